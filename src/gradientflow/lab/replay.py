"""A model whose arithmetic is slept: real tensors, real gradients, a real autograd graph, no computing.

`Replay` is built from a profile. Its forward pass sleeps as long as the profile's layers take and its backward
pass as long as their gradients take, and yields gradients of the real shapes one by one, in the profile's
order. Everything else is real: hooks, buckets, optimizers and every byte on the wire. So a laptop can stand for
a cluster of GPUs, as long as its processors keep up with what is not slept.

    model = Replay(workload("resnet-50", device="2080ti"), seed=rank)
    model().backward()

Gradients are the same in each step and differ by `seed`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from gradientflow.errors import UsageError
from gradientflow.profiles import Profile, TensorProfile

#: Shorter sleeps are put together: one costs about 100 us more than was asked for.
GRAIN_S = 200e-6


#: When a gradient gets its values.
Fill = Literal["once", "when written", "always"]

#: What optimizers and collectives take.
DTYPES = ("float16", "bfloat16", "float32", "float64")


def check_replayable(profile: Profile) -> None:
    """Raise `UsageError` unless there can be a model of this profile; takes no memory to speak of."""
    if not profile.numel:
        raise UsageError("the profile has no elements at all, so there is nothing to exchange")
    for tensor in profile.tensors:
        if tensor.dtype not in DTYPES:
            raise UsageError(f"tensor {tensor.name!r} is {tensor.dtype}: a replay takes {', '.join(DTYPES)}")
    small = tuple(tensor.model_copy(update={"shape": (1,)}) for tensor in profile.tensors)
    Replay(profile.model_copy(update={"tensors": small}))


class Pace:
    """Sleeps off what it is told, and remembers what it owes.

    Seconds add up until they are worth a sleep. What a sleep takes too long, and what was spent on work of our
    own, is taken off the sleeps that follow: over any number of calls, the time that passed in them differs
    from what was asked for by less than a grain and the last sleep's excess.

    >>> pace = Pace()
    >>> pace.spend(50e-6)  # too short to sleep
    >>> pace.owed_s
    5e-05
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        #: Below zero when sleeps took longer than was asked for.
        self.owed_s = 0.0
        #: What is asked for from now on counts so many times.
        self.stretch = 1.0

    def now(self) -> float:
        return self._clock()

    def spend(self, seconds: float, since_s: float | None = None) -> None:
        """Let `seconds` pass, counted from `since_s` (a value of `now`) if work of our own began then."""
        self.owed_s += self.stretch * seconds
        if since_s is not None:
            self.owed_s -= self._clock() - since_s
        if self.owed_s >= GRAIN_S:
            start_s = self._clock()
            self._sleep(self.owed_s)
            self.owed_s -= self._clock() - start_s


class Jitter:
    """How many times longer an iteration computes: a factor for each, around 1.

    Evenly distributed, since then mean and standard deviation are 1 and `share` without cutting anything off, and up to
    0.5 no factor is below zero. One factor for all layers of an iteration: if each had its own they would even out, in
    a model of 161 tensors from 10 % to less than 1 %, while what disturbs a machine lasts longer than a layer.

    >>> Jitter(0.0, seed=0).draw()
    1.0
    """

    MOST = 0.5

    def __init__(self, share: float, seed: int) -> None:
        if not 0.0 <= share <= self.MOST:
            raise UsageError(f"a jitter of {share}: give 0 to {self.MOST}")
        self._reach, self._seed = math.sqrt(3.0) * share, seed
        self.restart(0)

    def restart(self, number: int) -> None:
        """The factors that belong to `number` from now on, the same each time."""
        self._random = random.Random(f"{self._seed} {number}")

    def draw(self) -> float:
        return self._random.uniform(1.0 - self._reach, 1.0 + self._reach)


class Noise:
    """Gradient values: one block of normal noise, repeated. Its length is a prime, so rows of a matrix differ."""

    LENGTH = 262_139

    def __init__(self, seed: int) -> None:
        self._block = 0.01 * torch.randn(self.LENGTH, generator=torch.Generator().manual_seed(seed))

    def fill(self, tensor: torch.Tensor, offset: int) -> None:
        """Write noise into `tensor`, from element `offset` of the block on."""
        flat, done = tensor.view(-1), 0
        while done < flat.numel():
            piece = self._block[(offset + done) % self.LENGTH :][: flat.numel() - done]
            flat[done : done + len(piece)].copy_(piece)
            done += len(piece)


class Gradient:
    """One tensor's gradient: memory that is lent to autograd at each backward pass, and filled anew if need be.

    [Note: lending] A view that nobody else holds becomes `.grad` without a copy. Whoever writes into `.grad`
    (stock DDP, clipping, a scaler) raises the version of the memory below, and it is filled again before it
    is lent the next time. Writes that torch does not count stay: those through `.data`, and a collective
    on `.grad` itself. Whoever keeps a `.grad` from one step to the next has to clone it.
    """

    def __init__(self, noise: Noise, offset: int, seconds: float, fill: Fill) -> None:
        self._noise, self._offset, self._when = noise, offset, fill
        self.seconds = seconds
        self._memory = torch.empty(0)
        self._version = -1

    def prepare(self, parameter: nn.Parameter) -> None:
        """Have memory that fits the parameter, filled; after the first step there is nothing to do as a rule."""
        memory = self._memory
        if (memory.shape, memory.dtype, memory.device) != (parameter.shape, parameter.dtype, parameter.device):
            self._memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            self._fill()

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """What to give autograd in this backward pass."""
        if parameter.grad is not None:
            # That may be the memory we lent, to be added to: the summand has to be another.
            summand = torch.empty_like(self._memory)
            self._noise.fill(summand, self._offset)
            return summand
        written = self._memory._version != self._version
        if self._when == "always" or (self._when == "when written" and written):
            self._fill()
        return self._memory.view(self._memory.shape)

    def _fill(self) -> None:
        self._noise.fill(self._memory, self._offset)
        self._version = self._memory._version


