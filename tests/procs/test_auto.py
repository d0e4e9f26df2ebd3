"""`auto`: plans race in a running training, whose results stay stock DDP's through every switch."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf
from gradientflow.cost.table import Paying
from gradientflow.runtime import tuning
from gradientflow.tune import candidates, memory, trials
from gradientflow.tune.explain import Situation
from helpers import run_ranks
from models import build, loss_of, pay_for_any_race

STEPS = 62


def train(
    name: str, optimizer: str, dtype: torch.dtype, recipe: str, clip: bool
) -> tuple[list[torch.Tensor], str, int]:
    """Weights after every step, what was chosen, and how many plans have run."""
    pay_for_any_race()
    rank = dist.get_rank()
    model = build(name, dtype, seed=0)
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    ours = kinds[optimizer](model.parameters())
    flow = None if recipe == "ddp" else gf.attach(model, ours, recipe)
    wrapped = DistributedDataParallel(model) if flow is None else model
    found, plans = [], set()
    for step in range(STEPS):
        ours.zero_grad()
        loss_of(wrapped, name, rank, step, dtype).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ours.step()
        if flow is not None:
            plans.add(flow.plan.digest)
        found.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]))
    chosen = "" if flow is None else flow.plan.explain()
    if flow is not None:
        flow.close()
    return found, chosen, len(plans)


@pytest.mark.parametrize(("world", "name", "optimizer", "clip"), [
    (2, "cnn", "sgd", False), (2, "transformer", "adamw", True), (3, "mlp", "adamw", False),
])  # fmt: skip
def test_results_are_ddps_through_every_switch(world: int, name: str, optimizer: str, clip: bool) -> None:
    dtype = torch.float32 if world == 2 else torch.float64
    ours = run_ranks(world, train, name, optimizer, dtype, "auto", clip)
    theirs = run_ranks(world, train, name, optimizer, dtype, "ddp", clip)
    assert ours[0][2] >= 4, "several plans have run"
    assert len({chosen for _, chosen, _ in ours}) == 1 and ours[0][1].startswith("auto chose ")
    assert "predicted" in ours[0][1]
    for (weights, _, _), (reference, _, _) in zip(ours, theirs, strict=True):
        for step, (mine, other) in enumerate(zip(weights, reference, strict=True)):
            if world == 2 and not clip:
                assert torch.equal(mine, other), step
            else:
                torch.testing.assert_close(
                    mine, other, rtol=1e-5 if world == 2 else 1e-10, atol=1e-6 if clip else 1e-10
                )
        assert torch.equal(weights[-1], ours[0][0][-1])


class Recalled(NamedTuple):
    weights: list[torch.Tensor]
    situation: Situation
    explained: str
    settled_at: int
    warnings: list[str]


def train_with_memory(cache: Path, steps: int, tolerance: float) -> Recalled:
    """On a cache directory, with a check that always or never holds: no test is to depend on seconds."""
    os.environ |= {"XDG_CACHE_HOME": str(cache), "GRADIENTFLOW_CACHE": "on"}
    memory.TOLERANCE = tolerance
    pay_for_any_race()
    heard = Heard()
    logging.getLogger("gradientflow").addHandler(heard)
    rank, model = dist.get_rank(), build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    weights, settled_at = [], 0
    with gf.attach(model, optimizer, "auto") as flow:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, "mlp", rank, step, torch.float32).backward()
            optimizer.step()
            settled_at = settled_at or (step if flow._situation().notes.races else 0)
            weights.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]))
        return Recalled(weights, flow._situation(), flow.explain(), settled_at, heard.words)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "remembered" in record.getMessage():
            self.words.append(record.getMessage())


def test_what_has_won_is_recalled_and_checked(tmp_path: Path) -> None:
    always, never = 1e12, 1.0
    first = run_ranks(2, train_with_memory, tmp_path, STEPS, always)
    [path] = (tmp_path / "gradientflow" / "auto").iterdir()
    kept = memory.Remembered.read(path)
    race = first[0].situation.notes.races[0]
    assert race.why == "start" and kept.candidate.recipe == race.winner.recipe
    assert "over" in first[0].explained and "lost" in first[0].explained and "twice the bandwidth" in first[0].explained

    again = run_ranks(2, train_with_memory, tmp_path, 8, always)
    assert [one.settled_at for one in again] == [5, 5] and again[0].situation.notes.races[0].why == "remembered"
    assert again[1].situation.plan.messages == kept.candidate.plan.messages
    assert "remembered from an earlier run" in again[0].explained

    changed = run_ranks(2, train_with_memory, tmp_path, 16, never)
    assert not changed[0].settled_at and changed[0].situation.notes.doing.startswith("racing lazy")

    path.write_text(path.read_text().replace('"stop": ', '"stop": -'))
    hostile = run_ranks(2, train_with_memory, tmp_path, 6, always)
    assert not hostile[0].settled_at and len(hostile[0].warnings) == 1 and not hostile[1].warnings

    path.write_text(re.sub(r'"predicted_s": ?[^,}]+', '"predicted_s": NaN', kept.model_dump_json()))
    absurd = run_ranks(2, train_with_memory, tmp_path, 6, always)
    path.write_text(kept.model_copy(update={"candidate": kept.candidate.model_copy(update={"recipe": "lazy-ps:3"})})
                    .model_dump_json())  # fmt: skip
    foreign = run_ranks(2, train_with_memory, tmp_path, 6, always)
    for found in (absurd, foreign):
        assert not found[0].settled_at and len(found[0].warnings) == 1
    for ours in (again, changed, hostile, absurd, foreign):  # through whatever switches, and whatever is in a file
        for mine, reference in zip(ours, first, strict=True):
            assert all(map(torch.equal, mine.weights, reference.weights))


def resume(among_gates: bool) -> tuple[int, str, str]:
    """From a state of the middle of a race, with a gated plan at its turn, or of its end. Returns how many races there
    were afterwards, and what is said."""
    pay_for_any_race()
    candidates.QUICK, candidates.HOPELESS, tuning.MOST = ("lazy",), math.inf, 12
    rank, model = dist.get_rank(), build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def trained(until: Callable[[gf.Flow], bool], most: int) -> bool:
        for step in range(most):
            optimizer.zero_grad()
            loss_of(model, "mlp", rank, step, torch.float32).backward()
            optimizer.step()
            if until(flow):
                return True
        return False

    with gf.attach(model, optimizer, "auto") as flow:
        trained(lambda flow: flow.is_trying, 8)
        assert trained(lambda flow: flow.gated if among_gates else not flow.is_trying, 400)
        assert flow.is_trying == among_gates
        state = flow.state_dict()
    with gf.attach(model, optimizer, "auto") as flow:
        flow.load_state_dict(state)
        trained(lambda flow: flow.is_trying, 8)
        races = flow.is_trying
        trained(lambda flow: not flow.is_trying, 400 if races else 12)
        return races, flow.explain(), flow._situation().notes.races[-1].winner.recipe


def test_a_race_that_was_saved_in_its_midst_begins_again() -> None:
    for races, words, winner in run_ranks(2, resume, True):
        assert races and f"chosen: {winner}" in words


def test_a_race_that_was_over_is_told_of() -> None:
    for races, words, winner in run_ranks(2, resume, False):
        assert not races and f"chosen: {winner}" in words


def plans_of_a_race() -> tuple[list[bool], int]:
    """Step by step, whether what runs is the plan whose turn it is; and how many there were. Backward yields gradients
    in the order of the first guess, so the default is what runs when the race begins."""
    pay_for_any_race()
    trials.FIRST_DROP = trials.DROP = 1e9  # all of them have several turns
    rank, model = dist.get_rank(), build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    as_told, seen = [], set()
    with gf.attach(model, optimizer, "auto") as flow:
        for step in range(STEPS):
            races = flow._planning._tuning
            was_racing = races.is_racing
            optimizer.zero_grad()
            loss_of(model, "mlp", rank, step, torch.float32).backward()
            if was_racing and races.is_racing:
                as_told.append(flow.plan == races.plan_at(step))
                seen.add(flow.plan.digest)
            optimizer.step()
    return as_told, len(seen)


def test_in_a_race_the_plan_runs_whose_turn_it_is() -> None:
    for as_told, num_plans in run_ranks(2, plans_of_a_race):
        assert len(as_told) > 30 and all(as_told) and num_plans > 2


def train_without_a_budget() -> tuple[str, bool, tuple[str, ...], bool]:
    """As if steps took no time, and soon did. What is said then, whether a state is for good; which recipes raced when
    one may cost anything, and whether it was put off still."""
    trials.SHARE = 1e-6
    trials.Budget.affordable_in = lambda *given: 0
    rank, model = dist.get_rank(), build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gf.attach(model, optimizer, "auto") as flow:
        for step in range(tuning.PATIENCE + 70):
            if step == 10:
                words, settled = flow.explain(), flow.state_dict()["settled"]
                pay_for_any_race()
            optimizer.zero_grad()
            loss_of(model, "mlp", rank, step, torch.float32).backward()
            optimizer.step()
        notes = flow._situation().notes
        return words, settled, tuple(map(str, notes.races[0].tried)), bool(notes.doing)


def test_a_race_that_cannot_be_paid_for_waits() -> None:
    for words, settled, tried, is_put_off in run_ranks(2, train_without_a_budget):
        assert "auto is waiting for step 103" in words and not settled
        assert len(tried) > 2 and tried[0] == "lazy" and not is_put_off


def train_lossy(margin: float, is_affordable: bool) -> tuple[torch.Tensor, list[bool], int, str]:
    """With a codec that pays always, or never. Returns weights, which messages go as they are, how often the guard
    looked, and what was said."""
    Paying.MARGIN = margin
    trials.SHARE = 1e-6
    if is_affordable:
        pay_for_any_race()
    rank, model = dist.get_rank(), build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with gf.attach(model, optimizer, "auto", allow="lossy") as flow:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, "mlp", rank, step, torch.float32).backward()
            optimizer.step()
        dense = [message.dense for message in flow.plan.messages]
        weights = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        return weights, dense, len(flow.trace().of_kind("guard")), flow.explain()


@pytest.mark.parametrize(
    ("margin", "is_affordable", "goes_as_it_is"),
    [(-1e9, True, False), (1.0, True, True), (-1e9, False, True)],
    ids=["pays", "does not", "not known yet"],
)
def test_lossy_recipes_are_under_the_guard_and_only_where_they_pay(
    margin: float, is_affordable: bool, goes_as_it_is: bool
) -> None:
    (mine, dense, num_looks, words), (others, *_) = run_ranks(2, train_lossy, margin, is_affordable)
    assert torch.equal(mine, others) and torch.isfinite(mine).all()
    assert set(dense) == {goes_as_it_is} and num_looks and "auto+topk:1%:sampled:guard=2%" in words
    if goes_as_it_is:
        weights, *_ = run_ranks(2, train, "mlp", "sgd", torch.float32, "ddp", False)[0]
        torch.testing.assert_close(mine, weights[-1], rtol=1e-4, atol=1e-6)


def test_lossy_is_for_auto() -> None:
    model = build("mlp", torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(gf.UsageError, match='is for "auto"'):
        gf.attach(model, optimizer, "lazy", allow="lossy")
    with pytest.raises(gf.UsageError, match="one of lossless, lossy"):
        gf.attach(model, optimizer, "auto", allow="all")
