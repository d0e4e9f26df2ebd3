"""A run's trace beside a simulated one: which messages took longer than they should, and by how much."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from gradientflow.errors import UsageError
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.sim.cluster import Cluster
from gradientflow.sim.predict import simulate
from gradientflow.trace import Trace

#: Messages that are shown, those that are off by most first.
SHOWN = 10


def compare_run(
    profile: Profile, recipe: Recipe, cluster: Cluster, world: int, real: Trace, *, whole: bool = False
) -> Iterator[str]:
    """In lines for people. Medians over steps, without the first. whole: as of `simulate`."""
    prediction, simulated = simulate(profile, recipe, cluster, world, whole=whole)
    measured_s = _steps_s(real)
    if measured_s is None:
        raise UsageError("the trace holds fewer than three steps: run longer")
    error = prediction.iteration_s / measured_s - 1
    predicted_ms = 1e3 * prediction.iteration_s
    yield f"iteration  measured {1e3 * measured_s:.1f} ms  predicted {predicted_ms:.1f} ms {100 * error:+.1f} %"
    ours, theirs = _messages_s(simulated), _messages_s(real)
    common = ours.keys() & theirs.keys()
    if not common:
        yield f"no message of the run is one of {recipe}'s plan on {cluster.name}: it was planned on other costs"
        return
    yield "messages that are off by most, measured and predicted:"
    for name in sorted(common, key=lambda name: -abs(theirs[name] - ours[name]))[:SHOWN]:
        yield f"  {1e3 * theirs[name]:8.2f} ms  {1e3 * ours[name]:8.2f} ms  {name}"


def _steps_s(trace: Trace) -> float | None:
    """From the beginning of one step to that of the next."""
    starts_s: dict[int, float] = {}
    for span in trace.of_kind("forward"):
        starts_s[span.step] = min(span.start_s, starts_s.get(span.step, span.start_s))
    steps = sorted(starts_s)[1:]
    lengths_s = [starts_s[after] - starts_s[step] for step, after in pairwise(steps)]
    return statistics.median(lengths_s) if lengths_s else None


def _messages_s(trace: Trace) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for span in trace.of_kind("message"):
        if span.step:
            found[span.name].append(span.duration_s)
    return {name: statistics.median(seconds) for name, seconds in found.items()}
