"""`gradientflow export`: what was found out, for those who stay with the stack they have."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import complain, milliseconds
from gradientflow.cli.simulate import DEVICE_HELP, read_workload
from gradientflow.cli.tune import CLUSTER_HELP, NETWORK_HELP, WORKERS_HELP, WORKLOAD_HELP, read_place
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from gradientflow.profiles import Profile
    from gradientflow.sim.cluster import Cluster


class Stack(StrEnum):
    ddp = "ddp"
    horovod = "horovod"
    nccl = "nccl"


def export(
    stack: Annotated[
        Stack, typer.Argument(help="Stock DDP's buckets, Horovod's environment, or rows for NCCL's tuner plugin.")
    ],
    workload: Annotated[str, typer.Option(help=f"{WORKLOAD_HELP} Not for nccl.")] = "",
    network: Annotated[str, typer.Option(help=NETWORK_HELP)] = "",
    cluster: Annotated[str, typer.Option(help=CLUSTER_HELP)] = "",
    workers: Annotated[int, typer.Option(help=WORKERS_HELP)] = 0,
    batch: Annotated[int, typer.Option(help="Samples of one worker; 0: the usual.")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    compute: Annotated[float, typer.Option(help="Seconds that one worker computes; 0: by the device.")] = 0.0,
    measured: Annotated[
        list[str] | None,
        typer.Option(help="For nccl: a file of nccl-tests -J, run with NCCL_ALGO and NCCL_PROTO. Several times."),
    ] = None,
    channels: Annotated[
        int, typer.Option(help="For nccl: channels of every row; -1: as measured, or NCCL's own.")
    ] = -1,
    out: Annotated[Path | None, typer.Option(help="Write it there, not to stdout.")] = None,
) -> None:
    """Print what stock DDP, Horovod or NCCL can be told: by simulation, by measurements, or by NCCL's own model."""
    from gradientflow.documents import check_writable, write_text

    if out is not None:
        check_writable(out)
    if stack is Stack.nccl:
        if workload:
            raise UsageError("--workload: what NCCL chooses depends on sizes, not on models; leave it out")
        text = _nccl(network, cluster, workers, measured or [], channels)
    else:
        if measured or channels != -1:
            raise UsageError(f"--measured and --channels are for nccl, not for {stack.value}")
        if not workload:
            raise UsageError("give --workload, a model's name or a profile's file (.json)")
        place = read_place(network, cluster)
        profile, _ = read_workload(workload, place, device, batch, compute)
        world = workers or place.places
        place.check_world(world)
        if world < 2:
            raise UsageError(f"--workers {world}: give 2 or more")
        text = (_ddp if stack is Stack.ddp else _horovod)(profile, place, world)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)


def _ddp(profile: Profile, place: Cluster, world: int) -> str:
    """JSON on stdout; what it should gain on stderr."""
    from gradientflow.tune.for_ddp import best_buckets

    found = best_buckets(profile, place, world)
    complain(
        f"{len(found.bucket_cap_mb_list)} buckets by {found.schedule}: {milliseconds(found.iteration_s)} an iteration, "
        f"{milliseconds(found.stock_s)} with those that DDP has by itself"
    )
    return json.dumps({"bucket_cap_mb_list": found.bucket_cap_mb_list}) + "\n"


def _horovod(profile: Profile, place: Cluster, world: int) -> str:
    """Lines for a shell."""
    from gradientflow.tune.for_horovod import best_environment

    found = best_environment(profile, place, world)
    took, stock = milliseconds(found.iteration_s), milliseconds(found.stock_s)
    lines = [f"export {name}={value}" for name, value in found.variables.items()]
    return "\n".join([f"# {took} an iteration, {stock} with Horovod's own values", *lines]) + "\n"


def _nccl(network: str, cluster: str, workers: int, measured: list[str], channels: int) -> str:
    from gradientflow.tune.for_nccl import OWN_CHANNELS, read_tested, rows_of_model, rows_of_tests, text

    if channels == 0 or channels < -1 or channels > 64:
        raise UsageError(f"--channels {channels}: give 1 to 64, or -1")
    if measured:
        if network or cluster or workers:
            raise UsageError("--measured says which ranks there are: leave --network, --cluster and --workers out")
        rows = rows_of_tests([read_tested(path) for path in measured], channels)
        source = ", ".join(Path(path).name for path in measured)
    else:
        place = read_place(network, cluster)
        world = workers or place.places
        rows = rows_of_model(place, world, channels)
        source = f"NCCL's model on {place.name}, {world} ranks"
    remarks = [f"by gradientflow export, from {source}", *([OWN_CHANNELS] if any(r.channels < 0 for r in rows) else [])]
    return text(rows, remarks)
