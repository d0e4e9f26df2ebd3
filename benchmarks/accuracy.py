"""What compression costs in accuracy and what it gains in time, by trainings that are real.

    python benchmarks/accuracy.py --task digits text --out FILE.json     four workers on this machine's loopback
    python benchmarks/accuracy.py --task time --out FILE.json            four hosts of a lab, so as root or with user
                                                                         namespaces

digits: a CNN of 0.62 M parameters on half of scikit-learn's digits; how many of the other half it reads right.
wide: an MLP without biases on the same digits; its loss on the other half. By a thousandth of the bytes, with and
without a guard.
text: a small transformer on the source of Python's standard library, byte by byte; its loss on files held out.
Both are trained with momentum SGD, by each of five methods: dense, by coarse-grained sparse communication (10 % of the
gradients, fp16), and by that without momentum correction, without warm-up, without both; or, with --recipes, dense and
by each of those (say `always`: on a loopback no codec pays). All trainings of a seed start
from the same weights, see the same batches and have the same learning rates; what is reported is the mean difference
to dense over seeds. Warm-up is a tenth of the steps.

time: the digits again, on links of --rate. Stock DDP with the best of four bucket sizes, found in a pilot, is trained
to the end, and then the recipe `gradientflow`, each alone, the latter for twice as many steps, over which its learning
rate falls: it takes less time even so. Accuracy is noted by second and step, with the clock stopped
while it is found. Dense accuracy is the mean of DDP's last three evaluations; the time to it ends with the first
evaluation that reaches it.

`gradientflow report FILE.json` makes a page of it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from training import Transformer

from gradientflow.bench.arena import Arena, LabArena, Loopback, start
from gradientflow.bench.bakeoff import this_machine
from gradientflow.bench.digits import Batch, batches_of_rank, build_reader, load_digits
from gradientflow.bench.learning import Comparison, Evaluation, Learning, Training, differences, reaches
from gradientflow.bench.methods import BUCKETS_MB, stock_ddp
from gradientflow.bench.worker import WARM_UP_ITERATIONS, fastest
from gradientflow.documents import Document, check_writable
from gradientflow.errors import UserError
from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.lab import Lab, check_rate, parse_rate
from gradientflow.processes import die_with_parent
from gradientflow.recipe import as_recipe
from gradientflow.rundir import now

MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
#: Of the steps: how long learning rates rise, and how long csc takes to reach its density.
WARM_UP = 0.1
DENSE, BEST_DDP, WHOLE = "dense", "ddp-best", "gradientflow"
MANY_EPOCHS = 1_000_000
DEFAULT_SEEDS = {"digits": 10, "text": 10, "wide": 10, "time": 3}
DEFAULT_STEPS = {"digits": 300, "text": 300, "wide": 400, "time": 200}
TIME_EVALUATIONS = 40
#: In the race for time: how many steps the recipe has for each of DDP's.
STEPS_OF_WHOLE = 2
PILOT_STEPS = 6
TIMEOUT_S = 120.0
JOB_LIMIT_S = 3600.0


# - What is trained


class Task(Protocol):
    words: str
    measure: str
    unit: str
    higher_is_better: bool
    learning_rate: float

    def build(self, seed: int) -> nn.Module:
        """With weights that follow from the seed."""

    def batches(self, seed: int, rank: int, world: int) -> Iterator[Batch]:
        """A rank's own, without end."""

    def evaluate(self, model: nn.Module) -> float:
        """On data that is not trained on."""


class Digits:
    words = "CNN of 0.62 M parameters, half of the digits held out"
    measure, unit, higher_is_better = "test accuracy", "points", True
    learning_rate = 0.01
    batch = 8
    num_test = 898

    def __init__(self) -> None:
        self._data = load_digits(self.num_test)

    def build(self, seed: int) -> nn.Module:
        return build_reader(seed)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[Batch]:
        return batches_of_rank(
            self._data.train, epochs=MANY_EPOCHS, batch=self.batch * world, rank=rank, world=world, seed=seed
        )

    def evaluate(self, model: nn.Module) -> float:
        images, labels = self._data.test
        return 100.0 * float((model(images).argmax(dim=1) == labels).float().mean())


