"""Parameter servers for tests: real processes, found through a store as a job's are."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from gradientflow.exchange.server.directory import CORNER
from gradientflow.exchange.server.keeper import keep, serve_job
from gradientflow.exchange.server.servers import Wanted
from helpers import _CONTEXT

LOOPBACK = "127.0.0.1"


class Hosts:
    """Of servers: each a process that keeps another one."""

    def __init__(self, num_servers: int, keys: Path | None = None) -> None:
        self.store = dist.TCPStore(LOOPBACK, 0, is_master=True, timeout=datetime.timedelta(seconds=30))
        self._keepers: list[BaseProcess] = []
        self._logs: list[Path] = []
        self._wanted = Wanted(keys=keys)
        for slot in range(num_servers):
            process = _CONTEXT.Process(target=_keep, args=((LOOPBACK, self.store.port), slot, self._wanted))
            process.start()
            self._keepers.append(process)

    @property
    def environment(self) -> dict[str, str]:
        """For workers."""
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self.store.port)}

    def entry(self, slot: int) -> str:
        return self.store.get(f"{CORNER}/{slot}").decode()

    def kill(self, slot: int) -> None:
        """The one that serves, without a word; it is started anew."""
        before = self.entry(slot)
        pid = _child_of(self._keepers[slot].pid)
        os.kill(pid, signal.SIGKILL)
        end_s = time.monotonic() + 20
        while self.entry(slot) == before:
            assert time.monotonic() < end_s, f"server {slot} did not come back"
            time.sleep(0.01)

    def kill_for_good(self, slot: int) -> None:
        keeper = self._keepers[slot]
        keeper.kill()  # the other one goes with it
        keeper.join()

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
        for keeper in self._keepers:
            keeper.join()


@contextlib.contextmanager
def servers(num_servers: int, keys: Path | None = None) -> Iterator[Hosts]:
    hosts = Hosts(num_servers, keys)
    try:
        yield hosts
    finally:
        hosts.close()


def _keep(job: tuple[str, int], slot: int, wanted: Wanted) -> None:
    lock = wanted.lock_at(LOOPBACK)
    keep(lambda known, tell: serve_job(job, LOOPBACK, lock, 0, known, 30.0, lambda words: None, tell), slot, print)


def _child_of(pid: int | None) -> int:
    """That it has now; it may be between two."""
    for _ in range(200):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError(f"process {pid} has no child")
