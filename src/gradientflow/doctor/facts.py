"""What one rank is and where it stands; all of it can be told to the others as text."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradientflow import __version__
from gradientflow.exchange.reach import LOOPBACK, family_of, is_loopback, way_to_others


@dataclass(frozen=True)
class Facts:
    rank: int = 0
    host: str = ""
    #: Ranks with the same one share a network: the same boot of a machine, and there the same namespace.
    machine: str = ""
    gradientflow: str = ""
    torch: str = ""
    python: str = ""
    platform: str = ""
    byteorder: str = ""
    backends: tuple[str, ...] = ()
    accelerators: tuple[str, ...] = ()
    #: Where the others are told to find this rank.
    interface: str = ""
    address: str = ""
    #: By what the environment says, or ""
    told_interface: str = ""
    #: The interface that leads to rank 0, by this machine's routes.
    route_interface: str = ""
    #: Where Gloo would listen.
    gloo_address: str = ""
    interfaces: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.address or 'no address'})"

    @property
    def listens_on_loopback(self) -> bool:
        return is_loopback(self.gloo_address)

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Facts:
        """Also what another version of this package has said: what is not known here is left out.

        >>> Facts.of_text('{"rank": 3, "torch": "9.0", "of_the_future": 1}').torch
        '9.0'
        """
        known = {field.name for field in fields(cls)}
        told: dict[str, Any] = {name: value for name, value in json.loads(text).items() if name in known}
        for name, value in told.items():
            told[name] = tuple(value) if isinstance(value, list) else value
        return cls(**told)


def facts_here(environment: Mapping[str, str]) -> Facts:
    way = way_to_others(environment)
    told = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    # What the machine's routes say, whatever the environment does.
    route = way_to_others({name: value for name, value in environment.items() if name != "GLOO_SOCKET_IFNAME"})
    return Facts(
        rank=int(environment.get("RANK", "0")),
        host=socket.gethostname(),
        machine=_machine(),
        gradientflow=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(terse=True),
        byteorder=sys.byteorder,
        backends=tuple(name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)),
        accelerators=_accelerators(),
        interface=way.interface,
        address=way.address,
        told_interface=told,
        route_interface=route.interface,
        gloo_address=way.address if told else _address_of_hostname(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    where = boot.read_text().strip() if boot.exists() else socket.gethostname()
    with contextlib.suppress(OSError):
        where += f" {os.readlink('/proc/self/ns/net')}"
    return where


def _accelerators() -> tuple[str, ...]:
    if not torch.accelerator.is_available():
        return ()
    kind = torch.accelerator.current_accelerator()
    return tuple(f"{kind} {number}" for number in range(torch.accelerator.device_count()))


def _address_of_hostname() -> str:
    """Where Gloo listens if it is told nothing: at the first of the host name's own addresses, else on loopback."""
    with contextlib.suppress(OSError):
        for *_, place in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            address = str(place[0])
            with contextlib.suppress(OSError), socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
                return address
    return LOOPBACK
