"""Measures a real model: when forward first uses each tensor, when backward yields its gradient.

A tensor's forward seconds are those from its first use to the next tensor's first use. So activations, and the
second use of a tied weight, count for the layer before them, and nothing is left out: the sum is the whole
pass, loss included. Backward seconds are those between one gradient and the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from gradientflow.errors import NothingToTrainError, UsageError
from gradientflow.profiles import Profile, TensorProfile

Batch = TypeVar("Batch")


def profile(
    model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], torch.Tensor], *, steps: int = 5
) -> Profile:
    """The profile of `loss(model, batch).backward()`: medians over `steps` passes, after one to count operations.

    The model is left as it was: weights, gradients, buffers, hooks, torch's random numbers. Not undone is what
    Python code does on its own account: NumPy's random numbers, counters, caches, the gradient of a batch that
    wants one. Hooks that were there before are called as in training: do not measure a model that exchanges
    gradients, or steps an optimizer, in backward. Compiled models are not supported.

    Each torch call of the forward pass takes a few microseconds longer. On an accelerator the device is
    waited for at every mark, so that nothing overlaps.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> found = profile(model, torch.ones(1, 4), lambda model, batch: model(batch).sum(), steps=1)
    >>> [tensor.name for tensor in found.tensors][:2], found.numel
    (['2.bias', '2.weight'], 58)
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise NothingToTrainError("no parameter of the model requires a gradient: there is nothing to measure")
    if steps < 1:
        raise UsageError(f"steps is {steps}: give 1 or more")
    with _undisturbed(model), torch.enable_grad():
        with FlopCounterMode(display=False) as counter:
            _scalar(loss(model, batch)).backward()  # type: ignore[no-untyped-call]
        began_s = time.process_time()
        passes = [_measure(model, batch, loss, parameters) for _ in range(steps)]
        cpu_s = (time.process_time() - began_s) / steps
    forward_s = _shares([one.forward for one in passes])
    backward_s = _shares([one.backward for one in passes])
    # Tensors that were not seen come last, and take no time.
    order = {name: index for index, name in enumerate(dict.fromkeys([*forward_s, *parameters]))}
    tensors = []
    for name in dict.fromkeys([*backward_s, *parameters]):
        times = {"forward_s": forward_s.get(name, 0.0), "backward_s": backward_s.get(name, 0.0)}
        tensor = TensorProfile.of(name, parameters[name])
        tensors.append(tensor.model_copy(update={"forward_order": order[name], **times}))
    # Waiting for an accelerator is no work of a processor, though it may keep one busy.
    on_processors = all(parameter.device.type == "cpu" for parameter in parameters.values())
    flops = float(counter.get_total_flops())
    return Profile(tensors=tuple(tensors), flops=flops, cpu_s=cpu_s if on_processors else 0.0)


class _Pass(NamedTuple):
    """When each tensor's share was over, in seconds since forward, or backward, began."""

    forward: dict[str, float]
    backward: dict[str, float]


def _measure(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[nn.Module, Batch], torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
) -> _Pass:
    now = _clock_of(parameters)
    for parameter in parameters.values():
        parameter.grad = None
    uses = _FirstUses(parameters, now)
    start_s = now()
    with uses:
        value = _scalar(loss(model, batch))
    end_s = now()
    next_uses = [*list(uses.at_s.values())[1:], end_s]
    forward = {name: at_s - start_s for name, at_s in zip(uses.at_s, next_uses, strict=True)}

    arrived_s: dict[str, float] = {}
    handles = []
    for name, parameter in parameters.items():
        hook = partial(_note, arrived_s, name, now)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    try:
        start_s = now()
        value.backward()  # type: ignore[no-untyped-call]
        end_s = now()
    finally:
        for handle in handles:
            handle.remove()
    if arrived_s:
        arrived_s[max(arrived_s, key=lambda name: arrived_s[name])] = end_s
    return _Pass(forward, {name: at_s - start_s for name, at_s in arrived_s.items()})


def _note(arrived_s: dict[str, float], name: str, now: Callable[[], float], parameter: torch.Tensor) -> None:
    arrived_s[name] = now()


class _FirstUses(TorchFunctionMode):
    """Notes when a torch function is first given each parameter. Module hooks would miss class tokens, tied
    weights and attention's output projection."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], now: Callable[[], float]) -> None:
        super().__init__()
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._now = now
        self.at_s: dict[str, float] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # to look at a shape is no use
            for tensor in _tensors((args, kwargs)):
                name = self._names.get(tensor)  # type: ignore[call-overload]
                if name is not None and name not in self.at_s:
                    self.at_s[name] = self._now()
        return func(*args, **(kwargs or {}))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in arguments of a call, also those in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _shares(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds between the median ends of each tensor's share and the one before, in their order.

    >>> _shares([{"b": 1.0, "a": 3.0}, {"b": 1.0, "a": 9.0}, {"b": 2.0, "a": 4.0}])
    {'b': 1.0, 'a': 3.0}
    """
    names = dict.fromkeys(name for one in passes for name in one)
    ends_s = {name: median(one[name] for one in passes if name in one) for name in names}
    shares, previous_s = {}, 0.0
    for name in sorted(names, key=lambda name: ends_s[name]):
        shares[name] = ends_s[name] - previous_s
        previous_s = ends_s[name]
    return shares


def _scalar(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise UsageError("loss(model, batch) has to return one number that depends on the model's parameters")
    return value


def _clock_of(parameters: Mapping[str, nn.Parameter]) -> Callable[[], float]:
    if all(parameter.device.type == "cpu" for parameter in parameters.values()):
        return time.perf_counter

    def after_the_device() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return after_the_device


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back gradients, buffers and random numbers."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    accelerators = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    kind = next(iter(accelerators)).type if accelerators else "cuda"
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=list(accelerators), device_type=kind):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                buffer.copy_(content)
                setattr(module, name, buffer)
