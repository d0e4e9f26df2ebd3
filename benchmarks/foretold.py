"""All bake-offs in benchmarks/results, foretold from their own probes: how far predictions are off, by kind of method,
and by family and how busy all cores were.

python benchmarks/foretold.py [PREFIX]          # of files' names, such as 2026-11-16
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from gradientflow.bench.predicted import Foretold, foretell, summary
from gradientflow.bench.results import Results
from gradientflow.errors import UserError

GATED = ("flow", "bytescheduler", "dear")
BUSY = (0.0, 0.6, 0.85, 1.01)


def kind(one: Foretold) -> str:
    if one.cpu_bound:
        return "any, processors the limit"
    if "+" in one.method or one.method in ("gradientflow", "ddp-fp16", "ddp-bf16"):
        return "codecs"
    return "exact, with a gate" if one.method.startswith(GATED) else "exact, without a gate"


def family(one: Foretold) -> str:
    if "-ps" in one.method:
        return "servers"
    if "+" in one.method or one.method in ("gradientflow", "ddp-fp16", "ddp-bf16"):
        return "codecs"
    if one.method.startswith(GATED):
        return "with a gate"
    return "ddp" if one.method.startswith("ddp") else "ours, exact"


def main() -> None:
    prefix = sys.argv[1] if len(sys.argv) > 1 else ""
    found: list[Foretold] = []
    for path in sorted((Path(__file__).parent / "results").glob(f"{prefix}*.json")):
        try:
            found += foretell(Results.read(path))
        except UserError:
            continue  # not a bake-off's file
    for name in sorted({kind(one) for one in found}):
        print(f"{name:28} {summary([one for one in found if kind(one) == name])}")
    print(f"{'all':28} {summary(found)}")
    for name in ("ddp", "ours, exact", "with a gate", "codecs", "servers"):
        for least, most in pairwise(BUSY):
            some = [one for one in found if family(one) == name and least <= one.cpu_share < most]
            if some:
                print(f"{name:12} cores busy {least:4.0%} to {min(1.0, most):4.0%} {summary(some)}")


if __name__ == "__main__":
    main()
