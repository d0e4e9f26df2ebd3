"""Models so small that a message's own cost counts: ways of exchange against stock DDP, on one machine.

    python benchmarks/small_models.py [--quick] [--workers 2 4] [--transports sm tcp] [--out FILE]

MLPs of 0.4 and 8.4 million parameters train with SGD and momentum on batches of 32, one thread a worker. In a job that
mpirun starts, stock DDP over Gloo, the same with `gradient_as_bucket_view=True`, and `lazy` over MPI, over our own
patterns and over Gloo take turns in blocks of steps, in an order drawn anew each round; each has a model of its own.
The figure is the ratio of a method's block to DDP's of the same round: its median and 95 % interval.

Gloo and our patterns use TCP over the loopback. MPI has a choice: shared memory ("sm"), which it takes by itself on one
machine, or TCP, as between machines. It is made for a whole job, so each is a job of its own.

A ratio needs a quiet machine; the script prints the load it found at the start. It needs `gradientflow[mpi]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import ratio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf

#: Widths of the layers, by millions of parameters.
WIDTHS = {"0.4": (256, 512, 512, 10), "8.4": (1024, 2048, 2048, 1024, 10)}
BATCH = 32
#: Steps a block: a quarter of a second or more.
BLOCK_STEPS = {"0.4": 30, "8.4": 6}
WARM_UP_ROUNDS = 2
OURS = ("lazy-mpi", "lazy-ring", "lazy-halving", "lazy")
METHODS = ("ddp", "ddp-view", *OURS)
#: mpirun's options.
TRANSPORTS = {"sm": (), "tcp": ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")}
#: Of one job.
LIMIT_S = 1200.0


class Training:
    """One method on a model of its own."""

    def __init__(self, method: str, widths: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.model: nn.Module = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        torch.manual_seed(dist.get_rank())
        self.images, self.labels = torch.randn(BATCH, widths[0]), torch.randint(widths[-1], (BATCH,))
        self.flow: gf.Flow | None = None
        if method in ("ddp", "ddp-view"):
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=method == "ddp-view")
        else:
            self.flow = gf.attach(self.model, self.optimizer, method)

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def close(self) -> None:
        if self.flow is not None:
            self.flow.close()


def job(name: str, rounds: int, result: Path) -> None:
    """On a process of mpirun: seconds of a step by method, a value a round."""
    torch.set_num_threads(1)
    gf.init_from_mpi()
    trainings = {method: Training(method, WIDTHS[name]) for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for number in range(rounds + WARM_UP_ROUNDS):
        order = list(METHODS)
        random.Random(number).shuffle(order)  # the same on all ranks
        for method in order:
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(BLOCK_STEPS[name]):
                trainings[method].step()
            dist.barrier()
            if number >= WARM_UP_ROUNDS:
                seconds[method].append((time.perf_counter() - began_s) / BLOCK_STEPS[name])
    for training in trainings.values():
        training.close()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure(name: str, workers: int, transport: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result"
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if mpirun is None:
            sys.exit("there is no mpirun: pip install 'gradientflow[mpi]'")
        launch = [mpirun, "-n", str(workers), "--oversubscribe", "--bind-to", "none", *TRANSPORTS[transport]]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run(
            [*launch, sys.executable, __file__, "--job", name, str(rounds), str(result)],
            env={**os.environ, **root, "GLOO_SOCKET_IFNAME": "lo"},
            check=True,
            timeout=LIMIT_S,
        )
        seconds = json.loads(result.read_text())
    parameters = sum(i * o + o for i, o in pairwise(WIDTHS[name]))
    row: dict[str, Any] = {"parameters": parameters, "workers": workers, "mpi_over": transport}
    row["ms"] = {method: 1e3 * statistics.median(values) for method, values in seconds.items()}
    row["to_ddp"] = {method: ratio(seconds[method], seconds["ddp"]) for method in METHODS if method != "ddp"}
    row["best"] = min(OURS, key=lambda method: row["to_ddp"][method]["median"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds: to see that it runs")
    parser.add_argument("--models", choices=list(WIDTHS), nargs="+", default=list(WIDTHS))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--transports", choices=list(TRANSPORTS), nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        name, rounds, result = options.job
        job(name, int(rounds), Path(result))
        return
    figures: dict[str, Any] = {
        "version": 1,
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__},
        "load_at_start": os.getloadavg()[0],
        "rows": [],
    }
    cases = [(m, w, t) for m in options.models for w in options.workers for t in options.transports]
    with Progress(console=Console(stderr=True)) as progress:
        for case in progress.track(cases, description="measuring"):
            figures["rows"].append(measure(*case, rounds=3 if options.quick else 12))
    show(figures)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def show(figures: dict[str, Any]) -> None:
    console = Console()
    console.print(f"load at start {figures['load_at_start']:.2f}, {figures['machine']}")
    table = Table("parameters", "workers", "MPI over", "method", "ms", "to DDP", "95 %")
    for row in figures["rows"]:
        place = (f"{row['parameters'] / 1e6:.1f} M", str(row["workers"]), row["mpi_over"])
        table.add_row(*place, "ddp", f"{row['ms']['ddp']:.2f}", "1", "")
        for method, found in row["to_ddp"].items():
            interval = f"{found['low']:.3f} .. {found['high']:.3f}"
            table.add_row(*place, method, f"{row['ms'][method]:.2f}", f"{found['median']:.3f}", interval)
    console.print(table)


if __name__ == "__main__":
    main()
