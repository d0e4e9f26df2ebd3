"""What a protocol makes of a wire: how much of its rate large messages get, and what a small one takes.

One message between two workers takes what was measured for small sizes, read from a table as `cost.table` does, and
the wire's own time beyond. Constants are published ones, each with its source; a cluster's file may say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from gradientflow.cost.table import Cost, CostTable, Line
from gradientflow.errors import UsageError


@dataclass(frozen=True)
class Protocol:
    """`efficiency` of the line rate, `latency_s` of an empty message; measured points of small ones, if there are."""

    efficiency: float
    latency_s: float
    source: str
    #: (nbytes, seconds) on a wire of `measured_bits_s`.
    points: tuple[tuple[int, float], ...] = ()
    measured_bits_s: float = 0.0

    def link(self, bits_per_s: float) -> Cost:
        """One message from one end of a wire to the other.

        >>> round(1e6 * PROTOCOLS["ib-rdma"].link(100e9).seconds(16384), 2)
        7.85
        """
        beta_s_per_byte = 8 / (bits_per_s * self.efficiency)
        if not self.points or bits_per_s != self.measured_bits_s:
            return Line(alpha_s=self.latency_s, beta_s_per_byte=beta_s_per_byte)
        large = [(nbytes, self.latency_s + nbytes * beta_s_per_byte) for nbytes in (2**20, 2**22, 2**24, 2**26)]
        return CostTable(points=(*self.points, *large))


PROTOCOLS = {
    "tcp": Protocol(1448 / 1538, 15e-6, "of 1538 bytes on the wire 1448 are the message's (MTU 1500)"),
    "ib-rdma": Protocol(
        0.966,
        1.0e-6,
        "96.6 Gb/s on 100 Gb/s EDR (NVIDIA); ib_send_lat 0.82 us at 32 B, 2.26 us at 4 KiB; the survey's 7.85 us at"
        " 16 KiB",
        ((32, 0.82e-6), (4096, 2.26e-6), (16384, 7.85e-6)),
        100e9,
    ),
    "roce": Protocol(0.93, 2.0e-6, "engineering estimate for lossless Ethernet"),
    "ipoib": Protocol(0.184, 12e-6, "1.9 to 2.7 GB/s of bus bandwidth on 100 Gb/s InfiniBand in the survey's data"),
    "pcie": Protocol(0.3175, 5.7e-6, "5 GB/s of 15.75: NCCL 2.4.8's own figure for rings without NVLink"),
    "nvlink": Protocol(0.89, 3.4e-6, "134 of 150 GB/s on 8 V100 (vTrain's tables)"),
    "raw": Protocol(1.0, 0.0, "the wire itself"),
}


def protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        near = get_close_matches(name, PROTOCOLS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"no protocol {name!r}: there are {', '.join(PROTOCOLS)}{hint}")
    return PROTOCOLS[name]
