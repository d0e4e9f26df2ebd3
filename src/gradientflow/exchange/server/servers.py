"""An exchange's servers, as a worker sees them: beside workers and on hosts of their own, and what each is for."""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradientflow.compress import Answer, Question
from gradientflow.errors import DeadlineError
from gradientflow.exchange.control import Control
from gradientflow.exchange.health import LOOK_S
from gradientflow.exchange.reach import is_loopback
from gradientflow.exchange.server.client import Client, Echo, Errand
from gradientflow.exchange.server.directory import StoreDirectory, register, store_of_job
from gradientflow.exchange.server.keys import KeyFiles, Lock
from gradientflow.exchange.server.placement import (
    LEAST_NBYTES,
    PARTITION_NBYTES,
    cut,
    partition_nbytes,
    shares_of,
    spread,
)
from gradientflow.exchange.server.service import Service

_log = logging.getLogger(__name__)

#: A worker that has everything and leaves gives others so long to fetch what its server still has for them.
FETCH_S = 10.0
#: Messages of no plan: lanes, on which one question follows another.
_LANES = 2**31
_ASIDE = 1000
#: Servers that have not come by then are asked for.
ASK_FOR_S = 3.0
#: Enough to see a link, little enough for a slow one: a second at 30 Mbit/s.
PROBE_NBYTES = 10**6
PROBE_TIMES = 3
#: Servers whose links differ by this factor have shares that differ.
UNEQUAL = 1.5


@dataclass(frozen=True)
class Wanted:
    """What a recipe and the environment say about servers.

    num_spare: servers that somebody starts by `gradientflow server`. As long as there are fewer of them than workers,
    workers serve too.
    """

    num_spare: int = 0
    #: Where the whole job's store is; for servers that are not beside workers.
    job: tuple[str, int] = ("", 0)
    keys: Path | None = None
    #: Whether everybody on the network may read and write gradients.
    plain: bool = False

    def lock_at(self, address: str) -> Lock:
        """For a server that listens there."""
        if self.keys is not None:
            return Lock("files", KeyFiles.read(self.keys))
        return Lock("plain" if self.plain or is_loopback(address) else "job", everywhere=self.plain)


