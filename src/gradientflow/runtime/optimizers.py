"""Where a flow meets the optimizer: the one it was given, or any that updates its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradientflow.runtime.hooks import OriginalOnly

Seen = Callable[[torch.optim.Optimizer], None]


class Optimizers(Protocol):
    def watch(self, before_step: Seen, after_step: Seen) -> list[RemovableHandle]:
        """Call these around every `step()`."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """What will be updated, as far as that is known beforehand."""


class OneOptimizer:
    """The optimizer that `attach` was given."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def watch(self, before_step: Seen, after_step: Seen) -> list[RemovableHandle]:
        return [
            self.optimizer.register_step_pre_hook(OriginalOnly(lambda optimizer, args, kwargs: before_step(optimizer))),
            self.optimizer.register_step_post_hook(OriginalOnly(lambda optimizer, args, kwargs: after_step(optimizer))),
        ]

    def parameters(self) -> Iterator[torch.Tensor]:
        return held_by(self.optimizer)


class AnyOptimizer:
    """Every optimizer of the process that holds something of `known` (identities, may change)."""

    def __init__(self, known: set[int]) -> None:
        self._known = known

    def watch(self, before_step: Seen, after_step: Seen) -> list[RemovableHandle]:
        def when_ours(seen: Seen) -> Callable[..., None]:
            def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
                if any(id(parameter) in self._known for parameter in held_by(optimizer)):
                    seen(optimizer)

            return hook

        return [
            register_optimizer_step_pre_hook(when_ours(before_step)),
            register_optimizer_step_post_hook(when_ours(after_step)),
        ]

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(())


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
