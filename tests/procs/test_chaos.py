"""Faults on purpose, a few of each: the table that `make chaos` makes, in small. And that its judge can say no."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("chaos")


@pytest.fixture
def endurance(chaos: ModuleType) -> ModuleType:
    return importlib.import_module("endurance")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_of_each(chaos: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "chaos.json"
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--times", "small", "--out", str(out)])
    chaos.main()
    rows = json.loads(out.read_text())["rows"]
    assert {chaos.IN_PLACE, chaos.STOPS, chaos.POISON} <= {row["fault"] for row in rows}
    for row in rows:
        assert row["survived"] == row["tried"] and not row["steps_lost"] and not row["wrong"], row


def diaries(chaos: ModuleType) -> dict[str, list[dict[str, Any]]]:
    """Worker 2 takes steps 0 to 2 and is killed in step 3, which it alone has finished; then 0 and 1 take it, 1 by
    taking over what 0 has."""
    found: dict[str, list[dict[str, Any]]] = {"0": [], "1": [], "2": []}
    weight = velocity = 0.0
    for step in range(6):
        crew, generation = ((0, 1, 2), 1) if step < 3 else ((0, 1), 2)
        velocity += sum(chaos.gradient(member, step) for member in crew) / len(crew)
        weight -= velocity
        facts = {"step": step, "crew": crew, "generation": generation, "low": weight, "high": weight, "alike": [weight]}
        for worker in crew:
            found[str(worker)].append({**facts, "took": (step, worker) != (3, 1)})
    orphan = {"step": 3, "crew": (0, 1, 2), "generation": 1, "low": 5.0, "high": 5.0, "alike": [5.0], "took": True}
    found["2"].append(orphan)
    return found


def test_a_right_history(chaos: ModuleType) -> None:
    assert chaos.history_of(diaries(chaos), exact=True) == (6, 1, [])


@pytest.mark.parametrize(
    ("worker", "step", "change", "words"),
    [
        ("0", 4, {"low": 1.0}, "expected"),
        ("0", 4, {"alike": [0.5]}, "workers differ"),
        ("1", 4, {"crew": (1,)}, "was taken by"),
        ("0", 3, {"took": False}, "workers differ"),
    ],
)
def test_a_wrong_one(chaos: ModuleType, worker: str, step: int, change: dict[str, Any], words: str) -> None:
    wrong = copy.deepcopy(diaries(chaos))
    wrong[worker][step] |= change
    problems = chaos.history_of(wrong, exact=True).problems
    assert problems and words in problems[0], problems


def test_a_step_that_nobody_took(chaos: ModuleType) -> None:
    found = {worker: [facts for facts in diary if facts["step"] != 4] for worker, diary in diaries(chaos).items()}
    assert "step 4 was taken by nobody" in chaos.history_of(found, exact=True).problems[0]


def test_the_table_in_the_documents_is_what_was_measured(chaos: ModuleType) -> None:
    page = (BENCHMARKS.parent / "docs" / "faults.md").read_text()
    files = sorted(BENCHMARKS.glob("results/*-chaos-*.json"))
    assert files and all(file.name in page for file in files)
    found = chaos.rows([trial for file in files for trial in json.loads(file.read_text())["trials"]])
    assert chaos.table(found) in page


def test_a_story_follows_from_its_seed_and_spares_who_is_watched(endurance: ModuleType) -> None:
    story = [endurance.chapter_of(1, number) for number in range(60)]
    assert (
        story
        == [endurance.chapter_of(1, number) for number in range(60)]
        != [endurance.chapter_of(2, n) for n in range(60)]
    )
    taken = {fault.host for chapter in story for fault in chapter.faults if fault.what not in ("stop", "cut off")}
    assert taken == {1, 2}
    together = {fault.what for chapter in story if not chapter.come_and_go for fault in chapter.faults}
    assert together == {"stop", "cut off"}


def test_growth_is_seen(endurance: ModuleType) -> None:
    """A megabyte a minute, in two hours; what caches took in the first quarter of it does not count."""
    flat = [(60.0 * minute, {"resident_mb": min(minute, 30)}) for minute in range(120)]
    leaking = [(60.0 * minute, {"resident_mb": minute}) for minute in range(120)]
    assert endurance.flatness(flat)["resident_mb"]["growth an hour"] == 0
    assert endurance.flatness(leaking)["resident_mb"]["growth an hour"] == 60
    assert endurance.flatness(leaking)["resident_mb"]["quarter 4"] == 104.5
    assert endurance.flatness(flat[:7]) == {}
