"""The page about a run: what was run, how its steps went on every rank, who waited for whom, and the plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gradientflow.account import Waits, waits
from gradientflow.bench.report.charts import Line, Part, message_sizes, stacked_bars, steps_plot
from gradientflow.bench.report.network_part import add_network
from gradientflow.bench.report.page import (
    BLUE,
    GREY,
    VERMILLION,
    Page,
    Row,
    count,
    details,
    facts,
    need_plotly,
    notes,
    paragraph,
    seconds,
    size,
    table,
    time_unit,
    trace_link,
    write_page,
)
from gradientflow.bench.report.steps import RankSteps, common_steps, median_step, slowest_step, thinned
from gradientflow.bench.report.timeline import Group, timeline
from gradientflow.errors import DocumentError
from gradientflow.network import Network
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.rundir import Run, RunDirectory
from gradientflow.trace import Merged, Trace, aligned, write_merged

MERGED = "trace.json"
#: Lines that can still be told apart; with more ranks the fastest, the middle and the slowest are drawn.
LINES = 8
POINTS = 20_000
#: Ranks in bars and timelines, and in the square of who waited for whom.
DRAWN_RANKS = 16
MATRIX_RANKS = 16
TABLE_ROWS = 300
DRAWN_MESSAGES = 1_000


class Findings(NamedTuple):
    """What a run directory holds. Files that a run which ended early has not written are None."""

    path: Path
    run: Run
    profile: Profile | None
    plan: Plan | None
    network: Network | None
    traces: Sequence[Trace]

    @classmethod
    def read(cls, path: Path) -> Findings:
        directory = RunDirectory(path)
        if not (path / "run.json").exists():
            raise DocumentError(
                f"{path} is no run directory: there is no run.json in it (of several nodes, rank 0's holds it)"
            )
        return cls(
            path=path,
            run=directory.run,
            profile=directory.profile if (path / "profile.json").exists() else None,
            plan=directory.plan if (path / "plan.json").exists() else None,
            network=directory.network if (path / "network.json").exists() else None,
            traces=[_trace(directory, rank) for rank in directory.traced_ranks()],
        )


def _trace(directory: RunDirectory, rank: int) -> Trace:
    trace = directory.trace(rank)
    if trace.rank != rank:
        raise DocumentError(
            f"{directory.path / f'trace-{rank}.json'}: expected the trace of rank {rank}, found {trace.rank}"
        )
    return trace


def write_run_report(path: Path, target: Path) -> None:
    """Write the page about the run directory `path` to `target`, and one trace of all ranks into the directory."""
    need_plotly()
    found = Findings.read(path)
    traces = aligned(found.traces)
    ranks = [RankSteps.of(trace) for trace in traces]
    ranks = [rank for rank in ranks if rank.iteration_s]
    page = Page(
        f"{found.run.recipe} on {count(found.run.world, 'worker')}", f"{path.absolute().name}; {found.run.started}"
    )
    page.add(notes(_notes(found, ranks)))
    page.section("In short", facts(_facts(found, ranks)))
    if ranks:
        _add_steps(page, ranks)
        _add_timelines(page, traces, ranks)
    if found.traces:
        merged = write_merged(path / MERGED, found.traces)
        page.add(trace_link(path / MERGED, target, _about_trace(merged)))
        _add_waits(page, waits([trace for trace in traces if trace.of_kind("message")]))
    _add_plan(page, found)
    add_network(page, found.network)
    page.section("How it ran", facts(_origin(found)))
    write_page(page, target)


def _notes(found: Findings, ranks: Sequence[RankSteps]) -> list[str]:
    several = []
    missing = sorted(set(range(found.run.world)) - {trace.rank for trace in found.traces})
    if missing:
        several.append(f"No trace of {_ranks(missing)}: it did not end well, or its files are on another machine.")
    if found.traces and not ranks:
        several.append("No step ran to its end, so there are no times of steps.")
    if found.plan is None:
        several.append("There is no plan: the run ended before it was made.")
    for other in sorted(path.name for path in found.path.glob("flow-*") if (path / "run.json").exists()):
        several.append(f"The script attached another flow: gradientflow report {found.path / other}")
    return several


def _ranks(ranks: Sequence[int]) -> str:
    """
    >>> _ranks([1]), _ranks([1, 2, 3, 5])
    ('rank 1', 'ranks 1 to 3, 5')
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def _facts(found: Findings, ranks: Sequence[RankSteps]) -> list[tuple[str, object]]:
    several: list[tuple[str, object]] = [("recipe", found.run.recipe), ("workers", found.run.world)]
    if ranks:
        steps, first = sorted(ranks[0].iteration_s), ranks[0]
        iteration, exposed = first.spread(first.iteration_s), first.spread(first.exposed_s)
        several.append(("steps traced", f"{len(steps):,}, from {steps[0]} to {steps[-1]}"))
        several.append(("iteration", f"{seconds(iteration.median)}, median of rank {first.rank}"))
        share = f", {exposed.median / iteration.median:.0%} of it" if iteration.median else ""
        several.append(("exposed", f"{seconds(exposed.median)} a step{share}"))
    if found.profile:
        several.append(("model", f"{len(found.profile.tensors):,} tensors, {size(found.profile.nbytes)} of gradients"))
    if found.plan:
        messages = count(len(found.plan.messages), "message")
        several.append(("plan", f"{found.plan.schedule}: {messages} on {count(found.plan.num_lanes, 'lane')}"))
    return several


