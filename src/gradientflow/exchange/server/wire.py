"""What workers and servers say to each other: a fixed header, and a payload that it says the length of.

Frames come from whoever could connect, so nothing is believed: `Header.read` refuses what is not one of ours, what is
of another version and what says that it is longer than it may be or than it is. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import torch

MAGIC = b"GFPS"
VERSION = 2
#: Of a payload. libzmq is told so too, and hangs up on whoever announces more, before it makes room.
MAX_NBYTES = 64 * 2**20

_LAYOUT = struct.Struct("<4sBBBxQIIIQQiiQ")
HEADER_NBYTES = _LAYOUT.size

#: What a server can add up; by its place in the tuple it is known on the wire.
DTYPES = (torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


class Kind(IntEnum):
    # - Of a worker
    HELLO = 1  # payload: how many workers there are, and which sums it has, `Name`s
    PUSH = 2  # a share of a sum
    RELAY = 3  # for one other worker, or for all
    GIVE = 4  # a sum that this worker has and the server asked for
    GOT = 5  # results have arrived; payload: which, `Name`s
    BYE = 6  # it needs nothing more
    ECHO = 7  # to be acknowledged, and forgotten
    # - Of a worker that has a copy of a table
    JOIN = 8  # payload: `Terms`, and what it has from before
    FOUND = 9  # the first values of a piece
    DELTA = 10  # what it has changed a piece by; key: 0, samples behind it and one more (0: not counted), code, piece
    ASK = 11  # who is where, in a piece
    # - Of a server
    WELCOME = 16
    TAKEN = 17  # pushes have arrived, and count; payload: which, `Name`s
    RESULT = 18
    PASSED = 19  # everybody for whom a relay was has it
    WANT = 20  # give a sum
    LOST = 21  # a worker's connection is gone, and it has not come back
    REFUSED = 22  # payload: why
    PING = 23
    STATE = 24  # of a piece of a table: version `seq`, after so many outer steps (key's epoch); payload: `Copy`
    CLOCKS = 25  # payload: `Copy` without values
    CHANNEL = 26  # there is another way for what is large; payload: where


_KINDS = {int(kind): kind for kind in Kind}


class Refused(ValueError):
    """What arrived is not to be believed. Its first argument is one of few, to be counted by."""


class Key(NamedTuple):
    """What is summed or relayed: of a plan (0: of none), a message, the question about it, and the piece of that. The
    same key comes again in later steps, with a larger `seq`."""

    epoch: int
    message: int
    round: int
    piece: int


#: To all other workers.
EVERYONE = -1


class Header(NamedTuple):
    kind: Kind
    #: Of one exchange: what belongs together, on servers that may serve several.
    space: int
    key: Key = Key(0, 0, 0, 0)
    seq: int = 0
    #: Smaller goes first.
    urgency: int = 0
    #: Of a relay: for whom. Of a result: whose relay it was, or EVERYONE's sum. Of a hello: who it is.
    rank: int = EVERYONE
    dtype: torch.dtype = torch.uint8
    nbytes: int = 0

    def packed(self) -> bytes:
        code = DTYPES.index(self.dtype)
        numbers = (self.space, *self.key, self.seq, self.urgency, self.rank, self.nbytes)
        return _LAYOUT.pack(MAGIC, VERSION, self.kind, code, *numbers)

    @classmethod
    def read(cls, frame: memoryview, payload_nbytes: int | None = None) -> Header:
        """payload_nbytes: None if that is still to come. Raises `Refused`."""
        if len(frame) != HEADER_NBYTES:
            raise Refused("length of a header")
        magic, version, kind, code, space, *rest = _LAYOUT.unpack(frame)
        epoch, message, round_, piece, seq, urgency, rank, nbytes = rest
        if magic != MAGIC:
            raise Refused("not ours")
        if version != VERSION:
            raise Refused("version")
        if nbytes > MAX_NBYTES or payload_nbytes not in (None, nbytes):
            raise Refused("length of a payload")
        if code >= len(DTYPES) or nbytes % DTYPES[code].itemsize:
            raise Refused("type of a payload")
        if kind not in _KINDS:
            raise Refused("kind")
        return cls(_KINDS[kind], space, Key(epoch, message, round_, piece), seq, urgency, rank, DTYPES[code], nbytes)


class Name(NamedTuple):
    """Of a sum, or of a relay, in one step."""

    key: Key
    seq: int


_NAME = struct.Struct("<IIIQQ")
_WORLD = struct.Struct("<I")


def pack_names(names: Iterable[Name]) -> bytes:
    return b"".join(_NAME.pack(*key, seq) for key, seq in names)


def read_names(payload: memoryview) -> list[Name]:
    """Raises `Refused`."""
    if len(payload) % _NAME.size:
        raise Refused("names")
    return [Name(Key(*key), seq) for *key, seq in _NAME.iter_unpack(payload)]


class Terms(NamedTuple):
    """What a table is like, as all of its workers say."""

    #: How many clocks a worker may be ahead; below 0: any number.
    staleness: int
    lr: float
    momentum: float
    #: Rounds before these two hold.
    warmup: int
    #: Workers that are there before any of them begins.
    world: int
    #: On this server.
    num_pieces: int


class Mark(NamedTuple):
    """Of a worker, in a piece: how much of what it pushed is in it, and its clock (NO_CLOCK: nobody waits for it)."""

    seq: int
    clock: int


NO_CLOCK = 2**64 - 1
#: Of versions, deltas and clocks, which are counted up from what others say.
MAX_NUMBER = 2**62
_TERMS = struct.Struct("<iddIII")
_HELD = struct.Struct("<IQ")
_COUNT = struct.Struct("<II")
_MARK = struct.Struct("<I4xQQ")


def pack_join(terms: Terms, held: Mapping[int, int], known: Iterable[int]) -> bytes:
    """held: versions of pieces, by piece; known: workers that were there."""
    known = sorted(known)
    words = [_TERMS.pack(*terms), _COUNT.pack(len(held), len(known))]
    words += [_HELD.pack(*each) for each in held.items()]
    return b"".join([*words, struct.pack(f"<{len(known)}I", *known)])


def read_join(payload: memoryview) -> tuple[Terms, dict[int, int], set[int]]:
    """Raises `Refused`."""
    try:
        terms = Terms(*_TERMS.unpack_from(payload))
        num_held, num_known = _COUNT.unpack_from(payload, _TERMS.size)
        start = _TERMS.size + _COUNT.size
        middle = start + num_held * _HELD.size
        if len(payload) != middle + 4 * num_known:
            raise Refused("join")
        held = dict(_HELD.iter_unpack(payload[start:middle]))
        return terms, held, set(struct.unpack(f"<{num_known}I", payload[middle:]))
    except struct.error:
        raise Refused("join") from None


class Copy(NamedTuple):
    """Of a piece: who is in it, its values, and the outer optimizer's velocity, if that was asked for."""

    marks: Mapping[int, Mark]
    values: torch.Tensor
    velocity: torch.Tensor | None = None


