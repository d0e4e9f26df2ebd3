"""Beside FSDP2: shards along one dimension of a mesh, workers that step by themselves along the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradientflow
from helpers import run_ranks

pytest.importorskip("torch.distributed.fsdp")
STEPS = 4


def build(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()  # 5 rows and 1: uneven shards, and none
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after_backward: Any = lambda: None) -> list[torch.Tensor]:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 6, dtype=torch.float64, generator=generator)).square().mean().backward()
        after_backward()
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))


def beside_hsdp() -> tuple[float, float, list[str]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = mesh["replicate"].get_group()
    expected = train(*build(mesh))
    # A round after every step is BSP by another way, as SGD is linear in gradients.
    model, optimizer = build(mesh["shard"])
    with gradientflow.attach(model, optimizer, "lazy@local:1", process_group=replicas):
        by_rounds = furthest(train(model, optimizer), expected)
    # A codec that sends everything, on gradients.
    model, optimizer = build(mesh["shard"])
    averager = gradientflow.Averager("topk:100%:warmup=0:uncorrected", replicas)
    gradients = lambda: {name: p.grad.to_local() for name, p in model.named_parameters()}  # type: ignore[union-attr]  # noqa: E731
    by_codec = furthest(train(model, optimizer, lambda: averager.average_(gradients())), expected)
    averager.close()
    # The same in FSDP's own hook.
    model, optimizer = build(mesh["shard"])
    averager = gradientflow.Averager("topk:100%:warmup=0:uncorrected", replicas)
    model.set_all_reduce_hook(lambda shard: averager.average_({"gradients": shard.unsqueeze(0)}))  # type: ignore[operator]
    by_hook = furthest(train(model, optimizer), expected)
    averager.close()
    # And one that does not send everything: it was asked.
    model, optimizer = build(mesh["shard"])
    averager = gradientflow.Averager("int8", replicas)
    model.set_all_reduce_hook(lambda shard: averager.average_({"gradients": shard.unsqueeze(0)}))  # type: ignore[operator]
    rounded = furthest(train(model, optimizer), expected)
    averager.close()
    assert by_hook < 1e-10 < rounded < 0.05
    # Momentum too, of which each rank has a part.
    model, optimizer = build(mesh["shard"])
    with gradientflow.attach(model, optimizer, "lazy@local:2:state=average", process_group=replicas):
        train(model, optimizer)
    for state in optimizer.state.values():
        ours = state["momentum_buffer"].to_local()
        theirs = [torch.empty_like(ours) for _ in range(2)]
        dist.all_gather(theirs, ours.contiguous(), group=replicas)
        assert torch.equal(*theirs)
    refusals = []
    for recipe, group in (("lazy", replicas), ("lazy-ps@ssp:4", replicas), ("lazy@diloco:2", None)):
        with pytest.raises(gradientflow.UsageError) as refused:
            gradientflow.attach(*build(mesh["shard"]), recipe, process_group=group)
        refusals.append(str(refused.value))
    return by_rounds, by_codec, refusals


def test_rounds_and_codecs_along_the_replicate_dimension_are_hsdp() -> None:
    for by_rounds, by_codec, refusals in run_ranks(4, beside_hsdp):
        assert by_rounds < 1e-10
        assert by_codec < 1e-10
        assert "gradientflow.Averager" in refusals[0]
        assert "servers do not keep" in refusals[1]
        assert "process_group=mesh['replicate']" in refusals[2]


def disagree() -> str:
    """Ranks 0 and 3 hold different shards."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    with pytest.raises(gradientflow.DisagreementError) as refused:
        gradientflow.attach(*build(mesh["shard"]), "lazy@diloco:2", process_group=crossed)
    return str(refused.value)


def test_ranks_that_hold_other_shards_are_told_so() -> None:
    for words in run_ranks(4, disagree):
        assert "shard 0.weight" in words
