"""A worker's copy of a table: pieces as servers had them last, and what this worker has pushed since.

There is no thread of its own: what is sent leaves, and what arrives waits, in libzmq's threads, and the worker looks at
it when it has taken a step. What it has pushed stays here until a copy arrives that has it, and is pushed again to a
server that was started anew ([Note: a lost table] in table.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gradientflow.errors import TrainingError
from gradientflow.exchange.server.keys import KeyFiles
from gradientflow.exchange.server.lines import ASK_S, Directory, Lines
from gradientflow.exchange.server.table import ASKED, AVERAGED
from gradientflow.exchange.server.wire import (
    NO_CLOCK,
    Copy,
    Header,
    Key,
    Kind,
    Mark,
    Name,
    Terms,
    pack_copy,
    pack_join,
    pack_names,
    read_copy,
)


class Place(NamedTuple):
    """Of a piece."""

    slot: int
    dtype: torch.dtype
    numel: int
    #: No parameter: only its mean is taken.
    averaged: bool = False


class Delta(NamedTuple):
    """What was pushed, as it was written; and the same in full, for who has to reckon with it."""

    header: Header
    payload: torch.Tensor
    change: torch.Tensor


@dataclass(slots=True)
class Held:
    """A piece as this worker knows it."""

    place: Place
    #: Among those of its server.
    index: int
    version: int = -1
    #: Steps of the outer optimizer in it.
    num_advanced: int = 0
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    velocity: torch.Tensor | None = None
    marks: Mapping[int, Mark] = field(default_factory=dict)
    #: The same as they are on the server, when that was asked last.
    newest: Mapping[int, Mark] = field(default_factory=dict)
    #: Not in `values`.
    pending: deque[Delta] = field(default_factory=deque)
    #: The server may not have what is pending.
    is_doubtful: bool = True

    def clocks(self, *, newest: bool = False) -> dict[int, int]:
        """Of those who are waited for."""
        marks = self.newest if newest else self.marks
        return {number: mark.clock for number, mark in marks.items() if mark.clock != NO_CLOCK}

    def has_arrived(self, number: int) -> bool:
        """What this worker, of that number, has pushed; as far as it has heard."""
        newest = self.newest.get(number, Mark(0, NO_CLOCK))
        return not self.pending or newest.seq >= self.pending[-1].header.seq


class Replica:
    """Of worker `number`. founding: the first values of all pieces, if this is the worker that brings them."""

    def __init__(
        self,
        directory: Directory,
        number: int,
        space: int,
        terms: Callable[[int], Terms],
        places: Sequence[Place],
        files: KeyFiles | None = None,
        founding: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """terms: given the number of pieces on a server."""
        self.number = number
        self._founding = founding
        slots = sorted({place.slot for place in places})
        self._on: dict[int, list[Held]] = {slot: [] for slot in slots}
        self.pieces: list[Held] = []
        for place in places:
            held = Held(place, len(self._on[place.slot]))
            self._on[place.slot].append(held)
            self.pieces.append(held)
        self._terms = {slot: terms(len(pieces)) for slot, pieces in self._on.items()}
        self._lines = Lines(directory, slots, space, files, self)
        self._lines.open()

    def push(
        self,
        piece: int,
        change: torch.Tensor,
        payload: torch.Tensor,
        seq: int,
        samples: int | None,
        code: int,
        *,
        asked: bool = False,
    ) -> None:
        """payload: what stands for `change`; neither may be written to any more. samples: None if nobody counts. asked:
        for a plain mean, out of turn."""
        held = self.pieces[piece]
        key = Key(0, 0 if samples is None else min(samples, 2**32 - 2) + 1, code, held.index)
        header = Header(Kind.DELTA, 0, key, seq, dtype=payload.dtype, nbytes=payload.nbytes)
        delta = Delta(header._replace(urgency=ASKED if asked else 0), payload, change)
        held.pending.append(delta)
        if not held.is_doubtful:
            self._lines.say(held.place.slot, delta.header, payload)

    def ask_clocks(self) -> None:
        """Answers, if servers give any, are in `newest` of the pieces when they have come."""
        for held in self.pieces:
            self._ask_clocks(held)

    def _ask_clocks(self, held: Held) -> None:
        self._lines.say(held.place.slot, Header(Kind.ASK, 0, Key(0, 0, 0, held.index)))

    def turn(self, patience_s: float) -> None:
        """Hear what has come, or comes within so many seconds."""
        self._lines.turn(patience_s)

    @property
    def lost(self) -> str:
        return "; ".join(self._lines.lost)

    @property
    def num_replaced(self) -> int:
        return self._lines.num_replaced

    def deliver(self, patience_s: float) -> bool:
        """Until servers have all that was pushed, also where they do not answer yet: whether they have."""
        end_s = time.monotonic() + patience_s
        while lacking := [held for held in self.pieces if not held.has_arrived(self.number)]:
            if time.monotonic() > end_s:
                return False
            for held in lacking:
                self._ask_clocks(held)
            self.turn(ASK_S)
        return True

    def close(self) -> None:
        self._lines.close()

    def abandon(self) -> None:
        self._lines.abandon()

    # - What connections tell

    def awaits(self, slot: int) -> bool:
        return any(held.pending or held.version < 0 for held in self._on[slot])

    def connected(self, slot: int) -> None:
        self._lines.welcome(slot)
        pieces = self._on[slot]
        known = {number for held in pieces for number in held.clocks()}
        words = pack_join(self._terms[slot], {h.index: h.version for h in pieces if h.version >= 0}, known)
        self._lines.say(slot, Header(Kind.JOIN, 0, rank=self.number, nbytes=len(words)), words)
        for held in pieces:
            held.is_doubtful, held.newest = True, {}
        if self._founding is None:
            return
        for held, values in zip(self.pieces, self._founding, strict=True):
            if held.place.slot == slot and held.version < 0:
                said = Header(Kind.FOUND, 0, Key(0, 0, 0, held.index), dtype=values.dtype, nbytes=values.nbytes)
                self._lines.say(slot, said._replace(urgency=AVERAGED if held.place.averaged else 0), values)

    def heard(self, slot: int, header: Header, payload: memoryview) -> None:
        match header.kind:
            case Kind.STATE:
                held = self._on[slot][header.key.piece]
                copy = read_copy(payload, held.place.dtype, held.place.numel)
                self._take(held, header.seq, header.key.epoch, copy)
                words = pack_names([Name(header.key, header.seq)])
                self._lines.say(slot, Header(Kind.GOT, 0, nbytes=len(words)), words)
            case Kind.WANT:
                held = self._on[slot][header.key.piece]
                packed = pack_copy(Copy(held.marks, held.values, held.velocity))
                key = Key(held.num_advanced, held.place.numel, 0, held.index)
                said = Header(Kind.GIVE, 0, key, held.version, dtype=held.place.dtype, nbytes=packed.nbytes)
                self._lines.say(slot, said._replace(urgency=AVERAGED if held.place.averaged else 0), packed)
            case Kind.CLOCKS:
                self._on[slot][header.key.piece].newest = read_copy(payload, torch.uint8, 0).marks
            case Kind.REFUSED:
                raise TrainingError(f"server {slot} refuses: {bytes(payload).decode(errors='replace')}")
            case _:
                pass

    def _take(self, held: Held, version: int, num_advanced: int, copy: Copy) -> None:
        terms = self._terms[held.place.slot]
        if copy.velocity is not None:
            held.velocity = copy.velocity
        elif version == held.version:
            pass
        elif version != held.version + 1:
            held.velocity = None  # rounds went by without this worker
        elif held.velocity is not None and num_advanced > held.num_advanced >= terms.warmup:
            # As the server's, from what it has done: theta' = theta + lr ((1 + mu) d + mu^2 v), v' = mu v + d.
            lr, mu = terms.lr, terms.momentum
            moved = (copy.values.to(held.velocity.dtype) - held.values.to(held.velocity.dtype)).div_(lr)
            mean = moved.sub_(held.velocity, alpha=mu * mu).div_(1 + mu)
            held.velocity = held.velocity.mul(mu).add_(mean)
        before = held.clocks().keys()
        held.version, held.num_advanced, held.values, held.marks = version, num_advanced, copy.values, copy.marks
        if before - held.clocks().keys():
            self._lines.doubt(held.place.slot)  # it has left, or has found another server where this one was not lost
        mine = copy.marks.get(self.number, Mark(0, NO_CLOCK))
        while held.pending and held.pending[0].header.seq <= mine.seq:
            held.pending.popleft()
        if held.is_doubtful:
            held.is_doubtful = False
            for delta in held.pending:
                self._lines.say(held.place.slot, delta.header, delta.payload)
