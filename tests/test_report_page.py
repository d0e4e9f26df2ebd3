"""The report: what stands in the page, what cannot get into it, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gradientflow.account import waits
from gradientflow.bench.learning import Comparison, Evaluation, Learning, Training, differences, reaches
from gradientflow.bench.report import write_learning_report, write_report, write_run_report
from gradientflow.bench.report.bakeoff_page import CPU_BOUND, PAGE_SPANS
from gradientflow.bench.report.steps import RankSteps, median_step, slowest_step
from gradientflow.bench.report.timeline import Group, timeline
from gradientflow.bench.results import Machine, Ratio, Result, Results, Spread, Timeline
from gradientflow.cli import main
from gradientflow.network import Measurement, Network, Sample
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.rundir import Run, RunDirectory
from gradientflow.schedule import lazy
from gradientflow.trace import MAIN, Span, Trace

HOSTILE = "</script><img src=x onerror=alert(1)><b>&amp;"
WORLD = 4


# - Something to report about


def result(method: str, iteration_s: float, *, sent: float = 153e6, notes: tuple[str, ...] = ()) -> Result:
    return Result(
        workload="resnet-50",
        method=method,
        hosts=WORLD,
        rate=1e9,
        iteration_s=Spread(median=iteration_s, p10=0.98 * iteration_s, p90=1.05 * iteration_s, n=9),
        ratio_to={base: Ratio(median=iteration_s / s, low=0.9, high=1.1) for base, s in (("ddp", 1.9), ("lazy", 1.6))},
        samples_per_s=64 * WORLD / iteration_s,
        speedup=WORLD * 1.2 / iteration_s,
        compute_s=1.21,
        wire_bound_s=sent * 8 / 0.95e9,
        limit_s=max(1.21, sent * 8 / 0.95e9),
        exposed_s=iteration_s - 1.21,
        bytes_sent=1.01 * sent,
        must_send=sent,
        cpu_s=0.31,
        cpu_share=0.42,
        peak_memory_bytes=612_000_000,
        notes=notes,
    )  # fmt: skip


def iteration_spans(rank: int, num_messages: int, end_s: float) -> tuple[Span, ...]:
    begun_s = 0.001 * rank
    starts_s = [begun_s + 0.45 + 0.75 * number / num_messages for number in range(num_messages)]
    ends_s = [0.45 + (end_s - 0.46) * (number + 1) / num_messages for number in range(num_messages)]
    sent = {"nbytes": 8e6, "waited_s": 1e-3}
    messages = [
        Span("message", f"layer{n}.weight .. layer{n}.bias", f"lane {n % 2}", start, end, 0, sent)
        for n, (start, end) in enumerate(zip(starts_s, ends_s, strict=True))
    ]
    return (
        Span("forward", "forward", MAIN, begun_s, begun_s + 0.4, 0),
        Span("backward", "backward", MAIN, begun_s + 0.4, begun_s + 1.2, 0),
        Span("exposed", "exposed", MAIN, begun_s + 1.2, end_s - 0.01, 0),
        Span("optimizer", "optimizer", MAIN, end_s - 0.01, end_s, 0),
        *messages,
    )


def measurement(operation: str, ranks: tuple[int, ...], beta: float) -> Measurement:
    samples = tuple(
        Sample(nbytes=4**power, median_s=t, p10_s=0.95 * t, p90_s=1.2 * t, num_samples=20)
        for power, t in ((power, 2e-4 + beta * 4**power) for power in range(1, 13))
    )
    return Measurement(
        operation=operation, ranks=ranks, samples=samples, skipped_nbytes=(2**26,), alpha_s=2e-4,
        beta_s_per_byte=beta, residual=0.04, rate_bits_s=8 / beta,
    )  # fmt: skip


def stream(ranks: tuple[int, ...]) -> Measurement:
    whole = Sample(nbytes=2**26, median_s=0.6, p10_s=0.6, p90_s=0.6)
    return Measurement(
        operation="tcp", ranks=ranks, samples=(whole,), alpha_s=0, beta_s_per_byte=9e-9, residual=0, rate_bits_s=9e8
    )


def results(**changes: Any) -> Results:
    methods = {"ddp": (1.9, 6), "ddp-best": (1.8, 12), "lazy": (1.6, 24), "lazy+bf16": (1.3, 24)}
    rows = [result("compute", 1.21, sent=0.0)]
    rows += [result(name, took_s, sent=76e6 if "bf16" in name else 153e6) for name, (took_s, _) in methods.items()]
    rows[2] = rows[2].model_copy(update={"notes": ("buckets of 10 MB", CPU_BOUND), "cpu_share": 0.93})
    given = {
        "machine": MACHINE,
        "command": "gradientflow bench --workload resnet-50 --hosts 4 --rate 1Gbit --compute 1.2 --out results.json",
        "started": "2026-11-16T02:00:00+00:00",
        "place": "lab, 1Gbit a port",
        "network": Network(
            backend="gloo",
            hosts=("host-0", "host-1", "host-2", "host-3"),
            measurements=(
                measurement("all_reduce", (0, 1, 2, 3), 1.3e-8),
                stream((0, 1)),
                *(measurement("p2p", pair, 8.4e-9 * (1 + pair[1] / 10)) for pair in ((0, 1), (0, 2), (0, 3), (1, 2))),
            ),
        ),
        "notes": ("not shaped: this machine has no user namespaces",),
        "results": tuple(rows),
        "timelines": tuple(
            Timeline(method=name, rank=rank, spans=iteration_spans(rank, number, took_s))
            for name, (took_s, number) in methods.items()
            for rank in range(WORLD)
        ),
    }
    return Results(**(given | changes))


def hostile(rows: tuple[Result, ...]) -> Results:
    """All text that a file can hold is an attack."""
    names = [f"{HOSTILE}{number}" for number in range(len(rows))]
    words = {"workload": HOSTILE, "notes": (HOSTILE,), "ratio_to": {names[0]: Ratio(median=1, low=1, high=1)}}
    spans = (Span("message", HOSTILE, HOSTILE, 0.0, 1.0, 0), Span(HOSTILE, HOSTILE, MAIN, 0.0, 1.0, 0))
    return results(
        machine=Machine(platform=HOSTILE, cores=2, python=HOSTILE, torch=HOSTILE, gradientflow=HOSTILE),
        command=HOSTILE,
        started=HOSTILE,
        place=HOSTILE,
        notes=(HOSTILE,),
        network=Network(backend=HOSTILE, hosts=(HOSTILE,) * 2, measurements=(measurement(HOSTILE, (0, 1), 1e-8),)),
        results=tuple(row.model_copy(update=words | {"method": n}) for row, n in zip(rows, names, strict=True)),
        timelines=tuple(Timeline(method=name, rank=rank, spans=spans) for name in names[1:] for rank in range(2)),
    )


MACHINE = Machine(platform="Linux-6.1-x86_64", cores=2, python="3.11.7", torch="2.13.0", gradientflow="0.1.0")


def comparison(task: str, methods: dict[str, tuple[float, float]], *, timed: bool) -> Comparison:
    """By method, seconds of a step, and by how much it learns less than it could."""
    trainings = []
    for seed, (name, (step_s, lost)) in itertools.product(range(3), methods.items()):
        steps = range(20, 201, 20) if timed else [200]
        values = [99.0 - lost - seed / 10 - 80 * 0.5 ** (step / 20) for step in steps]
        points = [Evaluation(step=step, seconds=step * step_s, value=v) for step, v in zip(steps, values, strict=True)]
        trainings.append(Training(method=name, recipe=f"recipe of {name}", seed=seed, evaluations=tuple(points)))
    base = next(iter(methods))
    return Comparison(
        task=task, words=f"about {task}", measure="test accuracy", unit="points", higher_is_better=True,
        place="lab, 100Mbit a port", workers=4, steps=200, base=base, trainings=tuple(trainings),
        differences=differences(trainings, base),
        reached=reaches(trainings, base, higher_is_better=True) if timed else (),
    )  # fmt: skip


def learning(prefix: str = "") -> Learning:
    return Learning(
        machine=MACHINE,
        command=f"{prefix}python benchmarks/accuracy.py",
        started="2026-11-16T12:00:00+00:00",
        comparisons=(
            comparison(f"{prefix}digits", {f"{prefix}dense": (0.01, 0.0), "csc": (0.01, 0.25)}, timed=False),
            comparison(
                f"{prefix}time", {f"{prefix}ddp": (0.3, 0.0), "csc": (0.03, 0.0), "csc:1%": (0.02, 5.0)}, timed=True
            ),
        ),
    )


PROFILE = Profile(
    tensors=tuple(TensorProfile(name=f"layer{n}.weight", shape=(64, 2**n), backward_s=1e-3) for n in range(12))
)


def rank_trace(rank: int, num_steps: int, *, name: str = "") -> Trace:
    """Rank 2 computes longest; the clock of each rank is its own."""
    clock_s, spans = 100.0 * rank, []
    for step in range(num_steps):
        start_s = step * 0.05 - clock_s
        slow_s = 0.004 if rank == 2 else 0.0
        ready_s, arrived_s = start_s + 0.02 + slow_s, start_s + 0.032 + 0.001 * (step % 5)
        spans += [
            Span("forward", "forward", MAIN, start_s, start_s + 0.01 + slow_s, step),
            Span("backward", "backward", MAIN, start_s + 0.01 + slow_s, ready_s + 0.004, step),
            Span("message", name or "a", "lane 0", ready_s, arrived_s - 0.004, step, {"message": 0, "nbytes": 1e5}),
            Span("message", name or "b", "lane 1", ready_s + 0.002, arrived_s, step, {"message": 1, "nbytes": 2e5}),
            Span("exposed", "exposed", MAIN, ready_s + 0.004, arrived_s, step),
            Span("step", "step", MAIN, start_s, arrived_s + 0.002 + (0.1 if step == 0 else 0.0), step),
        ]  # fmt: skip
    return Trace(rank, 1e9 + clock_s + 0.001 * rank, tuple(spans))


def run_directory(
    path: Path, *, world: int = WORLD, num_steps: int = 40, recipe: str = "lazy:4MB+bf16"
) -> RunDirectory:
    directory = RunDirectory(path).create()
    run = Run(recipe=recipe, world=world, started="2026-11-16T02:00:00+00:00", gradientflow="0.1.0", torch="2.13.0")
    directory.write_run(run, Recipe.parse("lazy:4MB+bf16"), Network(backend="gloo", hosts=("a",) * world))
    directory.write_plan(PROFILE, lazy(PROFILE, "64KB").on_lanes(2))
    for rank in range(world):
        directory.write_trace(rank_trace(rank, num_steps))
    return directory


# - Reading it back


class Outline(HTMLParser):
    """Elements with their attributes and the text directly inside."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.append((self._open[-1], data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str) -> list[str]:
        return [data for name, data in self.texts if name == tag]

    @property
    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text("script")[0])
        return found


