"""`gradientflow sweep`: who wins where, over numbers of workers and rates of the links between hosts."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.given import read_recipe
from gradientflow.cli.simulate import DEVICE_HELP, read_workload
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from gradientflow.sim.cluster import Cluster
    from gradientflow.sim.predict import Prediction

#: The survey's compositions, and what this package adds.
RECIPES = ("bsp", "wfbp", "mg-wfbp", "bsp-ps", "wfbp-ps", "flow", "gradientflow:10%")


def sweep(
    workload: Annotated[str, typer.Option(help="A model's name, or a profile's file (.json).")] = "resnet-50",
    cluster: Annotated[str, typer.Option(help="A cluster's name or file.")] = "survey-10gbe",
    recipe: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers; none: 1, 2, 4 ... hosts.")] = "",
    rate: Annotated[str, typer.Option(help="Rates between hosts; none: the cluster's own.")] = "",
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    compute: Annotated[float, typer.Option(help="Seconds that one worker computes; 0: by the device.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="All figures (.csv), or who wins where (.html).")] = None,
) -> None:
    """Predict recipes over workers and rates: the fastest of each place, and by how much."""
    from gradientflow.documents import check_writable, write_text
    from gradientflow.lab import parse_rate
    from gradientflow.sim.cluster import read
    from gradientflow.sim.pages import winners_page
    from gradientflow.sim.predict import predict

    if out is not None:
        check_writable(out)
    place = read(cluster)
    if out is not None and out.suffix not in (".csv", ".html"):
        raise UsageError(f"--out {out}: all figures go to a name that ends in .csv, who wins where to one in .html")
    profile, samples = read_workload(workload, place, device, 0, compute)
    chosen = [read_recipe(text) for text in recipe or RECIPES]
    worlds = _numbers(workers) or _worlds(place)
    for world in worlds:
        place.check_world(world)
    rates = [parse_rate(text) for text in rate.split(",") if text] or [None]
    if any(rates) and place.between is None:
        raise UsageError(f"cluster {place.name} has no links between hosts: leave --rate out")

    def at(bits_per_s: float | None) -> Cluster:
        if bits_per_s is None or place.between is None:
            return place
        wire = place.between.model_copy(update={"bits_per_s": bits_per_s})
        return place.model_copy(update={"between": wire, "measured": (), "believed": ()})

    rows: list[tuple[float | None, int, Prediction]] = []
    for bits_per_s in rates:
        for world in worlds:
            found = [predict(profile, one, at(bits_per_s), world) for one in chosen]
            ordered = sorted(found, key=lambda one: one.iteration_s)
            where = f"{_gigabits(bits_per_s):>10}  {world:6} workers"
            ahead = ordered[1].iteration_s / ordered[0].iteration_s - 1 if len(ordered) > 1 else 0.0
            print(f"{where}  {ordered[0].recipe:34} {ordered[0].speedup:8.2f}x  {100 * ahead:5.1f} % ahead of the next")
            rows += [(bits_per_s, world, one) for one in found]
    if out is not None:
        write_text(out, winners_page(workload, place.name, rows) if out.suffix == ".html" else _csv(rows, samples))
        print(f"\nWritten to {out}")


def _csv(rows: list[tuple[float | None, int, Prediction]], samples: int) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["bits_per_s", "workers", "recipe", "iteration_s", "samples_per_s", "speedup", "exposed_s"])
    for bits_per_s, world, one in rows:
        figures = (one.iteration_s, one.samples_per_s(samples), one.speedup, one.exposed_s)
        writer.writerow([bits_per_s or "", world, one.recipe, *(f"{figure:.6g}" for figure in figures)])
    return text.getvalue()


def _worlds(place: Cluster) -> list[int]:
    hosts = [2**power for power in range(20) if 2**power <= place.hosts]
    return [number * place.workers_per_host for number in hosts if number * place.workers_per_host > 1]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise UsageError(f"--workers {text!r}: write numbers and commas, such as 8,16,32") from None


def _gigabits(bits_per_s: float | None) -> str:
    return "as it is" if bits_per_s is None else f"{bits_per_s / 1e9:g} Gb/s"
