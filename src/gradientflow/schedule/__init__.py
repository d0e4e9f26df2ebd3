"""Schedules: pure functions from a profile to a plan.

What a schedule may look at is its arguments, so that the runtime, the simulator and the tuner get the
same plan from the same profile, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.schedule.fusion import bsp, lazy, wfbp

#: Name in a recipe -> function of (profile, argument as written after the colon, "" if none).
SCHEDULES: dict[str, Callable[[Profile, str], Plan]] = {"bsp": bsp, "wfbp": wfbp, "lazy": lazy}

__all__ = ["SCHEDULES", "bsp", "lazy", "wfbp"]
