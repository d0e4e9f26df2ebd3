"""Replayed models, and the measuring of real ones: a profile becomes a model, a model a profile."""

from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradientflow.errors import NothingToTrainError, UsageError
from gradientflow.lab.measure import profile as measure
from gradientflow.lab.replay import GRAIN_S, Fill, Jitter, Pace, Replay
from gradientflow.lab.workloads import workload
from gradientflow.profiles import Profile, TensorProfile
from models import build, loss_of

SMALL = workload("bert-base", scale=0.001)


class Clock:
    """Time that passes only in sleeps and in work, and sleeps that take longer than was asked for."""

    def __init__(self, excesses_s: list[float]) -> None:
        self.now_s, self._num_sleeps, self._excesses_s = 0.0, 0, excesses_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= GRAIN_S
        self.now_s += seconds + self._excesses_s[self._num_sleeps % len(self._excesses_s)]
        self._num_sleeps += 1


SECONDS = st.floats(0.0, 0.01)


@given(layers=st.lists(st.tuples(SECONDS, SECONDS), max_size=60), excesses_s=st.lists(SECONDS, min_size=1, max_size=10))
def test_sleeps_and_work_add_up_to_what_was_asked_for(
    layers: list[tuple[float, float]], excesses_s: list[float]
) -> None:
    clock = Clock(excesses_s)
    pace = Pace(lambda: clock.now_s, clock.sleep)
    for seconds, work_s in layers:
        start_s = pace.now()
        clock.now_s += work_s
        pace.spend(seconds, start_s)
        clock.now_s += 1.0  # what happens in between is not ours
    asked_s = sum(seconds for seconds, _ in layers)
    passed_s = clock.now_s - len(layers)
    assert passed_s >= asked_s - GRAIN_S - 1e-9, "too short by more than a sleep that was put off"
    assert pace.owed_s == pytest.approx(asked_s - passed_s, abs=1e-9)
    unavoidable_s = max(_surplus(layers[start:]) for start in range(len(layers) + 1))
    assert passed_s <= asked_s + unavoidable_s + max(excesses_s) + 1e-9


def _surplus(layers: list[tuple[float, float]]) -> float:
    """By how much work alone outlasts what was asked for."""
    return sum(work_s - seconds for seconds, work_s in layers)


@given(share=st.floats(0.01, Jitter.MOST), seed=st.integers(0, 63))
def test_jitter_is_as_large_as_asked_for_around_1(share: float, seed: int) -> None:
    jitter = Jitter(share, seed)
    factors = [jitter.draw() for _ in range(4000)]
    assert min(factors) > 0.0
    assert statistics.mean(factors) == pytest.approx(1.0, abs=0.1 * share)
    assert statistics.stdev(factors) == pytest.approx(share, rel=0.1)


def test_jitter_differs_by_rank_and_comes_back() -> None:
    jitter, other = Jitter(0.1, seed=0), Jitter(0.1, seed=1)
    first = [jitter.draw() for _ in range(3)]
    assert [other.draw() for _ in range(3)] != first
    jitter.restart(1)
    assert [jitter.draw() for _ in range(3)] != first
    jitter.restart(0)
    assert [jitter.draw() for _ in range(3)] == first


def test_each_iteration_takes_its_own_factor() -> None:
    profile = workload("alexnet", scale=0.001, compute_s=3.0)
    clock, twin = Clock([0.0]), Jitter(0.3, seed=5)
    model = Replay(profile, jitter=Jitter(0.3, seed=5))
    model._pace = Pace(lambda: clock.now_s, clock.sleep)
    for _ in range(5):
        start_s, factor = clock.now_s, twin.draw()
        loss = model()
        assert clock.now_s - start_s == pytest.approx(factor * profile.forward_s, abs=GRAIN_S)
        loss.backward()
        assert clock.now_s - start_s == pytest.approx(factor * 3.0, abs=GRAIN_S)


@pytest.mark.parametrize("name", ["resnet-50", "inception-v4", "vit-b-16", "bert-base", "gpt-2"])
def test_parameters_are_the_profiles(name: str) -> None:
    profile = workload(name, scale=0.001)
    parameters = dict(Replay(profile).named_parameters())
    assert {key: tuple(parameter.shape) for key, parameter in parameters.items()} == {
        tensor.name: tensor.shape for tensor in profile.tensors
    }
    if name in ("resnet-50", "inception-v4", "gpt-2"):  # no module of these owns tensors and modules that come before
        assert list(parameters) == [tensor.name for tensor in reversed(profile.tensors)]


def arrivals(model: Replay) -> list[str]:
    """Names in the order in which one backward pass yields gradients."""
    seen: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        for name, parameter in model.named_parameters()
    ]
    model().backward()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ["resnet-50", "vit-b-16", "bert-base"])
def test_gradients_come_one_by_one_in_backward_order(name: str) -> None:
    profile = workload(name, scale=0.001)
    assert arrivals(Replay(profile)) == [tensor.name for tensor in profile.tensors]


