"""Beacons: every rank says in the store where it is, so that no rank waits in vain and none waits nameless.

A thread renews this rank's beacon about once a second and, while something on this rank waits, reads the
others'. Gloo wakes only the ring neighbours of a rank that died and nobody when one stops; here every
waiting thread asks `check` twice a second, and `verdict.judge` decides.

What the training thread writes is plain attributes, read by the beacon's thread: no lock on the way of a
gradient.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from gradientflow.documents import Record, parse_json
from gradientflow.errors import DeadlineError, PeerError
from gradientflow.exchange.stacks import Line, Stacks, as_written, stacks
from gradientflow.exchange.verdict import (
    CUT_OFF_S,
    SILENT_S,
    Beacon,
    Collective,
    Life,
    Peer,
    Verdict,
    Wait,
    judge,
    slow,
    unable,
)

BEAT_S = 1.0
#: How often a waiting thread looks up. Also how long Ctrl-C may take.
LOOK_S = 0.5
#: How long rank 0, whose process may hold the store, stays after it gave up.
LINGER_S = 2.5


class Process(Record):
    """A process, wherever it is. `started` tells it from a later one with the same number."""

    host: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        return cls(host=_this_machine(), pid=pid, started=_started(pid))

    def life(self) -> Life:
        if self.host != _this_machine() or not self.started:
            return Life.UNKNOWN
        fields = _status(self.pid)
        if not fields or fields[19] != self.started or fields[0] in "ZX":
            return Life.GONE
        return Life.STOPPED if fields[0] in "Tt" else Life.RUNNING


class Health:
    """This rank's beacon over `store`, and what the others' say. Constructing it sends nothing; `start` does.

    members: the ranks of the group in the whole job, by their rank in the group.
    processes: by rank, where they are known from before; else () until `start`.
    silent_s: how long a beacon, or the store, may be silent.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        members: tuple[int, ...],
        deadline_s: float,
        processes: Sequence[Process],
        silent_s: float = SILENT_S,
    ) -> None:
        self._store = store
        self._rank = rank
        self._members = members
        self._deadline_s, self._silent_s = deadline_s, silent_s
        # - Said by the training thread
        self.step = 0
        self.place = "attach"
        self.num_skipped = 0
        #: A step is open that a call of `backward()` is expected to finish.
        self.in_backward = False
        #: The training thread's identity, to look at its stack.
        self.trainer = 0
        self._entered: dict[str, int] = {}
        self._waits: dict[int, _Entry] = {}  # by thread
        self._ended = ""
        self._culprits: tuple[int, ...] = ()
        # - Known of the others
        self.processes = tuple(processes)
        now_s = time.monotonic()
        #: By rank: the newest, and when it was new.
        self._beacons = {rank: (Beacon(rank=rank), now_s) for rank in range(len(processes))}
        #: When they were read last: who waits for nobody does not look, and then knows nothing of silence.
        self._read_s = now_s
        self._stopped_since_s: dict[int, float] = {}
        self._answered_s = 0.0
        #: Its connection is closed, and is not made again.
        self._store_is_gone = False
        # - The thread's own
        self._beat = 0
        self._line = ""
        self._collective: _Call | None = None
        self._num_beats_outside = 0
        self._hurry = threading.Event()
        self._leaving = False
        self._thread: threading.Thread | None = None

    def announce(self) -> None:
        """Put a first beacon into the store. When all ranks have, they may `start`."""
        if len(self._members) > 1:
            _exchanging_here.append(self)
        self._store.set(str(self._rank), self._compose().model_dump_json())

    def start(self, processes: Sequence[Process]) -> None:
        """All ranks have announced themselves: keep saying where this one is."""
        self.processes = tuple(processes)
        now_s = self._answered_s = self._read_s = time.monotonic()
        self._beacons = {rank: (Beacon(rank=rank), now_s) for rank in range(len(processes))}
        if len(self._members) == 1:
            return
        # A connection of its own: a call on the other may last. Not before it is needed, since each 25th connection
        # to a TCPStore takes five seconds (torch 2.13).
        self._store = self._store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._work, name="gradientflow-beacon", daemon=True)
        self._thread.start()

    def end(self, words: str = "has left", culprits: tuple[int, ...] = ()) -> None:
        """Say why this rank will not come any more; the first words count."""
        if not self._ended:
            self._ended, self._culprits = words, culprits
        if self in _exchanging_here:
            _exchanging_here.remove(self)
        if self._thread is not None and not self._leaving:
            self._leaving = True
            self._hurry.set()
            # The thread sends the last beacon. A store that is gone must not hold anybody up.
            self._thread.join(timeout=1.0)

    def linger(self) -> None:
        """Before a rank that gave up leaves the process: if the store may go with it, the others need a moment to
        read what it said, or they would take it for the cause."""
        if self._rank != 0 or self._thread is None:
            return
        until_s = time.monotonic() + LINGER_S
        with contextlib.suppress(Exception):
            while time.monotonic() < until_s:
                self._read()
                lives = self._lives()
                if not any(life is Life.RUNNING and not self._beacons[rank][0].ended for rank, life in lives.items()):
                    return
                time.sleep(0.1)

    def beats(self) -> dict[int, tuple[int, float]]:
        """Of members as the whole job counts them: the newest beat, and since when it has been the newest, as far as
        was looked."""
        unseen_s = time.monotonic() - self._read_s
        return {self._members[rank]: (each.beat, since_s + unseen_s) for rank, (each, since_s) in self._beacons.items()}

    def behind(self, step: int) -> dict[int, str]:
        """Of members that are there and have finished fewer exchanges: by rank, how they ended, "" if they have not.
        None are known without a store."""
        if len(self._members) == 1:
            return {}
        self.enter("agreement", 0, "let the others catch up")
        try:
            self._refresh()
        finally:
            self.leave()
        if self._store_is_gone or time.monotonic() > self._answered_s + CUT_OFF_S:
            return {}
        peers = {rank: peer for rank, peer in self.peers().items() if peer.life is not Life.GONE}
        return {rank: peer.beacon.ended for rank, peer in peers.items() if peer.beacon.step < step}

    # - While something waits

    def enter(self, kind: str, number: int, detail: str = "") -> None:
        """The calling thread is in the `number`-th `kind`, which other ranks must enter too. `leave` it."""
        if number > self._entered.get(kind, 0):
            self._entered[kind] = number
            # Something came to its end: whoever was stopped has run since, though nobody may have looked meanwhile.
            self._stopped_since_s.clear()
        self._waits[threading.get_ident()] = (kind, number, detail, time.monotonic())

    def leave(self) -> None:
        del self._waits[threading.get_ident()]

    def check(self, *, deadline: bool = True) -> None:
        """From a thread that has entered something: raise if to wait is vain, or too long."""
        wait = _as_wait(self._waits[threading.get_ident()])
        verdict = self._judge(wait) or self._judge_by_elders()
        if verdict is not None:
            raise PeerError(f"waited {wait.waited_s:.0f} s for {wait}: {verdict.words}", verdict.culprits)
        if deadline and wait.waited_s > self._deadline_s:
            self._refresh()
            verdict = slow(wait, self.peers())
            words = f"waited {wait.waited_s:.0f} s for {wait}, the deadline is {self._deadline_s:g} s: {verdict.words}"
            raise DeadlineError(words, verdict.culprits)

    def find_culprit(self, words: str) -> PeerError:
        """The group failed (`words`) while the calling thread waited: who is to blame? Takes a few seconds
        unless somebody's process is gone."""
        wait = _as_wait(self._waits[threading.get_ident()])
        give_up_s = time.monotonic() + min(8.0, self._deadline_s)
        while True:
            verdict = self._judge(wait)
            if verdict is not None:
                return PeerError(f"waiting for {wait}: {verdict.words} ({words})", verdict.culprits)
            if time.monotonic() > give_up_s:
                seen = "; ".join(f"rank {peer.name} {peer.last_seen()}" for peer in self.peers().values())
                return PeerError(f"waiting for {wait}: the group's communication failed ({words}); {seen}", ())
            time.sleep(0.1)

    def peers(self, lives: dict[int, Life] | None = None) -> dict[int, Peer]:
        """All ranks but this one, as far as known."""
        lives = self._lives() if lives is None else lives
        now_s = time.monotonic()
        found = {}
        for rank, life in lives.items():
            beacon, renewed_s = self._beacons[rank]
            stopped_since_s = self._stopped_since_s.get(rank, now_s) if life is Life.STOPPED else now_s
            self._stopped_since_s[rank] = stopped_since_s
            # Not until now: a store that is out of reach since then shows nobody's beacon, and accuses nobody.
            silent_s = self._read_s - renewed_s
            found[rank] = Peer(beacon, self._members[rank], silent_s, life, now_s - stopped_since_s)
        return found

    def _lives(self) -> dict[int, Life]:
        return {rank: self.processes[rank].life() for rank in self._beacons if rank != self._rank}

    def _judge(self, wait: Wait) -> Verdict | None:
        """Nobody is accused on old evidence: who ended for another's sake has said so in the store, and is
        dead only if it was so before the store was read."""
        lives = self._lives()
        if self._judge_as_known(wait, lives) is None:
            return None
        self._refresh()
        return self._judge_as_known(wait, lives)

    def _judge_by_elders(self) -> Verdict | None:
        """Before ranks have met here, other exchanges of this process know them: is one dead or stopped, or has it
        given up waiting for this rank?"""
        if self._thread is not None:
            return None
        for elder in _exchanging_here.copy():
            if elder._thread is not None and self._judge_by(elder):
                elder._refresh()  # while nothing waits, it reads no beacons
                if verdict := self._judge_by(elder):
                    return verdict
        return None

    def _judge_by(self, elder: Health) -> Verdict | None:
        for peer in elder.peers().values():
            if peer.name not in self._members:
                continue
            if self._members[self._rank] in peer.beacon.culprits:
                return Verdict(f"rank {peer.name} gave up: {peer.beacon.ended}", (peer.name,))
            if words := unable(peer, self._deadline_s, CUT_OFF_S):
                return Verdict(f"rank {peer.name} {words}", (peer.name,))
            if peer.life is Life.GONE:
                return Verdict(f"rank {peer.name} has ended; {peer.last_seen()}", (peer.name,))
        return None

    def _judge_as_known(self, wait: Wait, lives: dict[int, Life]) -> Verdict | None:
        me = Peer(self._compose(), self._members[self._rank], life=Life.RUNNING)
        store_silent_s = time.monotonic() - self._answered_s if self._answers() else 0.0
        return judge(me, wait, self.peers(lives), store_silent_s, self._deadline_s, self._silent_s)

    def _refresh(self) -> None:
        """Have the beacons read now. A store that does not answer is not waited for."""
        asked_s = time.monotonic()
        self._hurry.set()
        while self._answers() and self._answered_s < asked_s and time.monotonic() < asked_s + 2.0:
            if self._store_is_gone:
                return
            time.sleep(0.02)

    def _answers(self) -> bool:
        return self._thread is not None and not self._leaving

    # - The thread

    def _work(self) -> None:
        while not self._leaving:
            self._hurry.clear()
            if not self._store_is_gone:  # each attempt would write a page of torch's warnings to the terminal
                self._round()
            self._hurry.wait(BEAT_S)
        with contextlib.suppress(Exception):
            if not self._store_is_gone:
                self._store.set(str(self._rank), self._compose().model_dump_json())

    def _round(self) -> None:
        self._beat += 1
        with contextlib.suppress(Exception):  # what a diagnosis runs into must not make this rank look dead
            self._look_at_the_stacks()
        try:
            began_s = time.monotonic()
            self._store.set(str(self._rank), self._compose().model_dump_json())
            if any(health._waits for health in _exchanging_here.copy()):
                self._read()
            self._answered_s = began_s
        except dist.DistNetworkError:
            self._store_is_gone = True
        except Exception:
            # The store is gone or does not answer. `_answered_s` stays behind, and `judge` sees it.
            self._hurry.wait(BEAT_S)

    def _read(self) -> None:
        others = [rank for rank in self._beacons if rank != self._rank]
        now_s = time.monotonic()
        for rank in others:
            beacon = parse_json(Beacon, self._store.get(str(rank)).decode(), f"the beacon of rank {rank}")
            old, renewed_s = self._beacons[rank]
            self._beacons[rank] = (beacon, now_s if beacon.beat != old.beat else renewed_s)
        self._read_s = now_s

    def _compose(self) -> Beacon:
        waits = [_as_wait(entry) for entry in self._waits.copy().values()]
        return Beacon(
            rank=self._rank,
            beat=self._beat,
            step=self.step,
            place=self.place,
            line=self._line,
            wait=max(waits, key=lambda wait: wait.waited_s, default=None),
            entered=self._entered.copy(),
            collective=self._elsewhere(),
            num_skipped=self.num_skipped,
            broken_off=self._num_beats_outside >= 2,
            ended=self._ended,
            culprits=self._culprits,
        )

    # - Looking at the training thread

    def _look_at_the_stacks(self) -> None:
        seen = stacks()
        lines = seen.of.get(self.trainer, ())
        self._line = _line_of_the_user(lines)
        found = _collective_of(self.trainer) if any(map(_is_collective, lines)) else None
        if found is None or self._collective is None or found.frame != self._collective.frame:
            self._collective = found
        # A backward pass that an exception ended tells nobody: its step stays open, and the thread has left it.
        outside = self.in_backward and not self._waits and seen.whole and not _somebody_runs_backward(seen)
        self._num_beats_outside = self._num_beats_outside + 1 if outside else 0

    def _elsewhere(self) -> Collective | None:
        call = self._collective
        if call is not None:
            return Collective(name=call.name, ranks=call.ranks, waited_s=time.monotonic() - call.since_s)
        for other in _exchanging_here.copy():
            for entry in other._waits.copy().values() if other is not self else ():
                wait = _as_wait(entry)
                whose = "" if wait.kind == "agreement" else " of another model"
                return Collective(name=f"{wait}{whose}", ranks=other._members, waited_s=wait.waited_s)
        return None


