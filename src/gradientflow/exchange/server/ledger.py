"""What a server has: sums that are being made and sums that somebody still needs. No sockets, no clock.

`Ledger.take` is given what a worker says and returns what is to be said; whoever talks to workers (service.py) decides
when. Invariants:

- a share counts once, however often it comes: who has contributed is remembered until the sum is settled, and then that
  it is settled;
- a sum is settled when every worker has said that it has it, or pushes for the next one of the same key. Who pushes for
  that without having been sent this one is refused. So a server holds at most two sums of a key, the one that some
  worker still fetches and the one that others push for already: twice the model. Of workers that push as they like each
  can have one unfinished sum of a key, and no more;
- nothing in here is worth saving. A server that is started anew asks workers for the sums that some of them have, and
  gets shares of the others once more ([Note: a lost server] in client.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gradientflow.exchange.server.window import Receipts, Window, abreast
from gradientflow.exchange.server.wire import (
    EVERYONE,
    Header,
    Key,
    Kind,
    Name,
    Refused,
    pack_names,
    read_hello,
    read_names,
)

#: libzmq hands small messages out as parts of a common buffer, at any address: these are copied.
SMALL_NBYTES = 16 * 1024
#: A worker is not missed before its connection has been gone for so long.
GONE_S = 3.0
MAX_WORLD = 4096
MAX_SPACES = 1024
#: Of sums and relays that there are or were, by name: what it takes to remember one is not in its bytes.
MAX_NAMES = 2**20


class Outgoing(NamedTuple):
    """To be said to whoever the ledger knows by this identity."""

    identity: bytes
    header: Header
    payload: torch.Tensor | bytes | None = None


@dataclass(slots=True)
class _Entry:
    """A sum, or a relay."""

    header: Header
    #: Who has given a share.
    given: set[int] = field(default_factory=set)
    value: torch.Tensor | None = None
    complete: bool = False
    #: Who is to have it and has not said so.
    missing: set[int] = field(default_factory=set)
    #: Who was asked for it, because it had it.
    asked: bytes = b""


@dataclass(slots=True)
class _Member:
    identity: bytes
    epoch: int = 0
    #: Sums that it had when it said hello.
    holds: dict[Key, int] = field(default_factory=dict)
    results: Window[Name, _Entry] = field(default_factory=Window)
    taken: Receipts[Name] = field(default_factory=Receipts)
    left: bool = False
    gone_since_s: float | None = None
    reported: bool = False


class _Space:
    def __init__(self, number: int, world: int) -> None:
        self.number, self.world = number, world
        self.members: dict[int, _Member] = {}
        self.entries: dict[Name, _Entry] = {}
        #: Of those entries, by key: few.
        self.seqs: dict[Key, set[int]] = {}
        #: The newest that is over, by key.
        self.settled: dict[Key, int] = {}
        self.epoch = 0  # which all members have reached

    def near(self, name: Name, *, newer: bool) -> dict[Name, _Entry]:
        """Entries of the same key that come after it, or before."""
        found = (Name(name.key, seq) for seq in self.seqs.get(name.key, ()) if seq != name.seq)
        return {other: self.entries[other] for other in found if (other.seq > name.seq) is newer}


class Ledger:
    """limit_nbytes: what it may hold."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self._spaces: dict[int, _Space] = {}
        self._who: dict[bytes, tuple[_Space, int]] = {}
        self.held_nbytes = 0
        #: Of everything that was not believed, by reason. "repeated" are shares that had come before.
        self.refusals: Counter[str] = Counter()
        self.summed_nbytes = 0

    def take(
        self, identity: bytes, header: Header, payload: memoryview, now_s: float, *, receipt: bool = True
    ) -> Iterable[Outgoing]:
        """receipt: whether a worker is to be told that its share has come. Raises `Refused` and is as before."""
        if header.kind is Kind.HELLO:
            return self._welcome(identity, header, payload)
        if identity not in self._who:
            raise Refused("no hello")
        space, rank = self._who[identity]
        if header.space != space.number:
            raise Refused("another space")
        member = space.members[rank]
        match header.kind:
            case Kind.PUSH | Kind.RELAY:
                said = self._share(space, rank, header, payload)
                if receipt:
                    member.taken.add(Name(header.key, header.seq), header.nbytes, now_s)
                return said
            case Kind.ECHO:
                member.taken.add(Name(header.key, header.seq), header.nbytes, now_s, at_once=True)
                return []
            case Kind.GIVE:
                return self._given(space, header, payload)
            case Kind.GOT:
                return [said for name in read_names(payload) for said in self._got(space, rank, name)]
            case Kind.BYE:
                member.left = True
                self._drop_if_over(space)
                return []
            case _:
                raise Refused("kind")

    def results(self, has_room: Callable[[bytes], bool] = lambda identity: True) -> Iterator[Outgoing]:
        """What workers may be sent now, one by one."""
        for space in list(self._spaces.values()):
            there = [member for member in space.members.values() if member.gone_since_s is None]
            for who, entry in abreast({member.identity: member.results for member in there}, has_room):
                yield Outgoing(who, entry.header, entry.value)

    def sent(self, result: Outgoing) -> None:
        """It will come, whatever follows it: there is no need to wait until the worker says so."""
        if result.identity in self._who:
            space, rank = self._who[result.identity]
            space.members[rank].results.arrived(Name(result.header.key, result.header.seq))

    def receipts(self, now_s: float) -> Iterator[Outgoing]:
        """What workers may be told to have arrived."""
        for space in self._spaces.values():
            for member in space.members.values():
                if names := member.taken.due(now_s):
                    words = pack_names(names)
                    yield Outgoing(member.identity, Header(Kind.TAKEN, space.number, nbytes=len(words)), words)

    @property
    def owes_receipts(self) -> bool:
        return any(member.taken for space in self._spaces.values() for member in space.members.values())

    def identities(self) -> list[bytes]:
        """Of those who are expected to be there."""
        return [
            member.identity
            for space in self._spaces.values()
            for member in space.members.values()
            if not member.left and not member.reported
        ]

    def knows(self, identity: bytes) -> bool:
        """Whether it has said hello, and nobody else in its place since."""
        return identity in self._who

    @property
    def is_awaited(self) -> bool:
        """Whether somebody who is there has a result to come."""
        return any(
            not space.members[rank].reported
            for space in self._spaces.values()
            for entry in space.entries.values()
            if entry.complete
            for rank in entry.missing & space.members.keys()
        )

    def unreachable(self, identity: bytes, now_s: float) -> list[Outgoing]:
        """Its connection is gone. What the others are to know of it, if it has been so for a while."""
        if identity not in self._who:
            return []
        space, rank = self._who[identity]
        member = space.members[rank]
        if member.identity != identity or member.reported:
            return []
        if member.gone_since_s is None:
            member.gone_since_s = now_s
        if now_s - member.gone_since_s < GONE_S:
            return []
        member.reported = True
        self._drop_if_over(space)
        if member.left:
            return []
        words = Header(Kind.LOST, space.number, rank=rank)
        return [Outgoing(other.identity, words) for other in space.members.values() if not other.reported]

    # - What workers say

    def _welcome(self, identity: bytes, header: Header, payload: memoryview) -> list[Outgoing]:
        world, holdings = read_hello(payload)
        if len(holdings) > MAX_NAMES:
            raise Refused("names")
        if identity in self._who and self._who[identity][0].number != header.space:
            raise Refused("somebody else")
        space = self._spaces.get(header.space) or _Space(header.space, world)
        if not 0 <= header.rank < world <= MAX_WORLD or space.world != world:
            raise Refused("rank")
        if len(self._spaces) >= MAX_SPACES and header.space not in self._spaces:
            raise Refused("spaces")
        self._spaces[header.space] = space
        old = space.members.get(header.rank)
        if old is not None:
            self._who.pop(old.identity, None)
        member = _Member(identity, old.epoch if old else 0)
        space.members[header.rank] = member
        self._who[identity] = space, header.rank
        said = [Outgoing(identity, header._replace(kind=Kind.WELCOME, nbytes=0))]
        member.holds = {holding.key: holding.seq for holding in holdings}
        for name, entry in list(space.entries.items()):
            if entry.header.rank == EVERYONE and name.seq <= member.holds.get(name.key, -1):
                said += self._got(space, header.rank, name)
            elif entry.complete and header.rank in entry.missing:
                member.results.add(name, entry.header.urgency, entry.header.nbytes, entry)
            said += self._ask_for(space, entry)
        return said

    def _share(self, space: _Space, rank: int, header: Header, payload: memoryview) -> list[Outgoing]:
        member = space.members[rank]
        name = Name(header.key, header.seq)
        over = header.seq <= space.settled.get(header.key, -1) or 0 < header.key.epoch < space.epoch
        # A share that was overtaken: its sum has come to this worker in another way.
        over = over or any(rank in newer.given for newer in space.near(name, newer=True).values())
        entry = space.entries.get(name)
        if over or (entry is not None and rank in entry.given):
            self.refusals["repeated"] += 1
            passed = Outgoing(member.identity, header._replace(kind=Kind.PASSED, nbytes=0))
            return [passed] if over and header.kind is Kind.RELAY else []
        older = space.near(name, newer=False)
        self._check_not_ahead(space, rank, older)
        if entry is None:
            entry = self._new_entry(space, rank, header)
        elif entry.header.dtype is not header.dtype or entry.header.nbytes != header.nbytes:
            return self._disagreement(space, rank, entry.header, header)
        said = [words for had in older for words in self._got(space, rank, had)]
        if header.key.epoch > member.epoch:
            member.epoch = header.key.epoch
            self._drop_old_epochs(space)
        entry.given.add(rank)
        if not entry.complete:
            self._add(entry, payload)
            entry.header = entry.header._replace(urgency=min(entry.header.urgency, header.urgency))
            if len(entry.given) == (1 if header.kind is Kind.RELAY else space.world):
                self._complete(space, name, entry)
        return said + self._ask_for(space, entry)

    def _check_not_ahead(self, space: _Space, rank: int, older: Mapping[Name, _Entry]) -> None:
        """Who pushes has what was before. If it cannot have that, it would fill the memory here with shares that nobody
        adds up."""
        for name, entry in older.items():
            is_open = not entry.complete or entry.header.rank != EVERYONE  # who relays hears when it is over
            if (is_open and rank in entry.given) or space.members[rank].results.waits(name):
                raise Refused("ahead")

    def _new_entry(self, space: _Space, rank: int, header: Header) -> _Entry:
        num_names = sum(len(each.entries) + len(each.settled) for each in self._spaces.values())
        if self.held_nbytes + header.nbytes > self.limit_nbytes or num_names >= MAX_NAMES:
            raise Refused("memory")
        everyone = set(range(space.world))
        if header.kind is Kind.RELAY:
            if header.rank != EVERYONE and not 0 <= header.rank < space.world:
                raise Refused("rank")
            whose = header._replace(kind=Kind.RESULT, rank=rank)
            entry = _Entry(whose, missing=everyone - {rank} if header.rank == EVERYONE else {header.rank})
        else:
            entry = _Entry(header._replace(kind=Kind.RESULT, rank=EVERYONE), missing=everyone)
        space.entries[Name(header.key, header.seq)] = entry
        space.seqs.setdefault(header.key, set()).add(header.seq)
        self.held_nbytes += header.nbytes
        return entry

    def _add(self, entry: _Entry, payload: memoryview) -> None:
        dtype = entry.header.dtype
        share = torch.frombuffer(payload, dtype=dtype) if len(payload) else torch.empty(0, dtype=dtype)
        self.summed_nbytes += len(payload)
        if entry.value is None:
            # What has arrived is where the sum is made: nothing is copied.
            entry.value = share.clone() if len(payload) <= SMALL_NBYTES else share
        else:
            entry.value.add_(share)

    def _given(self, space: _Space, header: Header, payload: memoryview) -> list[Outgoing]:
        name = Name(header.key, header.seq)
        entry = space.entries.get(name)
        if header.seq <= space.settled.get(header.key, -1) or (entry is not None and entry.complete):
            return []  # somebody else gave it
        if entry is None or not entry.asked:
            raise Refused("not asked for")
        if entry.header.dtype is not header.dtype or entry.header.nbytes != header.nbytes:
            raise Refused("length of a payload")
        entry.value = None
        self._add(entry, payload)
        entry.missing = {
            rank
            for rank in range(space.world)
            if rank not in space.members or space.members[rank].holds.get(header.key) != header.seq
        }
        self._complete(space, name, entry)
        return []

    def _got(self, space: _Space, rank: int, name: Name) -> list[Outgoing]:
        results = space.members[rank].results
        if results.waits(name):
            return []  # it cannot have come
        results.arrived(name)
        entry = space.entries.get(name)
        if entry is None or not entry.complete:
            return []
        entry.missing.discard(rank)
        return self._settle_if_over(space, name, entry)

    # - What becomes of it

    def _ask_for(self, space: _Space, entry: _Entry) -> list[Outgoing]:
        """Somebody may have the sum that others push for: then it has been made already, and is not made again."""
        if entry.complete or entry.header.rank != EVERYONE or entry.asked in self._who:
            return []
        for member in space.members.values():
            is_there = not member.left and member.gone_since_s is None
            if is_there and member.holds.get(entry.header.key) == entry.header.seq:
                entry.asked = member.identity
                return [Outgoing(member.identity, entry.header._replace(kind=Kind.WANT, nbytes=0))]
        return []

    def _complete(self, space: _Space, name: Name, entry: _Entry) -> None:
        entry.complete = True
        for rank in entry.missing:
            if rank in space.members:
                space.members[rank].results.add(name, entry.header.urgency, entry.header.nbytes, entry)
        self._settle_if_over(space, name, entry)

    def _settle_if_over(self, space: _Space, name: Name, entry: _Entry) -> list[Outgoing]:
        if entry.missing:
            return []
        self._forget(space, name)
        key, seq = name
        space.settled[key] = max(seq, space.settled.get(key, 0))
        source = entry.header.rank
        if source == EVERYONE or source not in space.members:
            return []
        passed = entry.header._replace(kind=Kind.PASSED, nbytes=0)
        return [Outgoing(space.members[source].identity, passed)]

    def _forget(self, space: _Space, name: Name) -> None:
        self.held_nbytes -= space.entries.pop(name).header.nbytes
        space.seqs[name.key].discard(name.seq)
        if not space.seqs[name.key]:
            del space.seqs[name.key]

    def _drop_old_epochs(self, space: _Space) -> None:
        """Who pushes for a plan has everything of the plans before it."""
        if len(space.members) < space.world:
            return
        space.epoch = min(member.epoch for member in space.members.values())
        old = {name for name in space.entries if 0 < name.key.epoch < space.epoch}
        for name in old:
            self._forget(space, name)
        for member in space.members.values() if old else ():
            member.results.forget(old)
        for key in [key for key in space.settled if 0 < key.epoch < space.epoch]:
            del space.settled[key]

    def _drop_if_over(self, space: _Space) -> None:
        if all(member.left or member.reported for member in space.members.values()):
            for name in list(space.entries):
                self._forget(space, name)
            for member in space.members.values():
                self._who.pop(member.identity, None)
            del self._spaces[space.number]

    def _disagreement(self, space: _Space, rank: int, first: Header, header: Header) -> list[Outgoing]:
        self.refusals["disagreement"] += 1
        words = (
            f"rank {rank} pushed {header.nbytes} bytes of {header.dtype} for {header.key}, others {first.nbytes} bytes "
            f"of {first.dtype}"
        ).encode()
        said = Header(Kind.REFUSED, space.number, header.key, header.seq, nbytes=len(words))
        return [Outgoing(member.identity, said, words) for member in space.members.values()]
