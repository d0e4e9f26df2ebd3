"""The outer optimizer: what the mean of workers' deltas does to the parameters that all of them began from.

SGD with Nesterov momentum to which minus the mean delta d is a gradient (DiLoCo, Douillard et al. 2023):

    v <- mu v + d        theta <- theta + lr (d + mu v)

With lr 1 and mu 0 theta + d is the plain mean of the workers' parameters.
"""

from __future__ import annotations

import torch
from pydantic import Field

from gradientflow.documents import Record


class Outer(Record):
    """(1, 0) is plain averaging."""

    lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.0, ge=0, lt=1)

    @property
    def is_plain(self) -> bool:
        return self.lr == 1 and self.momentum == 0

    def advance_(self, theta: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """In place, `theta` and `velocity`, which is only there if there is momentum. `mean` is left as it is."""
        if velocity is None:
            theta.add_(mean, alpha=self.lr)
            return
        velocity.mul_(self.momentum).add_(mean)
        theta.add_(mean, alpha=self.lr).add_(velocity, alpha=self.lr * self.momentum)


AVERAGE = Outer()
DILOCO = Outer(lr=0.7, momentum=0.9)
