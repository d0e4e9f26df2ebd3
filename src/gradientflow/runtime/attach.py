"""`attach`: one line that puts a recipe under a training loop."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import socket
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn

from gradientflow.compress import Feedback
from gradientflow.errors import UsageError
from gradientflow.exchange import Exchange, Moment, Stamp
from gradientflow.network import Network
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.rundir import Run, RunDirectory, now
from gradientflow.runtime.fingerprint import compare, describe_plan, describe_tensors
from gradientflow.runtime.flow import Flow, held_by_a_flow, trainable
from gradientflow.runtime.optimizers import held_by
from gradientflow.runtime.options import NonFinite, Options
from gradientflow.runtime.plain import PlainFlow
from gradientflow.runtime.pooled import PooledFlow, in_order_of_registration
from gradientflow.runtime.settings import RUN_ENV, SWITCH_ENV, Settings
from gradientflow.runtime.shares import treats_parameters_one_by_one
from gradientflow.runtime.sparse import sparse_names

_log = logging.getLogger(__name__)

#: A script that attaches several flows gets a directory for each: RUN, RUN/flow-2, ...
_run_directories = itertools.count(1)

#: How long a rank waits for the others before it says so. Long enough for a checkpoint on one of them.
DEADLINE_S = 600.0


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
    deadline_s: float = DEADLINE_S,
) -> Flow:
    """Average the gradients of `model` over all ranks, in every backward pass, as `recipe` says.

    Collective: every rank calls it, with the same model and recipe. Parameters and buffers become rank 0's.
    From then on `loss.backward()` returns with averaged gradients, as it does under DDP; with a gate they may still be
    on their way, and whatever touches a gradient or a parameter waits for it.

    recipe: "lazy" unless said otherwise here or by `gradientflow run --recipe`; see `gradientflow.recipe`.
    process_group: the default one unless given. Its connections are not used, only its members.
    scaler: the loop's `GradScaler`; with it, an overflow on the fp16 wire is left for the scaler to skip, and what a
        codec remembers is in unscaled units.
    profile: the model's tensors in backward order; without it the first step is observed.
    master_weights: update fp16/bf16 parameters through float32 copies; see `gradientflow.runtime.master`.
    broadcast_buffers: make buffers rank 0's before each training forward, as DDP does.
    nonfinite: what to do, on all ranks together, if an averaged gradient is inf or nan: "pass" it on as DDP
        does, "raise", or "skip" the step (no parameter has a gradient, so `optimizer.step()` changes nothing).
    gate: put `optimizer.step()` off, part by part, until the next forward pass needs its result, so that gradients
        travel during forward too. None: if the recipe is made for it (flow, bytescheduler, dear) and
        nothing forbids it.
    deadline_s: how long any one wait for ranks that are alive may last; then `DeadlineError`. A rank that is
        dead, stopped, gone or elsewhere is named within ten seconds (`PeerError`).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected a torch.optim.Optimizer as optimizer, found {type(optimizer).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError("the model is wrapped in DistributedDataParallel already: attach to model.module, unwrapped")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise UsageError(f"expected a GradScaler as scaler, found {type(scaler).__name__}")
    options = Options(
        broadcast_buffers=broadcast_buffers,
        master_weights=master_weights,
        overflow_is_handled=scaler is not None and scaler.is_enabled(),
        scaler=scaler,
        nonfinite=nonfinite,
    )
    return open_flow(
        model, optimizer, recipe, process_group, options, profile=profile, gate=gate, deadline_s=deadline_s
    )


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
) -> Flow:
    """What `attach` does, for wrappers. Without an optimizer, any that holds the parameters is watched."""
    settings = Settings.from_environment()
    chosen = settings.choose(recipe)
    _check(model, optimizer, profile, deadline_s, options)
    group = process_group or dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not set up: call torch.distributed.init_process_group() first, and start the "
            "script with torchrun or `gradientflow run`"
        )
    if dist.get_rank(group) < 0:
        raise UsageError("this rank is not a member of process_group; attach on its members only")
    gated = _may_gate(gate, chosen, model, optimizer, options, dist.get_world_size(group))
    options = dataclasses.replace(options, gate=gated, gradients_are_views=options.gradients_are_views or gated)
    mpi = chosen.over_mpi and settings.on
    exchange = Exchange(
        group, _device(model), chosen.lanes, deadline_s, chosen.patterns, settings.address, mpi, chosen.mesh
    )
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
        )
    except BaseException as error:
        exchange.abandon(f"failed to attach: {error}")
        raise


def _compare(exchange: Exchange, settings: dict[str, str], model: nn.Module, options: Options, plan: Plan) -> None:
    """Raise on every rank unless all have the same settings and tensors and would send the same plan."""
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    everything = {name: tensor for name, tensor in everything.items() if name not in options.ignored}
    exchanged = trainable(model, options.ignored)
    tensors = describe_tensors("tensor", everything) | describe_tensors("trainable", exchanged)
    compare(exchange.control, settings | tensors | describe_plan(plan))


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
    from gradientflow import __version__

    number = next(_run_directories)
    path = settings.run_directory if number == 1 else settings.run_directory / f"flow-{number}"
    directory = RunDirectory(path).create()
    hosts = tuple(exchange.control.gather(socket.gethostname(), "learn the hosts' names"))
    if exchange.global_rank == 0:
        run = Run(
            recipe=str(recipe),
            world=exchange.world,
            started=now(),
            gradientflow=__version__,
            torch=torch.__version__,
        )
        directory.write_run(run, recipe, Network(backend=exchange.backend, hosts=hosts))
    return directory
