"""`gradientflow run`: a training script under torchrun, with a recipe, leaving a run directory."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import complain, milliseconds
from gradientflow.cli.elastic import python, run_elastic, where
from gradientflow.cli.given import fresh_directory, read_recipe, timestamp
from gradientflow.cli.launch import launch
from gradientflow.errors import TrainingError, UsageError

if TYPE_CHECKING:
    from gradientflow.recipe import Recipe
    from gradientflow.rundir import RunDirectory


def run(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="The training script; it calls gradientflow.attach.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Given to the script untouched.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Such as lazy:4MB+fp16, or a recipe.toml. Default: what the script says.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers on this node. Default: one an accelerator, else one.")
    ] = None,
    nnodes: Annotated[str, typer.Option(help="Number of nodes, or MIN:MAX.")] = "1",
    node_rank: Annotated[
        int | None, typer.Option(help="Place of this node among them. Default: as they arrive.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where nodes meet; the same on all of them.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often workers are started anew after a failure: all of them, or each (--elastic).")
    ] = 0,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Workers come and go: who dies is replaced, the others go on.")
    ] = False,
    job: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --elastic: join the job whose store is there.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. Default: runs/DATE-TIME-RECIPE.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout; the script's output goes to stderr.")
    ] = False,
) -> None:
    """Run a training script on several workers, through torchrun."""
    _check_script(script)
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        raise UsageError(f"under mpirun each process is a worker already: mpirun ... python {script}")
    torchrun = [*_nodes(nnodes, node_rank, rdzv_endpoint), *_processes(workers, max_restarts)]
    if job is not None and not elastic:
        raise UsageError("--job is for workers that come and go: give --elastic too, or --rdzv-endpoint instead")
    if elastic and (nnodes != "1" or rdzv_endpoint):
        raise UsageError("--elastic runs on one host at a time: on others give --job HOST:PORT, the store's")
    from gradientflow.rundir import RunDirectory
    from gradientflow.runtime.settings import RECIPE_ENV, RUN_ENV, Settings

    settings = Settings.from_environment()
    if recipe is None and settings.recipe:
        recipe = settings.recipe
    chosen = None if recipe is None else read_recipe(recipe)
    if chosen is not None and chosen.over_mpi:
        raise UsageError(
            f"recipe '{chosen}' is for workers that mpirun starts: mpirun -n {workers or 2} python {script}"
        )
    directory = RunDirectory(fresh_directory(out or settings.run_directory, _run_name(chosen)))

    told = {RUN_ENV: str(directory.path)} | ({RECIPE_ENV: _told(recipe, chosen)} if recipe and chosen else {})
    if max_restarts:
        # Else torchrun keeps one store through restarts, and Gloo meets the addresses of the dead in it (torch 2.13).
        told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    stdout = sys.stderr if as_json else None
    if elastic:
        command = python(script, arguments or [])
        run_elastic(command, chosen, workers or 1, where(job), max_restarts, os.environ | told, stdout)
        _finish(directory, script, settings.on, as_json=as_json)
        return
    failure = launch(
        # Without the "--", torchrun would try its own abbreviations on the script's options.
        [*torchrun, "--", str(script), *(arguments or [])],
        os.environ | told,
        stdout=stdout,
    )
    if failure:
        raise TrainingError(f"{script} failed: {failure}; its output is above")
    _finish(directory, script, settings.on, as_json=as_json)


def _finish(directory: RunDirectory, script: Path, is_on: bool, *, as_json: bool) -> None:
    """Say what the run was like."""
    from gradientflow.runtime.settings import SWITCH_ENV

    summary = _summarize(directory)
    if not is_on:
        complain(f"{SWITCH_ENV}=off: no run directory was written")
    elif not summary.attached:
        raise TrainingError(f"{script} ended well but never called gradientflow.attach: there is nothing to report")
    if as_json:
        print(json.dumps({"version": 1, **asdict(summary)}))
    elif summary.attached:
        _show(summary)


def _check_script(script: Path) -> None:
    if script.is_dir():
        raise UsageError(f"{script} is a directory: give the training script in it")
    if not script.exists():
        raise UsageError(f"there is no script {script}")


def _processes(workers: int | None, max_restarts: int) -> list[str]:
    """torchrun's options for what runs on this node."""
    if workers is not None and workers < 1:
        raise UsageError(f"--workers must be 1 or more, found {workers}")
    if max_restarts < 0:
        raise UsageError(f"--max-restarts must be 0 or more, found {max_restarts}")
    return [f"--nproc-per-node={workers or _num_accelerators() or 1}", f"--max-restarts={max_restarts}"]


