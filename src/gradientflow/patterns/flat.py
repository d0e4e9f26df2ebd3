"""Patterns among ranks that are all alike.

With p ranks and S bytes, through the busiest port in one direction:

    ring                 2 (p - 1) rounds    2 (p - 1) / p S    fewest bytes
    halving_doubling     2 lg p rounds       2 (p - 1) / p S    fewest bytes, few rounds
    recursive_doubling   lg p rounds         lg p S             fewest rounds on single ports
    tree                 2 lg p rounds       lg p S             for any p, lg p rounded up
    star                 2 rounds            (p - 1) S          what one parameter server does

All but `star` are single-ported: in a round a rank sends to one rank at most and receives from one at most. Where
p is no power of two, the two that pair ranks have the largest power of two in p for p, and 2 rounds and S bytes
more for the fold.

Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradientflow.errors import UsageError
from gradientflow.patterns.pattern import Pattern, Transfer, in_turn, mirrored

# - Ring


def ring_reduce_scatter(world: int) -> Pattern:
    """Each chunk goes once around and grows; rank r ends with the sum of chunk r."""
    return Pattern("ring-reduce-scatter", _checked(world), world, tuple(_around(world, first=-1, add=True)))


def ring_all_gather(world: int) -> Pattern:
    """Each chunk goes once around; rank r begins with chunk r."""
    return Pattern("ring-all-gather", _checked(world), world, tuple(_around(world, first=0, add=False)))


def ring_all_reduce(world: int) -> Pattern:
    """Reduce-scatter, then all-gather.

    >>> ring_all_reduce(4).num_rounds, ring_all_reduce(4).bytes_sent(0, numel=1000, itemsize=4)
    (6, 6000)
    """
    halves = in_turn(ring_reduce_scatter(world).transfers, ring_all_gather(world).transfers)
    return Pattern("ring", world, world, halves)


def _around(world: int, first: int, add: bool) -> Iterator[Transfer]:
    """Each rank passes chunks on to the next, beginning with the one `first` places after its own."""
    for turn in range(world - 1):
        for rank in range(world):
            chunk = (rank + first - turn) % world
            yield Transfer(turn, rank, (rank + 1) % world, chunk, chunk + 1, add)


# - To one rank and back


def tree_reduce(world: int) -> Pattern:
    """A binomial tree: rank 0 ends with the sum."""
    return Pattern("tree-reduce", _checked(world), 1, tuple(_up_the_tree(world)))


def tree(world: int) -> Pattern:
    """Reduced to rank 0, then broadcast from there.

    >>> [(edge.source, edge.destination) for edge in tree(4).transfers]
    [(1, 0), (3, 2), (2, 0), (0, 2), (2, 3), (0, 1)]
    """
    reduction = tree_reduce(world).transfers
    return Pattern("tree", world, 1, in_turn(reduction, mirrored(reduction)))


def star(world: int, root: int = 0) -> Pattern:
    """All send to the root at once; it adds to its own in the order of ranks and sends the sum to each.

    >>> star(8).num_rounds, star(8).bytes_received(0, numel=1000, itemsize=4)
    (2, 28000)
    """
    if root not in range(_checked(world)):
        raise UsageError(f"the root of a star of {world} must be one of its ranks, not {root}")
    reduction = tuple(Transfer(0, rank, root, 0, 1, True) for rank in range(world) if rank != root)
    return Pattern("star", world, 1, in_turn(reduction, mirrored(reduction)))


def _up_the_tree(world: int) -> Iterator[Transfer]:
    for turn in range((world - 1).bit_length()):
        distance = 1 << turn
        for rank in range(distance, world, 2 * distance):
            yield Transfer(turn, rank, rank - distance, 0, 1, True)


# - In pairs


def recursive_doubling(world: int) -> Pattern:
    """Ranks exchange all they have, with partners at distances 1, 2, 4 ...

    >>> recursive_doubling(8).num_rounds, recursive_doubling(9).num_rounds
    (3, 5)
    """
    size = _power_of_two_in(world)
    rounds = range(size.bit_length() - 1)
    exchanges = (Transfer(turn, rank, rank ^ 1 << turn, 0, 1, True) for turn in rounds for rank in range(size))
    return _folded(Pattern("doubling", size, 1, tuple(exchanges)), world)


def halving_doubling(world: int) -> Pattern:
    """Rabenseifner's all-reduce: recursive halving, then recursive doubling.

    >>> halving_doubling(8).num_rounds, halving_doubling(8).bytes_sent(0, numel=1000, itemsize=4)
    (6, 7000)
    """
    size = _power_of_two_in(world)
    # Near partners first. The first exchange moves half of all bytes and the last one 1/p of them, while near
    # ranks share a host or a rack and far ones meet on links that many pairs share. The price is that rank r ends
    # the first half with the chunk whose number has r's bits reversed, which an all-reduce does not mind.
    halving = in_turn(_halving(size, [1 << bit for bit in range(size.bit_length() - 1)]))
    return _folded(Pattern("halving", size, size, in_turn(halving, mirrored(halving))), world)


def halving_reduce_scatter(world: int) -> Pattern:
    """Recursive halving among a power of two; rank r ends with the sum of chunk r.

    Far partners first: only so are the chunks that one rank sends to another next to each other.
    """
    if world != _power_of_two_in(world):
        raise UsageError(f"recursive halving needs a power of two, not {world} ranks: take the ring")
    far_first = [1 << bit for bit in reversed(range(world.bit_length() - 1))]
    return Pattern("halving-reduce-scatter", world, world, in_turn(_halving(world, far_first)))


def doubling_all_gather(world: int) -> Pattern:
    """Recursive doubling among a power of two; rank r begins with chunk r."""
    return Pattern("doubling-all-gather", world, world, mirrored(halving_reduce_scatter(world).transfers))


def _halving(world: int, distances: Iterable[int]) -> Iterator[Transfer]:
    """Partners share out the chunks they still have in common: the lower half goes to the lower rank."""
    for rank in range(world):
        start, stop = 0, world
        for turn, distance in enumerate(distances):
            middle = (start + stop) // 2
            lower, upper = (start, middle), (middle, stop)
            sent, (start, stop) = (lower, upper) if rank & distance else (upper, lower)
            yield Transfer(turn, rank, rank ^ distance, *sent, add=True)


def _folded(inner: Pattern, world: int) -> Pattern:
    """An all-reduce among more ranks than it is made for, fewer than twice as many.

    Each rank too many hands its message to a neighbour, which stands for both, and gets the result from it.
    """
    num_folded = world - inner.world
    stand_ins = range(0, 2 * num_folded, 2)
    fold = tuple(Transfer(0, rank + 1, rank, 0, inner.num_chunks, True) for rank in stand_ins)
    remaining = [*stand_ins, *range(2 * num_folded, world)]
    return Pattern(inner.name, world, inner.num_chunks, in_turn(fold, inner.placed(remaining), mirrored(fold)))


def _power_of_two_in(world: int) -> int:
    return 1 << _checked(world).bit_length() - 1


def _checked(world: int) -> int:
    if world < 1:
        raise UsageError(f"a pattern needs at least one rank, not {world}")
    return world
