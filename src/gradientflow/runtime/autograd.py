"""The two things we need from PyTorch's autograd engine that have no public name: the end-of-backward
callback and the node that is running.

Nothing else in the package may touch them (tests/test_layers.py). DDP itself stands on the first, and
`torch.utils.checkpoint` on the second, so they are as stable as private names get.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass is over; what it raises comes out of `backward()`.

    Only from inside a hook. With reentrant checkpointing, backward passes nest, and the innermost one's
    end counts.
    """
    Variable._execution_engine.queue_callback(callback)


def after_enclosing_node(callback: Callable[[], None]) -> None:
    """From an end-of-backward callback of an inner pass: call `callback` when the node of the outer pass in
    which it ran is done, that is, inside the outer pass."""
    torch._C._current_autograd_node().register_hook(lambda *gradients: callback())


def inside_backward() -> bool:
    """From an end-of-backward callback: is there another backward pass around the one that ended?"""
    return torch._C._current_autograd_node() is not None
