"""What the user gave, judged before anything is started or written."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gradientflow.errors import UsageError

STRAGGLER_HELP = "Who computes longer: RANK:FACTOR, turn:FACTOR:ITERATIONS or random:FACTOR:SHARE."

if TYPE_CHECKING:
    from gradientflow.recipe import Recipe


def read_recipe(text: str) -> Recipe:
    """A checked recipe, from its text or from the name of its file."""
    from gradientflow.recipe import as_recipe

    return as_recipe(text)


def read_rate(text: str) -> float | None:
    """Of --rate: bits per second; None for links that are not held to any."""
    from gradientflow.lab import parse_rate
    from gradientflow.lab.check import LEAST_RATE

    try:
        return parse_rate(text, LEAST_RATE)
    except UsageError as error:
        raise UsageError(f"--{error}") from None  # which begins with the word rate


def read_rates(text: str, num_hosts: int) -> tuple[float | None, dict[int, float | None]]:
    """Of --rate where hosts may differ, such as 1Gbit,2:50Mbit: that of all of them, and of single ones."""
    usual, *others = text.split(",")
    found: dict[int, float | None] = {}
    for other in others:
        number, colon, rate = other.partition(":")
        if not (colon and number.isascii() and number.isdigit()):
            raise UsageError(f"--rate {text}: write RATE,HOST:RATE,..., such as 1Gbit,2:50Mbit")
        if int(number) not in range(num_hosts) or int(number) in found:
            raise UsageError(f"--rate {text}: hosts are 0 to {num_hosts - 1}, and each has one rate")
        found[int(number)] = read_rate(rate)
    return read_rate(usual), found


def check_compute(seconds: float) -> None:
    from gradientflow.bench.worker import MOST_COMPUTE_S

    if not 0.0 <= seconds <= MOST_COMPUTE_S:
        raise UsageError(f"--compute {seconds:g}: give 0 to {MOST_COMPUTE_S:g} seconds")


def check_scale(scale: float) -> None:
    if not 0.0 < scale <= 1.0:
        raise UsageError(f"--scale {scale:g}: give more than 0 and at most 1")


def fresh_directory(asked: Path | None, name: str) -> Path:
    """The directory asked for, else `runs/NAME`; absolute, and without a run in it. It is not made here."""
    directory = (asked or _unused(Path("runs") / name)).absolute()
    if (directory / "run.json").exists():
        raise UsageError(f"{asked} holds a run already: choose another --out")
    standing = next(path for path in (directory, *directory.parents) if path.exists())
    if not standing.is_dir():
        raise UsageError(f"{standing} is not a directory: choose another --out")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise UsageError(f"{standing} cannot be written to: choose another --out")
    return directory


def timestamp() -> str:
    """Local time, in a form that sorts and needs no quoting."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def _unused(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
