"""All-reduce in two halves, with clipping from the parts: against stock DDP, with real processes."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import gradientflow as gf
from helpers import run_ranks
from models import build, loss_of

STEPS = 40


def clipped(recipe: str, foreach: bool | None, steps: int = STEPS) -> tuple[torch.Tensor, list[float], gf.Flow | None]:
    """Weights after some steps, and the norms that clipping returned."""
    rank = dist.get_rank()
    model = build("cnn", torch.float64, seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained: nn.Module = DistributedDataParallel(model) if recipe == "ddp" else model
    flow = None if recipe == "ddp" else gf.attach(model, optimizer, recipe)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(trained, "cnn", rank, step, torch.float64).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), 0.3, foreach=foreach)))
        optimizer.step()
    if flow is not None:
        flow.synchronize()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), norms, flow


def clips_as_ddp(recipe: str, foreach: bool | None) -> tuple[float, float, bool, list[str]]:
    expected, expected_norms, _ = clipped("ddp", None)
    found, norms, flow = clipped(recipe, foreach)
    assert flow is not None and flow.gated
    waits = [span.name for span in flow.trace().spans if span.kind == "exposed" and span.step > STEPS // 2]
    plan = flow.plan
    flow.close()
    off = max(abs(one / other - 1) for one, other in zip(norms, expected_norms, strict=True))
    return float((found - expected).abs().max()), off, plan.norms, waits


@pytest.mark.parametrize(("world", "foreach"), [(2, None), (3, True)])
def test_clipping_waits_for_norms_only_and_is_right(world: int, foreach: bool | None) -> None:
    for difference, off, norms, waits in run_ranks(world, clips_as_ddp, "dear:60KB", foreach):
        assert difference < 1e-12 and off < 1e-12
        assert norms, "the plan does not know that gradients are clipped"
        assert "a gradient" not in waits


def looks_at_gradients(recipe: str) -> list[float]:
    """Norms that only some of the ranks ask for, other norms, gradients between clipping and step."""
    rank = dist.get_rank()
    model = build("mlp", torch.float64, seed=0)
    twin = build("mlp", torch.float64, seed=0)
    ddp = DistributedDataParallel(twin)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin)]
    flow = gf.attach(model, optimizers[0], recipe)
    differences = []
    for step in range(24):
        for trained, optimizer in zip((model, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(trained, "mlp", rank, step, torch.float64).backward()
            parameters = list(trained.parameters())
            clip_grad_norm_(parameters, 0.3)
            if step % 4 == 1 and rank == 0:
                torch.nn.utils.get_total_norm([p.grad for p in parameters])
            if step % 4 == 2:
                clip_grad_norm_(parameters[:2], 0.1)
                clip_grad_norm_(parameters, 0.2, norm_type=float("inf"))
            if step % 4 == 3:
                parameters[0].grad.mul_(2.0).add_(1.0)
                parameters[1].grad = None
            optimizer.step()
        differences.append(
            max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        )
    flow.close()
    return differences


def scales_gradients(recipe: str) -> float:
    """By a factor that changes before it is applied; weights are then used inside a transform first."""
    rank = dist.get_rank()
    weights = []
    for name in ("ddp", recipe):
        model = build("mlp", torch.float64, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trained: nn.Module = DistributedDataParallel(model) if name == "ddp" else model
        flow = None if name == "ddp" else gf.attach(model, optimizer, name)
        factor = torch.tensor(2.0, dtype=torch.float64)
        for step in range(12):
            loss_of(trained, "mlp", rank, step, torch.float64).backward()
            clip_grad_norm_(model.parameters(), 0.3)
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            optimizer.step()
            factor.mul_(0.7)
            optimizer.zero_grad(set_to_none=False)
            if step % 2:
                torch.func.grad(lambda x, model=model: model(x).sum())(torch.ones(1, 64, dtype=torch.float64))
        weights.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
        if flow is not None:
            assert flow.plan.norms == recipe.startswith("dear")
            flow.close()
    return float((weights[0] - weights[1]).abs().max())


@pytest.mark.parametrize("recipe", ["dear:60KB", "flow"])
def test_gradients_are_scaled_as_they_would_have_been_at_once(recipe: str) -> None:
    assert max(run_ranks(2, scales_gradients, recipe)) < 1e-12


@pytest.mark.parametrize("recipe", ["dear:60KB", "flow"])
def test_any_use_of_gradients_is_right(recipe: str) -> None:
    for differences in run_ranks(2, looks_at_gradients, recipe):
        assert max(differences) < 1e-12, differences


def goes_on_after_a_failure() -> None:
    rank = dist.get_rank()
    model = build("mlp", torch.float64, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    flow = gf.attach(model, optimizer, "dear:1KB-ring:4")
    for step in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, "mlp", rank, step, torch.float64)
        if step == 8:
            assert flow.plan.norms
            handle = next(model.parameters()).register_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
            continue
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    flow.close()


def _fail(gradient: torch.Tensor) -> None:
    time.sleep(0.3)  # all messages but the last are done
    raise ZeroDivisionError


def test_a_lane_that_waits_for_the_others_ends_with_them() -> None:
    run_ranks(2, goes_on_after_a_failure)  # which looks for threads left behind
