"""`attach`: one line that puts a recipe under a training loop."""

from __future__ import annotations

import dataclasses
import logging
import socket
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn

from gradientflow.compress import Feedback
from gradientflow.errors import UsageError
from gradientflow.exchange import Exchange, Moment, Stamp
from gradientflow.exchange.members import Members
from gradientflow.exchange.roster import Roster
from gradientflow.exchange.server.directory import store_of_job
from gradientflow.network import Network
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe, as_recipe
from gradientflow.rundir import RunDirectory
from gradientflow.runtime.deltas import DeltaFlow, Road, shared_tensors
from gradientflow.runtime.evening import even_out
from gradientflow.runtime.fingerprint import compare, describe_plan, describe_tensors
from gradientflow.runtime.flow import GradientFlow
from gradientflow.runtime.handle import DEADLINE_S, Flow, held_by_a_flow, trainable
from gradientflow.runtime.leaving import run_directory
from gradientflow.runtime.optimizers import held_by
from gradientflow.runtime.options import Allow, NonFinite, Options
from gradientflow.runtime.plain import PlainFlow
from gradientflow.runtime.pooled import PooledFlow, in_order_of_registration
from gradientflow.runtime.rounds import Rounds
from gradientflow.runtime.served import open_served
from gradientflow.runtime.settings import ELASTIC_ENV, RUN_ENV, SWITCH_ENV, Settings
from gradientflow.runtime.sharded import check_group, describe_shards, first_in_shards, own_part
from gradientflow.runtime.shares import treats_parameters_one_by_one
from gradientflow.runtime.sparse import sparse_names
from gradientflow.sync import BSP
from gradientflow.trace import Recorder
from gradientflow.tune.memory import Cache

