"""What workers of a new generation agree on before they train, and what those that lack it are handed.

[Note: steps of generations] In place of a worker that died the others go on in the step that they are in (flow.py):

- A step is the sum of one gradient of each member of one generation. Who has not finished it gives the same gradient
  again in the next, which is why local gradients are kept until their step is; who joins computes one.
- If one survivor has finished a step, it counts, and whoever is behind takes that one's state over. Nobody is behind by
  more than one step: the next would have needed it. If none has, the step is taken anew, without the dead.
- State is taken over as a whole: it is kept apart until all of it has arrived, so a worker is at one step or at the
  next, whatever dies meanwhile.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradientflow.documents import Record
from gradientflow.exchange import Exchange, Moment, Stamp

_PIECE_NBYTES = 64 * 2**20


class Stand(Record):
    """Of one worker when it meets the others."""

    #: Exchanges that it has finished.
    step: int
    #: It has just come.
    joins: bool


def most_advanced(stands: Sequence[Stand]) -> int:
    """The rank whose state is everybody's."""
    trained = [rank for rank, stand in enumerate(stands) if not stand.joins] or range(len(stands))
    return max(trained, key=lambda rank: (stands[rank].step, -rank))


def behind(stands: Sequence[Stand]) -> set[int]:
    """Ranks that lack something."""
    source = most_advanced(stands)
    return {
        rank
        for rank, stand in enumerate(stands)
        if rank != source and (stand.joins or stand.step != stands[source].step)
    }


def hand_over(exchange: Exchange, source: int, state: Callable[[], dict[str, Any]], step: int) -> dict[str, Any]:
    """The `state` of rank `source`, on every rank. Collective."""
    written = io.BytesIO()
    if exchange.rank == source:
        torch.save(state(), written)
    nbytes = int(exchange.control.from_rank(source, str(written.tell()), "hear how much there is to take over"))
    if exchange.rank != source:
        written.write(bytes(nbytes))
    flat = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
    exchange.broadcast(torch.split(flat, _PIECE_NBYTES), Stamp(step, Moment.START), source)
    written.seek(0)
    found: dict[str, Any] = torch.load(written, weights_only=True)
    return found