@st.composite
def shuffled(draw: st.DrawFn) -> Profile:
    names = [f"{module}.{kind}" for module in ("a", "b", "b.c", "d.e") for kind in ("weight", "bias")] + ["token"]
    forward = draw(st.permutations(range(len(names))))
    tensors = [TensorProfile(name=n, shape=(3, 2), forward_order=f) for n, f in zip(names, forward, strict=True)]
    return Profile(tensors=tuple(draw(st.permutations(tensors))))


@given(profile=shuffled())
def test_forward_and_backward_order_are_independent(profile: Profile) -> None:
    model = Replay(profile)
    assert arrivals(model) == [tensor.name for tensor in profile.tensors]
    called: list[str] = []
    for path, module in model.named_modules():
        if path:
            module.register_forward_pre_hook(lambda _, __, path=path: called.append(path))
    model()
    forward = sorted(profile.tensors, key=lambda tensor: tensor.forward_order)
    modules = [tensor.name.rpartition(".")[0] for tensor in forward]
    runs = [now for before, now in zip([None, *modules], modules, strict=False) if now != before]
    assert called == [module for module in runs if module]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("fill", ["when written", "always"])
def test_gradients_are_the_same_in_each_step_and_differ_by_seed(fill: Fill) -> None:
    model = Replay(SMALL, seed=1, fill=fill)
    model("a batch").backward()
    first = gradients(model)
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    model.zero_grad()
    model().backward()
    assert same(gradients(model), first)
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == addresses, "a copy was made"
    other = Replay(SMALL, seed=2)
    other().backward()
    assert not any(torch.equal(ours, theirs) for ours, theirs in zip(gradients(other), first, strict=True))
    assert all(0.0 < gradient.abs().max() < 0.1 for gradient in first)


def test_a_model_beside_another_shares_its_memory_and_nothing_else() -> None:
    one = Replay(SMALL, seed=1, fill="once")
    other = Replay(SMALL, seed=2, fill="once", beside=one)
    heard: list[str] = []
    for model, name in ((one, "one"), (other, "other")):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda gradient, name=name: heard.append(name))
    one().backward()
    first, addresses = gradients(one), [parameter.grad.data_ptr() for parameter in one.parameters()]
    assert set(heard) == {"one"} and all(parameter.grad is None for parameter in other.parameters())
    one.zero_grad()
    heard.clear()
    other().backward()
    assert same(gradients(other), first) and set(heard) == {"other"}
    assert [parameter.grad.data_ptr() for parameter in other.parameters()] == addresses
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert all(parameter.any() for parameter in one.parameters()), "weights are the same memory"


WRITES = {
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-6),
    "one tensor at a time": lambda model: [parameter.grad.zero_() for parameter in model.parameters()],
    "foreach": lambda model: torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 3.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_into_grad_do_not_last(write: str) -> None:
    model = Replay(SMALL)
    model().backward()
    first = gradients(model)
    for _ in range(2):
        WRITES[write](model)
        assert not same(gradients(model), first)
        model.zero_grad()
        model().backward()
        assert same(gradients(model), first)


def test_gradients_accumulate() -> None:
    model = Replay(SMALL)
    model().backward()
    first = gradients(model)
    for count in (2, 3, 4):
        model().backward()
        torch.testing.assert_close(gradients(model), [count * gradient for gradient in first])
    model.zero_grad(set_to_none=False)
    model().backward()
    assert same(gradients(model), first)
    model.zero_grad()
    model().backward()
    assert same(gradients(model), first)


def test_large_matrices_hold_no_repeated_rows() -> None:
    model = Replay(Profile(tensors=(TensorProfile(name="weight", shape=(2048, 256)),)))
    model().backward()
    assert len(torch.unique(model.get_parameter("weight").grad, dim=0)) == 2048


def test_dtypes_are_kept_and_can_be_changed() -> None:
    tensors = (TensorProfile(name="a.b", shape=(4, 4), dtype="bfloat16"), TensorProfile(name="s", shape=()))
    model = Replay(Profile(tensors=tensors))
    for expected in ([torch.float32, torch.bfloat16], [torch.float64] * 2):
        model.zero_grad()
        model().backward()
        assert [parameter.grad.dtype for parameter in model.parameters()] == expected
        model.double()


