"""Workers in lockstep that come and go: whoever is left goes on in the same step, with the same weights."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradientflow as gf
from gradientflow.cli.elastic import open_store
from gradientflow.errors import DeadlineError, PeerError, UsageError
from gradientflow.exchange import Exchange
from gradientflow.runtime import flow as flow_module
from gradientflow.runtime.handle import open_flows
from gradientflow.runtime.planning import Planning
from gradientflow.runtime.pooled import PooledFlow
from helpers import _CONTEXT

STEPS = 12
AT = 5  # the step in which something happens
WORLD = 3


def gradient(worker: int, step: int) -> float:
    """Means over one to four workers are whole numbers."""
    return 12.0 * (worker + 1) * (-1) ** step


def rate(step: int) -> float:
    """Weights stay whole numbers."""
    return 1.0 + step // 4 % 2


def work(port: int, path: str, recipe: str, world: int, mischief: Callable[[], None] | None, options: Any) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)})
    os.environ.update({"GRADIENTFLOW_ELASTIC": "1", "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    out = Path(path).open("a", buffering=1)
    try:
        model = nn.ParameterList(torch.zeros(size) for size in (40_000, 5, 3000))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        if mischief is not None:
            mischief()
        flow: Any = gf.attach(_Summing(model), optimizer, recipe, **{"deadline_s": 20.0, **options})
        flow.carry(scheduler=scheduler)
        end = Path(path).parent / "end"
        while not (end.exists() and flow.step >= int(end.read_text())):
            step, crew = flow.step, flow.crew
            optimizer.zero_grad()
            _model_of(flow)(gradient(crew.members[crew.rank], step)).backward()
            crew, took = flow.crew, model[0].grad is not None
            optimizer.step()
            scheduler.step()
            weights = torch.cat([weight.detach() for weight in model])
            facts = {"step": step, "took": took, "crew": crew.members, "low": float(weights.min())}
            out.write(json.dumps(facts | {"high": float(weights.max()), "rate": scheduler.get_last_lr()[0]}) + "\n")
            time.sleep(0.05)
        flow.close()
        out.write(json.dumps({"ended": "well"}) + "\n")
    except Exception as error:
        out.write(json.dumps({"ended": f"{type(error).__name__}: {error}"}) + "\n")
        for left in list(open_flows):  # as at a script's end
            left.close()


class _Summing(nn.Module):
    def __init__(self, weights: nn.ParameterList) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, factor: float) -> torch.Tensor:
        return sum(weight.sum() for weight in self.weights) * factor


def _model_of(flow: Any) -> nn.Module:
    return flow._model


class Job:
    def __init__(self, directory: Path, recipe: str = "lazy", world: int = WORLD, **options: Any) -> None:
        self._directory, self._recipe, self._world, self._options = directory, recipe, world, options
        self._store = open_store("127.0.0.1", 0)
        self.processes: list[Any] = []

    def end_after(self, step: int) -> None:
        """Before this is said, workers train for ever."""
        (self._directory / "soon").write_text(str(step))
        os.replace(self._directory / "soon", self._directory / "end")

    def start(self, mischief: Callable[[], None] | None = None) -> int:
        number = len(self.processes)
        path = str(self._directory / f"{number}.jsonl")
        task = (self._store.port, path, self._recipe, self._world, mischief, self._options)
        self.processes.append(_CONTEXT.Process(target=work, args=task))
        self.processes[-1].start()
        if number < self._world:  # numbers are given as workers come: one after another, they are ours
            roster = dist.PrefixStore("gradientflow/roster", self._store)
            _until(lambda: roster.check(["workers"]) and int(roster.get("workers")) > number)
        return number

    def diary(self, number: int) -> list[dict[str, Any]]:
        path = self._directory / f"{number}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self) -> list[list[dict[str, Any]]]:
        for process in self.processes:
            process.join(60)
            assert process.exitcode is not None, "it hangs"
        return [self.diary(number) for number in range(len(self.processes))]


def _until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def check(diaries: list[list[dict[str, Any]]], *, exact: bool = True) -> dict[int, tuple[int, ...]]:
    """Weights after each step are what its members imply, on everybody who took it or took it over. By step, its
    members; what only the dead have taken does not count."""
    survivors = [diary for diary in diaries if diary and diary[-1].get("ended") == "well"]
    assert survivors
    crews, weight, velocity = {}, 0.0, 0.0
    for step in range(max(facts.get("step", 0) for diary in survivors for facts in diary) + 1):
        records = [facts for diary in survivors for facts in diary if facts.get("step") == step]
        found = {tuple(facts["crew"]) for facts in records if facts["took"]}
        assert len(found) == 1, (step, records)
        crews[step] = found.pop()
        velocity += sum(gradient(member, step) for member in crews[step]) / len(crews[step])
        weight -= velocity * rate(step)
        for facts in records:
            assert not exact or facts["low"] == facts["high"] == weight, (step, crews[step], weight, records)
            assert facts["rate"] == rate(step + 1)
        assert len({(facts["low"], facts["high"]) for facts in records}) == 1
    return crews


# - Mischief: each is run in one worker before it attaches


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_a_message() -> None:
    answer = Exchange.answer

    def hook(self: Exchange, question: Any, lane: int, number: int = 0, *rest: Any) -> Any:
        if number == AT + 1:
            time.sleep(0.3)  # the others are in it
            _die()
        return answer(self, question, lane, number, *rest)

    Exchange.answer = hook  # type: ignore[method-assign]


def is_overtaken() -> None:
    """The sums of this step reach everybody but this one."""
    finish = PooledFlow._finish

    def hook(self: PooledFlow, missing: list[int], skipped: bool) -> bool | None:
        found = finish(self, missing, skipped)
        if self._step == AT:
            PooledFlow._finish = finish  # type: ignore[method-assign]
            raise PeerError("the network failed", ())
        return found

    PooledFlow._finish = hook  # type: ignore[method-assign]


def dies_while_planning() -> None:
    Planning._plan_anew = lambda self, now: _die()  # type: ignore[method-assign,assignment]


def dies_while_handing_over() -> None:
    hand_over = flow_module.hand_over

    def hook(exchange: Exchange, source: int, *rest: Any) -> Any:
        if exchange.rank == source and exchange.members[-1] >= WORLD:
            _die()
        return hand_over(exchange, source, *rest)

    flow_module.hand_over = hook


def breaks_off() -> None:
    finish = PooledFlow._finish

    def hook(self: PooledFlow, missing: list[int], skipped: bool) -> bool | None:
        if self._step == AT:
            raise ZeroDivisionError("in the worker itself")
        return finish(self, missing, skipped)

    PooledFlow._finish = hook  # type: ignore[method-assign]


@pytest.mark.parametrize(("mischief", "victim"), [(dies_in_a_message, 0), (dies_while_planning, 2), (breaks_off, 0)])
def test_whoever_is_left_goes_on_in_the_same_step(directory: Path, mischief: Callable[[], None], victim: int) -> None:
    job = Job(directory)
    job.end_after(STEPS)
    for number in range(WORLD):
        job.start(mischief if number == victim else None)
    crews = check(job.wait())
    everybody, left = tuple(range(WORLD)), tuple(n for n in range(WORLD) if n != victim)
    # Who dies while a plan is made has given its part of the step before.
    last = {dies_in_a_message: AT - 1, dies_while_planning: 0, breaks_off: AT - 1}[mischief]
    assert [crews[step] for step in (last, last + 1)] == [everybody, left]


@pytest.mark.parametrize("recipe", ["lazy", "lazy+csc:20%"])
def test_who_was_overtaken_takes_over_what_the_others_have(directory: Path, recipe: str) -> None:
    job = Job(directory, recipe)
    job.end_after(STEPS)
    for number in range(WORLD):
        job.start(is_overtaken if number == 1 else None)
    diaries = job.wait()
    crews = check(diaries, exact="csc" not in recipe)
    assert set(crews.values()) == {tuple(range(WORLD))}
    assert [facts["step"] for facts in diaries[1] if not facts.get("took", True)] == [AT]


@pytest.mark.parametrize("recipe", ["lazy", "lazy+int8"])  # the second measures what pays, which is collective
def test_who_joins_begins_where_the_others_are_even_if_one_dies_meanwhile(directory: Path, recipe: str) -> None:
    job = Job(directory, recipe)
    for number in range(WORLD):
        job.start(dies_while_handing_over if number == 0 else None)
    _until(lambda: len(job.diary(1)) > 2)
    job.start()
    _until(lambda: bool(job.diary(3)))
    job.end_after(job.diary(3)[-1]["step"] + 6)
    diaries = job.wait()
    crews = check(diaries, exact=recipe == "lazy")
    assert crews[max(crews)] == (1, 2, 3) and diaries[3][0]["step"] > 2


def test_one_is_enough_and_all_may_change(directory: Path) -> None:
    job = Job(directory, world=2)
    job.start()
    job.start()
    _until(lambda: len(job.diary(0)) > 1)
    job.processes[0].kill()
    _until(lambda: job.diary(1)[-1].get("crew") == [1])
    job.start()
    _until(lambda: bool(job.diary(2)))
    job.processes[1].kill()
    job.end_after(job.diary(2)[-1]["step"] + 6)
    diaries = job.wait()
    assert diaries[2][-1]["ended"] == "well" and diaries[2][-2]["crew"] == [2]
    # Its weights are those of one history, of which others had the beginning.
    first = diaries[2][0]
    before = next(facts for facts in diaries[1] if facts.get("step") == first["step"])
    assert (before["low"], before["crew"]) == (first["low"], first["crew"])


def test_a_short_stop_is_waited_for(directory: Path) -> None:
    job = Job(directory)
    for _ in range(WORLD):
        job.start()
    _until(lambda: len(job.diary(1)) > 2)
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(job.processes[1].pid, signal.SIGCONT)
    job.end_after(job.diary(0)[-1]["step"] + 6)
    assert set(check(job.wait()).values()) == {tuple(range(WORLD))}


def test_who_was_stopped_for_long_is_told_that_the_others_went_on(directory: Path) -> None:
    job = Job(directory)
    for _ in range(WORLD):
        job.start()
    _until(lambda: len(job.diary(1)) > 2)
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    _until(lambda: job.diary(0)[-1]["crew"] == [0, 2])
    job.end_after(job.diary(0)[-1]["step"] + 6)
    _until(lambda: job.diary(0)[-1].get("ended") == "well")
    os.kill(job.processes[1].pid, signal.SIGCONT)
    diaries = job.wait()
    check(diaries)
    assert "the others went on without it" in diaries[1][-1]["ended"], diaries[1][-1]
    job.start()
    assert "the job is over" in job.wait()[-1][-1]["ended"]


def test_who_has_another_model_is_told_so_alone(directory: Path) -> None:
    job = Job(directory, world=1)
    job.start()
    job._options = {"verify_every": 7}
    job.start()
    _until(lambda: bool(job.diary(1)))
    job.end_after(STEPS)
    diaries = job.wait()
    assert diaries[0][-1]["ended"] == "well"
    assert "worker 1, options: expected" in diaries[1][-1]["ended"] and DeadlineError.__name__ not in diaries[1][-1]


def test_without_its_store_the_job_ends_and_nobody_stays(directory: Path) -> None:
    job = Job(directory, world=2, deadline_s=300.0)
    job.start()
    job.start()
    _until(lambda: len(job.diary(1)) > 2)
    del job._store
    began_s = time.monotonic()
    diaries = job.wait()
    assert all("the job's store is gone" in diary[-1]["ended"] for diary in diaries), diaries
    assert time.monotonic() < began_s + 30, "a worker waited for others that it could not hear any more"


def saves(port: int, directory: str, numbers: Any) -> None:
    """Takes steps to the next third, and saves."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"})
    os.environ.update({"GRADIENTFLOW_ELASTIC": "1", "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    model = nn.Linear(50, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if saved := gf.load(directory):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    flow = gf.attach(model, optimizer, "lazy+int8:always", deadline_s=20.0)
    assert flow.crew is not None
    if saved:
        flow.load_state_dict(saved["flow"])
    begun = flow.step
    while flow.step == begun or flow.step % 3:
        optimizer.zero_grad()
        model(torch.ones(4, 50)).sum().backward()
        optimizer.step()
    where = gf.save(directory, flow, model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match="has joined others at step"):
        flow.load_state_dict(flow.state_dict())
    numbers.put((flow.crew.rank, begun, where.name if where else None, float(model.weight.sum())))
    flow.close()


def test_the_first_of_them_saves_and_all_may_begin_from_it(directory: Path) -> None:
    numbers, sums = _CONTEXT.Queue(), []
    for job in range(2):
        store = open_store("127.0.0.1", 0)
        workers = [_CONTEXT.Process(target=saves, args=(store.port, str(directory), numbers)) for _ in range(2)]
        for worker in workers:
            worker.start()
        found = sorted(numbers.get(timeout=60) for _ in workers)
        for worker in workers:
            worker.join(30)
        assert [facts[:3] for facts in found] == [(0, 3 * job, str(job + 1)), (1, 3 * job, None)]
        sums.append(found[0][3])
        assert found[1][3] == sums[-1]
    assert sums[0] != sums[1]
    assert float(gf.load(directory)["model"]["weight"].sum()) == sums[1]
