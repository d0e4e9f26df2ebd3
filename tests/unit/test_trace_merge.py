"""The traces of several ranks on one clock, in one file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.errors import DocumentError
from gradientflow.trace import MAIN, Span, Trace, aligned, latest_steps, write_merged

#: How far apart the ends of a message are made to lie.
HOP_S = 1e-3

seconds = st.floats(min_value=-1e5, max_value=1e5)
jitter = st.floats(min_value=-HOP_S / 2, max_value=HOP_S / 2)


def step_spans(step: int, start_s: float, ends_s: list[float], lanes: int = 2) -> list[Span]:
    """A step of a rank: forward, backward and exposed inside the step, and messages on lanes in turn."""
    middle_s, end_s = start_s + 0.5, max([start_s + 1.0, *ends_s])
    messages = [
        Span("message", f"tensor {n}", f"lane {n % lanes}", start_s + 0.1, message_end_s, step, {"message": n})
        for n, message_end_s in enumerate(ends_s)
    ]
    return [
        Span("forward", "forward", MAIN, start_s, middle_s, step),
        *messages,
        Span("backward", "backward", MAIN, middle_s, end_s, step),
        Span("exposed", "exposed", MAIN, end_s, end_s, step),
        Span("step", "step", MAIN, start_s, end_s, step),
    ]


def trace(rank: int, steps: range, *, clock_s: float, epoch_s: float, draw: Any = lambda: 0.0) -> Trace:
    """Step n begins at second 10 n of the one true time, and its two messages end half a second apart."""
    spans: list[Span] = []
    for step in steps:
        true_s = 10.0 * step
        ends_s = [true_s + 1.0 + number / 2 + draw() - clock_s for number in range(2)]
        spans += step_spans(step, true_s - clock_s, ends_s)
    return Trace(rank, epoch_s, tuple(spans))


def wall_ends(several: list[Trace]) -> dict[tuple[int, str], list[float]]:
    """By message, its ends on all ranks."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for one in several:
        for span in one.of_kind("message"):
            found[span.step, span.name].append(span.end_s + one.epoch_s)
    return found


@given(st.data(), st.lists(st.tuples(seconds, seconds), min_size=2, max_size=5))
def test_clocks_are_set_by_messages_whatever_they_said(data: Any, clocks: list[tuple[float, float]]) -> None:
    several = [
        trace(rank, range(3), clock_s=clock_s, epoch_s=epoch_s, draw=lambda: data.draw(jitter))
        for rank, (clock_s, epoch_s) in enumerate(clocks)
    ]
    found = aligned(several)
    assert found[0].epoch_s == several[0].epoch_s
    for ends_s in wall_ends(found).values():
        assert max(ends_s) - min(ends_s) <= 3 * HOP_S + 1e-6  # of its two ranks and of the lowest


@given(st.lists(seconds, min_size=1, max_size=5))
def test_nothing_but_the_epoch_changes(clocks: list[float]) -> None:
    several = [trace(rank, range(2), clock_s=clock_s, epoch_s=0.0) for rank, clock_s in enumerate(clocks)]
    found = aligned(several)
    assert [(one.rank, one.spans) for one in found] == [(one.rank, one.spans) for one in several]


@given(st.permutations(range(4)))
def test_the_order_of_the_ranks_does_not_matter(order: list[int]) -> None:
    several = [trace(rank, range(3), clock_s=10.0**rank, epoch_s=5.0 * rank) for rank in range(4)]
    epochs_s = {one.rank: one.epoch_s for one in aligned([several[rank] for rank in order])}
    assert epochs_s == {one.rank: one.epoch_s for one in aligned(several)}


@given(st.lists(seconds, min_size=9, max_size=9))
def test_fewer_than_half_of_the_messages_may_be_wrong(errors_s: list[float]) -> None:
    other = trace(1, range(10), clock_s=7.0, epoch_s=123.0)  # 20 messages, 9 of which are disturbed
    disturbed = iter(errors_s)
    spans = tuple(
        span._replace(end_s=span.end_s + next(disturbed, 0.0)) if span.kind == "message" else span
        for span in other.spans
    )
    found = aligned([trace(0, range(10), clock_s=0.0, epoch_s=0.0), other._replace(spans=spans)])
    assert found[1].epoch_s == pytest.approx(7.0)


