"""SSP, ASP, Local SGD and DiLoCo around servers that keep the parameters: real processes that come, go and die."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_rounds import alone, assert_same, every, optimizer_of, step, train, weights
from torch import nn

import gradientflow as gf
from gradientflow.exchange.server.directory import store_of_job
from helpers import _CONTEXT, run_ranks
from models import build
from servers import Hosts, _child_of, servers


def told(environment: dict[str, str], function: Any, *args: Any) -> Any:
    os.environ.update(environment)
    return function(*args)


# - The same as without servers


@pytest.mark.parametrize(("world", "num_servers"), [(2, 0), (3, 2)])
def test_rounds_of_one_step_are_bsp(world: int, num_servers: int) -> None:
    """The way of deltas forced, with momentum."""
    exchange = f"-ps:{num_servers}" if num_servers else "-ps"
    with servers(num_servers) as hosts:
        found = run_ranks(
            world, told, hosts.environment, train, "mlp", "momentum", torch.float64, f"lazy{exchange}@ssp:0", 8
        )
    gradients = run_ranks(world, train, "mlp", "momentum", torch.float64, "lazy", 8)
    assert_same(found, gradients, 1e-10)
    for number in range(8):
        assert all(torch.equal(ours[number], found[0][number]) for ours in found)


def test_local_sgd_and_diloco_are_what_they_are_without_servers() -> None:
    with servers(1) as hosts:
        local = run_ranks(2, told, hosts.environment, train, "cnn", "adamw", torch.float64, "lazy-ps:1@local:4", 8)
        for sync in ("diloco:3:warmup=0", "diloco:3:warmup=1", "diloco:3:warmup=3"):
            diloco = run_ranks(2, told, hosts.environment, train, "cnn", "adamw", torch.float64, f"lazy-ps:1@{sync}", 9)
            assert_same(diloco, run_ranks(2, train, "cnn", "adamw", torch.float64, f"lazy@{sync}", 9), 1e-10)
    assert_same(local, alone(2, "cnn", "adamw", torch.float64, every(4), 8), 1e-10)


def train_all(recipes: list[str]) -> dict[str, torch.Tensor]:
    return {recipe: train("mlp", "sgd", torch.float32, recipe, 8)[-1] for recipe in recipes}


def test_deltas_may_be_compressed_on_their_way_to_servers() -> None:
    """What is rounded away waits: after four rounds little is missing."""
    recipes = [f"lazy-ps{codec}@local:2" for codec in ("", "+fp16", "+bf16", "+int8")]
    found = run_ranks(2, train_all, recipes)
    for recipe in recipes:
        assert torch.equal(found[0][recipe], found[1][recipe])
        moved = found[0][recipes[0]] - weights(build("mlp", torch.float32, seed=0))
        assert (found[0][recipe] - found[0][recipes[0]]).norm() < 0.02 * moved.norm(), recipe


# - Drifting apart


def drift(path: str, recipe: str, bound: int) -> torch.Tensor:
    """Workers are delayed at random. Before each step, nobody may be further behind than the bound."""
    rank, world = dist.get_rank(), dist.get_world_size()
    clocks = np.memmap(path, dtype=np.int64, mode="r+", shape=(world,))
    dice = random.Random(rank)
    model = build("mlp", torch.float32, seed=rank)
    ours = optimizer_of("sgd", model)
    with gf.attach(model, ours, recipe) as flow:
        for number in range(25):
            time.sleep(0.03 if dice.random() < 0.3 else 0.001)
            assert number - clocks.min() <= bound, f"rank {rank} begins step {number}, others are at {clocks.tolist()}"
            clocks[rank] = number + 1
            step(model, ours, "mlp", rank, number)
        flow.average()
        found = weights(model)
        step(model, ours, "mlp", rank, 25)  # who comes back first from the average trains on
    return found


@pytest.mark.parametrize("staleness", [1, 3])
def test_nobody_runs_further_ahead_than_it_may(tmp_path: Path, staleness: int) -> None:
    path = tmp_path / "clocks"
    np.zeros(3, dtype=np.int64).tofile(path)
    found = run_ranks(3, drift, str(path), f"lazy-ps@ssp:{staleness}", staleness)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def stand_still() -> int:
    """One worker takes no step: the others get as far as they may, and then hear whom they wait for."""
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    flow = gf.attach(model, ours, "lazy-ps@ssp:2", deadline_s=3.0)
    number = 0
    if dist.get_rank() != 1:
        with pytest.raises(gf.DeadlineError, match="worker 1 is at clock 0"):
            for number in range(99):
                step(model, ours, "mlp", 0, number)
    dist.barrier()
    flow.close()
    return number


def test_a_wait_has_a_deadline_and_a_name() -> None:
    assert run_ranks(3, stand_still) == [2, 0, 2]


def test_without_a_bound_workers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "clocks"
    np.zeros(2, dtype=np.int64).tofile(path)
    found = run_ranks(2, drift, str(path), "lazy-ps+int8@asp", 10**6)
    assert torch.equal(found[0], found[1])


def one_does_not_average() -> tuple[str, torch.Tensor | None]:
    """Of three, one is killed and another one does not come the second time."""
    rank = dist.get_rank()
    model = build("mlp", torch.float32, seed=0)
    ours = optimizer_of("sgd", model)
    flow = gf.attach(model, ours, "lazy-ps:1@ssp:3", deadline_s=4.0)
    step(model, ours, "mlp", rank, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    flow.average()
    found = weights(model)
    if rank == 2:
        time.sleep(6.0)
        return "", found
    with pytest.raises(gf.DeadlineError) as caught:
        flow.average()
    return str(caught.value), found


def test_who_does_not_average_is_named_and_who_is_dead_is_not_waited_for() -> None:
    with servers(1) as hosts:
        found = run_ranks(3, told, hosts.environment, one_does_not_average, lost=(1,))
    (words, ours), (_, theirs) = found[0], found[2]
    assert torch.equal(ours, theirs)
    assert words == "waited 4 s for all workers to call average(): rank 2 did not"


def count_nothing(recipe: str) -> float:
    """Steps are -1 on rank 0 and -100 on the other, which says that nothing is behind its second one."""
    rank = dist.get_rank()
    weight = nn.Parameter(torch.zeros(3))
    model, ours = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=1.0)
    with gf.attach(model, ours, recipe) as flow:
        for number in range(2):
            flow.count(0 if rank and number else 4)
            weight.grad = torch.full((3,), 100.0 if rank else 1.0)
            ours.step()
        flow.average()
        return weight[0].item()


@pytest.mark.parametrize("recipe", ["lazy-ps@asp", "lazy-ps@ssp:2", "lazy-ps+fp16@asp"])
def test_a_step_without_samples_counts_for_nothing(recipe: str) -> None:
    assert run_ranks(2, count_nothing, recipe) == [-51.0, -51.0]


def poisoned() -> torch.Tensor:
    rank = dist.get_rank()
    model = build("mlp", torch.float32, seed=rank)
    ours = optimizer_of("momentum", model)
    with gf.attach(model, ours, "lazy-ps@ssp:1"):
        for number in range(6):
            if rank == 1 and number == 2:
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))
            step(model, ours, "mlp", rank, number)
        return weights(model)


def test_what_is_not_finite_stays_where_it_is() -> None:
    assert all(torch.isfinite(found).all() for found in run_ranks(2, poisoned))


def masked() -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    ours = optimizer_of("sgd", model)
    with gf.attach(model, ours, "lazy-ps@local:1"):
        before = weights(model)
        model(torch.randn(4, 3)).sum().backward()
        ours.step()
        return weights(model) - before


def test_masks_stay_as_they_are() -> None:
    found = run_ranks(2, masked)
    assert torch.equal(found[0], found[1]) and (found[0] != 0).all()


def complex_numbers() -> str:
    model = nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(gf.UsageError) as caught:
        gf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "lazy-ps@asp")
    return str(caught.value)


def test_servers_keep_real_numbers() -> None:
    assert "'weight' is complex" in run_ranks(1, complex_numbers)[0]


def disagree() -> str:
    width = 8 + dist.get_rank()
    model = nn.Linear(4, width)
    try:
        gf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "lazy-ps@asp", deadline_s=2.0).close()
    except (gf.DisagreementError, gf.DeadlineError) as error:
        return str(error)
    return ""


def test_workers_hold_the_same_model() -> None:
    assert "expected torch.float32 [8]" in run_ranks(2, disagree)[1]


# - Coming and going


def work(environment: dict[str, str], recipe: str, steps: int, path: str, name: str, pause_s: float) -> None:
    """A worker of no process group. It leaves its last loss."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(64, 10)
    targets = inputs @ torch.arange(10.0)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gf.attach(model, optimizer, recipe, deadline_s=30.0) as flow:
        (Path(path) / f"{name}.began").write_text(str(flow.step))
        while flow.step < steps:
            time.sleep(pause_s)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
            loss.backward()
            optimizer.step()
    (Path(path) / f"{name}.loss").write_text(str(loss.item()))


