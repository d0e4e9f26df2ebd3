"""Half precision on the wire: wider gradients are rounded, summed in the narrow type and widened again.

fp16 keeps 11 bits but ends at 65504; bf16 has float32's range and 8 bits. A sum that leaves fp16's range
becomes inf on every rank alike: a `GradScaler` sees it everywhere and skips the step, and without one the
runtime raises `NonFiniteError` (a stock DDP fp16 hook poisons the weights without a word).
"""

from __future__ import annotations

import torch

from gradientflow.compress.codec import Conversation, Parcel, Sum, Traffic, summed_nbytes, summed_once
from gradientflow.errors import RecipeError


class Cast:
    """Send wider floating-point types as `wire`; what is as narrow already goes as it is."""

    lossless = False

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire
        self.can_overflow = torch.finfo(wire).max < 1e38

    def converse(self, parcel: Parcel) -> Conversation:
        if self.type_of(parcel.values[0].dtype) is parcel.values[0].dtype:
            yield Sum(parcel.values)
            return
        narrow = [values.to(self.wire) for values in parcel.values]
        yield Sum(narrow)
        for values, summed in zip(parcel.values, narrow, strict=True):
            values.copy_(summed)

    def traffic(self, parcel: Parcel, world: int) -> Traffic:
        if self.type_of(parcel.dtype) is parcel.dtype:
            return summed_once(parcel.nbytes, world)
        nbytes = parcel.numel * self.wire.itemsize
        return Traffic(1, nbytes, nbytes, 2 * (nbytes + parcel.nbytes), summed_nbytes(nbytes, world))

    def type_of(self, dtype: torch.dtype) -> torch.dtype:
        """What travels in place of `dtype`."""
        return self.wire if dtype.is_floating_point and dtype.itemsize > self.wire.itemsize else dtype


def fp16(argument: str = "") -> Cast:
    return _cast("fp16", torch.float16, argument)


def bf16(argument: str = "") -> Cast:
    return _cast("bf16", torch.bfloat16, argument)


def _cast(name: str, wire: torch.dtype, argument: str) -> Cast:
    if argument:
        raise RecipeError(f"+{name} takes no argument, found {argument!r}: write +{name}")
    return Cast(wire)
