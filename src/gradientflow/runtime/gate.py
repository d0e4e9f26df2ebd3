"""The gate: backward returns while gradients travel, and each part of the model waits for its own.

    backward ends        messages go on; `.grad` waits when it is touched (`open`)
    optimizer.step()     is put off, hyper-parameters noted (`put_off`)
    next forward         the first use of a parameter waits for the messages of its stage, and that stage's share
                         of the step runs there (`_advance`)
    next backward        whatever is left is finished first (`finish`)

A stage is some tensors that forward uses one after the other (`Plan.stages`); taking them together is cheaper than
one by one. Where a parameter is used is not guessed: any use of its values, at any place, brings its stage up to
date (runtime/waiting.py). Nothing here depends on stages being what forward really does, but the time it takes.

What touches gradients before `step()` gets them one by one as they arrive, and the step of those that were touched
is not put off; so clipping makes every step a whole one, after all gradients, as without a gate.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.errors import TrainingError
from gradientflow.runtime.hooks import OriginalOnly
from gradientflow.runtime.shares import Shares, outside_transforms
from gradientflow.runtime.waiting import Factor, Touched, UnfinishedGradient, make_pending, make_plain
from gradientflow.trace import MAIN, Recorder, Span


@dataclass(frozen=True)
class Owner:
    """What the gate asks of the flow it belongs to."""

    #: Return when these messages have arrived.
    wait_for: Callable[[Sequence[int]], None]
    wait_for_all: Callable[[], None]
    #: All gradients' norms, if they are to be had before the gradients; else none.
    norms: Callable[[], Sequence[torch.Tensor]]
    #: Once an exchange, before any of its results is used: raise if they must not be.
    conclude: Callable[[], None]
    #: A failure inside ends the exchange.
    breaking: Callable[[], AbstractContextManager[None]]


@dataclass
class _Stage:
    name: str
    indices: tuple[int, ...]
    messages: tuple[int, ...]
    #: Parameters whose update is still to come, by number.
    put_off: dict[int, nn.Parameter] = field(default_factory=dict)


class Gate:
    """For `parameters`, which are numbered by their place."""

    def __init__(self, parameters: Sequence[nn.Parameter], owner: Owner, recorder: Recorder) -> None:
        self._parameters = list(parameters)
        self._owner = owner
        self._recorder = recorder
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._stages: list[_Stage] = []
        self._stage_of: dict[int, _Stage] = {}
        self._touched: dict[int, Touched] = {}  # by identity of the stage
        self._messages_of: Sequence[Sequence[int]] = ()
        self._views: Sequence[torch.Tensor] = ()
        self._handles: list[RemovableHandle] = []
        self._at_start: Callable[..., None] = lambda: None
        self._waits_at_start = False
        #: What `.grad` becomes when a gradient is on its way.
        self.handed: list[UnfinishedGradient] = []

        # - The exchange that is under way
        #: Whether gradients may be on their way, or updates put off.
        self.is_open = False
        self._step = 0
        self._unfinished: set[int] = set()
        self._concluded = True
        self._shares: Shares | None = None
        self._zero_later: set[int] = set()
        self._factors: dict[int, list[Factor]] = {}  # by parameter, what its gradient is still to be multiplied by
        self._norms: Sequence[torch.Tensor] | None = None  # of this step; None: not asked for
        self._num_updated = self._num_put_off = 0  # stages, of the last step
        #: True, if the last step came after all gradients had been touched, or their norms asked for.
        self.was_whole = False

    def load(
        self,
        stages: Sequence[tuple[str, Sequence[int]]],
        messages_of: Sequence[Sequence[int]],
        views: Sequence[torch.Tensor],
        doors: Sequence[tuple[nn.Module, Sequence[int]]],
        at_start: Sequence[int],
    ) -> None:
        """New stages, by name and parameters; by parameter, its messages and its place in the pool. Before a
        module's forward pass runs, the parameters given with it in `doors` are brought up to date; those given
        `at_start` before the whole model's."""
        self.finish()
        self.take_doors_away()
        self._messages_of, self._views = messages_of, views
        self._stages = []
        for name, indices in stages:
            needed = {message for index in indices for message in messages_of[index]}
            last = self._stages[-1] if self._stages else None
            if last is not None and needed.issubset(last.messages):  # it has nothing of its own to wait for
                last.indices += tuple(indices)
                continue
            self._stages.append(_Stage(name, tuple(indices), tuple(sorted(needed))))
        self._touched = {id(stage): functools.partial(self._touch, stage) for stage in self._stages}
        self._stage_of = {index: stage for stage in self._stages for index in stage.indices}
        self.handed = [
            UnfinishedGradient.of(
                view,
                functools.partial(self._touch_gradient, index),
                functools.partial(self._zero_when_done, index),
                functools.partial(self._norm, index),
                functools.partial(self._scale_when_done, index),
            )
            for index, view in enumerate(views)
        ]
        for module, indices in doors:
            self._handles.append(module.register_forward_pre_hook(OriginalOnly(self._door(indices))))
        self._at_start = self._door(at_start)

    def take_doors_away(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _door(self, indices: Sequence[int]) -> Callable[..., None]:
        stages = list({id(stage): stage for index in indices if (stage := self._stage_of.get(index))}.values())

        def hook(*given: object) -> None:
            if torch.compiler.is_compiling():
                return
            for stage in stages:
                if stage.put_off:
                    self._advance(stage)

        return hook

    def enter_model(self) -> None:
        """A training forward pass of the whole model begins."""
        if self._waits_at_start:
            self.finish()
        self._at_start()

    # - In the order of a step

    def open(self, step: int) -> None:
        """Backward has ended; gradients are `handed` out, to those parameters that have one, and on their way."""
        with self._lock:
            assert not self.is_open
            self._step = step
            self._unfinished = set(range(len(self._parameters)))
            self._concluded = False
            self._norms = None
            self._num_updated = self._num_put_off = 0
            self.is_open = True

    def put_off(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """At `optimizer.step()`: what to run in its place now; None for the optimizer as it is."""
        with self._lock:
            if not self.is_open or self._shares is not None:
                self.finish()  # of a step() before this one, without an exchange in between
                return None
            shares = Shares(optimizer)
            held, parameters, handed, unfinished = shares.held, self._parameters, self.handed, self._unfinished
            waiting = [
                {
                    index: p
                    for index in stage.indices
                    if index in unfinished and (p := parameters[index]).grad is handed[index] and id(p) in held
                }
                for stage in self._stages
            ]
            self._num_put_off = sum(map(bool, waiting))
            self.was_whole = not self._num_put_off or bool(self._norms)
            if not self._num_put_off:
                self.finish()
                self._num_updated = self._num_put_off = 1
                return None
            now = shares.without({id(p) for later in waiting for p in later.values()})
            if any(p.grad is not None for group in now.param_groups for p in group["params"]):
                self._conclude()
            self._shares = shares
            shares.guard_state(self.finish)
            for stage, later in zip(self._stages, waiting, strict=True):
                stage.put_off, touched = later, self._touched[id(stage)]
                for parameter in later.values():
                    make_pending(parameter, touched)
            return now

    def finish(self) -> None:
        """Return with every gradient averaged and every update done."""
        with self._lock:
            if not self.is_open:
                return
            self._conclude()
            for stage in self._stages:
                self._advance(stage)
            if self._shares is not None:
                self._shares.release_state()
            with self._owner.breaking():
                began_s = self._recorder.clock()
                self._owner.wait_for_all()
                self._waited(began_s, "the rest")
            for index in list(self._unfinished):
                self._hand_over(index)
            self._forget_step()
            self.is_open = False

    @property
    def updated(self) -> str:
        """Of the last step, how many stages have been updated: all, none, or how many."""
        if not self._num_updated:
            return "none"
        return "all" if self._num_updated == self._num_put_off else f"{self._num_updated}/{self._num_put_off}"

    def cancel(self) -> None:
        """Forget the exchange and what hung on it: parameters stay as they are, unfinished gradients go."""
        with self._lock:
            for stage in self._stages:
                for parameter in stage.put_off.values():
                    make_plain(parameter)
                stage.put_off = {}
            for index in self._unfinished:
                if self._parameters[index].grad is self.handed[index]:
                    self._parameters[index].grad = None
            self._unfinished.clear()
            self._zero_later.clear()
            self._factors.clear()
            self._forget_step()
            self._concluded = True
            self.is_open = False

    def _forget_step(self) -> None:
        if self._shares is not None:
            self._shares.release_state()
        self._shares = None

    # - Touched

    def _touch_gradient(self, index: int) -> None:
        with self._lock:
            if index not in self._unfinished:
                return
            stage = self._stage_of[index]
            if index in stage.put_off:  # what is done to it now is after the step
                self._advance(stage)
                return
            self._conclude()
            with self._owner.breaking():
                began_s = self._recorder.clock()
                self._owner.wait_for(self._messages_of[index])
                self._waited(began_s, "a gradient")
            self._hand_over(index)

    def _norm(self, index: int) -> torch.Tensor | None:
        with self._lock:
            if index not in self._unfinished or index in self._factors or index in self._stage_of[index].put_off:
                return None
            if self._norms is None:
                with self._owner.breaking():
                    began_s = self._recorder.clock()
                    self._norms = self._owner.norms()
                    self._waited(began_s, "norms")
            return self._norms[index].to(self._views[index].dtype, copy=True) if self._norms else None

    def _scale_when_done(self, index: int, factor: Factor) -> bool:
        """The user scales a gradient before `step()`, having asked for nothing but norms."""
        with self._lock:
            if not self._norms or index not in self._unfinished or index in self._stage_of[index].put_off:
                return False
            self._factors.setdefault(index, []).append(factor)
            return True

    def _scale(self, index: int) -> None:
        for factor in self._factors.pop(index, ()):
            outside_transforms(functools.partial(self._views[index].mul_, factor))

    def _zero_when_done(self, index: int) -> bool:
        """The user zeroes gradients after `step()`: the update still needs this one."""
        if index in self._unfinished and index in self._stage_of[index].put_off:
            self._zero_later.add(index)
            return True
        return False

    def _touch(self, stage: _Stage, compiled: bool) -> None:
        # A compiled region that was not known as one: with parameters of another class it would be compiled again.
        self._waits_at_start |= compiled
        self._advance(stage)

    def _advance(self, stage: _Stage) -> None:
        """Bring a stage's parameters up to date."""
        if os.getpid() != self._process:
            raise TrainingError(
                "a forked process uses parameters whose update was still to come: call synchronize() before the fork"
            )
        with self._lock:
            if not stage.put_off:
                return
            self._conclude()
            if not stage.put_off:
                return  # concluded that it must not be
            with self._owner.breaking():
                began_s = self._recorder.clock()
                self._owner.wait_for(stage.messages)
                arrived_s = self._waited(began_s, stage.name)
            self._update(stage)
            self._recorder.add(Span("update", stage.name, MAIN, arrived_s, self._recorder.clock(), self._step + 1))

    def _update(self, stage: _Stage) -> None:
        assert self._shares is not None
        updated, stage.put_off = stage.put_off, {}
        for index in updated if self._factors else ():
            self._scale(index)
        left = []  # what the user has made of the gradients since
        for index, parameter in updated.items():
            make_plain(parameter)
            left.append(parameter.grad)
            parameter.grad = self._views[index]
        self._shares.run(list(updated.values()))
        for (index, parameter), gradient in zip(updated.items(), left, strict=True):
            if gradient is not self.handed[index]:
                parameter.grad = gradient
        self._unfinished.difference_update(updated)
        for index in self._zero_later.intersection(updated) if self._zero_later else ():
            outside_transforms(self._views[index].zero_)
            self._zero_later.discard(index)
        self._num_updated += 1

    def _hand_over(self, index: int) -> None:
        """The gradient has arrived, and the step has seen it."""
        self._unfinished.discard(index)
        self._scale(index)
        parameter = self._parameters[index]
        if parameter.grad is self.handed[index]:
            parameter.grad = self._views[index]

    def _conclude(self) -> None:
        if self._concluded:
            return
        self._concluded = True
        began_s = self._recorder.clock()
        try:
            self._owner.conclude()
            self._waited(began_s, "what all ranks did")
        except BaseException:
            self.cancel()
            raise

    def _waited(self, began_s: float, name: str) -> float:
        now_s = self._recorder.clock()
        if now_s - began_s > 20e-6:  # nothing to wait for takes less
            self._recorder.add(Span("exposed", name, MAIN, began_s, now_s, self._step + 1))
        return now_s
