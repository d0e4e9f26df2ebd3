"""Where a job of several workers runs: on a lab's hosts, on this machine's loopback, or in the world we are in.

`start` runs a Python module on every worker with the environment that `init_process_group()` reads, follows rank
0's lines, and ends all workers when one fails, when time is over or when this process is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from gradientflow.errors import TrainingError
from gradientflow.lab import Lab, LabUnavailable, check_rate, format_rate
from gradientflow.runtime.settings import PLAIN_ENV

PORT = 29500
LOG_LINES = 15


class Arena(Protocol):
    #: For people.
    words: str
    num_workers: int
    #: Parameter servers on hosts of their own, numbered after the workers.
    num_servers: int
    #: Bits per second of each worker's port; None: not known.
    rate: float | None
    #: What carries the workers' traffic, and how many of them share it.
    interface: str
    num_sharing: int
    notes: tuple[str, ...]

    def popen(self, number: int, argv: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a program as a worker or a server."""

    def master(self) -> tuple[str, int]:
        """Where rank 0 listens."""


class LabArena:
    def __init__(self, lab: Lab, rate: float | None, num_servers: int = 0) -> None:
        self._lab = lab
        self.num_workers, self.num_servers = len(lab.hosts) - num_servers, num_servers
        self.rate = rate
        own = [f"host {n} {format_rate(host.rate)}" for n, host in enumerate(lab.hosts) if host.rate != lab.rate]
        self.words = ", ".join([f"lab, {format_rate(lab.rate)} a port", *own])
        self.interface = lab.hosts[0].interface
        self.num_sharing = 1
        self.notes: tuple[str, ...] = ()

    def popen(self, number: int, argv: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        return self._lab.popen(number, argv, **options)

    def master(self) -> tuple[str, int]:
        return self._lab.hosts[0].address, PORT


class Loopback:
    """All workers on this machine's own network, as fast as it is."""

    def __init__(self, num_workers: int, why: str, num_servers: int = 0) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.rate: float | None = None
        self.words = "loopback, not shaped"
        self.interface = "lo"
        self.num_sharing = num_workers
        self.notes: tuple[str, ...] = (f"not shaped: {why}",) if why else ()
        self._port = _free_port()

    def popen(self, number: int, argv: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **options.pop("env", {}), "GLOO_SOCKET_IFNAME": "lo"}  # type: ignore[dict-item]
        return subprocess.Popen(argv, env=environment, **options)  # type: ignore[call-overload, no-any-return]

    def master(self) -> tuple[str, int]:
        return "127.0.0.1", self._port


@contextlib.contextmanager
def arena(
    num_workers: int,
    rate: float | None,
    rates: Mapping[int, float | None] = MappingProxyType({}),
    *,
    shaped: bool = True,
    num_servers: int = 0,
) -> Iterator[Arena]:
    """A lab if the machine allows one, else its loopback with a note that says what is missing.

    rates: of single workers, by number."""
    if not shaped:
        yield Loopback(num_workers, "", num_servers)
        return
    try:
        lab = Lab(num_workers + num_servers, rate, rates)
    except LabUnavailable as error:
        yield Loopback(num_workers, str(error), num_servers)
        return
    with lab:
        slowest = min((host.rate for host in lab.hosts[:num_workers] if host.rate is not None), default=None)
        if slowest is not None:
            check_rate(lab)
        yield LabArena(lab, slowest, num_servers)


def start(
    place: Arena,
    module: str,
    arguments: Sequence[str],
    follow: Callable[[str], None],
    limit_s: float,
    environment: Mapping[str, str] = MappingProxyType({}),
    logs: Path | None = None,
) -> None:
    """Run `python -m MODULE ARGUMENTS` on every worker until all have ended well, or raise; servers beside.

    follow: gets each line of rank 0's stdout.
    environment: beside this process's own, and what `init_process_group()` reads.
    logs: a directory for what workers say on stderr; without one it is kept only as long as they run."""
    address, port = place.master()
    with tempfile.TemporaryDirectory() as passing:
        files = [(logs or Path(passing)) / f"worker-{rank}.log" for rank in range(place.num_workers)]
        processes: list[subprocess.Popen[bytes]] = []
        servers: list[subprocess.Popen[bytes]] = []
        # Nobody else is on this network.
        common = {**os.environ, **environment, PLAIN_ENV: "1", "OMP_NUM_THREADS": "1"}
        try:
            for number in range(place.num_workers, place.num_workers + place.num_servers):
                argv = [sys.executable, "-m", "gradientflow", "server", "--plain", "--job", f"{address}:{port}"]
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                servers.append(place.popen(number, argv, env=common, **quiet))
            for rank, log in enumerate(files):
                told = {
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(place.num_workers),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                }
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                argv = [sys.executable, "-m", module, *arguments]
                try:
                    with log.open("w") as errors:
                        processes.append(place.popen(rank, argv, env=told, stdout=out, stderr=errors))
                except OSError as error:
                    raise TrainingError(f"worker {rank} cannot be started: {error}", (rank,)) from None
            _watch(processes, follow, limit_s, files)
        finally:
            for process in [*processes, *servers]:
                process.kill()
            for process in [*processes, *servers]:
                process.communicate()  # waits, and closes its pipe


def _watch(
    processes: list[subprocess.Popen[bytes]], follow: Callable[[str], None], limit_s: float, files: list[Path]
) -> None:
    end_s = time.monotonic() + limit_s
    stdout = processes[0].stdout
    assert stdout is not None
    os.set_blocking(stdout.fileno(), False)
    pending = b""
    while True:
        with contextlib.suppress(BlockingIOError):
            pending += os.read(stdout.fileno(), 2**16)
        *lines, pending = pending.split(b"\n")
        for line in lines:
            follow(line.decode(errors="replace"))
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(1.0)  # the others may say more
            first = failed[0]
            raise TrainingError(f"worker {first} {_end(codes[first] or 0, files[first])}", tuple(failed))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end_s:
            raise TrainingError(f"the workers did not end within {limit_s:.0f} s")
        time.sleep(0.05)


def _end(code: int, log: Path) -> str:
    if code < 0:
        memory = ", which is also how a machine without memory ends it" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{memory}"
    return f"failed ({_last_words(log)})"


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines[-LOG_LINES:]):
        if "Error" in line:
            return line.split("]: ", 1)[-1]
    return lines[-1] if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