class Wide(Digits):
    """Nearly everything is in matrices, so that a codec that leaves biases alone can reach any ratio."""

    words = "MLP of 1.1 M parameters without biases, half of the digits held out"
    measure, unit, higher_is_better = "held-out loss", "nats", False
    learning_rate = 0.02
    width = 1024

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [(64, self.width), (self.width, self.width), (self.width, 10)]
        parts = [part for layer in layers for part in (nn.Linear(*layer, bias=False), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *parts[:-1])

    def evaluate(self, model: nn.Module) -> float:
        images, labels = self._data.test
        return float(cross_entropy(model(images), labels))


class Text:
    words = "transformer of 2 layers, width 96, on bytes of Python's standard library; every tenth file held out"
    measure, unit, higher_is_better = "held-out loss", "nats", False
    learning_rate = 0.03
    width, num_layers, length = 96, 2, 64
    batch = 4
    num_test = 96

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._train = _joined([file for number, file in enumerate(files) if number % 10])
        held_out = _joined(files[::10])
        apart = (len(held_out) - self.length) // self.num_test
        self._test = self._windows(held_out, range(0, apart * self.num_test, apart))

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Transformer(self.width, self.num_layers, self.length)

    def batches(self, seed: int, rank: int, world: int) -> Iterator[Batch]:
        draw = random.Random(f"{seed} {rank}")
        last = len(self._train) - self.length
        while True:
            yield self._windows(self._train, [draw.randrange(last) for _ in range(self.batch)])

    def evaluate(self, model: nn.Module) -> float:
        return float(_loss(model, self._test))

    def _windows(self, text: torch.Tensor, starts: range | list[int]) -> Batch:
        windows = torch.stack([text[first : first + self.length + 1] for first in starts]).long()
        return windows[:, :-1], windows[:, 1:]


def _joined(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


TASKS: dict[str, type[Task]] = {"digits": Digits, "text": Text, "wide": Wide, "time": Digits}


# - In the workers


class Job(Document):
    """What the workers are told."""

    task: str
    seeds: int
    first_seed: int = 0
    steps: int
    learning_rate: float
    #: Beside dense; (): coarse-grained sparse communication and what it is made of.
    recipes: tuple[str, ...] = ()

    @property
    def methods(self) -> dict[str, str]:
        """Recipes by name; the first is what others are compared with."""
        warm_up = f"warmup={round(WARM_UP * self.steps)}"
        if self.task == "time":
            return {BEST_DDP: BEST_DDP, WHOLE: f"{WHOLE}:10%:{warm_up}"}
        if self.task == "wide" and not self.recipes:
            sparse, guarded = "lazy+topk:always:0.05%", "lazy+topk:always:0.02%:guard=1%"
            return {
                DENSE: "lazy",
                "1000x": f"{sparse}:warmup=0",
                "1000x, warm-up": f"{sparse}:{warm_up}",
                "guard": guarded,
            }
        if self.recipes:
            return {DENSE: "lazy", **{recipe: recipe for recipe in self.recipes}}
        csc = "lazy-ring+csc:always:10%"
        return {
            DENSE: "lazy",
            "csc": f"{csc}:{warm_up}+fp16",
            "csc, no momentum correction": f"{csc}:{warm_up}:uncorrected+fp16",
            "csc, no warm-up": f"{csc}:warmup=0+fp16",
            "csc, neither": f"{csc}:warmup=0:uncorrected+fp16",
        }


Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]


class Trained:
    """A model under one method."""

    def __init__(self, task: Task, seed: int, job: Job, wrap: Wrap) -> None:
        self._module = task.build(seed)
        self._optimizer = torch.optim.SGD(
            self._module.parameters(), job.learning_rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        self._rates = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, job.learning_rate, total_steps=job.steps, pct_start=WARM_UP, cycle_momentum=False
        )
        self._model = wrap(self._module, self._optimizer)
        self._batches = task.batches(seed, dist.get_rank(), dist.get_world_size())
        self._task = task

    def train(self, steps: int) -> float:
        """Seconds, from barrier to barrier. Collective."""
        self._module.train()
        dist.barrier()
        start_s = time.perf_counter()
        for batch in itertools.islice(self._batches, steps):
            self._optimizer.zero_grad()
            _loss(self._model, batch).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._rates.step()
        dist.barrier()
        return time.perf_counter() - start_s

    @torch.no_grad()
    def evaluate(self) -> float:
        """On rank 0; the others have the same weights."""
        self._module.eval()
        return self._task.evaluate(self._module) if dist.get_rank() == 0 else math.nan

    def compression(self) -> float:
        """Of the gradients' bytes, how many times less this rank had to say in the second half of the steps."""
        if not isinstance(self._model, DistributedDataParallel):
            return 0.0
        said: dict[int, float] = {}
        for span in self._model.flow.trace().of_kind("message"):
            said[span.step] = said.get(span.step, 0.0) + span.args["nbytes"]
        late = [said[step] for step in sorted(said)[len(said) // 2 :]]
        return len(late) * sum(p.nbytes for p in self._module.parameters()) / sum(late)

    def close(self) -> None:
        if isinstance(self._model, DistributedDataParallel):
            self._model.close()


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def work(job: Job, tell: Callable[[Training], None]) -> None:
    """Collective."""
    task = TASKS[job.task]()
    num_evaluations = min(job.steps, TIME_EVALUATIONS) if job.task == "time" else 1
    bucket_mb = fastest({size_mb: _pilot(size_mb, task, job) for size_mb in BUCKETS_MB}) if job.task == "time" else 0
    for seed in range(job.first_seed, job.first_seed + job.seeds):
        for name, recipe in job.methods.items():
            wrap = stock_ddp(bucket_mb).wrap if name == BEST_DDP else _under(recipe)
            steps = job.steps * (STEPS_OF_WHOLE if name == WHOLE else 1)
            trained = Trained(task, seed, job.model_copy(update={"steps": steps}), wrap)
            evaluations, seconds, done = [], 0.0, 0
            for number in range(num_evaluations):
                until = steps * (number + 1) // num_evaluations
                seconds += trained.train(until - done)
                done = until
                evaluations.append(Evaluation(step=done, seconds=seconds, value=trained.evaluate()))
            compression = trained.compression()
            trained.close()
            words = f"stock DDP, buckets of {bucket_mb} MB" if name == BEST_DDP else recipe
            found = {"evaluations": tuple(evaluations), "compression": compression}
            tell(Training(method=name, recipe=words, seed=seed, **found))


def _under(recipe: str) -> Wrap:
    return lambda module, optimizer: DistributedDataParallel(
        module, recipe=recipe, optimizer=optimizer, gradient_as_bucket_view=True
    )


def _pilot(bucket_mb: int, task: Task, job: Job) -> list[float]:
    pilot = Trained(
        task, 0, job.model_copy(update={"steps": WARM_UP_ITERATIONS + PILOT_STEPS}), stock_ddp(bucket_mb).wrap
    )
    pilot.train(WARM_UP_ITERATIONS)
    return [pilot.train(1) for _ in range(PILOT_STEPS)]


def be_worker(path: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    first = dist.get_rank() == 0
    work(Job.read(path), lambda training: print(training.model_dump_json(), flush=True) if first else None)
    dist.barrier()
    dist.destroy_process_group()


# - Around them


def compare(job: Job, place: Arena) -> Comparison:
    trainings: list[Training] = []

    def follow(line: str) -> None:
        training = Training.model_validate_json(line)
        trainings.append(training)
        last = training.evaluations[-1]
        _say(f"seed {training.seed}  {training.method:28} {last.value:8.3f}  {last.seconds:6.1f} s")

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "job.json"
        job.write(path)
        here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
        start(place, Path(__file__).stem, ["worker", str(path)], follow, JOB_LIMIT_S, here)
    task, base = TASKS[job.task], next(iter(job.methods))
    timed = job.task == "time"
    return Comparison(
        task=job.task,
        words=f"{task.words}; momentum SGD, learning rate {job.learning_rate:g}",
        measure=task.measure,
        unit=task.unit,
        higher_is_better=task.higher_is_better,
        place=place.words,
        workers=place.num_workers,
        steps=job.steps,
        base=base,
        trainings=tuple(trainings),
        differences=differences(trainings, base),
        reached=reaches(trainings, base, higher_is_better=task.higher_is_better) if timed else (),
    )


@contextlib.contextmanager
def _place(task: str, num_workers: int, rate: float | None) -> Iterator[Arena]:
    if task != "time":
        yield Loopback(num_workers, "")
        return
    with Lab(num_workers, rate) as lab:
        if rate is not None:
            check_rate(lab)
        yield LabArena(lab, rate)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def show(comparison: Comparison) -> None:
    print(
        f"{comparison.task}: {comparison.words}; {comparison.workers} workers, {comparison.place}, "
        f"{comparison.steps} steps, {len(comparison.of(comparison.base))} seeds"
    )
    for method in comparison.methods:
        mean = statistics.fmean(training.last for training in comparison.of(method))
        words = f"{method:28} {mean:8.3f} {comparison.unit}"
        words += f"  {statistics.fmean(training.compression for training in comparison.of(method)):7.1f}x"
        if method in comparison.differences:
            difference = comparison.differences[method]
            words += f"   {difference.mean:+.3f}"
            if difference.low is not None:
                words += f" ({difference.low:+.3f} to {difference.high:+.3f})"
        print(words)
    for reach in comparison.reached:
        when = f"{reach.seconds:.1f} s, step {reach.step}" if reach.seconds is not None else "not reached"
        print(f"seed {reach.seed}  {reach.method:28} {reach.target:.2f} {comparison.unit}: {when}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=sorted(TASKS), default=["digits", "text"])
    parser.add_argument("--seeds", type=int, help="trainings of each method; 10, for time 3")
    parser.add_argument("--first-seed", type=int, default=0, help="to go on where another run ended")
    parser.add_argument("--steps", type=int, help="of each training; 300, for time 200")
    parser.add_argument("--learning-rate", type=float, help="the highest, of all methods; 0.01, for text 0.03")
    parser.add_argument("--recipes", nargs="+", default=[], help="to compare with dense, instead of csc's parts")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="100Mbit", help="of each host's link, for time")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file, after each task anew")
    given = parser.parse_args()
    try:
        for name, least in (("seeds", 1), ("steps", 1), ("workers", 2)):
            if getattr(given, name) is not None and getattr(given, name) < least:
                raise UserError(f"--{name} must be {least} or more")
        if given.learning_rate is not None and not 0 < given.learning_rate < math.inf:
            raise UserError("--learning-rate must be above 0")
        if given.out:
            check_writable(given.out)
        began, comparisons = now(), []
        for task in dict.fromkeys(given.task):
            job = Job(
                task=task,
                seeds=given.seeds or DEFAULT_SEEDS[task],
                first_seed=given.first_seed,
                steps=given.steps or DEFAULT_STEPS[task],
                learning_rate=given.learning_rate or TASKS[task].learning_rate,
                recipes=tuple(str(as_recipe(recipe)) for recipe in given.recipes),
            )
            with _place(task, given.workers, parse_rate(given.rate)) as place:
                comparisons.append(compare(job, place))
            show(comparisons[-1])
            if given.out:
                command = shlex.join(["python", *sys.argv])
                Learning(machine=this_machine(), command=command, started=began, comparisons=tuple(comparisons)).write(
                    given.out
                )
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    be_worker(sys.argv[2]) if sys.argv[1:2] == ["worker"] else main()
