"""Strangers at a listening port hold nobody up."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from gradientflow.exchange import callers
from gradientflow.exchange.callers import Callers
from gradientflow.probe.stream import Receiver, send

WORDS = b"from rank 1"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def call(server: socket.socket, words: bytes) -> socket.socket:
    connection = socket.create_connection(server.getsockname(), timeout=20.0)
    connection.sendall(words)
    return connection


def heard(server: socket.socket, patience_s: float) -> bytes:
    with Callers(server, len(WORDS), WORDS.__eq__) as found:
        caller = found.next_within(patience_s)
    if caller is None:
        return b""
    caller[0].close()
    return caller[1]


@pytest.mark.parametrize("said", [b"", b"f", b"GET / HTTP/1.1\r\n\r\n", WORDS[:-1], bytes(100_000)], ids=repr)
def test_it_does_not_matter_who_called_before(server: socket.socket, said: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(call(server, said))
        call(server, said).close()
        stack.enter_context(call(server, WORDS))
        began_s = time.monotonic()
        assert heard(server, 20.0) == WORDS
        assert time.monotonic() - began_s < 5.0


def test_too_many_strangers_are_sent_away(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MOST_LISTENED_TO", 3)
    with ExitStack() as stack:
        first = stack.enter_context(call(server, b""))
        for _ in range(3):
            stack.enter_context(call(server, b""))
        with Callers(server, len(WORDS), WORDS.__eq__) as found:
            assert found.next_within(0.2) is None
            assert first.recv(1) == b""
            stack.enter_context(call(server, WORDS))
            caller = found.next_within(20.0)
            assert caller is not None
            caller[0].close()


def test_without_descriptors_callers_are_sent_away(server: socket.socket) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Callers(server, len(WORDS), WORDS.__eq__) as found, call(server, b"") as stranger, ExitStack() as stack:
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        assert found.next_within(0.1) is None
        assert found.num_refused == 1 and stranger.recv(1) == b""
        stack.close()
        with call(server, WORDS):
            caller = found.next_within(20.0)
            assert caller is not None
            caller[0].close()


def test_words_may_come_one_by_one(server: socket.socket) -> None:
    with call(server, WORDS[:3]) as connection, Callers(server, len(WORDS), WORDS.__eq__) as found:
        assert found.next_within(0.1) is None
        connection.sendall(WORDS[3:])
        caller = found.next_within(20.0)
        assert caller is not None and caller[1] == WORDS
        caller[0].close()


def test_a_silent_stranger_does_not_use_up_the_time_of_a_stream() -> None:
    receiver = Receiver("127.0.0.1")
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=20.0), ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, "127.0.0.1", receiver.port, receiver.token, 0.2, 20.0)
        began_s = time.monotonic()
        assert receiver.receive(0.2, 10.0) is not None
        assert time.monotonic() - began_s < 5.0
        sending.result(20.0)


def test_nobody_comes_in_time_however_many_others_do(server: socket.socket) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(call(server, b"x" * len(WORDS)))
        began_s = time.monotonic()
        assert heard(server, 0.3) == b""
        assert 0.3 <= time.monotonic() - began_s < 5.0
