"""What a recipe gains in a training that really computes. In a lab, so as root or with user namespaces:

    python benchmarks/training.py [--recipe flow] [--rate 400Mbit] [--steps 200] [--out FILE.json]

Two hosts, a worker on each with one core and one thread of its own, train a small transformer on the source of
Python's standard library, byte by byte, with AdamW. Three copies of it start from the same weights, see the same
batches and take turns in blocks of steps, in one job: one under stock DDP with the best of four bucket sizes, found in
a pilot; one under the recipe; and one that exchanges nothing, which is compute alone. A block's time runs from barrier
to barrier, and what a recipe puts off is finished inside. The first blocks warm up; ratios are taken between blocks of
the same round.

Links have the rate at which a step's bytes take as long as its computing, which is measured first in CPU seconds, so
that other programs do not count; --rate gives another.

Both trainings must learn the same: the losses of each step, mean over workers, are in the file, and the script fails if
they differ by more than one part in ten thousand.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from instrument import Pinned
from torch import nn
from torch.nn.functional import cross_entropy

from gradientflow.bench.arena import LabArena, start
from gradientflow.bench.bakeoff import this_machine
from gradientflow.bench.methods import BUCKETS_MB, Method, method, stock_ddp
from gradientflow.bench.results import Machine, Ratio, Spread
from gradientflow.bench.usage import Usage, usage
from gradientflow.bench.worker import WARM_UP_ITERATIONS, fastest
from gradientflow.documents import Document, Record, check_writable
from gradientflow.errors import UserError
from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.lab import check_rate, format_rate, parse_rate
from gradientflow.lab.limits import goodput
from gradientflow.processes import die_with_parent
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import as_recipe
from gradientflow.rundir import now

WORLD = 2
BATCH, LENGTH = 8, 64
WIDTH, HEADS, LAYERS = 256, 4, 4
BYTES = 256
LEARNING_RATE = 3e-4
PILOT_ROUNDS, PILOT_STEPS = 3, 4
CALIBRATION_STEPS = 12
#: Relative, between the losses of two trainings at the same step.
SAME = 1e-4
TIMEOUT_S = 120.0
JOB_LIMIT_S = 3600.0


class Job(Document):
    """What the workers are told."""

    #: "": measure what computing takes, and nothing else.
    recipe: str
    steps: int
    block: int
    interface: str
    findings: str


class Cost(Record):
    """Of a step."""

    seconds: Spread
    #: Of one worker; the mean over both.
    cpu_s: float
    #: By one worker, packets' headers taken off.
    sent_nbytes: float
    #: To stock DDP, from blocks of the same round.
    to_ddp: Ratio


class Findings(Document):
    compute_s: float
    must_send: float
    parameters: int
    bucket_mb: int = 0
    costs: dict[str, Cost] = {}  # noqa: RUF012 - pydantic copies it
    #: By method, after each step, mean over workers.
    losses: dict[str, tuple[float, ...]] = {}  # noqa: RUF012
    #: Whether both models have the same weights at the end, to the last bit.
    weights_identical: bool = False


class Results(Document):
    machine: Machine
    command: str
    started: str
    #: Bits per second of each link; None: not held to any.
    rate: float | None
    recipe: str
    steps: int
    block: int
    largest_difference_of_losses: float
    found: Findings


# - What is trained


class Transformer(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, width: int = WIDTH, num_layers: int = LAYERS, length: int = LENGTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embed(text) + self.place, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Text:
    """The source of the standard library; batches follow from step and rank alone."""

    def __init__(self, rank: int) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._bytes = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self._rank = rank

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = random.Random(f"{step} {self._rank}")
        starts = [draw.randrange(len(self._bytes) - LENGTH) for _ in range(BATCH)]
        windows = torch.stack([self._bytes[start : start + LENGTH + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]


class Training:
    """One method on a model of its own."""

    def __init__(self, way: Method, text: Text) -> None:
        torch.manual_seed(0)
        self.module = Transformer()
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE)
        self._model = way.wrap(self.module, self._optimizer)
        self._text = text
        self.losses: list[torch.Tensor] = []

    def block(self, steps: int) -> float:
        """Seconds a step. Collective."""
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(steps):
            inputs, targets = self._text.batch(len(self.losses))
            self._optimizer.zero_grad()
            loss = cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.losses.append(loss.detach())
        if isinstance(self._model, DistributedDataParallel):
            self._model.flow.synchronize()
        dist.barrier()
        return (time.perf_counter() - start_s) / steps

    def close(self) -> None:
        if isinstance(self._model, DistributedDataParallel):
            self._model.close()


# - In the workers


def work(job: Job, tell: Callable[[str], None]) -> Findings:
    """Collective; rank 0's are the ones to keep."""
    text = Text(dist.get_rank())
    alone = Training(method("compute"), text)
    tensors = tuple(TensorProfile.of(name, p) for name, p in alone.module.named_parameters())
    must_send = method("ddp").must_send_nbytes(Profile(tensors=tensors), WORLD)
    parameters = sum(tensor.numel for tensor in tensors)
    if not job.recipe:
        alone.block(WARM_UP_ITERATIONS)
        before_s = time.process_time()
        alone.block(CALIBRATION_STEPS)
        compute_s = (time.process_time() - before_s) / CALIBRATION_STEPS
        return Findings(compute_s=compute_s, must_send=must_send, parameters=parameters)
    tell("pilot of bucket sizes")
    bucket_mb = fastest({size_mb: _pilot(size_mb, text) for size_mb in BUCKETS_MB})
    trainings = {
        "compute": alone,
        "ddp": Training(stock_ddp(bucket_mb), text),
        job.recipe: Training(method(job.recipe), text),
    }
    blocks: dict[str, list[tuple[float, Usage]]] = {name: [] for name in trainings}
    for number, done in enumerate(range(0, job.steps, job.block)):
        for name in random.Random(number).sample(list(trainings), len(trainings)):
            before = usage(job.interface)
            seconds = trainings[name].block(job.block)
            blocks[name].append((seconds, usage(job.interface).since(before)))
        tell(f"step {done + job.block} of {job.steps}")
    weights = [torch.cat([p.detach().flatten() for p in t.module.parameters()]) for t in trainings.values()]
    usual = {name: measured[_num_warm_up(job) :] for name, measured in blocks.items()}
    costs = {name: _cost(measured, usual["ddp"], job) for name, measured in usual.items()}
    losses = {name: _mean_losses(trainings[name]) for name in ("ddp", job.recipe)}
    for training in trainings.values():
        training.close()
    return Findings(
        compute_s=costs["compute"].seconds.median,
        must_send=must_send,
        parameters=parameters,
        bucket_mb=bucket_mb,
        costs=costs,
        losses=losses,
        weights_identical=torch.equal(weights[1], weights[2]),
    )


