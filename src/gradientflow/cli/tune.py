"""`gradientflow tune`: the recipe for a model and a cluster, before anything runs there."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import milliseconds
from gradientflow.cli.given import fresh_directory
from gradientflow.cli.simulate import DEVICE_HELP, read_workload
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from gradientflow.sim.cluster import Cluster
    from gradientflow.tune.ranking import Ranking

WORKLOAD_HELP = "A model's name, or a profile's file (.json): of gradientflow profile, or in a run's directory."
NETWORK_HELP = "What gradientflow probe measured (.json)."
CLUSTER_HELP = "Instead of --network: a cluster's name or file (.toml)."
WORKERS_HELP = "0: as many as there are places."
#: In the table; --json has all.
SHOWN = 12


class Allow(StrEnum):
    lossless = "lossless"
    lossy = "lossy"


def tune(
    workload: Annotated[str, typer.Option(help=WORKLOAD_HELP)],
    network: Annotated[str, typer.Option(help=NETWORK_HELP)] = "",
    cluster: Annotated[str, typer.Option(help=CLUSTER_HELP)] = "",
    workers: Annotated[int, typer.Option(help=WORKERS_HELP)] = 0,
    allow: Annotated[Allow, typer.Option(help="lossy: codecs too.")] = Allow.lossless,
    exchange: Annotated[
        list[str] | None, typer.Option(help="Only by this: a2a, ps, halving, mpi ... May be given several times.")
    ] = None,
    spare: Annotated[
        int | None, typer.Option(help="Hosts that servers may have for themselves. Default: as the cluster says.")
    ] = None,
    clip: Annotated[bool, typer.Option("--clip", help="Training clips gradients by their norm.")] = False,
    batch: Annotated[int, typer.Option(help="Samples of one worker; 0: the usual.")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    compute: Annotated[float, typer.Option(help="Seconds that one worker computes; 0: by the device.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write recipe.toml, plan.json and ranking.json there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole ranking, for programs.")] = False,
) -> None:
    """Simulate every recipe on a cluster, rank them, and write the best one down with its plan."""
    place = read_place(network, cluster)
    world = workers or place.places
    place.check_world(world)
    names = _exchanges(exchange)
    if spare is not None and spare < 0:
        raise UsageError(f"--spare {spare}: give 0 or more hosts")
    profile, _ = read_workload(workload, place, device, batch, compute)
    directory = None if out is None else fresh_directory(out, "tuned")
    from gradientflow.rundir import RunDirectory
    from gradientflow.tune.ranking import pinned, rank

    found = rank(profile, place, world, lossy=allow is Allow.lossy, exchanges=names, spare=spare, whole=clip)
    if directory is not None:
        recipe = pinned(found.best.recipe, profile, place, world, whole=clip)
        RunDirectory(directory).create()
        found.write(directory / "ranking.json")
        recipe.write(directory / "recipe.toml")
    if as_json:
        print(json.dumps(_as_record(found, workload), indent=1))
        return
    _show(found, workload)
    if out is not None:
        print(f"\nWritten to {out}: gradientflow run --recipe {out / 'recipe.toml'} train.py")


def read_place(network: str, cluster: str) -> Cluster:
    """Of --network and --cluster, one is given."""
    from gradientflow.network import Network
    from gradientflow.sim.cluster import read
    from gradientflow.tune.ranking import cluster_of

    if bool(network) == bool(cluster):
        raise UsageError("give --network FILE (what gradientflow probe measured) or --cluster NAME, one of them")
    source = network or cluster
    if source.endswith(".json"):
        return cluster_of(Network.read(source), Path(source).stem)
    if network:
        raise UsageError(f"--network {network}: expected what gradientflow probe wrote, a .json file")
    return read(cluster)


def _exchanges(asked: list[str] | None) -> tuple[str, ...]:
    from gradientflow.tune.ranking import EXCHANGES

    known = (*EXCHANGES, "mpi")
    for name in asked or ():
        if name not in known:
            raise UsageError(f"--exchange {name}: give one of {', '.join(known)}")
    return tuple(dict.fromkeys(asked or ()))


def _show(found: Ranking, workload: str) -> None:
    from rich.console import Console
    from rich.table import Table

    best, offers = found.best, found.offers
    alone_s = offers[0].prediction.alone_s
    # What is piped is not cut off at 80 characters.
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(
        f"{workload} on {found.cluster}, {found.workers} workers: computing alone takes {milliseconds(alone_s)}, "
        f"stock DDP {milliseconds(found.ddp_s)}; {len(offers)} recipes simulated"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", no_wrap=True)
    for title in ("iteration", "speed-up", "of DDP's", "exposed", "messages"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("needs")
    shown = list(offers[:SHOWN])
    for offer in [*shown, *([] if best in shown else [best])]:
        one = offer.prediction
        table.add_row(
            offer.recipe,
            milliseconds(one.iteration_s),
            f"{one.speedup:.2f}x",
            f"{one.iteration_s / found.ddp_s:.3f}",
            milliseconds(one.exposed_s),
            str(one.num_messages),
            ", ".join(offer.needs),
            style="bold" if offer is best else None,
        )
    console.print(table)
    console.print(f"\n{best.recipe}: what needs least of those within 1 % of the quickest")
    for why in dict.fromkeys(found.left_out.values()):
        console.print(f"not tried: {', '.join(name for name in found.left_out if found.left_out[name] == why)}: {why}")


def _as_record(found: Ranking, workload: str) -> dict[str, object]:
    return {
        "version": 1,
        "workload": workload,
        "best": found.best.recipe,
        **found.model_dump(exclude={"version", "offers"}),
        "offers": [
            {**offer.prediction.model_dump(), "recipe": offer.recipe, "speedup": offer.prediction.speedup}
            | {"needs": offer.needs}
            for offer in found.offers
        ],
    }
