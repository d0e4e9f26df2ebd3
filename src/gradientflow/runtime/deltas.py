"""A flow whose workers step by themselves: what they have changed travels, not gradients.

`optimizer.step()` is where everything happens: when it returns, this worker's part of an exchange is done, as far as
its `Sync` asks for, and nothing changes a parameter until the next one. Two roads: `Rounds` (workers in lockstep) and
`Replica` (a copy of what servers keep, for workers that may drift apart, come and go).
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.compress import is_finite
from gradientflow.errors import TrainingError, UsageError
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.rundir import RunDirectory
from gradientflow.runtime.flow import GradientFlow
from gradientflow.runtime.handle import Flow, Memory, as_count, as_states, nothing_to_hold_back, open_flows, trainable
from gradientflow.runtime.hooks import OriginalOnly
from gradientflow.runtime.leaving import LiveTrace
from gradientflow.runtime.optimizers import check_known, held_by
from gradientflow.runtime.sharded import own_part
from gradientflow.runtime.states import RANKS, Shares, kept_by, shares
from gradientflow.saved import count, reading
from gradientflow.trace import MAIN, Recorder, Span, Trace
from gradientflow.tune.explain import Situation


class Road(Protocol):
    """How deltas travel."""

    plan: Plan

    def stepped(self) -> None:
        """The optimizer has taken a step."""

    def count(self, num_samples: int) -> None:
        """So many samples are behind the next step."""

    def average(self) -> None:
        """Make all workers the same."""

    def finish(self) -> None:
        """Take over what is on its way."""

    def memory(self) -> tuple[int, int, int]:
        """Bytes of deltas, on the wire, and of what is kept."""

    def cut(self, meet: Callable[[], None]) -> None:
        """See `Flow.cut`."""

    def state_dict(self) -> dict[str, Any]:
        """What all workers have alike."""

    def kept(self) -> dict[str, Any]:
        """What this one has for itself."""

    def load_state_dict(self, state: Mapping[str, Any], given: Shares) -> None: ...

    def close(self) -> None: ...

    def abandon(self, words: str) -> None:
        """This worker has failed; who waits for it is told."""


def shared_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What workers average: trainable parameters, and buffers of floating-point numbers, but for those that are not
    finite from the beginning: masks. In the order in which gradients would come, more or less, so that fragments are
    layers in a row."""
    parameters = [(name, own_part(parameter)) for name, parameter in trainable(model).items()]
    found: dict[str, torch.Tensor] = dict(reversed(parameters))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and is_finite(buffer):
            found[name] = buffer
    return found


