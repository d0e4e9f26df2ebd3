"""Workers in lockstep that come and go: who is in, agreed on through the job's store.

Work is done in generations. A generation is a list of workers that is written once (`compare_set`: the first writer
wins) and never changed, so that all of them have the same one, or none. Whoever wants into the next says that it is
ready; the list is closed as soon as every member of the last generation is ready too, or is known not to come: it has
left, its process is gone, it is stopped or silent, or the deadline is over. Anybody who is ready may close it.

What this keeps:
- A worker is in one generation at a time, and exchanges with those of its own only: each has a corner of the store.
- Who was taken for dead and comes back finds a generation without it. It has missed steps, and is told to begin anew.
- After the first generation each has a member of the one before in it. If none is left, what they had is lost; if all
  of them have left, the job is over.

Workers are numbered as they come, for ever; ranks are places in a generation, in the order of numbers.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch.distributed as dist

from gradientflow.documents import Record, parse_json
from gradientflow.errors import DeadlineError, DisagreementError, PeerError, TrainingError
from gradientflow.exchange.health import Process
from gradientflow.exchange.members import Members
from gradientflow.exchange.verdict import CUT_OFF_S, SILENT_S, STOPPED_S, Beacon, Life

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

LOOK_S = 0.05
BEAT_S = 1.0
#: Two that miss each other find so at almost the same time: neither is to be shut out for having been late.
GRACE_S = 5.0


class Worker(Record):
    """Who is ready."""

    number: int
    process: Process
    #: Goes up while it waits.
    beat: int = 0


class Generation(Record):
    number: int
    workers: tuple[Worker, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(worker.number for worker in self.workers)


class _Asking:
    """Calls of the store, in a thread: one that is stopped or cut off does not answer, and no call of it runs out."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._answered_s = 0.0

    def answered(self) -> None:
        self._answered_s = time.monotonic()

    def run(self, action: Callable[[], _T]) -> _T:
        """Its `action` says now and then that the store has answered."""
        found: list[_T] = []
        raised: list[Exception] = []

        def work() -> None:
            try:
                found.append(action())
            except Exception as error:
                raised.append(error)

        self.answered()
        thread = threading.Thread(target=work, name="gradientflow-roster", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_S)
            if thread.is_alive() and time.monotonic() > self._answered_s + self._patience_s:
                raise TrainingError(
                    f"the job's store has not answered for {self._patience_s:g} s: the launcher or `gradientflow "
                    "store` that holds it is stopped, or this host is cut off"
                )
        for error in raised:
            if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
                words = str(error).partition("\n")[0]
                raise TrainingError(
                    f"the job's store is gone: the launcher or `gradientflow store` held it ({words})"
                ) from error
            raise error
        return found[0]


