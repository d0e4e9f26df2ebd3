"""What the runtime itself costs, against stock DDP on loopback.

    python benchmarks/overhead.py [--quick] [--tensors 16 161 604] [--alone] [--out FILE]

Four questions, each answered at 16, 161 and 604 tensors (AlexNet's, ResNet-50's and DenseNet-201's
counts):

1. CPU time: microseconds per step and per tensor that the runtime adds in a world of one, where nothing is
   sent; DDP's own beside it.
2. Iteration time: `attach` with `lazy`, with `lazy` whose updates are put off into the next forward pass
   ("lazy-gated") and with `flow`, our DistributedDataParallel and stock DDP, both with and without
   `gradient_as_bucket_view`, in alternating blocks of one run, 2 and 4 workers; the ratio of each pair of
   neighbouring blocks, its median and 95 % interval. Bar: those to DDP lie below 1.05.
3. What it takes beyond DDP, from the same blocks: CPU and wall seconds of a step less DDP's, as a share of an
   iteration of 100 ms. Below zero: less than DDP.
4. Peak memory of a worker, each method in processes of its own, against DDP with
   `gradient_as_bucket_view=True`. Bar: at most 2 % more.

`--alone` asks only what a world of one can answer: the first, and its part of the third.

A ratio needs a quiet machine; the script prints the load it found at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf

TENSORS = (16, 161, 604)
WORLDS = (2, 4)
METHODS = ("ddp", "ddp-view", "lazy", "lazy-gated", "flow", "drop-in", "drop-in-view")
#: Whose seconds are shown as what they are beyond DDP's, and as a share of which iteration.
BEYOND_DDP = ("lazy", "lazy-gated", "flow", "drop-in")
ITERATION_S = 0.1
RATIOS = (
    ("lazy", "ddp"),
    ("lazy-gated", "ddp"),
    ("flow", "ddp"),
    ("lazy", "ddp-view"),
    ("drop-in", "ddp"),
    ("drop-in-view", "ddp-view"),
    ("ddp-view", "ddp"),
)


class Stack(nn.Module):
    """`num_tensors` tensors: residual blocks of LayerNorm and Linear (4 each), and what is left over."""

    def __init__(self, num_tensors: int, width: int) -> None:
        super().__init__()
        blocks, rest = divmod(num_tensors, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.rest = nn.ParameterList(torch.zeros(width) for _ in range(rest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        for bias in self.rest:
            x = x + bias
        return x.square().mean()


#: Width of the layers: 2.1, 10.6 and 10.1 MB of gradients, a step of some tens of milliseconds.
WIDTHS = {16: 360, 161: 256, 604: 128}
#: Steps a block: about half a second, or a ratio of two blocks says more about the machine than about them.
BLOCK_STEPS = {16: 50, 161: 12, 604: 8}
MEMORY_WIDTH = {16: 1250, 161: 400, 604: 205}  # about 25 MB each


class Training:
    """One method on a model of its own."""

    def __init__(self, method: str, num_tensors: int, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = Stack(num_tensors, width)
        assert len(list(self.model.parameters())) == num_tensors
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batch = torch.randn(batch, width)
        self.flow: gf.Flow | None = None
        self.trained: nn.Module = self.model
        if method == "ddp":
            self.trained = DistributedDataParallel(self.model)
        elif method == "ddp-view":
            self.trained = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        elif method in ("drop-in", "drop-in-view"):
            view = method == "drop-in-view"
            self.trained = gf.DistributedDataParallel(self.model, gradient_as_bucket_view=view)
            self.flow = self.trained.flow
        elif method == "lazy-gated":
            self.flow = gf.attach(self.model, self.optimizer, "lazy", gate=True)
        elif method != "bare":
            self.flow = gf.attach(self.model, self.optimizer, method)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.trained(self.batch).backward()
        self.optimizer.step()

    def finish(self) -> None:
        """What was put off."""
        if self.flow is not None:
            self.flow.synchronize()

    def close(self) -> None:
        if self.flow is not None:
            self.flow.close()


# - Workers


#: Seconds of a step by method, a value a block.
Seconds = dict[str, list[float]]


def in_turn(methods: Sequence[str], num_tensors: int, width: int, batch: int, steps: int, blocks: int) -> list[Seconds]:
    """On the wall clock, and of this process's CPU time, in alternating blocks."""
    trainings = {method: Training(method, num_tensors, width, batch) for method in methods}
    wall_s: Seconds = {method: [] for method in methods}
    cpu_s: Seconds = {method: [] for method in methods}
    for block in range(blocks + 2):
        for method, training in _shuffled(trainings, block):
            dist.barrier()
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                training.step()
            training.finish()
            cpu_ended_s = time.process_time()
            dist.barrier()
            if block >= 2:
                wall_s[method].append((time.perf_counter() - began_s) / steps)
                cpu_s[method].append((cpu_ended_s - cpu_began_s) / steps)
    for training in trainings.values():
        training.close()
    return [wall_s, cpu_s]


def calls_alone(num_tensors: int, blocks: int) -> list[Seconds]:
    """Tiny tensors, so that calls are all that counts."""
    return in_turn(("bare", *METHODS), num_tensors, 4, 1, 10, blocks)


def training_steps(num_tensors: int, blocks: int) -> list[Seconds]:
    return in_turn(METHODS, num_tensors, WIDTHS[num_tensors], 32, BLOCK_STEPS[num_tensors], blocks)


