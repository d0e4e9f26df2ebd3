"""`gradientflow server` and `gradientflow keys`: a parameter server on a host of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gradientflow.cli.elastic import where
from gradientflow.cli.launch import stoppable
from gradientflow.errors import UsageError


def server(
    job: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="MASTER_ADDR and MASTER_PORT of the workers; else as set.")
    ] = None,
    slot: Annotated[int | None, typer.Option(help="Take this server's place. Default: the next free one.")] = None,
    address: Annotated[str | None, typer.Option(help="Listen there. Default: the interface towards the job.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Encrypt, and know workers by keys that `gradientflow keys` made.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="No encryption: everybody on the network may read and change gradients.")
    ] = False,
    memory: Annotated[str, typer.Option(help="What it may hold, such as 8GB. Default: half of the machine's.")] = "",
    wait: Annotated[float, typer.Option(help="Seconds to wait for the job to begin.")] = 600.0,
) -> None:
    """Add up what the workers of a job push, until the job is over."""
    # A job ends with its store; torch would print a page of C++ about that.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from gradientflow.runtime.settings import job_of

    environment = dict(os.environ)
    if told := where(job):
        environment |= {"MASTER_ADDR": told[0], "MASTER_PORT": str(told[1])}
    found = job_of(environment)
    if not found[0]:
        raise UsageError("which job? give --job HOST:PORT, or set MASTER_ADDR and MASTER_PORT")
    if slot is not None and slot < 0:
        raise UsageError(f"--slot {slot}: slots count from 0")
    if keys is not None and plain:
        raise UsageError("--keys encrypts and --plain does not: leave one of them out")
    if not 0 < wait < float("inf"):
        raise UsageError(f"--wait {wait:g}: give seconds above 0")
    from gradientflow.exchange.reach import LOOPBACK, way_to_others
    from gradientflow.exchange.server.keeper import keep, serve_job
    from gradientflow.exchange.server.servers import Wanted
    from gradientflow.exchange.server.service import check_listening
    from gradientflow.schedule.sizes import parse_nbytes

    limit_nbytes = parse_nbytes(memory) if memory else 0
    place = address or way_to_others(environment).address or LOOPBACK
    check_listening(place)
    lock = Wanted(keys=keys, plain=plain).lock_at(place)
    say = functools.partial(print, flush=True)

    def serve(known: int | None, tell: Callable[[int], None]) -> None:
        serve_job(found, place, lock, limit_nbytes, known, wait, say, tell)

    with stoppable():
        keep(serve, slot, say)


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="For the keys; copy it to every host.")],
) -> None:
    """Make keys for servers and workers, so that nobody else can join, listen or change anything."""
    from gradientflow.exchange.server.keys import KeyFiles

    for path in KeyFiles.write_new(directory):
        print(f"Written to {path}")
    print(f"Copy {directory} to every host. Servers: --keys {directory}; workers: GRADIENTFLOW_KEYS={directory}")
