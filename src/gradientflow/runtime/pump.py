"""The pump: issues a plan's messages lane by lane, in the plan's order, as they become ready.

A lane is a queue of messages and the right to carry its head. Whoever holds that right carries one
conversation from its first question to its last: the lane's own thread while backward runs, and the
training thread itself once it has nothing else to do. So the last message of a step, the one nobody can
hide, costs no hand-over between threads, and a model that fits in one message never starts a thread. With a
gate, training goes on while messages travel (`launch`) and waits for some of them at a time (`wait`).

Invariant: each lane carries its messages in the order of the plan ([Note: plan order] in plan.py), one at
a time, whatever thread does it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gradientflow.compress import Codec, Conversation, Parcel
from gradientflow.errors import DeadlineError, TrainingError
from gradientflow.exchange import Exchange, drive
from gradientflow.patterns import QUICKEST, gather_of, scatter_of
from gradientflow.plan import NATIVE, Plan
from gradientflow.runtime.streams import Streams
from gradientflow.trace import Recorder, Span


class Pump:
    """Carries messages over `exchange`, encoded by `codec`."""

    def __init__(self, exchange: Exchange, codec: Codec, streams: Streams, recorder: Recorder) -> None:
        self._exchange = exchange
        self._codec = codec
        self._streams = streams
        self._recorder = recorder
        self._step = 0
        self._ready_s: list[float] = []
        self._parcels: Sequence[Parcel] = ()
        self._closing: Callable[[], Conversation] | None = None
        self._labels: list[str] = []
        self._places: list[str] = []
        self._lane_of: list[int] = []
        self._patterns: list[str] = []
        self._parts: list[_Part] = []  # what queues hold
        self._closing_place = -1  # in the first lane's queue
        self._place_of: list[int] = []  # in its lane's queue
        self._lanes = [_Lane(number, self._carry) for number in range(exchange.num_lanes)]

    def load(self, plan: Plan, parcels: Sequence[Parcel], closing: Callable[[], Conversation] | None = None) -> None:
        """Take a new plan and its messages. All lanes must be drained.

        closing: begins a conversation about all of them, when all have been carried; of a decoupled plan, their first
        halves."""
        self._parcels, self._closing = parcels, closing
        self._labels = [message.label for message in plan.messages]
        self._places = [
            f"message {index} ({message.label}) on lane {message.lane}" for index, message in enumerate(plan.messages)
        ]
        self._lane_of = [message.lane for message in plan.messages]
        self._patterns = [message.pattern for message in plan.messages]
        self._ready_s = [0.0] * len(plan.messages)
        # The first parts are numbered as messages are: those become ready, what follows them is.
        self._parts = [_Part(message, pattern) for message, pattern in enumerate(self._patterns)]
        queues: list[list[int]] = [[] for _ in self._lanes]
        for message, _, lane in plan.sequence():
            queues[lane].append(message)
        if plan.gathers:
            self._decouple(plan, queues)
        elif closing:
            self._close_after(queues[:1])
        self._place_of = [0] * len(plan.messages)
        for queue, owner in zip(queues, self._lanes, strict=True):
            for place, number in enumerate(queue):
                if (part := self._parts[number]).message is not None:
                    self._place_of[part.message] = place
            owner.load(queue, len(plan.messages))

    def _decouple(self, plan: Plan, queues: list[list[int]]) -> None:
        self._parts = [part._replace(pattern=scatter_of(part.pattern)) for part in self._parts]
        if self._closing:
            self._close_after(queues)  # who clips waits for norms: nothing is to stand in their way
        for message in plan.gathers:
            queues[self._lane_of[message]].append(len(self._parts))
            self._parts.append(_Part(message, gather_of(self._patterns[message])))

    def _close_after(self, queues: Sequence[list[int]]) -> None:
        """What is in the queues now. The first lane converses, others wait for it."""
        self._closing_place = len(queues[0])
        for queue in queues:
            queue.append(len(self._parts))
        self._parts.append(_Part(None, QUICKEST if QUICKEST in self._exchange.patterns else NATIVE))

    def begin(self, step: int) -> None:
        """A new step: nothing is ready, every lane stands before its first message."""
        self._step = step
        for lane in self._lanes:
            lane.rewind()

    def ready(self, message: int, *, wake: bool = True) -> None:
        """The message's gradients are written. `wake=False` when the caller is about to `drain` its lane."""
        self._ready_s[message] = self._recorder.clock()
        self._streams.mark_ready(message)
        self._lanes[self._lane_of[message]].mark(message, wake)

    def finish(self, remaining: Sequence[int]) -> None:
        """Backward is over and `remaining` are complete too: return when everything has been carried."""
        own = self._lane_of[remaining[-1]] if remaining else 0
        for message in remaining:
            self.ready(message, wake=self._lane_of[message] != own)
        for number in (own, *(lane.number for lane in self._lanes if lane.number != own)):
            self._lanes[number].drain(self._patience_s)
        self._streams.join()

    def launch(self, remaining: Sequence[int]) -> None:
        """Backward is over and `remaining` are complete too: let the lanes carry everything by themselves."""
        for message in remaining:
            self.ready(message)

    def wait(self, messages: Sequence[int]) -> None:
        """Return when these have been carried; raise what went wrong on their lanes."""
        for message in messages:
            self._lanes[self._lane_of[message]].wait(self._place_of[message], self._patience_s)
        self._streams.join()

    def wait_for_closing(self) -> None:
        """Return when the closing conversation is over."""
        self._lanes[0].wait(self._closing_place, self._patience_s)

    @property
    def idle_s(self) -> float:
        """In the step that was carried last, how long lanes stood before a message that was not ready although others
        behind it were; the most of any lane."""
        return max(lane.idle_s for lane in self._lanes)

    @property
    def _patience_s(self) -> float:
        # The exchange holds every question to its deadline; this is for a lane that hangs anywhere else.
        return 2 * self._exchange.deadline_s

    def wire_nbytes(self) -> int:
        """The most that conversations hold beside the pool: each lane its largest message."""
        largest = [0] * len(self._lanes)
        patterns = [self._parts[message].pattern for message in range(len(self._parcels))]
        for lane, parcel, pattern in zip(self._lane_of, self._parcels, patterns, strict=True):
            if parcel.values:
                traffic = self._codec.traffic(parcel, self._exchange.world)
                beside = self._exchange.scratch_nbytes(pattern, traffic.nbytes)
                largest[lane] = max(largest[lane], traffic.scratch_nbytes + beside)
        return sum(largest)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        for lane in self._lanes:  # one may wait for another
            lane.join()

    def _carry(self, number: int, lane: int) -> None:
        message, pattern = self._parts[number]
        if message is None:
            if lane == 0:
                self._close(lane, pattern)
            else:
                self.wait_for_closing()
            return
        start_s = self._recorder.clock()
        parcel, nbytes = self._parcels[message], 0
        with torch.no_grad(), self._streams.carry(message, lane):
            if parcel.values:  # an empty tensor by itself is a message of nothing, on every rank alike
                nbytes = self._drive(self._codec.converse(parcel), lane, self._places[message], pattern)
        details = {"message": message, "nbytes": nbytes, "waited_s": start_s - self._ready_s[message]}
        details["idle_s"] = self._lanes[lane].stood_s
        end_s = self._recorder.clock()
        self._recorder.add(Span("message", self._labels[message], f"lane {lane}", start_s, end_s, self._step, details))

    def _close(self, lane: int, pattern: str) -> None:
        """What it is about has to be there, on other lanes too; those wait for none of this lane's."""
        assert self._closing is not None
        for message, number in enumerate(self._lane_of):
            if number != lane:
                self._lanes[number].wait(self._lanes[number].place_of(message), self._patience_s)
        self._streams.join()
        start_s = self._recorder.clock()
        with torch.no_grad():
            nbytes = self._drive(self._closing(), lane, "norms", pattern)
        end_s = self._recorder.clock()
        self._recorder.add(Span("message", "norms", f"lane {lane}", start_s, end_s, self._step, {"nbytes": nbytes}))

    def _drive(self, conversation: Conversation, lane: int, place: str, pattern: str) -> int:
        where = f"step {self._step}, {place}"
        return drive(self._exchange, conversation, lane, self._step + 1, where, pattern)


