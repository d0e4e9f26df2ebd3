"""Where a flow meets the optimizer: the one it was given, or any that updates its parameters."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradientflow.errors import UsageError
from gradientflow.runtime.hooks import OriginalOnly

Seen = Callable[[torch.optim.Optimizer], None]
#: Arguments of `step`, the optimizer itself first.
Given = tuple[tuple[Any, ...], dict[str, Any]]
#: May give other arguments in their place.
Asked = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Given | None]


class Optimizers(Protocol):
    def watch(self, before_step: Asked, after_step: Seen) -> list[RemovableHandle]:
        """Call these around every `step()`."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """What will be updated, as far as that is known beforehand."""


class _StepHook(OriginalOnly):
    """Before `step`, on behalf of a flow."""


class OneOptimizer:
    """The optimizer that `attach` was given. `alone`: everything it holds is exchanged, and nothing but it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, alone: bool = True) -> None:
        self.optimizer, self.alone = optimizer, alone
        self._before: RemovableHandle | None = None

    def watch(self, before_step: Asked, after_step: Seen) -> list[RemovableHandle]:
        self._before = self.optimizer.register_step_pre_hook(_StepHook(before_step))
        return [
            self._before,
            self.optimizer.register_step_post_hook(OriginalOnly(lambda optimizer, args, kwargs: after_step(optimizer))),
        ]

    def parameters(self) -> Iterator[torch.Tensor]:
        return held_by(self.optimizer) if self.alone else iter(())

    def hears_last(self) -> bool:
        """Whether no hook of somebody else's comes between ours and `step`: it might change gradients."""
        before, hooks = self._before, self._hooks()
        assert before is not None
        after = itertools.takewhile(lambda number: number != before.id, reversed(hooks))
        return all(isinstance(hooks[number], _StepHook) for number in after)

    def hear_last(self) -> None:
        """From the next step on. Not while hooks run."""
        assert self._before is not None
        self._hooks().move_to_end(self._before.id)

    def _hooks(self) -> OrderedDict[int, object]:
        found: OrderedDict[int, object] | None = self._before.hooks_dict_ref() if self._before else None
        assert found is not None
        return found


class AnyOptimizer:
    """Every optimizer of the process that holds something of `known` (identities, may change)."""

    def __init__(self, known: set[int]) -> None:
        self._known = known

    def watch(self, before_step: Asked, after_step: Seen) -> list[RemovableHandle]:
        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return before_step(optimizer, args, kwargs) if self._is_ours(optimizer) else None

        def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            if self._is_ours(optimizer):
                after_step(optimizer)

        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._known for parameter in held_by(optimizer))

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(())


def check_known(parameters: Iterable[torch.Tensor], known: Container[int]) -> None:
    """Everything that an optimizer updates must be exchanged, also what it was given since `attach`."""
    for parameter in parameters:
        if id(parameter) not in known and parameter.requires_grad:
            raise UsageError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that was not there or not "
                "trainable when attach() was called: it would not be averaged. close() and attach again"
            )


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
