"""Runs any pattern over connections between ranks.

A message is cut into strips, and each strip goes through the whole pattern. They follow one another closely: round r of
strip 0, round r of strip 1, and so on, then round r + 1 of strip 0. So while one strip is added up, the bytes of the
others are on the wire. The order is the same on all ranks, which is why nothing on the wire has a name.

Bytes are sent from where they lie in the pool and received where they belong; only what is to be added is received
beside it first. What a round overwrites or adds to may be on its way out in the same round, so a strip's round ends
when its sends have been handed to the system as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradientflow.exchange.links import Links, Wire, wait
from gradientflow.patterns import Pattern, chunk_bounds

#: Of one transfer. Below it a transfer's own cost shows, above it the adding of a strip is no longer hidden.
PIECE_NBYTES = 512 * 1024
MOST_STRIPS = 8


@dataclass(frozen=True, slots=True)
class _Move:
    """Elements of the message, to or from a peer."""

    peer: int
    start: int
    stop: int
    #: Where in the scratch space it is received, to be added; -1: it replaces what is there.
    scratch: int = -1


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one rank does for one strip in one round."""

    strip: int
    sends: tuple[_Move, ...]
    receives: tuple[_Move, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of a pattern, for messages of one size."""

    turns: tuple[_Turn, ...]
    scratch_numel: int


def compile_pattern(pattern: Pattern, rank: int, numel: int, itemsize: int) -> Program:
    """What `rank` has to do for a message of `numel` elements."""
    num_strips = strips(pattern, numel * itemsize)
    edges = [_edges(pattern, *span) for span in _spans(numel, num_strips)]
    turns: list[_Turn] = []
    scratch_of_strip = [0] * num_strips
    for turn in pattern.rounds_of(rank):
        for strip in range(num_strips):
            sends = tuple(
                _Move(one.destination, edges[strip][one.start], edges[strip][one.stop])
                for one in turn.sends
                if edges[strip][one.start] < edges[strip][one.stop]
            )
            receives, used = [], 0
            for one in turn.receives:
                start, stop = edges[strip][one.start], edges[strip][one.stop]
                if start < stop:
                    receives.append(_Move(one.source, start, stop, used if one.add else -1))
                    used += (stop - start) if one.add else 0
            scratch_of_strip[strip] = max(scratch_of_strip[strip], used)
            if sends or receives:
                turns.append(_Turn(strip, sends, tuple(receives)))
    # Strips are under way at the same time, so each has a place of its own.
    offsets = [sum(scratch_of_strip[:strip]) for strip in range(num_strips)]
    placed = tuple(
        _Turn(turn.strip, turn.sends, tuple(_moved(move, offsets[turn.strip]) for move in turn.receives))
        for turn in turns
    )
    return Program(placed, sum(scratch_of_strip))


def peers_of(pattern: Pattern, rank: int) -> set[int]:
    """Whom `rank` exchanges anything with."""
    pairs = [{one.source, one.destination} for one in pattern.transfers]
    return {peer for pair in pairs if rank in pair for peer in pair} - {rank}


def strips(pattern: Pattern, nbytes: int) -> int:
    """How many strips a message of `nbytes` is cut into."""
    if not pattern.transfers:
        return 1
    most = max(one.stop - one.start for one in pattern.transfers) / pattern.num_chunks
    return max(1, min(MOST_STRIPS, round(nbytes * most / PIECE_NBYTES)))


def owned(pattern: Pattern, rank: int, numel: int, itemsize: int) -> list[tuple[int, int]]:
    """Where chunk number `rank` lies in a message: what a rank has after a reduce-scatter."""
    edges = [_edges(pattern, *span) for span in _spans(numel, strips(pattern, numel * itemsize))]
    return [(strip[rank], strip[rank + 1]) for strip in edges if strip[rank] < strip[rank + 1]]


class Staged:
    """The executor: one message a lane at a time, in the calling thread."""

    def __init__(
        self, links: Links, patterns: Mapping[str, Pattern], rank: int, num_lanes: int, everyone: Sequence[int] = ()
    ) -> None:
        """everyone: all other ranks, if there are connections to them."""
        self._rank = rank
        self._links, self._patterns = links, patterns
        self._programs: dict[tuple[str, int, int], Program] = {}
        self._wires = {
            (name, lane): {peer: links.wire(lane, peer) for peer in peers_of(pattern, rank)}
            for name, pattern in self._patterns.items()
            for lane in range(num_lanes)
        }
        self._mesh = [{peer: links.wire(lane, peer) for peer in everyone} for lane in range(num_lanes)]
        self._scratch = [torch.empty(0, dtype=torch.uint8) for _ in range(num_lanes)]

    @classmethod
    def none(cls) -> Staged:
        """Without any pattern."""
        return cls(Links.none(), {}, 0, 0)

    def abandon(self) -> None:
        self._links.abandon()

    def close(self) -> None:
        self._links.close()

    def run(self, name: str, values: torch.Tensor, lane: int, look: Callable[[], None], look_s: float) -> None:
        """Carry out a pattern on flat `values`, in place. `look` is called now and then while nothing moves, and
        may raise; afterwards the lane is of no more use."""
        program = self._program(name, values.numel(), values.itemsize)
        wires = self._wires[name, lane]
        scratch = self._room(lane, program.scratch_numel * values.itemsize).view(values.dtype)
        ours, beside = _bytes(values), _bytes(scratch)
        under_way: dict[int, _UnderWay] = {}
        for turn in program.turns:
            if (before := under_way.pop(turn.strip, None)) is not None:
                before.finish(wires, values, scratch, look, look_s)
            under_way[turn.strip] = _UnderWay.begin(turn, wires, ours, beside, values.itemsize)
        for last in under_way.values():
            last.finish(wires, values, scratch, look, look_s)

    def swap(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        lane: int,
        look: Callable[[], None],
        look_s: float,
    ) -> None:
        """Each rank's tensor to it, and its into the place of the same number; all at once, empty ones not at all."""
        wires = self._mesh[lane]
        receives, sends = [], []
        for shift in range(1, len(outgoing)):  # not all to the same one first
            peer = (self._rank + shift) % len(outgoing)
            if incoming[peer].numel():
                receives.append((wires[peer], wires[peer].receive(_bytes(incoming[peer]))))
            if outgoing[peer].numel():
                sends.append((wires[peer], wires[peer].send(_bytes(outgoing[peer]))))
        wait(
            wires.values(),
            lambda: (
                all(wire.num_received >= number for wire, number in receives)
                and all(wire.num_sent >= number for wire, number in sends)
            ),
            look,
            look_s,
        )
        incoming[self._rank].copy_(outgoing[self._rank])

    def scratch_nbytes(self, name: str, nbytes: int) -> int:
        """What a message of `nbytes` needs beside itself."""
        return compile_pattern(self._patterns[name], self._rank, nbytes, 1).scratch_numel

    def owned(self, name: str, numel: int, itemsize: int) -> Sequence[tuple[int, int]]:
        """What this rank has after a reduce-scatter of that name."""
        return owned(self._patterns[name], self._rank, numel, itemsize)

    def _program(self, name: str, numel: int, itemsize: int) -> Program:
        key = (name, numel, itemsize)
        if key not in self._programs:
            self._programs[key] = compile_pattern(self._patterns[name], self._rank, numel, itemsize)
        return self._programs[key]

    def _room(self, lane: int, nbytes: int) -> torch.Tensor:
        if self._scratch[lane].numel() < nbytes:
            self._scratch[lane] = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[lane][:nbytes]


@dataclass(slots=True)
class _UnderWay:
    """A turn that has begun."""

    turn: _Turn
    sends: Sequence[tuple[Wire, int]]
    receives: Sequence[tuple[Wire, int]]

    @classmethod
    def begin(
        cls, turn: _Turn, wires: dict[int, Wire], ours: memoryview, beside: memoryview, itemsize: int
    ) -> _UnderWay:
        receives = []
        for move in turn.receives:
            memory, start = (ours, move.start) if move.scratch < 0 else (beside, move.scratch)
            piece = memory[itemsize * start : itemsize * (start + move.stop - move.start)]
            receives.append((wires[move.peer], wires[move.peer].receive(piece)))
        sends = [
            (wires[move.peer], wires[move.peer].send(ours[itemsize * move.start : itemsize * move.stop]))
            for move in turn.sends
        ]
        return cls(turn, sends, receives)

    def finish(
        self,
        wires: dict[int, Wire],
        values: torch.Tensor,
        scratch: torch.Tensor,
        look: Callable[[], None],
        look_s: float,
    ) -> None:
        if not self._done():
            wait(wires.values(), self._done, look, look_s)
        for move in self.turn.receives:
            if move.scratch >= 0:
                numel = move.stop - move.start
                values[move.start : move.stop].add_(scratch[move.scratch : move.scratch + numel])

    def _done(self) -> bool:
        return all(wire.num_received >= number for wire, number in self.receives) and all(
            wire.num_sent >= number for wire, number in self.sends
        )


def _spans(numel: int, num_strips: int) -> list[tuple[int, int]]:
    edges = chunk_bounds(numel, num_strips)
    return list(pairwise(edges))


def _edges(pattern: Pattern, start: int, stop: int) -> list[int]:
    return [start + edge for edge in chunk_bounds(stop - start, pattern.num_chunks)]


def _moved(move: _Move, by: int) -> _Move:
    return _Move(move.peer, move.start, move.stop, move.scratch + by) if move.scratch >= 0 else move


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
