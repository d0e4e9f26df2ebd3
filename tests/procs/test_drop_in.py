"""A drop-in for stock DDP: one seeded script under either class, in the same processes, and what it saw compared.

A script gets a `Side`: it wraps models with it and notes gradients, weights, buffers and outputs. Tensors are
compared relative to their largest element; what is noted as shared must also be the same to the bit on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradientflow as gf
from helpers import run_ranks
from models import pay_for_any_race

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
MANY_BUCKETS = 0.0005  # MiB: a layer or two of the models below


class Note(NamedTuple):
    name: str
    value: Any
    shared: bool


class Side:
    """One of the two classes, and what a script saw of it."""

    def __init__(self, ours: bool) -> None:
        self.ours = ours
        self.team = 0  # ranks that train the same model
        self.notes: list[Note] = []
        self._wrapped: list[Any] = []

    def wrap(self, module: nn.Module, stock: dict[str, Any] | None = None, **options: Any) -> Any:
        """`stock` holds options for the stock class alone."""
        if self.ours:
            return self.adopt(gf.DistributedDataParallel(module, **options))
        return DistributedDataParallel(module, **options, **(stock or {}))

    def adopt(self, wrapped: Any) -> Any:
        """A copy of what was wrapped is to be closed as well."""
        if self.ours:
            self._wrapped.append(wrapped)
        return wrapped

    def close(self) -> None:
        for wrapped in self._wrapped:
            wrapped.close()

    def note(self, name: str, value: Any, shared: bool = False) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        self.notes.append(Note(f"{len(self.notes)}: {name}", value, shared))

    def gradients(self, model: nn.Module, shared: bool = True) -> None:
        for name, parameter in model.named_parameters():
            self.note(f"gradient of {name}", parameter.grad, shared)

    def weights(self, model: nn.Module, shared: bool = True) -> None:
        for name, parameter in model.named_parameters():
            self.note(f"weight {name}", parameter, shared)

    def buffers(self, model: nn.Module, shared: bool = False) -> None:
        for name, buffer in model.named_buffers():
            self.note(f"buffer {name}", buffer, shared)


def beside_stock(world: int, script: Callable[..., None], *args: Any) -> None:
    """`script(side, *args)` under both classes, in one world."""
    results = run_ranks(world, _both_sides, script, args, timeout_s=60)
    for team in {team for team, _ in results}:
        digests = [theirs for of, theirs in results if of == team]
        for member, theirs in enumerate(digests[1:], start=1):
            differing = [name for (name, a), (_, b) in zip(digests[0], theirs, strict=True) if a != b]
            assert not differing, f"members 0 and {member} of team {team} differ in {differing[:5]}"


def _both_sides(script: Callable[..., None], args: tuple[Any, ...]) -> tuple[int, list[tuple[str, int]]]:
    sides = {"stock": Side(ours=False), "ours": Side(ours=True)}
    for name, side in sides.items():
        torch.manual_seed(dist.get_rank())  # ranks start apart: what rank 0 has is what counts
        try:
            script(side, *args)
        except BaseException as error:
            error.add_note(f"with {name}, after {[note.name for note in side.notes[-3:]]}")
            raise
        side.close()
        dist.barrier()
    ours, stock = sides["ours"].notes, sides["stock"].notes
    assert ours, "nothing was noted"
    assert [note.name for note in ours] == [note.name for note in stock]
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine.name, mine.value, theirs.value)
    return sides["ours"].team, [(note.name, digest(note.value)) for note in ours if note.shared]


def assert_same(name: str, ours: Any, stock: Any) -> None:
    if not isinstance(stock, torch.Tensor):
        assert type(ours) is type(stock) and ours == stock, f"{name}: {ours} against {stock}"
        return
    assert isinstance(ours, torch.Tensor), f"{name}: {ours} against {stock}"
    for trait in ("dtype", "shape", "layout"):
        mine, theirs = getattr(ours, trait), getattr(stock, trait)
        assert mine == theirs, f"{name}: {trait} {mine} against {theirs}"
    bound = BOUNDS.get(stock.dtype, 0.0)
    if stock.is_sparse:
        ours, stock = ours.to_dense(), stock.to_dense()
    else:
        assert ours.stride() == stock.stride(), f"{name}: strides {ours.stride()} against {stock.stride()}"
    ours, stock = ours.double(), stock.double()
    assert torch.equal(ours.isfinite(), stock.isfinite()), f"{name}: {ours} against {stock}"
    ours, stock = ours.nan_to_num(0.0, 0.0, 0.0), stock.nan_to_num(0.0, 0.0, 0.0)
    if stock.numel():
        error = float((ours - stock).abs().max() / stock.abs().max().clamp_min(1e-30))
        assert error <= bound, f"{name}: off by {error:.3g}: {ours} against {stock}"


def digest(value: Any) -> int:
    """Differs when a bit does."""
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    if value.is_sparse:
        value = value.coalesce()
        return digest(value.indices()) ^ digest(value.values())
    return zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def data(step: int, *shape: int, rank: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that depend on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(*(shape or (4, 8)), generator=generator, dtype=torch.float64).to(dtype)


def indices(step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(20, shape, generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).double()


def normed() -> nn.Module:
    """With buffers, one of them of integers."""
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mean_square(model: nn.Module, step: int) -> torch.Tensor:
    return model(data(step)).square().mean()


def train(
    side: Side,
    model: Any,
    loss: Callable[[Any, int], torch.Tensor] = mean_square,
    steps: range = range(3),
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    optimizer = optimizer or sgd(model)
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        side.gradients(model)
        optimizer.step()
    side.weights(model)


# - Plain training, sizes and worlds


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_plain_training_in_worlds_of_one_to_four(world: int) -> None:
    beside_stock(world, _plain)


def _plain(side: Side) -> None:
    for options in (
        {},
        {"bucket_cap_mb": MANY_BUCKETS},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": MANY_BUCKETS},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"batched_grad_copy": True},
    ):
        torch.manual_seed(dist.get_rank())
        wrapped = side.wrap(mlp(), **options)
        assert isinstance(wrapped, DistributedDataParallel)
        train(side, wrapped)


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(1 + number % 3, dtype=torch.float64) for number in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parts)).square().sum() * x.sum()


def test_models_of_one_and_of_2000_parameters() -> None:
    beside_stock(2, _sizes)


def _sizes(side: Side) -> None:
    for count in (1, 2000):
        train(side, side.wrap(Many(count)), steps=range(2))


def test_a_model_without_parameters_is_refused_as_by_stock() -> None:
    beside_stock(2, _nothing_to_train)


def _nothing_to_train(side: Side) -> None:
    for module in (nn.GELU(), mlp().requires_grad_(False)):
        with pytest.raises(RuntimeError):
            side.wrap(module)
        side.note("refused", True)


# - What ranks start from, and buffers


BUFFER_OPTIONS = [{}, {"forward_sync_buffers": False}, {"broadcast_buffers": False}]


def test_ranks_start_from_rank_0s_parameters_and_buffers() -> None:
    beside_stock(3, _start)


def _start(side: Side) -> None:
    for options in [*BUFFER_OPTIONS, {"init_sync": False}]:
        torch.manual_seed(dist.get_rank())
        model = normed()
        model[1].running_mean += dist.get_rank()
        model[1].num_batches_tracked += dist.get_rank()
        wrapped = side.wrap(model, **options)
        alike = "init_sync" not in options
        side.weights(model, shared=alike)
        side.buffers(model, shared=alike and "broadcast_buffers" not in options)
        mean_square(wrapped, 0).backward()
        side.gradients(model)


@pytest.mark.parametrize("options", BUFFER_OPTIONS, ids=str)
def test_buffers_in_training_evaluation_and_accumulation(options: dict[str, Any]) -> None:
    beside_stock(2, _buffers, options)


def _buffers(side: Side, options: dict[str, Any]) -> None:
    model = normed()
    wrapped = side.wrap(model, **options)
    optimizer = sgd(model)

    def forward(step: int) -> torch.Tensor:
        output = wrapped(data(step))
        side.note("output", output)
        side.buffers(model)
        return output.square().mean()

    for step in range(0, 100, 10):
        optimizer.zero_grad()
        forward(step).backward()
        side.gradients(model)
        optimizer.step()
        if step == 20:  # the first evaluation after training is one with rank 0's buffers
            wrapped.eval()
            with torch.no_grad():
                forward(step + 1)
                forward(step + 2)
            wrapped.train()
        if step == 40:
            wrapped.eval()
            forward(step + 1).backward()
            side.gradients(model)
            wrapped.train()
        if step == 50:
            with torch.no_grad():
                forward(step + 1)
                forward(step + 2)
        if step == 60:
            with wrapped.no_sync():
                forward(step + 1).backward()
                forward(step + 2).backward()
            forward(step + 3).backward()
            side.gradients(model)
        if step == 70:
            model[1].running_mean = data(step, 16)  # a new tensor, another on each rank


# - Accumulation and zero_grad


@pytest.mark.parametrize("view", [False, True])
def test_accumulation_with_and_without_no_sync_however_gradients_are_zeroed(view: bool) -> None:
    beside_stock(2, _accumulation, view)


def _accumulation(side: Side, view: bool) -> None:
    for quiet in ("none", "all but last", "first of four"):
        for zero in ("to None", "to zeros", "never"):
            torch.manual_seed(dist.get_rank())
            wrapped = side.wrap(mlp(), gradient_as_bucket_view=view, bucket_cap_mb=MANY_BUCKETS)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            for step in range(3):
                if zero != "never":
                    optimizer.zero_grad(set_to_none=zero == "to None")
                for part in range(4):
                    hush = (quiet == "all but last" and part < 3) or (quiet == "first of four" and part == 0)
                    with wrapped.no_sync() if hush else contextlib.nullcontext():
                        mean_square(wrapped, 10 * step + part).backward()
                    side.gradients(wrapped, shared=not hush)
                optimizer.step()
            side.weights(wrapped)


def test_no_sync_is_decided_by_the_forward_pass() -> None:
    beside_stock(2, _where_no_sync)


def _where_no_sync(side: Side) -> None:
    wrapped = side.wrap(mlp())
    for step in range(0, 40, 10):
        wrapped.zero_grad()
        with wrapped.no_sync():
            loss = mean_square(wrapped, step)
        loss.backward()
        side.gradients(wrapped, shared=False)
        loss = mean_square(wrapped, step + 1)
        with wrapped.no_sync():
            loss.backward()
        side.gradients(wrapped)


def test_gradients_the_user_put_there_are_added_to() -> None:
    beside_stock(2, _given_gradients)


def _given_gradients(side: Side) -> None:
    wrapped = side.wrap(mlp())
    for step in range(3):
        for parameter in wrapped.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
        mean_square(wrapped, step).backward()
        side.gradients(wrapped)


def test_kept_gradients_do_not_change_and_zeroed_ones_stay_the_same_tensors() -> None:
    beside_stock(2, _kept)


def _kept(side: Side) -> None:
    wrapped = side.wrap(mlp(), gradient_as_bucket_view=False)
    optimizer = sgd(wrapped)
    history: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        optimizer.zero_grad()
        mean_square(wrapped, step).backward()
        side.gradients(wrapped)
        history += [(parameter.grad, parameter.grad.clone()) for parameter in wrapped.parameters()]
        optimizer.step()
    side.note("kept gradients are unchanged", all(torch.equal(kept, then) for kept, then in history))
    for step in range(3):  # zeroed in place: whoever holds the gradient sees the next one
        held = [parameter.grad for parameter in wrapped.parameters()]
        optimizer.zero_grad(set_to_none=False)
        mean_square(wrapped, step).backward()
        same = [parameter.grad is old for parameter, old in zip(wrapped.parameters(), held, strict=True)]
        side.note("gradients stay the same tensors", same)
        side.gradients(wrapped)


# - Parameters that are not used, tied, frozen, ignored


class Branches(nn.Module):
    """Uses some of its branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)
        self.double()

    def forward(self, x: torch.Tensor, use: str = "lr") -> torch.Tensor:
        x = self.stem(x)
        for letter in use:
            x = (self.left if letter == "l" else self.right)(x)
        return x


