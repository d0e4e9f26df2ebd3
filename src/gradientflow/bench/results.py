"""What a bake-off found: the file that `gradientflow bench --out` writes and `gradientflow report` reads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from gradientflow.documents import MAX_NBYTES, Document, Record
from gradientflow.lab.stragglers import Straggling
from gradientflow.network import Network
from gradientflow.trace import Span


class Spread(Record):
    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        return cls(
            median=statistics.median(ordered), p10=_quantile(ordered, 0.1), p90=_quantile(ordered, 0.9), n=len(ordered)
        )


class Ratio(Record):
    """A median of paired ratios, and the interval that covers the true one in 95 of 100 experiments."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """
        >>> Ratio.of([1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.0, 1.05]).low
        0.9
        """
        ordered = sorted(values)
        skip = _outside_interval(len(ordered))
        return cls(median=statistics.median(ordered), low=ordered[skip], high=ordered[-1 - skip])

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


class Conditions(Straggling):
    """What an iteration meets beside the workload itself, the same for all methods of a run."""

    #: Standard deviation of how long an iteration computes on a rank, as a share of the mean.
    jitter: float = 0.0
    #: To which the norm of all gradients together is clipped between backward and step; None: it is not.
    clip_norm: float | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """
        >>> Conditions(slowdown={2: 1.5}, jitter=0.1, clip_norm=1.0).words
        ('rank 2 computes 1.5 times as long', 'computing jitters by 10 %', 'gradients clipped to a norm of 1')
        """
        found = self.told
        if self.jitter:
            found.append(f"computing jitters by {100 * self.jitter:g} %")
        if self.clip_norm is not None:
            found.append(f"gradients clipped to a norm of {self.clip_norm:g}")
        return tuple(found)


class Result(Record):
    """One method on one workload."""

    workload: str
    method: str
    hosts: int
    rate: float | None
    iteration_s: Spread
    #: To other methods, from blocks that ran next to each other.
    ratio_to: dict[str, Ratio]
    samples_per_s: float
    speedup: float
    compute_s: float
    wire_bound_s: float
    limit_s: float
    exposed_s: float
    #: By one worker in an iteration, the mean over workers, without packets' headers.
    bytes_sent: float
    must_send: float
    cpu_s: float
    cpu_share: float
    peak_memory_bytes: int
    notes: tuple[str, ...] = ()


class Timeline(Record):
    """One iteration of one method on one rank; times from its beginning on rank 0, on rank 0's clock."""

    method: str
    rank: int = 0
    spans: tuple[Span, ...]


class Machine(Record):
    platform: str
    cores: int
    python: str
    torch: str
    gradientflow: str


class Results(Document):
    limit_nbytes = MAX_NBYTES

    machine: Machine
    command: str
    started: str
    #: Where the workers were: in a lab with links of some rate, on the loopback, in a cluster.
    place: str
    conditions: Conditions = Conditions()
    #: What a short probe measured there before the bake-off.
    network: Network | None = None
    notes: tuple[str, ...] = ()
    results: tuple[Result, ...] = Field(min_length=1)
    timelines: tuple[Timeline, ...] = ()


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _outside_interval(number: int) -> int:
    """How many order statistics to leave out at each end: the median lies between the rest with 95 %.

    >>> [_outside_interval(n) for n in (5, 9, 20, 40)]
    [0, 1, 5, 13]
    """
    outside, tail = 0, 0.5**number
    chance = tail
    while True:
        chance *= (number - outside) / (outside + 1)
        tail += chance
        if 2 * tail > 0.05 or outside + 1 > (number - 1) // 2:
            return outside
        outside += 1
