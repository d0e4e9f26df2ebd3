"""Local SGD, post-local SGD and DiLoCo among workers in lockstep, held against the same arithmetic in one process."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradientflow as gf
from gradientflow.runtime.deltas import shared_tensors
from gradientflow.runtime.pump import Pump
from helpers import run_ranks
from models import build, loss_of

STEPS = 12


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    return kinds[name](model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, rank: int, number: int) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    loss_of(model, kind, rank, number, dtype).backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in shared_tensors(model).values()])


def train(kind: str, optimizer: str, dtype: torch.dtype, recipe: str, steps: int = STEPS) -> list[torch.Tensor]:
    """Weights after every step."""
    rank = dist.get_rank()
    model = build(kind, dtype, seed=rank)
    ours = optimizer_of(optimizer, model)
    found = []
    with gf.attach(model, ours, recipe):
        for number in range(steps):
            step(model, ours, kind, rank, number)
            found.append(weights(model))
    return found


def alone(
    world: int, kind: str, optimizer: str, dtype: torch.dtype, after: Callable[..., None], steps: int = STEPS
) -> list[list[torch.Tensor]]:
    """All workers in this process; after(number, models, optimizers) does what an exchange would."""
    models = [build(kind, dtype, seed=0) for _ in range(world)]
    optimizers = [optimizer_of(optimizer, model) for model in models]
    found: list[list[torch.Tensor]] = [[] for _ in models]
    for number in range(steps):
        for rank, (model, ours) in enumerate(zip(models, optimizers, strict=True)):
            step(model, ours, kind, rank, number)
        with torch.no_grad():
            after(number, models, optimizers)
        for rank, model in enumerate(models):
            found[rank].append(weights(model))
    return found


def mean_of(models: list[nn.Module]) -> dict[str, torch.Tensor]:
    every = [shared_tensors(model) for model in models]
    return {name: torch.stack([tensors[name] for tensors in every]).mean(0) for name in every[0]}


def becomes(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in shared_tensors(model).items():
        tensor.copy_(values[name])


def every(period: int) -> Callable[..., None]:
    def after(number: int, models: list[nn.Module], optimizers: object) -> None:
        if (number + 1) % period == 0:
            mean = mean_of(models)
            for model in models:
                becomes(model, mean)

    return after


def assert_same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]], tolerance: float) -> None:
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            distance = (one - other).norm() / other.norm()
            assert distance < tolerance, f"rank {rank}, step {number}: {distance}"


# - Laws


@pytest.mark.parametrize(("recipe", "optimizer"), [("lazy@local:1", "sgd"), ("lazy-ring@local:1", "momentum")])
def test_every_step_with_plain_averaging_is_bsp(recipe: str, optimizer: str) -> None:
    """Momentum is linear: the mean of velocities is the velocity of means."""
    deltas = run_ranks(3, train, "mlp", optimizer, torch.float64, recipe)
    gradients = run_ranks(3, train, "mlp", optimizer, torch.float64, "lazy")
    assert_same(deltas, gradients, 1e-10)


@pytest.mark.parametrize(("recipe", "optimizer", "period"), [
    ("lazy@local:4", "adamw", 4), ("lazy-halving@local:3", "momentum", 3), ("wfbp@local:5", "sgd", 5),
])  # fmt: skip
def test_local_sgd_is_the_mean_every_so_many_steps(recipe: str, optimizer: str, period: int) -> None:
    found = run_ranks(3, train, "cnn", optimizer, torch.float64, recipe)
    assert_same(found, alone(3, "cnn", optimizer, torch.float64, every(period)), 1e-10)
    for number in range(period - 1, STEPS, period):
        assert all(torch.equal(ours[number], found[0][number]) for ours in found)


@pytest.mark.parametrize("warmup", [0, 2])
def test_diloco_is_nesterovs_momentum_on_the_mean_of_what_workers_did(warmup: int) -> None:
    """Judged by torch's own SGD, which begins after so many rounds of plain averaging."""
    found = run_ranks(2, train, "mlp", "adamw", torch.float64, f"lazy@diloco:3:warmup={warmup}")
    start = build("mlp", torch.float64, seed=0)
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def after(number: int, models: list[nn.Module], optimizers: object) -> None:
        if (number + 1) % 3 == 0:
            mean = mean_of(models)
            if number < 3 * warmup:
                becomes(start, mean)
            else:
                for name, parameter in start.named_parameters():
                    parameter.grad = parameter - mean[name]
                outer.step()
            for model in models:
                becomes(model, dict(start.named_parameters()))

    assert_same(found, alone(2, "mlp", "adamw", torch.float64, after), 1e-10)