USES = {  # by step, then by rank
    "the same everywhere": [("l", "l", "l")] * 4,
    "another on each rank": [("l", "r", "")] * 4,
    "changing": [("l", "r", ""), ("lr", "", "r"), ("", "", ""), ("r", "r", "r"), ("l", "lr", "l"), ("", "rl", "")],
}


@pytest.mark.parametrize(
    ("world", "view", "asked"),
    [(2, False, True), (2, True, False), (3, False, False), (3, True, True)],
)
def test_unused_parameters(world: int, view: bool, asked: bool) -> None:
    beside_stock(world, _unused, view, asked)


def _unused(side: Side, view: bool, asked: bool) -> None:
    options = {"find_unused_parameters": True}
    for uses in USES.values():
        for zero in ("to None", "to zeros", "never"):
            torch.manual_seed(dist.get_rank())
            model = Branches()
            if asked:
                wrapped = side.wrap(model, gradient_as_bucket_view=view, **options)
            else:
                wrapped = side.wrap(model, gradient_as_bucket_view=view, stock=options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step, by_rank in enumerate(uses):
                if zero != "never":
                    optimizer.zero_grad(set_to_none=zero == "to None")
                wrapped(data(step), by_rank[dist.get_rank()]).square().mean().backward()
                side.gradients(model)
                optimizer.step()
            side.weights(model)


def test_unused_parameters_under_accumulation() -> None:
    beside_stock(2, _unused_accumulation)


def _unused_accumulation(side: Side) -> None:
    wrapped = side.wrap(Branches(), find_unused_parameters=True)
    for step in range(0, 50, 10):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(data(step), ("l", "r")[dist.get_rank()]).square().mean().backward()
        wrapped(data(step + 1), ("", "l")[dist.get_rank()]).square().mean().backward()
        side.gradients(wrapped)


class Outputs(nn.Module):
    """Two heads, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        return self.left(x), self.right(x)


def test_outputs_the_loss_does_not_use() -> None:
    beside_stock(2, _unused_outputs)


def _unused_outputs(side: Side) -> None:
    wrapped = side.wrap(Outputs(), find_unused_parameters=True)
    for step in range(4):
        wrapped.zero_grad()
        outputs = wrapped(data(step))
        if step < 2:
            outputs[0].square().mean().backward()
        elif step == 2:
            outputs[dist.get_rank()].square().mean().backward()
        else:
            sum(output.square().mean() for output in outputs).backward()
        side.gradients(wrapped)


class Bypass(nn.Module):
    """Returns something that requires a gradient and has none of the parameters in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, bypass: bool) -> torch.Tensor:
        return 2 * x if bypass else self.layer(x)


