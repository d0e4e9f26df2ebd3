"""Where time went, from traces whose every second is known."""

from __future__ import annotations

import pytest

from gradientflow.account import accounts, alone_s, straggler
from gradientflow.cost.evaluate import evaluate
from gradientflow.cost.table import CostTable, Line, Priced
from gradientflow.lab.workloads import workload
from gradientflow.plan import NATIVE
from gradientflow.recipe import as_recipe
from gradientflow.trace import MAIN, Span, Trace
from gradientflow.tune.explain import Situation, explain, predicted_gains
from gradientflow.tune.notes import Notes, Race, Tried


def rank(number: int, compute_s: float, *, first: float = 0.0, num_steps: int = 6, epoch_s: float = 0.0) -> Trace:
    """Steps of 10 s: forward 1 s, backward the rest of computing, a message of 1 s that begins at 7 s at the earliest,
    an optimizer of half a second, and half a second until the next step."""
    spans = []
    for step in range(num_steps):
        at_s = first + 10.0 * step
        spans.append(Span("forward", "forward", MAIN, at_s, at_s + 1, step))
        spans.append(Span("backward", "backward", MAIN, at_s + 1, at_s + compute_s, step))
        spans.append(Span("message", "all", "lane 0", at_s + compute_s, at_s + 9, step, {"message": 0, "nbytes": 8}))
        spans.append(Span("exposed", "exposed", MAIN, at_s + compute_s, at_s + 9, step))
        spans.append(Span("step", "step", MAIN, at_s, at_s + 9.5, step))
    return Trace(number, epoch_s, tuple(spans))


def test_parts_add_up_to_the_whole() -> None:
    [found] = accounts([rank(0, 6.0)])
    assert (found.num_steps, found.last) == (5, 5), "without the first"
    assert found.compute_s == pytest.approx(6) and found.exposed_s == pytest.approx(3)
    assert found.rest_s == pytest.approx(0.5)
    parts = found.compute_s + found.exposed_s + found.rest_s + found.between_s
    assert parts == pytest.approx(found.iteration_s) and not found.sees_others


def test_exposed_seconds_are_the_traces() -> None:
    trace = evaluate(workload("resnet-50", compute_s=0.1), as_recipe("lazy").plan(workload("resnet-50"), 1),
                     Line(alpha_s=1e-3, beta_s_per_byte=1e-9)).trace(12)  # fmt: skip
    [found] = accounts([trace])
    in_trace_s = sum(span.duration_s for span in trace.of_kind("exposed") if span.step)
    assert found.exposed_s * found.num_steps == pytest.approx(in_trace_s, rel=0.05) and in_trace_s > 0


def test_waits_inside_a_pass_are_not_computing() -> None:
    spans = (
        Span("forward", "forward", MAIN, 0.0, 4.0, 1), Span("exposed", "a stage", MAIN, 1.0, 2.0, 1),
        Span("update", "a stage", MAIN, 2.0, 2.5, 1), Span("backward", "backward", MAIN, 4.0, 8.0, 1),
        Span("step", "step", MAIN, 0.0, 8.0, 1),
    )  # fmt: skip
    [found] = accounts([Trace(0, 0.0, spans)])
    assert (found.compute_s, found.exposed_s, found.rest_s) == (6.5, 1.0, 0.5)


def test_waiting_for_a_slow_rank_is_not_waiting_for_the_network() -> None:
    quick, slow = rank(0, 6.0), rank(1, 8.0)
    mine, others = accounts([quick, slow])
    assert mine.sees_others and mine.behind_s == pytest.approx(2) and mine.exposed_s == pytest.approx(3)
    assert others.behind_s == 0 and others.exposed_s == pytest.approx(1)
    found = straggler([quick, slow])
    assert found and (found.rank, found.waited_s) == (1, pytest.approx(2)) and found.factor == pytest.approx(8 / 6)
    assert straggler([rank(0, 6.0), rank(1, 6.1)]) is None


