"""A server's sockets: who gets in, and what becomes of those who do not."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zmq

from gradientflow.compress import Sum
from gradientflow.errors import UsageError
from gradientflow.exchange.server.channel import offer
from gradientflow.exchange.server.client import Client, Errand
from gradientflow.exchange.server.directory import StoreDirectory, claim
from gradientflow.exchange.server.keys import Invitation, KeyFiles, Lock, open_for
from gradientflow.exchange.server.service import Service
from gradientflow.exchange.server.wire import MAX_NBYTES, Header, Key, Kind, pack_hello

LOOPBACK = "127.0.0.1"


class One:
    """A directory of one server; who that is may change."""

    def __init__(self, invitation: Invitation) -> None:
        self.invitation = invitation

    def __len__(self) -> int:
        return 1

    def look_up(self, slot: int) -> Invitation:
        return self.invitation

    def take_over(self, slot: int, lost: Invitation, by: Invitation) -> None:
        raise AssertionError


class Pair:
    """Two workers."""

    def __init__(self, invitation: Invitation, files: KeyFiles | None = None, other: Invitation | None = None) -> None:
        """other: whom the second one finds."""
        self.directories = [One(invitation), One(other or invitation)]
        self.clients = [Client(directory, rank, 2, 1, files) for rank, directory in enumerate(self.directories)]
        self._seq = 0

    def find(self, invitation: Invitation) -> None:
        for directory in self.directories:
            directory.invitation = invitation

    def sum(self, nbytes: int = 200_000) -> list[torch.Tensor]:
        """nbytes: of a piece."""
        self._seq += 1
        values = [torch.full((100_000,), rank + 1.0) for rank in range(2)]
        ended = [threading.Event() for _ in self.clients]
        for client, mine, event in zip(self.clients, values, ended, strict=True):
            end = lambda nbytes, error, event=event: event.set()  # noqa: E731
            client.hold(Errand((question for question in [Sum([mine])]), 1, 0, self._seq, 0, [0], nbytes, end))
        for client, event in zip(self.clients, ended, strict=True):
            assert event.wait(10.0), client.error
            assert client.error is None
        return values

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.fixture
def keys(tmp_path: Path) -> KeyFiles:
    KeyFiles.write_new(tmp_path / "keys")
    return KeyFiles.read(tmp_path / "keys")


@pytest.fixture
def serving() -> Iterator[Callable[[Lock], Service]]:
    started: list[Service] = []

    def serve(lock: Lock) -> Service:
        started.append(Service(LOOPBACK, lock))
        started[-1].start()
        return started[-1]

    yield serve
    for service in started:
        service.stop()


def wait_for(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 10
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("mode", ["plain", "job", "files"])
def test_whoever_has_a_key_is_served(mode: str, keys: KeyFiles, serving: Callable[[Lock], Service]) -> None:
    files = keys if mode == "files" else None
    service = serving(Lock(mode, files))
    pair = Pair(service.invitation, files)
    try:
        for _ in range(3):
            assert all(torch.equal(values, torch.full((100_000,), 3.0)) for values in pair.sum())
    finally:
        pair.close()
    assert not +service.refusals
    assert wait_for(lambda: service.ledger.held_nbytes == 0)


def test_strangers_change_nothing_and_are_counted(keys: KeyFiles, serving: Callable[[Lock], Service]) -> None:
    service = serving(Lock("files", keys))
    invitation, chance = service.invitation, random.Random(0)
    pair = Pair(invitation, keys)
    good = Header(Kind.PUSH, 1, Key(1, 0, 0, 0), 1, nbytes=1000, dtype=torch.float32).packed()
    bad = [
        (chance.randbytes(50), "length of a header"),
        (good[:20], "length of a header"),
        (b"XXXX" + good[4:], "not ours"),
        (good[:4] + b"\x07" + good[5:], "version"),
        (good[:-8] + struct.pack("<Q", MAX_NBYTES + 1), "length of a payload"),
        (good, "no hello"),  # repeated by somebody else
    ]
    try:
        pair.sum()
        with zmq.Context() as context:
            insider = context.socket(zmq.DEALER)
            open_for(insider, invitation, keys)
            insider.connect(invitation.endpoint)
            for header, _ in 50 * bad:
                insider.send_multipart([header, b"x" * 1000])
            insider.send_multipart([b"a", b"b", b"c"])
            for number in range(10):
                stranger = context.socket(zmq.DEALER)
                stranger.linger = 0
                if number % 2:
                    stranger.plain_username, stranger.plain_password = b"worker", b"guess"
                stranger.connect(invitation.endpoint)
                with contextlib.suppress(zmq.Again):  # shown the door before it could
                    stranger.send(good, zmq.DONTWAIT)
                assert wait_for(lambda wanted=number + 1: service.refusals["handshake"] >= wanted)
                stranger.close()
            for _ in range(10):
                with socket.create_connection((invitation.address, invitation.port), timeout=5) as connection:
                    connection.sendall(chance.randbytes(1000))
            expected = {why: 50 * [reason for _, reason in bad].count(why) for _, why in bad}
            assert wait_for(lambda: all(service.refusals[why] == number for why, number in expected.items()))
            assert wait_for(lambda: service.refusals["no handshake"] == 10)
            assert service.refusals["number of frames"] == 1
            insider.close(linger=0)
        assert service.ledger.held_nbytes <= 2 * 400_000
        assert torch.equal(pair.sum()[0], torch.full((100_000,), 3.0))
    finally:
        pair.close()


def test_a_wrong_password_is_refused_and_said(serving: Callable[[Lock], Service]) -> None:
    service = serving(Lock("plain"))
    client = Client(One(service.invitation.model_copy(update={"password": "guess"})), 0, 2, 1)
    try:
        assert wait_for(lambda: client.error is not None)
        assert "do not have each other's keys" in str(client.error)
        assert service.refusals["key"] == 1
    finally:
        client.close()


def test_plain_mode_is_for_loopback_unless_told_otherwise() -> None:
    with pytest.raises(UsageError, match=r"plain mode at 0\.0\.0\.0"):
        Service("0.0.0.0", Lock("plain"))
    service = Service("0.0.0.0", Lock("plain", everywhere=True))
    service.start()
    service.stop()


def test_an_address_of_somebody_else() -> None:
    with pytest.raises(UsageError, match=r"cannot listen at 192\.0\.2\.1"):
        Service("192.0.2.1", Lock("job"))


# - Who serves

SUM = torch.full((100_000,), 3.0)


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args: Invitation | None) -> Pair:
        made.append(Pair(*args))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def test_a_server_that_died_before_anybody_came(pairs: Callable[..., Pair], serving: Callable[[Lock], Service]) -> None:
    dead = Service(LOOPBACK, Lock("plain"))
    dead.start()
    dead.stop()
    pair = pairs(dead.invitation)
    pair.find(serving(Lock("plain")).invitation)
    assert torch.equal(pair.sum()[0], SUM)


def test_workers_who_found_different_servers_meet_where_the_directory_says(
    pairs: Callable[..., Pair], serving: Callable[[Lock], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradientflow.exchange.server.client.STALLED_S", 0.5)
    first, second = serving(Lock("plain")).invitation, serving(Lock("plain")).invitation
    pair = pairs(first, None, second)
    assert wait_for(lambda: all(not client.lost for client in pair.clients))
    pair.find(second)
    assert torch.equal(pair.sum()[0], SUM)


def test_a_lost_servers_port_may_be_somebody_elses(
    pairs: Callable[..., Pair], serving: Callable[[Lock], Service]
) -> None:
    service = serving(Lock("plain"))
    pair = pairs(service.invitation)
    pair.sum()
    service.stop()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        stranger.curve_server, stranger.curve_secretkey = True, zmq.curve_keypair()[1]
        stranger.bind(service.invitation.endpoint)
        assert wait_for(lambda: all(line.num_failed > 5 for client in pair.clients for line in client._lines))
    pair.find(serving(Lock("plain")).invitation)
    assert torch.equal(pair.sum()[0], SUM)


def test_a_store_that_is_gone_is_no_reason_to_give_up(
    pairs: Callable[..., Pair], serving: Callable[[Lock], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had it is dead, and others say so, with its name."""
    asked = threading.Event()

    def fail(slot: int) -> Invitation:
        asked.set()
        raise RuntimeError("got 0 bytes")

    service = serving(Lock("plain"))
    pair = pairs(service.invitation)
    pair.sum()
    monkeypatch.setattr(pair.directories[0], "look_up", fail)
    service.stop()
    assert asked.wait(10.0)
    time.sleep(0.05)
    assert pair.clients[0].error is None


