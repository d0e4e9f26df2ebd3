"""Parity on GPUs over NCCL. Needs two; skips itself elsewhere, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf
from models import MODELS, build, loss_of

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, found {torch.cuda.device_count()}"
)


def worker(rank: int, rendezvous: str, name: str, recipe: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    theirs, ours = build(name).cuda(), build(name).cuda()
    ddp = DistributedDataParallel(theirs, device_ids=[rank])
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9)
    our_optimizer = torch.optim.SGD(ours.parameters(), lr=0.01, momentum=0.9)
    with gf.attach(ours, our_optimizer, recipe):
        for step in range(20):
            for model, optimizer in ((ddp, their_optimizer), (ours, our_optimizer)):
                optimizer.zero_grad()
                loss_of(model, name, rank, step).backward()
                optimizer.step()
    tolerance = 0.0 if "+" not in recipe else 0.05
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["bsp", "wfbp", "lazy:500KB", "lazy:500KB-a2a:2", "lazy+bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_two_gpus_equal_ddp(name: str, recipe: str, tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path / "rendezvous"), name, recipe), nprocs=2)