class Servers:
    """Of `world` workers. Constructing it is a collective call."""

    def __init__(
        self,
        wanted: Wanted,
        address: str,
        store: dist.Store,
        control: Control,
        rank: int,
        names: Sequence[int],
        deadline_s: float,
    ) -> None:
        world = len(names)
        files = KeyFiles.read(wanted.keys) if wanted.keys else None
        beside = world if wanted.num_spare < world else 0
        self._service: Service | None = None
        self._client: Client | None = None
        corner = dist.PrefixStore("servers", store)
        if beside:
            self._service = Service(address, wanted.lock_at(address))
            register(corner, rank, self._service.invitation)
            self._service.start()
        entries: list[tuple[dist.Store, str]] = []
        try:
            space = control.from_rank(0, str(secrets.randbits(56)), "learn where sums are made")
            if beside:
                control.gather("", "start servers")
                own = corner.clone()  # type: ignore[attr-defined]
                entries += [(own, str(slot)) for slot in range(world)]
            if wanted.num_spare:
                everyones = store_of_job(*wanted.job)
                with control.waiting_to(f"find {wanted.num_spare} servers in the job's store") as look:
                    _wait_for(everyones, wanted, look, deadline_s, say=rank == 0)
                entries += [(everyones, str(slot)) for slot in range(wanted.num_spare)]
        except BaseException:
            self.close()
            raise
        self._client = self._talker = Client(StoreDirectory(entries), rank, world, int(space), files, names)
        self._epoch = 0
        self._num_asked: dict[int, itertools.count[int]] = {}
        try:
            rates = self._measure(len(entries), rank, world, control, deadline_s) if len(entries) > 1 else [1.0]
        except BaseException:
            self.abandon()
            raise
        self._shares = shares_of(world, rates[:beside], rates[beside:])
        self._client.weigh(self._shares)
        self._every = [slot for slot, share in enumerate(self._shares) if share > 0]

    def _measure(self, num_servers: int, rank: int, world: int, control: Control, deadline_s: float) -> list[float]:
        """How fast servers take what they are sent: of each, by one worker, not its own, all of them at a time."""
        buffer = torch.zeros(PROBE_NBYTES, dtype=torch.uint8)
        found = {}
        with control.waiting_to("measure how fast servers are") as look:
            for slot in (slot for slot in range(num_servers) if (slot + 1) % world == rank):
                times_s = []
                for nbytes in (LEAST_NBYTES, *[PROBE_NBYTES] * PROBE_TIMES):
                    began_s = time.perf_counter()
                    asked = self._hold_aside(Echo(buffer[:nbytes], slot))
                    while not asked.done_within(min(LOOK_S, deadline_s)):
                        look()
                        if time.perf_counter() - began_s > deadline_s:
                            raise DeadlineError(f"server {slot} does not answer; {self.lost or 'it is there'}")
                    times_s.append(time.perf_counter() - began_s)
                found[slot] = PROBE_NBYTES / min(times_s[1:])
        told: dict[str, float] = {}
        for text in control.gather(json.dumps(found), "measure how fast servers are"):
            told |= json.loads(text)
        rates = [told[str(slot)] for slot in range(num_servers)]
        # What differs by less may be chance.
        return rates if max(rates) > UNEQUAL * min(rates) else [1.0] * num_servers

    def place(self, parcels: Sequence[Sequence[torch.Tensor]]) -> tuple[int, list[tuple[int, ...]]]:
        """Of each message, given its ranges: bytes of a piece, and a server for each piece."""
        total = sum(values.nbytes for ranges in parcels for values in ranges)
        nbytes = partition_nbytes(total, len(self._every))
        pieces = [
            [(stop - start) * values.itemsize for values in ranges for start, stop in cut_of(values, nbytes)]
            for ranges in parcels
        ]
        return nbytes, spread(pieces, self._shares)

    def next_epoch(self) -> int:
        """Of a plan that all ranks take now."""
        self._epoch += 1
        return self._epoch

    def hold(self, errand: Errand) -> None:
        self._talker.hold(errand)

    def ask(self, question: Question, lane: int) -> Asked:
        """Outside of any plan. Questions of one lane follow one another, on all ranks in the same order."""
        asked = Asked(question)
        seq = self._next_seq(lane)
        nbytes = max(LEAST_NBYTES, min(PARTITION_NBYTES, question.nbytes // (4 * len(self._every))))
        # Not all small ones to the same server.
        home = self._every[lane % len(self._every) :] + self._every[: lane % len(self._every)]
        self._talker.hold(Errand(asked.conversation(), 0, _LANES + lane, seq, -1, home, nbytes, asked.end))
        return asked

    def _hold_aside(self, echo: Echo) -> Asked:
        """Other ranks need not ask the same."""
        asked = Asked(echo)
        seq = self._next_seq(_ASIDE)
        self._talker.hold(Errand(asked.conversation(), 0, _LANES + _ASIDE, seq, 0, [0], PROBE_NBYTES, asked.end))
        return asked

    def _next_seq(self, lane: int) -> int:
        return next(self._num_asked.setdefault(lane, itertools.count(1)))

    @property
    def lost(self) -> str:
        """For people: which servers are looked for."""
        return "; ".join(self._talker.lost)

    @property
    def num_replaced(self) -> int:
        return self._talker.num_replaced

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._service is not None:
            self._service.stop(patience_s=FETCH_S)

    def abandon(self) -> None:
        """Nothing arrives any more; who waits here is told."""
        if self._client is not None:
            self._client.abandon()
        if self._service is not None:
            self._service.stop()


class Asked:
    """A question that is under way."""

    def __init__(self, question: Question | Echo) -> None:
        self._question = question
        self._answer: Answer = None
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def conversation(self) -> Generator[Any, Answer, None]:
        self._answer = yield self._question

    def end(self, nbytes: int, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()

    def done_within(self, patience_s: float | None) -> bool:
        if not self._ended.wait(patience_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def answer(self) -> Answer:
        return self._answer


def cut_of(values: torch.Tensor, nbytes: int) -> list[tuple[int, int]]:
    return cut(values.numel(), values.itemsize, nbytes)


def _wait_for(store: dist.Store, wanted: Wanted, look: Callable[[], None], deadline_s: float, *, say: bool) -> None:
    slots, began_s = [str(slot) for slot in range(wanted.num_spare)], time.monotonic()
    while not store.check(slots):
        there = f"{sum(store.check([slot]) for slot in slots)} of {wanted.num_spare} servers"
        start = "start the others with `gradientflow server --job {}:{}`".format(*wanted.job)
        waited_s = time.monotonic() - began_s
        if waited_s > deadline_s:
            raise DeadlineError(f"{there} came within {deadline_s:g} s: {start}")
        if say and waited_s > ASK_FOR_S:
            _log.warning("%s are there: %s", there, start)
            say = False
        look()
        time.sleep(0.1)