def peak_memory(method: str, num_tensors: int) -> int:
    """Peak resident bytes of this process after a few steps."""
    training = Training(method, num_tensors, MEMORY_WIDTH[num_tensors], 32)
    for _ in range(8):
        training.step()
    training.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _shuffled(trainings: dict[str, Training], block: int) -> list[tuple[str, Training]]:
    order = list(trainings.items())
    random.Random(block).shuffle(order)  # the same on all ranks
    return order


# - Running them


def run(world: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` on `world` fresh processes; rank 0's result."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_worker, (world, directory, function, args), nprocs=world)
        return json.loads((Path(directory) / "result").read_text())


def _worker(rank: int, world: int, directory: str, function: Callable[..., Any], args: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
    result = function(*args)
    if rank == 0:
        (Path(directory) / "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def middle(values: list[float]) -> dict[str, float]:
    """Their median and its 95 % interval by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(4000))
    return {"median": statistics.median(values), "low": medians[100], "high": medians[3899], "pairs": len(values)}


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    return middle([a / b for a, b in zip(ours, theirs, strict=True)])


def share(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Of an iteration: by how much ours are more."""
    return middle([(a - b) / ITERATION_S for a, b in zip(ours, theirs, strict=True)])


def beyond_ddp(num_tensors: int, workers: int, wall_s: Seconds, cpu_s: Seconds) -> list[dict[str, Any]]:
    return [
        {
            "tensors": num_tensors,
            "workers": workers,
            "method": method,
            "cpu": share(cpu_s[method], cpu_s["ddp"]),
            "wall": share(wall_s[method], wall_s["ddp"]),
        }
        for method in BEYOND_DDP
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks: to see that it runs")
    parser.add_argument("--tensors", type=int, choices=TENSORS, nargs="+", default=TENSORS)
    parser.add_argument("--alone", action="store_true", help="only what a world of one can answer")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    blocks = 3 if options.quick else 30
    console = Console()
    figures: dict[str, Any] = {
        "version": 1,
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__},
        "load_at_start": os.getloadavg()[0],
        "cpu": [],
        "iteration": [],
        "beyond_ddp_in_100_ms": [],
        "memory": [],
    }
    with Progress(console=Console(stderr=True)) as progress:
        num_parts = 1 if options.alone else 1 + len(WORLDS) + 2
        task = progress.add_task("measuring", total=len(options.tensors) * num_parts)
        for num_tensors in options.tensors:
            wall_s, cpu_s = run(1, calls_alone, num_tensors, blocks)
            figures["beyond_ddp_in_100_ms"] += beyond_ddp(num_tensors, 1, wall_s, cpu_s)
            seconds = {method: statistics.median(values) for method, values in cpu_s.items()}
            row = {"tensors": num_tensors}
            for method in ("ddp", *BEYOND_DDP):
                row[f"{method}_us_per_step"] = (seconds[method] - seconds["bare"]) * 1e6
                row[f"{method}_us_per_tensor"] = row[f"{method}_us_per_step"] / num_tensors
            figures["cpu"].append(row)
            progress.advance(task)
            if options.alone:
                continue
            for world in WORLDS:
                wall_s, cpu_s = run(world, training_steps, num_tensors, blocks)
                row = {"tensors": num_tensors, "workers": world}
                row |= {f"{method}_ms": statistics.median(values) * 1e3 for method, values in wall_s.items()}
                row |= {f"{one}/{other}": ratio(wall_s[one], wall_s[other]) for one, other in RATIOS}
                figures["iteration"].append(row)
                figures["beyond_ddp_in_100_ms"] += beyond_ddp(num_tensors, world, wall_s, cpu_s)
                progress.advance(task)
            peaks = {m: min(run(2, peak_memory, m, num_tensors) for _ in range(3)) for m in ("ddp-view", "lazy")}
            progress.advance(task, 2)
            figures["memory"].append({"tensors": num_tensors, **peaks, "ratio": peaks["lazy"] / peaks["ddp-view"]})
    show(figures, console)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def show(figures: dict[str, Any], console: Console) -> None:
    console.print(f"load at start {figures['load_at_start']:.2f}, {figures['machine']}")
    methods = ("ddp", *BEYOND_DDP)
    table = Table("tensors", *(f"{method} us/step" for method in methods), title="CPU time added, world of one")
    for row in figures["cpu"]:
        cells = [f"{row[f'{method}_us_per_step']:.0f}" for method in methods]
        table.add_row(str(row["tensors"]), *cells)
    console.print(table)
    table = Table("tensors", "workers", "ratio", "median", "95 %", title="Iteration")
    for row in figures["iteration"]:
        for one, other in RATIOS:
            found = row[f"{one}/{other}"]
            interval = f"{found['low']:.3f} .. {found['high']:.3f}"
            table.add_row(
                str(row["tensors"]), str(row["workers"]), f"{one}/{other}", f"{found['median']:.3f}", interval
            )
    console.print(table)
    title = f"Beyond DDP, as a share of {1e3 * ITERATION_S:.0f} ms"
    table = Table("tensors", "workers", "method", "CPU", "95 %", "wall", "95 %", title=title)
    for row in figures["beyond_ddp_in_100_ms"]:
        cells = []
        for found in (row["cpu"], row["wall"]):
            cells += [f"{found['median']:.1%}", f"{found['low']:.1%} .. {found['high']:.1%}"]
        table.add_row(str(row["tensors"]), str(row["workers"]), row["method"], *cells)
    console.print(table)
    table = Table("tensors", "DDP as view MB", "lazy MB", "ratio", title="Peak memory of a worker")
    for row in figures["memory"]:
        table.add_row(
            str(row["tensors"]), f"{row['ddp-view'] / 1e6:.1f}", f"{row['lazy'] / 1e6:.1f}", f"{row['ratio']:.4f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
