"""Plans worth trying: what each lossless recipe would do here, ranked by what an iteration should take.

Predictions are made from the model's measured times and from what messages were measured to cost. They tell the good
plans from the bad ones, not the best from the second best: what computing and communication take from each other's
processors is in no table. So a few of them are tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gradientflow.cost.evaluate import evaluate
from gradientflow.cost.table import Best, Cost, Paying, Seconds
from gradientflow.documents import Record
from gradientflow.plan import NATIVE, Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import DEFAULT, Recipe

#: Schedules that are worth a look; each by the group's own all-reduce, by each pattern, and by what is quickest.
SCHEDULES = ("lazy", "lazy:4MB", "merge", "flow")
FOR_A_GATE = ("flow", "bytescheduler")
#: Tried beside the default.
MOST = 3
#: What a codec has to gain of a message by prices to be tried: it may lose as much, since prices know nothing of what
#: else processors have to do.
COULD_PAY = -0.5
#: What should take so many times as long as the quickest is not tried.
FAR = 2.0


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
    profile: Profile, num_lanes: int, cost: Best | Paying, *, gated: bool, whole: bool
) -> tuple[Candidate, ...]:
    """The default first, then those that should be quickest, with a gate and without: what a gate takes of processors
    is in no price, and on busy ones all of its plans may be slower than predicted. Plans that are the same are there
    once. Where a codec pays for some messages, they go by it in all of them."""
    every = list(_all(profile, num_lanes, cost, gated=gated, whole=whole))
    default = next(each for each in every if each.recipe == DEFAULT)
    others: dict[str, Candidate] = {}
    for each in sorted(every, key=lambda each: each.predicted_s):
        others.setdefault(kind(each.plan), each)
    others.pop(kind(default.plan), None)
    return (default, *of_both_kinds(list(others.values()), MOST))


def of_both_kinds(
    by_prediction: Sequence[Candidate], number: int, beside: Sequence[Candidate] = ()
) -> tuple[Candidate, ...]:
    """The first ones. The last of them gives way where all of them, and those beside them, have a gate, or none has."""
    chosen = tuple(by_prediction[:number])
    kinds = {each.gated for each in (*beside, *chosen)}
    others = [each for each in by_prediction[number:] if each.gated not in kinds]
    return (*chosen[: number - 1], others[0]) if others else chosen


def _all(profile: Profile, num_lanes: int, cost: Best | Paying, *, gated: bool, whole: bool) -> Iterator[Candidate]:
    exchanges: dict[str, Cost] = {"a2a": cost}
    if isinstance(cost, Best):
        exchanges = {"a2a": cost.ways[NATIVE]}
        exchanges |= {name: way for name, way in cost.ways.items() if name != NATIVE}
        if len(cost.ways) > 1:
            exchanges["best"] = cost
    for waits in (False, True) if gated else (False,):
        for schedule in FOR_A_GATE if waits else SCHEDULES:
            for exchange, priced in exchanges.items():
                recipe = Recipe.parse(schedule if exchange == "a2a" else f"{schedule}-{exchange}")
                plan = recipe.plan(profile, num_lanes, priced, gated=waits, whole=whole)
                late = waits and not whole
                found = evaluate(profile, plan, priced, gated=late, stages=plan.stages)
                yield Candidate(recipe=str(recipe), plan=plan, predicted_s=found.iteration_s, gated=waits)


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
