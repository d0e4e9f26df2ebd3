"""Predict, then measure: bake-offs of the lab whose predictions are written down before a method has run.

    python benchmarks/blind.py DIRECTORY [CASE ...]

Of each case three files are written, in this order: `CASE.alone.json`, a probe and an iteration without exchange;
`CASE.predicted.json`, what the simulator makes of those, method by method; `CASE.json`, the bake-off. Files that are
there are left as they are, so that it goes on where it stopped; the table at the end is over all cases that are
complete. A case takes one to two minutes of an otherwise idle machine; all of them about a quarter of an hour.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from gradientflow.bench.arena import arena
from gradientflow.bench.bakeoff import run_at
from gradientflow.bench.methods import patterns_of
from gradientflow.bench.predicted import Foreteller, Foretold, against, summary
from gradientflow.bench.results import Results
from gradientflow.bench.worker import MIN_ROUNDS, Specification
from gradientflow.documents import Document
from gradientflow.lab.workloads import load, usual_batch

GBIT, MBIT = 1e9, 1e6


class Case(NamedTuple):
    workload: str
    scale: float
    compute_s: float
    rate: float
    methods: tuple[str, ...]
    num_workers: int = 4


CODED = ("lazy:2MB+bf16", "lazy:2MB-ring+int8:always", "lazy:2MB-ring+topk:1%:sampled:always")
COMMON = ("ddp", "lazy:2MB", "merge", "flow", "lazy:2MB+bf16")

#: Bytes take about as long as computing.
CASES = {
    "resnet-exact": Case("resnet-50", 0.15, 0.2, GBIT, ("ddp", "bsp", "wfbp", "lazy:2MB", "merge", "lazy:2MB-ring")),
    "resnet-gated": Case("resnet-50", 0.15, 0.2, GBIT, ("ddp", "flow", "dear", "bytescheduler")),
    "resnet-coded": Case("resnet-50", 0.15, 0.2, GBIT, (*CODED, "lazy:2MB-ring+powersgd:2:always", "gradientflow")),
    "resnet-slow": Case("resnet-50", 0.03, 0.4, 100 * MBIT, ("ddp", "lazy:1MB", "flow", *CODED)),
    "resnet-two": Case("resnet-50", 0.15, 0.2, GBIT, ("ddp", "wfbp", "lazy:2MB", "flow", *CODED), num_workers=2),
    "resnet-servers": Case("resnet-50", 0.15, 0.2, GBIT, ("ddp", "flow-ps", "bytescheduler-ps")),
    "vgg": Case("vgg-16", 0.03, 0.2, GBIT, COMMON),
    "bert": Case("bert-base", 0.04, 0.25, GBIT, COMMON),
    "densenet": Case("densenet-201", 0.25, 0.3, GBIT, COMMON),
    "gpt": Case("gpt-2", 0.03, 0.2, GBIT, COMMON),
}
#: The probe that predictions are made from takes longer than a bake-off's own.
PROBE_S, SHORT_PROBE_S = 20.0, 1.0


class Predicted(Document):
    """By method, seconds of an iteration."""

    seconds: dict[str, float]


def measure(case: Case, methods: tuple[str, ...], probe_s: float) -> Results:
    spec = Specification(
        workload=case.workload,
        profile=load(case.workload, compute_s=case.compute_s, scale=case.scale),
        methods=methods,
        rate=None,
        interface="",
        num_sharing=1,
        iterations=2,
        max_rounds=MIN_ROUNDS,
        precision=0.02,
        batch=usual_batch(case.workload),
        probe_s=probe_s,
        patterns=patterns_of(case.methods),
        findings="",
    )
    with arena(case.num_workers, case.rate) as place:
        return run_at(place, spec, lambda progress: None)


def run(name: str, directory: Path) -> None:
    case = CASES[name]
    alone, predicted, measured = (directory / f"{name}{end}.json" for end in (".alone", ".predicted", ""))
    if not alone.exists():
        measure(case, ("compute",), PROBE_S).write(alone)
    if not predicted.exists():
        foreteller = Foreteller(Results.read(alone), case.scale)
        seconds = {method: foreteller.seconds(method) for method in case.methods}
        Predicted(seconds={method: found for method, found in seconds.items() if found is not None}).write(predicted)
    if not measured.exists():
        measure(case, case.methods, SHORT_PROBE_S).write(measured)


def compared(name: str, directory: Path) -> list[Foretold]:
    predicted, measured = directory / f"{name}.predicted.json", directory / f"{name}.json"
    if not (predicted.exists() and measured.exists()):
        return []
    seconds = Predicted.read(predicted).seconds
    results = Results.read(measured).results
    return [against(result, seconds[result.method]) for result in results if result.method in seconds]


def main() -> None:
    directory, *names = sys.argv[1:]
    Path(directory).mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        run(name, Path(directory))
    everything = []
    for name in CASES:
        for one in (found := compared(name, Path(directory))):
            note = "  processors the limit" if one.cpu_bound else ""
            print(f"{name:15} {one.method:40} {1e3 * one.measured_s:7.1f} ms {100 * one.error:+6.1f} %{note}")
        everything += found
    if not everything:
        raise SystemExit("no case is complete")
    within = [one for one in everything if not one.cpu_bound]
    print(f"processors not the limit: {summary(within)}" if within else "processors were the limit of all methods")
    print(f"all:                      {summary(everything)}")


if __name__ == "__main__":
    main()
