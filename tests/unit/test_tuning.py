"""`auto` by itself, on a clock that a test moves: a thousand steps, what trials cost in them, and what is undone."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gradientflow.cost.table import Best, Line, Paying
from gradientflow.plan import NATIVE, Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import as_recipe
from gradientflow.runtime.pricing import TooDear
from gradientflow.runtime.tuning import ANEW, BACK, CODECS, NONE, PATIENCE, Tuning
from gradientflow.trace import Recorder
from gradientflow.tune.candidates import MOST, Candidate, candidates, rivals
from gradientflow.tune.notes import Notes
from gradientflow.tune.trials import PRICING, SHARE, WINDOW, Budget, longest

#: Few tensors: plans of them are made quickly, and differ.
PROFILE = Profile(tensors=tuple(
    TensorProfile(name=f"{number}", shape=(2**16 * (1 + number),), forward_order=9 - number, forward_s=2e-3,
                  backward_s=4e-3)
    for number in range(10)
))  # fmt: skip
COST = Best({
    NATIVE: Line(alpha_s=3e-3, beta_s_per_byte=1e-8), "ring": Line(alpha_s=1e-3, beta_s_per_byte=1e-8)
})  # fmt: skip
#: A codec that gains a fifth of each message.
PAYING = Paying(Line(alpha_s=8e-4, beta_s_per_byte=8e-9), COST.ways["ring"], COST.ways["ring"])
DEFAULT_PLAN = as_recipe("lazy").plan(PROFILE, 2)
#: Steps before the race, of a second each.
BEFORE = 3

#: Seconds of a step, given the plan that it is by and its number.
Took = Callable[[Plan, int], float]


class Job:
    """One rank, which is all ranks."""

    def __init__(self, took: Took, priced_s: float = 1.0) -> None:
        self.now_s, self.step, self.written = 0.0, 0, list[Notes]()
        recorder = Recorder(clock=lambda: self.now_s)
        self.recorder = recorder
        self.tuning = Tuning(recorder, note=self.written.append)
        control = SimpleNamespace(gather=lambda text, why: [text], from_rank=lambda rank, text, why: text)
        self.exchange: Any = SimpleNamespace(
            rank=0, world=1, num_lanes=2, backend="gloo", patterns=("ring",), control=control
        )
        self._took, self._priced_s = took, priced_s
        self._began_s = 0.0
        self.num_races = 0
        self.spent_s = self.raced_s = 0.0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._begin()
            plan = self.tuning.plan_at(self.step) if self.tuning.is_on else None
            took_s = self._took(plan, self.step) if plan else 1.0
            self.now_s += took_s
            self.spent_s += took_s
            self.step += 1
            if self.tuning.is_on and self.tuning.wish(self.step) and self.tuning.heed(self.exchange, self.step):
                self._race()

    def _begin(self) -> None:
        if self.tuning.is_on:
            assert not self.tuning.step_began(self.exchange, self.step, self._began_s, self.now_s)
        elif self.step == BEFORE:
            self._race()
        self._began_s = self.now_s

    def _race(self) -> None:
        budget, began_s = self.tuning.budget(self.exchange, self.now_s / max(1, self.step)), self.now_s
        self.now_s += self._priced_s
        self.spent_s += self._priced_s
        self.num_races += 1
        self.tuning.begin(
            self.exchange, 0, PROFILE, COST, self.step, budget, began_s, gated=False, whole=False
        )  # fmt: skip


def by_schedule(**seconds: float) -> Took:
    return lambda plan, step: next((s for name, s in seconds.items() if plan.schedule.startswith(name)), 2.0)


def test_a_thousand_steps_lose_at_most_two_in_a_hundred() -> None:
    """Timing messages takes two steps, others take up to half as long again."""
    job = Job(by_schedule(lazy=1.4, merge=1.0, flow=1.5), priced_s=2.0)
    job.run(1000)
    notes = job.tuning.notes
    assert notes.races[-1].winner.recipe.startswith("merge") and job.num_races == 1
    ideal_s = 1000 * 1.0
    assert job.spent_s / ideal_s - 1 <= SHARE
    assert notes.lost_s == pytest.approx(job.spent_s - ideal_s, abs=0.5), "what is reported is what was lost"
    assert notes.races[0].end <= BEFORE + longest(4) <= 60


def test_hopeless_candidates_do_not_cost_more_than_a_round() -> None:
    job = Job(by_schedule(lazy=1.0, merge=5.0, flow=5.0), priced_s=1.0)
    job.run(1000)
    assert job.tuning.notes.races[-1].winner.recipe == "lazy"
    first_round = sum(plan_s - 1 for plan_s in (5.0, 5.0, 5.0)) * 3 + 1.0
    assert job.tuning.notes.lost_s <= first_round + 0.1


def test_a_winner_that_does_not_keep_its_promise_is_undone() -> None:
    won_at: list[int] = []

    def took(plan: Plan, step: int) -> float:
        if plan.schedule.startswith("merge"):
            return 0.9 if not won_at else 1.2
        return 1.0 if plan.schedule.startswith("lazy") else 2.0

    job = Job(took)
    while not job.tuning.notes.races:
        job.run(1)
    won_at.append(job.step)
    assert job.tuning.notes.races[-1].winner.recipe.startswith("merge")
    job.run(WINDOW + 1)
    [race] = job.tuning.notes.races
    assert race.undone and race.winner.recipe.startswith("lazy") and job.num_races == 1
    plan = job.tuning.plan_at(job.step)
    assert plan.schedule.startswith("lazy") and "given up" in plan.why and job.tuning.wish(job.step) == NONE
    job.run(3 * WINDOW)
    assert job.tuning.plan_at(job.step) == plan, "and stays so"


def test_drift_is_answered_and_what_runs_is_the_one_to_beat() -> None:
    slow_from = 400

    def took(plan: Plan, step: int) -> float:
        quick, slow = {"lazy": (1.2, 3.0), "merge": (1.0, 2.5)}.get(plan.schedule.split("-")[0], (1.3, 1.5))
        return quick if step < slow_from else slow

    job = Job(took)
    job.run(slow_from)
    assert job.tuning.notes.races[-1].winner.recipe.startswith("merge") and job.num_races == 1
    job.run(50)
    assert job.num_races == 2
    race = job.tuning.notes.races[-1]
    assert race.why == "drift" and race.tried[0].recipe.startswith("merge"), "hysteresis: it has to be beaten"
    assert not race.winner.recipe.startswith("merge") and race.end - slow_from <= 50
    assert job.tuning.notes.lost_s <= SHARE * max(job.now_s, 1000 * 1.5) + 10


def put_off(job: Job, price_s: float, spent_s: float) -> None:
    budget, began_s = job.tuning.budget(job.exchange, 0.01), job.now_s
    job.now_s += spent_s
    job.tuning.put_off(job.exchange, 0, PROFILE, DEFAULT_PLAN, budget, TooDear(price_s), job.step, began_s)


@pytest.mark.parametrize("first", [BEFORE, 50_000], ids=["at the beginning", "of a job that goes on"])
def test_a_race_that_is_too_dear_is_put_off_until_it_is_not(first: int) -> None:
    """Steps of 10 ms; timing messages would take a second, and 50 ms have gone by."""
    job = Job(lambda plan, step: 0.01)
    job.now_s, job.step = 0.03, first
    budget = job.tuning.budget(job.exchange, 0.01)
    assert budget == Budget(may_s=pytest.approx(SHARE * 1000 * 0.01), step_s=0.01, elapsed_s=0.03)
    put_off(job, price_s=1.0, spent_s=0.05)
    assert job.tuning.is_put_off and job.tuning.is_on and not job.tuning.is_racing
    assert job.tuning.plan_at(first).schedule == "lazy" and "waiting for step" in job.written[-1].doing
    assert job.tuning.notes.lost_s == pytest.approx(0.05)
    while not job.num_races:
        job.run(1)
        assert job.step < first + 20_000
    due_s = (1.0 / PRICING + 0.05) / SHARE
    assert (job.step - first) * 0.01 == pytest.approx(due_s, rel=1e-3), "by then it costs what it may"
    job.run(100)
    [race] = job.tuning.notes.races
    assert not job.tuning.is_put_off and len(race.tried) > 1 and race.why == "start"


def test_what_has_won_runs_on_where_another_race_is_too_dear() -> None:
    job = Job(by_schedule(lazy=1.4, merge=1.0, flow=1.5))
    job.run(300)
    plan = job.tuning.plan_at(job.step)
    put_off(job, price_s=20.0, spent_s=0.1)
    assert job.tuning.plan_at(job.step) == plan and not job.tuning.is_put_off
    assert "waiting for step" in job.tuning.notes.doing and not job.tuning.is_due(job.step + 10**6)
    job.run(3000)
    assert not job.tuning.notes.doing and job.num_races == 1, "steps are what they were"


def test_what_was_loaded_runs_on_where_another_race_is_too_dear() -> None:
    job = Job(by_schedule(lazy=1.4, merge=1.0, flow=1.5))
    job.run(300)
    [race] = job.tuning.notes.races
    resumed = Job(lambda plan, step: 0.01)
    resumed.tuning.remember(race)
    resumed.now_s = 1.0
    put_off(resumed, price_s=20.0, spent_s=0.1)
    assert not (resumed.tuning.is_on or resumed.tuning.is_put_off) and resumed.tuning.notes.races == (race,)


@pytest.mark.parametrize(("every", "said", "drifts"), [(3, True, False), (3, False, True), (1, True, True)])
def test_what_is_done_between_steps_is_no_drift(every: int, said: bool, drifts: bool) -> None:
    """Some steps stand before an evaluation of ten seconds; if all do, that is what steps take now."""
    job = Job(by_schedule(lazy=1.4, merge=1.0, flow=1.5))
    job.run(60)
    for _ in range(300 // every):
        job.run(every)
        job.now_s += 10.0
        if said:
            job.tuning.stand_apart()
    assert (job.num_races > 1) is drifts


def test_where_there_is_no_rival_another_race_may_come() -> None:
    """No time for any plan but the default; when steps have paid for more, there is."""
    job = Job(by_schedule(lazy=1.0, merge=0.8, flow=0.9))
    job.step = BEFORE
    nothing = Budget(0.0, 1.0, elapsed_s=3.0)
    job.tuning.begin(job.exchange, 0, PROFILE, COST, BEFORE, nothing, 0.0, gated=False, whole=False)
    assert not job.tuning.is_racing and not job.tuning.is_put_off
    job.run(PATIENCE - 1)
    assert not job.num_races
    job.run(1000)
    [race] = job.tuning.notes.races
    assert job.num_races == 1 and len(race.tried) == MOST and race.winner.recipe.startswith("merge")


def test_where_time_is_short_few_plans_are_made() -> None:
    def found(within_s: float) -> tuple[Candidate, ...]:
        return candidates(PROFILE, 2, COST, gated=True, whole=False, within_s=within_s)

    [default] = found(0.0)
    assert default.recipe == "lazy"
    assert found(math.inf)[0] == default and len(found(math.inf)) == 1 + MOST
    assert len(candidates(PROFILE, 2, COST, gated=True, whole=False, most=1)) == 2


def test_nobody_races_all_the_time() -> None:
    """Steps that change for good every ten times the window: patience doubles."""
    job = Job(lambda plan, step: 1.0 if step // 120 % 2 else 3.0, priced_s=0.5)
    job.run(1500)
    assert 2 <= job.num_races <= 5 and PATIENCE == 100


def test_wishes_are_words() -> None:
    assert len({ANEW, BACK, NONE}) == 3 and not NONE


def test_what_auto_does_is_noted_as_it_goes() -> None:
    job = Job(by_schedule(lazy=1.0, merge=0.8, flow=0.9))
    job.run(100)
    assert job.written[0].doing.startswith("racing lazy") and not job.written[-1].doing and job.written[-1].races
    kinds = [span.kind for span in job.recorder.trace(0).spans]
    [race] = job.tuning.notes.races
    assert kinds.count("trial") == race.end - race.first and kinds.count("tuned") == 1


class CodecJob(Job):
    """Prices say that a codec pays; the race waits for its warm-up."""

    WARM_UP = 9

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.step == BEFORE:
                found = rivals(as_recipe("lazy+int8"), PROFILE, 2, PAYING, gated=False, whole=False)
                self.before = self.tuning.prepare(self.exchange, 0, PROFILE, found)
            if self.step == self.WARM_UP:
                assert self.tuning.is_waiting and self.tuning.rivals
                self.tuning.race(self.step)
            super().run(1)

    def _begin(self) -> None:
        if self.tuning.is_on:
            super()._begin()
        self._began_s = self.now_s


def goes_as_it_is(plan: Plan) -> bool:
    return all(message.dense for message in plan.messages)


@pytest.mark.parametrize(("coded_s", "pays"), [(0.8, True), (0.95, True), (0.99, False), (1.04, False), (1.2, False)])
def test_a_codec_that_should_pay_runs_on_if_steps_are_quicker_with_it(coded_s: float, pays: bool) -> None:
    job = CodecJob(lambda plan, step: 1.0 if goes_as_it_is(plan) else coded_s)
    job.run(job.WARM_UP + longest(2, CODECS) + 2 * WINDOW)
    assert not goes_as_it_is(job.before)
    chosen = job.tuning.plan_at(job.step)
    assert goes_as_it_is(chosen) is not pays and "a race chose" in chosen.why
    assert not job.tuning.is_racing and not job.tuning.is_waiting and job.tuning.rivals == ()
    (race,) = job.tuning.notes.races
    assert race.first == job.WARM_UP and race.lost_s <= SHARE * 1000


def test_steps_after_a_switch_do_not_count() -> None:
    """What waited is sent then, and momentum moves."""
    since: dict[bool, int] = {}

    def took(plan: Plan, step: int) -> float:
        dense = goes_as_it_is(plan)
        since.setdefault(dense, step)
        since.pop(not dense, None)
        return (1.0 if dense else 0.9) + (0.5 if step < since[dense] + CODECS.skipped else 0.0)

    job = CodecJob(took)
    job.run(job.WARM_UP + longest(2, CODECS) + 2 * WINDOW)
    (race,) = job.tuning.notes.races
    assert [each.measured_s for each in race.tried] == pytest.approx([1.0, 0.9])


def test_a_codec_that_has_won_is_not_given_up_for_a_few_slow_steps() -> None:
    end = CodecJob.WARM_UP + longest(2, CODECS)
    job = CodecJob(lambda plan, step: 1.0 if goes_as_it_is(plan) else 0.8 if step < end else 1.1)
    job.run(end + 2 * WINDOW)
    assert not goes_as_it_is(job.tuning.plan_at(job.step)) and not job.tuning.notes.races[-1].undone
