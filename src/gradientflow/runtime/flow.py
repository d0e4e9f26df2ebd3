"""A flow of gradients: the hooks that carry a model's gradients from backward to everybody's optimizer.

`GradientFlow` watches the training loop and knows nothing of how gradients travel. A training step, as seen from
here:

    forward       buffers are made rank 0's, as DDP does; a flow that broke down before meets the others anew
    backward      each gradient arrives (`_arrival_hook`), the first one opens the step
    end of it     the step is finished (`_finish`): gradients are the average over ranks on return
    optimizer     `step()` refuses gradients that were never exchanged

Hooks are PyTorch's public ones (runtime/autograd.py holds the exception), all of them removed by
`close()`. Two ways of travelling exist: `PooledFlow` (the product) and `PlainFlow` (`GRADIENTFLOW=off`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.documents import parse_json
from gradientflow.errors import (
    DeadlineError,
    DisagreementError,
    NonFiniteError,
    PeerError,
    TrainingError,
    UsageError,
)
from gradientflow.exchange import Exchange, Moment, Stamp
from gradientflow.exchange.members import Members
from gradientflow.exchange.roster import Generation, Roster
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.runtime.autograd import (
    accumulator_of,
    after_enclosing_node,
    at_end_of_backward,
    inside_backward,
    running_wrapper,
)
from gradientflow.runtime.context import ContextGradients
from gradientflow.runtime.handle import Carried, Crew, Flow, as_states, open_flows, trainable
from gradientflow.runtime.hooks import OriginalOnly
from gradientflow.runtime.master import MasterWeights
from gradientflow.runtime.momentum import holder_of
from gradientflow.runtime.observe import ForwardObserver
from gradientflow.runtime.optimizers import AnyOptimizer, Given, OneOptimizer, Optimizers, check_known
from gradientflow.runtime.options import Options
from gradientflow.runtime.regrouping import Stand, behind, hand_over, most_advanced
from gradientflow.runtime.sameness import differing, disagreement
from gradientflow.runtime.skips import Forwards, Skipped, compare_skips
from gradientflow.saved import count, reading
from gradientflow.trace import MAIN, Recorder, Span, Trace

_log = logging.getLogger(__name__)


#: Given what the node passed on (nothing) and what it got: (gradient,), or (None,) from a function that gave none.
ArrivalHook = Callable[[object, Sequence[torch.Tensor | None]], None]


#: So often may a step fail among the same workers before it is given up.
MOST_VAIN = 3
#: What a flow whose workers come and go outlives.
_LOST = (PeerError, DeadlineError)


class _Overtaken(Exception):
    """The others have finished the step that this rank was in."""


class GradientFlow(Flow):
    """Of which gradients travel."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, exchange: Exchange, options: Options
    ) -> None:
        # - What is trained
        self._model = model
        self._options = options
        self._known: set[int] = set()  # identities of what is exchanged, masters included
        self._optimizers: Optimizers = AnyOptimizer(self._known)
        if optimizer is not None:
            self._optimizers = OneOptimizer(optimizer, alone=not options.forward_is_told)
        self._masters: MasterWeights | None = None
        self._exchange = exchange
        self._parameters: dict[str, nn.Parameter] = {}
        self._frozen: list[nn.Parameter] = []  # not exchanged, because they were frozen
        self._stale = False

        # - Where the current step stands
        self._step = self._began_at = 0
        #: False inside no_sync(): backward passes only accumulate.
        self.exchanging = True
        self._awaited = False  # a forward pass was run whose exchange is to come
        self._watching = False  # the end of the running backward pass will call us
        self._arrived_s: list[float] = []  # 0.0: not yet
        self._opened_s = 0.0  # first arrival of this step; 0.0: none
        self._local: set[int] = set()  # parameters with gradients from no_sync(), not exchanged since
        self._forwards = Forwards()
        self._num_contributing = exchange.world
        self._verified_at = 0  # they were broadcast when it began
        self._context = ContextGradients()
        self._done: Skipped | None = None  # in the step that was exchanged last
        self._joined = False  # this rank has run out of inputs and only keeps the others company
        self._stepped_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._broken: TrainingError | None = None

        # - Workers that come and go
        self._roster: Roster | None = None
        self._open_exchange: Callable[[Members], Exchange]
        self._lost: TrainingError | None = None  # the exchange is given up, and what this rank has is whole
        self._regrouped_at = -1  # at this step
        self._num_vain = 0  # generations of the same workers since a step was finished
        self._kept: dict[int, torch.Tensor] = {}  # of this step, gradients as backward gave them
        self._carried: dict[str, Carried] = {}
        self._brought: dict[str, Any] = {}  # for what is still to be carried
        self._brought_groups: Sequence[Mapping[str, Any]] = ()  # of the optimizer; until the first step

        # - What is measured
        self._recorder = Recorder()
        self._forward_began_s = 0.0
        self._step_began_s = 0.0
        self._last_arrived_s: list[float] = []
        self._last_opened_s = 0.0
        self._previous_opened_s = 0.0  # the same, of the last step also if this rank had no inputs for it
        self._observer: ForwardObserver | None = None

        self._closed = False
        self._process = os.getpid()
        self._handles: list[RemovableHandle] = []
        self._parameter_handles: list[RemovableHandle] = []
        self._nodes: list[torch.autograd.graph.Node] = []  # hooks live as long as these

    def _take(self) -> None:
        """Know the trainable parameters; hooks come later, with `_hold`."""
        names = self._parameters.keys() | trainable(self._model, self._options.ignored).keys()
        every = {name: p for name, p in self._model.named_parameters() if name not in self._options.ignored}
        self._parameters = {name: parameter for name, parameter in every.items() if name in names}
        self._frozen = [parameter for name, parameter in every.items() if name not in names]
        self._names = tuple(self._parameters)
        self._arrived_s = [0.0] * len(self._names)
        self._last_arrived_s = self._arrived_s.copy()

    def _hold(self) -> None:
        """Put a hook on every parameter that is exchanged."""
        for handle in self._parameter_handles:
            handle.remove()
        held = [*self._parameters.values(), *(self._masters.parameters() if self._masters else ())]
        self._known.clear()
        self._known.update(id(parameter) for parameter in held)
        self._parameter_handles, self._nodes = [], []
        for index, parameter in enumerate(self._parameters.values()):
            trains = parameter.requires_grad
            parameter.requires_grad_(True)  # there is no node else; one that is frozen now may train again
            node = accumulator_of(parameter)
            parameter.requires_grad_(trains)
            self._nodes.append(node)
            self._parameter_handles.append(node.register_hook(self._arrival_hook(index, parameter)))

    def _watch(self) -> None:
        """Take hold of model and optimizer; the last thing a constructor does, so that one that fails
        leaves nothing behind."""
        if self._options.master_weights:
            assert isinstance(self._optimizers, OneOptimizer)
            self._masters = MasterWeights(self._parameters, self._optimizers.optimizer)
            refresh = OriginalOnly(lambda module, keys: self._refresh_masters())
            handle = self._model.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        self._observer = ForwardObserver(self._model, self._parameters)
        self._hold()
        self._handles += self._optimizers.watch(self._before_step, self._after_step)
        if not self._options.forward_is_told or self._options.gate:
            self._handles.append(self._model.register_forward_pre_hook(_uncompiled(self._before_forward)))
        if not self._options.forward_is_told:
            self._handles.append(self._model.register_forward_hook(_uncompiled(self._after_forward)))
        self._exchange.health.place = "between attach and the first forward pass"
        self._exchange.health.trainer = threading.get_ident()
        open_flows.add(self)
        atexit.register(self.close)

    # - What a way of travelling has to say

    @abstractmethod
    def _arrival_hook(self, index: int, parameter: nn.Parameter) -> ArrivalHook:
        """The hook of parameter `index`. It calls `_open` before the first gradient of a step and notes
        `_arrived_s[index]`; outside an exchange it does nothing but call `_accumulated`.

        It is a hook of the node that adds the gradient up, which runs after all hooks of users on the parameter:
        what they make of a gradient is what travels."""

    @abstractmethod
    def _finish(self, missing: list[int], skipped: bool) -> bool | None:
        """All gradients but the `missing` have arrived: make every gradient the average over ranks.
        Returns whether any rank had `skipped` anything; None if that is still on its way, and `_conclude` will be
        called when it is there."""

    def _own_gradients(self, missing: list[int]) -> dict[int, torch.Tensor]:
        """Before the exchange: this rank's gradients of this step, so that they can be given again."""
        raise NotImplementedError

    def _give_again(self, own: Mapping[int, torch.Tensor], arrived: Sequence[int]) -> None:
        """They are those of `_own_gradients`, in a step that is opened anew."""
        raise NotImplementedError

    def _memory_of_codec(self) -> dict[str, Any]:
        """What a codec remembers that is the same on all ranks."""
        return {}

    def _remember(self, memory: Mapping[str, Any]) -> None:
        """It is `_memory_of_codec` of another rank; what was this rank's alone is forgotten."""

    @abstractmethod
    def _abandon(self) -> None:
        """The exchange of this step failed: let go of memory that it may still write to."""

    @abstractmethod
    def _restart(self) -> None:
        """There is a new exchange, or other parameters: build anew what hangs on them. Collective."""

    def _begin(self) -> None:
        """The first gradient of a step is about to be taken up."""

    def _settle(self) -> None:
        """Every rank has finished the step: what has to be agreed on before the next may be done here."""

    def _num_calls_outside(self) -> int:
        """How often this rank has handed the exchange to code that is not ours, and got it back."""
        return 0

    def _updated(self) -> str:
        """Of the last step, how many parts have been done if it was put off: all, none, or how many."""
        return "all"

    def _can_overflow(self) -> bool:
        """Whether finite gradients may have become inf on the way."""
        return False

    # - For the training loop

    @property
    def step(self) -> int:
        """How many exchanges have been finished."""
        return self._step

    @property
    def crew(self) -> Crew:
        generation = self._roster.generation if self._roster else None
        exchange = self._exchange
        return Crew(generation.number if generation else 0, exchange.rank, exchange.world, exchange.members)

    def carry(self, **things: Carried) -> None:
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise UsageError(f"carry({name}=...): {type(thing).__name__} has no state_dict() and load_state_dict()")
            self._carried[name] = thing
            if name in self._brought:
                thing.load_state_dict(self._brought.pop(name))
        if self._brought_groups and isinstance(self._optimizers, OneOptimizer):
            # A scheduler that was made since has set them as at the beginning.
            for group, theirs in zip(self._optimizers.optimizer.param_groups, self._brought_groups, strict=True):
                group.update({name: value for name, value in theirs.items() if name != "params"})

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate, on this rank. Enter it on all ranks alike."""
        before, self.exchanging = self.exchanging, False
        try:
            yield
        finally:
            self.exchanging = before

    def synchronize(self) -> None:
        """Return when every gradient of the last exchanged backward pass is the average over ranks and every step
        that was asked for is done."""
        self._check_whole()
        self.catch_up()

    def trace(self) -> Trace:
        """What happened on this rank, up to the last 100,000 spans."""
        return self._recorder.trace(self._exchange.global_rank)

    def profile(self) -> Profile:
        """The model's tensors as the last exchanged backward pass and the first forward passes showed them."""
        return self._profile_of(self._names)

    def _profile_of(self, names: tuple[str, ...]) -> Profile:
        arrived_s = dict(zip(self._names, self._last_arrived_s, strict=True))
        order = sorted(names, key=lambda name: arrived_s[name] or float("inf"))
        forward_s = self._observer.seconds if self._observer else {}
        position = {name: number for number, name in enumerate(dict.fromkeys([*forward_s, *self._names]))}
        tensors, previous_s = [], self._last_opened_s
        for name in order:
            at_s = arrived_s[name] or previous_s
            times = {"forward_order": position[name], "forward_s": forward_s.get(name, 0.0)}
            times["backward_s"] = max(0.0, at_s - previous_s)
            tensors.append(TensorProfile.of(name, self._parameters[name]).model_copy(update=times))
            previous_s = at_s
        found = Profile(tensors=tuple(tensors))
        busy = self._observer.busy if self._observer and self._device().type == "cpu" else 0.0
        return found.model_copy(update={"cpu_s": busy * (found.forward_s + found.backward_s)})

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))

    @property
    def alike(self) -> bool:
        return self._options.broadcast_buffers or not any(True for _ in self._model.buffers())

    def cut(self, meet: Callable[[], None]) -> None:
        if self._roster is not None:
            with self._breaking():
                self._roster.check_current()

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved with a checkpoint, on every rank."""
        masters = self._masters.state_dict() if self._masters else {}
        return {"version": 1, "step": self._step, "master_weights": masters}

    @reading("the state")
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take over a `state_dict`, on all ranks together; after the model's own.

        A list of the states of all ranks may come from another world, of which each rank takes its share."""
        state = as_states(state)[0]
        if not isinstance(state, Mapping) or state.get("version") != 1:
            raise UsageError("expected what state_dict() of a flow gave, version 1")
        if "sync" in state:
            raise UsageError(
                f"the state was saved under {state.get('recipe')!r:.60}, where each worker has parameters of its own: "
                "load model and optimizer before attach(), which makes them the first rank's, and leave this state out"
            )
        masters = state.get("master_weights", {})  # torch.distributed.checkpoint leaves out what is empty
        if bool(masters) != (self._masters is not None):
            raise UsageError("the state was saved with another setting of master_weights")
        step = count(state, "step")
        if self._masters:
            self._masters.load_state_dict(masters)
        self._step = self._began_at = step

    def close(self) -> None:
        """Take everything away that `attach` put there. Finished gradients stay as they are."""
        if self._closed or os.getpid() != self._process:  # a forked child has neither the threads nor the hooks' use
            return
        try:
            if self._broken is None:
                self.catch_up()
                self._see_the_others_through()
        finally:
            self._let_go()
            if self._roster is not None:
                with contextlib.suppress(TrainingError):
                    self._roster.leave()

    def _let_go(self) -> None:
        self._closed = True
        atexit.unregister(self.close)
        open_flows.discard(self)
        for handle in [*self._handles, *self._parameter_handles]:
            handle.remove()
        self._nodes.clear()
        if self._observer:
            self._observer.close()
        if self._opened_s:
            self._break_off(f"left in the middle of step {self._step}")
        if self._masters:
            self._masters.restore()
        if self._broken is None:
            self._exchange.close()
        else:
            self._exchange.health.linger()

    # - For a wrapper that runs the model itself (`Options.forward_is_told`)

    def begin_forward(self) -> None:
        """Before a forward pass that backward may follow."""
        self._exchange.health.trainer = threading.get_ident()
        if self._opened_s:
            self._break_off(f"broke off the backward pass of step {self._step}")
        if self._roster is not None:
            self._look_around(self._roster)
        elif self._broken is not None:
            self._recover()
        if self._stale or any(parameter.requires_grad for parameter in self._frozen):
            self._take_anew()
        self._together(self._verify)
        self._exchange.health.place = "forward"
        if self._observer:
            self._observer.begin_forward(record=self._options.gate and not self.gated)
        self._forward_began_s = self._recorder.clock()
        self._step_began_s = self._step_began_s or self._forward_began_s

    def end_forward(self, output: object) -> None:
        now_s = self._recorder.clock()
        self._recorder.add(Span("forward", "forward", MAIN, self._forward_began_s, now_s, self._step))
        self._forward_began_s = 0.0
        if self._observer:
            self._observer.end_of_forward()
        if self.exchanging:
            self._forwards.note(output, self._reached, counts=self._model.training)
        self._exchange.health.place = "between forward and backward"

    def broadcast(self, tensors: list[torch.Tensor], moment: Moment, source: int = 0) -> None:
        """Make `tensors` those of rank `source`. Collective."""
        self._check_unbroken()
        if tensors:
            with self._breaking():
                self._exchange.broadcast(tensors, Stamp(self._step, moment), source)

    def arm(self, exchanging: bool) -> None:
        """From now on backward exchanges, or only accumulates.

        Another flow with some of the same parameters steps aside if its last forward pass has had its exchange:
        wrappers take turns. If that is still to come, both exchange what they share, and both get its average."""
        self.exchanging = self._awaited = exchanging
        for other in open_flows:
            if other is self or not isinstance(other, GradientFlow) or other._known.isdisjoint(self._known):
                continue
            if not other._awaited:
                other.exchanging = False
            elif exchanging and (self._options.gradients_are_views or other._options.gradients_are_views):
                raise UsageError(
                    "two wrappers share parameters, and one backward pass is to exchange them in both: build them with "
                    "gradient_as_bucket_view=False, or run a forward pass that no backward pass follows under "
                    "torch.no_grad()"
                )

    def follow_context(self, context: int | None) -> None:
        """Gradients of the next backward pass go into this context of distributed autograd; None: into `.grad`.
        They are exchanged when it ends, all at once."""
        self._context.context = context

    def catch_up(self) -> None:
        """Finish what was put off: gradients of the last exchange, updates by the last step."""

    def look_again(self) -> None:
        """Parameters may have become others (a dtype): look at the next training forward pass, on all ranks."""
        self._stale = True

    def contribute(self, num_contributing: int) -> None:
        """From now on, so many ranks have inputs; averages are over them."""
        self._num_contributing = num_contributing

    def shadow_step(self) -> None:
        """Take part in the others' exchange with nothing to give, and take nothing."""
        self._check_unbroken()
        self._joined = True
        try:
            self._opened_s = self._recorder.clock()
            self._begin()
            self._complete()
        finally:
            self._joined = False

    # - Hooks

    def _before_forward(self, model: nn.Module, args: object) -> None:
        if inside_backward():
            return  # recomputation is not a forward pass
        if not (model.training and torch.is_grad_enabled()):
            self.catch_up()  # torch's layers have other paths for parameters that are not plain ones
            return  # evaluation may happen on one rank only
        if self._options.forward_is_told:
            return
        if self.exchanging:
            _check_not_averaged_twice(self._known)
        self.begin_forward()
        if self.exchanging and self._options.broadcast_buffers and self._step != self._regrouped_at:
            self._together(lambda: self.broadcast(list(model.buffers()), Moment.TRAINING))

    def _after_forward(self, model: nn.Module, args: object, output: object) -> None:
        if self._forward_began_s:
            self.end_forward(output)

    def _reached(self) -> None:
        """Backward has come to the model's output."""
        if self._options.may_use_none and self.exchanging and not self._watching:
            self._open()

    def _open(self) -> None:
        """Before a gradient is taken up, once a backward pass (again after an inner one has ended)."""
        self._check_unbroken()
        self.catch_up()
        self._watching = True
        at_end_of_backward(self._backward_ended)
        if not self._opened_s:
            self._opened_s = self._recorder.clock()
            self._exchange.health.place = "backward"
            self._exchange.health.in_backward = self._context.context is None
            self._begin()

    def _accumulated(self, index: int) -> None:
        self._local.add(index)

    def _arrived_twice(self, index: int) -> TrainingError:
        self._break_off(f"got the gradient of {self._names[index]!r} twice in step {self._step}")
        self._broken = TrainingError(
            f"the gradient of {self._names[index]!r} arrived twice in step {self._step}: either an earlier backward "
            "pass was broken off by an exception, or the parameter is shared by regions under reentrant checkpointing "
            "(use checkpoint(..., use_reentrant=False), or static_graph=True)"
        )
        return self._broken

    def _check_unbroken(self) -> None:
        if self._broken is not None:
            raise TrainingError(
                f"this flow broke down before: {self._broken}; the next training forward pass tries anew",
                self._broken.ranks,
            ) from self._broken

    def _check_whole(self) -> None:
        """Between backward passes no step may be open: what is in the gradients then is not an average."""
        self._check_unbroken()
        if self._opened_s:
            self._break_off(f"broke off the backward pass of step {self._step}")
            assert self._broken is not None
            raise self._broken

    def _backward_ended(self) -> None:
        self._watching = False
        if not self._opened_s:
            return
        if self._context.context is not None:
            with self._context.in_grad(list(self._parameters.values())):
                self._complete()
            return
        if 0.0 in self._arrived_s and inside_backward():
            # The end of a reentrant checkpoint's inner pass: gradients of the outer one are still to come.
            after_enclosing_node(self._watch_outer)
            return
        self._complete()

    def _watch_outer(self) -> None:
        if self._opened_s and not self._watching:
            self._watching = True
            at_end_of_backward(self._backward_ended)

    def _complete(self) -> None:
        """Finish the step that is open, and note how long training waited for it."""
        health = self._exchange.health
        health.place = "the end of backward"
        ended_s = self._recorder.clock()
        missing = [index for index, arrived_s in enumerate(self._arrived_s) if not arrived_s]
        mine = None
        if not self._joined:
            mine = Skipped(self._forwards.num_run, self._forwards.num_unused, health.num_skipped)
        try:
            somebody_skipped = self._finish_together(missing, mine is not None and mine.anything)
        except _Overtaken:
            return
        done_s = self._recorder.clock()
        self._recorder.add(Span("backward", "backward", MAIN, self._opened_s, ended_s, self._step))
        self._recorder.add(Span("exposed", "exposed", MAIN, ended_s, done_s, self._step))
        if self._masters:
            self._masters.take_gradients()
        if not self._joined:
            self._last_arrived_s, self._last_opened_s = self._arrived_s.copy(), self._opened_s
        self._previous_opened_s = self._opened_s
        self._done, self._brought_groups = mine, ()
        self._step_ended()
        if somebody_skipped is not None:
            self._settle_together()
            self._conclude(somebody_skipped)

    def _conclude(self, somebody_skipped: bool) -> None:
        """It is known what all ranks did: agree on what follows from it."""
        try:
            with self._breaking():
                if self._lost is not None and somebody_skipped:
                    raise self._lost
                offenders = compare_skips(self._exchange.control, self._done) if somebody_skipped else {}
        except _LOST as error:
            if self._roster is None:
                raise
            # Whether the step counts is not known here: if it does for one of the others, its state tells.
            self._lost, self._broken = error, None
            self._step -= 1
            self._drop_gradients()
            return
        self._judge(offenders)

    def _step_ended(self) -> None:
        self._arrived_s[:] = [0.0] * len(self._names)
        self._opened_s = 0.0
        self._awaited = False
        self._local.clear()
        self._kept.clear()
        self._num_vain = 0
        self._forwards.exchanged()
        self._step += 1
        health = self._exchange.health
        health.step, health.num_skipped, health.in_backward = self._step, 0, False
        health.place = "after backward"

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """A failure inside ends this exchange: ranks may no longer stand at the same place."""
        try:
            yield
        except BaseException as error:
            self._broken = self._explain(error)
            ranks = error.ranks if isinstance(error, TrainingError) else ()
            self._give_up(f"{_kind(error)}{error or type(error).__name__}", ranks)
            if not isinstance(error, Exception):
                raise
            raise self._broken from error

    def _break_off(self, words: str) -> None:
        self._broken = TrainingError(
            f"{self._where()}: {words}, an exception ended it: gradients are no averages", (self._exchange.global_rank,)
        )
        self._give_up(words, ())

    def _give_up(self, words: str, culprits: tuple[int, ...]) -> None:
        self._exchange.abandon(words, culprits)
        self._abandon()
        self._kept.clear()
        self._opened_s = 0.0
        self._watching = self._awaited = False

    def _explain(self, error: BaseException) -> TrainingError:
        kind = type(error) if isinstance(error, TrainingError) else TrainingError
        ranks = error.ranks if isinstance(error, TrainingError) else ()
        return kind(f"{self._where()}: {error or type(error).__name__}", ranks)

    def _where(self) -> str:
        return f"rank {self._exchange.rank} of {self._exchange.world}, step {self._step}"

    def _recover(self) -> None:
        """Meet the other ranks again after a failure. Collective; what was exchanged last is lost."""
        exchange = self._exchange.renewed()
        stand = f"{self._step} {self._num_calls_outside()} {self._updated()}"
        stands = exchange.control.gather(stand, "compare steps after a failure")
        steps, calls, updated = zip(*(stand.split() for stand in stands), strict=True)
        if len(set(updated)) > 1 or not {"none", "all"}.issuperset(updated):
            exchange.close()
            raise TrainingError(
                f"after '{self._broken}' the last step was taken by some parts of the model and not by others "
                f"({', '.join(updated)} by rank): load a checkpoint, then close and attach again, on all ranks"
            )
        if len(set(stands)) > 1:
            exchange.close()
            raise TrainingError(
                f"after '{self._broken}' ranks stand at different steps ({', '.join(steps)} by rank): load a "
                "checkpoint, then close and attach again, on all ranks"
                if len(set(steps)) > 1
                else f"after '{self._broken}' ranks have made different numbers of comm hook calls ({', '.join(calls)} "
                "by rank), so the process group that the hook uses is out of step: give a new wrapper a new group"
            )
        self._begin_with(exchange)
        self._hold()
        self._broken = None

    def _begin_with(self, exchange: Exchange) -> None:
        self._exchange = exchange
        exchange.health.step, exchange.health.trainer = self._step, threading.get_ident()
        self._arrived_s[:] = [0.0] * len(self._names)
        self._local.clear()
        self._forwards.exchanged()
        self._restart()

    # - Workers that come and go: [Note: steps of generations] in regrouping.py

    def join(self, roster: Roster, open_exchange: Callable[[Members], Exchange]) -> None:
        """From now on with whoever is there; until now this flow was alone."""
        self._roster, self._open_exchange = roster, open_exchange
        self._regroup(None)

    def _look_around(self, roster: Roster) -> None:
        """Between steps: somebody is lost, or wants to join."""
        if self._lost is not None:
            self._broken = self._lost
            self._abandon()
        elif self._broken is None:
            with self._breaking():  # without the store nobody can be met any more
                somebody_waits = roster.somebody_waits()
            if somebody_waits:
                self._broken = PeerError("a worker joins")
                self._give_up("makes room for a worker that joins", ())
        if self._broken is not None:
            self._regroup(self._broken)

    def _together(self, action: Callable[[], None]) -> None:
        """What all ranks do at this point, unless somebody is lost: then those who are left begin anew behind it."""
        try:
            action()
        except _LOST as error:
            if self._roster is None:
                raise
            self._regroup(error)

    def _finish_together(self, missing: list[int], skipped: bool) -> bool | None:
        """`_finish`, with whoever is there."""
        if self._roster is None:
            with self._breaking():
                return self._finish(missing, skipped)
        opened_s, arrived_s, local = self._opened_s, self._arrived_s.copy(), self._local.copy()
        own = self._own_gradients(missing)
        while True:
            try:
                with self._breaking():
                    return self._finish(missing, skipped)
            except _LOST as error:
                if self._regroup(error):
                    raise _Overtaken from None
            self._opened_s = opened_s
            self._local.update(local)
            self._give_again(own, [index for index, at_s in enumerate(arrived_s) if at_s])
            self._arrived_s[:] = arrived_s

    def _settle_together(self) -> None:
        if self._roster is None:
            with self._breaking():
                self._settle()
            return
        try:
            self._settle()
        except _LOST as error:
            # The sums are there: this rank takes its step, and meets the others before the next.
            self._lost = self._explain(error)
            self._exchange.abandon(str(error), error.ranks)

    def _see_the_others_through(self) -> None:
        """Before this worker leaves: whoever has not finished the last step may need its state."""
        roster = self._roster
        end_s = time.monotonic() + self._exchange.deadline_s
        while roster is not None and time.monotonic() < end_s:
            waiting = {} if self._lost else self._exchange.health.behind(self._step)
            if self._lost is not None or any(waiting.values()):
                self._broken = self._lost or PeerError("a worker is behind")
                self._give_up("sees the others through", ())
                self._regroup(self._broken)
            elif not waiting:
                return
            time.sleep(0.1)

    def _regroup(self, why: TrainingError | None) -> bool:
        """Go on with whoever is there; whether they had finished the step that this rank was in."""
        roster = self._roster
        assert roster is not None
        began_s, joins, overtaken = self._recorder.clock(), why is None, False
        try:
            while True:
                before = roster.generation
                late = why.ranks if isinstance(why, DeadlineError) else ()
                generation = roster.enter(late, self._exchange.health.beats())
                self._count_vain(before, generation, why)
                exchange: Exchange | None = None
                try:
                    exchange = self._open_exchange(roster.members(self._exchange.backend))
                    overtaken |= self._even_out(exchange, joins)
                    joins = False
                    self._begin_with(exchange)
                    break
                except _LOST as error:
                    why = error
                    if exchange is not None:
                        exchange.abandon(str(error), error.ranks)
        except TrainingError as error:
            self._broken = error
            raise
        # What was there before is in a cycle of objects: its sockets would stay until Python looks for those by itself.
        gc.collect()
        self._broken = self._lost = None
        self._num_contributing = exchange.world
        self._regrouped_at = self._verified_at = self._step
        now_s = self._recorder.clock()
        self._recorder.add(Span("regroup", f"generation {generation.number}", MAIN, began_s, now_s, self._step))
        if exchange.rank == 0:
            _log.warning("%s%s", _changes(before, generation, self._step), f" ({why})" if why else "")
        return overtaken

    def _count_vain(self, before: Generation | None, now: Generation, why: TrainingError | None) -> None:
        same = before is not None and before.numbers == now.numbers
        self._num_vain = self._num_vain + 1 if same else 0
        if self._num_vain > MOST_VAIN and why is not None:
            raise TrainingError(
                f"step {self._step} failed {self._num_vain} times among the same workers: {why}", why.ranks
            )

    def _even_out(self, exchange: Exchange, joins: bool) -> bool:
        """Bring everybody to the same step, with the same state; whether this rank was behind. Collective."""
        own = Stand(step=self._step, joins=joins)
        texts = exchange.control.gather(own.model_dump_json(), "compare steps")
        stands = [parse_json(Stand, text, f"the stand of rank {rank}") for rank, text in enumerate(texts)]
        source, lacking = most_advanced(stands), behind(stands)
        step = stands[source].step
        buffers = dict(self._model.named_buffers()) if self._options.broadcast_buffers else {}
        if not lacking:
            exchange.broadcast(list(buffers.values()), Stamp(step, Moment.START), source)
            return False
        state = hand_over(exchange, source, self._whole_state, step)
        if exchange.rank not in lacking:
            _copy_into(buffers, state["buffers"])
            return False
        if not joins and step != self._step + 1:
            raise TrainingError(
                f"worker {exchange.global_rank} stands at step {self._step}, the others at {step}: load a checkpoint"
            )
        self._take_over(state, joins=joins)
        return not joins

    def _whole_state(self) -> dict[str, Any]:
        assert isinstance(self._optimizers, OneOptimizer)
        return {
            "parameters": {name: parameter.detach() for name, parameter in self._model.named_parameters()},
            "buffers": dict(self._model.named_buffers()),
            "optimizer": self._optimizers.optimizer.state_dict(),
            "flow": GradientFlow.state_dict(self),
            "codec": self._memory_of_codec(),
            "carried": {name: thing.state_dict() for name, thing in self._carried.items()},
        }

    def _take_over(self, state: Mapping[str, Any], *, joins: bool) -> None:
        assert isinstance(self._optimizers, OneOptimizer)
        optimizer = self._optimizers.optimizer
        _copy_into(dict(self._model.named_parameters()), state["parameters"])
        _copy_into(dict(self._model.named_buffers()), state["buffers"])
        theirs = state["optimizer"]
        if not joins:  # the loop is in the same step as theirs was, and will change groups as theirs did
            theirs = {**theirs, "param_groups": optimizer.state_dict()["param_groups"]}
        optimizer.load_state_dict(theirs)
        GradientFlow.load_state_dict(self, state["flow"])
        self._remember(state["codec"])
        self._drop_gradients()
        if joins:
            self._brought, self._brought_groups = dict(state["carried"]), theirs["param_groups"]
            return
        self._began_at = self._step - 1  # the loop's `step()` belongs to it, and finds nothing to do
        self._stepped_at.clear()

    def _take_anew(self) -> None:
        """Parameters that were frozen are trainable now, or have another dtype. Collective: it is so on all
        ranks, or raises."""
        self._stale = False
        self.catch_up()
        self._take()
        with self._breaking():
            self._restart()
        self._hold()

    def _verify(self) -> None:
        """Collective, in the first forward pass after every so many steps."""
        every = self._options.verify_every
        if self._verified_at == self._step or self._num_contributing != self._exchange.world:
            return
        # A worker that joined may have set something of its optimizer by itself: the first step would show it.
        after_regrouping = self._roster is not None and self._step == self._regrouped_at + 1
        if not (after_regrouping or (every and self._step % every == 0)):
            return
        self._verified_at = self._step
        self.catch_up()
        began_s = self._recorder.clock()
        masters = self._masters.by_name() if self._masters else {}
        compared = {name: p for name, p in self._model.named_parameters() if name not in self._options.ignored}
        compared |= {f"{name} (its master)": master for name, master in masters.items()}
        with self._breaking():
            found = differing(self._exchange, compared, self._step + 1, f"parameters after step {self._step}")
        self._recorder.add(Span("verify", "parameters", MAIN, began_s, self._recorder.clock(), self._step))
        if found:
            raise disagreement(self._exchange, found, self._step)

    # - Judgement

    def _judge(self, offenders: dict[int, str]) -> None:
        """The step is finished and the flow ready for the next; raise if its result must not be used."""
        if self._joined:
            return
        if offenders:
            self._drop_gradients()
            words = "; ".join(offenders.values())
            raise DisagreementError(
                f"step {self._step - 1}: {words}: gradients are dropped on all ranks",
                tuple(self._exchange.members[rank] for rank in offenders),
            )
        policy = self._options.nonfinite
        if policy == "pass" and not (self._can_overflow() and not self._options.overflow_is_handled):
            return
        if policy == "skip" and self._options.overflow_is_handled:
            return  # the scaler does, on all ranks alike; without gradients to look at it would fail
        bad = [name for name, parameter in self._parameters.items() if not _is_finite(parameter.grad)]
        if bad and policy == "skip":
            self._drop_gradients()
        elif bad:
            self._drop_gradients()
            advice = (
                "fp16 on the wire ends at 65504: use +bf16, or attach(..., scaler=...) and let the scaler skip it"
                if self._can_overflow()
                else 'some rank\'s loss or backward pass produced it; nonfinite="skip" leaves such steps out'
            )
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NonFiniteError(
                f"step {self._step - 1}: the averaged gradient of {bad[0]!r}{more} is inf or nan on every rank, and "
                f"dropped; {advice}"
            )

    def _drop_gradients(self) -> None:
        held = [*self._parameters.values(), *(self._masters.parameters() if self._masters else ())]
        for parameter in held:
            parameter.grad = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Given | None:
        """Gets the arguments of `step`, and may give others in their place."""
        self._check_whole()
        check_known(self._optimizers.parameters(), self._known)
        self._check_momentum(optimizer)
        if self._local and isinstance(self._optimizers, OneOptimizer) and self._optimizers.alone:
            raise UsageError(
                "optimizer.step() with gradients that never left this rank: the last backward pass before "
                "step() must run outside no_sync()"
            )
        if not self._has_exchanged_for(optimizer):
            self._exchange.health.num_skipped += 1
        self._stepped_at[optimizer] = self._step
        self._exchange.health.place = "optimizer.step()"
        return None

    def _check_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """What another wrapper around the same parameters keeps of it, this one's gradients would be without."""
        held = holder_of(optimizer)
        if held and held.is_set and self._has_exchanged_for(optimizer) and not self._holds_momentum_of(optimizer):
            raise UsageError(
                "optimizer.step() with gradients of one wrapper, while another around the same model keeps the "
                "optimizer's momentum for its compression: close() the one that is not used, or compress without "
                'momentum correction ("+csc:uncorrected")'
            )

    def _holds_momentum_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return False

    def _has_exchanged_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Since its last step; else what it sees now is another wrapper's, or a second step on the same gradients."""
        return self._stepped_at.get(optimizer, self._began_at) != self._step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._exchange.health.place = "after optimizer.step()"
        if self._masters:
            self._masters.publish()
        if self._step_began_s:
            span = Span("step", "step", MAIN, self._step_began_s, self._recorder.clock(), self._step - 1)
            self._recorder.add(span)
        self._step_began_s = 0.0

    def _refresh_masters(self) -> None:
        if self._masters:
            self._masters.refresh()


