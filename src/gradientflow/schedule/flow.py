"""Fuse or cut, and in which order: the plan with which the next iteration ends first.

Each pool of gradients is one axis, and a message is a range of it: several tensors, one, or part of one. Early
layers' gradients come last and are needed first, so the newest gradients go first; what they push aside waits and
fills the link during the next forward pass. Were messages free, this would be optimal when cut ever finer: it is
Jackson's preemptive rule for one machine with release times and tails, and its optimum is `cost.limit_s`. Messages
are not free. How large they should be, and how much should have gathered before one is worth its start-up, is found
by trying: some `_Style`s are played through and judged by what the evaluator makes of them, beside the named
schedules.

[Note: jitter] Times will differ from the profile's. A plan that bets on them finds its next message not ready, and
the link idle with other gradients waiting behind. So plans are judged by their mean over a few `Case`s: faster and
slower compute, slower links, uneven layers. By the profile's own times the chosen plan is never worse than a named
schedule; among plans that differ by less than `TOLERANCE` the one with the fewest messages is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple

from gradientflow.cost.evaluate import Evaluation, Job, Stages, evaluate, host_s, limit_s, startup_and_wire_s
from gradientflow.cost.table import Cost, Memo, Steps
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.schedule.board import SLOWER_LINKS, Axis, Board, Case, Range, times
from gradientflow.schedule.fusion import DEFAULT_THETA, bsp, fuse, wfbp
from gradientflow.schedule.merge import merge, merges, mg_wfbp
from gradientflow.schedule.priority import bytescheduler, issue_in_turn

#: Of a mean iteration; less than a simulation can know. On BERT-Base, 10 Gbit/s, it saves two messages in three.
TOLERANCE = 0.005
#: Where compute hides everything, `merge` sends far more messages than it has to.
MARGINS = (1.5, 3.0)
#: How many plans are looked at closely: with 2000 tensors half a second, with all of them a whole one.
NEAR = 24
#: How many styles are tried with other sizes, nearer than a factor of two.
REFINED = 4
#: Of what the link can carry until backward ends.
TAPERS = (0.1, 0.25)


def flow(profile: Profile, cost: Cost, *, num_lanes: int = 1, gated: bool = True, stages: Stages = ()) -> Plan:
    """The plan for `num_lanes` lanes and a gate that waits for `stages`, tensor by tensor if there are none.

    Without a gate all gradients are needed at once: order is worth nothing, and it comes close to `merge`.
    """
    if not profile.nbytes:
        return bsp(profile).model_copy(update={"schedule": "flow"})
    board, cost = Board(profile), Memo(cost)
    cases = [Case(board, moments, link) for moments, link in times(profile, gated, stages)]
    judge = _Judge(board, cases, cost, num_lanes, host_s(profile, cost))
    merged, *joined = merges(profile, cost, (math.inf, *MARGINS))
    named = [judge.calmly(board.ranges(plan)) for plan in _named(profile, cost, num_lanes, merged).values()]
    own = [judge.calmly(board.ranges(plan)) for plan in joined]
    styles = _styles(profile, cost)
    played = {style: judge.calmly(_play(board, style, cases[0], cost, num_lanes)) for style in styles}
    finer = {
        near for style in sorted(played, key=lambda style: played[style].calm_s)[:REFINED] for near in style.near()
    }
    own += played.values()
    own += [judge.calmly(_play(board, style, cases[0], cost, num_lanes)) for style in sorted(finer)]
    for slower in SLOWER_LINKS:
        late = Steps(cost, slower, 1.0)
        own += [judge.calmly(_play(board, style, cases[0], late, num_lanes)) for style in styles[1::4]]
    # No choice is made by the last digit.
    most_s = (1 + 1e-9) * min(plan.calm_s for plan in named)
    as_good = [plan for plan in [*named, *own] if plan.calm_s <= most_s]
    return board.plan("flow", judge.best(as_good).ranges).on_lanes(num_lanes)


def named_schedules(profile: Profile, cost: Cost, num_lanes: int = 1) -> dict[str, Plan]:
    """What `flow` is held against, on as many lanes."""
    plans = _named(profile, cost, num_lanes, merge(profile, cost))
    return {name: plan.on_lanes(num_lanes) for name, plan in plans.items()}


def _named(profile: Profile, cost: Cost, num_lanes: int, merged: Plan) -> dict[str, Plan]:
    """Not yet dealt out over lanes."""
    plans = {"bsp": bsp(profile), "wfbp": wfbp(profile)}
    for theta in (1_000_000, 4_000_000, DEFAULT_THETA):
        name = f"lazy:{theta // 10**6}MB"
        plans[name] = merged.model_copy(update={"schedule": name, "messages": fuse(profile, theta)})
    plans["mg-wfbp"] = mg_wfbp(profile, cost)
    plans["merge"] = merged
    plans["bytescheduler"] = bytescheduler(profile, cost, num_lanes=num_lanes)
    return plans


@dataclass(frozen=True, slots=True)
class _Judged:
    """A plan, and what it takes by the profile's own times."""

    ranges: tuple[Range, ...]
    calm_s: float


