"""The user's own optimizer, run for some of its parameters at a time.

What runs is the optimizer's own `step`, without its hooks, on a double that shares state and everything else with
it but has other groups: those of `step()`, hyper-parameters as they were then, and in them only the parameters that
are to be updated. The user's object is never changed.

That is the same as one whole step for an optimizer that treats parameters one by one. One that keeps something for
all of them, a counter in a group, say, changes it in `step`; `Watch` sees that.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gradientflow.runtime.autograd import is_transforming


class Shares:
    """Parts of one step of `optimizer`, with the values that its groups have when this is made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._step = _without_hooks(type(optimizer))
        self._state = optimizer.state
        while isinstance(self._state, _WaitingState):  # another flow's, which has the same parameters
            self._state = self._state.state
        self._guard: _WaitingState | None = None
        # A scheduler writes new values into groups, and into tensors in them, before the last part has run.
        self._groups = [
            {key: value if key == "params" else _kept(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        #: Identities of the parameters it would update.
        self.held = {id(p) for group in self._groups for p in group["params"]}

    @functools.cached_property
    def _group_of(self) -> dict[int, int]:
        return {id(p): number for number, group in enumerate(self._groups) for p in group["params"]}

    def without(self, left_out: Collection[int]) -> torch.optim.Optimizer:
        """A double of the optimizer that leaves some parameters (identities) alone."""
        groups = [{**group, "params": [p for p in group["params"] if id(p) not in left_out]} for group in self._groups]
        return _double(self._optimizer, groups, self._state)

    def guard_state(self, touched: Callable[[], None]) -> None:
        """Until `release_state`, whoever looks into the optimizer's state calls `touched` first."""
        self._guard = self._optimizer.state = _WaitingState(self._state, touched)

    def release_state(self) -> None:
        if self._optimizer.state is self._guard:
            self._optimizer.state = self._state

    def run(self, parameters: Sequence[torch.Tensor]) -> None:
        """Update these, by their `.grad`."""
        if len(self._groups) == 1:
            groups = [{**self._groups[0], "params": parameters}]
        else:
            members: dict[int, list[torch.Tensor]] = {}
            for parameter in parameters:
                members.setdefault(self._group_of[id(parameter)], []).append(parameter)
            groups = [{**self._groups[number], "params": members[number]} for number in sorted(members)]
        double = _double(self._optimizer, groups, self._state)
        device = groups[0]["params"][0].device.type
        if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device):
            _in_a_thread(functools.partial(self._update, double))
        else:
            outside_transforms(functools.partial(self._update, double))

    def _update(self, double: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self._step(double)


def outside_transforms(call: Callable[[], object]) -> None:
    if is_transforming():
        _in_a_thread(call)
    else:
        call()


def _in_a_thread(call: Callable[[], object]) -> None:
    """A forward pass is around whose modes are none of the optimizer's business; threads have their own."""
    with ThreadPoolExecutor(1) as clean:
        clean.submit(call).result()


class Watch:
    """Notices, around whole steps, whether an optimizer could be run in shares."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._before = _common_values(optimizer)

    def objection(self, optimizer: torch.optim.Optimizer) -> str:
        """What `step` has changed that belongs to all parameters, in words; empty if nothing."""
        for key, value in _common_values(optimizer).items():
            if key not in self._before or not _equal(self._before[key], value):
                return f"{type(optimizer).__name__}.step() changes {key}, which is not one parameter's"
        return ""


def _common_values(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    found: dict[str, object] = {}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{key!r} of group {number}": _value(value) for key, value in group.items() if key != "params"}
    ours = ("state", "param_groups", "defaults")
    # A scheduler counts calls of step() on the optimizer.
    counted = ("_opt_called", "_step_count")
    found |= {f"self.{k}": _value(v) for k, v in vars(optimizer).items() if k not in (*ours, *counted)}
    return found


def _kept(value: Any) -> Any:
    return value if isinstance(value, int | float | str | type(None)) else copy.deepcopy(value)


def _value(value: object) -> object:
    """Something that differs when the value is changed in place too, as far as that can be told."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return value if isinstance(value, int | float | str | tuple | type(None)) else id(value)


def _equal(one: object, other: object) -> bool:
    return one is other or bool(one == other) or (one != one and other != other)


def treats_parameters_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Of torch's own optimizers it is known; LBFGS is the one that does not."""
    known = _without_hooks(type(optimizer)).__module__.startswith("torch.optim.")
    return known and not isinstance(optimizer, torch.optim.LBFGS)


def _without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """`step` as its author wrote it: torch wraps it to call hooks, which have been called for the whole step."""
    step: Callable[..., Any] = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _double(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: defaultdict[torch.Tensor, Any]
) -> torch.optim.Optimizer:
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.param_groups, double.state = groups, state
    return double


class _WaitingState(defaultdict[torch.Tensor, Any]):
    """Stands before an optimizer's state, empty itself."""

    def __init__(self, state: defaultdict[torch.Tensor, Any], touched: Callable[[], None]) -> None:
        super().__init__(dict)
        self.state, self._touched = state, touched

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._touched()
        return copy.deepcopy(self.state, memo)


def _forward_to_state(name: str) -> Callable[..., Any]:
    def method(self: _WaitingState, *args: Any) -> Any:
        self._touched()
        return getattr(self.state, name)(*args)

    return method


for _name in (
    "__contains__ __copy__ __delitem__ __eq__ __getitem__ __ior__ __iter__ __len__ __ne__ __or__ __repr__ "
    "__reduce_ex__ __reversed__ __setitem__ clear copy get items keys pop popitem setdefault update values"
).split():
    setattr(_WaitingState, _name, _forward_to_state(_name))
