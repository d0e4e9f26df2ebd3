"""What codecs compute, against copying the gradients once.

    python benchmarks/codecs.py [--workload resnet-50] [--rounds 15] [--out FILE.json]

One process and one thread, no network: each codec works on a pool of the workload's gradients, in messages of 25 MB,
from the first message to the closing conversation, as a rank does it in a step; sums over ranks are left out. It takes
turns with a copy of as many bytes into memory that is there; ratios are taken between neighbours. One codec after the
other, since memory that waits for its turn is not what a training has. Bar: sparse chunks take at most three times as
long as the copy.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gradientflow.bench.bakeoff import this_machine
from gradientflow.bench.results import Machine, Ratio
from gradientflow.compress import Codec, Feedback, Momentum, Parcel
from gradientflow.documents import Document, Record, check_writable
from gradientflow.errors import UserError
from gradientflow.lab.workloads import load
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe, as_recipe
from gradientflow.rundir import now
from gradientflow.runtime.pool import Pool

RECIPES = ("lazy+fp16", "lazy+bf16", "lazy+csc", "lazy+csc+fp16", "lazy+csc+bf16")
WITH_MOMENTUM = " with momentum"


class Row(Record):
    codec: str
    seconds: tuple[float, ...]
    to_copy: Ratio


class Codecs(Document):
    command: str
    started: str
    machine: Machine
    workload: str
    numel: int
    rows: tuple[Row, ...]


class Rank:
    """A pool and a codec on it."""

    def __init__(self, recipe: Recipe, profile: Profile, momentum: float) -> None:
        plan = recipe.plan(profile, num_lanes=1)
        tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in profile.tensors}
        pool = Pool(plan, tensors)
        self._codec: Codec = recipe.settled().codec()
        apart = isinstance(self._codec, Feedback)
        self._parcels: list[Parcel] = [pool.parcel(n, message, apart) for n, message in enumerate(plan.messages)]
        self._momenta = dict.fromkeys(tensors, Momentum(momentum)) if momentum else {}
        self._gradients = torch.randn(sum(values.numel() for parcel in self._parcels for values in parcel.values))
        if isinstance(self._codec, Feedback):
            self._codec.lay_out(self._parcels, 0, 1, "")
        self.fill()

    def fill(self) -> None:
        offset = 0
        for values in (values for parcel in self._parcels for values in parcel.values):
            values.copy_(self._gradients[offset : offset + values.numel()])
            offset += values.numel()

    def step(self) -> None:
        if isinstance(self._codec, Feedback):
            self._codec.begin(self._momenta)
        for parcel in self._parcels:
            for _ in self._codec.converse(parcel):
                pass
        if isinstance(self._codec, Feedback):
            for _ in self._codec.close():
                pass
            assert self._codec.settle()


def copier(profile: Profile) -> Callable[[], None]:
    source, target = torch.randn(profile.numel), torch.zeros(profile.numel)

    def copy() -> None:
        target.copy_(source)

    return copy


def measure(workload: str, rounds: int) -> tuple[int, list[Row]]:
    profile = load(workload)
    copy, rows = copier(profile), []
    for recipe in RECIPES:
        for momentum in (0.0, 0.9) if "csc" in recipe else (0.0,):
            rank = Rank(as_recipe(recipe), profile, momentum)
            seconds, ratios = [], []
            for number in range(2 + rounds):  # the first step sends everything, and memory is new
                rank.fill()
                copy_s, step_s = _timed(copy), _timed(rank.step)
                if number >= 2:
                    seconds.append(step_s)
                    ratios.append(step_s / copy_s)
            name = recipe.removeprefix("lazy") + (WITH_MOMENTUM if momentum else "")
            rows.append(Row(codec=name, seconds=tuple(seconds), to_copy=Ratio.of(ratios)))
            del rank
    return profile.numel, rows


def _timed(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="resnet-50")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    given = parser.parse_args()
    try:
        if given.out:
            check_writable(given.out)
        torch.set_num_threads(1)
        with torch.no_grad():
            numel, rows = measure(given.workload, given.rounds)
    except UserError as error:
        raise SystemExit(f"codecs.py: {error}") from None
    for row in rows:
        ratio = row.to_copy
        middle_ms = sorted(row.seconds)[len(row.seconds) // 2] * 1e3
        print(
            f"{row.codec:<28} {middle_ms:7.1f} ms   to a copy {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    if given.out:
        Codecs(
            command=shlex.join(["python", *sys.argv]),
            started=now(),
            machine=this_machine(),
            workload=given.workload,
            numel=numel,
            rows=tuple(rows),
        ).write(given.out)


if __name__ == "__main__":
    main()
