"""How ranks are wired: which links a transfer takes, and what each of them costs.

A link carries one direction and is named by anything hashable. Its line says what it adds to a transfer's latency,
`alpha_s`, and how long a byte occupies it, `beta_s_per_byte`. Wires are full duplex: the way back is another link.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from gradientflow.cost.table import Line
from gradientflow.patterns import check_hosts


class Topology(Protocol):
    """Links between ranks."""

    @property
    def world(self) -> int: ...

    def route(self, source: int, destination: int) -> Sequence[Hashable]:
        """The links from one rank to another, in order."""

    def link(self, name: Hashable) -> Line:
        """What a link of a route costs."""


@dataclass(frozen=True)
class Switch:
    """Each rank has a port to one switch that never blocks."""

    world: int
    alpha_s: float
    beta_s_per_byte: float

    def route(self, source: int, destination: int) -> Sequence[Hashable]:
        return ("out", source), ("in", destination)

    def link(self, name: Hashable) -> Line:
        return _port(self.alpha_s, self.beta_s_per_byte)


@dataclass(frozen=True)
class Hosts:
    """Workers on hosts: `inside` is a worker's port to the others on its host, `between` the one network card that
    all workers of a host share. Racks of workers that share an uplink are the same thing.
    """

    hosts: Sequence[Sequence[int]]
    inside: Line
    between: Line

    def __post_init__(self) -> None:
        check_hosts(self.hosts)

    @property
    def world(self) -> int:
        return len(self._host_of)

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: number for number, host in enumerate(self.hosts) for rank in host}

    def route(self, source: int, destination: int) -> Sequence[Hashable]:
        here, there = self._host_of[source], self._host_of[destination]
        if here == there:
            return ("inside", "out", source), ("inside", "in", destination)
        return ("between", "out", here), ("between", "in", there)

    def link(self, name: Hashable) -> Line:
        match name:
            case ("inside", _, _):
                line = self.inside
            case _:
                line = self.between
        return _port(line.alpha_s, line.beta_s_per_byte)


@dataclass(frozen=True)
class Torus:
    """Rank `row * x + column` has a wire to each of its neighbours, and the ends of rows and columns are neighbours.

    Others are reached along the row and then along the column, the shorter way around.
    """

    x: int
    y: int
    alpha_s: float
    beta_s_per_byte: float

    @property
    def world(self) -> int:
        return self.x * self.y

    def route(self, source: int, destination: int) -> Sequence[Hashable]:
        (row, column), (to_row, to_column) = divmod(source, self.x), divmod(destination, self.x)
        passed = [row * self.x + stop for stop in _around(column, to_column, self.x)]
        passed += [stop * self.x + to_column for stop in _around(row, to_row, self.y)[1:]]
        return tuple(pairwise(passed))

    def link(self, name: Hashable) -> Line:
        return Line(alpha_s=self.alpha_s, beta_s_per_byte=self.beta_s_per_byte)


def _around(start: int, stop: int, size: int) -> list[int]:
    """The places on a ring from one to another, both included, the shorter way."""
    ahead = (stop - start) % size
    step, distance = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
    return [(start + step * moved) % size for moved in range(distance + 1)]


@dataclass(frozen=True)
class BCube:
    """n^levels servers, each with a port to an n-port switch on each level; see `patterns.bcube`.

    Servers pass on what is meant for others: a route mends one digit after another, the highest first.

    >>> BCube(n=4, levels=2, alpha_s=0.0, beta_s_per_byte=1.0).route(1, 14)
    [('out', 1, 1), ('in', 13, 1), ('out', 13, 0), ('in', 14, 0)]
    """

    n: int
    levels: int
    alpha_s: float
    beta_s_per_byte: float

    @property
    def world(self) -> int:
        return int(self.n**self.levels)

    def route(self, source: int, destination: int) -> Sequence[Hashable]:
        links: list[Hashable] = []
        here = source
        for level in reversed(range(self.levels)):
            place = self.n**level
            off_by = destination // place % self.n - here // place % self.n
            if off_by:
                links.append(("out", here, level))
                here += off_by * place
                links.append(("in", here, level))
        return links

    def link(self, name: Hashable) -> Line:
        return _port(self.alpha_s, self.beta_s_per_byte)


def _port(alpha_s: float, beta_s_per_byte: float) -> Line:
    """One of the two ports on the way through a switch: each has half of the latency."""
    return Line(alpha_s=alpha_s / 2, beta_s_per_byte=beta_s_per_byte)
