"""gradientflow: the communication backend for PyTorch data-parallel training.

    import gradientflow as gf

    with gf.attach(model, optimizer, "lazy") as flow:
        for batch in data:
            optimizer.zero_grad()
            loss(model, batch).backward()   # returns with gradients averaged over all ranks
            optimizer.step()

Importing the package starts nothing and reads no environment; names are loaded when first used, so the
command line does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradientflow.errors import (
        DeadlineError,
        DisagreementError,
        DocumentError,
        GradientFlowError,
        NonFiniteError,
        NothingToTrainError,
        PeerError,
        RecipeError,
        TrainingError,
        UsageError,
        UserError,
    )
    from gradientflow.integrations.ddp import DistributedDataParallel
    from gradientflow.integrations.hook import HookState, hook
    from gradientflow.lab.measure import profile
    from gradientflow.plan import Message, Plan, Slice
    from gradientflow.profiles import Profile, TensorProfile
    from gradientflow.recipe import Recipe
    from gradientflow.rundir import RunDirectory
    from gradientflow.runtime.attach import attach
    from gradientflow.runtime.averager import Averager
    from gradientflow.runtime.checkpoints import load, save
    from gradientflow.runtime.handle import Flow
    from gradientflow.runtime.start import init_from_mpi
    from gradientflow.sync import Sync
    from gradientflow.trace import Span, Trace

__version__ = "0.1.0"

_HOME = {
    "Averager": "runtime.averager",
    "DeadlineError": "errors",
    "DisagreementError": "errors",
    "DistributedDataParallel": "integrations.ddp",
    "DocumentError": "errors",
    "Flow": "runtime.handle",
    "GradientFlowError": "errors",
    "HookState": "integrations.hook",
    "Message": "plan",
    "NonFiniteError": "errors",
    "NothingToTrainError": "errors",
    "PeerError": "errors",
    "Plan": "plan",
    "Profile": "profiles",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "RunDirectory": "rundir",
    "Slice": "plan",
    "Span": "trace",
    "Sync": "sync",
    "TensorProfile": "profiles",
    "Trace": "trace",
    "TrainingError": "errors",
    "UsageError": "errors",
    "UserError": "errors",
    "attach": "runtime.attach",
    "hook": "integrations.hook",
    "init_from_mpi": "runtime.start",
    "load": "runtime.checkpoints",
    "profile": "lab.measure",
    "save": "runtime.checkpoints",
}

__all__ = [
    "Averager",
    "DeadlineError",
    "DisagreementError",
    "DistributedDataParallel",
    "DocumentError",
    "Flow",
    "GradientFlowError",
    "HookState",
    "Message",
    "NonFiniteError",
    "NothingToTrainError",
    "PeerError",
    "Plan",
    "Profile",
    "Recipe",
    "RecipeError",
    "RunDirectory",
    "Slice",
    "Span",
    "Sync",
    "TensorProfile",
    "Trace",
    "TrainingError",
    "UsageError",
    "UserError",
    "attach",
    "hook",
    "init_from_mpi",
    "load",
    "profile",
    "save",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradientflow' has no attribute {name!r}")
    return getattr(import_module(f"gradientflow.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