def test_a_rank_whose_loss_reaches_no_parameter() -> None:
    beside_stock(3, _bypass)


def _bypass(side: Side) -> None:
    """Stock would wait for ever in the next step, so there the rank adds nothing instead."""
    wrapped = side.wrap(Bypass(), find_unused_parameters=True)
    optimizer = sgd(wrapped)
    for step in range(4):
        optimizer.zero_grad()
        x = data(step).requires_grad_()
        bypass = dist.get_rank() == step % dist.get_world_size()
        if side.ours or not bypass:
            loss = wrapped(x, bypass).square().mean()
        else:
            loss = 0.0 * wrapped(x, False).sum() + (2 * x).square().mean()
        loss.backward()
        side.gradients(wrapped)
        side.note("gradient of the input", x.grad)
        optimizer.step()
    optimizer.zero_grad()
    wrapped(data(9).requires_grad_(), True).square().mean().backward()  # on all ranks
    side.gradients(wrapped)
    train(side, wrapped, lambda model, step: model(data(step), False).square().mean(), optimizer=optimizer)
    side.weights(wrapped)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def tied_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(indices(step, 6)).square().mean()


def test_tied_weights() -> None:
    beside_stock(4, _tied)


def _tied(side: Side) -> None:
    train(side, side.wrap(Tied()), tied_loss)
    train(side, side.wrap(Tied(), gradient_as_bucket_view=True), tied_loss)


def test_parameters_frozen_later() -> None:
    beside_stock(2, _frozen_later)


def _frozen_later(side: Side) -> None:
    """Stock must be told to look for unused parameters."""
    for zero_first in (True, False):
        model = mlp()
        wrapped = side.wrap(model, stock={"find_unused_parameters": True})
        optimizer = sgd(model)
        train(side, wrapped, optimizer=optimizer)
        if zero_first:
            optimizer.zero_grad()
        model[0].requires_grad_(False)
        model[2].bias.requires_grad_(False)
        for step in range(3, 6):
            if zero_first:
                optimizer.zero_grad()
            mean_square(wrapped, step).backward()
            side.gradients(model)
            optimizer.step()
        side.weights(model)


@pytest.mark.parametrize("swap", [False, True], ids=["one after another", "others frozen meanwhile"])
def test_parameters_unfrozen_later_are_averaged_from_then_on(swap: bool) -> None:
    beside_stock(2, _unfrozen_later, swap)


def _unfrozen_later(side: Side, swap: bool) -> None:
    """Stock has to be wrapped anew."""
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    wrapped = side.wrap(model)
    optimizer = sgd(model)
    train(side, wrapped, optimizer=optimizer)
    for layer, steps in [(2, range(3, 6)), (0, range(6, 9))]:
        model[4].requires_grad_(layer == 0 or not swap)
        model[layer].requires_grad_(True)
        if not side.ours:
            state = optimizer.state_dict()
            model = copy.deepcopy(model)
            for parameter, old in zip(model.parameters(), wrapped.parameters(), strict=True):
                parameter.grad = old.grad
            wrapped, optimizer = side.wrap(model), sgd(model)
            optimizer.load_state_dict(state)
        train(side, wrapped, steps=steps, optimizer=optimizer)


def test_ignored_parameters_and_buffers_stay_local() -> None:
    beside_stock(2, _ignored)


def _ignored(side: Side) -> None:
    model = normed()
    ignored = ["3.weight", "1.running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = side.wrap(model)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        mean_square(wrapped, step).backward()
        for name, parameter in model.named_parameters():
            side.note(f"gradient of {name}", parameter.grad)
        side.buffers(model)
        optimizer.step()
    side.weights(model, shared=False)


# - Optimizers, precision, layouts


def test_parameter_groups_clipping_and_a_schedule() -> None:
    beside_stock(3, _groups_and_clipping)


def _groups_and_clipping(side: Side) -> None:
    model = mlp()
    wrapped = side.wrap(model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.01, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        optimizer.zero_grad()
        mean_square(wrapped, step).backward()
        norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
        side.note("norm", norm, shared=True)
        side.gradients(model)
        optimizer.step()
        schedule.step()
    side.weights(model)


def test_autocast_and_a_scaler_that_skips_a_step_all_ranks_alike() -> None:
    beside_stock(2, _amp)


def _amp(side: Side) -> None:
    model = mlp().float()
    wrapped = side.wrap(model)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = wrapped(data(step, dtype=torch.float32))
        loss = output.float().square().mean()
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        side.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        for name, parameter in model.named_parameters():
            side.note(f"gradient of {name}", parameter.grad, shared=step != 2)  # NaNs differ in their bits
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert moved == (step != 2)
        side.note("scale", scaler.get_scale(), shared=True)
        side.weights(model)


class Sparse(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=True)
        self.bag = nn.EmbeddingBag(20, 6, mode="mean", sparse=True)
        self.more = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 3) if dense else nn.Identity()
        self.double()

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x).mean(1) + self.bag(x)) + self.more(more).sum()


