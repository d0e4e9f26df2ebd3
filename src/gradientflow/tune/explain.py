"""A run in plain words, on one screen: where its time goes, what was chosen over what, and what would help.

Where time goes is measured (account.py). What would help is predicted: plans of the same recipe on other costs, or for
another model, against what is predicted for things as they are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradientflow.account import Account, Slow, accounts, alone_s, slowest, straggler
from gradientflow.compress import Feedback
from gradientflow.cost.evaluate import evaluate
from gradientflow.cost.table import Altered, Best, Cost, CostTable, Line
from gradientflow.plan import NATIVE, Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import DEFAULT, Choice, Recipe, as_recipe
from gradientflow.trace import Trace, aligned
from gradientflow.tune.notes import Notes, Race, Tried

#: What the codec is that is asked about, and of how many tensors one is made.
CSC = Choice(name="csc", argument="10%")
FEWER = 4
#: Below this share of an iteration a gain is none.
LEAST = 0.005
#: Candidates that are named.
NAMED = 4


class Situation(NamedTuple):
    """What is run: everything that a prediction takes but costs."""

    profile: Profile
    plan: Plan
    recipe: Recipe
    world: int
    notes: Notes = Notes()

    @property
    def runs(self) -> Recipe:
        """What `auto` has chosen, or what was asked for."""
        if not self.recipe.tunes:
            return self.recipe
        races = self.notes.races
        chosen = as_recipe(races[-1].winner.recipe if races else DEFAULT)
        return chosen.model_copy(update={"codecs": self.recipe.codecs})


class Gain(NamedTuple):
    what: str
    #: Of an iteration.
    seconds: float


def explain(situation: Situation, traces: Sequence[Trace]) -> str:
    """traces: of this rank, or of all of them."""
    traces = aligned(traces) if len(traces) > 1 else list(traces)
    found = accounts(traces)
    if not found:
        return f"recipe {situation.recipe}: no step is over yet"
    # All ranks wait for each other, so their steps are about as long; the one that waits most shows what for.
    account = max(found, key=lambda one: one.exposed_s)
    slow = straggler(traces) if len(traces) > 1 else slowest(dict(enumerate(situation.notes.computes_s)))
    return "\n".join([*_where(situation, account), *_who(slow, situation), *_chosen(situation, account), *_help(
        situation, account, traces
    )])  # fmt: skip


# - Where time goes


def _where(situation: Situation, account: Account) -> Iterator[str]:
    runs = f"{situation.recipe}: {situation.runs}" if situation.recipe.tunes else str(situation.recipe)
    runs += " with the gate" if situation.plan.stages else ""
    total_s = account.iteration_s
    yield (
        f"{runs}, rank {account.rank} of {situation.world}: {1e3 * total_s:.1f} ms a step, over {account.num_steps} "
        f"steps up to {account.last}"
    )
    exposed_s, words = account.exposed_s, "waiting for communication"
    if account.sees_others:
        exposed_s -= account.behind_s
        yield from _part("waiting for slower ranks", account.behind_s, total_s)
    else:
        words += " or slower ranks"
    yield from _part(words, exposed_s, total_s)
    yield from _part("computing", account.compute_s, total_s)
    yield from _part("optimizer, and what else a step holds", account.rest_s, total_s)
    yield from _part("between steps", account.between_s, total_s)


def _part(name: str, seconds: float, total_s: float) -> Iterator[str]:
    yield f"  {name:43} {1e3 * seconds:9.2f} ms  {seconds / total_s if total_s else 0.0:4.0%}"


def _who(slow: Slow | None, situation: Situation) -> Iterator[str]:
    if slow is not None:
        yield f"slow: {slow}" + (", as it was when plans were made" if slow.waited_s is None else "")
    elif situation.world > 1:
        yield "slow: nobody; ranks compute about equally long"


# - What was chosen


def _chosen(situation: Situation, account: Account) -> Iterator[str]:
    notes = situation.notes
    if not situation.recipe.tunes:
        yield f"chosen: {situation.recipe}, as asked for or by default; `auto` would try others"
        if notes.doing or notes.races:
            yield f"codec: {notes.doing or _over(notes.races[-1])}"
        return
    if not notes.races:
        lost = f"; lost {notes.lost_s:.2f} s to that" if notes.lost_s else ""
        yield f"chosen: nothing yet; auto is {notes.doing or 'at its beginning'}{lost}"
        return
    race = notes.races[-1]
    yield f"chosen: {_over(race)}"
    # The whole of training, not the steps that are accounted for alone.
    whole_s = notes.elapsed_s + max(0, account.last + 1 - race.end) * account.iteration_s
    share = notes.lost_s / max(1e-9, notes.lost_s, whole_s)
    yield (
        f"tuning: {len(notes.races)} race{'s' * (len(notes.races) > 1)}, the last over at step {race.end}; lost "
        f"{notes.lost_s:.2f} s to trials, {100 * share:.1f} % of {account.last + 1} steps"
        + (f"; auto is {notes.doing}" if notes.doing else "")
    )


def _over(race: Race) -> str:
    winner = race.winner
    words = f"{winner}, {1e3 * winner.measured_s:.1f} ms"
    if race.why == "remembered":
        return f"{words}, remembered from an earlier run and as quick as it was then"
    others = sorted((each for each in race.tried if each != winner), key=lambda each: each.measured_s)
    named = ", ".join(f"{each} {1e3 * each.measured_s:.1f} ms ({_less(winner, each)})" for each in others[:NAMED])
    undone = "; another won and was given up, as it did not keep what it had promised" if race.undone else ""
    return f"{words}, over {named}{undone}" if named else words


def _less(winner: Tried, other: Tried) -> str:
    share = winner.measured_s / other.measured_s - 1 if other.measured_s else 0.0
    return f"{100 * share:+.0f} %"


# - What would help


def _help(situation: Situation, account: Account, traces: Sequence[Trace]) -> Iterator[str]:
    if situation.recipe.sync.deltas or situation.recipe.served:
        yield f"what would help: is not predicted for {situation.recipe}; try `gradientflow simulate`"
        return
    if situation.world == 1:
        yield "what would help: nothing is sent in a world of one"
        return
    cost = situation.notes.price.cost() if situation.notes.price else _cost_of(traces)
    if cost is None or not situation.profile.backward_s:
        yield "what would help: cannot be said, too little was measured"
        return
    now_s, gains = predicted_gains(situation, cost)
    yield (
        f"what would help, as predicted ({1e3 * now_s:.1f} ms as things are, {1e3 * account.iteration_s:.1f} ms "
        "measured):"
    )
    for gain in sorted(gains, key=lambda gain: -gain.seconds):
        # Nothing can gain more than what is waited for.
        seconds = min(gain.seconds, account.exposed_s)
        share = seconds / account.iteration_s if account.iteration_s else 0.0
        words = f"{1e3 * seconds:9.2f} ms less  {share:4.0%}" if share > LEAST else "  next to nothing"
        yield f"  {gain.what:43} {words}"


def predicted_gains(situation: Situation, cost: Cost) -> tuple[float, list[Gain]]:
    """Seconds of an iteration as it is, and what each change would take off."""
    recipe, plan, profile, world = situation.runs, situation.plan, situation.profile, situation.world
    touch_s = situation.notes.price.touch_s_per_byte if situation.notes.price else 0.0
    carries = _carries(recipe, cost)
    if recipe.weighs:  # else the codec is in what was measured
        carries = recipe.priced(carries, world, touch_s)
    now_s = _evaluated(situation, profile, plan, carries)

    def gain(what: str, other: Cost, model: Profile = profile, by: Recipe = recipe) -> Gain:
        gated = bool(plan.stages) and not isinstance(by.codec(), Feedback)
        made = by.plan(model, plan.num_lanes, other, gated=gated, whole=situation.notes.whole, words=False)
        return Gain(what, now_s - min(_evaluated(situation, model, made, other), now_s))

    gains = [gain("twice the bandwidth", _altered(carries, wire=0.5))]
    if not isinstance(carries, Line):  # whose start-up is not known
        gains.append(gain("half the start-up of messages", _altered(carries, startup=0.5)))
        gains.append(gain(f"a quarter as many tensors ({len(_fewer(profile).tensors)})", carries, _fewer(profile)))
    if not recipe.codecs and recipe.schedule.name != "dear":
        by = recipe.model_copy(update={"codecs": (CSC,)})
        gains.append(gain(f"+{CSC}, a tenth of the bytes, lossy", by.priced(carries, world, touch_s), by=by))
    # Of equal links, BytePS's optimum against a ring's bytes; see exchange/server/placement.py.
    gains.append(gain("one host more, as a server (-ps:1)", _altered(carries, wire=world**2 / (world**2 + world - 2))))
    return now_s, gains


def _evaluated(situation: Situation, profile: Profile, plan: Plan, cost: Cost) -> float:
    gated = bool(plan.stages) and not situation.notes.whole
    return evaluate(profile, plan, cost, gated=gated, stages=plan.stages).iteration_s


def _carries(recipe: Recipe, cost: Cost) -> Cost:
    """Of the ways that were measured, that of the recipe."""
    if not isinstance(cost, Best) or recipe.exchange.name == "best":
        return cost
    return cost.ways.get(recipe.exchange.name, cost.ways[NATIVE])


def _altered(cost: Cost, *, startup: float = 1.0, wire: float = 1.0) -> Cost:
    if isinstance(cost, Best):
        return Best({name: Altered(way, startup, wire) for name, way in cost.ways.items()})
    return Altered(cost, startup, wire)


def _fewer(profile: Profile) -> Profile:
    """The same model with neighbours in one tensor."""
    found: list[list[TensorProfile]] = []
    for tensor in profile.tensors:
        if found and len(found[-1]) < FEWER and found[-1][0].pool == tensor.pool:
            found[-1].append(tensor)
        else:
            found.append([tensor])
    return profile.model_copy(update={"tensors": tuple(map(_joined, found))})


def _joined(tensors: Sequence[TensorProfile]) -> TensorProfile:
    update = {
        "shape": (sum(tensor.numel for tensor in tensors),),
        "forward_order": min(tensor.forward_order for tensor in tensors),
        "forward_s": sum(tensor.forward_s for tensor in tensors),
        "backward_s": sum(tensor.backward_s for tensor in tensors),
    }
    return tensors[0].model_copy(update=update)


def _cost_of(traces: Sequence[Trace]) -> Cost | None:
    """What messages were seen to take, where nobody has measured it. Of several ranks, the one that began last waited
    least; of several messages of a size, a quick one: both are nearest to what the network took."""
    seen: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        spans = [span for span in trace.of_kind("message") if span.step and span.args.get("nbytes", 0.0) > 0]
        for nbytes, seconds in alone_s(spans):
            if seconds > 0:
                seen[int(nbytes)].append(seconds)
    quick = {nbytes: _lower_quartile(seconds) for nbytes, seconds in sorted(seen.items())}
    if not quick:
        return None
    if len(quick) == 1:
        [(nbytes, seconds)] = quick.items()
        return Line(alpha_s=0.0, beta_s_per_byte=seconds / nbytes)
    return CostTable(points=tuple(quick.items()))


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]
