"""`GRADIENTFLOW=off`: the same averages by the shortest way, for bisecting a problem.

No pool, no threads, no plan: after backward each gradient is summed by itself, and everything waits.
If a fault is there with this too, it is not in the pool, the pump or a codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gradientflow.compress import Sum
from gradientflow.exchange import Exchange
from gradientflow.plan import Plan
from gradientflow.recipe import Choice, Recipe
from gradientflow.runtime.fingerprint import compare, describe_tensors
from gradientflow.runtime.flow import ArrivalHook, GradientFlow
from gradientflow.runtime.handle import Memory
from gradientflow.runtime.options import Options
from gradientflow.runtime.sparse import SparseSums, sparse_names
from gradientflow.schedule import wfbp
from gradientflow.tune.explain import Situation


class PlainFlow(GradientFlow):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, exchange: Exchange, options: Options
    ) -> None:
        super().__init__(model, optimizer, exchange, options)
        self._take()
        self._watch()

    @property
    def plan(self) -> Plan:
        return wfbp(self.profile()).model_copy(update={"schedule": "off"})

    def _situation(self) -> Situation:
        return Situation(self.profile(), self.plan, Recipe(schedule=Choice(name="off")), self._exchange.world)

    def memory(self) -> Memory:
        return Memory(master_weights=self._masters.nbytes if self._masters else 0)

    def _arrival_hook(self, index: int, parameter: nn.Parameter) -> ArrivalHook:
        def hook(passed_on: object, got: Sequence[torch.Tensor | None]) -> None:
            if not self.exchanging:
                self._accumulated(index)
                return
            if not self._watching:
                self._open()
            if self._context.context is not None:
                self._local.add(index)
                return
            if got[0] is None:
                return  # a function in the graph gave no gradient: this parameter was not used
            if self._arrived_s[index] and not self._options.static_graph:
                raise self._arrived_twice(index)
            self._arrived_s[index] = self._recorder.clock()

        return hook

    def _finish(self, missing: list[int], skipped: bool) -> bool:
        exchange, parameters = self._exchange, list(self._parameters.values())
        sparse = {name: self._parameters[name] for name in sparse_names(self._model, self._parameters)}
        dense = [parameter for name, parameter in self._parameters.items() if name not in sparse]
        held = [float(parameter.grad is not None and not self._joined) for parameter in dense]
        present = torch.tensor([*held, float(skipped)], device=parameters[0].device if parameters else "cpu")
        self._ask(present)
        for parameter, somewhere in zip(dense, present[:-1].tolist(), strict=True):
            if not somewhere:
                continue
            mine = None if self._joined else parameter.grad
            gradient = torch.zeros_like(parameter) if mine is None else mine.detach() * (1.0 / exchange.world)
            self._ask(gradient)
            if self._joined:
                continue
            gradient *= exchange.world / self._num_contributing
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.detach().copy_(gradient)
        SparseSums(exchange, sparse).sum(self._step, self._num_contributing, self._joined)
        return bool(present[-1] != 0)

    def _ask(self, tensor: torch.Tensor) -> None:
        self._exchange.answer(Sum([tensor]), 0, self._step + 1, f"step {self._step}")

    def _restart(self) -> None:
        compare(self._exchange.control, describe_tensors("trainable", self._parameters))

    def _abandon(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