@pytest.mark.parametrize(("world", "dense"), [(2, False), (3, True)])
def test_sparse_gradients(world: int, dense: bool) -> None:
    beside_stock(world, _sparse, dense)


def _sparse(side: Side, dense: bool) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(indices(step, 4, 3), indices(step, 5)).square().mean()

    for optimizers in ("sgd", "adam"):
        torch.manual_seed(dist.get_rank())
        model = Sparse(dense)
        wrapped = side.wrap(model)
        if optimizers == "sgd":
            steppers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1)]
        else:
            steppers = [torch.optim.SparseAdam([model.words.weight, model.bag.weight, model.more.weight], lr=0.1)]
            steppers += [torch.optim.Adam(model.head.parameters(), lr=0.1)] if dense else []
        for step in range(3):
            for stepper in steppers:
                stepper.zero_grad()
            loss(wrapped, step).backward()
            side.gradients(model)
            for stepper in steppers:
                stepper.step()
        side.weights(model)
        wrapped.zero_grad()
        with wrapped.no_sync():
            loss(wrapped, 10).backward()
        loss(wrapped, 11).backward()
        side.gradients(model)


def test_a_sparse_parameter_unused_on_one_rank() -> None:
    beside_stock(2, _sparse_unused)


class MaybeSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=True)
        self.more = nn.Embedding(20, 6, sparse=True)
        self.double()

    def forward(self, x: torch.Tensor, more: torch.Tensor | None) -> torch.Tensor:
        x = self.words(x).mean(1)
        return x if more is None else x + self.more(more).sum()


def _sparse_unused(side: Side) -> None:
    """Stock refuses a sparse parameter without a gradient, so there the rank looks up nothing."""
    model = MaybeSparse()
    wrapped = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        more = None if side.ours else indices(step, 0)
        if dist.get_rank() == step % 2:
            more = indices(step, 5)
        wrapped(indices(step, 4, 3), more).square().mean().backward()
        side.gradients(model)
        optimizer.step()
    side.weights(model)


