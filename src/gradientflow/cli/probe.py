"""`gradientflow probe`: what the links between workers can do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gradientflow.errors import UsageError


def probe(
    hosts: Annotated[int, typer.Option(help="Hosts of the lab. Under torchrun its world is used and no lab.")] = 2,
    rate: Annotated[str, typer.Option(help="Of each host's link: 100Mbit, 1Gbit, unshaped.")] = "unshaped",
    loopback: Annotated[bool, typer.Option("--loopback", help="No lab: this machine's loopback.")] = False,
    out: Annotated[Path, typer.Option(help="Where to write what was measured.")] = Path("network.json"),
) -> None:
    """Measure point-to-point links and all-reduce over sizes, and fit a line."""
    from gradientflow.lab import parse_rate
    from gradientflow.network import Network
    from gradientflow.probe import osu_table

    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.absolute().parent} is no directory: choose another --out")
    if "RANK" in os.environ:
        from gradientflow.bench.prober import measure_here

        network = measure_here()
        if network is None:
            return
    else:
        from gradientflow.bench.arena import arena, start

        if not 2 <= hosts <= 64:
            raise UsageError(f"--hosts must be from 2 to 64, found {hosts}")
        with tempfile.TemporaryDirectory() as directory, arena(hosts, parse_rate(rate), shaped=not loopback) as place:
            found = Path(directory) / "network.json"
            start(place, "gradientflow.bench.prober", [str(found)], lambda line: None, limit_s=600.0)
            network = Network.read(found)
            for note in place.notes:
                print(f"note: {note}")
    network.write(out)
    print(osu_table(network))
    print(f"Written to {out}")