@dataclass(frozen=True, slots=True)
class _Judge:
    board: Board
    cases: list[Case]
    cost: Cost
    num_lanes: int
    host_s: float

    def calmly(self, ranges: tuple[Range, ...]) -> _Judged:
        return _Judged(ranges, self._iterations_s(ranges, self.cases[:1])[0])

    def best(self, plans: Sequence[_Judged]) -> _Judged:
        """By the mean over all cases, among those that are best by the profile's own times."""
        different = sorted({plan.ranges: plan for plan in plans}.values(), key=lambda plan: plan.calm_s)
        near_s = 1.05 * different[0].calm_s
        near = {plan.ranges: plan for plan in different[:NEAR] if plan.calm_s <= near_s}
        mean_s = {ranges: fmean(self._iterations_s(ranges, self.cases)) for ranges in near}
        good_s = (1 + TOLERANCE) * min(mean_s.values())
        good = [ranges for ranges in near if mean_s[ranges] <= good_s]
        return near[min(good, key=lambda ranges: (len(ranges), mean_s[ranges]))]

    def _iterations_s(self, ranges: Sequence[Range], cases: Sequence[Case]) -> list[float]:
        axes = self.board.axes
        sizes = [(stop - start) * axes[pool].itemsize for pool, start, stop in ranges]
        costs_s = [startup_and_wire_s(self.cost, nbytes) for nbytes in sizes]
        spans = [(pool, *axes[pool].tensors_of(start, stop)) for pool, start, stop in ranges]
        messages = list(zip(sizes, costs_s, spans, strict=True))
        found = []
        taken_s = self.host_s * len(ranges)
        for case in cases:
            jobs = [
                Job(number % self.num_lanes, nbytes, case.ready_s[pool][last], case.link * start_s, case.link * wire_s)
                for number, (nbytes, (start_s, wire_s), (pool, _, last)) in enumerate(messages)
            ]
            found.append(taken_s + case.moments.iteration_s(jobs, [case.follows_s(*span) for span in spans]))
        return found


# - The newest first, in many styles


class _Style(NamedTuple):
    size_nbytes: float  # what a message holds at most
    least_nbytes: float  # what has to have gathered while backward runs
    #: Of what the link carries between a message's start and the end of backward, whichever comes first, the most that
    #: it may hold; but `floor_nbytes` always. Around that moment come the gradients that are needed first, and whatever
    #: is on the link then is in their way.
    taper: float = math.inf
    floor_nbytes: float = 0.0

    def near(self) -> Iterator[_Style]:
        for factor in (2 ** (1 / 3), 2 ** (-1 / 3)):
            yield self._replace(size_nbytes=self.size_nbytes * factor, least_nbytes=self.least_nbytes * factor)


def _styles(profile: Profile, cost: Cost) -> list[_Style]:
    """Sizes from the whole down to where there would be hundreds of messages, or start-up outweighs the wire."""
    whole = float(profile.nbytes)
    startup_s, wire_s = startup_and_wire_s(cost, profile.nbytes)
    smallest = whole * min(1.0, max(1 / 256, startup_s / wire_s / 8 if wire_s else 1.0))
    sizes = [whole / 2**step for step in range(1 + math.ceil(math.log2(whole / smallest)))]
    even = [_Style(size, size * share) for size in sizes for share in (0.0, 0.25, 0.5)]
    floors = [(size, size / part) for size in sizes for part in (4, 16) if size / part >= smallest]
    return even + [_Style(size, 0.0, taper, floor) for size, floor in floors for taper in TAPERS]


