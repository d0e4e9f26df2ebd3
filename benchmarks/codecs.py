"""What codecs compute, against copying the gradients once.

    python benchmarks/codecs.py [--workload resnet-50] [--rounds 15] [--out FILE.json]

One process and one thread, no network: each codec works on a pool of the workload's gradients, in messages of 25 MB,
from the first message to the closing conversation, as a rank does it in a step; sums over ranks are left out. It takes
turns with a copy of as many bytes into memory that is there; ratios are taken between neighbours. One codec after the
other, since memory that waits for its turn is not what a training has. Bar: sparse chunks take at most three times as
long as the copy.

Then the parts that have a bar of their own: to encode and decode as many elements (1 GB of float32 a second), and to
choose a hundredth of 25 million by a sampled threshold, against `torch.topk` (five times as fast).
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from gradientflow.bench.bakeoff import this_machine
from gradientflow.bench.results import Machine, Ratio
from gradientflow.compress import Answer, Codec, Conversation, Feedback, Momentum, Parcel, alone
from gradientflow.compress.quantize import Codes, Int8, Qsgd, Scheme, Sign
from gradientflow.compress.sparsify import about_largest, largest
from gradientflow.documents import Document, Record, check_writable
from gradientflow.errors import UserError
from gradientflow.lab.workloads import load
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe, as_recipe
from gradientflow.rundir import now
from gradientflow.runtime.pool import Pool

RECIPES = (
    "lazy+fp16",
    "lazy+bf16",
    "lazy+csc",
    "lazy+csc+fp16",
    "lazy+csc+bf16",
    "lazy+int8",
    "lazy+efsign",
    "lazy+qsgd:4",
    "lazy+topk:1%:sampled",
    "lazy+dgc:1%",
    "lazy+randomk:1%",
    "lazy+powersgd:2",
)
SCHEMES: dict[str, Scheme] = {"int8": Int8(), "efsign": Sign(), "qsgd:8": Qsgd(8), "qsgd:4": Qsgd(4)}
CHOSEN_FROM = 25_000_000
DENSITIES = (0.01, 0.001)
WITH_MOMENTUM = " with momentum"


class Row(Record):
    codec: str
    seconds: tuple[float, ...]
    to_copy: Ratio


class Rate(Record):
    """Of encoding and decoding: gigabytes of float32 a second."""

    codec: str
    encode: float
    decode: float
    both: float


class Choosing(Record):
    """By a sampled threshold, against torch.topk."""

    density: float
    speedup: Ratio


class Codecs(Document):
    command: str
    started: str
    machine: Machine
    workload: str
    numel: int
    rows: tuple[Row, ...]
    rates: tuple[Rate, ...]
    choosing: tuple[Choosing, ...]


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
            _talk(self._codec.converse(parcel))
        if isinstance(self._codec, Feedback):
            _talk(self._codec.close())
            assert self._codec.settle()


def _talk(conversation: Conversation) -> None:
    answer: Answer = None
    try:
        while True:
            answer = alone(conversation.send(answer))
    except StopIteration:
        return


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


def rates(numel: int, rounds: int) -> Iterator[Rate]:
    values, found = torch.randn(numel), torch.zeros(numel)
    generator = torch.Generator().manual_seed(0)
    for name, scheme in SCHEMES.items():
        codes = Codes(scheme, math.ceil(numel / scheme.block) * scheme.block, values.device)
        write_s, read_s = [], []
        for _ in range(1 + rounds):
            write_s.append(
                _timed(lambda c=codes: c.write(values, None, lambda rows: torch.rand(rows.shape, generator=generator)))
            )
            read_s.append(_timed(lambda c=codes: c.read(found)))
        encode_s, decode_s = median(write_s[1:]), median(read_s[1:])
        gigabytes = values.nbytes / 1e9
        both = gigabytes / (encode_s + decode_s)
        yield Rate(codec=name, encode=gigabytes / encode_s, decode=gigabytes / decode_s, both=both)


def choosing(rounds: int) -> Iterator[Choosing]:
    values = torch.randn(CHOSEN_FROM)
    for density in DENSITIES:
        number, ratios = round(density * CHOSEN_FROM), []
        for _ in range(rounds):
            exact_s = _timed(lambda k=number: largest(values, k))
            ratios.append(exact_s / _timed(lambda k=number: about_largest(values, k)))
        yield Choosing(density=density, speedup=Ratio.of(ratios))


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
            speeds, choices = tuple(rates(numel, given.rounds)), tuple(choosing(given.rounds))
    except UserError as error:
        raise SystemExit(f"codecs.py: {error}") from None
    for row in rows:
        ratio = row.to_copy
        middle_ms = sorted(row.seconds)[len(row.seconds) // 2] * 1e3
        print(
            f"{row.codec:<28} {middle_ms:7.1f} ms   to a copy {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    for rate in speeds:
        print(f"{rate.codec:<28} encodes {rate.encode:.2f}, decodes {rate.decode:.2f}, both {rate.both:.2f} GB/s")
    for choice in choices:
        ratio = choice.speedup
        words = f"{ratio.median:.1f} ({ratio.low:.1f} to {ratio.high:.1f}) times as fast as torch.topk"
        print(f"{choice.density:.1%} of {CHOSEN_FROM} by a sampled threshold: {words}")
    if given.out:
        Codecs(
            command=shlex.join(["python", *sys.argv]),
            started=now(),
            machine=this_machine(),
            workload=given.workload,
            numel=numel,
            rows=tuple(rows),
            rates=speeds,
            choosing=choices,
        ).write(given.out)


if __name__ == "__main__":
    main()
