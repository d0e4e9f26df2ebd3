"""With the gate an update is put off until the next forward pass needs it; nobody may notice, except by the clock.

Loops run under stock DDP and under the gate in a world of two, where a sum does not depend on its order: the losses of
all steps, and weights, buffers and the optimizer's state at the end must be the same bits. A loop reads nothing else
unless that is its point, because whoever looks at a parameter makes the gate finish it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import logging
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

import gradientflow as gf
from gradientflow.runtime import replanning
from gradientflow.runtime.pooled import in_order_of_registration
from helpers import Script, run_ranks
from models import (
    WIDTH,
    Attention,
    Blocks,
    Borrowed,
    Checkpointed,
    Embedded,
    Normed,
    OwnFunction,
    Recurrent,
    Sometimes,
    TiedGPT,
    batch,
    build,
)

#: Some recipes watch three steps before they plan.
STEPS = 8
#: A flow that fails must not hold up the tests behind it.
DEADLINE_S = 20.0

Optimizer = torch.optim.Optimizer


@dataclasses.dataclass(frozen=True)
class Method:
    """How gradients are averaged: a recipe with or without the gate, or stock DDP if there is no recipe."""

    recipe: str = ""
    gate: bool | None = None
    drop_in: bool = False

    def __str__(self) -> str:
        return f"{self.recipe or 'DDP'}, gate {self.gate}{', drop-in' if self.drop_in else ''}"


DDP = Method()
FUSED = Method("lazy:2KB", gate=True)
PLANNED = Method("flow")


class Training:
    """A model, its optimizer and whatever averages its gradients; `seen` is what must not depend on that."""

    def __init__(
        self, method: Method, make: Callable[[], nn.Module], optimize: Callable[[nn.Module], Optimizer], **ddp: Any
    ) -> None:
        torch.manual_seed(0)
        self.method = method
        self.module = make()
        self.optimizer = optimize(self.module)
        self.ddp_options = ddp
        self.seen: list[Any] = []
        self._kept: dict[str, Any] = {}
        self.was_gated = False
        self.flow: gf.Flow | None = None
        self.open()

    def open(self) -> None:
        """Average from now on."""
        recipe, gate = self.method.recipe, self.method.gate
        if not recipe:
            self.model: nn.Module = DistributedDataParallel(self.module, **self.ddp_options)
        elif self.method.drop_in:
            self.model = gf.DistributedDataParallel(
                self.module, recipe=recipe, optimizer=self.optimizer, deadline_s=DEADLINE_S, **self.ddp_options
            )
            self.flow = self.model.flow
        else:
            self.model = self.module
            self.flow = gf.attach(self.module, self.optimizer, recipe, gate=gate, deadline_s=DEADLINE_S)

    def close(self) -> None:
        if self.flow is not None:
            self.was_gated = self.flow.gated
            self.flow.close()
            self.flow = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return (self.model if self.flow is None or self.method.drop_in else self.flow).no_sync()

    def note(self, value: Any) -> None:
        """Remember `value`, a tree of tensors and numbers, as it is now."""
        self.seen.append(
            tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)
        )

    def loss(self, step: int) -> torch.Tensor:
        images, labels = batch(dist.get_rank(), step, flat=False)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.note(loss)
        return loss

    def backward(self, step: int) -> None:
        loss = self.loss(step)
        if self.flow is not None and dist.get_rank() == step % 2:
            time.sleep(0.002)  # the other rank's messages have to wait beyond the end of its backward pass
        loss.backward()

    def train(self, steps: range) -> Iterator[int]:
        """The usual loop. The body of the `for` runs between backward and `optimizer.step()`."""
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            yield step
            self.optimizer.step()

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Something a loop keeps with this training."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def end(self) -> None:
        self.note(self.module.state_dict())
        self.note([parameter.detach() for parameter in self.module.parameters()])
        self.note(self.optimizer.state_dict())


def plain(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        pass


def momentum(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def beside(
    reference: Method,
    methods: tuple[Method, ...],
    loop: Callable[[Training], None] = plain,
    make: Callable[[], nn.Module] = Blocks,
    optimize: Callable[[nn.Module], Optimizer] = momentum,
    gated: bool | None = True,
    **ddp: Any,
) -> None:
    """Run `loop` by the reference and by each method; raise unless they saw the same bits.

    `gated` is what the flow must say in the end. None: either, but then the log must say that a gate is not used."""
    expected = Training(reference, make, optimize, **ddp)
    loop(expected)
    expected.end()
    expected.close()
    for method in methods:
        with words_of("gradientflow") as words:
            training = Training(method, make, optimize, **(ddp if method.drop_in else {}))
            loop(training)
            training.end()
            training.close()
        assert gated is None or training.was_gated == gated, f"{method}: gated is {training.was_gated}"
        if not training.was_gated and gated is None and dist.get_rank() == 0:
            assert any("gate" in line for line in words), f"{method}: not gated, and no word about it: {words}"
        different = first_difference(training.seen, expected.seen)
        assert different is None, f"{method} is not as {reference}: {different}"


def first_difference(ours: list[Any], theirs: list[Any]) -> str | None:
    mine, our_shape = tree_flatten_with_path(ours)
    expected, their_shape = tree_flatten_with_path(theirs)
    if our_shape != their_shape:
        return "not as many things, or things of another kind, were seen"
    for (path, value), (_, other) in zip(mine, expected, strict=True):
        if isinstance(other, torch.Tensor):
            if not torch.equal(value, other):
                return f"seen{keystr(path)} is off by up to {float((value - other).abs().max()):.3g}"
        elif value != other:
            return f"seen{keystr(path)} is {value!r}, not {other!r}"
    return None


@contextlib.contextmanager
def words_of(logger: str) -> Iterator[list[str]]:
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield words
    finally:
        logging.getLogger(logger).removeHandler(handler)


# - Loops

LOOPS: dict[str, Callable[[Training], None]] = {}


def a_loop(function: Callable[[Training], None]) -> Callable[[Training], None]:
    LOOPS[function.__name__] = function
    return function


def _zeroing(place: str, set_to_none: bool, training: Training) -> None:
    zero = functools.partial(training.optimizer.zero_grad, set_to_none=set_to_none)
    for step in range(STEPS):
        if place == "before forward":
            zero()
        training.backward(step)
        if place == "after the first backward":
            zero()
            training.backward(100 + step)
        training.optimizer.step()
        if place != "before forward":
            zero()


LOOPS |= {
    f"zero_grad {place}, to {'None' if to_none else 'zeros'}": functools.partial(_zeroing, place, to_none)
    for place in ("before forward", "after step", "after the first backward")
    for to_none in (True, False)
}


@a_loop
def never_zeroed(training: Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.optimizer.step()


@a_loop
def zeroed_by_hand_after_step(training: Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.optimizer.step()
        for parameter in training.module.parameters():
            parameter.grad = None


@a_loop
def accumulated(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        for part in range(2):
            with training.no_sync():
                training.backward(100 + 100 * part + step)
        training.backward(step)
        training.optimizer.step()


@a_loop
def accumulated_while_updates_are_put_off(training: Training) -> None:
    for step in range(STEPS):
        with training.no_sync():
            training.backward(100 + step)
        training.backward(step)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)


@a_loop
def exchanged_twice_before_a_step(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(step)
        training.backward(100 + step)
        training.optimizer.step()


@a_loop
def zeroed_in_place_after_step(training: Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.optimizer.step()
        for parameter in training.module.parameters():
            parameter.grad.zero_()


@a_loop
def steps_left_out(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(step)
        if step % 3:
            training.optimizer.step()


@a_loop
def parameters_added_to_the_optimizer(training: Training) -> None:
    late = training.optimizer.param_groups[0]["params"].pop()
    for step in training.train(range(STEPS)):
        if step == 4:
            training.optimizer.add_param_group({"params": [late], "lr": 0.01})


@a_loop
def two_optimizers(training: Training) -> None:
    """The second knows nothing of the flow."""
    parameters = training.optimizer.param_groups[0]["params"]
    other = torch.optim.AdamW(parameters[::2], lr=1e-2)
    del parameters[::2]
    for step in range(STEPS):
        training.module.zero_grad()
        training.backward(step)
        training.optimizer.step()
        other.step()
    training.note(other.state_dict())


@a_loop
def stepped_twice_after_one_backward(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.optimizer.step()


# - Gradients read or written between backward and step


@a_loop
def clipped_by_norm(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.note(nn.utils.clip_grad_norm_(training.module.parameters(), 0.5))


@a_loop
def clipped_by_norm_every_third_step(training: Training) -> None:
    for step in training.train(range(STEPS)):
        if step % 3 == 2:
            training.note(nn.utils.clip_grad_norm_(training.module.parameters(), 0.5))


@a_loop
def clipped_by_value(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        nn.utils.clip_grad_value_(training.module.parameters(), 0.01)


@a_loop
def one_gradient_logged(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.note(training.module.head.weight.grad.norm())


@a_loop
def one_gradient_logged_after_step(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(step)
        training.optimizer.step()
        training.note(training.module.stem.weight.grad.norm())


@a_loop
def all_gradients_kept(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.note([parameter.grad for parameter in training.module.parameters()])


@a_loop
def some_gradients_clipped(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.note(nn.utils.clip_grad_norm_(training.module.head.parameters(), 0.1))


@a_loop
def weights_added_to_gradients(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        for parameter in training.module.parameters():
            parameter.grad.data.add_(parameter.data, alpha=0.01)


@a_loop
def gradients_halved(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        for parameter in training.module.parameters():
            parameter.grad.mul_(0.5)


@a_loop
def gradients_zeroed_and_written_in_one_line(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.module.stem.weight.grad.zero_().add_(0.01)
    training.module.head.weight.grad.zero_().add_(0.01)
    training.note(training.module.head.weight.grad)


@a_loop
def one_gradient_halved(training: Training) -> None:
    for step in training.train(range(STEPS)):
        training.module.blocks[step % 3][1].weight.grad *= 0.5


@a_loop
def gradients_replaced(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        for parameter in training.module.parameters():
            parameter.grad = parameter.grad.sign()


def _data_of_gradients_replaced(set_to_none: bool, training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad(set_to_none)
        with training.no_sync():
            training.backward(100 + step)
        training.backward(step)
        for parameter in training.module.parameters():
            parameter.grad.data = 0.5 * parameter.grad.data
        training.optimizer.step()


LOOPS |= {
    f"data of gradients replaced, zeroed to {'None' if to_none else 'zeros'}": functools.partial(
        _data_of_gradients_replaced, to_none
    )
    for to_none in (True, False)
}


@a_loop
def gradients_replaced_unread(training: Training) -> None:
    for step in training.train(range(STEPS)):
        training.module.head.bias.grad = torch.full((10,), 0.01 * step)
        training.module.stem.weight.grad = None


@a_loop
def gradients_as_arrays(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.note(training.module.head.bias.grad.numpy().tolist())
        training.note(training.module.stem.bias.grad.tolist())


@a_loop
def gradients_by_foreach(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.note(torch._foreach_norm([parameter.grad for parameter in training.module.parameters()]))


@a_loop
def gradients_as_a_vector(training: Training) -> None:
    for _ in training.train(range(STEPS)):
        training.note(torch.cat([parameter.grad.view(-1) for parameter in training.module.parameters()]).norm())


@a_loop
def scaled_with_a_step_left_out(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        loss = training.loss(step)
        if step == STEPS // 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.module.parameters(), 0.5)
        scaler.step(training.optimizer)
        scaler.update()
        training.note(scaler.get_scale())


@a_loop
def scaled_without_unscale(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        scaler.scale(training.loss(step)).backward()
        scaler.step(training.optimizer)
        scaler.update()


@a_loop
def autocast_around_forward(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = training.loss(step)
        loss.backward()
        training.optimizer.step()


# - Settings of the optimizer that change right after step: a share that was put off uses those from before


def scheduled(training: Training, schedule: Callable[[Optimizer], LRScheduler]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        scheduler = schedule(training.optimizer)
        for step in range(STEPS):
            training.optimizer.zero_grad()
            training.backward(step)
            training.optimizer.step()
            scheduler.step()
            training.note(scheduler.get_last_lr())


@a_loop
def scheduler(training: Training) -> None:
    scheduled(training, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))


@a_loop
def one_cycle_with_momentum(training: Training) -> None:
    scheduled(training, lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=STEPS + 1))


@a_loop
def settings_changed_by_hand(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(step)
        training.optimizer.step()
        for group in training.optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = 0.1 * step


# - Things done right after step, while updates are put off


def after_step(look: Callable[[Training], Any]) -> Callable[[Training], Any]:
    """A loop that calls `look` right after every second step, and keeps what it gives."""

    def run(training: Training) -> None:
        for step in range(STEPS):
            training.optimizer.zero_grad()
            training.backward(step)
            training.optimizer.step()
            if step % 2:
                training.note(look(training))

    LOOPS[look.__name__] = run
    return look


@after_step
def state_of_the_model(training: Training) -> Any:
    return training.module.state_dict()


@after_step
def state_of_the_optimizer(training: Training) -> Any:
    return training.optimizer.state_dict()


@after_step
def state_of_one_parameter(training: Training) -> Any:
    return training.optimizer.state[training.module.stem.weight]


@after_step
def momentum_forgotten(training: Training) -> Any:
    for state in training.optimizer.state.values():
        state["momentum_buffer"].zero_()


@after_step
def deep_copy_of_the_model(training: Training) -> Any:
    return copy.deepcopy(training.module).state_dict()


@after_step
def saved_model(training: Training) -> Any:
    return _through_a_file(training.module).state_dict()


@after_step
def saved_states(training: Training) -> Any:
    return _through_a_file([training.module.state_dict(), training.optimizer.state_dict()])


def _through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@after_step
def state_loaded(training: Training) -> Any:
    """What is loaded is not updated by a step from before."""
    training.module.load_state_dict({name: tensor / 2 for name, tensor in training.module.state_dict().items()})


@after_step
def optimizer_state_loaded(training: Training) -> Any:
    training.optimizer.load_state_dict(training.optimizer.state_dict())


@after_step
def moving_average(training: Training) -> Any:
    averages = training.kept("averages", lambda: [torch.zeros_like(p) for p in training.module.parameters()])
    with torch.no_grad():
        for average, parameter in zip(averages, training.module.parameters(), strict=True):
            average.lerp_(parameter, 0.1)
    return averages


@after_step
def averaged_model(training: Training) -> Any:
    average = training.kept("average", lambda: AveragedModel(training.module))
    average.update_parameters(training.module)
    return average.state_dict()


@after_step
def norms_of_parameters(training: Training) -> Any:
    return [parameter.norm() for parameter in training.module.parameters()]


@after_step
def parameters_as_lists(training: Training) -> Any:
    return training.module.stem.bias.tolist(), training.module.head.bias.detach().numpy().tolist()


@after_step
def one_element(training: Training) -> Any:
    return float(training.module.head.weight[0, 0])


@after_step
def data_clamped(training: Training) -> Any:
    for parameter in training.module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@after_step
def data_replaced(training: Training) -> Any:
    training.module.head.bias.data = torch.ones(10)


@after_step
def parameters_scaled(training: Training) -> Any:
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.mul_(0.9)


@after_step
def parameters_scaled_by_foreach(training: Training) -> Any:
    with torch.no_grad():
        torch._foreach_mul_(list(training.module.parameters()), 0.9)


@after_step
def one_parameter_copied_over_another(training: Training) -> Any:
    with torch.no_grad():
        training.module.head.weight.copy_(training.module.blocks[0][1].weight[:10])


@after_step
def parameters_as_a_vector(training: Training) -> Any:
    vector = nn.utils.parameters_to_vector(training.module.parameters())
    nn.utils.vector_to_parameters(0.9 * vector, training.module.parameters())
    return vector


def evaluate(training: Training, without_gradients: Callable[[], Any] = torch.no_grad) -> torch.Tensor:
    images, _ = batch(0, 0, flat=False)
    training.module.eval()
    with without_gradients():
        output = training.module(images)
    training.module.train()
    return output


@after_step
def evaluation(training: Training) -> Any:
    return evaluate(training)


@after_step
def evaluation_in_inference_mode(training: Training) -> Any:
    return evaluate(training, torch.inference_mode).tolist()


@after_step
def evaluation_on_one_rank(training: Training) -> Any:
    return evaluate(training) if dist.get_rank() == 1 else None


@after_step
def evaluation_in_another_thread(training: Training) -> Any:
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(evaluate(training)))
    thread.start()
    thread.join()
    return outputs


@after_step
def gradient_of_the_inputs(training: Training) -> Any:
    images, _ = batch(0, 0, flat=False)
    images.requires_grad_()
    training.module.eval()
    (gradient,) = torch.autograd.grad(training.module(images).sum(), images)
    training.module.train()
    return gradient


@after_step
def functional_call(training: Training) -> Any:
    images, _ = batch(0, 0, flat=False)
    training.module.eval()
    output = torch.func.functional_call(training.module, dict(training.module.named_parameters()), (images,))
    training.module.train()
    return output


@after_step
def gradients_by_functions(training: Training) -> Any:
    parameters = dict(training.module.named_parameters())
    images, _ = batch(0, 0, flat=False)
    training.module.eval()

    def total(values: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(training.module, values, (one[None],)).sum()

    each = torch.func.vmap(torch.func.grad(total), in_dims=(None, 0))(parameters, images)
    training.module.train()
    return each


@after_step
def forward_mode(training: Training) -> Any:
    weight = training.module.head.weight
    return torch.func.jvp(lambda w: w.sin(), (weight,), (torch.ones_like(weight),))


@after_step
def traced_model(training: Training) -> Any:
    images, _ = batch(0, 0, flat=False)
    training.module.eval()
    output = torch.jit.trace(training.module, images, check_trace=False)(images)
    training.module.train()
    return output


@after_step
def moved_to_where_it_is(training: Training) -> Any:
    training.module.to("cpu").float()


@after_step
def a_forked_child_looks(training: Training) -> Any:
    """It has none of the threads that could finish anything; it must not hang."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            float(training.module.stem.weight.sum())
        os._exit(0)
    for _ in range(1000):
        if os.waitpid(child, os.WNOHANG)[0]:
            return None
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a forked child hangs")


