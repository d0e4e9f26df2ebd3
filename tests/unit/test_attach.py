"""What `attach` refuses before it touches a network, and how the environment and the call share the recipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradientflow as gf
from gradientflow.runtime.settings import Settings


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_without_a_process_group_it_says_what_to_do() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(gf.UsageError, match="init_process_group"):
        gf.attach(model, sgd(model))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (lambda m: (m, sgd(nn.Linear(3, 3))), "2 parameters that are not the model's"),
        (lambda m: (m, "adam"), "expected a torch.optim.Optimizer"),
        (lambda m: ("model", sgd(m)), "expected a torch.nn.Module"),
        (lambda m: (m, sgd(m), "lazy+zip"), "no codec 'zip'"),
    ],
)
def test_wrong_arguments_are_named(arguments, sentence: str) -> None:
    with pytest.raises(gf.UserError, match=sentence):
        gf.attach(*arguments(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("deadline_s", 0), ("deadline_s", float("inf")), ("deadline_s", "5"), ("profile", 3), ("recipe", 5)],
)
def test_odd_values_are_named(name: str, value: object) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(gf.UserError, match=name):
        gf.attach(model, sgd(model), **{name: value})


def test_a_lazy_module_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(gf.UsageError, match="no shape yet"):
        gf.attach(model, torch.optim.SGD(nn.Linear(1, 1).parameters()))


def test_call_and_environment_may_not_contradict_each_other() -> None:
    assert str(Settings().choose(None)) == "auto"
    assert str(Settings(elastic=True).choose(None)) == "lazy", "auto needs workers that stay"
    assert str(Settings(recipe="bsp").choose(None)) == "bsp"
    assert str(Settings(recipe="bsp").choose("bsp")) == "bsp"
    with pytest.raises(gf.UsageError, match="'wfbp' and GRADIENTFLOW_RECIPE says 'bsp'"):
        Settings(recipe="bsp").choose("wfbp")


def test_the_switch_is_on_or_off() -> None:
    assert Settings.from_environment({}).on
    assert not Settings.from_environment({"GRADIENTFLOW": "off"}).on
    with pytest.raises(gf.UsageError, match="write on or off"):
        Settings.from_environment({"GRADIENTFLOW": "no"})
