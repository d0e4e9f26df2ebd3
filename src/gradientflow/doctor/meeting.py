"""Ranks meet in the job's store, which is there before any collective can work, and says who is missing."""

from __future__ import annotations

import datetime
import errno
import socket
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from gradientflow.errors import UsageError
from gradientflow.runtime.settings import job_of

#: How long to wait for one answer of the store, which every rank reaches by then.
_ANSWER_S = 30.0
_PAUSE_S = 0.01


class NotReached(Exception):
    """The store cannot be reached from here; `mend` says what to do."""

    def __init__(self, words: str, mend: str) -> None:
        super().__init__(words)
        self.mend = mend


class Meeting:
    """The ranks of the job that the environment describes. Constructing it waits for the store, up to `wait_s`."""

    def __init__(self, environment: Mapping[str, str], wait_s: float) -> None:
        self.address, self.port = job_of(environment)
        try:
            self.rank, self.world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            raise UsageError("RANK and WORLD_SIZE must both be set, to numbers: start with torchrun") from None
        if not self.address:
            raise UsageError("MASTER_ADDR and MASTER_PORT are not set: start with torchrun, or set them as it would")
        self._wait_s = wait_s
        hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holds = self.rank == 0 and not hosted
        if not holds:
            _reach(self.address, self.port, wait_s)
        try:
            self.store = dist.PrefixStore("gradientflow/doctor", self._open(holds))
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
            words = f"the store at {self.address}:{self.port} does not answer: {str(error).splitlines()[0]}"
            raise NotReached(
                words, "is the port used by another job? choose another MASTER_PORT on all hosts"
            ) from None

    def _open(self, holds: bool) -> dist.TCPStore:
        timeout = datetime.timedelta(seconds=max(_ANSWER_S, self._wait_s))
        return dist.TCPStore(self.address, self.port, self.world, holds, timeout, wait_for_workers=False)

    def tell(self, key: str, text: str) -> None:
        self.store.set(f"{key}/{self.rank}", text)

    def hear(self, key: str, ranks: Sequence[int], wait_s: float | None = None) -> dict[int, str]:
        """What those ranks have told; who has said nothing within `wait_s` is missing in it."""
        end_s = time.monotonic() + (self._wait_s if wait_s is None else wait_s)
        found: dict[int, str] = {}
        while True:
            for rank in ranks:
                if rank not in found and self.store.check([f"{key}/{rank}"]):
                    found[rank] = str(self.store.get(f"{key}/{rank}"), "utf-8")
            if len(found) == len(ranks) or time.monotonic() > end_s:
                return found
            time.sleep(_PAUSE_S)

    def skew_of(self, rank: int, wait_s: float = 5.0) -> float | None:
        """By how much that rank's clock is ahead of this one's, which asks; `answer` on that rank, meanwhile."""
        best: tuple[float, float] | None = None
        for number in range(3):
            before_s = time.time()
            self.store.set(f"ask/{number}/{rank}", "")
            answer = self.hear(f"time/{number}", [rank], wait_s).get(rank)
            after_s = time.time()
            if answer is None:
                return None
            if best is None or after_s - before_s < best[0]:
                best = after_s - before_s, float(answer) - (before_s + after_s) / 2
        return best[1] if best else None

    def answer(self, wait_s: float) -> None:
        """Say the time when asked, by `skew_of`."""
        end_s = time.monotonic() + wait_s
        for number in range(3):
            while not self.store.check([f"ask/{number}/{self.rank}"]):
                if time.monotonic() > end_s:
                    return
                time.sleep(0.001)
            self.tell(f"time/{number}", repr(time.time()))


def _reach(address: str, port: int, wait_s: float) -> None:
    """A plain connection, again and again: who holds the store may be slower than we are."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.5, end_s - time.monotonic())).close()
            return
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > end_s:
                raise NotReached(*why_not(error, address, port)) from None
            time.sleep(0.2)


def why_not(error: OSError, address: str, port: int) -> tuple[str, str]:
    """What is in the way, and what to do about it.

    >>> why_not(ConnectionRefusedError(errno.ECONNREFUSED, ""), "10.0.0.1", 29500)[0]
    'nobody listens at 10.0.0.1:29500'
    """
    place = f"{address}:{port}"
    if isinstance(error, socket.gaierror):
        return f"the name {address!r} leads to no address", "write it as an address, or mend /etc/hosts or DNS"
    if error.errno == errno.ECONNREFUSED:
        return f"nobody listens at {place}", f"start rank 0 there, with MASTER_PORT={port}"
    said = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
    return (
        f"{place} cannot be reached ({said})",
        f"open port {port} in the firewall or security group between the hosts",
    )