def outline_of(path: Path) -> Outline:
    return Outline(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bakeoff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bakeoff") / "results.html"
    write_report(results(), str(path))
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = run_directory(tmp_path_factory.mktemp("runs") / "one")
    write_run_report(directory.path, directory.path / "run.html")
    return directory.path / "run.html"


@pytest.fixture(scope="module", params=["bakeoff", "ran"])
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_everything_is_in_the_one_file(page: Path) -> None:
    outline = outline_of(page)
    for tag, attributes in outline.elements:
        assert "src" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes)
        if tag == "link":
            assert attributes["href"] == "data:,"
    assert [attributes["href"] for attributes in outline.all("a")][1:] == ["https://ui.perfetto.dev"]
    assert page.stat().st_size < 8_000_000


def test_the_page_says_what_it_is_to_those_who_cannot_see_it(page: Path) -> None:
    outline = outline_of(page)
    assert outline.all("html") == [{"lang": "en"}]
    assert outline.all("meta")[0] == {"charset": "utf-8"}
    headings = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(other - one <= 1 for one, other in itertools.pairwise(headings))
    assert len(outline.all("caption")) == len(outline.all("table")) > 0
    assert all("scope" in attributes for attributes in outline.all("th"))
    labelled = {attributes["for"] for attributes in outline.all("label")}
    assert {attributes["id"] for attributes in outline.all("select")} == labelled
    plots = [attributes for attributes in outline.all("div") if attributes.get("class") == "plot"]
    assert all(attributes["aria-label"] for attributes in plots)
    assert {attributes["id"] for attributes in plots} == set(outline.figures)
    identities = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(identities) == len(set(identities))