def _play(board: Board, style: _Style, case: Case, cost: Cost, num_lanes: int) -> tuple[Range, ...]:
    backlog = _Backlog(board.axes, style, case, cost.beta_s_per_byte)
    issue_in_turn(backlog, cost, num_lanes)
    return tuple(backlog.issued)


class _Backlog:
    """What is ready and not sent, played through in one style. A supply for `issue_in_turn`."""

    def __init__(self, axes: Sequence[Axis], style: _Style, case: Case, beta_s_per_byte: float) -> None:
        self._axes, self._style, self._after_s = axes, style, case.after_s
        self._beta_s_per_byte = beta_s_per_byte
        self._ready_s = case.ready_s
        self._backward_s = max(ready_s[-1] for ready_s in self._ready_s)
        self._num_ready = [0] * len(axes)
        #: Runs of elements, the newest last.
        self._runs: list[list[list[int]]] = [[] for _ in axes]
        self._left = sum(axis.edges[-1] for axis in axes)
        self.issued: list[Range] = []

    def __bool__(self) -> bool:
        return self._left > 0

    def more_s(self, now_s: float) -> float:
        """When a pool will have enough in its newest run, or everything."""
        return min(self._enough_s(pool) for pool in range(len(self._axes)))

    def _enough_s(self, pool: int) -> float:
        axis, runs, num_ready = self._axes[pool], self._runs[pool], self._num_ready[pool]
        if num_ready == len(axis.tensors):
            # What is too small by itself goes at the end of backward.
            return self._backward_s if runs else math.inf
        begin = runs[-1][0] if runs and runs[-1][1] == axis.edges[num_ready] else axis.edges[num_ready]
        index = bisect_left(axis.edges, begin + self._style.least_nbytes / axis.itemsize) - 1
        return self._ready_s[pool][min(max(index, num_ready), len(axis.tensors) - 1)]

    def take(self, now_s: float, flying_nbytes: int) -> int | None:
        for pool in range(len(self._axes)):
            self._gather(pool, now_s)
        least = self._style.least_nbytes if now_s < self._backward_s else 0.0
        for pool, run in self._most_urgent_first():
            itemsize = self._axes[pool].itemsize
            if (run[1] - run[0]) * itemsize >= least:
                return self._issue(pool, run, self._most_nbytes(now_s)) * itemsize
        return None

    def _most_nbytes(self, now_s: float) -> float:
        style = self._style
        if math.isinf(style.taper) or not self._beta_s_per_byte:
            return style.size_nbytes
        carried = abs(self._backward_s - now_s) / self._beta_s_per_byte
        return min(style.size_nbytes, max(style.floor_nbytes, style.taper * carried))

    def _gather(self, pool: int, now_s: float) -> None:
        edges, runs = self._axes[pool].edges, self._runs[pool]
        start = edges[self._num_ready[pool]]
        self._num_ready[pool] = bisect_right(self._ready_s[pool], now_s, self._num_ready[pool])
        stop = edges[self._num_ready[pool]]
        if runs and runs[-1][1] == start:
            runs[-1][1] = stop
        elif start < stop:
            runs.append([start, stop])

    def _most_urgent_first(self) -> Iterator[tuple[int, list[int]]]:
        if len(self._runs) == 1:
            return ((0, run) for run in reversed(self._runs[0]))
        runs = [(pool, run) for pool, runs in enumerate(self._runs) for run in reversed(runs)]
        return iter(sorted(runs, key=lambda entry: -self._urgency_s(*entry)))

    def _urgency_s(self, pool: int, run: list[int]) -> float:
        _, last = self._axes[pool].tensors_of(*run)
        return self._after_s[pool][last]

    def _issue(self, pool: int, run: list[int], most_nbytes: float) -> int:
        """Send the newest end of a run, and with it a leftover that would be too small to go by itself."""
        start, stop = run
        itemsize = self._axes[pool].itemsize
        size = max(1, int(most_nbytes / itemsize))
        least = max(size / 4, self._style.least_nbytes / itemsize)
        cut = stop - size if stop - size - start >= least else start
        self.issued.append((pool, cut, stop))
        self._left -= stop - cut
        run[1] = cut
        if cut == start:
            self._runs[pool].remove(run)
        return stop - cut


