"""What `auto` loses against whoever knew best: lossless recipes, `ddp-best` and a settled `auto` in one bake-off.

python benchmarks/regret.py --most 1            # measures a setting that is missing, and says how all of them stand
python benchmarks/regret.py --most 0            # says how they stand

A setting is a model, a link, a number of hosts and how long computing takes against the wire. Models are shrunk until
the longer of the two takes `LONGEST_S`. Each setting has a file of its own; one that is there is not measured again.
Regret: of the iteration times of all recipes, ours in the same run, by how much the least is exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gradientflow.bench.arena import arena
from gradientflow.bench.bakeoff import run_at
from gradientflow.bench.results import Result, Results
from gradientflow.bench.worker import MIN_ROUNDS, Specification
from gradientflow.lab.limits import goodput
from gradientflow.lab.workloads import scaled, timed, workload
from gradientflow.profiles import Profile

MODELS = ("alexnet", "vgg-16", "resnet-50", "densenet-201", "bert-base", "vit-b/16")
#: Bits per second that an unshaped link is taken for, to say how long computing is to take.
RATES = {"100Mbit": 1e8, "1Gbit": 1e9, "unshaped": 4e9}
HOSTS = (4, 2)
#: Computing, as a multiple of the wire bound.
COMPUTES = (1.0, 0.25, 4.0)
LONGEST_S = 0.06
RECIPES = ("lazy", "merge", "flow", "bytescheduler", "dear", "lazy-ring", "merge-ring", "flow-ring")
#: Of each method in a block.
ITERATIONS = 2
PROBE_S = 2.0
AUTO, DDP = "auto", "ddp-best"
RESULTS = Path(__file__).parent / "results" / "regret"


class Setting(NamedTuple):
    model: str
    rate: str
    hosts: int
    compute: float

    @property
    def path(self) -> Path:
        words = self.model.replace("/", "-"), self.rate.lower(), f"{self.hosts}-hosts", f"compute-{self.compute:g}"
        return RESULTS / f"{'-'.join(words)}.json"

    @property
    def profile(self) -> Profile:
        model = workload(self.model, compute_s=1.0)
        on_the_wire = 2 * (self.hosts - 1) / self.hosts * model.nbytes
        bytes_per_s = goodput(RATES[self.rate]) / 8
        scale = min(1.0, min(LONGEST_S, LONGEST_S / self.compute) * bytes_per_s / on_the_wire)
        return timed(scaled(model, scale), self.compute * scale * on_the_wire / bytes_per_s)


def settings() -> Iterator[Setting]:
    """Those first that differ most: each model, link, number of hosts and computing comes up early."""
    every = list(itertools.product(range(len(MODELS)), range(len(RATES)), range(len(HOSTS)), range(len(COMPUTES))))
    every.sort(key=lambda at: ((at[0] + at[1]) % 3 != at[3], (at[0] + at[1]) % 2 != at[2], (at[0] - 2 * at[1]) % 6))
    rates = list(RATES)
    for model, rate, hosts, compute in every:
        yield Setting(MODELS[model], rates[rate], HOSTS[hosts], COMPUTES[compute])


def measure(setting: Setting) -> None:
    rate = None if setting.rate == "unshaped" else RATES[setting.rate]
    spec = Specification(
        workload=setting.model,
        profile=setting.profile,
        methods=(DDP, *RECIPES, AUTO),
        rate=rate,
        interface="",
        num_sharing=1,
        iterations=ITERATIONS,
        max_rounds=MIN_ROUNDS,
        precision=0.01,
        batch=1,
        probe_s=PROBE_S,
        brief=True,
        findings="",
    )
    with arena(setting.hosts, rate, shaped=True) as place:
        found = run_at(place, spec, lambda progress: None)
    setting.path.parent.mkdir(parents=True, exist_ok=True)
    found.write(setting.path)


class Regret(NamedTuple):
    setting: Setting
    best: Result
    auto: Result

    @property
    def share(self) -> float:
        """Above 0: by so much the best recipe was quicker, in paired rounds."""
        return self.auto.ratio_to[self.best.method].median - 1

    def __str__(self) -> str:
        against = self.auto.ratio_to[DDP]
        chose = ", ".join(note for note in self.auto.notes if note.startswith("chose "))
        limit = self.auto.ratio_to[self.best.method]
        return (
            f"{self.setting.path.stem:42} {1e3 * self.auto.iteration_s.median:7.1f} ms  best {self.best.method:13} "
            f"regret {100 * self.share:+5.1f} % ({100 * (limit.low - 1):+.1f} to {100 * (limit.high - 1):+.1f})  "
            f"to {DDP} {against.median:.3f} ({against.low:.3f} to {against.high:.3f})  {chose}"
        )


def regret(setting: Setting) -> Regret | None:
    rows = {row.method: row for row in Results.read(setting.path).results}
    if AUTO not in rows or DDP not in rows:
        return None
    recipes = [row for name, row in rows.items() if name in RECIPES]
    return Regret(setting, min(recipes, key=lambda row: row.iteration_s.median), rows[AUTO])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=len(list(settings())), help="settings to measure now")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other setting after these")
    given = parser.parse_args()
    missing = [setting for setting in settings() if not setting.path.exists()]
    began_s = time.monotonic()
    for setting in missing[: given.most]:
        if time.monotonic() - began_s > given.seconds:
            break
        measure(setting)
        print(f"{setting.path.stem}: measured, {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    found = [each for setting in settings() if setting.path.exists() and (each := regret(setting))]
    for each in found:
        print(each)
    if found:
        shares = [each.share for each in found]
        against = [each.auto.ratio_to[DDP] for each in found]
        print(
            f"{len(found)} settings: regret {100 * statistics.median(shares):.1f} % (median), {100 * max(shares):.1f} "
            f"% (worst); to {DDP} {statistics.median(one.median for one in against):.3f} (median), "
            f"{max(one.median for one in against):.3f} (worst), above it by more than 2 % for certain in "
            f"{sum(one.low > 1.02 for one in against)}"
        )


if __name__ == "__main__":
    main()
