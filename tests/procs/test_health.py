"""When a rank dies, stops, skips or breaks: every other one says who, where and why, and goes on if it can."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradientflow as gf
from gradientflow.exchange import links
from gradientflow.plan import NATIVE
from helpers import run_at_once, run_ranks
from models import pay_for_any_race

LIMIT_S = 10.0


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 8, generator=generator)


class Loop:
    """A training loop through the drop-in class or `attach`, with a place for mischief."""

    def __init__(self, kind: str, module: nn.Module | None = None, recipe: str = "wfbp", **options: Any) -> None:
        self.module = module or make()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        if kind == "attach":
            self.model: Any = self.module
            self.flow = gf.attach(self.module, self.optimizer, recipe, **options)
        else:
            self.model = gf.DistributedDataParallel(self.module, recipe=recipe, **options)
            self.flow = self.model.flow

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(batch(number)).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()]).tolist()


def told(action: Callable[[], object], error: type[Exception] = gf.PeerError) -> tuple[str, tuple[int, ...], float]:
    """What `action` raises, whom it names, and after how long."""
    began_s = time.monotonic()
    with pytest.raises(error) as caught:
        action()
    return str(caught.value), caught.value.ranks, time.monotonic() - began_s


# - A rank that will not come

VICTIM = 2
WORDS = {
    "dies": "is dead",
    "stops": "is stopped",
    "leaves": "has left",
    "sits in a barrier": "in torch.distributed.barrier",
    "steps alone": "skipped this step",
}


# attach refuses to step alone, on the rank itself: test_stepping_with_gradients_that_never_travelled.
@pytest.mark.parametrize(
    "worlds",
    [
        [("attach", "dies"), ("drop-in", "dies"), ("attach with a ring", "dies")],
        [("attach", "stops"), ("attach with a ring", "stops")],
        [("attach", "leaves"), ("attach", "sits in a barrier"), ("drop-in", "steps alone")],
    ],
)
def test_every_other_rank_names_the_one_that_does_not_come(worlds: list[tuple[str, str]]) -> None:
    found = run_at_once(4, _does_not_come, worlds, lost=(VICTIM,))
    for (kind, how), outcomes in zip(worlds, found, strict=True):
        for message, ranks, elapsed_s in (outcome for rank, outcome in enumerate(outcomes) if rank != VICTIM):
            assert WORDS[how] in message and f"rank {VICTIM}" in message and ranks == (VICTIM,), (kind, message)
            assert "step 2" in message and "test_health.py" in message, (kind, message)
            assert elapsed_s < LIMIT_S, (kind, how)


def _does_not_come(kind: str, how: str) -> Any:
    kind, _, ring = kind.partition(" with a ")
    loop = Loop(kind, recipe="wfbp-ring" if ring else "wfbp")
    for number in range(2):
        loop.step(number)
    time.sleep(1.5)  # a beacon is renewed once a second
    if dist.get_rank() != VICTIM:
        outcome = told(lambda: loop.step(2))
        loop.flow.close()
        return outcome
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "leaves":
        loop.flow.close()
    elif how == "sits in a barrier":
        with contextlib.suppress(RuntimeError):  # when the others leave
            dist.barrier()
    else:
        with loop.model.no_sync():
            for number in range(2, 4):
                loop.step(number)
    time.sleep(60)
    return None


def test_a_slow_rank_is_waited_for_until_the_deadline_and_then_named() -> None:
    outcomes = run_ranks(2, _slow)
    assert "rank 1 is slow: last seen in step 2" in outcomes[0] and "in _slow" in outcomes[0], outcomes[0]


def _slow() -> str:
    loop = Loop("attach", deadline_s=3.0)
    loop.step(0)
    if dist.get_rank() == 1:
        time.sleep(1)  # inside the deadline: no harm
    loop.step(1)
    message = ""
    if dist.get_rank() == 1:
        time.sleep(5)
    else:
        message, ranks, _ = told(lambda: loop.step(2), gf.DeadlineError)
        assert ranks == (1,)
    loop.flow.close()
    return message


# - A rank that does something else, and everybody can go on


@pytest.mark.parametrize("kind", ["attach", "drop-in"])
def test_a_forward_pass_without_backward_on_one_rank_raises_on_all_and_the_next_step_is_fine(kind: str) -> None:
    weights = run_ranks(3, _forward_only, kind)
    assert weights[0] == weights[1] == weights[2]


def _forward_only(kind: str) -> list[float]:
    loop = Loop(kind)
    loop.step(0)
    if dist.get_rank() == 1:
        loop.model(batch(1))  # and then `continue`
    with pytest.raises(gf.DisagreementError, match="rank 1 ran a training forward pass that no backward pass followed"):
        loop.step(2)
    assert all(parameter.grad is None for parameter in loop.module.parameters())
    loop.optimizer.step()  # changes nothing
    loop.step(3)
    if dist.get_rank() == 1:
        with torch.no_grad():
            loop.model(batch(1))
    loop.step(4)
    loop.flow.close()
    return loop.weights()


class Trap(torch.autograd.Function):
    """Raises in backward while armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Trap.armed:
            raise ZeroDivisionError("the trap")
        return gradient


class Trapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Trap.apply(self.first(x)))


@pytest.mark.parametrize("kind", ["attach", "drop-in"])
def test_an_exception_in_one_ranks_backward_reaches_all_and_training_goes_on(kind: str) -> None:
    for weights in run_at_once(3, _trap, [(kind, recipe) for recipe in ("wfbp", "off", "wfbp-ring")]):
        assert weights[0] == weights[1] == weights[2]


def _trap(kind: str, recipe: str) -> list[float]:
    if recipe == "off":
        os.environ["GRADIENTFLOW"], recipe = "off", "wfbp"
    loop = Loop(kind, module=Trapped(), recipe=recipe)
    loop.step(0)
    Trap.armed = dist.get_rank() == 1
    if Trap.armed:
        with pytest.raises(ZeroDivisionError):
            loop.step(1)
        with pytest.raises(gf.TrainingError, match="broke off the backward pass of step 1"):
            loop.optimizer.step()
    else:
        message, ranks, elapsed_s = told(lambda: loop.step(1))
        assert "rank 1 broke" in message and elapsed_s < LIMIT_S and ranks == (1,), message
        with pytest.raises(gf.TrainingError, match="broke down before"):
            loop.optimizer.step()
    assert all(parameter.grad is None for parameter in loop.module.parameters())
    Trap.armed = False
    for number in range(2, 5):
        loop.step(number)
    assert loop.flow.step == 4
    loop.flow.close()
    return loop.weights()


@pytest.mark.parametrize("where", ["on all ranks", "on one"])
def test_a_comm_hook_that_raises(where: str) -> None:
    weights = run_ranks(2, _raising_comm_hook, where)
    assert weights[0] == weights[1]


