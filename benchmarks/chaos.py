"""Faults on purpose, many times: is training right afterwards, and how soon does it go on?

    python benchmarks/chaos.py [--times small|usual|full] [--seed 0] [--only FAULT ...] [--out FILE]
    python benchmarks/chaos.py --table FILE ...

Every job trains a model whose gradients are whole numbers that tell worker and step, with momentum 1: weights after
each step follow exactly from who took part in which. Each worker writes down each step that it has taken; when a job is
over, `history_of` reads all of it and finds steps that are missing, that were taken differently by two survivors, or
whose weights are not what the record of members implies. What codecs that leave something over do is not foretold;
there all workers must have the same bits.

Which fault comes when follows from --seed; where in a step it hits does not. --table prints what is in result files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import gradientflow as gf
from gradientflow.bench.bakeoff import this_machine
from gradientflow.cli.elastic import open_store
from gradientflow.lab import Lab, LabUnavailable
from gradientflow.processes import die_with_parent
from gradientflow.runtime.sameness import checksums

LOOPBACK = "127.0.0.1"
EXACT = ("lazy", "wfbp", "flow", "lazy:100KB", "lazy-ring", "lazy+bf16", "lazy+fp16", "mg-wfbp")
#: For workers of one group, beside those.
LOCKSTEP = ("bytescheduler:200KB", "dear", "lazy-ps", "merge", "bsp")
ALIKE = ("lazy+int8", "lazy+csc:10%", "lazy+topk:5%", "lazy+powersgd:2")
#: Longer than anything here should take.
LIMIT_S = 60.0
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "gradientflow.runtime.attach"])


# - What is trained


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in ((200, 200), 3000, 3, (400, 250), 7000))

    def forward(self, factor: float) -> torch.Tensor:
        return sum(weight.sum() for weight in self.weights) * factor


def gradient(worker: int, step: int) -> float:
    """A multiple of 12: means over up to four workers are whole. Small enough for bfloat16, and with changing signs, so
    that nothing grows."""
    return 12.0 * (worker % 3 + 1) * (-1) ** step


class Training:
    def __init__(self, recipe: str, diary: Path, **options: Any) -> None:
        self.model = Counting()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=1.0)
        self._options = options
        self._before = 0  # steps of earlier flows
        self.flow: Any = gf.attach(self.model, self.optimizer, recipe, **options)
        self._diary = diary.open("a", buffering=1)
        self._generation = 0

    @property
    def num_steps(self) -> int:
        return self._before + self.flow.step

    def switch(self, recipe: str) -> None:
        self._before = self.num_steps
        self.flow.close()
        self.flow = gf.attach(self.model, self.optimizer, recipe, **self._options)

    def close(self) -> None:
        self.flow.close()
        self._diary.close()

    def step(self, poison: float = 0.0) -> None:
        step, crew = self.num_steps, self.flow.crew
        self.optimizer.zero_grad()
        loss = self.model(gradient(crew.members[crew.rank], step))
        (loss * poison if poison else loss).backward()
        crew = self.flow.crew
        took = self.model.weights[0].grad is not None
        self.optimizer.step()
        self.note(step=step, took=took, crew=crew.members, generation=crew.generation)

    def note(self, **facts: Any) -> None:
        weights = [weight.detach() for weight in self.model.weights]
        low, high = min(float(w.min()) for w in weights), max(float(w.max()) for w in weights)
        alike = [int(each) for each in checksums(dict(enumerate(weights)))]  # type: ignore[arg-type]
        now_s = time.time()
        facts |= {"at_s": now_s, "low": low, "high": high, "alike": alike}
        if facts["generation"] != self._generation:
            self._generation = facts["generation"]
            clock_s = time.perf_counter()
            last = self.flow.trace().of_kind("regroup")[-1]
            facts["regroup_s"] = [now_s - (clock_s - at_s) for at_s in (last.start_s, last.end_s)]
        if facts["step"] % 50 == 0:
            facts["usage"] = usage()
        self._diary.write(json.dumps(facts) + "\n")


def usage() -> dict[str, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    tasks, files = (len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd"))
    return {"resident_mb": resident // 2**20, "threads": tasks, "descriptors": files}


class Record(NamedTuple):
    worker: str
    facts: dict[str, Any]


def read_diaries(directory: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for path in sorted(directory.glob("*.diary")):
        lines = path.read_text().splitlines(keepends=True)
        found[path.stem] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


class History(NamedTuple):
    num_steps: int
    #: Steps that only a worker that died had taken: the others took them without it.
    num_orphans: int
    problems: list[str]


def history_of(
    diaries: dict[str, list[dict[str, Any]]], *, exact: bool, left_out: frozenset[int] = frozenset()
) -> History:
    """Go through steps from the first, and hold what each worker wrote against what follows from members.

    left_out: steps that must change nothing."""
    by_step: dict[int, list[Record]] = {}
    for worker, records in diaries.items():
        for facts in records:
            by_step.setdefault(facts["step"], []).append(Record(worker, facts))
    last_of = {worker: max(facts["step"] for facts in records) for worker, records in diaries.items() if records}
    problems: list[str] = []
    weight = velocity = 0.0
    num_orphans = 0
    for step in range(max(by_step, default=-1) + 1):
        records = by_step.get(step, [])
        newest = max((r.facts["generation"] for r in records if r.facts["took"] != (step in left_out)), default=None)
        if newest is None:
            problems.append(f"step {step} was taken by nobody")
            continue
        orphans = [
            r for r in records if r.facts["took"] and r.facts["generation"] != newest and last_of[r.worker] == step
        ]
        num_orphans += bool(orphans)
        counting = [record for record in records if record not in orphans]
        crews = {tuple(r.facts["crew"]) for r in counting if r.facts["took"]}
        if len(crews) > 1:
            problems.append(f"step {step} was taken by {sorted(crews)}")
        if len({str(r.facts["alike"]) for r in counting}) > 1:
            problems.append(f"after step {step} workers differ: {[(r.worker, r.facts['low']) for r in counting]}")
        members = max(crews, default=())
        if step not in left_out and members:
            velocity += sum(gradient(member, step) for member in members) / len(members)
            weight -= velocity
        wrong = [r for r in counting if exact and not r.facts["low"] == r.facts["high"] == weight]
        if wrong:
            found = [(r.worker, r.facts["low"], r.facts["high"], r.facts["took"]) for r in wrong]
            problems.append(f"after step {step} of {members}: expected {weight}, found {found}")
            break
    return History(max(by_step, default=-1) + 1, num_orphans, problems)


def flatness(diaries: dict[str, list[dict[str, Any]]]) -> dict[str, list[int]]:
    """Of the worker that was there longest: what it used after 50 steps or more, and at the end."""
    longest = max(diaries.values(), key=len)
    uses = [facts["usage"] for facts in longest if "usage" in facts and facts["step"] >= 50]
    return {name: [uses[0][name], uses[-1][name]] for name in uses[0]} if uses else {}


# - Workers that come and go


def elastic_worker(directory: str, place: tuple[str, int], recipe: str, world: int, number: int) -> None:
    die_with_parent()
    log_to(Path(directory, f"{number}.log"))
    told = {"MASTER_ADDR": place[0], "MASTER_PORT": str(place[1]), "WORLD_SIZE": str(world)}
    os.environ.update({**told, "GRADIENTFLOW_ELASTIC": "1"})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # in a lab it is another
    torch.set_num_threads(1)
    training = Training(recipe, Path(directory, f"{number}.diary"), deadline_s=20)
    stop = Path(directory, "stop")
    while not (stop.exists() and training.flow.step >= int(stop.read_text() or 10**9)):
        training.step()
    training.close()


def log_to(path: Path) -> None:
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


class Crew:
    """A job in this directory. Workers are forked with torch loaded, so that one costs a fraction of a second."""

    def __init__(self, directory: Path, recipe: str, world: int) -> None:
        self._store = open_store(LOOPBACK, 0)
        self._place = (LOOPBACK, self._store.port)
        self._begin(directory, recipe, world)

    def _begin(self, directory: Path, recipe: str, world: int) -> None:
        self.directory, self._recipe, self._world = directory, recipe, world
        self.workers: dict[int, Any] = {}
        self._num_started = 0
        for _ in range(world):
            self.start()

    def start(self) -> None:
        number, self._num_started = self._num_started, self._num_started + 1
        task = (str(self.directory), self._place, self._recipe, self._world, number)
        self.workers[number] = self._launch(number, task)

    def _launch(self, number: int, task: tuple[Any, ...]) -> Any:
        worker = _CONTEXT.Process(target=elastic_worker, args=task)
        worker.start()
        return worker

    def generations(self) -> dict[int, int]:
        return {number: self.last(number)["generation"] for number in self.workers}

    def wait_for_others_than(self, then: dict[int, int]) -> None:
        """Until all workers are in another generation than they were."""
        self.wait_for(lambda: all(now != then.get(number) for number, now in self.generations().items()))

    def kill(self, number: int) -> None:
        self.workers.pop(number).kill()

    def signal(self, number: int, which: int) -> None:
        os.kill(self.workers[number].pid, which)

    def last(self, number: int) -> dict[str, Any]:
        """What it wrote last."""
        path = self.directory / f"{number}.diary"
        lines = _end_of(path).splitlines(keepends=True)[-2:] if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1]) if whole else {"step": -1, "generation": 0, "crew": [], "at_s": 0.0}

    def wait_for(self, what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        end_s = time.monotonic() + limit_s
        while not what():
            dead = [number for number, worker in self.workers.items() if worker.exitcode is not None]
            if dead or time.monotonic() > end_s:
                words = f"worker {dead} ended" if dead else f"nothing happened for {limit_s:g} s"
                raise Failed(f"{words}: {self.words()}")
            time.sleep(0.02)

    def train(self, num_steps: int, *, together: int | None = None) -> None:
        """Until everybody has taken so many steps more, and so many workers train together."""
        goals = {number: max(0, self.last(number)["step"]) + num_steps for number in self.workers}
        self.wait_for(lambda: all(self.last(number)["step"] >= goal for number, goal in goals.items()))
        if together is not None:
            self.wait_for(lambda: all(len(self.last(number)["crew"]) == together for number in self.workers))

    def log_of(self, number: int) -> str:
        path = self.directory / f"{number}.log"
        return path.read_text() if path.exists() else ""

    def words(self) -> str:
        newest = range(max(0, self._num_started - 8), self._num_started)
        return "\n".join(f"--- worker {number}\n{self.log_of(number)[-1500:]}" for number in newest)

    def end(self) -> None:
        """Everybody leaves after the same step."""
        last = max(self.last(number)["step"] for number in self.workers)
        replace(self.directory / "stop", str(last + 30))
        for number, worker in self.workers.items():
            worker.join(LIMIT_S)
            if worker.exitcode != 0:
                raise Failed(f"worker {number} ended with {worker.exitcode}: {self.words()}")

    def close(self) -> None:
        for worker in self.workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGCONT)
            worker.kill()
            worker.join()


def replace(path: Path, text: str) -> None:
    """Who reads it has the old text or the new."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


