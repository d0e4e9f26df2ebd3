"""Starts torchrun, follows it to its end, and never leaves it behind.

torchrun gets a session of its own: a Ctrl-C in the terminal then reaches this command alone, which asks
torchrun to stop, once. Two signals would break torchrun off while it is stopping its workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: torchrun gives workers 30 s to end on SIGTERM before it kills them; nothing of it is left after this.
_PATIENCE_S = 45.0


class Stopped(BaseException):
    """A signal asked this command to end; what it had started is gone."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


def launch(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    follow: Callable[[str], None] | None = None,
) -> str:
    """Run torchrun with `arguments`; "" if all workers ended well, else what went wrong, in a few words.

    follow: gets each line of the workers' stdout, which otherwise goes to `stdout`.
    """
    reader, writer = os.pipe()
    with os.fdopen(reader) as verdict, stoppable():
        child = subprocess.Popen(
            [sys.executable, "-m", "gradientflow.cli.torchrun", str(writer), *arguments],
            env=dict(environment),
            stdout=subprocess.PIPE if follow else stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        try:
            if follow:
                assert child.stdout is not None
                with child.stdout:
                    for line in child.stdout:
                        follow(line)
            exit_code = child.wait()
        except BaseException:
            _stop(child)
            raise
        if exit_code == 0:
            return ""
        return verdict.read() or f"torchrun ended with exit code {exit_code}"


def _stop(child: subprocess.Popen[str]) -> None:
    with _on_signals(signal.SIG_IGN):
        child.terminate()
        try:
            child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def stoppable() -> contextlib.AbstractContextManager[None]:
    """A signal that asks this command to end raises `Stopped` inside, so that everything is taken down on the way."""
    return _on_signals(_raise_stopped)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextlib.contextmanager
def _on_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    # What is ignored already stays so: under nohup, SIGHUP is not for us.
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heeded = [number for number, handled in before.items() if handled is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
