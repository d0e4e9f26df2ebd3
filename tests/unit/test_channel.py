"""The way for what is large: memory that is used again, and frames that come in any pieces."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zmq

from gradientflow.exchange.server.blocks import STEP_NBYTES, Blocks
from gradientflow.exchange.server.channel import LARGE_NBYTES, Channel
from gradientflow.exchange.server.wire import MAX_NBYTES, Header, Key, Kind, Refused

# - Blocks


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def test_a_block_is_used_again_when_nobody_refers_to_it() -> None:
    blocks = Blocks()
    first = blocks.get(100_000)
    at = address(first)
    del first
    second = blocks.get(90_000)  # about the same size is the same
    assert len(second) == 90_000 and address(second) == at
    assert blocks.nbytes == 2 * STEP_NBYTES


@pytest.mark.parametrize("kept", [memoryview, np.asarray, lambda view: torch.frombuffer(view, dtype=torch.uint8)[5:]])
def test_a_block_that_anybody_sees_is_not_handed_out(kept: object) -> None:
    blocks = Blocks()
    seen = kept(blocks.get(100_000))  # type: ignore[operator]
    other = blocks.get(100_000)
    other[:] = bytes(100_000)
    assert blocks.nbytes == 4 * STEP_NBYTES
    before = bytes(memoryview(np.asarray(seen)))
    other[:] = b"x" * 100_000
    assert bytes(memoryview(np.asarray(seen))) == before


def test_no_more_is_held_than_was_in_use_at_a_time() -> None:
    blocks = Blocks()
    held = [blocks.get(4 * STEP_NBYTES) for _ in range(4)]
    most = blocks.nbytes
    del held
    for size in (1, 2, 3, 8, 16):
        held = [blocks.get(size * STEP_NBYTES) for _ in range(16 // size)]
        assert blocks.nbytes <= most
        del held


# - Channels


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel, zmq.Poller]]:
    """A plain socket, and a channel at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        channel = Channel(server.accept()[0], Blocks())
    poller = zmq.Poller()
    yield raw, channel, poller
    channel.close(poller)
    raw.close()


def pulled(channel: Channel, poller: zmq.Poller, number: int) -> list[tuple[Header, bytes]]:
    found: list[tuple[Header, bytes]] = []
    while len(found) < number:
        channel.watch(poller)
        assert poller.poll(5000), "nothing comes"
        found += [(header, bytes(payload)) for header, payload in channel.pull()]
    return found


def share(piece: int, nbytes: int) -> Header:
    return Header(Kind.PUSH, 1, Key(1, 2, 3, piece), 7, nbytes=nbytes)


def test_frames_arrive_whole_however_they_are_cut(ends: tuple[socket.socket, Channel, zmq.Poller]) -> None:
    raw, channel, poller = ends
    chance = random.Random(0)
    sizes = [LARGE_NBYTES, LARGE_NBYTES + 1, 300_000, 1_500_001, LARGE_NBYTES]
    sent = [(share(piece, size), chance.randbytes(size)) for piece, size in enumerate(sizes)]
    stream, found = b"".join(header.packed() + payload for header, payload in sent), []
    while stream:
        cut = chance.choice([1, 55, 56, 57, 1000, 100_000])
        raw.sendall(stream[:cut])
        stream = stream[cut:]
        found += [(header, bytes(payload)) for header, payload in channel.pull()]
    found += pulled(channel, poller, len(sent) - len(found))
    assert found == sent


def test_nothing_waits_for_more_than_comes(ends: tuple[socket.socket, Channel, zmq.Poller]) -> None:
    """The smallest frame, of which a part of the head came along with the frame before."""
    raw, channel, poller = ends
    frame = share(0, LARGE_NBYTES).packed() + bytes(LARGE_NBYTES)
    raw.sendall(frame + frame[:30])
    assert len(pulled(channel, poller, 1)) == 1
    raw.sendall(frame[30:])
    assert len(pulled(channel, poller, 1)) == 1


def test_what_is_sent_goes_on_when_there_is_room(ends: tuple[socket.socket, Channel, zmq.Poller]) -> None:
    raw, channel, _ = ends
    payloads = [random.Random(piece).randbytes(5_000_000) for piece in range(3)]
    for piece, payload in enumerate(payloads):
        channel.send(share(piece, len(payload)), memoryview(payload))
    expected = b"".join(share(piece, len(payload)).packed() + payload for piece, payload in enumerate(payloads))
    raw.settimeout(5.0)
    found = bytearray()
    while len(found) < len(expected):
        found += raw.recv(2**20)
        channel.push()
    assert bytes(found) == expected


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"XXXX" + share(0, LARGE_NBYTES).packed()[4:], "not ours"),
        (share(0, MAX_NBYTES + 1).packed(), "length of a payload"),
        (share(0, 2**63).packed(), "length of a payload"),
        (share(0, LARGE_NBYTES - 1).packed(), "length of a payload"),
    ],
)
def test_what_is_not_ours_is_refused_and_nothing_made_for_it(
    ends: tuple[socket.socket, Channel, zmq.Poller], words: bytes, why: str
) -> None:
    raw, channel, poller = ends
    raw.sendall(words + bytes(LARGE_NBYTES))
    with pytest.raises(Refused, match=why):
        pulled(channel, poller, 1)
    assert channel._blocks.nbytes == 0


def test_a_closed_connection_is_noticed_in_the_midst_of_a_frame(
    ends: tuple[socket.socket, Channel, zmq.Poller],
) -> None:
    raw, channel, poller = ends
    raw.sendall(share(0, 300_000).packed() + bytes(100_000))
    raw.close()
    with pytest.raises(ConnectionError):
        pulled(channel, poller, 1)
