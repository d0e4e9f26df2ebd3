"""Compression under training loops with real processes: against stock DDP where it must be equal, by laws elsewhere."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import gradientflow as gf
from gradientflow.errors import NonFiniteError, UsageError
from gradientflow.plan import Plan
from gradientflow.runtime import tuning
from gradientflow.tune import candidates, trials
from helpers import kept, run_ranks
from models import build, loss_of

STEPS = 25
#: Enough for a race of three.
RACED = 75


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    if kind == "groups":
        half = len(parameters) // 2
        return torch.optim.SGD(
            [
                {"params": parameters[:half], "momentum": 0.5, "weight_decay": 0.01},
                {"params": parameters[half:], "nesterov": True, "maximize": True, "lr": 0.001},
            ],
            lr=0.05,
            momentum=0.9,
        )
    nesterov = kind == "nesterov"
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=nesterov)


def train(
    recipe: str, kind: str = "sgd", steps: int = STEPS, family: str = "cnn", dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, gf.Flow | None]:
    rank = dist.get_rank()
    model = build(family, dtype, seed=rank)
    optimizer = optimizer_of(model, kind)
    trained: nn.Module = DistributedDataParallel(model) if recipe == "ddp" else model
    flow = None if recipe == "ddp" else gf.attach(model, optimizer, recipe)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(trained, family, rank, step, dtype).backward()
        optimizer.step()
        schedule.step()
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    expected = {"groups": [0.5, 0.9], "adam": [None]}.get(kind, [0.9])
    assert momenta == expected, "the user's groups are not as they were"
    return weights(model), flow


def equals_ddp(recipe: str, kind: str) -> float:
    found, flow = train(recipe, kind)
    assert flow is not None
    flow.close()
    expected, _ = train("ddp", kind)
    return float((found - expected).abs().max())


@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "groups"), (2, "sgd"), (2, "nesterov"), (2, "adam"), (4, "groups")],
)
def test_sending_everything_is_dense_training(world: int, kind: str) -> None:
    for difference in run_ranks(world, equals_ddp, "lazy:60KB+csc:always:1", kind):
        assert difference < 1e-10


def law(recipe: str, dtype: torch.dtype, steps: int = STEPS) -> tuple[torch.Tensor, list[int], int, float]:
    """Weights; bytes of each step; and by how much what was applied and what is left over differ from what was
    given."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build("cnn", dtype, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    flow = gf.attach(model, optimizer, recipe)
    names = [name for name, _ in model.named_parameters()]
    given = {name: torch.zeros_like(p, dtype=torch.float64).reshape(-1) for name, p in model.named_parameters()}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, "cnn", rank, step, dtype)
        local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        for name, gradient, parameter in zip(names, local, model.parameters(), strict=True):
            assert parameter.grad is not None
            given[name] += gradient.double().reshape(-1) / world - parameter.grad.double().reshape(-1) / world
        optimizer.step()
    left_over = kept(flow.state_dict())["compression"]["codec"]["slots"]["residual"]
    missing = torch.cat([given[name] - left_over[name].double() for name in names])
    dist.all_reduce(missing)
    sent = [
        sum(int(span.args["nbytes"]) for span in flow.trace().spans if span.kind == "message" and span.step == step)
        for step in range(steps)
    ]
    flow.close()
    return weights(model), sent, sum(p.numel() for p in model.parameters()), float(missing.abs().max())


@pytest.mark.parametrize(
    ("world", "recipe"),
    [
        (1, "lazy:60KB+csc:always:0.1:warmup=0"),
        (3, "lazy:60KB-ring+csc:always:0.1:warmup=0"),
    ],
)
def test_what_is_sent_and_left_over_is_what_was_given_and_ranks_are_alike(world: int, recipe: str) -> None:
    found = run_ranks(world, law, recipe, torch.float64)
    for ended, sent, numel, missing in found:
        assert torch.equal(ended, found[0][0]), "ranks ended with different weights"
        assert missing < 1e-10
        assert sent[0] >= 8 * numel, "the first step sends everything"
        for nbytes in sent[5:]:
            assert 0.1 * 8 * numel <= nbytes <= 0.13 * 8 * numel + 4 * 1200 + 8 * 40


#: Every other codec, so that much of what it is given waits; the last two forget it.
CODECS = (
    "topk:always:5%:warmup=0",
    "topk:always:5%:warmup=0:sampled",
    "dgc:always:5%:warmup=0",
    "gtopk:always:5%:warmup=0",
    "randomk:always:20%:warmup=0",
    "threshold:always:0.01:warmup=0",
    "int8:always",
    "efsign:always:warmup=0",
    "powersgd:always:1:warmup=0",
    "qsgd:always:4",
    "signsgd",
)


def laws(schedule: str, codecs: tuple[str, ...]) -> tuple[list[torch.Tensor], list[float]]:
    """By codec: weights, and by how much what was applied and what is left over differ from what was given."""
    found = [law(f"{schedule}+{codec}", torch.float32, steps=4) for codec in codecs]
    return [ended for ended, *_ in found], [missing for *_, missing in found]


