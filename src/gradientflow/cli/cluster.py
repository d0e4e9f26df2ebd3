"""`gradientflow cluster`: the clusters that can be simulated, and a probe's network as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradientflow.errors import UsageError


def cluster(
    name: Annotated[str, typer.Argument(help="A cluster's name or file, or a probe's (.json); none: list all.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write it there, as TOML to be edited.")] = None,
) -> None:
    """Show a cluster, list those that come with the package, or turn a probe's network.json into one."""
    from gradientflow.documents import check_writable
    from gradientflow.sim.cluster import names, read

    if out is not None:
        if not name:
            raise UsageError(f"--out {out}: say which cluster to write: gradientflow cluster NAME --out {out}")
        check_writable(out)
    for known in [name] if name else names():
        found = read(known)
        wires = [f"{wire.bytes_per_s / 1e9:.3g} GB/s {where} ({wire.protocol})" for where, wire in found.wires]
        layout = f"{found.hosts} hosts x {found.workers_per_host}"
        print(f"{found.name:18} {layout:16} {', '.join(wires)}  {found.device}")
        if out is not None:
            found.write_toml(out)
            print(f"Written to {out}")
