"""The flow that runs a plan: gradients land in the pool, messages leave as they fill, lanes carry them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gradientflow.documents import parse_json
from gradientflow.errors import NonFiniteError, UsageError
from gradientflow.exchange import Native
from gradientflow.plan import Plan
from gradientflow.profile import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.rundir import RunDirectory
from gradientflow.runtime.fingerprint import compare, describe_plan
from gradientflow.runtime.flow import Flow, Memory, trainable
from gradientflow.runtime.pool import Pool
from gradientflow.runtime.pump import Pump
from gradientflow.runtime.streams import streams_for


class PooledFlow(Flow):
    """Runs `recipe`, beginning with `plan`. If it is to `observe`, the first step shows in which order
    backward really yields gradients, and the plan is made anew from what rank 0 saw."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Native,
        recipe: Recipe,
        plan: Plan,
        *,
        observe: bool,
        overflow_is_handled: bool,
        run_directory: RunDirectory | None,
        broadcast_buffers: bool,
        master_weights: bool,
    ) -> None:
        super().__init__(model, optimizer, exchange, broadcast_buffers, master_weights)
        self.recipe = recipe
        codec = recipe.codec()
        self._raise_on_overflow = codec.can_overflow and not overflow_is_handled
        self._run_directory = run_directory
        device = next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))
        self._pump = Pump(exchange, codec, streams_for(device, exchange.num_lanes), self._recorder)

        # - The plan, and what follows from it. Hooks hold on to the lists, so they are changed in place.
        self._observing = observe
        self._next_plan: Plan | None = None
        self._pool: Pool | None = None
        self._views: list[torch.Tensor] = []
        self._scales = [_scale(parameter, exchange.world) for parameter in self._parameters.values()]
        self._messages_of: list[tuple[int, ...]] = []
        self._num_missing: list[int] = []  # per message: gradients that have not arrived
        self._num_tensors: list[int] = []  # its value at the start of a step
        self._install(plan)
        self._watch()

    @property
    def plan(self) -> Plan:
        return self._plan_now

    def memory(self) -> Memory:
        assert self._pool is not None
        masters = self._masters.nbytes if self._masters else 0
        return Memory(pool=self._pool.nbytes, wire=self._pump.wire_nbytes(), master_weights=masters)

    def state_dict(self) -> dict[str, Any]:
        """Holds the plan too: the order of a sum decides its last bits, so an exact resume needs it."""
        plan = (self._next_plan or self._plan_now).model_dump_json()
        return super().state_dict() | {"recipe": str(self.recipe), "plan": plan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        plan = None
        if isinstance(state, Mapping) and state.get("recipe") == str(self.recipe) and "plan" in state:
            # Lanes are this world's own affair: a state saved on another backend may count others.
            plan = parse_json(Plan, state["plan"], "the saved plan").on_lanes(self._exchange.num_lanes)
            try:
                plan.check(self.profile())
            except ValueError as error:
                raise UsageError(f"the state was saved for another model: {error}") from None
            compare(self._exchange.control, describe_plan(plan))
        super().load_state_dict(state)
        if plan is not None:
            self._observing = False
            self._next_plan = plan

    def close(self) -> None:
        if self._closed:
            return
        self._pump.close()  # before the lanes' groups go
        super().close()
        if self._run_directory is not None:
            self._run_directory.write_trace(self.trace())
            if self._exchange.global_rank == 0:
                self._run_directory.write_plan(self.profile(), self._plan_now)

    # - Planning

    def _agree_on_observed_plan(self) -> None:
        """Collective, at the end of the first exchanged backward pass, when every rank is here."""
        self._observing = False
        text = self._exchange.control.from_rank_0(self.profile().model_dump_json(), "hear rank 0's profile")
        observed = parse_json(Profile, text, "rank 0's profile")
        plan = self.recipe.plan(observed, self._exchange.num_lanes)
        compare(self._exchange.control, describe_plan(plan))
        if plan != self._plan_now:
            self._next_plan = plan
        if self._run_directory is not None and self._exchange.global_rank == 0:
            self._run_directory.write_plan(observed, plan)

    def _install(self, plan: Plan) -> None:
        """Lay the pool out anew. Gradients that live in the old one move over."""
        living = {
            name: parameter.grad.clone()
            for (name, parameter), view in zip(self._parameters.items(), self._views, strict=False)
            if parameter.grad is view
        }
        pool = self._pool = Pool(plan, self._parameters, self._pool)
        self._plan_now = plan
        self._views[:] = [pool.views[name] for name in self._names]
        for name, gradient in living.items():
            pool.views[name].copy_(gradient)
            self._parameters[name].grad = pool.views[name]
        self._pump.load(plan, [pool.ranges(index, message) for index, message in enumerate(plan.messages)])

        messages_of: dict[str, list[int]] = {name: [] for name in self._names}
        for index, message in enumerate(plan.messages):
            for name in dict.fromkeys(piece.tensor for piece in message.slices):
                messages_of[name].append(index)
        self._messages_of[:] = [tuple(messages_of[name]) for name in self._names]
        # The message with presence waits for one thing more, the end of backward.
        self._num_tensors = [
            len({piece.tensor for piece in message.slices}) + (index == pool.last)
            for index, message in enumerate(plan.messages)
        ]
        self._num_missing[:] = self._num_tensors

    # - A step

    def _arrival_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # This runs once a tensor and step, on the critical path (12 us a tensor at 604 of them, the
        # multiplication included: benchmarks/overhead.py). Attributes that change are
        # looked up, everything else is bound here.
        flow = self
        arrived_s, views, messages_of = self._arrived_s, self._views, self._messages_of
        num_missing, scale = self._num_missing, self._scales[index]
        clock, ready, multiply = self._recorder.clock, self._pump.ready, torch.mul

        def hook(parameter: torch.Tensor) -> None:
            if not flow._exchanging:
                flow._accumulated()
                return
            if not flow._watching:
                flow._open()
            if arrived_s[index]:
                raise flow._arrived_twice(index)
            gradient, view = parameter.grad, views[index]
            assert gradient is not None
            if gradient is not view:
                if gradient.requires_grad or gradient.is_sparse:
                    gradient = flow._plain_gradient(index, gradient)
                multiply(gradient, scale, out=view)
                parameter.grad = view
            else:
                view.mul_(scale)
            arrived_s[index] = clock()
            for message in messages_of[index]:
                num_missing[message] -= 1
                if not num_missing[message]:
                    ready(message)

        return hook

    def _plain_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.is_sparse:
            raise UsageError(
                f"the gradient of {self._names[index]!r} is sparse, which this version does not exchange: "
                "build the embedding with sparse=False"
            )
        warnings.warn("backward(create_graph=True): averaged gradients carry no graph of their own", stacklevel=2)
        return gradient.detach()

    def _begin(self) -> None:
        if self._next_plan is not None:
            plan, self._next_plan = self._next_plan, None
            self._install(plan)
        self._pump.begin(self._step)

    def _finish(self, missing: list[int]) -> None:
        assert self._pool is not None
        absent = self._fill_in(missing)
        self._pool.mark_absent(absent)
        self._pump.finish([message for message, number in enumerate(self._num_missing) if number > 0])
        self._num_missing[:] = self._num_tensors
        for name in absent - self._pool.absent_everywhere(absent):
            self._parameters[name].grad = self._pool.views[name]

    def _fill_in(self, missing: list[int]) -> set[str]:
        """Stand in for gradients that backward did not produce: what was accumulated before, else zero.
        Returns the names of those that have none at all."""
        absent = set()
        for index in missing:
            parameter, view = self._parameters[self._names[index]], self._views[index]
            if parameter.grad is None:
                view.zero_()
                absent.add(self._names[index])
            else:
                torch.mul(parameter.grad.detach(), self._scales[index], out=view)
                parameter.grad = view
        return absent

    def _abandon(self) -> None:
        for parameter, view in zip(self._parameters.values(), self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def _settle(self) -> None:
        if self._observing:
            self._agree_on_observed_plan()

    def _judge(self) -> None:
        if self._raise_on_overflow:
            self._refuse_overflow()

    def _refuse_overflow(self) -> None:
        # One sum a message is cheap; a sum of finite numbers may overflow too, so the second look decides.
        suspects = [view for view in self._views if not torch.isfinite(view.sum())]
        if suspects and not all(bool(torch.isfinite(view).all()) for view in suspects):
            names = [n for n, view in zip(self._names, self._views, strict=True) if not torch.isfinite(view).all()]
            raise NonFiniteError(
                f"step {self._step - 1}: the averaged gradient of {names[0]!r} and {len(names) - 1} more is inf or nan "
                "on every rank; fp16 on the wire ends at 65504: use +bf16, or attach(..., scaler=...) and let the "
                "scaler skip such steps"
            )


def in_order_of_registration(model: nn.Module) -> Profile:
    """A first guess: backward yields gradients in the reverse of the order in which layers were made."""
    tensors = [TensorProfile.of(name, parameter) for name, parameter in trainable(model).items()]
    return Profile(tensors=tuple(reversed(tensors)))


def _scale(parameter: torch.Tensor, world: int) -> torch.Tensor | float:
    """1 / world as the cheapest operand that does not round it.

    A 0-dim tensor of the gradient's own type halves the cost of a call (1.6 against 4.0 us); half-precision
    types would round 1/3 before it is used, a Python number is not rounded.
    """
    if parameter.dtype in (torch.float32, torch.float64):
        return torch.tensor(1.0 / world, dtype=parameter.dtype, device=parameter.device)
    return 1.0 / world
