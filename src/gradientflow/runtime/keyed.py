"""The pump for servers: every message goes as soon as it is ready, the most urgent first.

A server knows each message by name, so ranks need not send in the same order, and none is decided beforehand. What is
ready is handed to the client's thread, which holds all conversations at a time; when its connection has room, the
message goes that the next forward pass needs first. Without a gate nothing is needed before anything else, and messages
go in the plan's order.

The closing conversation, about all messages, is held when they are over.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from gradientflow.compress import Codec, Conversation, Parcel
from gradientflow.exchange import Exchange
from gradientflow.exchange.server.client import Errand
from gradientflow.exchange.server.servers import Servers
from gradientflow.plan import Plan
from gradientflow.trace import Recorder, Span


class KeyedPump:
    """Carries messages through the exchange's servers, encoded by `codec`. As `Pump`, for those who use it."""

    def __init__(self, exchange: Exchange, servers: Servers, codec: Codec, recorder: Recorder) -> None:
        self._exchange, self._servers, self._codec, self._recorder = exchange, servers, codec, recorder
        self._step = self._seq = self._epoch = 0
        self._parcels: Sequence[Parcel] = ()
        self._closing: Callable[[], Conversation] | None = None
        self._labels: list[str] = []
        self._urgencies: list[int] = []
        self._nbytes = 0  # of a piece
        self._homes: list[tuple[int, ...]] = []
        # - Changed by several threads
        self._changed = threading.Condition()
        self._ready_s: list[float] = []
        self._done: set[int] = set()
        self._error: BaseException | None = None

    def load(self, plan: Plan, parcels: Sequence[Parcel], closing: Callable[[], Conversation] | None = None) -> None:
        """Take a new plan and its messages; everything that was under way is over."""
        self._parcels, self._closing = parcels, closing
        self._labels = [message.label for message in plan.messages]
        self._urgencies = urgencies(plan)
        self._nbytes, homes = self._servers.place([parcel.values for parcel in parcels])
        self._homes = [home or (0,) for home in homes]
        self._epoch = self._servers.next_epoch()
        self._ready_s = [0.0] * len(parcels)
        self._done = set(range(len(parcels) + 1))

    def begin(self, step: int) -> None:
        with self._changed:
            assert len(self._done) == len(self._parcels) + 1, "the last step is not over"
            self._step = step
            self._seq += 1  # not the step, which may be set back
            self._done = set() if self._closing else {len(self._parcels)}

    def ready(self, message: int, *, wake: bool = True) -> None:
        """The message's gradients are written."""
        self._ready_s[message] = self._recorder.clock()
        parcel = self._parcels[message]
        if not parcel.values:
            self._over(message, 0, None)
            return
        self._hold(message, self._codec.converse(parcel), self._urgencies[message], self._homes[message])

    def finish(self, remaining: Sequence[int]) -> None:
        self.launch(remaining)
        self._wait(range(len(self._parcels) + 1))

    def launch(self, remaining: Sequence[int]) -> None:
        for message in remaining:
            self.ready(message)

    def wait(self, messages: Sequence[int]) -> None:
        self._wait(messages)

    def wait_for_closing(self) -> None:
        self._wait([len(self._parcels)])

    @property
    def idle_s(self) -> float:
        """No message stands before another here."""
        return 0.0

    def wire_nbytes(self) -> int:
        """The most that conversations hold beside the pool, all messages being under way: what they say of themselves,
        and results as they arrived."""
        world = self._exchange.world
        held = [self._codec.traffic(parcel, world) for parcel in self._parcels if parcel.values]
        return sum(traffic.scratch_nbytes + traffic.nbytes for traffic in held)

    def close(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _hold(self, number: int, conversation: Conversation, urgency: int, home: Sequence[int]) -> None:
        ended = functools.partial(self._over, number)
        self._servers.hold(Errand(conversation, self._epoch, number, self._seq, urgency, home, self._nbytes, ended))

    def _over(self, number: int, nbytes: int, error: BaseException | None) -> None:
        closes = False
        with self._changed:
            self._done.add(number)
            self._error = self._error or error
            if self._closing and len(self._done) == len(self._parcels) and number < len(self._parcels):
                closes = error is None
            self._changed.notify_all()
        if error is None and number < len(self._parcels) and self._parcels[number].values:
            now_s = self._recorder.clock()
            details = {"message": number, "nbytes": nbytes}
            span = Span("message", self._labels[number], "servers", self._ready_s[number], now_s, self._step, details)
            self._recorder.add(span)
        if closes:
            assert self._closing is not None
            self._hold(len(self._parcels), self._closing(), -1, self._homes[0] if self._homes else (0,))

    def _wait(self, messages: Sequence[int]) -> None:
        numbers = set(messages)
        if numbers <= self._done and self._error is None:
            return

        def done(patience_s: float) -> bool:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or numbers <= self._done, patience_s)
                if self._error is not None:
                    raise self._error
                return numbers <= self._done

        missing = sorted(numbers - self._done)
        first = self._labels[missing[0]] if missing and missing[0] < len(self._labels) else "norms"
        detail = f"step {self._step}, {len(missing)} messages through servers, the first of them {first}"
        self._exchange.wait_until(done, self._step + 1, detail)


def urgencies(plan: Plan) -> list[int]:
    """Of each message: when forward needs it, if a gate lets it wait; else its place in the plan."""
    if not plan.stages:
        return list(range(len(plan.messages)))
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage}
    return [min(stage_of[piece.tensor] for piece in message.slices) for message in plan.messages]