_Entry = tuple[str, int, str, float]  # kind, number, detail, since when


def _as_wait(entry: _Entry) -> Wait:
    kind, number, detail, since_s = entry
    return Wait(kind=kind, number=number, detail=detail, waited_s=time.monotonic() - since_s)


#: The health of all exchanges of this process: a rank may wait in one while it is missed in another.
_exchanging_here: list[Health] = []


# - The user's stack

#: In these nobody is through before everybody has come.
_FOR_ALL = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_gather_single", "all_to_all",
    "all_to_all_single", "barrier", "monitored_barrier", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single",
}  # fmt: skip
#: Here one may be through while another has not come: who is not in it may have been, and is not missed.
_FOR_SOME = {
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "scatter", "scatter_object_list", "recv",
    "send",
}  # fmt: skip


class _Call(NamedTuple):
    """A running call of torch.distributed. Only the frame's identity is kept: the frame holds tensors."""

    name: str
    frame: int
    ranks: tuple[int, ...]
    since_s: float


def _is_collective(line: Line) -> bool:
    return (line.function in _FOR_ALL or line.function in _FOR_SOME) and line.path.endswith("distributed_c10d.py")


def _collective_of(thread: int) -> _Call | None:
    """The outermost call of torch.distributed on a thread's stack that waits for others.

    To know the group that it was called with, frames have to be walked after all (see `stacks`): those of a thread that
    has just been seen in a collective, where it waits."""
    found = None
    frame = sys._current_frames().get(thread)
    while isinstance(frame, FrameType):
        if _is_collective(Line(frame.f_code.co_filename, 0, frame.f_code.co_name)):
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    name = found.f_code.co_name
    ranks = _ranks_of(found) if name in _FOR_ALL else ()
    return _Call(f"torch.distributed.{name}", id(found), ranks, time.monotonic())


