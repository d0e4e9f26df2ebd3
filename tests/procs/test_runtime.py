"""The runtime's behaviour beyond plain training, with real processes; DDP is the judge where it has an opinion."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradientflow as gf
from gradientflow.profiles import Profile, TensorProfile
from helpers import RankFailed, run_ranks
from models import build, loss_of


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{name}: {a.grad} against {b.grad}"
        if a.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7), name


def beside_ddp(
    make: Callable[[], nn.Module], step: Callable, steps: int = 4, recipe: str = "lazy", **ddp_options: object
) -> None:
    """Train `make()` under DDP and under `recipe` with the same `step(model, number, quiet)`; compare gradients.

    `quiet` is the context manager in which backward does not exchange.
    """
    torch.manual_seed(0)
    theirs = make()
    torch.manual_seed(0)
    ours = make()
    ddp, their_optimizer, our_optimizer = DistributedDataParallel(theirs, **ddp_options), sgd(theirs), sgd(ours)
    with gf.attach(ours, our_optimizer, recipe) as flow:
        for number in range(steps):
            their_optimizer.zero_grad()
            our_optimizer.zero_grad()
            step(ddp, number, ddp.no_sync)
            step(ours, number, flow.no_sync)
            assert_same_gradients(ours, theirs)
            their_optimizer.step()
            our_optimizer.step()


# - Accumulation


def accumulate(model: nn.Module, number: int, quiet: Callable) -> None:
    for part in range(3):
        with quiet() if part < 2 else contextlib.nullcontext():
            loss_of(model, "cnn", dist.get_rank(), 10 * number + part).backward()


def without_quiet(model: nn.Module, number: int, quiet: Callable) -> None:
    for part in range(3):
        loss_of(model, "cnn", dist.get_rank(), 10 * number + part).backward()


@pytest.mark.parametrize("step", [accumulate, without_quiet])
@pytest.mark.parametrize("recipe", ["wfbp", "lazy:2KB"])
def test_accumulation_equals_ddp(step: Callable, recipe: str) -> None:
    run_ranks(2, _accumulation, step, recipe)


def _accumulation(step: Callable, recipe: str) -> None:
    beside_ddp(_cnn, step, recipe=recipe)


def _cnn() -> nn.Module:
    return build("cnn", large=False)


def test_gradients_kept_as_zeros_or_dropped_are_the_same() -> None:
    run_ranks(2, _zeroing)


def _zeroing() -> None:
    results = []
    for set_to_none in (True, False):
        model = build("mlp", large=False)
        optimizer = sgd(model)
        with gf.attach(model, optimizer, "lazy:5KB"):
            for step in range(5):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(model, "mlp", dist.get_rank(), step).backward()
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_stepping_with_gradients_that_never_travelled_is_refused() -> None:
    run_ranks(2, _step_in_no_sync)


def _step_in_no_sync() -> None:
    model = build("mlp", large=False)
    optimizer = sgd(model)
    with gf.attach(model, optimizer) as flow:
        with flow.no_sync():
            loss_of(model, "mlp", dist.get_rank(), 0).backward()
        with pytest.raises(gf.UsageError, match="outside no_sync"):
            optimizer.step()
        loss_of(model, "mlp", dist.get_rank(), 1).backward()
        optimizer.step()


# - Models that do not use everything


class Branches(nn.Module):
    """Uses one of its branches, both, or none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        x = self.stem(x)
        for letter in use:
            x = (self.left if letter == "l" else self.right)(x)
        return x


USES = [("l", "r", ""), ("lr", "", "r"), ("", "", ""), ("r", "r", "r"), ("l", "lr", "l")]  # by step, then by rank


def use_branches(model: nn.Module, number: int, quiet: Callable) -> None:
    torch.manual_seed(number + dist.get_rank())
    model(torch.randn(4, 8), USES[number][dist.get_rank()]).square().sum().backward()


@pytest.mark.parametrize("recipe", ["bsp", "wfbp", "lazy"])
def test_unused_parameters_that_differ_by_rank_and_step(recipe: str) -> None:
    run_ranks(2, _branches, recipe)


