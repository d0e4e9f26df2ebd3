"""Schedules: pure functions from a profile, and for some what messages cost, to a plan.

What a schedule may look at is its arguments, so that the runtime, the simulator and the tuner get the
same plan from the same profile, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradientflow.cost.evaluate import Stages
from gradientflow.cost.table import Cost
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.schedule.decoupled import dear as _dear
from gradientflow.schedule.flow import explain
from gradientflow.schedule.flow import flow as _flow
from gradientflow.schedule.fusion import bsp, lazy, wfbp
from gradientflow.schedule.merge import merge as _merge
from gradientflow.schedule.merge import mg_wfbp
from gradientflow.schedule.priority import PARTITION_NBYTES, bytescheduler
from gradientflow.schedule.sizes import parse_nbytes

#: Name in a recipe -> function of (profile, argument as written after the colon, "" if none).
SCHEDULES: dict[str, Callable[[Profile, str], Plan]] = {"bsp": bsp, "wfbp": wfbp, "lazy": lazy}


@dataclass(frozen=True)
class Terms:
    """What messages cost, on how many lanes, and what a gate waits for. If steps are `whole`, something looks at all
    gradients before each. With `words` the plan says why it is as it is, which takes as long as making it."""

    cost: Cost
    num_lanes: int = 1
    gated: bool = False
    whole: bool = False
    stages: Stages = ()
    words: bool = True


def _bytescheduler(profile: Profile, argument: str, terms: Terms) -> Plan:
    nbytes = parse_nbytes(argument) if argument else PARTITION_NBYTES
    return bytescheduler(profile, terms.cost, partition_nbytes=nbytes, num_lanes=terms.num_lanes)


def _flow_on(profile: Profile, argument: str, terms: Terms) -> Plan:
    gated = terms.gated and not terms.whole
    plan = _flow(profile, terms.cost, num_lanes=terms.num_lanes, gated=gated, stages=terms.stages)
    if not terms.words:
        return plan
    why = explain(profile, plan, terms.cost, gated=gated, stages=terms.stages)
    return plan.model_copy(update={"why": why})


def _dear_on(profile: Profile, argument: str, terms: Terms) -> Plan:
    nbytes = parse_nbytes(argument) if argument else None
    return _dear(
        profile,
        terms.cost,
        nbytes=nbytes,
        num_lanes=terms.num_lanes,
        gated=terms.gated,
        norms=terms.gated and terms.whole,
        stages=terms.stages,
    )


#: Those that need to know more -> function of (profile, argument, terms).
PRICED: dict[str, Callable[[Profile, str, Terms], Plan]] = {
    "mg-wfbp": lambda profile, argument, terms: mg_wfbp(profile, terms.cost),
    "merge": lambda profile, argument, terms: _merge(profile, terms.cost),
    "bytescheduler": _bytescheduler,
    "flow": _flow_on,
    "dear": _dear_on,
}
#: Those whose order pays only if the next forward pass waits layer by layer.
FOR_A_GATE = frozenset({"bytescheduler", "flow", "dear"})
WITH_A_SIZE = frozenset({"bytescheduler", "dear"})
#: Those that send each message in two halves.
DECOUPLED = frozenset({"dear"})

__all__ = ["DECOUPLED", "FOR_A_GATE", "PRICED", "SCHEDULES", "WITH_A_SIZE", "Terms", "bsp", "lazy", "mg_wfbp", "wfbp"]