@pytest.mark.parametrize(
    ("world", "schedule", "codecs"),
    [(1, "lazy:60KB", CODECS), (3, "bytescheduler:200KB", CODECS), (5, "lazy:60KB-ring", CODECS[::2])],
)
def test_every_codec_loses_nothing_and_keeps_ranks_alike(world: int, schedule: str, codecs: tuple[str, ...]) -> None:
    everyone = run_ranks(world, laws, schedule, codecs)
    for ended, missing in everyone:
        for codec, ours, first, by_how_much in zip(codecs, ended, everyone[0][0], missing, strict=True):
            assert torch.equal(ours, first), f"{codec}: ranks ended with different weights"
            assert codec in CODECS[-2:] or by_how_much < 1e-5, codec


def spoiled(how: str, codec: str = "csc:always:0.1:warmup=0", steps: int = 15) -> tuple[bool, bool, int]:
    """Training with one bad step against training without that step."""
    rank, middle = dist.get_rank(), steps // 2
    ends = []
    skipped = 0
    for bad_step in (middle, -1):
        model = build("cnn", torch.float32, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6, enabled=how == "scaler")
        flow = gf.attach(model, optimizer, f"lazy:60KB+{codec}", scaler=scaler if how == "scaler" else None)
        for step in range(steps):
            if step == middle and bad_step < 0:
                if how == "scaler":
                    scaler.update(128.0)
                continue
            optimizer.zero_grad()
            loss = loss_of(model, "cnn", rank, step, torch.float32)
            if step == bad_step and rank == 1 % dist.get_world_size():
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step == bad_step and how == "plain":
                skipped += sum(parameter.grad is not None for parameter in model.parameters())
            scaler.step(optimizer)
            scaler.update()
        state = kept(flow.state_dict())["compression"]["codec"]["slots"]
        waits = torch.cat([values for kind in state.values() for values in kind.values()])
        ends.append((weights(model), waits))
        flow.close()
    return torch.equal(ends[0][0], ends[1][0]), torch.equal(ends[0][1], ends[1][1]), skipped


@pytest.mark.parametrize(("world", "how"), [(1, "plain"), (3, "plain"), (3, "scaler")])
def test_an_inf_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(world: int, how: str) -> None:
    for same_weights, same_memory, num_gradients in run_ranks(world, spoiled, how):
        assert same_weights and same_memory
        assert not num_gradients, "optimizer.step() would have used them"


def all_spoiled() -> list[tuple[bool, bool, int]]:
    return [spoiled("scaler" if number % 2 else "plain", codec, steps=6) for number, codec in enumerate(CODECS)]


def test_an_inf_on_one_rank_leaves_no_trace_in_any_codec() -> None:
    assert run_ranks(2, all_spoiled) == [[(True, True, 0)] * len(CODECS)] * 2


def raises_on_inf() -> str:
    model = build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gf.attach(model, optimizer, "lazy+csc:always:0.1", nonfinite="raise"):
        loss = loss_of(model, "mlp", dist.get_rank(), 0, torch.float32)
        try:
            (loss * (float("nan") if dist.get_rank() else 1.0)).backward()
        except NonFiniteError as error:
            return str(error)
    return ""


def test_a_rank_without_the_inf_raises_too_if_that_is_asked_for() -> None:
    assert all("step 0" in words and "dropped on all ranks" in words for words in run_ranks(2, raises_on_inf))


def scaled() -> bool:
    rank = dist.get_rank()
    ends = []
    for scales in (True, False):
        model = build("cnn", torch.float32, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4, enabled=scales)
        with gf.attach(model, optimizer, "lazy:60KB+csc:always:0.1:warmup=0", scaler=scaler):
            for step in range(15):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, "cnn", rank, step, torch.float32)).backward()
                scaler.step(optimizer)
                scaler.update()
        ends.append(weights(model))
    return torch.allclose(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_what_waits_survives_a_change_of_the_scalers_factor() -> None:
    assert all(run_ranks(2, scaled))


class Job:
    """A training that can be stopped and gone on with."""

    def __init__(
        self,
        recipe: str,
        states: Any = None,
        kind: str = "sgd",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.model = build("cnn", torch.float32, seed=0).to(memory_format=memory_format)  # type: ignore[call-overload]
        self.optimizer = optimizer_of(self.model, kind)
        if states:
            self.model.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])
        self.flow = gf.attach(self.model, self.optimizer, recipe)
        if states:
            self.flow.load_state_dict(states["flow"])

    def run(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, "cnn", dist.get_rank(), step, torch.float32).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: values.clone() for name, values in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "flow": self.flow.state_dict(),
        }


