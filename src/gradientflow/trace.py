"""What happened, when: spans of one rank, readable by Perfetto and chrome://tracing, and of all ranks in one file.

Inside, times are seconds on the rank's own monotonic clock; `epoch_s` turns them into wall-clock time so
that traces of several machines can be laid over each other. Machines do not agree on the wall-clock time: `aligned`
corrects it by what the traces themselves say.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from gradientflow.documents import Record, describe, parse_data, read_text, write_text
from gradientflow.errors import DocumentError

#: Tracks that are not lanes. Lane i is the track `lane i`.
MAIN = "main"
#: The most spans of all ranks in one file: about 40 MB, which Perfetto opens within seconds.
MERGED_SPANS = 200_000
#: Of one rank's file: more than twice what a full recorder writes.
MAX_NBYTES = 64 * 2**20


class Span(NamedTuple):
    """Something that took from `start_s` to `end_s` on a track.

    Kinds: `forward` and `backward` (compute), `message` (on the wire; args: its number in the plan, nbytes,
    waited_s, how long it was ready before its lane took it, and idle_s, how long its lane stood before it while others
    behind it were ready), `exposed` (training waited for communication), `update` (a stage's share of a step that was
    put off), `step` (from the first forward to the end of the optimizer's step), `trial` (a step in which `auto` tries
    something), `tuned` (what it has chosen; args: iteration_s, and lost_s, what trials have cost so far).
    """

    kind: str
    name: str
    track: str
    start_s: float
    end_s: float
    step: int
    args: Mapping[str, float] = {}

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s

    def moved(self, by_s: float) -> Span:
        """The same, so much later."""
        return self._replace(start_s=self.start_s + by_s, end_s=self.end_s + by_s)


class Recorder:
    """Collects spans; old ones fall out, so that a month of training does not fill the memory."""

    def __init__(self, capacity: int = 100_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._epoch_s = time.time() - clock()

    def add(self, span: Span) -> None:
        self._spans.append(span)  # deque.append is atomic: lanes add from their own threads

    def trace(self, rank: int, most: int = 0) -> Trace:
        """most: of the latest spans; 0: all that are left."""
        spans = tuple(itertools.islice(reversed(self._spans), most))[::-1] if most else tuple(self._spans)
        return Trace(rank=rank, epoch_s=self._epoch_s, spans=spans)


class Trace(NamedTuple):
    """The spans of one rank. Files of it open in Perfetto and chrome://tracing.

    >>> waited = Span("exposed", "waiting", "main", 1.0, 1.5, step=3)
    >>> trace = Trace(rank=0, epoch_s=0.0, spans=(waited,))
    >>> sum(span.duration_s for span in trace.of_kind("exposed"))
    0.5
    """

    rank: int
    #: What to add to a span's seconds for the time of day.
    epoch_s: float
    spans: tuple[Span, ...]

    def of_kind(self, kind: str) -> list[Span]:
        """The spans of one kind, in the order in which they were recorded."""
        return [span for span in self.spans if span.kind == kind]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Chrome trace-event JSON: one process a rank, one thread a track, times in microseconds."""
        _write_events(path, _Header(rank=self.rank, epoch_s=self.epoch_s), [self])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """What `write` wrote; `DocumentError` for anything else."""
        document = parse_data(read_text(path, MAX_NBYTES), str(path), "JSON")
        try:
            header = _Header.model_validate(document["otherData"])
            tracks: dict[int, str] = {}
            spans = []
            for event in document["traceEvents"]:
                if event["ph"] == "M" and event["name"] == "thread_name":
                    tracks[event["tid"]] = event["args"]["name"]
                if event["ph"] == "X":
                    spans.append(_span(event, tracks, header.epoch_s))
        except ValidationError as error:
            raise DocumentError(f"{path}: otherData: {describe(error)}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DocumentError(f"{path}: expected a trace written by gradientflow; {error!r:.300}") from None
        return cls(header.rank, header.epoch_s, tuple(spans))


# - Several ranks


def aligned(traces: Sequence[Trace]) -> list[Trace]:
    """The same spans, on the wall clock of the lowest rank.

    In a lockstep exchange a message ends on all ranks at nearly the same moment. So a rank's clock is set by the
    median, over the messages it has in common with the lowest rank, of the difference between their ends. A rank
    that shares none with it (one joined when the other had left) is set by a rank that is set already. Where none
    is left to be set so, the lowest of the rest keeps its wall clock and the others follow it.

    Accuracy: ends lie apart by up to the last hop of a ring, in which one chunk of a message goes to the neighbour,
    and the median takes the usual such distance for a difference of clocks. Clocks that drift apart within the traces
    are right in their middle only. Fewer than half of the messages may be disturbed in any way.

    >>> sent = Span("message", "fc", "lane 0", 3.0, 4.0, step=7)
    >>> late = Trace(rank=1, epoch_s=100.5, spans=(sent,))
    >>> [trace.epoch_s for trace in aligned([Trace(rank=0, epoch_s=100.0, spans=(sent,)), late])]
    [100.0, 100.0]
    """
    ends_s = {trace.rank: _message_ends(trace) for trace in traces}
    epochs_s: dict[int, float] = {}
    for trace in sorted(traces, key=lambda trace: trace.rank):
        found = {} if trace.rank in epochs_s else {trace.rank: trace.epoch_s}
        while found:  # each time those who share messages with somebody found the time before
            epochs_s |= found
            found = _followers(found, {rank: ends_s[rank] for rank in ends_s if rank not in epochs_s}, ends_s)
    return [trace._replace(epoch_s=epochs_s[trace.rank]) for trace in traces]


def latest_steps(traces: Sequence[Trace], limit: int = MERGED_SPANS) -> list[Trace]:
    """The last steps, whole and of all ranks, that are no more than `limit` spans together.

    Where not even one step of all ranks is so small, the last step of the lowest ranks, as many as fit.
    """
    sizes = Counter(span.step for trace in traces for span in trace.spans)
    kept: set[int] = set()
    num_spans = 0
    for step in sorted(sizes, reverse=True):
        num_spans += sizes[step]
        if num_spans > limit:
            break
        kept.add(step)
    if kept or not sizes:
        return [_only(trace, kept) for trace in traces]
    return _lowest_ranks([_only(trace, {max(sizes)}) for trace in traces], limit)


class Merged(Record):
    """What the file of all ranks says of itself, in its `otherData`."""

    version: int = 1
    #: The rank whose wall clock times are on.
    clock_of_rank: int | None
    #: How far each rank's wall clock was ahead of it, as far as messages could tell; else 0.
    ahead_s: dict[int, float]
    num_spans: int
    steps: tuple[int, ...]
    left_out_spans: int
    left_out_steps: int
    #: Ranks of which nothing is in the file.
    left_out_ranks: tuple[int, ...]


def write_merged(
    path: str | os.PathLike[str], traces: Sequence[Trace], *, clocks_agree: bool = False, limit: int = MERGED_SPANS
) -> Merged:
    """One file of all ranks, one process each, with their latest steps on the lowest rank's clock.

    clocks_agree: times are on one clock already."""
    kept = latest_steps(sorted(traces, key=lambda trace: trace.rank), limit)
    # Cut first: clocks are then compared where they are shown, and have less time to drift apart.
    corrected = kept if clocks_agree else aligned(kept)
    header = _describe_merged(traces, kept, corrected)
    _write_events(path, header, corrected)
    return header


#: When each message of a rank ended, on its own clock.
_Ends = dict[tuple[object, ...], float]


def _followers(
    leaders: Mapping[int, float], others: Mapping[int, _Ends], ends_s: Mapping[int, _Ends]
) -> dict[int, float]:
    """Epochs of those `others` that have messages in common with a leader: with the one they share most with."""
    found = {}
    for rank, mine_s in others.items():
        common = {leader: mine_s.keys() & ends_s[leader].keys() for leader in leaders}
        nearest = max(leaders, key=lambda leader: len(common[leader]))
        if common[nearest]:
            apart_s = statistics.median(mine_s[key] - ends_s[nearest][key] for key in common[nearest])
            found[rank] = leaders[nearest] - apart_s
    return found


def _message_ends(trace: Trace) -> _Ends:
    """Without messages that cannot be told apart."""
    keyed = [((span.step, span.args.get("message"), span.name, span.track), span) for span in trace.of_kind("message")]
    times = Counter(key for key, _ in keyed)
    return {key: span.end_s for key, span in keyed if times[key] == 1}


def _only(trace: Trace, steps: set[int]) -> Trace:
    return trace._replace(spans=tuple(span for span in trace.spans if span.step in steps))


def _lowest_ranks(traces: Sequence[Trace], limit: int) -> list[Trace]:
    """Ranks beyond the limit lose their spans."""
    found, room = {}, limit
    for trace in sorted(traces, key=lambda trace: trace.rank):
        room -= len(trace.spans)
        found[trace.rank] = trace if room >= 0 else trace._replace(spans=())
    return [found[trace.rank] for trace in traces]


def _describe_merged(given: Sequence[Trace], kept: Sequence[Trace], corrected: Sequence[Trace]) -> Merged:
    steps = sorted({span.step for trace in kept for span in trace.spans})
    before = {span.step for trace in given for span in trace.spans}
    num_kept = sum(len(trace.spans) for trace in kept)
    return Merged(
        clock_of_rank=min((trace.rank for trace in kept), default=None),
        ahead_s={one.rank: one.epoch_s - other.epoch_s for one, other in zip(kept, corrected, strict=True)},
        num_spans=num_kept,
        steps=(steps[0], steps[-1]) if steps else (),
        left_out_spans=sum(len(trace.spans) for trace in given) - num_kept,
        left_out_steps=len(before) - len(steps),
        left_out_ranks=tuple(trace.rank for trace in kept if not trace.spans),
    )


# - The file


class _Header(Record):
    version: int = 1
    rank: int
    epoch_s: float = Field(allow_inf_nan=False)


def _span(event: dict[str, Any], tracks: Mapping[int, str], epoch_s: float) -> Span:
    """A complete event, back as what it was made of; TypeError if it was not made here."""
    args = dict(event["args"])
    step, kind, name, track = args.pop("step"), event["cat"], event["name"], tracks[event["tid"]]
    times = event["ts"], event["dur"]
    if not isinstance(step, int) or not all(isinstance(words, str) for words in (kind, name, track)):
        raise TypeError(f"expected a number as step, and words as kind, name and track, found {event!r:.200}")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (*times, *args.values())):
        raise TypeError(f"expected numbers as times and args, found {event!r:.200}")
    start_s = times[0] / 1e6 - epoch_s
    return Span(kind, name, track, start_s, start_s + times[1] / 1e6, step, args)