@after_step
def one_layer_by_itself(training: Training) -> Any:
    return training.module.head(torch.ones(1, training.module.head.in_features))


@after_step
def collectives_of_the_users_own(training: Training) -> Any:
    total = training.module.stem.weight.detach().clone()
    dist.all_reduce(total)
    dist.broadcast(training.module.stem.bias.data, 0)
    return total


@after_step
def synchronized(training: Training) -> Any:
    if training.flow is not None:
        training.flow.synchronize()
    return aliases(training)


def aliases(training: Training) -> list[torch.Tensor]:
    """The parameters' memory, past any guard on them. To be called once before it matters."""
    return training.kept(
        "aliases", lambda: [torch.from_numpy(parameter.detach().numpy()) for parameter in training.module.parameters()]
    )


# - Closing, resuming, failing, going on


@a_loop
def closed_right_after_step(training: Training) -> None:
    """The memory is right without a look at a parameter, and plain DDP goes on with it."""
    aliases(training)
    plain(training)
    training.close()
    if training.method.recipe:
        training.model = DistributedDataParallel(training.module)
    training.note(aliases(training))
    for _ in training.train(range(STEPS, STEPS + 3)):
        pass


@a_loop
def resumed_from_a_checkpoint(training: Training) -> None:
    plain(training)
    ours = training.flow.state_dict() if training.flow is not None else None
    saved = _through_a_file([training.module.state_dict(), training.optimizer.state_dict(), ours])
    for _ in training.train(range(100, 103)):  # what is lost
        pass
    training.close()
    training.module = Blocks()
    training.optimizer = momentum(training.module)
    training.open()
    training.module.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    if training.flow is not None:
        training.flow.load_state_dict(saved[2])
    torch.manual_seed(1)
    plain(training)


