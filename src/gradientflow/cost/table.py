"""Seconds a message takes, by its size.

Between measured sizes a table is interpolated in log-log, which stays within a few per cent where one line
alpha + beta * nbytes errs by 10 % and more, just in the range where fused messages live. The line serves
beyond the largest measured size, and where nothing was measured.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar, Protocol

from pydantic import Field, field_validator

from gradientflow.documents import Record
from gradientflow.errors import UsageError

#: (nbytes, seconds)
Point = tuple[Annotated[int, Field(gt=0)], Annotated[float, Field(gt=0.0, allow_inf_nan=False)]]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Cost(Protocol):
    """Anything that knows what a message takes."""

    @property
    def beta_s_per_byte(self) -> float:
        """How long a byte occupies the link; in the rest of a message's time the link is free for others."""

    @property
    def host_s(self) -> float:
        """What each message takes of processors, so far as those may be missing elsewhere."""

    def seconds(self, nbytes: float) -> float:
        """From handing over a message of `nbytes` to having its result, alone on the network."""


class Line(Record):
    """alpha + beta * nbytes.

    >>> Line(alpha_s=0.5, beta_s_per_byte=0.25).seconds(4)
    1.5
    """

    alpha_s: Seconds
    beta_s_per_byte: Seconds
    host_s: Seconds = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> tuple[Line, tuple[float, ...]]:
        """The line with the least squared relative errors, neither part below 0; and its relative error at each
        point, predicted / measured - 1.

        Relative, because seconds span five decades: with absolute errors 64 MB alone would decide alpha.
        """
        if len({nbytes for nbytes, _ in points}) < 2:
            raise UsageError("a line needs times for two sizes: measure more than one")
        line = min(_candidates(points), key=lambda line: sum(error**2 for error in line._errors(points)))
        return line, line._errors(points)

    def _errors(self, points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
        return tuple(self.seconds(nbytes) / seconds - 1 for nbytes, seconds in points)


def _candidates(points: Sequence[tuple[float, float]]) -> list[Line]:
    """The free optimum if it is allowed, else the best with alpha = 0 and the best with beta = 0: the error is
    convex, so one of these is the optimum."""
    # Weights 1 / seconds^2 make relative errors of absolute ones. Moments about the mean keep the digits.
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    beta = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    alpha = mean_y - beta * mean_x
    if alpha >= 0 and beta >= 0:
        return [Line(alpha_s=alpha, beta_s_per_byte=beta)]
    squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    through_origin = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares
    return [Line(alpha_s=0.0, beta_s_per_byte=through_origin), Line(alpha_s=mean_y, beta_s_per_byte=0.0)]


def check_rising(points: Sequence[tuple[int, float]]) -> None:
    """Sizes of a table; a `ValueError` names the first that does not follow."""
    for (one, _), (other, _) in pairwise(points):
        if other <= one:
            raise ValueError(f"sizes must rise: {other} follows {one}")


class CostTable(Record):
    """Measured times: exact at measured sizes, log-log between them, the smallest's time below them.

    Beyond the largest, seconds grow by the slope of the last `TAIL` points. Two points at least: a single
    one knows no slope.

    >>> table = CostTable(points=((100, 1.0), (400, 2.0)))
    >>> table.seconds(200) == math.sqrt(2), table.seconds(10), table.seconds(700)
    (True, 1.0, 3.0)
    """

    points: tuple[Point, ...] = Field(min_length=2)
    #: What software adds to each message beyond what was measured, such as handing it to a lane's thread.
    software_s: Seconds = 0.0
    host_s: Seconds = 0.0

    @field_validator("points")
    @classmethod
    def _in_order(cls, points: tuple[Point, ...]) -> tuple[Point, ...]:
        check_rising(points)
        return points

    @property
    def beta_s_per_byte(self) -> float:
        return _fit(self.points[-TAIL:]).beta_s_per_byte

    def seconds(self, nbytes: float) -> float:
        place = bisect_left(self.points, nbytes, key=lambda point: point[0])
        if place == len(self.points):
            largest, seconds = self.points[-1]
            return self.software_s + seconds + self.beta_s_per_byte * (nbytes - largest)
        above, seconds_above = self.points[place]
        if place == 0 or nbytes == above:
            return self.software_s + seconds_above
        below, seconds_below = self.points[place - 1]
        share = math.log(nbytes / below) / math.log(above / below)
        return self.software_s + seconds_below * math.pow(seconds_above / seconds_below, share)


#: How many of the largest sizes say how a table goes on. On the 10 GbE all-reduce times behind MG-WFBP (OSU, 2 to
#: 8 nodes) 4 sizes up to 128 KiB foretell 1 MiB within 9 %, the line through all sizes misses it by 67 to 200 %.
TAIL = 4


@functools.lru_cache(maxsize=256)
def _fit(points: tuple[Point, ...]) -> Line:
    return Line.fit(points)[0]


@dataclass(frozen=True, slots=True)
class Steps:
    """`count` messages one after another, each of a `fraction` of the bytes.

    A codec that halves what travels is `Steps(cost, 1, 0.5)`.
    """

    cost: Cost
    count: float
    fraction: float

    @property
    def beta_s_per_byte(self) -> float:
        return self.count * self.fraction * self.cost.beta_s_per_byte

    @property
    def host_s(self) -> float:
        return self.count * self.cost.host_s

    def seconds(self, nbytes: float) -> float:
        return self.count * self.cost.seconds(nbytes * self.fraction)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message that a codec works on, for so many seconds a byte, before and after it travels."""

    cost: Cost
    compute_s_per_byte: float

    @property
    def beta_s_per_byte(self) -> float:
        return self.compute_s_per_byte + self.cost.beta_s_per_byte

    @property
    def host_s(self) -> float:
        return self.cost.host_s

    def seconds(self, nbytes: float) -> float:
        return self.compute_s_per_byte * nbytes + self.cost.seconds(nbytes)


@dataclass(frozen=True, slots=True)
class Best:
    """The quickest of several ways to carry a message; the first unless another gains a `MARGIN`.

    >>> ways = {"long": Line(alpha_s=4.0, beta_s_per_byte=1.0), "short": Line(alpha_s=1.0, beta_s_per_byte=2.0)}
    >>> Best(ways).pick(1), Best(ways).pick(4)
    ('short', 'long')
    """

    ways: Mapping[str, Cost]

    #: Of a message's seconds; what repeats of a measurement differ by.
    MARGIN: ClassVar[float] = 0.05

    def pick(self, nbytes: float) -> str:
        """The name of the way for a message of `nbytes`."""
        first = next(iter(self.ways))
        quickest = min(self.ways, key=lambda name: self.ways[name].seconds(nbytes))
        gains = self.ways[quickest].seconds(nbytes) < (1 - self.MARGIN) * self.ways[first].seconds(nbytes)
        return quickest if gains else first

    @property
    def beta_s_per_byte(self) -> float:
        return min(cost.beta_s_per_byte for cost in self.ways.values())

    @property
    def host_s(self) -> float:
        return next(iter(self.ways.values())).host_s

    def seconds(self, nbytes: float) -> float:
        return self.ways[self.pick(nbytes)].seconds(nbytes)


class Priced(Record):
    """What was measured of messages, by each way of carrying them, as it can be written down."""

    ways: dict[str, CostTable] = Field(min_length=1)
    #: Messages may each go by another way.
    by_size: bool = False
    #: Times that a message is sent, ...
    count: float = 1.0
    #: ... what a codec leaves of its bytes, ...
    fraction: float = 1.0
    #: ... and what it computes for each.
    compute_s_per_byte: Seconds = 0.0
    #: Of memory that is read or written, as any codec does.
    touch_s_per_byte: Seconds = 0.0

    def cost(self) -> Cost:
        found = {
            name: Encoded(Steps(table, self.count, self.fraction), self.compute_s_per_byte)
            for name, table in self.ways.items()
        }
        return Best(found) if self.by_size else next(iter(found.values()))


@dataclass(frozen=True, slots=True)
class Altered:
    """The same on another network: start-ups and bytes take so many times as long.

    >>> Altered(Line(alpha_s=2.0, beta_s_per_byte=1.0), startup=0.5, wire=2.0).seconds(3)
    7.0
    """

    cost: Cost
    startup: float = 1.0
    wire: float = 1.0

    @property
    def beta_s_per_byte(self) -> float:
        return self.wire * self.cost.beta_s_per_byte

    @property
    def host_s(self) -> float:
        return self.startup * self.cost.host_s

    def seconds(self, nbytes: float) -> float:
        whole_s = self.cost.seconds(nbytes)
        wire_s = min(whole_s, self.cost.beta_s_per_byte * nbytes)
        return self.startup * (whole_s - wire_s) + self.wire * wire_s


class Memo:
    """The same, asked once for each size: planners ask for the same sizes hundreds of times.

    >>> Memo(Line(alpha_s=1.0, beta_s_per_byte=2.0)).seconds(3)
    7.0
    """

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.beta_s_per_byte, self.host_s = cost.beta_s_per_byte, cost.host_s
        self.seconds = functools.cache(cost.seconds)


@dataclass(frozen=True, slots=True)
class Least:
    """The least of several costs, as a library takes it that chooses by itself.

    >>> cost = Least((Line(alpha_s=4.0, beta_s_per_byte=1.0), Line(alpha_s=1.0, beta_s_per_byte=2.0)))
    >>> cost.seconds(1), cost.seconds(10)
    (3.0, 14.0)
    """

    costs: tuple[Cost, ...]

    @property
    def beta_s_per_byte(self) -> float:
        return min(cost.beta_s_per_byte for cost in self.costs)

    @property
    def host_s(self) -> float:
        return self.costs[0].host_s

    def seconds(self, nbytes: float) -> float:
        return min(cost.seconds(nbytes) for cost in self.costs)


@dataclass(frozen=True, slots=True)
class Paying:
    """A message by a codec where that gains a `margin`, else as it is.

    >>> dense = Line(alpha_s=1.0, beta_s_per_byte=1.0)
    >>> cost = Paying(Line(alpha_s=2.0, beta_s_per_byte=0.5), dense, dense)
    >>> cost.pays(1), cost.pays(10), cost.seconds(10)
    (False, True, 7.0)
    """

    encoded: Cost
    #: As it is, measured in the same way.
    plain: Cost
    #: As it is, for planning.
    dense: Cost

    #: Of a message's seconds; 1: no codec gains as much.
    margin: float = field(default_factory=lambda: Paying.MARGIN)

    #: What goes as it is is exact, too, and takes no processor's time from computing.
    MARGIN: ClassVar[float] = 0.1

    def pays(self, nbytes: float) -> bool:
        return self.encoded.seconds(nbytes) < (1 - self.margin) * self.plain.seconds(nbytes)

    @property
    def beta_s_per_byte(self) -> float:
        return min(self.encoded.beta_s_per_byte, self.dense.beta_s_per_byte)

    @property
    def host_s(self) -> float:
        return self.dense.host_s

    def seconds(self, nbytes: float) -> float:
        return (self.encoded if self.pays(nbytes) else self.dense).seconds(nbytes)


def ring_reduce_scatter(link: Cost, world: int) -> Steps:
    """p - 1 steps of 1/p of the bytes, over `link`."""
    return Steps(link, world - 1, 1 / world)


def ring_all_gather(link: Cost, world: int) -> Steps:
    """p - 1 steps of 1/p of the bytes, over `link`."""
    return Steps(link, world - 1, 1 / world)


def ring_all_reduce(link: Cost, world: int) -> Steps:
    """2 (p - 1) alpha + 2 (p - 1) / p * nbytes * beta, if `link` is a line.

    >>> ring_all_reduce(Line(alpha_s=1.0, beta_s_per_byte=0.5), world=4).seconds(8)
    12.0
    """
    return Steps(link, 2 * (world - 1), 1 / world)
