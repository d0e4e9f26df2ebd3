"""Who calls at a port of ours and says the right words first.

Anybody may call: scanners, other jobs, somebody who says nothing. They hold nobody up: all are listened to at the same
time, and if there are too many, the one that has been listened to longest is sent away.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Self

#: Who has not said enough yet. Those we wait for speak at once.
MOST_LISTENED_TO = 256


class Callers:
    """Of a listening socket. Who begins with `num_bytes` bytes that are `expected` is let in."""

    def __init__(self, server: socket.socket, num_bytes: int, expected: Callable[[bytes], bool]) -> None:
        server.setblocking(False)
        self._server, self._num_bytes, self._expected = server, num_bytes, expected
        #: By number, the eldest first.
        self._listened_to: dict[int, tuple[socket.socket, bytearray]] = {}
        self._poll = select.epoll()
        self._poll.register(server, select.EPOLLIN)
        #: Who was sent away or has hung up, having said nothing or something else.
        self.num_refused = 0
        #: Given up for a moment when there are no more, so that who calls can be sent away.
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection, _ in self._listened_to.values():
            connection.close()
        self._listened_to.clear()
        self._poll.close()
        os.close(self._spare)

    def __len__(self) -> int:
        """Who is listened to."""
        return len(self._listened_to)

    def fileno(self) -> int:
        """A file that can be read when somebody says something."""
        return self._poll.fileno()

    def next_within(self, patience_s: float) -> tuple[socket.socket, bytes] | None:
        """Another one and what it said; None if there was none in that time."""
        end_s = time.monotonic() + patience_s
        while True:
            for number, _ in self._poll.poll(max(0.0, end_s - time.monotonic())):
                if number == self._server.fileno():
                    number = self._answer()
                if found := self._listen(number):
                    return found
            if time.monotonic() >= end_s:
                return None

    def _answer(self) -> int:
        try:
            connection, _ = self._server.accept()
        except (BlockingIOError, ConnectionError):  # it has hung up meanwhile
            return -1
        except OSError:  # no descriptors are left
            self._send_one_away()
            return -1
        connection.setblocking(False)
        if len(self._listened_to) == MOST_LISTENED_TO:
            self._dismiss(next(iter(self._listened_to))).close()
            self.num_refused += 1
        self._listened_to[connection.fileno()] = connection, bytearray()
        self._poll.register(connection, select.EPOLLIN)
        return connection.fileno()

    def _send_one_away(self) -> None:
        """Who calls is there until it is accepted, and would be noticed again at once."""
        self.num_refused += 1
        os.close(self._spare)
        try:
            self._server.accept()[0].close()
        except OSError:
            pass
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _listen(self, number: int) -> tuple[socket.socket, bytes] | None:
        if number not in self._listened_to:
            return None
        connection, words = self._listened_to[number]
        try:
            more = connection.recv(self._num_bytes - len(words))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        words += more
        if more and len(words) < self._num_bytes:
            return None
        self._dismiss(number)
        if len(words) == self._num_bytes and self._expected(bytes(words)):
            return connection, bytes(words)
        connection.close()
        self.num_refused += 1
        return None

    def _dismiss(self, number: int) -> socket.socket:
        self._poll.unregister(number)
        return self._listened_to.pop(number)[0]
