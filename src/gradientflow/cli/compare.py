"""`gradientflow compare`: what was measured against what the simulator says of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from gradientflow.rundir import RunDirectory
    from gradientflow.sim.cluster import Cluster
    from gradientflow.tune.explain import Situation


def compare(
    what: Annotated[Path, typer.Argument(help="A run's directory, or a bake-off's file.")],
    cluster: Annotated[
        str, typer.Option(help="Of a run: a cluster's name or file; what the run itself measured if none.")
    ] = "",
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
    from gradientflow.sim.cluster import read
    from gradientflow.sim.compared import compare_run
    from gradientflow.tune.explain import Situation
    from gradientflow.tune.notes import Notes

    run = RunDirectory(path)
    situation = Situation(run.profile, run.plan, run.recipe, run.run.world, Notes.of(run))
    ranks = run.traced_ranks()
    if not ranks:
        raise UsageError(f"{path} holds no trace: run with gradientflow run")
    place = read(name) if name else _place(run, situation)
    notes, trace = situation.notes, run.trace(ranks[0])
    # Until a race is over others run than the one that has won it.
    first = notes.races[-1].end if notes.races else 0
    trace = trace._replace(spans=tuple(span for span in trace.spans if span.step >= first))
    for line in compare_run(run.profile, situation.runs, place, situation.world, trace, whole=notes.whole):
        print(line)


def _place(run: RunDirectory, situation: Situation) -> Cluster:
    """As the run itself measured it."""
    from gradientflow.sim.cluster import Cluster

    name, notes, network = run.path.name, situation.notes, run.network
    if network.of("all_reduce"):
        return Cluster.of_network(network, name)
    if notes.price is None:
        raise UsageError(
            f"{run.path}: {situation.recipe} did not measure what messages cost there: give --cluster, a cluster's "
            "name or file, or what gradientflow probe measured"
        )
    return Cluster.of_prices(notes.price, name, situation.world, notes.num_lanes)