def pack_copy(copy: Copy) -> torch.Tensor:
    """Nothing of it is shared with the result."""
    marks = b"".join(_MARK.pack(number, *mark) for number, mark in copy.marks.items())
    parts = [copy.values] if copy.velocity is None else [copy.values, copy.velocity]
    head = _COUNT.pack(len(copy.marks), len(parts)) + marks
    into = torch.empty(len(head) + sum(part.nbytes for part in parts), dtype=torch.uint8)
    into[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    place = len(head)
    for part in parts:
        into[place : place + part.nbytes] = part.view(-1).view(torch.uint8)
        place += part.nbytes
    return into


def read_copy(payload: memoryview, dtype: torch.dtype, numel: int) -> Copy:
    """Raises `Refused`."""
    if len(payload) < _COUNT.size:
        raise Refused("copy")
    num_marks, num_parts = _COUNT.unpack_from(payload)
    place = _COUNT.size + num_marks * _MARK.size
    velocity = torch.promote_types(dtype, torch.float32)
    width = dtype.itemsize + (num_parts - 1) * velocity.itemsize
    if num_parts not in (1, 2) or len(payload) != place + numel * width:
        raise Refused("copy")
    marks = {number: Mark(seq, clock) for number, seq, clock in _MARK.iter_unpack(payload[_COUNT.size : place])}
    if any(mark.seq > MAX_NUMBER or MAX_NUMBER < mark.clock != NO_CLOCK for mark in marks.values()):
        raise Refused("copy")
    parts = []
    for kind in (dtype, velocity)[:num_parts]:
        data = payload[place : place + numel * kind.itemsize]
        # A small message may lie at any address.
        parts.append(torch.frombuffer(bytearray(data), dtype=kind) if numel else torch.empty(0, dtype=kind))
        place += len(data)
    return Copy(marks, *parts)


def pack_hello(world: int, holdings: Iterable[Name]) -> bytes:
    return _WORLD.pack(world) + pack_names(holdings)


def read_hello(payload: memoryview) -> tuple[int, list[Name]]:
    """Raises `Refused`."""
    if len(payload) < _WORLD.size:
        raise Refused("names")
    return _WORLD.unpack(payload[: _WORLD.size])[0], read_names(payload[_WORLD.size :])
