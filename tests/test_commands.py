"""Every command that is printed in a document exists and takes what it is given there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from documents import PAGES, ROOT, Command, commands
from gradientflow.cli import app

FOUND = [(page, command) for page in PAGES for command in commands(page)]
#: Scripts of the reader's own.
THEIRS = {"train.py", "model.py"}


def parse_ours(words: list[str], mentioned: bool = False) -> None:
    group = typer.main.get_command(app)
    if not words or words[0] in {"--help", *(option for parameter in group.params for option in parameter.opts)}:
        return
    name, *arguments = words
    assert name in group.commands, f"there is no command {name}"
    command = group.commands[name]
    if mentioned:
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= known, words
        return
    with command.make_context(name, list(arguments)):
        pass


def check_script(path: str) -> None:
    if path.endswith(".py") and path not in THEIRS:
        assert (ROOT / path).exists(), path


def parse_torchrun(words: list[str]) -> None:
    found = get_args_parser().parse_args(words)
    if found.module:
        assert found.training_script == "gradientflow"
        parse_ours(found.training_script_args)
    else:
        check_script(found.training_script)


def check(command: Command) -> None:
    program, *rest = command.words
    if program == "gradientflow":
        parse_ours(rest, command.mentioned)
    elif program == "torchrun" and not command.mentioned:
        parse_torchrun(rest)
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert rest[0] in targets, rest
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for asked in re.findall(r"gradientflow\[([\w,]+)\]", " ".join(rest)):
            assert set(asked.split(",")) <= set(extras), asked
    elif program == "python" and rest[:2] == ["-m", "gradientflow"]:
        parse_ours(rest[2:])
    elif program.startswith("examples/"):
        assert (ROOT / program).exists(), program
    for word in rest:
        if re.fullmatch(r"(examples|benchmarks|tests)/[\w./-]+", word):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize(
    ("page", "command"), FOUND, ids=[f"{page.relative_to(ROOT)}: {' '.join(each.words)}" for page, each in FOUND]
)
def test_a_command_in_a_document_exists_and_parses(page: Path, command: Command) -> None:
    try:
        check(command)
    except SystemExit as refused:  # argparse
        pytest.fail(f"torchrun does not take {command.words}: {refused}")


def test_commands_are_found_where_they_are() -> None:
    written = [command.words for _, command in FOUND if not command.mentioned]
    programs = [words[0] for words in written]
    assert programs.count("gradientflow") > 30 and programs.count("torchrun") > 5 and "make" in programs
    shown = {words[1] for words in written if words[0] == "gradientflow"}
    assert shown >= set(typer.main.get_command(app).commands) - {"demo"}, "a command that no document shows"


@pytest.mark.parametrize(
    "wrong",
    [
        ["gradientflow", "rnu", "train.py"],
        ["gradientflow", "--complete-me"],
        ["gradientflow", "bench", "--workloads", "resnet-50"],
        ["gradientflow", "run", "--workers", "four", "train.py"],
        ["torchrun", "--nprocs", "2", "train.py"],
        ["python", "examples/missing.py"],
        ["pip", "install", "gradientflow[missing]"],
        ["make", "missing"],
    ],
)
def test_a_wrong_command_would_be_found(wrong: list[str]) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(Command(wrong, mentioned=False))
