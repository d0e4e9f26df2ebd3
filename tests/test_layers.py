"""Imports point down only, and what must stay in one place does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradientflow

SOURCE = Path(gradientflow.__file__).parent

#: From top to bottom. A room may import from rooms below its own line, and from its own room.
FLOORS = (
    {"__main__"},
    {"cli"},
    {"doctor"},
    {"bench"},
    {"integrations"},
    {"runtime"},
    {"tune"},
    {"sim"},
    {"lab", "probe"},
    {"rundir", "account"},
    {"recipe"},
    {"exchange"},
    {"schedule"},
    {"cost", "compress"},
    {"patterns", "plan", "sync", "trace"},
    {"profiles", "network", "outer"},
    {"documents"},
    {"saved"},
    {"errors", "processes"},
)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    here = room_of(path)
    assert here in floor, f"give {here!r} a floor"
    for module in imports(path):
        if module.startswith("gradientflow."):
            there = module.split(".")[1]
            assert there == here or floor[there] > floor[here], f"{here} imports {there}, which is not below it"


def test_the_runtime_and_the_simulator_do_not_know_each_other() -> None:
    """They agree through plans, synchronisation, codecs' traffic and traces alone."""
    for path in FILES:
        if room_of(path) in {"runtime", "exchange", "integrations"}:
            assert not [module for module in imports(path) if module.startswith("gradientflow.sim")]
    assert not [path for path in FILES if room_of(path) == "sim" and "gradientflow.runtime" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_that_know_no_network(path: Path) -> None:
    if room_of(path) in {"compress", "patterns", "plan", "profiles", "recipe", "schedule", "sync", "trace"}:
        assert not [module for module in imports(path) if module.startswith("torch.distributed")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_torch_names_live_in_one_file(path: Path) -> None:
    if path == SOURCE / "runtime" / "autograd.py":
        return
    assert not re.search(r"_execution_engine|torch\._[^_]", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_environment_is_read_at_the_edges(path: Path) -> None:
    edges = {SOURCE / "runtime" / "settings.py", SOURCE / "runtime" / "start.py"}
    if room_of(path) not in {"cli", "bench"} and path not in edges:
        assert not re.search(r"os\.(environ|getenv)", path.read_text())


def test_importing_starts_nothing_and_does_not_load_torch() -> None:
    code = (
        "import os, sys, threading, logging\n"
        "class Watched(dict):\n"
        "    def __getitem__(self, key): assert 'GRADIENTFLOW' not in key; return super().__getitem__(key)\n"
        "    def get(self, key, default=None): assert 'GRADIENTFLOW' not in key; return super().get(key, default)\n"
        "os.environ = Watched(os.environ)\n"
        "import gradientflow\n"
        "assert 'torch' not in sys.modules, 'torch is loaded too early'\n"
        "gradientflow.attach\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not logging.getLogger('gradientflow').handlers and not logging.getLogger().handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
