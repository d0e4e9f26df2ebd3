"""What the first forward passes show of a model."""

from __future__ import annotations

import time

import torch
from torch import nn

from gradientflow.runtime.observe import ForwardObserver


class Odd(nn.Module):
    """Uses parameters in another order than it has them, one of them outside its owner, one twice in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3, bias=False)
        self.first = nn.Linear(3, 3, bias=False)
        self.squared = nn.Parameter(torch.ones(3))
        self.attention = nn.MultiheadAttention(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * (self.squared * self.squared)
        x = self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.linear(x, self.last.weight)


def test_uses_are_seen_where_they_are() -> None:
    model = Odd()
    observer = ForwardObserver(model, dict(model.named_parameters()))
    for _ in range(4):
        observer.begin_forward(record=True)
        model(torch.ones(2, 1, 3))
        observer.end_of_forward()
    order = list(observer.seconds)
    assert order[:2] == ["first.weight", "squared"] and order[-1] == "last.weight"
    assert "attention.in_proj_weight" in order[2:4] and "attention.out_proj.weight" in order[2:4]
    assert all(seconds >= 0 for seconds in observer.seconds.values())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    # Its own class might use what it owns around Python; torch's layers do not.
    assert set(observer.doors) == {"squared", "last.weight"}
    assert set(observer.doors.values()) == {model}


def test_a_pass_that_sleeps_keeps_no_processor_busy() -> None:
    model = nn.Linear(2, 2)
    observer = ForwardObserver(model, dict(model.named_parameters()))
    busy = []
    for work in (lambda: time.sleep(0.2), lambda: [torch.ones(64, 64) @ torch.ones(64, 64) for _ in range(4_000)]):
        observer.begin_forward()
        work()
        observer.end_of_forward()
        busy.append(observer.busy)
    assert busy[0] < busy[1], "by whatever else the machine does both may be low"
