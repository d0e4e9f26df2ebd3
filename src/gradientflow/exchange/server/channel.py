"""Another way for what is large, beside libzmq's: plain TCP, to servers in plain mode.

libzmq wakes up for whatever has come, reads into memory that it gets anew for every message, and hands over between
threads. Here one thread receives as much as a wakeup is worth (SO_RCVLOWAT) into memory that was used before.

[Note: two ways] A worker still connects through libzmq, which authenticates it, notices that it is lost and carries
everything small. Once it is welcome the server tells it a port and a token (CHANNEL) that is good for one connection;
what that connection says counts as said by this worker. What is large takes this way as soon as it is there and
libzmq's before, so between the two there is no order, and none is needed: sums are known by name. They are lost
together: a worker that sees either of them closed takes up both anew, as if the server were another one. Encrypted
modes have libzmq's way only.

What waits to be sent waits in a `Window` on either way. libzmq takes whatever it is given, so there the peer's receipts
say when there is room; here the system says so, and nobody has to be told that something has come.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections import deque
from collections.abc import Iterator

import zmq

from gradientflow.exchange.reach import family_of
from gradientflow.exchange.server.blocks import Blocks
from gradientflow.exchange.server.wire import HEADER_NBYTES, Header, Refused

#: What is on its way in the kernel cannot be overtaken.
SOCKET_NBYTES = 2**20
#: Less goes through libzmq, and is copied: to keep track of it takes longer.
LARGE_NBYTES = 64 * 1024
#: Received of one connection before others have their turn.
TURN_NBYTES = 4 * 2**20
#: A host that vanished without a word is given up after so long, on either way; one that is cut off for less goes on.
HEARTBEAT_S = 5
SILENT_S = 20
#: Wake up for no less, while more than that is to come.
GULP_NBYTES = 512 * 1024
TOKEN_NBYTES = 16
_OFFER = struct.Struct(f"<H{TOKEN_NBYTES}s")
#: What one call of the system is given to send.
_AT_ONCE = 8


class Channel:
    """One end, which never blocks. Who has it waits for it with `watch`, and then lets it `push` and `pull`."""

    def __init__(self, connection: socket.socket, blocks: Blocks, token: bytes = b"") -> None:
        """token: to be said first."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Not of what is received: the system would no longer make more room for what is waited for by SO_RCVLOWAT.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_NBYTES)
        _notice_silence(connection)
        self._socket, self._blocks = connection, blocks
        self._outgoing: deque[memoryview] = deque([memoryview(token)] if token else [])
        #: Whether the other end can be sent something.
        self.is_ready = not token
        self._lowest, self._watched = 1, 0
        self._head = memoryview(bytearray(HEADER_NBYTES))
        self._header: Header | None = None
        self._body = memoryview(b"")
        #: What is still to come, of the head or of the body.
        self._rest = self._head

    @classmethod
    def call(cls, address: str, offer: memoryview, blocks: Blocks) -> Channel:
        """Begin to connect to whoever made the offer. Raises `OSError` or `Refused`."""
        if len(offer) != _OFFER.size:
            raise Refused("offer")
        port, token = _OFFER.unpack(offer)
        connection = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect((address, port))
            return cls(connection, blocks, token)
        except OSError:
            connection.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_room(self) -> bool:
        """Whether what is sent now would begin to go at once."""
        return not self._outgoing

    def watch(self, poller: zmq.Poller) -> None:
        """For what there is to do."""
        # A message is never smaller than what is large, so nothing waits for more to come that does not.
        lowest = min(len(self._rest) + (LARGE_NBYTES if self._header is None else 0), GULP_NBYTES)
        if lowest != self._lowest:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
            self._lowest = lowest
        watched = zmq.POLLIN | zmq.POLLOUT if self._outgoing else zmq.POLLIN
        if watched != self._watched:
            poller.register(self.fileno(), watched)
            self._watched = watched

    def send(self, header: Header, payload: memoryview) -> None:
        """What is given must stay as it is until the other side has it."""
        is_first = not self._outgoing
        self._outgoing += (memoryview(header.packed()), payload)
        if is_first:
            with contextlib.suppress(OSError):  # noticed by who moves it
                self.push()

    def push(self) -> None:
        """As much as goes without waiting. Raises `OSError`."""
        queue = self._outgoing
        while queue:
            try:
                sent = self._socket.sendmsg(list(itertools.islice(queue, _AT_ONCE)))
            except BlockingIOError:
                return
            self.is_ready = True
            while queue and sent >= len(queue[0]):
                sent -= len(queue.popleft())
            if sent:
                queue[0] = queue[0][sent:]
                return

    def pull(self) -> Iterator[tuple[Header, memoryview]]:
        """What has come without waiting. Raises `OSError`, or `Refused` at what cannot be one of ours; nothing that
        follows would be."""
        total = 0
        while total < TURN_NBYTES:
            # The next head along with the end of a body.
            rooms = [self._rest] if self._header is None else [self._rest, self._head]
            try:
                found = self._socket.recvmsg_into(rooms)[0]
            except BlockingIOError:
                return
            if not found:
                raise ConnectionResetError("the other side closed the connection")
            total += found
            is_all = found == sum(map(len, rooms))
            while found:
                taken = min(found, len(self._rest))
                self._rest, found = self._rest[taken:], found - taken
                if self._rest:
                    break
                if self._header is None:
                    self._header = Header.read(self._head)
                    if self._header.nbytes < LARGE_NBYTES:
                        raise Refused("length of a payload")
                    self._rest = self._body = self._blocks.get(self._header.nbytes)
                else:
                    yield self._whole()
            if not is_all:
                return

    def _whole(self) -> tuple[Header, memoryview]:
        """Nothing of it is kept here: its memory is free when whoever gets it lets it go."""
        assert self._header is not None
        header, body = self._header, self._body
        self._header, self._body, self._rest = None, memoryview(b""), self._head
        return header, body

    def close(self, poller: zmq.Poller, linger_s: float = 0.0) -> None:
        """linger_s: for what has not been sent."""
        with contextlib.suppress(OSError):
            if linger_s and self.is_ready:
                self._socket.settimeout(linger_s)
                while self._outgoing:
                    self._socket.sendall(self._outgoing.popleft())
        self._outgoing.clear()
        if self._watched:
            poller.unregister(self.fileno())
        self._socket.close()


def _notice_silence(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, HEARTBEAT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, HEARTBEAT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // HEARTBEAT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


def offer(port: int, token: bytes) -> bytes:
    return _OFFER.pack(port, token)