def _origin(found: Findings) -> list[tuple[str, object]]:
    run = found.run
    return [
        ("machine", run.machine),
        ("versions", f"gradientflow {run.gradientflow}, torch {run.torch}, Python {run.python}"),
        ("started", run.started),
        ("run directory", found.path.absolute()),
    ]


# - Steps


def _add_steps(page: Page, ranks: Sequence[RankSteps]) -> None:
    first = min(min(rank.iteration_s) for rank in ranks)
    beginner = next(rank for rank in ranks if first in rank.iteration_s)
    left = ""
    if len(beginner.iteration_s) > 1:
        took_s = seconds(beginner.iteration_s[first])
        left = f" Without step {first} ({took_s} on rank {beginner.rank}), which also holds the loop's own beginnings."
    drawn = sorted(ranks, key=lambda rank: -rank.spread(rank.exposed_s).median)[:DRAWN_RANKS]
    drawn.sort(key=lambda rank: rank.rank)
    fewer = f" The {len(drawn)} ranks that were exposed most." if len(drawn) < len(ranks) else ""
    page.section(
        "Steps",
        page.plot("steps", _over_steps(ranks), f"Iteration time and its exposed part over the steps.{left}"),
        page.plot("ranks", _rank_bars(drawn), f"The medians of each rank.{fewer}"),
        _rank_table(ranks),
    )


def _over_steps(ranks: Sequence[RankSteps]) -> dict[str, object]:
    return steps_plot(
        _lines(ranks, [rank.iteration_s for rank in ranks]),
        _lines(ranks, [rank.exposed_s for rank in ranks]),
        ("iteration", "exposed"),
    )