def stops_and_goes_on(recipe: str, kind: str, steps: int = 20) -> tuple[bool, bool]:
    whole, half = Job(recipe, kind=kind), steps // 2 + 1
    whole.run(range(steps))
    expected = weights(whole.model)
    whole.flow.close()
    first = Job(recipe, kind=kind)
    first.run(range(half))
    state = first.state()
    first.flow.close()
    second = Job(recipe, state, kind)
    second.run(range(half, steps))
    found = weights(second.model)
    second.flow.close()
    return torch.equal(found, expected), bool(
        kept(second.flow.state_dict())["compression"]["codec"]["num_steps"] == steps
    )


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("lazy:60KB+csc:always:0.1:warmup=8", "sgd"),
        ("lazy:60KB+csc:always:0.1:warmup=8", "adam"),
        ("gradientflow:always:0.1:warmup=8", "groups"),
    ],
)
def test_going_on_from_a_checkpoint_is_bit_identical(recipe: str, kind: str) -> None:
    assert run_ranks(2, stops_and_goes_on, recipe, kind) == [(True, True)] * 2


def saves(recipe: str) -> dict[str, Any]:
    job = Job(recipe)
    job.run(range(9))
    state = job.state()
    job.flow.close()
    return state


def moves(recipe: str, states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What all ranks of this world hold together after loading those of another."""
    job = Job(recipe, states[0] | {"flow": [state["flow"] for state in states]})
    masses = held_by([job.flow.state_dict()])
    for values in masses.values():
        dist.all_reduce(values)
    job.run(range(9, 12))
    job.flow.close()
    return masses


def held_by(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for state in states:
        for kind, tensors in kept(state)["compression"]["codec"]["slots"].items():
            mass = torch.cat([tensors[name].double() for name in sorted(tensors)])
            found[kind] = found.get(kind, torch.zeros_like(mass)) + mass
    return found


def test_another_world_and_another_plan_take_over_all_that_was_left() -> None:
    states = run_ranks(3, saves, "lazy:60KB+csc:always:0.1:warmup=0")
    expected = held_by([state["flow"] for state in states])
    assert set(expected) == {"residual", "momentum"} and expected["residual"].any()
    for world, recipe in ((2, "lazy:60KB+csc:always:0.1:warmup=0"), (4, "wfbp+csc:always:0.2:warmup=0")):
        for masses in run_ranks(world, moves, recipe, states):
            for kind, mass in expected.items():
                assert torch.allclose(masses[kind], mass, atol=1e-5)


def loads_a_stranger(states: list[dict[str, Any]]) -> str:
    try:
        Job("lazy:60KB+csc:always:0.1:warmup=0", states[0])
    except UsageError as error:
        return str(error)
    return ""


def test_a_state_of_another_rank_is_refused_with_what_to_do() -> None:
    states = run_ranks(2, saves, "lazy:60KB+csc:always:0.1:warmup=0")
    words = run_ranks(1, loads_a_stranger, states)[0]
    assert "rank 0 of 2" in words and "a list of those of all 2 ranks" in words


def odd_loops(kind: str) -> bool:
    """Ranks stay alike and nothing breaks; weights of all ranks are compared by the caller."""
    rank = dist.get_rank()
    model = build("cnn", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    if kind == "frozen":
        for parameter in list(model.parameters())[:2]:
            parameter.requires_grad_(False)
    with gf.attach(model, optimizer, "lazy:60KB+csc:always:0.1:warmup=4+bf16") as flow:
        for step in range(12):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if kind == "accumulation":
                with flow.no_sync():
                    loss_of(model, "cnn", rank, 100 + step, torch.float32).backward()
            if kind == "frozen" and step == 6:
                for parameter in list(model.parameters())[:2]:
                    parameter.requires_grad_(True)
            loss_of(model, "cnn", rank, step, torch.float32).backward()
            if kind == "clipping":
                clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    mine = weights(model)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return torch.equal(mine, theirs) and bool(torch.isfinite(mine).all())


@pytest.mark.parametrize("kind", ["accumulation", "frozen", "clipping"])
def test_odd_loops_keep_ranks_alike(kind: str) -> None:
    assert all(run_ranks(3, odd_loops, kind))


def unused_for_a_while() -> tuple[float, float]:
    """A layer that is used in the first steps only: what of it waits is applied all the same."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(40, 40), "early": nn.Linear(40, 40)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gf.attach(model, optimizer, "lazy+csc:always:0.2:warmup=0") as flow:
        for step in range(40):
            optimizer.zero_grad()
            inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            layers = ["used", "early"] if step < 3 else ["used"]
            sum(model[layer](inputs).square().mean() for layer in layers).backward()
            if step == 2:
                waiting = sum(
                    float(values.abs().sum())
                    for name, values in kept(flow.state_dict())["compression"]["codec"]["slots"]["residual"].items()
                    if name.startswith("early")
                )
            optimizer.step()
        left = kept(flow.state_dict())["compression"]["codec"]["slots"]["residual"]
        rest = sum(float(values.abs().sum()) for name, values in left.items() if name.startswith("early"))
    return waiting, rest


def test_what_waits_for_a_layer_that_is_no_longer_used_is_not_lost() -> None:
    for waiting, rest in run_ranks(2, unused_for_a_while):
        assert waiting > 0 and rest == 0


def warns(kind: str) -> list[str]:
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("gradientflow").addHandler(Ear())
    model = build("mlp", torch.float32, seed=0)
    gf.attach(model, optimizer_of(model, kind), "lazy+csc:always:0.1").close()
    return heard


def test_an_optimizer_without_momentum_correction_is_told_of() -> None:
    assert any("SGD only, not for Adam" in words for words in run_ranks(2, warns, "adam")[0])
    assert run_ranks(2, warns, "sgd") == [[], []]


def refuses_a_gate() -> str:
    model = build("mlp", torch.float32, seed=0)
    try:
        gf.attach(model, optimizer_of(model, "sgd"), "flow+csc:always:0.1", gate=True)
    except UsageError as error:
        return str(error)
    return ""


def test_no_gate_before_it_is_known_whether_a_step_counts() -> None:
    assert "whether a step counts" in run_ranks(1, refuses_a_gate)[0]


def momentum_moves() -> float:
    """Dense training, then compression that sends everything and keeps momentum, then one that leaves it to the
    optimizer, and again: none of it is lost."""
    rank = dist.get_rank()
    ends = []
    for changes in (True, False):
        model = build("cnn", torch.float64, seed=0)
        optimizer = optimizer_of(model, "sgd")
        flow = gf.attach(model, optimizer, "lazy:60KB")
        for step in range(14):
            if step in (3, 6, 7, 11) and changes:
                state = flow.state_dict()
                flow.close()
                codec = "int8:always:warmup=99" if step in (6, 7) else "csc:always:1"
                flow = gf.attach(model, optimizer, f"lazy:60KB+{codec}")
                flow.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, "cnn", rank, step, torch.float64).backward()
            optimizer.step()
        flow.close()
        ends.append(weights(model))
    return float((ends[0] - ends[1]).abs().max())


