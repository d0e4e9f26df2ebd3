"""Training through parameter servers, with real processes and sockets: parity with stock DDP, all codecs, faults."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import ONE_BUCKET, SEVERAL_BUCKETS, assert_ranks_identical, train_all
from torch import nn

import gradientflow as gf
from gradientflow.compress import Gather, Sum, Swap
from gradientflow.exchange import Exchange
from gradientflow.exchange.server import client
from gradientflow.exchange.server.keeper import keep
from gradientflow.exchange.server.keys import KeyFiles
from gradientflow.exchange.server.servers import Wanted
from helpers import _CONTEXT, run_ranks
from models import build, loss_of
from servers import servers

RECIPES = ("bsp-ps", "wfbp-ps", "bytescheduler:150KB-ps", "flow-ps")


def told(environment: dict[str, str], function: Any, *args: Any) -> Any:
    os.environ.update(environment)
    return function(*args)


def served(recipe: str, num_servers: int) -> str:
    """Through servers of their own."""
    return f"{recipe}:{num_servers}" if num_servers else recipe


# - Questions


def ask_everything(num_spare: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    job = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0)))
    exchange = Exchange(dist.group.WORLD, torch.device("cpu"), 2, 30.0, servers=Wanted(num_spare, job))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
        for numel in (0, 1, 1000, 700_001):
            shares = [torch.arange(numel).remainder(5).add(each).to(dtype) for each in range(world)]
            exchange.answer(Sum([ours := shares[rank].clone(), torch.ones(3)]), lane=1)
            assert torch.equal(ours, sum(shares)), (dtype, numel)
            gathered = exchange.answer(Gather(shares[rank]), lane=1)
            assert all(torch.equal(one, other) for one, other in zip(gathered, shares, strict=True)), (dtype, numel)
            parts = [shares[rank][: numel * to // world] for to in range(world)]
            swapped = exchange.answer(Swap(parts, [numel * rank // world] * world), lane=1)
            assert all(torch.equal(s, t[: numel * rank // world]) for s, t in zip(swapped, shares, strict=True))
    exchange.close()


@pytest.mark.parametrize(("world", "num_spare"), [(2, 0), (3, 1)])
def test_every_question_is_answered(world: int, num_spare: int) -> None:
    with servers(num_spare) as hosts:
        run_ranks(world, told, hosts.environment, ask_everything, num_spare)


# - Parity


@pytest.mark.parametrize(
    ("world", "num_servers", "name", "optimizer"),
    [(2, 1, "cnn", "adamw"), (3, 2, "transformer", "sgd"), (4, 3, "mlp", "adamw")],
)
def test_parity_with_ddp(world: int, num_servers: int, name: str, optimizer: str) -> None:
    recipes = [served(recipe, num_servers) for recipe in RECIPES]
    methods = (*recipes[:2], *(f"gated {recipe}" for recipe in recipes[2:]))
    with servers(num_servers) as hosts:
        results = run_ranks(
            world,
            told,
            hosts.environment,
            train_all,
            name,
            optimizer,
            torch.float32,
            (ONE_BUCKET, SEVERAL_BUCKETS, *methods),
            12,
        )
        if world > 2:
            exact = run_ranks(
                world, told, hosts.environment, train_all, name, optimizer, torch.float64, (ONE_BUCKET, *methods), 12
            )
            assert_ranks_identical(exact)
    assert_ranks_identical(results)
    reference, spread = results[0][ONE_BUCKET], results[0][SEVERAL_BUCKETS][0]
    for method in methods:
        if world == 2:  # of two numbers there is one sum
            assert results[0][method][1] == reference[1], method
        else:
            assert (exact[0][method][0] - exact[0][ONE_BUCKET][0]).abs().max() < 1e-10, method
            distance = (results[0][method][0] - reference[0]).norm()
            assert distance <= 2 * (spread - reference[0]).norm(), method


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 6, sparse=True)
        self.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))
        self.more = nn.Embedding(20, 6, sparse=True)
        self.double()

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        found = (self.words(x).to(torch.complex128) @ self.turn).abs()
        return found + self.more(x % 20) if more else found


def train_sparse(recipes: tuple[str, ...]) -> list[torch.Tensor]:
    """Ranks look up different numbers of words, and in each step one of them none in `more`."""
    found, rank = [], dist.get_rank()
    for recipe in recipes:
        torch.manual_seed(0)
        model = Sparse()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gf.attach(model, optimizer, recipe):
            for step in range(4):
                optimizer.zero_grad()
                words = torch.randint(30, (4 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))
                model(words, (step + rank) % 3 > 0).square().mean().backward()
                optimizer.step()
        found.append(torch.cat([torch.view_as_real(p.detach() + 0j).reshape(-1) for p in model.parameters()]))
    return found


def test_sparse_and_complex_gradients_are_what_they_are_without_servers() -> None:
    results = run_ranks(3, train_sparse, ("wfbp", "wfbp-ps"))
    for without, through in results:
        assert torch.equal(through, results[0][1])
        torch.testing.assert_close(through, without, rtol=1e-12, atol=1e-12)


CODECS = (
    "fp16", "bf16", "csc:always", "csc:always+fp16", "int8:always", "qsgd:4:always", "efsign:always", "signsgd",
    "topk:5%:always", "topk:5%:sampled:always", "threshold:0.001:always", "randomk:5%:always", "dgc:5%:always",
    "gtopk:5%:always", "powersgd:2:always",
)  # fmt: skip


def train_compressed(recipes: list[str]) -> dict[str, tuple[torch.Tensor, float]]:
    found = {}
    for recipe in recipes:
        model = build("cnn", torch.float32, seed=dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        with gf.attach(model, optimizer, recipe):
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, "cnn", dist.get_rank(), step, torch.float32).backward()
                optimizer.step()
        found[recipe] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return found


def test_every_codec_leaves_ranks_identical_and_is_what_it_is_without_servers() -> None:
    """Through a server of its own and those beside three workers."""
    recipes, lockstep = [f"wfbp-ps:1+{codec}" for codec in CODECS], [f"wfbp+{codec}" for codec in CODECS[::2]]
    with servers(1) as hosts:
        results = run_ranks(3, told, hosts.environment, train_compressed, recipes + lockstep)
    for through in recipes:
        assert all(torch.equal(theirs[through], results[0][through]) for theirs in results), through
        assert torch.isfinite(results[0][through]).all()
    for through, without in zip(recipes[::2], lockstep, strict=True):
        # Sums are added up in another order: what rounds to 16 bits shows it.
        torch.testing.assert_close(results[0][through], results[0][without], rtol=0.05, atol=5e-3, msg=through)


# - Faults


class Counting(nn.Module):
    """Its gradients are whole numbers that tell rank and step: sums are exact, and a share that is lost or counted
    twice shows."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, step: int) -> torch.Tensor:
        return sum(w.sum() for w in self.weights) * float((dist.get_rank() + 1) * (step % 50 + 1))


