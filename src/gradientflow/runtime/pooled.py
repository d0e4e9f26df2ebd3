"""The flow that runs a plan: gradients land in the pool, messages leave as they fill, lanes carry them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradientflow.compress import Exact, Feedback
from gradientflow.errors import NonFiniteError, TrainingError, UsageError
from gradientflow.exchange import Exchange
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import DEFAULT, Recipe, as_recipe
from gradientflow.rundir import RunDirectory
from gradientflow.runtime.comm_hooks import CommHook, HookPump
from gradientflow.runtime.compression import Compression
from gradientflow.runtime.fingerprint import compare, describe_plan, describe_tensors
from gradientflow.runtime.flow import ArrivalHook, GradientFlow
from gradientflow.runtime.gate import Gate, Owner
from gradientflow.runtime.handle import Memory, as_states, trainable
from gradientflow.runtime.hooks import OriginalOnly
from gradientflow.runtime.keyed import KeyedPump
from gradientflow.runtime.leaving import LiveTrace
from gradientflow.runtime.optimizers import Given, OneOptimizer
from gradientflow.runtime.options import Options
from gradientflow.runtime.planning import OBSERVED_STEPS, Observed, Planning
from gradientflow.runtime.pool import Pool
from gradientflow.runtime.pump import Pump
from gradientflow.runtime.shards import Shards
from gradientflow.runtime.shares import Watch
from gradientflow.runtime.sparse import SparseSums, sparse_names
from gradientflow.runtime.states import COMPRESSION, RANKS, kept_by, shares
from gradientflow.runtime.streams import streams_for
from gradientflow.runtime.waiting import UnfinishedGradient
from gradientflow.saved import reading
from gradientflow.trace import MAIN, Span
from gradientflow.tune.explain import Situation
from gradientflow.tune.memory import Cache
from gradientflow.tune.notes import FILE as NOTES
from gradientflow.tune.notes import Notes

_log = logging.getLogger(__name__)


class PooledFlow(GradientFlow):
    """Runs `recipe`, beginning with `plan`. If it is to `observe`, the first step shows in which order
    backward really yields gradients, and the plan is made anew from what rank 0 saw."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        exchange: Exchange,
        recipe: Recipe,
        plan: Plan,
        options: Options,
        *,
        observe: bool,
        run_directory: RunDirectory | None,
        cache: Cache | None = None,
    ) -> None:
        super().__init__(model, optimizer, exchange, options)
        self.recipe = recipe
        self._codec = recipe.codec()
        self._compression = Compression(self._codec, options.scaler) if isinstance(self._codec, Feedback) else None
        self._run_directory = run_directory
        self._live = LiveTrace(run_directory, self._recorder, exchange.global_rank) if run_directory else None
        self._comm_hooks: list[CommHook] = []

        self._gate: Gate | None = None
        self._gate_shut = ""  # why steps are not put off after all
        self._watch_optimizer: Watch | None = None
        self._optimizer_is_known = False  # a whole step of it was watched, and it can be run in parts
        self._num_objections = 0
        self._cache, self._observes = cache, observe
        self._planning = self._new_planning()
        self._version = 0  # of the pool when backward had ended

        # - The plan, and what follows from it. Hooks hold on to the lists, so they are changed in place.
        self._pool: Pool | None = None
        self._shards: Shards | None = None
        self._views: list[torch.Tensor] = []  # empty ones for sparse gradients
        self._addresses: list[int] = []  # of those, in the pool
        self._handed: list[torch.Tensor] = []  # what `.grad` becomes: those, or what waits for them
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
        self._meet_optimizer(aloud=exchange.rank == 0)
        if options.gate:
            assert isinstance(self._optimizers, OneOptimizer) and options.gradients_are_views
            before = OriginalOnly(lambda *given: self.catch_up())
            self._handles.append(self._optimizers.optimizer.register_state_dict_pre_hook(before))
            self._handles.append(self._optimizers.optimizer.register_load_state_dict_pre_hook(before))

    @property
    def plan(self) -> Plan:
        return self._plan_now

    @property
    def gated(self) -> bool:
        return self._gate is not None and bool(self._plan_now.stages) and not self._gate_shut

    @property
    def is_trying(self) -> bool:
        return self._planning.is_trying

    def synchronize(self) -> None:
        super().synchronize()
        self._planning.stand_apart()

    def begin_forward(self) -> None:
        super().begin_forward()
        if self._gate is not None:
            self._gate.enter_model()

    def memory(self) -> Memory:
        assert self._pool is not None
        return Memory(
            pool=self._pool.nbytes,
            wire=self._pump.wire_nbytes(),
            master_weights=self._masters.nbytes if self._masters else 0,
            remembered=self._compression.nbytes if self._compression else 0,
            own_gradients=sum(view.nbytes for view in self._views) if self._roster else 0,
        )

    def profile(self) -> Profile:
        """As seen in the last step. Sparse gradients are not in it: they travel beside the plan."""
        return self._profile_of(tuple(name for name in self._names if name not in self._sparse.names))

    def state_dict(self) -> dict[str, Any]:
        """Holds the plan too: the order of a sum decides its last bits, so an exact resume needs it."""
        self.catch_up()
        found = super().state_dict() | {"recipe": str(self.recipe)} | self._planning.state_dict(self._plan_now)
        if self._compression:
            kept = {COMPRESSION: self._compression.state_dict()}
            found |= kept_by(self._exchange.rank, self._exchange.world, kept)
        return found

    @reading("the state")
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self.catch_up()
        states, saved = as_states(state), None
        state = states[0]
        if self._roster is not None:
            if self._step:
                raise UsageError(
                    f"this worker has joined others at step {self._step}, and has what they have: load a checkpoint "
                    "before attach(), and the flow's state only if flow.step is 0"
                )
            super().load_state_dict(state)  # plans are made anew by each generation
            self._regrouped_at = self._verified_at = self._step
            return
        if isinstance(state, Mapping) and state.get("recipe") == str(self.recipe) and "plan" in state:
            saved = self._planning.read(state, self.profile())
        super().load_state_dict(state)
        if self._compression and RANKS in state:
            given = shares(states, self._exchange.rank, self._exchange.world)
            self._compression.load_state_dict(given.of(COMPRESSION))
            self._planning.put(self._plan_now)  # what was loaded takes its place when a plan is installed
        elif RANKS in state and self._exchange.rank == 0:
            _log.warning(
                "recipe '%s' keeps nothing from step to step: what '%s' had not sent yet is lost, and momentum it kept",
                self.recipe,
                state.get("recipe"),
            )
        if saved is not None:
            self._planning.go_on(saved, self.profile())

    def _let_go(self) -> None:
        if self._gate is not None:
            self._gate.cancel()
            self._gate.take_doors_away()
        if self._compression:
            self._compression.close()
        self._pump.close()  # before the lanes' groups go
        super()._let_go()
        if self._run_directory is not None:
            self._run_directory.write_trace(self.trace())
            self._write_plan(self.profile(), self._plan_now)

    def _situation(self) -> Situation:
        return Situation(self.profile(), self._plan_now, self.recipe, self._exchange.world, self._planning.notes)

    def _new_planning(self) -> Planning:
        return Planning(
            self.recipe,
            self._codec,
            self._exchange,
            self._recorder,
            self._cache,
            observes=self._observes,
            by_time=self.recipe.needs_cost or self._options.gate,
            note=self._write_notes,
            written=self._write_plan,
        )

    def _observe(self) -> Observed:
        return Observed(
            step=self._step,
            profile=self.profile(),
            plan=self._plan_now,
            nbytes=self._pool.nbytes if self._pool else 0,
            device=self._device(),
            gated=self._gate is not None and not self._gate_shut,
            changes=self._roster is not None,
        )

    def _write_plan(self, profile: Profile, plan: Plan) -> None:
        if self._run_directory is not None and self._exchange.global_rank == 0:
            self._run_directory.write_plan(profile, plan)

    def _write_notes(self, notes: Notes) -> None:
        if self._run_directory is not None and self._exchange.global_rank == 0:
            notes.write(self._run_directory.path / NOTES)

    def use_comm_hook(self, hook: CommHook) -> None:
        """Let `hook` do the exchange of each message from the next step on, after those given before.
        On all ranks alike, between steps."""
        if not isinstance(self._codec, Exact):
            raise UsageError(
                f"recipe '{self.recipe}' has a codec, which a comm hook would replace: leave one of them out"
            )
        self._keep_tensors_whole()
        self.synchronize()
        self._comm_hooks.append(hook)
        self._pump.close()
        self._build()
        self._install(self._planning.take() or self._plan_now)

    def _keep_tensors_whole(self) -> None:
        """A hook gets whole gradients, and may remember things by a bucket's number: where plans are tried in turn, it
        is the default's that stays."""
        if self.recipe.tunes:
            self.recipe = as_recipe(DEFAULT)
            self._planning = self._new_planning()
            guess = in_order_of_registration(self._model, self._options.ignored, self._parameters)
            self._planning.put(self.recipe.plan(guess, self._exchange.num_lanes))
        elif self.recipe.wants_gate:
            raise UsageError(
                f"recipe '{self.recipe}' cuts tensors, and a comm hook gets whole gradients: use lazy, merge or mg-wfbp"
            )

    # - Building

    def _build(self) -> None:
        """What hangs on the exchange and the set of parameters."""
        exchange = self._exchange
        parameters = list(self._parameters.values())
        device = self._device()
        sparse = sparse_names(self._model, self._parameters)
        self._sparse = SparseSums(exchange, {name: self._parameters[name] for name in sparse})
        self._pump: Pump | KeyedPump | HookPump
        if self._comm_hooks:
            self._pump = HookPump(exchange, self._comm_hooks, self._recorder)
            self._scales[:] = [1.0] * len(parameters)  # a comm hook divides for itself
        else:
            if exchange.servers is not None:
                self._pump = KeyedPump(exchange, exchange.servers, self._codec, self._recorder)
            else:
                streams = streams_for(device, exchange.num_lanes)
                self._pump = Pump(exchange, self._codec, streams, self._recorder)
            self._scales[:] = [_scale(parameter, exchange.world) for parameter in parameters]
        self._num_expected[:] = [0 if self._options.static_graph else 1] * len(parameters)
        self._num_seen[:] = [0] * len(parameters)
        if self._gate is not None:
            self._gate.take_doors_away()
            self._gate = None
        if self._options.gate and not self._comm_hooks:
            owner = Owner(self._wait_for, self._wait_for_all, self._norms, self._conclude_early, self._breaking)
            self._gate = Gate(parameters, owner, self._recorder)

    def _restart(self) -> None:
        self._pump.close()
        self._build()
        guess = in_order_of_registration(self._model, self._options.ignored, self._parameters)
        plan = self.recipe.plan(guess, self._exchange.num_lanes)
        compare(self._exchange.control, describe_tensors("trainable", self._parameters) | describe_plan(plan))
        self._pool, self._views[:] = None, []
        self._planning = self._new_planning()  # to measure costs is collective, and who has just come has none
        self._install(plan)
        self._meet_optimizer(aloud=False)

    def _meet_optimizer(self, *, aloud: bool) -> None:
        if self._compression is None:
            return
        copies = self._masters.by_name() if self._masters else {}
        names: dict[torch.Tensor, str] = {
            copies.get(name, p): name for name, p in self._parameters.items() if name not in self._sparse.names
        }
        one = self._optimizers.optimizer if isinstance(self._optimizers, OneOptimizer) else None
        self._compression.meet_optimizer(one, names, aloud=aloud)

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
        self._addresses = [view.data_ptr() for view in self._views]
        self._handed[:] = self._views
        for name, gradient in living.items():
            pool.views[name].copy_(gradient)
            self._parameters[name].grad = pool.views[name]
        if isinstance(self._pump, HookPump):
            ranges = [pool.ranges(index, message) for index, message in enumerate(plan.messages)]
            self._pump.load(plan, ranges, pool, self._parameters)
        else:
            self._load_pump(self._pump, pool, plan)

        messages_of: dict[str, list[int]] = {name: [] for name in self._names}
        for index, message in enumerate(plan.messages):
            for name in dict.fromkeys(piece.tensor for piece in message.slices):
                messages_of[name].append(index)
        self._messages_of[:] = [tuple(messages_of[name]) for name in self._names]
        # The message with presence waits for one thing more, the end of backward.
        self._num_tensors = [
            len({piece.tensor for piece in message.slices}) + (index == pool.carrier)
            for index, message in enumerate(plan.messages)
        ]
        self._num_missing[:] = self._num_tensors
        if self._gate is not None and plan.stages:
            self._load_gate(self._gate, plan)

    def _load_pump(self, pump: Pump | KeyedPump, pool: Pool, plan: Plan) -> None:
        apart = self._compression is not None
        parcels = [pool.parcel(index, message, flags_apart=apart) for index, message in enumerate(plan.messages)]
        self._shards = Shards(plan, pool, self._names, self._exchange) if plan.norms else None
        closing = self._shards.converse if self._shards else None
        if self._compression:
            self._compression.lay_out(plan, parcels, pool.views, self._exchange)
            closing = self._compression.closing
        pump.load(plan, parcels, closing)

    def _load_gate(self, gate: Gate, plan: Plan) -> None:
        number = {name: index for index, name in enumerate(self._names)}
        stages = [(_label(stage), [number[name] for name in stage]) for stage in plan.stages]
        behind: dict[nn.Module, list[int]] = {}
        for name, module in (self._observer.doors if self._observer else {}).items():
            behind.setdefault(module, []).append(number[name])
        at_start = behind.pop(self._model, [])
        gate.load(stages, self._messages_of, self._views, list(behind.items()), at_start)
        if self.gated:
            self._handed[:] = gate.handed

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
            gradient = parameter.grad
            if got[0] is None or gradient is None:
                return  # a function in the graph gave no gradient: this parameter was not used
            if arrived_s[index]:
                raise flow._arrived_twice(index)
            num_seen[index] += 1
            if num_seen[index] == num_expected[index]:
                take(parameter, gradient)

        take = self._taker(index)
        return hook

    def _taker(self, index: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """What is done with a parameter and its gradient `index` once that is complete."""
        flow, as_view = self, self._options.gradients_are_views
        arrived_s, views, scales = self._arrived_s, self._views, self._scales
        messages_of, num_missing, handed = self._messages_of, self._num_missing, self._handed
        clock, multiply = self._recorder.clock, torch.mul
        if self._names[index] in self._sparse.names:
            return lambda parameter, gradient: arrived_s.__setitem__(index, clock())

        kept = self._kept

        def take(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            view = views[index]
            if flow._roster is not None:
                kept[index] = gradient.clone() if gradient is view else gradient
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
                    parameter.grad = handed[index]
            else:
                view.mul_(scales[index])
                parameter.grad = handed[index]
            arrived_s[index] = clock()
            for message in messages_of[index]:
                num_missing[message] -= 1
                if not num_missing[message]:
                    flow._pump.ready(message)

        return take

    def _take_gradient(self, index: int) -> None:
        parameter = self._parameters[self._names[index]]
        assert parameter.grad is not None
        self._taker(index)(parameter, parameter.grad)

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
        self._bring_views_home()
        if not isinstance(self._pump, HookPump):
            self._planning.stood(self._pump.idle_s, self._opened_s - self._previous_opened_s)
        moments_s = self._previous_opened_s, self._opened_s
        is_settled = self._compression is not None and self._compression.warmed_up
        with self._breaking():
            if self._planning.step_begins(self._observe, self._plan_now, self._step, *moments_s, is_settled=is_settled):
                self._opened_s = self._recorder.clock()
        if (plan := self._planning.take()) is not None:
            self._install(plan)
        if self._roster is not None and self._accumulates():
            raise UsageError(
                "a backward pass adds to gradients that are averages already: where workers come and go, accumulate "
                "under no_sync(), and call zero_grad() before the next step"
            )
        if self._compression:
            if self._compression.update_is_due and self._accumulates() and not self._joined:
                raise UsageError(
                    "a backward pass adds to gradients that are averages already and hold momentum: accumulate under "
                    "no_sync(), call zero_grad() if the optimizer is not to use them, or leave momentum to it, "
                    "+csc:uncorrected"
                )
            self._compression.begin(self._exchange.world / self._num_contributing)
        self._pump.begin(self._step)

    def _accumulates(self) -> bool:
        """Whether gradients of the last exchange are still there. The one that has just arrived tells nothing."""
        held = [*self._parameters.values(), *(self._masters.parameters() if self._masters else ())]
        return not self._local and sum(p.grad is not None and bool(p.grad.any()) for p in held) > 1

    def _bring_views_home(self) -> None:
        """`p.grad.data = values` has made another memory of a view: it becomes the pool's again, values and all."""
        assert self._pool is not None
        if [view.data_ptr() for view in self._views] == self._addresses:
            return
        for name, view, address in zip(self._names, self._views, self._addresses, strict=True):
            if view.data_ptr() != address:
                values, parameter = view.data, self._parameters[name]
                view.data = self._pool.place(name, parameter)
                if parameter.grad is view:
                    view.copy_(values)

    def _finish(self, missing: list[int], skipped: bool) -> bool | None:
        pool = self._pool
        assert pool is not None
        missing = self._take_late(missing)
        absent, kept = self._fill_in(missing)
        # With compression, what is kept has been given: it is part of what waits, or of what comes back.
        missing_here = absent if self._compression else absent | kept.keys()
        pool.mark_absent(missing_here, skipped, asks=self._asks())
        remaining = [message for message, number in enumerate(self._num_missing) if number > 0]
        self._num_missing[:] = self._num_tensors
        self._num_seen[:] = [0] * len(self._num_seen)
        alone = self._joined or self._context.context is not None or self._num_contributing != self._exchange.world
        if self.gated and not alone:
            self._leave(remaining, absent, kept)
            return None
        self._pump.finish(remaining)
        if self._num_contributing != self._exchange.world and not self._comm_hooks and not self._compression:
            pool.scale(self._exchange.world / self._num_contributing)
        self._sparse.sum(self._step, self._num_contributing, self._joined)
        if not self._joined:
            self._hand_out(absent, kept)
        self._version = pool.version
        if self.gated:
            self._finish_gradients()
        return pool.somebody_skipped()

    def _leave(self, remaining: list[int], absent: set[str], kept: dict[str, torch.Tensor]) -> None:
        """Let the rest travel by itself, and the gate do what is left."""
        assert not isinstance(self._pump, HookPump) and self._gate is not None and self._pool is not None
        self._pump.launch(remaining)
        if absent or kept:
            # What no rank has is not to have a gradient; that is known when presence has arrived.
            self._pump.wait([self._pool.carrier])
            self._hand_out(absent, kept)
        self._gate.open(self._step)

    # - For the gate

    def _wait_for(self, messages: Sequence[int]) -> None:
        assert not isinstance(self._pump, HookPump)
        self._pump.wait(messages)

    def _wait_for_all(self) -> None:
        self._pump.finish([])

    def _norms(self) -> Sequence[torch.Tensor]:
        assert not isinstance(self._pump, HookPump)
        if self._shards is None:
            return ()
        self._pump.wait_for_closing()
        return self._shards.norms()

    def _conclude_early(self) -> None:
        assert not isinstance(self._pump, HookPump) and self._pool is not None
        with self._breaking():
            self._pump.wait([self._pool.carrier])
        self._planning.heard_early(self._step, self._pool.somebody_asks())
        self._conclude(self._pool.somebody_skipped())

    def catch_up(self) -> None:
        if self._gate is not None:
            self._gate.finish()

    def _updated(self) -> str:
        return self._gate.updated if self._gate is not None and self.gated else super()._updated()

    def _drop_gradients(self) -> None:
        if self._gate is not None:
            self._gate.cancel()
        super()._drop_gradients()

    def _holds_momentum_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._compression is not None and self._compression.holds_momentum_of(optimizer)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Given | None:
        is_ours = self._has_exchanged_for(optimizer)
        super()._before_step(optimizer, args, kwargs)
        if self._compression:
            return self._compression.before_update(optimizer, args, kwargs)
        if self._gate is None or self._gate_shut or not is_ours:
            self.catch_up()
            return None
        assert isinstance(self._optimizers, OneOptimizer)
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            self._shut_gate("optimizer.step() was given a closure")
        elif not (self._plan_now.stages and self._optimizer_is_known):
            self.catch_up()
            if self._planning.is_observing and self._pool is not None:
                self._planning.saw(self._pool.version != self._version)
            self._watch_optimizer = Watch(optimizer)
        elif not self._optimizers.hears_last():
            self.catch_up()  # a hook behind ours may change gradients
        else:
            now = self._gate.put_off(optimizer)
            self._planning.saw(self._gate.was_whole)
            if now is not None:
                return (now, *args[1:]), kwargs
        return None

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._compression:
            self._compression.after_update()
        super()._after_step(optimizer)
        if self._live is not None:
            self._live.step_ended()
        if self._watch_optimizer is not None:
            objection = self._watch_optimizer.objection(optimizer)
            self._watch_optimizer = None
            self._optimizer_is_known = not objection
            self._num_objections = self._num_objections + 1 if objection else 0
            if self._num_objections == OBSERVED_STEPS:  # a first step may prepare things
                self._shut_gate(objection)
        if self._gate is not None:
            assert isinstance(self._optimizers, OneOptimizer)
            self._optimizers.hear_last()

    def _shut_gate(self, why: str) -> None:
        self.catch_up()
        self._gate_shut = why
        self._handed[:] = self._views
        if self._exchange.rank == 0:
            _log.warning("the gate is shut, no step is put off from now on: %s", why)

    def _asks(self) -> bool:
        """Whether this rank would have another plan."""
        return self._planning.asks(self._step, is_shut=bool(self._gate_shut and self._plan_now.stages))

    # - Pieces of a step

    def _take_late(self, missing: list[int]) -> list[int]:
        """Take what arrived less often than expected, or in a first step that only counts. Returns what never
        arrived."""
        never = [index for index in missing if not self._num_seen[index]]
        for index in missing:
            if self._num_seen[index]:
                self._take_gradient(index)
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
                parameter.grad = self._handed[index]
        return absent, kept

    @torch.no_grad()
    def _hand_out(self, absent: set[str], kept: dict[str, torch.Tensor]) -> None:
        """Sums are in the pool: give them to the parameters."""
        assert self._pool is not None
        nowhere = self._pool.absent_everywhere(absent | kept.keys())
        if self._compression:  # what no rank has now may be left over from before
            nowhere = {
                name for name in nowhere if not (self._parameters[name].requires_grad and self._pool.views[name].any())
            }
        as_view = self._options.gradients_are_views
        number = {name: index for index, name in enumerate(self._names)} if absent else {}
        for name in absent - nowhere:
            view = self._pool.views[name]
            self._parameters[name].grad = self._handed[number[name]] if as_view else view.clone()
        for name in kept.keys() & nowhere:
            gradient = self._parameters[name].grad
            if as_view:  # its place in the pool may still be written to
                self._parameters[name].grad = kept[name]
            elif gradient is not None:
                gradient.copy_(kept[name])
        if not as_view:
            for name, view in self._pool.views.items():
                gradient = self._parameters[name].grad
                if gradient is not None and name not in nowhere:
                    gradient.copy_(view)

    def _finish_gradients(self) -> None:
        """Nothing is on its way: what would wait for it is the gradient itself."""
        for parameter, view, handed in zip(self._parameters.values(), self._views, self._handed, strict=True):
            if handed is not view and parameter.grad is handed:
                parameter.grad = view

    def _own_gradients(self, missing: list[int]) -> dict[int, torch.Tensor]:
        own = self._kept.copy()
        for index in missing:
            gradient = self._parameters[self._names[index]].grad
            if gradient is not None:
                own[index] = gradient.detach().clone()
        return own

    def _give_again(self, own: Mapping[int, torch.Tensor], arrived: Sequence[int]) -> None:
        self._begin()
        for index, parameter in enumerate(self._parameters.values()):
            parameter.grad = own.get(index)
        for index in arrived:
            self._take_gradient(index)

    def _memory_of_codec(self) -> dict[str, Any]:
        return self._compression.in_common() if self._compression else {}

    def _remember(self, memory: Mapping[str, Any]) -> None:
        if self._compression and memory:
            self._compression.begin_as(memory)

    def _abandon(self) -> None:
        if self._gate is not None:
            self._gate.cancel()
        for parameter, view in zip(self._parameters.values(), self._views, strict=False):
            if (
                parameter.grad is view
                or isinstance(parameter.grad, UnfinishedGradient)
                or not self._options.gradients_are_views
            ):
                parameter.grad = None

    def _settle(self) -> None:
        assert self._pool is not None
        asks = not self._planning.is_observing and self._pool.somebody_asks()
        self._planning.step_ended(self._observe, self._step, asks)

    def _num_calls_outside(self) -> int:
        return self._pump.num_calls if isinstance(self._pump, HookPump) else 0

    def _can_overflow(self) -> bool:
        return self._codec.can_overflow and self._compression is None

    def _judge(self, offenders: dict[int, str]) -> None:
        if self._compression is None or offenders or self._compression.settle():
            if self._compression and (seen := self._compression.guarded()):
                now_s = self._recorder.clock()
                self._recorder.add(Span("guard", "guard", MAIN, now_s, now_s, self._step - 1, seen))
            super()._judge(offenders)
            return
        if self._joined:
            return
        words = f"step {self._step - 1}: a gradient is inf or nan on some rank"
        if self._options.overflow_is_handled:
            self._spoil_gradients()
            return
        self._drop_gradients()
        if self._options.nonfinite == "raise":
            raise NonFiniteError(f"{words}; gradients are dropped on all ranks, what they had left over is as before")
        if self._exchange.rank == 0:
            _log.warning("%s: all ranks leave it out, as if it had not been", words)

    def _spoil_gradients(self) -> None:
        """For a scaler to see, wherever it looks: what is sent may not hold what went wrong."""
        held = [*self._parameters.values(), *(self._masters.parameters() if self._masters else ())]
        for parameter in held:
            if parameter.grad is not None:
                parameter.grad.fill_(float("inf"))


def in_order_of_registration(
    model: nn.Module, ignored: frozenset[str] = frozenset(), among: Mapping[str, nn.Parameter] | None = None
) -> Profile:
    """A first guess: backward yields gradients in the reverse of the order in which layers were made. Without
    those that yield sparse ones."""
    parameters = trainable(model, ignored) if among is None else among
    sparse = sparse_names(model, parameters)
    tensors = [TensorProfile.of(name, parameter) for name, parameter in parameters.items() if name not in sparse]
    return Profile(tensors=tuple(reversed(tensors)))


def _label(stage: Sequence[str]) -> str:
    return stage[0] if len(stage) == 1 else f"{stage[0]} .. {stage[-1]}"


def _scale(parameter: torch.Tensor, world: int) -> torch.Tensor | float:
    """1 / world as the cheapest operand that does not round it.

    A 0-dim tensor of the gradient's own type halves the cost of a call (1.6 against 4.0 us); half-precision
    types would round 1/3 before it is used, a Python number is not rounded.
    """
    if parameter.dtype in (torch.float32, torch.float64):
        return torch.tensor(1.0 / world, dtype=parameter.dtype, device=parameter.device)
    return 1.0 / world
