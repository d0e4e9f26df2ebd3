"""The codec as a conversation.

`Codec.converse` is a generator. It yields questions to the group and is resumed when the group has
answered, in place: after `yield Sum([x])`, `x` holds the sum over all ranks. Whoever drives the
conversation decides how a question is carried (process group, parameter server, simulator), the codec
never does. Half precision asks once; a low-rank codec will ask twice.

Invariants every codec keeps (tests/unit/test_codecs.py):
- the number, dtype and size of its questions depend on the message's size alone, so that `traffic` can
  state them without running anything and all ranks ask alike;
- when the conversation ends, the ranges it was given hold the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Sum:
    """Asks the group to replace each tensor by its sum over all ranks."""

    tensors: Sequence[torch.Tensor]


Conversation = Generator[Sum, None, None]


class Traffic(NamedTuple):
    """What a conversation will take on one rank: rounds, the bytes of all its questions, and the bytes it
    holds beside the message itself meanwhile."""

    rounds: int
    nbytes: int
    scratch_nbytes: int


class Codec(Protocol):
    """See the module's description."""

    @property
    def lossless(self) -> bool:
        """Whether the result is the plain sum of what the ranks put in."""

    @property
    def can_overflow(self) -> bool:
        """Whether finite gradients may come back as inf."""

    def converse(self, ranges: Sequence[torch.Tensor]) -> Conversation:
        """Turn the flat `ranges`, in place, from this rank's share into the sum over ranks."""

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        """What `converse` will take, for a message of `numel` elements."""


class Exact:
    """No compression: one question, the ranges themselves."""

    lossless = True
    can_overflow = False

    def converse(self, ranges: Sequence[torch.Tensor]) -> Conversation:
        yield Sum(ranges)

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        return Traffic(1, numel * dtype.itemsize, 0)


EXACT = Exact()
