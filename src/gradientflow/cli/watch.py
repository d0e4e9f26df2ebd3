"""`gradientflow watch`: a run in the terminal while it trains."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import milliseconds
from gradientflow.errors import UsageError, UserError

if TYPE_CHECKING:
    from rich.console import Group

    from gradientflow.account import Account
    from gradientflow.rundir import RunDirectory

#: Between two looks at the files, which are written every two seconds at most.
PAUSE_S = 1.0
#: Rows of the table; of more ranks, those that compute longest.
RANKS = 16
#: A rank whose file is older has ended, or stands.
OLD_S = 60.0

#: What is drawn on a page: name, value, step.
Scalars = Callable[[str, float, int], None]


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory: what `run --out` was given.")],
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write scalars for TensorBoard there as well.")
    ] = None,
) -> None:
    """Show a run while it trains: step time, what is exposed, who is slow, what `auto` is doing. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from gradientflow.rundir import RunDirectory

    if not run.is_dir():
        raise UsageError(f"{run} is no directory: give what `gradientflow run --out` was given")
    found = RunDirectory(run)
    with _scalars(tensorboard) as add, contextlib.suppress(KeyboardInterrupt):
        console, drawn, said = Console(highlight=False), -1, None
        live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        with live or contextlib.nullcontext():
            while True:
                accounts = look(found)
                if live:
                    live.update(screen(found, accounts), refresh=True)
                elif said != (said := max((one.last for one in accounts), default=-1)):  # a file, a pipe: what is new
                    console.print(screen(found, accounts))
                    console.file.flush()
                drawn = draw(accounts, drawn, add)
                time.sleep(PAUSE_S)


def look(run: RunDirectory) -> list[Account]:
    """What the files say now; nothing, if there are none yet."""
    from gradientflow.account import accounts
    from gradientflow.trace import aligned

    return accounts(aligned([run.trace(rank) for rank in run.traced_ranks()]))


def screen(run: RunDirectory, found: list[Account]) -> Group:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from gradientflow.account import slowest
    from gradientflow.tune.notes import Notes

    if not found:
        return Group(Text(f"{run.path}: nothing yet; traces come a few seconds after the first step"))
    first = found[0]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("rank")
    for heading in ("step", "computing", "exposed", "of that, for slower ranks", "at step"):
        table.add_column(heading, justify="right")
    for one in sorted(sorted(found, key=lambda one: -one.compute_s)[:RANKS], key=lambda one: one.rank):
        table.add_row(
            str(one.rank),
            milliseconds(one.iteration_s),
            milliseconds(one.compute_s),
            f"{milliseconds(one.exposed_s)}  {one.exposed_s / one.iteration_s:.0%}" if one.iteration_s else "-",
            milliseconds(one.behind_s) if one.sees_others else "-",
            str(one.last),
        )
    notes = Notes.of(run)
    slow = slowest({one.rank: one.compute_s for one in found})
    lines = [f"slow: {slow}" if slow else "slow: nobody"]
    recipe = _recipe(run)
    who = "auto" if recipe.startswith("auto") else "it"
    if notes.doing:
        lines.append(f"{who} is {notes.doing}")
    elif notes.races:
        race = notes.races[-1]
        lines.append(
            f"{who} runs {race.winner} since step {race.end}; trials have cost {notes.lost_s:.1f} s, in "
            f"{len(notes.races)} race{'s' * (len(notes.races) > 1)}"
        )
    if (age_s := _age_s(run, first.rank)) > OLD_S:
        lines.append(f"nothing new for {age_s:.0f} s: the run has ended, or stands")
    words = f"{recipe}, {len(found)} of {max(notes.world, len(found))} ranks, step {max(o.last for o in found)}"
    return Group(Text(words), table, Text("\n".join(lines)))


def draw(found: list[Account], drawn: int, add: Scalars) -> int:
    """Of each rank, if there is a step that is newer than `drawn`. Returns the newest."""
    newest = max((one.last for one in found), default=drawn)
    for one in found if newest > drawn else ():
        add(f"step_ms/rank {one.rank}", 1e3 * one.iteration_s, one.last)
        add(f"compute_ms/rank {one.rank}", 1e3 * one.compute_s, one.last)
        add(f"exposed_share/rank {one.rank}", one.exposed_s / one.iteration_s if one.iteration_s else 0.0, one.last)
    return newest


@contextlib.contextmanager
def _scalars(directory: Path | None) -> Iterator[Scalars]:
    if directory is None:
        yield lambda name, value, step: None
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs TensorBoard: pip install 'gradientflow[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))
    try:
        yield lambda name, value, step: writer.add_scalar(name, value, step)
    finally:
        writer.close()


def _recipe(run: RunDirectory) -> str:
    with contextlib.suppress(UserError):
        return str(run.recipe)
    return str(run.path)


def _age_s(run: RunDirectory, rank: int) -> float:
    return max(0.0, time.time() - (run.path / f"trace-{rank}.json").stat().st_mtime)
