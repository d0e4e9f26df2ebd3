"""Where training's time went, as its traces say: computing, waiting for communication, waiting for slower ranks.

One rank's trace tells how long training waited. What it waited for takes the traces of all ranks, on one clock: a
message can only move once its last rank has begun it; up to then the others wait for that rank, not for the network.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gradientflow.documents import Record
from gradientflow.trace import Span, Trace

#: Steps after the last race that are enough to leave out those before it.
ENOUGH = 5
#: Of the others' computing: who takes so much longer is worth a name.
SLOW = 1.1


class Account(Record):
    """Of one rank, seconds of a step, on average over `num_steps` steps. The parts add up to `iteration_s`."""

    rank: int
    num_steps: int
    #: The last of them.
    last: int
    #: From the beginning of a step to that of the next.
    iteration_s: float
    compute_s: float
    #: Training waited for communication. With the traces of all ranks:
    exposed_s: float
    #: of that, for ranks that were not there yet.
    behind_s: float = 0.0
    #: Whether that is known.
    sees_others: bool = False
    #: The optimizer, and all else in a step.
    rest_s: float
    #: From the end of a step to the beginning of the next: input, evaluation, checkpoints.
    between_s: float


class Slow(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    #: Times the median of the others' computing.
    factor: float
    #: What another rank waits for it in a step, on average; None: not known.
    waited_s: float | None = None

    def __str__(self) -> str:
        others = "" if self.waited_s is None else f"; the others wait {1e3 * self.waited_s:.1f} ms a step for it"
        return f"rank {self.rank} computes {self.factor:.2f} times as long as the others{others}"


def accounts(traces: Sequence[Trace]) -> list[Account]:
    """Of each rank that has finished a step. Traces of several ranks are to be on one clock (`trace.aligned`)."""
    steps = _counted(traces)
    behind = _behind(traces, steps) if len(traces) > 1 else {}
    return [_account(trace, steps, behind.get(trace.rank, ())) for trace in traces if _lengths(trace, steps)]


def slowest(computes_s: Mapping[int, float], waited_s: Mapping[int, float] | None = None) -> Slow | None:
    """Given what each rank computes, and what another waits for it; None if they are about alike.

    >>> slowest({0: 1.0, 1: 1.5, 2: 1.0}).rank
    1
    >>> slowest({0: 1.0, 1: 1.05})
    """
    if len(computes_s) < 2:
        return None
    rank = max(computes_s, key=lambda rank: (computes_s[rank], -rank))
    usual_s = statistics.median(seconds for other, seconds in computes_s.items() if other != rank)
    if not usual_s or computes_s[rank] <= SLOW * usual_s:
        return None
    return Slow(rank, computes_s[rank] / usual_s, None if waited_s is None else waited_s.get(rank, 0.0))


def straggler(traces: Sequence[Trace]) -> Slow | None:
    """Among ranks whose traces are on one clock."""
    found = waits(traces)
    waited_s = {trace.rank: found.for_(trace.rank) / max(1, len(traces) - 1) for trace in traces}
    return slowest({account.rank: account.compute_s for account in accounts(traces)}, waited_s)


class Waits(NamedTuple):
    """Who stood waiting in messages for whom, the last to begin them; on average in a step."""

    num_steps: int
    num_messages: int
    #: By (waiting rank, awaited rank).
    seconds: Mapping[tuple[int, int], float]
    #: In how many messages a rank was the last to begin.
    last: Mapping[int, int]

    def by(self, rank: int) -> float:
        return sum(value_s for (waiting, _), value_s in self.seconds.items() if waiting == rank)

    def for_(self, rank: int) -> float:
        return sum(value_s for (_, awaited), value_s in self.seconds.items() if awaited == rank)


def waits(traces: Sequence[Trace]) -> Waits:
    """From traces on one clock. Counted are messages that all ranks have in common, without their first step where
    there are more."""
    begun = [_messages(trace) for trace in traces]
    shared = set.intersection(*(set(one) for one in begun)) if begun else set()
    first = min((step for step, *_ in shared), default=0)
    common = {key for key in shared if key[0] != first} or shared
    total_s: dict[tuple[int, int], float] = defaultdict(float)
    last: dict[int, int] = defaultdict(int)
    for key in common:
        starts_s = {trace.rank: one[key][0] for trace, one in zip(traces, begun, strict=True)}
        awaited = max(starts_s, key=lambda rank: (starts_s[rank], -rank))
        last[awaited] += 1
        for trace, one in zip(traces, begun, strict=True):
            start_s, end_s = one[key]
            if trace.rank != awaited:
                total_s[trace.rank, awaited] += max(0.0, min(starts_s[awaited], end_s) - start_s)
    num_steps = len({step for step, *_ in common})
    means_s = {pair: value_s / num_steps for pair, value_s in total_s.items()}
    return Waits(num_steps, len(common), means_s, dict(last))


#: From when to when.
_Interval = tuple[float, float]


def _counted(traces: Sequence[Trace]) -> set[int]:
    """Steps that all ranks have seen to their end: those after the last race, else all but the first."""
    seen = [{span.step for span in trace.of_kind("step")} for trace in traces]
    steps = sorted(set.intersection(*seen)) if seen else []
    raced = max((span.step for trace in traces for span in trace.of_kind("trial")), default=-1)
    # The one after a race begins with a pool that is laid out anew.
    after = [step for step in steps if step > raced + 1]
    return set(after if raced >= 0 and len(after) >= ENOUGH else steps[1:] or steps)


def _lengths(trace: Trace, steps: set[int]) -> list[float]:
    """From the beginning of each step to that of the next; of the last, its own."""
    spans = sorted((span for span in trace.of_kind("step")), key=lambda span: span.step)
    begun_s = {span.step: span.start_s for span in spans}
    return [begun_s.get(span.step + 1, span.end_s) - span.start_s for span in spans if span.step in steps]


def _account(trace: Trace, steps: set[int], behind: Iterable[_Interval]) -> Account:
    own = [span for span in trace.spans if span.step in steps]
    lengths_s = _lengths(trace, steps)
    num_steps = len(lengths_s)
    step_s = sum(span.duration_s for span in own if span.kind == "step")
    exposed = _union((span.start_s, span.end_s) for span in own if span.kind == "exposed")
    computing = _union((span.start_s, span.end_s) for span in own if span.kind in ("forward", "backward"))
    updating = _union((span.start_s, span.end_s) for span in own if span.kind in ("exposed", "update"))
    exposed_s = _length(exposed)
    # Where nobody noted passes (workers that step by themselves), all that is not waiting is computing.
    compute_s = _length(computing) - _length(_both(computing, updating)) if computing else step_s - exposed_s
    others = _union((start_s - trace.epoch_s, end_s - trace.epoch_s) for start_s, end_s in behind)
    return Account(
        rank=trace.rank,
        num_steps=num_steps,
        last=max(steps),
        iteration_s=sum(lengths_s) / num_steps,
        compute_s=compute_s / num_steps,
        exposed_s=exposed_s / num_steps,
        behind_s=_length(_both(exposed, others)) / num_steps,
        sees_others=bool(others),
        rest_s=max(0.0, step_s - compute_s - exposed_s) / num_steps,
        between_s=max(0.0, sum(lengths_s) - step_s) / num_steps,
    )


def _behind(traces: Sequence[Trace], steps: set[int]) -> dict[int, list[_Interval]]:
    """By rank, when a message of its had begun and that of some other rank had not."""
    begun = [_messages(trace) for trace in traces]
    common = set.intersection(*(set(one) for one in begun))
    found: dict[int, list[_Interval]] = {trace.rank: [] for trace in traces}
    for key in common:
        if key[0] not in steps:
            continue
        last_s = max(one[key][0] for one in begun)
        for trace, one in zip(traces, begun, strict=True):
            start_s, end_s = one[key]
            found[trace.rank].append((start_s, max(start_s, min(last_s, end_s))))
    return found


def _messages(trace: Trace) -> dict[tuple[int, object, str], _Interval]:
    return {
        (span.step, span.args.get("message"), span.track): (span.start_s + trace.epoch_s, span.end_s + trace.epoch_s)
        for span in trace.of_kind("message")
    }


def alone_s(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Of messages of one rank, (bytes, seconds): the time that each would have taken had it shared the link with no
    other, as far as that can be told. While k are under way, each gets on as if for 1/k of the time."""
    moments = sorted({moment for span in spans for moment in (span.start_s, span.end_s)})
    number = {moment: index for index, moment in enumerate(moments)}
    under_way = [0] * len(moments)
    for span in spans:
        for index in range(number[span.start_s], number[span.end_s]):
            under_way[index] += 1
    found = []
    for span in spans:
        pieces = range(number[span.start_s], number[span.end_s])
        seconds = sum((moments[index + 1] - moments[index]) / under_way[index] for index in pieces)
        found.append((span.args.get("nbytes", 0.0), seconds))
    return found


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """
    >>> _union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    found: list[_Interval] = []
    for start_s, end_s in sorted(intervals):
        if found and start_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((start_s, end_s))
    return found


def _both(one: Sequence[_Interval], other: Sequence[_Interval]) -> list[_Interval]:
    """What lies in both of two unions.

    >>> _both([(0, 4), (6, 8)], [(1, 2), (3, 7)])
    [(1, 2), (3, 4), (6, 7)]
    """
    found, place = [], 0
    for start_s, end_s in one:
        while place < len(other) and other[place][1] <= start_s:
            place += 1
        index = place
        while index < len(other) and other[index][0] < end_s:
            found.append((max(start_s, other[index][0]), min(end_s, other[index][1])))
            index += 1
    return found


def _length(intervals: Sequence[_Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)