def test_momentum_moves_to_whoever_is_to_keep_it() -> None:
    assert all(difference < 1e-10 for difference in run_ranks(2, momentum_moves))


def what_waits_moves(before: str, after: str) -> float:
    """Six steps, then none but zeros under another codec, by way of a checkpoint. Whatever keeps momentum, weights are
    to go 1 / (1 - m) times as far as gradients say."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    generator, state = torch.Generator().manual_seed(dist.get_rank()), None
    gradients = torch.randn(6, 16, 16, generator=generator, dtype=torch.float64)
    start = model.weight.detach().clone()
    for codec, given in ((before, gradients), (after, torch.zeros(80, 16, 16, dtype=torch.float64))):
        with gf.attach(model, optimizer, f"lazy+{codec}") as flow:
            if state is not None:
                flow.load_state_dict(state)
            for gradient in given:
                optimizer.zero_grad()
                (model.weight * gradient).sum().backward()
                optimizer.step()
            state = flow.state_dict()
    expected = gradients.sum(0) / dist.get_world_size() / (1 - 0.5)
    dist.all_reduce(expected)
    return float((start - model.weight.detach() - expected).norm() / expected.norm())


def all_that_waits_moves() -> list[float]:
    codecs = ("topk:10%:warmup=0:always", "topk:10%:warmup=0:always:uncorrected", "powersgd:2:warmup=0:always")
    return [what_waits_moves(before, after) for before, after in itertools.permutations(codecs, 2)]


def test_what_waits_is_as_much_for_an_optimizer_that_keeps_momentum_as_for_one_that_does_not() -> None:
    for found in run_ranks(2, all_that_waits_moves):
        assert max(found) < 1e-9, found


def gathers(number: int) -> list[list[float]]:
    from gradientflow.compress import Gather
    from gradientflow.exchange import Exchange

    assert dist.group.WORLD is not None
    exchange = Exchange(dist.group.WORLD, torch.device("cpu"), 2, 30.0)
    values = torch.full((number,), float(dist.get_rank()))
    found = exchange.answer(Gather(values), lane=1)
    exchange.close()
    assert found is not None
    return [each.tolist() for each in found]


@pytest.mark.parametrize("world", [1, 3])
def test_a_gather_gives_what_each_rank_has(world: int) -> None:
    expected = [[float(rank)] * 5 for rank in range(world)]
    assert run_ranks(world, gathers, 5) == [expected] * world


class Heads(nn.Module):
    """A trunk, and a second head that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 8, 3, bias=False)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.trunk(inputs).tanh().mean((2, 3))
        found: torch.Tensor = self.first(hidden)
        return found + self.second(hidden) if both else found


def heads_loss(model: nn.Module, step: int, both: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.float64)
    found: torch.Tensor = model(inputs, both).square().mean()
    return found