def _branches(recipe: str) -> None:
    beside_ddp(Branches, use_branches, len(USES), recipe, find_unused_parameters=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def use_tied(model: nn.Module, number: int, quiet: Callable) -> None:
    torch.manual_seed(number + dist.get_rank())
    model(torch.randint(20, (6,))).square().mean().backward()


class Mixed(nn.Module):
    """Two dtypes, a frozen layer, a scalar, an empty tensor, channels_last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.wide = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3)) * self.scale + self.empty.sum()
        return self.wide(self.frozen(x).double())


def use_mixed(model: nn.Module, number: int, quiet: Callable) -> None:
    torch.manual_seed(number + dist.get_rank())
    model(torch.randn(2, 3, 6, 6)).square().sum().backward()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def use_checkpointed(model: nn.Module, number: int, quiet: Callable) -> None:
    torch.manual_seed(number + dist.get_rank())
    model(torch.randn(2, 8)).square().sum().backward()


def _checkpointed_reentrant() -> nn.Module:
    return Checkpointed(True)


def _checkpointed() -> nn.Module:
    return Checkpointed(False)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("make", "step"),
    [
        (Tied, use_tied),
        (Mixed, use_mixed),
        (_checkpointed, use_checkpointed),
        (_checkpointed_reentrant, use_checkpointed),
    ],
)
def test_unusual_models_equal_ddp(world: int, make: Callable, step: Callable) -> None:
    run_ranks(world, _unusual, make, step)


def _unusual(make: Callable, step: Callable) -> None:
    for recipe in ("wfbp", "lazy:100B", "lazy"):
        beside_ddp(make, step, recipe=recipe)


def test_gradients_are_views_of_one_pool_with_the_parameters_strides() -> None:
    run_ranks(2, _views)


def _views() -> None:
    model = Mixed()
    optimizer = sgd(model)
    with gf.attach(model, optimizer) as flow:
        for step in range(3):  # the pool is laid out anew after the first
            use_mixed(model, step, flow.no_sync)
            optimizer.zero_grad()
        use_mixed(model, 9, flow.no_sync)
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None and p.numel()}
        assert len(storages) == 2, "one float32 pool, one float64 pool"
        assert model.conv.weight.grad.stride() == model.conv.weight.stride()
        numel32, numel64 = model.conv.weight.numel() + 4 + 1, 2 * 4 + 2
        presence = (6 + 2) * 4  # one element a tensor, one for skips, one for wishes, behind the last gradient's pool
        assert flow.memory().pool == numel32 * 4 + numel64 * 8 + presence


def test_the_pool_follows_the_order_of_backward() -> None:
    run_ranks(2, _order)


class Backwards(nn.Module):
    """Registers its layers in the opposite order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def _order() -> None:
    model = Backwards()
    optimizer = sgd(model)
    with gf.attach(model, optimizer, "wfbp") as flow:
        assert flow.plan.layout[0].startswith("first")
        for step in range(2):
            use_checkpointed(model, step, flow.no_sync)
        assert [name.split(".")[0] for name in flow.plan.layout] == ["last", "last", "first", "first"]
        profile = flow.profile()
        assert [tensor.name for tensor in profile.tensors] == list(flow.plan.layout)
        assert profile.forward_s > 0 and profile.backward_s > 0
        order = {tensor.name: tensor.forward_order for tensor in profile.tensors}
        assert order["first.weight"] < order["last.weight"]
        # Gradients that are alive when the pool is laid out anew move along.
    model = Backwards()
    with gf.attach(model, sgd(model), "wfbp"):
        use_checkpointed(model, 0, contextlib.nullcontext)
        first = gradients(model)
        use_checkpointed(model, 0, contextlib.nullcontext)
        for a, b in zip(gradients(model), first, strict=True):
            assert torch.allclose(a, 2 * b)


# - Precision


@pytest.mark.parametrize("recipe", ["lazy+fp16", "lazy+bf16", "wfbp+fp16"])
@pytest.mark.parametrize("world", [1, 3])
def test_half_precision_on_the_wire_is_close_and_alike(world: int, recipe: str) -> None:
    results = run_ranks(world, _half_on_wire, recipe)
    for theirs in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], theirs, strict=True))


