"""Can the measuring instrument be trusted? On an idle machine, as root or with user namespaces:

    python benchmarks/instrument.py links --out FILE.json      the probe against a plain socket, in turn
    python benchmarks/instrument.py same --out FILE.json       DDP against DDP: is their ratio 1.00?

`links`: two hosts of a lab at 100 Mbit/s, at 1 Gbit/s and as fast as the machine is, a process on each. A plain socket
sends for a second and the receiver counts, then the probe measures the same link, by its own stream and over Gloo, then
the socket sends again. The figures are ratios to the mean of the socket before and after. Each host has a core of its
own, and socket and probe share processes: on links that are not held to a rate, speed is that of memory copies, and
changes by a factor of two with where the scheduler puts the two ends and what else a process has done. So a socket that
sends before and after counts for what was between, and the first of all does not count.

`same`: a replayed ResNet-50 on four hosts at 1 Gbit/s, stock DDP twice in one bake-off, and the bytes that went
through the ports against 2 (n - 1) / n of the gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gradientflow.lab import Lab, check_rate, format_rate, parse_rate
from gradientflow.probe import measure_network

RATES = ("100Mbit", "1Gbit", "unshaped")
PORT = 7000
TRANSFER_S = 1.0
PROBE_S = 5.0


class Pinned(Lab):
    """Each host's programs stay on a core of their own."""

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        return super().command(host, ["taskset", "-c", str(host % (os.cpu_count() or 1)), *argv])


# - In the two processes


def pair(address: str, times: int) -> list[tuple[float, float, float]]:
    """Bits a second by a socket, by the probe's stream, and by the probe over Gloo."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = []
    transfer(address)
    for _ in range(times):
        before = transfer(address)
        network = measure_network(budget_s=PROBE_S, address=address)
        plain = (before + transfer(address)) / 2
        found.append((plain, network.of("tcp")[0].rate_bits_s, network.of("p2p")[0].rate_bits_s))
    dist.destroy_process_group()
    return found


def transfer(address: str) -> float:
    """From rank 0 to rank 1, whose address it is: bits a second that arrived after the first quarter, on both."""
    rate = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 1:
        with socket.create_server((address, PORT)) as server:
            dist.barrier()
            connection, _ = server.accept()
        with connection:
            rate[0] = _received(connection)
    else:
        dist.barrier()
        with socket.create_connection((address, PORT)) as connection:
            block, end_s = bytes(2**20), time.monotonic() + TRANSFER_S
            while time.monotonic() < end_s:
                connection.sendall(block)
    dist.broadcast(rate, 1)
    return float(rate)


def _received(connection: socket.socket) -> float:
    buffer, nbytes = bytearray(2**20), 0
    start_s = counted_s = now_s = time.perf_counter()
    while number := connection.recv_into(buffer):
        now_s = time.perf_counter()
        nbytes += number
        if counted_s == start_s and now_s - start_s > TRANSFER_S / 4:
            counted_s, nbytes = now_s, 0
    return 8 * nbytes / (now_s - counted_s)


# - Around them


def links(times: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in RATES:
        rate = parse_rate(text)
        with Pinned(2, rate) as lab:
            if rate is not None:
                check_rate(lab)
            triples = _run_pair(lab, times)
        sockets, streams, over_gloo = zip(*triples, strict=True)
        found[text] = {"socket_bits_s": sockets, "stream_bits_s": streams, "gloo_bits_s": over_gloo}
        plain = format_rate(float(f"{statistics.median(sockets):.4g}"))
        print(f"{text:10} socket {plain:>12}", end="")
        for name, rates in (("probe's stream", streams), ("probe over Gloo", over_gloo)):
            ratios = sorted(probe / plain for plain, probe in zip(sockets, rates, strict=True))
            print(f"   {name} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})", end="")
        print(flush=True)
    return found


def _run_pair(lab: Lab, times: int) -> list[tuple[float, float, float]]:
    argv = [sys.executable, __file__, "pair", "--times", str(times), "--address", lab.hosts[1].address]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29500"}
    with (
        lab.popen(1, argv, env={**os.environ, **world, "RANK": "1"}, stdout=subprocess.DEVNULL),
        lab.popen(0, argv, env={**os.environ, **world, "RANK": "0"}, stdout=subprocess.PIPE, text=True) as first,
    ):
        triples: list[tuple[float, float, float]] = json.loads(first.communicate(timeout=60 * times)[0])
    return triples


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
    parser.add_argument("what", choices=("links", "same", "pair"), help="pair is what links runs on its hosts")
    parser.add_argument("--times", type=int, default=9, help="links: pairs of measurements at each rate")
    parser.add_argument("--address", help="pair: of the host that receives")
    parser.add_argument("--workload", default="resnet-50", help="same: what is replayed")
    parser.add_argument("--compute", type=float, default=1.2, help="same: seconds an iteration computes")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    given = parser.parse_args()
    if given.what == "pair":
        print(json.dumps(pair(given.address, given.times)))
        return
    found = links(given.times) if given.what == "links" else same(given.workload, given.compute)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
