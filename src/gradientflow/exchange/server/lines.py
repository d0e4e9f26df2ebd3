"""A worker's connections to servers, one for each slot, kept up: to whoever takes a lost server's place, too."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import zmq
import zmq.utils.monitor

from gradientflow.errors import UsageError
from gradientflow.exchange.server.blocks import Blocks
from gradientflow.exchange.server.channel import LARGE_NBYTES, Channel
from gradientflow.exchange.server.keys import Invitation, KeyFiles, open_for
from gradientflow.exchange.server.service import HANDSHAKE_FAILED, NOW, bytes_of, prepare, send
from gradientflow.exchange.server.wire import Header, Kind

#: How often the store is asked who has taken a lost server's place.
ASK_S = 0.2
#: A lost server that nobody has replaced by then: another one takes its work over.
TAKEOVER_S = 10.0
MOST_FAILED = 5
#: A server that has had nothing to say for so long may not be the one that the others found in its place. Longer than
#: anybody may be cut off: to ask the store stops this thread until there is an answer.
STALLED_S = 30.0
#: Messages of one server at a time; others may have something too.
_AT_ONCE = 16


class Directory(Protocol):
    """Where servers are to be found. Slots are numbered; who serves one may change."""

    def __len__(self) -> int: ...

    def look_up(self, slot: int) -> Invitation: ...

    def take_over(self, slot: int, lost: Invitation, by: Invitation) -> None:
        """Unless there is somebody else in its place by now."""


class Listener(Protocol):
    def connected(self, slot: int) -> None:
        """To a server that may know nothing: say who this is."""

    def awaits(self, slot: int) -> bool:
        """Whether something is to come from there."""

    def heard(self, slot: int, header: Header, payload: memoryview) -> None:
        """The payload's memory is the listener's, for as long as it refers to it."""


class _Line:
    def __init__(self) -> None:
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        #: [Note: two ways] in channel.py.
        self.channel: Channel | None = None
        self.invitation: Invitation | None = None
        self.is_up = self.was_up = False
        self.num_failed = 0  # handshakes
        self.lost_since_s: float | None = time.monotonic()
        #: When it last said something of ours, or was looked for.
        self.heard_s = time.monotonic()
        self.is_doubtful = False


class Lines:
    """Everything happens in the thread that calls `open` and `turn`. Meanwhile libzmq's own sends and receives.

    space: of slot 0; one more for each slot, since a server may have the work of several.
    takeover_s: after which this worker finds somebody for a lost server's work; inf: it is not the one to do so.
    """

    def __init__(
        self,
        directory: Directory,
        slots: Sequence[int],
        space: int,
        files: KeyFiles | None,
        listener: Listener,
        takeover_s: float = TAKEOVER_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._directory, self._space, self._files, self._listener = directory, space, files, listener
        self._takeover_s, self._stalled_s = takeover_s, stalled_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._blocks = Blocks()
        self._lines = {slot: _Line() for slot in slots}
        self._asked_s = 0.0
        #: Servers that were replaced.
        self.num_replaced = 0

    def __iter__(self) -> Iterator[_Line]:
        return iter(self._lines.values())

    def open(self) -> None:
        for slot in self._lines:
            self._connect(slot, self._directory.look_up(slot))

    def ring_at(self, bell: int) -> None:
        """A turn ends when there is something to read in this file, too."""
        self._poller.register(bell, zmq.POLLIN)

    def turn(self, patience_s: float) -> None:
        """Hear what has come, or comes within so many seconds."""
        for line in self._lines.values():
            if line.channel is not None:
                line.channel.watch(self._poller)
        ready = dict(self._poller.poll(max(0, math.ceil(1e3 * patience_s))))
        for slot, line in self._lines.items():
            if line.socket in ready:
                self._receive(slot, line)
            if line.monitor in ready:
                self._notice(slot, line)
            if line.channel is not None and line.channel.fileno() in ready:
                self._move(slot, line, line.channel)
        self._look_after_servers()

    def has_room(self, slot: int) -> bool:
        """Whether what is large goes at once, or the server's receipts say when it may."""
        channel = self._lines[slot].channel
        return channel is None or not channel.is_ready or channel.has_room

    def say(self, slot: int, header: Header, payload: torch.Tensor | memoryview | bytes | None = None) -> bool:
        """What is large is not copied, and must stay as it is. True if the server will not say that it has come."""
        line = self._lines[slot]
        if line.socket is None:
            return False
        header = header._replace(space=self._space + slot)
        if line.channel is not None and line.channel.is_ready and header.nbytes >= LARGE_NBYTES:
            assert payload is not None
            line.channel.send(header, bytes_of(payload) if isinstance(payload, torch.Tensor) else memoryview(payload))
            return True
        # An error means that the connection is lost, which is noticed elsewhere.
        with contextlib.suppress(zmq.Again):
            send(line.socket, header, payload)
        return False

    def is_up(self, slot: int) -> bool:
        return self._lines[slot].is_up

    def welcome(self, slot: int) -> None:
        """There is a server, and it knows who this is."""
        line = self._lines[slot]
        self.num_replaced += line.was_up
        line.is_up, line.was_up, line.lost_since_s = True, True, None

    def doubt(self, slot: int) -> None:
        """Others may have found another server in its place: the directory is asked."""
        self._lines[slot].is_doubtful = True

    @property
    def lost(self) -> list[str]:
        """Servers that are looked for, for people."""
        now_s = time.monotonic()
        return [
            f"server {slot} at {line.invitation.endpoint if line.invitation else '?'} is lost for "
            f"{now_s - line.lost_since_s:.0f} s"
            for slot, line in self._lines.items()
            if line.lost_since_s is not None
        ]

    def close(self, linger_s: float = 1.0) -> None:
        """Say good-bye."""
        for slot, line in self._lines.items():
            if line.is_up:
                self.say(slot, Header(Kind.BYE, 0))
            self._close_channel(line, linger_s)
            if line.socket is not None:
                line.socket.linger = int(1e3 * linger_s)
                line.socket.disable_monitor()
                line.socket.close()
                line.socket = None
        self._context.destroy(linger=None)

    def abandon(self) -> None:
        self._context.destroy(linger=0)
        for line in self._lines.values():
            self._close_channel(line)
            line.socket, line.is_up = None, False

    def _receive(self, slot: int, line: _Line) -> None:
        for _ in range(_AT_ONCE):
            if line.socket is None:
                return
            try:
                frames = line.socket.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            # A server was chosen by its key; what it says is in order or the job is at an end.
            payload = frames[1].buffer if len(frames) == 2 else memoryview(b"")
            header = Header.read(frames[0].buffer, len(payload))
            if header.space != self._space + slot:  # a ping
                continue
            line.heard_s = time.monotonic()
            if header.kind is Kind.CHANNEL:
                assert line.invitation is not None
                self._close_channel(line)
                with contextlib.suppress(OSError):  # then there is libzmq's way
                    line.channel = Channel.call(line.invitation.address, payload, self._blocks)
            else:
                self._listener.heard(slot, header, payload)

    def _move(self, slot: int, line: _Line, channel: Channel) -> None:
        try:
            channel.push()
            for header, payload in channel.pull():
                line.heard_s = time.monotonic()
                self._listener.heard(slot, header, payload)
        except OSError:
            if channel.is_ready:
                self._lose(slot, line)
            else:  # there never was one
                self._close_channel(line)

    def _close_channel(self, line: _Line, linger_s: float = 0.0) -> None:
        if line.channel is not None:
            line.channel.close(self._poller, linger_s)
            line.channel = None

    def _connect(self, slot: int, invitation: Invitation) -> None:
        """Anew; what the old connection had not delivered is forgotten."""
        line = self._lines[slot]
        self._disconnect(line)
        line.invitation = invitation
        line.socket = self._context.socket(zmq.DEALER)
        prepare(line.socket)
        line.socket.ipv6 = ":" in invitation.address
        line.socket.reconnect_ivl = 50
        line.socket.reconnect_ivl_max = 1000
        open_for(line.socket, invitation, self._files)
        line.monitor = line.socket.get_monitor_socket()
        line.socket.connect(invitation.endpoint)
        self._poller.register(line.socket, zmq.POLLIN)
        self._poller.register(line.monitor, zmq.POLLIN)

    def _disconnect(self, line: _Line) -> None:
        if line.socket is None or line.monitor is None:
            return
        self._close_channel(line)
        self._poller.unregister(line.socket)
        self._poller.unregister(line.monitor)
        line.socket.disable_monitor()
        line.socket.close(linger=0)
        line.monitor.close(linger=0)
        line.socket = line.monitor = None
        line.is_up = False

    def _notice(self, slot: int, line: _Line) -> None:
        assert line.monitor is not None and line.invitation is not None
        event = zmq.utils.monitor.recv_monitor_message(line.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            line.num_failed = 0
            self._listener.connected(slot)
        elif event in HANDSHAKE_FAILED:
            line.num_failed += 1
            # A server that dies in the middle of it looks the same, but not again and again; and a lost one's port may
            # be somebody else's by now.
            failed = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or line.num_failed == MOST_FAILED
            if failed and not line.was_up:
                raise UsageError(
                    f"server {slot} at {line.invitation.endpoint} and this worker do not have each other's keys: give "
                    "GRADIENTFLOW_KEYS the directory that the server was given"
                )
        elif event == zmq.EVENT_DISCONNECTED:
            self._lose(slot, line)

    def _lose(self, slot: int, line: _Line) -> None:
        # Not left to libzmq: what it would send to whoever comes next is not what that one needs.
        assert line.invitation is not None
        line.lost_since_s = line.lost_since_s or time.monotonic()
        self._connect(slot, line.invitation)

    def _look_after_servers(self) -> None:
        now_s = time.monotonic()
        if now_s - self._asked_s < ASK_S:
            return
        self._asked_s = now_s
        try:
            for slot, line in self._lines.items():
                if line.lost_since_s is not None or self._is_stalled(slot, line, now_s):
                    self._look_for(slot, line, now_s)
        except RuntimeError:  # the store is gone, and whoever had it will be missed
            self._asked_s = math.inf

    def _is_stalled(self, slot: int, line: _Line, now_s: float) -> bool:
        if now_s - line.heard_s < self._stalled_s and not line.is_doubtful:
            return False
        is_doubtful, line.heard_s, line.is_doubtful = line.is_doubtful, now_s, False
        return is_doubtful or self._listener.awaits(slot)

    def _look_for(self, slot: int, line: _Line, now_s: float) -> None:
        """All workers are to be where the directory says, also those who found somebody else in between."""
        assert line.invitation is not None
        there = self._directory.look_up(slot)
        if there != line.invitation:
            line.lost_since_s = line.lost_since_s or now_s
            self._connect(slot, there)
        elif line.lost_since_s is not None and now_s - line.lost_since_s > self._takeover_s:
            alive = [other.invitation for other in self._lines.values() if other.is_up and other.invitation]
            if alive:
                self._directory.take_over(slot, line.invitation, alive[slot % len(alive)])
