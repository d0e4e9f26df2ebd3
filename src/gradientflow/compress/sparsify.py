"""Sparsification: few elements travel, the others wait.

Ranks that choose for themselves (top-k) send indices along, and all of them gather what everyone has chosen: bytes grow
with the number of ranks. Ranks that choose alike (random-k: by a seed they share) send values alone, and a sum does.
gTop-k keeps the number of elements constant on its way down a tree of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gradientflow.compress.codec import (
    Conversation,
    Gather,
    Parcel,
    Sum,
    Swap,
    Traffic,
    gathered_nbytes,
    summed_nbytes,
)
from gradientflow.compress.draws import drawing
from gradientflow.compress.part import BLOCK, Plain, pieces, write_out

#: Of all elements, but no fewer than this, a threshold is estimated from.
SAMPLED = 0.01
MIN_SAMPLES = 4096
#: A threshold that finds this share of the wanted number or more is good enough.
ENOUGH = 0.8
#: Else it is lowered, at most so often, each time by this factor.
MAX_LOWERED = 10
LOWERED = 0.8
#: Of an index.
INDEX_NBYTES = 4


class Chosen(NamedTuple):
    """Elements of a message: where, and how much."""

    indices: torch.Tensor
    values: torch.Tensor


def largest(values: torch.Tensor, number: int) -> torch.Tensor:
    """Indices of the `number` elements that are largest in magnitude.

    >>> largest(torch.tensor([1.0, -5.0, 2.0, 0.0]), 2).tolist()
    [1, 2]
    """
    return torch.topk(values.abs(), number, sorted=False).indices


def about_largest(values: torch.Tensor, number: int) -> torch.Tensor:
    """Indices of at most `number` elements, those above a threshold that a sample suggests (Lin et al. 2018).

    Where more are above it, those of them that are largest; the sample is of every so-manieth element, so that all
    parts of a message are in it.
    """
    num_samples = min(
        len(values), max(MIN_SAMPLES, math.ceil(SAMPLED * len(values)), math.ceil(2 * len(values) / number))
    )
    sample = values[:: len(values) // num_samples].abs()
    rank = max(1, round(number * len(sample) / len(values)))
    threshold = sample.kthvalue(len(sample) - rank + 1).values
    found = above(values, float(threshold))
    for _ in range(MAX_LOWERED):
        if len(found) >= ENOUGH * number or not threshold > 0:
            break
        threshold = threshold * LOWERED
        found = above(values, float(threshold))
    if len(found) > number:
        found = found[largest(values[found], number)]
    return found


def above(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Indices of elements that are not 0, and not smaller than this in magnitude.

    >>> above(torch.tensor([1.0, -5.0, 0.0, 2.0]), 2.0).tolist()
    [1, 3]
    """
    threshold = max(threshold, float(np.nextafter(np.float32(0), np.float32(1))))
    if values.device.type != "cpu":
        return (values.abs() >= threshold).nonzero().flatten()
    # Numpy finds them in a quarter of torch's time.
    scratch, found = values.new_empty(min(BLOCK, len(values))), []
    for number, block in enumerate(torch.split(values, BLOCK)):
        magnitudes = torch.abs(block, out=scratch[: len(block)])
        found.append(np.flatnonzero(magnitudes.numpy() >= threshold) + number * BLOCK)
    return torch.from_numpy(np.concatenate(found))


def one_of_each_stratum(numel: int, number: int, generator: torch.Generator) -> torch.Tensor:
    """`number` indices in order, each drawn from as many equal parts of the range: no two are the same, all elements
    are equally likely, and no list of all of them has to be shuffled.

    >>> one_of_each_stratum(10, 5, drawing(1)) // 2
    tensor([0, 1, 2, 3, 4])
    """
    edges = torch.arange(number + 1) * numel // number
    draws = torch.rand(number, generator=generator, dtype=torch.float64)
    return edges[:-1] + (draws * (edges[1:] - edges[:-1])).long()