def test_plotly_takes_the_figures(page: Path) -> None:
    import plotly.graph_objects as go

    for figure in outline_of(page).figures.values():
        for data in figure.get("choices", [figure.get("data")]):
            go.Figure({"data": data, "layout": figure["layout"]})


def test_the_trace_beside_the_page_is_linked_and_holds_all_ranks(page: Path) -> None:
    target = outline_of(page).all("a")[0]["href"]
    assert target == ("results.trace.json" if page.name == "results.html" else "trace.json")
    document = json.loads((page.parent / target).read_text())
    assert {event["pid"] for event in document["traceEvents"]} == set(range(WORLD))


def test_methods_follow_each_other_in_the_trace(bakeoff: Path) -> None:
    document = json.loads(bakeoff.with_suffix(".trace.json").read_text())
    wholes = [event for event in document["traceEvents"] if event.get("cat") == "method" and event["pid"] == 1]
    assert [event["name"] for event in wholes] == ["ddp", "ddp-best", "lazy", "lazy+bf16"]
    assert all(one["ts"] + one["dur"] < other["ts"] for one, other in itertools.pairwise(wholes))
    assert min(event["ts"] for event in document["traceEvents"] if event["ph"] == "X") == 0


def test_the_table_of_methods(bakeoff: Path) -> None:
    outline = outline_of(bakeoff)
    heads = [head for head in outline.text("th") if head.strip()]
    wanted = ["iteration", "to limit", "limit", "wire bound", "exposed", "sent", "CPU"]
    assert {*wanted, "memory", "samples/s", "speed-up", "notes", "to ddp"} <= set(heads)
    cells = outline.text("td")
    assert "1.900 s" in cells and "1.47" in cells and "154.5 MB" in cells and "buckets of 10 MB" in cells
    assert {"1.862 to 1.995 s", "0.900 to 1.100", "must 153.0 MB", "93% of cores"} <= set(outline.text("small"))
    assert len([row for row in outline.all("tr") if row.get("class") == "marked"]) == 1
    assert CPU_BOUND in outline.text("strong")


