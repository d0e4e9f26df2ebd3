"""Schedules: pure functions from a profile, and for some what messages cost, to a plan.

What a schedule may look at is its arguments, so that the runtime, the simulator and the tuner get the
same plan from the same profile, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from gradientflow.cost.table import Cost
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.schedule.fusion import bsp, lazy, wfbp
from gradientflow.schedule.merge import merge as _merge
from gradientflow.schedule.merge import mg_wfbp

#: Name in a recipe -> function of (profile, argument as written after the colon, "" if none).
SCHEDULES: dict[str, Callable[[Profile, str], Plan]] = {"bsp": bsp, "wfbp": wfbp, "lazy": lazy}

#: Those that need to know what messages cost -> function of (profile, cost).
PRICED: dict[str, Callable[[Profile, Cost], Plan]] = {"mg-wfbp": mg_wfbp, "merge": _merge}

__all__ = ["PRICED", "SCHEDULES", "bsp", "lazy", "mg_wfbp", "wfbp"]