def test_a_rank_that_joined_late_is_set_by_the_steps_it_shares() -> None:
    several = [trace(0, range(10), clock_s=0.0, epoch_s=0.0), trace(1, range(7, 10), clock_s=40.0, epoch_s=-3.0)]
    assert aligned(several)[1].epoch_s == pytest.approx(40.0)


def test_a_rank_without_anything_in_common_with_the_lowest_is_set_by_another() -> None:
    several = [
        trace(0, range(4), clock_s=0.0, epoch_s=0.0),
        trace(1, range(2, 8), clock_s=11.0, epoch_s=99.0),
        trace(2, range(6, 9), clock_s=22.0, epoch_s=98.0),
    ]
    assert [one.epoch_s for one in aligned(several)] == pytest.approx([0.0, 11.0, 22.0])


def test_those_who_share_messages_agree_also_where_the_lowest_has_none() -> None:
    several = [
        Trace(0, 55.0, ()),
        trace(1, range(3), clock_s=0.0, epoch_s=50.0),
        trace(2, range(3), clock_s=9.0, epoch_s=60.0),
    ]
    assert [one.epoch_s for one in aligned(several)] == pytest.approx([55.0, 50.0, 59.0])


def test_without_common_messages_wall_clocks_stay_as_they_are() -> None:
    several = [
        trace(3, range(2), clock_s=0.0, epoch_s=50.0),
        trace(5, range(5, 7), clock_s=9.0, epoch_s=60.0),
        Trace(7, 70.0, ()),
    ]
    assert aligned(several) == several
    assert aligned([]) == []


def test_messages_that_cannot_be_told_apart_are_not_compared() -> None:
    twice = [Span("message", "fc", "lane 0", 0.0, end_s, 0) for end_s in (1.0, 5.0)]
    several = [Trace(0, 0.0, tuple(twice)), Trace(1, 3.0, tuple(twice[1:]))]
    assert aligned(several)[1].epoch_s == 3.0