def trains_heads(kind: str, recipe: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = Heads().double().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=kind == "unused")
    trained: nn.Module = DistributedDataParallel(model, find_unused_parameters=True) if recipe == "ddp" else model
    flow = None if recipe == "ddp" else gf.attach(model, optimizer, "lazy" if kind == "taken over" else recipe)
    for step in range(12):
        if kind == "taken over" and flow is not None and step == 5:
            flow.close()
            flow = gf.attach(model, optimizer, recipe)

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = heads_loss(trained, step, both=kind != "unused" or step % 4 == dist.get_rank() % 2)
            loss.backward()
            return loss

        if kind == "closure":
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()
    if flow is not None:
        flow.close()
    return weights(model)


def heads_equal_ddp(kind: str) -> float:
    return float((trains_heads(kind, "lazy+csc:always:1") - trains_heads(kind, "ddp")).abs().max())


@pytest.mark.parametrize("kind", ["closure", "unused", "taken over"])
def test_sending_everything_is_dense_training_with_closures_unused_tensors_and_other_memory_formats(kind: str) -> None:
    assert all(difference < 1e-10 for difference in run_ranks(2, heads_equal_ddp, kind))


def frozen_midway() -> float:
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    with gf.attach(model, optimizer, "lazy+csc:always:0.1:warmup=0"):
        for step in range(12):
            if step == 6:
                model.second.requires_grad_(False)
                before = weights(model.second)
            optimizer.zero_grad()
            heads_loss(model, step).backward()
            optimizer.step()
    return float((weights(model.second) - before).abs().max())


def test_what_is_frozen_midway_stays_where_it_is() -> None:
    assert run_ranks(2, frozen_midway) == [0.0, 0.0]


def exchanges_twice(momentum: float) -> tuple[str, float]:
    """Two exchanges before each step, of which the second does not use all: what was refused, else how far the law of
    what is given and left over is off."""
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    given = {name: torch.zeros_like(p).reshape(-1) for name, p in model.named_parameters()}
    with gf.attach(model, optimizer, "lazy+csc:always:0.2:warmup=0:chunk=4") as flow:
        for step in range(8):
            optimizer.zero_grad()
            for both in (True, False):
                loss = heads_loss(model, step + 100 * both, both)
                local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
                try:
                    loss.backward()
                except UsageError as error:
                    return str(error), 0.0
                for name, gradient in zip(given, local, strict=True):
                    given[name] += 0.0 if gradient is None else gradient.reshape(-1) / dist.get_world_size()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                given[name] -= parameter.grad.reshape(-1) / dist.get_world_size()
            optimizer.step()
        left_over = kept(flow.state_dict())["compression"]["codec"]["slots"]["residual"]
    missing = torch.cat([given[name] - left_over[name] for name in given])
    dist.all_reduce(missing)
    return "", float(missing.abs().max())


def test_adding_to_averages_loses_nothing_and_is_refused_if_momentum_would_be_added_twice() -> None:
    assert all(not words and missing < 1e-12 for words, missing in run_ranks(2, exchanges_twice, 0.0))
    assert all("no_sync()" in words for words, _ in run_ranks(2, refused_twice))


def refused_twice() -> tuple[str, float]:
    found = exchanges_twice(0.9)
    for thread in threading.enumerate():
        if thread.name == "gradientflow-beacon":
            thread.join(timeout=20.0)
    return found


