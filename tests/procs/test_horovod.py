"""The wrapper around Horovod, with a stand-in for `horovod.torch` that exchanges through the process group."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradientflow.bench.horovod import Horovod
from helpers import run_ranks


class StandIn(types.ModuleType):
    Average = object()

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.names: list[str] = []

    def is_initialized(self) -> bool:
        return True

    def allreduce_async_(self, tensor: torch.Tensor, name: str, op: object) -> Any:
        assert op is self.Average
        self.names.append(name)
        return tensor, dist.all_reduce(tensor, async_op=True)

    def synchronize(self, handle: Any) -> None:
        tensor, work = handle
        work.wait()
        tensor.div_(dist.get_world_size())


def _train() -> tuple[int, int]:
    sys.modules["horovod.torch"] = stand_in = StandIn()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    reference.load_state_dict(model.state_dict())
    wrapped, ddp = Horovod(model), DistributedDataParallel(reference)
    for step in range(3):
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for trained, through in ((model, wrapped), (reference, ddp)):
            trained.zero_grad()
            through(batch).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    sent = len(stand_in.names)
    model(torch.ones(1, 4)).sum().backward()  # not its own forward pass: another method's turn
    return sent, len(stand_in.names)


def test_gradients_are_averaged_in_its_own_passes_only() -> None:
    assert run_ranks(2, _train) == [(12, 12)] * 2


def test_a_missing_horovod_is_named() -> None:
    from gradientflow.bench.methods import method
    from gradientflow.errors import UsageError

    with pytest.raises(UsageError, match="pip install horovod"):
        method("horovod")
