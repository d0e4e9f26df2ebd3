"""A process group in a script that mpirun has started."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist

from gradientflow.errors import UsageError
from gradientflow.exchange.mpi import library
from gradientflow.exchange.reach import LOOPBACK, way_to_others


def init_from_mpi(deadline_s: float = 600.0) -> None:
    """`torch.distributed.init_process_group("gloo")` for the processes of mpirun. Collective.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun would, where they are not set. Needs
    `gradientflow[mpi]`.

    deadline_s: of the group's own operations."""
    if dist.is_initialized():
        raise UsageError("torch.distributed is set up already: call init_from_mpi() instead of init_process_group()")
    mpi = library()
    world = mpi.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    found = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": hosts[: world.rank].count(hosts[world.rank])}
    meeting = world.bcast(_meeting_place(hosts) if world.rank == 0 else None)
    if not meeting["MASTER_ADDR"]:
        raise UsageError(
            f"{hosts[0]} does not know its address towards the other machines: set GLOO_SOCKET_IFNAME to the interface "
            "that leads to them"
        )
    for name, value in (found | meeting).items():
        os.environ.setdefault(name, str(value))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=deadline_s))


def _meeting_place(hosts: list[str]) -> dict[str, str]:
    """Where rank 0, which is here, can be reached."""
    others = [host for host in hosts if host != hosts[0]]
    towards = os.environ.get("MASTER_ADDR") or (others[0] if others else LOOPBACK)
    address = way_to_others({**os.environ, "MASTER_ADDR": towards}).address
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    return {"MASTER_ADDR": os.environ.get("MASTER_ADDR", address), "MASTER_PORT": os.environ.get("MASTER_PORT", port)}
