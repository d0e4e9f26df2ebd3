"""What the trust page promises, tried often.

    python benchmarks/trust.py kills [--times 50] [--out FILE]
    python benchmarks/trust.py files [--times 10000] [--out FILE]
    python benchmarks/trust.py sameness [--out FILE]

kills: two ranks train and save a checkpoint after every step, and are killed (SIGKILL) at a random moment. Bars: what
is loaded then is whole and of one step, the newest that was saved; the next job goes on from it.

files: files, checkpoints, servers' frames and states of flows are spoilt at random (`tests/hostile.py`) and read. Bar:
each gives a valid object or one line that names the file; nothing is executed; memory stays as it was.

sameness: two ranks replay ResNet-50 over loopback with `attach(verify_every=...)`. Bar: at every 100 steps, less than
0.5 % on average of a step that only computes. Quartiles in milliseconds.

What is random follows from --seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import gradientflow as gf
from gradientflow.lab.replay import Replay
from gradientflow.lab.workloads import workload
from helpers import run_ranks
from hostile import Checkpoint, Frames, attack_file, kinds
from saving import goes_on, kill_while_saving, newest

#: Frames between two new servers.
SESSION = 60
EVERY = 100
#: Whose published speed is replayed.
DEVICE = "2080ti"


def kills(args: argparse.Namespace) -> dict[str, Any]:
    chance, torn, lost = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as room:
        directory = Path(room) / "checkpoints"
        directory.mkdir()
        for number in range(args.times):
            complete, step, half = kill_while_saving(directory, 2, chance)
            torn += half
            lost += step != complete
            print(f"{number + 1} of {args.times}: step {step}{', one half written was left' * half}", flush=True)
        ended = run_ranks(2, goes_on, str(directory))
        assert ended == [newest(directory)] * 2
    return {"killed": args.times, "half_written_left": torn, "committed_steps_lost": lost, "steps_saved": ended[0]}


def files(args: argparse.Namespace) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    wrongs: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as room:
        every, checkpoint, frames = kinds(Path(room)), Checkpoint(Path(room)), Frames()
        before_kb = 0
        for number in range(args.times):
            chance = random.Random(args.seed * args.times + number)
            kind = chance.choice(every)
            where = Path(room) / "keys" if kind.name == "worker.key" else Path(room)
            frames = Frames() if number % SESSION == 0 else frames
            attacks: dict[str, Callable[[], tuple[str, str]]] = {
                kind.name: lambda kind=kind, where=where, chance=chance: attack_file(kind, chance, where),
                "frame": lambda chance=chance, frames=frames: frames.attack(chance),
            }
            if number % 10 == 0:  # 40 ms each
                attacks["checkpoint"] = lambda chance=chance: checkpoint.attack(chance)
            for what, attack in attacks.items():
                outcome, wrong = attack()
                outcomes[f"{what} {outcome}"] += 1
                if wrong:
                    wrongs[wrong] += 1
                    print(f"seed {args.seed * args.times + number}: {wrong}", flush=True)
            if number == args.times // 10:
                before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
    (found,) = run_ranks(1, _states, args.seed, max(1, args.times // 40), timeout_s=900)
    outcomes.update(f"state {each if each in ('read', 'refused') else 'broke'}" for each in found)
    wrongs.update(each for each in found if each not in ("read", "refused"))
    return {"outcomes": dict(sorted(outcomes.items())), "wrong": dict(wrongs), "memory_grown_mb": round(grown_mb, 1)}


def _states(seed: int, times: int) -> list[str]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "unit"))
    from test_hostile_files import states

    return states(seed, times)


def sameness(args: argparse.Namespace) -> dict[str, Any]:
    rows, profile = {}, workload("resnet-50", device=DEVICE)
    compute_ms = 1e3 * (profile.forward_s + profile.backward_s)
    for recipe in ("lazy", "flow", "lazy@local:2"):
        found = run_ranks(2, _verified, recipe, args.steps, timeout_s=280)
        verify_ms = [1e3 * seconds for each in found for seconds in each[0]]
        step_ms = [1e3 * seconds for each in found for seconds in each[1]]
        share = statistics.median(verify_ms) / EVERY / compute_ms
        rows[recipe] = {
            "verify_ms": [round(value, 2) for value in statistics.quantiles(verify_ms, n=4)],
            "step_ms": [round(value, 1) for value in statistics.quantiles(step_ms, n=4)],
            "share_of_compute_every_100": round(share, 6),
        }
        print(recipe, rows[recipe], flush=True)
    return {"workload": "resnet-50", "device": DEVICE, "compute_ms": round(compute_ms, 1), "recipes": rows}


def _verified(recipe: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each comparison and of each step."""
    model = Replay(workload("resnet-50", device=DEVICE), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gf.attach(model, optimizer, recipe, verify_every=2) as flow:
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        spans = flow.trace().spans
    verified = [span.duration_s for span in spans if span.kind == "verify"]
    return verified[1:], [span.duration_s for span in spans if span.kind == "step"][3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "files", "sameness"])
    parser.add_argument("--times", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.times = args.times or {"kills": 50, "files": 10_000, "sameness": 0}[args.what]
    began_s, load = time.monotonic(), os.getloadavg()[0]
    found = {"kills": kills, "files": files, "sameness": sameness}[args.what](args)
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
    result = {
        "version": 1,
        "what": args.what,
        "date": date.today().isoformat(),
        "seed": args.seed,
        "machine": machine,
        "load_at_start": load,
        "seconds": round(time.monotonic() - began_s, 1),
        **found,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
