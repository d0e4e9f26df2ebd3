"""`gradientflow doctor`: what stands in the way of training here, and how to mend it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.launch import stoppable
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from gradientflow.doctor.findings import Finding
    from gradientflow.doctor.parity import Parity

_PARITY_LIMIT_S = 300.0
_COLOURS = {"ok": "green", "note": "yellow", "fix": "red"}


def doctor(
    parity: Annotated[
        bool, typer.Option("--parity", help="Train a little with DDP and with us: same results, and how long.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for other ranks.")] = 30.0,
    seconds: Annotated[float, typer.Option(help="How long each way between two hosts is measured.")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Look for what stands in a job's way: versions, interface, ports, clocks, slow hosts. On all hosts at once under
    torchrun: torchrun ... -m gradientflow doctor"""
    if not 1.0 <= wait <= 3600.0:
        raise UsageError(f"--wait {wait:g}: give 1 to 3600 seconds")
    if not 0.1 <= seconds <= 60.0:
        raise UsageError(f"--seconds {seconds:g}: give 0.1 to 60")
    from gradientflow.doctor.examination import examine_here, examine_together

    together = "RANK" in os.environ
    measured = None
    if together:
        found, meeting = examine_together(os.environ, wait, seconds)
        if parity and meeting is not None:
            from gradientflow.doctor.parity import measure_parity

            measured = measure_parity(meeting, int(os.environ.get("LOCAL_RANK", "0")))
    else:
        found = examine_here(os.environ)
        if parity:
            measured = _two_workers_here(seconds)
    first = int(os.environ.get("RANK", "0")) == 0
    broken = any(each.weight == "fix" for each in found)
    if not first and not broken:
        return
    if as_json:
        print(json.dumps(_as_document(found, measured)))
    else:
        _show(found, measured)
        if not together:
            print("Other hosts were not looked at: run it on all of them, torchrun ... -m gradientflow doctor")
    if broken or (measured is not None and not measured.holds):
        raise typer.Exit(1)


def _two_workers_here(seconds: float) -> Parity | None:
    """This command once more, as two workers on loopback."""
    from gradientflow.bench.arena import Loopback, start
    from gradientflow.doctor.parity import Parity

    lines: list[str] = []
    arguments = ["doctor", "--parity", "--json", "--seconds", str(seconds)]
    with stoppable():
        start(Loopback(2, ""), "gradientflow", arguments, lines.append, limit_s=_PARITY_LIMIT_S)
    found = json.loads(lines[-1])["parity"]
    return Parity.model_validate(found) if found else None


def _as_document(found: Sequence[Finding], measured: Parity | None) -> dict[str, object]:
    rows = [each._asdict() for each in found]
    return {"version": 1, "findings": rows, "parity": measured.model_dump() if measured else None}


def _show(found: Sequence[Finding], measured: Parity | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for each in found:
        mark = (f"{each.weight:<5}", _COLOURS[each.weight])
        console.print(Text.assemble(f"{each.check:<12}", mark, each.words), soft_wrap=True)
    if measured is not None:
        weight = "ok" if measured.holds else "fix"
        for words in measured.words:
            console.print(Text.assemble(f"{'parity':<12}", (f"{weight:<5}", _COLOURS[weight]), words), soft_wrap=True)
    mends = [each.mend for each in found if each.weight == "fix"]
    if mends:
        console.print("\nTo mend:")
        for number, mend in enumerate(dict.fromkeys(mends), start=1):
            console.print(Text(f"  {number}. {mend}"), soft_wrap=True)
