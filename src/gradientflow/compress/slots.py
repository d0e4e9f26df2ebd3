"""Slots: what a codec remembers from step to step, beside the pool.

A slot belongs to a message and is laid out like it. There are two of each: what holds now, and what a step proposes.
A step that all ranks accept makes proposals hold (`commit`, which copies nothing); after any other everything is as
it was, to the last bit. By whatever messages gradients travel, what is saved is filed by parameter name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradientflow.compress.codec import Parcel
from gradientflow.errors import UsageError

#: Kind of memory -> parameter name -> values, flat.
Named = dict[str, dict[str, torch.Tensor]]


class Slots:
    """Of several kinds; a kind takes memory from the first time that it is `need`ed."""

    def __init__(self) -> None:
        self._parcels: Sequence[Parcel] = ()
        self._now: dict[str, list[torch.Tensor]] = {}  # by kind and message
        self._proposed: dict[str, list[torch.Tensor]] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._now)

    @property
    def nbytes(self) -> int:
        return 2 * sum(values.nbytes for slots in self._now.values() for values in slots)

    def lay_out(self, parcels: Sequence[Parcel]) -> None:
        """For these messages from now on. What is held moves over; what was proposed is forgotten."""
        named = self.named()
        self._parcels, self._now, self._proposed = parcels, {}, {}
        self.load(named)

    def forget(self) -> None:
        """Everything, of all kinds."""
        self._now, self._proposed = {}, {}

    def need(self, kind: str) -> None:
        """From now on there is memory of this kind, empty at first."""
        if kind not in self._now:
            self._now[kind] = [_zeros(parcel) for parcel in self._parcels]
            self._proposed[kind] = [torch.zeros_like(values) for values in self._now[kind]]

    def now(self, kind: str, parcel: Parcel) -> torch.Tensor:
        """What holds for the parcel, its ranges one after another."""
        return self._now[kind][parcel.number]

    def proposed(self, kind: str, parcel: Parcel) -> torch.Tensor:
        """What is to hold for it from the next step on: to be written, all of it, in every step, unless it is empty
        and stays so."""
        return self._proposed[kind][parcel.number]

    def commit(self) -> None:
        self._now, self._proposed = self._proposed, self._now

    def named(self) -> Named:
        """Copies of everything that holds."""
        return {kind: self._named(kind) for kind in self._now}

    def give_up(self, kind: str) -> dict[str, torch.Tensor]:
        """What holds, by parameter name; there is no memory of this kind from now on."""
        found = self._named(kind)
        del self._now[kind], self._proposed[kind]
        return found

    def _named(self, kind: str) -> dict[str, torch.Tensor]:
        sizes, tensors = self._sizes(), dict[str, torch.Tensor]()
        for parcel, values in zip(self._parcels, self._now[kind], strict=True):
            offset = 0
            for piece in parcel.message.slices:
                if piece.tensor not in tensors:
                    tensors[piece.tensor] = values.new_zeros(sizes[piece.tensor])
                tensors[piece.tensor][piece.start : piece.stop] = values[offset : offset + piece.numel]
                offset += piece.numel
        return tensors

    def check(self, named: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raise unless these could be loaded."""
        sizes = self._sizes()
        if (
            sizes
            and (unknown := self.unknown(named))
            and not any(sizes.keys() & each.keys() for each in named.values())
        ):
            raise UsageError(
                f"the state was saved for another model: it has {unknown[0]!r:.60}, and nothing of this one's "
                f"parameters, such as {min(sizes)!r:.60}"
            )
        for tensors in named.values():
            for name, values in tensors.items():
                if not values.is_floating_point() or values.dim() != 1:
                    raise UsageError(f"what waits of {name!r:.40} is {values.dtype} of {values.dim()} dimensions")
                if (expected := sizes.get(name, values.numel())) != values.numel():
                    raise UsageError(
                        f"the state was saved for another model: {name!r} had {values.numel()} elements, not {expected}"
                    )

    def unknown(self, named: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
        """Names of parameters that no message is about: nothing of them could be loaded."""
        sizes = self._sizes()
        return sorted({str(name) for tensors in named.values() for name in tensors} - sizes.keys())

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for parcel in self._parcels:
            for piece in parcel.message.slices:
                sizes[piece.tensor] = max(sizes.get(piece.tensor, 0), piece.stop)
        return sizes

    def load(self, named: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Make these hold; nothing for parameters that are not among them. Other kinds stay as they are."""
        for kind, tensors in named.items():
            self.need(kind)
            for parcel, values in zip(self._parcels, self._now[kind], strict=True):
                offset = 0
                for piece in parcel.message.slices:
                    there = values[offset : offset + piece.numel]
                    offset += piece.numel
                    if piece.tensor in tensors:
                        there.copy_(tensors[piece.tensor][piece.start : piece.stop])
                    else:
                        there.zero_()


def _zeros(parcel: Parcel) -> torch.Tensor:
    """Half-precision gradients are remembered in float32: what is left of them is smaller than they are."""
    if not parcel.values:
        return torch.zeros(0, dtype=torch.float32)
    first = parcel.values[0]
    dtype = first.dtype if first.dtype.itemsize >= torch.float32.itemsize else torch.float32
    return torch.zeros(parcel.message.numel, dtype=dtype, device=first.device)
