"""Trains the same model by several methods in one job, block by block in turn, and compares them.

    python -m gradientflow.bench.side_by_side --recipe lazy --epochs 12 --out DIR --interface lo --num-sharing 4

A round trains each method on the same few batches, one method after the other; who begins moves on with
each round. So a slow moment of the machine meets all methods alike. A block's time runs from barrier to
barrier: workers that share a core do not advance evenly, and a single step's time on one of them would
say little. Compute alone (no exchange at all, on a copy that is thrown away) is one of the methods, so
exposed communication is measured the same way for the others: their iteration time less its own.

Rank 0 writes its progress to stdout, a JSON object a line, and the comparison to `DIR/comparison.json`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradientflow.bench.digits import Batch, Digits, batches_of_rank, build_reader, load_digits
from gradientflow.bench.usage import sent_nbytes
from gradientflow.bench.worker import Progress
from gradientflow.documents import Document, Record
from gradientflow.processes import die_with_parent
from gradientflow.runtime.attach import attach

#: Images a step over all workers; constant, so that the number of workers does not change what is learnt.
BATCH = 128
BLOCK_STEPS = 4
#: DDP lays its buckets out anew after the first step, a flow its pool; neither is what a step costs.
WARM_UP_ROUNDS = 2

LEARNING_RATE = 0.05
TIMEOUT_S = 120.0


class Cost(Record):
    """What a step of a method takes."""

    #: Median over blocks.
    iteration_s: float
    #: By one worker, packets' headers taken off, the barriers around a block included. The least over blocks, since
    #: other programs' traffic can only add to it.
    sent_nbytes: float


class Score(Cost):
    """What a method takes, and what its model has learnt."""

    test_accuracy: float
    #: Mean over all images of the training set, after the last step.
    train_loss: float


class Comparison(Document):
    """`comparison.json`."""

    recipe: str
    world: int
    epochs: int
    steps: int
    parameters: int
    compute_only: Cost
    ddp: Score
    gradientflow: Score


class Wire(NamedTuple):
    """What carries a worker's traffic, and how many workers share it."""

    interface: str
    num_sharing: int


class _Block(NamedTuple):
    """Some steps of one method, per step."""

    seconds: float
    sent_nbytes: float


class _Method:
    """A model in training, and what its blocks took."""

    def __init__(self) -> None:
        self.model = build_reader()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.forward = self.model
        self.blocks: list[_Block] = []

    def train_block(self, batches: Sequence[Batch], wire: Wire) -> None:
        """Collective."""
        dist.barrier()
        sent_before, start_s = sent_nbytes(wire.interface), time.perf_counter()
        for images, labels in batches:
            self.optimizer.zero_grad()
            cross_entropy(self.forward(images), labels).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        dist.barrier()
        seconds, sent = time.perf_counter() - start_s, sent_nbytes(wire.interface) - sent_before
        self.blocks.append(_Block(seconds / len(batches), sent / len(batches) / wire.num_sharing))

    def cost(self) -> Cost:
        blocks = self.blocks[WARM_UP_ROUNDS:] or self.blocks[-1:]
        return Cost(
            iteration_s=statistics.median(block.seconds for block in blocks),
            sent_nbytes=min(block.sent_nbytes for block in blocks),
        )

    def score(self, data: Digits) -> Score:
        accuracy, _ = _evaluate(self.model, data.test)
        _, loss = _evaluate(self.model, data.train)
        return Score(**dict(self.cost()), test_accuracy=accuracy, train_loss=loss)


def compare(recipe: str, epochs: int, wire: Wire, report: Callable[[Progress], None]) -> Comparison:
    """Collective, in an initialised process group. Rank 0's return value is the one to keep."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load_digits()
    batches = list(batches_of_rank(data.train, epochs=epochs, batch=BATCH, rank=rank, world=world))
    methods = compute_only, ddp, gradientflow = _Method(), _Method(), _Method()
    ddp.forward = DistributedDataParallel(ddp.model)
    with attach(gradientflow.model, gradientflow.optimizer, recipe, deadline_s=TIMEOUT_S):
        for number, start in enumerate(range(0, len(batches), BLOCK_STEPS)):
            block = batches[start : start + BLOCK_STEPS]
            for turn in range(len(methods)):
                methods[(number + turn) % len(methods)].train_block(block, wire)
            report(Progress(done=start + len(block), total=len(batches), words="training on digits"))
    return Comparison(
        recipe=recipe,
        world=world,
        epochs=epochs,
        steps=len(batches),
        parameters=sum(parameter.numel() for parameter in ddp.model.parameters()),
        compute_only=compute_only.cost(),
        ddp=ddp.score(data),
        gradientflow=gradientflow.score(data),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("--num-sharing", type=int, required=True)
    given = parser.parse_args()
    wire = Wire(given.interface, given.num_sharing)
    die_with_parent()
    # Workers share the machine's cores; more threads would only get into each other's way.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    try:
        first = dist.get_rank() == 0
        comparison = compare(given.recipe, given.epochs, wire, _print_progress if first else _stay_silent)
        if first:
            comparison.write(given.out / "comparison.json")
    finally:
        dist.destroy_process_group()


def _print_progress(progress: Progress) -> None:
    print(progress.model_dump_json(), flush=True)


def _stay_silent(progress: Progress) -> None:
    pass


@torch.no_grad()
def _evaluate(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Accuracy and mean loss."""
    images, labels = batch
    model.eval()
    outputs = model(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    return accuracy, cross_entropy(outputs, labels).item()


if __name__ == "__main__":
    main()
