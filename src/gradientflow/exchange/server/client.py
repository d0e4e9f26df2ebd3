"""A worker's side: one thread that holds conversations with the group through servers.

A conversation's question is cut into pieces, each piece goes to a server and comes back as a sum; when all of a
question's pieces are back, the conversation goes on. Any number of conversations are under way at a time, and what is
sent next is decided when there is room for it: the piece of the most urgent message that is ready.

[Note: a lost server] A server keeps nothing that workers could not tell its successor. A worker's share of a sum
stays where it is, in the gradients, until the sum overwrites it; and the sum, as it arrived, is kept until the next sum
of the same key arrives, since that is made of shares of all workers, who gave them because they had this one. So when a
server is lost, each worker tells the new one which sums it holds (`pack_hello`) and pushes its shares of those that it
lacks. If anybody holds a sum that another lacks, the server asks for it (WANT); it is not made again, so all workers
have the same bits, and every share counts once. Any number of servers may be lost, at once or while others are being
replaced. A worker that is lost takes its gradients with it, and with synchronous training that ends the job.

A relay, what one worker has for others, is under way until all of them have it; so it is sent once more, too, and who
has it already says so again.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradientflow.compress import Answer, Conversation, Gather, Question, Sum, Swap
from gradientflow.errors import DisagreementError, GradientFlowError, PeerError, TrainingError
from gradientflow.exchange.server.keys import KeyFiles
from gradientflow.exchange.server.lines import ASK_S, STALLED_S, TAKEOVER_S, Directory, Lines
from gradientflow.exchange.server.placement import cut
from gradientflow.exchange.server.window import RECEIPT_S, Receipts, Window, abreast
from gradientflow.exchange.server.wire import EVERYONE, Header, Key, Kind, Name, pack_hello, pack_names, read_names

#: Pieces of one pair of ranks in one question. They are numbered above those of any sum: a message's next question may
#: be of the other kind, and servers know a piece by its number.
_MAX_PIECES = 4096
_FIRST_RELAY = 2**32


@dataclass(frozen=True, slots=True)
class Echo:
    """Asks one server to say that it has these values, and nothing else."""

    values: torch.Tensor
    slot: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class Errand(NamedTuple):
    """A conversation to be held.

    message, seq, epoch: together they name it, the same on all ranks; for one message and epoch, seq goes up.
    home: servers for its pieces, in turn.
    nbytes: of a piece, at most.
    """

    conversation: Conversation | Generator[Echo, Answer, None]
    epoch: int
    message: int
    seq: int
    urgency: int
    home: Sequence[int]
    nbytes: int
    #: Called on the client's thread: the bytes that were asked about, or what went wrong.
    ended: Callable[[int, BaseException | None], None]


@dataclass(slots=True)
class _Piece:
    key: Key
    seq: int
    slot: int
    #: Whether this rank sends it; if not, it is on its way here.
    outgoing: bool
    #: Flat: what is sent, or where what arrives is put, or both.
    values: torch.Tensor
    talk: _Talk
    kind: Kind = Kind.PUSH
    rank: int = EVERYONE

    @property
    def name(self) -> Name:
        return Name(self.key, self.seq)

    @property
    def header(self) -> Header:
        urgency = self.talk.errand.urgency
        dtype = self.values.dtype
        return Header(self.kind, 0, self.key, self.seq, urgency, self.rank, dtype, self.values.nbytes)


@dataclass(slots=True)
class _Talk:
    errand: Errand
    round: int = -1
    nbytes: int = 0
    num_open: int = 0
    answer: Answer = None


@dataclass(slots=True)
class _Held:
    seq: int
    dtype: torch.dtype
    payload: memoryview


class _Server:
    """What is under way with it."""

    def __init__(self) -> None:
        self.window: Window[Name, _Piece] = Window()
        #: For results.
        self.got: Receipts[Name] = Receipts()
        #: Sums as they arrived. [Note: a lost server]
        self.held: dict[Key, _Held] = {}


class Client:
    """Of rank `rank`. Constructing it connects to nobody; the thread does."""

    def __init__(
        self,
        directory: Directory,
        rank: int,
        world: int,
        space: int,
        files: KeyFiles | None = None,
        names: Sequence[int] = (),
    ) -> None:
        self._rank, self._world = rank, world
        #: What the whole job calls the ranks.
        self._names = names or range(world)
        slots = range(len(directory))
        self._servers = [_Server() for _ in slots]
        # Rank 0 finds somebody for a lost server's work.
        patience = (TAKEOVER_S if rank == 0 else math.inf, STALLED_S)
        self._lines = Lines(directory, slots, space, files, self, *patience)
        self._pieces: dict[Name, _Piece] = {}
        #: Relays that came before their question was asked here.
        self._early: dict[Name, memoryview] = {}
        #: The newest relay of each key that was used.
        self._used: dict[Key, int] = {}
        self._epoch = 0
        self._orders: deque[Errand] = deque()
        self._under_way: dict[int, _Talk] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._bell_lock = threading.Lock()
        self._closing = False
        self.error: BaseException | None = None
        self._lines.ring_at(self._bell)
        self._thread = threading.Thread(target=self._work, name="gradientflow-client", daemon=True)
        self._thread.start()

    def hold(self, errand: Errand) -> None:
        """Have a conversation held, from any thread."""
        self._orders.append(errand)
        self._ring()
        if self.error is not None:  # nobody may be there any more
            self._end_all(self.error)

    def weigh(self, shares: Sequence[float]) -> None:
        """What part of a model each server is to have."""
        for server, share in zip(self._servers, shares, strict=True):
            server.window.weight = share * len(shares) or 1.0

    def close(self) -> None:
        """Say good-bye."""
        self._closing = True
        self._ring()
        self._thread.join(timeout=5.0)

    def abandon(self) -> None:
        """At once. Nothing is written to anybody's memory any more."""
        self.error = self.error or TrainingError("this exchange was given up")
        self.close()

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _unhang_bell(self) -> None:
        """Whoever rings from now on must not ring at a file that has its number by then."""
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1

    # - The thread

    def _work(self) -> None:
        try:
            with torch.no_grad():
                self._lines.open()
                while not self._closing:
                    self._turn()
        except GradientFlowError as error:
            self.error = error
        except BaseException as error:
            self.error = TrainingError(f"talking to servers failed: {error}")
            self.error.__cause__ = error
        finally:
            self._leave()
            self.error = self.error or TrainingError("this exchange was closed")
            self._end_all(self.error)

    def _turn(self) -> None:
        self._lines.turn(RECEIPT_S if any(server.got for server in self._servers) else ASK_S)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._orders:
            talk = _Talk(self._orders.popleft())
            self._under_way[id(talk)] = talk
            if talk.errand.epoch > self._epoch:
                self._epoch = talk.errand.epoch
                self._used = {key: seq for key, seq in self._used.items() if not 0 < key.epoch < self._epoch}
            self._go_on(talk)
        there = {slot: server for slot, server in enumerate(self._servers) if self._lines.is_up(slot)}
        windows = {slot: server.window for slot, server in there.items()}
        for slot, piece in abreast(windows, self._lines.has_room):
            # If it is not, somebody else had the sum of it, which is in its place by now.
            is_wanted = self._pieces.get(piece.name) is piece
            if not is_wanted or self._lines.say(slot, piece.header, piece.values):
                windows[slot].arrived(piece.name)
        for slot, server in there.items():
            if names := server.got.due(time.monotonic()):
                words = pack_names(names)
                self._lines.say(slot, Header(Kind.GOT, 0, nbytes=len(words)), words)

    # - Conversations

    def _go_on(self, talk: _Talk) -> None:
        """To its next question, or to its end."""
        try:
            while True:
                question = talk.errand.conversation.send(talk.answer)
                talk.round += 1
                talk.nbytes += question.nbytes
                pieces = self._ask(talk, question)
                if pieces:
                    break
        except StopIteration:
            self._end(talk, None)
            return
        except BaseException as error:
            self._end(talk, error)
            raise
        talk.num_open = len(pieces)
        for piece in pieces:
            name = piece.name
            self._pieces[name] = piece
            if piece.outgoing:
                self._servers[piece.slot].window.add(name, talk.errand.urgency, piece.values.nbytes, piece)
        for piece in pieces:
            if not piece.outgoing and (payload := self._early.pop(piece.name, None)) is not None:
                self._arrive(piece, payload)

    def _end(self, talk: _Talk, error: BaseException | None) -> None:
        if self._under_way.pop(id(talk), None) is not None:
            talk.errand.ended(talk.nbytes, error)

    def _end_all(self, error: BaseException) -> None:
        for talk in list(self._under_way.values()):
            self._end(talk, error)
        while self._orders:
            with contextlib.suppress(IndexError):
                self._orders.popleft().ended(0, error)

    def _ask(self, talk: _Talk, question: Question | Echo) -> list[_Piece]:
        """The question's pieces; the answer is in `talk` by the time they are done."""
        if isinstance(question, Echo):
            # Each rank's own: others may ask this server at the same time.
            key = Key(0, talk.errand.message, talk.round, self._rank)
            return [_Piece(key, talk.errand.seq, question.slot, True, question.values, talk, Kind.ECHO)]
        if isinstance(question, Sum):
            talk.answer = None
            return list(self._sum(talk, question))
        if isinstance(question, Gather):
            flat = question.tensor.view(-1)
            into = flat.new_empty((self._world, flat.numel()))
            into[self._rank] = flat
            talk.answer = into.unbind()
            sends = {EVERYONE: flat}
            receives = {rank: into[rank] for rank in range(self._world) if rank != self._rank}
        else:
            assert isinstance(question, Swap)
            places = [question.outgoing[0].new_empty(size) for size in question.incoming]
            places[self._rank].copy_(question.outgoing[self._rank])
            talk.answer = places
            sends = {rank: values for rank, values in enumerate(question.outgoing) if rank != self._rank}
            receives = {rank: values for rank, values in enumerate(places) if rank != self._rank}
        sent = [(self._rank, other, values) for other, values in sends.items()]
        to = EVERYONE if isinstance(question, Gather) else self._rank
        received = [(other, to, values) for other, values in receives.items()]
        return [*self._relays(talk, sent), *self._relays(talk, received)]

    def _sum(self, talk: _Talk, question: Sum) -> Iterator[_Piece]:
        errand, number = talk.errand, 0
        for tensor in question.tensors:
            flat = _as_reals(tensor.view(-1))
            for start, stop in cut(flat.numel(), flat.itemsize, errand.nbytes):
                key = Key(errand.epoch, errand.message, talk.round, number)
                slot = errand.home[number % len(errand.home)]
                yield _Piece(key, errand.seq, slot, True, flat[start:stop], talk)
                number += 1

    def _relays(self, talk: _Talk, moves: Sequence[tuple[int, int, torch.Tensor]]) -> Iterator[_Piece]:
        """From whom, to whom, what."""
        errand = talk.errand
        for source, to, values in moves:
            flat = _as_reals(values)
            if not flat.numel():
                continue
            first = _FIRST_RELAY + (source * (self._world + 1) + 1 + to) * _MAX_PIECES
            for number, (start, stop) in enumerate(cut(flat.numel(), flat.itemsize, errand.nbytes)):
                key = Key(errand.epoch, errand.message, talk.round, first + number)
                slot = errand.home[(source + 1 + to + number) % len(errand.home)]
                outgoing = source == self._rank
                yield _Piece(key, errand.seq, slot, outgoing, flat[start:stop], talk, Kind.RELAY, to)

    def _arrive(self, piece: _Piece, payload: memoryview) -> None:
        """What is for it is there."""
        if len(payload) != piece.values.nbytes:
            raise DisagreementError(
                f"{len(payload)} bytes came for {piece.key} where {piece.values.nbytes} were expected"
            )
        if len(payload):
            piece.values.copy_(torch.frombuffer(payload, dtype=piece.values.dtype))
        if piece.kind is Kind.RELAY:
            self._used[piece.key] = piece.seq
        self._done(piece)

    def _done(self, piece: _Piece) -> None:
        del self._pieces[piece.name]
        talk = piece.talk
        talk.num_open -= 1
        if not talk.num_open:
            self._go_on(talk)

    # - What servers say

    def heard(self, slot: int, header: Header, payload: memoryview) -> None:
        server = self._servers[slot]
        name = Name(header.key, header.seq)
        match header.kind:
            case Kind.WELCOME:
                self._greeted(slot)
            case Kind.TAKEN:
                for taken in read_names(payload):
                    server.window.arrived(taken)
                    piece = self._pieces.get(taken)
                    if piece is not None and piece.kind is Kind.ECHO:
                        self._done(piece)
            case Kind.RESULT:
                self._result(server, header, payload)
            case Kind.PASSED:
                piece = self._pieces.get(name)
                if piece is not None and piece.outgoing:
                    self._done(piece)
            case Kind.WANT:
                held = server.held.get(header.key)
                if held is not None and held.seq == header.seq:
                    said = header._replace(kind=Kind.GIVE, dtype=held.dtype, nbytes=len(held.payload))
                    self._lines.say(slot, said, held.payload)
            case Kind.LOST:
                lost = self._names[header.rank]
                raise PeerError(f"rank {lost} is dead or has left: its connection to server {slot} is closed", (lost,))
            case Kind.REFUSED:
                raise DisagreementError(f"server {slot} refuses: {bytes(payload).decode(errors='replace')}")
            case _:
                pass

    def _result(self, server: _Server, header: Header, payload: memoryview) -> None:
        name = Name(header.key, header.seq)
        piece = self._pieces.get(name)
        # It has it, whatever becomes of it here. Of a relay, somebody waits to hear so.
        server.got.add(name, header.nbytes, time.monotonic(), at_once=header.rank != EVERYONE)
        if header.rank == EVERYONE:
            server.window.arrived(name)
            if piece is None:
                return  # once more
            server.held[header.key] = _Held(header.seq, header.dtype, payload)
            if header.key.epoch > 0:
                for key in [key for key in server.held if 0 < key.epoch < header.key.epoch]:
                    del server.held[key]
        if piece is not None:
            self._arrive(piece, payload)
        elif header.seq > self._used.get(header.key, -1) and not 0 < header.key.epoch < self._epoch:
            self._early[name] = payload

    # - Connections

    def connected(self, slot: int) -> None:
        holdings = [Name(key, held.seq) for key, held in self._servers[slot].held.items()]
        hello = pack_hello(self._world, holdings)
        self._lines.say(slot, Header(Kind.HELLO, 0, rank=self._rank, nbytes=len(hello)), hello)

    def awaits(self, slot: int) -> bool:
        return any(piece.slot == slot for piece in self._pieces.values())

    def _greeted(self, slot: int) -> None:
        """The server knows who this is and what it holds: it gets the rest."""
        self._lines.welcome(slot)
        server = self._servers[slot]
        server.window.clear()
        server.got = Receipts()
        for name, piece in self._pieces.items():
            if piece.slot == slot and piece.outgoing:
                server.window.add(name, piece.talk.errand.urgency, piece.values.nbytes, piece)

    @property
    def lost(self) -> list[str]:
        """Servers that are looked for, for people."""
        return self._lines.lost

    @property
    def num_replaced(self) -> int:
        """Servers that were replaced."""
        return self._lines.num_replaced

    def _leave(self) -> None:
        if self.error is None:
            self._lines.close(linger_s=0.2)
        else:
            self._lines.abandon()
        self._unhang_bell()


def _as_reals(flat: torch.Tensor) -> torch.Tensor:
    """torch needs more of a complex number's address than frames have."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
