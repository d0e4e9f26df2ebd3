"""A plain TCP stream between two ranks: what their link carries with no collective library in between.

The receiver listens for one connection and takes nothing from whoever does not first say its token.
"""

from __future__ import annotations

import secrets
import socket
import time
from typing import NamedTuple

from gradientflow.exchange.callers import Callers
from gradientflow.exchange.reach import family_of

CHUNK_NBYTES = 2**20
#: Of the start that does not count: slow start, and what a shaped link lets through at once.
RAMP = 0.25
TOKEN_NBYTES = 8


class Streamed(NamedTuple):
    """What arrived after the ramp."""

    nbytes: int
    seconds: float


class Receiver:
    """Listens from the moment it is made; `receive` once."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), family=family_of(address))
        self.port: int = self._server.getsockname()[1]
        self.token = secrets.randbits(62)

    def receive(self, seconds: float, limit_s: float) -> Streamed | None:
        """What the sender sent in about `seconds`; None if there was no sender with the token."""
        end_s = time.monotonic() + limit_s
        with self._server:
            with Callers(self._server, TOKEN_NBYTES, _as_bytes(self.token).__eq__) as callers:
                found = callers.next_within(limit_s)
            if found is None:
                return None
            with found[0] as connection:
                connection.settimeout(max(0.1, end_s - time.monotonic()))
                return _count(connection, seconds)

    def close(self) -> None:
        self._server.close()


def send(address: str, port: int, token: int, seconds: float, limit_s: float) -> None:
    """Send to a `Receiver` for `seconds`."""
    with socket.create_connection((address, port), timeout=limit_s) as connection:
        connection.sendall(_as_bytes(token))
        chunk, end_s = bytes(CHUNK_NBYTES), time.monotonic() + seconds
        while time.monotonic() < end_s:
            connection.sendall(chunk)


def _as_bytes(token: int) -> bytes:
    return token.to_bytes(TOKEN_NBYTES, "little")


def _count(connection: socket.socket, seconds: float) -> Streamed | None:
    buffer = bytearray(CHUNK_NBYTES)
    start_s = now_s = counted_from_s = time.perf_counter()
    nbytes = 0
    while number := connection.recv_into(buffer):
        now_s = time.perf_counter()
        if counted_from_s == start_s and now_s - start_s > RAMP * seconds:
            counted_from_s, nbytes = now_s, 0
        else:
            nbytes += number
    return Streamed(nbytes, now_s - counted_from_s) if nbytes and now_s > counted_from_s else None
