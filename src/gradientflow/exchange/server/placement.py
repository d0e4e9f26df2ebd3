"""Which server adds up which part of a model.

A server that shares its host with a worker has the host's link only for what the worker leaves of it. So shares follow
from one question: in which time T can every host send and receive what it must? With n workers and a model of M bytes,
a host whose link carries b bytes/s and whose server has a share x of the model takes in

    n x M              if it only serves: everybody's pushes
    M + (n - 2) x M    if it works too: (n - 1) x M of pushes and (1 - x) M of sums; its own stay inside

and T b is at least that. The smallest T at which shares fill the model is the best that can be had. Of equal links it
is BytePS's (Jiang et al. 2020), 2 n (n - 1) / (n^2 + k n - 2 k) M / b with k spare hosts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

#: Beyond this a partition has no advantage (BytePS cuts at 4,096,000).
PARTITION_NBYTES = 4 * 10**6
#: Each server is to have so many: while it adds one up, others are on their way in and out.
PARTITIONS_OF_A_SERVER = 24
#: Smaller ones cost more than they carry.
LEAST_NBYTES = 64 * 1024


def shares_of(num_workers: int, worker_rates: Sequence[float], spare_rates: Sequence[float]) -> list[float]:
    """Of the servers beside workers, then of those on spare hosts; they add up to 1. Rates are in any unit.

    worker_rates: of the hosts of workers that serve too; () if none of them does.

    >>> shares_of(4, [1, 1, 1, 1], [])
    [0.25, 0.25, 0.25, 0.25]
    >>> [round(18 * share, 3) for share in shares_of(4, [1, 1, 1, 1], [1])]
    [3.0, 3.0, 3.0, 3.0, 6.0]
    """
    rates = [*worker_rates, *spare_rates]
    if num_workers <= 2 and not spare_rates:
        return [rate / sum(rates) for rate in rates]  # a host takes the same in whatever its share is

    def fitting(time: float) -> list[float]:
        beside = [max(0.0, time * rate - 1) / max(1, num_workers - 2) for rate in worker_rates]
        return [*(min(1.0, x) for x in beside), *(min(1.0, time * rate / num_workers) for rate in spare_rates)]

    low, high = 0.0, 4.0 * num_workers / min(rates)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(fitting(middle)) < 1 else (low, middle)
    found = fitting(high)
    return [share / sum(found) for share in found]


def partition_nbytes(total_nbytes: int, num_servers: int) -> int:
    """Of a model: small enough that every server has several."""
    fair = total_nbytes // (PARTITIONS_OF_A_SERVER * num_servers)
    return max(LEAST_NBYTES, min(PARTITION_NBYTES, fair))


def cut(numel: int, itemsize: int, nbytes: int) -> list[tuple[int, int]]:
    """Elements from where to where, in pieces of at most about `nbytes` and about one size; at least one.

    >>> cut(10, 4, 16)
    [(0, 3), (3, 6), (6, 10)]
    """
    pieces = max(1, -(-numel * itemsize // nbytes))
    edges = [numel * number // pieces for number in range(pieces + 1)]
    return list(pairwise(edges))


def spread(pieces: Sequence[Sequence[int]], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """For every message, given the bytes of its pieces, a server for each piece: neighbours on different ones, all of
    them loaded as their shares say."""
    loads = [(0.0, slot) for slot, share in enumerate(shares) if share > 0]
    found = []
    for message in pieces:
        slots = []
        for nbytes in message:
            load, slot = heapq.heappop(loads)
            heapq.heappush(loads, (load + max(1, nbytes) / shares[slot], slot))
            slots.append(slot)
        found.append(tuple(slots))
    return found
