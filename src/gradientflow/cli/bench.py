"""`gradientflow bench`: methods side by side on a workload, on a shaped network on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import megabytes, milliseconds
from gradientflow.cli.given import STRAGGLER_HELP, check_compute, check_scale, read_rates
from gradientflow.cli.launch import stoppable
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gradientflow.bench.ablation import Stage
    from gradientflow.bench.results import Results
    from gradientflow.bench.worker import Progress
    from gradientflow.profiles import Profile

DEFAULT_METHODS = "ddp,ddp-best,lazy,wfbp,bsp,lazy+bf16"
DEFAULT_RATE = "1Gbit"
DEFAULT_COMPUTE_S = 1.0
HOSTS = range(2, 65)
MOST_SERVERS = 64
#: Between two lines of progress where there is no terminal.
PROGRESS_S = 10.0


def bench(
    workload: Annotated[str, typer.Option(help="A model's name, such as resnet-50, or a profile.json.")],
    hosts: Annotated[int, typer.Option(help="Hosts of the lab. Under torchrun its world is used and no lab.")] = 4,
    servers: Annotated[
        int | None, typer.Option(help="Hosts with a parameter server each, for -ps:K. Default: as methods say.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help=f"Of links: 100Mbit, unshaped; 1Gbit,2:50Mbit: host 2's differs. Default: {DEFAULT_RATE} in a lab."
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated: ddp, ddp-best, ..., or recipes.")] = DEFAULT_METHODS,
    ablation: Annotated[
        str | None, typer.Option(help="Instead of --methods: ddp-best, and this recipe's parts one by one.")
    ] = None,
    iterations: Annotated[int, typer.Option(help="Of each method, at least; nine blocks share them.")] = 18,
    precision: Annotated[float, typer.Option(help="Go on until 95 % intervals are +- this.")] = 0.02,
    max_rounds: Annotated[int, typer.Option(help="Blocks of each method at most, 9 or more.")] = 30,
    compute: Annotated[
        float | None,
        typer.Option(help=f"Seconds of forward and backward in an iteration. Default: {DEFAULT_COMPUTE_S:g}."),
    ] = None,
    compute_ratio: Annotated[float | None, typer.Option(help="The same, as a multiple of the wire bound.")] = None,
    device: Annotated[str | None, typer.Option(help="The same, from a GPU's published speed: 2080ti, v100.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of one worker in an iteration.")] = None,
    scale: Annotated[float, typer.Option(help="Shrink the model, its distribution of sizes kept.")] = 1.0,
    straggler: Annotated[list[str] | None, typer.Option(help=STRAGGLER_HELP)] = None,
    jitter: Annotated[float, typer.Option(help="Computing varies from iteration to iteration, by this share.")] = 0.0,
    clip: Annotated[float | None, typer.Option(help="Clip gradients to this norm before each step.")] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="No lab: this machine's loopback.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results there, as JSON.")] = None,
) -> None:
    """Measure methods of exchanging gradients, interleaved in one run, against stock DDP and against the limit."""
    from gradientflow.bench.ablation import gains
    from gradientflow.bench.methods import patterns_of
    from gradientflow.bench.results import Conditions
    from gradientflow.bench.worker import MIN_ROUNDS, MOST_COMPUTE_S, Specification
    from gradientflow.documents import check_writable
    from gradientflow.lab.replay import Jitter
    from gradientflow.lab.workloads import usual_batch

    in_a_world = "RANK" in os.environ
    parts = () if ablation is None else _parts(ablation, methods)
    names = check_methods(",".join(["ddp-best", *(part.recipe for part in parts)]) if parts else methods)
    if iterations < 1 or max_rounds < MIN_ROUNDS or not 0 < precision < 1:
        raise UsageError(
            f"--iterations must be 1 or more, --max-rounds {MIN_ROUNDS} or more, --precision between 0 and 1"
        )
    world = int(os.environ["WORLD_SIZE"]) if in_a_world else hosts
    if world not in HOSTS:
        raise UsageError(f"{world} workers: give --hosts, or torchrun, {HOSTS[0]} to {HOSTS[-1]}")
    usual, rates = read_rates(rate or ("unshaped" if in_a_world or loopback else DEFAULT_RATE), world)
    # All bytes go through every port, as rings and trees have it, so the slowest one is what a bound is about.
    bits_per_s = min((each for each in [rates.get(n, usual) for n in range(world)] if each is not None), default=None)
    if loopback and bits_per_s is not None:
        raise UsageError("--loopback has no --rate: leave one of them out")
    if not (loopback or in_a_world) and any(name.startswith("horovod") for name in names):
        raise UsageError("horovod fails to connect between hosts of a lab: give --loopback, or start it with torchrun")
    if not 0.0 <= jitter <= Jitter.MOST:
        raise UsageError(f"--jitter {jitter:g}: give a share from 0 to {Jitter.MOST}")
    if clip is not None and not 0.0 < clip < float("inf"):
        raise UsageError(f"--clip {clip:g}: give a norm above 0")
    if out is not None:
        check_writable(out)
    num_servers = _num_servers(names, servers, in_a_world)
    profile = _profile(workload, world, bits_per_s, compute, compute_ratio, device, batch, scale)
    conditions = Conditions.parse(straggler or [], world).model_copy(update={"jitter": jitter, "clip_norm": clip})
    longest_s = conditions.most * (profile.forward_s + profile.backward_s)
    if longest_s > MOST_COMPUTE_S:
        raise UsageError(f"an iteration would compute for {longest_s:.3g} s: make it {MOST_COMPUTE_S:g} s at most")
    spec = Specification(
        workload=workload,
        profile=profile,
        methods=names,
        rate=bits_per_s,
        interface="",
        num_sharing=1,
        iterations=-(-iterations // MIN_ROUNDS),
        max_rounds=max_rounds,
        precision=precision,
        batch=batch or (1 if workload.endswith(".json") else usual_batch(workload)),
        conditions=conditions,
        patterns=patterns_of(names),
        findings="",
    )
    from gradientflow.bench.arena import arena
    from gradientflow.bench.bakeoff import check_memory, run_at, run_here

    if in_a_world:
        with progress_bar() if os.environ["RANK"] == "0" else contextlib.nullcontext(_say_nothing) as follow:
            found = run_here(spec, follow)
        if found is None:
            return  # another rank has them
        results = found
    else:
        check_memory(profile, len(names), world)
        there = arena(world, usual, rates, shaped=not loopback, num_servers=num_servers)
        with stoppable(), there as place, progress_bar() as follow:
            results = run_at(place, spec, follow)
    _show(results, gains(results, parts))
    if out is not None:
        results.write(out)
        print(f"\nResults: {out}\nA page: gradientflow report {out}")


def check_methods(text: str) -> tuple[str, ...]:
    """Their names, told apart."""
    from gradientflow.bench.methods import method, numbered

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--methods is empty: give for example ddp,lazy")
    for name in names:
        if name != "ddp-best":  # found by a pilot
            method(name)
    return numbered(name for name in names if name != "compute")  # which is always there


def _num_servers(names: tuple[str, ...], given: int | None, in_a_world: bool) -> int:
    """Hosts for servers: as many as some method has."""
    from gradientflow.bench.methods import NAMES, without_number
    from gradientflow.recipe import Recipe

    recipes = [Recipe.parse(text) for text in map(without_number, names) if text not in NAMES]
    asked = max((recipe.num_servers for recipe in recipes), default=0)
    if given is not None and in_a_world:
        raise UsageError("--servers is for a lab: on a cluster, start them with `gradientflow server`")
    if given is not None and not asked <= given <= MOST_SERVERS:
        raise UsageError(f"--servers {given}: methods ask for {asked}, and {MOST_SERVERS} is the most")
    if asked > MOST_SERVERS:
        raise UsageError(f"a method asks for {asked} servers, and {MOST_SERVERS} is the most of a lab")
    return asked if given is None else given


def _parts(recipe: str, methods: str) -> tuple[Stage, ...]:
    from gradientflow.bench.ablation import stages
    from gradientflow.recipe import as_recipe

    if methods != DEFAULT_METHODS:
        raise UsageError("--ablation has methods of its own: leave --methods out")
    return stages(as_recipe(recipe))


def _profile(
    workload: str,
    world: int,
    rate: float | None,
    compute: float | None,
    compute_ratio: float | None,
    device: str | None,
    batch: int | None,
    scale: float,
) -> Profile:
    from gradientflow.lab.limits import goodput
    from gradientflow.lab.replay import check_replayable
    from gradientflow.lab.workloads import load

    ways = {"--compute": compute, "--compute-ratio": compute_ratio, "--device": device}
    given = [option for option, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both say how long computing takes: give one of them")
    if compute is not None:
        check_compute(compute)
    if compute_ratio is not None and not 0.0 <= compute_ratio < float("inf"):
        raise UsageError(f"--compute-ratio {compute_ratio:g}: give 0 or more")
    check_scale(scale)
    is_file = workload.endswith(".json")
    if is_file and device is not None:
        raise UsageError(f"{workload} is a profile of one device: leave --device out")
    wire_s = None
    if compute_ratio is not None:
        if rate is None:
            raise UsageError("--compute-ratio is a multiple of the wire bound: give a --rate")
        wire_s = 2 * (world - 1) / world * load(workload, scale=scale).nbytes * 8 / goodput(rate)
    elif compute is None and device is None and not is_file:
        compute = DEFAULT_COMPUTE_S
    profile = load(
        workload,
        compute_s=compute,
        compute_ratio=compute_ratio,
        wire_s=wire_s,
        device=device,
        batch=None if is_file else batch,
        scale=scale,
    )
    check_replayable(profile)
    return profile


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Shows what workers say of themselves: on a terminal as a bar, else as a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LinesNowAndThen()
        return
    columns = TextColumn("{task.description}"), BarColumn()
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting workers", total=None)

        def follow(line: Progress) -> None:
            bar.update(task, description=line.words, completed=line.done, total=line.total)

        yield follow


def _say_nothing(line: Progress) -> None:
    pass


class _LinesNowAndThen:
    """For logs: what is going on, but not every word of it."""

    def __init__(self) -> None:
        self._last_s = -PROGRESS_S

    def __call__(self, line: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= PROGRESS_S:
            self._last_s = now_s
            print(f"{line.words} ({line.done} of {line.total})", file=sys.stderr, flush=True)


def _show(results: Results, parts: list[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140  # a table that is cut to a pipe's 80 columns cannot be read
    show_results(console, results)
    if parts:
        console.print("\n".join(["", "What each part makes of the one before it:", *parts]))


def show_results(console: Console, results: Results) -> None:
    """The table, and what its columns mean."""
    first = results.results[0]
    console.print("; ".join([f"{first.workload}, {first.hosts} workers, {results.place}", *results.conditions.words]))
    for note in results.notes:
        console.print(f"note: {note}", style="bold")
    console.print(_table(results))
    console.print(
        "to ddp     median of paired ratios and its 95 % interval, blocks interleaved in one run\n"
        "to limit   iteration over what no exact method can beat: compute, wire, and the first layers, whose\n"
        "           gradients come last and are needed first\n"
        "exposed    iteration less that of compute alone\n"
        "sent       by one worker in an iteration, without packet headers\n"
        "CPU        busy share of all cores, whatever kept them busy",
        style="dim",
    )


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
