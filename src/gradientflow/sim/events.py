"""Time as events, and things that go on side by side and slow each other down.

A `Timeline` is a clock with a queue of what is to happen; of two things at the same moment the one that was asked for
first happens first, so a simulation is the same each time. `Activities` are pieces of work that take time: computing,
and bytes on links. How fast each gets on depends on the others, so whenever one begins or ends all speeds are found
anew:

- A transfer takes so many seconds of each of its links if it is alone there. Links are shared max-min fairly: no
  transfer could be faster without slowing one that is no faster than itself.
- While somebody computes, links may have less to give (`room`).
- Computing loses what transfers take of it (`drag`: seconds of computing lost per second at full speed).
- Processors that workers share (`cores`): where more is wanted of them than there is, all that run on them slow each
  other down alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

#: Computing never stands still for the sake of transfers.
MOST_DRAG = 0.9
#: Of a job's own work: what is left of rounding.
EPSILON = 1e-12


#: In `Activities.busy_s`: all processors that workers share.
CORES = "cores"
_ROOMY: Mapping[str, float] = {}


class Timeline:
    """Seconds since the beginning, and what happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Let `action` happen at a moment that is not past."""
        self._count += 1
        heappush(self._queue, (max(moment_s, self.now_s), self._count, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            self.now_s, _, action = heappop(self._queue)
            action()


@dataclass(slots=True, eq=False)
class Activity:
    """Work of some seconds, if nothing is in its way."""

    work_s: float
    done: Callable[[], None]
    #: Seconds on each link per second of work; none: computing.
    links: Mapping[str, float] = field(default_factory=dict)
    #: Seconds of computing lost per second of this work.
    drag: float = 0.0
    #: Of all shared processors, what it takes at full speed.
    cores: float = 0.0
    left_s: float = 0.0
    speed: float = 0.0


class Activities:
    """All that is going on."""

    def __init__(self, timeline: Timeline, room: Mapping[str, float] | None = None) -> None:
        """room: of some links, what is left of them while somebody computes."""
        self._timeline = timeline
        self._room = room or _ROOMY
        self._transfers: list[Activity] = []
        self._computing: list[Activity] = []
        self._since_s = 0.0
        self._version = 0
        self._is_turning = False
        self._rooms: Mapping[str, float] | None = None  # with which speeds were found; None: transfers have changed
        self._begun_s: dict[str, float] = {}  # of each link, what everything that was ever started takes of it

    def start(self, activity: Activity) -> None:
        if activity.work_s <= 0:
            self._timeline.after(0.0, activity.done)
            return
        activity.left_s = activity.work_s
        self._pass()
        (self._transfers if activity.links else self._computing).append(activity)
        if activity.links:
            self._rooms = None
        for link, seconds in _occupied_s(activity, activity.work_s):
            self._begun_s[link] = self._begun_s.get(link, 0.0) + seconds
        if activity.cores:
            self._rooms = None
        self._change()

    def busy_s(self) -> dict[str, float]:
        """Until now, the seconds of each link, as if everything had been alone on it; and of processors."""
        found, passed_s = dict(self._begun_s), self._timeline.now_s - self._since_s
        for activity in (*self._transfers, *self._computing):
            for link, seconds in _occupied_s(activity, activity.left_s - passed_s * activity.speed):
                found[link] -= seconds
        return found

    def _pass(self) -> None:
        """Everything gets on until now."""
        passed_s = self._timeline.now_s - self._since_s
        self._since_s = self._timeline.now_s
        if passed_s:
            for group in (self._transfers, self._computing):
                for activity in group:
                    activity.left_s -= passed_s * activity.speed

    def _change(self) -> None:
        """New speeds, once for all that begins and ends at this moment."""
        self._version += 1
        if not self._is_turning:
            self._is_turning = True
            self._timeline.after(0.0, self._turn)

    def _turn(self) -> None:
        self._is_turning = False
        rooms = self._room if self._computing else _ROOMY
        if self._rooms is not rooms:
            self._rooms = rooms
            fair_speeds(self._transfers, rooms)
        drag = sum(activity.drag * activity.speed for activity in self._transfers)
        for activity in self._computing:
            activity.speed = 1 - min(MOST_DRAG, drag)
        running = [activity for group in (self._transfers, self._computing) for activity in group if activity.cores]
        if running:
            wanted = sum(activity.cores * activity.speed for activity in running)
            for activity in running:
                activity.speed /= max(1.0, wanted)
            self._rooms = None  # links' speeds were overwritten
        version = self._version
        next_s = min(
            (activity.left_s / activity.speed for group in (self._transfers, self._computing) for activity in group),
            default=math.inf,
        )
        if next_s < math.inf:
            self._timeline.after(max(0.0, next_s), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # something began or ended meanwhile, and the moment is another
        self._pass()
        going = [*self._transfers, *self._computing]
        done = [activity for activity in going if activity.left_s <= EPSILON * max(1.0, activity.work_s)]
        if not done:  # rounding: the nearest one is done
            done = [min(going, key=lambda activity: activity.left_s / activity.speed)]
        if any(activity.links for activity in done):
            self._rooms = None
        ended = {id(activity) for activity in done}
        self._transfers = [activity for activity in self._transfers if id(activity) not in ended]
        self._computing = [activity for activity in self._computing if id(activity) not in ended]
        self._change()
        for activity in done:
            activity.done()


def _occupied_s(activity: Activity, work_s: float) -> Iterator[tuple[str, float]]:
    """What so much of its work takes of links, and of processors."""
    for link, share in activity.links.items():
        yield link, share * work_s
    if activity.cores:
        yield CORES, activity.cores * work_s


def fair_speeds(transfers: Sequence[Activity], rooms: Mapping[str, float] | None = None) -> None:
    """Max-min fair: the link with the least to give for each of its transfers settles theirs, then the next.

    >>> both = [Activity(1.0, print, {"a": 1.0}), Activity(1.0, print, {"a": 1.0, "b": 4.0})]
    >>> fair_speeds(both)
    >>> [activity.speed for activity in both]
    [0.75, 0.25]
    """
    rooms = rooms or {}
    # Transfers over the very same links are settled together.
    alike: dict[int, list[Activity]] = {}
    for activity in transfers:
        alike.setdefault(id(activity.links), []).append(activity)
    groups = list(alike.values())
    room: dict[str, float] = {}
    weight: dict[str, float] = {}
    for group in groups:
        for link, share in group[0].links.items():
            weight[link] = weight.get(link, 0.0) + share * len(group)
            room.setdefault(link, rooms.get(link, 1.0))
    while groups:
        _, tightest = min((room[link] / total, link) for link, total in weight.items() if total > EPSILON)
        speed = max(0.0, room[tightest]) / weight[tightest]
        rest = []
        for group in groups:
            if tightest not in group[0].links:
                rest.append(group)
                continue
            for activity in group:
                activity.speed = speed
            for link, share in group[0].links.items():
                room[link] -= share * speed * len(group)
                weight[link] -= share * len(group)
        groups = rest
        del weight[tightest]
