"""The site builds without a warning: every page is in the navigation, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_examples import ROOT

import gradientflow
from gradientflow.cli import app


def test_the_site_builds_and_every_page_has_its_place(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make test-integrations has it")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        made = tmp_path / (name.parent if name.name == "index" else name) / "index.html"
        assert made.exists(), page
        text = made.read_text()
        assert "<h1" in text
        assert not re.search(r'<(script|link|img)[^>]* (src|href)="https?:', text), (
            "something is fetched from elsewhere"
        )
    reference = "".join(page.read_text() for page in (tmp_path / "reference").rglob("index.html"))
    for name in gradientflow.__all__:
        assert re.search(rf'<h[23] id="gradientflow\.{name}"', reference), f"{name} is not in the reference"
    for command in typer.main.get_command(app).commands:
        assert f'<h3 id="{command}"' in reference, f"{command} is not in the reference"
    assert "gt;&gt;&gt;" not in re.sub("<(pre|code).*?</\\1>", "", reference, flags=re.DOTALL), "an example is no block"