_log = logging.getLogger(__name__)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe | str | None = None,
    process_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    *,
    profile: Profile | None = None,
    master_weights: bool = False,
    broadcast_buffers: bool = True,
    nonfinite: NonFinite = "pass",
    gate: bool | None = None,
    verify_every: int = 0,
    allow: Allow = "lossless",
    deadline_s: float = DEADLINE_S,
) -> Flow:
    """Average the gradients of `model` over all ranks, in every backward pass, as `recipe` says.

    Collective: every rank calls it, with the same model and recipe. Parameters and buffers become rank 0's.
    From then on `loss.backward()` returns with averaged gradients, as it does under DDP; with a gate they may still be
    on their way, and whatever touches a gradient or a parameter waits for it.

    recipe: "auto" unless said otherwise here or by `gradientflow run --recipe`; see `gradientflow.recipe`. With another
        synchronisation than BSP ("lazy@local:8", "lazy-ps@ssp:4") workers step by themselves, and `optimizer.step()` is
        where what they have changed is exchanged.
    process_group: the default one unless given. Its connections are not used, only its members.
    scaler: the loop's `GradScaler`; with it, an overflow on the fp16 wire is left for the scaler to skip, and what a
        codec remembers is in unscaled units.
    profile: the model's tensors in backward order; without it the first step is observed.
    master_weights: update fp16/bf16 parameters through float32 copies; see `gradientflow.runtime.master`.
    broadcast_buffers: make buffers rank 0's before each training forward, as DDP does.
    nonfinite: what to do, on all ranks together, if an averaged gradient is inf or nan: "pass" it on as DDP
        does, "raise", or "skip" the step (no parameter has a gradient, so `optimizer.step()` changes nothing; with a
        `scaler`, it is the one to skip it).
    gate: put `optimizer.step()` off, part by part, until the next forward pass needs its result, so that gradients
        travel during forward too. None: if the recipe is made for it (flow, bytescheduler, dear) and
        nothing forbids it.
    verify_every: compare parameters with the other ranks' every so many steps, and raise `DisagreementError` with names
        if they are not the same; 0: never. Under Local SGD and DiLoCo, what workers move from, at the end of a period.
    allow: what "auto" may choose: recipes that train as DDP does, or "lossy" ones too: messages for which a codec pays
        are compressed, under its guard (docs/compression.md).
    deadline_s: how long any one wait for ranks that are alive may last; then `DeadlineError`. A rank that is
        dead, stopped, gone or elsewhere is named within ten seconds (`PeerError`).

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with attach(model, optimizer, "lazy") as flow:
    ...     for step in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(4)).sum().backward()
    ...         optimizer.step()
    ...     flow.step, flow.plan.messages[0].label
    (3, 'bias .. weight')
    >>> dist.destroy_process_group()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected a torch.optim.Optimizer as optimizer, found {type(optimizer).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel already: attach to model.module, and call that, not the "
            "wrapper"
        )
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise UsageError(f"expected a GradScaler as scaler, found {type(scaler).__name__}")
    options = Options(
        broadcast_buffers=broadcast_buffers,
        master_weights=master_weights,
        overflow_is_handled=scaler is not None and scaler.is_enabled(),
        scaler=scaler,
        nonfinite=nonfinite,
        verify_every=verify_every,
    )
    settings = Settings.from_environment()
    chosen = _allowed(settings.choose(recipe), allow)
    if chosen.sync.deltas and settings.on:
        if gate:
            raise UsageError(f"gate=True, but gradients do not travel under @{chosen.sync}: leave it out")
        return _open_deltas(model, optimizer, chosen, process_group, options, settings, deadline_s)
    return open_flow(
        model, optimizer, chosen, process_group, options, profile=profile, gate=gate, deadline_s=deadline_s, told=False
    )


def _allowed(recipe: Recipe, allow: Allow) -> Recipe:
    if allow not in get_args(Allow):
        raise UsageError(f"allow must be one of {', '.join(get_args(Allow))}, found {allow!r}")
    if allow == "lossy" and not recipe.tunes:
        raise UsageError(f"allow='lossy' is for \"auto\", which chooses; '{recipe}' is what it is: leave allow out")
    return recipe.lossy().check() if allow == "lossy" else recipe


def _open_deltas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    process_group: dist.ProcessGroup | None,
    options: Options,
    settings: Settings,
    deadline_s: float,
) -> Flow:
    """For workers that step by themselves."""
    _check(model, optimizer, None, deadline_s, options)
    if options.master_weights:
        raise UsageError(f"master_weights=True is for gradients that travel, and @{recipe.sync} sends none of them")
    raises = options.nonfinite == "raise"
    sharded = first_in_shards(dict(model.named_parameters()))
    if recipe.served and options.verify_every:
        raise UsageError(
            f"verify_every={options.verify_every} compares workers in lockstep, and under '{recipe}' servers keep the "
            "parameters: leave it out"
        )
    if recipe.served:
        if sharded:
            raise UsageError(f"{sharded!r} is in shards (FSDP), which servers do not keep: use '@local' or '@diloco'")
        return open_served(model, optimizer, recipe, process_group, settings, deadline_s, raises)
    if settings.elastic:
        raise UsageError(
            f"workers that come and go (gradientflow run --elastic) with recipe '{recipe}': leave @{recipe.sync} out, "
            f"or let servers keep the parameters, -ps:1@{recipe.sync}"
        )
    group = _group(process_group)
    check_group(dict(model.named_parameters()), group)
    ways = (recipe.patterns, settings.address, recipe.over_mpi, recipe.mesh)

    def open_road(recorder: Recorder) -> tuple[Road, RunDirectory | None]:
        exchange = Exchange(group, _device(model), recipe.lanes, deadline_s, *ways)
        try:
            facts = {"recipe": str(recipe)} | describe_shards(dict(model.named_parameters()))
            _compare(exchange, facts, model, options)
            parameters = [own_part(parameter) for parameter in model.parameters()]
            exchange.broadcast([*parameters, *model.buffers()], Stamp(0, Moment.START))
            road = Rounds(
                recipe,
                exchange,
                shared_tensors(model),
                trainable(model),
                optimizer,
                recorder,
                raises,
                options.verify_every,
            )
            return road, _run_directory(settings, recipe, exchange)
        except BaseException as error:
            exchange.abandon(f"failed to attach: {error}")
            raise

    dense = None
    if recipe.sync.start:
        together = recipe.model_copy(update={"sync": BSP})
        dense = open_flow(model, optimizer, together, process_group, options, deadline_s=deadline_s, told=False)
    place = dist.get_rank(group), dist.get_world_size(group)
    return DeltaFlow(model, optimizer, recipe, dist.get_rank(), place, open_road, dense)


def open_flow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    recipe: Recipe | str | None,
    process_group: dist.ProcessGroup | None,
    options: Options,
    *,
    profile: Profile | None = None,
    gate: bool | None = None,
    deadline_s: float = DEADLINE_S,
    broadcast_parameters: bool = True,
    broadcast_first_buffers: bool = True,
    told: bool = True,
) -> GradientFlow:
    """What `attach` does, for wrappers. Without an optimizer, any that holds the parameters is watched. told: the
    environment may name the recipe."""
    settings = Settings.from_environment()
    chosen = settings.choose(recipe) if told or recipe is None else as_recipe(recipe)
    if chosen.sync.deltas and settings.on:
        raise UsageError(
            f"recipe '{chosen}': workers that step by themselves need gradientflow.attach(model, optimizer)"
        )
    _check(model, optimizer, profile, deadline_s, options)
    if sharded := first_in_shards(trainable(model, options.ignored)):
        raise UsageError(
            f"{sharded!r} is in shards (FSDP), whose gradients are not ours to carry: use a recipe with '@local' or "
            "'@diloco', or gradientflow.Averager, along the mesh's replicate dimension"
        )
    if settings.elastic:
        if settings.on:
            return _open_elastic(model, optimizer, chosen, process_group, options, settings, profile, gate, deadline_s)
        raise UsageError(f"{ELASTIC_ENV}=1: workers cannot come and go with {SWITCH_ENV}=off")
    group = _group(process_group)
    if gate is None and options.forward_is_told and recipe is None and not settings.recipe:
        gate = False  # a wrapper in DDP's place, of which nothing else was asked
    gated = settings.on and _may_gate(gate, chosen, model, optimizer, options, dist.get_world_size(group))
    options = dataclasses.replace(options, gate=gated, gradients_are_views=options.gradients_are_views or gated)
    mpi = chosen.over_mpi and settings.on
    servers = settings.servers(chosen.num_servers) if chosen.served and settings.on else None
    device = _device(model)
    patterns = () if not settings.on or (chosen.tunes and device.type != "cpu") else chosen.patterns
    ways = (patterns, settings.address, mpi, chosen.mesh, servers, not chosen.tunes)
    exchange = Exchange(group, device, chosen.lanes, deadline_s, *ways)
    try:
        guess = profile or in_order_of_registration(model, options.ignored)
        observe = profile is None or chosen.needs_cost
        plan = chosen.plan(guess, exchange.num_lanes, gated=options.gate and not observe)
        facts = {
            "recipe": str(chosen),
            SWITCH_ENV: "on" if settings.on else "off",
            RUN_ENV: "set" if settings.run_directory else "not set",
            "options": repr(dataclasses.replace(options, ignored=frozenset())),
            "profile": "not given" if profile is None else "given",
        }
        _compare(exchange, facts, model, options, plan)
        first: dict[str, torch.Tensor] = dict(model.named_parameters()) if broadcast_parameters else {}
        first |= dict(model.named_buffers()) if broadcast_first_buffers else {}
        tensors = [tensor for name, tensor in first.items() if name not in options.ignored]
        exchange.broadcast(tensors, Stamp(0, Moment.START))
        if optimizer is not None and broadcast_parameters:
            even_out(exchange, optimizer, trainable(model, options.ignored))
        if not settings.on:
            if exchange.rank == 0:
                _log.warning("%s=off: gradients are averaged one by one, not as '%s'", SWITCH_ENV, chosen)
            return PlainFlow(model, optimizer, exchange, options)
        return PooledFlow(
            model,
            optimizer,
            exchange,
            chosen,
            plan,
            options,
            observe=observe,
            run_directory=_run_directory(settings, chosen, exchange),
            cache=Cache(settings.cache) if settings.cache else None,
        )
    except BaseException as error:
        exchange.abandon(f"failed to attach: {error}")
        raise


def _open_elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    recipe: Recipe,
    process_group: dist.ProcessGroup | None,
    options: Options,
    settings: Settings,
    profile: Profile | None,
    gate: bool | None,
    deadline_s: float,
) -> GradientFlow:
    """As one of a job's workers, whoever they are. It begins alone, and then joins."""
    device = _device(model)
    why_not = ""
    if process_group is not None or dist.is_initialized():
        why_not = "a process group has members for ever: leave init_process_group() out"
    elif not settings.job[0]:
        why_not = "MASTER_ADDR and MASTER_PORT do not say where the job's store is: start it with `gradientflow run`"
    elif optimizer is None or options.forward_is_told:
        why_not = "who joins is handed the optimizer's state: use gradientflow.attach(model, optimizer)"
    elif isinstance(optimizer, torch.optim.LBFGS):
        why_not = "LBFGS runs backward inside its step"
    elif recipe.served or recipe.over_mpi:
        why_not = f"recipe '{recipe}' sums through {'servers' if recipe.served else 'MPI'}: leave it out"
    elif recipe.tunes:
        why_not = "auto races plans over many steps among the same workers: name a recipe"
    elif device.type != "cpu":
        why_not = f"the model is on {device.type}: restart all workers under torchrun instead, --max-restarts"
    elif options.scaler is not None:
        why_not = "a GradScaler's factor is each worker's own: train in bfloat16"
    elif gate:
        why_not = "gate=True puts steps off, and a step is taken by all workers or by none"
    elif profile is not None:
        why_not = "plans are made anew from what each generation sees: leave profile out"
    elif sparse_names(model, trainable(model, options.ignored)):
        why_not = "the model has sparse gradients"
    if why_not:
        raise UsageError(f"workers that come and go in lockstep (gradientflow run --elastic): {why_not}")
    roster = Roster(store_of_job(*settings.job, "gradientflow/roster"), settings.world, deadline_s)
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    facts = {"recipe": str(recipe), "options": repr(options)}
    facts |= describe_tensors("tensor", everything) | describe_tensors("trainable", trainable(model, options.ignored))
    roster.compare(facts)

    def exchange_of(members: Members) -> Exchange:
        return Exchange(members, device, recipe.lanes, deadline_s, recipe.patterns, settings.address, mesh=recipe.mesh)

    alone = exchange_of(roster.alone("gloo"))
    plan = recipe.plan(in_order_of_registration(model, options.ignored), alone.num_lanes)
    network = Network(backend="gloo", hosts=(socket.gethostname(),))
    directory = run_directory(settings.run_directory, recipe, settings.world, network, is_first=roster.number == 0)
    flow = PooledFlow(model, optimizer, alone, recipe, plan, options, observe=True, run_directory=directory)
    try:
        flow.join(roster, exchange_of)
    except BaseException:
        flow.close()
        raise
    return flow


