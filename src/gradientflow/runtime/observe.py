"""Observes what a model does in its first training steps, to fill a profile and to know where a gate has to stand.

Its hooks are on the modules only while such a forward pass runs: `copy.deepcopy(model)` and `torch.save(model)`, which
take hooks along, find none.

A parameter's forward seconds run from its first use to that of the next one. Uses are those of modules that own
parameters, in the first pass; after that, if it is to `record`, those of the parameters themselves
(runtime/waiting.py). Nothing is synchronised: on an accelerator these are the times at which work was issued.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.runtime.hooks import OriginalOnly
from gradientflow.runtime.waiting import make_pending, make_plain


class ForwardObserver:
    """Times the forward pass by parameter, between `begin_forward` and `end_of_forward`, `num_steps` times."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], num_steps: int = 3) -> None:
        self._model, self._parameters = model, dict(parameters)
        self._remaining = num_steps
        self._handles: list[RemovableHandle] = []
        self._recording: set[str] = set()  # parameters that have not been used in this pass
        self._entered: dict[nn.Module, float] = {}
        self._used: dict[str, float] = {}
        self._opaque: set[str] = set()
        #: Seconds by parameter in the last observed forward pass, keys in the order of use.
        self.seconds: dict[str, float] = {}
        #: Processors that it kept busy, on average: more than one by several threads, none if an accelerator computes.
        self.busy = 0.0
        self._began_s = self._began_cpu_s = 0.0
        #: By parameter, the module before whose forward pass it has to be there, because that may use it unseen.
        self.doors: dict[str, nn.Module] = {}

    def begin_forward(self, record: bool = False) -> None:
        self.close()  # the pass before may have ended in an exception
        if not self._remaining:
            return
        for module in self._model.modules():
            if module is not self._model and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                self._handles.append(module.register_forward_pre_hook(OriginalOnly(self._enter)))
        if record and self.seconds:
            self._recording = {name for name in self._parameters if name not in self._opaque}
            for name in self._recording:
                make_pending(self._parameters[name], functools.partial(self._use, name))
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
        self._used, self._entered = {}, {self._model: self._began_s}

    def end_of_forward(self) -> None:
        if not self._entered:
            return
        end_s = time.perf_counter()
        self.busy = (time.process_time() - self._began_cpu_s) / max(end_s - self._began_s, 1e-9)
        self.close()
        self._remaining -= 1
        nearest = {name: next(m for m in self._around(name) if m in self._entered) for name in self._parameters}
        hiding = {door for door in nearest.values() if self._hides_what_it_runs(door)}
        self._opaque = {name for name, door in nearest.items() if door in hiding}
        self.doors = {name: door for name, door in nearest.items() if name in self._opaque or self._is_foreign(door)}
        used = {name: self._entered[door] for name, door in nearest.items()} | self._used
        self.seconds = _until_the_next(used, end_s)
        self._entered = {}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name in self._recording:
            make_plain(self._parameters[name])
        self._recording.clear()

    def _enter(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():  # a clock in a compiled region would cut it in two
            self._entered.setdefault(module, time.perf_counter())

    def _use(self, name: str, compiled: bool) -> None:
        if name in self._recording:  # one call may hold it twice: p * p
            self._recording.discard(name)
            make_plain(self._parameters[name])
            self._used[name] = time.perf_counter()

    def _hides_what_it_runs(self, module: nn.Module) -> bool:
        """It is compiled, perhaps: no module in it was seen to run. A parameter of another class would have it compiled
        anew."""
        if module is not self._model and not self._is_foreign(module):
            return False  # nn.MultiheadAttention uses the parameters of its `out_proj`, which it never calls
        inner = [other for other in module.modules() if other is not module]
        return bool(inner) and not any(other in self._entered for other in inner)

    @staticmethod
    def _is_foreign(module: nn.Module) -> bool:
        """Whether it might use parameters by code of its own, around Python. Of torch's layers it is known that they do
        not; and they take their fast paths only if there are no hooks on them."""
        return not type(module).__module__.startswith("torch.nn.") or "forward" in vars(module)

    def _around(self, name: str) -> Iterator[nn.Module]:
        """The modules that the parameter is in, its own first."""
        path = name
        while path:
            path = path.rpartition(".")[0]
            yield self._model.get_submodule(path)


def _until_the_next(used: Mapping[str, float], end_s: float) -> dict[str, float]:
    """Those that were used at the same moment share the time after it."""
    sharing = Counter(used.values())
    moments = [*sorted(sharing), end_s]
    share_s = {moment: (later - moment) / sharing[moment] for moment, later in pairwise(moments)}
    return {name: share_s[moment] for name, moment in sorted(used.items(), key=lambda entry: entry[1])}
