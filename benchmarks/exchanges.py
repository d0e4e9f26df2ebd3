"""What a sum takes by each way there is: the group's own all-reduce, and our patterns over connections of our own.

    python benchmarks/exchanges.py --out FILE.json             four hosts of a lab at 1 Gbit/s
    python benchmarks/exchanges.py --loopback --workers 2      as fast as the machine is

Ways take turns, message by message, so that what disturbs one disturbs all. A time is from a barrier to the last rank's
end. Beside all-reduces, the two halves of one are measured against what the wire needs for them, 2 (n - 1) / n of the
bytes for a whole one; Gloo's own reduce-scatter and all-gather stand beside ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gradientflow.bench.arena import arena, start
from gradientflow.compress import Sum
from gradientflow.exchange import Exchange
from gradientflow.lab import parse_rate
from gradientflow.lab.limits import goodput
from gradientflow.patterns import ALL_REDUCES, HALVES
from gradientflow.plan import NATIVE
from gradientflow.runtime.settings import Settings

SIZES = (4, 4096, 16 * 2**10, 64 * 2**10, 2**18, 2**20, 2**22, 2**24)
LIMIT_S = 600.0
#: Of the wire's bytes of an all-reduce.
SHARES = {"reduce-scatter": 0.5, "all-gather": 0.5, **dict.fromkeys(HALVES, 0.5)}


# - In the workers


def measure(rounds: int) -> dict[str, dict[int, list[float]]]:
    """By way and size, seconds of each round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    patterns = (*ALL_REDUCES, *HALVES)
    exchange = Exchange(group, torch.device("cpu"), 1, 60.0, patterns, Settings.from_environment().address)
    ways = _ways(exchange, patterns)
    found: dict[str, dict[int, list[float]]] = {name: {} for name in ways}
    for nbytes in SIZES:
        values = torch.ones(max(dist.get_world_size(), nbytes // 4))
        repeats = rounds * (4 if nbytes <= 2**18 else 1)
        for number in range(1 + repeats):
            for name, way in ways.items():
                seconds = _timed(way, values)
                if number:
                    found[name].setdefault(nbytes, []).append(seconds)
    exchange.close()
    return found


def _ways(exchange: Exchange, patterns: tuple[str, ...]) -> dict[str, Callable[[torch.Tensor], None]]:
    world = exchange.world
    ours: dict[str, Callable[[torch.Tensor], None]] = {
        name: lambda values, name=name: exchange.answer(Sum([values]), 0, pattern=name)  # type: ignore[misc]
        for name in (NATIVE, *patterns)
    }

    def reduce_scatter(values: torch.Tensor) -> None:
        whole = values[: values.numel() // world * world]
        dist.reduce_scatter_single(whole[: whole.numel() // world].clone(), whole)

    def all_gather(values: torch.Tensor) -> None:
        whole = values[: values.numel() // world * world]
        dist.all_gather_single(whole, whole[: whole.numel() // world].clone())

    return {**ours, "reduce-scatter": reduce_scatter, "all-gather": all_gather}


def _timed(way: Callable[[torch.Tensor], None], values: torch.Tensor) -> float:
    """On the slowest rank, from when all are there."""
    values.fill_(1.0)
    dist.barrier()
    began_s = time.perf_counter()
    way(values)
    seconds = torch.tensor(time.perf_counter() - began_s)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


# - Around them


def show(found: dict[str, dict[str, list[float]]], world: int, rate: float | None) -> None:
    def cell(name: str, size: str) -> str:
        ratio = _ratio(found[name][size], found[NATIVE][size])
        return f"{1e3 * statistics.median(found[name][size]):9.3f} {ratio[0]:5.2f}"

    sizes = list(found[NATIVE])
    print("milliseconds, and median of the ratios to the group's own all-reduce in the same round")
    print(f"{'':16}" + "".join(f"{int(size):>16,}" for size in sizes))
    for name in found:
        print(f"{name:16}" + " ".join(cell(name, size) for size in sizes))
    if rate is None:
        return
    print("\ntimes the wire's need, at the largest size")
    largest = sizes[-1]
    need_s = 2 * (world - 1) / world * int(largest) * 8 / goodput(rate)
    for name, by_size in found.items():
        times = [seconds / (need_s * SHARES.get(name, 1.0)) for seconds in sorted(by_size[largest])]
        print(f"{name:16} {statistics.median(times):.3f} ({times[0]:.3f} to {times[-1]:.3f})")


def _ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="1Gbit", help="of each host's link")
    parser.add_argument("--loopback", action="store_true", help="no lab: this machine's loopback")
    parser.add_argument("--rounds", type=int, default=15, help="times four for sizes up to 256 KiB")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        found = measure(given.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.destroy_process_group()
        return
    lines: list[str] = []
    with arena(given.workers, parse_rate(given.rate), shaped=not given.loopback) as place:
        sys.path.insert(0, str(Path(__file__).parent))
        environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
        start(place, "exchanges", ["--worker", f"--rounds={given.rounds}"], lines.append, LIMIT_S, environment)
        words, rate = place.words, place.rate
    result = json.loads(lines[-1])
    print(f"{given.workers} workers, {words}")
    show(result, given.workers, rate)
    if given.out:
        document = {"workers": given.workers, "place": words, "seconds": result}
        given.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