@a_loop
def rolled_back_in_place(training: Training) -> None:
    plain(training)
    model, optimizer = copy.deepcopy([training.module.state_dict(), training.optimizer.state_dict()])
    for _ in training.train(range(100, 103)):
        pass
    training.module.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    plain(training)


@a_loop
def forward_broken_off_between_stages(training: Training) -> None:
    for step in range(STEPS):
        if step % 3 == 2:
            handle = training.module.blocks[1].register_forward_pre_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                training.loss(100 + step)
            handle.remove()
        training.optimizer.zero_grad()
        training.backward(step)
        training.optimizer.step()


def _fail(module: nn.Module, args: object) -> None:
    raise ZeroDivisionError


@a_loop
def stepped_with_a_closure(training: Training) -> None:
    def closure(step: int) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(step)
        loss.backward()
        return loss

    for step in range(STEPS):
        training.note(training.optimizer.step(functools.partial(closure, step)))


@a_loop
def stepped_with_none(training: Training) -> None:
    """As Accelerate does."""
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(step)
        training.optimizer.step(None)


@a_loop
def step_replaced_on_the_optimizer(training: Training) -> None:
    """As profilers and loggers do."""
    original, calls = training.optimizer.step, []

    @functools.wraps(original)
    def step(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    training.optimizer.step = step
    plain(training)
    training.note(len(calls))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_sees_what_it_sees_under_ddp(name: str) -> None:
    run_ranks(2, _loop, name)


def _loop(name: str) -> None:
    beside(DDP, (FUSED, PLANNED), LOOPS[name], gated="closure" not in name or None)


@pytest.mark.parametrize("name", ["two_forwards_then_two_backwards", "one_graph_twice"])
def test_a_loop_that_ddp_cannot_judge(name: str) -> None:
    """Stock DDP would not exchange in the second backward pass, so the judge is the same recipe without the gate."""
    run_ranks(2, _without_ddp, name)


def _without_ddp(name: str) -> None:
    beside(Method("lazy:2KB", gate=False), (FUSED, PLANNED), globals()[name])


def two_forwards_then_two_backwards(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        losses = [training.loss(step), training.loss(100 + step)]
        for loss in losses:
            loss.backward()
        training.optimizer.step()


def one_graph_twice(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        loss = training.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        training.optimizer.step()


# - Optimizers


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups whose parameters alternate in the order of the forward pass."""
    parameters = list(module.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01}]


def _all(kind: type[Optimizer], **settings: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda module: kind(module.parameters(), **settings)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": _all(torch.optim.SGD, lr=0.05),
    "SGD nesterov": _all(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD decay": _all(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD foreach": _all(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "SGD one by one": _all(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "SGD fused": _all(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "SGD maximize": _all(torch.optim.SGD, lr=0.001, maximize=True),
    "SGD two groups": lambda module: torch.optim.SGD(groups(module), lr=0.05, momentum=0.9),
    "Adam": _all(torch.optim.Adam, lr=1e-2),
    "AdamW": _all(torch.optim.AdamW, lr=1e-2),
    "AdamW foreach": _all(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW fused": _all(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW amsgrad": _all(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "AdamW two groups": lambda module: torch.optim.AdamW(groups(module), lr=1e-2),
    "RMSprop": _all(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": _all(torch.optim.Adagrad, lr=1e-2),
    "NAdam": _all(torch.optim.NAdam, lr=1e-2),
    "RAdam": _all(torch.optim.RAdam, lr=1e-2),
    "Adamax": _all(torch.optim.Adamax, lr=1e-2),
    "Adadelta": _all(torch.optim.Adadelta),
    "Adafactor": _all(torch.optim.Adafactor),
    "ASGD": _all(torch.optim.ASGD),
    "Rprop": _all(torch.optim.Rprop),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_as_under_ddp(name: str) -> None:
    run_ranks(2, _optimizer, name)


def _optimizer(name: str) -> None:
    beside(DDP, (FUSED,), LOOPS["scheduler"], optimize=OPTIMIZERS[name])


class PerGroupCounter(Optimizer):
    """Counts its steps in the group, and updates by the count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["count"])


class StateOnSelf(Optimizer):
    """Keeps momenta by position, outside `state`, and the number of steps beside them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.momenta = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for parameter, mean in zip(all_of(self), self.momenta, strict=True):
            mean.lerp_(parameter.grad, 0.1)
            parameter.sub_(mean, alpha=0.1 / self.num_steps)


def all_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class ClipsInside(torch.optim.SGD):
    """Needs all gradients at once, though it is an SGD."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(all_of(self), 0.5)
        return super().step(closure)


class LooksAhead(torch.optim.SGD):
    """Every third step goes half the way back to where it was three steps ago."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.slow = [parameter.detach().clone() for parameter in all_of(self)]
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            with torch.no_grad():
                for parameter, slow in zip(all_of(self), self.slow, strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


def _pre_hook_clips(module: nn.Module) -> Optimizer:
    optimizer = momentum(module)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(module.parameters(), 0.5) and None)
    return optimizer


def _post_hook_decays(module: nn.Module) -> Optimizer:
    optimizer = momentum(module)
    optimizer.register_step_post_hook(lambda *_: torch._foreach_mul_([p.data for p in module.parameters()], 0.9))
    return optimizer


OTHER_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "counter in the group": lambda module: PerGroupCounter(groups(module)),
    "state on itself": _all(StateOnSelf),
    "clips inside step": _all(ClipsInside, lr=0.05, momentum=0.9),
    "looks ahead": _all(LooksAhead, lr=0.05, momentum=0.9),
    "pre-hook that clips": _pre_hook_clips,
    "post-hook that decays": _post_hook_decays,
    # A scheduler writes into this tensor.
    "learning rate in a tensor": lambda module: torch.optim.AdamW(
        module.parameters(), torch.tensor(0.05), foreach=False
    ),
    "LBFGS": _all(torch.optim.LBFGS, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_an_optimizer_of_another_kind_is_right_or_said_not_to_be_gated(name: str) -> None:
    run_ranks(2, _other_optimizer, name)


def _other_optimizer(name: str) -> None:
    loop = LOOPS["stepped_with_a_closure" if name == "LBFGS" else "scheduler"]
    beside(DDP, (PLANNED,), loop, optimize=OTHER_OPTIMIZERS[name], gated=None)


def test_a_gate_that_cannot_be_is_refused_if_it_was_asked_for() -> None:
    run_ranks(2, _refused)


def _refused() -> None:
    module = Blocks()
    with pytest.raises(gf.UsageError, match="LBFGS"):
        gf.attach(module, torch.optim.LBFGS(module.parameters()), "flow", gate=True)


def test_step_hooks_fire_once_a_step() -> None:
    run_ranks(2, _step_hooks)


def _step_hooks() -> None:
    beside(DDP, (FUSED, PLANNED), counting_hooks)


def counting_hooks(training: Training) -> None:
    fired: list[str] = []
    handles = [
        training.optimizer.register_step_pre_hook(lambda *_: fired.append("pre")),
        training.optimizer.register_step_post_hook(lambda *_: fired.append("post")),
        register_optimizer_step_pre_hook(lambda *_: fired.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: fired.append("global post")),
    ]
    plain(training)
    if training.flow is not None:
        training.flow.synchronize()
    for handle in handles:
        handle.remove()
    training.note({kind: fired.count(kind) for kind in fired})


@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR"])
def test_a_scheduler_from_before_attach(schedule: str) -> None:
    run_ranks(2, _early_scheduler, schedule)


def _early_scheduler(schedule: str) -> None:
    schedulers: list[LRScheduler] = []

    def optimize(module: nn.Module) -> Optimizer:
        optimizer = torch.optim.AdamW(groups(module), lr=1e-2)
        schedulers.append(
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            if schedule == "StepLR"
            else torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        )
        return optimizer

    def loop(training: Training) -> None:
        scheduled(training, lambda optimizer: schedulers[-1])

    beside(DDP, (FUSED, PLANNED), loop, optimize=optimize)


# - Models


def _compiled(block_alone: bool) -> nn.Module:
    model = Blocks()
    (model.blocks[1] if block_alone else model).compile(backend="aot_eager")
    return model


def _with_a_block(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Blocks()
    model.blocks[1] = change(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn with batch norm": lambda: build("cnn", large=False),
    "vit with class token": lambda: build("transformer", large=False),
    "multi-head attention": Attention,
    "tied gpt": TiedGPT,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "weight borrowed by a function": Borrowed,
    "lstm": Recurrent,
    "own autograd function": OwnFunction,
    "weight norm": Normed,
    "embedding renormed in forward": lambda: Embedded(max_norm=1.0),
    "compiled": lambda: _compiled(block_alone=False),
    "compiled block": lambda: _compiled(block_alone=True),
    "used every second step": lambda: Sometimes(lambda block, passes: block != 1 or passes % 2 == 0),
    "used from the tenth step on": lambda: Sometimes(lambda block, passes: block != 0 or passes >= 10),
    "used by one rank": lambda: Sometimes(lambda block, passes: block != passes % 3 or dist.get_rank() == 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_under_ddp(name: str) -> None:
    run_ranks(2, _model, name)


def _model(name: str) -> None:
    # Compiling takes longer than all the rest.
    methods = {"compiled": (FUSED,), "compiled block": (PLANNED,)}.get(name, (FUSED, PLANNED))
    beside(DDP, methods, trained_and_evaluated, MODELS[name], find_unused_parameters=name.startswith("used"))


OTHER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "scripted block": lambda: _with_a_block(torch.jit.script),
    "traced block": lambda: _with_a_block(lambda block: torch.jit.trace(block, torch.ones(8, WIDTH))),
    "embedding with sparse gradients": lambda: Embedded(sparse=True),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_model_of_another_kind_is_right_or_said_not_to_be_gated(name: str) -> None:
    run_ranks(2, _other_model, name)


def _other_model(name: str) -> None:
    beside(DDP, (PLANNED,), trained_and_evaluated, OTHER_MODELS[name], OPTIMIZERS["SGD"], gated=None)


def trained_and_evaluated(training: Training) -> None:
    for step in range(14):
        training.optimizer.zero_grad()
        training.backward(step)
        training.optimizer.step()
        if step % 5 == 4:
            training.note(evaluate(training))


@pytest.mark.parametrize("when", ["for a while", "at first"])
def test_a_frozen_layer(when: str) -> None:
    run_ranks(2, _frozen, when)


def _frozen(when: str) -> None:
    loop = {"for a while": frozen_for_a_while, "at first": frozen_at_first}[when]
    beside(DDP, (FUSED, PLANNED), loop, find_unused_parameters=True)


def frozen_for_a_while(training: Training) -> None:
    for frozen in (False, True, False):
        training.module.blocks[1].requires_grad_(not frozen)
        for _ in training.train(range(5)):
            pass


def frozen_at_first(training: Training) -> None:
    """What was frozen when gradients began to be averaged needs a new beginning, under DDP too."""
    for frozen in (True, False):
        training.close()
        training.module.stem.requires_grad_(not frozen)
        training.open()
        plain(training)


# - Recipes, codecs, the drop-in


@pytest.mark.parametrize("recipe", ["bsp", "lazy:2KB", "merge", "mg-wfbp", "bytescheduler:1KB"])
def test_any_recipe_can_be_gated(recipe: str) -> None:
    run_ranks(2, _any_recipe, recipe)


def _any_recipe(recipe: str) -> None:
    beside(DDP, (Method(recipe, gate=True),), with_everything, optimize=OPTIMIZERS["AdamW two groups"])


def with_everything(training: Training) -> None:
    """Accumulation, clipping now and then, a scheduler, evaluation."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.8)
    for step in range(12):
        training.optimizer.zero_grad()
        with training.no_sync():
            training.backward(100 + step)
        training.backward(step)
        if step % 4 == 3:
            training.note(nn.utils.clip_grad_norm_(training.module.parameters(), 0.5))
        training.optimizer.step()
        scheduler.step()
        if step % 5 == 4:
            training.note(evaluate(training))


@pytest.mark.parametrize("recipe", ["flow+bf16", "flow+fp16", "lazy:2KB+bf16"])
def test_codecs_behind_the_gate(recipe: str) -> None:
    """Elements are rounded one by one, so fusing and cutting change nothing: the judge is one message, ungated."""
    run_ranks(2, _codec, recipe)


def _codec(recipe: str) -> None:
    codec = recipe.rpartition("+")[2]
    # Whether fp16 has overflowed is known when all gradients are there, before any of them is used.
    gated = None if codec == "fp16" else True
    beside(Method(f"bsp+{codec}", gate=False), (Method(recipe, gate=gated),), with_everything, gated=gated)
    if codec == "fp16":
        module = Blocks()
        with pytest.raises(gf.UsageError, match="bf16"):
            gf.attach(module, momentum(module), recipe, gate=True)


@pytest.mark.parametrize("recipe", ["flow", "bytescheduler:1KB"])
def test_the_drop_in_is_gated_if_it_has_the_optimizer(recipe: str) -> None:
    run_ranks(2, _drop_in, recipe)


def _drop_in(recipe: str) -> None:
    method = Method(recipe, drop_in=True)
    for loop in (with_everything, LOOPS["clipped_by_norm"], LOOPS["state_of_the_model"]):
        beside(DDP, (method,), loop)
    beside(DDP, (method,), trained_and_evaluated, TiedGPT)
    module = Blocks()
    wrapper, optimizer = gf.DistributedDataParallel(module, recipe=recipe), momentum(module)
    for step in range(STEPS):
        one_step(wrapper, optimizer, step)
    assert not wrapper.flow.gated, "put off without an optimizer to share"
    wrapper.close()


def one_step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    images, labels = batch(dist.get_rank(), step, flat=False)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


# - What the flow says and does


def test_who_asked_for_the_gate_gets_it() -> None:
    run_ranks(2, _asked_for)


def _asked_for() -> None:
    wanted = {("flow", None): True, ("bytescheduler:1KB", None): True, ("lazy", None): False, ("merge", None): False}
    told = {("flow", False): False, ("bytescheduler", False): False, ("lazy", True): True, ("wfbp", True): True}
    for (recipe, gate), gated in (wanted | told).items():
        training = Training(Method(recipe, gate), Blocks, momentum)
        plain(training)
        assert training.flow is not None
        plan = training.flow.plan
        assert training.flow.gated == gated, (recipe, gate)
        in_stages = sorted(name for stage in plan.stages for name in stage)
        assert in_stages == (sorted(plan.layout) if gated else []), (recipe, gate)
        training.close()


def test_updates_come_stage_by_stage_with_the_next_forward_pass() -> None:
    run_ranks(2, _stage_by_stage)


def _stage_by_stage() -> None:
    training = Training(FUSED, Blocks, momentum)
    flow = training.flow
    assert flow is not None
    names = [name for name, _ in training.module.named_parameters()]
    aliases(training)
    plain(training)
    assert len(flow.plan.stages) > 2, flow.plan.stages
    before: list[torch.Tensor] = []
    halfway: list[set[str]] = []

    def updated() -> set[str]:
        return {n for n, now, old in zip(names, aliases(training), before, strict=True) if not torch.equal(now, old)}

    handle = training.module.blocks[1].register_forward_pre_hook(lambda *_: halfway.append(updated()))
    for step in range(4):
        flow.synchronize()
        before[:] = [alias.clone() for alias in aliases(training)]
        one_step(training.model, training.optimizer, STEPS + 2 * step)
        assert not updated(), "step() did not put them off"
        one_step(training.model, training.optimizer, STEPS + 2 * step + 1)
        assert updated() == set(names)
    handle.remove()
    # A forward pass before which a new plan is taken up finishes everything first; busy lanes may ask for one.
    assert any("stem.weight" in seen and "head.weight" not in seen for seen in halfway[1::2]), halfway
    trace = flow.trace()
    assert len({span.step for span in trace.of_kind("update")}) >= STEPS // 2
    assert trace.of_kind("exposed")
    training.close()


def test_two_flows_take_turns_like_two_wrappers() -> None:
    """A generator and a critic, each with its optimizer; each one's gradients also reach the other's parameters."""
    run_ranks(2, _two_flows)


def _two_flows() -> None:
    expected = _generator_and_critic(DDP)
    for method in (FUSED, PLANNED):
        difference = first_difference(_generator_and_critic(method), expected)
        assert difference is None, f"{method}: {difference}"


def _generator_and_critic(method: Method) -> list[Any]:
    torch.manual_seed(0)
    generator = Training(method, lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64)), momentum)
    critic = Training(method, Blocks, momentum, find_unused_parameters=False)
    for step in range(STEPS):
        noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        images, _ = batch(dist.get_rank(), step, flat=False)
        critic.optimizer.zero_grad()
        with torch.no_grad():
            made = generator.module(noise)
        (critic.model(made).sum() - critic.model(images).sum()).tanh().backward()
        critic.optimizer.step()
        generator.optimizer.zero_grad()
        critic.module.requires_grad_(False)
        critic.module(generator.model(noise)).sum().tanh().neg().backward()
        critic.module.requires_grad_(True)
        generator.optimizer.step()
    for training in (generator, critic):
        training.end()
        training.close()
        assert not method.recipe or training.was_gated
    return [generator.seen, critic.seen]


