"""`gradientflow probe`: what the links between workers can do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gradientflow.cli.given import read_rate
from gradientflow.cli.launch import stoppable
from gradientflow.errors import UsageError


def probe(
    hosts: Annotated[int, typer.Option(help="Hosts of the lab. Under torchrun its world is used and no lab.")] = 2,
    rate: Annotated[str, typer.Option(help="Of each host's link: 100Mbit, 1Gbit, unshaped.")] = "unshaped",
    loopback: Annotated[bool, typer.Option("--loopback", help="No lab: this machine's loopback.")] = False,
    out: Annotated[Path, typer.Option(help="Where to write what was measured.")] = Path("network.json"),
) -> None:
    """Measure point-to-point links and all-reduce over sizes, and fit a line."""
    from gradientflow.bench.arena import arena, start
    from gradientflow.bench.prober import measure_here
    from gradientflow.cli.bench import HOSTS
    from gradientflow.documents import check_writable
    from gradientflow.network import Network
    from gradientflow.probe import osu_table

    check_writable(out)
    if hosts not in HOSTS:
        raise UsageError(f"--hosts must be from {HOSTS[0]} to {HOSTS[-1]}, found {hosts}")
    bits_per_s = read_rate(rate)
    if loopback and bits_per_s is not None:
        raise UsageError("--loopback has no --rate: leave one of them out")
    if "RANK" in os.environ:
        found = measure_here()
        if found is None:
            return  # another rank has it
        network = found
    else:
        with stoppable(), arena(hosts, bits_per_s, shaped=not loopback) as place:
            for note in place.notes:
                print(f"note: {note}")
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "network.json"
                start(place, "gradientflow.bench.prober", [str(path)], lambda line: None, limit_s=600.0)
                network = Network.read(path)
    network.write(out)
    print(osu_table(network))
    print(f"Written to {out}")