@torch.no_grad()
def _copy_into(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.data.copy_(values[name])


def _changes(before: Generation | None, now: Generation, step: int) -> str:
    then = before.numbers if before else ()
    gone = [f"without worker {number}" for number in then if number not in now.numbers]
    come = [f"with worker {number}" for number in now.numbers if then and number not in then]
    news = f" {', '.join([*gone, *come])}" if gone or come else ""
    return f"generation {now.number}: {len(now.workers)} workers go on{news} at step {step}"


def _kind(error: BaseException) -> str:
    return "" if isinstance(error, TrainingError) else f"failed: {type(error).__name__}: "


def _is_finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    values = gradient._values() if gradient.is_sparse else gradient
    # One sum is cheap; a sum of finite numbers may overflow too, so the second look decides.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _uncompiled(hook: Callable[..., None]) -> OriginalOnly:
    """A compiled model runs around such a hook, not through it: there are clocks and collectives inside."""
    return OriginalOnly(torch.compiler.disable(hook))  # type: ignore[no-untyped-call]


def _check_not_averaged_twice(known: Collection[int]) -> None:
    """By the flow and by torch's wrapper around the model, whose hooks cannot be seen."""
    wrapper = running_wrapper()
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return
    for name, parameter in wrapper.module.named_parameters():
        if id(parameter) in known and name not in wrapper.parameters_to_ignore:
            raise UsageError(
                f"the model runs inside DistributedDataParallel, which averages the gradient of {name!r} as well: call "
                "model.module, not the wrapper, or leave one of the two out"
            )