def test_clocks_need_not_agree() -> None:
    situation = Situation(workload("alexnet"), as_recipe("lazy").plan(workload("alexnet"), 1), as_recipe("lazy"), 2)
    words = explain(situation, [rank(0, 6.0), rank(1, 8.0, epoch_s=1e6)])
    assert "rank 1 computes 1.33 times as long" in words and "wait 2000.0 ms a step for it" in words


def test_steps_of_a_race_are_left_out() -> None:
    trace = rank(0, 6.0, num_steps=20)
    trial = Span("trial", "lazy", MAIN, 0.0, 1.0, 9)
    [found] = accounts([trace._replace(spans=(*trace.spans, trial))])
    assert (found.num_steps, found.last) == (9, 19), "nor is the step that lays memory out anew counted"


def test_messages_that_share_the_link_are_told_apart() -> None:
    one = Span("message", "a", "lane 0", 0.0, 4.0, 1, {"nbytes": 10})
    other = Span("message", "b", "lane 1", 2.0, 6.0, 1, {"nbytes": 20})
    assert alone_s([one, other]) == [(10, 3.0), (20, 3.0)]


def situation(rate: float, alpha_s: float = 1e-3, recipe: str = "auto") -> Situation:
    profile = workload("resnet-50", compute_s=0.1)
    sizes = [2**power for power in range(12, 25, 2)]
    table = CostTable(points=tuple((size, alpha_s + size * 8 / rate) for size in sizes))
    price = Priced(ways={NATIVE: table}, by_size=True, touch_s_per_byte=1e-11)
    tried = tuple(Tried(recipe=name, predicted_s=0.1, measured_s=seconds) for name, seconds in (
        ("lazy", 0.2), ("merge", 0.1)
    ))  # fmt: skip
    race = Race(first=3, end=30, why="start", tried=tried, chosen=1, lost_s=1.5)
    notes = Notes(
        world=4, num_lanes=2, computes_s=(0.1, 0.1, 0.1, 0.2), price=price, races=(race,), lost_s=1.5, elapsed_s=55
    )
    plan = as_recipe("merge").plan(profile, 2, price.cost())
    return Situation(profile, plan, as_recipe(recipe), 4, notes)


@pytest.mark.parametrize(("rate", "alpha_s", "first"), [(1e9, 1e-6, "csc"), (1e12, 5e-3, "half the start-up")])
def test_what_would_help_is_what_is_waited_for(rate: float, alpha_s: float, first: str) -> None:
    now_s, gains = predicted_gains(situation(rate, alpha_s), situation(rate, alpha_s).notes.price.cost())
    assert all(0 <= gain.seconds <= now_s for gain in gains) and len(gains) == 5
    assert first in max(gains, key=lambda gain: gain.seconds).what


def test_twice_the_bandwidth_is_worth_half_of_what_is_exposed_where_nothing_is_hidden() -> None:
    given = situation(1e7, 1e-9)
    _, gains = predicted_gains(given, given.notes.price.cost())
    wire_s = given.profile.nbytes * 8 / 1e7
    assert gains[0].what == "twice the bandwidth" and gains[0].seconds == pytest.approx(wire_s / 2, rel=0.02)


def test_an_explanation_is_one_screen_and_says_all_of_it() -> None:
    words = explain(situation(1e9), [rank(0, 6.0, num_steps=100)])
    assert len(words.splitlines()) <= 24 and max(map(len, words.splitlines())) <= 160
    for part in ("auto: merge", "rank 3 computes 2.00 times", "merge, 100.0 ms, over lazy 200.0 ms (-50 %)",
                 "lost 1.50 s to trials, 0.2 % of 100 steps", "twice the bandwidth"):  # fmt: skip
        assert part in words, words


def test_what_tuning_cost_is_a_share_of_all_seconds_of_training() -> None:
    """55 s until the race was over, with what it took to time messages, and two steps since."""
    assert "1.50 s to trials, 2.0 % of 32 steps" in explain(situation(1e9), [rank(0, 6.0, num_steps=32)])


def test_without_a_step_there_is_little_to_say() -> None:
    assert "no step is over" in explain(situation(1e9), [Trace(0, 0.0, ())])
