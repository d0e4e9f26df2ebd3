"""Between the halves of a decoupled all-reduce each rank has a part of the sum: what can be learnt from all parts.

The norm of each tensor is one number, and the squares of parts add up. So who clips by the global norm need not wait
for gradients to be gathered: norms are known before, and the factor is applied as gradients arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from gradientflow.compress import Conversation, Sum
from gradientflow.exchange import Exchange
from gradientflow.plan import Plan
from gradientflow.runtime.autograd import foreach_norm
from gradientflow.runtime.pool import Pool


class Shards:
    """This rank's parts of the tensors in `names`, as `plan` scatters them."""

    def __init__(self, plan: Plan, pool: Pool, names: Sequence[str], exchange: Exchange) -> None:
        number = {name: index for index, name in enumerate(names)}
        self._parts: list[torch.Tensor] = []
        owners: list[int] = []
        for index, message in enumerate(plan.messages):
            for name, part in pool.parts(index, message, functools.partial(exchange.owned, message.pattern)):
                self._parts.append(part)
                owners.append(number[name])
        self._owners = torch.tensor(owners, dtype=torch.int64)
        self._squares = torch.zeros(len(names), dtype=torch.float64)

    def converse(self) -> Conversation:
        """Sum this rank's share of the squares with the others'."""
        self._squares.zero_()
        if self._parts:
            norms = torch.stack([norm.double() for norm in foreach_norm(self._parts)])
            self._squares.index_add_(0, self._owners, norms.square())
        yield Sum([self._squares])

    def norms(self) -> list[torch.Tensor]:
        """Of each tensor; to be asked when they have been summed."""
        return list(self._squares.sqrt().unbind())
