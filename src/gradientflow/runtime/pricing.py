"""What a message costs on the lanes that are there, measured once, after the first step."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import torch

from gradientflow.compress import EXACT, Codec, Feedback, Sum, imagined
from gradientflow.cost.table import Cost, CostTable, Paying, Priced
from gradientflow.exchange import Exchange, drive
from gradientflow.patterns import HALVES
from gradientflow.plan import NATIVE
from gradientflow.tune.trials import midmean

#: 4 KiB to 4 MiB; at 100 Mbit/s and four ranks all of it takes about two seconds.
SIZES = tuple(2**power for power in range(12, 23, 2))
#: Patterns that send more bytes than they must gain nothing beyond; nor are they measured there.
SMALL = 256 * 1024
LEAN = (NATIVE, "ring", "halving", "levels", *HALVES)
REPEATS = 3
#: Of those up to `SMALL`, which on busy processors take twice as long one time as another: plans follow from them.
REPEATS_OF_SMALL = 9
#: Where time is short.
LEAST_REPEATS = 2
#: Steps in which a codec that is new may do otherwise than it will.
SETTLING = 2


class TooDear(NamedTuple):
    """Timing messages would take so long, and it has taken so long to find that out; as all ranks agree."""

    seconds: float
    spent_s: float


def sizes_up_to(most_nbytes: int) -> tuple[int, ...]:
    """Those that messages of a model of so many bytes lie among.

    >>> sizes_up_to(5000), sizes_up_to(10**9) == SIZES
    ((4096, 16384), True)
    """
    return SIZES[: max(2, 1 + bisect_left(SIZES, most_nbytes))]


def measure_cost(
    exchange: Exchange,
    codec: Codec,
    device: torch.device,
    step: int,
    *,
    by_size: bool = False,
    most_nbytes: int = SIZES[-1],
    within_s: float = math.inf,
) -> Priced | TooDear:
    """Seconds of one message by its size, as a gradient's bytes count. Collective; each rank's own clock.

    by_size: messages may go by any of the exchange's patterns, else all by the same. most_nbytes: of a message.
    within_s: the same on all ranks; where it is short, messages are sent less often."""
    sizes = sizes_up_to(most_nbytes)
    buffer = torch.zeros(sizes[-1] // 4, device=device)
    names = (NATIVE, *exchange.patterns) if by_size else (next(iter(exchange.patterns), NATIVE),)
    repeats = REPEATS_OF_SMALL
    if within_s < math.inf:
        found = _affordable(exchange, names, buffer, sizes, step, within_s)
        if isinstance(found, TooDear):
            return found
        repeats = found
    dense = imagined([(1024, max(1, buffer.numel() // 1024))], buffer.dtype)
    traffic = codec.traffic(dense, exchange.world)
    touch_s_per_byte = _touch_s_per_byte(buffer)
    return Priced(
        ways={name: _table(exchange, name, buffer, sizes, step, repeats) for name in names},
        by_size=by_size,
        count=2 if names[0] in HALVES else 1,
        fraction=traffic.sent_nbytes / max(1, EXACT.traffic(dense, exchange.world).sent_nbytes),
        compute_s_per_byte=traffic.touched_nbytes / buffer.nbytes * touch_s_per_byte,
        touch_s_per_byte=touch_s_per_byte,
    )


def _affordable(
    exchange: Exchange, names: tuple[str, ...], buffer: torch.Tensor, sizes: tuple[int, ...], step: int, within_s: float
) -> int | TooDear:
    """How often each small message may be sent. Collective: each is sent once, by the first way, after a first time
    that opens connections; other ways are taken to be alike."""
    for nbytes in sizes:
        _once(exchange, names[0], buffer[: nbytes // 4], step)
    once_s = [_once(exchange, names[0], buffer[: nbytes // 4], step) for nbytes in sizes]
    small_s = sum(seconds for nbytes, seconds in zip(sizes, once_s, strict=True) if nbytes <= SMALL)
    told = exchange.control.gather(f"{small_s!r} {sum(once_s) - small_s!r}", "compare what messages take")
    small_s, large_s = (max(map(float, column)) for column in zip(*map(str.split, told), strict=True))
    costs_s = {
        repeats: len(names) * ((1 + repeats) * small_s + (1 + min(repeats, REPEATS)) * large_s)
        for repeats in range(LEAST_REPEATS, 1 + REPEATS_OF_SMALL)
    }
    fitting = [repeats for repeats, seconds in costs_s.items() if seconds <= within_s]
    return max(fitting) if fitting else TooDear(costs_s[LEAST_REPEATS], 2 * (small_s + large_s))


def measure_paying(
    exchange: Exchange,
    new_codec: Callable[[], Codec],
    dense: Cost,
    device: torch.device,
    step: int,
    most_nbytes: int = SIZES[-1],
) -> Paying:
    """What messages take through a codec and without, measured as they are talked about: encoding, decoding, wire.
    On all lanes at once, as in training: what a codec computes on one of them is missing on the others. Collective.

    new_codec: as it is in the long run."""
    pattern = next(iter(exchange.patterns), NATIVE) if len(exchange.patterns) < 3 else NATIVE
    tables = []
    with ThreadPoolExecutor(exchange.num_lanes, "gradientflow-pricing") as threads:
        for make in (new_codec, lambda: EXACT):
            points = []
            for nbytes in sizes_up_to(most_nbytes):
                trials = [_Trial(make(), exchange, nbytes, device, lane) for lane in range(exchange.num_lanes)]
                times_s = []
                for _ in range(SETTLING + REPEATS):
                    start_s = time.perf_counter()
                    for done in [threads.submit(trial.run, exchange, step, pattern) for trial in trials]:
                        done.result()
                    times_s.append(max(time.perf_counter() - start_s, 1e-9) / len(trials))
                    for trial in trials:
                        trial.settle(exchange, step)
                points.append((nbytes, median(times_s[SETTLING:])))
            tables.append(CostTable(points=tuple(points)))
    encoded, plain = tables
    return Paying(encoded, plain, dense)


class _Trial:
    """A message of one matrix, and a codec for it, on a lane."""

    def __init__(self, codec: Codec, exchange: Exchange, nbytes: int, device: torch.device, lane: int) -> None:
        self._lane = lane
        rows = 2 ** (nbytes.bit_length() // 2 - 1)
        values = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(exchange.rank)).to(device)
        self._codec, self._values = codec, values
        self._parcel = imagined([(rows, nbytes // 4 // rows)], values.dtype)._replace(values=[values.clone()])
        if isinstance(codec, Feedback):
            codec.lay_out([self._parcel], exchange.rank, exchange.world, "")
            codec.begin({})

    def run(self, exchange: Exchange, step: int, pattern: str) -> None:
        with torch.no_grad():
            drive(exchange, self._codec.converse(self._parcel), self._lane, step, "measure what a codec takes", pattern)
            _finish(self._values)

    def settle(self, exchange: Exchange, step: int) -> None:
        if isinstance(self._codec, Feedback):
            drive(exchange, self._codec.close(), 0, step, "measure what a codec takes")
            self._codec.settle()
            self._codec.begin({})
        self._parcel.values[0].copy_(self._values)


def _touch_s_per_byte(buffer: torch.Tensor) -> float:
    """Of memory that is read or written."""
    times_s = []
    for _ in range(1 + REPEATS):
        start_s = time.perf_counter()
        buffer.clone()
        _finish(buffer)
        times_s.append(time.perf_counter() - start_s)
    return median(times_s[1:]) / (2 * buffer.nbytes)


def _table(
    exchange: Exchange, pattern: str, buffer: torch.Tensor, sizes: tuple[int, ...], step: int, repeats: int
) -> CostTable:
    points = []
    for nbytes in (size for size in sizes if pattern in LEAN or size <= SMALL):
        number = 1 + (repeats if nbytes <= SMALL else min(repeats, REPEATS))
        times_s = [_once(exchange, pattern, buffer[: nbytes // 4], step) for _ in range(number)]
        points.append((nbytes, midmean(times_s[1:])))
    # Of all threads: what a lane or the backend's own threads take is missing where training computes, unless there
    # are cores to spare.
    began_s = time.process_time()
    for _ in range(1 + repeats):
        _once(exchange, pattern, buffer[: sizes[0] // 4], step)
    host_s = exchange.crowding * (time.process_time() - began_s) / (1 + repeats)
    return CostTable(points=tuple(points), host_s=host_s)


def _once(exchange: Exchange, pattern: str, values: torch.Tensor, step: int) -> float:
    start_s = time.perf_counter()
    exchange.answer(Sum([values]), 0, step, "measure what messages cost", pattern)
    _finish(values)
    return max(time.perf_counter() - start_s, 1e-9)


def _finish(values: torch.Tensor) -> None:
    if values.device.type != "cpu":
        torch.accelerator.synchronize(values.device)
