"""What a pattern takes on a topology, from the load of its links.

In a round all transfers begin together. A link's load is the time that all bytes sent over it occupy it; a transfer
takes the latency of its route and as long as the busiest link there; a rank then adds what it was sent to add. A round
ends when its last rank is done, and then the next begins. The sum over rounds is the textbook's formula where there is
one, and holds for shared links as well.

Real ranks do not wait for all others between rounds. That matters where a round is long for some and short for
others, such as a ring of which some links are slow to begin: this price counts the slow ones in every round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cache

from gradientflow.cost.topology import Topology
from gradientflow.errors import UsageError
from gradientflow.patterns import Pattern, Transfer


def price(pattern: Pattern, nbytes: float, topology: Topology, *, gamma_s_per_byte: float = 0.0) -> float:
    """Seconds for a message of `nbytes` in chunks of equal size; gamma is what adding a byte takes.

    >>> from gradientflow.cost import Switch
    >>> from gradientflow.patterns import ring_all_reduce
    >>> price(ring_all_reduce(4), 8, Switch(world=4, alpha_s=1.0, beta_s_per_byte=0.5))
    12.0
    """
    if pattern.world != topology.world:
        raise UsageError(f"a pattern among {pattern.world} ranks has no price on a topology of {topology.world}")
    chunk_nbytes = nbytes / pattern.num_chunks
    path = _paths(topology)
    return sum(_round_s(transfers, chunk_nbytes, path, gamma_s_per_byte) for transfers in pattern.rounds())


#: The latency of a route, and its links with their seconds per byte.
Path = tuple[float, tuple[tuple[Hashable, float], ...]]


def _paths(topology: Topology) -> Callable[[int, int], Path]:
    @cache
    def path(source: int, destination: int) -> Path:
        links = [(name, topology.link(name)) for name in topology.route(source, destination)]
        return sum(line.alpha_s for _, line in links), tuple((name, line.beta_s_per_byte) for name, line in links)

    return path


def _round_s(
    transfers: Sequence[Transfer], chunk_nbytes: float, path: Callable[[int, int], Path], gamma_s_per_byte: float
) -> float:
    load_s: defaultdict[Hashable, float] = defaultdict(float)
    adding_s: defaultdict[int, float] = defaultdict(float)
    for transfer in transfers:
        nbytes = (transfer.stop - transfer.start) * chunk_nbytes
        for link, beta_s_per_byte in path(transfer.source, transfer.destination)[1]:
            load_s[link] += nbytes * beta_s_per_byte
        if transfer.add:
            adding_s[transfer.destination] += nbytes * gamma_s_per_byte

    def done_s(transfer: Transfer) -> float:
        latency_s, links = path(transfer.source, transfer.destination)
        return latency_s + max(load_s[link] for link, _ in links) + adding_s[transfer.destination]

    return max(done_s(transfer) for transfer in transfers)
