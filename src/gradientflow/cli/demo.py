"""`gradientflow demo`: stock DDP and a recipe, side by side on real data, on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import megabytes, milliseconds
from gradientflow.cli.given import fresh_directory, read_recipe, timestamp
from gradientflow.cli.launch import launch
from gradientflow.errors import TrainingError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from gradientflow.bench.side_by_side import Comparison, Cost
    from gradientflow.recipe import Recipe

#: A batch of 128 images is shared out, and batch normalisation wants a few of them on each worker.
MAX_WORKERS = 32
LOG_LINES_SHOWN = 20


def demo(
    workers: Annotated[int, typer.Option(help=f"Workers on this machine, 2 to {MAX_WORKERS}.")] = 4,
    epochs: Annotated[int, typer.Option(help="Passes over the 1437 images of the training set.")] = 12,
    recipe: Annotated[str, typer.Option(help="What is compared with DDP: such as lazy:1MB+fp16.")] = "lazy",
    out: Annotated[Path | None, typer.Option(help="Run directory. Default: runs/demo-DATE-TIME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")] = False,
) -> None:
    """Train a small CNN on real images with DDP and with gradientflow, side by side."""
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("the demo needs scikit-learn's digits: pip install 'gradientflow[demo]'")
    if not 2 <= workers <= MAX_WORKERS:
        raise UsageError(f"--workers must be from 2 to {MAX_WORKERS}, found {workers}")
    if epochs < 1:
        raise UsageError(f"--epochs must be 1 or more, found {epochs}")
    from gradientflow.bench.side_by_side import Comparison
    from gradientflow.rundir import RunDirectory

    chosen = read_recipe(recipe)
    directory = fresh_directory(out, f"demo-{timestamp()}")
    environment = _environment(chosen, directory)
    worker = ["-m", "gradientflow.bench.side_by_side", f"--recipe={chosen}", f"--epochs={epochs}", f"--out={directory}"]
    RunDirectory(directory).create()
    start_s = time.perf_counter()
    _follow(["--standalone", f"--nproc-per-node={workers}", *worker], environment, directory / "demo.log")
    elapsed_s = time.perf_counter() - start_s
    comparison = Comparison.read(directory / "comparison.json")
    if as_json:
        print(json.dumps(_as_json(comparison, elapsed_s, directory)))
    else:
        _show(comparison, elapsed_s, directory)


def _environment(recipe: Recipe, directory: Path) -> dict[str, str]:
    from gradientflow.runtime.settings import RECIPE_ENV, RUN_ENV, SWITCH_ENV, Settings

    if not Settings.from_environment().on:
        raise UsageError(f"{SWITCH_ENV}=off takes away what the demo shows: unset it")
    # Without an interface, Gloo looks up the host's name, which on many machines leads nowhere.
    usual = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return usual | os.environ | {RECIPE_ENV: str(recipe), RUN_ENV: str(directory)}


def _follow(torchrun: list[str], environment: dict[str, str], log: Path) -> None:
    """Run the workers under a progress bar. What else they say goes to the log."""
    from pydantic import ValidationError
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from gradientflow.bench.side_by_side import Progress as Line

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar, log.open("w") as rest:
        task = bar.add_task("starting workers", total=None)

        def follow(line: str) -> None:
            try:
                progress = Line.model_validate_json(line)
            except ValidationError:
                print(line, end="", file=rest, flush=True)
                return
            words = "training" if progress.steps_done < progress.steps_total else "finishing"
            bar.update(task, description=words, completed=progress.steps_done, total=progress.steps_total)

        failure = launch(torchrun, environment, stderr=rest, follow=follow)
    if failure:
        with log.open(errors="replace") as lines:
            sys.stderr.writelines(deque(lines, LOG_LINES_SHOWN))
        raise TrainingError(f"the demo failed: {failure}; all of its output is in {log}")


def _as_json(comparison: Comparison, elapsed_s: float, directory: Path) -> dict[str, object]:
    """The comparison, with what follows from it, and where the rest is."""
    document: dict[str, object] = comparison.model_dump()
    for name, score in (("ddp", comparison.ddp), ("gradientflow", comparison.gradientflow)):
        derived = {
            "iteration_ratio": score.iteration_s / comparison.ddp.iteration_s,
            "exposed_s": _exposed_s(comparison, score),
        }
        document[name] = score.model_dump() | derived
    return document | {"elapsed_s": elapsed_s, "run_directory": str(directory)}


def _show(comparison: Comparison, elapsed_s: float, directory: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(
        f"Recipe {comparison.recipe}, {comparison.world} workers, {comparison.parameters / 1e6:.2f} M parameters, "
        f"{comparison.steps} steps a method, {elapsed_s:.0f} s"
    )
    console.print(_table(comparison))
    console.print(
        "iteration  median over blocks of steps; the methods take turns\n"
        "exposed    iteration less that of compute alone\n"
        "sent       by each worker in a step, as the loopback interface counts it:\n"
        "           TCP headers, acknowledgements and barriers included\n"
        "accuracy   on images kept back for the test; loss: on those trained with",
        style="dim",
    )
    console.print(f"\n{_meaning(comparison)}\n")
    # A path that is wrapped cannot be copied.
    console.print(f"Trace: open {directory / 'trace-0.json'} in https://ui.perfetto.dev", soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for heading in ("iteration", "to DDP", "exposed", "sent", "accuracy", "loss"):
        table.add_column(heading, justify="right")

    def cells(cost: Cost) -> list[str]:
        ratio = cost.iteration_s / comparison.ddp.iteration_s
        sent = "-" if cost.sent_nbytes is None else megabytes(cost.sent_nbytes)
        return [milliseconds(cost.iteration_s), f"{ratio:.2f}", milliseconds(_exposed_s(comparison, cost)), sent]

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
        f"DDP and gradientflow started from the same weights, saw the same batches and ended {learnt}; the times are "
        f"those of {comparison.world} workers that share one machine's cores and its loopback, so they show what an "
        "exchange costs here, not what it would cost on a network."
    )