def _ranks_of(frame: FrameType) -> tuple[int, ...]:
    group = frame.f_locals.get("group")
    try:
        return tuple(dist.get_process_group_ranks(group))
    except Exception:  # a group that is going away under us; then nobody is accused
        return ()


def _somebody_runs_backward(seen: Stacks) -> bool:
    """Any thread: on an accelerator hooks run on threads of the engine, and who called it may be anybody."""
    return any(line.function == "_engine_run_backward" for lines in seen.of.values() for line in lines)


def _line_of_the_user(lines: Sequence[Line]) -> str:
    """The innermost line that is neither PyTorch's, the standard library's nor ours."""
    for path, number, function in lines:
        if not path.startswith((_HERE, _TORCH, _STDLIB)) and "site-packages" not in path and path[:1] != "<":
            return f"{os.path.basename(path)}:{number} in {function}"
    return ""


_HERE = as_written(os.path.dirname(os.path.dirname(__file__)))
_TORCH = as_written(os.path.dirname(os.path.dirname(dist.__file__)))
_STDLIB = as_written(os.path.dirname(os.__file__))


# - Processes


@functools.cache
def _this_machine() -> str:
    """Equal for two processes exactly when they can see each other's numbers."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}, which has no /proc"


def _status(pid: int) -> list[str]:
    """/proc/PID/stat from the state on, [] if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    fields = _status(pid)
    return fields[19] if fields else ""
