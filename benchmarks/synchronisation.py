"""What workers gain that need not wait for each other, and what it costs, by trainings that are real.

    python benchmarks/synchronisation.py stragglers --out FILE.json   workers five times as slow in a fifth of steps
    python benchmarks/synchronisation.py rounds --out FILE.json       Local SGD(8) and DiLoCo(50): bytes, accuracy
    python benchmarks/synchronisation.py clouds --out FILE.json       two clouds of two hosts, a thin link between them
    python benchmarks/synchronisation.py crew --out FILE.json         50 workers killed and 50 come, SSP and DiLoCo

All of them train the CNN of 0.62 M parameters on half of scikit-learn's digits, four workers, and are judged by how
many of the other half it reads right. What is in the file of --out is kept, if it is of the same job: seeds may be
trained in several goes.

stragglers: a forward pass takes --step-s, or five times as long with a probability of 0.2, drawn by each worker for
each step; it is slept for what computing leaves of it. `lazy-ps@ssp:4` against `lazy`, paired by seeds: seconds until
the accuracy of --target is first reached. The learning rate rises for a tenth of the steps and stays.
crew: until all workers together have taken --steps, with kills and joins and without.
rounds and clouds need a lab (root or user namespaces): bytes are those that interfaces count.
`gradientflow report FILE.json` makes a page of what stragglers, rounds and clouds write.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from accuracy import MOMENTUM, WEIGHT_DECAY, Digits, _loss
from torch import nn

import gradientflow as gf
from gradientflow.bench.arena import Arena, LabArena, Loopback, start
from gradientflow.bench.bakeoff import this_machine
from gradientflow.bench.learning import Comparison, Difference, Evaluation, Learning, Training, differences, reaches
from gradientflow.bench.methods import BUCKETS_MB, stock_ddp
from gradientflow.bench.worker import fastest
from gradientflow.cli.elastic import open_store
from gradientflow.documents import Document, check_writable
from gradientflow.errors import UserError
from gradientflow.lab import Lab, parse_rate
from gradientflow.processes import die_with_parent
from gradientflow.recipe import Recipe
from gradientflow.rundir import now
from gradientflow.runtime.deltas import DeltaFlow

WORKERS = 4
BEST_DDP = "ddp-best"
SLOW, OFTEN = 5.0, 0.2
TIMEOUT_S = 120.0
LIMIT_S = 3600.0
PILOT_STEPS = 6
CREWS = ("lazy-ps:2@ssp:4", "lazy-ps:2@diloco:10")
CREW_STEPS = 16_000


class Job(Document):
    """What the workers are told."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    learning_rate: float
    #: Of single methods.
    own_rates: dict[str, float] = {}  # noqa: RUF012 - pydantic copies it
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = MOMENTUM
    #: Seconds of a step at least; 0: as long as it takes.
    step_s: float = 0.0
    straggling: bool = False
    #: How often it is evaluated.
    evaluations: int = 1

    @property
    def words(self) -> str:
        optimizer = "AdamW" if self.optimizer == "adamw" else f"SGD, momentum {self.momentum:g}"
        own = [f"of {method} {rate:g}" for method, rate in sorted(self.own_rates.items())]
        return ", ".join([f"digits; {optimizer}, learning rate {self.learning_rate:g}", *own])

    def rate_of(self, method: str) -> float:
        return self.own_rates.get(method, self.learning_rate)


# - In the workers


def make_optimizer(module: nn.Module, job: Job, rate: float) -> torch.optim.Optimizer:
    if job.optimizer == "adamw":
        return torch.optim.AdamW(module.parameters(), rate)
    return torch.optim.SGD(module.parameters(), rate, momentum=job.momentum, weight_decay=WEIGHT_DECAY)


