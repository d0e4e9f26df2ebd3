"""Does `auto` answer when the network changes in mid-run? Four hosts of a lab whose links become five times slower, and
quick again.

    python benchmarks/drift.py [--workload resnet-50] [--scale 0.06] [--out FILE.json]

One job trains under `auto`: at 1 Gbit/s until it has settled and `STEADY` steps more, then at 200 Mbit/s, then at
1 Gbit/s again. Nobody tells it. Then every recipe of `RECIPES` runs by itself at both rates, in the same processes.
Bars: another choice within 50 steps of a change, and steps from there on within 5 % of the best recipe at that rate.
The slowest rank's seconds count, in the median; computing takes as long as the wire at 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import gradientflow as gf
from gradientflow.bench.bakeoff import this_machine
from gradientflow.lab import Lab
from gradientflow.lab.limits import goodput
from gradientflow.lab.replay import Replay
from gradientflow.lab.workloads import workload
from gradientflow.processes import die_with_parent
from gradientflow.rundir import now

HOSTS = 4
FAST, SLOW = 1e9, 2e8
#: Steps before a change, from when the last answer is over; `auto` does not race again before 100, then 200.
STEADY = (130, 230)
#: Within which a change should be answered; and after which it is given up.
BAR, LAST = 50, 150
RECIPES = (
    "lazy",
    "lazy:4MB",
    "merge",
    "flow",
    "bytescheduler",
    "lazy-ring",
    "lazy:4MB-ring",
    "flow-ring",
    "merge-ring",
)
#: Of one recipe by itself: to settle, and to be timed.
SETTLING, TIMED = 12, 20
PORT = 29500


def work(name: str, scale: float) -> None:
    """One rank. Rank 0 says what it does, a line of JSON each, and is told to go on at the end of a part."""
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    profile = workload(name, scale=scale, compute_s=1.0)
    wire_s = 2 * (HOSTS - 1) / HOSTS * profile.nbytes / (goodput(FAST) / 8)
    profile = workload(name, scale=scale, compute_s=wire_s)
    model = Replay(profile, seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def train(flow: gf.Flow) -> float:
        began_s = time.perf_counter()
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        return time.perf_counter() - began_s

    with gf.attach(model, optimizer, "auto") as flow:
        while _told("auto", flow.step, _seconds(train(flow)), _choices(flow)):
            pass
    for _ in (FAST, SLOW):
        for recipe in RECIPES:
            with gf.attach(model, optimizer, recipe) as flow:
                took_s = [_seconds(train(flow)) for _ in range(SETTLING + TIMED)]
            _told(recipe, 0, median(took_s[SETTLING:]), 0)
    dist.destroy_process_group()


def _seconds(own_s: float) -> float:
    """The slowest rank's."""
    slowest = torch.tensor([own_s])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _choices(flow: gf.Flow) -> int:
    """So far."""
    return sum(span.kind == "tuned" for span in flow.trace().spans)


def _told(part: str, step: int, seconds: float, choices: int) -> bool:
    """Whether to go on, as rank 0 hears it."""
    word = torch.zeros(1)
    if dist.get_rank() == 0:
        print(json.dumps({"part": part, "step": step, "seconds": seconds, "choices": choices}), flush=True)
        word[0] = float(sys.stdin.readline())
    dist.broadcast(word, 0)
    return bool(word)


class Watcher:
    """Changes the lab's rate while a job runs, and writes down how it answers."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._rates = [FAST, SLOW, FAST]
        self._since = 0  # the step of the last change, or 0
        self._answered: int | None = None
        self._choices = 0
        self._took_s: list[float] = []
        self.phases: list[dict[str, Any]] = []
        self.alone: dict[str, dict[str, float]] = {}

    def heard(self, part: str, step: int, seconds: float, choices: int) -> bool:
        if part != "auto":
            rates = self.alone.setdefault(part, {})
            rates["slow" if "fast" in rates else "fast"] = seconds
            if part == RECIPES[-1] and "slow" not in rates:
                self._lab.reshape(SLOW)
            return True
        if choices > self._choices and self._answered is None:
            self._answered, self._took_s = step - self._since, []
        self._choices = choices
        self._took_s.append(seconds)
        number = len(self.phases)
        waited = step - self._since
        is_over = waited - self._answered >= STEADY[min(number, 1)] if self._answered is not None else waited >= LAST
        if not is_over:
            return True
        steady_s = median(self._took_s[20:] if self._answered is not None else self._took_s[-20:])
        self.phases.append({"rate": self._rates[number], "answered_after": self._answered, "step_s": steady_s})
        print(self.phases[-1], flush=True)
        if len(self.phases) == len(self._rates):
            return False
        self._lab.reshape(self._rates[len(self.phases)])
        self._since, self._answered, self._took_s = step, None, []
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", default="resnet-50")
    parser.add_argument("--scale", type=float, default=0.06)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.workload, arguments.scale)
        return
    started = now()
    with Lab(HOSTS, FAST) as lab:
        job = {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": str(PORT), "WORLD_SIZE": str(HOSTS)}
        job |= {"GRADIENTFLOW_CACHE": "off", "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, __file__, "--workload", arguments.workload, "--scale", str(arguments.scale), "--rank"]
        watcher = Watcher(lab)
        ranks = [
            lab.popen(
                rank,
                [*argv, str(rank)],
                env={**os.environ, **job, "RANK": str(rank)},
                text=True,
                **({"stdin": -1, "stdout": -1} if rank == 0 else {}),
            )
            for rank in range(HOSTS)
        ]
        for line in ranks[0].stdout:
            ranks[0].stdin.write(f"{int(watcher.heard(**json.loads(line)))}\n")
            ranks[0].stdin.flush()
        failed = [rank for rank, process in enumerate(ranks) if process.wait(60)]
    if failed:
        sys.exit(f"ranks {failed} failed")
    for phase in watcher.phases:
        speed = "slow" if phase["rate"] == SLOW else "fast"
        best = min(watcher.alone, key=lambda recipe: watcher.alone[recipe][speed])
        phase |= {"best": best, "to_best": phase["step_s"] / watcher.alone[best][speed]}
        words = "not answered" if phase["answered_after"] is None else f"answered after {phase['answered_after']} steps"
        print(
            f"{phase['rate'] / 1e6:4.0f} Mbit/s: {words}, {1e3 * phase['step_s']:.1f} ms a step, "
            f"{phase['to_best']:.3f} of {best}"
        )
    if arguments.out:
        command = shlex.join(["python", "benchmarks/drift.py", *sys.argv[1:]])
        found = {"machine": this_machine().model_dump(), "command": command, "started": started}
        found |= {"phases": watcher.phases, "alone": watcher.alone}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
