"""Hooks on a user's modules that stay with the original.

`copy.deepcopy(model)` and `torch.save(model)` take a module's hooks along. A copy of the model belongs to
no flow, so a hook that is copied or pickled becomes one that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OriginalOnly:
    """Calls `function`; its copies do not."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., OriginalOnly], tuple[Callable[..., Any]]]:
        return OriginalOnly, (_nothing,)


def _nothing(*args: object) -> None:
    pass
