"""One iteration of a method as it can be seen: what the training thread did, where it waited, what was on the wire.

A method that puts updates off does a part of each iteration's work in the next. So what is looked at is an iteration
that follows another without a pause, from its beginning to its end: what the one before left over is in it, what it
leaves over itself is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from gradientflow.bench.results import Timeline
from gradientflow.trace import MAIN, Span, Trace, aligned

#: Around a part of an iteration, called with its kind.
Phase = Callable[[str], AbstractContextManager[object]]

#: Of the training thread's spans, those that a flow notes by itself.
NOTED_BY_FLOWS = ("exposed", "update")


def watched(iterate: Callable[[Phase], None], parameters: Sequence[torch.Tensor]) -> tuple[list[Span], Span]:
    """What the training thread did in an iteration, and the time from the last gradient to the end of backward."""
    work: list[Span] = []
    arrived_s = 0.0

    def note(parameter: torch.Tensor) -> None:
        nonlocal arrived_s
        arrived_s = time.perf_counter()

    @contextmanager
    def phase(kind: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        work.append(Span(kind, kind, MAIN, start_s, time.perf_counter(), 0))

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in parameters]  # type: ignore[no-untyped-call]
    iterate(phase)
    for handle in handles:
        handle.remove()
    end_s = next(span.end_s for span in work if span.kind == "backward")
    return work, Span("exposed", "exposed", MAIN, arrived_s, end_s, 0)


def without(work: Sequence[Span], waits: Sequence[Span]) -> list[Span]:
    """`work` less the time of `waits`, in pieces.

    >>> forward = Span("forward", "forward", MAIN, 0.0, 5.0, 0)
    >>> [(piece.start_s, piece.end_s) for piece in without([forward], [forward._replace(start_s=1.0, end_s=3.0)])]
    [(0.0, 1.0), (3.0, 5.0)]
    """
    pieces = list(work)
    for wait in waits:
        pieces = [piece for span in pieces for piece in _around(wait, span)]
    return pieces


def _around(hole: Span, span: Span) -> list[Span]:
    before = span._replace(end_s=min(span.end_s, hole.start_s))
    after = span._replace(start_s=max(span.start_s, hole.end_s))
    return [piece for piece in (before, after) if piece.duration_s > 0.0]


def within(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """The spans that lie between two moments at least in part, that part of each."""
    cut = [span._replace(start_s=max(span.start_s, start_s), end_s=min(span.end_s, end_s)) for span in spans]
    return [span for span in cut if span.duration_s > 0.0]


def extent(work: Sequence[Span]) -> tuple[float, float]:
    """Of the training thread's spans, which begin and end an iteration."""
    mine = [span for span in work if span.track == MAIN]
    return min(span.start_s for span in mine), max(span.end_s for span in mine)


def timelines(method: str, traces: Sequence[Trace]) -> list[Timeline]:
    """An iteration on each rank; times from its beginning on rank 0, on rank 0's clock."""
    # Before messages are cut: it is their ends that clocks are compared by.
    on_one_clock = aligned(traces)
    first_s = on_one_clock[0].epoch_s + extent(on_one_clock[0].spans)[0]
    return [
        Timeline(
            method=method,
            rank=trace.rank,
            spans=tuple(
                span._replace(step=0).moved(trace.epoch_s - first_s)
                for span in within(trace.spans, *extent(trace.spans))
            ),
        )
        for trace in on_one_clock
    ]
