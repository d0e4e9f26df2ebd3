"""One iteration as it is shown: nothing twice, nothing from outside, all ranks on one clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradientflow.bench.timelines import timelines, within, without
from gradientflow.trace import MAIN, Span, Trace

MOMENT = st.integers(0, 40).map(float)
SPANS = st.lists(st.tuples(MOMENT, MOMENT).map(sorted), max_size=6).map(
    lambda pairs: [Span("any", "any", MAIN, *pair, 0) for pair in pairs]
)


def covered(spans: list[Span]) -> set[int]:
    return {second for span in spans for second in range(int(span.start_s), int(span.end_s))}


@given(work=SPANS, waits=SPANS)
def test_work_is_what_is_not_waited(work: list[Span], waits: list[Span]) -> None:
    assert covered(without(work, waits)) == covered(work) - covered(waits)


@given(spans=SPANS, start_s=MOMENT, end_s=MOMENT)
def test_within_two_moments(spans: list[Span], start_s: float, end_s: float) -> None:
    assert covered(within(spans, start_s, end_s)) == covered(spans) & set(range(int(start_s), int(end_s)))


def test_what_an_iteration_was_left_is_in_it_and_what_it_leaves_is_not() -> None:
    work = [Span("forward", "forward", MAIN, 10.0, 12.0, 0), Span("backward", "backward", MAIN, 14.0, 18.0, 0)]
    waits = [Span("exposed", "exposed", MAIN, 12.0, 13.0, 7), Span("update", "update", MAIN, 13.0, 14.0, 7)]
    left = Span("message", "fc", "lane 0", 8.0, 13.0, 6, {"message": 0.0})
    own = Span("message", "fc", "lane 0", 16.0, 21.0, 7, {"message": 0.0})
    late = [span.moved(-5.0) for span in (*work, *waits, left, own)]
    shown = timelines("flow", [Trace(0, 100.0, (*work, *waits, left, own)), Trace(1, 105.5, tuple(late))])
    for line in shown:
        assert [(span.kind, span.start_s, span.end_s, span.step) for span in line.spans] == [
            ("forward", 0.0, 2.0, 0),
            ("backward", 4.0, 8.0, 0),
            ("exposed", 2.0, 3.0, 0),
            ("update", 3.0, 4.0, 0),
            ("message", 0.0, 3.0, 0),
            ("message", 6.0, 8.0, 0),
        ]
