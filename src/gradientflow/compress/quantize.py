"""Quantisation: every element travels, in few bits.

Sums of codes are no codes, so ranks cannot simply add up what they get. Instead each rank is the one to sum a shard of
the message: ranks swap codes of shards, decode and add them in the order of ranks, encode the sum and gather that. What
travels is twice the codes of a message, whatever the number of ranks, and since all of them decode the same bytes,
they end with the same bits. What encoding a sum takes away is left over on the rank that did it, as what encoding its
own gradients took away is: nothing is lost.

Codes of a shard are bytes: packed values, then a float32 scale for each block of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from gradientflow.compress.codec import Conversation, Gather, Parcel, Swap, Traffic, gathered_nbytes
from gradientflow.compress.draws import drawing
from gradientflow.compress.part import Plain, is_finite, write_out

#: Elements worked on at a time, a multiple of every block: they and their codes stay in a core's cache.
PIECE = 128 * 1024
#: Elements that share a scale.
INT8_BLOCK = 256
QSGD_BUCKET = 512
SIGN_BLOCK = 128

#: Numbers from 0 to 1, as many as there are in a tensor.
Draw = Callable[[torch.Tensor], torch.Tensor]


class Scheme(Protocol):
    """A way to write numbers with few bits: `block` of them share a scale."""

    block: int
    #: Of an element.
    bits: int

    def encode(
        self, rows: torch.Tensor, last: int, codes: torch.Tensor, scales: torch.Tensor, work: torch.Tensor, draw: Draw
    ) -> None:
        """rows: float32, a block each, the last one with so many numbers and zeros after them. To be written: codes,
        uint8, of each row; scales, float32, one for each row. work: room for as many rows; may be the rows themselves.
        """

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows."""


class Int8:
    """Rounded to 255 levels between the largest of a block and its negative."""

    block, bits = INT8_BLOCK, 8

    def encode(
        self, rows: torch.Tensor, last: int, codes: torch.Tensor, scales: torch.Tensor, work: torch.Tensor, draw: Draw
    ) -> None:
        # torch.aminmax takes three times as long as these two, a norm four times.
        scales.copy_(rows.abs().amax(dim=1)).div_(127.0)
        torch.mul(rows, torch.where(scales > 0, 1.0 / scales, 0.0).unsqueeze(1), out=work).round_()
        codes.view(torch.int8).copy_(work)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        torch.mul(codes.view(torch.int8), scales.unsqueeze(1), out=rows)


