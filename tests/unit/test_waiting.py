"""Tensors that wait when they are touched."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradientflow.runtime.waiting import UnfinishedGradient, make_pending, make_plain


class Late:
    """A parameter whose next value is one more, and how often it was asked for."""

    def __init__(self, kind: type[nn.Parameter] = nn.Parameter) -> None:
        self.parameter = kind(torch.zeros(3))
        self.num_touched = 0
        make_pending(self.parameter, self.touched)

    def touched(self, compiled: bool) -> None:
        self.num_touched += 1
        make_plain(self.parameter)
        with torch.no_grad():
            self.parameter += 1


USES: dict[str, Callable[[nn.Parameter], object]] = {
    "sum": lambda p: p.sum(),
    "function": lambda p: nn.functional.linear(torch.ones(1, 3), p[None]),
    "in a list": lambda p: torch.cat([torch.ones(1), p]),
    "keyword": lambda p: torch.add(input=torch.ones(3), other=p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "item": lambda p: p[0].item(),
    "numpy": lambda p: p.detach().numpy(),
    "words": repr,
    "list": lambda p: p.tolist(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "iteration": list,
    "comparison": lambda p: p == 1,
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "written": lambda p: p.data.copy_(torch.ones(3)),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_values_brings_a_parameter_up_to_date(use: str) -> None:
    late = Late()
    USES[use](late.parameter)
    assert late.num_touched == 1
    assert type(late.parameter) is nn.Parameter
    assert late.parameter.tolist() == [1, 1, 1]
    USES[use](late.parameter)
    assert late.num_touched == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: (p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf, p.numel(), p.dim(), p.size(0), p.stride()),
        lambda p: {p: 1}[p],
        lambda p: isinstance(p, nn.Parameter),
        lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(),
        lambda p: setattr(p, "grad", torch.ones(3)),
        lambda p: p.requires_grad_(False),
        lambda p: p.register_hook(lambda gradient: None).remove(),
    ],
)
def test_what_asks_for_no_values_does_not_wait(ask: Callable[[nn.Parameter], object]) -> None:
    late = Late()
    ask(late.parameter)
    assert late.num_touched == 0
    make_plain(late.parameter)


def test_the_gradient_of_a_parameter_that_waits_is_read_set_and_deleted() -> None:
    late = Late()
    gradient = torch.ones(3)
    late.parameter.grad = gradient
    assert late.parameter.grad is gradient
    with pytest.raises(TypeError):
        late.parameter.grad = 1  # type: ignore[assignment]
    del late.parameter.grad
    assert late.parameter.grad is None
    assert late.num_touched == 0
    make_plain(late.parameter)
    assert late.parameter.grad is None


class Counting(nn.Parameter):
    """A parameter class with a gradient of its own making."""

    @property
    def grad(self):  # type: ignore[no-untyped-def]
        return "its own"


def test_what_a_class_of_the_users_gives_as_gradient_it_gives_while_it_waits() -> None:
    late = Late(Counting)
    assert late.parameter.grad == "its own"
    assert late.num_touched == 0
    make_plain(late.parameter)


def test_a_copy_is_plain() -> None:
    late = Late()
    other = copy.deepcopy(late.parameter)
    assert type(other) is nn.Parameter
    assert other.tolist() == [1, 1, 1]


class Loud(nn.Parameter):
    """A parameter class with dispatch of its own."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_of_the_users_sees_the_call_after_the_wait() -> None:
    late = Late(Loud)
    Loud.seen.clear()
    assert float(torch.mean(late.parameter.detach().as_subclass(torch.Tensor))) == 1.0
    assert type(late.parameter) is Loud
    assert "detach" in Loud.seen


# - Gradients


class OnItsWay:
    """A gradient that becomes twos, and how often it was asked for."""

    def __init__(self, zero_later: bool = False) -> None:
        self.plain = torch.zeros(3)
        self.num_touched = self.num_zeroed = 0
        self._seen_to = zero_later
        self.gradient = UnfinishedGradient.of(self.plain, self.touched, self.zero_later)

    def touched(self) -> None:
        self.num_touched += 1
        if self.num_touched == 1:
            self.plain.fill_(2.0)

    def zero_later(self) -> bool:
        self.num_zeroed += 1
        return self._seen_to


def test_a_gradient_waits_for_reads_and_writes_and_what_comes_out_is_plain() -> None:
    late = OnItsWay()
    assert late.gradient.shape == (3,) and late.gradient.dtype == torch.float32 and not late.num_touched
    doubled = late.gradient * 2
    assert type(doubled) is torch.Tensor and doubled.tolist() == [4, 4, 4]
    late.gradient.mul_(0.5)
    assert late.plain.tolist() == [1, 1, 1]


def test_autograd_adds_to_a_gradient_only_when_it_has_arrived() -> None:
    late = OnItsWay()
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = late.gradient
    (3 * parameter).sum().backward()
    assert late.num_touched
    assert late.plain.tolist() == [5, 5, 5]


def test_stock_clipping_waits() -> None:
    late = OnItsWay()
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = late.gradient
    norm = nn.utils.clip_grad_norm_([parameter], 1.0)
    assert float(norm) == pytest.approx(12**0.5)
    assert float(late.plain.norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("together", [False, True])
def test_zeroing_is_offered_first(together: bool) -> None:
    gladly, not_at_all = OnItsWay(zero_later=True), OnItsWay()
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter, late in zip(parameters, (gladly, not_at_all), strict=True):
        parameter.grad = late.gradient
    torch.optim.SGD(parameters, lr=0.1, foreach=together).zero_grad(set_to_none=False)
    assert (gladly.num_touched, gladly.num_zeroed) == (0, 1)
    assert not_at_all.num_touched and not_at_all.plain.tolist() == [0, 0, 0]
