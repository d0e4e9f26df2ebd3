"""How the other ranks reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_ON_THE_LINK = "20"


class Way(NamedTuple):
    """How traffic leaves this machine."""

    interface: str
    #: At which the others reach it; "" if unknown.
    address: str


def way_to_others(environment: Mapping[str, str]) -> Way:
    """The interface that Gloo is told to use, else the one towards rank 0."""
    told = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if told:
        return Way(told, next(iter(_addresses_of(told)), ""))
    own = _source_towards(environment.get("MASTER_ADDR", LOOPBACK))
    names = (name for _, name in socket.if_nameindex() if own in _addresses_of(name))
    return Way(next(names, "lo"), own)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _source_towards(destination: str) -> str:
    try:
        candidates = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    # IPv4 first, as for an interface: ranks whose resolvers sort differently choose alike.
    for family, kind, protocol, _, place in sorted(candidates, key=lambda each: each[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def _addresses_of(interface: str) -> list[str]:
    """IPv4 first. Those of IPv6 that are known on the link alone are left out."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for digits, _, _, scope, _, name in map(str.split, lines):
            if name == interface and scope != _ON_THE_LINK:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
