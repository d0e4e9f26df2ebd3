"""What traces say about steps: how long they took, how much of it was exposed, and who waited for whom."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradientflow.bench.results import Spread
from gradientflow.trace import Span, Trace


class RankSteps(NamedTuple):
    """Seconds of one rank by step. Only steps that were seen to their end."""

    rank: int
    iteration_s: Mapping[int, float]
    compute_s: Mapping[int, float]
    exposed_s: Mapping[int, float]

    @classmethod
    def of(cls, trace: Trace) -> RankSteps:
        iteration_s = _sums(trace.of_kind("step"))
        compute_s = _sums(trace.of_kind("forward") + trace.of_kind("backward"))
        exposed_s = _sums(trace.of_kind("exposed"))
        return cls(
            trace.rank,
            iteration_s,
            {step: compute_s.get(step, 0.0) for step in iteration_s},
            {step: exposed_s.get(step, 0.0) for step in iteration_s},
        )

    @property
    def usual(self) -> list[int]:
        """All steps but the first: it also holds the loop's own beginnings."""
        steps = sorted(self.iteration_s)
        return steps[1:] or steps

    def spread(self, of: Mapping[int, float]) -> Spread:
        return Spread.of([of[step] for step in self.usual])


def _sums(spans: Sequence[Span]) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for span in spans:
        found[span.step] += span.duration_s
    return dict(found)


def common_steps(ranks: Sequence[RankSteps]) -> list[int]:
    """Steps seen on all ranks, without the first where there are more."""
    shared = set.intersection(*(set(rank.iteration_s) for rank in ranks)) if ranks else set()
    steps = sorted(shared)
    return steps[1:] or steps


def by_slowest(ranks: Sequence[RankSteps]) -> dict[int, float]:
    """What each common step took on the rank where it took longest."""
    return {step: max(rank.iteration_s[step] for rank in ranks) for step in common_steps(ranks)}


def median_step(ranks: Sequence[RankSteps]) -> int | None:
    """The step that is neither fast nor slow."""
    took_s = by_slowest(ranks)
    ordered = sorted(took_s, key=lambda step: (took_s[step], step))
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def slowest_step(ranks: Sequence[RankSteps]) -> int | None:
    took_s = by_slowest(ranks)
    return max(took_s, key=lambda step: (took_s[step], -step), default=None)


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
    """From traces on one clock. A message can only move once its last rank has begun it: up to then, all others wait.

    Counted are messages that all ranks have in common, without their first step where there are more.
    """
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


def _messages(trace: Trace) -> dict[tuple[int, object, str], tuple[float, float]]:
    return {
        (span.step, span.args.get("message"), span.track): (span.start_s + trace.epoch_s, span.end_s + trace.epoch_s)
        for span in trace.of_kind("message")
    }


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[float, float]]:
    """No more than `most` points, each the median of as many neighbours as it takes.

    >>> thinned([(0, 1.0), (1, 5.0), (2, 2.0), (3, 2.0), (4, 9.0), (5, 2.0)], 2)
    [(1, 2.0), (4, 2.0)]
    """
    width = -(-len(points) // most) if points else 1
    several = [points[start : start + width] for start in range(0, len(points), width)]
    return [(part[len(part) // 2][0], statistics.median(value for _, value in part)) for part in several]
