"""The codec as a conversation.

`Codec.converse` is a generator. It yields questions to the group and is resumed when the group has
answered: after `yield Sum([x])`, `x` holds the sum over all ranks; `yield Gather(x)` is a list, what each rank
had in `x`; `yield Swap(parts, sizes)` is a list, what each rank had for this one. Whoever drives the conversation
decides how a question is carried (process group, parameter server, simulator), the codec never does. Half precision
asks once; a low-rank codec asks twice.

Invariants every codec keeps (tests/unit/test_codecs.py):
- number, dtype and size of its questions are the same on all ranks (of a swap: what one rank sends is what the other
  expects): they follow from the message and from what all ranks have learnt together, never from a rank's own
  gradients; `traffic` states them without running anything;
- when the conversation ends, the ranges it was given hold the same bits on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from gradientflow.plan import Message, Slice


@dataclass(frozen=True, slots=True)
class Sum:
    """Asks the group to replace each tensor by its sum over all ranks."""

    tensors: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Gather:
    """Asks the group what every rank has in `tensor`, which is of one size and dtype on all of them."""

    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True, slots=True)
class Swap:
    """Asks the group to bring each rank what the others have for it: `outgoing`, flat tensors of one dtype by rank,
    some of them empty; `incoming`, the number of elements that each rank has for this one."""

    outgoing: Sequence[torch.Tensor]
    incoming: Sequence[int]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outgoing)


Question = Sum | Gather | Swap
#: Nothing for a sum; else, what each rank had, by rank.
Answer = Sequence[torch.Tensor] | None
Conversation = Generator[Question, Answer, None]


def alone(question: Question) -> Answer:
    """What a world of one answers."""
    if isinstance(question, Sum):
        return None
    return [question.tensor] if isinstance(question, Gather) else question.outgoing


class Parcel(NamedTuple):
    """A message of the plan as a codec sees it."""

    number: int
    message: Message
    #: Where its gradients lie: flat ranges, in the order of the message's slices.
    values: Sequence[torch.Tensor]
    #: Of the tensor that each slice is of: its extents in the order in which it lies in memory.
    shapes: Sequence[tuple[int, ...]] = ()
    #: Beside gradients: small whole numbers of which only "zero or not" is asked after the sum. For a codec that does
    #: not send everything; else they are among the values.
    flags: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        return sum(values.numel() for values in self.values)

    @property
    def dtype(self) -> torch.dtype:
        return self.values[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.values)


def imagined(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Parcel:
    """A message of tensors that nobody has."""
    slices = [Slice(tensor=f"{number}", start=0, stop=math.prod(shape)) for number, shape in enumerate(shapes)]
    values = torch.empty(sum(piece.numel for piece in slices), dtype=dtype, device="meta")
    return Parcel(0, Message(slices=tuple(slices)), [values], list(shapes))


class Traffic(NamedTuple):
    """What a conversation will take on one rank: rounds, the bytes of all its questions, the bytes it
    holds beside the message itself meanwhile, the bytes of memory that it reads and writes, and the bytes that it puts
    on the wire (the mean over ranks)."""

    rounds: int
    nbytes: int
    scratch_nbytes: int
    touched_nbytes: int
    sent_nbytes: float


def summed_nbytes(nbytes: float, world: int) -> float:
    """What a rank sends of a sum, if it sends no more than it must."""
    return 2 * (world - 1) / world * nbytes


def gathered_nbytes(nbytes: float, world: int) -> float:
    return (world - 1) * nbytes


class Codec(Protocol):
    """See the module's description."""

    @property
    def lossless(self) -> bool:
        """Whether the result is the plain sum of what the ranks put in."""

    @property
    def can_overflow(self) -> bool:
        """Whether finite gradients may come back as inf."""

    def converse(self, parcel: Parcel) -> Conversation:
        """Turn the parcel's values, in place, from this rank's share into the sum over ranks."""

    def traffic(self, parcel: Parcel, world: int) -> Traffic:
        """What `converse` will take; what depends on the step, on average, and on the rank, at most."""


class Exact:
    """No compression: one question, the ranges themselves."""

    lossless = True
    can_overflow = False

    def converse(self, parcel: Parcel) -> Conversation:
        yield Sum(parcel.values)

    def traffic(self, parcel: Parcel, world: int) -> Traffic:
        return summed_once(parcel.nbytes, world)


def summed_once(nbytes: int, world: int) -> Traffic:
    """Of a message that goes as it is."""
    return Traffic(1, nbytes, 0, 0, summed_nbytes(nbytes, world))


EXACT = Exact()
