"""An environment for Horovod.

Horovod's thread wakes once a cycle, takes what all ranks have ready, fuses neighbours as long as they stay below the
threshold, and exchanges these one after another; meanwhile more becomes ready. A long cycle fuses more and begins
later. Both are searched here on that picture of it. Since waiting tensors are fused anyway while an exchange runs,
Horovod's own values are hard to beat, and are kept unless something gains a `MARGIN`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from gradientflow.cost.table import Cost, Line
from gradientflow.documents import Record
from gradientflow.profiles import Profile
from gradientflow.sim.cluster import Cluster
from gradientflow.sim.costs import levels_cost

#: Horovod's own, 0.28.
THRESHOLD_NBYTES, CYCLE_S, CACHE_CAPACITY = 128 * 2**20, 1e-3, 1024
THRESHOLDS = (THRESHOLD_NBYTES, *(mib * 2**20 for mib in (64, 32, 16, 8, 4, 2, 1)))
CYCLES_S = (CYCLE_S, 0.5e-3, 2e-3, 3.5e-3, 5e-3, 10e-3, 25e-3)
#: When a cycle begins is chance: the mean over so many beginnings.
PHASES = 4
#: Of an iteration.
MARGIN = 0.01


class Environment(Record):
    """Variables; seconds of an iteration with them, and with Horovod's own values."""

    variables: dict[str, str]
    iteration_s: float
    stock_s: float


def best_environment(profile: Profile, cluster: Cluster, world: int) -> Environment:
    """By simulation of Horovod's loop."""
    ways: dict[bool, Cost] = {False: cluster.all_reduce(world)}
    if min(world, cluster.workers_per_host) > 1 and cluster.check_world(world) > 1:
        ways[True] = levels_cost(cluster, world)
    asking = Line(alpha_s=cluster.overheads.negotiation_s, beta_s_per_byte=cluster.overheads.copy_s_per_byte)

    gradients = Gradients.of(profile)

    def took(choice: tuple[bool, int, float]) -> float:
        levels, nbytes, cycle_s = choice
        phases = [number / PHASES * cycle_s for number in range(PHASES)]
        return fmean(iteration_s(gradients, (asking, ways[levels]), nbytes, cycle_s, phase_s) for phase_s in phases)

    stock = (False, THRESHOLD_NBYTES, CYCLE_S)
    thresholds = [nbytes for nbytes in THRESHOLDS if nbytes == THRESHOLD_NBYTES or nbytes < profile.nbytes]
    found = [(levels, nbytes, cycle_s) for levels in ways for nbytes in thresholds for cycle_s in CYCLES_S]
    times_s = {choice: took(choice) for choice in found}
    chosen = min(times_s, key=times_s.__getitem__)
    if times_s[chosen] > (1 - MARGIN) * times_s[stock]:
        chosen = stock
    levels, nbytes, cycle_s = chosen
    variables = {"HOROVOD_FUSION_THRESHOLD": str(nbytes), "HOROVOD_CYCLE_TIME": f"{1e3 * cycle_s:g}"}
    if levels:
        variables["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    if len(profile.tensors) > CACHE_CAPACITY:  # names that are not in the cache are told in full in every step
        variables["HOROVOD_CACHE_CAPACITY"] = str(2 * len(profile.tensors))
    return Environment(variables=variables, iteration_s=times_s[chosen], stock_s=times_s[stock])


@dataclass(frozen=True)
class Gradients:
    """Bytes, and when they are there; and when backward is over."""

    sizes: list[int]
    ready_s: list[float]
    computed_s: float

    @classmethod
    def of(cls, profile: Profile) -> Gradients:
        passed_s = accumulate((tensor.backward_s for tensor in profile.tensors), initial=profile.forward_s)
        ready_s = list(passed_s)[1:]
        return cls([tensor.nbytes for tensor in profile.tensors], ready_s, profile.forward_s + profile.backward_s)


def iteration_s(
    gradients: Gradients, costs: Sequence[Cost], threshold_nbytes: float, cycle_s: float, phase_s: float = 0.0
) -> float:
    """Forward, backward, and what is still on its way then. The first cycle of the iteration begins after `phase_s`; an
    exchange takes what its costs add up to."""
    ready_s = gradients.ready_s
    now_s, done_s, sent = phase_s, 0.0, 0
    while sent < len(ready_s):
        if ready_s[sent] > now_s:  # sleeps through whole cycles
            # Rounded, the last one may end a hair too early: so the tensor that it was slept for is taken in any case.
            now_s = max(ready_s[sent], now_s + cycle_s * math.ceil((ready_s[sent] - now_s) / cycle_s))
        ready = bisect_right(ready_s, now_s, lo=sent)
        fused = _fused(gradients.sizes[sent:ready], threshold_nbytes)
        done_s = now_s + sum(cost.seconds(nbytes) for nbytes in fused for cost in costs)
        now_s, sent = max(now_s + cycle_s, done_s), ready
    return max(gradients.computed_s, done_s)


def _fused(sizes: Sequence[int], threshold_nbytes: float) -> Iterator[int]:
    """
    >>> list(_fused([3, 4, 9, 1], 8))
    [7, 9, 1]
    """
    held = 0
    for nbytes in sizes:
        if held and held + nbytes > threshold_nbytes:
            yield held
            held = 0
        held += nbytes
    if held:
        yield held
