"""How messages are brought: by lanes in lockstep, or through servers.

Both are fluid: a transfer is seconds on links, and links are shared (`sim.events`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from gradientflow.plan import Plan
from gradientflow.sim.events import Activities, Activity, Timeline
from gradientflow.sim.workers import Handed

Links = Mapping[str, float]
Arrived = Callable[[Handed, float], None]
WIRE = "wire"
#: What workers of a host, and their computing, share.
BUS = "bus"
#: Where codecs compute.
CODEC = {"codec": 1.0}


@dataclass(frozen=True)
class Load:
    """A message: seconds with the link free for others, seconds on it, and computing lost while it is there; before
    all that, what a codec computes, for which lanes share one processor."""

    startup_s: float
    wire_s: float
    #: Of start-up, what is added while another lane carries something.
    beside_s: float = 0.0
    drag_s: float = 0.0
    links: Mapping[str, float] = field(default_factory=lambda: {WIRE: 1.0})
    encode_s: float = 0.0
    #: Seconds of all processors that workers share, between start-up and arrival, and while the codec computes.
    cores_s: float = 0.0
    encode_cores_s: float = 0.0

    @property
    def cores(self) -> float:
        """What it takes of them meanwhile. Alone it took no longer than it did, so it wanted no more than there was."""
        return min(1.0, _each(self.cores_s, self.startup_s + self.wire_s))

    def part(self, share: float) -> Load:
        seconds = {name: share * value for name, value in vars(self).items() if name.endswith("_s")}
        return replace(self, **seconds)


class Lanes:
    """Each lane carries its own messages in the plan's order, one at a time. See [Note: shared link]."""

    def __init__(
        self,
        plan: Plan,
        loads: Sequence[Load],
        timeline: Timeline,
        activities: Activities,
        closing: Load | None = None,
    ) -> None:
        """closing: what ranks tell each other when all messages of a step have been carried; the last one has arrived
        when that has."""
        self._plan, self._timeline, self._activities, self._closing = plan, timeline, activities, closing
        self._carried: dict[int, int] = {}  # messages of a step, where something closes it
        self._loads = [load.part(0.5) for load in loads] if plan.gathers else list(loads)
        self._orders: dict[int, list[tuple[int, bool]]] = {}
        halves = [(number, bool(plan.gathers)) for number in range(len(plan.messages))]
        for number, first in [*halves, *((number, False) for number in plan.gathers)]:
            self._orders.setdefault(plan.messages[number].lane, []).append((number, first))
        self._next = dict.fromkeys(self._orders, 0)
        self._busy: set[int] = set()
        self._handed: dict[Handed, Arrived] = {}
        self._taken_s: dict[Handed, float] = {}
        self._summed: dict[int, int] = {}  # first halves of a step that are done
        self._held: dict[int, list[Callable[[], None]]] = {}

    def carry(self, handed: Handed, arrived: Arrived) -> None:
        self._handed[handed] = arrived
        self._take(self._plan.messages[handed.number].lane)

    def _take(self, lane: int) -> None:
        """The lane's next message, if the lane is free and the message there."""
        if lane in self._busy:
            return
        order = self._orders[lane]
        step, place = divmod(self._next[lane], len(order))
        number, first = order[place]
        handed = Handed(step, number)
        if handed not in self._handed:
            return
        self._busy.add(lane)
        self._next[lane] += 1
        self._taken_s.setdefault(handed, self._timeline.now_s)
        self._bring(self._loads[number], lane, lambda: self._done(lane, handed, first))

    def _bring(self, load: Load, lane: int, done: Callable[[], None]) -> None:
        if load.beside_s and len(self._busy) > 1:
            load = replace(load, startup_s=load.startup_s + load.beside_s, beside_s=0.0)
        # Its work is one message, not so many seconds: what shares a link with it keeps pace, large or small.
        links = {link: share * load.wire_s for link, share in load.links.items()}
        wire = Activity(1.0 if load.wire_s else 0.0, done, links, load.drag_s, load.cores * load.wire_s)
        follows = partial(self._activities.start, wire)
        if load.cores and load.startup_s:
            startup = Activity(load.startup_s, follows, {f"lane {lane}": 1.0}, cores=load.cores)
            follows = partial(self._activities.start, startup)
        elif load.startup_s:
            follows = partial(self._timeline.after, load.startup_s, follows)
        if load.encode_s:
            cores = _each(load.encode_cores_s, load.encode_s)
            self._activities.start(Activity(load.encode_s, follows, CODEC, cores=cores))
        else:
            follows()

    def _done(self, lane: int, handed: Handed, first: bool) -> None:
        self._busy.remove(lane)
        if first:
            self._summed[handed.step] = self._summed.get(handed.step, 0) + 1
            if self._summed[handed.step] == len(self._plan.messages):
                for release in self._held.pop(handed.step, []):
                    release()
        elif self._plan.norms and self._summed.get(handed.step, 0) < len(self._plan.messages):
            self._held.setdefault(handed.step, []).append(lambda: self._arrive(handed))
        else:
            self._arrive(handed)
        self._take(lane)

    def _arrive(self, handed: Handed) -> None:
        self._carried[handed.step] = self._carried.get(handed.step, 0) + 1
        arrived = partial(self._handed.pop(handed), handed, self._taken_s.pop(handed))
        if self._closing is not None and self._carried[handed.step] == len(self._plan.messages):
            self._bring(self._closing, 0, arrived)
        else:
            arrived()


