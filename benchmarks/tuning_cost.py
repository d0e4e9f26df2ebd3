"""What `auto` costs in a thousand steps, as it says itself and as the clock says: short steps and longer ones.

    python benchmarks/tuning_cost.py [--repeats 3] [--workers 2] [--cases alexnet:2 resnet-50:8] [--out FILE.json]

A case is a model, replayed with gradients of half a megabyte in all, and milliseconds of computing. Each is trained
for `STEPS` steps by `lazy` and by `auto` in turn, without a memory of what has won before, over the loopback. What a
job has lost is what its first steps took longer than as many of its later ones (`EARLY`, `SETTLED`): of `auto` what it
takes to find the plan that runs then; of `lazy`, which looks for none, what any job takes to get going. The difference
of the two, over all the seconds of `auto`, is what tuning has cost. Bar: 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import gradientflow as gf
from gradientflow.bench.bakeoff import this_machine
from gradientflow.lab.replay import Replay
from gradientflow.lab.workloads import workload
from gradientflow.processes import die_with_parent
from gradientflow.rundir import now
from gradientflow.tune.trials import SHARE, midmean

STEPS = 1000
#: Within which everything is settled, and from which on steps are taken for what they are.
EARLY, SETTLED = 120, 400
NBYTES = 5e5
CASES = ("alexnet:1", "alexnet:3", "alexnet:10", "resnet-50:3", "resnet-50:10", "resnet-50:30", "densenet-201:30")
METHODS = ("lazy", "auto")


def work(case: str, recipe: str) -> None:
    """One rank; rank 0 prints what it saw."""
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, compute_ms = case.split(":")
    whole = workload(name, compute_s=float(compute_ms) / 1e3)
    model = Replay(workload(name, scale=NBYTES / whole.nbytes, compute_s=float(compute_ms) / 1e3), seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    ends_s = []
    with gf.attach(model, optimizer, recipe) as flow:
        dist.barrier()
        for _ in range(STEPS + 1):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            ends_s.append(time.perf_counter())
        tuned = [span for span in flow.trace().spans if span.kind == "tuned"]
        took_s = [end_s - start_s for start_s, end_s in pairwise(ends_s)]
        if dist.get_rank() == 0:
            found = {
                "total_s": sum(took_s),
                "step_s": midmean(took_s[SETTLED:]),
                "lost_s": sum(took_s[:EARLY]) - EARLY * midmean(took_s[SETTLED:]),
                "said_s": tuned[-1].args["lost_s"] if tuned else 0.0,
                "settled_at": tuned[-1].step if tuned else 0,
                "races": len(tuned),
                "runs": flow.plan.explain().splitlines()[0],
            }
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def run(case: str, recipe: str, workers: int, port: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", case, recipe]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    where |= {"GRADIENTFLOW_CACHE": "off", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, env=os.environ | where | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(workers)
    ]
    told = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{case}, {recipe}: a rank has failed")
    found: dict[str, Any] = json.loads(told[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:MS")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*given.work)
        return
    table = Table("case", "a step, lazy", "a step, auto", "lost, %", "least to most", "said, %", "settled", "runs")
    rows, port = [], 29700
    for case in given.cases:
        found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
        for _ in range(given.repeats):
            for method in METHODS:
                port += 1
                found[method].append(run(case, method, given.workers, port))
        usual_s = statistics.median(one["lost_s"] for one in found["lazy"])
        lost = [100 * (one["lost_s"] - usual_s) / one["total_s"] for one in found["auto"]]
        said = [100 * one["said_s"] / one["total_s"] for one in found["auto"]]
        steps = {method: 1e3 * statistics.median(one["step_s"] for one in found[method]) for method in METHODS}
        rows.append({"case": case, "lost_percent": lost, "said_percent": said, "runs": found})
        table.add_row(
            case,
            *(f"{steps[method]:.2f} ms" for method in METHODS),
            f"{statistics.median(lost):.1f}",
            f"{min(lost):.1f} to {max(lost):.1f}",
            f"{statistics.median(said):.1f}",
            " ".join(str(one["settled_at"]) for one in found["auto"]),
            "; ".join(one["runs"] for one in found["auto"]),
        )
    Console(width=200).print(table)
    worst = max(statistics.median(row["lost_percent"]) for row in rows)
    print(f"at most {worst:.1f} % in the median of a case; aimed at: {100 * SHARE:g} %")
    if given.out:
        facts = {"date": now(), "machine": this_machine().model_dump(), "workers": given.workers, "steps": STEPS}
        facts["cases"] = rows
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
