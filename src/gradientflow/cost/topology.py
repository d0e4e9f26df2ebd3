"""How ranks are wired: which links a transfer takes, and what each of them costs.

A link carries one direction and is named by anything hashable. Its line says what it adds to a transfer's latency,
`alpha_s`, and how long a byte occupies it, `beta_s_per_byte`. Wires are full duplex: the way back is another link.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Protocol

import networkx

from gradientflow.cost.table import Line
from gradientflow.errors import UsageError
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


class Graph:
    """Any wiring: a graph of workers, called 0, 1, ..., and switches, called anything else; routes are shortest paths.

    Each cable is two links, one each way, with `alpha_s` and `beta_s_per_byte` of its own. Of several shortest paths
    always the same one is taken.

    >>> cabled([(0, "switch"), (1, "switch")], Line(alpha_s=1.0, beta_s_per_byte=1.0)).route(0, 1)
    ((0, 'switch'), ('switch', 1))
    """

    def __init__(self, cables: networkx.Graph) -> None:
        self._cables = cables
        workers = sorted(node for node in cables if isinstance(node, int))
        if workers != list(range(len(workers))):
            raise UsageError(f"workers of a graph must be called 0, 1, 2 ..., not {workers[:8]}")
        if workers and not networkx.is_connected(cables):
            parts = [sorted(map(str, part)) for part in networkx.connected_components(cables)]
            one, other = (", ".join(part[:4]) for part in sorted(parts)[:2])
            raise UsageError(
                f"the graph is in {len(parts)} parts (no way leads from {one} to {other}): add a cable between them"
            )
        self.world = len(workers)
        self._routes = cache(self._route)

    def route(self, source: int, destination: int) -> Sequence[Hashable]:
        return self._routes(source, destination)

    def _route(self, source: int, destination: int) -> Sequence[Hashable]:
        return tuple(pairwise(networkx.shortest_path(self._cables, source, destination)))

    def link(self, name: Hashable) -> Line:
        cable = self._cables.edges[name]
        return Line(alpha_s=cable["alpha_s"], beta_s_per_byte=cable["beta_s_per_byte"])


def fat_tree(num_workers: int, per_switch: int, oversubscription: float, line: Line) -> Graph:
    """Workers under switches, and a core above these that never blocks. A switch's cable to the core carries what its
    workers could send, divided by the oversubscription."""
    cables = networkx.Graph()
    port = _port(line.alpha_s, line.beta_s_per_byte)
    for worker in range(num_workers):
        cables.add_edge(
            worker, f"switch {worker // per_switch}", **port.model_dump(include={"alpha_s", "beta_s_per_byte"})
        )
    if num_workers > per_switch:
        up = line.beta_s_per_byte * oversubscription / per_switch
        for number in range(-(-num_workers // per_switch)):
            cables.add_edge(f"switch {number}", "core", alpha_s=0.0, beta_s_per_byte=up)
    return Graph(cables)


def cabled(cables: Sequence[tuple[int | str, int | str]], line: Line) -> Graph:
    """A graph of equal cables; between two workers half the latency of each."""
    graph = networkx.Graph()
    for one, other in cables:
        graph.add_edge(one, other, alpha_s=line.alpha_s / 2, beta_s_per_byte=line.beta_s_per_byte)
    return Graph(graph)


def torus_of(sides: Sequence[int], line: Line) -> Graph:
    """A torus of any number of directions."""
    grid = networkx.grid_graph(dim=tuple(reversed(sides)), periodic=True)
    number = {node: index for index, node in enumerate(sorted(grid))}
    graph = networkx.relabel_nodes(grid, number)
    networkx.set_edge_attributes(graph, line.alpha_s, "alpha_s")
    networkx.set_edge_attributes(graph, line.beta_s_per_byte, "beta_s_per_byte")
    return Graph(graph)


def _port(alpha_s: float, beta_s_per_byte: float) -> Line:
    """One of the two ports on the way through a switch: each has half of the latency."""
    return Line(alpha_s=alpha_s / 2, beta_s_per_byte=beta_s_per_byte)