def test_it_is_a_module_like_any_other() -> None:
    model = Replay(SMALL)
    torch.optim.SGD(model.parameters(), lr=0.1)
    model().backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    model.load_state_dict(twin.state_dict(), assign=True)
    model.zero_grad()
    twin.zero_grad()
    model().backward()
    twin().backward()
    assert same(gradients(model), gradients(twin))
    with torch.no_grad():
        assert not model().requires_grad
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    model.zero_grad()
    model().backward()
    assert frozen.grad is None and all(parameter.grad is not None for parameter in list(model.parameters())[1:])


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (("a", "a.b"), "no module can have a tensor"),
        (("a.b", "a"), "no module can have a tensor 'a'"),
        (("",), "can't be empty"),
        (("a..b",), "can't be empty"),
        (("forward",), "'forward' already exists"),
        (("_layers.0",), "'_layers' already exists"),
    ],
)
def test_names_that_no_module_can_have_are_refused(names: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Replay(Profile(tensors=tuple(TensorProfile(name=name, shape=(1,)) for name in reversed(names))))


def test_integers_are_refused() -> None:
    with pytest.raises(UsageError, match="int64, which has no gradient"):
        Replay(Profile(tensors=(TensorProfile(name="a", shape=(1,), dtype="int64"),)))


def call(model: nn.Module, batch: object) -> torch.Tensor:
    return model(batch)


def test_measuring_a_replay_gives_its_profile_back() -> None:
    tensors = (
        TensorProfile(name="c.bias", shape=(3,), forward_order=3, forward_s=0.02, backward_s=0.003),
        TensorProfile(name="c.weight", shape=(3, 3), forward_order=2),
        TensorProfile(name="a.weight", shape=(5, 3), forward_order=0, forward_s=0.003, backward_s=0.03),
        TensorProfile(name="token", shape=(3,), forward_order=1, forward_s=0.003, backward_s=0.003),
    )
    asked = Profile(tensors=tensors)
    found = measure(Replay(asked), None, call, steps=3)
    assert [(t.name, t.shape, t.forward_order) for t in found.tensors] == [
        (t.name, t.shape, t.forward_order) for t in asked.tensors
    ]
    assert max(found.tensors, key=lambda tensor: tensor.forward_s).name == "c.bias"
    assert max(found.tensors, key=lambda tensor: tensor.backward_s).name == "a.weight"


class Odd(nn.Module):
    """Tied weights, an unused tensor, a frozen one, dropout, batch norm, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout()
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.dropout(self.norm(hidden.flatten(0, 1)))
        return hidden @ self.embedding.weight.T


def test_uses_that_module_hooks_would_miss_are_seen() -> None:
    tokens = torch.arange(6).view(2, 3)
    found = measure(Odd(), tokens, lambda model, batch: model(batch).square().mean(), steps=2)
    forward = [tensor.name for tensor in sorted(found.tensors, key=lambda tensor: tensor.forward_order)]
    assert forward[0] == "embedding.weight"
    assert set(forward[1:5]) == {f"attention.{n}" for n in ("in_proj_weight", "in_proj_bias")} | {
        f"attention.out_proj.{n}" for n in ("weight", "bias")
    }
    assert forward[5:] == ["norm.weight", "unused.weight", "unused.bias"]
    backward = [tensor.name for tensor in found.tensors]
    assert backward[0] == "norm.weight"
    assert backward[-3:] == ["embedding.weight", "unused.weight", "unused.bias"]
    assert found.by_name["unused.bias"].backward_s == found.by_name["unused.bias"].forward_s == 0.0


def test_measuring_leaves_no_trace() -> None:
    model, tokens = Odd(), torch.arange(6).view(2, 3)
    model(tokens).sum().backward()
    state = copy.deepcopy(model.state_dict())
    grads = [
        (parameter.grad, None if parameter.grad is None else parameter.grad.clone()) for parameter in model.parameters()
    ]
    buffers, random = list(model.buffers()), torch.get_rng_state()
    measure(model, tokens, lambda model, batch: model(batch).square().mean(), steps=2)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    for parameter, (gradient, content) in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, content)
        assert not parameter._post_accumulate_grad_hooks
    assert all(now is before for now, before in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_a_measured_model_is_what_it_says_and_can_be_replayed(name: str) -> None:
    model = build(name, large=False)
    found = measure(model, 0, lambda model, step: loss_of(model, name, 0, step), steps=2)
    assert {t.name: t.shape for t in found.tensors} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert sorted(t.forward_order for t in found.tensors) == list(range(len(found.tensors)))
    assert 0.0 < found.forward_s < math.inf and 0.0 < found.backward_s < math.inf
    if name == "mlp":  # 8 samples; the first layer needs no gradient of its input
        first, last = 64 * 48, 48 * 10
        assert found.flops == 8 * 2 * (2 * first + 3 * last)
    assert arrivals(Replay(found)) == [tensor.name for tensor in found.tensors]


def test_what_cannot_be_measured_is_refused() -> None:
    model = nn.Linear(2, 2)
    for wrong in (lambda model, batch: 1.0, lambda model, batch: model(batch), lambda model, batch: torch.zeros(())):
        with pytest.raises(UsageError, match="has to return one number"):
            measure(model, torch.ones(3, 2), wrong)
    with pytest.raises(UsageError, match="steps is 0"):
        measure(model, torch.ones(3, 2), lambda model, batch: model(batch).sum(), steps=0)
    with pytest.raises(NothingToTrainError):
        measure(nn.ReLU(), torch.ones(3, 2), lambda model, batch: model(batch).sum())
    assert model.weight.grad is None
