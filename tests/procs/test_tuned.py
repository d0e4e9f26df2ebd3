"""A tuned plan runs as it was written down, and stock DDP gets the buckets that it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf
from gradientflow.errors import DisagreementError, UsageError
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.sim.cluster import Cluster, Collective, Wire
from gradientflow.tune.for_ddp import caps_mb
from gradientflow.tune.ranking import pinned, rank
from helpers import run_ranks
from models import build, loss_of

CLUSTER = Cluster(
    name="two", hosts=2, between=Wire(bits_per_s=1e8, latency_s=1e-4), collective=Collective(launch_s=1e-3, lanes=2)
)
STEPS = 4


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = build("cnn")
    return gf.profile(model, None, lambda model, _: loss_of(model, "cnn", 0, 0), steps=2)


def train(recipe: str, caps: tuple[float, ...] = ()) -> tuple[list[torch.Tensor], list[Plan], list[int]]:
    """Weights after every step, plans that ran, and sizes of stock DDP's buckets."""
    model = build("cnn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flow = None if recipe == "ddp" else gf.attach(model, optimizer, recipe)
    trained: nn.Module = model if flow else DistributedDataParallel(model, bucket_cap_mb_list=list(caps) or None)
    weights, plans = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(trained, "cnn", dist.get_rank(), step).backward()
        optimizer.step()
        weights.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]))
        plans += [flow.plan] if flow else []
    if flow is not None:
        flow.close()
        return weights, plans, []
    found = str(trained._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    return weights, plans, [int(size) for size in found.split(",")]


def test_a_tuned_plan_runs_and_trains_as_ddp_does(profile: Profile, tmp_path: Path) -> None:
    best = rank(profile, CLUSTER, 2, exchanges=("a2a",)).best.recipe
    reference = run_ranks(2, train, "ddp")
    for number, text in enumerate([best, "flow-a2a:2", "lazy:100KB-halving:1", "wfbp-ps"]):
        file = tmp_path / str(number) / "recipe.toml"
        file.parent.mkdir()
        recipe = pinned(text, profile, CLUSTER, 2)
        recipe.write(file)
        assert gf.Recipe.read(file) == recipe and recipe.pinned is not None
        for (weights, plans, _), (expected, _, _) in zip(run_ranks(2, train, str(file)), reference, strict=True):
            lanes = plans[0].num_lanes if recipe.served else recipe.lanes  # servers have none
            told = recipe.pinned.on_lanes(lanes)
            assert all((plan.messages, plan.layout) == (told.messages, told.layout) for plan in plans)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, expected, strict=True))


def test_stock_ddp_gets_the_merge_plans_buckets(profile: Profile) -> None:
    plan = pinned("merge-a2a:1", profile, CLUSTER, 2).pinned
    halves = gf.Recipe.parse("lazy:200KB").plan(profile, num_lanes=1)
    assert plan is not None and len(halves.messages) > 2
    for told in (plan, halves):
        for _, _, sizes in run_ranks(2, train, "ddp", caps_mb(profile, told)):
            assert sizes == [4 * message.numel for message in told.messages]


def attach_another(file: str, second: str) -> str:
    model = build("mlp" if second == "model" else "cnn")
    given = file if dist.get_rank() == 0 or second == "model" else second
    with pytest.raises((UsageError, DisagreementError)) as caught:
        gf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_plan_of_another_model_or_of_one_rank_alone_is_refused(profile: Profile, tmp_path: Path) -> None:
    lazy = gf.Recipe.parse("lazy")
    lazy.model_copy(update={"pinned": lazy.plan(profile, 2)}).write(tmp_path / "recipe.toml")
    for words in run_ranks(2, attach_another, str(tmp_path / "recipe.toml"), "model"):
        assert words.startswith("UsageError: the plan that recipe 'lazy' pins is of another model")
    many = gf.Recipe.parse("lazy:100KB").plan(profile, 2)
    (tmp_path / "other").mkdir()
    lazy.model_copy(update={"pinned": many}).write(tmp_path / "other" / "recipe.toml")
    found = run_ranks(2, attach_another, str(tmp_path / "recipe.toml"), str(tmp_path / "other" / "recipe.toml"))
    assert all(words.startswith("DisagreementError") for words in found)
