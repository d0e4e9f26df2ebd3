"""What a rank shares with the others of its group: lanes for gradients, a side way for weights, and who is well.

Lanes are roads ([road](road.py)): the process group's own all-reduce (`native`), MPI's (`mpi`), a pattern that we
run ourselves over connections of our own (`staged`), or servers that add up for all (`server`). Beside them one process
group moves initial weights and buffers, which may come at any time.

A failed exchange is `abandon`ed: what it was using is never used again ([Note: abandoned operations] in native.py), and
`renewed` builds another with the ranks that come.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradientflow.compress import Answer, Conversation, Gather, Question, Swap, alone
from gradientflow.documents import Record
from gradientflow.errors import DeadlineError, DisagreementError, TrainingError, UsageError
from gradientflow.exchange.control import Control
from gradientflow.exchange.health import LOOK_S, Health, Process
from gradientflow.exchange.links import Links
from gradientflow.exchange.members import Members
from gradientflow.exchange.mpi import Mpi
from gradientflow.exchange.native import Connecting, Groups
from gradientflow.exchange.reach import LOOPBACK
from gradientflow.exchange.road import Pending, TimeIsUp
from gradientflow.exchange.server.servers import Servers, Wanted
from gradientflow.exchange.staged import Staged, peers_of
from gradientflow.exchange.verdict import CUT_OFF_S, SILENT_S
from gradientflow.patterns import ALL_REDUCES, HALVES, Pattern, scatter_of, two_level
from gradientflow.plan import NATIVE

# Small tensors are packed up to this size before they are broadcast; larger ones go by themselves, in place.
PACK_NBYTES = 4 * 2**20
#: For connections that may be done without.
PATIENCE_S = 15.0

_log = logging.getLogger(__name__)


class Moment(IntEnum):
    """What a broadcast is for."""

    START = 0
    TRAINING = 1
    EVALUATION = 2
    JOIN = 3


class _Hello(Record):
    """What ranks tell each other first."""

    process: Process
    ways: str


class Stamp(NamedTuple):
    """A point of training, the same on all ranks."""

    step: int
    moment: Moment

    def __str__(self) -> str:
        words = ["the start", "a training forward pass", "a forward pass for evaluation", "the end of uneven inputs"]
        return f"{words[self.moment]}, step {self.step}"


class Exchange:
    """Lanes over `members`, or over those of a process group, for tensors on `device`. Constructing it is a collective
    call.

    patterns: names of the patterns that messages may be carried by, beside the group's own all-reduce.
    address: at which the other ranks reach this one; for patterns.
    mpi: sums go over MPI instead of the group.
    mesh: what a codec gathers or swaps goes over connections of our own too, if there are patterns.
    servers: questions go through them instead of the group.
    insists: on its patterns; else it does without them where ranks cannot be reached by connections of our own.
    """

    def __init__(
        self,
        members: dist.ProcessGroup | Members,
        device: torch.device,
        num_lanes: int,
        deadline_s: float,
        patterns: Sequence[str] = (),
        address: str = LOOPBACK,
        mpi: bool = False,
        mesh: bool = False,
        servers: Wanted | None = None,
        insists: bool = True,
        previous: Exchange | None = None,
    ) -> None:
        who = members if isinstance(members, Members) else Members.of(members, device)
        self.rank, self.world, self.backend = who.rank, len(who.names), who.backend
        #: Members as the whole job counts them.
        self.members = who.names
        self.global_rank = who.names[who.rank]
        self.deadline_s = deadline_s
        self.num_lanes = num_lanes or _default_lanes(self.backend)
        self.patterns = tuple(patterns)
        if patterns and device.type != "cpu":
            raise UsageError(
                f"the model is on {device.type}, and patterns ({', '.join(patterns)}) run on CPUs only: take a recipe "
                "of whole messages by the group's own all-reduce, such as flow or lazy"
            )
        if mpi and device.type != "cpu":
            raise UsageError(f"the model is on {device.type}: -mpi runs on CPUs only; use -a2a")
        if servers and device.type != "cpu":
            raise UsageError(f"the model is on {device.type}: -ps runs on CPUs only; use -a2a")
        self._who, self._device, self._address, self._over_mpi = who, device, address, mpi
        self._mesh = mesh and bool(patterns)
        self._wanted, self._insists = servers, insists
        self._abandoned = False
        self._num_broadcasts = 0
        #: How often its members have met again, whatever came of it: where they met, things lie about.
        self._num_meetings = 0
        self._store: dist.Store = previous._another_corner() if previous else _corner_of(who, deadline_s)
        known: tuple[Process, ...] = previous.health.processes if previous else who.processes
        beacons = dist.PrefixStore("beacons", self._store)
        # Servers hear of a worker that died, so that one that is only silent can be waited for.
        silent_s = SILENT_S if servers is None else CUT_OFF_S
        self.health: Health = Health(beacons, self.rank, self.members, deadline_s, known, silent_s)
        control = dist.PrefixStore("control", self._store)
        self.control = Control(control, self.rank, self.members, deadline_s, self.health)
        self._groups, self._staged = Groups.none(), Staged.none()
        self._sums: Groups | Mpi = self._groups
        #: None: ranks exchange among themselves, each lane in the plan's order.
        self.servers: Servers | None = None
        try:
            self._meet(previous)
        except BaseException as error:
            culprits = error.ranks if isinstance(error, TrainingError) else ()
            self.health.end(f"gave up meeting the other ranks: {error or type(error).__name__}", culprits)
            raise

    def _another_corner(self) -> dist.Store:
        return dist.PrefixStore(f"again/{self._num_meetings}", self._store)

    def _meet(self, previous: Exchange | None) -> None:
        self.health.announce()
        purpose = "meet the other ranks again after a failure" if previous else "meet the other ranks"
        own = _Hello(process=Process.this(), ways=self._ways())
        hellos = [_Hello.model_validate_json(text) for text in self.control.gather(own.model_dump_json(), purpose)]
        if previous:
            previous._num_meetings += 1
        # What is to be connected follows from it, so whoever is told otherwise would be waited for in vain.
        for name, hello in zip(self.members, hellos, strict=True):
            if hello.ways != hellos[0].ways:
                raise DisagreementError(
                    f"rank {self.members[0]} exchanges by {hellos[0].ways} and rank {name} by {hello.ways}: recipes, "
                    "devices or GRADIENTFLOW* in the environment differ; all ranks need the same"
                )
        processes = [hello.process for hello in hellos]
        here = sum(process.host == processes[self.rank].host for process in processes)
        #: How likely it is that a processor's time is missing elsewhere: ranks of this machine for each of its cores.
        self.crowding = min(1.0, here / (os.cpu_count() or 1))
        self.health.start(processes)
        if self.world > 1:
            self._sums = self._groups = self._connected()
        if self.world > 1 and self._over_mpi:
            self._sums = Mpi(self.control, self.num_lanes, self._wait_to_connect)
        if self.world > 1 and self.patterns:
            self._connect()
        if self.world > 1 and self._wanted:
            corner = (self._store, self.control, self.rank, self.members)
            self.servers = Servers(self._wanted, self._address, *corner, self.deadline_s)
        if self.world > 1:
            # A rank that is connected and fails next would break the connections that others are still making, and
            # they would report its failure instead of their own.
            self.control.gather("", "wait until all ranks are connected")

    def _ways(self) -> str:
        """What it will have connections for, in words."""
        if self._wanted:
            return f"servers, {self._wanted.num_spare} of them on hosts of their own"
        beside = f" and connections of our own for {', '.join(self.patterns)}" if self.patterns else ""
        return f"{'MPI' if self._over_mpi else self.backend} on {self.num_lanes} lanes{beside}"

    def _connected(self) -> Groups:
        # Gloo's own time limit is a backstop: our waits end earlier, and with names.
        limit_s = self.deadline_s + 30
        num_lanes = 0 if self._over_mpi or self._wanted else self.num_lanes
        facts = (self.backend, self._store, self.rank, self.world, num_lanes, limit_s)
        if self.backend != "gloo":
            return Groups(*facts)
        connecting = Connecting(*facts)
        self.health.enter("groups", 1)
        try:
            self._wait(connecting)
        finally:
            self.health.leave()
        return connecting.groups

    def _connect(self) -> None:
        limit_s = self.deadline_s if self._insists else min(PATIENCE_S, self.deadline_s / 2)
        links = Links(self._address, self.control, self.rank, limit_s)
        patterns = {name: _pattern(name, links.addresses) for name in self.patterns}
        everyone = [rank for rank in range(self.world) if rank != self.rank] if self._mesh else []
        peers = {peer for pattern in patterns.values() for peer in peers_of(pattern, self.rank)}
        if self._insists:
            links.connect(peers.union(everyone), self.num_lanes)
        elif why_not := links.try_to_connect(peers.union(everyone), self.num_lanes):
            if self.rank == 0:
                _log.warning("messages go by the group's own all-reduce only, not by %s: %s", self.patterns, why_not)
            self.patterns, self._mesh = (), False
            return
        self._staged = Staged(links, patterns, self.rank, self.num_lanes, everyone)

    def answer(self, question: Question, lane: int, number: int = 0, detail: str = "", pattern: str = NATIVE) -> Answer:
        """Carry out a codec's question, a sum in place. Returns when the result is there (on an accelerator: when
        it is queued on the current stream). `number` and `detail` say which exchange this is part of; patterns are for
        sums."""
        if self.world == 1:
            return alone(question)
        self.health.enter("gradients", number, detail)
        try:
            if self.servers is not None:
                asked = self.servers.ask(question, lane)
                self._wait(asked)
                return asked.answer
            if isinstance(question, Gather):
                into = question.tensor.new_empty((self.world, question.tensor.numel()))
                if self._mesh:
                    self._swap([question.tensor.view(-1)] * self.world, into.unbind(), lane)
                else:
                    self._wait(self._sums.all_gather(into, question.tensor, lane))
                return into.unbind()
            if isinstance(question, Swap) and self._mesh:
                places = [question.outgoing[0].new_empty(size) for size in question.incoming]
                self._swap(question.outgoing, places, lane)
                return places
            if isinstance(question, Swap):
                sizes = list(question.incoming)
                outgoing = torch.cat([tensor.view(-1) for tensor in question.outgoing])
                arrived = outgoing.new_empty(sum(sizes))
                self._wait(self._sums.all_to_all(arrived, outgoing, sizes, [len(t) for t in question.outgoing], lane))
                return torch.split(arrived, sizes)
            if pattern == NATIVE:
                for pending in [self._sums.all_reduce(tensor, lane) for tensor in question.tensors]:
                    self._wait(pending)
            else:
                for tensor in question.tensors:
                    self._run(pattern, tensor, lane)
            return None
        finally:
            self.health.leave()

    @property
    def sums_sparse(self) -> bool:
        """Whether tensors of a `Sum` may be sparse."""
        return self.world == 1 or (isinstance(self._sums, Groups) and self.servers is None)

    def scratch_nbytes(self, pattern: str, nbytes: int) -> int:
        """What a message of `nbytes` needs beside itself."""
        return 0 if self.world == 1 or pattern == NATIVE else self._staged.scratch_nbytes(pattern, nbytes)

    def owned(self, pattern: str, values: torch.Tensor) -> Sequence[tuple[int, int]]:
        """Where in `values` this rank has the sum, after the first half of a pattern."""
        if self.world == 1:
            return [(0, values.numel())]
        return self._staged.owned(scatter_of(pattern), values.numel(), values.itemsize)

    def broadcast(self, tensors: Iterable[torch.Tensor], stamp: Stamp, source: int = 0) -> None:
        """Rank `source`'s values into everybody's `tensors`, small ones packed. Beside all lanes.

        The stamp says at which point of training this is; it travels along, since a rank that makes one call
        more than the others would otherwise hand them stale values for ever.
        """
        if self.world == 1:
            return
        self._num_broadcasts += 1
        self.health.enter("broadcast", self._num_broadcasts, str(stamp))
        try:
            theirs = torch.tensor(stamp, device=self._device)
            for pack in _packs([theirs, *tensors]):
                # One contiguous tensor is its own pack: no copy of a large parameter.
                alone = len(pack) == 1 and pack[0].is_contiguous()
                flat = pack[0].view(-1).view(torch.uint8) if alone else _join(pack)
                self._wait(self._groups.broadcast(flat, source))
                if not alone:
                    _split(flat, pack)
        finally:
            self.health.leave()
        # To look at it would make an accelerator wait.
        if self._device.type == "cpu" and (found := Stamp(*theirs.tolist())) != stamp:
            raise DisagreementError(
                f"rank {self.global_rank} is at {stamp} and got what rank {self.members[source]} sent at {found}: one "
                "of them made a forward pass that the other did not (to evaluate on one rank, call the unwrapped "
                "module)"
            )

    def abandon(self, words: str, culprits: tuple[int, ...] = ()) -> None:
        """The other ranks read `words` about this one, and stop waiting."""
        self._abandoned = True
        self._sums.abandon()
        self._groups.abandon()
        self._staged.abandon()
        if self.servers is not None:
            self.servers.abandon()
        self.health.end(words, culprits)

    def renewed(self) -> Exchange:
        """Another exchange with the same members, after this one was abandoned on all of them. Collective."""
        ways = (self.patterns, self._address, self._over_mpi, self._mesh, self._wanted, self._insists)
        return Exchange(self._who, self._device, self.num_lanes, self.deadline_s, *ways, self)

    def close(self) -> None:
        """Give the connections back."""
        self.health.end()
        self._sums.close()
        self._groups.close()
        self._staged.close()
        if self.servers is not None:
            self.servers.close()

    def _run(self, pattern: str, values: torch.Tensor, lane: int) -> None:
        try:
            self._staged.run(pattern, values.view(-1), lane, self._look, min(LOOK_S, self.deadline_s))
        except OSError as error:
            raise self._broken(str(error)) from error

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], lane: int) -> None:
        try:
            self._staged.swap(outgoing, incoming, lane, self._look, min(LOOK_S, self.deadline_s))
        except OSError as error:
            raise self._broken(str(error)) from error

    def _wait(self, pending: Pending) -> None:
        try:
            # NCCL orders the current stream behind the work; with a limit it would block this thread instead. Its
            # watchdog holds the lane to the deadline the group was made with.
            patience_s = None if self.backend == "nccl" else min(LOOK_S, self.deadline_s)
            while not pending.done_within(patience_s):
                self._look()
        except TimeIsUp as error:
            raise DeadlineError(f"no answer from the group within {self.deadline_s:g} s ({error})") from error
        except ConnectionError as error:
            raise self._broken(str(error)) from error

    def _wait_to_connect(self, connecting: Pending) -> None:
        self.health.enter("connections", 1)
        try:
            self._wait(connecting)
        finally:
            self.health.leave()

    def wait_until(self, done: Callable[[float], bool], number: int, detail: str) -> None:
        """For gradients that others carry: until `done`, which waits for so many seconds at most, or it is vain."""
        self.health.enter("gradients", number, detail)
        try:
            while not done(min(LOOK_S, self.deadline_s)):
                self._look()
        finally:
            self.health.leave()

    def _look(self) -> None:
        if self._abandoned:
            raise TrainingError("this exchange was given up")
        try:
            self.health.check()
        except DeadlineError as error:
            if self.servers is None or not self.servers.lost:
                raise
            raise DeadlineError(f"{error}; {self.servers.lost}", error.ranks) from error

    def _broken(self, words: str) -> TrainingError:
        if self._abandoned or self.backend == "nccl":
            return TrainingError(f"the group's communication failed ({words})")
        return self.health.find_culprit(words)


def drive(
    exchange: Exchange, conversation: Conversation, lane: int, number: int, detail: str, pattern: str = NATIVE
) -> int:
    """From its first question to its last; returns the bytes that it asked about."""
    nbytes, answer = 0, None
    try:
        while True:
            question = conversation.send(answer)
            nbytes += question.nbytes
            answer = exchange.answer(question, lane, number, detail, pattern)
    except StopIteration:
        return nbytes


def _corner_of(who: Members, deadline_s: float) -> dist.Store:
    """Of the store, where nobody else has been. Collective."""
    if who.processes or len(who.names) == 1:
        return who.store
    health = Health(dist.PrefixStore("beacons", who.store), who.rank, who.names, deadline_s, ())
    health.announce()
    try:
        control = Control(dist.PrefixStore("control", who.store), who.rank, who.names, deadline_s, health)
        return dist.PrefixStore(control.meet("meet the other ranks"), who.store)
    finally:
        health.end()


def _default_lanes(backend: str) -> int:
    """Two lanes hide one message's start-up behind the other's transfer. NCCL's communicators compete for
    the same GPU, so there it is one unless the recipe asks for more."""
    return 1 if backend == "nccl" else 2


def _pattern(name: str, addresses: Sequence[str]) -> Pattern:
    """Ranks at one address are workers of one host."""
    if name != "levels":
        return {**ALL_REDUCES, **HALVES}[name](len(addresses))
    hosts: dict[str, list[int]] = {}
    for rank, address in enumerate(addresses):
        hosts.setdefault(address, []).append(rank)
    return two_level(list(hosts.values()))


def _packs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups of at most `PACK_NBYTES`, or one larger tensor."""
    packs: list[list[torch.Tensor]] = []
    room = 0
    # Wide elements first, so that every piece of the joined bytes starts at a multiple of its own width.
    # `.data`: a buffer may be written between two forward passes whose backward is still to come.
    for tensor in sorted((tensor.data for tensor in tensors), key=lambda tensor: -tensor.itemsize):
        if not tensor.numel():
            continue
        if tensor.nbytes > room:
            packs.append([])
            room = PACK_NBYTES
        packs[-1].append(tensor)
        room -= tensor.nbytes
    return packs


def _join(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    # A slice with a step is "reshaped" to another view of itself, whose bytes are not in a row.
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in pack])


def _split(flat: torch.Tensor, pack: Sequence[torch.Tensor]) -> None:
    for tensor, piece in zip(pack, torch.split(flat, [tensor.nbytes for tensor in pack]), strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