class _Sparse(Plain):
    """What the parts below have in common: how many elements a message sends."""

    def __init__(self) -> None:
        super().__init__()
        self._num_taken: list[int] = []
        self._sent: dict[int, torch.Tensor] = {}  # by message, where this rank has sent something

    def lay_out(self, parcels: Sequence[Parcel], rank: int, world: int) -> None:
        super().lay_out(parcels, rank, world)
        self._num_taken = [self._numel(parcel) for parcel in parcels]
        self._sent = {}

    def clear_sent(self, parcel: Parcel, values: torch.Tensor) -> None:
        values[self._sent[parcel.number]] = 0.0

    def _gather(
        self, parcel: Parcel, total: torch.Tensor, chosen: torch.Tensor, number: int, unit: float
    ) -> Conversation:
        """What each rank has chosen for itself, at most `number` elements."""
        self._sent[parcel.number] = chosen
        if not number:
            return
        packed = _packed(Chosen(chosen, total[chosen]), number)
        total[chosen] = 0.0
        gathered = yield Gather(packed)
        assert gathered is not None
        _add_up(parcel, total, (_unpacked(theirs, total.dtype) for theirs in gathered), unit)

    def _numel(self, parcel: Parcel) -> int:
        return sum(stop - start for _, shape, _, start, stop in pieces(parcel) if self.takes(shape))

    def _places(self, parcel: Parcel, numbers: torch.Tensor) -> torch.Tensor:
        """Where in the message elements lie that are counted among those that are taken."""
        runs = [(start, stop) for _, shape, _, start, stop in pieces(parcel) if self.takes(shape)]
        ends = torch.tensor([stop - start for start, stop in runs]).cumsum(0)
        shifts = torch.tensor([stop for _, stop in runs]) - ends
        return numbers + shifts[torch.bucketize(numbers, ends, right=True)]

    def _number(self, parcel: Parcel) -> int:
        density = self._densities[parcel.number] if self._densities else self._density
        return math.ceil(density * self._num_taken[parcel.number])


class TopK(_Sparse):
    """A `Part`: the largest elements of each rank's own; or, `sampled`, about those."""

    def __init__(self, sampled: bool) -> None:
        super().__init__()
        self._choose = about_largest if sampled else largest

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        number = self._number(parcel)
        yield from self._gather(parcel, total, self._choose(total, number), number, unit)

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        nbytes = math.ceil(density * self._numel(parcel)) * (INDEX_NBYTES + _itemsize(parcel))
        return Traffic(1, nbytes, (world + 3) * nbytes, 7 * parcel.nbytes, gathered_nbytes(nbytes, world))


