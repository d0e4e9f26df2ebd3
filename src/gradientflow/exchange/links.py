"""Connections of our own between ranks: plain TCP, one for each lane and pair that needs one.

Not Gloo's send and receive, because of what those are like (torch 2.13, measured). A receive cannot be asked whether it
is done nor be given up, and a wait for it that runs out breaks the group, so a rank that waits in vain could not say
so before the deadline; and each hop goes through two threads, 82 us one way on a loopback where a plain socket takes 7.
Here a wait ends when we want it to, and once a connection is closed nobody writes into our memory any more.

Nothing is framed: all ranks know from the pattern which bytes follow which. A connection counts only if it begins with
the token that its listener told the others through the store, so that jobs do not meet by accident; it is no secret
from whoever reads the store.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from gradientflow.documents import Record
from gradientflow.errors import DeadlineError, TrainingError
from gradientflow.exchange.callers import Callers
from gradientflow.exchange.control import Control
from gradientflow.exchange.health import LOOK_S
from gradientflow.exchange.reach import family_of

#: Try again to reach a rank that has not answered for so long.
TRY_S = 5.0
#: Wake up for no less, while more than that is to come.
GULP_NBYTES = 512 * 1024
_HELLO = struct.Struct("<16sII")
_INTERFACE = "set GLOO_SOCKET_IFNAME to the interface that leads to the other machines"


class Unreachable(DeadlineError):
    """A rank that lives, and that connections of our own do not lead to."""


class Endpoint(Record):
    """Where a rank listens, and what to say there."""

    address: str
    port: int
    token: str
    #: Why it cannot listen there.
    trouble: str = ""


class Wire:
    """A connection that never blocks: what is to be sent and what is expected, each first in, first out.

    name: of the rank at its other end, as the whole job calls it.
    """

    def __init__(self, connection: socket.socket, name: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._name = connection, name
        self._outgoing: deque[memoryview] = deque()
        self._expected: deque[memoryview] = deque()
        self._lowest = 1
        #: How many have been handed to the system, and how many have arrived.
        self.num_sent = self.num_received = 0
        #: How many there will be.
        self.num_to_send = self.num_to_receive = 0

    def send(self, piece: memoryview) -> int:
        """Begin to send; done once `num_sent` has reached the number that is returned."""
        self._outgoing.append(piece)
        self.num_to_send += 1
        if len(self._outgoing) == 1:
            self._push()
        return self.num_to_send

    def receive(self, piece: memoryview) -> int:
        """The next bytes go there; done once `num_received` has reached the number that is returned."""
        self._expected.append(piece)
        self.num_to_receive += 1
        return self.num_to_receive

    def move(self) -> None:
        """As much as goes without waiting."""
        self._push()
        self._pull()

    @property
    def interest(self) -> int:
        """What to ask `poll` for; 0 if nothing is left to do."""
        if self._expected:
            lowest = min(len(self._expected[0]), GULP_NBYTES)
            if lowest != self._lowest:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
                self._lowest = lowest
        return (select.POLLIN if self._expected else 0) | (select.POLLOUT if self._outgoing else 0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def abandon(self) -> None:
        """End it under the hands of a thread that may be using it: the number stays taken, so that no new connection
        can be mistaken for this one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # What was handed over and not read by the other side is still delivered.
        self._socket.close()

    def _push(self) -> None:
        queue = self._outgoing
        while queue:
            piece = queue[0]
            try:
                sent = self._socket.send(piece)
            except BlockingIOError:
                return
            if sent < len(piece):
                queue[0] = piece[sent:]
            else:
                queue.popleft()
                self.num_sent += 1

    def _pull(self) -> None:
        queue = self._expected
        while queue:
            piece = queue[0]
            try:
                found = self._socket.recv_into(piece)
            except BlockingIOError:
                return
            if not found:
                raise ConnectionResetError(f"rank {self._name} closed the connection")
            if found < len(piece):
                queue[0] = piece[found:]
            else:
                queue.popleft()
                self.num_received += 1


def wait(wires: Iterable[Wire], done: Callable[[], bool], look: Callable[[], None], look_s: float) -> None:
    """Move bytes until `done`; about every `look_s` seconds `look`, which may raise."""
    for wire in wires:
        wire.move()
    look_at_s = time.monotonic() + look_s
    while not done():
        by_number = {wire.fileno(): wire for wire in wires}
        poll = select.poll()
        for number, wire in by_number.items():
            if interest := wire.interest:
                poll.register(number, interest)
        for number, _ in poll.poll(1e3 * look_s):
            by_number[number].move()
        if time.monotonic() > look_at_s:
            look()
            look_at_s = time.monotonic() + look_s