class Crew:
    """Workers that come and go, around servers."""

    def __init__(self, hosts: Hosts, path: Path, recipe: str, founders: int, steps: int, pause_s: float = 0.01) -> None:
        self._environment = hosts.environment | {"WORLD_SIZE": str(founders)}
        self._path, self._recipe, self._steps, self._pause_s = path, recipe, steps, pause_s
        self.workers: dict[str, BaseProcess] = {}
        for _ in range(founders):
            self.add()

    def add(self) -> str:
        name = f"worker-{len(self.workers)}"
        given = (self._environment, self._recipe, self._steps, str(self._path), name, self._pause_s)
        process = _CONTEXT.Process(target=work, args=given)
        process.start()
        self.workers[name] = process
        return name

    def wait_to_begin(self, name: str) -> None:
        end_s = time.monotonic() + 30
        while not (self._path / f"{name}.began").exists():
            assert self.workers[name].is_alive(), name
            assert time.monotonic() < end_s, f"{name} did not begin"
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        pid = self.workers[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def losses(self) -> dict[str, float]:
        """Of those who came to the end, when nobody works any more."""
        for name, process in self.workers.items():
            process.join(timeout=60)
            assert process.exitcode is not None, f"{name} hangs"
        return {path.stem: float(path.read_text()) for path in self._path.glob("*.loss")}


@pytest.mark.parametrize("recipe", ["lazy-ps:2@ssp:2", "lazy-ps:2@diloco:5"])
def test_workers_die_and_others_come(tmp_path: Path, recipe: str) -> None:
    with servers(2) as hosts:
        crew = Crew(hosts, tmp_path, recipe, founders=3, steps=300)
        for name in list(crew.workers):
            crew.wait_to_begin(name)
        crew.kill("worker-0")  # which brought the parameters
        fourth = crew.add()
        crew.wait_to_begin(fourth)
        crew.kill("worker-1")
        losses = crew.losses()
    assert losses.keys() == {"worker-2", fourth}
    assert all(loss < 1e-3 for loss in losses.values()), losses


def test_who_dies_before_it_has_said_anything_is_not_waited_for(tmp_path: Path) -> None:
    """The first number was given to a worker that never came further, for want of servers."""
    with servers(1) as hosts:
        dist.PrefixStore("table", store_of_job("127.0.0.1", hosts.store.port)).add("workers", 1)
        assert len(Crew(hosts, tmp_path, "lazy-ps:1@asp", founders=2, steps=5).losses()) == 2


@pytest.mark.parametrize("recipe", ["lazy-ps:1@ssp:2", "lazy-ps:1@diloco:5"])
def test_a_lost_server_is_replaced_by_what_workers_have(tmp_path: Path, recipe: str) -> None:
    with servers(1) as hosts:
        crew = Crew(hosts, tmp_path, recipe, founders=2, steps=300)
        for name in list(crew.workers):
            crew.wait_to_begin(name)
        for _ in range(3):
            time.sleep(0.3)
            hosts.kill(0)
        losses = crew.losses()
    assert len(losses) == 2 and all(loss < 1e-3 for loss in losses.values()), losses


def push_and_leave(server: int) -> float:
    """To a server that stands still for two seconds; more than lies on the way."""
    rank = dist.get_rank()
    weight = nn.Parameter(torch.zeros(2000, 2000))
    model = nn.ParameterList([weight])
    ours = torch.optim.SGD(model.parameters(), lr=1.0)
    with gf.attach(model, ours, "lazy-ps:1@asp") as flow:
        if rank == 0:
            os.kill(server, signal.SIGSTOP)
            threading.Timer(2.0, os.kill, (server, signal.SIGCONT)).start()
            weight.grad = torch.full_like(weight, -1.0)
            ours.step()
            flow.close()
        dist.barrier()
        if rank == 1:
            flow.average()
    return weight.detach().mean().item()


def test_who_leaves_leaves_nothing_behind() -> None:
    with servers(1) as hosts:
        server = _child_of(hosts._keepers[0].pid)
        assert run_ranks(2, told, hosts.environment, push_and_leave, server)[1] == 0.5


def test_without_a_group_it_is_said_what_to_do() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(gf.UsageError, match="gradientflow run --elastic"):
        gf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "lazy-ps@ssp:4")
