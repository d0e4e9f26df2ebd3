"""DDP's communication hooks: a user's function does the exchange of each message.

A hook gets a bucket and returns a future of the flat tensor that is to become the gradients. Hooks run on
the training thread, in the plan's order, as soon as a message and all before it are complete, and their
futures are awaited at the end of backward: what DDP promises to hooks. Several hooks compose: each sees in
`bucket.buffer()` what the one before it gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.futures import Future

from gradientflow.compress import Sum
from gradientflow.errors import DeadlineError, TrainingError
from gradientflow.exchange import Exchange
from gradientflow.plan import Plan
from gradientflow.runtime.pool import Pool
from gradientflow.trace import Recorder, Span

#: (state, bucket) -> future of a flat tensor, with the state bound.
CommHook = Callable[["Bucket"], Future[Any]]


class Bucket:
    """One message, with the methods of `torch.distributed.GradBucket` (which cannot be made in Python)."""

    def __init__(
        self, index: int, is_last: bool, buffer: torch.Tensor, views: list[torch.Tensor], parameters: list[nn.Parameter]
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._views = views
        self._parameters = parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The gradients, one after the other, not divided."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        if buffer.numel() != self._buffer.numel():
            raise TrainingError(f"set_buffer: expected {self._buffer.numel()} elements, found {buffer.numel()}")
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer`, shaped like the parameters."""
        offset, found = 0, []
        for view in self._views:
            piece = self._buffer[offset : offset + view.numel()]
            found.append(piece.as_strided(view.shape, view.stride(), piece.storage_offset()))
            offset += view.numel()
        return found

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)


class HookPump:
    """Does for a flow what `Pump` does, through `hooks`."""

    def __init__(self, exchange: Exchange, hooks: Sequence[CommHook], recorder: Recorder) -> None:
        self._exchange = exchange
        self._hooks = list(hooks)
        self._recorder = recorder
        self._step = 0
        self._ready: set[int] = set()
        self._next = 0
        self._ranges: list[torch.Tensor] = []
        self._labels: list[str] = []
        self._buckets: list[tuple[list[torch.Tensor], list[nn.Parameter]]] = []
        self._started: list[tuple[Future[Any], float]] = []
        self._presence = torch.empty(0)
        #: Calls of hooks that returned.
        self.num_calls = 0

    def load(
        self, plan: Plan, ranges: Sequence[list[torch.Tensor]], pool: Pool, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        assert all(len(pieces) <= 1 for pieces in ranges), "a comm hook's message is one range of whole tensors"
        self._ranges = [pieces[0] if pieces else torch.empty(0) for pieces in ranges]
        self._labels = [message.label for message in plan.messages]
        self._presence = pool.presence
        self._buckets = []
        for message in plan.messages:
            names = [piece.tensor for piece in message.slices]
            self._buckets.append(([pool.views[name] for name in names], [parameters[name] for name in names]))

    def begin(self, step: int) -> None:
        self._step = step
        self._next = 0
        self._ready.clear()
        self._started = []

    def ready(self, message: int) -> None:
        self._ready.add(message)
        while self._next in self._ready:
            self._start(self._next)
            self._next += 1

    def finish(self, remaining: Sequence[int]) -> None:
        for message in remaining:
            self.ready(message)
        with torch.no_grad():
            for message, (future, began_s) in enumerate(self._started):
                result = self._wait(future, message)
                if self._ranges[message].data_ptr() != result.data_ptr():
                    self._ranges[message].copy_(result.view(-1))
                lane, end_s = "comm hook", self._recorder.clock()
                details = {"message": message, "nbytes": self._ranges[message].nbytes}
                self._recorder.add(Span("message", self._labels[message], lane, began_s, end_s, self._step, details))
        self._started = []
        self._exchange.answer(Sum([self._presence]), 0, self._step + 1, f"step {self._step}, presence")

    def wire_nbytes(self) -> int:
        return 0  # what hooks hold is their own

    def close(self) -> None:
        pass

    def _start(self, message: int) -> None:
        began_s = self._recorder.clock()
        views, parameters = self._buckets[message]
        bucket = Bucket(message, message == len(self._ranges) - 1, self._ranges[message], views, parameters)
        self._started.append((self._chain(bucket, self._hooks), began_s))

    def _chain(self, bucket: Bucket, hooks: Sequence[CommHook]) -> Future[Any]:
        """All but the last hook are awaited at once: the next one starts from their result."""
        for hook in hooks[:-1]:
            result = self._wait(self._call(hook, bucket), bucket.index())
            bucket.set_buffer(result.view(-1))
        return self._call(hooks[-1], bucket)

    def _call(self, hook: CommHook, bucket: Bucket) -> Future[Any]:
        future = hook(bucket)
        self.num_calls += 1
        if not hasattr(future, "wait"):
            raise TrainingError(f"a comm hook must return a torch.futures.Future, found {type(future).__name__}")
        return future

    def _wait(self, future: Future[Any], message: int) -> torch.Tensor:
        """`Future.wait` knows no deadline, so this asks, seldom enough to cost nothing."""
        health, pause_s = self._exchange.health, 0.00005
        health.enter("gradients", self._step + 1, f"step {self._step}, comm hook of message {message}")
        try:
            look_s = time.monotonic() + 0.5
            while not future.done():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.002)
                if time.monotonic() > look_s:
                    health.check()
                    look_s = time.monotonic() + 0.5
        except DeadlineError as error:
            raise DeadlineError(f"the future of a comm hook is not done: {error}", error.ranks) from error
        finally:
            health.leave()
        value = future.wait()
        # The future of a collective holds a list of one tensor.
        result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
        return result
