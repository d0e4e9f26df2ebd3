"""Real ranks for tests: processes with a Gloo group over a file, results and errors brought back.

Processes are forked from a server that has torch loaded, so a world of four starts in a fraction of a
second. Nothing waits for ever: a rank that does not answer fails the test with every rank's last words.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = mp.get_context("forkserver")
# torch._dynamo: the first optimizer of a process loads it, for more than a second. pytest: the test's own file does.
_CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.nn.parallel", "gradientflow.runtime.attach", "pytest"]
)


class RankFailed(AssertionError):
    """Some rank raised, died or never answered."""


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0, lost: tuple[int, ...] = ()
) -> list[Any]:
    """`function(*args)` on each of `world` ranks inside an initialised default group; results by rank.

    Nothing is expected of the `lost` ranks: they may die or stop, and are killed when the others are done."""
    (found,) = run_at_once(world, function, [args], timeout_s=timeout_s, lost=lost)
    return found


def run_at_once(
    world: int,
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float = 90.0,
    lost: tuple[int, ...] = (),
) -> list[list[Any]]:
    """For each of these arguments a world of its own, side by side: for ranks that wait more than they compute."""
    with contextlib.ExitStack() as stack:
        worlds = [stack.enter_context(_started(world, function, args, lost)) for args in calls]
        return [_collect(pipes, processes, timeout_s, lost) for pipes, processes in worlds]


@contextlib.contextmanager
def _started(
    world: int, function: Callable[..., Any], args: tuple[Any, ...], lost: tuple[int, ...]
) -> Iterator[tuple[list[Connection], list[Any]]]:
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = str(Path(directory) / "rendezvous")
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank, args=(rank, world, rendezvous, theirs, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            yield pipes, processes
        finally:
            for rank, process in enumerate(processes):
                process.join(timeout=0 if rank in lost else 5)
                if process.is_alive():
                    process.kill()
                    process.join()


def kept(state: dict[str, Any]) -> Any:
    """Of a flow's state, what its rank keeps for itself."""
    (found,) = state["ranks"].values()
    return found


class Script:
    """A Python script in a process and session of its own. It is forked with torch loaded, which saves seconds, and
    ends as any interpreter does: exit handlers, threads, modules."""

    def __init__(self, path: Path, arguments: tuple[str, ...] = (), **environment: str) -> None:
        self._outputs = [Path(tempfile.mkstemp(dir=path.parent)[1]) for _ in range(2)]
        self._process = _CONTEXT.Process(target=_as_main, args=(path, arguments, environment, self._outputs))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, negative if a signal ended it."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"the script still runs: {self.stderr}")
        return self._process.exitcode

    def kill(self) -> None:
        """With all that it started."""
        if self._process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()


def _as_main(path: Path, arguments: tuple[str, ...], environment: dict[str, str], outputs: list[Path]) -> None:
    gc.freeze()  # what is loaded already need not be searched for garbage at the end
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY), number)
    os.environ.update(environment)
    sys.argv = [str(path), *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(path)
    code: object = 0
    try:
        exec(compile(path.read_text(), path, "exec"), main.__dict__)
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    # A process of multiprocessing would end without all that an interpreter does at its end.
    ctypes.pythonapi.Py_Exit(code)


def _rank(rank: int, world: int, rendezvous: str, pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        outcome: tuple[bool, Any] = (True, function(*args))
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("gradientflow")]
        if left:
            outcome = (False, f"threads left behind: {left}")
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if outcome[0]:
        dist.destroy_process_group()


def _collect(pipes: list[Connection], processes: list[Any], timeout_s: float, lost: tuple[int, ...]) -> list[Any]:
    end_s = time.monotonic() + timeout_s
    outcomes: dict[int, tuple[bool, Any]] = {rank: (True, None) for rank in lost}
    while len(outcomes) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in outcomes}
        # Once one rank has failed the others are given a moment to say what they saw.
        patience_s = end_s - time.monotonic()
        if any(not fine for fine, _ in outcomes.values()):
            patience_s = min(patience_s, 5.0)
        answered = wait(list(waiting), timeout=max(0.0, patience_s))
        if not answered:
            outcomes.update({rank: (False, "no answer") for rank in waiting.values()})
        for pipe in answered:
            try:
                outcomes[waiting[pipe]] = pickle.loads(pipe.recv_bytes())  # type: ignore[index]
            except EOFError:
                process = processes[waiting[pipe]]  # type: ignore[index]
                process.join(timeout=5)
                outcomes[waiting[pipe]] = (False, f"died with exit code {process.exitcode}")  # type: ignore[index]
    failed = {rank: words for rank, (fine, words) in sorted(outcomes.items()) if not fine}
    if failed:
        raise RankFailed("\n".join(f"--- rank {rank}:\n{words}" for rank, words in failed.items()))
    return [outcomes[rank][1] for rank in range(len(pipes))]