def _pilot(bucket_mb: int, text: Text) -> list[float]:
    pilot = Training(stock_ddp(bucket_mb), text)
    pilot.block(WARM_UP_ITERATIONS)
    return [pilot.block(PILOT_STEPS) for _ in range(PILOT_ROUNDS)]


def _num_warm_up(job: Job) -> int:
    return math.ceil(WARM_UP_ITERATIONS / job.block)


def _cost(measured: list[tuple[float, Usage]], ddp: list[tuple[float, Usage]], job: Job) -> Cost:
    """Collective."""
    cpu_s = statistics.median(used.cpu_s for _, used in measured) / job.block
    sent = statistics.median(used.sent_nbytes for _, used in measured) / job.block
    mean = torch.tensor([cpu_s, sent], dtype=torch.float64) / WORLD
    dist.all_reduce(mean)
    cpu_s, sent = mean.tolist()
    return Cost(
        seconds=Spread.of([seconds for seconds, _ in measured]),
        cpu_s=cpu_s,
        sent_nbytes=sent,
        to_ddp=Ratio.of([ours / theirs for (ours, _), (theirs, _) in zip(measured, ddp, strict=True)]),
    )


def _mean_losses(training: Training) -> tuple[float, ...]:
    """Collective."""
    losses = torch.stack(training.losses).double()
    dist.all_reduce(losses)
    return tuple((losses / WORLD).tolist())


