"""A replayed model under stock DDP, the drop-in and `attach`, with real processes: equal averages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf
from gradientflow.lab.replay import Fill, Replay
from gradientflow.lab.workloads import workload
from helpers import run_ranks

STEPS = 3

WRITTEN: Fill = "when written"


PROFILE = workload("resnet-50", scale=0.002, compute_s=0.02)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def train(method: str, fill: Fill) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Step by step: this rank's own gradients as backward yielded them, and the averages."""
    model = Replay(PROFILE, seed=dist.get_rank(), fill=fill)
    trained, flow = model, None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if method == "ddp":
        trained = DistributedDataParallel(model, bucket_cap_mb=0.05)
    elif method == "ddp views":
        trained = DistributedDataParallel(model, bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    elif method == "drop-in":
        trained = gf.DistributedDataParallel(model, bucket_cap_mb=0.05)
    else:
        flow = gf.attach(model, optimizer, "lazy:50KB")
    own: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: own.update({name: gradient.clone()}))
    results = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        trained().backward()
        optimizer.step()
        averages = flat([parameter.grad for parameter in model.parameters()])
        results.append((flat([own[name] for name, _ in model.named_parameters()]), averages))
    if flow is not None:
        observed = [tensor.name for tensor in flow.profile().tensors]
        assert observed == [tensor.name for tensor in PROFILE.tensors]
        flow.close()
    return results


def compare() -> bool:
    alone = []
    for seed in range(dist.get_world_size()):
        model = Replay(PROFILE, seed=seed)
        model().backward()
        alone.append(flat([parameter.grad for parameter in model.parameters()]))
    for method, fill in (
        ("ddp", WRITTEN),
        ("ddp", "always"),
        ("ddp views", WRITTEN),
        ("drop-in", WRITTEN),
        ("attach", WRITTEN),
    ):
        for step, (own, averages) in enumerate(train(method, fill)):
            assert torch.equal(own, alone[dist.get_rank()]), f"{method}, fill={fill}, step {step}: not this rank's own"
            assert torch.equal(averages, sum(alone) / len(alone)), f"{method}, fill={fill}, step {step}"
    return True


def test_averages_are_equal_under_every_method() -> None:
    assert run_ranks(2, compare) == [True, True]