class Mixed(nn.Module):
    """Three dtypes, a frozen layer, a scalar, an empty tensor, channels_last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.wide = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3)) * self.scale + self.empty.sum()
        return self.wide(self.low(self.frozen(x).bfloat16()).double())


@pytest.mark.parametrize(("world", "view"), [(2, False), (3, True)])
def test_mixed_dtypes_and_channels_last(world: int, view: bool) -> None:
    beside_stock(world, _mixed, view)


def _mixed(side: Side, view: bool) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        images = data(step, 2, 3, 6, 6, dtype=torch.float32).to(memory_format=torch.channels_last)
        return model(images).square().sum()

    wrapped = side.wrap(Mixed(), gradient_as_bucket_view=view)
    for step in range(3):
        wrapped.zero_grad()
        loss(wrapped, step).backward()
        side.gradients(wrapped)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 3)).double()
    wrapped = side.wrap(convolutions.to(memory_format=torch.channels_last), gradient_as_bucket_view=view)
    for step in range(3):
        wrapped.zero_grad()
        output = wrapped(data(step, 2, 3, 6, 6).to(memory_format=torch.channels_last))
        side.note("output", output)
        output.square().mean().backward()
        side.gradients(wrapped)


# - Uneven inputs


@pytest.mark.parametrize(("world", "initial"), [(2, True), (3, False)])
def test_uneven_inputs(world: int, initial: bool) -> None:
    beside_stock(world, _uneven, initial)


def _uneven(side: Side, initial: bool) -> None:
    for make, options in [
        (mlp, {}),
        (mlp, {"bucket_cap_mb": MANY_BUCKETS, "find_unused_parameters": True}),
        (normed, {}),
        (normed, {"forward_sync_buffers": False}),
    ]:
        for first_to_leave in (0, dist.get_world_size() - 1):
            torch.manual_seed(dist.get_rank())
            wrapped = side.wrap(make(), **options)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            batches = 2 + 2 * abs(dist.get_rank() - first_to_leave)
            with wrapped.join(divide_by_initial_world_size=initial):
                for step in range(batches):
                    optimizer.zero_grad()
                    mean_square(wrapped, step).backward()
                    side.gradients(wrapped, shared=False)
                    side.buffers(wrapped)
                    optimizer.step()
            side.weights(wrapped)
            side.buffers(wrapped)
            train(side, wrapped, steps=range(20, 22))  # even again


def test_inputs_that_end_while_plans_are_made_or_race() -> None:
    beside_stock(2, _uneven_planning)


def _uneven_planning(side: Side) -> None:
    pay_for_any_race()
    for recipe, batches in (("merge", (2, 5)), ("auto", (0, 4)), ("auto", (30, 1))):
        wrapped = side.wrap(mlp(), **({"recipe": recipe} if side.ours else {}))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with wrapped.join():
            for step in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                mean_square(wrapped, step).backward()
                optimizer.step()
        side.weights(wrapped)
        train(side, wrapped, steps=range(40, 44))


def test_uneven_inputs_under_accumulation() -> None:
    beside_stock(2, _uneven_accumulation)


def _uneven_accumulation(side: Side) -> None:
    wrapped = side.wrap(normed())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(2 + 4 * dist.get_rank()):
            with wrapped.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                mean_square(wrapped, step).backward()
            side.gradients(wrapped, shared=False)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    side.weights(wrapped)


def test_two_models_with_uneven_inputs() -> None:
    beside_stock(2, _uneven_pair)


def _uneven_pair(side: Side) -> None:
    pair = [side.wrap(mlp()), side.wrap(normed())]
    with Join(pair, divide_by_initial_world_size=False):
        for step in range(2 + dist.get_rank()):
            for wrapped in pair:
                wrapped.zero_grad()
                mean_square(wrapped, step).backward()
                side.gradients(wrapped, shared=False)
    for wrapped in pair:
        side.weights(wrapped)


def test_uneven_inputs_can_end_training_on_all_ranks() -> None:
    beside_stock(3, _early_termination)


def _early_termination(side: Side) -> None:
    wrapped = side.wrap(normed())
    done = 0
    with (
        pytest.raises(RuntimeError, match="exhausted") as caught,
        wrapped.join(throw_on_early_termination=True),
    ):
        for step in range(2 + dist.get_rank()):
            wrapped.zero_grad()
            mean_square(wrapped, step).backward()
            done += 1
    side.note("steps", done, shared=True)
    side.note("words", str(caught.value))
    side.gradients(wrapped, shared=False)
    with wrapped.join():
        train(side, wrapped, steps=range(5, 7))


def test_join_does_nothing_when_inputs_are_even_or_it_is_off() -> None:
    beside_stock(2, _even)


def _even(side: Side) -> None:
    for enable in (True, False):
        wrapped = side.wrap(normed())
        with wrapped.join(enable=enable):
            train(side, wrapped)
        side.weights(wrapped)


# - Checkpoints and compilers


class Checkpointed(nn.Module):
    """Every layer but the first under a checkpoint, `times` over."""

    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))
        self.reentrant, self.times = reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            for _ in range(self.times):
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool, view: bool) -> None:
    beside_stock(2, _checkpoints, reentrant, view)


def _checkpoints(side: Side, reentrant: bool, view: bool) -> None:
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": MANY_BUCKETS}
    train(side, side.wrap(Checkpointed(reentrant), **options))
    train(side, side.wrap(Checkpointed(reentrant), static_graph=True, **options))
    if not reentrant:
        train(side, side.wrap(Checkpointed(reentrant, times=3), **options))
        train(side, side.wrap(Checkpointed(reentrant), find_unused_parameters=True, **options))


def test_a_layer_under_several_reentrant_checkpoints_in_a_static_graph() -> None:
    beside_stock(2, _static_graph)


class PartlyCheckpointed(Checkpointed):
    """Beside what is under checkpoints, a layer that is not used."""

    def __init__(self) -> None:
        super().__init__(True, times=2)
        self.never = nn.Linear(3, 3, dtype=torch.float64)


def _static_graph(side: Side) -> None:
    for view in (False, True):
        wrapped = side.wrap(Checkpointed(True, times=3), static_graph=True, gradient_as_bucket_view=view)
        train(side, wrapped, steps=range(4))
        train(side, side.wrap(PartlyCheckpointed(), static_graph=True, gradient_as_bucket_view=view), steps=range(4))


def test_accumulation_in_a_static_graph() -> None:
    beside_stock(2, _static_accumulation)


def _static_accumulation(side: Side) -> None:
    wrapped = side.wrap(Checkpointed(True, times=2), static_graph=True)
    optimizer = sgd(wrapped)
    for step in range(0, 40, 10):
        optimizer.zero_grad()
        for part in range(3):
            with wrapped.no_sync() if part < 2 and step else contextlib.nullcontext():
                mean_square(wrapped, step + part).backward()
        side.gradients(wrapped)
        optimizer.step()
    side.weights(wrapped)


@pytest.mark.parametrize("order", ["wrapped then compiled", "compiled then wrapped"])
def test_torch_compile(order: str) -> None:
    beside_stock(2, _compiled, order)


def _compiled(side: Side, order: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 400), nn.GELU(), nn.Linear(400, 400), nn.GELU(), nn.Linear(400, 4)).double()
    if order == "wrapped then compiled":
        wrapped = side.wrap(model, bucket_cap_mb=1)  # the compiler cuts its graph at buckets
        compiled: Any = torch.compile(wrapped, backend="aot_eager")
    else:
        compiled = wrapped = side.wrap(torch.compile(model, backend="aot_eager"))
    optimizer = sgd(model)
    for step in range(0, 40, 10):
        optimizer.zero_grad()
        if step == 20:
            with wrapped.no_sync():
                mean_square(compiled, step + 1).backward()
            side.gradients(model, shared=False)
        mean_square(compiled, step).backward()
        side.gradients(model)
        optimizer.step()
    compiled.eval()
    with torch.no_grad():
        side.note("evaluated", compiled(data(99)))


# - Several passes


def test_several_forward_and_backward_passes_per_step() -> None:
    beside_stock(2, _several_passes)


def _several_passes(side: Side) -> None:
    for make in (mlp, normed):
        torch.manual_seed(dist.get_rank())
        wrapped = side.wrap(make())
        optimizer = sgd(wrapped)
        for step in range(0, 40, 10):
            optimizer.zero_grad()
            if step < 20:  # forwards, then one backward
                (wrapped(data(step)) - wrapped(data(step + 1))).square().mean().backward()
            else:  # a backward for each forward
                for part in range(3):
                    mean_square(wrapped, step + part).backward()
                    side.gradients(wrapped)
            side.gradients(wrapped)
            side.buffers(wrapped)
            optimizer.step()
        side.weights(wrapped)


def test_two_backward_passes_after_two_forward_passes() -> None:
    beside_stock(2, _two_and_two)


def _two_and_two(side: Side) -> None:
    """Stock averages one backward for all its forwards, and would leave the second local; so there they take turns."""
    wrapped = side.wrap(mlp())
    for step in range(0, 30, 10):
        wrapped.zero_grad()
        first = mean_square(wrapped, step)
        if side.ours:
            second = mean_square(wrapped, step + 1)
        first.backward()
        side.gradients(wrapped)
        if not side.ours:
            second = mean_square(wrapped, step + 1)
        second.backward()
        side.gradients(wrapped)


def test_a_retained_graph_is_averaged_each_time() -> None:
    beside_stock(2, _retain_graph)


def _retain_graph(side: Side) -> None:
    """Stock would leave the second backward local, so there it has a forward of its own."""
    wrapped = side.wrap(mlp())
    optimizer = sgd(wrapped)
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_square(wrapped, step)
        loss.backward(retain_graph=True)
        side.gradients(wrapped)
        if not side.ours:
            loss = mean_square(wrapped, step)
        loss.backward()
        side.gradients(wrapped)
        optimizer.zero_grad()
        mean_square(wrapped, 10 + step).backward()
        side.gradients(wrapped)
        optimizer.step()


def test_gradients_taken_with_autograd_grad_leave_no_exchange_behind() -> None:
    beside_stock(2, _autograd_grad)


def _autograd_grad(side: Side) -> None:
    wrapped = side.wrap(mlp())
    optimizer = sgd(wrapped)
    for step in range(0, 50, 10):
        optimizer.zero_grad()
        x = data(step).requires_grad_()
        output = wrapped(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        side.gradients(wrapped)
        (output.square().mean() + slope.square().mean()).backward()  # a gradient penalty
        side.note("slope", slope)
        side.gradients(wrapped)
        optimizer.step()
        if step > 10 and dist.get_rank() == 0:  # alone, without a backward pass, once stock has settled its buckets
            taken = torch.autograd.grad(mean_square(wrapped, step + 1), list(wrapped.parameters()))
            side.note("taken", taken[0])
        if step == 20:
            taken = torch.autograd.grad(mean_square(wrapped, step + 2), list(wrapped.parameters()))
            side.note("taken", taken[0])
        check = torch.ones(1)
        dist.all_reduce(check)
        assert int(check) == dist.get_world_size()


# - Inputs and outputs


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    nothing: None = None
    label: str = "label"


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, *, x: torch.Tensor, kind: str) -> Any:
        a, b = self.a(x), self.b(x)
        return {
            "dict": lambda: {"a": a, "nothing": None, "deep": [b, {"text": "text", "number": 3}]},
            "tuple": lambda: (a, None, (b,)),
            "namedtuple": lambda: Pair(a + b, None),
            "dataclass": lambda: Record(a + b),
            "input": lambda: (x, a + b),
        }[kind]()


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, list | tuple) else []


def skeleton(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"tensor, {'with' if value.requires_grad else 'without'} gradient"
    if dataclasses.is_dataclass(value):
        return type(value).__name__, skeleton(vars(value))
    if isinstance(value, dict):
        return {key: skeleton(part) for key, part in value.items()}
    return (type(value).__name__, *map(skeleton, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("unused", [False, True])
def test_outputs_of_any_structure_and_inputs_by_keyword(unused: bool) -> None:
    beside_stock(2, _structures, unused)


def _structures(side: Side, unused: bool) -> None:
    wrapped = side.wrap(Structured(), find_unused_parameters=unused)
    for step, kind in enumerate(["dict", "tuple", "namedtuple", "dataclass", "input"]):
        wrapped.zero_grad()
        x = data(step)
        output = wrapped(x=x, kind=kind)
        side.note("skeleton", skeleton(output))
        if kind == "input":
            side.note("the input itself", output[0] is x)
        found = tensors_of(output)
        for tensor in found:
            side.note("output", tensor)
        sum(tensor.square().mean() for tensor in found).backward()
        side.gradients(wrapped)


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mood: str) -> torch.Tensor:
        return {"input": lambda: x, "detached": lambda: self.layer(x).detach(), "work": lambda: self.layer(x)}[mood]()


def test_forward_passes_without_a_gradient_leave_nothing_behind() -> None:
    beside_stock(2, _without_gradient)


def _without_gradient(side: Side) -> None:
    for unused in (False, True):
        wrapped = side.wrap(Moody(), find_unused_parameters=unused)
        for step, mood in enumerate(["work", "input", "work", "detached", "work", "input", "detached", "work"]):
            wrapped.zero_grad()
            x = data(step)
            output = wrapped(x, mood)
            side.note("output", output)
            side.note("requires a gradient", output.requires_grad)
            if mood == "work":
                output.square().mean().backward()
            side.gradients(wrapped)


@pytest.mark.parametrize("no_grad", [True, False])
def test_one_rank_may_evaluate_alone(no_grad: bool) -> None:
    beside_stock(2, _evaluate_alone, no_grad)


def _evaluate_alone(side: Side, no_grad: bool) -> None:
    wrapped = side.wrap(mlp())
    for steps in (range(3), range(3, 6)):
        train(side, wrapped, steps=steps)
        if dist.get_rank() == 1:
            wrapped.eval()
            with torch.no_grad() if no_grad else contextlib.nullcontext():
                side.note("evaluated", wrapped(data(50)))
                side.note("evaluated", wrapped(data(51)))
            wrapped.train()


# - Groups and several models


def test_a_group_of_some_of_the_ranks() -> None:
    beside_stock(3, _subset)


def _subset(side: Side) -> None:
    group = dist.new_group([1, 2])  # rank 0 of the group is not rank 0 of the world
    rank = dist.get_rank()
    side.team = int(rank in (1, 2))
    if side.team:
        wrapped = side.wrap(normed(), process_group=group)
        side.weights(wrapped)
        side.buffers(wrapped, shared=True)
        train(side, wrapped)
        side.buffers(wrapped)
        with wrapped.join():
            for step in range(rank + 1):
                mean_square(wrapped, step).backward()
        side.gradients(wrapped, shared=False)
    else:
        side.note("idle", True)


def test_two_groups_train_two_models_at_once() -> None:
    beside_stock(4, _two_groups)


def _two_groups(side: Side) -> None:
    members = [(0, 2), (1, 3)]
    groups = [dist.new_group(list(ranks)) for ranks in members]
    side.team = dist.get_rank() % 2
    wrapped = side.wrap([mlp, normed][side.team](), process_group=groups[side.team], bucket_cap_mb=MANY_BUCKETS)
    train(side, wrapped, steps=range(3 + 5 * side.team))


@pytest.mark.parametrize("freeze", [False, True])
def test_two_models_of_one_process_train_in_turns(freeze: bool) -> None:
    beside_stock(2, _adversaries, freeze)


def _adversaries(side: Side, freeze: bool) -> None:
    """The critic's parameters may be frozen while the other model learns, as many scripts do."""
    maker, critic = side.wrap(nn.Sequential(mlp(), nn.Linear(4, 8).double())), side.wrap(normed())
    make, judge = sgd(maker), sgd(critic)
    for step in range(0, 40, 10):
        fake = maker(data(step))
        judge.zero_grad()
        (critic(data(step + 1)).square().mean() - critic(fake.detach()).tanh().mean()).backward()
        side.gradients(critic)
        judge.step()
        critic.requires_grad_(not freeze)
        make.zero_grad()
        critic(fake).tanh().mean().backward()
        side.gradients(maker)
        side.gradients(critic)
        make.step()
        critic.requires_grad_(True)
    for wrapped in (maker, critic):
        side.weights(wrapped)
        side.buffers(wrapped)


