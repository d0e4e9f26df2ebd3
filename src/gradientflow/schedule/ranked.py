"""Lanes that go first: whatever is needed earlier overtakes what is on its way.

Where lower lanes have the right of way (exchange/links.py), nothing has to be foreseen. Each lane takes the layers of
one part of the forward pass, the first part the lowest lane, and sends their gradients as they come. When the last
gradients come, which are needed first, they find the link free at once; what they push aside goes on afterwards, and
fills whatever the link has left. Times that differ from the profile's change when things are sent and never what has to
wait for what, so no order is bet on.

With messages of no size and a lane for each layer this is Jackson's preemptive rule, and takes `cost.limit_s`. What is
left to choose is where a lane's part ends and how large messages are; some ways are tried and judged as in flow.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple

from gradientflow.cost.evaluate import Job, Stages, startup_and_wire_s
from gradientflow.cost.table import Cost
from gradientflow.plan import Message, Plan
from gradientflow.profiles import Profile
from gradientflow.schedule.board import Board, Case, times

SIZES_NBYTES = tuple(250_000 * 2**power for power in range(5))
#: By what parts of the forward pass are alike: bytes, seconds, or both.
WEIGHTS = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
#: Of a mean iteration; what a simulation cannot know. Fewer messages win.
TOLERANCE = 0.005


class _Piece(NamedTuple):
    """A message: where it lies, its tensors, and its lane."""

    pool: int
    start: int
    stop: int
    first: int
    last: int
    lane: int


def ranked(profile: Profile, cost: Cost, *, num_lanes: int, gated: bool = True, stages: Stages = ()) -> Plan:
    """The plan for lanes of which lower ones go first."""
    board = Board(profile)
    cases = [Case(board, moments, link) for moments, link in times(profile, gated, stages)]
    plans = {
        pieces
        for parts in {min(2, num_lanes), max(1, num_lanes // 2), num_lanes}
        for weights in WEIGHTS
        for size in SIZES_NBYTES
        if (pieces := tuple(_pieces(profile, board, cases[0], _lanes(profile, parts, weights), size)))
    }
    mean_s = {pieces: fmean(_iteration_s(board, case, pieces, cost) for case in cases) for pieces in plans}
    good_s = (1 + TOLERANCE) * min(mean_s.values(), default=0.0)
    good = [pieces for pieces in plans if mean_s[pieces] <= good_s]
    best = min(good, key=lambda pieces: (len(pieces), mean_s[pieces], pieces), default=())
    messages = tuple(
        Message(slices=tuple(board.axes[piece.pool].slices(piece.start, piece.stop)), lane=piece.lane) for piece in best
    )
    layout = tuple(tensor.name for tensor in profile.tensors)
    return Plan(schedule="flow", layout=layout, messages=messages, ranked_lanes=True)


def _lanes(profile: Profile, parts: int, weights: tuple[float, float]) -> list[int]:
    """Each tensor's lane: the forward pass in `parts` that are alike by weight."""
    by_bytes, by_time = weights
    nbytes, forward_s = max(1, profile.nbytes), profile.forward_s or 1.0
    order = sorted(range(len(profile.tensors)), key=lambda place: (profile.tensors[place].forward_order, -place))
    each = [
        by_bytes * profile.tensors[place].nbytes / nbytes + by_time * profile.tensors[place].forward_s / forward_s
        for place in order
    ]
    total = sum(each) or 1.0
    lanes = [0] * len(order)
    # By where a tensor begins: a large one belongs to the part before it.
    for place, before in zip(order, accumulate(each, initial=0.0), strict=False):
        lanes[place] = min(parts - 1, int(parts * before / total * (1 + 1e-9)))
    return lanes


def _pieces(profile: Profile, board: Board, case: Case, lanes: Sequence[int], size_nbytes: int) -> list[_Piece]:
    """Neighbours in a pool and of one lane, fused up to the size; larger tensors cut; in the order they come."""
    found = []
    for pool, axis in enumerate(board.axes):
        size = max(1, size_nbytes // axis.itemsize)
        own = [lanes[place] for place in axis.places]
        for start, stop, lane in _runs(axis.edges, own, size):
            num = max(1, round((stop - start) / size))
            cuts = [start + (stop - start) * number // num for number in range(num + 1)]
            for begin, end in pairwise(cuts):
                if begin < end:
                    found.append(_Piece(pool, begin, end, *axis.tensors_of(begin, end), lane))
    return sorted(found, key=lambda piece: (case.ready_s[piece.pool][piece.last], piece.lane))


def _runs(edges: Sequence[int], lanes: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Elements of neighbours of one lane, until there are `size` of them."""
    start = edges[0]
    for index, lane in enumerate(lanes):
        stop = edges[index + 1]
        ends = index + 1 == len(lanes) or lanes[index + 1] != lane
        if stop - start >= size or (ends and stop > start):
            yield start, stop, lane
            start = stop


def _iteration_s(board: Board, case: Case, pieces: Sequence[_Piece], cost: Cost) -> float:
    jobs = []
    for piece in pieces:
        nbytes = (piece.stop - piece.start) * board.axes[piece.pool].itemsize
        start_s, wire_s = startup_and_wire_s(cost, nbytes)
        ready_s = case.ready_s[piece.pool][piece.last]
        jobs.append(Job(piece.lane, nbytes, ready_s, case.link * start_s, case.link * wire_s))
    follows_s = [case.follows_s(piece.pool, piece.first, piece.last) for piece in pieces]
    return cost.host_s * len(pieces) + case.moments.iteration_s(jobs, follows_s, ranked=True)
