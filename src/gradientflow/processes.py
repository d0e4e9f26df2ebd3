"""Processes that belong together, and the processors that they run on."""

from __future__ import annotations

import ctypes
import os
import signal


def die_with_parent() -> None:
    """In a child: end when the process that started it ends, however it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def machine_s() -> tuple[float, float]:
    """Seconds of all processors of this machine since it began: busy with anything, the network's own work included,
    and in all."""
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    second = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / second, sum(ticks) / second