class Place(NamedTuple):
    """Where a parameter is to be found, and what backward yields for it."""

    module: nn.Module
    name: str
    gradient: Gradient

    @property
    def parameter(self) -> nn.Parameter:
        # Looked up each time: conversions and `load_state_dict(assign=True)` may put another one in its place.
        parameter: nn.Parameter = getattr(self.module, self.name)
        return parameter


class _Arrival(torch.autograd.Function):
    """Hands a loss through; its backward takes a tensor's time and yields the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, parameter: nn.Parameter, gradient: Gradient, pace: Pace) -> torch.Tensor:
        ctx.parameter, ctx.gradient, ctx.pace = parameter, gradient, pace
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.gradient.prepare(ctx.parameter)  # is not counted: making it up would eat the sleeps of many steps
        start_s = ctx.pace.now()
        gradient = ctx.gradient.take(ctx.parameter) if ctx.needs_input_grad[1] else None
        ctx.pace.spend(ctx.gradient.seconds, start_s)
        return loss, gradient, None, None


class Node(nn.Module):
    """A module of the replayed model. Called once for each layer that it owns, so that its hooks fire there."""

    def forward(self, layer: Layer, pace: Pace) -> None:
        layer.run(pace)


class Layer:
    """Tensors of one module that forward uses one after the other, and how long that takes."""

    def __init__(self, module: nn.Module, places: list[Place], seconds: float) -> None:
        self.module, self._places, self._seconds = module, places, seconds

    def run(self, pace: Pace) -> None:
        start_s = pace.now()
        for place in self._places:
            place.parameter.detach()  # a use of the parameter, for those who watch where they are used
        pace.spend(self._seconds, start_s)


class Replay(nn.Module):
    """The model of `profile`, on the CPU, with the profile's names and dtypes; weights are zero.

    Gradients are lent to autograd without a copy ([Note: lending]). A method that writes into `.grad` makes us
    fill it again, which one that does not is spared: the time is taken off the sleep, the processor's work is
    not. With `fill="always"` every gradient is filled at every step. With "once" none is after the first: its values
    become what methods make of them, but no method costs the processor anything for what an accelerator would do.

    The first backward pass takes longer: it allocates the gradients.

    beside: a model of the same profile whose memory this one uses too, for weights and for gradients. They are to take
    turns; parameters, hooks and autograd's graph are each one's own.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        seed: int = 0,
        fill: Fill = "when written",
        jitter: Jitter | None = None,
        beside: Replay | None = None,
    ) -> None:
        super().__init__()
        self._pace = Pace()
        self._jitter = jitter or Jitter(0.0, seed)
        self._layers: list[Layer] = []
        self._places: dict[str, Place] = {}
        #: In the order in which the loss passes through them: the last one's gradient is the first to come.
        self._arrivals: list[Place] = []
        backward = {tensor.name: index for index, tensor in enumerate(profile.tensors)}
        forward = sorted(profile.tensors, key=lambda tensor: (tensor.forward_order, -backward[tensor.name]))
        noise, places = Noise(seed), self._places
        for index, tensor in enumerate(forward):
            held = beside._places[tensor.name] if beside else None
            weights = held.parameter.detach() if held else torch.zeros(tensor.shape, dtype=tensor.torch_dtype)
            gradient = held.gradient if held else Gradient(noise, 7919 * index, tensor.backward_s, fill)
            places[tensor.name] = Place(*self._register(tensor, weights), gradient)
        for path, run in groupby(forward, key=lambda tensor: tensor.name.rpartition(".")[0]):
            tensors = list(run)
            seconds = sum(tensor.forward_s for tensor in tensors)
            self._layers.append(Layer(self.get_submodule(path), [places[t.name] for t in tensors], seconds))
        self._arrivals = [places[tensor.name] for tensor in reversed(profile.tensors)]

    def forward(self, batch: object = None) -> torch.Tensor:
        """A loss of 0, after the forward pass's time; `batch` is not looked at."""
        self._pace.stretch = self._jitter.draw()  # for the backward pass that follows too
        for layer in self._layers:
            if layer.module is self:
                layer.run(self._pace)
            else:
                layer.module(layer, self._pace)
        # Only now does the graph see the parameters: backward's order is the profile's, whatever forward's was.
        start_s = self._pace.now()
        loss = torch.zeros(())
        for place in self._arrivals:
            loss = _Arrival.apply(loss, place.parameter, place.gradient, self._pace)  # type: ignore[no-untyped-call]
        self._pace.spend(0.0, start_s)
        return loss

    def _register(self, tensor: TensorProfile, weights: torch.Tensor) -> tuple[nn.Module, str]:
        """Make the parameter and the modules above it; returns its module and its name there."""
        if not (tensor.torch_dtype.is_floating_point or tensor.torch_dtype.is_complex):
            raise UsageError(f"tensor {tensor.name!r} is {tensor.dtype}, which has no gradient: leave it out")
        module: nn.Module = self
        *path, name = tensor.name.split(".")
        try:
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, Node())
                module = module.get_submodule(part)
            module.register_parameter(name, nn.Parameter(weights))
        except KeyError as error:  # torch's words for a name that is empty, taken, or both tensor and module
            raise UsageError(f"no module can have a tensor {tensor.name!r}: {error.args[0]}") from None
        return module, name
