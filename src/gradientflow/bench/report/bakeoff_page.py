"""The page about a bake-off: methods against what no exact method can beat, and one iteration of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradientflow.bench.report.charts import Marks, Part, stacked_bars
from gradientflow.bench.report.network_part import add_network
from gradientflow.bench.report.page import (
    BLUE,
    VERMILLION,
    Page,
    Row,
    Unit,
    code_block,
    count,
    details,
    facts,
    need_plotly,
    notes,
    paragraph,
    table,
    time_unit,
    trace_link,
    write_page,
)
from gradientflow.bench.report.timeline import GROUP_SPANS, Group, timeline
from gradientflow.bench.results import Result, Results, Timeline
from gradientflow.trace import MAIN, Merged, Span, Trace, write_merged

CPU_BOUND = "CPU-bound"
#: Between the iterations of two methods in the merged trace, as a share of the longest.
_GAP = 0.05
TABLE_ROWS = 200
COMPUTE_KINDS = ("forward", "backward", "optimizer", "update")
#: In the timelines of all ranks and methods: about 4 MB of the page.
PAGE_SPANS = 30_000

_COLUMNS = (
    (
        "iteration",
        "median over blocks, from the end of one step to the end of a later one; below it where 80 % of the blocks lay",
    ),
    ("to another", "median of ratios between blocks that ran next to each other; below it its 95 % interval"),
    (
        "limit",
        "max(C, W, max over k of C - c_k + W_k): compute, wire, and the first k tensors in forward order, whose "
        "gradients come last and are needed first; no exact method can beat it",
    ),
    ("wire bound", "what must be sent, at the link's rate"),
    ("exposed", 'iteration less that of "compute", which has the optimizer on and the exchange off'),
    ("sent", "by one worker in an iteration, packets' headers taken off; below it what the method must send"),
    ("CPU", "seconds of one worker in an iteration; below it how busy all cores were, whatever kept them busy"),
    ("memory", "the most that a worker held"),
    ("speed-up", 'over one worker by itself, whose iteration is that of "compute"'),
)


def write_report(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the page to `path` and, where timelines were recorded, one trace of all ranks beside it."""
    need_plotly()
    target = Path(path)
    page = _page(results)
    if results.timelines:
        trace = trace_beside(target)
        merged = write_merged(trace, _one_after_the_other(results.timelines), clocks_agree=True)
        page.add(trace_link(trace, target, _about_trace(merged)))
    _add_origin(page, results)
    write_page(page, target)


def trace_beside(page: Path) -> Path:
    """
    >>> trace_beside(Path("out/results.html"))
    PosixPath('out/results.trace.json')
    """
    return page.with_suffix(".trace.json")


def _page(results: Results) -> Page:
    first, rows = results.results[0], results.results
    num_methods = len([row for row in rows if row.method != "compute"])
    page = Page(
        f"{first.workload}: {count(num_methods, 'method')} on {count(first.hosts, 'worker')}",
        "; ".join([results.place, *results.conditions.words, results.started]),
    )
    page.add(notes([*results.notes, *_warnings(rows)]))
    page.section(
        "Iteration time against the limit",
        page.plot("bars", _bars(rows), "Median iteration of each method, in its parts, and the least it could take."),
        _table(rows),
        details("What the columns mean", facts(_COLUMNS)),
        details("Ratios to every method", _ratios(rows)),
    )
    page.section("One iteration", *_timelines(page, results))
    return page


def _warnings(rows: Sequence[Result]) -> list[str]:
    found = []
    bound = [row.method for row in rows if CPU_BOUND in row.notes]
    if bound:
        found.append(
            f"CPU-bound: {', '.join(bound)}. The machine's cores were busy, so these rows say little about the network."
        )
    if all(row.rate is None for row in rows):
        found.append("No rate of the links is known, so there is no wire bound and the limit is compute alone.")
    return found


# - Figures and tables


