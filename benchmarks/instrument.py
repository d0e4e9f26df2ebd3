"""Can the measuring instrument be trusted? On an idle machine, as root or with user namespaces:

    python benchmarks/instrument.py links --out FILE.json      the probe against a plain socket, in turn
    python benchmarks/instrument.py same --out FILE.json       DDP against DDP: is their ratio 1.00?

`links`: two hosts of a lab at 100 Mbit/s, at 1 Gbit/s and as fast as the machine is. A plain socket sends for some
seconds and the receiver counts; then the probe measures the same link, by a plain stream and over Gloo; and again. The
figures are ratios to the socket, in pairs. Each host has a core of its own: on links that are not held to a rate,
speed is that of a core's copies, and doubles or halves with where the scheduler puts the two ends.

`same`: a replayed ResNet-50 on four hosts at 1 Gbit/s, stock DDP twice in one bake-off, and the bytes that went
through the ports against 2 (n - 1) / n of the gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gradientflow.bench.arena import LabArena, start
from gradientflow.lab import Lab, check_rate, format_rate, parse_rate
from gradientflow.network import Network

RATES = ("100Mbit", "1Gbit", "unshaped")

LISTEN = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7000)) as server:
    print(flush=True)
    connection, _ = server.accept()
buffer, received, first_s = bytearray(2**20), 0, 0.0
while number := connection.recv_into(buffer):
    now_s = time.perf_counter()
    if not first_s and received > 2**20:  # what a full bucket let through at once does not count
        first_s, received = now_s, 0
    received += number
print(8 * received / (now_s - first_s))
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
block, end_s = bytes(2**20), time.monotonic() + float(sys.argv[2])
while time.monotonic() < end_s:
    connection.sendall(block)
"""


class Pinned(Lab):
    """Each host's programs stay on a core of their own."""

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        return super().command(host, ["taskset", "-c", str(host % (os.cpu_count() or 1)), *argv])


def socket_rate(lab: Lab, seconds: float) -> float:
    """Bits a second of payload that host 1 received from host 0."""
    address = lab.hosts[1].address
    with lab.popen(1, [sys.executable, "-c", LISTEN, address], stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        with lab.popen(0, [sys.executable, "-c", SEND, address, str(seconds)]) as sender:
            sender.wait(60)
        return float(listener.communicate(timeout=60)[0])


def probe_rates(place: LabArena) -> tuple[float, float]:
    """By a plain stream, and over Gloo."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "network.json"
        start(place, "gradientflow.bench.prober", [str(path)], lambda line: None, 120.0)
        network = Network.read(path)
    return network.of("tcp")[0].rate_bits_s, network.of("p2p")[0].rate_bits_s


def links(times: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in RATES:
        rate = parse_rate(text)
        with Pinned(2, rate) as lab:
            if rate is not None:
                check_rate(lab)
            triples = [(socket_rate(lab, 3.0), *probe_rates(LabArena(lab, rate))) for _ in range(times)]
        sockets, streams, over_gloo = zip(*triples, strict=True)
        found[text] = {"socket_bits_s": sockets, "stream_bits_s": streams, "gloo_bits_s": over_gloo}
        plain = format_rate(float(f"{statistics.median(sockets):.4g}"))
        print(f"{text:10} socket {plain:>12}", end="")
        for name, rates in (("probe's stream", streams), ("probe over Gloo", over_gloo)):
            ratios = sorted(probe / plain for plain, probe in zip(sockets, rates, strict=True))
            print(f"   {name} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})", end="")
        print(flush=True)
    return found


def same(workload: str, compute_s: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "results.json"
        argv = [
            "bench",
            "--workload",
            workload,
            "--compute",
            str(compute_s),
            "--methods",
            "ddp,ddp",
            "--out",
            str(path),
        ]
        subprocess.run([sys.executable, "-m", "gradientflow", *argv], check=True)
        document: dict[str, object] = json.loads(path.read_text())
    document.pop("timelines")
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("links", "same"))
    parser.add_argument("--times", type=int, default=5, help="links: pairs of measurements at each rate")
    parser.add_argument("--workload", default="resnet-50", help="same: what is replayed")
    parser.add_argument("--compute", type=float, default=1.2, help="same: seconds an iteration computes")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    given = parser.parse_args()
    found = links(given.times) if given.what == "links" else same(given.workload, given.compute)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
