"""Low rank: of each matrix, its projection onto a few directions travels (PowerSGD, Vogels et al. 2019).

One step of power iteration, begun where the last one ended: P = M Q, summed over ranks and orthonormalised, then
Q = M^T P, summed; the result is P Q^T. All matrices of a message share the two sums. Since P is the same on all ranks,
what a rank has sent of its own M is P P^T M, and the rest is left over; the paper leaves over M less the mean result,
which adds up to the same and is larger on each rank.

A message may hold some rows of a matrix: then these are a matrix of their own, and rows that are cut are sent whole.

All ranks compute P Q^T from the same numbers, and get the same bits if they compute alike: with the same library on the
same kind of processor and as many threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from gradientflow.compress.codec import Conversation, Parcel, Sum, Traffic, summed_nbytes
from gradientflow.compress.part import Plain, is_finite, pieces, write_out

#: A matrix is taken if its factors are smaller by this factor at least.
MIN_GAIN = 2.0
#: Matrices up to this size are multiplied in batches of one shape, which copies them; larger ones one by one.
BATCHED_NUMEL = 64 * 1024
#: What a guard calls the density of the rank in the recipe. Twice the density is twice the rank; from 32 times the rank
#: on, the guard's `WHOLE`, messages go as they are.
GUARDED_FLOOR = 1 / 64


class _Matrix(NamedTuple):
    """Where in the message, and its shape."""

    start: int
    rows: int
    columns: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class _Batch(NamedTuple):
    """Matrices of one shape, and where their factors lie among those of the message."""

    matrices: list[_Matrix]
    p_start: int
    q_start: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrices[0].rows, self.matrices[0].columns

    def gathered(self, flat: torch.Tensor) -> torch.Tensor:
        if len(self.matrices) == 1:
            return self.matrices[0].of(flat).unsqueeze(0)
        return torch.stack([matrix.of(flat) for matrix in self.matrices])


class _Layout(NamedTuple):
    """Of one message, for factors of so many directions."""

    rank: int
    batches: list[_Batch]
    loose: list[tuple[int, int]]  # what travels whole: cut rows, and what is no matrix
    p_numel: int
    q_numel: int

    def p_of(self, batch: _Batch, ps: torch.Tensor) -> torch.Tensor:
        """A batch's first factors among those of the message."""
        return self._factor(batch, ps, batch.p_start, batch.shape[0])

    def q_of(self, batch: _Batch, qs: torch.Tensor) -> torch.Tensor:
        return self._factor(batch, qs, batch.q_start, batch.shape[1])

    def _factor(self, batch: _Batch, flat: torch.Tensor, start: int, length: int) -> torch.Tensor:
        count = len(batch.matrices)
        return flat[start : start + count * length * self.rank].view(count, length, self.rank)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """The same space's orthonormal basis, for each of a batch; where columns depend on each other or are zero, any
    directions beside those that they span."""
    basis: torch.Tensor = torch.linalg.qr(columns)[0]
    return basis


