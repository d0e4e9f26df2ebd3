"""Holds a lab's network namespaces, and ends what runs in them when the lab or its owner ends.

A program of its own: `python -I -S warden.py gradientflow-lab NAME OWNER NUM_HOSTS RATE`. It makes a namespace for each
host and stays in one more, the switch's. It says on stdout under which of its descriptors the hosts' are, and waits for
a word on stdin or for its owner's death. Namespaces have no names and nothing lies on disk, so when this process is
gone nothing is left to be found.

It watches the owner through a pidfd: a pipe stays open in the owner's forked children, and a parent-death signal comes
when the thread ends that made the lab.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection

#: What `Lab.status` looks for among processes' arguments.
MARK = "gradientflow-lab"

_CLONE_NEWNET = 0x40000000


def main(owner: int, num_hosts: int) -> None:
    told_to_end = _wake_on_signals()
    watch = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    hosts = [_enter_new_namespace() for _ in range(num_hosts)]
    switch = _enter_new_namespace()
    print(*hosts, flush=True)
    select.select([sys.stdin, watch, told_to_end], [], [])
    _end_programs([*hosts, switch])


def _wake_on_signals() -> int:
    """A descriptor that becomes readable. No exception: one could come in the middle of tidying up."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return told


def _enter_new_namespace() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        sys.exit(f"a new network namespace: {os.strerror(ctypes.get_errno())}")
    # IPv6 speaks unasked, and a link's counters should begin with what programs send.
    _set("ipv6/conf/default/disable_ipv6", "1")
    # The machine's default may be BBR, which gave away up to 10 % of a shaped link on two busy cores. A namespace may
    # choose only from what the machine allows; it always allows reno.
    _set("ipv4/tcp_congestion_control", "reno")
    _set("ipv4/tcp_congestion_control", "cubic")
    # A connection's packets stay on one processor: through queues of several they overtake each other, as they do on no
    # wire. TCP then took some for lost and sent less: in one lab in three of four hosts at 1 Gbit/s Gloo's all-reduce
    # of 8 MB took 135 to 160 ms where the others' took 107.
    _set("core/rps_default_mask", _mask_of(os.sched_getaffinity(0)))
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _mask_of(processors: Collection[int]) -> str:
    """As the kernel writes it: groups of 32 bits, the highest first.

    >>> _mask_of({0, 1}), _mask_of({0, 33})
    ('00000003', '00000002,00000001')
    """
    groups = range(max(processors) // 32, -1, -1)
    return ",".join(f"{sum(1 << one % 32 for one in processors if one // 32 == group):08x}" for group in groups)


def _set(setting: str, value: str) -> None:
    """Where the kernel has it and grants it."""
    with contextlib.suppress(OSError), open(f"/proc/sys/net/{setting}", "w") as file:
        file.write(value)


def _end_programs(namespaces: Collection[int], limit_s: float = 5.0) -> None:
    """Kill whatever is in these namespaces but this process, and what it starts meanwhile."""
    # Held under new numbers, so that the kernel gives their identity to no others; the old ones lead nowhere, so that
    # whoever has not come in yet finds no door.
    ours = {_identity(os.fstat(os.dup(namespace))) for namespace in namespaces}
    nowhere = os.open("/dev/null", os.O_RDONLY)
    for namespace in namespaces:
        os.dup2(nowhere, namespace)
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        others = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
        if not any([_kill_if_in(ours, pid) for pid in others]):
            return
        time.sleep(0.01)


def _kill_if_in(namespaces: Collection[tuple[int, int]], pid: int) -> bool:
    """Whether the process is in one of these, and so is killed, or has a door open and will be."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
        # The descriptor comes before the look, so that what is killed is what was looked at; the doors come before the
        # room, or one that goes in meanwhile would be seen in neither.
        process = os.pidfd_open(pid)
        try:
            entering = any(_is_one_of(namespaces, door.path) for door in os.scandir(f"/proc/{pid}/fd"))
            inside = _is_one_of(namespaces, f"/proc/{pid}/ns/net")
            if inside:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            return inside or entering
        finally:
            os.close(process)
    return False


def _is_one_of(namespaces: Collection[tuple[int, int]], path: str) -> bool:
    try:
        return _identity(os.stat(path)) in namespaces
    except OSError:  # closed meanwhile
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


if __name__ == "__main__":
    try:
        main(owner=int(sys.argv[3]), num_hosts=int(sys.argv[4]))
    except OSError as error:
        sys.exit(f"the lab's warden: {error}")