def test_a_flow_that_nobody_keeps() -> None:
    run_ranks(2, _not_kept)


def _not_kept() -> None:
    expected = Training(DDP, Blocks, momentum)
    plain(expected)
    training = Training(FUSED, Blocks, momentum)
    assert training.flow is not None
    flow, training.flow = weakref.ref(training.flow), None
    gc.collect()
    plain(training)
    assert first_difference(training.seen, expected.seen) is None
    found = flow()
    assert found is not None and found.gated
    found.close()


@pytest.mark.parametrize("given", ["master weights", "non-finite steps left out", "scaler", "profile"])
def test_other_arguments_of_attach(given: str) -> None:
    run_ranks(2, _other_arguments, given)


def _other_arguments(given: str) -> None:
    results = [_with_argument(given, gate) for gate in (False, None)]
    difference = first_difference(results[1], results[0])
    assert difference is None, difference


def _with_argument(given: str, gate: bool | None) -> list[Any]:
    torch.manual_seed(0)
    module = Blocks().to(torch.bfloat16 if given == "master weights" else torch.float32)
    optimizer = momentum(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=given == "scaler")
    arguments = {
        "master weights": {"master_weights": True},
        "non-finite steps left out": {"nonfinite": "skip"},
        "scaler": {"scaler": scaler},
        "profile": {"profile": in_order_of_registration(module)},
    }[given]
    flow = gf.attach(module, optimizer, "flow", gate=gate, deadline_s=DEADLINE_S, **arguments)
    seen: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        images, labels = batch(dist.get_rank(), step, flat=False)
        loss = nn.functional.cross_entropy(module(images.to(module.stem.weight.dtype)), labels)
        seen.append(loss.detach())
        if step == 5 and dist.get_rank() == 1 and given in ("scaler", "non-finite steps left out"):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    flow.synchronize()
    seen.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    flow.close()
    return seen


