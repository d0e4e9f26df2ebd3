"""Plans worth trying: what each lossless recipe would do here, ranked by what an iteration should take.

Predictions are made from the model's measured times and from what messages were measured to cost. They tell the good
plans from the bad ones, not the best from the second best: what computing and communication take from each other's
processors is in no table. So a few of them are tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Iterator, Sequence

from gradientflow.cost.evaluate import evaluate
from gradientflow.cost.table import Best, Cost, Paying, Seconds
from gradientflow.documents import Record
from gradientflow.plan import NATIVE, Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import DEFAULT, Recipe

#: Schedules that are worth a look; each by the group's own all-reduce, by each pattern, and by what is quickest.
QUICK = ("lazy", "lazy:4MB", "merge")
QUICK_FOR_A_GATE = "bytescheduler"
#: With a gate and without. One plan takes up to 3.4 times as long as all those (16 tensors: 15 ms and 4; 604 tensors:
#: 160 ms and 170).
SEARCHED, SEARCH_TIMES = "flow", 3.4
#: Tried beside the default.
MOST = 3
#: What a codec has to gain of a message by prices to be tried: it may lose as much, since prices know nothing of what
#: else processors have to do.
COULD_PAY = -0.5
#: What should take so many times as long as the quickest is not tried; with a gate, which takes of processors what is
#: in no price (a prediction of 1.5 times was 2.4 times).
FAR, HOPELESS = 2.0, 1.3


class Candidate(Record):
    recipe: str
    plan: Plan
    #: Of an iteration.
    predicted_s: Seconds
    #: Whether forward passes wait layer by layer.
    gated: bool = False

    def __str__(self) -> str:
        return f"{self.recipe} with the gate" if self.gated else self.recipe


def candidates(
    profile: Profile,
    num_lanes: int,
    cost: Best | Paying,
    *,
    gated: bool,
    whole: bool,
    most: int = MOST,
    within_s: float = math.inf,
) -> tuple[Candidate, ...]:
    """The default first, then those that should be quickest, with a gate and without: what a gate takes of processors
    is in no price, and on busy ones all of its plans may be slower than predicted. Plans that are the same are there
    once. Where a codec pays for some messages, they go by it in all of them.

    within_s: no plan is begun that should not be there by then, but for the default."""
    plans = _Plans(profile, num_lanes, cost, gated=gated, whole=whole)
    watch = _Watch(within_s)
    quick = plans.quick()
    with _uncollected():
        every = [next(quick), *watch.while_there_is_time(quick)]
        watch.longest_s = SEARCH_TIMES * watch.spent_s
        every += watch.while_there_is_time(plans.searched())
    default = next(each for each in every if each.recipe == DEFAULT)
    others: dict[str, Candidate] = {}
    for each in sorted(every, key=lambda each: each.predicted_s):
        others.setdefault(kind(each.plan), each)
    others.pop(kind(default.plan), None)
    least_s = min(each.predicted_s for each in every)
    hopeful = [each for each in others.values() if not each.gated or each.predicted_s <= HOPELESS * least_s]
    return (default, *of_both_kinds(hopeful, most))


def of_both_kinds(
    by_prediction: Sequence[Candidate], number: int, beside: Sequence[Candidate] = ()
) -> tuple[Candidate, ...]:
    """The first ones. The last of them gives way where all of them, and those beside them, have a gate, or none has;
    unless it is the only one."""
    chosen = tuple(by_prediction[:number])
    if number < 2:
        return chosen
    kinds = {each.gated for each in (*beside, *chosen)}
    others = [each for each in by_prediction[number:] if each.gated not in kinds]
    return (*chosen[: number - 1], others[0]) if others else chosen


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Plans hold no cycles, but so many objects that Python begins to look for some, in all that torch has imported:
    180 ms beside the 15 ms that a dozen plans take."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Watch:
    """Ends work that comes in pieces before its time is over."""

    def __init__(self, within_s: float) -> None:
        self._began_s, self._within_s = time.perf_counter(), within_s
        #: What the next piece may take.
        self.longest_s = 0.0

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self._began_s

    def while_there_is_time(self, pieces: Iterator[Candidate]) -> Iterator[Candidate]:
        while self.spent_s + self.longest_s <= self._within_s:
            before_s = self.spent_s
            if (piece := next(pieces, None)) is None:
                return
            self.longest_s = max(self.longest_s, self.spent_s - before_s)
            yield piece


class _Plans:
    """Of each recipe, by each way of carrying messages."""

    def __init__(self, profile: Profile, num_lanes: int, cost: Best | Paying, *, gated: bool, whole: bool) -> None:
        self._profile, self._num_lanes, self._gated, self._whole = profile, num_lanes, gated, whole
        self._ways: dict[str, Cost] = {"a2a": cost}
        if isinstance(cost, Best):
            self._ways = {"a2a": cost.ways[NATIVE]}
            self._ways |= {name: way for name, way in cost.ways.items() if name != NATIVE}
            if len(cost.ways) > 1:
                self._ways["best"] = cost
        #: By way, what should be quickest of the plans so far.
        self._least_s = dict.fromkeys(self._ways, math.inf)

    def quick(self) -> Iterator[Candidate]:
        """The default first."""
        for waits, schedule in [(False, schedule) for schedule in QUICK] + [(True, QUICK_FOR_A_GATE)] * self._gated:
            for way in self._ways:
                yield (found := self._plan(schedule, way, waits))
                self._least_s[way] = min(self._least_s[way], found.predicted_s)

    def searched(self) -> Iterator[Candidate]:
        """The most promising ways first."""
        for way in sorted(self._ways, key=self._least_s.__getitem__):
            for waits in (True, False) if self._gated else (False,):
                yield self._plan(SEARCHED, way, waits)

    def _plan(self, schedule: str, way: str, waits: bool) -> Candidate:
        recipe, cost = Recipe.parse(schedule if way == "a2a" else f"{schedule}-{way}"), self._ways[way]
        plan = recipe.plan(self._profile, self._num_lanes, cost, gated=waits, whole=self._whole, words=False)
        found = evaluate(self._profile, plan, cost, gated=waits and not self._whole, stages=plan.stages)
        return Candidate(recipe=str(recipe), plan=plan, predicted_s=found.iteration_s, gated=waits)


def rivals(
    recipe: Recipe, profile: Profile, num_lanes: int, cost: Paying, *, gated: bool, whole: bool
) -> tuple[Candidate, ...]:
    """A recipe with its codec for no message, for those that it should pay for, and for those that it could: as far as
    these differ, and none is clearly the slower. A single one needs no trial."""
    found: dict[str, Candidate] = {}
    for margin in (1.0, Paying.MARGIN, COULD_PAY):
        priced = dataclasses.replace(cost, margin=margin)
        plan = recipe.plan(profile, num_lanes, priced, gated=gated, whole=whole)
        coded = not all(message.dense for message in plan.messages)
        name = str(recipe if coded else recipe.model_copy(update={"codecs": ()}))
        # As it is, too, by what was measured beside the codec: both with all lanes at once.
        seconds = evaluate(profile, plan, dataclasses.replace(priced, dense=cost.plain)).iteration_s
        found.setdefault(kind(plan), Candidate(recipe=name, plan=plan, predicted_s=seconds))
    least_s = min(each.predicted_s for each in found.values())
    return tuple(each for each in found.values() if each.predicted_s <= FAR * least_s)


def kind(plan: Plan) -> str:
    """What is done, whoever suggested it."""
    return plan.model_copy(update={"schedule": "", "why": ""}).digest
