"""Momentum of the user's own SGD, kept by a codec instead (compress/feedback.py says why).

Gradients then come as velocities, so inside `optimizer.step()` the groups' momentum is 0, and is put back after it:
schedulers, checkpoints and the user see what they set. Weight decay is part of what SGD's momentum acts on, and
nothing of it needs to travel, as weights are the same on all ranks: it has a momentum of its own, here. Without that
it would be weaker by 1 / (1 - m).

A codec that has nothing to send gives momentum back (`hand_back`): the optimizer's buffer is the sum of both.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from gradientflow.compress import Momentum

_MOMENTUM, _DECAY = "momentum", "weight_decay"
#: SGD turns gradients round first thing, so that its buffers are of those, and ours of gradients as they come.
_MAXIMIZE = "maximize"
#: Who keeps an optimizer's momentum. Of several wrappers around a model it is one.
_HOLDERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[BorrowedMomentum]] = weakref.WeakKeyDictionary()


def why_not(optimizer: torch.optim.Optimizer | None) -> str:
    """What stands against keeping the optimizer's momentum elsewhere; "" if nothing does."""
    if optimizer is None:
        return "no optimizer was given"
    if type(optimizer) is not torch.optim.SGD:
        return f"momentum correction is defined for torch.optim.SGD only, not for {type(optimizer).__name__}"
    if any(group["dampening"] for group in optimizer.param_groups):
        return "SGD with dampening has no such form"
    return ""


def momenta_of(optimizer: torch.optim.Optimizer | None, names: Mapping[torch.Tensor, str]) -> dict[str, float]:
    """By parameter name; nothing where there is no such thing."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {
        names[p]: float(group[_MOMENTUM])
        for group in groups
        if _MOMENTUM in group
        for p in group["params"]
        if p in names
    }


def holder_of(optimizer: torch.optim.Optimizer) -> BorrowedMomentum | None:
    held = _HOLDERS.get(optimizer)
    return held() if held else None


class BorrowedMomentum:
    """Of the parameters in `names`, which `optimizer` updates."""

    def __init__(self, optimizer: torch.optim.SGD, names: Mapping[torch.Tensor, str]) -> None:
        self.optimizer = optimizer
        self._names = names
        self._lent: list[dict[str, Any]] | None = None  # what groups had, while a step is under way
        self._decays: dict[str, torch.Tensor] = {}  # velocities of weight decay
        self.hold()

    def hold(self) -> None:
        """The optimizer's momentum is kept here from now on."""
        _HOLDERS[self.optimizer] = weakref.ref(self)

    def momenta(self) -> dict[str, Momentum]:
        """As the groups say now."""
        found: dict[str, Momentum] = {}
        for group in self.optimizer.param_groups:
            momentum = Momentum(float(group[_MOMENTUM]), bool(group["nesterov"]))
            found |= {self._names[p]: momentum for p in group["params"] if p in self._names}
        return found

    @property
    def is_set(self) -> bool:
        return any(group[_MOMENTUM] for group in self.optimizer.param_groups)

    def take_velocities(self) -> dict[str, torch.Tensor]:
        """What the optimizer has gathered before; it has it no longer."""
        found = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if parameter in self._names and (velocity := state.pop("momentum_buffer", None)) is not None:
                    found[self._names[parameter]] = -velocity if group[_MAXIMIZE] else velocity
        return found

    @torch.no_grad()
    def hand_back(self, velocities: Mapping[str, torch.Tensor]) -> None:
        """What the optimizer would have gathered by itself. It keeps its momentum from now on."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"] if group[_MOMENTUM] else ():
                name = self._names.get(parameter, "")
                if name in velocities:
                    buffer = torch.empty_like(parameter).copy_(velocities[name])
                    if group[_MAXIMIZE]:
                        buffer.neg_()
                    if name in self._decays:
                        buffer.add_(self._decays[name])
                    self.optimizer.state[parameter]["momentum_buffer"] = buffer
        self._decays = {}
        self.release()

    @property
    def nbytes(self) -> int:
        return sum(velocity.nbytes for velocity in self._decays.values())

    @torch.no_grad()
    def lend(self) -> None:
        """Just before the optimizer computes: gradients are there, and nobody else looks at the groups."""
        self.put_back()
        groups = self.optimizer.param_groups
        for group in groups:
            if group[_MOMENTUM] and group[_DECAY]:
                self._decay(group)
        self._lent = [{_MOMENTUM: group[_MOMENTUM], _DECAY: group[_DECAY]} for group in groups]
        for group in groups:
            if group[_MOMENTUM]:
                group[_DECAY] = 0.0
            group[_MOMENTUM] = 0.0

    def put_back(self) -> None:
        """Groups are as the user left them."""
        lent, self._lent = self._lent, None
        for group, before in zip(self.optimizer.param_groups, lent or (), strict=False):
            group.update(before)

    def release(self) -> None:
        """The optimizer keeps its momentum itself from now on."""
        self.put_back()
        if holder_of(self.optimizer) is self:
            del _HOLDERS[self.optimizer]

    def _decay(self, group: dict[str, Any]) -> None:
        """What weight decay alone does in this step: the update is linear in it."""
        held = [p for p in group["params"] if p.grad is not None and p in self._names]
        for parameter in held:
            name = self._names[parameter]
            velocity = self._decays.get(name)
            if velocity is None:
                velocity = self._decays[name] = torch.zeros_like(parameter)
            velocity.mul_(group[_MOMENTUM]).add_(parameter, alpha=group[_DECAY])
            step = velocity
            if group["nesterov"]:
                step = torch.add(parameter * group[_DECAY], velocity, alpha=group[_MOMENTUM])
            parameter.sub_(step * group["lr"])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: velocity.clone() for name, velocity in self._decays.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        devices = {name: parameter for parameter, name in self._names.items()}
        self._decays = {name: v.to(devices[name].device, copy=True) for name, v in state.items() if name in devices}
