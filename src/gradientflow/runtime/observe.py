"""Observes what a model does in its first training steps, to fill a profile.

Its hooks are on the modules only while such a forward pass runs: `copy.deepcopy(model)` and `torch.save(model)`, which
take hooks along, find none.

Forward seconds come from the modules that own parameters, their inner modules' time taken off. Nothing is
synchronised: on an accelerator these are the times at which work was issued.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.runtime.hooks import OriginalOnly


class ForwardObserver:
    """Times the forward pass by parameter, between `begin_forward` and `end_of_forward`, `num_steps` times."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], num_steps: int = 3) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._remaining = num_steps
        self._stack: list[list[float]] = []  # per running module: start, seconds spent in inner modules
        self._latest: dict[str, float] = {}
        #: Seconds by parameter in the last observed forward pass, keys in the order of use.
        self.seconds: dict[str, float] = {}
        self._model = model
        self._handles: list[RemovableHandle] = []

    def begin_forward(self) -> None:
        self.close()  # the pass before may have ended in an exception
        if not self._remaining:
            return
        for module in self._model.modules():
            if any(parameter in self._names for parameter in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(OriginalOnly(self._enter)))
                self._handles.append(module.register_forward_hook(OriginalOnly(self._leave), always_call=True))

    def end_of_forward(self) -> None:
        if not self._handles:
            return
        self.close()
        self.seconds, self._latest = self._latest, {}
        self._remaining -= 1

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _enter(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return  # a clock in a compiled region would cut it in two
        self._stack.append([time.perf_counter(), 0.0])

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or not self._stack:
            return
        start_s, inner_s = self._stack.pop()
        elapsed_s = time.perf_counter() - start_s
        if self._stack:
            self._stack[-1][1] += elapsed_s
        owned = [parameter for parameter in module.parameters(recurse=False) if parameter in self._names]
        numel = sum(parameter.numel() for parameter in owned) or 1
        for parameter in owned:
            name = self._names[parameter]
            share_s = (elapsed_s - inner_s) * parameter.numel() / numel
            self._latest[name] = self._latest.get(name, 0.0) + share_s
