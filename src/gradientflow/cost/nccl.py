"""What NCCL takes an all-reduce to cost, and so which algorithm and protocol it picks. By version: constants drift.

2.4.8 had one threshold between tree and ring. From about 2.8 on there is a table of latency and bandwidth for each
algorithm and protocol, and the cheapest is taken; `MODELS["2.30"]` has the latencies and caps of that version. Left
out are caps by channel, which depend on what NCCL finds in a host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Algorithm = Literal["tree", "ring"]
Protocol = Literal["ll", "ll128", "simple"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree")
PROTOCOLS: tuple[Protocol, ...] = ("ll", "ll128", "simple")
AMPERE = 80
Wire = Literal["nvlink", "pcie"]


def tree_below_nbytes(nodes: int, ranks: int, ring_bytes_s: float = 5e9) -> float:
    """NCCL 2.4.8: smaller messages go by tree, larger ones by ring.

    >>> round(tree_below_nbytes(2, 8)), round(tree_below_nbytes(8, 32))
    (150000, 1290000)
    """
    tree_bytes_s = ring_bytes_s * 2 / 3
    ring_s = 6e-6 * (ranks - 1)
    tree_s = 15e-6 * math.log2(nodes) + 4e-6 * (ranks / nodes - 1)
    return ring_bytes_s * tree_bytes_s / (ring_bytes_s - tree_bytes_s) * (ring_s - tree_s)


class Choice(NamedTuple):
    seconds: float
    algorithm: Algorithm
    protocol: Protocol


@dataclass(frozen=True)
class Model:
    """Latencies in microseconds, by protocol; bandwidths in GB/s."""

    base: dict[Algorithm, dict[Protocol, float]]
    inside: dict[Wire, dict[Algorithm, dict[Protocol, float]]]
    network: dict[Algorithm, dict[Protocol, float]]
    #: Of the LL protocol in all, on one, two, and more nodes.
    ll_cap: tuple[float, float, float]
    #: What is left of a tree's bandwidth, by powers of two from 64 bytes on.
    tree_by_size: dict[Protocol, tuple[float, ...]]
    net_overhead: float = 1.0

    def choose(self, nbytes: float, job: Job) -> Choice:
        """The cheapest."""
        return min(
            Choice(self.seconds(nbytes, job, algorithm, protocol), algorithm, protocol)
            for algorithm in ALGORITHMS
            for protocol in job.protocols
        )

    def seconds(self, nbytes: float, job: Job, algorithm: Algorithm, protocol: Protocol) -> float:
        latency, bandwidth = self._latency(job, algorithm, protocol), self._bandwidth(job, algorithm, protocol)
        if algorithm == "ring" and protocol == "simple" and job.nodes > 1:
            latency *= 1.4 if job.capability >= AMPERE else 1.9
        power = int(nbytes // 64).bit_length() - 1
        if algorithm == "tree" and 0 <= power < len(self.tree_by_size[protocol]):
            bandwidth *= self.tree_by_size[protocol][power]
        return 1e-6 * latency + nbytes / (1e9 * bandwidth)

    def _latency(self, job: Job, algorithm: Algorithm, protocol: Protocol) -> float:
        inside, network = self.inside[job.inside][algorithm][protocol], self.network[algorithm][protocol]
        base = self.base[algorithm][protocol]
        if algorithm == "tree":
            return base + 2 * ((job.ranks_per_node - 1) * inside + math.log2(job.nodes) * network)
        if job.nodes > 1:
            inside = max(inside, self.net_overhead * (3 if protocol == "simple" else 1))
        across = 2 * (job.nodes - 1)
        return base + (2 * (job.ranks - 1) - across) * inside + across * network

    def _bandwidth(self, job: Job, algorithm: Algorithm, protocol: Protocol) -> float:
        bus, cap = job.bus_gbytes_s, self.ll_cap[min(job.nodes, 3) - 1]
        if algorithm == "ring":
            found = {"ll": min(cap, 0.5 * bus), "ll128": 0.92 * bus, "simple": bus}[protocol]
            return found * job.ranks / (2 * (job.ranks - 1))
        shrunk = 7 / 9 if job.nodes == 1 else 120 / 128
        tree = 0.92 * bus
        return 0.5 * {"ll": min(tree / 3.8, cap), "ll128": tree * shrunk, "simple": tree}[protocol]


@dataclass(frozen=True)
class Job:
    """Ranks, and the bandwidth that NCCL found between them."""

    nodes: int
    ranks_per_node: int
    bus_gbytes_s: float
    inside: Wire = "nvlink"
    #: CUDA's compute capability, without its point.
    capability: int = AMPERE

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """LL128 asks for stores of 128 bytes that nothing takes apart: NCCL leaves it out where GPUs have no NVLink."""
        return PROTOCOLS if self.inside == "nvlink" else ("ll", "simple")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def _row(ll: float, ll128: float, simple: float) -> dict[Protocol, float]:
    return {"ll": ll, "ll128": ll128, "simple": simple}


def _tenths(words: str) -> tuple[float, ...]:
    return tuple(int(word) / 10 for word in words.split())


MODELS = {
    "2.30": Model(
        base={"tree": _row(6.8, 14.0, 8.4), "ring": _row(6.6, 14.0, 8.4)},
        inside={
            "nvlink": {"tree": _row(0.6, 1.25, 4.0), "ring": _row(0.6, 1.9, 3.4)},
            "pcie": {"tree": _row(1.0, 1.9, 4.0), "ring": _row(1.0, 2.5, 5.7)},
        },
        network={"tree": _row(5.0, 8.5, 14.0), "ring": _row(2.7, 4.0, 14.0)},
        ll_cap=(87.7, 22.5, 19.0),
        tree_by_size={
            "ll": _tenths("10 10 10 10 9 8 7 7 7 7 6 5 4 4 5 6 7 8 9"),
            "ll128": _tenths("10 10 10 10 10 9 8 8 8 7 6 6 6 6 6 6 8 9 9 9 9"),
            "simple": _tenths("9 9 9 9 9 9 9 8 7 6 6 5 5 5 5 6 7 8 7 7 8 9 9"),
        },
    )
}
