"""The outer optimizer: what the mean of workers' deltas does to the parameters that all of them began from.

SGD with Nesterov momentum to which minus the mean delta d is a gradient (DiLoCo, Douillard et al. 2023):

    v <- mu v + d        theta <- theta + lr (d + mu v)

With lr 1 and mu 0 theta + d is the plain mean of the workers' parameters. A training that begins from nothing changes
most in its first rounds, and momentum would carry that on for many more; so it may begin later (`warmup`).
"""

from __future__ import annotations

import torch
from pydantic import Field, model_validator

from gradientflow.documents import Record


class Outer(Record):
    """(1, 0) is plain averaging."""

    lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    #: The first so many rounds are plain averaging, and leave no velocity.
    warmup: int = Field(default=0, ge=0, le=10**9)

    @model_validator(mode="after")
    def _warms_up_for_something(self) -> Outer:
        if self.is_plain and self.warmup:
            raise ValueError("warmup is averaging before an outer optimizer: lr=1 with momentum=0 is all averaging")
        return self

    @property
    def is_plain(self) -> bool:
        return self.lr == 1 and self.momentum == 0

    def advance_(
        self, theta: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, num_before: int = 0
    ) -> None:
        """In place, `theta` and, if there is momentum, `velocity`. `mean` is left as it is. num_before: rounds that
        `theta` has been through."""
        if num_before < self.warmup:
            theta.add_(mean)
        elif not self.momentum or velocity is None:
            theta.add_(mean, alpha=self.lr)
        else:
            velocity.mul_(self.momentum).add_(mean)
            theta.add_(mean, alpha=self.lr).add_(velocity, alpha=self.lr * self.momentum)


AVERAGE = Outer()
DILOCO = Outer(lr=0.7, momentum=0.9)
