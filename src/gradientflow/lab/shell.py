"""The commands that build a lab: `ip` and `tc` of iproute2, `nsenter` and `unshare` of util-linux."""

from __future__ import annotations

import select
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, NamedTuple

from gradientflow.errors import UsageError

LIMIT_S = 20.0

_PACKAGE = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}


class LabUnavailable(UsageError):
    """This machine cannot have a lab; the message says what is missing."""


def find(command: str) -> str:
    """Where a command is. Also in /usr/sbin, which not every user has in the path."""
    found = shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")
    if found is None:
        raise LabUnavailable(f"a lab needs the command {command}: install the package {_PACKAGE[command]}")
    return found


class Batch(NamedTuple):
    """Lines for `ip -batch` or `tc -batch`, and how to enter where they are meant for."""

    entrance: Sequence[str]
    tool: str
    lines: Sequence[str]


def run(batch: Batch) -> str:
    """What the tool complains of; nothing if all went well."""
    argv = [*batch.entrance, find(batch.tool), "-batch", "-"]
    text = "\n".join(batch.lines)
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=LIMIT_S)
    return f"{batch.tool}: {' '.join(done.stderr.split())}" if done.returncode else ""


def run_all(batches: Sequence[Batch]) -> None:
    """Side by side, so they must not depend on each other."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        complaints = [words for words in pool.map(run, batches) if words]
    if complaints:
        raise LabUnavailable(f"the kernel refuses a part of the lab, which needs veth, bridge and tbf: {complaints[0]}")


def first_line(pipe: IO[str] | None) -> str:
    """Of a program that was just started; nothing if it ends or does not speak."""
    assert pipe
    ready, _, _ = select.select([pipe], [], [], LIMIT_S)
    return pipe.readline() if ready else ""
