"""What looks after workers of one host that live and die each by itself, and where their store listens."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradientflow as gf
from gradientflow.cli.elastic import _look_after, _Worker, open_store, run_elastic
from gradientflow.errors import TrainingError, UsageError
from gradientflow.recipe import Recipe


def ending_with(code: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", f"exit {code}"])


def beginning(codes: list[int]) -> Callable[[], subprocess.Popen[bytes]]:
    return lambda: ending_with(codes.pop(0))


def test_who_fails_is_started_anew_as_often_as_it_may() -> None:
    codes = [1, 1, 0]
    _look_after({0: _Worker(ending_with(1))}, [], beginning(codes), max_restarts=3)
    assert not codes
    with pytest.raises(TrainingError, match="worker 0 failed with exit code 3"):
        _look_after({0: _Worker(ending_with(3))}, [], beginning([3]), max_restarts=1)


def test_nobody_joins_those_who_have_come_to_the_end() -> None:
    done = ending_with(0)
    done.wait()
    _look_after({0: _Worker(done), 1: _Worker(ending_with(1))}, [], beginning([]), max_restarts=3)


def test_a_store_listens_where_it_is_told() -> None:
    here = open_store("127.0.0.1", 0)
    open_store("127.0.0.2", here.port)  # another address, the same port
    with pytest.raises(UsageError, match="in use"):
        open_store("127.0.0.1", here.port)
    with pytest.raises(UsageError, match="no store at 203"):
        open_store("203.0.113.1", 0)


@pytest.mark.parametrize("recipe", ["lazy@local:8", "lazy-ps:1", "lazy-ps@ssp:4"])
def test_recipes_whose_workers_cannot_come_and_go_are_refused_before_anything_starts(recipe: str) -> None:
    with pytest.raises(UsageError, match="--elastic with recipe"):
        run_elastic(["false"], Recipe.parse(recipe).check(), 2, None, 0, {}, None)


@pytest.mark.parametrize(
    ("recipe", "optimizer", "options", "words"),
    [
        ("auto", torch.optim.SGD, {}, "auto races plans"),
        ("lazy-ps", torch.optim.SGD, {}, "sums through servers"),
        ("lazy@local:4", torch.optim.SGD, {}, "let servers keep the parameters, -ps:1@local:4"),
        ("lazy", torch.optim.LBFGS, {}, "LBFGS"),
        ("flow", torch.optim.SGD, {"gate": True}, "gate=True"),
        ("lazy", torch.optim.SGD, {"scaler": torch.amp.GradScaler("cpu")}, "GradScaler"),
    ],
)
def test_what_workers_that_come_and_go_cannot_have_is_said(
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, object],
    words: str,
) -> None:
    told = {"GRADIENTFLOW_ELASTIC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=words):
        gf.attach(model, optimizer(model.parameters()), recipe, **options)


def test_a_launcher_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIENTFLOW_ELASTIC", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="where the job's store is"):
        gf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