def _num_accelerators() -> int:
    import torch

    return torch.accelerator.device_count()


def _nodes(nnodes: str, node_rank: int | None, endpoint: str | None) -> list[str]:
    """torchrun's options for which nodes take part, and where they meet."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nnodes):
        raise UsageError(f"--nnodes {nnodes}: write a number such as 2, or a range such as 1:4")
    if not endpoint:
        if nnodes != "1" or node_rank is not None:
            raise UsageError("several nodes need --rdzv-endpoint HOST:PORT, the same on all of them")
        return ["--standalone"]
    meeting = [f"--nnodes={nnodes}", f"--rdzv-endpoint={endpoint}"]
    if node_rank is None:
        return [*meeting, "--rdzv-backend=c10d"]
    if ":" in nnodes or not 0 <= node_rank < int(nnodes):
        raise UsageError(f"--node-rank {node_rank} is no place among --nnodes {nnodes}: they count from 0")
    return [*meeting, "--rdzv-backend=static", f"--node-rank={node_rank}"]


def _told(given: str, recipe: Recipe) -> str:
    """What workers are told: a plan that is pinned is in the file alone."""
    return str(recipe) if recipe.pinned is None else str(Path(given).absolute())


def _run_name(recipe: Recipe | None) -> str:
    return f"{timestamp()}-{recipe}".replace(":", "-") if recipe else timestamp()


@dataclass(frozen=True)
class _Summary:
    """What a run directory says in a few lines. Times are medians of its lowest rank."""

    run_directory: str
    #: None where run.json is elsewhere: of several nodes, only rank 0's has it.
    recipe: str | None = None
    world: int | None = None
    #: None where no worker on this node attached.
    steps: int | None = None
    iteration_s: float | None = None
    exposed_s: float | None = None

    @property
    def attached(self) -> bool:
        return self.recipe is not None or self.steps is not None


def _summarize(directory: RunDirectory) -> _Summary:
    run = directory.run if (directory.path / "run.json").exists() else None
    recipe, world = (run.recipe, run.world) if run else (None, None)
    ranks = directory.traced_ranks()
    if not ranks:
        return _Summary(str(directory.path), recipe, world)
    trace = directory.trace(ranks[0])
    iterations_s = [span.duration_s for span in trace.of_kind("step")]
    waits_s = [span.duration_s for span in trace.of_kind("exposed")]
    return _Summary(str(directory.path), recipe, world, len(iterations_s), _usual(iterations_s), _usual(waits_s))


def _usual(durations_s: list[float]) -> float | None:
    """The median, without the first where there are more: it also holds the loop's own beginnings."""
    return statistics.median(durations_s[1:] or durations_s) if durations_s else None


def _show(summary: _Summary) -> None:
    """On stderr: stdout is the script's."""
    from rich.console import Console
    from rich.text import Text

    rows = {"steps traced": str(summary.steps or 0)}
    if summary.recipe is not None:
        rows = {"recipe": summary.recipe, "world": str(summary.world)} | rows
    if summary.iteration_s is not None:
        rows["iteration time"] = f"{milliseconds(summary.iteration_s)} (median)"
    if summary.exposed_s is not None:
        rows["exposed communication"] = f"{milliseconds(summary.exposed_s)} a step (median)"
    rows["run directory"] = summary.run_directory
    console = Console(stderr=True)
    for label, value in rows.items():
        # Not wrapped: half a path cannot be copied.
        console.print(Text.assemble((f"{label:<23}", "dim"), value), soft_wrap=True)
