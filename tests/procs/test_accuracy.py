"""The script that measures what compression costs in accuracy runs to its end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from gradientflow.bench.learning import Learning

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *arguments])
    importlib.import_module("accuracy").main()


@pytest.mark.slow
def test_a_short_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    run(monkeypatch, *"--task digits --workers 2 --seeds 1 --steps 4 --out".split(), str(out))
    (found,) = Learning.read(out).comparisons
    assert len(found.trainings) == 5 and len(found.differences) == 4
    # So few steps have no warm-up. The same weights, batches and choices give the same accuracy.
    csc, without = found.of("csc"), found.of("csc, no warm-up")
    assert csc[0].recipe == without[0].recipe
    assert [each.last for each in csc] == [each.last for each in without]
    assert "csc, neither" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds must be 1 or more"),
        (["--workers", "1"], "--workers must be 2 or more"),
        (["--task", "poetry"], "poetry"),
        (["--out", "/no/such/place.json"], "no directory"),
    ],
)
def test_bad_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