def test_ranks_plan_anew_when_all_are_there() -> None:
    """One rank learns what all ranks asked for before the others do, who meanwhile wait for it elsewhere."""
    run_ranks(2, _planned_anew)


def _planned_anew() -> None:
    replanning.PATIENCE, replanning.STREAK = 3, 2
    beside(DDP, (PLANNED, Method("dear:60KB")), clipped_for_a_while_and_looked_at_by_one_rank, lambda: build("cnn"))


def clipped_for_a_while_and_looked_at_by_one_rank(training: Training) -> None:
    for step in range(36):
        training.optimizer.zero_grad()
        training.backward(step)
        if 8 <= step < 20:
            nn.utils.clip_grad_value_(training.module.parameters(), 0.01)
        training.optimizer.step()
        if dist.get_rank() == 0:
            evaluate(training)
        if step % 2:  # else the next forward pass broadcasts buffers
            dist.barrier()


# - Ranks that are lost between backward and the next forward pass


@pytest.mark.parametrize("how", ["dies", "raises", "sleeps"])
def test_a_rank_lost_after_backward_is_named_by_all_others(how: str) -> None:
    for words in run_ranks(3, _lost_rank, how, timeout_s=60, lost=(2,))[:2]:
        assert "rank 2" in words, words


def _lost_rank(how: str) -> str:
    module = Blocks()
    optimizer = momentum(module)
    flow = gf.attach(module, optimizer, "wfbp", gate=True, deadline_s=2.0 if how == "sleeps" else 30.0)
    for step in range(STEPS):
        one_step(module, optimizer, step)
    if dist.get_rank() == 2:
        images, labels = batch(2, STEPS, flat=False)
        nn.functional.cross_entropy(module(images), labels).backward()
        if how == "dies":
            os._exit(1)
        if how == "raises":
            with flow:
                raise ZeroDivisionError
        time.sleep(60)
    with within(20), pytest.raises(gf.TrainingError) as caught:
        for step in range(STEPS, STEPS + 3):
            one_step(module, optimizer, step)
        flow.synchronize()
    assert caught.value.ranks == (2,), caught.value
    with within(10):
        flow.close()
    return str(caught.value)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < seconds