def _group(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = given or dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not set up: call torch.distributed.init_process_group() first, and start the "
            "script with torchrun or `gradientflow run`"
        )
    if dist.get_rank(group) < 0:
        raise UsageError("this rank is not a member of process_group; attach on its members only")
    return group


def _compare(
    exchange: Exchange, settings: dict[str, str], model: nn.Module, options: Options, plan: Plan | None = None
) -> None:
    """Raise on every rank unless all have the same settings and tensors and would send the same plan."""
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    everything = {name: tensor for name, tensor in everything.items() if name not in options.ignored}
    exchanged = trainable(model, options.ignored)
    tensors = describe_tensors("tensor", everything) | describe_tensors("trainable", exchanged)
    compare(exchange.control, settings | tensors | (describe_plan(plan) if plan else {}))


def _may_gate(
    asked: bool | None,
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: Options,
    world: int,
) -> bool:
    """Whether steps can be put off; raises if that was asked for and cannot be."""
    if asked is False or (asked is None and (not recipe.wants_gate or world == 1)):
        return False  # alone, there is nothing to wait for
    why_not = ""
    if optimizer is None:
        why_not = "there is no optimizer to put off: give it"
    elif isinstance(optimizer, torch.optim.LBFGS):
        why_not = "LBFGS runs backward inside its step"
    elif asked is None and not treats_parameters_one_by_one(optimizer):
        why_not = (
            f"whether {type(optimizer).__name__} can be run for some parameters at a time is yours to say, gate=True"
        )
    elif options.master_weights:
        why_not = "master_weights=True rounds all copies after each step"
    elif options.nonfinite != "pass":
        why_not = f"nonfinite={options.nonfinite!r} looks at all gradients before a step"
    elif isinstance(recipe.codec(), Feedback):
        why_not = "whether a step counts is known when all of its messages have arrived"
    elif recipe.codec().can_overflow and not options.overflow_is_handled:
        why_not = "fp16 on the wire may overflow, so all gradients are looked at before a step: use +bf16"
    elif sparse_names(model, trainable(model, options.ignored)):
        why_not = "the model has sparse gradients"
    elif any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        why_not = "TorchScript uses parameters unseen"
    if why_not and asked:
        raise UsageError(f"gate=True, but {why_not}")
    if why_not and optimizer is not None and dist.is_initialized() and dist.get_rank() == 0:
        _log.warning("recipe '%s' runs without a gate: %s", recipe, why_not)
    return not why_not


