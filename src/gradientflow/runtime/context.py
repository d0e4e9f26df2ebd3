"""Gradients of distributed autograd (`torch.distributed.autograd`): they lie in a context, not in `.grad`.

The nodes that add gradients up call their hooks all the same, and a context hands out the tensors themselves, so that
averages can be written back in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from gradientflow.runtime.autograd import gradients_in


class ContextGradients:
    """Follows one context after the other."""

    def __init__(self) -> None:
        #: None: gradients go into `.grad`, as usual.
        self.context: int | None = None

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
