"""The plain stream of the probe."""

from __future__ import annotations

import socket
import threading

from gradientflow.probe.stream import Receiver, Streamed, send


def _receive(receiver: Receiver, limit_s: float, found: list[Streamed | None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(receiver.receive(0.2, limit_s)))
    thread.start()
    return thread


def test_what_is_sent_is_counted_without_its_start() -> None:
    receiver, found = Receiver("127.0.0.1"), list[Streamed | None]()
    thread = _receive(receiver, 20.0, found)
    send("127.0.0.1", receiver.port, receiver.token, 0.2, 20.0)
    thread.join(20.0)
    assert found[0] is not None and found[0].nbytes > 0 and 0 < found[0].seconds < 15.0


def test_strangers_are_not_counted() -> None:
    receiver, found = Receiver("127.0.0.1"), list[Streamed | None]()
    thread = _receive(receiver, 20.0, found)
    for words in (b"", b"GET /", bytes(8) + bytes(1000)):
        with socket.create_connection(("127.0.0.1", receiver.port), timeout=20.0) as stranger:
            stranger.sendall(words)
    send("127.0.0.1", receiver.port, receiver.token, 0.2, 20.0)
    thread.join(20.0)
    assert found[0] is not None and found[0].nbytes > 1000


def test_nobody_comes() -> None:
    assert Receiver("127.0.0.1").receive(0.1, 0.1) is None