def train(job: Job, method: str, seed: int, task: Digits, bucket_mb: int) -> Training:
    """One method, from the first step to the last. Weights are noted on the way and evaluated afterwards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = task.build(seed)
    optimizer = make_optimizer(module, job, job.rate_of(method))
    rising = job.steps // 10
    rates: torch.optim.lr_scheduler.LRScheduler
    if job.straggling:
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rising))
    else:
        rates = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, job.rate_of(method), total_steps=job.steps, pct_start=0.1, cycle_momentum=False
        )
    model: nn.Module = module
    flow = None
    if method == BEST_DDP:
        model = stock_ddp(bucket_mb).wrap(module, optimizer)
    else:
        flow = gf.attach(module, optimizer, method)
    dice = random.Random(f"{seed} {rank}")
    noted: list[tuple[int, float, dict[str, torch.Tensor]]] = []
    note_at = {job.steps * (number + 1) // job.evaluations for number in range(job.evaluations)}
    dist.barrier()
    if rank == 0:
        print("begin", flush=True)  # what it took to begin is not counted
        time.sleep(0.2)
    dist.barrier()
    began_s = time.perf_counter()
    for number, batch in enumerate(itertools.islice(task.batches(seed, rank, world), job.steps), start=1):
        step_began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = _loss(model, batch)
        if job.step_s:
            long_s = job.step_s * (SLOW if job.straggling and dice.random() < OFTEN else 1.0)
            time.sleep(max(0.0, step_began_s + long_s - time.perf_counter()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rates.step()
        if number in note_at:
            if number == job.steps and isinstance(flow, DeltaFlow) and number % flow.recipe.sync.period:
                flow.average()
            if rank == 0:
                weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
                noted.append((number, time.perf_counter() - began_s, weights))
    dist.barrier()
    if rank == 0:
        print("end", flush=True)
        time.sleep(0.2)
    if flow is not None:
        flow.close()
    dist.barrier()
    evaluations = [evaluate(task, module, *each) for each in noted] or [Evaluation(step=0, seconds=0, value=0)]
    words = f"stock DDP, buckets of {bucket_mb} MB" if method == BEST_DDP else method
    return Training(method=method, recipe=words, seed=seed, evaluations=tuple(evaluations))


@torch.no_grad()
def evaluate(
    task: Digits, module: nn.Module, step: int, seconds: float, weights: dict[str, torch.Tensor]
) -> Evaluation:
    module.load_state_dict(weights)
    module.eval()
    value = task.evaluate(module)
    module.train()
    return Evaluation(step=step, seconds=seconds, value=value)


def _pilot(bucket_mb: int, task: Digits) -> list[float]:
    module = task.build(0)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    model = stock_ddp(bucket_mb).wrap(module, optimizer)
    found = []
    for batch in itertools.islice(task.batches(0, dist.get_rank(), dist.get_world_size()), 2 + PILOT_STEPS):
        dist.barrier()
        began_s = time.perf_counter()
        optimizer.zero_grad()
        _loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        dist.barrier()
        found.append(time.perf_counter() - began_s)
    return found[2:]


def be_worker(path: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    job, task = Job.read(path), Digits()
    bucket_mb = fastest({size: _pilot(size, task) for size in BUCKETS_MB}) if BEST_DDP in job.methods else 0
    for seed in job.seeds:
        # Not always in the same order: what else the machine does is nobody's alone.
        for method in random.Random(seed).sample(job.methods, len(job.methods)):
            training = train(job, method, seed, task, bucket_mb)
            if dist.get_rank() == 0:
                print(training.model_dump_json(), flush=True)
            dist.barrier()
    dist.destroy_process_group()


def be_member(path: str, seed: str, recipe: str) -> None:
    """A worker of no process group: trains until it is told that it is enough, and leaves its accuracy. Its steps are
    the bytes of a file, so that they count though it be killed."""
    die_with_parent()
    torch.set_num_threads(1)
    task = Digits()
    module = task.build(int(seed))
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    batches = task.batches(os.getpid(), 0, 1)
    with gf.attach(module, optimizer, recipe, deadline_s=60.0), Path(f"{path}.steps").open("ab", buffering=0) as steps:
        while not Path(path).parent.joinpath("enough").exists():
            optimizer.zero_grad()
            _loss(module, next(batches)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps.write(b".")
    module.eval()
    with torch.no_grad():
        Path(f"{path}.accuracy").write_text(str(task.evaluate(module)))


# - Around them


def compare(
    job: Job, place: Arena, words: str, before: Sequence[Training], counts: Callable[[], int] | None = None
) -> Comparison:
    """Of what was trained before, and of the seeds that lack there. Bytes too, if they can be counted."""
    trainings = list(before)
    counted = {"begin": 0, "end": 0}

    def follow(line: str) -> None:
        if line in counted:
            counted[line] = counts() if counts else 0
            return
        training = Training.model_validate_json(line)
        trainings.append(training.model_copy(update={"sent_nbytes": counted["end"] - counted["begin"]}))
        last = training.evaluations[-1]
        _say(f"seed {training.seed}  {training.method:34} {last.value:7.2f}  {last.seconds:6.1f} s")

    lacking = tuple(seed for seed in job.seeds if seed not in {training.seed for training in before})
    if lacking:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "job.json"
            job.model_copy(update={"seeds": lacking}).write(path)
            here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
            start(place, Path(__file__).stem, ["worker", str(path)], follow, LIMIT_S, here)
    base = job.methods[0]
    return Comparison(
        task="synchronisation",
        words=words,
        measure=Digits.measure,
        unit=Digits.unit,
        higher_is_better=True,
        place=place.words,
        workers=place.num_workers,
        steps=job.steps,
        base=base,
        trainings=tuple(trainings),
        differences=differences(trainings, base),
        reached=reaches(trainings, base, higher_is_better=True) if job.evaluations > 1 else (),
    )


def trained_before(out: Path | None, job: Job, words: str) -> tuple[Training, ...]:
    """What the file has that is to be written; it must be of the same job, but for the seeds."""
    if out is None or not out.exists():
        return ()
    (comparison,) = Learning.read(out).comparisons
    found = (comparison.words, comparison.steps, set(comparison.methods))
    if found != (words, job.steps, set(job.methods)):
        raise UserError(f"{out} is of another job ({comparison.words}, {comparison.steps} steps): give another --out")
    return comparison.trainings


def seconds_to(training: Training, target: float) -> float:
    return next((each.seconds for each in training.evaluations if each.value >= target), math.inf)


def stragglers(given: argparse.Namespace) -> tuple[Comparison, list[str]]:
    methods = ("lazy", "lazy-ps@ssp:4")
    job = Job(
        methods=methods,
        seeds=_seeds(given, 10),
        steps=given.steps or 120,
        learning_rate=given.learning_rate,
        momentum=given.momentum,
        step_s=given.step_s,
        straggling=True,
        evaluations=30,
    )
    words = f"{job.words}; a step of {given.step_s:g} s is five times as long in a fifth of each worker's steps"
    comparison = compare(job, Loopback(WORKERS, ""), words, trained_before(given.out, job, words))
    by_seed = {(each.method, each.seed): each for each in comparison.trainings}
    ratios, whole, notes = [], [], []
    for seed in sorted({seed for _, seed in by_seed}):
        pair = [by_seed[method, seed] for method in methods]
        took = [seconds_to(each, given.target) for each in pair]
        ratios.append(took[0] / took[1])
        notes.append(f"seed {seed}: {given.target:g} % after {took[0]:.2f} s with lazy, {took[1]:.2f} s with ssp:4")
        ends = [each.evaluations[-1].seconds for each in pair]
        whole.append(ends[0] / ends[1])
    for name, values in (("to the target", ratios), ("for all steps", whole)):
        notes.append(f"BSP's seconds over SSP's, {name}: {_with_interval(Difference.of(values), '.3f')}")
    return comparison, notes


def rounds(given: argparse.Namespace) -> tuple[Comparison, list[str]]:
    methods = ("lazy", *(given.methods or ("lazy@local:8", "lazy@diloco:50")))
    job = Job(
        methods=methods,
        seeds=_seeds(given, 10),
        steps=given.steps or 400,
        learning_rate=given.learning_rate,
        own_rates=_own_rates(given.own_rate, methods),
        optimizer=given.optimizer,
    )
    before = trained_before(given.out, job, job.words)
    with Lab(WORKERS, None) as lab:
        counts = lambda: lab.counters()[0].tx_bytes  # noqa: E731
        comparison = compare(job, LabArena(lab, None), job.words, before, counts)
    sent = {method: statistics.fmean(training.sent_nbytes for training in comparison.of(method)) for method in methods}
    notes = []
    for method in methods[1:]:
        factor, sync = sent["lazy"] / sent[method], Recipe.parse(method).sync
        expected = job.steps / (sync.start + (job.steps - sync.start) / sync.period)
        notes.append(f"{method}: {factor:.2f} times fewer bytes than lazy, {factor / expected:.3f} of {expected:g}")
        difference = comparison.differences[method]
        notes.append(f"{method}: accuracy {_with_interval(difference, '+.3f')} points")
    return comparison, notes


def clouds(given: argparse.Namespace) -> tuple[Comparison, list[str]]:
    methods = (BEST_DDP, "lazy@local:8", "lazy@diloco:50", "lazy@diloco:20:fragments=4:delay=2")
    job = Job(
        methods=methods,
        seeds=_seeds(given, 3),
        steps=given.steps or 300,
        learning_rate=given.learning_rate,
        optimizer=given.optimizer,
        evaluations=30,
    )
    between = parse_rate(given.between)
    before = trained_before(given.out, job, job.words)
    with Lab(WORKERS, parse_rate("1Gbit"), clouds=[[0, 1], [2, 3]], between=between) as lab:
        place = LabArena(lab, None)
        place.words = f"lab, two clouds of two hosts at 1 Gbit/s, joined at {given.between}"
        comparison = compare(job, place, job.words, before)
    notes = []
    for method in methods:
        took = [seconds_to(each, given.target) for each in comparison.of(method)]
        whole = statistics.median(each.evaluations[-1].seconds for each in comparison.of(method))
        notes.append(
            f"{method}: {given.target:g} % after {', '.join(f'{each:.1f}' for each in took)} s, all steps {whole:.1f} s"
        )
    return comparison, notes


def crew(given: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Kills and joins, one after the other, and what is reached; against a crew that nobody disturbs and that takes as
    many steps, all its workers together."""
    found: dict[str, dict[str, object]] = {}
    if given.out and given.out.exists():
        found = json.loads(given.out.read_text())["found"]
    for recipe, seed in itertools.product(given.methods or CREWS, _seeds(given, 1)):
        for times in (given.times, 0):
            name = f"{recipe}, seed {seed}, {'disturbed' if times else 'undisturbed'}"
            if name not in found:
                found[name] = _crew(recipe, times, given.steps or CREW_STEPS, seed)
                _say(f"{name}: {json.dumps(found[name])}")
    return found