class Links:
    """This rank's connections. Constructing it is a collective call, and so is `connect`."""

    def __init__(self, address: str, control: Control, rank: int, deadline_s: float) -> None:
        self._control, self._rank, self._deadline_s = control, rank, deadline_s
        self._wires: dict[tuple[int, int], Wire] = {}
        self._name = control.members[rank]
        self._token = secrets.token_bytes(16)
        own = Endpoint(address=address, port=0, token=self._token.hex())
        try:
            self._server = socket.create_server((address, 0), family=family_of(address), backlog=1024)
            own = own.model_copy(update={"port": self._server.getsockname()[1]})
        except OSError as error:
            self._server = socket.socket()
            own = own.model_copy(update={"trouble": str(error)})
        try:
            texts = control.gather(own.model_dump_json(), "learn the other ranks' addresses")
            self._endpoints = [Endpoint.model_validate_json(text) for text in texts]
        except BaseException:
            self._server.close()
            raise

    @classmethod
    def none(cls) -> Links:
        """Connected to nobody."""
        found = cls.__new__(cls)
        found._wires = {}
        return found

    @property
    def addresses(self) -> list[str]:
        """Of all ranks."""
        return [endpoint.address for endpoint in self._endpoints]

    def connect(self, peers: Collection[int], num_lanes: int) -> None:
        """Have connections with `peers`, who name this rank as well."""
        try:
            with self._server:
                if self._endpoints[self._rank].trouble:  # of this rank alone: others may go on without it
                    raise TrainingError(self._why_not(self._rank))
                self._check_that_all_listen()
                self._meet(peers, num_lanes)
                # Before that, others may still be calling.
                self._control.gather("", "connect to the other ranks")
        except BaseException:
            self.close()
            raise

    def try_to_connect(self, peers: Collection[int], num_lanes: int) -> str:
        """The same on all ranks: nothing if all have their connections; else why not, and nobody has any."""
        own = ""
        try:
            with self._server:
                try:
                    self._check_that_all_listen()
                    self._meet(peers, num_lanes)
                except (Unreachable, OSError) as error:
                    own = str(error) or type(error).__name__
                told = self._control.gather(own, "connect to the other ranks")
        except BaseException:
            self.close()
            raise
        found = next(filter(None, told), "")
        if found:
            self.close()
            self._wires.clear()
        return found

    def _check_that_all_listen(self) -> None:
        for peer, endpoint in enumerate(self._endpoints):
            if endpoint.trouble:
                raise Unreachable(self._why_not(peer), (self._control.members[peer],))

    def _why_not(self, peer: int) -> str:
        there = self._endpoints[peer]
        return f"rank {self._control.members[peer]} cannot listen at {there.address} ({there.trouble}): {_INTERFACE}"

    def _meet(self, peers: Collection[int], num_lanes: int) -> None:
        for peer in sorted(peer for peer in peers if peer > self._rank):
            self._call(peer, num_lanes)
        self._answer_calls({peer for peer in peers if peer < self._rank}, num_lanes)

    def wire(self, lane: int, peer: int) -> Wire:
        return self._wires[lane, peer]

    def abandon(self) -> None:
        """Nobody reads or writes any more; a thread that waits here is woken."""
        for wire in self._wires.values():
            wire.abandon()

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()

    def _call(self, peer: int, num_lanes: int) -> None:
        there, name = self._endpoints[peer], self._control.members[peer]
        for lane in range(num_lanes):
            try:
                with self._control.waiting_to(f"reach rank {name} at {there.address}") as look:
                    connection = _connection(there, self._deadline_s, look)
                self._wires[lane, peer] = Wire(connection, name)
                # Nothing is in its way yet: so few bytes go at once.
                connection.sendall(_HELLO.pack(bytes.fromhex(there.token), self._rank, lane))
            except OSError as error:
                raise Unreachable(
                    f"rank {self._name} cannot reach rank {name} at {there.address} ({error}): {_INTERFACE}", (name,)
                ) from error

    def _answer_calls(self, peers: set[int], num_lanes: int) -> None:
        missing = {(lane, peer) for peer in peers for lane in range(num_lanes)}
        end_s = time.monotonic() + self._deadline_s

        def is_missing(words: bytes) -> bool:
            token, peer, lane = _HELLO.unpack(words)
            return token == self._token and (lane, peer) in missing

        with (
            Callers(self._server, _HELLO.size, is_missing) as callers,
            self._control.waiting_to("be reached by the other ranks") as look,
        ):
            while missing:
                found = callers.next_within(min(LOOK_S, max(0.0, end_s - time.monotonic())))
                if found is not None:
                    connection, (_, peer, lane) = found[0], _HELLO.unpack(found[1])
                    missing.remove((lane, peer))
                    self._wires[lane, peer] = Wire(connection, self._control.members[peer])
                elif time.monotonic() >= end_s:
                    late = tuple(sorted({self._control.members[peer] for _, peer in missing}))
                    raise Unreachable(
                        f"rank {self._name} waited {self._deadline_s:g} s for a connection from rank "
                        f"{', '.join(map(str, late))}",
                        late,
                    )
                else:
                    look()


def _connection(there: Endpoint, deadline_s: float, look: Callable[[], None]) -> socket.socket:
    end_s = time.monotonic() + deadline_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            return socket.create_connection((there.address, there.port), timeout=max(0.1, min(TRY_S, left_s)))
        except TimeoutError:
            if left_s <= TRY_S:
                raise
            look()
