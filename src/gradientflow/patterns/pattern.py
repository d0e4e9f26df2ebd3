"""A collective as data: who sends which part of a message to whom, round by round.

A message is cut into chunks that are as even as can be. In each round a rank sends what it had before the round,
and then takes in what arrives: added to what it has, or in its place. Additions happen in the order in which the
transfers are listed, so the order of every sum is part of the pattern. That makes sums equal bit by bit on all
ranks, if a chunk is summed in one place and copied from there, or if ranks that sum it in two places add the same
two values: a + b == b + a holds in floating point.

What a pattern keeps: a rank never sends to itself, gets a chunk from one source at most once in a round, and never
gets a chunk to add and to replace in the same round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple


class Transfer(NamedTuple):
    """Chunks `start` to `stop` - 1 go from one rank to another."""

    round: int
    source: int
    destination: int
    start: int
    stop: int
    #: The destination adds what arrives to what it has; else it is replaced.
    add: bool


class Turn(NamedTuple):
    """What one rank does in one round."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """All transfers of one collective, sorted by round."""

    name: str
    world: int
    num_chunks: int
    transfers: tuple[Transfer, ...]

    @property
    def num_rounds(self) -> int:
        return _num_rounds(self.transfers)

    def rounds(self) -> Iterator[tuple[Transfer, ...]]:
        """The transfers of each round, in order."""
        for _, transfers in groupby(self.transfers, key=lambda transfer: transfer.round):
            yield tuple(transfers)

    def rounds_of(self, rank: int) -> list[Turn]:
        """What `rank` has to do in each round in which it takes part; the others are left out."""
        own = [transfer for transfer in self.transfers if rank in (transfer.source, transfer.destination)]
        return [
            Turn(
                sends=tuple(transfer for transfer in transfers if transfer.source == rank),
                receives=tuple(transfer for transfer in transfers if transfer.destination == rank),
            )
            for transfers in (list(group) for _, group in groupby(own, key=lambda transfer: transfer.round))
        ]

    def bytes_sent(self, rank: int, numel: int, itemsize: int) -> int:
        """What `rank` sends for a message of `numel` elements."""
        return itemsize * self._numel(numel, (transfer for transfer in self.transfers if transfer.source == rank))

    def bytes_received(self, rank: int, numel: int, itemsize: int) -> int:
        """What `rank` receives for a message of `numel` elements."""
        return itemsize * self._numel(numel, (transfer for transfer in self.transfers if transfer.destination == rank))

    def _numel(self, numel: int, transfers: Iterable[Transfer]) -> int:
        bounds = chunk_bounds(numel, self.num_chunks)
        return sum(bounds[transfer.stop] - bounds[transfer.start] for transfer in transfers)

    def placed(self, ranks: Sequence[int], *, start: int = 0, stretch: int = 1) -> Iterator[Transfer]:
        """The transfers as part of a larger pattern: among these ranks, from chunk `start` on, with `stretch` of the
        larger pattern's chunks for each of this one's.

        >>> list(Pattern("copy", 2, 1, (Transfer(0, 0, 1, 0, 1, False),)).placed([5, 7], start=6, stretch=3))
        [Transfer(round=0, source=5, destination=7, start=6, stop=9, add=False)]
        """
        for transfer in self.transfers:
            yield transfer._replace(
                source=ranks[transfer.source],
                destination=ranks[transfer.destination],
                start=start + stretch * transfer.start,
                stop=start + stretch * transfer.stop,
            )


def in_turn(*stages: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """One stage after another, each with rounds that count from 0; a stage may hold several patterns side by side."""
    transfers: list[Transfer] = []
    for stage in stages:
        num_before = _num_rounds(transfers)
        in_order = sorted(stage, key=lambda transfer: transfer.round)
        transfers += [transfer._replace(round=num_before + transfer.round) for transfer in in_order]
    return tuple(transfers)


def mirrored(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Backwards in time, each transfer the other way and as a copy: of a reduction to one rank this makes the
    broadcast from there, of a reduce-scatter the all-gather. The transfers are sorted by round.

    >>> mirrored([Transfer(0, 1, 0, 0, 1, add=True)])
    (Transfer(round=0, source=0, destination=1, start=0, stop=1, add=False),)
    """
    last = _num_rounds(transfers) - 1
    return tuple(
        Transfer(last - turn, destination, source, start, stop, add=False)
        for turn, source, destination, start, stop, _ in reversed(transfers)
    )


def chunk_bounds(numel: int, num_chunks: int) -> list[int]:
    """`num_chunks` + 1 edges; chunk i is the elements from edge i to edge i + 1, perhaps none.

    Sizes differ by one at most. Edges of a coarser division are edges of a finer one as well if the number of
    chunks of the one divides that of the other.

    >>> chunk_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [numel * index // num_chunks for index in range(num_chunks + 1)]


def _num_rounds(transfers: Sequence[Transfer]) -> int:
    return transfers[-1].round + 1 if transfers else 0
