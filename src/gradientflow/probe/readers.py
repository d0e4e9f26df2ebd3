"""What nccl-tests and the OSU benchmarks measured, as the tables that our own probe makes.

nccl-tests: the JSON file of `all_reduce_perf -J out.json` and its sisters, version 1 and 2. In-place times, which
is how gradients are summed. OSU: the text that `osu_allreduce`, `osu_latency`, `osu_bw` print, also with `-f`.
Sizes of 0 are left out; a size that was run several times is one sample.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from gradientflow.documents import MAX_DOCUMENT_NBYTES, describe, parse_data, read_text
from gradientflow.errors import DocumentError
from gradientflow.network import Measurement
from gradientflow.probe.measure import sample_of, summarize

#: Program of nccl-tests -> operation.
_NCCL_OPERATIONS = {
    "all_reduce_perf": "all_reduce",
    "reduce_scatter_perf": "reduce_scatter",
    "all_gather_perf": "all_gather",
    "sendrecv_perf": "p2p",
}
#: A file that speaks of more is not of a machine there is.
MOST_RANKS = 10**6
#: Title of an OSU benchmark, without "OSU MPI" and "Test" -> operation.
_OSU_OPERATIONS = {
    "Allreduce Latency": "all_reduce",
    "Reduce_scatter Latency": "reduce_scatter",
    "Allgather Latency": "all_gather",
    "Latency": "p2p",
    "Bandwidth": "p2p",
}


def read_nccl_tests(path: str | os.PathLike[str]) -> Measurement:
    """A JSON file written by nccl-tests with `-J`."""
    document = parse_data(read_text(path, MAX_DOCUMENT_NBYTES), str(path), "JSON")
    try:
        program = PurePath(document["args"][0]).name
        config = document["config"]
        # A process lists one device, whatever the number of its threads and GPUs.
        world = len(config["devices"]) * config["nthreads"] * config["ngpus"]
        if not isinstance(world, int) or not 0 < world <= MOST_RANKS:
            raise ValueError(f"{world!r:.40} ranks")
        times_s: dict[int, list[float]] = {}
        for row in document["results"]:
            times_s.setdefault(int(row["size"]), []).extend(_nccl_seconds(row))
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError) as error:
        raise DocumentError(f"{path}: expected what nccl-tests writes with -J; {error!r:.300}") from None
    operation = _lookup(_NCCL_OPERATIONS, program, path)
    return _measurement(path, operation, 2 if operation == "p2p" else world, times_s)


def read_osu(path: str | os.PathLike[str], world: int = 2) -> Measurement:
    """What an OSU benchmark printed, run by `world` processes: its output does not say how many."""
    text = read_text(path, MAX_DOCUMENT_NBYTES)
    titles = re.findall(r"OSU \S+ (.+?) Test", text)
    if len(titles) != 1:
        raise DocumentError(f"{path}: expected the output of one OSU benchmark, found {len(titles)}")
    operation = _lookup(_OSU_OPERATIONS, titles[0], path)
    times_s: dict[int, list[float]] = {}
    for line in text.splitlines():
        if row := re.match(r"\s*(\d+)\s+(\d+\.?\d*)(?:\s|$)", line):
            nbytes, figure = int(row.group(1)), float(row.group(2))
            seconds = _at_rate(nbytes, figure * 1e6) if titles[0] == "Bandwidth" else figure * 1e-6
            times_s.setdefault(nbytes, []).append(seconds)
    return _measurement(path, operation, world, times_s)


def _nccl_seconds(row: Mapping[str, Any]) -> list[float]:
    """Each repetition, where nccl-tests was asked to list them; else their mean."""
    place = "in_place" if row.get("in_place") else "out_of_place"
    each = row.get(f"{place}_per_iter", {}).get("times_us")
    figures = row[place]
    microseconds = each or [figures["time"] if "time" in figures else figures["cpu_time"]]
    return [float(figure) * 1e-6 for figure in microseconds]


def _at_rate(nbytes: int, bytes_per_s: float) -> float:
    return nbytes / bytes_per_s if bytes_per_s else math.inf


def _lookup(operations: Mapping[str, str], name: str, path: str | os.PathLike[str]) -> str:
    if name not in operations:
        raise DocumentError(f"{path}: {name!r} is none of {', '.join(operations)}")
    return operations[name]


def _measurement(
    path: str | os.PathLike[str], operation: str, world: int, times_s: Mapping[int, list[float]]
) -> Measurement:
    try:
        samples = [sample_of(nbytes, times_s[nbytes]) for nbytes in sorted(times_s) if nbytes]
    except ValidationError as error:
        raise DocumentError(f"{path}: {describe(error)}") from None
    if not samples or world < 2:
        missing = "rows with a size and a time" if not samples else "two processes or more"
        raise DocumentError(f"{path}: expected {missing}")
    return summarize(operation, range(world), samples)
