"""`gradientflow report`: a page about what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradientflow.errors import UsageError


def report(
    file: Annotated[Path, typer.Argument(help="What `gradientflow bench --out` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page. Default: beside FILE, as .html.")] = None,
) -> None:
    """Write one self-contained HTML page about a bake-off."""
    from gradientflow.bench.report import write_report
    from gradientflow.bench.results import Results

    page = out or file.with_suffix(".html")
    if page == file:
        raise UsageError(f"{page} is the file to read: give another --out")
    write_report(Results.read(file), str(page))
    print(page)