# - The end of a script

SCRIPT = """
import atexit, os, pathlib, sys, torch, torch.distributed as dist
from models import Blocks
from test_gate import PLANNED, Training, momentum, plain

os.chdir(pathlib.Path(__file__).parent)
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=rank, world_size=2)

def mapped():
    # Their memory is a file, which shows what it holds when the process is gone.
    model = Blocks()
    for name, parameter in model.named_parameters():
        shared = torch.from_file(f"{rank}-{name}", shared=True, size=parameter.numel()).view(parameter.shape)
        parameter.data = shared.copy_(parameter.data)
    return model

def save(when):
    torch.save(training.module.state_dict(), f"{rank}-{when}")

atexit.register(save, "after-ours")
training = Training(PLANNED, mapped, momentum)
atexit.register(save, "before-ours")
plain(training)
"""


def test_the_end_of_a_script_finishes_what_was_put_off(tmp_path: Path) -> None:
    expected = run_ranks(2, _weights_under_ddp)[0]
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = [Script(tmp_path / "script.py", (str(rank),), GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    try:
        for script in ranks:
            assert script.wait() == 0, script.stderr
    finally:
        for script in ranks:
            script.kill()
    for rank in range(2):
        saved = [torch.load(tmp_path / f"{rank}-{when}") for when in ("before-ours", "after-ours")]
        for name, parameter in expected.items():
            left = torch.from_file(str(tmp_path / f"{rank}-{name}"), size=parameter.numel()).view(parameter.shape)
            assert torch.equal(left, parameter), f"rank {rank}, {name}: not finished when the process ended"
            assert all(torch.equal(state[name], parameter) for state in saved), f"rank {rank}, {name}: not saved right"


def _weights_under_ddp() -> dict[str, torch.Tensor]:
    training = Training(DDP, Blocks, momentum)
    plain(training)
    return dict(training.module.state_dict())
