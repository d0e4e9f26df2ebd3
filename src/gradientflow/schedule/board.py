"""What planners play on: pools as axes, plans as ranges of them, and the times that may come."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gradientflow.cost.evaluate import Moments, Stages
from gradientflow.plan import Message, Plan, Slice
from gradientflow.profiles import Profile, TensorProfile

#: A link is slower than it was measured, never faster: processors are busy, others use it. A large message that goes
#: just before the last gradients come is then in their way, so some plans are made for such a link.
SLOWER_LINKS = (1.15, 1.3)

#: Pool, first element, last element + 1.
Range = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """A pool: its tensors in backward order, their places in the profile, and where each begins."""

    tensors: tuple[TensorProfile, ...]
    places: tuple[int, ...]
    edges: tuple[int, ...]
    itemsize: int

    def tensors_of(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last tensor that hold elements of a range. Empty tensors hold none."""
        return bisect_right(self.edges, start) - 1, bisect_left(self.edges, stop) - 1

    def slices(self, start: int, stop: int) -> Iterator[Slice]:
        first, last = self.tensors_of(start, stop)
        for index in range(first, last + 1):
            begin, end = self.edges[index], self.edges[index + 1]
            if begin < end:
                name = self.tensors[index].name
                yield Slice(tensor=name, start=max(start, begin) - begin, stop=min(stop, end) - begin)


class Board:
    """A profile's pools, and what plans over them take."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        members: dict[tuple[str, str], list[int]] = {}
        for place, tensor in enumerate(profile.tensors):
            members.setdefault(tensor.pool, []).append(place)
        self.axes = [self._axis(places) for places in members.values()]

    def _axis(self, places: list[int]) -> Axis:
        tensors = tuple(self._profile.tensors[place] for place in places)
        edges = tuple(accumulate((tensor.numel for tensor in tensors), initial=0))
        return Axis(tensors, tuple(places), edges, tensors[0].torch_dtype.itemsize)

    def ranges(self, plan: Plan) -> tuple[Range, ...]:
        """A plan whose messages are runs of a pool, without those of empty tensors."""
        begins = {
            tensor.name: (pool, edge)
            for pool, axis in enumerate(self.axes)
            for tensor, edge in zip(axis.tensors, axis.edges[:-1], strict=True)
        }
        found = []
        for message in plan.messages:
            first, last = message.slices[0], message.slices[-1]
            pool, begin = begins[first.tensor]
            start, stop = begin + first.start, begins[last.tensor][1] + last.stop
            assert stop - start == message.numel, "not a run"
            if start < stop:
                found.append((pool, start, stop))
        return tuple(found)

    def plan(self, schedule: str, ranges: Sequence[Range]) -> Plan:
        layout = tuple(tensor.name for tensor in self._profile.tensors)
        messages = tuple(Message(slices=tuple(self.axes[pool].slices(*span))) for pool, *span in ranges)
        return Plan(schedule=schedule, layout=layout, messages=messages)


# - Times that may come. [Note: jitter] in flow.py


class Case:
    """Moments, pool by pool in backward order; and how many times as long as its cost a message takes."""

    def __init__(self, board: Board, moments: Moments, link: float) -> None:
        self.moments, self.link = moments, link
        self.ready_s = [[moments.ready_s[place] for place in axis.places] for axis in board.axes]
        self.after_s = [[moments.after_s[place] for place in axis.places] for axis in board.axes]
        self._rising = [all(one <= next_ for one, next_ in pairwise(after_s)) for after_s in self.after_s]

    def follows_s(self, pool: int, first: int, last: int) -> float:
        """Compute that follows a message of these tensors."""
        after_s = self.after_s[pool]
        return after_s[last] if self._rising[pool] else max(after_s[first : last + 1])


def times(profile: Profile, gated: bool, stages: Stages) -> Iterator[tuple[Moments, float]]:
    """The profile's own first."""
    num = len(profile.tensors)
    calm = Moments.of(profile, gated=gated, stages=stages)
    yield calm, 1.0
    for slower in SLOWER_LINKS:
        yield calm, slower
    for factors in (
        [1.1] * num,
        [0.9] * num,
        [_uneven(place, 1) for place in range(num)],
        [_uneven(place, 2) for place in range(num)],
    ):
        yield Moments.of(_paced(profile, factors), gated=gated, stages=stages), 1.0


def _paced(profile: Profile, factors: Sequence[float]) -> Profile:
    tensors = tuple(
        tensor.model_copy(update={"forward_s": tensor.forward_s * factor, "backward_s": tensor.backward_s * factor})
        for tensor, factor in zip(profile.tensors, factors, strict=True)
    )
    return profile.model_copy(update={"tensors": tensors})


def _uneven(place: int, seed: int) -> float:
    """0.7 to 1.3, as if by chance, the same everywhere and for ever (Knuth's multiplicative hash)."""
    mixed = (place + 1) * (2 * seed + 1) * 2654435761 % 2**32
    return 0.7 + 0.6 * ((mixed ^ mixed >> 15) * 2246822519 % 2**32) / 2**32
