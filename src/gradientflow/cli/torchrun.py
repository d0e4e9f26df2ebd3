"""torchrun, as `launch` starts it: its verdict goes to a pipe as words, not to stderr as a traceback.

python -m gradientflow.cli.torchrun PIPE TORCHRUN_ARGUMENTS...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def main() -> None:
    _end_with_parent()
    pipe = int(sys.argv[1])
    try:
        run.main(sys.argv[2:])
    except SignalException as stopped:
        _kill_children()
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        _conclude(pipe, _describe(*error.get_first_failure()))
    except Exception as error:
        _conclude(pipe, f"torchrun could not go on: {type(error).__name__}: {error}".splitlines()[0])


def _conclude(pipe: int, verdict: str) -> None:
    with os.fdopen(pipe, "w") as file:
        file.write(verdict)
    sys.exit(1)


def _describe(rank: int, failure: ProcessFailure) -> str:
    how = f"ended by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
    return f"rank {rank} was the first to fail, {how}"


def _end_with_parent() -> None:
    """Be told to stop if the command that started us is killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _kill_children() -> None:
    """A hack: torchrun forgets the workers it is just starting when the signal comes. Each leads a session."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(child), signal.SIGKILL)


if __name__ == "__main__":
    main()