@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 100))
def test_the_latest_whole_steps_are_kept_and_no_more_than_allowed(world: int, num_steps: int, limit: int) -> None:
    several = [trace(rank, range(num_steps), clock_s=0.0, epoch_s=0.0) for rank in range(world)]
    found = latest_steps(several, limit)
    assert sum(len(one.spans) for one in found) <= limit
    steps = sorted({span.step for one in found for span in one.spans})
    assert steps == list(range(num_steps))[num_steps - len(steps) :]
    whole = {rank: [span for span in several[rank].spans if span.step in steps] for rank in range(world)}
    full = [one.rank for one in found if list(one.spans) == whole[one.rank]]
    if world * 6 <= limit:
        assert len(full) == world
        assert len(steps) == min(num_steps, limit // (world * 6))
    else:  # of the last step, as many ranks as fit
        assert full[: limit // 6] == list(range(world))[: limit // 6]
        assert all(one.spans == () for one in found if one.rank not in full)


# - The file


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def complete(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


@given(st.lists(seconds, min_size=1, max_size=4), st.integers(10, 60))
def test_the_file_holds_what_perfetto_asks_for(
    tmp_path_factory: pytest.TempPathFactory, clocks: list[float], limit: int
) -> None:
    path = tmp_path_factory.mktemp("merged") / "trace.json"
    several = [trace(rank, range(4), clock_s=clock_s, epoch_s=1e9) for rank, clock_s in enumerate(clocks)]
    header = write_merged(path, several, limit=limit)
    document = read(path)
    events = complete(document)
    assert len(events) == header.num_spans <= limit
    assert header.num_spans + header.left_out_spans == sum(len(one.spans) for one in several)
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
    for event in events:
        assert isinstance(event["ts"], int) and isinstance(event["dur"], int) and event["dur"] >= 0
    named = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} <= named
    processes = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert processes == [f"rank {rank}" for rank in range(len(clocks))]
    assert_nested(events)


def assert_nested(events: list[dict[str, Any]]) -> None:
    """In the order of the file, a span of a thread lies inside the open one before it or after its end."""
    for thread in {(event["pid"], event["tid"]) for event in events}:
        open_ends: list[int] = []
        last = None
        for event in (event for event in events if (event["pid"], event["tid"]) == thread):
            assert last is None or event["ts"] >= last
            last = event["ts"]
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], event
            open_ends.append(event["ts"] + event["dur"])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_spans_that_overlap_get_threads_of_their_own(
    tmp_path_factory: pytest.TempPathFactory, intervals: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("overlap") / "trace.json"
    spans = tuple(
        Span("message", f"bucket {number}", "buckets", start, start + length, 0)
        for number, (start, length) in enumerate(intervals)
    )
    one = Trace(0, 0.0, spans)
    one.write(path)
    assert_nested(complete(read(path)))
    back = Trace.read(path)
    assert sorted(back.spans, key=lambda span: span.name) == sorted(spans, key=lambda span: span.name)


def test_what_was_left_out_and_how_clocks_were_set_is_in_the_file(tmp_path: Path) -> None:
    several = [trace(rank, range(5), clock_s=0.0, epoch_s=1000.0 + rank) for rank in (2, 0)]
    write_merged(tmp_path / "trace.json", several, limit=30)
    assert read(tmp_path / "trace.json")["otherData"] == {
        "version": 1,
        "clock_of_rank": 0,
        "ahead_s": {"0": 0.0, "2": pytest.approx(2.0)},
        "num_spans": 24,
        "steps": [3, 4],
        "left_out_spans": 36,
        "left_out_steps": 3,
        "left_out_ranks": [],
    }


def test_the_same_message_ends_at_the_same_moment_in_the_file(tmp_path: Path) -> None:
    several = [trace(rank, range(3), clock_s=100.0 * rank, epoch_s=1e9 - rank) for rank in range(3)]
    write_merged(tmp_path / "trace.json", several)
    ends: dict[tuple[int, str], set[int]] = defaultdict(set)
    for event in complete(read(tmp_path / "trace.json")):
        if event["cat"] == "message":
            ends[event["args"]["step"], event["name"]].add(event["ts"] + event["dur"])
    assert len(ends) == 6
    assert all(max(moments) - min(moments) <= 2 for moments in ends.values())


def test_times_on_one_clock_are_not_touched(tmp_path: Path) -> None:
    several = [trace(0, range(1), clock_s=0.0, epoch_s=0.0), trace(1, range(1), clock_s=-0.25, epoch_s=0.0)]
    header = write_merged(tmp_path / "trace.json", several, clocks_agree=True)
    assert header.ahead_s == {0: 0.0, 1: 0.0}
    starts = [event["ts"] for event in complete(read(tmp_path / "trace.json")) if event["name"] == "step"]
    assert starts == [0, 250_000]


def test_no_spans_make_an_empty_file(tmp_path: Path) -> None:
    assert write_merged(tmp_path / "none.json", []).clock_of_rank is None
    write_merged(tmp_path / "empty.json", [Trace(0, 0.0, ())])
    assert complete(read(tmp_path / "none.json")) == complete(read(tmp_path / "empty.json")) == []


@pytest.mark.parametrize(
    "change",
    [
        {"ts": "soon"},
        {"ts": float("nan")},
        {"dur": None},
        {"name": ["a"]},
        {"args": {"step": "first"}},
        {"args": {}},
        {"tid": 99},
        {"ts": 10**400},
        {"args": {"step": 0, "nbytes": "many"}},
    ],
)
def test_a_trace_that_was_not_written_here_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "trace-0.json"
    trace(0, range(1), clock_s=0.0, epoch_s=0.0).write(path)
    document = read(path)
    document["traceEvents"][-1] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(DocumentError, match=r"trace-0\.json: expected"):
        Trace.read(path)


def test_the_file_of_all_ranks_is_not_taken_for_that_of_one(tmp_path: Path) -> None:
    write_merged(tmp_path / "trace.json", [trace(0, range(1), clock_s=0.0, epoch_s=0.0)])
    with pytest.raises(DocumentError, match="otherData"):
        Trace.read(tmp_path / "trace.json")