class Qsgd:
    """Rounded at random to one of so many levels on either side, of the norm of a bucket, so that the mean is right
    (Alistarh et al. 2017)."""

    block = QSGD_BUCKET

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.levels = 2 ** (bits - 1) - 1

    def encode(
        self, rows: torch.Tensor, last: int, codes: torch.Tensor, scales: torch.Tensor, work: torch.Tensor, draw: Draw
    ) -> None:
        # Of what is at most 1: squares of large numbers would be inf.
        most = rows.abs().amax(dim=1).clamp_(min=torch.finfo(rows.dtype).tiny)
        scales.copy_((rows / most.unsqueeze(1)).square_().sum(dim=1).sqrt_()).mul_(most)
        torch.mul(rows, torch.where(scales > 0, self.levels / scales, 0.0).unsqueeze(1), out=work)
        work.add_(draw(rows)).floor_()
        # An element is at most the norm, but for rounding.
        found = work.clamp_(-self.levels, self.levels).to(torch.int8).view(torch.uint8)
        scales.div_(self.levels)
        parts = found.view(len(rows), -1, 8 // self.bits)
        codes.zero_()
        for place in range(8 // self.bits):
            codes |= (parts[..., place] & (2**self.bits - 1)) << (place * self.bits)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        parts = rows.view(len(rows), -1, 8 // self.bits)
        for place in range(8 // self.bits):
            # To the top, then down again as a signed number: its sign comes along.
            top = (codes << (8 - (place + 1) * self.bits)).view(torch.int8)
            parts[..., place] = top >> (8 - self.bits)
        rows.mul_(scales.unsqueeze(1))


class Sign:
    """One bit, and the mean of magnitudes of a block (EF-sign, Karimireddy et al. 2019)."""

    block, bits = SIGN_BLOCK, 1

    def encode(
        self, rows: torch.Tensor, last: int, codes: torch.Tensor, scales: torch.Tensor, work: torch.Tensor, draw: Draw
    ) -> None:
        codes.copy_(_packed_signs(rows))
        scales.copy_(torch.abs(rows, out=work).sum(dim=1)).div_(self.block)
        scales[-1] *= self.block / last

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        torch.mul(_unpacked(codes), (2.0 * scales).unsqueeze(1), out=rows).sub_(scales.unsqueeze(1))


class Vote(Sign):
    """Nothing but the bit: what ranks decode is 1 or -1, and so is what becomes of their sum (signSGD with majority
    vote, Bernstein et al. 2018)."""

    #: What 0 is: a gradient that is not there, a tie of ranks.
    zero_is_up = True

    def encode(
        self, rows: torch.Tensor, last: int, codes: torch.Tensor, scales: torch.Tensor, work: torch.Tensor, draw: Draw
    ) -> None:
        codes.copy_(_packed_signs(rows, self.zero_is_up))
        scales.fill_(1.0)


def _packed_signs(rows: torch.Tensor, zero_is_up: bool = True) -> torch.Tensor:
    """Eight in a byte, the first in its lowest bit: 1 if it is above 0."""
    if rows.device.type == "cpu":  # numpy compares in a third of torch's time
        flat = rows.numpy().ravel()
        return torch.from_numpy(np.packbits(flat >= 0 if zero_is_up else flat > 0, bitorder="little")).view(
            len(rows), -1
        )
    is_up = rows >= 0 if zero_is_up else rows > 0
    weights = 2 ** torch.arange(8, device=rows.device, dtype=torch.uint8)
    return (is_up.view(len(rows), -1, 8) * weights).sum(dim=-1, dtype=torch.uint8)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    if codes.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(codes.numpy().ravel(), bitorder="little")).view(len(codes), -1)
    shifts = torch.arange(8, device=codes.device, dtype=torch.uint8)
    return ((codes.unsqueeze(-1) >> shifts) & 1).flatten(1)


class Quantized(Plain):
    """A `Part`: an all-reduce in codes of a scheme."""

    overwrites = True

    def __init__(self, scheme: Scheme, forgets: bool = False) -> None:
        super().__init__()
        self._scheme, self.forgets = scheme, forgets

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        draw = self._drawing(parcel.number, total.device)
        shard = self._shard(len(total))
        bounds = [(min(k * shard, len(total)), min((k + 1) * shard, len(total))) for k in range(self._world)]
        outgoing = [Codes(self._scheme, shard, total.device) for _ in bounds]
        summed = outgoing[self._rank]
        for codes, (start, stop) in zip(outgoing, bounds, strict=True):
            values = total[start:stop]
            if self.forgets:
                codes.write(values, None, draw)
            elif codes is not summed:
                codes.write(values, values, draw)
        arrived = yield Swap([codes.flat for codes in outgoing], [len(summed.flat)] * self._world)
        assert arrived is not None
        start, stop = bounds[self._rank]
        # Its own part of the shard a rank need not encode, if nothing is to be forgotten: what waits there is what
        # codes of sums have left over, and would be encoded twice before it is sent.
        mine = torch.zeros_like(total[start:stop]) if self.forgets else total[start:stop]
        for rank, flat in enumerate(arrived):
            if self.forgets or rank != self._rank:
                Codes(self._scheme, shard, total.device, flat).read(mine, add=True)
        summed.write(mine, None if self.forgets else mine, draw)
        gathered = yield Gather(summed.flat)
        assert gathered is not None
        in_place = len(parcel.values) == 1 and parcel.dtype == torch.float32
        result = parcel.values[0] if in_place else mine.new_empty(len(total))
        for flat, (start, stop) in zip(gathered, bounds, strict=True):
            codes = Codes(self._scheme, shard, total.device, flat)
            codes.read(result[start:stop])
            if not is_finite(codes.scales):
                self._bad.append(parcel.number)
        if not in_place:
            write_out(parcel, result, unit)
        elif unit != 1.0:
            result.mul_(unit)

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        nbytes = _nbytes(self._scheme, self._shard(parcel.numel, world))
        sent = (world - 1) * nbytes + gathered_nbytes(nbytes, world)
        # Gradients and what is left over are read and written, the result is; and each of them once more in pieces.
        return Traffic(2, (world + 1) * nbytes, 4 * world * nbytes, 8 * parcel.nbytes, sent)

    def _shard(self, numel: int, world: int = 0) -> int:
        """Elements that each rank sums, whole blocks."""
        return math.ceil(numel / (world or self._world) / self._scheme.block) * self._scheme.block

    def _drawing(self, message: int, device: torch.device) -> Draw:
        """Numbers that follow from the step, the message and the rank: a run can be repeated, and no lane draws what
        another would have."""
        generator = drawing(self._step, message, self._rank)
        return lambda like: torch.rand(like.shape, generator=generator, dtype=torch.float32).to(device)


class Voted(Quantized):
    """A `Part`: the sign that most ranks have. What has none goes up in one step and down in the next, so that weights
    do not drift where gradients are 0 or ranks disagree."""

    def __init__(self) -> None:
        self._vote = Vote()
        super().__init__(self._vote, forgets=True)

    def begin(self, density: float, step: int, densities: Sequence[float] | None = None) -> None:
        super().begin(density, step, densities)
        self._vote.zero_is_up = step % 2 == 0


class Codes:
    """The codes of one shard: `flat` is what travels."""

    def __init__(self, scheme: Scheme, shard: int, device: torch.device, flat: torch.Tensor | None = None) -> None:
        self._scheme = scheme
        num_blocks = shard // scheme.block
        self.flat = torch.zeros(_nbytes(scheme, shard), dtype=torch.uint8, device=device) if flat is None else flat
        self._codes = self.flat[: shard * scheme.bits // 8].view(num_blocks, -1)
        self.scales = self.flat[shard * scheme.bits // 8 :].view(torch.float32)

    def write(self, values: torch.Tensor, left_over: torch.Tensor | None, draw: Draw) -> None:
        """Encode; take from `left_over` what the codes stand for."""
        left = torch.split(left_over, PIECE) if left_over is not None else itertools.repeat(None)
        for (rows, codes, scales, piece), waits in zip(self._pieces(values), left, strict=False):
            flat, given = rows.view(-1), rows
            if len(piece) == len(flat) and piece.dtype == flat.dtype:
                given = piece.view(rows.shape)
            else:
                flat[: len(piece)] = piece
                flat[len(piece) :] = 0.0
            self._scheme.encode(given, (len(piece) - 1) % self._scheme.block + 1, codes, scales, rows, draw)
            if waits is not None:
                self._scheme.decode(codes, scales, rows)
                waits.sub_(flat[: len(piece)])

    def read(self, values: torch.Tensor, add: bool = False) -> None:
        for rows, codes, scales, piece in self._pieces(values):
            if not add and len(piece) == rows.numel() and piece.dtype == rows.dtype:
                self._scheme.decode(codes, scales, piece.view(rows.shape))
                continue
            self._scheme.decode(codes, scales, rows)
            (piece.add_ if add else piece.copy_)(rows.view(-1)[: len(piece)])

    def _pieces(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Rows to work in, their codes and scales, and the part of values that they are of."""
        size = min(PIECE, len(self.scales) * self._scheme.block)
        rows = torch.empty(size, dtype=torch.float32, device=values.device).view(-1, self._scheme.block)
        for number, piece in enumerate(torch.split(values, PIECE) if len(values) else ()):
            first, count = number * PIECE // self._scheme.block, math.ceil(len(piece) / self._scheme.block)
            yield rows[:count], self._codes[first : first + count], self.scales[first : first + count], piece


def _nbytes(scheme: Scheme, shard: int) -> int:
    return shard * scheme.bits // 8 + 4 * shard // scheme.block