def _half_on_wire(recipe: str) -> list[torch.Tensor]:
    exact, model = build("cnn", large=False), build("cnn", large=False)
    with gf.attach(exact, sgd(exact), "lazy"):
        loss_of(exact, "cnn", dist.get_rank(), 0).backward()
    with gf.attach(model, sgd(model), recipe) as flow:
        loss_of(model, "cnn", dist.get_rank(), 0).backward()
        if recipe.startswith("lazy"):
            assert flow.memory().wire == flow.memory().pool // 2, "all in one message, at half the width"
    for a, b in zip(gradients(model), gradients(exact), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.01 * b.norm()
    return gradients(model)


def test_an_empty_tensor_by_itself_travels_as_nothing() -> None:
    run_ranks(2, _empty_tensor)


def _empty_tensor() -> None:
    model = Mixed()
    with gf.attach(model, sgd(model), "wfbp+bf16") as flow:
        for step in range(2):
            use_mixed(model, step, flow.no_sync)
        assert 0 in [span.args["nbytes"] for span in flow.trace().of_kind("message")]


def test_an_fp16_overflow_without_a_scaler_raises_on_all_ranks_and_does_not_break_the_flow() -> None:
    run_ranks(2, _overflow)


def _overflow() -> None:
    model = build("mlp", large=False)
    optimizer = sgd(model)
    with gf.attach(model, optimizer, "lazy+fp16") as flow:
        factor = 1e8 if dist.get_rank() == 1 else 1.0
        with pytest.raises(gf.NonFiniteError, match="65504"):
            (factor * loss_of(model, "mlp", dist.get_rank(), 0)).backward()
        optimizer.zero_grad()
        loss_of(model, "mlp", dist.get_rank(), 1).backward()
        optimizer.step()
        assert flow.step == 2


@pytest.mark.parametrize("recipe", ["lazy", "lazy+fp16"])
def test_an_overflow_on_one_rank_is_skipped_by_all(recipe: str) -> None:
    results = run_ranks(3, _scaled, recipe)
    assert all(theirs == results[0] for theirs in results)
    taken, scales = results[0]
    assert taken == [True, False, True, True]
    assert scales[1] == scales[0] / 2


def _scaled(recipe: str) -> tuple[list[bool], list[float]]:
    model = build("mlp", large=False)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    taken, scales = [], []
    with gf.attach(model, optimizer, recipe, scaler=scaler):
        for step in range(4):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, "mlp", dist.get_rank(), step)
            if step == 1 and dist.get_rank() == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            taken.append(not all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)))
            scales.append(scaler.get_scale())
    return taken, scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_weights_train_what_half_precision_would_lose(dtype: torch.dtype) -> None:
    run_ranks(2, _master, dtype)


def _master(dtype: torch.dtype) -> None:
    """Updates far below half precision's resolution: without masters nothing would move."""
    results = {}
    for master in (True, False):
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with gf.attach(model, optimizer, "lazy", scaler=scaler, master_weights=master) as flow:
            for _ in range(200):
                optimizer.zero_grad()
                loss = model(torch.ones(1, 4, dtype=dtype)).float().sum()
                if master:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    optimizer.step()
            results[master] = float(model.weight.detach().float().mean())
            if master:
                state = flow.state_dict()["master_weights"]
                assert state["weight"].dtype == torch.float32
                assert flow.memory().master_weights == 16 * 4
        assert optimizer.param_groups[0]["params"][0] is model.weight
    assert results[False] == 1.0
    assert results[True] == pytest.approx(1.0 - 200 * 1e-4, abs=2e-3)


# - Ranks that would not do the same thing


def test_a_different_shape_is_reported_on_every_rank_with_rank_and_name() -> None:
    texts = run_ranks(3, _different_shape)
    assert len(set(texts)) == 1
    assert (
        "rank 2, tensor 1.bias: expected torch.float32 [7] at 3 (as on rank 0), found torch.float32 [9] at 3"
        in texts[0]
    )


def _different_shape() -> str:
    width = 9 if dist.get_rank() == 2 else 7
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, width))
    with pytest.raises(gf.DisagreementError) as caught:
        gf.attach(model, sgd(model))
    return str(caught.value)


@pytest.mark.parametrize("difference", ["recipe", "order", "dtype", "frozen", "profile", "strides", "buffers"])
def test_any_difference_is_reported_on_every_rank(difference: str) -> None:
    for text in run_ranks(2, _different, difference):
        assert "rank 1, " in text


def _different(difference: str) -> str:
    other = dist.get_rank() == 1
    layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    model: nn.Module = nn.ModuleDict(dict(reversed(layers.items())) if other and difference == "order" else layers)
    if other and difference == "dtype":
        model = model.double()
    if other and difference == "frozen":
        model["a"].requires_grad_(False)
    if difference == "strides":
        conv = nn.Conv2d(2, 2, 2)
        model = conv.to(memory_format=torch.channels_last) if other else conv
    profile = None
    if difference == "profile":
        tensors = tuple(TensorProfile.of(name, p) for name, p in model.named_parameters())
        profile = Profile(tensors=tensors[::-1] if other else tensors)
    recipe = "wfbp" if other and difference == "recipe" else "lazy"
    with pytest.raises(gf.DisagreementError) as caught:
        buffers = not (other and difference == "buffers")
        gf.attach(model, sgd(model), recipe, profile=profile, broadcast_buffers=buffers)
    return str(caught.value)