class Roster:
    """This worker's view. world: so many begin together, as the first to come says."""

    def __init__(self, store: dist.Store, world: int, deadline_s: float) -> None:
        self._store, self._deadline_s = store, deadline_s
        self._asking = _Asking(CUT_OFF_S)
        self._process = Process.this()
        self.number: int = self._asking.run(lambda: store.add("workers", 1)) - 1
        self._world = int(self._asking.run(lambda: store.compare_set("world", "", str(world))))
        #: The last one that this worker was in.
        self.generation: Generation | None = None
        self._beat = 0
        self._looked_s = 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # by worker: its beat, and when that was new
        self._stopped_s: dict[int, float] = {}  # since when

    def compare(self, facts: Mapping[str, str]) -> None:
        """Raise unless the worker that came first has the same ones. Here alone: the others need not suffer."""
        words = json.dumps(dict(facts))
        first: dict[str, str] = json.loads(self._asking.run(lambda: self._store.compare_set("facts", "", words)))
        for item in dict.fromkeys([*first, *facts]):
            if first.get(item) != facts.get(item):
                raise DisagreementError(
                    f"worker {self.number}, {item}: expected {first.get(item, 'nothing of that name')} (as on the "
                    f"first), found {facts.get(item, 'nothing of that name')}; nothing was sent",
                    (self.number,),
                )

    def members(self, backend: str) -> Members:
        """Of the generation that this worker is in."""
        found = self.generation
        assert found is not None
        processes = tuple(worker.process for worker in found.workers)
        corner = self._corner(found.number)
        return Members(found.numbers.index(self.number), found.numbers, corner, backend, processes)

    def alone(self, backend: str) -> Members:
        """Before it is in any."""
        corner = dist.PrefixStore(f"alone/{self.number}", self._store)
        return Members(0, (self.number,), corner, backend, (self._process,))

    def somebody_waits(self) -> bool:
        """Whether a worker wants to join. Asked often; the store is, now and then."""
        now_s = time.monotonic()
        if self.generation is None or now_s < self._looked_s + BEAT_S:
            return False
        self._looked_s = now_s
        key = _knock(self.generation.number + 1)
        return self._asking.run(lambda: bool(self._store.check([key])))

    def check_current(self) -> None:
        """Raise if the others have gone on without this worker."""
        if (found := self.generation) is not None:
            if self._asking.run(lambda: self._read(found.number + 1)) is not None:
                raise self._left_behind(found.number + 1)

    def leave(self) -> None:
        """For good: nobody waits for this worker any more."""
        self._asking.run(lambda: self._store.set(f"left/{self.number}", ""))

    def enter(
        self, late: Iterable[int] = (), beats: Mapping[int, tuple[int, float]] = MappingProxyType({})
    ) -> Generation:
        """Wait for the next generation that this worker is in.

        late: workers that are not waited for, but for a moment; if they come, they are in. beats: as the health of the
        last one knew them, so that silence need not be waited for twice."""
        self._seen.update(beats)
        return self._asking.run(lambda: self._enter(set(late)))

    def _enter(self, late: set[int]) -> Generation:
        last = self.generation
        number = last.number + 1 if last else self._newest() + 1
        self._stopped_s.clear()
        began_s = time.monotonic()
        end_s, beaten_s = began_s + self._deadline_s, 0.0
        while True:
            self._asking.answered()
            found = self._read(number)
            if found is not None:
                if self.number in found.numbers:
                    self.generation = found
                    return found
                if last is not None:
                    raise self._left_behind(number)
                number += 1
                continue
            now_s = time.monotonic()
            if now_s > beaten_s + BEAT_S:
                beaten_s = now_s
                self._say_ready(number, joins=last is None)
            before = self._read(number - 1) if number > 1 else None
            ready = self._ready(number)
            overdue = now_s > end_s
            missing = self._missing(before, ready, late if now_s > began_s + GRACE_S else set(), overdue)
            if not missing and self._may_begin(before, ready):
                self._propose(Generation(number=number, workers=tuple(ready[each] for each in sorted(ready))))
                continue
            if now_s > end_s + self._deadline_s:
                who = ", ".join(map(str, missing)) or f"{self._world - len(ready)} more"
                raise DeadlineError(
                    f"worker {self.number} waited {2 * self._deadline_s:g} s for generation {number}; missing: worker "
                    f"{who}",
                    tuple(missing),
                )
            time.sleep(LOOK_S)

    def _left_behind(self, generation: int) -> PeerError:
        return PeerError(
            f"worker {self.number}: the others went on without it in generation {generation}, since it was stopped, "
            "cut off or slow; start it anew to join them",
            (self.number,),
        )

    # - What is in the store

    def _corner(self, generation: int) -> dist.Store:
        return dist.PrefixStore(f"{generation}/exchange", self._store)

    def _newest(self) -> int:
        number = 0
        while self._store.check([f"{number + 1}/workers"]):
            number += 1
        return number

    def _read(self, number: int) -> Generation | None:
        key = f"{number}/workers"
        if not self._store.check([key]):
            return None
        return parse_json(Generation, self._store.get(key).decode(), f"generation {number}")

    def _say_ready(self, number: int, joins: bool) -> None:
        self._beat += 1
        words = Worker(number=self.number, process=self._process, beat=self._beat).model_dump_json()
        self._store.set(f"{number}/ready/{self.number}", words)
        if joins:
            self._store.set(_knock(number), "")

    def _propose(self, generation: Generation) -> None:
        self._store.compare_set(f"{generation.number}/workers", "", generation.model_dump_json())

    def _ready(self, number: int) -> dict[int, Worker]:
        """Those that can be counted on."""
        found = {}
        for each in range(self._store.add("workers", 0)):
            key = f"{number}/ready/{each}"
            if each != self.number and not self._store.check([key]):
                continue
            worker = parse_json(Worker, self._store.get(key).decode(), f"worker {each}")
            if each == self.number or not self._is_out(each, worker.process, worker.beat):
                found[each] = worker
        return found

    def _missing(
        self, before: Generation | None, ready: Mapping[int, Worker], late: set[int], overdue: bool
    ) -> list[int]:
        """Members of the last generation that will come, and have not."""
        missing = []
        for rank, worker in enumerate(before.workers if before else ()):
            number = worker.number
            if number in ready or number in late or overdue or self._store.check([f"left/{number}"]):
                continue
            assert before is not None
            if not self._is_out(number, worker.process, self._beat_of(before.number, rank)):
                missing.append(number)
        return missing

    def _beat_of(self, generation: int, rank: int) -> int:
        """Of a member that is still in the last generation, as its beacon says."""
        beacons = dist.PrefixStore("beacons", self._corner(generation))
        if not beacons.check([str(rank)]):
            return 0
        return parse_json(Beacon, beacons.get(str(rank)).decode(), f"the beacon of rank {rank}").beat

    def _is_out(self, number: int, process: Process, beat: int) -> bool:
        now_s, life = time.monotonic(), process.life()
        if life is Life.GONE:
            return True
        if life is not Life.STOPPED:
            self._stopped_s.pop(number, None)
        elif now_s > self._stopped_s.setdefault(number, now_s) + min(STOPPED_S, self._deadline_s):
            return True
        if self._seen.get(number, (-1, 0.0))[0] != beat:
            self._seen[number] = beat, now_s
        return life is Life.UNKNOWN and now_s > self._seen[number][1] + min(SILENT_S, self._deadline_s)

    def _may_begin(self, before: Generation | None, ready: Mapping[int, Worker]) -> bool:
        if before is None:
            return len(ready) >= self._world
        if any(worker.number in ready for worker in before.workers):
            return True
        staying = [worker for worker in before.workers if not self._store.check([f"left/{worker.number}"])]
        if not staying:
            raise TrainingError(
                f"worker {self.number} came too late: the job is over, all its workers have left", (self.number,)
            )
        # Who is only silent may come back with what it has.
        if not all(worker.process.life() is Life.GONE for worker in staying):
            return False
        _log.warning(
            "worker %d: nobody of generation %d is left, and what they had is lost: training begins with what this "
            "generation brings",
            self.number,
            before.number,
        )
        return True


def _knock(number: int) -> str:
    return f"{number}/knock"
