"""What a message costs on the lanes that are there, measured once, after the first step."""

from __future__ import annotations

import time
from statistics import median

import torch

from gradientflow.compress import Codec, Sum
from gradientflow.cost.table import Cost, CostTable, Steps
from gradientflow.exchange import Native

#: 4 KiB to 4 MiB; at 100 Mbit/s and four ranks all of it takes about two seconds.
SIZES = tuple(2**power for power in range(12, 23, 2))
REPEATS = 3


def measure_cost(exchange: Native, codec: Codec, device: torch.device, step: int) -> Cost:
    """Seconds of one message by its size, as a gradient's bytes count. Collective; each rank's own clock."""
    buffer = torch.zeros(SIZES[-1] // 4, device=device)
    points, hosts_s = [], []
    for nbytes in SIZES:
        times_s = []
        for _ in range(1 + REPEATS):
            began_s = time.thread_time()
            times_s.append(_once(exchange, buffer[: nbytes // 4], step))
            hosts_s.append(time.thread_time() - began_s)
        points.append((nbytes, median(times_s[1:])))
    table = CostTable(points=tuple(points), host_s=median(hosts_s))
    return Steps(table, 1, codec.traffic(SIZES[-1] // 4, torch.float32).nbytes / SIZES[-1])


def _once(exchange: Native, values: torch.Tensor, step: int) -> float:
    start_s = time.perf_counter()
    exchange.answer(Sum([values]), 0, step, "measure what messages cost")
    if values.device.type != "cpu":
        torch.accelerator.synchronize(values.device)
    return max(time.perf_counter() - start_s, 1e-9)