def _device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model's parameters are on several devices ({found}); attach to a model on one")
    return next(iter(devices), torch.device("cpu"))


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    profile: Profile | None,
    deadline_s: float,
    options: Options,
) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module as model, found {type(model).__name__}")
    if not isinstance(options.verify_every, int) or options.verify_every < 0:
        raise UsageError(f"verify_every must be a number of steps, 0 or more, found {options.verify_every!r}")
    if options.nonfinite not in get_args(NonFinite):
        raise UsageError(f"nonfinite must be one of {', '.join(get_args(NonFinite))}, found {options.nonfinite!r}")
    if not isinstance(deadline_s, int | float) or not 0 < deadline_s < float("inf"):
        raise UsageError(f"deadline_s must be a number of seconds above 0, found {deadline_s!r}")
    if profile is not None and not isinstance(profile, Profile):
        raise UsageError(f"expected a gradientflow.Profile as profile, found {type(profile).__name__}")
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise UsageError(f"{lazy[0]!r} has no shape yet: run one forward pass through lazy modules before attach()")
    parameters = trainable(model, options.ignored)
    held = held_by_a_flow(parameters)
    if held and not options.forward_is_told:  # wrappers of one model take turns, forward pass by forward pass
        raise UsageError(f"{held[0]!r} and {len(held) - 1} more are attached already: close() that flow first")
    known = set(parameters.values())
    strangers = [
        tuple(parameter.shape)
        for parameter in (held_by(optimizer) if optimizer and not options.forward_is_told else ())
        if parameter.requires_grad and parameter not in known
    ]
    if strangers:
        raise UsageError(
            f"the optimizer holds {len(strangers)} parameters that are not the model's, the first of shape "
            f"{strangers[0]}; their gradients would not be averaged. Build the optimizer from model.parameters()"
        )
    if profile is not None:
        ours = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in parameters.items()}
        theirs = {tensor.name: (tensor.shape, tensor.torch_dtype) for tensor in profile.tensors}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise UsageError(
                    f"the profile is of another model: tensor {name!r} is {ours.get(name, 'missing')} in the model, "
                    f"{theirs.get(name, 'missing')} in the profile"
                )


def _run_directory(settings: Settings, recipe: Recipe, exchange: Exchange) -> RunDirectory | None:
    if settings.run_directory is None:
        return None
    hosts = tuple(exchange.control.gather(socket.gethostname(), "learn the hosts' names"))
    network = Network(backend=exchange.backend, hosts=hosts)
    is_first = exchange.global_rank == 0
    return run_directory(settings.run_directory, recipe, exchange.world, network, is_first=is_first)
