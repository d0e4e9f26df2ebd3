"""The page about trainings: what each method learns, against the base, and how soon."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from gradientflow.bench.learning import LAST_EVALUATIONS, Comparison, Difference, Learning, Reach
from gradientflow.bench.report.charts import Line, curves_plot
from gradientflow.bench.report.page import (
    Page,
    Row,
    code_block,
    count,
    facts,
    need_plotly,
    notes,
    paragraph,
    table,
    write_page,
)


def write_learning_report(learning: Learning, path: str | os.PathLike[str]) -> None:
    need_plotly()
    tasks = ", ".join(dict.fromkeys(comparison.task for comparison in learning.comparisons))
    page = Page(f"What methods learn: {tasks}", learning.started)
    page.add(notes(learning.notes))
    for number, comparison in enumerate(learning.comparisons):
        _add_comparison(page, comparison, number)
    machine = learning.machine
    page.section(
        "How it was measured",
        paragraph(
            "Trainings of one seed start from the same weights and see the same batches. Differences are taken between "
            "them, and the interval holds the true mean in 95 of 100 experiments (Student's distribution)."
        ),
        code_block(learning.command),
        facts(
            [
                ("machine", f"{machine.platform}, {machine.cores} cores"),
                ("versions", f"gradientflow {machine.gradientflow}, torch {machine.torch}, Python {machine.python}"),
                ("started", learning.started),
            ]
        ),
    )
    write_page(page, Path(path))


def _add_comparison(page: Page, comparison: Comparison, number: int) -> None:
    page.section(
        f"{comparison.task}: {comparison.measure}",
        paragraph(
            f"{comparison.words}. {count(comparison.workers, 'worker')}, {comparison.place}; "
            f"{count(comparison.steps, 'step')}."
        ),
        _differences(comparison),
    )
    if comparison.reached:
        page.add(
            page.plot(
                f"curves-{number}",
                _curves(comparison),
                f"{comparison.measure} over seconds of training, a line a seed. The clock stands still while it is "
                f"evaluated. Dotted: what {comparison.base} settles at, mean over seeds.",
            ),
            _times(comparison),
        )


# - Tables


def _differences(comparison: Comparison) -> str:
    heads = ("method", f"{comparison.measure}, {comparison.unit}", f"to {comparison.base}", "in %", "seeds", "recipe")
    means = {method: statistics.fmean(t.last for t in comparison.of(method)) for method in comparison.methods}
    rows = []
    for method, mean in means.items():
        difference, trainings = comparison.differences.get(method), comparison.of(method)
        rows.append(
            Row(
                (
                    method,
                    f"{mean:.3f}",
                    _with_interval(difference) if difference else "–",
                    f"{100 * difference.mean / means[comparison.base]:+.2f}" if difference else "–",
                    str(len(trainings)),
                    trainings[0].recipe,
                )
            )
        )
    better = "more" if comparison.higher_is_better else "less"
    caption = f"After the last step, mean over seeds; {better} is better. Below a difference, its 95 % interval"
    return table(caption, heads, rows, words=(len(heads) - 1,))


def _with_interval(difference: Difference) -> str | tuple[str, str]:
    mean = f"{difference.mean:+.3f}"
    return mean if difference.low is None else (mean, f"{difference.low:+.3f} to {difference.high:+.3f}")


def _times(comparison: Comparison) -> str:
    base_s = {reach.seed: reach.seconds for reach in comparison.reached if reach.method == comparison.base}
    heads = ("method", "seed", f"{comparison.measure} to reach", "after", "step", f"{comparison.base} takes")
    rows = [_time_row(reach, base_s[reach.seed]) for reach in comparison.reached]
    caption = (
        f"When each training first reached the mean of the last {LAST_EVALUATIONS} evaluations of {comparison.base} "
        "with the same seed"
    )
    return table(caption, heads, rows)


def _time_row(reach: Reach, base_s: float | None) -> Row:
    after, step, ratio = "not reached", "–", "–"
    if reach.seconds is not None:
        after, step = f"{reach.seconds:.1f} s", str(reach.step)
        if base_s and reach.seconds:
            ratio = f"{base_s / reach.seconds:.2f} times as long"
    return Row((reach.method, str(reach.seed), f"{reach.target:.2f}", after, step, ratio))


# - The plot


def _curves(comparison: Comparison) -> dict[str, object]:
    lines: list[Sequence[Line]] = []
    for method in comparison.methods:
        lines.append(
            [
                Line(f"{method}, seed {training.seed}", [(each.seconds, each.value) for each in training.evaluations])
                for training in comparison.of(method)
            ]
        )
    target = statistics.fmean(training.settled for training in comparison.of(comparison.base))
    return curves_plot(comparison.methods, lines, target, f"{comparison.measure}, {comparison.unit}")