def _crew(recipe: str, times: int, steps: int, seed: int) -> dict[str, object]:
    """Until its workers, also those that were killed, have taken `steps` together; kills are spread over them."""
    dice = random.Random(seed)
    store = open_store("127.0.0.1", 0)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(WORKERS),
    }
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        argv = [sys.executable, "-m", "gradientflow", "server", "--job", f"127.0.0.1:{store.port}"]
        servers = [subprocess.Popen(argv, env=environment, **quiet) for _ in range(2)]
        workers: list[tuple[Path, subprocess.Popen]] = []
        number = itertools.count()
        logs = here / "log"

        def add() -> Path:
            path = here / f"worker-{next(number)}"
            argv = [sys.executable, __file__, "member", str(path), str(seed), recipe]
            worker = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=logs.open("a"))
            workers.append((path, worker))
            return path

        def steps_taken() -> int:
            return sum(file.stat().st_size for file in here.glob("*.steps"))

        def wait_until(holds: Callable[[], bool], words: str, limit_s: float = 180.0) -> float:
            began_s = time.monotonic()
            while not holds():
                if time.monotonic() > began_s + limit_s:
                    raise RuntimeError(f"not within {limit_s:g} s: {words}\n{logs.read_text()[-2000:]}")
                time.sleep(0.01)
            return time.monotonic() - began_s

        def wait_for(path: Path, kind: str) -> float:
            """The first step of who comes; the accuracy of who goes."""
            file = path.with_suffix(f".{kind}")
            return wait_until(lambda: file.exists() and file.stat().st_size > 0, f"{file.name} of {recipe}")

        try:
            for path in [add() for _ in range(WORKERS)]:
                wait_for(path, "steps")
            began_s, joined_s = time.monotonic(), []
            for kill in range(times):
                enough = steps * (kill + dice.random()) / times
                wait_until(lambda enough=enough: steps_taken() >= enough, f"step {enough:.0f} of {recipe}")
                _, victim = workers.pop(dice.randrange(len(workers)))
                victim.kill()
                victim.wait()
                joined_s.append(wait_for(add(), "steps"))
            wait_until(lambda: steps_taken() >= steps, f"step {steps} of {recipe}", LIMIT_S)
            (here / "enough").touch()
            accuracies = []
            for path, worker in workers:
                wait_for(path, "accuracy")
                worker.wait(timeout=30)
                accuracies.append(float(path.with_suffix(".accuracy").read_text()))
            taken = steps_taken()
        finally:
            for process in [*(worker for _, worker in workers), *servers]:
                process.kill()
                process.wait()
    return {
        "kills": times,
        "joins": times,
        "steps": taken,
        "seconds": round(time.monotonic() - began_s, 1),
        "slowest_join_s": round(max(joined_s, default=0.0), 2),
        "accuracy": accuracies,
    }