class _Part(NamedTuple):
    """What a lane carries at once: a message by a pattern, or one half of it by one half of the pattern. No message:
    the closing conversation, which the first lane carries."""

    message: int | None
    pattern: str


class _Lane:
    """A queue of messages, carried strictly in order by one thread at a time."""

    def __init__(self, number: int, carry: Callable[[int, int], None]) -> None:
        self.number = number
        self._carry = carry
        self._queue: list[int] = []
        self._next = 0
        self._ready: set[int] = set()
        self._num_to_come = 0
        self._busy = False
        self._draining = False  # the training thread is here: it has the right to carry
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # started when there is something to overlap
        self.idle_s = 0.0
        self.stood_s = 0.0  # of it, before the message that was taken last
        self._stuck_since_s = 0.0  # others are ready, the head is not; 0.0: it is not so

    def load(self, queue: list[int], num_to_come: int) -> None:
        """Numbers below `num_to_come` become ready; the others follow those and need nothing else."""
        with self._changed:
            assert not self._busy
            self._queue, self._num_to_come = queue, num_to_come
            self._next = len(queue)

    def rewind(self) -> None:
        with self._changed:
            assert not self._busy and self._next == len(self._queue)
            self._next = 0
            self._ready.clear()
            self.idle_s = self.stood_s = self._stuck_since_s = 0.0

    def mark(self, message: int, wake: bool) -> None:
        with self._changed:
            self._ready.add(message)
            self._note_idleness()
            if wake and self._thread is None:
                name = f"gradientflow-lane-{self.number}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            elif wake and self._may_work() and self._head_is_ready():
                self._changed.notify()

    def drain(self, patience_s: float) -> None:
        """Carry what is left, after the message that the lane's thread is carrying; raise what went wrong."""
        with self._changed:
            self._draining = True
            if not self._changed.wait_for(lambda: not self._busy, patience_s):
                raise DeadlineError(f"lane {self.number} has not moved for {patience_s:g} s")
        try:
            while self._error is None and self._next < len(self._queue):
                with self._changed:
                    assert self._head_is_ready(), "drained before everything was ready"
                    message = self._take()
                self._carry_taken(message)
        finally:
            self._draining = False
        if self._error is not None:
            raise self._error

    def wait(self, place: int, patience_s: float) -> None:
        """Until the message at this place of the queue has been carried. Patience is with the lane, not with what it
        stands before: a backward pass takes as long as it takes."""
        with self._changed:
            stand = self._stand()
            while not self._changed.wait_for(lambda: self._will_not_come() or self._next > place, patience_s):
                before, stand = stand, self._stand()
                if stand == before and (self._busy or self._head_is_ready()):
                    raise DeadlineError(f"lane {self.number} has not moved for {patience_s:g} s")
            if self._error is not None:
                raise self._error
            if self._next <= place:
                raise TrainingError(f"lane {self.number} was closed")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        # A lane stuck in a dead exchange ends with the process; everything else ends now.
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._may_work() and self._head_is_ready()))
                if self._closed:
                    return
                message = self._take()
            self._carry_taken(message)

    def _stand(self) -> tuple[int, bool, bool]:
        return self._next, self._busy, self._head_is_ready()

    def _will_not_come(self) -> bool:
        return self._closed or self._error is not None

    def _may_work(self) -> bool:
        return not self._busy and not self._draining

    def place_of(self, number: int) -> int:
        return self._queue.index(number)

    def _head_is_ready(self) -> bool:
        if self._error is not None or self._next == len(self._queue):
            return False
        head = self._queue[self._next]
        return head in self._ready or head >= self._num_to_come

    def _note_idleness(self) -> None:
        stuck = bool(self._ready) and not self._busy and not self._head_is_ready()
        if stuck and not self._stuck_since_s:
            self._stuck_since_s = time.perf_counter()
        elif not stuck and self._stuck_since_s:
            self.stood_s = time.perf_counter() - self._stuck_since_s
            self.idle_s += self.stood_s
            self._stuck_since_s = 0.0

    def _take(self) -> int:
        self._busy = True
        message = self._queue[self._next]
        self._ready.discard(message)
        return message

    def _carry_taken(self, message: int) -> None:
        error: BaseException | None = None
        try:
            self._carry(message, self.number)
        except BaseException as raised:
            error = raised
        with self._changed:
            self._busy = False
            self._error = error
            self._next += error is None
            self.stood_s = 0.0
            self._note_idleness()
            self._changed.notify_all()  # someone may be draining, others may wait
