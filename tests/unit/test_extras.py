"""An integration whose library is not installed says which, and how to get it."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

INTEGRATIONS = ("accelerate", "lightning", "ray", "transformers")


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_a_missing_library_is_named_with_its_install_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in INTEGRATIONS:
        monkeypatch.setitem(sys.modules, library, None)  # as if it were not there
        monkeypatch.delitem(sys.modules, f"gradientflow.integrations.{library}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'gradientflow\[{name}\]'"):
        importlib.import_module(f"gradientflow.integrations.{name}")


def test_every_integration_has_an_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(INTEGRATIONS) <= project["optional-dependencies"].keys()
