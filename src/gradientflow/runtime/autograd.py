"""The things we need from PyTorch that have no public name: the end-of-backward callback, the node that is
running, the context of distributed autograd, what `zero_grad` and clipping call for many gradients at once,
whether a transform is at work, and which of torch's wrappers runs the model.

Nothing else in the package may touch them (tests/test_layers.py). DDP itself stands on the first, and
`torch.utils.checkpoint` on the second, so they are as stable as private names get.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch import nn
from torch.autograd import Variable

foreach_zero_ = torch._foreach_zero_
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


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


def distributed_context() -> int | None:
    """The context of `torch.distributed.autograd` that is open here, where gradients go instead of `.grad`."""
    if not torch.distributed.rpc.is_available():
        return None
    try:
        context: int = torch.distributed.autograd._current_context()._context_id()  # type: ignore[attr-defined]
    except RuntimeError:  # no RPC, or no context
        return None
    return context


def accumulator_of(parameter: torch.Tensor) -> torch.autograd.graph.Node:
    """The node that adds up the parameter's gradient. Hooks on it live as long as somebody holds it."""
    user = parameter.expand_as(parameter).grad_fn
    assert user is not None
    node = user.next_functions[0][0]
    assert node is not None
    return node


def is_transforming() -> bool:
    """Whether operations are not just run: traced, transformed (`torch.func`), counted or faked by a mode."""
    return (
        torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
    )


def gradients_in(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """By parameter, what a context of distributed autograd holds: the tensors themselves, not copies."""
    found: dict[torch.Tensor, torch.Tensor] = torch.distributed.autograd.get_gradients(context)  # type: ignore[attr-defined]
    return found


def running_wrapper() -> nn.parallel.DistributedDataParallel | None:
    """The one whose forward pass this is."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
