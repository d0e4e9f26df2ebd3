"""Rows for the tuner plugin that comes with NCCL as an example, and for the one that is built into RCCL.

    collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff

The first row that matches wins; -1 matches anything, and as a number of channels leaves it to the library. What is
quickest at which size comes from runs of nccl-tests, each with one algorithm and protocol (NCCL_ALGO, NCCL_PROTO), or
from NCCL's own model on a cluster's links.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from gradientflow.cost.nccl import ALGORITHMS, MODELS, Job
from gradientflow.cost.table import CostTable
from gradientflow.documents import read_text
from gradientflow.errors import DocumentError, UsageError
from gradientflow.probe.readers import read_nccl_tests
from gradientflow.sim.cluster import Cluster

#: As the plugins spell them.
ALGORITHM_WORDS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOL_WORDS = ("ll", "ll128", "simple")
COLLECTIVES = {"all_reduce": "allreduce", "reduce_scatter": "reducescatter", "all_gather": "allgather"}
#: Rows reach from 0 to here.
LARGEST_NBYTES = 2**40
#: Looked at so often between a size and its double; between two looks the winner changes once at most.
LOOKS = 8
#: Of devices in clusters' files; others are Ampere or later.
CAPABILITIES = {"2080ti": 75, "v100": 70}
#: The example plugin begins with one channel and leaves it so for -1, where RCCL's begins with none (NCCL 2.28).
OWN_CHANNELS = "channels -1: RCCL chooses by itself, but NVIDIA's example plugin takes one; give --channels for it"
HEADER = "# collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"


@dataclass(frozen=True)
class Row:
    collective: str
    min_nbytes: int
    max_nbytes: int
    algorithm: str
    protocol: str
    channels: int = -1
    num_nodes: int = -1
    num_ranks: int = -1

    def __str__(self) -> str:
        """No spaces: a plugin may not take them. Any number of operations in a group, registered buffers or not."""
        numbers = f"{self.channels},{self.num_nodes},{self.num_ranks},-1,-1"
        return f"{self.collective},{self.min_nbytes},{self.max_nbytes},{self.algorithm},{self.protocol},{numbers}"


#: Algorithm, protocol and channels.
Way = tuple[str, str, int]


@dataclass(frozen=True)
class Tested:
    """One run of nccl-tests."""

    collective: str
    way: Way
    num_nodes: int
    num_ranks: int
    table: CostTable


def rows_of_model(cluster: Cluster, world: int, channels: int = -1) -> list[Row]:
    """All-reduces, by NCCL's own model on the cluster's links."""
    job, model = job_of(cluster, world), MODELS["2.30"]
    ways: dict[Way, Callable[[float], float]] = {
        (algorithm, protocol, channels): partial(model.seconds, job=job, algorithm=algorithm, protocol=protocol)
        for algorithm in ALGORITHMS
        for protocol in job.protocols
    }
    return _rows(Row("allreduce", 0, LARGEST_NBYTES, "", "", num_nodes=job.nodes, num_ranks=job.ranks), ways)


def rows_of_tests(tests: Iterable[Tested], channels: int = -1) -> list[Row]:
    """Of every collective among as many ranks, what was quickest."""
    together: dict[tuple[str, int, int], dict[Way, Callable[[float], float]]] = {}
    for test in tests:
        algorithm, protocol, own = test.way
        ways = together.setdefault((test.collective, test.num_nodes, test.num_ranks), {})
        if (way := (algorithm, protocol, own if channels < 0 else channels)) in ways:
            raise UsageError(f"two of the files are {test.collective} by {algorithm} and {protocol}: leave one out")
        ways[way] = test.table.seconds
    rows: list[Row] = []
    for (collective, nodes, ranks), ways in together.items():
        rows += _rows(Row(collective, 0, LARGEST_NBYTES, "", "", num_nodes=nodes, num_ranks=ranks), ways)
    return rows


def job_of(cluster: Cluster, world: int) -> Job:
    if world < 2:
        raise UsageError(f"{world} worker sends nothing: give 2 or more")
    nodes = cluster.check_world(world)
    if not cluster.wires:
        raise UsageError(f"nothing is known of links in {cluster.name}: probe them, or give a cluster's file")
    nvlink = cluster.inside is not None and cluster.inside.protocol == "nvlink"
    return Job(
        nodes=nodes,
        ranks_per_node=world // nodes,
        bus_gbytes_s=cluster.slowest(world).bytes_per_s / 1e9,
        inside="nvlink" if nvlink else "pcie",
        capability=CAPABILITIES.get(cluster.device.removesuffix("-amp"), 80),
    )


def read_tested(path: str | os.PathLike[str]) -> Tested:
    """A file that nccl-tests wrote with -J: times by size, and in its environment what it was held to."""
    found = read_nccl_tests(path)
    if found.operation not in COLLECTIVES:
        raise DocumentError(f"{path}: {found.operation} is no collective that a tuner plugin chooses for")
    if len(found.samples) < 2:
        raise DocumentError(f"{path}: expected times of two sizes or more")
    document = json.loads(read_text(path))
    said = dict(word.split("=", 1) for word in document.get("env", []) if "=" in word)
    way = (_word(path, said, "NCCL_ALGO", ALGORITHM_WORDS), _word(path, said, "NCCL_PROTO", PROTOCOL_WORDS))
    bounds = {said.get(name, "") for name in ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")}
    channels = bounds.pop() if len(bounds) == 1 else ""
    hosts = {device.get("host") or device.get("hostname") for device in document["config"]["devices"]}
    return Tested(
        collective=COLLECTIVES[found.operation],
        way=(*way, int(channels) if channels.isdecimal() else -1),
        num_nodes=-1 if None in hosts else len(hosts),
        num_ranks=len(found.ranks),
        table=CostTable(points=found.points),
    )


def text(rows: Sequence[Row], remarks: Sequence[str]) -> str:
    """The file; remarks are for people."""
    return "\n".join([*(f"# {remark}" for remark in remarks), HEADER, *map(str, rows)]) + "\n"


def _word(path: str | os.PathLike[str], said: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    """NVLSTree is nvls_tree, Ring is ring."""
    letters = {word.replace("_", ""): word for word in words}
    given = said.get(name, "").lower().replace("_", "")
    if given not in letters:
        raise DocumentError(
            f"{path}: run it with {name} set to one of {', '.join(words)}, found {said.get(name, 'nothing')!r}"
        )
    return letters[given]


def _rows(row: Row, ways: Mapping[Way, Callable[[float], float]]) -> list[Row]:
    """`row` cut where another way becomes the quickest."""

    def quickest(nbytes: int) -> Way:
        return min(ways, key=lambda way: ways[way](nbytes))

    looks = [0, *sorted({round(2 ** (step / LOOKS)) for step in range(LOOKS * LARGEST_NBYTES.bit_length())})]
    found: list[Row] = []
    begun, way = 0, quickest(0)
    for below, above in pairwise(looks):
        if (other := quickest(above)) == way:
            continue
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if quickest(middle) == way else (below, middle)
        found.append(_cut(row, begun, above - 1, way))
        begun, way = above, other
    return [*found, _cut(row, begun, row.max_nbytes, way)]


def _cut(row: Row, first: int, last: int, way: Way) -> Row:
    algorithm, protocol, channels = way
    return replace(row, min_nbytes=first, max_nbytes=last, algorithm=algorithm, protocol=protocol, channels=channels)
