"""A flow: the hooks that carry a model's gradients from backward to everybody's optimizer.

`Flow` watches the training loop and knows nothing of how gradients travel. A training step, as seen from
here:

    forward       buffers are made rank 0's, as DDP does
    backward      each gradient arrives (`_arrival_hook`), the first one opens the step
    end of it     the step is finished (`_finish`): gradients are the average over ranks on return
    optimizer     `step()` refuses gradients that were never exchanged

Hooks are PyTorch's public ones (runtime/autograd.py holds the exception), all of them removed by
`close()`. Two ways of travelling exist: `PooledFlow` (the product) and `PlainFlow` (`GRADIENTFLOW=off`).
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.documents import Record
from gradientflow.errors import TrainingError, UsageError
from gradientflow.exchange import Native
from gradientflow.plan import Plan
from gradientflow.profile import Profile, TensorProfile
from gradientflow.runtime.autograd import after_enclosing_node, at_end_of_backward, inside_backward
from gradientflow.runtime.hooks import OriginalOnly
from gradientflow.runtime.master import MasterWeights
from gradientflow.runtime.observe import ForwardObserver
from gradientflow.trace import MAIN, Recorder, Span, Trace


class Memory(Record):
    """What a flow holds, in bytes."""

    pool: int = 0
    #: What a codec holds beside the pool while messages are on the wire, at most.
    wire: int = 0
    master_weights: int = 0


class Flow(ABC):
    """Made by `gradientflow.attach`; a context manager."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Native,
        broadcast_buffers: bool,
        master_weights: bool,
    ) -> None:
        # - What is trained
        self._model = model
        self._optimizer = optimizer
        self._parameters = trainable(model)
        self._names = tuple(self._parameters)
        self._wants_masters = master_weights
        self._masters: MasterWeights | None = None
        self._known: set[int] = set()  # identities of what is exchanged, masters included
        self._exchange = exchange
        self._broadcast_buffers = broadcast_buffers

        # - Where the current step stands
        self._step = 0
        self._exchanging = True  # False inside no_sync()
        self._watching = False  # the end of the running backward pass will call us
        self._arrived_s = [0.0] * len(self._names)  # 0.0: not yet
        self._opened_s = 0.0  # first arrival of this step; 0.0: none
        self._local_only = False  # gradients were accumulated under no_sync() and not exchanged since
        self._broken: TrainingError | None = None

        # - What is measured
        self._recorder = Recorder()
        self._forward_began_s = 0.0
        self._step_began_s = 0.0
        self._last_arrived_s = self._arrived_s
        self._last_opened_s = 0.0
        self._observer: ForwardObserver | None = None

        self._closed = False
        self._handles: list[RemovableHandle] = []

    def _watch(self) -> None:
        """Take hold of model and optimizer; the last thing a constructor does, so that one that fails
        leaves nothing behind."""
        if self._wants_masters:
            self._masters = MasterWeights(self._parameters, self._optimizer)
            refresh = OriginalOnly(lambda module, keys: self._refresh_masters())
            handle = self._model.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        held = [*self._parameters.values(), *(self._masters.parameters() if self._masters else ())]
        self._known = {id(parameter) for parameter in held}
        self._observer = ForwardObserver(self._model, self._parameters)
        for index, parameter in enumerate(self._parameters.values()):
            handle = parameter.register_post_accumulate_grad_hook(self._arrival_hook(index))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        self._handles += [
            self._model.register_forward_pre_hook(_uncompiled(self._before_forward)),
            self._model.register_forward_hook(_uncompiled(self._after_forward)),
            self._optimizer.register_step_pre_hook(OriginalOnly(self._before_step)),
            self._optimizer.register_step_post_hook(OriginalOnly(self._after_step)),
        ]
        _open_flows.add(self)
        atexit.register(self.close)

    # - What a way of travelling has to say

    @abstractmethod
    def _arrival_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """The hook of parameter `index`. It calls `_open` before the first gradient of a step and notes
        `_arrived_s[index]`; outside an exchange it does nothing but call `_accumulated`."""

    @abstractmethod
    def _finish(self, missing: list[int]) -> None:
        """All gradients but the `missing` have arrived: make every gradient the average over ranks."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """What is being sent in which order."""

    @abstractmethod
    def memory(self) -> Memory:
        """Bytes held beyond the model, the optimizer and the process group."""

    # - For the training loop

    @property
    def step(self) -> int:
        """How many exchanges have been finished."""
        return self._step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate, on this rank. Enter it on all ranks alike."""
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def synchronize(self) -> None:
        """Raise unless every gradient of the last exchanged backward pass is the average over ranks."""
        self._check_whole()

    def trace(self) -> Trace:
        """What happened on this rank, up to the last 100,000 spans."""
        return self._recorder.trace(self._exchange.global_rank)

    def profile(self) -> Profile:
        """The model's tensors as the last exchanged backward pass and the first forward passes showed them."""
        order = sorted(range(len(self._names)), key=lambda index: self._last_arrived_s[index] or float("inf"))
        forward_s = self._observer.seconds if self._observer else {}
        position = {name: number for number, name in enumerate(dict.fromkeys([*forward_s, *self._names]))}
        tensors, previous_s = [], self._last_opened_s
        for index in order:
            name = self._names[index]
            arrived_s = self._last_arrived_s[index] or previous_s
            times = {"forward_order": position[name], "forward_s": forward_s.get(name, 0.0)}
            times["backward_s"] = max(0.0, arrived_s - previous_s)
            tensors.append(TensorProfile.of(name, self._parameters[name]).model_copy(update=times))
            previous_s = arrived_s
        return Profile(tensors=tuple(tensors))

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved with a checkpoint, on every rank."""
        masters = self._masters.state_dict() if self._masters else {}
        return {"version": 1, "step": self._step, "master_weights": masters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, on all ranks together; after the model's own."""
        if not isinstance(state, Mapping) or state.get("version") != 1:
            raise UsageError("expected what state_dict() of a flow gave, version 1")
        missing = {"step", "master_weights"} - state.keys()
        if missing:
            raise UsageError(f"the state lacks {', '.join(sorted(missing))}: it is not what state_dict() gave")
        if bool(state["master_weights"]) != (self._masters is not None):
            raise UsageError("the state was saved with another setting of master_weights")
        if self._masters:
            self._masters.load_state_dict(state["master_weights"])
        self._step = int(state["step"])

    def close(self) -> None:
        """Take everything away that `attach` put there. Finished gradients stay as they are."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        _open_flows.discard(self)
        for handle in self._handles:
            handle.remove()
        if self._observer:
            self._observer.close()
        if self._opened_s:
            self._abandon()
        if self._masters:
            self._masters.restore()
        if self._broken is None:
            self._exchange.close()  # a broken one may block: its operations are still in flight

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # - Hooks

    def _open(self) -> None:
        """Before a gradient is taken up, once a backward pass (again after an inner one has ended)."""
        self._check_unbroken()
        self._watching = True
        at_end_of_backward(self._backward_ended)
        if not self._opened_s:
            self._opened_s = self._recorder.clock()
            self._begin()

    def _begin(self) -> None:  # noqa: B027 - nothing, unless a way of travelling says otherwise
        """The first gradient of a step is about to be taken up."""

    def _accumulated(self) -> None:
        self._local_only = True

    def _arrived_twice(self, index: int) -> TrainingError:
        self._broken = TrainingError(
            f"the gradient of {self._names[index]!r} arrived twice in step {self._step}: either an earlier backward "
            "pass was broken off by an exception (close this flow and attach again), or the parameter is shared "
            "by regions under reentrant checkpointing (use checkpoint(..., use_reentrant=False))"
        )
        return self._broken

    def _check_unbroken(self) -> None:
        if self._broken is not None:
            raise TrainingError(f"this flow broke down before: {self._broken}") from self._broken

    def _check_whole(self) -> None:
        """Between backward passes no step may be open: what is in the gradients then is not an average."""
        self._check_unbroken()
        if self._opened_s:
            self._broken = TrainingError(
                f"the backward pass of step {self._step} did not finish its exchange, an exception broke it off: "
                "close this flow and attach again"
            )
            self._abandon()
            raise self._broken

    def _backward_ended(self) -> None:
        self._watching = False
        if not self._opened_s:
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
        ended_s = self._recorder.clock()
        missing = [index for index, arrived_s in enumerate(self._arrived_s) if not arrived_s]
        with self._breaking():
            self._finish(missing)
        done_s = self._recorder.clock()
        self._recorder.add(Span("backward", "backward", MAIN, self._opened_s, ended_s, self._step))
        self._recorder.add(Span("exposed", "exposed", MAIN, ended_s, done_s, self._step))
        if self._masters:
            self._masters.take_gradients()
        self._last_arrived_s, self._last_opened_s = self._arrived_s.copy(), self._opened_s
        self._arrived_s[:] = [0.0] * len(self._names)
        self._opened_s = 0.0
        self._local_only = False
        self._step += 1
        with self._breaking():
            self._settle()
        self._judge()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """A failure inside ends this flow: ranks may no longer stand at the same place."""
        try:
            yield
        except BaseException as error:
            self._broken = self._explain(error)
            self._abandon()
            if not isinstance(error, Exception):
                raise
            raise self._broken from error

    def _settle(self) -> None:  # noqa: B027
        """Every rank has finished the step: what has to be agreed on before the next may be done here."""

    @abstractmethod
    def _abandon(self) -> None:
        """The exchange of this step failed: let go of memory that it may still write to."""

    def _judge(self) -> None:  # noqa: B027
        """The step is finished and the flow ready for the next; raise if its result must not be used."""

    def _explain(self, error: BaseException) -> TrainingError:
        where = f"rank {self._exchange.rank} of {self._exchange.world}, step {self._step}"
        kind = type(error) if isinstance(error, TrainingError) else TrainingError
        words = f"{where}: {error or type(error).__name__}"
        if isinstance(error, TrainingError):
            missing = self._exchange.control.missing_at(f"stuck/{self._step}")
            if missing:
                words += f"; not stuck there too: rank {', '.join(map(str, missing))}"
        return kind(words)

    def _before_forward(self, model: nn.Module, args: object) -> None:
        if not (model.training and torch.is_grad_enabled()) or inside_backward():
            return  # evaluation may happen on one rank only; recomputation is not a forward pass
        self._check_whole()
        if self._exchanging and self._broadcast_buffers:
            with self._breaking():
                self._exchange.broadcast(model.buffers())
        self._forward_began_s = self._recorder.clock()
        self._step_began_s = self._step_began_s or self._forward_began_s

    def _after_forward(self, model: nn.Module, args: object, output: object) -> None:
        if not self._forward_began_s:
            return
        now_s = self._recorder.clock()
        self._recorder.add(Span("forward", "forward", MAIN, self._forward_began_s, now_s, self._step))
        self._forward_began_s = 0.0
        if self._observer:
            self._observer.end_of_forward()

    def _before_step(self, optimizer: object, args: object, kwargs: object) -> None:
        self._check_whole()
        self._check_owners()
        if self._local_only:
            raise UsageError(
                "optimizer.step() with gradients that never left this rank: the last backward pass before "
                "step() must run outside no_sync()"
            )

    def _check_owners(self) -> None:
        """Everything the optimizer updates must be exchanged, also what it was given since `attach`."""
        known = self._known
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known and parameter.requires_grad:
                    raise UsageError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that was not there or not "
                        "trainable when attach() was called: its gradients are not averaged. close() and attach again"
                    )

    def _after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        if self._masters:
            self._masters.publish()
        if self._step_began_s:
            span = Span("step", "step", MAIN, self._step_began_s, self._recorder.clock(), self._step - 1)
            self._recorder.add(span)
        self._step_began_s = 0.0

    def _refresh_masters(self) -> None:
        if self._masters:
            self._masters.refresh()


def _uncompiled(hook: Callable[..., None]) -> OriginalOnly:
    """A compiled model runs around such a hook, not through it: there are clocks and collectives inside."""
    return OriginalOnly(torch.compiler.disable(hook))  # type: ignore[no-untyped-call]


#: Flows that are attached now.
_open_flows: weakref.WeakSet[Flow] = weakref.WeakSet()


def held_by_a_flow(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of those that another flow exchanges already; two would both divide by the world."""
    held = {id(parameter) for flow in _open_flows for parameter in flow._parameters.values()}
    return [name for name, parameter in parameters.items() if id(parameter) in held]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are exchanged; a tied one counts once, by its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