def _bars(rows: Sequence[Result]) -> dict[str, object]:
    medians = [row.iteration_s.median for row in rows]
    compute = [min(row.compute_s, row.iteration_s.median) for row in rows]
    exposed = [median - part for median, part in zip(medians, compute, strict=True)]
    return stacked_bars(
        [row.method for row in rows],
        [Part("compute", BLUE, compute), Part("exposed", VERMILLION, exposed, hatched=True)],
        [(row.iteration_s.p10, row.iteration_s.p90) for row in rows],
        Marks("limit of the method", [row.limit_s for row in rows]),
    )


def _base(rows: Sequence[Result]) -> str:
    return next((row.method for row in rows if row.method.startswith("ddp")), rows[-1].method)


def _table(rows: Sequence[Result]) -> str:
    base = _base(rows)
    times = time_unit(row.iteration_s.p90 for row in rows)
    heads = (
        "method", "iteration", f"to {base}", "to limit", "limit", "wire bound", "exposed", "sent", "CPU", "memory",
        "samples/s", "speed-up", "notes",
    )  # fmt: skip
    # A column of nothing would push the others out of sight.
    width = len(heads) if any(set(row.notes) - {CPU_BOUND} for row in rows) else len(heads) - 1
    found = [Row(_cells(row, base, times)[:width], CPU_BOUND if CPU_BOUND in row.notes else "") for row in rows]
    first = rows[0]
    link = f" and links of {Unit('Mbit/s', 1e6, 0).of(first.rate)}" if first.rate else ""
    return table(f"{first.workload}, {first.hosts} workers{link}", heads[:width], found, words=(len(heads) - 1,))


def _cells(row: Result, base: str, times: Unit) -> tuple[str | tuple[str, str], ...]:
    ratio, spread, megabytes = row.ratio_to.get(base), row.iteration_s, Unit("MB", 1e6)
    return (
        row.method,
        (times.of(spread.median), times.between(spread.p10, spread.p90)),
        (f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}") if ratio else "–",
        f"{spread.median / row.limit_s:.2f}" if row.limit_s > 0 else "–",
        times.of(row.limit_s),
        times.of(row.wire_bound_s) if row.rate else "–",
        times.of(row.exposed_s),
        (megabytes.of(row.bytes_sent), f"must {megabytes.of(row.must_send)}"),
        (times.of(row.cpu_s), f"{row.cpu_share:.0%} of cores"),
        megabytes.of(row.peak_memory_bytes),
        f"{row.samples_per_s:,.1f}",
        f"{row.speedup:.2f}",
        ", ".join(note for note in row.notes if note != CPU_BOUND),
    )


def _ratios(rows: Sequence[Result]) -> str:
    bases = list(dict.fromkeys(base for row in rows for base in row.ratio_to))
    found = []
    for row in rows:
        ratios = [row.ratio_to.get(base) for base in bases]
        found.append(
            Row((row.method, *(f"{r.median:.3f} ({r.low:.3f} to {r.high:.3f})" if r else "–" for r in ratios)))
        )
    heads = ("method", *(f"to {base}" for base in bases))
    return table("Iteration over that of another method, with the 95 % interval", heads, found)


# - Timelines


def _timelines(page: Page, results: Results) -> list[str]:
    if not results.timelines:
        return [paragraph("No timelines were recorded.")]
    methods = list(dict.fromkeys(found.method for found in results.timelines))
    spans = {(found.method, found.rank): found.spans for found in results.timelines}
    ranks = sorted({found.rank for found in results.timelines})
    shown = _ranks_that_fit(ranks, spans)
    sets = [[Group(method, spans.get((method, rank), ())) for method in methods] for rank in shown]
    left = f" Ranks {shown[-1] + 1} to {ranks[-1]} are in the trace only." if len(shown) < len(ranks) else ""
    caption = (
        "One more iteration of each method after the measurement, in the midst of others, on rank 0's clock: a method "
        "that puts updates off begins it with what the one before left to it. Messages are shown from when they were "
        f"issued to their end.{left}"
    )
    plot = page.plot("timeline", timeline(sets), caption, ("Rank", [str(rank) for rank in shown]))
    return [plot, details("The same in figures", _timeline_table(results.timelines))]


