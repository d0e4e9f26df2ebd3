"""`gradientflow bench`: methods side by side on a workload, on a shaped network on this machine or on a cluster."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import megabytes, milliseconds
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from gradientflow.bench.results import Results
    from gradientflow.bench.worker import Findings, Specification

_NO_NOTES: tuple[str, ...] = ()
DEFAULT_METHODS = "ddp,ddp-best,lazy,wfbp,bsp,lazy+bf16"


def bench(
    workload: Annotated[str, typer.Option(help="A model's name, such as resnet-50, or a profile.json.")],
    hosts: Annotated[int, typer.Option(help="Hosts of the lab. Under torchrun its world is used and no lab.")] = 4,
    rate: Annotated[str, typer.Option(help="Of each host's link: 100Mbit, 1Gbit, unshaped.")] = "1Gbit",
    methods: Annotated[str, typer.Option(help="Comma-separated: ddp, ddp-best, ..., or recipes.")] = DEFAULT_METHODS,
    iterations: Annotated[int, typer.Option(help="Of each method, at least; nine blocks share them.")] = 18,
    precision: Annotated[float, typer.Option(help="Go on until 95 % intervals are +- this.")] = 0.02,
    max_rounds: Annotated[int, typer.Option(help="Blocks of each method at most.")] = 30,
    compute: Annotated[float | None, typer.Option(help="Seconds of forward and backward in an iteration.")] = None,
    compute_ratio: Annotated[float | None, typer.Option(help="The same, as a multiple of the wire bound.")] = None,
    device: Annotated[str | None, typer.Option(help="The same, from a GPU's published speed: 2080ti, v100.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of one worker in an iteration.")] = None,
    scale: Annotated[float, typer.Option(help="Shrink the model, its distribution of sizes kept.")] = 1.0,
    straggler: Annotated[list[str] | None, typer.Option(help="RANK:FACTOR, its computing takes longer.")] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="No lab: this machine's loopback.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results there, as JSON.")] = None,
) -> None:
    """Measure methods of exchanging gradients, interleaved in one run, against stock DDP and against the limit."""
    from gradientflow.bench.methods import NAMES, method
    from gradientflow.lab import parse_rate

    names = tuple(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    if not names:
        raise UsageError("--methods is empty: give for example ddp,lazy")
    for name in names:
        if name != "ddp-best":
            method(name)
    assert "ddp-best" in NAMES
    if iterations < 1 or max_rounds < 9 or not 0 < precision < 1:
        raise UsageError("--iterations must be 1 or more, --max-rounds 9 or more, --precision between 0 and 1")
    world = int(os.environ.get("WORLD_SIZE", hosts))
    if not 2 <= world <= 64:
        raise UsageError(f"--hosts must be from 2 to 64, found {world}")
    bits_per_s = parse_rate(rate)
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"{out.absolute().parent} is no directory: choose another --out")
    with tempfile.TemporaryDirectory() as directory:
        spec = _specification(
            workload, names, world, bits_per_s, iterations, precision, max_rounds, compute, compute_ratio, device,
            batch, scale, straggler or [], Path(directory),
        )  # fmt: skip
        results = _run(spec, world, bits_per_s, loopback, Path(directory))
    if results is None:
        return  # another rank of a cluster
    if out is not None:
        results.write(out)
    _show(results, out)


def _specification(
    workload: str, names: tuple[str, ...], world: int, rate: float | None, iterations: int, precision: float,
    max_rounds: int, compute: float | None, compute_ratio: float | None, device: str | None, batch: int | None,
    scale: float, straggler: list[str], directory: Path,
) -> Specification:  # fmt: skip
    from gradientflow.bench.worker import GOODPUT, MIN_ROUNDS, Specification
    from gradientflow.lab.workloads import load

    plain = load(workload, scale=scale) if workload.endswith(".json") else None
    wire_s = None
    if compute_ratio is not None:
        if rate is None:
            raise UsageError("--compute-ratio is a multiple of the wire bound: give a --rate")
        size = (plain or load(workload, compute_s=1.0, scale=scale)).nbytes
        wire_s = 2 * (world - 1) / world * size * 8 / (rate * GOODPUT)
    given = [value for value in (compute, compute_ratio, device) if value is not None]
    if plain is None and not given:
        compute = 1.0
    profile = load(
        workload, compute_s=compute, compute_ratio=compute_ratio, wire_s=wire_s, device=device, batch=batch, scale=scale
    )
    return Specification(
        workload=workload,
        profile=profile,
        methods=names,
        rate=rate,
        iterations=-(-iterations // MIN_ROUNDS),
        max_rounds=max_rounds,
        precision=precision,
        batch=batch or 64,
        slowdown=_slowdown(straggler, world),
        workers_here=world,
        findings=str(directory / "findings.json"),
    )


def _slowdown(given: list[str], world: int) -> dict[int, float]:
    found = {}
    for text in given:
        rank, _, factor = text.partition(":")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise UsageError(f"--straggler {text}: write RANK:FACTOR, such as 2:1.5") from None
        if not 0 <= int(rank) < world or float(factor) < 1:
            raise UsageError(f"--straggler {text}: ranks are 0 to {world - 1}, factors 1 or more")
    return found


def _run(spec: Specification, world: int, rate: float | None, loopback: bool, directory: Path) -> Results | None:
    from gradientflow import __version__
    from gradientflow.bench.results import Machine, Results
    from gradientflow.bench.worker import Findings
    from gradientflow.rundir import now

    if "RANK" in os.environ:
        network, notes, found = "the cluster's own", _NO_NOTES, _in_this_world(spec)
        if found is None:
            return None
    else:
        network, notes = _on_this_machine(spec, world, rate, loopback, directory)
        found = Findings.read(spec.findings)
    import torch

    machine = Machine(
        platform=platform.platform(),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=torch.__version__,
        gradientflow=__version__,
    )
    return Results(
        machine=machine,
        command=" ".join(["gradientflow", *sys.argv[1:]]),
        started=now(),
        network=network,
        notes=(*notes, *found.notes),
        results=found.results,
        timelines=found.timelines,
    )


def _in_this_world(spec: Specification) -> Findings | None:
    """Under torchrun: this process is a rank already, and the same command runs on all of them."""
    import torch
    import torch.distributed as dist

    from gradientflow.bench.worker import bake

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    findings = bake(spec.model_copy(update={"workers_here": here, "rate": None}))
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return findings if rank == 0 else None


def _on_this_machine(
    spec: Specification, world: int, rate: float | None, loopback: bool, directory: Path
) -> tuple[str, tuple[str, ...]]:
    from pydantic import ValidationError
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from gradientflow.bench.arena import arena, start
    from gradientflow.bench.worker import Progress as Line

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), console=console, transient=True, disable=not console.is_terminal
    )
    with arena(world, rate, shaped=not loopback) as place, bar:
        task = bar.add_task("starting workers", total=None)

        def follow(text: str) -> None:
            try:
                line = Line.model_validate_json(text)
            except ValidationError:
                return
            bar.update(task, description=line.words, completed=line.done, total=line.total)

        spec = spec.model_copy(update={"rate": place.rate})
        path = directory / "specification.json"
        spec.write(path)
        blocks = spec.max_rounds * (len(spec.methods) + 1) * spec.iterations
        most_s = blocks * (10 * (spec.profile.forward_s + spec.profile.backward_s) + 60)
        start(place, "gradientflow.bench.worker", [str(path)], follow, limit_s=most_s)
        return place.network, place.notes


def _show(results: Results, out: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140  # a table that is cut to a pipe's 80 columns cannot be read
    first = results.results[0]
    console.print(f"{first.workload}, {first.hosts} workers, {results.network}")
    for note in results.notes:
        console.print(f"note: {note}", style="bold")
    console.print(_table(results))
    console.print(
        "to limit   iteration over what no exact method can beat: compute, wire, and the first layers, whose\n"
        "           gradients come last\n"
        "to DDP     median of paired ratios and its 95 % interval, blocks interleaved in one run\n"
        "sent       by one worker in an iteration, without packet headers",
        style="dim",
    )
    if out is not None:
        console.print(f"\nResults: {out}", soft_wrap=True)


def _table(results: Results) -> Table:
    from rich import box
    from rich.table import Table

    base = next((row.method for row in results.results if row.method.startswith("ddp")), results.results[-1].method)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for heading in ("iteration", f"to {base}", "to limit", "exposed", "sent", "CPU", "memory", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results.results:
        ratio = row.ratio_to.get(base)
        table.add_row(
            row.method,
            milliseconds(row.iteration_s.median),
            f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if ratio else "-",
            f"{row.iteration_s.median / row.limit_s:.2f}" if row.limit_s else "-",
            milliseconds(row.exposed_s),
            megabytes(row.bytes_sent),
            f"{row.cpu_share:.0%}",
            megabytes(row.peak_memory_bytes),
            ", ".join(row.notes),
        )
    return table