def _own_rates(given: Sequence[str], methods: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        method, _, rate = text.rpartition("=")
        try:
            found[method] = float(rate)
        except ValueError:
            method = ""
        if method not in methods:
            raise UserError(f"--own-rate {text}: write METHOD=RATE, with one of {', '.join(methods)}")
    return found


def _seeds(given: argparse.Namespace, usual: int) -> tuple[int, ...]:
    return tuple(range(given.first_seed, given.first_seed + (given.seeds or usual)))


def _with_interval(found: Difference, form: str) -> str:
    interval = "" if found.low is None else f" ({found.low:{form}} to {found.high:{form}})"
    return f"{found.mean:{form}}{interval}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["stragglers", "rounds", "clouds", "crew"])
    parser.add_argument("--seeds", type=int, help="trainings of each method; 10, of clouds 3, of crew 1")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", help="of rounds: beside lazy; of crew: recipes")
    parser.add_argument("--steps", type=int, help="of each training; of crew: of all workers together")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--own-rate", nargs="+", default=[], help="of rounds: METHOD=RATE, instead of --learning-rate")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="of rounds and clouds")
    parser.add_argument("--momentum", type=float, default=MOMENTUM, help="of stragglers")
    parser.add_argument("--step-s", type=float, default=0.04, help="of stragglers: seconds of a step")
    parser.add_argument("--target", type=float, default=97.0, help="of stragglers and clouds: %% to be reached")
    parser.add_argument("--between", default="50Mbit", help="of clouds: what joins them")
    parser.add_argument("--times", type=int, default=50, help="of crew: kills, and joins")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file; seeds that it has are kept")
    given = parser.parse_args(arguments)
    try:
        if given.out:
            check_writable(given.out)
        began, command = now(), shlex.join(["python", *sys.argv])
        if given.what == "crew":
            found = crew(given)
            print(json.dumps(found, indent=1))
            if given.out:
                told = {"command": command, "started": began, "found": found}
                given.out.write_text(json.dumps(told, indent=1) + "\n")
            return
        comparison, notes = {"stragglers": stragglers, "rounds": rounds, "clouds": clouds}[given.what](given)
        print("\n".join(notes))
        if given.out:
            page = Learning(
                machine=this_machine(), command=command, started=began, notes=tuple(notes), comparisons=(comparison,)
            )
            page.write(given.out)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        be_worker(sys.argv[2])
    elif sys.argv[1:2] == ["member"]:
        be_member(*sys.argv[2:])
    else:
        main()