# - In words


def explain(profile: Profile, plan: Plan, cost: Cost, *, gated: bool = True, stages: Stages = ()) -> str:
    """What a plan does, what it is predicted to take beside the named schedules, and what bounds it."""
    alternatives = named_schedules(profile, cost, plan.num_lanes)
    found = evaluate(profile, plan, cost, gated=gated, stages=stages)
    others_s = {
        name: evaluate(profile, other, cost, gated=gated, stages=stages).iteration_s
        for name, other in alternatives.items()
    }
    return "\n".join(
        [
            f"{plan.schedule}: {_sizes(plan, found)}",
            f"order: {_order(profile, plan, found)}",
            f"predicted: {_seconds(found.iteration_s)} an iteration {'with' if gated else 'without'} the gate, "
            f"{_seconds(found.compute_s)} of it compute, {_seconds(found.exposed_s)} waiting",
            "against: " + ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in others_s.items()),
            f"bound: {_bound(profile, cost, found, gated)}",
        ]
    )


def _sizes(plan: Plan, found: Evaluation) -> str:
    if not found.messages:
        return "no messages"
    sizes = sorted(timing.nbytes for timing in found.messages)
    lanes = f"{plan.num_lanes} lane" + "s" * (plan.num_lanes > 1)
    num_fusing = sum(len(message.slices) > 1 for message in plan.messages)
    parts = Counter(piece.tensor for message in plan.messages for piece in message.slices)
    num_cut = sum(count > 1 for count in parts.values())
    return (
        f"{len(sizes)} messages on {lanes}, {_nbytes(sizes[0])} to {_nbytes(sizes[-1])}, half of them up to "
        f"{_nbytes(sizes[(len(sizes) - 1) // 2])}; {num_fusing} hold several tensors, "
        f"{num_cut} of {len(parts)} tensors are cut"
    )


def _order(profile: Profile, plan: Plan, found: Evaluation) -> str:
    place = {tensor.name: index for index, tensor in enumerate(profile.tensors)}
    places = [max(place[piece.tensor] for piece in message.slices) for message in plan.messages]
    num_later = sum(one > next_ for one, next_ in pairwise(places))
    backward_ends_s = next(part.end_s for part in found.work if part.kind == "backward")
    num_after = sum(timing.start_s >= backward_ends_s for timing in found.messages)
    order = "as gradients come" if not num_later else f"newest first, {num_later} times back to older ones"
    return f"{order}; {num_after} messages start after backward"


def _bound(profile: Profile, cost: Cost, found: Evaluation, gated: bool) -> str:
    wire_s = profile.nbytes * cost.beta_s_per_byte
    least_s = limit_s(profile, wire_s, 1.0) if gated else _least_without_gate_s(profile, cost)
    if least_s <= found.compute_s:
        what = "compute"
    elif least_s <= wire_s:
        what = f"the link, {_seconds(wire_s)} for all bytes"
    else:
        what = "gradients that come last and are needed first" if gated else "gradients that come last"
    over = found.iteration_s / least_s - 1 if least_s else 0.0
    return f"{what}; no plan is below {_seconds(least_s)}, start-ups and the size of messages add {over:.1%}"


def _least_without_gate_s(profile: Profile, cost: Cost) -> float:
    """From each gradient on, it and all later ones have to be sent, and forward follows."""
    ready_s = accumulate(tensor.backward_s for tensor in profile.tensors)
    sent = accumulate((tensor.nbytes for tensor in profile.tensors), initial=0)
    whole, beta_s_per_byte = profile.nbytes, cost.beta_s_per_byte
    rest_s = (beta_s_per_byte * (whole - nbytes) for nbytes in sent)
    return profile.forward_s + max(map(sum, zip(ready_s, rest_s, strict=False)), default=0.0)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _nbytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} KB"
