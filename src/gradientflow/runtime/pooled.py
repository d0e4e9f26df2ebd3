"""The flow that runs a plan: gradients land in the pool, messages leave as they fill, lanes carry them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradientflow.compress import Exact
from gradientflow.documents import parse_json
from gradientflow.errors import TrainingError, UsageError
from gradientflow.exchange import Native
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.rundir import RunDirectory
from gradientflow.runtime.comm_hooks import CommHook, HookPump
from gradientflow.runtime.fingerprint import compare, describe_plan, describe_tensors
from gradientflow.runtime.flow import ArrivalHook, Flow, Memory, trainable
from gradientflow.runtime.options import Options
from gradientflow.runtime.pool import Pool
from gradientflow.runtime.pricing import measure_cost
from gradientflow.runtime.pump import Pump
from gradientflow.runtime.sparse import SparseSums, sparse_names
from gradientflow.runtime.streams import streams_for


class PooledFlow(Flow):
    """Runs `recipe`, beginning with `plan`. If it is to `observe`, the first step shows in which order
    backward really yields gradients, and the plan is made anew from what rank 0 saw."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        exchange: Native,
        recipe: Recipe,
        plan: Plan,
        options: Options,
        *,
        observe: bool,
        run_directory: RunDirectory | None,
    ) -> None:
        super().__init__(model, optimizer, exchange, options)
        self.recipe = recipe
        self._codec = recipe.codec()
        self._run_directory = run_directory
        self._comm_hooks: list[CommHook] = []

        # - The plan, and what follows from it. Hooks hold on to the lists, so they are changed in place.
        self._observes = self._observing = observe
        self._next_plan: Plan | None = None
        self._pool: Pool | None = None
        self._views: list[torch.Tensor] = []  # empty ones for sparse gradients
        self._scales: list[torch.Tensor | float] = []
        self._messages_of: list[tuple[int, ...]] = []
        self._num_missing: list[int] = []  # per message: gradients that have not arrived
        self._num_tensors: list[int] = []  # its value at the start of a step
        #: Arrivals of each gradient in one backward pass; 0: not known yet, everything waits for its end.
        self._num_expected: list[int] = []
        self._num_seen: list[int] = []
        self._take()
        self._build()
        self._install(plan)
        self._watch()

    @property
    def plan(self) -> Plan:
        return self._plan_now

    def memory(self) -> Memory:
        assert self._pool is not None
        masters = self._masters.nbytes if self._masters else 0
        return Memory(pool=self._pool.nbytes, wire=self._pump.wire_nbytes(), master_weights=masters)

    def profile(self) -> Profile:
        """As seen in the last step. Sparse gradients are not in it: they travel beside the plan."""
        return self._profile_of(tuple(name for name in self._names if name not in self._sparse.names))

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

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let `hook` do the exchange of each message from the next step on, after those given before.
        On all ranks alike, between steps."""
        if not isinstance(self._codec, Exact):
            raise UsageError(
                f"recipe '{self.recipe}' has a codec, which a comm hook would replace: leave one of them out"
            )
        self._check_whole()
        self._comm_hooks.append(hook)
        self._pump.close()
        self._build()
        self._install(self._next_plan or self._plan_now)
        self._next_plan = None

    # - Building

    def _build(self) -> None:
        """What hangs on the exchange and the set of parameters."""
        exchange = self._exchange
        parameters = list(self._parameters.values())
        device = parameters[0].device if parameters else torch.device("cpu")
        sparse = sparse_names(self._model, self._parameters)
        self._sparse = SparseSums(exchange, {name: self._parameters[name] for name in sparse})
        self._pump: Pump | HookPump
        if self._comm_hooks:
            self._pump = HookPump(exchange, self._comm_hooks, self._recorder)
            self._scales[:] = [1.0] * len(parameters)  # a comm hook divides for itself
        else:
            self._pump = Pump(exchange, self._codec, streams_for(device, exchange.num_lanes), self._recorder)
            self._scales[:] = [_scale(parameter, exchange.world) for parameter in parameters]
        self._num_expected[:] = [0 if self._options.static_graph else 1] * len(parameters)
        self._num_seen[:] = [0] * len(parameters)

    def _restart(self) -> None:
        self._pump.close()
        self._build()
        guess = in_order_of_registration(self._model, self._options.ignored, self._parameters)
        plan = self.recipe.plan(guess, self._exchange.num_lanes)
        compare(self._exchange.control, describe_tensors("trainable", self._parameters) | describe_plan(plan))
        self._pool, self._views[:] = None, []
        self._next_plan, self._observing = None, self._observes
        self._install(plan)

    def _install(self, plan: Plan) -> None:
        """Lay the pool out anew. Gradients that live in the old one move over."""
        living = {
            name: parameter.grad.clone()
            for (name, parameter), view in zip(self._parameters.items(), self._views, strict=False)
            if parameter.grad is not None and parameter.grad is view
        }
        pool = self._pool = Pool(plan, self._parameters, self._pool, presence_apart=bool(self._comm_hooks))
        self._plan_now = plan
        nothing = torch.empty(0)
        self._views[:] = [pool.views.get(name, nothing) for name in self._names]
        for name, gradient in living.items():
            pool.views[name].copy_(gradient)
            self._parameters[name].grad = pool.views[name]
        ranges = [pool.ranges(index, message) for index, message in enumerate(plan.messages)]
        if isinstance(self._pump, HookPump):
            self._pump.load(plan, ranges, pool, self._parameters)
        else:
            self._pump.load(plan, ranges)

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

    def _agree_on_observed_plan(self) -> None:
        """Collective, at the end of the first exchanged backward pass, when every rank is here."""
        self._observing = False
        exchange, observed = self._exchange, self.profile()
        device = next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))
        cost = measure_cost(exchange, self._codec, device, self._step) if self.recipe.needs_cost else None
        # One rank's plan, not one rank's profile: the last digit of a logarithm is the processor's own affair.
        own = self.recipe.plan(observed, exchange.num_lanes, cost).model_dump_json() if exchange.rank == 0 else ""
        plan = parse_json(Plan, exchange.control.from_rank_0(own, "hear rank 0's plan"), "rank 0's plan")
        plan.check(observed)
        compare(exchange.control, describe_plan(plan))
        if plan != self._plan_now:
            self._next_plan = plan
        if self._run_directory is not None and exchange.global_rank == 0:
            self._run_directory.write_plan(observed, plan)

    # - A step

    def _arrival_hook(self, index: int, parameter: nn.Parameter) -> ArrivalHook:
        # This runs once a tensor and step, on the critical path (12 us a tensor at 604 of them, the
        # multiplication included: benchmarks/overhead.py). Attributes that change are
        # looked up, everything else is bound here.
        flow, context = self, self._context
        arrived_s, num_expected, num_seen = self._arrived_s, self._num_expected, self._num_seen

        def hook(passed_on: object, got: Sequence[torch.Tensor | None]) -> None:
            if not flow.exchanging:
                flow._accumulated(index)
                return
            if not flow._watching:
                flow._open()
            if context.context is not None:
                flow._local.add(index)  # taken up from there when backward ends
                return
            if got[0] is None or parameter.grad is None:
                return  # a function in the graph gave no gradient: this parameter was not used
            if arrived_s[index]:
                raise flow._arrived_twice(index)
            num_seen[index] += 1
            if num_seen[index] == num_expected[index]:
                take(parameter)

        take = self._taker(index)
        return hook

    def _taker(self, index: int) -> Callable[[torch.Tensor], None]:
        """What is done with gradient `index` once it is complete."""
        flow, as_view = self, self._options.gradients_are_views
        arrived_s, views, scales = self._arrived_s, self._views, self._scales
        messages_of, num_missing = self._messages_of, self._num_missing
        clock, multiply = self._recorder.clock, torch.mul
        if self._names[index] in self._sparse.names:
            return lambda parameter: arrived_s.__setitem__(index, clock())

        def take(parameter: torch.Tensor) -> None:
            gradient, view = parameter.grad, views[index]
            assert gradient is not None
            if gradient is not view:
                if (
                    gradient.requires_grad
                    or gradient.is_sparse
                    or gradient.shape != view.shape
                    or gradient.dtype is not view.dtype
                ):
                    gradient = flow._plain_gradient(index, gradient)
                multiply(gradient, scales[index], out=view)
                if as_view:
                    parameter.grad = view
            else:
                view.mul_(scales[index])
            arrived_s[index] = clock()
            for message in messages_of[index]:
                num_missing[message] -= 1
                if not num_missing[message]:
                    flow._pump.ready(message)

        return take

    def _plain_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        name = self._names[index]
        if gradient.is_sparse:
            raise UsageError(
                f"the gradient of {name!r} is sparse, and its module is no nn.Embedding(sparse=True) that says so: "
                "make it dense"
            )
        view = self._views[index]
        if (gradient.shape, gradient.dtype) != (view.shape, view.dtype):
            raise TrainingError(
                f"the gradient of {name!r} is {gradient.dtype} {list(gradient.shape)}, its parameter was {view.dtype} "
                f"{list(view.shape)} when it was taken up: build a new wrapper or attach again"
            )
        if not gradient.requires_grad:
            return gradient
        warnings.warn("backward(create_graph=True): averaged gradients carry no graph of their own", stacklevel=2)
        return gradient.detach()

    def _begin(self) -> None:
        if self._next_plan is not None:
            plan, self._next_plan = self._next_plan, None
            self._install(plan)
        self._pump.begin(self._step)

    def _finish(self, missing: list[int], skipped: bool) -> bool:
        pool = self._pool
        assert pool is not None
        missing = self._take_late(missing)
        absent, kept = self._fill_in(missing)
        pool.mark_absent(absent | kept.keys(), skipped)
        self._pump.finish([message for message, number in enumerate(self._num_missing) if number > 0])
        self._num_missing[:] = self._num_tensors
        self._num_seen[:] = [0] * len(self._num_seen)
        if self._num_contributing != self._exchange.world and not self._comm_hooks:
            pool.scale(self._exchange.world / self._num_contributing)
        self._sparse.sum(self._step, self._num_contributing, self._joined)
        if not self._joined:
            self._hand_out(absent, kept)
        return pool.somebody_skipped()

    def _take_late(self, missing: list[int]) -> list[int]:
        """Take what arrived less often than expected, or in a first step that only counts. Returns what never
        arrived."""
        never = [index for index in missing if not self._num_seen[index]]
        for index in missing:
            if self._num_seen[index]:
                self._taker(index)(self._parameters[self._names[index]])
        if self._options.static_graph and not self._joined:
            self._num_expected[:] = [max(1, seen) for seen in self._num_seen]
        return [index for index in never if self._names[index] not in self._sparse.names]

    def _fill_in(self, missing: list[int]) -> tuple[set[str], dict[str, torch.Tensor]]:
        """Stand in for gradients that backward did not produce: what is there from before, else zero.

        Returns the names of those that have none at all, and copies of those that nothing was added to since
        the last exchange: if no rank added to them, they are to stay as they are, to the last bit.
        """
        absent, kept = set(), {}
        for index in missing:
            name, view = self._names[index], self._views[index]
            parameter = self._parameters[name]
            if parameter.grad is None or self._joined:
                view.zero_()
                absent.add(name)
                continue
            gradient = parameter.grad.detach()
            if index not in self._local:
                kept[name] = gradient.clone()
            torch.mul(gradient, self._scales[index], out=view)
            if self._options.gradients_are_views:
                parameter.grad = view
        return absent, kept

    @torch.no_grad()
    def _hand_out(self, absent: set[str], kept: dict[str, torch.Tensor]) -> None:
        """Sums are in the pool: give them to the parameters."""
        assert self._pool is not None
        nowhere = self._pool.absent_everywhere(absent | kept.keys())
        as_view = self._options.gradients_are_views
        for name in absent - nowhere:
            view = self._pool.views[name]
            self._parameters[name].grad = view if as_view else view.clone()
        for name in kept.keys() & nowhere:
            gradient = self._parameters[name].grad
            if gradient is not None:
                gradient.copy_(kept[name])
        if not as_view:
            for name, view in self._pool.views.items():
                gradient = self._parameters[name].grad
                if gradient is not None and name not in nowhere:
                    gradient.copy_(view)

    def _abandon(self) -> None:
        for parameter, view in zip(self._parameters.values(), self._views, strict=False):
            if parameter.grad is view or not self._options.gradients_are_views:
                parameter.grad = None

    def _settle(self) -> None:
        if self._observing:
            self._agree_on_observed_plan()

    def _num_calls_outside(self) -> int:
        return self._pump.num_calls if isinstance(self._pump, HookPump) else 0

    def _can_overflow(self) -> bool:
        return self._codec.can_overflow


def in_order_of_registration(
    model: nn.Module, ignored: frozenset[str] = frozenset(), among: Mapping[str, nn.Parameter] | None = None
) -> Profile:
    """A first guess: backward yields gradients in the reverse of the order in which layers were made. Without
    those that yield sparse ones."""
    parameters = trainable(model, ignored) if among is None else among
    sparse = sparse_names(model, parameters)
    tensors = [TensorProfile.of(name, parameter) for name, parameter in parameters.items() if name not in sparse]
    return Profile(tensors=tuple(reversed(tensors)))


def _scale(parameter: torch.Tensor, world: int) -> torch.Tensor | float:
    """1 / world as the cheapest operand that does not round it.

    A 0-dim tensor of the gradient's own type halves the cost of a call (1.6 against 4.0 us); half-precision
    types would round 1/3 before it is used, a Python number is not rounded.
    """
    if parameter.dtype in (torch.float32, torch.float64):
        return torch.tensor(1.0 / world, dtype=parameter.dtype, device=parameter.device)
    return 1.0 / world