class Threshold(_Sparse):
    """A `Part`: all elements of a magnitude, however many they are. Ranks ask each other for numbers first."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        # Values are shares of a mean: gradients divided by ranks.
        chosen = above(total, self._threshold / self._world)
        numbers = yield Gather(torch.tensor([len(chosen)], device=total.device))
        assert numbers is not None
        yield from self._gather(parcel, total, chosen, max(int(number) for number in numbers), unit)

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        """If nothing is above the threshold: nobody knows before."""
        return Traffic(1, 8, 8 * world, 5 * parcel.nbytes, gathered_nbytes(8, world))


class RandomK(_Sparse):
    """A `Part`: elements drawn by a seed that all ranks share."""

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        generator = drawing(self._step, parcel.number)
        drawn = one_of_each_stratum(self._num_taken[parcel.number], self._number(parcel), generator)
        chosen = self._places(parcel, drawn).to(total.device)
        self._sent[parcel.number] = chosen
        packed = total[chosen]
        total[chosen] = 0.0
        yield Sum([packed])
        _add_up(parcel, total, [Chosen(chosen, packed)], unit)

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        nbytes = math.ceil(density * self._numel(parcel)) * _itemsize(parcel)
        return Traffic(1, nbytes, 3 * nbytes, 4 * parcel.nbytes + 6 * nbytes, summed_nbytes(nbytes, world))


class GTopK(_Sparse):
    """A `Part`: of the sum over ranks, about the largest elements (Shi et al. 2019).

    In each round half of the ranks that are left hand what they have to another, which adds it to its own, keeps as
    many elements as one rank began with, and leaves the others over for itself: so, unlike in the paper, nothing is
    lost, whatever comes down the other branches. What is left in the end goes back up the tree. Any number of ranks.
    """

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        number = self._number(parcel)
        indices = about_largest(total, number)
        self._sent[parcel.number] = indices
        chosen = Chosen(indices, total[indices])
        total[indices] = 0.0
        for distance in _distances(self._world):
            other, takes = self._partner(distance)
            arrived = yield self._hand(_packed(chosen, number), other, takes)
            assert arrived is not None
            if other is not None and takes:
                chosen = _merged(chosen, _unpacked(arrived[other], total.dtype), number, total)
        for distance in reversed(_distances(self._world)):
            other, takes = self._partner(distance)
            arrived = yield self._hand(_packed(chosen, number), other, not takes)
            assert arrived is not None
            if other is not None and not takes:
                chosen = _unpacked(arrived[other], total.dtype)
        _add_up(parcel, total, [chosen], unit)

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        """Of the first rank, which takes in every round of one half and gives in every round of the other."""
        nbytes = math.ceil(density * self._numel(parcel)) * (INDEX_NBYTES + _itemsize(parcel))
        num_rounds = len(_distances(world))
        sent = 2 * (world - 1) / world * nbytes
        return Traffic(2 * num_rounds, num_rounds * nbytes, 8 * nbytes, 7 * parcel.nbytes, sent)

    def _partner(self, distance: int) -> tuple[int | None, bool]:
        """Of this rank in a round of the way down, and whether it takes what the other has."""
        if self._rank % (2 * distance) == distance:
            return self._rank - distance, False
        if self._rank % (2 * distance) == 0 and self._rank + distance < self._world:
            return self._rank + distance, True
        return None, False

    def _hand(self, packed: torch.Tensor, other: int | None, takes: bool) -> Swap:
        outgoing, incoming = [packed[:0]] * self._world, [0] * self._world
        if other is not None and takes:
            incoming[other] = len(packed)
        elif other is not None:
            outgoing[other] = packed
        return Swap(outgoing, incoming)


def _distances(world: int) -> list[int]:
    return [2**power for power in range((world - 1).bit_length())]


def _merged(one: Chosen, other: Chosen, number: int, dropped: torch.Tensor) -> Chosen:
    """Their sum, of which at most `number` elements are kept and the rest is added to `dropped`."""
    indices, places = torch.unique(torch.cat([one.indices, other.indices]), return_inverse=True)
    values = one.values.new_zeros(len(indices)).index_add_(0, places, torch.cat([one.values, other.values]))
    if len(indices) <= number:
        return Chosen(indices, values)
    kept = torch.zeros(len(indices), dtype=torch.bool, device=indices.device)
    kept[largest(values, number)] = True
    dropped.index_add_(0, indices[~kept], values[~kept])
    return Chosen(indices[kept], values[kept])


def _itemsize(parcel: Parcel) -> int:
    """Of a value on the wire: as it is remembered."""
    return max(parcel.dtype.itemsize, torch.float32.itemsize)


def _packed(chosen: Chosen, number: int) -> torch.Tensor:
    """As bytes, for `number` elements; those that there are not are zeros at index 0."""
    packed = torch.zeros(
        number * (chosen.values.itemsize + INDEX_NBYTES), dtype=torch.uint8, device=chosen.values.device
    )
    edge, count = number * chosen.values.itemsize, len(chosen.indices)
    packed[:edge].view(chosen.values.dtype)[:count] = chosen.values
    packed[edge:].view(torch.int32)[:count] = chosen.indices
    return packed


def _unpacked(packed: torch.Tensor, dtype: torch.dtype) -> Chosen:
    edge = len(packed) // (dtype.itemsize + INDEX_NBYTES) * dtype.itemsize
    if packed.storage_offset() % dtype.itemsize:
        packed = packed.clone()
    return Chosen(packed[edge:].view(torch.int32).long(), packed[:edge].view(dtype))


def _add_up(parcel: Parcel, total: torch.Tensor, everyone: Iterable[Chosen], unit: float) -> None:
    """The sum of what ranks have chosen, in their order, into the parcel's values, which are zero."""
    in_place = len(parcel.values) == 1 and parcel.dtype == total.dtype
    result = parcel.values[0] if in_place else torch.zeros_like(total)
    for chosen in everyone:
        result.index_add_(0, chosen.indices, chosen.values if unit == 1.0 else chosen.values * unit)
    if not in_place:
        write_out(parcel, result, 1.0)
