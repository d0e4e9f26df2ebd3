"""Differences with their intervals, and times to an accuracy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from gradientflow.bench.learning import Difference, Training, differences, reaches, student_quantile


def training(method: str, seed: int, values: Sequence[float], step_s: float = 1.0) -> Training:
    points = [{"step": 10 * n, "seconds": 10 * n * step_s, "value": value} for n, value in enumerate(values, start=1)]
    return Training.model_validate({"method": method, "recipe": method, "seed": seed, "evaluations": points})


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (11, 2.2010), (29, 2.0452), (120, 1.9799)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=5e-5)


def test_an_interval_is_the_mean_and_as_many_standard_errors_to_both_sides() -> None:
    found = Difference.of([0.1, -0.3, 0.2, 0.4])
    error = math.sqrt(sum((value - 0.1) ** 2 for value in (0.1, -0.3, 0.2, 0.4)) / 3) / 2
    assert found.mean == pytest.approx(0.1) and found.n == 4
    assert found.low == pytest.approx(0.1 - 3.1824 * error, abs=1e-4)
    assert found.high == pytest.approx(0.1 + 3.1824 * error, abs=1e-4)


def test_intervals_cover_the_true_mean_in_95_of_100_experiments() -> None:
    draw, covered = random.Random(0), 0
    for _ in range(2000):
        found = Difference.of([draw.gauss(1.0, 3.0) for _ in range(5)])
        assert found.low is not None and found.high is not None
        covered += found.low <= 1.0 <= found.high
    assert 0.935 <= covered / 2000 <= 0.965


def test_one_pair_has_no_interval() -> None:
    assert Difference.of([0.5]) == Difference(mean=0.5, low=None, high=None, n=1)


def test_differences_are_between_trainings_of_one_seed() -> None:
    trainings = [
        training("dense", 0, [90.0, 99.0]),
        training("csc", 0, [10.0, 98.0]),
        training("csc", 1, [95.0]),
        training("dense", 1, [95.5]),
        training("csc", 2, [1.0]),  # nothing to compare it with
    ]
    found = differences(trainings, "dense")
    assert list(found) == ["csc"]
    assert (found["csc"].mean, found["csc"].n) == (-0.75, 2)


def test_the_time_to_accuracy_ends_with_the_first_evaluation_that_reaches_it() -> None:
    trainings = [
        training("ddp", 0, [50.0, 90.0, 96.0, 95.0, 97.0], step_s=0.3),
        training("csc", 0, [40.0, 95.9, 96.0, 94.0, 96.5], step_s=0.1),
        training("csc", 1, [99.0]),
    ]
    base, csc = reaches(trainings, "ddp", higher_is_better=True)
    assert (base.target, base.step, base.seconds) == (96.0, 30, pytest.approx(9.0))
    assert (csc.target, csc.step, csc.seconds) == (96.0, 30, pytest.approx(3.0))


def test_what_is_not_reached_has_no_time() -> None:
    trainings = [training("ddp", 0, [2.0, 1.0, 1.0, 1.0]), training("csc", 0, [3.0, 1.5]), training("dgc", 0, [0.5])]
    base, csc, dgc = reaches(trainings, "ddp", higher_is_better=False)
    assert (base.step, dgc.step) == (20, 10)
    assert csc.step is None and csc.seconds is None
