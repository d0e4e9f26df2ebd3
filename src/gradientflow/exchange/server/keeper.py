"""A server on a host of its own: it enters itself into the job's store, and if it dies it is started anew.

Two processes: one that serves, and one that keeps it, has imported everything and does nothing else, so that a new one
is there in a tenth of a second. It takes the same slot; what it needs to know, workers tell it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradientflow.errors import TrainingError, UserError
from gradientflow.exchange.server.directory import claim, register, store_of_job
from gradientflow.exchange.server.keys import Lock
from gradientflow.exchange.server.service import Service, keep_freed_memory
from gradientflow.processes import die_with_parent

#: How often it is looked whether there still is a job.
LOOK_S = 1.0
#: A server that dies before it serves, so many times, would do so again.
MOST_STILLBORN = 3
#: How long workers may stay without the store of their job: to fetch the last sums, or to hear who is gone.
LEAVE_S = 10.0
#: What a server ends with that met a mistake of ours.
_BROKEN = 70


def keep(
    serve: Callable[[int | None, Callable[[int], None]], None], slot: int | None, say: Callable[[str], None]
) -> None:
    """Until there is no job any more. serve: given its slot, if that is known, and where to tell it."""
    stillborn = 0
    while True:
        reader, writer = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _serve_and_exit(serve, slot, writer)
        os.close(writer)
        try:
            with os.fdopen(reader) as told:
                words = told.readline().strip()
                slot = int(words) if words else slot
                stillborn = 0 if words else stillborn + 1
                _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) != _BROKEN:
            if code := os.WEXITSTATUS(status):
                sys.exit(code)
            return
        name = "an error" if os.WIFEXITED(status) else signal.Signals(os.WTERMSIG(status)).name
        if stillborn == MOST_STILLBORN:
            raise TrainingError(f"the server was ended by {name} {stillborn} times before it could serve")
        say(f"server {'?' if slot is None else slot} was ended by {name}: another one takes its place")


def _serve_and_exit(serve: Callable[[int | None, Callable[[int], None]], None], slot: int | None, writer: int) -> None:
    """In the child, which must not return into what its parent was doing."""
    code = _BROKEN
    try:
        die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        serve(slot, lambda found: _tell(writer, found))
        code = 0
    except (TrainingError, UserError) as error:
        print(f"gradientflow: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UserError) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(writer: int, slot: int) -> None:
    os.write(writer, f"{slot}\n".encode())
    os.close(writer)


def serve_job(
    job: tuple[str, int],
    address: str,
    lock: Lock,
    limit_nbytes: int,
    slot: int | None,
    deadline_s: float,
    say: Callable[[str], None],
    tell_slot: Callable[[int], None],
) -> None:
    """Serve until the job's store is gone, which is when the job is over."""
    torch.set_num_threads(1)
    keep_freed_memory()
    store = _find_job(job, deadline_s)
    service = Service(address, lock, limit_nbytes)
    service.start()
    if slot is None:
        number = claim(store, service.invitation)
    else:
        register(store, number := slot, service.invitation)
    tell_slot(number)
    say(f"server {number} serves at {service.invitation.endpoint}, mode {lock.mode}, process {os.getpid()}")
    try:
        while store.check([str(number)]) and service.is_serving:
            time.sleep(LOOK_S)
    except RuntimeError:  # of the store, whose process is gone
        pass
    if not service.is_serving:
        raise AssertionError("the server's thread has ended")
    service.stop(LEAVE_S, until_all_left=True)
    added_up = service.ledger.summed_nbytes + service.tables.summed_nbytes
    refused = ", ".join(f"{number} x {why}" for why, number in sorted(service.refusals.items())) or "nothing"
    say(f"server {number}: the job is over; {added_up / 1e6:.1f} MB were added up, {refused} refused")


def _find_job(job: tuple[str, int], deadline_s: float) -> dist.Store:
    """Servers may be started before the job."""
    end_s = time.monotonic() + deadline_s
    while True:
        try:
            # The store's client would wait as well, and fill the screen with what it thinks of that.
            with socket.create_connection(job, timeout=5.0):
                pass
            return store_of_job(*job)
        except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
            if time.monotonic() > end_s:
                raise TrainingError(
                    f"no job at {job[0]}:{job[1]} within {deadline_s:g} s ({str(error).splitlines()[0]}): give --job "
                    "MASTER_ADDR:MASTER_PORT of its workers"
                ) from error
            time.sleep(0.2)