def fails_in_step() -> list[tuple[float, float]]:
    """What the groups say after a step that an exception ended, and after close()."""
    model = build("mlp", torch.float32, seed=0)
    optimizer = optimizer_of(model, "sgd")
    group = optimizer.param_groups[0]
    found = []
    with gf.attach(model, optimizer, "lazy+csc:always:0.1") as flow:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, "mlp", dist.get_rank(), step, torch.float32).backward()
            failing = optimizer.register_step_pre_hook(lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            failing.remove()
            found.append((group["momentum"], group["weight_decay"]))
        optimizer.step()
        numel = weights(model).numel()
        assert flow.memory().remembered == 5 * 4 * numel, "two of gradients, two of velocities, one of weight decay's"
    return [*found, (group["momentum"], group["weight_decay"])]


def test_groups_are_the_users_after_an_exception_in_step() -> None:
    assert run_ranks(1, fails_in_step) == [[(0.9, 1e-2)] * 3]


def scaled_halves() -> float:
    """Relative distance between what fp16 gradients are on one rank and what compression makes of them."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with gf.attach(model, optimizer, "lazy+csc:always:1", scaler=scaler, master_weights=True):
        loss = model(torch.randn(8, 64).half()).float().mean() * 1e-5
        expected = torch.autograd.grad(loss * 65536.0, model.weight, retain_graph=True)[0].float()
        scaler.scale(loss).backward()
        found = optimizer.param_groups[0]["params"][0].grad
    return float((found - expected).norm() / expected.norm())


def test_gradients_that_only_a_scaler_keeps_from_vanishing_do_not_vanish() -> None:
    assert run_ranks(1, scaled_halves)[0] < 1e-3


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(1.0)
        return gradient


class SlowInBackward(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Slow.apply(inputs)
        return found


def slow_backward() -> None:
    linear = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    model = nn.Sequential(linear[0], SlowInBackward(), *linear[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gf.attach(model, optimizer, "wfbp-a2a:2+csc:always:1", deadline_s=0.3):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def test_a_backward_pass_may_take_longer_than_ranks_wait_for_each_other() -> None:
    run_ranks(1, slow_backward)


def loads_another_model(state: dict[str, Any]) -> str:
    model = build("mlp", torch.float32, seed=0)
    for name, values in kept(state)["compression"]["codec"]["slots"]["residual"].items():
        kept(state)["compression"]["codec"]["slots"]["residual"][name] = values[:-1]
    with gf.attach(model, optimizer_of(model, "sgd"), "wfbp+csc:always:0.1") as flow:
        try:
            flow.load_state_dict(state)
        except UsageError as error:
            return str(error)
    return ""


def saves_mlp() -> dict[str, Any]:
    model = build("mlp", torch.float32, seed=0)
    with gf.attach(model, optimizer_of(model, "sgd"), "lazy+csc:always:0.1") as flow:
        return flow.state_dict()


def test_a_state_of_another_model_is_refused_before_it_is_used() -> None:
    assert "another model" in run_ranks(1, loads_another_model, run_ranks(1, saves_mlp)[0])[0]


def loads_a_layer_that_is_gone() -> list[str]:
    """What is said of a state with one parameter too many, and of one whose names are all others."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    said = []
    with gf.attach(model, optimizer_of(model, "sgd"), "lazy+topk:10%:always") as flow:
        state = flow.state_dict()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradientflow").addHandler(handler)
    for other in (nn.Sequential(nn.Linear(8, 8)), nn.ModuleDict({"inner": model})):
        with gf.attach(other, optimizer_of(other, "sgd"), "lazy+topk:20%:always") as flow:
            try:
                flow.load_state_dict(state)
            except UsageError as error:
                said.append(str(error))
    return said


def test_what_waits_is_not_dropped_in_silence() -> None:
    ((gone, renamed),) = run_ranks(1, loads_a_layer_that_is_gone)
    assert "lost: 1.bias, 1.weight" in gone
    assert "another model: it has '0.bias'" in renamed and "'inner.0.bias'" in renamed


def joins(ours: bool) -> torch.Tensor:
    """Ranks with fewer inputs than others; averages are over those that have some."""
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    wrapper: DistributedDataParallel = (
        gf.DistributedDataParallel(model, recipe="lazy+csc:always:1", optimizer=optimizer)
        if ours
        else DistributedDataParallel(model)
    )
    with wrapper.join(divide_by_initial_world_size=False):
        for step in range(4 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            heads_loss(wrapper, step).backward()
            optimizer.step()
    if isinstance(wrapper, gf.DistributedDataParallel):
        wrapper.close()
    return weights(model)


def joins_as_ddp_does() -> float:
    return float((joins(True) - joins(False)).abs().max())


def test_ranks_that_run_out_of_inputs_do_not_change_what_momentum_others_have() -> None:
    assert all(difference < 1e-10 for difference in run_ranks(2, joins_as_ddp_does))


def changes_memory_format() -> float:
    """Half of a training in channels_last, the other half not, by way of a checkpoint."""
    ends = []
    for changes in (True, False):
        job = Job("lazy:60KB+csc:always:0.1:warmup=0", memory_format=torch.channels_last)
        job.run(range(6))
        if changes:
            state = job.state()
            job.flow.close()
            job = Job("lazy:60KB+csc:always:0.1:warmup=0", state, memory_format=torch.contiguous_format)
        job.run(range(6, 12))
        waits = kept(job.flow.state_dict())["compression"]["codec"]["slots"]
        ends.append(torch.cat([values for kind in waits for _, values in sorted(waits[kind].items())]))
        job.flow.close()
    # Chunks lie otherwise, so others are sent: what both have is momentum, and it does not depend on that.
    half = len(ends[0]) // 2
    return float((ends[0][half:] - ends[1][half:]).abs().max() / ends[1][half:].abs().max())


def test_a_checkpoint_fits_another_memory_format() -> None:
    assert all(difference < 1e-3 for difference in run_ranks(2, changes_memory_format))


def drop_in_with_a_scaler() -> tuple[bool, float]:
    """A step in which one rank overflows, under the drop-in: the scaler sees it on all ranks."""
    rank = dist.get_rank()
    model = build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6)
    wrapped = gf.DistributedDataParallel(
        model, recipe="lazy+csc:always:0.1:warmup=0", optimizer=optimizer, scaler=scaler
    )
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(wrapped, "mlp", rank, step, torch.float32)
        scaler.scale(loss * (float("inf") if step == 2 and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    found = bool(torch.isfinite(weights(model)).all()), scaler.get_scale()
    wrapped.close()
    return found


def test_the_drop_in_knows_a_scaler() -> None:
    assert run_ranks(2, drop_in_with_a_scaler) == [(True, 128.0)] * 2


def two_wrappers_around_one_model() -> list[str]:
    """What a step says with gradients of the one that compresses, of the other, and when the first is closed."""
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compressing = gf.DistributedDataParallel(model, recipe="lazy+csc:always:0.1", optimizer=optimizer)
    plain = gf.DistributedDataParallel(model, recipe="lazy")

    def step(wrapper: nn.Module, number: int) -> str:
        optimizer.zero_grad()
        heads_loss(wrapper, number).backward()
        try:
            optimizer.step()
        except UsageError as error:
            return str(error)
        return "" if all(group["momentum"] == 0.9 for group in optimizer.param_groups) else "momentum is gone"

    said = [step(compressing, 0), step(plain, 1), step(plain, 2)]
    compressing.close()
    said.append(step(plain, 3))
    plain.close()
    return said


def a_gate_beside_a_codec() -> bool:
    """Whether steps of the one are still put off after steps of the other, which has no momentum to correct."""
    model = Heads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gated = gf.DistributedDataParallel(model, recipe="flow", optimizer=optimizer, gradient_as_bucket_view=True)
    coded = gf.DistributedDataParallel(model, recipe="lazy+topk:always", optimizer=optimizer)
    for wrapper in (gated, coded, gated):
        for each in (gated, coded):
            each.flow.exchanging = False
        for step in range(8):
            optimizer.zero_grad()
            heads_loss(wrapper, step).backward()
            optimizer.step()
        wrapper.flow.synchronize()
    found = gated.flow.gated
    gated.close()
    coded.close()
    return found


def test_a_codec_without_momentum_shuts_no_other_wrappers_gate() -> None:
    assert run_ranks(2, a_gate_beside_a_codec) == [True, True]


def test_of_two_wrappers_only_the_one_that_keeps_momentum_may_use_it() -> None:
    for said in run_ranks(2, two_wrappers_around_one_model):
        assert ["keeps the optimizer's momentum" in words for words in said] == [False, True, True, False]
        assert not said[0] and not said[3]


def weighs() -> tuple[torch.Tensor, list[bool], bool]:
    """Weights; which messages go as they are in the end; and whether ranks had to be told."""
    model = build("cnn", torch.float32, seed=0)
    optimizer = optimizer_of(model, "sgd")
    with gf.attach(model, optimizer, "lazy:60KB+int8") as flow:
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, "cnn", dist.get_rank(), step, torch.float32).backward()
            optimizer.step()
        plan = flow.plan
    dense = [message.dense for message in plan.messages]
    return weights(model), dense, "go as they are" in plan.explain()


def test_ranks_agree_on_what_a_codec_pays_for() -> None:
    everyone = run_ranks(3, weighs)
    for ended, dense, said in everyone:
        assert torch.equal(ended, everyone[0][0]) and dense == everyone[0][1]
        assert said == any(dense)


def change_plan(flow: gf.Flow, *, dense: bool) -> None:
    """From the next step on all messages go as they are, or none does."""
    state = flow.state_dict()
    plan = Plan.model_validate_json(state["plan"]).compressed_if(lambda message: not dense)
    flow.load_state_dict(state | {"plan": plan.model_dump_json()})


def has_momentum(flow: gf.Flow, optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
    """The codec; the optimizer."""
    slots = kept(flow.state_dict())["compression"]["codec"]["slots"]
    return "momentum" in slots, any("momentum_buffer" in state for state in optimizer.state.values())


def gives_momentum_back(kind: str) -> tuple[float, list[tuple[bool, bool]]]:
    """Compression that sends everything, then no message that is worth it, then some again: the difference to DDP."""
    rank, seen = dist.get_rank(), []
    model = build("cnn", torch.float64, seed=rank).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_of(model, kind)
    with gf.attach(model, optimizer, "lazy:60KB+csc:always:1") as flow:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            if step in (4, 16):
                change_plan(flow, dense=step == 4)
            optimizer.zero_grad()
            loss_of(model, "cnn", rank, step, torch.float64).backward()
            optimizer.step()
            schedule.step()
            if step in (3, 14, 24):
                seen.append(has_momentum(flow, optimizer))
    expected, _ = train("ddp", kind)
    return float((weights(model) - expected).abs().max()), seen


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "groups"])
def test_momentum_is_the_optimizers_own_while_nothing_is_compressed(kind: str) -> None:
    for difference, seen in run_ranks(2, gives_momentum_back, kind):
        assert difference < 1e-10
        assert seen == [(True, False), (False, True), (True, False)]


def interrupted(at: int, how: str) -> tuple[torch.Tensor, bool]:
    """Weights after some steps, of which all but the first go as they are; whether momentum is the optimizer's by then.
    At one of them something happens that is to leave no trace."""
    recipe = "lazy:60KB+topk:always:0.1:warmup=0"
    job = Job(recipe)
    job.run(range(2))
    change_plan(job.flow, dense=True)
    for step in range(2, 9):
        if step == at and how == "inf":
            job.optimizer.zero_grad()
            loss = loss_of(job.model, "cnn", dist.get_rank(), 99, torch.float32)
            (loss * (float("inf") if dist.get_rank() else 1.0)).backward()
            job.optimizer.step()
        if step == at and how == "checkpoint":
            state = job.state()
            job.flow.close()
            job = Job(recipe, state)
        if step == at and how == "back":  # some steps on, and back to where it was
            state = copy.deepcopy(job.state())
            job.run(range(40, 46))
            job.model.load_state_dict(state["model"])
            if state["optimizer"]["state"]:  # else momentum is all in the flow's
                job.optimizer.load_state_dict(state["optimizer"])
            job.flow.load_state_dict(state["flow"])
        job.run(range(step, step + 1))
    codecs, optimizers = has_momentum(job.flow, job.optimizer)
    job.flow.close()
    return weights(job.model), optimizers and not codecs


def all_interrupted(how: str) -> bool:
    expected, handed_back = interrupted(0, "")
    found = [interrupted(at, how) for at in range(3, 7)]
    return handed_back and all(torch.equal(ended, expected) and same for ended, same in found)


@pytest.mark.parametrize("how", ["inf", "checkpoint", "back"])
def test_nothing_is_lost_while_momentum_is_given_back(how: str) -> None:
    assert run_ranks(2, all_interrupted, how) == [True] * 2


def races(kind: str) -> tuple[float, set[tuple[bool, bool]], bool, str]:
    """A codec that sends everything, and none, in turn: the difference to DDP; whether messages went as they are, and
    momentum was the optimizer's own; whether the state held what is tried, as long as it was; what was chosen."""
    # Whatever prices say, and in two rounds.
    candidates.FAR, candidates.COULD_PAY, trials.FIRST_DROP = 1e9, -1e9, 1e9
    tuning.CODECS = tuning.CODECS._replace(rounds=2)
    rank, seen, holds = dist.get_rank(), set(), []
    model = build("cnn", torch.float64, seed=rank)
    optimizer = optimizer_of(model, kind)
    with gf.attach(model, optimizer, "lazy:60KB+csc:1:warmup=0") as flow:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, RACED)
        for step in range(RACED):
            optimizer.zero_grad()
            loss_of(model, "cnn", rank, step, torch.float64).backward()
            optimizer.step()
            schedule.step()
            holds.append(step < 3 or ("rivals" in flow.state_dict()) == flow.is_trying)
            if flow.is_trying:
                seen.add((all(message.dense for message in flow.plan.messages), has_momentum(flow, optimizer)[1]))
        assert not flow.is_trying and "a race chose" in flow.plan.why
        chosen = flow.plan.digest
    expected, _ = train("ddp", kind, RACED)
    return float((weights(model) - expected).abs().max()), seen, all(holds), chosen


