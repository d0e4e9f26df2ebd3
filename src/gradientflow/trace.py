"""What happened, when: spans of one rank, readable by Perfetto and chrome://tracing.

Inside, times are seconds on the rank's own monotonic clock; `epoch_s` turns them into wall-clock time so
that traces of several machines can be laid over each other.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from gradientflow.documents import Record, describe, read_text, write_text
from gradientflow.errors import DocumentError

#: Tracks that are not lanes. Lane i is the track `lane i`.
MAIN = "main"


class Span(NamedTuple):
    """Something that took from `start_s` to `end_s` on a track.

    Kinds: `forward` and `backward` (compute), `message` (on the wire; args: its number in the plan, nbytes,
    and waited_s, how long it was ready before its lane took it), `exposed` (training waited for
    communication), `step` (from the first forward to the end of the optimizer's step).
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
        return self.end_s - self.start_s


class Recorder:
    """Collects spans; old ones fall out, so that a month of training does not fill the memory."""

    def __init__(self, capacity: int = 100_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._epoch_s = time.time() - clock()

    def add(self, span: Span) -> None:
        self._spans.append(span)  # deque.append is atomic: lanes add from their own threads

    def trace(self, rank: int) -> Trace:
        return Trace(rank=rank, epoch_s=self._epoch_s, spans=tuple(self._spans))


class Trace(NamedTuple):
    """The spans of one rank."""

    rank: int
    epoch_s: float
    spans: tuple[Span, ...]

    def of_kind(self, kind: str) -> list[Span]:
        return [span for span in self.spans if span.kind == kind]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Chrome trace-event JSON: one process a rank, one thread a track, times in microseconds."""
        tracks = sorted({span.track for span in self.spans}, key=lambda track: (track != MAIN, track))
        thread_of = {track: number for number, track in enumerate(tracks)}
        events: list[dict[str, Any]] = [_name("process_name", self.rank, 0, f"rank {self.rank}")]
        events += [_name("thread_name", self.rank, number, track) for track, number in thread_of.items()]
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "cat": span.kind,
                    "name": span.name,
                    "pid": self.rank,
                    "tid": thread_of[span.track],
                    "ts": (span.start_s + self.epoch_s) * 1e6,
                    "dur": span.duration_s * 1e6,
                    "args": {"step": span.step, **span.args},
                }
            )
        header = _Header(rank=self.rank, epoch_s=self.epoch_s)
        write_text(path, json.dumps({"otherData": header.model_dump(), "traceEvents": events}))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        text = read_text(path)
        try:
            document = json.loads(text)
            header = _Header.model_validate(document["otherData"])
            tracks: dict[int, str] = {}
            spans = []
            for event in document["traceEvents"]:
                if event["ph"] == "M" and event["name"] == "thread_name":
                    tracks[event["tid"]] = event["args"]["name"]
                if event["ph"] != "X":
                    continue
                args = dict(event["args"])
                step = args.pop("step")
                start_s = event["ts"] / 1e6 - header.epoch_s
                end_s = start_s + event["dur"] / 1e6
                spans.append(Span(event["cat"], event["name"], tracks[event["tid"]], start_s, end_s, step, args))
        except ValidationError as error:
            raise DocumentError(f"{path}: otherData: {describe(error)}") from None
        except ValueError as error:
            raise DocumentError(f"{path}: expected JSON; {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise DocumentError(f"{path}: expected a trace written by gradientflow; {error!r}") from None
        return cls(header.rank, header.epoch_s, tuple(spans))


class _Header(Record):
    version: int = 1
    rank: int
    epoch_s: float


def _name(kind: str, process: int, thread: int, label: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": label}}
