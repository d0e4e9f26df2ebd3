"""Workers that are to train together begin alike: parameters are the first rank's, and what an optimizer remembers of
them is as well. Ranks that trained each by themselves (Local SGD, SSP) come with momentum of their own, and averages of
gradients would never even that out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch

from gradientflow.exchange import Exchange
from gradientflow.runtime.regrouping import hand_over
from gradientflow.runtime.sameness import checksums

_log = logging.getLogger(__name__)


def even_out(exchange: Exchange, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Collective. What the optimizer has in `state` for these parameters becomes the first rank's, if ranks differ."""
    own = _digest(optimizer, parameters)
    if len(set(exchange.control.gather(own, "compare what optimizers remember"))) == 1:
        return
    if exchange.rank == 0:
        _log.warning("optimizers remember different things on different ranks: all take over the first rank's")
    found = hand_over(exchange, 0, lambda: _remembered(optimizer, parameters), 0)
    for name, parameter in parameters.items() if exchange.rank else ():
        optimizer.state.pop(parameter, None)
        if name in found:
            optimizer.state[parameter] = {key: _beside(parameter, value) for key, value in found[name].items()}


def _remembered(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    found = {name: optimizer.state.get(parameter) for name, parameter in parameters.items()}
    return {name: dict(state) for name, state in found.items() if state}


def _digest(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> str:
    """ "" if it remembers nothing."""
    remembered = _remembered(optimizer, parameters)
    words = []
    for name, state in remembered.items():
        for key, value in sorted(state.items()):
            is_tensor = isinstance(value, torch.Tensor)
            words.append(f"{name} {key} {int(checksums({key: value})[0]) if is_tensor else repr(value)}")
    return hashlib.sha256("\n".join(words).encode()).hexdigest() if words else ""


def _beside(parameter: torch.Tensor, value: Any) -> Any:
    """On the device of this rank's parameter, unless the optimizer has it in main memory, as counts of steps."""
    moves = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    return value.to(parameter.device) if moves else value
