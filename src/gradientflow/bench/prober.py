"""One worker of `gradientflow probe`.

python -m gradientflow.bench.prober NETWORK.json        (with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist

from gradientflow.exchange.reach import way_to_others
from gradientflow.network import Network
from gradientflow.patterns import ALL_REDUCES
from gradientflow.probe import measure_network
from gradientflow.processes import die_with_parent

TIMEOUT_S = 120.0


def measure_here() -> Network | None:
    """In the world that the environment describes; the result on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    network = measure_network(
        address=way_to_others(os.environ).address or None,
        smaller_worlds=True,
        patterns=tuple(ALL_REDUCES),
        processors=True,
    )
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return network if rank == 0 else None


if __name__ == "__main__":
    die_with_parent()
    found = measure_here()
    if found is not None:
        found.write(sys.argv[1])
