"""`gradientflow reproduce`: published figures beside predicted ones."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Published(StrEnum):
    survey = "survey"
    gradientflow = "gradientflow"


def reproduce(
    what: Annotated[Published, typer.Argument(help="The survey's table, or the GradientFlow paper's speed-up.")],
    out: Annotated[Path | None, typer.Option(help="As a page (.html).")] = None,
) -> None:
    """Predict published results from the clusters that come with the package, and say how far off that is."""
    from gradientflow.documents import check_writable, write_text
    from gradientflow.sim.pages import page

    if out is not None:
        check_writable(out)
    lines, holds = _survey() if what is Published.survey else _paper()
    print("\n".join(lines))
    if out is not None:
        write_text(out, page(f"Published and predicted: {what.value}", lines))
    if not holds:
        raise typer.Exit(1)


def _survey() -> tuple[list[str], bool]:
    from gradientflow.sim.survey import CALIBRATED_ON, MEAN_APART, METHODS, cells, compare, judge

    compared = compare(cells())
    lines = ["Samples per second, published > predicted, and the error"]
    for key in dict.fromkeys((one.cell.workload, one.cell.cluster) for one in compared):
        found = [one for one in compared if (one.cell.workload, one.cell.cluster) == key]
        note = " (calibrated on these)" if key[0] == CALIBRATED_ON else ""
        workers = list(dict.fromkeys(one.cell.workers for one in found))
        lines += ["", f"{key[0]} on {key[1]}{note}", " " * 18 + "".join(f"{f'{num} workers':>30}" for num in workers)]
        for method in METHODS:
            row = [one for one in found if one.cell.method == method]
            words = [f"{one.cell.published:9.1f} > {one.predicted:8.1f} {100 * one.error:+6.1f} %" for one in row]
            lines.append(f"{method:18}" + "".join(f"{word:>30}" for word in words))
    verdict = judge(compared)
    lines += [
        "",
        f"ByteScheduler-A2A, which has an overhead of its own: MAE {verdict.mean_apart:.1f} % (bound {MEAN_APART:g} %)",
        verdict.words,
    ]
    return lines, verdict.holds


def _paper() -> tuple[list[str], bool]:
    from gradientflow.sim.paper import report

    return report()
