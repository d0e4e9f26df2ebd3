"""Layers as data, and the four kinds of layer everything is built from.

Operations are counted as a profiler of matrix products counts them: two for a multiplication with its
addition, nothing for norms, activations and look-ups. `positions` is how often the weight is applied to one
sample: pixels of the output, or tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

Shape = tuple[int, ...]


class Layer(NamedTuple):
    """Tensors that one module uses together, by full name, and the operations of its forward pass on one sample."""

    tensors: dict[str, Shape]
    flops: float = 0.0

    def plus(self, flops: float) -> Layer:
        """The same layer, followed by work that needs no tensor of its own."""
        return self._replace(flops=self.flops + flops)


def convolution(
    name: str, inputs: int, outputs: int, kernel: int | tuple[int, int], positions: int, *, bias: bool = False
) -> Layer:
    """
    >>> convolution("conv", 3, 8, (1, 7), positions=100)
    Layer(tensors={'conv.weight': (8, 3, 1, 7)}, flops=33600)
    """
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    return _weighted(name, (outputs, inputs, height, width), positions, bias)


def linear(name: str, inputs: int, outputs: int, positions: int = 1, *, bias: bool = True) -> Layer:
    """
    >>> linear("fc", 20, 10)
    Layer(tensors={'fc.weight': (10, 20), 'fc.bias': (10,)}, flops=400)
    """
    return _weighted(name, (outputs, inputs), positions, bias)


def norm(name: str, width: int) -> Layer:
    """
    >>> norm("bn", 8)
    Layer(tensors={'bn.weight': (8,), 'bn.bias': (8,)}, flops=0.0)
    """
    return Layer({f"{name}.weight": (width,), f"{name}.bias": (width,)})


def table(name: str, *shape: int) -> Layer:
    """A tensor that is looked up or added, not multiplied with.

    >>> table("wte.weight", 100, 8)
    Layer(tensors={'wte.weight': (100, 8)}, flops=0.0)
    """
    return Layer({name: shape})


def _weighted(name: str, weight: Shape, positions: int, bias: bool) -> Layer:
    tensors = {f"{name}.weight": weight} | ({f"{name}.bias": weight[:1]} if bias else {})
    return Layer(tensors, 2 * math.prod(weight) * positions)