class PowerSgd(Plain):
    """A `Part`: `rank` directions of each matrix."""

    overwrites = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._least = rank
        self._layouts: list[_Layout] = []
        self._q: list[torch.Tensor] = []  # by message, where the next step begins
        self._next: dict[int, torch.Tensor] = {}

    def takes(self, shape: tuple[int, ...]) -> bool:
        """What is no matrix, or one whose factors would be hardly smaller, travels whole behind the first factors."""
        return True

    def lay_out(self, parcels: Sequence[Parcel], rank: int, world: int) -> None:
        super().lay_out(parcels, rank, world)
        self._layouts = [_layout(parcel, self._least) for parcel in parcels]
        self._next = {}
        self._q = [_first_q(parcel, layout) for parcel, layout in zip(parcels, self._layouts, strict=True)]

    def _move(self, number: int, rank: int) -> None:
        """A message's matrices have so many directions from now on: those that they had, and others drawn."""
        parcel, before, qs = self._parcels[number], self._layouts[number], self._q[number]
        layout = _layout(parcel, rank)
        found = _first_q(parcel, layout)
        known = {
            m.start: q for batch in before.batches for m, q in zip(batch.matrices, before.q_of(batch, qs), strict=True)
        }
        for batch in layout.batches:
            for matrix, q in zip(batch.matrices, layout.q_of(batch, found), strict=True):
                if matrix.start in known:
                    kept = known[matrix.start][:, :rank]
                    q[:, : kept.shape[1]] = kept
        self._layouts[number], self._q[number] = layout, found

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        layout, before = self._layouts[parcel.number], self._q[parcel.number]
        num_loose = sum(stop - start for start, stop in layout.loose)
        ps = total.new_empty(layout.p_numel + num_loose)
        if num_loose:
            ps[layout.p_numel :] = torch.cat([total[start:stop] for start, stop in layout.loose])
        gathered = [batch.gathered(total) for batch in layout.batches]
        for batch, matrices in zip(layout.batches, gathered, strict=True):
            torch.matmul(matrices, layout.q_of(batch, before), out=layout.p_of(batch, ps))
        yield Sum([ps])
        if not is_finite(ps):  # as it is if any rank's matrix is not
            self._bad.append(parcel.number)
        qs = torch.empty_like(before)
        for batch, matrices in zip(layout.batches, gathered, strict=True):
            p = layout.p_of(batch, ps)
            p.copy_(orthonormal(p))
            torch.matmul(matrices.transpose(1, 2), p, out=layout.q_of(batch, qs))
            own = layout.q_of(batch, qs)
            for matrix, left, right in zip(batch.matrices, p, own, strict=True):
                matrix.of(total).addmm_(left, right.T, alpha=-1.0)
        if layout.batches:
            yield Sum([qs])
            if not is_finite(qs):
                self._bad.append(parcel.number)
        in_place = len(parcel.values) == 1 and parcel.dtype == total.dtype
        result = parcel.values[0] if in_place else torch.zeros_like(total)
        for batch in layout.batches:
            for matrix, left, right in zip(batch.matrices, layout.p_of(batch, ps), layout.q_of(batch, qs), strict=True):
                torch.matmul(left, right.T, out=matrix.of(result))
        offset = layout.p_numel
        for start, stop in layout.loose:
            result[start:stop] = ps[offset : offset + stop - start]
            total[start:stop] = 0.0
            offset += stop - start
        self._next[parcel.number] = torch.empty_like(qs)
        for batch in layout.batches:  # the length of gradients is nothing to go on with
            layout.q_of(batch, self._next[parcel.number]).copy_(normalize(layout.q_of(batch, qs), dim=1))
        if not in_place:
            write_out(parcel, result, unit)
        elif unit != 1.0:
            result.mul_(unit)

    def commit(self) -> None:
        for number, qs in self._next.items():
            self._q[number] = qs
        self._next = {}

    def begin(self, density: float, step: int, densities: Sequence[float] | None = None) -> None:
        super().begin(density, step, densities)
        self._next = {}
        for number, layout in enumerate(self._layouts if densities else ()):
            assert densities is not None
            rank = max(self._least, round(self._least * densities[number] / GUARDED_FLOOR))
            if rank != layout.rank:
                self._move(number, rank)

    def see(self, parcel: Parcel, number: int, start: int, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """Factors tell whether it is finite."""

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        layout = _layout(parcel, self._least)
        itemsize = _dtype(parcel).itemsize
        loose = sum(stop - start for start, stop in layout.loose)
        nbytes = itemsize * (layout.p_numel + layout.q_numel + loose)
        return Traffic(2 if layout.batches else 1, nbytes, 2 * nbytes, 8 * parcel.nbytes, summed_nbytes(nbytes, world))

    def state_dict(self) -> dict[str, Any]:
        return {"q": [qs.clone() for qs in self._q], "ranks": [layout.rank for layout in self._layouts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        layouts = [_layout(parcel, rank) for parcel, rank in zip(self._parcels, state["ranks"], strict=False)]
        if [len(qs) for qs in state["q"]] == [layout.q_numel for layout in layouts]:
            self._layouts = layouts
            self._q = [loaded.to(qs, copy=True) for loaded, qs in zip(state["q"], self._q, strict=True)]


def _layout(parcel: Parcel, rank: int) -> _Layout:
    shapes: dict[tuple[int, int], list[list[_Matrix]]] = {}
    loose: list[tuple[int, int]] = []
    for _, shape, begin, start, stop in pieces(parcel):
        columns = math.prod(shape[1:]) if len(shape) > 1 else 1
        head = min(-begin % columns, stop - start)
        rows = (stop - start - head) // columns
        if not _shrinks(rows, columns, rank):
            head, rows = stop - start, 0
        end = start + head + rows * columns
        for low, high in ((start, start + head), (end, stop)):
            if low < high:
                joins = loose and loose[-1][1] == low
                loose.append((loose.pop()[0] if joins else low, high))
        if rows:
            batches = shapes.setdefault((rows, columns), [])
            if not batches or rows * columns > BATCHED_NUMEL:
                batches.append([])
            batches[-1].append(_Matrix(start + head, rows, columns))
    found, p_numel, q_numel = [], 0, 0
    for (rows, columns), batches in shapes.items():
        for matrices in batches:
            found.append(_Batch(matrices, p_numel, q_numel))
            p_numel += len(matrices) * rows * rank
            q_numel += len(matrices) * columns * rank
    return _Layout(rank, found, loose, p_numel, q_numel)


def _shrinks(rows: int, columns: int, rank: int) -> bool:
    return rows > 0 and MIN_GAIN * rank * (rows + columns) <= rows * columns


def _first_q(parcel: Parcel, layout: _Layout) -> torch.Tensor:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(parcel.number)
    drawn = torch.randn(layout.q_numel, generator=generator, dtype=torch.float32)
    return drawn.to(parcel.values[0].device, _dtype(parcel)) if parcel.values else drawn


def _dtype(parcel: Parcel) -> torch.dtype:
    """In which it is remembered."""
    return parcel.dtype if parcel.dtype.itemsize >= torch.float32.itemsize else torch.float32