def _end_of(path: Path) -> str:
    """Lines are read again and again while somebody writes: two of them are enough."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        return file.read().decode()


class Failed(Exception):
    """A job did not do what it should."""


@contextlib.contextmanager
def crew_of(recipe: str, world: int) -> Iterator[Crew]:
    with tempfile.TemporaryDirectory() as directory:
        crew = Crew(Path(directory), recipe, world)
        try:
            yield crew
        finally:
            crew.close()


class Trial(NamedTuple):
    fault: str
    survived: bool
    detect_s: float | None = None
    again_s: float | None = None
    steps_lost: int = 0
    wrong: int = 0
    words: str = ""
    #: Of the whole job that it was part of.
    more: dict[str, Any] | None = None
    #: So many at once.
    times: int = 1


def judged(crew: Crew, recipe: str, trials: list[Trial]) -> list[Trial]:
    """End the job, and hold its history against the law. What is wrong is said of its last trial."""
    crew.end()
    diaries = read_diaries(crew.directory)
    history = history_of(diaries, exact=recipe in EXACT)
    facts = {"recipe": recipe, "steps": history.num_steps, "orphans": history.num_orphans, "usage": flatness(diaries)}
    lost = sum("nobody" in words for words in history.problems)
    wrong = len(history.problems) - lost
    words = "; ".join(history.problems[:3])
    *others, last = trials
    return [*others, last._replace(steps_lost=lost, wrong=wrong, words=words, more=facts)]


def jobs(fault: str, times: int, seed: int, each: int, job: Callable[..., list[Trial]]) -> Iterator[Trial]:
    """So many trials, in jobs of some. A job that fails counts as one trial that was not survived."""
    for first in range(0, times, each):
        draw = random.Random(f"{fault} {seed} {first}")
        recipe = draw.choice(EXACT if draw.random() < 0.7 else ALIKE)
        try:
            yield from job(recipe, min(each, times - first), draw)
        except Failed as error:
            yield Trial(fault, False, words=f"{recipe}: {error}")


def kills_in_place(recipe: str, times: int, draw: random.Random) -> list[Trial]:
    """A worker is killed, the others go on; another one joins."""
    world, trials = draw.choice([2, 3, 4]), []
    with crew_of(recipe, world) as crew:
        crew.train(5, together=world)
        for _ in range(times):
            time.sleep(draw.uniform(0.0, 0.2))
            trials.append(kill_one(crew, draw.choice(list(crew.workers))))
            if draw.random() < 0.5:
                crew.train(draw.randrange(1, 20))
            crew.start()
            crew.train(1, together=world)
        return judged(crew, recipe, trials)


def kill_one(crew: Crew, victim: int) -> Trial:
    then, killed_s = crew.generations(), time.time()
    crew.kill(victim)
    crew.wait_for_others_than(then)
    return Trial(IN_PLACE, True, *_regrouped(crew, killed_s))


def stops(recipe: str, times: int, draw: random.Random) -> list[Trial]:
    """Three of four for less than three seconds."""
    world, trials = 3, []
    with crew_of(recipe, world) as crew:
        crew.train(5, together=world)
        for number in range(times):
            victim = draw.choice(list(crew.workers))
            if number % 4 != 3:
                trials.append(stop_briefly(crew, victim, draw.uniform(0.3, 2.5)))
                continue
            trials.append(stop_for_long(crew, victim))
            crew.start()
            crew.train(1, together=world)
        return judged(crew, recipe, trials)


def stop_briefly(crew: Crew, victim: int, seconds: float) -> Trial:
    """The others wait, and nothing else happens."""
    then, stopped_s = crew.generations(), time.time()
    crew.signal(victim, signal.SIGSTOP)
    time.sleep(seconds)
    crew.signal(victim, signal.SIGCONT)
    continued_s = time.time()
    crew.train(3)
    # On a busy machine it may have been stopped for longer than was meant: then it is rightly missed.
    fine = crew.generations() == then or continued_s - stopped_s > 3.5
    return Trial(STOPS, fine, again_s=time.time() - continued_s)


def stop_for_long(crew: Crew, victim: int) -> Trial:
    """The others go on without it; when it is continued it hears of that and ends."""
    then, stopped_s = crew.generations(), time.time()
    crew.signal(victim, signal.SIGSTOP)
    stopped = crew.workers.pop(victim)
    crew.wait_for_others_than(then)
    trial = Trial(STOPS, True, *_regrouped(crew, stopped_s))
    os.kill(stopped.pid, signal.SIGCONT)
    _hears_of_it(crew, victim, stopped)
    return trial


def _hears_of_it(crew: Crew, victim: int, process: Any) -> None:
    process.join(LIMIT_S)
    if "the others went on without it" not in crew.log_of(victim):
        raise Failed(f"worker {victim} was not told: {crew.words()}")


def _regrouped(crew: Crew, since_s: float) -> tuple[float, float]:
    """After how long the last of the workers noticed, and all had taken a step again."""
    records = read_diaries(crew.directory)
    noticed, again = [], []
    for number in crew.workers:
        first = next(f for f in records[str(number)] if f.get("regroup_s") and f["regroup_s"][1] > since_s)
        noticed.append(first["regroup_s"][0] - since_s)
        again.append(first["at_s"] - since_s)
    return max(0.0, *noticed), max(again)


# - Workers on hosts of a lab, one of which is cut off


def cuts(times: int, seed: int) -> list[Trial]:
    """Three of four for up to three seconds."""
    draw, trials, recipe = random.Random(f"{CUTS} {seed}"), [], "lazy"
    try:
        lab = Lab(3, 1e9)
    except LabUnavailable as error:
        print(f"no lab: {error}", file=sys.stderr)
        return []
    with lab, tempfile.TemporaryDirectory() as directory:
        crew = LabCrew(Path(directory), recipe, lab)
        try:
            crew.train(5, together=3)
            for number in range(times):
                if number % 4 != 3:
                    trials.append(cut_briefly(crew, draw.randrange(3), draw.uniform(0.5, 3.0)))
                    continue
                trials.append(cut_for_long(crew, draw.randrange(1, 3)))  # on the first is the store
                crew.start()
                crew.train(1, together=3)
            return judged(crew, recipe, trials)
        except Failed as error:
            return [*trials, Trial(CUTS, False, words=str(error))]
        finally:
            crew.close()


def cut_briefly(crew: LabCrew, host: int, seconds: float) -> Trial:
    """Nobody is accused, and everything goes on."""
    then = crew.generations()
    with crew.lab.cut_off(host):
        time.sleep(seconds)
    up_s = time.time()
    crew.train(3)
    return Trial(CUTS, crew.generations() == then, again_s=time.time() - up_s)


def cut_for_long(crew: LabCrew, host: int) -> Trial:
    """The others go on without it; when the link is up its worker hears of that and ends."""
    then, cut_s, victim = crew.generations(), time.time(), crew.on(host)
    process = crew.workers.pop(victim)
    with crew.lab.cut_off(host):
        crew.wait_for_others_than(then)
    trial = Trial(CUTS, True, *_regrouped(crew, cut_s))
    _hears_of_it(crew, victim, process)
    return trial


class LabCrew(Crew):
    """On each host a worker; the store is on the first."""

    def __init__(self, directory: Path, recipe: str, lab: Lab) -> None:
        self.lab = lab
        address = lab.hosts[0].address
        command = [sys.executable, "-m", "gradientflow", "store", "--address", address, "--port", "29500"]
        self._held = lab.popen(0, command, stdout=subprocess.PIPE, text=True)
        assert self._held.stdout is not None
        self._held.stdout.readline()
        self._place = (address, 29500)
        self._begin(directory, recipe, len(lab.hosts))

    def _launch(self, number: int, task: tuple[Any, ...]) -> Any:
        return self.launch_apart([sys.executable, __file__, "--worker", json.dumps(task)])

    def launch_apart(self, argv: list[str]) -> _Launched:
        """On a host that has no worker, in a namespace of its own, so that others do not see the process: as on another
        machine."""
        taken = {worker.host for worker in self.workers.values()}
        host = next(each for each in range(len(self.lab.hosts)) if each not in taken)
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return _Launched(self.lab.popen(host, [*apart, *argv], stdin=subprocess.DEVNULL), host)

    def on(self, host: int) -> int:
        return next(number for number, worker in self.workers.items() if worker.host == host)

    def close(self) -> None:
        super().close()
        self._held.kill()
        self._held.communicate()


class _Launched:
    """A subprocess that looks like one of multiprocessing."""

    def __init__(self, process: subprocess.Popen[Any], host: int) -> None:
        self._process, self.kill, self.host = process, process.kill, host

    @property
    def pid(self) -> int:
        """Of the worker itself, a child of `unshare`."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        found = children.read_text().split() if children.exists() else []
        if not found:
            raise ProcessLookupError(f"worker of host {self.host}")
        return int(found[0])

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


