"""`gradientflow run --elastic` and `gradientflow store`: workers of one host that live and die each by itself.

torchrun ends all workers when one fails. Here the others go on, and a worker that died is started anew and joins:
around servers that keep the parameters (`-ps:K@ssp:4`, `-ps:K@diloco:50`), or in lockstep, one generation of workers
after another (exchange/roster.py).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.console import complain
from gradientflow.cli.launch import stoppable
from gradientflow.errors import TrainingError, UsageError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from gradientflow.recipe import Recipe

_LOOK_S = 0.1
#: Processes that are asked to end have so long.
_PATIENCE_S = 10.0


def store(
    port: Annotated[int, typer.Option(help="Listen there; 0 takes any that is free.")] = 29500,
    address: Annotated[str, typer.Option(help="Listen at this address only. Default: at all.")] = "0.0.0.0",
) -> None:
    """Hold a job's store until stopped, so that any of its workers may die."""
    held = open_store(address, port)
    print(f"Store at {address}:{held.port}", flush=True)
    with stoppable():
        while True:
            time.sleep(3600)


def open_store(address: str, port: int) -> TCPStore:
    """Everybody finds everybody through it."""
    import torch.distributed as dist

    from gradientflow.exchange.reach import family_of

    if not 0 <= port < 2**16:
        raise UsageError(f"port {port}: expected 0 to 65535")
    everywhere = address == "0.0.0.0" and socket.has_dualstack_ipv6()
    bound = "::" if everywhere else address
    try:
        # By itself it would listen at all addresses, whatever it is told.
        listener = socket.create_server((bound, port), family=family_of(bound), dualstack_ipv6=everywhere)
    except OSError as error:
        raise UsageError(f"no store at {address}:{port}: {error.strerror or error}") from None
    return dist.TCPStore(
        "127.0.0.1" if address == "0.0.0.0" else address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )


def where(job: str | None) -> tuple[str, int] | None:
    if job is None:
        return None
    host, colon, port = job.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise UsageError(f"--job {job}: write HOST:PORT, such as 10.0.0.1:29500")
    return host.strip("[]"), int(port)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    num_restarts: int = 0


def run_elastic(
    command: Sequence[str],
    recipe: Recipe | None,
    num_workers: int,
    job: tuple[str, int] | None,
    max_restarts: int,
    environment: Mapping[str, str],
    stdout: IO[str] | None,
) -> None:
    """Until all workers have ended. Without a job, one is begun here: its store, and its servers."""
    from gradientflow.runtime.settings import ELASTIC_ENV

    num_servers = recipe.num_servers if recipe else 0
    if recipe and (recipe.sync.deltas or recipe.served) and not (recipe.sync.deltas and num_servers):
        raise UsageError(
            f"--elastic with recipe '{recipe}': workers come and go in lockstep (lazy, flow+bf16), or step by "
            "themselves around servers of their own (lazy-ps:1@ssp:4, lazy-ps:1@diloco:50)"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(stoppable())
        servers: list[subprocess.Popen[bytes]] = []
        if job is None:
            held = open_store("127.0.0.1", 0)
            job = "127.0.0.1", held.port
            stack.callback(lambda: held)  # for as long as there are workers
            told = {**environment, "MASTER_ADDR": job[0], "MASTER_PORT": str(job[1])}
            for _ in range(num_servers):
                argv = [sys.executable, "-m", "gradientflow", "server", "--job", f"{job[0]}:{job[1]}"]
                # Of its end, which comes from here, it need not speak.
                server = subprocess.Popen(argv, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                servers.append(stack.enter_context(_ending(server)))
        told = {
            **environment,
            "MASTER_ADDR": job[0],
            "MASTER_PORT": str(job[1]),
            "WORLD_SIZE": str(num_workers),
            ELASTIC_ENV: "1",
        }

        def begin() -> subprocess.Popen[bytes]:
            return stack.enter_context(
                _ending(subprocess.Popen(command, env=told, stdout=stdout, start_new_session=True))
            )

        workers = {number: _Worker(begin()) for number in range(num_workers)}
        _look_after(workers, servers, begin, max_restarts)


def _look_after(
    workers: dict[int, _Worker],
    servers: Sequence[subprocess.Popen[bytes]],
    begin: Callable[[], subprocess.Popen[bytes]],
    max_restarts: int,
) -> None:
    lost: list[str] = []
    num_done = 0
    while workers:
        time.sleep(_LOOK_S)
        if gone := [server.returncode for server in servers if server.poll() is not None]:
            raise TrainingError(f"a server {_how(gone[0])}: start one by hand to see why, gradientflow server --job")
        for number, worker in list(workers.items()):
            code = worker.process.poll()
            if code is None:
                continue
            del workers[number]
            if code == 0:
                num_done += 1
            elif num_done and not workers:
                complain(f"worker {number} {_how(code)}; the others have come to the end")
            elif worker.num_restarts < max_restarts:
                complain(f"worker {number} of this launcher {_how(code)}: another one joins in its place")
                workers[number] = _Worker(begin(), worker.num_restarts + 1)
            else:
                lost.append(f"worker {number} {_how(code)}")
                complain(f"{lost[-1]}; the others go on")
    if not num_done:
        raise TrainingError("; ".join(lost))


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def python(script: Path, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, os.fspath(script), *arguments]