def test_notes_stand_before_everything_else(bakeoff: Path) -> None:
    outline = outline_of(bakeoff)
    notes = [number for number, (tag, at) in enumerate(outline.elements) if tag == "p" and at.get("class") == "note"]
    assert len(notes) == 2
    assert max(notes) < next(number for number, (tag, _) in enumerate(outline.elements) if tag == "h2")
    assert " not shaped: this machine has no user namespaces" in outline.text("p")


def test_links_are_listed_and_those_of_several_sizes_are_drawn(bakeoff: Path) -> None:
    outline = outline_of(bakeoff)
    drawn = [trace["name"] for trace in outline.figures["probe"]["data"] if trace.get("showlegend", True)]
    assert drawn == [
        "all_reduce among 4",
        *(f"rank {one} to rank {other}" for one, other in ((0, 1), (0, 2), (0, 3), (1, 2))),
    ]
    assert {*drawn, "rank 0 to rank 1, plain TCP"} <= set(outline.text("th"))
    assert {"200.0 µs", "900 Mbit/s", "13.000 ns/B", "4 B to 16.8 MB"} <= set(outline.text("td"))


def test_bars_add_up_to_the_iteration(bakeoff: Path) -> None:
    compute, exposed, spread, limit = outline_of(bakeoff).figures["bars"]["data"]
    totals = [one + other for one, other in zip(compute["x"], exposed["x"], strict=True)]
    assert totals == pytest.approx([1.21, 1.9, 1.8, 1.6, 1.3])
    assert spread["x"] == pytest.approx(totals)
    assert exposed["marker"]["pattern"]["bgcolor"] == exposed["marker"]["color"]  # else only the hatching is painted
    assert limit["x"][1] == pytest.approx(result("ddp", 1.9).limit_s)


