"""A server at work: sockets around a `Ledger`, of sums, and `Tables`, of parameters."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import secrets
import socket as socketlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator

import torch
import zmq
import zmq.utils.monitor

from gradientflow.errors import UsageError
from gradientflow.exchange.callers import Callers
from gradientflow.exchange.reach import family_of
from gradientflow.exchange.server.blocks import Blocks
from gradientflow.exchange.server.channel import (
    HEARTBEAT_S,
    LARGE_NBYTES,
    SILENT_S,
    SOCKET_NBYTES,
    TOKEN_NBYTES,
    Channel,
    offer,
)
from gradientflow.exchange.server.keys import Invitation, Lock
from gradientflow.exchange.server.ledger import Ledger, Outgoing
from gradientflow.exchange.server.table import Tables
from gradientflow.exchange.server.window import RECEIPT_S
from gradientflow.exchange.server.wire import MAX_NBYTES, Header, Kind, Refused

#: Workers that nothing was heard of for so long are looked after.
LOOK_S = 1.0
#: Who has connected has so long to prove who it is.
HANDSHAKE_S = 5.0
#: Of messages from one worker that were not looked at yet: then it has to wait. It is to nobody's loss.
MOST_UNREAD = 64
#: Of messages to one that reads nothing: then it counts as gone. Results are not so many, pings and receipts are small.
MOST_UNSENT = 10_000
# As plain numbers: to combine those of the library takes as long as to send.
NOW = int(zmq.NOBLOCK)
MORE = NOW | int(zmq.SNDMORE)
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)
_ZAP = "inproc://zeromq.zap.01"


class Service:
    """Bound when it is made; `run` until `stop`.

    address: of the interface to listen at.
    """

    def __init__(self, address: str, lock: Lock, limit_nbytes: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.ledger = Ledger(limit_nbytes or memory_limit())
        self.tables = Tables(self.ledger.limit_nbytes, self.ledger.refusals)
        self._lock = lock
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._router = self._context.socket(zmq.ROUTER)
        prepare(self._router)
        self._router.rcvhwm, self._router.sndhwm = MOST_UNREAD, MOST_UNSENT
        self._router.router_mandatory = True  # who is not there is an error, not silence
        self._router.handshake_ivl = int(1e3 * HANDSHAKE_S)
        self._router.zap_domain = b"gradientflow"
        self._router.ipv6 = ":" in address
        self._monitor = self._router.get_monitor_socket()
        self._stopped = threading.Event()
        self._until_s, self._until_all_left = 0.0, False
        self._num_unknown = 0  # connections of which it is not known yet, or never will be, whose they are
        self._thread: threading.Thread | None = None
        self._looked_s = time.monotonic()
        self._doors: _Doors | None = None
        try:
            lock.close(self._router, address)
            host = f"[{address}]" if ":" in address else address
            port = self._router.bind_to_random_port(f"tcp://{host}")
            self._doors = _Doors(address) if lock.mode == "plain" else None
        except (zmq.ZMQError, OSError) as error:
            self._close()
            raise UsageError(f"a server cannot listen at {address}: {error.strerror}") from None
        except UsageError:
            self._close()
            raise
        self.invitation: Invitation = lock.invitation(address, port)

    @property
    def refusals(self) -> Counter[str]:
        """By reason. Who connects and does not even begin a handshake is "no handshake"."""
        at_doors = self._doors.num_refused if self._doors else 0
        return self.ledger.refusals + Counter({"no handshake": self._num_unknown, "no token": at_doors})

    def start(self) -> None:
        """In a thread."""
        self._thread = threading.Thread(target=self.run, name="gradientflow-server", daemon=True)
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, patience_s: float = 0.0, *, until_all_left: bool = False) -> None:
        """At once, or when nobody needs anything any more, or is there at all."""
        self._until_s, self._until_all_left = time.monotonic() + patience_s, until_all_left
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0 + patience_s)

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._zap, self._monitor):
            poller.register(socket, zmq.POLLIN)
        try:
            with torch.no_grad():
                while not self._is_over():
                    if self._doors:
                        self._doors.watch(poller)
                    patience_s = RECEIPT_S if self.ledger.owes_receipts else 0.2
                    ready = dict(poller.poll(int(1e3 * patience_s)))
                    if self._zap in ready:
                        self._judge_caller()
                    if self._monitor in ready:
                        self._count_caller()
                    if self._router in ready:
                        self._receive()
                    if self._doors:
                        for who, header, payload in self._doors.said(ready, self.ledger.refusals):
                            self._take(who, header, payload, receipt=False)
                    for outgoing in list(self.ledger.receipts(time.monotonic())):
                        self._send(outgoing)
                    for outgoing in self.ledger.results(self._has_room):
                        self._send(outgoing)
                    for outgoing in self.tables.answers():
                        self._send(outgoing)
                    self._look_after_workers()
        finally:
            self._close()

    def _is_over(self) -> bool:
        if not self._stopped.is_set():
            return False
        is_needed = bool(self.ledger.identities()) if self._until_all_left else self.ledger.is_awaited
        return not (is_needed or self.tables.is_used) or time.monotonic() > self._until_s

    def _receive(self) -> None:
        # Not for ever: what was summed is to be sent, too.
        for _ in range(16):
            try:
                identity, *frames = self._router.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            who = bytes(identity.buffer)
            try:
                if not 1 <= len(frames) <= 2:
                    raise Refused("number of frames")
                payload = frames[1].buffer if len(frames) == 2 else memoryview(b"")
                header = Header.read(frames[0].buffer, len(payload))
            except Refused as refused:
                self.ledger.refusals[str(refused)] += 1
                continue
            self._take(who, header, payload)
            if header.kind is Kind.HELLO and self._doors and self.ledger.knows(who):
                words = self._doors.expect(who)
                self._send(Outgoing(who, Header(Kind.CHANNEL, header.space, nbytes=len(words)), words))
            del frames, payload

    def _take(self, who: bytes, header: Header, payload: memoryview, *, receipt: bool = True) -> None:
        try:
            if header.kind is Kind.JOIN or self.tables.knows(who):
                answers = self.tables.take(who, header, payload, time.monotonic())
            else:
                answers = self.ledger.take(who, header, payload, time.monotonic(), receipt=receipt)
            for outgoing in answers:
                self._send(outgoing)
        except Refused as refused:
            self.ledger.refusals[str(refused)] += 1
            if (why := self._excuse(refused)) is not None:
                words = why.encode()
                said = Header(Kind.REFUSED, header.space, header.key, header.seq, nbytes=len(words))
                self._send(Outgoing(who, said, words))

    def _excuse(self, refused: Refused) -> str | None:
        """For a worker, of what is its user's to mend."""
        match str(refused):
            case "memory":
                return f"it may hold {self.ledger.limit_nbytes} bytes, which is too little"
            case "ahead":
                return "it got a share of a sum although this worker had not been sent the one before"
            case "samples":
                return "some workers count their samples and some do not: call count() on all of them, or on none"
            case _:
                return None

    def _send(self, outgoing: Outgoing) -> None:
        channel = self._doors.channel(outgoing) if self._doors else None
        if channel is not None:
            assert isinstance(outgoing.payload, torch.Tensor)
            channel.send(outgoing.header, bytes_of(outgoing.payload))
            self.ledger.sent(outgoing)
            return
        try:
            self._router.send(outgoing.identity, MORE)
            send(self._router, outgoing.header, outgoing.payload)
        except zmq.ZMQError:
            self._unreachable(outgoing.identity)

    def _has_room(self, identity: bytes) -> bool:
        return self._doors is None or self._doors.has_room(identity)

    def _unreachable(self, identity: bytes) -> None:
        if self.tables.knows(identity):
            self.tables.unreachable(identity, time.monotonic())
            return
        for outgoing in self.ledger.unreachable(identity, time.monotonic()):
            self._send(outgoing)

    def _look_after_workers(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if self._doors:
            self._doors.forget_unless(self.ledger.knows)
        ping = Header(Kind.PING, 0)
        for identity in [*self.ledger.identities(), *self.tables.identities()]:
            self._send(Outgoing(identity, ping))
        for outgoing in list(self.tables.look(now_s)):
            self._send(outgoing)

    def _judge_caller(self) -> None:
        """ZAP, ZeroMQ's authentication protocol (rfc.zeromq.org/spec/27)."""
        version, sequence, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        plain = self._lock.passwords
        if mechanism == b"PLAIN" and len(credentials) == 2:
            good = plain.get(credentials[0].decode(errors="replace")) == credentials[1].decode(errors="replace")
        else:
            good = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._lock.allowed
        code, words = (b"200", b"OK") if good else (b"400", b"no valid key")
        if not good:
            self.ledger.refusals["key"] += 1
        self._zap.send_multipart([version, sequence, code, words, b"worker" if good else b"", b""])

    def _count_caller(self) -> None:
        event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_ACCEPTED:
            self._num_unknown += 1
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED or event in HANDSHAKE_FAILED:
            self._num_unknown -= 1
        # Of a wrong key, ZAP was asked.
        if event in HANDSHAKE_FAILED and event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.ledger.refusals["handshake"] += 1

    def _close(self) -> None:
        self._router.disable_monitor()
        self._context.destroy(linger=0)
        if self._doors:
            self._doors.close()


class _Doors:
    """Where workers that are welcome come in with what is large. [Note: two ways]"""

    def __init__(self, address: str) -> None:
        self._listening = socketlib.create_server((address, 0), family=family_of(address), backlog=1024)
        self._callers = Callers(self._listening, TOKEN_NBYTES, self._is_token)
        self._blocks = Blocks()
        #: By who was told them, and only until they are used.
        self._tokens: dict[bytes, bytes] = {}
        self._channels: dict[bytes, Channel] = {}
        self._poller = zmq.Poller()

    @property
    def num_refused(self) -> int:
        return self._callers.num_refused + len(self._callers)

    def watch(self, poller: zmq.Poller) -> None:
        """Before each wait there."""
        if poller is not self._poller:
            self._poller = poller
            poller.register(self._callers.fileno(), zmq.POLLIN)
        for channel in self._channels.values():
            channel.watch(poller)

    def expect(self, who: bytes) -> bytes:
        """What to tell a worker that has said hello."""
        self._drop(who)
        self._tokens[who] = secrets.token_bytes(TOKEN_NBYTES)
        return offer(self._listening.getsockname()[1], self._tokens[who])

    def channel(self, outgoing: Outgoing) -> Channel | None:
        """For what is to be said, if it is large and there is one."""
        if outgoing.header.nbytes < LARGE_NBYTES or not isinstance(outgoing.payload, torch.Tensor):
            return None
        return self._channels.get(outgoing.identity)

    def has_room(self, who: bytes) -> bool:
        return who not in self._channels or self._channels[who].has_room

    def said(self, ready: Container[object], refusals: Counter[str]) -> Iterator[tuple[bytes, Header, memoryview]]:
        """What has come, by whom; and send what waits. ready: what was found by who watches."""
        if self._callers.fileno() in ready:
            self._let_in()
        for who, channel in list(self._channels.items()):
            try:
                if channel.fileno() in ready:
                    channel.push()
                    for header, payload in channel.pull():
                        yield who, header, payload
            except OSError:
                self._drop(who)
            except Refused as refused:
                refusals[str(refused)] += 1
                self._drop(who)

    def forget_unless(self, knows: Callable[[bytes], bool]) -> None:
        for who in [who for who in {**self._channels, **self._tokens} if not knows(who)]:
            self._drop(who)

    def close(self) -> None:
        for who in list(self._channels):
            self._drop(who)
        self._callers.__exit__()
        self._listening.close()

    def _is_token(self, words: bytes) -> bool:
        return any(hmac.compare_digest(words, token) for token in self._tokens.values())

    def _let_in(self) -> None:
        while (found := self._callers.next_within(0.0)) is not None:
            connection, words = found
            who = next(who for who, token in self._tokens.items() if token == words)
            del self._tokens[who]
            self._channels[who] = Channel(connection, self._blocks)

    def _drop(self, who: bytes) -> None:
        """The worker notices, and begins anew."""
        self._tokens.pop(who, None)
        if (channel := self._channels.pop(who, None)) is not None:
            channel.close(self._poller)


def prepare(socket: zmq.Socket[bytes]) -> None:
    """Of either end."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # workers send as much as windows let them
    socket.maxmsgsize = MAX_NBYTES
    socket.sndbuf = socket.rcvbuf = SOCKET_NBYTES
    socket.heartbeat_ivl = 1000 * HEARTBEAT_S
    socket.heartbeat_timeout = 1000 * SILENT_S


def send(socket: zmq.Socket[bytes], header: Header, payload: torch.Tensor | memoryview | bytes | None) -> None:
    """Without waiting. What is large is not copied, and must stay as it is until the other side has it."""
    if payload is None:
        socket.send(header.packed(), NOW)
        return
    socket.send(header.packed(), MORE)
    what = bytes_of(payload) if isinstance(payload, torch.Tensor) else payload
    socket.send(what, NOW, copy=header.nbytes < LARGE_NBYTES)


def bytes_of(values: torch.Tensor) -> memoryview:
    """Not copied."""
    return memoryview(values.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def memory_limit() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def keep_freed_memory() -> None:
    """glibc gives large blocks back to the system and has them anew, page by page, for each message. They are
    of few sizes, and come again."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**30)


def check_listening(address: str) -> None:
    """Raise `UsageError` if this machine has no such address."""
    try:
        with socketlib.create_server((address, 0), family=family_of(address)):
            pass
    except OSError as error:
        raise UsageError(f"a server cannot listen at {address}: {error.strerror or error}") from None