def _write_events(path: str | os.PathLike[str], header: Record, traces: Sequence[Trace]) -> None:
    events = [event for trace in traces for event in _events(trace)]
    write_text(path, json.dumps({"otherData": header.model_dump(), "traceEvents": events}))


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    """A rank in the trace-event format: its name, its threads' names, and a complete event a span.

    Times are whole microseconds, so that a span which ends where the next begins does so in the file too. What
    begins earlier comes first, and of two that begin together the longer, as Perfetto expects of nested spans.
    """
    timed = [(*_microseconds(span, trace.epoch_s), span) for span in trace.spans]
    timed.sort(key=lambda entry: (entry[0], -entry[1]))
    rows = _Rows()
    places = [(span.track, rows.take(span.track, start, end)) for start, end, span in timed]
    # Longer names later: lane 10 after lane 9.
    in_order = sorted(set(places), key=lambda place: (place[0] != MAIN, len(place[0]), *place))
    thread_of = {place: number for number, place in enumerate(in_order)}
    yield _metadata("process_name", trace.rank, 0, name=f"rank {trace.rank}")
    yield _metadata("process_sort_index", trace.rank, 0, sort_index=trace.rank)
    for (track, _), number in thread_of.items():
        yield _metadata("thread_name", trace.rank, number, name=track)
    for (start, end, span), place in zip(timed, places, strict=True):
        yield {
            "ph": "X",
            "cat": span.kind,
            "name": span.name,
            "pid": trace.rank,
            "tid": thread_of[place],
            "ts": start,
            "dur": end - start,
            "args": {"step": span.step, **span.args},
        }


def _microseconds(span: Span, epoch_s: float) -> tuple[int, int]:
    """Start and end, whole; Perfetto knows no spans that end before they start."""
    start, end = (round(1e6 * (moment_s + epoch_s)) for moment_s in (span.start_s, span.end_s))
    return start, max(start, end)


class _Rows:
    """Deals the spans of a track, taken by their start, to threads of its name.

    Perfetto takes a thread's spans for nested calls and drops one that overlaps another without lying inside it,
    as messages do of which several are under way. Such a span goes to a further thread.
    """

    def __init__(self) -> None:
        self._open_ends: dict[str, list[list[int]]] = {}

    def take(self, track: str, start: int, end: int) -> int:
        """The number of the thread, among those of the track."""
        rows = self._open_ends.setdefault(track, [])
        for number, ends in enumerate(rows):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return number
        rows.append([end])
        return len(rows) - 1


def _metadata(kind: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
