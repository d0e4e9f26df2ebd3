"""Tensors cut into pieces, and pieces sent in the order in which the next forward pass needs them.

P3 (Jayarajan et al., MLSys 2019) and ByteScheduler (Peng et al., SOSP 2019) decide at run time which piece goes
next. Lockstep exchanges cannot: all ranks have to issue the same messages in the same order. So the decision is
made here, on the profile's times, and what is left of it is an order. Other times than the profile's can make a
lane wait, but they cannot change the order; and a lane waits for backward only, which waits for no lane, so
no wait is for ever.
"""

from __future__ import annotations

import heapq
import math
from itertools import accumulate
from typing import Protocol

from gradientflow.cost.evaluate import Link, Moments, startup_and_wire_s
from gradientflow.cost.table import Cost
from gradientflow.errors import UsageError
from gradientflow.plan import Message, Plan, Slice
from gradientflow.profiles import Profile

#: ByteScheduler's defaults are 1 and 4 million parameters, of four bytes each in its day.
PARTITION_NBYTES = 4_000_000
CREDIT_NBYTES = 16_000_000
#: P3's slices: 50,000 parameters. It has no credit: the next piece goes when the one before it is done.
P3_PARTITION_NBYTES = 200_000
#: Of a plan: 100 GB in P3's slices.
MOST_PIECES = 500_000


def bytescheduler(
    profile: Profile,
    cost: Cost,
    *,
    partition_nbytes: int = PARTITION_NBYTES,
    credit_nbytes: float = CREDIT_NBYTES,
    num_lanes: int = 1,
) -> Plan:
    """Pieces of at most `partition_nbytes`. Whenever there is a lane and credit, the piece goes that is ready and
    of the layer nearest to the input. In flight are at most `credit_nbytes`, or one piece.

    Deviations: pieces are runs of elements, not rows. Our lanes carry one message each, so credit beyond one
    piece a lane changes nothing. For a gate: without one, order gains nothing and cutting costs.
    """
    pieces = _Pieces(profile, partition_nbytes, credit_nbytes)
    issue_in_turn(pieces, cost, num_lanes)
    layout = tuple(tensor.name for tensor in profile.tensors)
    messages = tuple(Message(slices=(piece,)) for piece in pieces.issued)
    return Plan(schedule="bytescheduler", layout=layout, messages=messages).on_lanes(num_lanes)


def p3(profile: Profile, cost: Cost, *, partition_nbytes: int = P3_PARTITION_NBYTES) -> Plan:
    """As `bytescheduler`, with P3's smaller pieces, one at a time."""
    plan = bytescheduler(profile, cost, partition_nbytes=partition_nbytes, credit_nbytes=0)
    return plan.model_copy(update={"schedule": "p3"})


# - Who goes next, decided as time goes by


class Supply(Protocol):
    """What is still to be sent."""

    def take(self, now_s: float, flying_nbytes: int) -> int | None:
        """The size of what goes now, or `None` to wait. Next asked when a message has arrived or at `more_s`."""

    def more_s(self, now_s: float) -> float:
        """When the next gradient after `now_s` will be there."""

    def __bool__(self) -> bool: ...


def issue_in_turn(supply: Supply, cost: Cost, num_lanes: int) -> None:
    """Empty `supply` over lanes that take turns, from the start of backward.

    In turns, and not whichever is free first, so that `Plan.on_lanes` deals messages out in the same way.
    """
    link, flying, number = Link(), dict[int, int](), 0
    while supply:
        lane = number % num_lanes
        nbytes = None if lane in flying else supply.take(link.now_s, sum(flying.values()))
        if nbytes is not None:
            link.start(lane, link.now_s, *startup_and_wire_s(cost, nbytes))
            flying[lane] = nbytes
            number += 1
            continue
        arrived = link.run(math.inf if lane in flying else supply.more_s(link.now_s))
        flying.pop(-1 if arrived is None else arrived, None)


class _Pieces:
    """Pieces of tensors, first in forward order first."""

    def __init__(self, profile: Profile, partition_nbytes: int, credit_nbytes: float) -> None:
        moments = Moments.of(profile, gated=True)
        self._tensors = profile.tensors
        self._ready_s = tuple(accumulate(tensor.backward_s for tensor in profile.tensors))
        #: The more compute follows a tensor, the earlier forward needs it; of equals, the one that came last.
        self._urgency = [(-after_s, -index) for index, after_s in enumerate(moments.after_s)]
        self._partition_nbytes, self._credit_nbytes = partition_nbytes, credit_nbytes
        num_pieces = sum(-(-tensor.nbytes // max(1, partition_nbytes)) for tensor in profile.tensors)
        if num_pieces > MOST_PIECES:
            raise UsageError(f"partitions of {partition_nbytes} bytes would be {num_pieces} messages: take larger ones")
        self._num_ready = 0
        self._waiting: list[tuple[tuple[float, int], int, int]] = []  # urgency, first element, tensor
        self.issued: list[Slice] = []

    def __bool__(self) -> bool:
        return bool(self._waiting) or self._num_ready < len(self._tensors)

    def more_s(self, now_s: float) -> float:
        return self._ready_s[self._num_ready] if self._num_ready < len(self._tensors) else math.inf

    def take(self, now_s: float, flying_nbytes: int) -> int | None:
        while self._num_ready < len(self._tensors) and self._ready_s[self._num_ready] <= now_s:
            heapq.heappush(self._waiting, (self._urgency[self._num_ready], 0, self._num_ready))
            self._num_ready += 1
        if not self._waiting:
            return None
        urgency, start, index = self._waiting[0]
        tensor = self._tensors[index]
        itemsize = tensor.torch_dtype.itemsize
        stop = min(tensor.numel, start + max(1, self._partition_nbytes // itemsize))
        nbytes = (stop - start) * itemsize
        if flying_nbytes and flying_nbytes + nbytes > self._credit_nbytes:
            return None
        if stop < tensor.numel:
            heapq.heapreplace(self._waiting, (urgency, stop, index))
        else:
            heapq.heappop(self._waiting)
        self.issued.append(Slice(tensor=tensor.name, start=start, stop=stop))
        return nbytes