def test_diloco_with_a_plain_outer_step_is_averaging() -> None:
    plain = run_ranks(2, train, "mlp", "sgd", torch.float32, "lazy@diloco:1:lr=1:momentum=0")
    local = run_ranks(2, train, "mlp", "sgd", torch.float32, "lazy@local:1")
    assert all(torch.equal(one, other) for one, other in zip(plain[0], local[0], strict=True))
    outer, theta, mean = gf.Sync.parse("diloco:1:lr=1:momentum=0").outer, torch.randn(99), torch.randn(99)
    expected = theta + mean
    outer.advance_(theta, mean, torch.zeros(99))
    assert torch.equal(theta, expected)


def train_averaging(recipe: str, after: list[int]) -> list[torch.Tensor]:
    """Weights after every step; `flow.average()` comes before they are looked at."""
    rank = dist.get_rank()
    model = build("mlp", torch.float64, seed=0)
    ours = optimizer_of("momentum", model)
    found = []
    with gf.attach(model, ours, recipe) as flow:
        for number in range(8):
            step(model, ours, "mlp", rank, number)
            for _ in range(after.count(number)):
                flow.average()
            found.append(weights(model))
    return found


@pytest.mark.parametrize("recipe", ["lazy@diloco:2:warmup=1", "lazy-ps@diloco:2:warmup=1"])
def test_to_average_where_workers_are_the_same_changes_nothing(recipe: str) -> None:
    seldom, often = (run_ranks(2, train_averaging, recipe, after) for after in ([], [1, 1, 3, 5, 5, 7]))
    assert all(torch.equal(*pair) for pair in zip(seldom[0], often[0], strict=True))


@pytest.mark.parametrize("recipe", ["lazy@diloco:4", "lazy-ps@diloco:4"])
def test_what_was_averaged_is_none_of_the_outer_optimizers_business(recipe: str) -> None:
    """It sees what was done since; its velocity and its rounds are as they were."""
    start = build("mlp", torch.float64, seed=0)
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def after(number: int, models: list[nn.Module], optimizers: object) -> None:
        mean = mean_of(models)
        if number == 1:
            becomes(start, mean)
        elif number % 4 == 3:
            for name, parameter in start.named_parameters():
                parameter.grad = parameter - mean[name]
            outer.step()
        else:
            return
        for model in models:
            becomes(model, dict(start.named_parameters()))

    expected = alone(2, "mlp", "momentum", torch.float64, after, 8)
    assert_same(run_ranks(2, train_averaging, recipe, [1]), expected, 1e-10)


def train_all(recipes: list[str]) -> list[list[torch.Tensor]]:
    return [train("cnn", "momentum", torch.float32, recipe, 8) for recipe in recipes]


@pytest.mark.parametrize("more", ["", ":fragments=2:delay=1"])
def test_diloco_that_warms_up_for_all_rounds_is_averaging(more: str) -> None:
    """Of each fragment so many: there are two in eight steps."""
    recipes = [f"lazy@{sync}{more}" for sync in ("local:4", "diloco:4:warmup=2", "diloco:4:warmup=1")]
    for local, all_of_them, one in run_ranks(2, train_all, recipes):
        assert all(torch.equal(*pair) for pair in zip(local, all_of_them, strict=True))
        assert all(torch.equal(*pair) for pair in zip(local[:6], one[:6], strict=True))
        assert not torch.equal(local[7], one[7])


