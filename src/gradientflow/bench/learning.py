"""What a training learnt and how long it took, by method: the file that `benchmarks/accuracy.py` writes.

Methods are compared in pairs: trainings of one seed start from the same weights and see the same batches, so that what
differs between them is the method, and differences vary much less than the trainings themselves do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pydantic import Field

from gradientflow.bench.results import Machine
from gradientflow.documents import Document, Record

#: At the end of a training: their mean is what it has reached.
LAST_EVALUATIONS = 3


class Evaluation(Record):
    """After so many steps and seconds of training; evaluating itself is not counted."""

    step: int
    seconds: float
    value: float


class Training(Record):
    """One method from the first step to the last."""

    method: str
    recipe: str
    seed: int
    evaluations: tuple[Evaluation, ...] = Field(min_length=1)
    #: Of the gradients' bytes, how many times less a rank had to say in the second half of the steps; 0: not known.
    compression: float = 0.0
    #: By one worker's host, as its interface counts; 0: not known.
    sent_nbytes: float = 0.0

    @property
    def last(self) -> float:
        return self.evaluations[-1].value

    @property
    def settled(self) -> float:
        """A last evaluation may be a lucky one.

        >>> values = [Evaluation(step=step, seconds=step, value=value) for step, value in enumerate([9, 4, 5, 6])]
        >>> Training(method="ddp", recipe="", seed=0, evaluations=values).settled
        5.0
        """
        return statistics.fmean(evaluation.value for evaluation in self.evaluations[-LAST_EVALUATIONS:])


class Difference(Record):
    """The mean of paired differences, and the interval that covers the true one in 95 of 100 experiments, as Student's
    distribution has it; a single pair has none."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference:
        """
        >>> found = Difference.of([1.0, 2.0, 3.0])
        >>> found.mean, round(found.low, 3), round(found.high, 3)
        (2.0, -0.484, 4.484)
        """
        mean, n = statistics.fmean(values), len(values)
        if n == 1:
            return cls(mean=mean, low=None, high=None, n=n)
        half = student_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
        return cls(mean=mean, low=mean - half, high=mean + half, n=n)


class Reach(Record):
    """When a training first was as good as the base of its seed is in the end; None: never."""

    method: str
    seed: int
    target: float
    step: int | None
    seconds: float | None


class Comparison(Record):
    """Of several methods at one task."""

    task: str
    #: What is trained, and how.
    words: str
    #: What is evaluated, in which unit.
    measure: str
    unit: str
    higher_is_better: bool
    place: str
    workers: int
    steps: int
    #: The method that others are compared with.
    base: str
    trainings: tuple[Training, ...] = Field(min_length=1)
    #: To the base, by method, of last evaluations.
    differences: dict[str, Difference]
    reached: tuple[Reach, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(training.method for training in self.trainings))

    def of(self, method: str) -> list[Training]:
        return [training for training in self.trainings if training.method == method]


class Learning(Document):
    machine: Machine
    command: str
    started: str
    notes: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = Field(min_length=1)


def differences(trainings: Sequence[Training], base: str) -> dict[str, Difference]:
    """To the base's training of the same seed, where there is one."""
    bases = {training.seed: training.last for training in trainings if training.method == base}
    pairs: dict[str, list[float]] = {}
    for training in trainings:
        if training.method != base and training.seed in bases:
            pairs.setdefault(training.method, []).append(training.last - bases[training.seed])
    return {method: Difference.of(values) for method, values in pairs.items()}


def reaches(trainings: Sequence[Training], base: str, *, higher_is_better: bool) -> tuple[Reach, ...]:
    """Of every training whose seed the base was trained with, the base's own included."""
    targets = {training.seed: training.settled for training in trainings if training.method == base}
    return tuple(
        _reach(training, targets[training.seed], higher_is_better) for training in trainings if training.seed in targets
    )


def _reach(training: Training, target: float, higher_is_better: bool) -> Reach:
    sign = 1.0 if higher_is_better else -1.0
    first = next((each for each in training.evaluations if sign * (each.value - target) >= 0), None)
    return Reach(
        method=training.method,
        seed=training.seed,
        target=target,
        step=first.step if first else None,
        seconds=first.seconds if first else None,
    )


def student_quantile(freedom: int) -> float:
    """Between plus and minus this lie 95 % of Student's distribution with `freedom` degrees.

    >>> [round(student_quantile(freedom), 3) for freedom in (1, 2, 9, 30)]
    [12.706, 4.303, 2.262, 2.042]
    """
    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < 0.95 else (low, middle)
    return high


def _share_within(bound: float, freedom: int) -> float:
    """Of Student's distribution, between -bound and bound; a finite sum of cosines for whole degrees of freedom."""
    angle = math.atan(bound / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * number / (number + 1)
    share = total * math.sin(angle)
    return 2 / math.pi * (angle + share) if odd else share
