"""What one thread sees of where the others are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from gradientflow.exchange.stacks import Line, Stacks, as_written, parse, stacks

LIMIT_S = 20.0


def watched(work: Callable[[Callable[[], object]], object]) -> tuple[Line, ...]:
    """The stack of a thread that runs `work`, as seen while it waits in what `work` is given."""
    arrived, leave = threading.Event(), threading.Event()

    def rest() -> None:
        arrived.set()
        assert leave.wait(LIMIT_S)

    thread = threading.Thread(target=work, args=(rest,))
    thread.start()
    try:
        assert arrived.wait(LIMIT_S) and thread.ident
        return stacks().of[thread.ident]
    finally:
        leave.set()
        thread.join(LIMIT_S)


def test_another_thread_s_calls_are_seen_with_their_lines() -> None:
    def outer(rest: Callable[[], object]) -> None:
        inner(rest)

    def inner(rest: Callable[[], object]) -> None:
        rest()

    own = [line for line in watched(outer) if line.path == __file__]
    assert [line.function for line in own] == ["rest", "inner", "outer"]
    numbers = [line.number for line in own]
    assert numbers[2] == outer.__code__.co_firstlineno + 1 and numbers[1] == inner.__code__.co_firstlineno + 1


def test_one_s_own_stack_is_among_them() -> None:
    seen = stacks()
    assert any(line.function == "test_one_s_own_stack_is_among_them" for line in seen.of[threading.get_ident()])


def test_of_deep_stacks_the_innermost_calls_are_seen_and_that_there_are_more() -> None:
    wholes: list[bool] = []

    def deep(rest: Callable[[], object], depth: int = 150) -> None:
        if depth:
            deep(rest, depth - 1)
        else:
            wholes.append(stacks().whole)
            rest()

    own = [line.function for line in watched(deep) if line.path == __file__]
    assert own[0] == "rest" and set(own[1:]) == {"deep"} and len(own) < 150
    assert wholes == [False]


def test_names_that_look_like_something_else() -> None:
    text = (
        'Current thread 0x0a [main "x"] (most recent call first):\n  File "a", line 3 in b.py", line ??? in <lambda>\n'
    )
    assert parse(text).of == {10: (Line('a", line 3 in b.py', 0, "<lambda>"),)}
    assert parse("").of == {} and parse("").whole
    assert not parse("Thread 0x1 (most recent call first):\n  ...\n").whole
    assert not parse("...\n").whole


def test_a_python_that_was_built_for_an_older_libc_has_stacks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    test_one_s_own_stack_is_among_them()


def test_paths_are_known_as_they_are_written() -> None:
    """`faulthandler` writes no letters but ASCII's."""
    path = "/home/jürgen/Ω/𝄞/a.py"
    source = compile("def here(look): return look()", path, "exec")
    names: dict[str, Callable[[Callable[[], Stacks]], Stacks]] = {}
    exec(source, names)
    own = names["here"](stacks).of[threading.get_ident()]
    assert as_written(path) in [line.path for line in own]
