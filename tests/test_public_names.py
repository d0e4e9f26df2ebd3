"""The public names are a promise: they change on purpose or not at all."""

from __future__ import annotations

import inspect

import torch

import gradientflow as gf
from gradientflow.runtime.deltas import DeltaFlow

NAMES = {
    "Averager",
    "DeadlineError", "DisagreementError", "DistributedDataParallel", "DocumentError", "Flow", "GradientFlowError",
    "HookState",
    "Message", "NonFiniteError", "NothingToTrainError", "PeerError", "Plan", "Profile", "Recipe", "RecipeError",
    "RunDirectory", "Slice", "Span", "Sync", "TensorProfile", "Trace", "TrainingError", "UsageError", "UserError",
    "attach",
    "hook", "init_from_mpi", "load", "profile", "save",
}  # fmt: skip


def test_exactly_these_names_are_exported_and_all_of_them_load() -> None:
    assert set(gf.__all__) == NAMES == set(gf._HOME)
    for name in NAMES:
        assert getattr(gf, name).__name__ == name


def test_attach_keeps_its_arguments() -> None:
    parameters = inspect.signature(gf.attach).parameters
    assert list(parameters)[:5] == ["model", "optimizer", "recipe", "process_group", "scaler"]


def test_a_flow_keeps_its_methods() -> None:
    promised = {"no_sync", "synchronize", "trace", "profile", "plan", "memory", "step", "state_dict", "load_state_dict",
                "close", "gated", "average", "count", "alike", "cut", "crew", "carry", "explain", "is_trying",
                "__enter__", "__exit__"}  # fmt: skip
    assert promised <= set(dir(gf.Flow))
    public = {name for name in dir(gf.Flow) if not name.startswith("_")}
    assert public == {name for name in promised if not name.startswith("_")}
    assert {name for name in dir(DeltaFlow) if not name.startswith("_")} == public  # one script for all recipes


def test_the_drop_in_takes_what_torchs_class_takes_in_the_same_order() -> None:
    stock = list(inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters)
    ours = list(inspect.signature(gf.DistributedDataParallel.__init__).parameters)
    assert ours[: len(stock)] == stock
    assert ours[len(stock) :] == ["recipe", "deadline_s", "nonfinite", "optimizer", "scaler"]


def test_every_public_name_and_member_says_what_it_is() -> None:
    silent = [name for name in NAMES if not (getattr(gf, name).__doc__ or "").strip()]
    for name in NAMES:
        found = getattr(gf, name)
        members = vars(found).items() if inspect.isclass(found) else ()
        for member, value in members:
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not member.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(value):
                silent.append(f"{name}.{member}")
    assert not [each for each in silent if not each.startswith("DistributedDataParallel.")]  # torch's words