# - Workers of one group, for ever


def group_worker(directory: str, rank: int, world: int, recipes: list[str], left_out: list[int], every: int) -> None:
    """Takes `every` steps with each recipe. What is left out has an inf or a nan on one rank."""
    die_with_parent()
    log_to(Path(directory, f"{rank}.log"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    options = {"deadline_s": 20.0, **({"nonfinite": "skip"} if left_out else {})}
    training = Training(recipes[0], Path(directory, f"{rank}.diary"), **options)
    for number, recipe in enumerate(recipes):
        if number:
            training.switch(recipe)
        for _ in range(every):
            step = training.num_steps
            bad = step in left_out and step % world == rank
            training.step(float("nan" if step % 2 else "inf") if bad else 0.0)
    training.close()
    dist.destroy_process_group()


def group_job(fault: str, recipes: list[str], every: int, left_out: frozenset[int], exact: bool) -> Trial:
    world = 3
    with tempfile.TemporaryDirectory() as directory:
        task = (world, recipes, sorted(left_out), every)
        workers = [_CONTEXT.Process(target=group_worker, args=(directory, rank, *task)) for rank in range(world)]
        for worker in workers:
            worker.start()
        end_s = time.monotonic() + LIMIT_S + 5 * len(recipes)
        for worker in workers:
            worker.join(max(1.0, end_s - time.monotonic()))
        codes = [worker.exitcode for worker in workers]
        for worker in workers:
            worker.kill()
        if any(codes):
            words = "\n".join(path.read_text()[-1500:] for path in sorted(Path(directory).glob("*.log")))
            return Trial(fault, False, words=f"{recipes[:3]}, exit codes {codes}: {words}")
        diaries = read_diaries(Path(directory))
        history = history_of(diaries, exact=exact, left_out=left_out)
        facts = {"recipes": recipes, "steps": history.num_steps, "usage": flatness(diaries)}
        return Trial(fault, True, wrong=len(history.problems), words="; ".join(history.problems[:3]), more=facts)


def poisons(times: int, seed: int) -> Iterator[Trial]:
    """Steps in which one rank's gradients are inf or nan; nonfinite="skip" leaves them out on all."""
    draw = random.Random(f"{POISON} {seed}")
    for first in range(0, times, 25):
        num = min(25, times - first)
        recipe = draw.choice([*EXACT, *ALIKE])
        left_out = frozenset(draw.sample(range(2, 4 * num + 4), num))
        yield group_job(POISON, [recipe], 4 * num + 6, left_out, recipe in EXACT)._replace(times=num)


def switches(times: int, seed: int) -> list[Trial]:
    """Another recipe, again and again; memory, threads and descriptors must not grow."""
    draw = random.Random(f"{SWITCHES} {seed}")
    recipes = [draw.choice([*EXACT, *LOCKSTEP]) for _ in range(times)]
    return [group_job(SWITCHES, recipes, 12, frozenset(), exact=True)._replace(times=times)]


# - Restarts and files


SCRIPT = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import torch, torch.distributed as dist
import chaos
torch.set_num_threads(1)
dist.init_process_group("gloo")
where, last = Path(sys.argv[1]), int(sys.argv[2])
rank, kept = dist.get_rank(), where / "checkpoint.pt"
training = chaos.Training("lazy", where / f"{{rank}}.diary", deadline_s=20)
if kept.exists():
    state = torch.load(kept)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.flow.load_state_dict(state["flow"])
training.note(began=training.num_steps, step=training.num_steps - 1, took=False, crew=(), generation=0, pid=os.getpid())
while training.num_steps < last and not (where / "stop").exists():
    training.step()
    if training.num_steps % 10 == 0 and rank == 0:
        chaos.save(training, kept)
    time.sleep(0.01)
training.flow.close()
dist.destroy_process_group()
"""


def save(training: Training, path: Path) -> None:
    """Whole, or not at all: a file is replaced when the other one is on the disk."""
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        torch.save({**state, "flow": training.flow.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def restarts(times: int, seed: int) -> list[Trial]:
    """One of two workers under torchrun is killed; all are started anew, from the last checkpoint."""
    draw, trials, killed_s = random.Random(f"{RESTART} {seed}"), [], 0.0
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "train.py").write_text(SCRIPT.format(here=str(Path(__file__).parent)))
        options = ["--workers", "2", "--max-restarts", str(times), "--out", str(where / "run")]
        argv = [sys.executable, "-m", "gradientflow", "run", *options, str(where / "train.py"), directory, "1000000"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with (where / "log").open("w") as log:
            job = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
        try:
            for number in range(times + 1):
                began = _wait_for_begin(where, number + 1, job)
                if number:
                    lost = max(_last_steps(where, killed_s)) + 1 - began[0]["began"]
                    again_s = max(facts["at_s"] for facts in began) - killed_s
                    trials.append(Trial(RESTART, True, None, again_s, more={"taken_again": lost}))
                if number == times:
                    break
                time.sleep(draw.uniform(0.2, 1.5))
                killed_s = time.time()
                os.kill(draw.choice(began)["pid"], signal.SIGKILL)
            (where / "stop").touch()
            job.wait(LIMIT_S)
        except (Failed, subprocess.TimeoutExpired) as error:
            trials.append(Trial(RESTART, False, words=f"{error}: {(where / 'log').read_text()[-2000:]}"))
        finally:
            job.terminate()
            job.wait()
        wrong = _wrong_after_restarts(read_diaries(where))
        return [*trials[:-1], trials[-1]._replace(wrong=len(wrong), words=trials[-1].words or str(wrong[:3]))]


def _begun(where: Path) -> list[list[dict[str, Any]]]:
    return [[facts for facts in diary if "began" in facts] for diary in read_diaries(where).values()]


def _wait_for_begin(where: Path, times: int, job: subprocess.Popen[Any]) -> list[dict[str, Any]]:
    """Until both workers have begun so often, and taken a step since."""
    end_s = time.monotonic() + 2 * LIMIT_S
    while True:
        begun = _begun(where)
        if len(begun) == 2 and all(len(each) >= times for each in begun):
            last = [diary[-1] for diary in read_diaries(where).values()]
            if all("began" not in facts for facts in last):
                return [each[times - 1] for each in begun]
        if job.poll() is not None or time.monotonic() > end_s:
            raise Failed("the job ended, or workers did not begin anew")
        time.sleep(0.05)


def _last_steps(where: Path, before_s: float) -> list[int]:
    diaries = read_diaries(where).values()
    return [max(f["step"] for f in diary if f["at_s"] < before_s + 0.5 and "began" not in f) for diary in diaries]


def _wrong_after_restarts(diaries: dict[str, list[dict[str, Any]]]) -> list[str]:
    """However often a step was taken: it is always the same two workers'."""
    expected, weight, velocity, wrong = [], 0.0, 0.0, []
    for step in range(1 + max((facts["step"] for diary in diaries.values() for facts in diary), default=0)):
        velocity += (gradient(0, step) + gradient(1, step)) / 2
        weight -= velocity
        expected.append(weight)
    for worker, diary in diaries.items():
        for facts in diary:
            right = expected[facts["step"]] if facts["step"] >= 0 else 0.0
            if not facts["low"] == facts["high"] == right:
                wrong.append(f"rank {worker} after step {facts['step']}: {facts['low']}, not {right}")
    return wrong


def writer(directory: str, rank: int) -> None:
    """Writes checkpoints as quickly as it can, and says which are done."""
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting-{rank}", rank=0, world_size=1)
    training = Training("lazy", Path(directory, "0.diary"))
    kept, done = Path(directory, "checkpoint.pt"), os.open(Path(directory, "done"), os.O_CREAT | os.O_WRONLY)
    if kept.exists():
        state = torch.load(kept)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.flow.load_state_dict(state["flow"])
    while True:
        training.step()
        save(training, kept)
        os.pwrite(done, str(training.num_steps).ljust(12).encode(), 0)


def checkpoints(times: int, seed: int) -> list[Trial]:
    """Who writes checkpoints all the time is killed: the file holds the last one that was done, or the next."""
    draw, trials = random.Random(f"{CHECKPOINT} {seed}"), []
    with tempfile.TemporaryDirectory() as directory:
        kept, done = Path(directory, "checkpoint.pt"), Path(directory, "done")
        for number in range(times):
            before = int(done.read_text()) if done.exists() else 0
            worker = _CONTEXT.Process(target=writer, args=(directory, number))
            worker.start()
            end_s = time.monotonic() + LIMIT_S
            while not (done.exists() and int(done.read_text() or 0) > before):
                if time.monotonic() > end_s:
                    return [*trials, Trial(CHECKPOINT, False, words="nothing was written")]
                time.sleep(0.005)
            time.sleep(draw.uniform(0.0, 0.05))
            worker.kill()
            worker.join()
            step = int(torch.load(kept)["flow"]["step"])
            lost = max(0, int(done.read_text()) - step)
            trials.append(Trial(CHECKPOINT, step > before, steps_lost=lost))
        history = history_of(read_diaries(Path(directory)), exact=True)
        # A step that was taken and not kept is taken again, with the same result.
        return [*trials[:-1], trials[-1]._replace(wrong=len(history.problems), words="; ".join(history.problems[:3]))]


# - Servers


def server_kills(times: int, seed: int) -> list[Trial]:
    import servers

    try:
        found = servers.kills(SimpleNamespace(times=times, seed=seed))
    except AssertionError as error:
        return [Trial(SERVERS, False, words=str(error))]
    # The longest step of all is the worst of what a kill has cost.
    return [
        Trial(SERVERS, True, None, found["longest_step_s"], wrong=int(found["wrong"] != 0), more=found, times=times)
    ]


def frames(times: int, seed: int) -> list[Trial]:
    import servers

    try:
        found = servers.strangers(SimpleNamespace(frames=times, clients=max(6, times // 100), seed=seed, mode="files"))
    except AssertionError as error:
        return [Trial(FRAMES, False, words=str(error))]
    return [Trial(FRAMES, True, wrong=int(found["wrong"] != 0), more=found, times=times)]


# - All of it

IN_PLACE, RESTART = "kill a worker, in place", "kill a worker, restart (torchrun)"
STOPS, CUTS = "stop and continue a worker", "link down and up (lab)"
SERVERS, FRAMES = "kill a server", "malformed frames"
CHECKPOINT, POISON, SWITCHES = "kill during a checkpoint", "gradients of inf or nan", "another recipe"


class Fault(NamedTuple):
    #: How often: in `make test`, usually, and all of it.
    small: int
    usual: int
    full: int
    run: Callable[[int, int], Iterable[Trial]]


FAULTS = {
    IN_PLACE: Fault(3, 10, 50, lambda times, seed: jobs(IN_PLACE, times, seed, 5, kills_in_place)),
    RESTART: Fault(0, 10, 50, restarts),
    STOPS: Fault(1, 8, 20, lambda times, seed: jobs(STOPS, times, seed, 4, stops)),
    CUTS: Fault(1, 8, 20, cuts),
    SERVERS: Fault(0, 10, 50, server_kills),
    CHECKPOINT: Fault(4, 20, 50, checkpoints),
    FRAMES: Fault(0, 10_000, 50_000, frames),
    POISON: Fault(10, 100, 500, poisons),
    SWITCHES: Fault(6, 40, 200, switches),
}


def rows(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for fault in FAULTS:
        ours = [trial for trial in trials if trial["fault"] == fault]
        if ours:
            sums = {"tried": sum(trial["times"] for trial in ours)}
            sums["survived"] = sum(trial["times"] for trial in ours if trial["survived"])
            sums |= {name: sum(trial[name] for trial in ours) for name in ("steps_lost", "wrong")}
            times = {name: _spread([t[name] for t in ours if t[name] is not None]) for name in ("detect_s", "again_s")}
            found.append({"fault": fault, **sums, **times})
    return found


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else ""


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| fault | tried | survived | seconds to detect | seconds to train again | steps lost | wrong results |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = (row[name] for name in ("fault", "tried", "survived", "detect_s", "again_s", "steps_lost", "wrong"))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", choices=["small", "usual", "full"], default="usual")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(FAULTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        elastic_worker(*json.loads(arguments.worker))
        return
    if arguments.table:
        print(table(rows([trial for path in arguments.table for trial in json.loads(path.read_text())["trials"]])))
        return
    began_s, load = time.monotonic(), os.getloadavg()[0]
    words = re.sub(r" --out \S+", "", shlex.join(["python", "benchmarks/chaos.py", *sys.argv[1:]]))
    result = {"machine": this_machine().model_dump(), "command": words, "load_before": load}
    trials: list[dict[str, Any]] = []
    for fault in arguments.only or FAULTS:
        times = getattr(FAULTS[fault], arguments.times)
        # Written down one by one: what was tried before somebody interrupts it counts.
        for trial in FAULTS[fault].run(times, arguments.seed) if times else ():
            trials.append(trial._asdict())
            if not trial.survived or trial.wrong:
                print(trial.words, file=sys.stderr)
            if arguments.out:
                facts = {"seconds": time.monotonic() - began_s, "rows": rows(trials), "trials": trials}
                arguments.out.write_text(json.dumps(result | facts, indent=1) + "\n")
        print("\n".join(table([row for row in rows(trials) if row["fault"] == fault]).splitlines()[2:]), flush=True)
    if any(not trial["survived"] or trial["wrong"] or trial["steps_lost"] for trial in trials):
        sys.exit(1)


if __name__ == "__main__":
    main()