def test_a_job_whose_store_is_gone_is_served_until_its_workers_are(
    pairs: Callable[..., Pair], serving: Callable[[Lock], Service]
) -> None:
    service = serving(Lock("plain"))
    pair = pairs(service.invitation)
    pair.sum()
    stopping = threading.Thread(target=lambda: service.stop(10.0, until_all_left=True))
    stopping.start()
    assert torch.equal(pair.sum()[0], SUM)
    pair.close()
    stopping.join(5.0)
    assert not service.is_serving


def test_who_calls_a_client_that_has_failed_rings_at_nobodys_file(serving: Callable[[Lock], Service]) -> None:
    service = serving(Lock("plain"))
    client = Client(One(service.invitation.model_copy(update={"password": "guess"})), 0, 2, 1)
    bell = client._bell
    client._thread.join(10.0)
    opened = [os.eventfd(0, os.EFD_NONBLOCK)]
    try:
        while opened[-1] < bell:
            opened.append(os.eventfd(0, os.EFD_NONBLOCK))
        client.close()
        for number in opened:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(number)
    finally:
        for number in opened:
            os.close(number)


def test_slots_are_claimed_with_an_entry() -> None:
    store, locks = dist.HashStore(), [Lock("plain") for _ in range(3)]
    invitations = [lock.invitation(LOOPBACK, 1 + number) for number, lock in enumerate(locks)]
    store.set("1", "taken")
    assert [claim(store, invitation) for invitation in invitations] == [0, 2, 3]
    assert StoreDirectory([(store, "2")]).look_up(0) == invitations[1]