@pytest.mark.parametrize("kind", ["sgd", "nesterov"])
def test_a_race_with_a_codec_and_without_is_dense_training_if_the_codec_sends_everything(kind: str) -> None:
    everyone = run_ranks(2, races, kind)
    assert len({chosen for *_, chosen in everyone}) == 1
    for difference, seen, holds, _ in everyone:
        assert difference < 1e-10 and holds
        assert seen >= {(True, True), (False, False)}


def stops_in_a_race() -> tuple[bool, bool, bool]:
    """Whether another job races on from a state saved in the middle of a race; a third, of that which has won, does
    not; nor does one that is to compress always."""
    candidates.FAR, candidates.COULD_PAY, trials.FIRST_DROP = 1e9, -1e9, 1e9
    tuning.CODECS = tuning.CODECS._replace(rounds=1)
    first = Job("lazy:60KB+int8")
    first.run(range(12))
    second = Job("lazy:60KB+int8", first.state())
    first.flow.close()
    second.run(range(12, 14))
    races_on = second.flow.is_trying
    second.run(range(14, 60))
    plan, races_no_more = second.flow.plan, not second.flow.is_trying
    third = Job("lazy:60KB+int8", second.state())
    second.flow.close()
    third.run(range(60, 80))
    same = third.flow.plan.digest == plan.digest and not third.flow.is_trying
    third.flow.close()
    always = Job("lazy:60KB+int8:always")
    always.run(range(5))
    raced = always.flow.is_trying
    always.flow.close()
    return races_on and races_no_more, same, raced


def test_what_a_race_has_chosen_is_kept_and_who_stops_before_races_again() -> None:
    assert run_ranks(2, stops_in_a_race) == [(True, True, False)] * 2
