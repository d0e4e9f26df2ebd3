"""Patterns that follow how ranks are wired: hosts in a network, rows and columns, servers with several ports.

With S bytes, through the busiest port in one direction:

    two_level    n hosts of g     2 (g - 1) rounds inside    2 (g - 1) / g S inside a host
                                  2 (n - 1) across           2 (n - 1) / n S / g across, of each worker
    torus        x by y           2 (x + y - 2) rounds       2 (x - 1) / x S along x, 2 (y - 1) / y S / x along y
    bcube        n^d servers      2 d rounds                 2 (1 - 1 / n^d) S / d, of each of d ports

The first two are single-ported. In a BCube a rank exchanges with n - 1 others on each of d ports in one round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from gradientflow.errors import UsageError
from gradientflow.patterns.flat import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_reduce
from gradientflow.patterns.pattern import Pattern, Transfer, in_turn, mirrored


def two_level(hosts: Sequence[Sequence[int]]) -> Pattern:
    """An all-reduce that sends between hosts only what it must; `hosts` are the ranks of each.

    Where hosts have equally many workers, all of these take part in what crosses the network. Where not, chunks
    that are owned one by one have no owner on every host, so the first worker of each stands for its host.

    >>> two_level([[0, 1], [2, 3], [4, 5]]).num_rounds, two_level([[0, 1, 2], [3]]).num_rounds
    (6, 6)
    """
    check_hosts(hosts)
    if len({len(host) for host in hosts}) == 1:
        return _grid("two-level", hosts)
    return _by_leaders(hosts)


def check_hosts(hosts: Sequence[Sequence[int]]) -> None:
    """Each rank has one host, and each host a rank."""
    ranks = sorted(chain.from_iterable(hosts))
    if not ranks or ranks != list(range(len(ranks))) or not all(hosts):
        raise UsageError(f"hosts must share out ranks 0, 1, 2 ... among them, at least one each, not {hosts}")


def torus(x: int, y: int) -> Pattern:
    """An all-reduce in rings along x and along y; rank `row * x + column`.

    >>> torus(4, 4).num_rounds, ring_all_reduce(16).num_rounds
    (12, 30)
    """
    if x < 1 or y < 1:
        raise UsageError(f"a torus needs at least one rank along each side, not {x} by {y}")
    return _grid("torus", [range(row * x, (row + 1) * x) for row in range(y)])


def _grid(name: str, rows: Sequence[Sequence[int]]) -> Pattern:
    """Reduce-scatter in each row, an all-reduce of what a rank then owns in each column, all-gather in each row."""
    columns = list(zip(*rows, strict=True))
    height, width = len(rows), len(columns)
    scatter, reduce, gather = ring_reduce_scatter(width), ring_all_reduce(height), ring_all_gather(width)
    transfers = in_turn(
        chain.from_iterable(scatter.placed(row, stretch=height) for row in rows),
        chain.from_iterable(reduce.placed(column, start=i * height) for i, column in enumerate(columns)),
        chain.from_iterable(gather.placed(row, stretch=height) for row in rows),
    )
    return Pattern(name, height * width, height * width, transfers)


def _by_leaders(hosts: Sequence[Sequence[int]]) -> Pattern:
    """A tree inside each host, up to its leader; a ring among leaders; and down the trees."""
    num_chunks = len(hosts)
    up = in_turn(chain.from_iterable(tree_reduce(len(host)).placed(host, stretch=num_chunks) for host in hosts))
    leaders = [host[0] for host in hosts]
    transfers = in_turn(up, ring_all_reduce(len(hosts)).placed(leaders), mirrored(up))
    return Pattern("two-level", sum(len(host) for host in hosts), num_chunks, transfers)


def bcube(n: int, levels: int) -> Pattern:
    """An all-reduce for n^levels servers that have a port to an n-port switch on each level.

    A rank written in base n names its switches: those that differ in digit l only share a switch of level l. The
    message is cut in `levels` parts, each of which is reduced level by level and gathered back, and each of which
    begins on a level of its own: so all ports are busy in all rounds, and no two parts meet in one.

    Wang et al.: BML, a High-Performance, Low-Cost Gradient Synchronization Algorithm for DML Training (2018).

    >>> bcube(4, 2).world, bcube(4, 2).num_rounds
    (16, 4)
    """
    if n < 1 or levels < 1:
        raise UsageError(f"a BCube needs at least one port a switch and one level, not {n} and {levels}")
    scatter = in_turn(chain.from_iterable(_level_by_level(n, levels, first) for first in range(levels)))
    return Pattern("bcube", n**levels, levels * n**levels, in_turn(scatter, mirrored(scatter)))


def _level_by_level(n: int, levels: int, first: int) -> Iterator[Transfer]:
    """The reduce-scatter of one part, from level `first` on and around.

    On each level the n ranks at a switch share out by digit the chunks they still have in common.
    """
    world = n**levels
    for rank in range(world):
        start, size = first * world, world
        for turn in range(levels):
            place = n ** ((first + turn) % levels)
            own = rank // place % n
            size //= n
            for digit in range(n):
                if digit != own:
                    peer = rank + (digit - own) * place
                    yield Transfer(turn, rank, peer, start + digit * size, start + (digit + 1) * size, add=True)
            start += own * size
