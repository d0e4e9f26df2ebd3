"""Rates of links: how they are written, and how a port is held to one.

A token bucket (`tc tbf`) sits on both ends of a port. Three of its numbers decide whether TCP sees a link or a toy:

- *Super-packets.* TCP hands the interface many segments as one packet. One that is larger than the bucket is cut up
  in the bucket, and every segment then goes through the switch by itself: at 1 Gbit/s that took 0.8 of a core instead
  of 0.16, and on two busy cores the link at times fell to half its rate. So the interface is told to take no more than
  half a bucket at once. (Not a whole one: a bucket that has to be full again for each packet passed 5 % less than its
  rate.) The kernel charges the bucket for all segments' headers, so super-packets travel no faster than their segments
  would.
- *Burst.* What an idle link lets through at once: too much makes small messages free, too little is lost whenever the
  timer is late. Half a millisecond was the least that kept four hosts in a ring at 1 Gbit/s on two busy cores. What
  is sent after a pause therefore arrives up to 0.4 ms before it could on a wire. Each burst costs processors about the
  same, whatever the rate: eight hosts that sent and received all the time kept one of two cores busy with nothing but
  packets. So it grows with the number of hosts for each core.
- *Queue.* A switch's buffer: three senders at one receiver lose nothing at 20 ms, and some packets at 5.
"""

from __future__ import annotations

import math
import os
import re
from typing import NamedTuple

from gradientflow.errors import UsageError

#: Bytes of a full segment on the wire: its payload, TCP with timestamps, IP, Ethernet.
PACKET_NBYTES = 1514
PAYLOAD_NBYTES = 1448

BURST_S = 0.0005
HOSTS_OF_A_CORE = 2
QUEUE_S = 0.020

#: Beyond these the 32-bit numbers inside tbf overflow.
_SLOWEST, _FASTEST = 1e3, 1e12
#: A super-packet is at most 64 KiB.
_MOST_SEGMENTS = 44

_UNITS = {"Gbit": 1e9, "Mbit": 1e6, "kbit": 1e3, "bit": 1.0}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?) ?(" + "|".join(_UNITS) + ")", re.IGNORECASE)


def parse_rate(text: str, least: float = _SLOWEST) -> float | None:
    """Bits per second, `least` or more; None for a link that is not held to a rate.

    >>> parse_rate("2.5Gbit"), parse_rate("100Mbit"), parse_rate("unshaped")
    (2500000000.0, 100000000.0, None)
    """
    if text == "unshaped":
        return None
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise UsageError(f"rate {text!r}: expected a number and a unit like 100Mbit or 2.5Gbit, or the word unshaped")
    rate = float(match[1]) * {unit.lower(): bits for unit, bits in _UNITS.items()}[match[2].lower()]
    return check_range(rate, least)


def format_rate(rate: float | None) -> str:
    """
    >>> format_rate(2.5e9), format_rate(None)
    ('2.5Gbit', 'unshaped')
    """
    if rate is None:
        return "unshaped"
    unit, bits = next(((unit, bits) for unit, bits in _UNITS.items() if rate >= bits), ("bit", 1.0))
    return f"{rate / bits:.10g}{unit}"


def check_range(rate: float, least: float = _SLOWEST) -> float:
    if not (math.isfinite(rate) and least <= rate <= _FASTEST):
        raise UsageError(f"rate {rate:g} bit/s: expected {format_rate(least)} to {format_rate(_FASTEST)}")
    return rate


class Bucket(NamedTuple):
    """A token bucket for one end of a port."""

    rate: float
    burst_nbytes: int
    queue_nbytes: int
    #: The most segments that may come as one packet.
    num_segments: int

    @classmethod
    def of(cls, rate: float, num_hosts: int = 1) -> Bucket:
        """In a lab of so many hosts."""
        crowding = max(1.0, num_hosts / HOSTS_OF_A_CORE / (os.cpu_count() or 1))
        burst = max(4 * PACKET_NBYTES, int(rate / 8 * BURST_S * crowding))
        queue = max(64 * PACKET_NBYTES, int(rate / 8 * QUEUE_S))
        return cls(rate, burst, queue, min(_MOST_SEGMENTS, burst // 2 // PACKET_NBYTES))

    def __str__(self) -> str:
        return f"tbf rate {round(self.rate)}bit burst {self.burst_nbytes} limit {self.queue_nbytes}"


def goodput(rate: float) -> float:
    """The most that TCP's payload can have of `rate`."""
    return rate * PAYLOAD_NBYTES / PACKET_NBYTES


def qdiscs(device: str, rate: float | None, latency_s: float = 0.0, num_hosts: int = 1) -> list[str]:
    """Lines for `tc -batch` that make what `device` sends wait for its latency, then for its turn at `rate`."""
    lines = [] if rate is None else [f"qdisc add dev {device} root handle 1: {Bucket.of(rate, num_hosts)}"]
    if latency_s:
        # What is on its way lies in netem's queue, and no more than the bucket's own queue beside it.
        flight = (latency_s + QUEUE_S) * (_FASTEST if rate is None else rate) / 8 / PACKET_NBYTES
        parent = "root" if rate is None else "parent 1:1"
        lines += [f"qdisc add dev {device} {parent} netem delay {latency_s * 1e6:.0f}us limit {max(1000, int(flight))}"]
    return lines
