"""`gradientflow report`: a page about what was measured, or about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradientflow.errors import DocumentError, UsageError


def report(
    source: Annotated[
        Path, typer.Argument(metavar="FILE|RUN", help="What `gradientflow bench --out` wrote, or a run directory.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page. Default: beside FILE, as .html; RUN/run.html.")] = None,
) -> None:
    """Write one self-contained HTML page, and beside it one trace of all ranks for Perfetto."""
    page = out or (source / "run.html" if source.is_dir() else source.with_suffix(".html"))
    _check_target(page)
    try:
        if source.is_dir():
            _about_run(source, page)
        else:
            _about_results(source, page)
    except OSError as error:
        raise UsageError(f"cannot write the report: {error}") from None
    print(page)


def _check_target(page: Path) -> None:
    if page.is_dir():
        raise UsageError(f"{page} is a directory: give the page's own name to --out")
    if not page.absolute().parent.is_dir():
        raise UsageError(f"{page.absolute().parent} is no directory: choose another --out")


def _about_results(file: Path, page: Path) -> None:
    from gradientflow.bench.report import write_report
    from gradientflow.bench.report.bakeoff_page import trace_beside
    from gradientflow.bench.results import Results

    try:
        results = Results.read(file)
    except DocumentError as error:
        raise DocumentError(f"{error}; expected what `gradientflow bench --out` writes, or a run directory") from None
    if file.resolve() in (page.resolve(), trace_beside(page).resolve()):
        raise UsageError(f"{file} is the file to read: give another --out")
    write_report(results, str(page))


def _about_run(directory: Path, page: Path) -> None:
    from gradientflow.bench.report import write_run_report

    if page.resolve().parent == directory.resolve() and page.suffix in (".json", ".toml"):
        raise UsageError(f"{page} is a file of the run: give another --out")
    write_run_report(directory, page)
