"""`attach`: one line that puts a recipe under a training loop."""

from __future__ import annotations

import itertools
import logging
import socket

import torch
import torch.distributed as dist
from torch import nn

from gradientflow.errors import UsageError
from gradientflow.exchange import Native
from gradientflow.plan import Plan
from gradientflow.profile import Profile
from gradientflow.recipe import Recipe
from gradientflow.rundir import Network, Run, RunDirectory, now
from gradientflow.runtime.fingerprint import compare, describe_plan, describe_tensors
from gradientflow.runtime.flow import Flow, held_by_a_flow, trainable
from gradientflow.runtime.plain import PlainFlow
from gradientflow.runtime.pooled import PooledFlow, in_order_of_registration
from gradientflow.runtime.settings import RUN_ENV, SWITCH_ENV, Settings

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
    deadline_s: float = DEADLINE_S,
) -> Flow:
    """Average the gradients of `model` over all ranks, in every backward pass, as `recipe` says.

    Collective: every rank calls it, with the same model and recipe. Parameters and buffers become rank 0's.
    From then on `loss.backward()` returns with averaged gradients, as it does under DDP.

    recipe: "lazy" unless said otherwise here or by `gradientflow run --recipe`; see `gradientflow.recipe`.
    process_group: the default one unless given. Its connections are not used, only its members.
    scaler: the loop's `GradScaler`; with it, an overflow on the fp16 wire is left for the scaler to skip.
    profile: the model's tensors in backward order; without it the first step is observed.
    master_weights: update fp16/bf16 parameters through float32 copies; see `gradientflow.runtime.master`.
    broadcast_buffers: make buffers rank 0's before each training forward, as DDP does.
    deadline_s: how long any one wait for the others may last; then `DeadlineError`.
    """
    settings = Settings.from_environment()
    chosen = settings.choose(recipe)
    _check(model, optimizer, profile, deadline_s)
    group = process_group or dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not set up: call torch.distributed.init_process_group() first, and start the "
            "script with torchrun or `gradientflow run`"
        )
    if dist.get_rank(group) < 0:
        raise UsageError("this rank is not a member of process_group; attach on its members only")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise UsageError(f"expected a GradScaler as scaler, found {type(scaler).__name__}")
    overflow_is_handled = scaler is not None and scaler.is_enabled()
    exchange = Native(group, _device(model), chosen.lanes, deadline_s)
    try:
        plan = chosen.plan(profile or in_order_of_registration(model), exchange.num_lanes)
        _compare(
            exchange,
            {
                "recipe": str(chosen),
                SWITCH_ENV: "on" if settings.on else "off",
                RUN_ENV: "set" if settings.run_directory else "not set",
                "master_weights": str(master_weights),
                "broadcast_buffers": str(broadcast_buffers),
                "profile": "not given" if profile is None else "given",
                "scaler": "enabled" if overflow_is_handled else "none",
            },
            model,
            plan,
        )
        exchange.broadcast([*model.parameters(), *model.buffers()])
        if not settings.on:
            if exchange.rank == 0:
                _log.warning("%s=off: gradients are averaged one by one, not as '%s'", SWITCH_ENV, chosen)
            return PlainFlow(model, optimizer, exchange, broadcast_buffers, master_weights)
        return PooledFlow(
            model,
            optimizer,
            exchange,
            chosen,
            plan,
            observe=profile is None,
            overflow_is_handled=overflow_is_handled,
            run_directory=_run_directory(settings, chosen, exchange),
            broadcast_buffers=broadcast_buffers,
            master_weights=master_weights,
        )
    except BaseException:
        exchange.close()
        raise


def _compare(exchange: Native, settings: dict[str, str], model: nn.Module, plan: Plan) -> None:
    """Raise on every rank unless all have the same settings and tensors and would send the same plan."""
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = describe_tensors("tensor", everything) | describe_tensors("trainable", trainable(model))
    compare(exchange.control, settings | tensors | describe_plan(plan))


def _device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model's parameters are on several devices ({found}); attach to a model on one")
    return next(iter(devices), torch.device("cpu"))


def _check(model: nn.Module, optimizer: object, profile: Profile | None, deadline_s: float) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module as model, found {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError("the model is wrapped in DistributedDataParallel already: attach to model.module, unwrapped")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected a torch.optim.Optimizer as optimizer, found {type(optimizer).__name__}")
    if not isinstance(deadline_s, int | float) or not 0 < deadline_s < float("inf"):
        raise UsageError(f"deadline_s must be a number of seconds above 0, found {deadline_s!r}")
    if profile is not None and not isinstance(profile, Profile):
        raise UsageError(f"expected a gradientflow.Profile as profile, found {type(profile).__name__}")
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise UsageError(f"{lazy[0]!r} has no shape yet: run one forward pass through lazy modules before attach()")
    parameters = trainable(model)
    held = held_by_a_flow(parameters)
    if held:
        raise UsageError(f"{held[0]!r} and {len(held) - 1} more are attached already: close() that flow first")
    known = set(parameters.values())
    strangers = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
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


def _run_directory(settings: Settings, recipe: Recipe, exchange: Native) -> RunDirectory | None:
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