class DeltaFlow(Flow):
    """Runs `recipe`. rank: in the whole job. place: rank among those that take part, and their number. open_road: makes
    the way that deltas travel by, when it is needed first, and tells where to leave what happened; collective. dense:
    gradients travel by it for as many steps as the recipe says, then it is closed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        rank: int,
        place: tuple[int, int],
        open_road: Callable[[Recorder], tuple[Road, RunDirectory | None]],
        dense: GradientFlow | None = None,
    ) -> None:
        self.recipe = recipe
        self._model, self._optimizer = model, optimizer
        self._rank, self._place = rank, place
        self._parameters = trainable(model)
        self._known = {id(parameter) for parameter in self._parameters.values()}
        self._open_road, self._dense = open_road, dense
        self._recorder = Recorder()
        self._road: Road | None = None
        self._run_directory: RunDirectory | None = None
        self._live: LiveTrace | None = None
        if dense is None:
            self._open(open_road)
        #: Samples of a step that may be the first by this worker alone; None if nobody counts.
        self._num_counted: int | None = None
        self._num_steps = 0
        self._began_s = self._recorder.clock()
        self._broken: BaseException | None = None
        self._closed = False
        self._process = os.getpid()
        #: Hooks in which workers part.
        self._parting: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(OriginalOnly(lambda *given: self._before_step())),
            optimizer.register_step_post_hook(OriginalOnly(lambda *given: self._after_step())),
        ]
        if dense:
            # Not in a hook of the optimizer, whose hooks the other flow takes away.
            hook = OriginalOnly(torch.compiler.disable(lambda *given: self._before_forward()))  # type: ignore[no-untyped-call]
            self._parting = [model.register_forward_pre_hook(hook)]
        else:
            open_flows.add(self)
        atexit.register(self.close)

    # - For the training loop

    @property
    def step(self) -> int:
        return self._num_steps

    @property
    def plan(self) -> Plan:
        return self._dense.plan if self._dense else self._way.plan

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._dense.no_sync() if self._dense else nothing_to_hold_back()

    def count(self, num_samples: int) -> None:
        if self._dense:
            self._num_counted = (self._num_counted or 0) + as_count(num_samples)
        else:
            self._way.count(as_count(num_samples))

    def average(self) -> None:
        if self._dense:
            self._dense.synchronize()
            return
        with self._breaking():
            self._way.average()

    def synchronize(self) -> None:
        if self._dense:
            self._dense.synchronize()
            return
        with self._breaking():
            self._way.finish()

    @property
    def alike(self) -> bool:
        return self._dense is not None and self._dense.alike

    def cut(self, meet: Callable[[], None]) -> None:
        if not self._dense:
            with self._breaking():
                self._way.cut(meet)

    def trace(self) -> Trace:
        return self._recorder.trace(self._rank)

    def profile(self) -> Profile:
        backwards = reversed(list(self._parameters.items()))
        return Profile(tensors=tuple(TensorProfile.of(name, own_part(parameter)) for name, parameter in backwards))

    def _situation(self) -> Situation:
        if self._dense:
            return self._dense._situation()
        world = dist.get_world_size() if dist.is_initialized() else 1
        return Situation(self.profile(), self.plan, self.recipe, world)

    def memory(self) -> Memory:
        if self._dense:
            return self._dense.memory()
        pool, wire, anchors = self._way.memory()
        return Memory(pool=pool, wire=wire, anchors=anchors)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"version": 1, "step": self._num_steps, "recipe": str(self.recipe)}
        if self._dense:
            state = self._dense.state_dict()
            ranks = {RANKS: state.pop(RANKS)} if RANKS in state else {}
            return found | {"dense": state} | ranks
        with self._breaking():
            kept = {"step": self._num_steps, **self._way.kept()}
            return found | {"sync": self._way.state_dict()} | kept_by(*self._place, kept)

    @reading("the state")
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = as_states(state)
        if any(not isinstance(each, Mapping) or each.get("version") != 1 or "step" not in each for each in states):
            raise UsageError("expected what state_dict() of a flow gave, version 1")
        given: Shares | None = None
        if self._dense and "dense" in states[0]:
            ranks = [{RANKS: each[RANKS]} if RANKS in each else {} for each in states]
            self._dense.load_state_dict([each["dense"] | more for each, more in zip(states, ranks, strict=True)])
        elif "sync" in states[0]:
            if self._dense:
                self._relax_as_loaded()
            given = shares(states, *self._place)
            self._way.load_state_dict(states[0]["sync"], given)
        elif "dense" in states[0]:
            raise UsageError(
                f"the state is of a step before start={self.recipe.sync.start}, after which workers have parted here: "
                "close() this flow, attach again and load it then"
            )
        else:
            raise UsageError(f"the state was saved under {states[0].get('recipe')!r}, in which workers stay together")
        self._num_steps = count((given.states if given else states)[0], "step")
        self._watch_parts()

    def close(self) -> None:
        """Take everything away that `attach` put there. Parameters stay as they are: `average()` first, if they are to
        be the same everywhere."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        open_flows.discard(self)
        for handle in [*self._handles, *self._parting]:
            handle.remove()
        if self._dense:
            self._dense.close()
        elif self._broken is None:
            self._way.close()
        if self._run_directory is not None:
            self._run_directory.write_trace(self.trace())
            if self._rank == 0:
                self._run_directory.write_plan(self.profile(), self.plan)

    def _open(self, open_road: Callable[[Recorder], tuple[Road, RunDirectory | None]]) -> None:
        self._road, self._run_directory = open_road(self._recorder)
        if self._run_directory is not None:
            self._live = LiveTrace(self._run_directory, self._recorder, self._rank)

    # - Hooks

    @property
    def _way(self) -> Road:
        if self._broken is not None:
            raise TrainingError(f"this flow broke down before: {self._broken}; close it and attach again")
        assert self._road is not None
        return self._road

    def _relax(self, *, at_once: bool = False) -> None:
        """Workers have stayed together for long enough."""
        if self._dense is None or (self._num_steps < self.recipe.sync.start and not at_once):
            return
        dense, self._dense = self._dense, None
        dense.close()
        for handle in self._parting:
            handle.remove()
        self._open(self._open_road)
        open_flows.add(self)
        if self._num_counted is not None:
            self._way.count(self._num_counted)

    @torch.no_grad()
    def _relax_as_loaded(self) -> None:
        """What was loaded into the model is this worker's own; the way begins with what is the same for all."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        loaded = [tensor.clone() for tensor in tensors]
        self._relax(at_once=True)
        for tensor, values in zip(tensors, loaded, strict=True):
            tensor.copy_(values)

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():  # one worker may evaluate by itself
            self._relax()

    def _before_part(self) -> None:
        if not torch.compiler.is_compiling():
            self._before_forward()

    def _watch_parts(self) -> None:
        """When workers are to part, in a forward pass: the model may never be called as a whole."""
        if self._dense is None or self._num_steps < self.recipe.sync.start or len(self._parting) > 1:
            return
        for part in self._model.modules():
            if part is not self._model and not isinstance(part, torch.jit.ScriptModule):  # takes no hooks
                hook = OriginalOnly(lambda *given: self._before_part())
                self._parting.append(part.register_forward_pre_hook(hook))

    def _before_step(self) -> None:
        if self._dense and self._num_steps > self.recipe.sync.start:
            raise UsageError(
                f"recipe '{self.recipe}': after start={self.recipe.sync.start} steps workers part in the next forward "
                "pass, and neither the model nor a module in it was called since: call model(...)"
            )
        if not self._dense:
            self._way  # noqa: B018 - raises if there is none
            check_known(held_by(self._optimizer), self._known)

    def _after_step(self) -> None:
        self._num_steps += 1
        if self._dense:
            self._num_counted = None
            self._watch_parts()
            return
        with self._breaking():
            self._way.stepped()
        now_s = self._recorder.clock()
        self._recorder.add(Span("step", "step", MAIN, self._began_s, now_s, self._num_steps - 1))
        self._began_s = now_s
        if self._live is not None:
            self._live.step_ended()

    @contextlib.contextmanager
    def _breaking(self) -> Any:
        """A failure inside ends this worker's part."""
        try:
            yield
        except BaseException as error:
            if self._broken is None and self._road is not None:
                self._broken = error
                self._road.abandon(f"failed: {type(error).__name__}: {error}")
            raise
