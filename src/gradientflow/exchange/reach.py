"""How the other ranks reach this one."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


class Way(NamedTuple):
    """How traffic leaves this machine."""

    interface: str
    #: At which the others reach it; "" if unknown.
    address: str


def way_to_others(environment: Mapping[str, str]) -> Way:
    """The interface that Gloo is told to use, else the one towards rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        told = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if told:
            return Way(told, _address_of(probe, told))
        try:
            probe.connect((environment.get("MASTER_ADDR", LOOPBACK), 9))  # sends nothing
        except OSError:
            return Way("lo", "")
        own = probe.getsockname()[0]
        names = (name for _, name in socket.if_nameindex() if _address_of(probe, name) == own)
        return Way(next(names, "lo"), own)


def _address_of(any_socket: socket.socket, interface: str) -> str:
    try:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # it has none
        return ""
    return socket.inet_ntoa(answer[20:24])
