"""`gradientflow compare`: what was measured against what the simulator says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradientflow.errors import UsageError


def compare(
    what: Annotated[Path, typer.Argument(help="A run's directory, or a bake-off's file.")],
    cluster: Annotated[str, typer.Option(help="Of a run: a cluster's name or file; its own probe if none.")] = "",
) -> None:
    """Say how far a prediction is off, and in which messages."""
    if what.is_dir():
        _run(what, cluster)
    elif what.suffix == ".json":
        _bake_off(what)
    else:
        raise UsageError(f"{what} is neither a run's directory nor a bake-off's file (.json)")


def _bake_off(path: Path) -> None:
    from gradientflow.bench.predicted import foretell, summary
    from gradientflow.bench.results import Results

    found = foretell(Results.read(path))
    if not found:
        raise UsageError(f"{path} holds no network or no computing alone: measure with gradientflow bench")
    width = max(len(one.method) for one in found)
    for one in found:
        note = "  CPU-bound" if one.cpu_bound else ""
        print(
            f"{one.method:{width}}  measured {1e3 * one.measured_s:8.1f} ms  predicted {1e3 * one.predicted_s:8.1f} ms "
            f"{100 * one.error:+6.1f} %{note}"
        )
    print(summary(found))


def _run(path: Path, name: str) -> None:
    from gradientflow.rundir import RunDirectory
    from gradientflow.sim.cluster import Cluster, read
    from gradientflow.sim.compared import compare_run

    run = RunDirectory(path)
    place = read(name) if name else Cluster.of_network(run.network, path.name)
    ranks = run.traced_ranks()
    if not ranks:
        raise UsageError(f"{path} holds no trace: run with gradientflow run")
    for line in compare_run(run.profile, run.recipe, place, run.run.world, run.trace(ranks[0])):
        print(line)