def count(recipe: str, seconds: float, sizes: tuple[int, ...], start: Path | None = None) -> tuple[int, int, float]:
    """Steps, servers replaced, and the largest wrong weight."""
    world = dist.get_world_size()
    model = Counting(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flow = gf.attach(model, optimizer, recipe, deadline_s=60)
    end_s, step, expected, wrong = time.monotonic() + seconds, 0, 0.0, 0.0
    go_on = torch.ones(1)
    while go_on.item():
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        expected -= sum(rank + 1 for rank in range(world)) * (step % 50 + 1) / world
        step += 1
        for weight in model.weights:
            wrong = max(wrong, float((weight.detach() - expected).abs().max()))
        if abs(expected) > 2**20:
            expected = 0.0
            with torch.no_grad():
                for weight in model.weights:
                    weight.zero_()
        if start is not None and dist.get_rank() == 0:
            start.touch()
        if step % 5 == 0:
            go_on[0] = time.monotonic() < end_s
            dist.broadcast(go_on, 0)
    replaced = flow._exchange.servers.num_replaced
    flow.close()
    return step, replaced, wrong


def test_servers_die_and_no_update_is_lost_or_doubled(tmp_path: Path) -> None:
    """As in benchmarks/servers.py, which kills fifty."""
    recipe, num_servers, chance = "bytescheduler:60KB-ps", 2, random.Random(1)
    with servers(num_servers) as hosts:
        started = tmp_path / "started"
        killed = []

        def kill_now_and_then() -> None:
            while not started.exists():
                time.sleep(0.05)
            for _ in range(4):
                time.sleep(chance.uniform(0.1, 0.8))
                hosts.kill(slot := chance.randrange(num_servers))
                killed.append(slot)

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        environment = hosts.environment
        args = (served(recipe, num_servers), 6.0, (100_000, 30_000, 3, 250_000), started)
        results = run_ranks(2, told, environment, count, *args)
        killer.join()
    assert len(killed) == 4
    for steps, replaced, wrong in results:
        assert wrong == 0.0
        assert replaced >= 1
        assert steps > 20


def impatient(function: Any, *args: Any) -> Any:
    client.TAKEOVER_S = 1.5
    return function(*args)


def test_another_server_takes_over_where_nobody_comes_back(tmp_path: Path) -> None:
    with servers(2) as hosts:
        started = tmp_path / "started"

        def kill_one() -> None:
            while not started.exists():
                time.sleep(0.05)
            time.sleep(0.3)
            hosts.kill_for_good(1)

        killer = threading.Thread(target=kill_one)
        killer.start()
        args = ("wfbp-ps:2", 5.0, (100_000, 3, 250_000), started)
        results = run_ranks(2, told, hosts.environment, impatient, count, *args)
        killer.join()
        assert hosts.entry(1) == hosts.entry(0)
    for _, _, wrong in results:
        assert wrong == 0.0


def lose_a_worker(recipe: str, how: str) -> tuple[str, tuple[int, ...], float]:
    model = Counting((1000, 20_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gf.attach(model, optimizer, recipe, deadline_s=60)
    began_s = 0.0
    with pytest.raises(gf.TrainingError) as caught:
        for step in range(1000):
            if step <= 5:  # the server beside it may be gone before others have the sums of step 4
                began_s = time.monotonic()
            if step == 5 and dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
    return str(caught.value), caught.value.ranks, time.monotonic() - began_s


@pytest.mark.parametrize(("num_servers", "how"), [(0, "dies"), (3, "dies"), (3, "stops")])
def test_a_worker_that_will_not_come_is_named_on_all_others(num_servers: int, how: str) -> None:
    with servers(num_servers) as hosts:
        args = (served("wfbp-ps", num_servers), how)
        results = run_ranks(3, told, hosts.environment, lose_a_worker, *args, lost=(2,))
    for words, ranks, seconds in results[:2]:
        assert 2 in ranks and "rank 2" in words
        assert seconds < 10.0


def test_no_server_says_how_to_start_one() -> None:
    with servers(0) as hosts:
        for words in run_ranks(2, told, hosts.environment, attach_in_vain):
            assert "0 of 1 servers came within 2 s: start the others with `gradientflow server" in words


def break_once(told: Path) -> None:
    def serve(slot: int | None, tell: Callable[[int], None]) -> None:
        if not told.exists():
            told.touch()
            tell(3)
            raise AssertionError("a mistake of ours")
        told.write_text(str(slot))

    keep(serve, None, print)


def test_a_server_that_meets_a_mistake_is_started_anew(tmp_path: Path) -> None:
    keeper = _CONTEXT.Process(target=break_once, args=(tmp_path / "told",))
    keeper.start()
    keeper.join(20.0)
    assert keeper.exitcode == 0
    assert (tmp_path / "told").read_text() == "3"


def attach_in_vain() -> str:
    model = Counting((10,))
    with pytest.raises(gf.DeadlineError) as caught:
        gf.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), "wfbp-ps:1", deadline_s=2)
    return str(caught.value)


# - Keys


@pytest.mark.parametrize("num_servers", [0, 1])
def test_with_key_files(tmp_path: Path, num_servers: int) -> None:
    KeyFiles.write_new(tmp_path / "keys")
    with servers(num_servers, tmp_path / "keys") as hosts:
        environment = {**hosts.environment, "GRADIENTFLOW_KEYS": str(tmp_path / "keys")}
        args = (served("wfbp-ps", num_servers), 1.0, (70_000, 3))
        results = run_ranks(2, told, environment, count, *args)
        if num_servers:
            for error in run_ranks(2, told, hosts.environment, attach_with_the_wrong_keys):
                assert "GRADIENTFLOW_KEYS" in error
            KeyFiles.write_new(tmp_path / "others")
            environment["GRADIENTFLOW_KEYS"] = str(tmp_path / "others")
            for error in run_ranks(2, told, environment, attach_with_the_wrong_keys):
                assert "do not have each other's keys" in error
    assert all(wrong == 0.0 for _, _, wrong in results)


def attach_with_the_wrong_keys() -> str:
    model = Counting((10,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        with gf.attach(model, optimizer, "wfbp-ps:1", deadline_s=20):
            model(0).backward()
    except gf.GradientFlowError as error:
        return f"{type(error).__name__}: {error}"
    return "it was let in"
