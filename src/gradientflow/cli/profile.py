"""`gradientflow profile`: a model's tensors with their seconds, for `bench --workload` and whoever plans."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gradientflow.cli.console import megabytes, milliseconds
from gradientflow.errors import UsageError


def profile(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="FUNCTION() returns a model, a batch, and loss(model, batch). Or package.module:FUNCTION.",
        ),
    ],
    steps: Annotated[int, typer.Option(help="Forward and backward passes; the medians are kept.")] = 5,
    out: Annotated[Path, typer.Option(help="Where to write it.")] = Path("profile.json"),
) -> None:
    """Measure a real model's forward and backward pass, tensor by tensor."""
    from gradientflow.documents import check_writable

    if steps < 1:
        raise UsageError(f"--steps must be 1 or more, found {steps}")
    check_writable(out)
    model, batch, loss = _made_by(_function(target), target)
    from gradientflow.lab.measure import profile as measure

    found = measure(model, batch, loss, steps=steps)
    found.write(out)
    print(
        f"{len(found.tensors)} tensors, {found.numel / 1e6:.2f} M parameters, {megabytes(found.nbytes)} of gradients\n"
        f"forward {milliseconds(found.forward_s)}, backward {milliseconds(found.backward_s)}, "
        f"{found.flops / 1e9:.3g} GFLOP an iteration\nWritten to {out}"
    )


def _function(target: str) -> Callable[[], Any]:
    source, _, name = target.rpartition(":")
    if not source or not name.isidentifier():
        raise UsageError(f"{target}: write FILE.py:FUNCTION or package.module:FUNCTION")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise UsageError(f"there is no file {source}")
        found = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert found is not None and found.loader is not None
        sys.path.insert(0, str(Path(source).absolute().parent))  # as `python FILE.py` does
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module  # dataclasses and pickle look there
        found.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise UsageError(f"{target}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{source} has no function {name}")
    return function  # type: ignore[no-any-return]


def _made_by(function: Callable[[], Any], target: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    from torch import nn

    made = function()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[2])):
        raise UsageError(f"{target} has to return (model, batch, loss) with loss(model, batch) -> one number")
    return made
