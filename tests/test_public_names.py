"""The public names are a promise: they change on purpose or not at all."""

from __future__ import annotations

import inspect

import torch

import gradientflow as gf

NAMES = {
    "Averager",
    "DeadlineError", "DisagreementError", "DistributedDataParallel", "DocumentError", "Flow", "GradientFlowError",
    "HookState",
    "Message", "NonFiniteError", "NothingToTrainError", "PeerError", "Plan", "Profile", "Recipe", "RecipeError",
    "RunDirectory", "Slice", "Span", "Sync", "TensorProfile", "Trace", "TrainingError", "UsageError", "UserError",
    "attach",
    "hook", "init_from_mpi", "profile",
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
                "close", "gated", "__enter__", "__exit__"}  # fmt: skip
    for_wrappers = {
        "begin_forward",
        "end_forward",
        "arm",
        "broadcast",
        "contribute",
        "shadow_step",
        "follow_context",
        "look_again",
        "catch_up",
    }
    assert promised <= set(dir(gf.Flow))
    public = {name for name in dir(gf.Flow) if not name.startswith("_")}
    assert public == {name for name in promised | for_wrappers if not name.startswith("_")}


def test_the_drop_in_takes_what_torchs_class_takes_in_the_same_order() -> None:
    stock = list(inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters)
    ours = list(inspect.signature(gf.DistributedDataParallel.__init__).parameters)
    assert ours[: len(stock)] == stock
    assert ours[len(stock) :] == ["recipe", "deadline_s", "nonfinite", "optimizer", "scaler"]
