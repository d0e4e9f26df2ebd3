"""What has won before: found again, bounded, and never believed unread."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gradientflow.errors import UsageError
from gradientflow.lab.workloads import workload
from gradientflow.recipe import as_recipe
from gradientflow.runtime.settings import Settings
from gradientflow.tune.candidates import Candidate
from gradientflow.tune.memory import MOST_FILES, MOST_NBYTES, TOLERANCE, Cache, Remembered, fingerprint_of_model


def remembered(model: str = "m", cluster: str = "c") -> Remembered:
    plan = as_recipe("lazy").plan(workload("alexnet"), 2)
    candidate = Candidate(recipe="lazy", plan=plan, predicted_s=0.5)
    return Remembered(model=model, cluster=cluster, candidate=candidate, iteration_s=0.4)


def test_what_was_kept_is_found_by_both_keys(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "there" / "is" / "none")
    assert cache.recall("m", "c") is None
    cache.keep(remembered())
    assert cache.recall("m", "c") == remembered() and cache.recall("m", "other") is None
    assert [path.name for path in cache.directory.iterdir()] == ["m-c.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2}', "\x00", '{"version": 1, "model": "m", "cluster": "c"}', "x" * (MOST_NBYTES + 1)],
)
def test_what_cannot_be_read_is_one_warning(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path)
    (tmp_path / "m-c.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cache.recall("m", "c") is None
    assert len(caplog.records) == 1 and "\n" not in caplog.text.strip()
    cache.keep(remembered())
    assert cache.recall("m", "c") == remembered()


def test_a_file_under_anothers_name_is_not_believed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep(remembered())
    os.rename(tmp_path / "m-c.json", tmp_path / "m-d.json")
    assert cache.recall("m", "d") is None


def test_a_directory_that_is_none_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    Cache(tmp_path / "file" / "auto").keep(remembered())
    assert len(caplog.records) == 1


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for number in range(MOST_FILES + 3):
        (tmp_path / f"{number}-c.json").write_text("{}")
        os.utime(tmp_path / f"{number}-c.json", (number, number))
    cache.keep(remembered())
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == MOST_FILES and "m-c.json" in left and "3-c.json" not in left and "4-c.json" in left


def test_other_models_have_other_fingerprints() -> None:
    small, large = workload("alexnet"), workload("vgg-16")
    turned = small.model_copy(update={"tensors": small.tensors[::-1]})
    assert fingerprint_of_model(small, "auto") == fingerprint_of_model(turned, "auto")
    assert (
        len({fingerprint_of_model(*facts) for facts in ((small, "auto"), (large, "auto"), (small, "auto+bf16"))}) == 3
    )


def test_it_holds_as_long_as_seconds_do() -> None:
    assert remembered().still_holds(0.4 * TOLERANCE * 0.99) and remembered().still_holds(0.4 / TOLERANCE * 1.01)
    assert not remembered().still_holds(0.4 * TOLERANCE * 1.01) and not remembered().still_holds(0.3)


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/gradientflow/auto"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/var/mine"}, "/var/mine/gradientflow/auto"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "not/absolute"}, "/home/me/.cache/gradientflow/auto"),
        ({}, None),
        ({"HOME": "/home/me", "GRADIENTFLOW_CACHE": "off"}, None),
    ],
)
def test_where_it_is(environment: dict[str, str], directory: str | None) -> None:
    found = Settings.from_environment(environment).cache
    assert (str(found) if found else None) == directory


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(UsageError, match="write on or off"):
        Settings.from_environment({"GRADIENTFLOW_CACHE": "maybe"})
