"""What a message costs on the lanes that are there, measured once, after the first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from gradientflow.compress import EXACT, Codec, Feedback, Sum, imagined
from gradientflow.cost.table import Cost, CostTable, Paying, Priced
from gradientflow.exchange import Exchange, drive
from gradientflow.patterns import HALVES
from gradientflow.plan import NATIVE

#: 4 KiB to 4 MiB; at 100 Mbit/s and four ranks all of it takes about two seconds.
SIZES = tuple(2**power for power in range(12, 23, 2))
#: Patterns that send more bytes than they must gain nothing beyond; nor are they measured there.
SMALL = 256 * 1024
LEAN = (NATIVE, "ring", "halving", "levels", *HALVES)
REPEATS = 3
#: Of those up to `SMALL`, which on busy processors take twice as long one time as another: plans follow from them.
REPEATS_OF_SMALL = 9
#: Steps in which a codec that is new may do otherwise than it will.
SETTLING = 2
#: Of the smallest size, which tells what a message takes of processors, whatever its bytes.
REPEATS_OF_SMALLEST = 10


def measure_cost(exchange: Exchange, codec: Codec, device: torch.device, step: int, by_size: bool = False) -> Priced:
    """Seconds of one message by its size, as a gradient's bytes count. Collective; each rank's own clock.

    by_size: messages may go by any of the exchange's patterns, else all by the same."""
    buffer = torch.zeros(SIZES[-1] // 4, device=device)
    dense = imagined([(1024, buffer.numel() // 1024)], buffer.dtype)
    traffic = codec.traffic(dense, exchange.world)
    touch_s_per_byte = _touch_s_per_byte(buffer)
    names = (NATIVE, *exchange.patterns) if by_size else (next(iter(exchange.patterns), NATIVE),)
    return Priced(
        ways={name: _table(exchange, name, buffer, step) for name in names},
        by_size=by_size,
        count=2 if names[0] in HALVES else 1,
        fraction=traffic.sent_nbytes / max(1, EXACT.traffic(dense, exchange.world).sent_nbytes),
        compute_s_per_byte=traffic.touched_nbytes / buffer.nbytes * touch_s_per_byte,
        touch_s_per_byte=touch_s_per_byte,
    )


def measure_paying(
    exchange: Exchange, new_codec: Callable[[], Codec], dense: Cost, device: torch.device, step: int
) -> Paying:
    """What messages take through a codec and without, measured as they are talked about: encoding, decoding, wire.
    On all lanes at once, as in training: what a codec computes on one of them is missing on the others. Collective.

    new_codec: as it is in the long run."""
    pattern = next(iter(exchange.patterns), NATIVE) if len(exchange.patterns) < 3 else NATIVE
    tables = []
    with ThreadPoolExecutor(exchange.num_lanes, "gradientflow-pricing") as threads:
        for make in (new_codec, lambda: EXACT):
            points = []
            for nbytes in SIZES:
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


def _table(exchange: Exchange, pattern: str, buffer: torch.Tensor, step: int) -> CostTable:
    points = []
    for nbytes in (size for size in SIZES if pattern in LEAN or size <= SMALL):
        repeats = REPEATS_OF_SMALL if nbytes <= SMALL else REPEATS
        times_s = [_once(exchange, pattern, buffer[: nbytes // 4], step) for _ in range(1 + repeats)]
        points.append((nbytes, median(times_s[1:])))
    # Of all threads: what a lane or the backend's own threads take is missing where training computes, unless there
    # are cores to spare.
    began_s = time.process_time()
    for _ in range(REPEATS_OF_SMALLEST):
        _once(exchange, pattern, buffer[: SIZES[0] // 4], step)
    host_s = exchange.crowding * (time.process_time() - began_s) / REPEATS_OF_SMALLEST
    return CostTable(points=tuple(points), host_s=host_s)


def _once(exchange: Exchange, pattern: str, values: torch.Tensor, step: int) -> float:
    start_s = time.perf_counter()
    exchange.answer(Sum([values]), 0, step, "measure what messages cost", pattern)
    _finish(values)
    return max(time.perf_counter() - start_s, 1e-9)


def _finish(values: torch.Tensor) -> None:
    if values.device.type != "cpu":
        torch.accelerator.synchronize(values.device)
