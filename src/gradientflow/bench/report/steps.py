"""What traces say about steps: how long they took, and how much of it was exposed."""

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


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[float, float]]:
    """No more than `most` points, each the median of as many neighbours as it takes.

    >>> thinned([(0, 1.0), (1, 5.0), (2, 2.0), (3, 2.0), (4, 9.0), (5, 2.0)], 2)
    [(1, 2.0), (4, 2.0)]
    """
    width = -(-len(points) // most) if points else 1
    several = [points[start : start + width] for start in range(0, len(points), width)]
    return [(part[len(part) // 2][0], statistics.median(value for _, value in part)) for part in several]