# - The way for what is large


def test_a_token_is_good_for_one_connection_and_strangers_have_none(serving: Callable[[Lock], Service]) -> None:
    """Also in plain mode. Who has none is sent away, and counted, before anything is read that it says."""
    service = serving(Lock("plain"))
    pair = Pair(service.invitation)
    chance = random.Random(0)
    try:
        pair.sum()
        doors = service._doors
        assert doors is not None and wait_for(lambda: len(doors._channels) == 2)
        there, held_nbytes = doors._listening.getsockname(), doors._blocks.nbytes
        used = doors.expect(b"a worker that has said hello")
        for words in [chance.randbytes(16), chance.randbytes(5000), used[2:][:15] + b"x"]:
            with socket.create_connection(there, timeout=5) as connection:
                connection.sendall(words + bytes(100_000) if len(words) == 16 else words)
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1) == b""
        with socket.create_connection(there, timeout=5):  # who says nothing
            assert wait_for(lambda: service.refusals["no token"] == 4)
            assert len(doors._channels) == 2 and doors._blocks.nbytes == held_nbytes
        doors._drop(b"a worker that has said hello")
        assert torch.equal(pair.sum()[0], SUM)
    finally:
        pair.close()


@contextlib.contextmanager
def offered(service: Service, space: int) -> Iterator[tuple[int, bytes]]:
    """Where a worker that says hello may come in, and what it has to say there."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.linger, line.rcvtimeo = 0, 5000
        open_for(line, service.invitation, None)
        line.connect(service.invitation.endpoint)
        hello = pack_hello(1, [])
        line.send_multipart([Header(Kind.HELLO, space, rank=0, nbytes=len(hello)).packed(), hello])
        told = (line.recv_multipart() for _ in range(9))
        yield struct.unpack("<H16s", next(payload[0] for head, *payload in told if head[5] == Kind.CHANNEL))


def test_who_may_come_in_and_talks_nonsense_is_shown_out(serving: Callable[[Lock], Service]) -> None:
    service = serving(Lock("plain"))
    pair = Pair(service.invitation)
    good = Header(Kind.PUSH, 1, Key(1, 0, 0, 0), 1, nbytes=80_000, dtype=torch.float32).packed()
    spoilt = {
        "not ours": b"XXXX" + good[4:],
        "version": good[:4] + b"\x07" + good[5:],
        "length of a payload": good[:-8] + struct.pack("<Q", MAX_NBYTES + 1),
    }
    try:
        pair.sum()
        for number, (why, header) in enumerate(spoilt.items()):
            with (
                offered(service, 50 + number) as (port, token),
                socket.create_connection((LOOPBACK, port), timeout=5) as connection,
            ):
                connection.sendall(token + header + bytes(80_000))
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1) == b""
            assert service.refusals[why] == 1
        assert torch.equal(pair.sum()[0], SUM)
    finally:
        pair.close()


def test_who_is_replaced_is_not_listened_to_any_more(serving: Callable[[Lock], Service]) -> None:
    service = serving(Lock("plain"))
    with (
        offered(service, 50) as (port, token),
        socket.create_connection((LOOPBACK, port), timeout=5) as connection,
    ):
        connection.sendall(token)
        with offered(service, 50):  # somebody who says that it is the same worker
            assert connection.recv(1) == b""


@pytest.mark.parametrize("side", ["worker", "server"])
def test_a_way_that_breaks_alone_is_taken_up_anew(
    side: str, pairs: Callable[..., Pair], serving: Callable[[Lock], Service]
) -> None:
    service = serving(Lock("plain"))
    pair = pairs(service.invitation)
    pair.sum()
    doors, line = service._doors, next(iter(pair.clients[0]._lines))
    assert doors is not None and wait_for(lambda: len(doors._channels) == 2)
    channel = line.channel if side == "worker" else next(iter(doors._channels.values()))
    assert channel is not None
    channel._socket.shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        assert torch.equal(pair.sum()[0], SUM)
    assert wait_for(lambda: len(doors._channels) == 2)
    assert sum(client.num_replaced for client in pair.clients) == 1


def test_where_the_other_way_is_barred_everything_takes_the_first(
    pairs: Callable[..., Pair], serving: Callable[[Lock], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serving(Lock("plain"))
    assert service._doors is not None
    with socket.socket() as deaf:
        deaf.bind((LOOPBACK, 0))
        monkeypatch.setattr(service._doors, "expect", lambda who: offer(deaf.getsockname()[1], bytes(16)))
        pair = pairs(service.invitation)
        for _ in range(3):
            assert torch.equal(pair.sum()[0], SUM)
        assert wait_for(lambda: all(line.channel is None for client in pair.clients for line in client._lines))
        assert torch.equal(pair.sum()[0], SUM)
    assert not service._doors._channels and not any(client.num_replaced for client in pair.clients)


# - Key files


def test_keys_are_for_their_owner_and_never_overwritten(tmp_path: Path) -> None:
    paths = KeyFiles.write_new(tmp_path / "keys")
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
    before = [path.read_text() for path in paths]
    with pytest.raises(UsageError, match="is there already"):
        KeyFiles.write_new(tmp_path / "keys")
    assert [path.read_text() for path in paths] == before


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "cannot read"),
        (lambda path: path.write_text("nonsense"), "holds no pair of keys"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "it is not text"),
        (lambda path: path.write_text("a" * 40 + "\n" + "b" * 40), "do not belong together"),
        (lambda path: path.chmod(0o644), "can be read by others"),
    ],
)
def test_bad_key_files_say_what_to_do(tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    paths = KeyFiles.write_new(tmp_path)
    spoil(paths[1])
    with pytest.raises(UsageError, match=words):
        KeyFiles.read(tmp_path)


def test_who_has_key_files_talks_to_nobody_without(keys: KeyFiles) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        with pytest.raises(UsageError, match="GRADIENTFLOW_KEYS"):
            open_for(line, Lock("job").invitation(LOOPBACK, 1), keys)
        with pytest.raises(UsageError, match="GRADIENTFLOW_KEYS"):
            open_for(line, Lock("files", keys).invitation(LOOPBACK, 1), None)