# - Saving, loading, copying


def test_state_goes_from_stock_to_ours_and_back() -> None:
    beside_stock(2, _state)


def _state(side: Side) -> None:
    """Stock, then the class under test, then stock again; each goes on where the former stopped."""
    wrapped: Any = DistributedDataParallel(normed())
    optimizer = sgd(wrapped)
    train(side, wrapped, optimizer=optimizer)
    for turn, make in enumerate([side.wrap, DistributedDataParallel, side.wrap], start=1):
        file = io.BytesIO()
        torch.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file)
        side.note("names", list(state["model"]))
        wrapped = make(normed())
        optimizer = sgd(wrapped)
        side.note("matched", str(wrapped.load_state_dict(state["model"])))
        optimizer.load_state_dict(state["optimizer"])
        train(side, wrapped, steps=range(3 * turn, 3 * turn + 3), optimizer=optimizer)
        side.buffers(wrapped)
        side.note("names of parameters", [name for name, _ in wrapped.named_parameters()])
    plain = normed()
    plain.load_state_dict(wrapped.module.state_dict())


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_copies_train_by_themselves(how: str, view: bool) -> None:
    beside_stock(2, _copies, how, view)


def _copies(side: Side, how: str, view: bool) -> None:
    wrapped = side.wrap(normed(), gradient_as_bucket_view=view, find_unused_parameters=True)
    for trained in (False, True):
        if trained:
            train(side, wrapped)
        if how == "deepcopy":
            other = copy.deepcopy(wrapped)
        else:
            file = io.BytesIO()
            torch.save(wrapped, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        side.adopt(other)
        side.note("of the same class", type(other) is type(wrapped))
        side.weights(other)
        train(side, other, steps=range(5, 8))
        train(side, wrapped, steps=range(8, 10))
        train(side, other, steps=range(8, 10))
        side.buffers(other)


# - Communication hooks


def allreduce(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def fp16(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def nothing(model: Any) -> None:
    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)


def summed(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def new_tensor(model: Any) -> None:
    """The future gives another tensor than the bucket's."""

    def hook(state, bucket):
        copied = bucket.buffer().clone()
        return dist.all_reduce(copied, async_op=True).get_future().then(lambda future: future.value()[0] * state)

    model.register_comm_hook(0.25, hook)


def by_a_thread(model: Any) -> None:
    """Exchanged at once, completed later, the last bucket first."""

    def hook(state, bucket):
        work, future, buffer = dist.all_reduce(bucket.buffer(), async_op=True), torch.futures.Future(), bucket.buffer()

        def complete() -> None:
            work.wait()
            time.sleep(0.05 / (1 + bucket_index))
            future.set_result(buffer / dist.get_world_size())

        bucket_index = bucket.index()
        threading.Thread(target=complete).start()
        return future

    model.register_comm_hook(None, hook)


HOOKS = [allreduce, fp16, nothing, new_tensor, by_a_thread]


@pytest.mark.parametrize("register", HOOKS)
def test_hooks(register: Callable[[Any], None]) -> None:
    beside_stock(2, _hooks, register)


def _hooks(side: Side, register: Callable[[Any], None]) -> None:
    for options in (
        {},
        {"bucket_cap_mb": MANY_BUCKETS},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ):
        wrapped = side.wrap(mlp(), **options)
        register(wrapped)
        optimizer = sgd(wrapped)
        for step in range(0, 30, 10):
            optimizer.zero_grad()
            with wrapped.no_sync():
                mean_square(wrapped, step).backward()
            mean_square(wrapped, step + 1).backward()
            side.gradients(wrapped, shared=register is not nothing)
            optimizer.step()


def test_what_a_hook_is_told_of_its_bucket() -> None:
    beside_stock(2, _buckets)


def _buckets(side: Side) -> None:
    wrapped = side.wrap(mlp(), bucket_cap_mb=MANY_BUCKETS)
    seen: list[Any] = []

    def hook(state, bucket):
        parameters, gradients = bucket.parameters(), bucket.gradients()
        seen.append((bucket.index(), bucket.is_last(), [id(parameter) for parameter in parameters]))
        assert state == "state"
        assert [p.shape for p in parameters] == [g.shape for g in gradients]
        assert bucket.buffer().dim() == 1 and bucket.buffer().numel() == sum(p.numel() for p in parameters)
        assert torch.equal(torch.cat([g.reshape(-1) for g in gradients]), bucket.buffer())
        bucket.set_buffer(bucket.buffer() / dist.get_world_size())
        return summed(state, bucket)

    wrapped.register_comm_hook("state", hook)
    for step in range(3):
        wrapped.zero_grad()
        seen.clear()
        mean_square(wrapped, step).backward()
        side.gradients(wrapped)
        side.note("buckets are numbered from 0", sorted(index for index, _, _ in seen) == list(range(len(seen))))
        side.note("one is the last", [index for index, last, _ in seen if last] == [len(seen) - 1])
        whose = sorted(number for _, _, numbers in seen for number in numbers)
        side.note("each parameter once", whose == sorted(id(parameter) for parameter in wrapped.parameters()))


def test_power_sgd_in_one_bucket() -> None:
    beside_stock(2, _power_sgd)


def _power_sgd(side: Side) -> None:
    wrapped = side.wrap(mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(side, wrapped, steps=range(6))


def test_buckets_of_a_hook_are_the_same_in_all_steps() -> None:
    """Hooks remember things by a bucket's number, so nothing is tried in turn under them."""
    assert all(len(seen) == 1 and not trying for seen, trying in run_ranks(2, _buckets_of_a_hook))


def _buckets_of_a_hook() -> tuple[set[tuple[int, ...]], bool]:
    pay_for_any_race()
    wrapped = gf.DistributedDataParallel(mlp())
    sizes: list[int] = []
    seen: set[tuple[int, ...]] = set()

    def hook(state, bucket):
        sizes.append(bucket.buffer().numel())
        return summed(state, bucket)

    for step in range(70):
        if step == 8:  # in the middle of a race
            assert wrapped.flow.is_trying
            wrapped.register_comm_hook(None, hook)
        wrapped.zero_grad()
        mean_square(wrapped, step).backward()
        if step > 8:  # after the step that shows in which order gradients come
            seen.add(tuple(sizes))
        sizes.clear()
    return seen, wrapped.flow.is_trying


def test_a_hook_gets_whole_gradients() -> None:
    assert all("cuts tensors" in words and "use lazy" in words for words in run_ranks(2, _cut_gradients))


def _cut_gradients() -> str:
    wrapped = gf.DistributedDataParallel(mlp(), recipe="flow")
    with pytest.raises(gf.UsageError) as caught:
        wrapped.register_comm_hook(None, summed)
    wrapped.close()
    return str(caught.value)


def test_without_a_recipe_gradients_are_as_stock_s_also_if_the_optimizer_is_given() -> None:
    assert all(run_ranks(2, _plain_with_optimizer))


def _plain_with_optimizer() -> bool:
    pay_for_any_race()
    module = mlp()
    optimizer = sgd(module)
    wrapped = gf.DistributedDataParallel(module, optimizer=optimizer)
    kept: list[torch.Tensor] = []
    for step in range(60):
        assert wrapped.flow.is_trying or step != 20
        optimizer.zero_grad()
        mean_square(wrapped, step).backward()
        mine = next(module.parameters()).grad
        assert mine is not None and type(mine) is torch.Tensor
        if step in (20, 50):
            kept += [mine, mine.clone()]
        optimizer.step()
    return all(torch.equal(now, then) for now, then in (kept[:2], kept[2:]))


def test_two_hooks_run_one_after_the_other() -> None:
    beside_stock(2, _two_hooks)


def _two_hooks(side: Side) -> None:
    """Stock takes one hook, which there does the work of both."""

    def halved(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / 2 + 1)
        return future

    def both(state, bucket):
        bucket.set_buffer(bucket.buffer() / 2 + 1)
        return summed(state, bucket)

    wrapped = side.wrap(mlp(), bucket_cap_mb=MANY_BUCKETS)
    for hook in (halved, summed) if side.ours else (both,):
        wrapped.register_comm_hook(None, hook)
    train(side, wrapped)


def test_hooks_are_refused_as_by_stock() -> None:
    beside_stock(1, _refused_hooks)


def _refused_hooks(side: Side) -> None:
    wrapped = side.wrap(mlp())

    def annotated(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    for hook, error in [(3, TypeError), (annotated, ValueError)]:
        with pytest.raises(error):
            wrapped.register_comm_hook(None, hook)
        side.note("refused", True)


# - Wrappers that share parameters


class Shared(nn.Module):
    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(torch.tanh(self.trunk(inputs)))
        return output


@pytest.mark.parametrize("how", ["one loss", "in turn", "nested", "part of a larger one"])
def test_wrappers_that_share_parameters_average_all_of_them(how: str) -> None:
    beside_stock(2, _sharing, how)


def _sharing(side: Side, how: str) -> None:
    trunk, one, other = (nn.Linear(6, 6).double(), nn.Linear(6, 2).double(), nn.Linear(6, 3).double())
    if how == "nested":
        models = [side.wrap(Shared(side.wrap(trunk), one))]
    elif how == "part of a larger one":
        inner = side.wrap(trunk)
        models = [side.wrap(Shared(trunk, one)), inner]
    else:
        models = [side.wrap(Shared(trunk, one)), side.wrap(Shared(trunk, other))]
    parameters = {id(p): p for model in models for p in model.parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        losses = (model(data(step, 4, 6)).square().mean() for model in models)
        if how == "in turn":
            for loss in losses:
                loss.backward()
        else:
            sum(losses).backward()
        for model in models:
            side.gradients(model)
        optimizer.step()
    for model in models:
        side.weights(model)


def test_wrappers_that_share_views_say_that_they_cannot() -> None:
    run_ranks(2, _sharing_views)


def _sharing_views() -> None:
    trunk = nn.Linear(6, 6)
    first, second = (gf.DistributedDataParallel(trunk, gradient_as_bucket_view=True) for _ in range(2))
    loss = first(torch.ones(1, 6)).sum()
    with pytest.raises(gf.UsageError, match="gradient_as_bucket_view=False"):
        second(torch.ones(1, 6))
    loss.backward()
    second(torch.ones(1, 6)).sum().backward()  # in turn they may
    for wrapper in (first, second):
        wrapper.close()


# - What users do to gradients and modules


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_users_hook_makes_of_a_gradient_is_what_travels(when: str, view: bool) -> None:
    beside_stock(2, _hooked, when, view)


def _hooked(side: Side, when: str, view: bool) -> None:
    module = mlp()

    def clip(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-0.001, 0.001)

    def put() -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(clip)

    if when == "before":
        put()
    model = side.wrap(module, gradient_as_bucket_view=view, bucket_cap_mb=MANY_BUCKETS)
    if when == "after":
        put()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        mean_square(model, step).backward()
        side.gradients(model)
        optimizer.step()


def test_buffers_and_parameters_with_strides() -> None:
    beside_stock(2, _strided)


def _strided(side: Side) -> None:
    module = mlp()
    module.register_buffer("slice", torch.randn(10)[::2])
    module.register_buffer("columns", torch.randn(4, 6)[:, ::2])
    module.register_buffer("real", torch.randn(5, dtype=torch.complex64).real)
    module.register_parameter("odd", nn.Parameter(torch.randn(12, dtype=torch.float64)[::2]))
    model = side.wrap(module)
    side.buffers(model, shared=True)
    (mean_square(model, 0) + model.module.odd.square().sum()).backward()
    for _, value in model.named_buffers():
        assert value.stride()[-1] == 2
    side.gradients(model)


def test_a_conversion_that_changes_nothing_may_happen_on_one_rank() -> None:
    beside_stock(2, _saves_on_one_rank)


def _saves_on_one_rank(side: Side) -> None:
    model = side.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        mean_square(model, step).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            side.note("saved", len(model.cpu().double().state_dict()))
        else:
            side.note("saved", len(model.state_dict()))
    side.weights(model)


def test_a_copy_or_a_saved_module_holds_nothing_of_ours() -> None:
    run_ranks(2, _copies_are_clean)


def _copies_are_clean() -> None:
    with contextlib.closing(gf.DistributedDataParallel(mlp())) as model:
        copies = [copy.deepcopy(model.module)]
        mean_square(model, 0).backward()
        copies.append(copy.deepcopy(model.module))
        for each in (*copies, model.module):
            file = io.BytesIO()
            torch.save(each, file)
            assert b"gradientflow" not in file.getvalue()
            torch.jit.script(each)


def test_forward_passes_that_backward_reaches_on_no_rank_may_differ_in_number() -> None:
    beside_stock(2, _episodes)


def _episodes(side: Side) -> None:
    model = side.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        losses = [mean_square(model, 10 * step + part) for part in range(2 + 2 * dist.get_rank())]
        bootstrap = mean_square(model, 99).detach()
        torch.stack([loss + bootstrap for loss in losses]).mean().backward()
        optimizer.step()
    side.weights(model)


def test_who_drives_the_reducer_by_hand_gets_averages() -> None:
    beside_stock(2, _by_hand)


def _by_hand(side: Side) -> None:
    model = side.wrap(mlp())
    model.require_backward_grad_sync = False
    for step in range(3):
        model.zero_grad()
        loss = mean_square(model, step)
        model.require_backward_grad_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        model.require_backward_grad_sync = False
        side.gradients(model)
    side.note("syncs buffers", model.will_sync_module_buffers())