def test_a_rank_that_never_attaches_is_named() -> None:
    texts = run_ranks(3, _never_attaches)
    assert "nothing came from rank 1" in texts[0] and "nothing came from rank 1" in texts[2]


def _never_attaches() -> str:
    if dist.get_rank() == 1:
        return ""
    model = nn.Linear(2, 2)
    with pytest.raises(gf.DeadlineError) as caught:
        gf.attach(model, sgd(model), deadline_s=2.0)
    return str(caught.value)


# - Where it is attached


def test_two_flows_in_one_process_and_on_a_group_of_their_own() -> None:
    run_ranks(4, _subgroups)


def _subgroups() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[dist.get_rank() % 2]
    seed = dist.get_rank() % 2
    models = [nn.Linear(3, 3), nn.Linear(4, 4)]
    for _ in range(2):  # lanes are made anew each time
        with gf.attach(models[0], sgd(models[0]), "lazy", group), gf.attach(models[1], sgd(models[1]), "wfbp"):
            for model, width in zip(models, (3, 4), strict=True):
                model.zero_grad()
                model(torch.full((1, width), float(dist.get_rank()))).sum().backward()
        assert torch.equal(models[0].weight.grad, torch.full((3, 3), seed + 1.0))
        assert torch.equal(models[1].weight.grad, torch.full((4, 4), 1.5))


def test_the_users_own_collectives_do_not_get_between_ours() -> None:
    run_ranks(2, _own_collectives)


def _own_collectives() -> None:
    """Equal-shaped all-reduces on the user's group, from a thread of its own, in the middle of backward."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = sgd(model, lr=0.0)
    totals: list[float] = []

    def chatter() -> None:
        for _ in range(50):
            values = torch.full((64 + 1,), 7.0)
            dist.all_reduce(values)
            totals.append(float(values.mean()))

    with gf.attach(model, optimizer, "lazy"):
        thread = threading.Thread(target=chatter)
        thread.start()
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.full((1, 8), 1.0 + dist.get_rank())).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((8, 8), 1.5))
        thread.join()
    assert totals == [14.0] * 50


def test_close_takes_everything_away() -> None:
    run_ranks(2, _close)


def _close() -> None:
    model = build("cnn", large=False)
    optimizer = sgd(model)
    flow = gf.attach(model, optimizer, "wfbp")
    loss_of(model, "cnn", dist.get_rank(), 0).backward()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("gradientflow")]
    flow.close()
    flow.close()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gradientflow")]
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    optimizer.zero_grad()
    loss_of(model, "cnn", dist.get_rank(), 1).backward()  # local again
    mine = [torch.empty_like(model.head[0].weight) for _ in range(2)]
    dist.all_gather(mine, model.head[0].weight.grad)
    assert not torch.equal(*mine)


def test_off_gives_the_same_average() -> None:
    run_ranks(3, _off)


def _off() -> None:
    os.environ["GRADIENTFLOW"] = "off"
    for make, step, options in [
        (_cnn, accumulate, {}),
        (Mixed, use_mixed, {}),
        (_checkpointed_reentrant, use_checkpointed, {}),
        (Branches, use_branches, {"find_unused_parameters": True}),
    ]:
        beside_ddp(make, step, **options)


def test_the_group_may_be_destroyed_first() -> None:
    run_ranks(2, _destroyed_first)


def _destroyed_first() -> None:
    model = nn.Linear(3, 3)
    flow = gf.attach(model, sgd(model))
    model(torch.ones(1, 3)).sum().backward()
    dist.destroy_process_group()
    flow.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the helper to destroy


def test_a_plan_given_by_a_profile_is_used_from_the_first_step() -> None:
    run_ranks(2, _given_profile)


def _given_profile() -> None:
    model = Backwards()
    names = ["last.bias", "last.weight", "first.bias", "first.weight"]
    parameters = dict(model.named_parameters())
    profile = Profile(tensors=tuple(TensorProfile.of(name, parameters[name]) for name in names))
    with gf.attach(model, sgd(model), "wfbp", profile=profile) as flow:
        assert list(flow.plan.layout) == names
        use_checkpointed(model, 0, flow.no_sync)
        trace = flow.trace()
        assert [span.name for span in sorted(trace.of_kind("message"), key=lambda s: s.args["message"])] == names
        assert {span.name: span.args["nbytes"] for span in trace.of_kind("message")}["last.bias"] == 8 * 4
    with pytest.raises(gf.UsageError, match="of another model"):
        gf.attach(other := nn.Linear(2, 2), sgd(other), "wfbp", profile=profile)


def test_state_pins_the_plan_and_the_step() -> None:
    run_ranks(2, _state)


def _state() -> None:
    model = Backwards()
    with gf.attach(model, sgd(model), "wfbp") as flow:
        for step in range(3):
            use_checkpointed(model, step, flow.no_sync)
        state, plan = flow.state_dict(), flow.plan
    with gf.attach(model, sgd(model), "wfbp") as flow:
        assert flow.plan != plan
        assert [message.lane for message in plan.messages] == [0, 1, 0, 1]
        saved = gf.Plan.model_validate_json(state["plan"]).on_lanes(4)  # as another backend might have it
        flow.load_state_dict(state | {"plan": saved.model_dump_json()})
        assert flow.step == 3
        use_checkpointed(model, 3, flow.no_sync)
        assert (flow.plan, flow.step) == (plan, 4)
        with pytest.raises(gf.UsageError, match="version"):
            flow.load_state_dict({"version": 9})


# - Unusual backward passes


class WholeUnderCheckpoint(nn.Module):
    """Every used parameter arrives in an inner backward pass, and one layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("recipe", ["lazy", "wfbp"])