def be_worker(path: str) -> None:
    die_with_parent()
    job = Job.read(path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    first = dist.get_rank() == 0
    found = work(job, lambda words: print(words, flush=True) if first else None)
    if first:
        found.write(job.findings)
    dist.barrier()
    dist.destroy_process_group()


# - Around them


def run(rate: float | None, job: Job) -> Findings:
    with tempfile.TemporaryDirectory() as directory, Pinned(WORLD, rate) as lab:
        if rate is not None:
            check_rate(lab)
        place = LabArena(lab, rate)
        findings, path = Path(directory) / "findings.json", Path(directory) / "job.json"
        job.model_copy(update={"findings": str(findings), "interface": place.interface}).write(path)
        here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
        start(place, Path(__file__).stem, ["worker", str(path)], _say, JOB_LIMIT_S, here)
        return Findings.read(findings)


def _say(words: str) -> None:
    print(words, file=sys.stderr)


def chosen_rate(job: Job) -> float:
    """At which a step's bytes take as long as its computing, to two digits."""
    found = run(None, job.model_copy(update={"recipe": ""}))
    payload = 8 * found.must_send / found.compute_s
    rate = float(f"{payload / goodput(1.0):.2g}")
    _say(
        f"a step computes {1e3 * found.compute_s:.0f} ms and sends {found.must_send / 1e6:.1f} MB: {format_rate(rate)}"
    )
    return rate


def compare(given: argparse.Namespace) -> Results:
    began = now()
    recipe = str(as_recipe(given.recipe))
    job = Job(recipe=recipe, steps=given.steps, block=given.block, interface="", findings="")
    rate = parse_rate(given.rate) if given.rate else chosen_rate(job)
    found = run(rate, job)
    pairs = zip(found.losses["ddp"], found.losses[recipe], strict=True)
    return Results(
        machine=this_machine(),
        command=shlex.join(["python", *sys.argv]),
        started=began,
        rate=rate,
        recipe=recipe,
        steps=given.steps,
        block=given.block,
        largest_difference_of_losses=max(abs(theirs - ours) / theirs for theirs, ours in pairs),
        found=found,
    )


def show(results: Results) -> None:
    found = results.found
    print(
        f"{found.parameters / 1e6:.2f} M parameters, {WORLD} workers, links of {format_rate(results.rate)}, "
        f"{results.steps} steps in blocks of {results.block}; DDP's buckets: {found.bucket_mb} MB"
    )
    for name, cost in found.costs.items():
        ratio = cost.to_ddp
        print(
            f"{name:10} {1e3 * cost.seconds.median:7.1f} ms a step   to ddp {ratio.median:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f})   CPU {1e3 * cost.cpu_s:.0f} ms   "
            f"sent {cost.sent_nbytes / 1e6:.2f} MB"
        )
    losses, same = found.losses[results.recipe], "identical" if found.weights_identical else "not identical"
    print(
        f"loss {losses[0]:.4f} at first and {losses[-1]:.4f} at last; largest difference between the two trainings "
        f"{results.largest_difference_of_losses:.1e} of it; weights at the end {same}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="flow", help="what is compared with DDP")
    parser.add_argument("--rate", help="of each link, such as 400Mbit; without it, chosen by what computing takes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--block", type=int, default=20, help="steps of one training before it is another's turn")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    given = parser.parse_args()
    try:
        if given.block < 1 or given.steps < 3 * given.block or given.steps % given.block:
            raise UserError("--steps must be three or more whole blocks")
        if given.out:
            check_writable(given.out)
        results = compare(given)
    except UserError as error:
        parser.error(str(error))
    show(results)
    if given.out:
        results.write(given.out)
    if not results.largest_difference_of_losses <= SAME:
        sys.exit("the two trainings did not learn the same")


if __name__ == "__main__":
    be_worker(sys.argv[2]) if sys.argv[1:2] == ["worker"] else main()
