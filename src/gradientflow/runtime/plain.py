"""`GRADIENTFLOW=off`: the same averages by the shortest way, for bisecting a problem.

No pool, no threads, no plan: after backward each gradient is summed by itself, and everything waits.
If a fault is there with this too, it is not in the pool, the pump or a codec.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gradientflow.compress import Sum
from gradientflow.exchange import Native
from gradientflow.plan import Plan
from gradientflow.runtime.flow import Flow, Memory
from gradientflow.schedule import wfbp


class PlainFlow(Flow):
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Native,
        broadcast_buffers: bool,
        master_weights: bool,
    ) -> None:
        super().__init__(model, optimizer, exchange, broadcast_buffers, master_weights)
        self._watch()

    @property
    def plan(self) -> Plan:
        return wfbp(self.profile()).model_copy(update={"schedule": "off"})

    def memory(self) -> Memory:
        return Memory(master_weights=self._masters.nbytes if self._masters else 0)

    def _arrival_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if not self._exchanging:
                self._accumulated()
                return
            if not self._watching:
                self._open()
            if self._arrived_s[index]:
                raise self._arrived_twice(index)
            self._arrived_s[index] = self._recorder.clock()

        return hook

    def _finish(self, missing: list[int]) -> None:
        parameters = list(self._parameters.values())
        present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
        if parameters:
            present = present.to(parameters[0].device)
        self._exchange.answer(Sum([present]), lane=0)
        for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
            if not somewhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with torch.no_grad():
                parameter.grad.mul_(1.0 / self._exchange.world)
            self._exchange.answer(Sum([parameter.grad]), lane=0)

    def _abandon(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