def test_no_network_no_timelines_no_rate(tmp_path: Path) -> None:
    rows = tuple(row.model_copy(update={"rate": None, "ratio_to": {}}) for row in results().results)
    write_report(results(network=None, timelines=(), notes=(), results=rows), str(tmp_path / "page.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    outline = outline_of(tmp_path / "page.html")
    assert set(outline.figures) == {"bars"}
    assert any("No rate of the links is known" in words for words in outline.text("p"))


def test_numbers_that_are_none_do_no_harm(tmp_path: Path) -> None:
    rows = (result("ddp", float("nan")), result("lazy", float("inf")), result("bsp", 1e-12))
    write_report(results(results=rows), str(tmp_path / "page.html"))
    assert outline_of(tmp_path / "page.html").figures["bars"]["data"][1]["x"][0] is None


def test_a_large_world_makes_no_large_page(tmp_path: Path) -> None:
    spans = tuple(Span("message", f"message {n}", "lane 0", n, n + 1, 0) for n in range(1_200))
    timelines = tuple(Timeline(method=m, rank=r, spans=spans) for m in ("ddp", "lazy") for r in range(40))
    write_report(results(timelines=timelines), str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").stat().st_size < 12_000_000
    outline = outline_of(tmp_path / "page.html")
    assert 1 <= len(outline.all("option")) < 40
    assert any("in the trace only" in words for words in outline.text("figcaption"))
    drawn = sum(len(trace["base"]) for one in outline.figures["timeline"]["choices"] for trace in one[1:])
    assert drawn <= PAGE_SPANS


def test_all_groups_of_a_timeline_share_the_time_axis() -> None:
    spans = iteration_spans(0, 4, 2.0)
    figure = timeline([[Group("a", spans), Group("b", ())], [Group("a", ()), Group("b", spans)]])
    for one, other in zip(*figure["choices"], strict=True):
        assert "xaxis" not in one and one.get("yaxis") == other.get("yaxis") and one["name"] == other["name"]
    assert {trace["yaxis"] for trace in figure["choices"][0] if "yaxis" in trace} == {"y", "y2"}
    assert figure["layout"]["yaxis"]["categoryarray"] == ["exposed", "lane 1", "lane 0", "compute"]


# - Text from files


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attacked") / "results.html"
    write_report(hostile(results().results), str(path))
    return path


@pytest.fixture(scope="module")
def attacked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes are parsed, so they cannot hold everything; what run.json says of them can."""
    directory = run_directory(tmp_path_factory.mktemp("attacked") / "<b>one", recipe=HOSTILE, num_steps=5)
    for rank in range(WORLD):
        directory.write_trace(rank_trace(rank, 5, name=HOSTILE))
    write_run_report(directory.path, directory.path / "run.html")
    return directory.path / "run.html"


def test_text_from_files_stays_text(attacked: Path, attacked_run: Path) -> None:
    for path in (attacked, attacked_run):
        outline = outline_of(path)
        assert HOSTILE in "".join(data for tag, data in outline.texts if tag == "h1")
        assert not outline.all("img") and not outline.all("b")
        assert len(outline.all("script")) == 3
        plots = json.dumps(outline.figures)
        assert "onerror" in plots and "<img" not in plots and "</script" not in plots


def test_half_a_character_is_no_reason_to_fail(tmp_path: Path) -> None:
    write_report(results(place="a lab \udce9"), str(tmp_path / "page.html"))
    assert "a lab ?" in (tmp_path / "page.html").read_text(encoding="utf-8")


# - Runs


def test_the_page_about_a_run(ran: Path) -> None:
    outline = outline_of(ran)
    assert outline.text("h1") == ["lazy:4MB+bf16 on 4 workers"]
    assert outline.text("h2") == [
        "In short",
        "Steps",
        "One step",
        "Who waits for whom",
        "Plan",
        "The network",
        "How it ran",
    ]
    assert set(outline.figures) == {"steps", "ranks", "timeline", "plan"}
    assert [option.split(",")[1] for option in outline.text("option")] == [" the median", " the slowest", " the last"]
    assert "Rank 2 was the last in 100% of 78 messages." in outline.text("p")


def test_steps_and_the_median_among_them() -> None:
    ranks = [RankSteps.of(rank_trace(rank, 12)) for rank in range(3)]
    assert ranks[0].iteration_s[0] == pytest.approx(0.134)
    assert ranks[0].spread(ranks[0].iteration_s).n == 11
    assert slowest_step(ranks) == 4 and (median_step(ranks) or 0) % 5 == 2
    assert median_step([]) is None and slowest_step([RankSteps(0, {}, {}, {})]) is None


def test_those_who_began_a_message_wait_for_the_last() -> None:
    traces = [rank_trace(rank, 3)._replace(epoch_s=100.0 * rank) for rank in range(3)]
    found = waits(traces)
    assert (found.num_steps, found.num_messages, found.last) == (2, 4, {2: 4})
    assert [found.by(rank) for rank in range(3)] == pytest.approx([0.008, 0.008, 0.0])
    assert found.for_(2) == pytest.approx(0.016)
    assert waits([]).num_messages == 0 == waits(traces[:1]).for_(0)


def test_a_run_of_many_ranks_and_steps(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run", world=20, num_steps=30)
    write_run_report(directory.path, tmp_path / "page.html")
    outline = outline_of(tmp_path / "page.html")
    assert {trace["name"] for trace in outline.figures["steps"]["data"]} == {
        "fastest rank",
        "middle rank",
        "slowest rank",
    }
    assert outline.all("a")[0]["href"] == "run/trace.json"


def test_a_run_that_ended_early(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run", num_steps=0)
    for name in ("plan.json", "profile.json", "trace-2.json", "trace-3.json"):
        (directory.path / name).unlink()
    (directory.path / "flow-2").mkdir()
    shutil.copy(directory.path / "run.json", directory.path / "flow-2")
    write_run_report(directory.path, directory.path / "run.html")
    notes = " ".join(outline_of(directory.path / "run.html").text("p"))
    assert "No trace of ranks 2 to 3" in notes and "No step ran to its end" in notes and "no plan" in notes
    assert "flow-2" in notes


def test_the_page_about_trainings(tmp_path: Path) -> None:
    import plotly.graph_objects as go

    write_learning_report(learning(), tmp_path / "page.html")
    outline = outline_of(tmp_path / "page.html")
    cells = outline.text("td")
    assert {"98.822", "-0.250", "-0.25", "recipe of csc", "54.0 s", "10.00 times as long", "not reached"} <= set(cells)
    assert "-0.250 to -0.250" in outline.text("small")
    assert list(outline.figures) == ["curves-1"]
    figure = outline.figures["curves-1"]
    shown = [line["name"] for line in figure["data"] if line.get("showlegend", True)]
    assert shown[:3] == ["ddp", "csc", "csc:1%"] and len(figure["data"]) == 3 * 3 + 1
    go.Figure(figure)


# - The command


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gradientflow", "report", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_makes_a_page_beside_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results().write(tmp_path / "results.json")
    learning().write(tmp_path / "learning.json")
    run_directory(tmp_path / "run")
    for source in ("results.json", "learning.json", "run"):
        assert command(monkeypatch, str(tmp_path / source)) == 0
    pages = ("results.html", "learning.html", "run/run.html")
    assert capsys.readouterr().out.split() == [str(tmp_path / page) for page in pages]
    assert (tmp_path / "results.trace.json").exists() and (tmp_path / "run" / "trace.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.json"], "nowhere.json: No such file"),
        (["broken.json"], "invalid JSON"),
        (["other.json"], "expected what `gradientflow bench --out` writes"),
        (["trainings.json"], "field machine: field required (and 3 more)"),
        (["trace-0.json"], "expected what `gradientflow bench --out` writes"),
        (["binary.json"], "expected UTF-8"),
        (["empty"], "no run directory"),
        (["torn"], "run.json"),
        (["torn-trace"], "trace-0.json"),
        (["wrong-trace"], "expected the trace of rank 0, found 1"),
        (["results.json", "--out", "nowhere/page.html"], "no directory"),
        (["results.json", "--out", "empty"], "is a directory"),
        (["results.json", "--out", "results.json"], "give another --out"),
        (["results.trace.json", "--out", "results.html"], "give another --out"),
        (["run", "--out", "run/run.json"], "give another --out"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    results().write("results.json")
    results().write("results.trace.json")
    run_directory(Path("run"), num_steps=1)
    Path("broken.json").write_text('{"version": 1,')
    Path("other.json").write_text('{"version": 1, "tensors": []}')
    Path("trainings.json").write_text('{"version": 1, "comparisons": []}')
    Path("binary.json").write_bytes(b"\xff\xfe")
    rank_trace(0, 1).write("trace-0.json")
    for name in ("empty", "torn", "torn-trace", "wrong-trace"):
        Path(name).mkdir()
    shutil.copy("run/run.json", "wrong-trace")
    rank_trace(1, 1).write("wrong-trace/trace-0.json")
    Path("torn", "run.json").write_text('{"recipe"')
    shutil.copy("run/run.json", "torn-trace")
    Path("torn-trace", "trace-0.json").write_text('{"traceEvents": [')
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    assert command(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("gradientflow: ") and said.err.count("\n") == 1
    assert words in said.err
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize("source", ["results.json", "run"])
def test_without_plotly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    results().write(tmp_path / "results.json")
    run_directory(tmp_path / "run", num_steps=1)
    before = sorted(tmp_path.rglob("*"))
    assert command(monkeypatch, str(tmp_path / source)) == 2
    assert "pip install 'gradientflow[report]'" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


# - In a browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
#: A proxy that the environment names has no business with 127.0.0.1.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TAB, ENTER, DOWN = "\ue004", "\ue007", "\ue015"


class Browser:
    """As much of WebDriver's protocol as these tests need: chromedriver speaks JSON over HTTP."""

    def __init__(self, directory: Path) -> None:
        assert CHROMIUM and DRIVER
        self._log = (directory / "chromedriver.log").open("w+")
        self._driver = subprocess.Popen([DRIVER, "--port=0"], stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._address = f"http://127.0.0.1:{self._port()}"
            self._address += f"/session/{self._begin(directory)}"
        except BaseException:
            self._stop()
            raise

    def _begin(self, directory: Path) -> str:
        flags = [*FLAGS, f"--user-data-dir={directory / 'profile'}", *(["--no-sandbox"] if os.getuid() == 0 else [])]
        options = {"binary": CHROMIUM, "args": flags}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        return str(self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"])

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._stop()

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(timeout=20)
        self._log.close()

    def open(self, page: Path) -> None:
        self._ask("POST", "/url", {"url": page.absolute().as_uri()})
        self.until(lambda: self.run("return [...document.querySelectorAll('.plot')].every(plot => plot.dataset.drawn)"))

    def run(self, script: str, *arguments: object) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, keys: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/value", {"text": keys})

    def press(self, key: str) -> None:
        """Wherever the focus is."""
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def chrome(self, method: str, **parameters: object) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": method, "params": parameters})

    def width(self, pixels: int, *, phone: bool = False) -> None:
        self.chrome("Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=phone)

    def picture(self, path: Path) -> None:
        """Of the whole page, as far as it can be scrolled down."""
        picture = self.chrome("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def complaints(self) -> list[str]:
        """What the console has said, but for plain talk."""
        entries = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def until(self, happened: Callable[[], Any]) -> None:
        end_s = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < end_s, "the page did not do what it should"
            time.sleep(0.05)

    def _find(self, selector: str) -> str:
        return str(self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT])

    def _port(self) -> int:
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s and self._driver.poll() is None:
            found = re.search(r"successfully on port (\d+)", Path(self._log.name).read_text())
            if found:
                return int(found[1])
            time.sleep(0.05)
        raise AssertionError(f"chromedriver did not start: {Path(self._log.name).read_text()}")

    def _ask(self, method: str, path: str, body: dict[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with _DIRECT.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from None


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


def shown_bars(browser: Browser, plot: str) -> int:
    """Those that can be seen: a bar of nothing is a path as well."""
    script = "return [...document.querySelectorAll(arguments[0])].filter(bar => bar.getBBox().width > 0).length"
    return int(browser.run(script, f"#{plot} .barlayer .point path"))


@pytest.mark.slow
def test_a_bakeoff_in_the_browser(browser: Browser, bakeoff: Path, tmp_path: Path) -> None:
    width_of_bars = "return document.querySelector('#bars .main-svg').clientWidth"
    browser.width(1280)
    browser.open(bakeoff)
    assert shown_bars(browser, "bars") == 2 * 5 - 1  # compute alone has no exposed part
    assert browser.count("#bars .scatterlayer .point") == 2 * 5
    assert browser.count("#probe .scatterlayer .js-line") == 2 * 5
    assert shown_bars(browser, "timeline") == (6 + 12 + 24 + 24) + 4 * 4  # messages, and the main thread's spans

    bars = (
        "return [...document.querySelectorAll('#timeline .barlayer .point path')].map(b => b.getAttribute('d')).join()"
    )
    before = browser.run(bars)
    browser.type("#timeline-choice", DOWN)
    browser.until(lambda: browser.run("return document.getElementById('timeline').dataset.drawn") == "1")
    assert browser.run("return document.getElementById('timeline-choice').value") == "1"
    assert browser.run(bars) != before  # rank 1 began later

    browser.click("#bars .legend .traces .legendtoggle")
    browser.until(lambda: shown_bars(browser, "bars") == 4)
    pressed = "return document.querySelector('#bars .legend .traces .legendtoggle').getAttribute('aria-pressed')"
    assert browser.run(pressed) == "false"
    browser.run("document.querySelector('#bars .legend .traces .legendtoggle').focus()")
    browser.press(ENTER)
    browser.until(lambda: shown_bars(browser, "bars") == 9)
    assert browser.run(pressed) == "true"
    assert browser.run("return document.activeElement.getAttribute('aria-label')") == "show compute"

    browser.run("document.querySelector('summary').focus()")
    browser.press(ENTER)
    assert browser.run("return document.querySelector('details').open")
    browser.picture(tmp_path / "desktop.png")

    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.until(lambda: browser.run(width_of_bars) < 700)
    assert browser.run("return [...document.querySelectorAll('details')].every(part => part.open)")
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.until(lambda: browser.run(width_of_bars) > 1200)

    browser.width(390, phone=True)
    browser.until(lambda: browser.run("return document.querySelector('#bars .main-svg').clientWidth <= 390"))
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.picture(tmp_path / "phone.png")
    assert (tmp_path / "desktop.png").stat().st_size > 10_000
    assert browser.complaints() == []


@pytest.mark.slow
def test_a_run_in_the_browser(browser: Browser, ran: Path, tmp_path: Path) -> None:
    browser.width(1280)
    browser.open(ran)
    assert browser.count("#steps .scatterlayer .js-line") == 2 * WORLD
    assert shown_bars(browser, "ranks") == 3 * WORLD
    assert shown_bars(browser, "timeline") == 6 * WORLD
    browser.type("#timeline-choice", DOWN)
    browser.until(lambda: browser.run("return document.getElementById('timeline').dataset.drawn") == "1")
    browser.picture(tmp_path / "desktop.png")
    browser.width(390, phone=True)
    browser.until(lambda: browser.run("return document.querySelector('#steps .main-svg').clientWidth <= 390"))
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.picture(tmp_path / "phone.png")
    assert browser.complaints() == []


@pytest.mark.slow
def test_trainings_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    write_learning_report(learning(HOSTILE), tmp_path / "page.html")
    browser.width(1280)
    browser.open(tmp_path / "page.html")  # an alert would make this fail
    assert browser.count("img") == 0
    assert browser.count("#curves-1 .scatterlayer .js-line") == 3 * 3 + 1
    assert HOSTILE in browser.run("return document.querySelector('h1').textContent")
    assert HOSTILE in browser.run("return document.querySelector('#curves-1 .legendtext').textContent")
    browser.picture(tmp_path / "desktop.png")
    browser.width(390, phone=True)
    browser.until(lambda: browser.run("return document.querySelector('#curves-1 .main-svg').clientWidth <= 390"))
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []


@pytest.mark.slow
def test_everything_that_does_something_is_reached_by_the_keyboard(browser: Browser, bakeoff: Path) -> None:
    browser.width(1280)
    browser.open(bakeoff)
    reached: set[str] = set()
    name = "const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.tagName"
    for _ in range(60):
        browser.press(TAB)
        reached.add(browser.run(name))
    assert {"timeline-choice", "show exposed", "show message", "SUMMARY", "A"} <= reached


@pytest.mark.slow
def test_an_attack_does_nothing_in_the_browser(browser: Browser, attacked: Path, attacked_run: Path) -> None:
    browser.width(1280)
    for page in (attacked, attacked_run):
        browser.open(page)  # an alert would make this fail
        assert browser.count("img") == 0
        assert browser.count("script") == 3
        assert HOSTILE in browser.run("return document.querySelector('h1').textContent")
        assert browser.complaints() == []
    browser.open(attacked)
    assert HOSTILE in browser.run("return document.querySelector('#bars .yaxislayer-above text').textContent")
