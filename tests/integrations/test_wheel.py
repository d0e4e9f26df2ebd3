"""The wheel builds, installs in a clean venv beside nothing but what it declares, and does what the start page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_examples import LIMIT_S, ROOT

from documents import python_blocks


def run(*argv: str, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GRADIENTFLOW"))}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(argv, cwd=cwd, env=clean, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{argv}:\n{done.stdout}{done.stderr}"
    return done.stdout


def declared(name: str) -> set[str]:
    """Distributions that it cannot do without, and they without."""
    found, unread = set(), [name]
    while unread:
        for text in distribution(unread.pop()).requires or ():
            needed = Requirement(text)
            if needed.name not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                found.add(needed.name)
                unread.append(needed.name)
    return found


def link(name: str, packages: Path) -> None:
    """As if it were installed there: gigabytes need no copy."""
    installed = distribution(name)
    for top in {path.parts[0] for path in installed.files or () if path.parts[0] not in ("..", "__pycache__")}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(installed.locate_file(top))))


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its `bin`."""
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(ROOT), cwd=place)
    (wheel,) = place.glob("gradientflow-*-py3-none-any.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(place / "venv"), cwd=place)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    for name in declared("gradientflow"):
        link(name, packages)
    into = ["--python", str(place / "venv" / "bin" / "python"), "install", "--quiet", "--no-index"]
    run(sys.executable, "-m", "pip", *into, str(wheel), cwd=place)  # refuses if something declared is not there
    return place / "venv" / "bin"


def test_commands_work_and_what_they_read_came_along(venv: Path, tmp_path: Path) -> None:
    program = str(venv / "gradientflow")
    assert run(program, "--version", cwd=tmp_path).startswith("gradientflow ")
    found = json.loads(run(program, "simulate", "--workload", "resnet-50", "--workers", "8", "--json", cwd=tmp_path))
    assert found["iteration_s"] > 0


@pytest.mark.timeout(2 * LIMIT_S)
def test_the_script_of_the_start_page_trains(venv: Path, tmp_path: Path) -> None:
    (block,) = [block for block in python_blocks(ROOT / "docs" / "index.md") if "attach" in block.text]
    (tmp_path / "train.py").write_text(block.text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "chosen:" in run(str(venv / "python"), *torchrun, "train.py", cwd=tmp_path)
