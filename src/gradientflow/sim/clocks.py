"""Workers that need not be in step: how long their steps take when one may be ahead of another.

A worker's step takes its own computing, and what of its own exchange computing does not hide. Under SSP with staleness
s a worker begins step c when all have ended step c - 1 - s; s = 0 is BSP, infinity ASP. With Local SGD workers compute
`period` steps by themselves and then exchange once, together; or a fragment of the model at a time, each of which may
take `delay` steps.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import pairwise

from gradientflow.sync import Sync

#: Enough for the first steps, in which everybody is level, to count for little.
STEPS = 400


def steps_s(sync: Sync, paces: Sequence[Sequence[float]], compute_s: float, exposed_s: float) -> list[float]:
    """Seconds that workers' steps take, with a mean that says how many are done in a second.

    paces: by step, of each worker; gone through again and again. exposed_s: what an exchange adds to a step.
    """
    ranks = [paces[step % len(paces)] for step in range(STEPS)]
    if sync.period > 1:
        fragment_s = max(0.0, exposed_s / sync.fragments - sync.delay * compute_s)
        return _local(sync.period, ranks, compute_s, sync.fragments * fragment_s)
    return _stale(sync.staleness, ranks, compute_s, exposed_s)


def _local(period: int, ranks: Sequence[Sequence[float]], compute_s: float, exposed_s: float) -> list[float]:
    found = []
    for first in range(0, max(1, STEPS - period + 1), period):
        own_s = [sum(ranks[(first + step) % STEPS][rank] for step in range(period)) for rank in range(len(ranks[0]))]
        found.append((max(own_s) * compute_s + exposed_s) / period)
    return found


def ends_s(staleness: float, paces: Sequence[Sequence[float]], compute_s: float, exposed_s: float) -> list[list[float]]:
    """Of each worker, when its steps end, after second 0; paces are by step, of each worker.

    >>> ends_s(0, [[1, 3], [3, 1]], 1.0, 0.0), ends_s(1, [[1, 3], [3, 1]], 1.0, 0.0)
    ([[0.0, 1.0, 6.0], [0.0, 3.0, 4.0]], [[0.0, 1.0, 4.0], [0.0, 3.0, 4.0]])
    """
    found: list[list[float]] = [[0.0] for _ in paces[0]]
    for step, of_step in enumerate(paces):
        needed = step - staleness  # steps that everybody must have ended
        free_s = max(own_s[int(needed)] for own_s in found) if needed > 0 else 0.0
        for own_s, pace in zip(found, of_step, strict=True):
            own_s.append(max(own_s[-1], free_s) + pace * compute_s + exposed_s)
    return found


def _stale(staleness: float, ranks: Sequence[Sequence[float]], compute_s: float, exposed_s: float) -> list[float]:
    found = ends_s(staleness, ranks, compute_s, exposed_s)
    # Fast workers are through earlier: what counts is how many steps all of them have done by then.
    until_s = min(own_s[-1] for own_s in found)
    durations_s = [
        after - before
        for own_s in found
        for before, after in pairwise(own_s[: bisect.bisect_right(own_s, until_s * (1 + 1e-12))])
    ]
    effective_s = until_s * len(found) / len(durations_s) if durations_s else math.inf
    mean_s = sum(durations_s) / len(durations_s)
    return [one_s * effective_s / mean_s if mean_s else 0.0 for one_s in durations_s]