def _lines(ranks: Sequence[RankSteps], values: Sequence[Mapping[int, float]]) -> list[Line]:
    if len(ranks) <= LINES:
        most = POINTS // (2 * len(ranks))
        return [
            Line(f"rank {rank.rank}", thinned([(step, of[step]) for step in rank.usual], most))
            for rank, of in zip(ranks, values, strict=True)
        ]
    by_step = {step: sorted(of[step] for of in values) for step in common_steps(ranks)}
    names = {"fastest rank": 0, "middle rank": len(ranks) // 2, "slowest rank": -1}
    most = POINTS // (2 * len(names))
    return [
        Line(name, thinned([(step, ordered[place]) for step, ordered in by_step.items()], most))
        for name, place in names.items()
    ]


def _rank_bars(ranks: Sequence[RankSteps]) -> dict[str, object]:
    whole = [rank.spread(rank.iteration_s) for rank in ranks]
    compute = [rank.spread(rank.compute_s).median for rank in ranks]
    exposed = [rank.spread(rank.exposed_s).median for rank in ranks]
    rest = [max(0.0, w.median - c - e) for w, c, e in zip(whole, compute, exposed, strict=True)]
    return stacked_bars(
        [f"rank {rank.rank}" for rank in ranks],
        [
            Part("forward and backward", BLUE, compute),
            Part("exposed", VERMILLION, exposed, hatched=True),
            Part("rest of the step", GREY, rest),
        ],
        [(spread.p10, spread.p90) for spread in whole],
    )


def _rank_table(ranks: Sequence[RankSteps]) -> str:
    unit = time_unit(rank.spread(rank.iteration_s).p90 for rank in ranks)
    rows = []
    for rank in ranks[:TABLE_ROWS]:
        whole, exposed = rank.spread(rank.iteration_s), rank.spread(rank.exposed_s)
        share = f"{exposed.median / whole.median:.0%}" if whole.median else "–"
        computed = rank.spread(rank.compute_s).median
        cells = (f"rank {rank.rank}", f"{len(rank.iteration_s):,}", unit.of(whole.median), unit.of(whole.p10))
        rows.append(Row((*cells, unit.of(whole.p90), unit.of(computed), unit.of(exposed.median), share)))
    heads = ("rank", "steps", "iteration", "p10", "p90", "forward and backward", "exposed", "of the iteration")
    return table("Medians over the traced steps but the first", heads, rows)


# - One step


def _add_timelines(page: Page, traces: Sequence[Trace], ranks: Sequence[RankSteps]) -> None:
    middle, slowest = median_step(ranks), slowest_step(ranks)
    if middle is None or slowest is None:
        page.section("One step", paragraph("No step was traced on all ranks."))
        return
    last = common_steps(ranks)[-1]
    chosen = {
        f"step {middle}, the median": middle,
        f"step {slowest}, the slowest": slowest,
        f"step {last}, the last": last,
    }
    shown = traces[:DRAWN_RANKS]
    sets = [_step_groups(shown, step) for step in chosen.values()]
    fewer = f" The lowest {len(shown)} of {len(traces)} ranks." if len(shown) < len(traces) else ""
    caption = (
        "A step on each rank, on the lowest rank's clock. Clocks are set by the ends of messages, so they are right up "
        f"to the last hop of a message.{fewer}"
    )
    page.section("One step", page.plot("timeline", timeline(sets), caption, ("Step", list(chosen))))


def _step_groups(traces: Sequence[Trace], step: int) -> list[Group]:
    spans = [[span.moved(trace.epoch_s) for span in trace.spans if span.step == step] for trace in traces]
    first_s = min(span.start_s for several in spans for span in several)
    return [
        Group(f"rank {trace.rank}", [span.moved(-first_s) for span in several])
        for trace, several in zip(traces, spans, strict=True)
    ]


def _about_trace(merged: Merged) -> str:
    words = ["all ranks, on one clock."]
    ahead_s = max((abs(value_s) for value_s in merged.ahead_s.values()), default=0.0)
    if len(merged.ahead_s) > 1:
        words.append(f"Wall clocks were up to {seconds(ahead_s)} apart from that of rank {merged.clock_of_rank}.")
    if merged.left_out_spans:
        kept = f"steps {merged.steps[0]} to {merged.steps[1]}" if merged.steps else "nothing"
        words.append(f"It holds {kept}; {merged.left_out_spans:,} earlier spans did not fit.")
    return " ".join(words)


# - Who waits for whom


def _add_waits(page: Page, found: Waits) -> None:
    ranks = sorted({rank for pair in found.seconds for rank in pair})
    if not ranks:
        page.section("Who waits for whom", paragraph("No message was traced on several ranks."))
        return
    often = max(found.last, key=lambda rank: (found.last[rank], -rank))
    share = f"{found.last[often] / found.num_messages:.0%}"
    unit = time_unit([*(found.by(rank) for rank in ranks), *(found.for_(rank) for rank in ranks)])
    rows = [
        Row(
            (
                f"rank {rank}",
                unit.of(found.by(rank)),
                unit.of(found.for_(rank)),
                f"{found.last.get(rank, 0) / found.num_messages:.0%}",
            )
        )
        for rank in ranks[:TABLE_ROWS]
    ]
    pieces = [
        paragraph(
            "A message moves once the last rank has begun it. Up to then its other ranks wait, if only on a lane: what "
            "of it held up training is the exposed part above."
        ),
        paragraph(f"Rank {often} was the last in {share} of {count(found.num_messages, 'message')}."),
        table("In messages, a step on average", ("rank", "waited", "was waited for", "was the last"), rows),
    ]
    if 2 < len(ranks) <= MATRIX_RANKS:
        pieces.append(details("By pairs", _matrix(found, ranks)))
    page.section("Who waits for whom", *pieces)


def _matrix(found: Waits, ranks: Sequence[int]) -> str:
    unit = time_unit(found.seconds.values())
    rows = [
        Row(
            (
                f"rank {one}",
                *(unit.of(found.seconds.get((one, other), 0.0)) if one != other else "–" for other in ranks),
            )
        )
        for one in ranks
    ]
    return table("Who waited for whom in a step", ("waits", *(f"for rank {rank}" for rank in ranks)), rows)


# - The plan


def _add_plan(page: Page, found: Findings) -> None:
    if found.plan is None or not found.plan.messages:
        page.section("Plan", paragraph("There is none."))
        return
    nbytes = _message_nbytes(found.plan, found.profile)
    sent = _sent_nbytes(found.traces)
    lanes: dict[str, list[tuple[int, float, str]]] = defaultdict(list)
    rows = []
    for number, message in enumerate(found.plan.messages):
        if number < DRAWN_MESSAGES:
            lanes[f"lane {message.lane}"].append((number, nbytes[number], message.label))
        tensors = Counter(piece.tensor for piece in message.slices)
        on_wire = size(sent[number]) if number in sent else "–"
        cells = (
            str(number),
            str(message.lane),
            f"{len(tensors):,}",
            f"{message.numel:,}",
            size(nbytes[number]),
            on_wire,
        )
        rows.append(Row((*cells, message.label)))
    heads = ("message", "lane", "tensors", "elements", "gradients", "on the wire", "from .. to")
    shown = rows[:TABLE_ROWS]
    fewer = f"; the first {len(shown):,} of {len(rows):,}" if len(shown) < len(rows) else ""
    caption = "Messages in the order in which they are issued."
    if len(rows) > DRAWN_MESSAGES:
        caption += f" The first {DRAWN_MESSAGES:,} of {len(rows):,}."
    page.section(
        "Plan",
        page.plot("plan", message_sizes(sorted(lanes.items())), caption),
        details("The messages", table(f"{found.plan.schedule}{fewer}", heads, shown, words=(6,))),
    )


def _message_nbytes(plan: Plan, profile: Profile | None) -> list[float]:
    """By the dtypes of the profile; float32 where there is none."""
    tensors = profile.by_name if profile else {}
    widths = {name: tensor.torch_dtype.itemsize for name, tensor in tensors.items()}
    return [sum(piece.numel * widths.get(piece.tensor, 4) for piece in message.slices) for message in plan.messages]


def _sent_nbytes(traces: Sequence[Trace]) -> dict[int, float]:
    """What each message took in its last step: a codec may have made it smaller."""
    spans = traces[0].of_kind("message") if traces else []
    return {
        int(span.args["message"]): span.args["nbytes"] for span in spans if {"message", "nbytes"} <= span.args.keys()
    }