def _each(total_s: float, seconds: float) -> float:
    """In every one of so many seconds."""
    return total_s / seconds if seconds else 0.0


# - Servers


class Stage(NamedTuple):
    """Where a piece has to go through: after `startup_s`, so many seconds on links if it is alone there."""

    name: str
    startup_s: float
    seconds: float
    links: Links


@dataclass(frozen=True)
class Piece:
    """A part of a message on its way through a server."""

    #: Lowest first, where the exchange decides at run time; else all are alike and the first comes first.
    urgency: int
    stages: tuple[Stage, ...]
    drag_s: float = 0.0
    #: Before the first stage.
    startup_s: float = 0.0
    #: Of processors that workers share, in all stages together.
    cores_s: float = 0.0


class Servers:
    """Pieces go through their stages one after another; of each stage so many are under way, the most urgent first."""

    def __init__(
        self, pieces: Sequence[Sequence[Piece]], in_flight: int, timeline: Timeline, activities: Activities
    ) -> None:
        self._pieces, self._in_flight = pieces, in_flight
        self._timeline, self._activities = timeline, activities
        self._queues: dict[str, list[tuple[int, int, int, Piece, int, Handed]]] = {}
        self._flying: dict[str, int] = {}
        self._open: dict[Handed, int] = {}
        self._arrived: dict[Handed, tuple[Arrived, float]] = {}
        self._count = 0

    def carry(self, handed: Handed, arrived: Arrived) -> None:
        pieces = self._pieces[handed.number]
        self._open[handed] = len(pieces)
        self._arrived[handed] = arrived, self._timeline.now_s
        for piece in pieces:
            if piece.startup_s:
                self._timeline.after(piece.startup_s, partial(self._enter, piece, 0, handed))
            else:
                self._enter(piece, 0, handed)

    def _enter(self, piece: Piece, place: int, handed: Handed) -> None:
        if place == len(piece.stages):
            self._open[handed] -= 1
            if not self._open[handed]:
                arrived, taken_s = self._arrived.pop(handed)
                arrived(handed, taken_s)
            return
        stage = piece.stages[place].name
        self._count += 1
        entry = (handed.step, piece.urgency, self._count, piece, place, handed)
        heapq.heappush(self._queues.setdefault(stage, []), entry)
        self._take_soon(stage)

    def _take_soon(self, stage: str) -> None:
        """When everything of this moment has come: it may be more urgent than what is there already."""
        self._timeline.after(0.0, partial(self._take, stage))

    def _take(self, stage: str) -> None:
        queue = self._queues[stage]
        while queue and self._flying.get(stage, 0) < self._in_flight:
            *_, piece, place, handed = heapq.heappop(queue)
            self._flying[stage] = self._flying.get(stage, 0) + 1
            _, startup_s, seconds, links = piece.stages[place]
            drag = _each(piece.drag_s / len(piece.stages), seconds)
            cores = _each(piece.cores_s / len(piece.stages), seconds)

            def done(piece: Piece = piece, place: int = place, handed: Handed = handed) -> None:
                self._flying[stage] -= 1
                self._enter(piece, place + 1, handed)
                self._take_soon(stage)

            activity = Activity(seconds, done, links, drag, cores)
            self._timeline.after(startup_s, partial(self._activities.start, activity))