def _ranks_that_fit(ranks: Sequence[int], spans: dict[tuple[str, int], tuple[Span, ...]]) -> list[int]:
    """The first always, others as long as the page does not grow too large."""
    found, room = list[int](), PAGE_SPANS
    for rank in ranks:
        room -= sum(min(len(several), GROUP_SPANS) for (_, other), several in spans.items() if other == rank)
        if found and room < 0:
            break
        found.append(rank)
    return found


def _timeline_table(timelines: Sequence[Timeline]) -> str:
    times = time_unit(span.end_s for found in timelines for span in found.spans)
    rows = []
    for found in timelines[:TABLE_ROWS]:
        messages = [span for span in found.spans if span.kind == "message"]
        exposed_s = sum(span.duration_s for span in found.spans if span.kind == "exposed")
        computed_s = sum(span.duration_s for span in found.spans if span.kind in COMPUTE_KINDS)
        end_s = max((span.end_s for span in found.spans), default=0.0)
        cells = (found.method, str(found.rank), times.of(end_s), times.of(computed_s), str(len(messages)))
        rows.append(Row((*cells, times.of(exposed_s))))
    heads = ("method", "rank", "last end", "compute", "messages", "exposed")
    return table("One iteration of each method on each rank", heads, rows)


def _one_after_the_other(timelines: Sequence[Timeline]) -> list[Trace]:
    """The iterations of all methods in turn, as if they had been one trace a rank; a method is a step."""
    methods = list(dict.fromkeys(found.method for found in timelines))
    spans: dict[int, list[Span]] = {found.rank: [] for found in timelines}
    extents = {method: _extent(found for found in timelines if found.method == method) for method in methods}
    gap_s = _GAP * max(end_s - start_s for start_s, end_s in extents.values())
    now_s = 0.0
    for number, method in enumerate(methods):
        start_s, end_s = extents[method]
        for found in timelines:
            if found.method == method:
                moved = [span._replace(step=number).moved(now_s - start_s) for span in found.spans]
                whole = Span("method", method, MAIN, now_s, now_s + end_s - start_s, number)
                spans[found.rank] += [whole, *moved]
        now_s += end_s - start_s + gap_s
    return [Trace(rank, 0.0, tuple(several)) for rank, several in sorted(spans.items())]


def _extent(timelines: Iterable[Timeline]) -> tuple[float, float]:
    spans = [span for found in timelines for span in found.spans]
    return min((span.start_s for span in spans), default=0.0), max((span.end_s for span in spans), default=0.0)


def _about_trace(merged: Merged) -> str:
    left = f" {merged.left_out_spans:,} spans did not fit." if merged.left_out_spans else ""
    return f"these iterations on all ranks, the methods one after the other.{left}"


def _add_origin(page: Page, results: Results) -> None:
    add_network(page, results.network)
    machine = results.machine
    page.section(
        "How it was measured",
        paragraph(
            "Methods take turns, block by block, in one job; ratios are taken between blocks that ran next to each "
            "other, and the interval holds the true median in 95 of 100 experiments."
        ),
        code_block(results.command),
        facts(
            [
                ("machine", f"{machine.platform}, {machine.cores} cores"),
                ("versions", f"gradientflow {machine.gradientflow}, torch {machine.torch}, Python {machine.python}"),
                ("where", results.place),
                ("conditions", ", ".join(results.conditions.words) or "as the workload says"),
                ("started", results.started),
                ("blocks", ", ".join(f"{row.method} {row.iteration_s.n}" for row in results.results)),
            ]
        ),
    )
