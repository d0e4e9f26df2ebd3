"""Coarse-grained sparse communication (Sun et al. 2019): send the chunks of the pool that matter most, summed densely.

The pool is cut into chunks, each within one range of a message. What is in them is judged by its L1 norm, summed over
ranks; so all ranks choose the same chunks, which are packed and summed by an ordinary all-reduce. No indices travel,
and what travels does not grow with the number of ranks. A step's chunks are chosen from norms of the step before, so
they can leave while backward runs.

The paper leaves details open, or we do otherwise:
- a chunk is judged by its norm for each of its elements: the last one of a range is shorter;
- a chunk that was sent is judged by what one of the steps that made up its content has given, on average, for this is
  what the next step will find there. By all that it held it would be chosen again at once, and have little to give;
- a quarter of the chunks is chosen by how long they have waited, so that none waits longer than 4 / density steps;
- what rounding to the wire's precision takes away is left over as well; so is what might leave its range, unless there
  is a scaler to lower its factor;
- after a new plan the first step sends everything: norms of chunks that no longer exist say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradientflow.compress.cast import Cast
from gradientflow.compress.codec import Conversation, Parcel, Sum, Traffic, summed_nbytes
from gradientflow.compress.part import BLOCK, is_finite, ranges

MAX_CHUNK = 32 * 1024
#: A pool has at least so many chunks, however small they get.
MIN_CHUNKS = 1024
#: Of those sent, the share that is chosen by age.
BY_AGE = 0.25
#: Of fp16's range: partial sums are rounded.
SAFE = 0.9


class _Grid(NamedTuple):
    """The chunks of one range: `num_full` of the common size and, if `tail`, a shorter one."""

    first: int  # number of its first chunk in the pool
    num_full: int
    tail: int

    @property
    def num_chunks(self) -> int:
        return self.num_full + (self.tail > 0)


class _Pick(NamedTuple):
    """What is sent of one range."""

    rows: torch.Tensor  # numbers of full chunks, within the range
    tail: bool


class _Choice(NamedTuple):
    """What the next step sends, and how long chunks have waited then."""

    chosen: torch.Tensor
    ages: torch.Tensor


class Csc:
    """A `Part`: chunks, chosen by norm and age. wire: the precision that they travel in, unless their own."""

    forgets = False
    sends_all = True
    chooses_ahead = True
    overwrites = False

    def __init__(self, wire: Cast | None = None, chunk: int = 0) -> None:
        self._wire, self._asked_chunk = wire, chunk
        self.can_overflow = wire is not None and wire.can_overflow
        self._overflown: list[int] = []  # messages of this step; lanes append to it side by side
        self._chunk = 1
        self._world = 1
        self._parcels: Sequence[Parcel] = ()
        self._grids: list[list[_Grid]] = []
        self._picks: list[list[_Pick]] = []
        self._lengths = torch.zeros(0)  # of all chunks
        self._norms = torch.zeros(0)  # of this step
        self._chosen = torch.zeros(0, dtype=torch.bool)
        self._ages = torch.zeros(0, dtype=torch.int64)  # steps since a chunk was sent
        self._next: _Choice | None = None
        self._density = 1.0

    @property
    def num_chunks(self) -> int:
        return len(self._ages)

    @property
    def chosen(self) -> torch.Tensor:
        """Of all chunks, those that are sent in this step."""
        return self._chosen

    def takes(self, shape: tuple[int, ...]) -> bool:
        return True

    def lay_out(self, parcels: Sequence[Parcel], rank: int, world: int) -> None:
        """The next step sends everything."""
        self._world = world
        pool = sum(parcel.message.numel for parcel in parcels)
        self._chunk = self._asked_chunk or max(1, min(MAX_CHUNK, pool // MIN_CHUNKS))
        self._parcels, self._grids = parcels, []
        first, lengths = 0, []
        for parcel in parcels:
            grids = []
            for values in parcel.values:
                grid = _Grid(first, values.numel() // self._chunk, values.numel() % self._chunk)
                lengths += [self._chunk] * grid.num_full + [grid.tail] * (grid.tail > 0)
                first += grid.num_chunks
                grids.append(grid)
            self._grids.append(grids)
        device = next((values.device for parcel in parcels for values in parcel.values), torch.device("cpu"))
        self._lengths = torch.tensor(lengths, dtype=torch.float32)
        self._norms = torch.zeros(first, dtype=torch.float32, device=device)
        self._ages = torch.zeros(first, dtype=torch.int64)
        self._choose(torch.ones(first, dtype=torch.bool))

    def _choose(self, chosen: torch.Tensor) -> None:
        self._chosen, self._picks = chosen, []
        for parcel, grids in zip(self._parcels, self._grids, strict=True):
            picks = []
            for grid, values in zip(grids, parcel.values, strict=True):
                rows = chosen[grid.first : grid.first + grid.num_full].nonzero().flatten()
                tail = grid.tail > 0 and bool(chosen[grid.first + grid.num_full])
                picks.append(_Pick(rows.to(values.device), tail))
            self._picks.append(picks)

    def begin(self, density: float, step: int, densities: Sequence[float] | None = None) -> None:
        self._density, self._next = density, None
        self._overflown = []

    def blocks(self, parcel: Parcel, number: int) -> list[int]:
        grid, rows = self._grids[parcel.number][number], max(1, BLOCK // self._chunk)
        whole, rest = divmod(grid.num_full, rows)
        sizes = [rows * self._chunk] * whole + [rest * self._chunk, grid.tail]
        return [size for size in sizes if size]

    def see(self, parcel: Parcel, number: int, start: int, total: torch.Tensor, scratch: torch.Tensor) -> None:
        grid = self._grids[parcel.number][number]
        first = grid.first + start // self._chunk
        size = self._chunk if start < grid.num_full * self._chunk else grid.tail
        rows = total.view(-1, size)
        # torch.linalg.vector_norm takes twice as long as these two.
        norms = torch.abs(rows, out=scratch[: rows.numel()].view(rows.shape)).sum(dim=1)
        self._norms[first : first + len(rows)] = norms

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        places = list(zip(self._grids[parcel.number], self._picks[parcel.number], strict=True))
        numel = sum(self._numel(grid, pick) for grid, pick in places)
        dtype, device = self._type_of(parcel.values[0].dtype), parcel.values[0].device
        packed = torch.empty(numel, dtype=dtype, device=device)
        is_narrow = torch.finfo(dtype).max < 1e38
        offset = 0
        for (grid, pick), values in zip(places, ranges(parcel, total), strict=True):
            for here, rows in self._picked(grid, pick, values):
                wire = packed[offset : offset + len(rows) * here.shape[1]].view(len(rows), -1)
                offset += wire.numel()
                if wire.dtype == here.dtype and unit == 1.0:
                    torch.index_select(here, 0, rows, out=wire)
                    here.index_fill_(0, rows, 0.0)
                else:
                    part = here.index_select(0, rows)
                    if unit != 1.0:
                        wire.copy_(part * unit)
                    elif is_narrow:
                        most = SAFE * torch.finfo(dtype).max / self._world
                        wire.copy_(part.clamp(-most, most))
                    else:
                        wire.copy_(part)
                    here.index_copy_(0, rows, part.sub_(wire, alpha=1.0 / unit))
        if len(packed):
            yield Sum([packed])
            # A sum may leave the wire's range though all of its parts were within it; on all ranks alike.
            if is_narrow and not is_finite(packed):
                self._overflown.append(parcel.number)
        offset = 0
        for (grid, pick), values in zip(places, parcel.values, strict=True):
            for here, rows in self._picked(grid, pick, values):
                count = len(rows) * here.shape[1]
                here.index_copy_(0, rows, packed[offset : offset + count].view(len(rows), -1).to(values.dtype))
                offset += count

    def clear_sent(self, parcel: Parcel, values: torch.Tensor) -> None:
        places = zip(self._grids[parcel.number], self._picks[parcel.number], ranges(parcel, values), strict=True)
        for grid, pick, part in places:
            for here, rows in self._picked(grid, pick, part):
                here.index_fill_(0, rows, 0.0)

    def tells(self) -> Sequence[torch.Tensor]:
        return [self._norms]

    def learns(self) -> bool:
        norms = self._norms.cpu()
        finite = not self._overflown and bool(torch.isfinite(norms).all())
        if finite:
            expected = torch.where(self._chosen, norms / (self._ages + 1), norms)
            ages = torch.where(self._chosen, 0, self._ages + 1)
            self._next = _Choice(most_important(expected / self._lengths, ages, self._density), ages)
        return finite

    def commit(self) -> None:
        assert self._next is not None
        self._ages = self._next.ages
        self._choose(self._next.chosen)

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        nbytes = math.ceil(density * parcel.numel) * self._type_of(parcel.dtype).itemsize
        # Gradients and what is left over are read, that and the result written; what is sent is packed and unpacked.
        return Traffic(1, nbytes, 2 * nbytes, 4 * parcel.nbytes + 4 * nbytes, summed_nbytes(nbytes, world))

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": self._chosen.clone(), "ages": self._ages.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["ages"]) == self.num_chunks:
            self._ages = state["ages"].clone()
            self._choose(state["chosen"].clone())

    def _picked(self, grid: _Grid, pick: _Pick, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A range as rows of one length and which of them are picked; twice, if it ends in a shorter chunk that is
        picked too."""
        full = grid.num_full * self._chunk
        if len(pick.rows):
            yield values[:full].view(-1, self._chunk), pick.rows
        if pick.tail:
            yield values[full:].view(1, -1), pick.rows.new_zeros(1)

    def _numel(self, grid: _Grid, pick: _Pick) -> int:
        return len(pick.rows) * self._chunk + grid.tail * pick.tail

    def _type_of(self, dtype: torch.dtype) -> torch.dtype:
        return self._wire.type_of(dtype) if self._wire else dtype


def most_important(scores: torch.Tensor, ages: torch.Tensor, density: float) -> torch.Tensor:
    """Which chunks to send: ceil(density * all), a quarter of them those that have waited longest, the rest those with
    the highest scores. Ties go to the first, so equal scores give equal choices everywhere.

    >>> scores, ages = torch.tensor([9.0, 1.0, 8.0, 2.0, 0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0, 0, 0, 5, 0])
    >>> most_important(scores, ages, 0.375).nonzero().flatten().tolist()
    [0, 2, 6]
    """
    number = min(len(scores), math.ceil(density * len(scores)))
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    by_age = torch.sort(ages, descending=True, stable=True).indices[: math.ceil(BY_AGE * number)]
    chosen[by_age] = True
    by_score = torch.sort(scores.masked_fill(chosen, -1.0), descending=True, stable=True).indices
    chosen[by_score[: number - len(by_age)]] = True
    return chosen
