"""Reaches every other host from every host, at a port that the system chooses, and measures what the way carries.

Pairs take turns as in a tournament, so that a host is in one pair at a time and all hosts are busy.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence

from gradientflow.doctor.meeting import Meeting, why_not
from gradientflow.probe.stream import Receiver, send

#: From rank to rank, bytes a second; or the words of what was in the way.
Carried = dict[tuple[int, int], float | str]

_CONNECT_S = 3.0
_REACHED = "reached"


def rounds(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, each player at most once in a round (the circle method).

    >>> rounds([0, 1, 2])
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    seats: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]


def measure_links(meeting: Meeting, ranks: Sequence[int], address: str, seconds: float) -> Carried:
    """What this rank has received from each other; on every one of `ranks`, one a host, at the same time."""
    found: Carried = {}
    for number, pairs in enumerate(rounds(ranks)):
        for a, b in pairs:
            if meeting.rank in (a, b):
                for source, target in ((a, b), (b, a)):
                    key = f"link/{number}/{source}-{target}"
                    if meeting.rank == target:
                        found[source, target] = _receive(meeting, source, key, address, seconds)
                    else:
                        _send(meeting, target, key, seconds)
    return found


def _receive(meeting: Meeting, source: int, key: str, address: str, seconds: float) -> float | str:
    try:
        receiver = Receiver(address)
    except OSError as error:
        words = f"nobody can listen at {address or 'no address'} ({error.strerror or error})"
        meeting.tell(key, json.dumps({"words": words}))
        return words
    try:
        meeting.tell(key, json.dumps({"address": address, "port": receiver.port, "token": receiver.token}))
        said = meeting.hear(f"{key}/said", [source], 2 * _CONNECT_S).get(source)
        if said != _REACHED:
            return said or f"rank {source} did not try within {2 * _CONNECT_S:g} s"
        streamed = receiver.receive(seconds, limit_s=4 * seconds + _CONNECT_S)
    except OSError as error:
        return f"the connection broke ({error})"
    finally:
        receiver.close()
    return streamed.nbytes / streamed.seconds if streamed else "the connection was made and nothing came through it"


def _send(meeting: Meeting, target: int, key: str, seconds: float) -> None:
    told = json.loads(meeting.hear(key, [target]).get(target, "{}"))
    if "port" not in told:
        return
    place = told["address"], told["port"]
    try:
        # First without a word, so that a way that is closed is known at once to both.
        socket.create_connection(place, timeout=_CONNECT_S).close()
    except OSError as error:
        meeting.tell(f"{key}/said", why_not(error, *place)[0])
        return
    meeting.tell(f"{key}/said", _REACHED)
    with contextlib.suppress(OSError):  # the receiver sees it too
        send(*place, told["token"], seconds, limit_s=_CONNECT_S + 2 * seconds)
