"""Where the threads of this process are, for one of them that watches the others.

A running thread's frames are not to be walked from another one: between two of them it may go on, and then `f_back`, in
Python 3.11, was at times no frame but whatever lay there by then, which has ended processes (CPython's issue 99110).
`faulthandler` writes all stacks down while no other thread can run, and makes no object that could move anything.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from typing import BinaryIO, NamedTuple


class Line(NamedTuple):
    """A call that is not over."""

    path: str
    number: int
    function: str


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_CUT = re.compile(r"^ *\.\.\.$", re.MULTILINE)


class Stacks(NamedTuple):
    """By thread, the innermost call first."""

    of: dict[int, tuple[Line, ...]]
    #: Else there are more than a hundred threads, or calls of one, or no file was to be had; the innermost are there.
    whole: bool


def stacks() -> Stacks:
    """Of this process, now."""
    try:
        with _unnamed_file() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return parse(file.read().decode(errors="replace"))
    except OSError:
        return Stacks({}, whole=False)


def parse(text: str) -> Stacks:
    """
    >>> parse('Thread 0x00ff (most recent call first):\\n  File "a.py", line 7 in work\\n')
    Stacks(of={255: (Line(path='a.py', number=7, function='work'),)}, whole=True)
    """
    found: dict[int, list[Line]] = {}
    lines: list[Line] = []
    for each in text.splitlines():
        if thread := _THREAD.match(each):
            lines = found.setdefault(int(thread[1], 16), [])
        elif line := _LINE.fullmatch(each):
            lines.append(Line(line[1], int(line[2]) if line[2].isdigit() else 0, line[3]))
    return Stacks({thread: tuple(lines) for thread, lines in found.items()}, whole=not _CUT.search(text))


def as_written(path: str) -> str:
    r"""As paths are in `Line`s.

    >>> print(as_written("/home/jürgen"))
    /home/j\xfcrgen
    """
    return path.encode("ascii", "backslashreplace").decode()


def _unnamed_file() -> BinaryIO:
    """Not a pipe: who fills one up waits for somebody to read it, and nobody can run meanwhile."""
    if hasattr(os, "memfd_create"):  # not in every Python on Linux: some are built for an older libc
        return open(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()
