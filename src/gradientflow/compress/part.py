"""What a codec is to `Feedback`, which keeps for it what it has not sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from gradientflow.compress.codec import Conversation, Parcel, Traffic

#: Elements of each operand that are worked on at a time. More leave the caches, fewer are all overhead.
BLOCK = 384 * 1024


class Part(Protocol):
    """A codec that sends part of what it is given, or something like it."""

    can_overflow: bool
    #: Whether what it does not send is gone, instead of left over.
    forgets: bool
    #: Whether a density of 1 is its own business; else it is not asked to send anything then.
    sends_all: bool
    #: Whether it chooses in one step what the next one sends.
    chooses_ahead: bool
    #: Whether it writes all of a parcel's values, so that nobody has to clear them before.
    overwrites: bool

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is for it; others are summed as they are, all of a step together."""

    def lay_out(self, parcels: Sequence[Parcel], rank: int, world: int) -> None:
        """For these messages from now on. What it has learnt is forgotten."""

    def begin(self, density: float, step: int, densities: Sequence[float] | None = None) -> None:
        """Step number `step`: to send this share in it, or, of one that chooses ahead, in the next. densities: of each
        message, instead; for parts that a guard may look after."""

    def blocks(self, parcel: Parcel, number: int) -> list[int]:
        """Elements of each of the blocks, small enough for a cache, in which range `number` of the parcel is seen."""

    def see(self, parcel: Parcel, number: int, start: int, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """`total` is what there is to send, from `start` of a range on: one of its blocks. `scratch` may be written
        to, and is as long."""

    def send(self, parcel: Parcel, total: torch.Tensor, unit: float) -> Conversation:
        """Send a part of `total`, which is all of the message, and leave the rest there; the sum of what ranks sent,
        times `unit`, is in the parcel's values then, which are zero before, unless it `overwrites` them. So is `total`
        where tensors are not taken.
        """

    def clear_sent(self, parcel: Parcel, values: torch.Tensor) -> None:
        """Write zeros where the last `send` of the parcel has sent something of this rank's."""

    def tells(self) -> Sequence[torch.Tensor]:
        """After all messages of a step: float32, to be summed over ranks, in place."""

    def learns(self) -> bool:
        """What it told has been summed: whether the step can count, as all ranks find alike."""

    def commit(self) -> None:
        """The step counts."""

    def traffic(self, parcel: Parcel, density: float, world: int) -> Traffic:
        """As a codec's, for the tensors that it takes."""

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt, for messages of this layout."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `state_dict` gave it; messages are laid out as they were then."""


class Plain:
    """A part that learns nothing from step to step but whether all that there was to send is finite."""

    can_overflow = False
    forgets = False
    sends_all = False
    chooses_ahead = False
    overwrites = False

    def __init__(self) -> None:
        self._rank, self._world = 0, 1
        self._density, self._step = 1.0, 0
        self._densities: Sequence[float] | None = None
        self._parcels: Sequence[Parcel] = ()
        self._sums: list[torch.Tensor] = []  # lanes append to it side by side
        self._num_bad = _flag(False)
        self._bad: list[int] = []  # messages of which a sum is not finite, as all ranks see; lanes append side by side

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Norms and biases are small, and a model is quick to suffer from what is wrong with them."""
        return len(shape) > 1

    def lay_out(self, parcels: Sequence[Parcel], rank: int, world: int) -> None:
        self._parcels, self._rank, self._world = parcels, rank, world

    def begin(self, density: float, step: int, densities: Sequence[float] | None = None) -> None:
        self._density, self._step, self._densities = density, step, densities
        self._sums, self._num_bad, self._bad = [], _flag(False), []

    def blocks(self, parcel: Parcel, number: int) -> list[int]:
        return blocks_of(parcel.values[number])

    def see(self, parcel: Parcel, number: int, start: int, total: torch.Tensor, scratch: torch.Tensor) -> None:
        # A sum takes a tenth of the time of a look at each element; one of finite numbers may overflow too.
        found = total.sum()
        if total.device.type == "cpu" and not torch.isfinite(found):
            found = total.new_tensor(0.0 if total.isfinite().all() else float("nan"))
        self._sums.append(found)

    def clear_sent(self, parcel: Parcel, values: torch.Tensor) -> None:
        values.zero_()

    def tells(self) -> Sequence[torch.Tensor]:
        if not self._sums:
            return []
        self._num_bad = _flag(not torch.isfinite(torch.stack(self._sums)).all())
        return [self._num_bad]

    def learns(self) -> bool:
        return not self._bad and not self._num_bad.any()

    def commit(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _flag(is_set: bool) -> torch.Tensor:
    """That ranks can add up."""
    return torch.tensor([float(is_set)], dtype=torch.float32)


def blocks_of(values: torch.Tensor) -> list[int]:
    """Elements of each of the blocks that it is worked on in."""
    whole, rest = divmod(values.numel(), BLOCK)
    return [BLOCK] * whole + [rest] * (rest > 0)


def is_finite(values: torch.Tensor) -> bool:
    # One sum takes a tenth of the time; one of finite numbers may overflow too, so the second look decides.
    return bool(torch.isfinite(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())


def pieces(parcel: Parcel) -> Iterator[tuple[str, tuple[int, ...], int, int, int]]:
    """Of each slice that is not empty: its tensor, the shape of that (flat, if nobody said), where the slice begins in
    it, and from where to where it lies in the message."""
    start = 0
    for number, piece in enumerate(parcel.message.slices):
        shape = parcel.shapes[number] if parcel.shapes else (piece.stop,)
        if piece.numel:
            yield piece.tensor, shape, piece.start, start, start + piece.numel
        start += piece.numel


def ranges(parcel: Parcel, values: torch.Tensor) -> Sequence[torch.Tensor]:
    """What lies in the place of each of the parcel's ranges."""
    return torch.split(values, [part.numel() for part in parcel.values])


def write_out(parcel: Parcel, total: torch.Tensor, unit: float) -> None:
    """A whole message into its ranges, in the unit and the precision that they have."""
    for values, part in zip(parcel.values, ranges(parcel, total), strict=True):
        if unit == 1.0:
            values.copy_(part)
        else:
            values.copy_(part * unit)
