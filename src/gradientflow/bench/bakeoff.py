"""A bake-off from specification to results, wherever its workers are."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError

from gradientflow import __version__
from gradientflow.bench.arena import Arena, start
from gradientflow.bench.results import Conditions, Machine, Results
from gradientflow.bench.usage import available_memory
from gradientflow.bench.worker import TIMEOUT_S, Findings, Progress, Specification, bake
from gradientflow.errors import TrainingError, UsageError
from gradientflow.exchange.reach import way_to_others
from gradientflow.profiles import Profile
from gradientflow.rundir import now
from gradientflow.runtime.settings import CACHE_ENV

#: A worker's interpreter and libraries.
WORKER_NBYTES = 300 * 2**20


def check_memory(profile: Profile, num_methods: int, num_workers: int) -> None:
    """Weights, gradients, momentum and noise of every worker, and buffers of every method, all on this machine."""
    needed, free = num_workers * (WORKER_NBYTES + (4 + num_methods) * profile.nbytes), available_memory()
    if needed > free:
        raise UsageError(
            f"{num_workers} workers with {num_methods} methods take {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are"
            " free: name fewer methods or hosts, or give --scale"
        )


def run_at(place: Arena, spec: Specification, follow: Callable[[Progress], None]) -> Results:
    """On workers that are started there."""
    check_memory(spec.profile, len(spec.methods), place.num_workers)
    began = now()
    spec = spec.model_copy(update={"rate": place.rate, "interface": place.interface, "num_sharing": place.num_sharing})

    def follow_line(text: str) -> None:
        try:
            follow(Progress.model_validate_json(text))
        except ValidationError:
            pass  # somebody else's words

    # Every wait of a worker has its own deadline; this one is for what nobody thought of.
    iteration_s = 10 * (spec.profile.forward_s + spec.profile.backward_s) + 60
    most_s = spec.max_rounds * (len(spec.methods) + 1) * spec.iterations * iteration_s
    with tempfile.TemporaryDirectory() as directory:
        spec = spec.model_copy(update={"findings": str(Path(directory) / "findings.json")})
        path = Path(directory) / "specification.json"
        spec.write(path)
        start(place, "gradientflow.bench.worker", [str(path)], follow_line, most_s)
        return _results(Findings.read(spec.findings), spec.conditions, began, place.words, place.notes)


def run_here(spec: Specification, follow: Callable[[Progress], None]) -> Results | None:
    """In the world that the environment describes, of which this process is a rank; progress and results on rank 0."""
    began = now()
    os.environ[CACHE_ENV] = "off"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_memory(spec.profile, len(spec.methods), here)
    # Of several workers on a host, a ring sends one's share over the host's port, the others' stays inside.
    update = {"interface": way_to_others(os.environ).interface, "num_sharing": 1}
    rank, num_hosts = dist.get_rank(), max(1, dist.get_world_size() // here)
    if num_hosts == 1:
        update["num_sharing"] = here
    findings = bake(spec.model_copy(update=update), follow)
    dist.barrier()
    dist.destroy_process_group()
    words = f"cluster, {num_hosts} hosts with {here} workers each" if num_hosts > 1 else "one machine, not shaped"
    return _results(findings, spec.conditions, began, words, ()) if rank == 0 else None


def _results(found: Findings, conditions: Conditions, began: str, place: str, notes: tuple[str, ...]) -> Results:
    if not found.results:
        raise TrainingError("; ".join(found.notes))
    return Results(
        machine=this_machine(),
        command=shlex.join(["gradientflow", *sys.argv[1:]]),
        started=began,
        place=place,
        conditions=conditions,
        network=found.network,
        notes=(*notes, *found.notes),
        results=found.results,
        timelines=found.timelines,
    )


def this_machine() -> Machine:
    return Machine(
        platform=platform.platform(),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=torch.__version__,
        gradientflow=__version__,
    )