def test_a_model_all_under_reentrant_checkpoints_is_averaged_when_backward_returns(recipe: str) -> None:
    run_ranks(2, _all_under_checkpoint, recipe)


def _all_under_checkpoint(recipe: str) -> None:
    """DDP has no opinion here, it raises; so two ranks with inputs 1 and 2 against their mean by hand."""
    torch.manual_seed(0)
    model = WholeUnderCheckpoint()
    expected = copy.deepcopy(model)
    for rank in range(2):
        (0.5 * expected(torch.full((1, 8), 1.0 + rank, requires_grad=True)).square().sum()).backward()
    optimizer = sgd(model)
    with gf.attach(model, optimizer, recipe) as flow:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 8), 1.0 + dist.get_rank(), requires_grad=True)).square().sum().backward()
            assert_same_gradients(model, expected)
        assert flow.step == 2
        optimizer.step()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)


def test_a_parameter_shared_by_reentrant_regions_is_refused() -> None:
    run_ranks(2, _shared)


def _shared() -> None:
    model = Shared()
    with gf.attach(model, sgd(model)), pytest.raises(gf.TrainingError, match="arrived twice"):
        model(torch.ones(1, 8)).sum().backward()


def test_backward_with_create_graph_is_averaged() -> None:
    run_ranks(2, _create_graph)


def _create_graph() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    with gf.attach(model, sgd(model)):
        x = torch.full((1, 1), 1.0 + dist.get_rank())
        with pytest.warns(UserWarning, match="no graph of their own"):
            model(x).square().sum().backward(create_graph=True)  # 2 x x w: 2 and 8
        assert float(model.weight.grad) == 5.0 and not model.weight.grad.requires_grad


def test_a_parameter_belongs_to_one_flow() -> None:
    run_ranks(1, _attach_twice)


def _attach_twice() -> None:
    model = nn.Linear(3, 3)
    with gf.attach(model, sgd(model)), pytest.raises(gf.UsageError, match="attached already"):
        gf.attach(nn.Sequential(model), sgd(model))
    gf.attach(model, sgd(model)).close()


def test_a_copy_of_the_model_belongs_to_no_flow() -> None:
    run_ranks(2, _copies)


def _copies() -> None:
    model = build("cnn", large=False)
    with gf.attach(model, sgd(model)) as flow:
        loss_of(model, "cnn", dist.get_rank(), 0).backward()
        for copy_ in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            if dist.get_rank() == 0:  # alone: a collective here would hang
                copy_.zero_grad()
                loss_of(copy_, "cnn", 0, 1).backward()
        assert flow.step == 1


def test_what_the_optimizer_gets_later_is_not_forgotten() -> None:
    run_ranks(1, _later_parameters)


