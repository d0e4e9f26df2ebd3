"""The user's optimizer, run for some of its parameters at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradientflow.runtime.shares import Shares, Watch, treats_parameters_one_by_one

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "adamw, foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "adam, fused": lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1),
    "rate in a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1)),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(3, 2)) for _ in range(4)]
    for parameter in found:
        parameter.grad = torch.randn(3, 2)
    return found


def groups(found: list[nn.Parameter]) -> list[dict]:
    return [{"params": found[:3]}, {"params": found[3:], "lr": 0.02}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_add_up_to_the_whole_with_the_values_of_the_first_moment(name: str) -> None:
    whole, parts = parameters(), parameters()
    one, other = OPTIMIZERS[name](groups(whole)), OPTIMIZERS[name](groups(parts))
    for step in range(3):
        one.step()
        shares = Shares(other)
        for group in (*one.param_groups, *other.param_groups):  # a scheduler, meanwhile
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(0.1 / (step + 2))
            else:
                group["lr"] = 0.1 / (step + 2)
        shares.run([parts[2], parts[3]])
        shares.run([parts[0]])
        shares.run([parts[1]])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(whole, parts, strict=True))
    states = [optimizer.state_dict()["state"] for optimizer in (one, other)]
    assert repr(sorted(states[0].items())) == repr(sorted(states[1].items()))


def test_a_double_leaves_parameters_out_and_the_optimizer_alone() -> None:
    found = parameters()
    optimizer = torch.optim.SGD(groups(found), lr=0.1)
    before = [parameter.detach().clone() for parameter in found]
    double = Shares(optimizer).without({id(found[1]), id(found[3])})
    type(optimizer).step.__wrapped__(double)
    changed = [not torch.equal(parameter, old) for parameter, old in zip(found, before, strict=True)]
    assert changed == [True, False, True, False]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]


def test_whoever_looks_into_the_state_is_heard_once() -> None:
    found = parameters()
    optimizer = torch.optim.SGD(found, lr=0.1, momentum=0.9)
    optimizer.step()
    state = optimizer.state
    heard: list[int] = []
    shares = Shares(optimizer)

    def touched() -> None:
        heard.append(1)
        shares.release_state()

    for look in (
        lambda: optimizer.state[found[0]]["momentum_buffer"],
        lambda: list(optimizer.state.values()),
        lambda: len(optimizer.state),
        lambda: copy.deepcopy(optimizer.state),
        lambda: found[0] in optimizer.state,
    ):
        shares.guard_state(touched)
        look()
        assert optimizer.state is state
    assert len(heard) == 5


def test_a_second_flow_does_not_take_the_first_ones_guard_for_the_state() -> None:
    found = parameters()
    optimizer = torch.optim.SGD(found, lr=0.1, momentum=0.9)
    state = optimizer.state
    first = Shares(optimizer)
    first.guard_state(lambda: None)
    second = Shares(optimizer)
    second.guard_state(lambda: None)
    second.release_state()
    assert optimizer.state is state


class Counting(torch.optim.SGD):
    def step(self, closure=None):  # type: ignore[no-untyped-def]
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_keeps_something_for_all_parameters_is_noticed() -> None:
    counting, plain = Counting(parameters(), lr=0.1), torch.optim.AdamW(parameters(), lr=0.1)
    for optimizer in (counting, plain):
        optimizer.step()
    watches = [Watch(counting), Watch(plain)]
    for optimizer in (counting, plain):
        optimizer.step()
    assert "count" in watches[0].objection(counting)
    assert not watches[1].objection(plain)


def test_torchs_own_are_known() -> None:
    assert treats_parameters_one_by_one(torch.optim.AdamW(parameters()))
    assert not treats_parameters_one_by_one(torch.optim.LBFGS(parameters()))
    assert not treats_parameters_one_by_one(Counting(parameters(), lr=0.1))
