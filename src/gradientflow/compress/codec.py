"""The codec as a conversation.

`Codec.converse` is a generator. It yields questions to the group and is resumed when the group has
answered: after `yield Sum([x])`, `x` holds the sum over all ranks; `yield Gather(x)` is a list, what each rank
had in `x`. Whoever drives the conversation decides how a question is carried (process group, parameter server,
simulator), the codec never does. Half precision asks once; a low-rank codec will ask twice.

Invariants every codec keeps (tests/unit/test_codecs.py):
- number, dtype and size of its questions are the same on all ranks: they follow from the message and from what all
  ranks have learnt together, never from a rank's own gradients; `traffic` states them without running anything;
- when the conversation ends, the ranges it was given hold the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from gradientflow.plan import Message


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


Question = Sum | Gather
#: Nothing for a sum; for a gather, what each rank had, by rank.
Answer = Sequence[torch.Tensor] | None
Conversation = Generator[Question, Answer, None]


class Parcel(NamedTuple):
    """A message of the plan as a codec sees it."""

    number: int
    message: Message
    #: Where its gradients lie: flat ranges, in the order of the message's slices.
    values: Sequence[torch.Tensor]
    #: Beside gradients: small whole numbers of which only "zero or not" is asked after the sum. For a codec that does
    #: not send everything; else they are among the values.
    flags: torch.Tensor | None = None


class Traffic(NamedTuple):
    """What a conversation will take on one rank: rounds, the bytes of all its questions, the bytes it
    holds beside the message itself meanwhile, and the bytes of memory that it reads and writes."""

    rounds: int
    nbytes: int
    scratch_nbytes: int
    touched_nbytes: int


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

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        """What `converse` will take, for a message of `numel` elements; what depends on the step, on average."""


class Exact:
    """No compression: one question, the ranges themselves."""

    lossless = True
    can_overflow = False

    def converse(self, parcel: Parcel) -> Conversation:
        yield Sum(parcel.values)

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        return Traffic(1, numel * dtype.itemsize, 0, 0)


EXACT = Exact()
