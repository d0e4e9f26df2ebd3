"""Warm-up: gradients change quickly at first, and waiting for a part of them costs most then.

The first fifth of the warm-up is dense, and each of the four that follow keeps the same fraction of what the one before
it did (Lin et al. 2018 do so by epochs).
"""

from __future__ import annotations

from typing import NamedTuple

STAGES = 5


class WarmUp(NamedTuple):
    """The share of gradients that is sent, by step.

    >>> [round(WarmUp(0.1, 10).density(step), 2) for step in range(0, 12, 2)]
    [1.0, 0.63, 0.4, 0.25, 0.16, 0.1]
    >>> WarmUp(0.1, 0).density(0)
    0.1
    """

    target: float
    num_steps: int
    #: 1: all of them are dense.
    stages: int = STAGES

    def density(self, step: int) -> float:
        if step >= self.num_steps:
            return self.target
        return float(self.target ** (self.stages * step // self.num_steps / self.stages))
