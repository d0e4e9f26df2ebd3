"""Parameters that servers keep for workers which step by themselves: pieces, clocks, who is there. No sockets.

A worker pushes what it has changed a piece by (a delta, numbered by `seq`) and is sent the piece when it may go on. Its
*clock* counts its pushes. `Terms.staleness` s says when that is:

s > 0, or any   a delta is added at once, as its worker's part of a mean over those who are there. The piece is sent
                back when no clock is more than s behind the worker's own: until then the answer is parked (SSP, Ho et
                al. 2013)
s = 0           deltas of a round wait for each other; when all who are there have given theirs, the outer optimizer
                takes the mean, weighed by samples, and everybody gets the same. A round that all of them asked for
                (`ASKED`) out of turn is the plain mean, and no step of the outer optimizer

Invariants:

- a delta counts once, however often it comes: what was taken of each worker is remembered by `seq`, and sent with the
  piece
- nobody waits for a worker that has left or is gone: its clock is released. What it has given counts
- a worker that comes later waits for nobody, and nobody for it, until its first push

[Note: a lost table] What is applied to a piece is applied in one order, so copies of it that workers hold are stages of
one history: the newest (by `version`) has all that any other has. A server that is started anew asks for the newest
copies, and workers push again what is not in them. If a worker is lost together with a server, its last deltas may be.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from pydantic import ValidationError

from gradientflow.compress.part import is_finite
from gradientflow.compress.quantize import Codes, Int8
from gradientflow.exchange.server.ledger import GONE_S, MAX_SPACES, MAX_WORLD, Outgoing
from gradientflow.exchange.server.wire import (
    MAX_NUMBER,
    NO_CLOCK,
    Copy,
    Header,
    Key,
    Kind,
    Mark,
    Refused,
    Terms,
    pack_copy,
    read_copy,
    read_join,
    read_names,
)
from gradientflow.outer import AVERAGE, Outer

#: Workers that had been there may take so long to come back to a server that was started anew.
GRACE_S = 10.0
MAX_PIECES = 2**20
#: How a delta is written, in `Key.round`.
PLAIN, INT8 = 0, 1
#: In `Header.urgency` of a piece's first values: it is no parameter, and only its mean is taken.
AVERAGED = 1
#: In `Header.urgency` of a delta: its worker wants a mean now, though it may not be its turn.
ASKED = 1
#: Outer steps of a piece that anybody may say it has been through.
MAX_ADVANCED = 2**31
#: Who has none counts for nothing, unless nobody has any: then all count alike.
NO_SAMPLES = 2.0**-40


@dataclass(slots=True)
class _Piece:
    dtype: torch.dtype
    #: At least in single precision: small deltas would vanish in what workers hold.
    value: torch.Tensor
    outer: Outer
    velocity: torch.Tensor | None
    version: int = 0
    #: Steps that the outer optimizer has taken.
    num_advanced: int = 0
    #: The newest of each worker that is in the value, also of those who left.
    taken: dict[int, int] = field(default_factory=dict)
    #: Of those who are waited for.
    clocks: dict[int, int] = field(default_factory=dict)
    # - Of the round that is open
    total: torch.Tensor | None = None
    weight: float = 0.0
    is_counted: bool = False  # by samples
    is_asked: bool = False  # by all who have given
    given: dict[int, int] = field(default_factory=dict)  # by whom, and its number

    @property
    def nbytes(self) -> int:
        """At most."""
        return self.value.nbytes * (2 if self.velocity is None else 3)

    def copy(self, *, whole: bool) -> Copy:
        marks = {number: Mark(self.taken.get(number, 0), clock) for number, clock in self.clocks.items()}
        marks |= {number: Mark(seq, NO_CLOCK) for number, seq in self.taken.items() if number not in marks}
        return Copy(marks, self.value.to(self.dtype), self.velocity if whole else None)


@dataclass(slots=True)
class _Member:
    identity: bytes
    #: Pieces that it is to be sent.
    due: set[int] = field(default_factory=set)
    #: Pieces that are on their way to it.
    flying: set[int] = field(default_factory=set)
    #: It has just come, and needs what the outer optimizer keeps.
    is_new: bool = True
    #: That were behind its last delta, if it counts them.
    samples: int = 0
    #: What it had when it came: versions, by piece.
    held: dict[int, int] = field(default_factory=dict)
    gone_since_s: float | None = None


class Table:
    """What one group of workers shares, as much of it as is on this server."""

    def __init__(self, space: int, terms: Terms) -> None:
        """Raises `Refused`."""
        self.space, self.terms = space, terms
        self._outer = _outer_of(terms)
        self.members: dict[int, _Member] = {}
        self._pieces: dict[int, _Piece] = {}
        #: From then on pieces are sent.
        self.is_open = False
        #: What the founder begins with; pieces that nobody has had yet.
        self._first: dict[int, _Piece] = {}
        # - While copies are looked for
        self._known: set[int] = set()
        self._since_s: float | None = None
        self._asked: dict[int, int] = {}  # of a piece, who

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in (self._pieces, self._first) for piece in pieces.values())

    # - Coming and going

    def join(self, number: int, identity: bytes, held: dict[int, int], known: set[int], now_s: float) -> None:
        member = _Member(identity, held=held)
        before = self.members.get(number)
        member.samples = before.samples if before else 0
        self.members[number] = member
        member.due = set(self._pieces)
        self._ask_no_more(number)
        if not self.is_open and held:
            self._known |= known | {number}
            self._since_s = now_s if self._since_s is None else self._since_s
        self._open_if_ready()

    def release(self, number: int) -> None:
        """It has left, or is gone."""
        self.members.pop(number, None)
        self._ask_no_more(number)
        for piece in self._pieces.values():
            piece.clocks.pop(number, None)
            self._close_round(piece)

    def found(self, index: int, header: Header, payload: memoryview) -> None:
        """The first values."""
        if index in self._pieces or index in self._first or self.is_open:
            return  # once more
        values = torch.frombuffer(bytearray(payload), dtype=header.dtype) if len(payload) else torch.empty(0)
        self._first[index] = self._piece(header, values)
        self._open_if_ready()

    def _piece(self, header: Header, values: torch.Tensor) -> _Piece:
        if not header.dtype.is_floating_point:
            raise Refused("type of a payload")
        value = values.to(torch.promote_types(header.dtype, torch.float32)).clone()
        outer = AVERAGE if header.urgency == AVERAGED else self._outer
        return _Piece(header.dtype, value, outer, torch.zeros_like(value) if outer.momentum else None)

    def _open_if_ready(self) -> None:
        """When everything is there and everybody who is to begin."""
        if self.is_open:
            return
        num_pieces = self.terms.num_pieces
        if self._since_s is None and len(self._first) == num_pieces and len(self.members) >= self.terms.world:
            for index in range(num_pieces):
                self._begin_from_first(index)
        if len(self._pieces) < num_pieces:
            return
        self.is_open = True
        self._first.clear()
        for member in self.members.values():
            member.due = set(self._pieces)

    def _begin_from_first(self, index: int) -> None:
        self._pieces[index] = self._first.pop(index)
        self._pieces[index].clocks = dict.fromkeys(self.members, 0)

    # - A table that was lost

    def look_for_copies(self, now_s: float) -> Iterator[Outgoing]:
        """Ask those who have the newest, once all have come back who are expected to."""
        if self.is_open or self._since_s is None:
            return
        if not self._known <= self.members.keys() and now_s < self._since_s + GRACE_S:
            return
        for index in range(self.terms.num_pieces):
            if index in self._pieces or index in self._asked:
                continue
            holders = [(m.held[index], number) for number, m in self.members.items() if index in m.held]
            if holders:
                _, holder = max(holders)
                self._asked[index] = holder
                yield self._say(holder, Header(Kind.WANT, self.space, Key(0, 0, 0, index)))
            elif index in self._first:  # the server was lost before anybody had it
                self._begin_from_first(index)
        self._open_if_ready()

    def _ask_no_more(self, number: int) -> None:
        """What it was asked for went to a connection that is gone."""
        self._asked = {piece: holder for piece, holder in self._asked.items() if holder != number}

    def give(self, number: int, index: int, header: Header, payload: memoryview, numel: int) -> None:
        """A copy that was asked for."""
        if self._asked.get(index) != number or index in self._pieces:
            raise Refused("not asked for")
        copy = read_copy(payload, header.dtype, numel)
        piece = self._piece(header, copy.values)
        if piece.velocity is not None and copy.velocity is not None:
            piece.velocity.copy_(copy.velocity)
        piece.version, piece.num_advanced = header.seq, header.key.epoch
        piece.taken = {who: mark.seq for who, mark in copy.marks.items()}
        piece.clocks = {
            who: mark.clock for who, mark in copy.marks.items() if who in self.members and mark.clock != NO_CLOCK
        }
        self._pieces[index] = piece
        self._open_if_ready()

    # - Deltas

    def delta(self, number: int, index: int, header: Header, payload: memoryview) -> bool:
        """Whether it was new."""
        piece = self._pieces.get(index)
        if piece is None or not self.is_open:
            raise Refused("not open")
        member = self.members[number]
        member.due.add(index)
        newest = piece.given.get(number, piece.taken.get(number, 0))
        if header.seq <= newest:
            return False
        # Numbers in between went with a server that was lost while this worker was away.
        if number in piece.given:
            raise Refused("out of order")
        samples = header.key.message - 1
        if piece.given and piece.is_counted != (samples >= 0):
            raise Refused("samples")
        change = _read_delta(header, payload, piece.value)
        member.samples = samples if samples > 0 else member.samples
        if not is_finite(change):
            change = torch.zeros_like(change)  # of one worker; the others are not to have it
        if self.terms.staleness == 0:
            piece.given[number] = header.seq
            self._add_to_round(piece, number, change, samples, header.urgency == ASKED)
        else:
            piece.taken[number] = header.seq
            self._add_at_once(piece, number, change, samples)
        return True

    def _add_at_once(self, piece: _Piece, number: int, change: torch.Tensor, samples: int) -> None:
        least = min(piece.clocks.values(), default=0)
        piece.clocks[number] = piece.clocks.get(number, least) + 1
        counted = [m.samples for who in piece.clocks if (m := self.members.get(who)) and m.samples]
        # Who has not said yet how many it has is taken to have as many as the others.
        weight = samples * len(counted) / sum(counted) if samples > 0 else 1.0
        piece.value.add_(change, alpha=weight / len(piece.clocks))
        piece.version += 1

    def _add_to_round(self, piece: _Piece, number: int, change: torch.Tensor, samples: int, asked: bool) -> None:
        piece.is_asked = asked and (piece.is_asked or piece.total is None)
        piece.is_counted = samples >= 0
        weight = float(samples or NO_SAMPLES) if piece.is_counted else 1.0
        piece.clocks.setdefault(number, piece.version)
        piece.weight += weight
        if piece.total is None:
            piece.total = change.mul_(weight)
        else:
            piece.total.add_(change, alpha=weight)
        self._close_round(piece)

    def _close_round(self, piece: _Piece) -> None:
        """If all have given who are waited for."""
        if piece.total is None or not piece.given.keys() >= piece.clocks.keys():
            return
        outer = AVERAGE if piece.is_asked else piece.outer
        outer.advance_(piece.value, piece.total.div_(piece.weight), piece.velocity, piece.num_advanced)
        piece.num_advanced += not piece.is_asked
        piece.version += 1
        for number in piece.clocks:
            piece.clocks[number] = piece.version
        piece.taken |= piece.given
        piece.total, piece.weight, piece.given = None, 0.0, {}

    # - Answers

    def answers(self) -> Iterator[Outgoing]:
        """Pieces for those who may go on."""
        if not self.is_open:
            return
        for number, member in list(self.members.items()):  # to send may show that somebody is gone
            if member.gone_since_s is not None:
                continue
            for index in sorted(member.due - member.flying):
                piece = self._pieces[index]
                if self._may_have(number, piece):
                    member.due.discard(index)
                    member.flying.add(index)
                    payload = pack_copy(piece.copy(whole=member.is_new and piece.velocity is not None))
                    key = Key(piece.num_advanced, 0, 0, index)
                    said = Header(Kind.STATE, self.space, key, piece.version, dtype=piece.dtype, nbytes=payload.nbytes)
                    yield Outgoing(member.identity, said, payload)
            if not member.due:
                member.is_new = False

    def _may_have(self, number: int, piece: _Piece) -> bool:
        if self.terms.staleness == 0:
            return number not in piece.given
        if self.terms.staleness < 0 or number not in piece.clocks:
            return True
        return min(piece.clocks.values()) >= piece.clocks[number] - self.terms.staleness

    def clocks(self, number: int, index: int) -> Iterator[Outgoing]:
        """As they are now, for who waits."""
        if index in self._pieces:
            marks = self._pieces[index].copy(whole=False)._replace(values=torch.empty(0))
            payload = pack_copy(marks)
            said = Header(Kind.CLOCKS, self.space, Key(0, 0, 0, index), nbytes=payload.nbytes)
            yield Outgoing(self.members[number].identity, said, payload)

    def got(self, number: int, index: int) -> None:
        self.members[number].flying.discard(index)

    def _say(self, number: int, header: Header) -> Outgoing:
        return Outgoing(self.members[number].identity, header)


class Tables:
    """All that a server keeps, for whatever jobs. limit_nbytes: what it may hold."""

    def __init__(self, limit_nbytes: int, refusals: Counter[str]) -> None:
        self._limit_nbytes, self._refusals = limit_nbytes, refusals
        self._tables: dict[int, Table] = {}
        self._who: dict[bytes, tuple[Table, int]] = {}
        #: Tables that all workers have left.
        self._over: deque[int] = deque(maxlen=MAX_SPACES)
        self.summed_nbytes = 0

    @property
    def is_used(self) -> bool:
        """By workers that have not left."""
        return bool(self._who)

    def knows(self, identity: bytes) -> bool:
        return identity in self._who

    def take(self, identity: bytes, header: Header, payload: memoryview, now_s: float) -> Iterable[Outgoing]:
        """Raises `Refused` and is as before."""
        if header.kind is Kind.JOIN:
            if header.space in self._over:
                words = b"the job is over, all of its workers have left"
                return [Outgoing(identity, Header(Kind.REFUSED, header.space, nbytes=len(words)), words)]
            self._join(identity, header, payload, now_s)
            return self._tables[header.space].look_for_copies(now_s)
        table, number = self._who[identity]
        if header.space != table.space:
            raise Refused("another space")
        index = header.key.piece
        if index >= table.terms.num_pieces and header.kind in (Kind.FOUND, Kind.DELTA, Kind.GIVE):
            raise Refused("piece")
        if header.seq > MAX_NUMBER or header.key.epoch > MAX_ADVANCED:
            raise Refused("number")
        match header.kind:
            case Kind.FOUND:
                self._make_room(header.nbytes)
                table.found(index, header, payload)
            case Kind.DELTA:
                self.summed_nbytes += header.nbytes
                if not table.delta(number, index, header, payload):
                    self._refusals["repeated"] += 1
            case Kind.GIVE:
                self._make_room(header.nbytes)
                table.give(number, index, header, payload, header.key.message)
            case Kind.GOT:
                for name in read_names(payload):
                    table.got(number, name.key.piece)
            case Kind.ASK:
                return table.clocks(number, index)
            case Kind.BYE:
                self._forget(identity)
                if not table.members:
                    del self._tables[table.space]
                    self._over.append(table.space)
            case _:
                raise Refused("kind")
        return ()

    def _join(self, identity: bytes, header: Header, payload: memoryview, now_s: float) -> None:
        terms, held, known = read_join(payload)
        table = self._tables.get(header.space)
        if (
            not 0 <= header.rank < 2**31 - 1
            or not 0 < terms.world <= MAX_WORLD
            or terms.num_pieces > MAX_PIECES
            or (table is None and len(self._tables) >= MAX_SPACES)
            or (table is not None and table.terms != terms)
        ):
            raise Refused("terms")
        table = table or Table(header.space, terms)
        if self._who.get(identity, (table, header.rank)) != (table, header.rank):
            raise Refused("somebody else")
        if (old := table.members.get(header.rank)) is not None:
            self._who.pop(old.identity, None)
        self._tables[header.space] = table
        self._who[identity] = table, header.rank
        table.join(header.rank, identity, held, known, now_s)

    def _make_room(self, nbytes: int) -> None:
        """At the cost of tables whose workers are all gone, without a word: they might come back, or others."""
        while sum(table.nbytes for table in self._tables.values()) + 3 * nbytes > self._limit_nbytes:
            deserted = next((space for space, table in self._tables.items() if not table.members), None)
            if deserted is None:
                raise Refused("memory")
            del self._tables[deserted]

    def answers(self) -> Iterator[Outgoing]:
        for table in self._tables.values():
            yield from table.answers()

    def look(self, now_s: float) -> Iterator[Outgoing]:
        """Now and then."""
        for table in self._tables.values():
            yield from table.look_for_copies(now_s)

    def identities(self) -> list[bytes]:
        """Of those who are expected to be there."""
        return list(self._who)

    def unreachable(self, identity: bytes, now_s: float) -> None:
        """Its connection is gone; if it has been so for a while, nobody waits for it any more."""
        table, number = self._who[identity]
        member = table.members[number]
        if member.gone_since_s is None:
            member.gone_since_s = now_s
        if now_s - member.gone_since_s >= GONE_S:
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        table, number = self._who.pop(identity)
        table.release(number)


def _outer_of(terms: Terms) -> Outer:
    """Raises `Refused`."""
    try:
        return Outer(lr=terms.lr, momentum=terms.momentum, warmup=terms.warmup)
    except ValidationError:
        raise Refused("terms") from None


def _read_delta(header: Header, payload: memoryview, like: torch.Tensor) -> torch.Tensor:
    """In the table's own precision; not the payload's memory. Raises `Refused`."""
    if header.key.round == PLAIN:
        if header.nbytes != like.numel() * header.dtype.itemsize or not header.dtype.is_floating_point:
            raise Refused("length of a payload")
        if not header.nbytes:
            return torch.zeros_like(like)
        return torch.frombuffer(bytearray(payload), dtype=header.dtype).to(like.dtype)
    if header.key.round != INT8 or header.dtype is not torch.uint8:
        raise Refused("type of a payload")
    change = torch.zeros(like.numel())
    try:
        flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        Codes(Int8(), shard_of(like.numel()), flat.device, flat).read(change)
    except (RuntimeError, ValueError):
        raise Refused("length of a payload") from None
    return change.to(like.dtype)


def shard_of(numel: int) -> int:
    """Elements that codes stand for, whole blocks."""
    return math.ceil(max(1, numel) / Int8.block) * Int8.block
