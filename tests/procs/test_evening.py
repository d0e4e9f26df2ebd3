"""Ranks that are to train together meet and begin alike, whatever they did before; and nobody averages twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf
from helpers import run_ranks
from models import build, loss_of


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, "mlp", dist.get_rank(), number, torch.float32).backward()
    optimizer.step()


def alone_then_together(kind: str, only: int | None) -> tuple[torch.Tensor, int]:
    """only: the rank that has taken steps before; None: each by itself."""
    rank, model = dist.get_rank(), build("mlp", torch.float32, seed=0)
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }[kind](model.parameters())
    if only is None:
        with gf.attach(model, optimizer, "lazy@local:2") as flow:
            for number in range(5):
                step(model, optimizer, number)
            flow.average()
    elif rank == only:
        step(model, optimizer, 0)
    with gf.attach(model, optimizer, "lazy"):
        for number in range(3):
            step(model, optimizer, number)
    return weights(model), len(optimizer.state)


@pytest.mark.parametrize(("kind", "only"), [("sgd", None), ("adamw", None), ("adamw", 1)])
def test_optimizers_begin_with_what_the_first_rank_remembers(kind: str, only: int | None) -> None:
    (mine, num_mine), (others, num_others) = run_ranks(2, alone_then_together, kind, only)
    assert torch.equal(mine, others) and num_mine == num_others


def from_local(directory: str) -> str:
    model = build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with gf.attach(model, optimizer, "lazy@local:2") as flow:
        for number in range(3):
            step(model, optimizer, number)
        gf.save(directory, flow, model=model, optimizer=optimizer)
    saved = gf.load(directory)
    with gf.attach(model, optimizer, "lazy") as flow, pytest.raises(gf.UsageError) as refused:
        flow.load_state_dict(saved["flow"])
    return str(refused.value)


def test_a_state_of_workers_of_their_own_is_not_one_for_all(tmp_path: Path) -> None:
    for words in run_ranks(2, from_local, str(tmp_path)):
        assert "'lazy@local:2'" in words and "before attach()" in words


def twice(sync: bool) -> tuple[str, float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    wrapper = DistributedDataParallel(model)
    wrapper.require_backward_grad_sync = sync
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with gf.attach(wrapper.module, optimizer, "lazy"):
        try:
            (wrapper(torch.ones(1, 1)) * (1.0 + dist.get_rank())).sum().backward()
        except gf.UsageError as error:
            return str(error), float(model.weight)
        optimizer.step()
    return "", float(model.weight)


def test_torchs_wrapper_and_a_flow_do_not_both_average() -> None:
    for words, _ in run_ranks(2, twice, True):
        assert "'weight'" in words and "call model.module" in words
    assert run_ranks(2, twice, False) == [("", -1.5)] * 2  # a wrapper that leaves gradients alone may stay


def with_a_past(store: str) -> torch.Tensor:
    """The first rank has been in a world of its own before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    model = build("mlp", torch.float32, seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with gf.attach(model, optimizer, "lazy"):
            step(model, optimizer, 0)
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    with gf.attach(model, optimizer, "lazy", deadline_s=10.0):
        step(model, optimizer, 1)
    return weights(model)


def test_processes_with_different_pasts_meet(tmp_path: Path) -> None:
    mine, others = run_ranks(2, with_a_past, str(tmp_path / "store"))
    assert torch.equal(mine, others)
