"""What the system counts: processor seconds, memory, bytes that went through an interface."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path
from typing import NamedTuple

from gradientflow.processes import machine_s

#: Of a segment that carries data: Ethernet, IP, TCP with time stamps.
HEADER_NBYTES = 66
_SIOCGIFADDR = 0x8915


class Usage(NamedTuple):
    """Counters of one worker; what matters is the difference of two."""

    #: Of this process.
    cpu_s: float
    #: Of all processors of the machine: busy with anything, the network's own work included, and in all.
    busy_s: float
    total_s: float
    #: Sent by the interface, packets' headers taken off.
    sent_nbytes: float

    def since(self, before: Usage) -> Usage:
        return Usage(*(after - earlier for after, earlier in zip(self, before, strict=True)))


def usage(interface: str) -> Usage:
    used = resource.getrusage(resource.RUSAGE_SELF)
    busy_s, total_s = machine_s()
    return Usage(used.ru_utime + used.ru_stime, busy_s, total_s, sent_nbytes(interface))


def sent_nbytes(interface: str) -> float:
    """0 where there is no such interface."""
    # Not /sys/class/net: in a lab's host that still shows the machine's.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return float(fields[8]) - HEADER_NBYTES * float(fields[9])
    return 0.0


def forget_peak_memory() -> None:
    """From now on `peak_memory` is that of the time after, where the kernel allows it.

    What was freed is given back first: glibc keeps up to 32 MB blocks, such as buckets of a wrapper that is gone."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes of this process that were in memory at most."""
    return 1024 * _field("/proc/self/status", "VmHWM")


def available_memory() -> int:
    """Bytes of the machine that may still be taken."""
    return 1024 * _field("/proc/meminfo", "MemAvailable")


def _field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
