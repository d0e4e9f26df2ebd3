"""`gradientflow demo`: stock DDP and a recipe side by side, on real data and on a replayed model, on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.bench import HOSTS, check_methods, progress_bar, show_results
from gradientflow.cli.console import megabytes, milliseconds
from gradientflow.cli.given import check_compute, check_scale, fresh_directory, read_rate, read_recipe, timestamp
from gradientflow.cli.launch import stoppable
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gradientflow.bench.arena import Arena
    from gradientflow.bench.results import Results
    from gradientflow.bench.side_by_side import Comparison, Cost
    from gradientflow.recipe import Recipe

#: A batch of 128 images is shared out, and batch normalisation wants a few of them on each worker.
MAX_WORKERS = 32
TRAINING_LIMIT_S = 1800.0
#: Wide enough for nine rounds, as a rule.
PRECISION = 0.05


def demo(
    workers: Annotated[int, typer.Option(help=f"Hosts of the lab, a worker on each, 2 to {MAX_WORKERS}.")] = 4,
    rate: Annotated[str, typer.Option(help="Of each host's link: 100Mbit, 1Gbit, unshaped.")] = "1Gbit",
    epochs: Annotated[int, typer.Option(help="Passes over the 1437 images of the training set.")] = 12,
    workload: Annotated[str, typer.Option(help="What is replayed: a model's name or a profile.json.")] = "resnet-50",
    compute: Annotated[float, typer.Option(help="Seconds that an iteration of it computes.")] = 0.6,
    scale: Annotated[float, typer.Option(help="Shrink it, its distribution of sizes kept.")] = 0.5,
    recipe: Annotated[str, typer.Option(help="What is compared with DDP: such as lazy:1MB+fp16.")] = "lazy",
    out: Annotated[Path | None, typer.Option(help="Run directory. Default: runs/demo-DATE-TIME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the tables.")] = False,
) -> None:
    """Train a small CNN on real images, and replay a large model, with DDP and with gradientflow side by side."""
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("the demo needs scikit-learn's digits: pip install 'gradientflow[demo]'")
    if not HOSTS[0] <= workers <= MAX_WORKERS:
        raise UsageError(f"--workers must be from {HOSTS[0]} to {MAX_WORKERS}, found {workers}")
    if epochs < 1:
        raise UsageError(f"--epochs must be 1 or more, found {epochs}")
    check_compute(compute)
    check_scale(scale)
    from gradientflow.bench.worker import Specification
    from gradientflow.lab.workloads import load
    from gradientflow.rundir import RunDirectory

    chosen, bits_per_s = read_recipe(recipe), read_rate(rate)
    if chosen.pinned is not None:
        raise UsageError(f"{recipe} pins a plan, and the demo trains models of its own: give --recipe '{chosen}'")
    environment = _environment(chosen)
    spec = Specification(
        workload=workload,
        profile=load(workload, compute_s=compute, scale=scale),
        methods=check_methods(",".join(["ddp", str(chosen), *_beside(chosen)])),
        rate=bits_per_s,
        interface="",
        num_sharing=1,
        iterations=1,
        max_rounds=9,
        precision=PRECISION,
        batch=1,
        findings="",
    )
    directory = fresh_directory(out, f"demo-{timestamp()}")
    RunDirectory(directory).create()
    start_s = time.perf_counter()
    from gradientflow.bench.bakeoff import run_at

    with stoppable(), contextlib.ExitStack() as stack:
        place = _place(stack, workers, bits_per_s)
        comparison = _train(place, chosen, epochs, directory, environment)
        with progress_bar() as follow:
            results = run_at(place, spec, follow)
    results.write(directory / "results.json")
    page = _page(results, directory)
    elapsed_s = time.perf_counter() - start_s
    if as_json:
        print(json.dumps(_as_json(comparison, results, elapsed_s, directory)))
    else:
        _show(comparison, results, elapsed_s, directory, page)


def _environment(recipe: Recipe) -> dict[str, str]:
    from gradientflow.runtime.settings import RECIPE_ENV, SWITCH_ENV, Settings

    if not Settings.from_environment().on:
        raise UsageError(f"{SWITCH_ENV}=off takes away what the demo shows: unset it")
    return {RECIPE_ENV: str(recipe)}


def _beside(recipe: Recipe) -> list[str]:
    """The same with half the bytes, unless it compresses already; and what fills the forward pass too."""
    half = [f"{recipe}+bf16"] if recipe.codec().lossless and not recipe.patterns else []
    return [*half, *(["flow"] if str(recipe) != "flow" else [])]


def _place(stack: contextlib.ExitStack, workers: int, rate: float | None) -> Arena:
    """A lab if this machine has one, and carries the rate; else the loopback, with a note that says why."""
    from gradientflow.bench.arena import Loopback, arena

    try:
        return stack.enter_context(arena(workers, rate))
    except UsageError as error:
        return Loopback(workers, str(error))


def _train(place: Arena, recipe: Recipe, epochs: int, directory: Path, environment: dict[str, str]) -> Comparison:
    from pydantic import ValidationError

    from gradientflow.bench.arena import start
    from gradientflow.bench.side_by_side import Comparison
    from gradientflow.bench.worker import Progress
    from gradientflow.runtime.settings import RUN_ENV

    worker = [f"--recipe={recipe}", f"--epochs={epochs}", f"--out={directory}"]
    worker += [f"--interface={place.interface}", f"--num-sharing={place.num_sharing}"]
    with progress_bar() as follow:

        def follow_line(text: str) -> None:
            with contextlib.suppress(ValidationError):
                follow(Progress.model_validate_json(text))

        told = environment | {RUN_ENV: str(directory)}
        start(place, "gradientflow.bench.side_by_side", worker, follow_line, TRAINING_LIMIT_S, told, logs=directory)
    return Comparison.read(directory / "comparison.json")


def _page(results: Results, directory: Path) -> Path | None:
    """The report, where it can be made."""
    if importlib.util.find_spec("plotly") is None:
        return None
    from gradientflow.bench.report import write_report

    page = directory / "report.html"
    write_report(results, str(page))
    return page


def _as_json(comparison: Comparison, results: Results, elapsed_s: float, directory: Path) -> dict[str, object]:
    """What was measured, with what follows from it, and where the rest is."""
    trained: dict[str, object] = comparison.model_dump()
    for name, score in (("ddp", comparison.ddp), ("gradientflow", comparison.gradientflow)):
        derived = {
            "iteration_ratio": score.iteration_s / comparison.ddp.iteration_s,
            "exposed_s": _exposed_s(comparison, score),
        }
        trained[name] = score.model_dump() | derived
    replayed = results.model_dump(mode="json", exclude={"timelines", "network"})
    return {"version": 1, "trained": trained, "replayed": replayed} | {
        "elapsed_s": elapsed_s,
        "run_directory": str(directory),
    }


def _show(comparison: Comparison, results: Results, elapsed_s: float, directory: Path, page: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140
    _show_training(console, comparison)
    show_results(console, results)
    # A path that is wrapped cannot be copied.
    console.print(f"\n{elapsed_s:.0f} s in all. Everything is in {directory}:", soft_wrap=True)
    if page is not None:
        console.print(f"  {page}   the replay as a page", soft_wrap=True)
    else:
        console.print("  no page: pip install 'gradientflow[report]'")
    console.print(f"  {directory / 'trace-0.json'}   the training, for https://ui.perfetto.dev", soft_wrap=True)


def _show_training(console: Console, comparison: Comparison) -> None:
    console.print(
        f"Training on digits: recipe {comparison.recipe}, {comparison.world} workers, "
        f"{comparison.parameters / 1e6:.2f} M parameters, {comparison.steps} steps a method"
    )
    console.print(_table(comparison))
    console.print(
        "iteration  median over blocks of steps; the methods take turns\n"
        "exposed    iteration less that of compute alone\n"
        "sent       by one worker in a step, without packet headers; the barriers around a block included\n"
        "accuracy   on images kept back for the test; loss: on those trained with",
        style="dim",
    )
    console.print(f"\n{_meaning(comparison)}\n")


def _table(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for heading in ("iteration", "to DDP", "exposed", "sent", "accuracy", "loss"):
        table.add_column(heading, justify="right")

    def cells(cost: Cost) -> list[str]:
        ratio = cost.iteration_s / comparison.ddp.iteration_s
        exposed = milliseconds(_exposed_s(comparison, cost))
        return [milliseconds(cost.iteration_s), f"{ratio:.2f}", exposed, megabytes(cost.sent_nbytes)]

    table.add_row("compute alone", *cells(comparison.compute_only), "-", "-")
    for name, score in (("DDP", comparison.ddp), ("gradientflow", comparison.gradientflow)):
        table.add_row(name, *cells(score), f"{score.test_accuracy:.1%}", f"{score.train_loss:.5f}")
    return table


def _exposed_s(comparison: Comparison, cost: Cost) -> float:
    return cost.iteration_s - comparison.compute_only.iteration_s


def _meaning(comparison: Comparison) -> str:
    """What may be concluded, true whatever the numbers are."""
    apart = abs(comparison.ddp.test_accuracy - comparison.gradientflow.test_accuracy)
    learnt = f"{apart * 100:.1f} points of test accuracy apart" if apart else "with equal test accuracy"
    return (
        f"DDP and gradientflow started from the same weights, saw the same batches and ended {learnt}. The workers "
        "share one machine's cores, so what they compute takes longer than on machines of their own."
    )
