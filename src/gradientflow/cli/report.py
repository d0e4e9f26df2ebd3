"""`gradientflow report`: a page about what was measured, or about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import from_json

from gradientflow.documents import parse_json, read_text
from gradientflow.errors import DocumentError, UsageError


def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|RUN",
            help="What `gradientflow bench --out` or `benchmarks/accuracy.py --out` wrote, or a run directory.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The page. Default: beside FILE, as .html; RUN/run.html.")] = None,
) -> None:
    """Write one self-contained HTML page, and beside it one trace of all ranks for Perfetto, where there is any."""
    page = out or (source / "run.html" if source.is_dir() else source.with_suffix(".html"))
    _check_target(page)
    try:
        if source.is_dir():
            _about_run(source, page)
        else:
            _about_file(source, page)
    except OSError as error:
        raise UsageError(f"cannot write the report: {error}") from None
    print(page)


def _check_target(page: Path) -> None:
    if page.is_dir():
        raise UsageError(f"{page} is a directory: give the page's own name to --out")
    if not page.absolute().parent.is_dir():
        raise UsageError(f"{page.absolute().parent} is no directory: choose another --out")


def _about_file(file: Path, page: Path) -> None:
    from gradientflow.bench.learning import Learning
    from gradientflow.bench.report import write_learning_report, write_report
    from gradientflow.bench.report.bakeoff_page import trace_beside
    from gradientflow.bench.results import Results

    found: Results | Learning
    try:
        text = read_text(file)
        if _has_comparisons(text):
            found = parse_json(Learning, text, str(file))
        else:
            found = parse_json(Results, text, str(file))
    except DocumentError as error:
        raise DocumentError(
            f"{error}; expected what `gradientflow bench --out` writes, or benchmarks/accuracy.py, or a run directory"
        ) from None
    if file.resolve() in (page.resolve(), trace_beside(page).resolve()):
        raise UsageError(f"{file} is the file to read: give another --out")
    if isinstance(found, Learning):
        write_learning_report(found, page)
    else:
        write_report(found, page)


def _has_comparisons(text: str) -> bool:
    """Which of the two kinds of files it is, or is meant to be."""
    try:
        found = from_json(text)
    except ValueError:
        return False
    return isinstance(found, dict) and "comparisons" in found


def _about_run(directory: Path, page: Path) -> None:
    from gradientflow.bench.report import write_run_report

    if page.resolve().parent == directory.resolve() and page.suffix in (".json", ".toml"):
        raise UsageError(f"{page} is a file of the run: give another --out")
    write_run_report(directory, page)