def _raising_comm_hook(where: str) -> list[float]:
    """If it raised on one rank only, the others have an operation on the hook's group that nobody answers:
    going on with that group would pair it with another. So the wrapper refuses; a new one with a new group works."""
    raises = where == "on all ranks" or dist.get_rank() == 1
    trouble = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if trouble and bucket.is_last() and raises:
            raise ZeroDivisionError("the hook")
        work = dist.all_reduce(bucket.buffer().div_(2), group=state, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def wrapped() -> gf.DistributedDataParallel:
        model = gf.DistributedDataParallel(module, bucket_cap_mb=0.0001)
        model.register_comm_hook(dist.new_group(), hook)
        return model

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()

    model = wrapped()
    step(0)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trouble.append("now")
    if raises:
        with pytest.raises(gf.TrainingError, match="the hook"):
            step(1)
    else:
        message, _, elapsed_s = told(lambda: step(1))
        assert "rank 1 failed: ZeroDivisionError: the hook" in message and elapsed_s < LIMIT_S, message
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    trouble.clear()
    if where == "on one":
        with pytest.raises(gf.TrainingError, match="give a new wrapper a new group"):
            step(2)
        model.close()
        model = wrapped()
    step(2)
    model.close()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def test_a_changed_shape_is_reported() -> None:
    run_ranks(2, _changed_shape)


def _changed_shape() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model = gf.DistributedDataParallel(module)
    model(torch.ones(2, 4)).sum().backward()
    module[1].weight.data = torch.ones(3, 4)
    module.zero_grad()
    # Torch's own words: the node that adds the gradient up knows the shape it was made for.
    with pytest.raises(RuntimeError, match=r"invalid gradient .* got \[3, 4\] but expected shape .* \[4, 4\]"):
        model(torch.ones(2, 4)).sum().backward()
    model.close()


@pytest.mark.parametrize("recipe", ["lazy", "lazy+bf16"])
@pytest.mark.parametrize("kind", ["attach", "drop-in"])
def test_a_gradient_that_is_not_finite_is_a_decision_of_all_ranks(kind: str, recipe: str) -> None:
    results = run_ranks(2, _nonfinite, kind, recipe)
    assert results[0] == results[1]


def _nonfinite(kind: str, recipe: str) -> list[float]:
    def poison(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        factor = float("nan") if dist.get_rank() == 1 else 1.0
        (loop.model(batch(1)).square().mean() * factor).backward()

    loop = Loop(kind, recipe=recipe, nonfinite="raise")
    loop.step(0)
    before = loop.weights()
    with pytest.raises(gf.NonFiniteError, match="inf or nan on every rank"):
        poison(loop)
    loop.optimizer.step()
    assert loop.weights() == before
    loop.step(2)
    loop.flow.close()

    loop = Loop(kind, recipe=recipe, nonfinite="skip")
    loop.step(0)
    before = loop.weights()
    poison(loop)
    loop.optimizer.step()
    assert loop.weights() == before
    loop.step(2)
    assert loop.weights() != before
    loop.flow.close()

    if kind == "attach":
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        loop = Loop(kind, recipe=recipe, nonfinite="skip", scaler=scaler)
        for step in range(3):
            factor = float("inf") if (dist.get_rank(), step) == (1, 1) else 1.0
            kept = loop.weights()
            loop.optimizer.zero_grad()
            scaler.scale(loop.model(batch(1)).square().mean() * factor).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            assert (loop.weights() == kept) == (step == 1)
        assert scaler.get_scale() == 32.0
        loop.flow.close()

    if recipe == "lazy":
        loop = Loop(kind, recipe=recipe)  # as stock: it spreads, on all ranks alike
        poison(loop)
        assert all(bool(p.grad.isnan().any()) for p in loop.module.parameters())
        loop.flow.close()
    return before


def test_ranks_that_cannot_meet_again_say_so() -> None:
    run_ranks(2, _cannot_meet, lost=(1,))


def _cannot_meet() -> None:
    loop = Loop("attach", deadline_s=20.0)
    loop.step(0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told(lambda: loop.step(1))
    message, ranks, elapsed_s = told(lambda: loop.step(2))
    assert "rank 1 is dead" in message and ranks == (1,) and elapsed_s < LIMIT_S
    loop.flow.close()


def test_a_rank_that_waits_for_a_slow_one_in_another_collective_is_not_accused() -> None:
    for results in run_at_once(3, _slow_elsewhere, [("broadcast",), ("scatter",), ("recv",)]):
        assert results[0] == results[1] == results[2]


def _slow_elsewhere(call: str) -> list[float]:
    loop, rank, tensor = Loop("drop-in"), dist.get_rank(), torch.ones(3)
    loop.step(0)
    if rank == 2:
        time.sleep(6.0)  # the first is with it in the call, the second through with it and in the next step
    if call == "broadcast":
        dist.broadcast(tensor, 0)
    elif call == "scatter":
        dist.scatter(tensor, [torch.ones(3)] * 3 if rank == 0 else None, src=0)
    elif rank == 0:
        dist.recv(tensor, 2)
    elif rank == 2:
        dist.send(tensor, 0)
    loop.step(1)
    weights = loop.weights()
    loop.flow.close()
    return weights


def test_a_copy_that_trains_on_one_rank_only_is_named_on_all() -> None:
    for words, _, waited_s in run_ranks(2, _meets_alone):
        assert waited_s < LIMIT_S
        assert "another model" in words or "meet the other ranks" in words


def _meets_alone() -> tuple[str, tuple[int, ...], float]:
    loop = Loop("drop-in", deadline_s=60.0)
    loop.step(0)
    other = copy.deepcopy(loop.model)
    found = told(lambda: other(batch(1)) if dist.get_rank() == 0 else loop.step(1))
    loop.flow.close()
    return found


# - While connections of our own are made


def test_a_rank_that_dies_before_it_calls_the_others_is_named_at_once() -> None:
    for outcome in run_ranks(3, _dies_before_it_calls, lost=(0,))[1:]:
        words, ranks, waited_s = outcome
        assert "rank 0 is dead" in words and ranks == (0,) and waited_s < LIMIT_S, outcome


def _dies_before_it_calls() -> tuple[str, tuple[int, ...], float]:
    if dist.get_rank() == 0:
        links._connection = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: Loop("attach", recipe="wfbp-ring", deadline_s=60.0))


def test_a_rank_that_cannot_be_reached_is_called_on_all_ranks_as_the_whole_job_calls_it() -> None:
    for outcome in run_ranks(3, _cannot_be_reached)[1:]:
        words, ranks, waited_s = outcome
        assert "rank 1 cannot reach rank 2 at 127.0.0.1 (No route to host)" in words, outcome
        assert ranks == (2,) and waited_s < LIMIT_S, outcome


def _no_route(*_: object) -> None:
    raise OSError("No route to host")


def _cannot_be_reached() -> tuple[str, tuple[int, ...], float] | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    links._connection = _no_route
    return told(lambda: Loop("attach", recipe="wfbp-ring", process_group=group, deadline_s=60.0), gf.TrainingError)


def test_a_rank_that_cannot_listen_fails_by_itself_and_the_others_for_its_sake() -> None:
    (others, their_type), (own, own_type) = run_ranks(2, _cannot_listen)
    assert "rank 1 cannot listen at 127.0.0.1" in others and "rank 1 cannot listen at 127.0.0.1" in own
    assert issubclass(their_type, gf.DeadlineError) and own_type is gf.TrainingError


def _cannot_listen() -> tuple[str, type[BaseException]]:
    if dist.get_rank() == 1:
        links.family_of = lambda address: socket.AF_INET6
    with pytest.raises(gf.TrainingError) as caught:
        Loop("attach", recipe="wfbp-ring", deadline_s=12.0)
    return str(caught.value), caught.type


@pytest.mark.parametrize("how", ["no route", "no address"])
def test_auto_does_without_connections_that_cannot_be_made(how: str) -> None:
    for rank, (said, patterns, is_trying) in enumerate(run_ranks(3, _without_connections, how)):
        assert patterns == () and not is_trying
        words = {"no route": "rank 1 cannot reach rank 2", "no address": "rank 1 cannot listen at"}[how]
        assert ("by the group's own all-reduce only" in said and words in said) == (rank == 0), said


def test_recipes_with_other_connections_are_told_apart_before_any_is_made() -> None:
    for words, ranks, waited_s in run_ranks(2, _other_ways):
        assert "rank 0 exchanges by gloo on 2 lanes and connections of our own for ring, halving and rank 1" in words
        assert "GRADIENTFLOW" in words and ranks == () and waited_s < LIMIT_S


def _other_ways() -> tuple[str, tuple[int, ...], float]:
    recipe = ["auto", "lazy"][dist.get_rank()]
    return told(lambda: Loop("attach", recipe=recipe, deadline_s=60.0), gf.DisagreementError)


def test_a_state_whose_plan_went_by_connections_that_cannot_be_made_here_is_taken() -> None:
    for rank, (said, step, is_trying, patterns) in enumerate(run_ranks(2, _state_from_elsewhere)):
        assert ("goes by ring, which there is not here: auto chooses anew" in said) == (rank == 0)
        assert step == 12 and is_trying and patterns == {NATIVE}


def _state_from_elsewhere() -> tuple[str, int, bool, set[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradientflow.runtime").addHandler(handler)
    loop = Loop("attach", recipe="lazy-ring")
    for number in range(4):
        loop.step(number)
    state = loop.flow.state_dict() | {"recipe": "auto"}
    loop.flow.close()
    links._connection = _no_route
    pay_for_any_race()
    loop = Loop("attach", recipe="auto", deadline_s=6.0)
    loop.flow.load_state_dict(state)
    for number in range(8):
        loop.step(number)
    found = "".join(said), loop.flow.step, loop.flow.is_trying, {each.pattern for each in loop.flow.plan.messages}
    loop.flow.close()
    return found


def _without_connections(how: str) -> tuple[str, tuple[str, ...], bool]:
    """One of the ranks is the one that cannot; all of them go on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradientflow.exchange").addHandler(handler)
    if dist.get_rank() == 1 and how == "no route":
        links._connection = _no_route
    if dist.get_rank() == 1 and how == "no address":
        links.family_of = lambda address: socket.AF_INET6
    pay_for_any_race()
    loop = Loop("attach", recipe="auto", deadline_s=6.0)
    for number in range(70):
        loop.step(number)
    found = "".join(said), loop.flow._exchange.patterns, loop.flow.is_trying
    loop.flow.close()
    return found


def test_ranks_that_met_again_in_vain_can_meet_once_more() -> None:
    weights = run_ranks(2, _meets_in_vain)
    assert weights[0] == weights[1]


def _meets_in_vain() -> list[float]:
    loop = Loop("attach", module=Trapped(), recipe="wfbp-ring", deadline_s=15.0)
    loop.step(0)
    Trap.armed = dist.get_rank() == 1
    with pytest.raises((ZeroDivisionError, gf.PeerError)):
        loop.step(1)
    Trap.armed = False
    connects, links._connection = links._connection, _no_route
    with pytest.raises(gf.TrainingError, match="rank 0 cannot reach rank 1"):
        loop.step(2)
    links._connection = connects
    for number in range(3, 5):
        loop.step(number)
    weights = loop.weights()
    loop.flow.close()
    return weights