def _later_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    optimizer = sgd(model)
    with gf.attach(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model[1].requires_grad_(True)
        with pytest.raises(gf.UsageError, match="not be averaged"):
            optimizer.step()
        model[1].requires_grad_(False)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        with pytest.raises(gf.UsageError, match=r"shape \(3,\)"):
            optimizer.step()


def test_two_forwards_through_batch_norm_and_one_backward() -> None:
    run_ranks(2, _siamese)


def _siamese() -> None:
    beside_ddp(_batch_norm, use_twice)


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def use_twice(model: nn.Module, number: int, quiet: Callable) -> None:
    torch.manual_seed(number + dist.get_rank())
    (model(torch.randn(4, 8)) - model(torch.randn(4, 8))).square().mean().backward()


# - Buffers and evaluation


class Counting(nn.Module):
    """Buffers that differ by rank unless they are made rank 0's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before = self.seen.clone()
        self.seen += 1 + dist.get_rank()
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.int64])
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_rank_0s_before_a_training_forward_unless_told_otherwise(
    dtype: torch.dtype, broadcast: bool
) -> None:
    for rank, seen in enumerate(run_ranks(2, _buffers, dtype, broadcast)):
        assert seen == ([0, 1, 2, 3] if broadcast or rank == 0 else [0, 2, 4, 6])


def _buffers(dtype: torch.dtype, broadcast: bool) -> list[int]:
    model = Counting(dtype)
    seen = []
    with gf.attach(model, sgd(model), broadcast_buffers=broadcast) as flow:
        for step in range(4):
            with flow.no_sync() if step == 3 and not broadcast else contextlib.nullcontext():
                model(torch.ones(1, 2)).sum().backward()
            seen.append(int(model.before[0]))
            if dist.get_rank() == 0:  # evaluation on one rank alone
                model.eval()
                model.seen -= 1
                model(torch.ones(1, 2))
                model.train()
                with torch.no_grad():
                    model.seen -= 1
                    model(torch.ones(1, 2))
    return seen


# - Master weights under use


def test_master_weights_follow_what_is_loaded_and_accumulate() -> None:
    run_ranks(2, _master_in_use)


def _master_in_use() -> None:
    model = nn.Linear(2, 1, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with gf.attach(model, optimizer, master_weights=True) as flow:
        model.load_state_dict({"weight": torch.full((1, 2), 8.0)})
        x = torch.full((1, 2), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
        with flow.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        assert model.weight.grad is None
        optimizer.step()
        assert torch.equal(model.weight.detach().float(), torch.full((1, 2), 8.0 - 2 * 1.5))
        state = flow.state_dict()
        with torch.no_grad():
            model.weight.zero_()
        flow.load_state_dict(state)
        assert torch.equal(model.weight.detach().float(), torch.full((1, 2), 5.0))
        with pytest.raises(gf.UsageError, match="another setting of master_weights"):
            flow.load_state_dict(state | {"master_weights": {}})
    plain = nn.Linear(2, 2)
    with pytest.raises(gf.UsageError, match="no fp16 or bf16"):
        gf.attach(plain, sgd(plain), master_weights=True)
    assert not plain._forward_hooks and not plain._forward_pre_hooks, "a failed attach leaves nothing behind"
    gf.attach(plain, sgd(plain)).close()


def test_failures_of_a_rank_reach_the_test() -> None:
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        run_ranks(2, _fails)


def _fails() -> float:
    return 1 / (dist.get_rank() - 1)


# - Schedules that look at costs


@pytest.mark.parametrize("recipe", ["merge", "mg-wfbp", "merge+bf16"])
def test_a_schedule_that_needs_costs_measures_them_and_averages_as_any_other(recipe: str) -> None:
    digests = run_ranks(2, _priced, recipe)
    assert digests[0] == digests[1]


def _priced(recipe: str) -> str:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(*(nn.Linear(40, 40) for _ in range(6))) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gf.attach(model, optimizer, recipe) as flow:
        assert "not yet priced" in flow.plan.schedule
        for step in range(4):
            batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for trained, through in ((model, model), (reference, ddp)):
                trained.zero_grad()
                through(batch).square().mean().backward()
            tolerance = 2e-2 if "bf16" in recipe else 1e-6
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance * 1e-2)
        assert flow.plan.schedule == recipe.partition("+")[0]
        flow.plan.check(flow.profile())
        return flow.plan.digest
