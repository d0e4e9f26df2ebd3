"""Gradients of distributed autograd (`torch.distributed.autograd`): they lie in a context, not in `.grad`.

Hooks on `.grad` are never called then. The nodes that add gradients up do call theirs, and a context hands out
the tensors themselves, so that averages can be written back in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.runtime.autograd import accumulator_of, gradients_in


class ContextGradients:
    """Follows one context after the other."""

    def __init__(self) -> None:
        #: None: gradients go into `.grad`, as usual.
        self.context: int | None = None
        self._nodes: list[torch.autograd.graph.Node] = []

    def watch(self, parameters: Sequence[nn.Parameter], arrived: Callable[[int], None]) -> list[RemovableHandle]:
        """Call `arrived(index)` for every gradient that goes into a context."""
        if self._nodes:
            return []
        self._nodes = [accumulator_of(parameter) for parameter in parameters]  # hooks live as long as these
        return [node.register_hook(self._hook(index, arrived)) for index, node in enumerate(self._nodes)]

    def _hook(self, index: int, arrived: Callable[[int], None]) -> Callable[..., None]:
        def hook(*gradients: object) -> None:
            if self.context is not None:
                arrived(index)

        return hook

    @contextlib.contextmanager
    def in_grad(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, the context's gradients are where everybody looks for them; what they have become is put back."""
        assert self.context is not None
        found = gradients_in(self.context)
        ours = [parameter for parameter in parameters if parameter in found]
        before = [parameter.grad for parameter in ours]
        for parameter in ours:
            parameter.grad = found[parameter]
        try:
            yield
            with torch.no_grad():
                for parameter in ours:
                    if parameter.grad is not None and parameter.grad is not found[parameter]:
                        found[parameter].copy_(parameter.grad)
        finally:
            for parameter, gradient in zip(ours, before, strict=True):
                parameter.grad = gradient
