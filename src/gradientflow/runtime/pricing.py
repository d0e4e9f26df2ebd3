"""What a message costs on the lanes that are there, measured once, after the first step."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, median
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
#: Where time is short. Up to 256 KiB: links may let smaller ones through at once (the lab's do).
LEAST_REPEATS, LEAST_SIZES = 2, 4
#: Steps in which a codec that is new may do otherwise than it will.
SETTLING = 2


class TooDear(NamedTuple):
    """Timing messages would take so long, as all ranks agree."""

    seconds: float


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
    samples = _Samples(exchange, buffer, sizes, step)
    too_dear = samples.collect(names, within_s)
    if too_dear is not None:
        return too_dear
    dense = imagined([(1024, max(1, buffer.numel() // 1024))], buffer.dtype)
    traffic = codec.traffic(dense, exchange.world)
    touch_s_per_byte = _touch_s_per_byte(buffer)
    return Priced(
        ways={name: samples.table(name) for name in names},
        by_size=by_size,
        count=2 if names[0] in HALVES else 1,
        fraction=traffic.sent_nbytes / max(1, EXACT.traffic(dense, exchange.world).sent_nbytes),
        compute_s_per_byte=traffic.touched_nbytes / buffer.nbytes * touch_s_per_byte,
        touch_s_per_byte=touch_s_per_byte,
    )


class _Samples:
    """What messages took, in rounds of one message of each size by each way: what disturbs a machine for a while meets
    all of them alike. Before each way ranks meet: they have not come from what was before at the same moment."""

    def __init__(self, exchange: Exchange, buffer: torch.Tensor, sizes: tuple[int, ...], step: int) -> None:
        self._exchange, self._buffer, self._sizes, self._step = exchange, buffer, sizes, step
        self._times_s: dict[tuple[str, int], list[float]] = {}
        self._busy_s: dict[str, list[float]] = {}
        self._began_s = time.perf_counter()

    def collect(self, names: Sequence[str], within_s: float) -> TooDear | None:
        """Collective. Rounds until there are enough, or until there is no time for another. None: there are enough."""
        if within_s < math.inf:
            least_s, spent_s = self._fit(names, within_s)
            if spent_s + least_s > within_s:
                return TooDear(spent_s + least_s)
        for number in range(1 + REPEATS_OF_SMALL):
            took = self._round(names, large=number <= REPEATS)
            if number == 0:
                self._times_s, self._busy_s = {}, {}
            if within_s == math.inf:
                continue
            small_s, large_s, spent_s = self._agreed(took)
            next_s = small_s + (large_s if number < REPEATS else 0.0)
            least_s = max(0, LEAST_REPEATS - number) * next_s
            if least_s and spent_s + least_s > within_s:
                return TooDear(spent_s + least_s)
            if spent_s + next_s > within_s:
                break
        return None

    def _fit(self, names: Sequence[str], within_s: float) -> tuple[float, float]:
        """Collective. Leaves out the largest sizes if there is no time for them: on a slow link they take as long as
        their bytes. Returns the least that the others will take, and what that took to find out: each is sent once, by
        one way, others are taken to be alike."""
        times = (1 + LEAST_REPEATS) * len(names)
        _once(self._exchange, names[0], self._buffer[:1], self._step)  # opens connections
        fitting_s, last_s, spent_s = 0.0, 0.0, 0.0
        for number, nbytes in enumerate(self._sizes):
            next_s = last_s * nbytes / self._sizes[max(0, number - 1)]
            if number >= LEAST_SIZES and spent_s + next_s + times * (fitting_s + next_s) > within_s:
                self._sizes = self._sizes[:number]
                break
            took_s = _once(self._exchange, names[0], self._buffer[: nbytes // 4], self._step)
            last_s, _, spent_s = self._agreed((took_s, 0.0))
            fitting_s += last_s
        return times * fitting_s, spent_s

    def table(self, name: str) -> CostTable:
        """host_s is of all threads: what a lane or the backend's own threads take is missing where training computes,
        unless there are cores to spare."""
        points = tuple((nbytes, midmean(times_s)) for (way, nbytes), times_s in self._times_s.items() if way == name)
        return CostTable(points=points, host_s=self._exchange.crowding * mean(self._busy_s[name]))

    def _round(self, names: Sequence[str], large: bool) -> tuple[float, float]:
        """Seconds of small messages, and of large ones."""
        small_s = large_s = 0.0
        for name in names:
            small_s += _once(self._exchange, name, self._buffer[:1], self._step)
            for nbytes in self._sizes:
                if nbytes > SMALL and not (large and name in LEAN):
                    continue
                busy_s = time.process_time()
                seconds = _once(self._exchange, name, self._buffer[: nbytes // 4], self._step)
                if nbytes == self._sizes[0]:
                    self._busy_s.setdefault(name, []).append(time.process_time() - busy_s)
                self._times_s.setdefault((name, nbytes), []).append(seconds)
                if nbytes <= SMALL:
                    small_s += seconds
                else:
                    large_s += seconds
        return small_s, large_s

    def _agreed(self, took_s: tuple[float, float]) -> tuple[float, float, float]:
        """On the slowest rank, and of all so far."""
        mine = " ".join(repr(seconds) for seconds in (*took_s, time.perf_counter() - self._began_s))
        told = self._exchange.control.gather(mine, "compare what messages take")
        small_s, large_s, spent_s = (max(map(float, column)) for column in zip(*map(str.split, told), strict=True))
        return small_s, large_s, spent_s


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


def _once(exchange: Exchange, pattern: str, values: torch.Tensor, step: int) -> float:
    start_s = time.perf_counter()
    exchange.answer(Sum([values]), 0, step, "measure what messages cost", pattern)
    _finish(values)
    return max(time.perf_counter() - start_s, 1e-9)


def _finish(values: torch.Tensor) -> None:
    if values.device.type != "cpu":
        torch.accelerator.synchronize(values.device)
