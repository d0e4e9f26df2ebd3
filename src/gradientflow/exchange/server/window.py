"""What waits to be sent to a peer: the most urgent first, and no more at a time than the peer has room for.

Whatever has been handed to a connection cannot be overtaken any more, so no more is handed over than keeps it busy.
Credit comes back when the peer says that it has something, not when the sum of it is there: workers may push in
different orders, and each would wait for what the other has not pushed yet. A peer says so of several things at once
(`Receipts`), since to say it costs as much as to send a small message.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Generic, TypeVar

#: Of one direction of one connection. Enough for 25 Gbit/s at a millisecond and a half from hand to hand.
CREDIT_NBYTES = 4 * 2**20
#: Connections go abreast: none is so much further than another in what is to be sent. All of it is needed, so the last
#: one to end counts, and TCP divides a link unevenly.
LEAD_NBYTES = 2 * 2**20
#: Receipts wait for so long at most, or until half of the credit waits for them.
RECEIPT_S = 0.02

Name = TypeVar("Name")
Thing = TypeVar("Thing")
Peer = TypeVar("Peer")


class Window(Generic[Name, Thing]):
    """Things by name."""

    def __init__(self, credit_nbytes: int = CREDIT_NBYTES) -> None:
        self._credit_nbytes = credit_nbytes
        self._waiting: list[tuple[int, int, Name, int, Thing]] = []
        self._order = itertools.count()  # of equals, the first
        self._flying: dict[Name, int] = {}
        self._flying_nbytes = 0
        self._names: set[Name] = set()
        #: Of what has not been sent.
        self.waiting_nbytes = 0
        #: Of all that there is to send, a peer's part over the mean of all peers'.
        self.weight = 1.0

    def add(self, name: Name, urgency: int, nbytes: int, thing: Thing) -> None:
        """Unless it waits or flies already."""
        if name not in self._names:
            self._names.add(name)
            self.waiting_nbytes += nbytes
            heapq.heappush(self._waiting, (urgency, next(self._order), name, nbytes, thing))

    def next(self) -> Thing | None:
        """What to send now; None if nothing waits or there is no credit."""
        if not self._waiting:
            return None
        nbytes = self._waiting[0][3]
        if self._flying and self._flying_nbytes + nbytes > self._credit_nbytes:
            return None
        _, _, name, nbytes, thing = heapq.heappop(self._waiting)
        self._flying[name] = nbytes
        self._flying_nbytes += nbytes
        self.waiting_nbytes -= nbytes
        return thing

    def waits(self, name: Name) -> bool:
        """Whether it is still to be sent."""
        return name in self._names and name not in self._flying

    def arrived(self, name: Name) -> None:
        """Or will, whatever follows it. It need not be one of ours: peers may say so twice."""
        if name in self._flying:
            self._flying_nbytes -= self._flying.pop(name)
            self._names.discard(name)

    def forget(self, names: Container[Name]) -> None:
        """Do not send these any more."""
        self.waiting_nbytes -= sum(nbytes for _, _, name, nbytes, _ in self._waiting if name in names)
        self._names -= {name for _, _, name, _, _ in self._waiting if name in names}
        self._waiting = [waiting for waiting in self._waiting if waiting[2] not in names]
        heapq.heapify(self._waiting)

    def clear(self) -> None:
        weight = self.weight
        self.__init__(self._credit_nbytes)  # type: ignore[misc]
        self.weight = weight

    @property
    def distance_nbytes(self) -> float:
        """To the end."""
        return self.waiting_nbytes / self.weight


def abreast(
    windows: Mapping[Peer, Window[Name, Thing]], has_room: Callable[[Peer], bool]
) -> Iterator[tuple[Peer, Thing]]:
    """What to send now, and to whom, one by one: whether there is room for more is asked again after each."""
    is_over = not windows
    while not is_over:
        is_over = True
        for peer, window in windows.items():
            while (
                has_room(peer)
                and max(other.distance_nbytes for other in windows.values()) <= window.distance_nbytes + LEAD_NBYTES
                and (thing := window.next()) is not None
            ):
                yield peer, thing
                is_over = False  # others may have been waiting for it


class Receipts(Generic[Name]):
    """For things that have come and whose sender has not been told so."""

    def __init__(self) -> None:
        self._names: list[Name] = []
        self._nbytes = 0
        self._since_s = 0.0

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: Name, nbytes: int, now_s: float, *, at_once: bool = False) -> None:
        if not self._names:
            self._since_s = now_s
        self._names.append(name)
        self._nbytes += CREDIT_NBYTES if at_once else nbytes

    def due(self, now_s: float) -> list[Name]:
        """What to tell now, if anything."""
        if not self._names or (2 * self._nbytes < CREDIT_NBYTES and now_s < self._since_s + RECEIPT_S):
            return []
        names, self._names, self._nbytes = self._names, [], 0
        return names