def test_fragments_take_turns_and_keep_what_was_done_meanwhile() -> None:
    """Four steps a period: half of the tensors is sent after the second, half after the fourth, and taken over one step
    later."""
    found = run_ranks(2, train, "mlp", "sgd", torch.float64, "lazy@local:4:fragments=2:delay=1")
    names = list(shared_tensors(build("mlp", torch.float64, seed=0)))
    nbytes = [shared_tensors(build("mlp", torch.float64, seed=0))[name].nbytes for name in names]
    cut = next(n for n in range(len(names)) if 2 * sum(nbytes[: n + 1]) >= sum(nbytes)) + 1
    halves = [names[:cut], names[cut:]]
    sent: list[dict[str, torch.Tensor]] = []
    means: dict[str, torch.Tensor] = {}

    def after(number: int, models: list[nn.Module], optimizers: object) -> None:
        nonlocal sent, means
        if sent:
            for model, before in zip(models, sent, strict=True):
                for name, tensor in shared_tensors(model).items():
                    if name in means:
                        tensor.add_(means[name] - before[name])
            sent = []
        if (number + 1) % 2 == 0:
            half = halves[((number + 1) // 2 + 1) % 2]
            sent = [{n: t.clone() for n, t in shared_tensors(model).items()} for model in models]
            means = {name: mean for name, mean in mean_of(models).items() if name in half}

    assert_same(found, alone(2, "mlp", "sgd", torch.float64, after), 1e-10)


def train_in_clouds(recipe: str) -> list[torch.Tensor]:
    """Of two ranks each: stock DDP inside, `recipe` between those that have the same place in their clouds."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = build("mlp", torch.float64, seed=rank)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=inside)
    ours = optimizer_of("momentum", model)
    found = []
    with gf.attach(model, ours, recipe, process_group=across):
        for number in range(6):
            step(wrapped, ours, "mlp", rank, number)
            found.append(weights(model))
    return found


def test_clouds_are_exact_inside_and_meet_every_so_many_steps() -> None:
    assert_same(
        run_ranks(4, train_in_clouds, "lazy@local:1"),
        run_ranks(4, train, "mlp", "momentum", torch.float64, "lazy", 6),
        1e-10,
    )
    for number, (first, second, third, fourth) in enumerate(
        zip(*run_ranks(4, train_in_clouds, "lazy@local:3"), strict=True)
    ):
        assert torch.equal(first, second) and torch.equal(third, fourth)
        assert torch.equal(first, third) == (number in (2, 5))


def train_counting(counts: list[int]) -> torch.Tensor:
    rank = dist.get_rank()
    model = build("mlp", torch.float64, seed=rank)
    ours = optimizer_of("sgd", model)
    with gf.attach(model, ours, "lazy@local:2") as flow:
        for number in range(2):
            flow.count(counts[rank])
            step(model, ours, "mlp", rank, number)
    return weights(model)


def test_workers_are_weighed_by_their_samples() -> None:
    found = run_ranks(3, train_counting, [1, 5, 2])
    alike = alone(3, "mlp", "sgd", torch.float64, lambda *given: None, steps=2)
    expected = sum(part * ours[1] for part, ours in zip((1 / 8, 5 / 8, 2 / 8), alike, strict=True))
    for ours in found:
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def count_on_one() -> str:
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    with pytest.raises(gf.DisagreementError) as caught, gf.attach(model, ours, "lazy@local:1") as flow:
        if dist.get_rank() == 0:
            flow.count(4)
        step(model, ours, "mlp", 0, 0)
    return str(caught.value)


def test_samples_are_counted_by_all_or_by_none() -> None:
    assert all("1 of 2 ranks count their samples" in words for words in run_ranks(2, count_on_one))


def test_dense_steps_come_first() -> None:
    found = run_ranks(2, train, "cnn", "momentum", torch.float64, "lazy@local:3:start=4")
    together = run_ranks(2, train, "cnn", "momentum", torch.float64, "lazy", 4)
    for rank in range(2):
        assert all(torch.equal(*pair) for pair in zip(found[rank][:4], together[rank], strict=True))
    assert not torch.equal(found[0][4], found[1][4]) and not torch.equal(found[0][5], found[1][5])
    assert torch.equal(found[0][6], found[1][6]) and torch.equal(found[0][9], found[1][9])


class Parts(nn.Module):
    """Never called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.scale.weight)

    def loss(self) -> torch.Tensor:
        return self.scale(torch.full((1,), dist.get_rank() + 1.0)).sum()

    def loss_by_hand(self) -> torch.Tensor:
        return self.scale.weight.sum()


def part_after_two(stop: int) -> tuple[list[float], str]:
    """Of weights, after each of four steps; what is said if modules are not called, and to a state from before."""
    model = Parts()
    ours = torch.optim.SGD(model.parameters(), lr=1.0)
    recipe, found = "lazy@local:3:start=2", []
    flow = gf.attach(model, ours, recipe)
    for number in range(4):
        if number == stop:
            state = copy.deepcopy((model.state_dict(), flow.state_dict()))
            flow.close()
            flow = gf.attach(model, ours, recipe)
            for each, saved in zip((model, flow), state, strict=True):
                each.load_state_dict(saved)
        ours.zero_grad()
        model.loss().backward()
        ours.step()
        found.append(model.scale.weight.item())
    with pytest.raises(gf.UsageError, match=r"of a step before start=2.* attach again and load it then"):
        flow.load_state_dict(state[1])
    flow.close()
    with gf.attach(model, ours, recipe), pytest.raises(gf.UsageError) as caught:
        for _ in range(5):
            ours.zero_grad()
            model.loss_by_hand().backward()
            ours.step()
    return found, str(caught.value)


@pytest.mark.parametrize("stop", [1, 2])
def test_workers_part_also_if_the_model_is_not_called_as_a_whole(stop: int) -> None:
    (ours, words), (theirs, _) = run_ranks(2, part_after_two, stop)
    assert ours == [-1.5, -3.0, -4.0, -5.0] and theirs == [-1.5, -3.0, -5.0, -7.0]
    assert "after start=2 steps" in words and "call model(...)" in words


def count_before_parting(counts: list[int]) -> float:
    rank = dist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    ours = torch.optim.SGD(model.parameters(), lr=1.0)
    with gf.attach(model, ours, "lazy@local:1:start=2") as flow:
        for _ in range(3):
            flow.count(counts[rank])
            before = model.weight.item()
            ours.zero_grad()
            model(torch.full((1, 1), rank * 4.0)).sum().backward()
            ours.step()
        return before - model.weight.item()


def test_samples_of_the_first_step_after_parting_count() -> None:
    assert run_ranks(2, count_before_parting, [1, 3]) == pytest.approx([3.0, 3.0])


def count_oddly() -> dict[str, str]:
    model = build("mlp", torch.float32, seed=0)
    found = {}
    for recipe in ("lazy@local:2", "lazy"):
        with gf.attach(model, optimizer_of("sgd", model), recipe) as flow:
            flow.count(torch.tensor(9))  # type: ignore[arg-type]
            flow.load_state_dict(flow.state_dict())
            for odd in (float("nan"), 2.0, "3", None, torch.tensor(2.5), torch.eye(2), -1, 2**60):
                with pytest.raises(gf.UsageError) as caught:
                    flow.count(odd)  # type: ignore[arg-type]
                found[f"{recipe} {odd}"] = str(caught.value)
    return found


def test_samples_are_whole_numbers() -> None:
    found = run_ranks(1, count_oddly)[0]
    assert len(found) == 16
    assert all(words.startswith("count(") and "\n" not in words for words in found.values()), found
    assert found["lazy@local:2 nan"] == "count(nan): samples are counted in whole numbers"


def moments_after(recipe: str) -> list[torch.Tensor]:
    rank = dist.get_rank()
    model = build("mlp", torch.float64, seed=rank)
    ours = optimizer_of("adamw", model)
    with gf.attach(model, ours, recipe):
        for number in range(2):
            step(model, ours, "mlp", rank, number)
    return [torch.cat([state[kind].reshape(-1) for state in ours.state.values()]) if ours.state else torch.empty(0)
            for kind in ("exp_avg", "exp_avg_sq")]  # fmt: skip


def test_moments_are_kept_averaged_or_forgotten() -> None:
    kept = run_ranks(2, moments_after, "lazy@local:2")
    averaged = run_ranks(2, moments_after, "lazy@local:2:state=average")
    assert not torch.equal(kept[0][0], kept[1][0])
    for kind in range(2):
        assert torch.equal(averaged[0][kind], averaged[1][kind])
        torch.testing.assert_close(averaged[0][kind], (kept[0][kind] + kept[1][kind]) / 2)
    assert all(not len(moments) for moments in run_ranks(2, moments_after, "lazy@local:2:state=reset")[0])


def moments_of_a_number() -> tuple[float, float]:
    model = nn.ParameterDict({"logit_scale": nn.Parameter(torch.zeros(()))})
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    with gf.attach(model, ours, "lazy@local:1:state=average"):
        (model["logit_scale"] * (dist.get_rank() + 1.0)).backward()
        ours.step()
    state = ours.state[model["logit_scale"]]
    return state["exp_avg"].item(), state["step"].item()


def test_moments_of_a_single_number_are_averaged_too() -> None:
    for moment, step in run_ranks(2, moments_of_a_number):
        assert (moment, step) == (pytest.approx(0.15), 1.0)


# - Codecs


def train_compressed(recipes: list[str]) -> dict[str, list[torch.Tensor]]:
    return {recipe: train("cnn", "sgd", torch.float32, recipe, 8) for recipe in recipes}


def test_deltas_may_be_compressed() -> None:
    codecs = ["fp16", "bf16", "int8", "csc:30%:warmup=0", "csc:30%:warmup=0+fp16", "topk:20%:warmup=0", "powersgd:2"]
    recipes = ["lazy@local:2", *(f"lazy+{codec}@local:2" for codec in codecs)]
    found = run_ranks(2, train_compressed, recipes)
    dense = found[0][recipes[0]][-1]
    for recipe in recipes:
        for number in (1, 3, 5, 7):
            assert torch.equal(found[0][recipe][number], found[1][recipe][number]), recipe
        assert (found[0][recipe][-1] - dense).norm() < 0.2 * dense.norm(), recipe


# - What breaks


def poisoned() -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    model = build("mlp", torch.float64, seed=rank)
    ours = optimizer_of("momentum", model)
    with gf.attach(model, ours, "lazy@local:2"):
        for number in range(2):
            step(model, ours, "mlp", rank, number)
        before = weights(model)
        step(model, ours, "mlp", rank, 2)
        if rank == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = float("inf")
        step(model, ours, "mlp", rank, 3)
        after = weights(model)
        for number in range(4, 6):
            step(model, ours, "mlp", rank, number)
    assert torch.isfinite(weights(model)).all()
    return before, after


def test_an_inf_takes_all_back_to_their_last_mean() -> None:
    for before, after in run_ranks(2, poisoned):
        assert torch.equal(before, after)


SCALED_STEPS = 6


def scaled(fused: bool, overflows: int) -> tuple[torch.Tensor, int, int, float]:
    """Until the flow has counted enough steps; rank 1's gradients overflow once. Weights, iterations, steps, and by how
    much the scaler scales in the end."""
    rank = dist.get_rank()
    model = build("mlp", torch.float32, seed=rank)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    iterations = 0
    with gf.attach(model, ours, "lazy@local:2") as flow:
        while flow.step < SCALED_STEPS:
            # Batches go by steps, so that an iteration that is skipped is taken again.
            loss = loss_of(model, "mlp", rank, flow.step, torch.float32)
            ours.zero_grad()
            scaler.scale(loss * (float("inf") if rank == 1 and iterations == overflows else 1.0)).backward()
            scaler.step(ours)
            scaler.update()
            iterations += 1
        return weights(model), iterations, flow.step, scaler.get_scale()


def test_a_scaler_skips_a_step_of_its_worker_alone_and_it_counts_for_nobody() -> None:
    (ours, iterations, steps, scale), (theirs, more, as_many, less) = run_ranks(2, scaled, False, 3)
    assert torch.equal(ours, theirs) and torch.isfinite(ours).all()
    assert (iterations, more) == (SCALED_STEPS, SCALED_STEPS + 1) and steps == as_many == SCALED_STEPS
    assert (scale, less) == (1024.0, 512.0)
    undisturbed = run_ranks(2, scaled, False, -1)
    torch.testing.assert_close(ours, undisturbed[0][0], rtol=1e-6, atol=1e-6)


def test_a_fused_optimizer_skips_inside_its_step_which_counts() -> None:
    (ours, iterations, steps, _), (theirs, more, as_many, less) = run_ranks(2, scaled, True, 3)
    assert torch.equal(ours, theirs) and torch.isfinite(ours).all()
    assert iterations == more == steps == as_many == SCALED_STEPS and less == 512.0


def resumed(recipe: str, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    whole = train("cnn", "adamw", torch.float32, recipe, 9)[-1]
    model = build("cnn", torch.float32, seed=rank)
    ours = optimizer_of("adamw", model)
    with gf.attach(model, ours, recipe) as flow:
        for number in range(stop):
            step(model, ours, "cnn", rank, number)
        saved = copy.deepcopy((model.state_dict(), ours.state_dict(), flow.state_dict()))
    model = build("cnn", torch.float32, seed=7)
    ours = optimizer_of("adamw", model)
    with gf.attach(model, ours, recipe) as flow:
        model.load_state_dict(saved[0])
        ours.load_state_dict(saved[1])
        flow.load_state_dict(saved[2])
        for number in range(stop, 9):
            step(model, ours, "cnn", rank, number)
    return whole, weights(model)


@pytest.mark.parametrize(("recipe", "stop"), [
    ("lazy@local:4", 6), ("lazy@diloco:3:delay=1", 3), ("lazy+int8@diloco:2", 5), ("lazy@local:2:start=3", 2),
    ("lazy@local:4:fragments=2:delay=1", 6), ("lazy@local:2:start=3", 5),
])  # fmt: skip
def test_training_goes_on_as_if_it_had_not_stopped(recipe: str, stop: int) -> None:
    for whole, parts in run_ranks(2, resumed, recipe, stop):
        assert torch.equal(whole, parts)


def slow_lanes() -> None:
    carry = Pump._carry

    def slowly(self: Pump, number: int, lane: int) -> None:
        time.sleep(0.2)
        carry(self, number, lane)

    Pump._carry = slowly  # type: ignore[method-assign]


def rolled_back() -> tuple[torch.Tensor, torch.Tensor]:
    """To before a round that is on its way."""
    rank, recipe = dist.get_rank(), "lazy@local:2:delay=1"
    whole = train("cnn", "momentum", torch.float32, recipe, 6)[-1]
    slow_lanes()
    model = build("cnn", torch.float32, seed=rank)
    ours = optimizer_of("momentum", model)
    with gf.attach(model, ours, recipe) as flow:
        for number in range(3):
            step(model, ours, "cnn", rank, number)
        saved = copy.deepcopy((model.state_dict(), ours.state_dict(), flow.state_dict()))
        step(model, ours, "cnn", rank, 3)
        for each, state in zip((model, ours, flow), saved, strict=True):
            each.load_state_dict(state)
        for number in range(3, 6):
            step(model, ours, "cnn", rank, number)
        return whole, weights(model)


def test_to_go_back_in_the_same_process_is_to_go_back() -> None:
    for whole, parts in run_ranks(2, rolled_back):
        assert torch.equal(whole, parts)


def go_on_with_another_delay(delays: tuple[int, int], steps: int) -> float:
    """Each of nine steps is -1; saved while a round is on its way."""
    weight = nn.Parameter(torch.zeros(()))
    model, ours = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=1.0)

    def train(first: int, last: int) -> None:
        for _ in range(first, last):
            weight.grad = torch.ones(())
            ours.step()

    with gf.attach(model, ours, f"lazy@local:4:delay={delays[0]}") as flow:
        train(0, steps)
        state = flow.state_dict()
    with gf.attach(model, ours, f"lazy@local:4:delay={delays[1]}") as flow:
        flow.load_state_dict(state)
        train(steps, 9)
        flow.average()
    return weight.item()


@pytest.mark.parametrize(("delays", "steps"), [((1, 0), 4), ((2, 1), 5), ((1, 3), 4)])
def test_what_was_on_its_way_arrives_also_with_another_delay(delays: tuple[int, int], steps: int) -> None:
    assert run_ranks(2, go_on_with_another_delay, delays, steps) == [-9.0, -9.0]


class Forked(nn.Module):
    """Each rank uses a part of its own; and a buffer that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 5), nn.Linear(4, 1)])
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.parts[dist.get_rank()](inputs).sum() + self.parts[2](inputs).sum()


def fork() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(dist.get_rank())
    model = Forked()
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    with gf.attach(model, ours, "lazy@local:2:state=average"):
        before = weights(model)
        for _ in range(2):
            ours.zero_grad()
            model(torch.randn(3, 4)).backward()
            ours.step()
    return before, weights(model), [ours.state[p]["exp_avg"] for p in model.parts[2].parameters()]


def test_ranks_may_use_parameters_of_their_own_and_masks() -> None:
    found = run_ranks(2, fork)
    for before, after, _ in found:
        assert (before != after).all(), "all parameters move"
        assert torch.equal(after, found[0][1])
    assert all(torch.equal(*pair) for pair in zip(found[0][2], found[1][2], strict=True)), "used by both: averaged"


def average_on_one() -> str:
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    with pytest.raises(gf.DisagreementError) as caught, gf.attach(model, ours, "lazy@local:4:fragments=2") as flow:
        for number in range(4):
            if dist.get_rank() == 0 and number == 3:
                flow.average()
            step(model, ours, "mlp", 0, number)
    return str(caught.value)


def test_average_is_for_all() -> None:
    assert all("call it on all of them" in words for words in run_ranks(2, average_on_one))


def average_in_between() -> torch.Tensor:
    rank = dist.get_rank()
    model = build("cnn", torch.float32, seed=0)
    ours = optimizer_of("adamw", model)
    with gf.attach(model, ours, "lazy@diloco:4:fragments=2:delay=1") as flow:
        for number in range(7):
            step(model, ours, "cnn", rank, number)
        flow.average()
        return weights(model)


def test_average_makes_all_the_same_to_the_bit_also_with_a_delay() -> None:
    found = run_ranks(2, average_in_between)
    assert torch.equal(found[0], found[1])


def saved_while_poisoned() -> torch.Tensor:
    rank = dist.get_rank()
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    with gf.attach(model, ours, "lazy@local:2:delay=1") as flow:
        step(model, ours, "mlp", rank, 0)
        if rank == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = float("inf")
        step(model, ours, "mlp", rank, 1)
        flow.state_dict()
        step(model, ours, "mlp", rank, 2)
        return weights(model)


def test_what_is_saved_on_its_way_is_not_believed_for_that() -> None:
    found = run_ranks(2, saved_while_poisoned)
    assert torch.equal(found[0], found[1]) and torch.isfinite(found[0]).all()


def evaluate_alone() -> torch.Tensor:
    rank = dist.get_rank()
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    with gf.attach(model, ours, "lazy@local:2:start=2", deadline_s=10.0) as flow:
        for number in range(4):
            if rank == 0 and number == 2:
                with torch.no_grad():
                    loss_of(model, "mlp", rank, number, torch.float32)
            dist.barrier()
            flow.count(3)
            step(model, ours, "mlp", rank, number)
        flow.average()
    return weights(model)


def test_a_rank_may_evaluate_by_itself_before_workers_part() -> None:
    found = run_ranks(2, evaluate_alone)
    assert torch.equal(found[0], found[1])


def switched_off() -> torch.Tensor:
    os.environ["GRADIENTFLOW"] = "off"
    return evaluate_alone()


def test_the_same_script_runs_with_the_switch_off() -> None:
    found = run_ranks(2, switched_off)
    assert torch.equal(found[0], found[1])


def lose_one() -> str:
    rank = dist.get_rank()
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    flow = gf.attach(model, ours, "lazy@local:2")
    began_s = time.monotonic()
    try:
        for number in range(50):
            if rank == 1 and number == 5:
                time.sleep(3.0)  # until it has said where it is
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, ours, "mlp", rank, number)
    except gf.PeerError as error:
        flow.close()
        assert time.monotonic() - began_s < 20
        return str(error)
    return ""


def test_a_worker_that_dies_is_named() -> None:
    words = run_ranks(3, lose_one, lost=(1,))
    assert all("rank 1 is dead" in said for said in (words[0], words[2]))
    assert all("last seen in step 5, training by itself" in said for said in (words[0], words[2])), words


def refuse() -> list[str]:
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    found = []
    attempts: list[Callable[[], Any]] = [
        lambda: gf.attach(model, ours, "flow@local:2"),
        lambda: gf.attach(model, ours, "lazy@local:2", gate=True),
        lambda: gf.attach(model, ours, "lazy@local:2", master_weights=True),
        lambda: gf.DistributedDataParallel(model, recipe="lazy@local:2"),
    ]
    for attempt in attempts:
        with pytest.raises(gf.UserError) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_what_does_not_fit_is_refused() -> None:
    flow, gate, masters, ddp = run_ranks(1, refuse)[0]
    assert "use bsp or wfbp or lazy" in flow
    assert "leave it out" in gate and "sends none" in masters
    assert "gradientflow.attach" in ddp


def thaw() -> str:
    """A layer that was frozen when the flow began."""
    model = build("mlp", torch.float32, seed=0)
    first = next(model.parameters()).requires_grad_(False)
    ours = optimizer_of("sgd", model)
    with gf.attach(model, ours, "lazy@local:2"):
        step(model, ours, "mlp", 0, 0)
        first.requires_grad_(True)
        with pytest.raises(gf.UsageError) as caught:
            step(model, ours, "mlp", 0, 1)
    return str(caught.value)


def test_what_began_to_train_later_is_not_left_out_in_silence() -> None:
    assert "attach again" in run_ranks(1, thaw)[0]
