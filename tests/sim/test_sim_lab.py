"""Our own bake-offs, foretold from their probes: exact methods that processors did not limit."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from gradientflow.bench.predicted import Foreteller, Foretold, ddp_buckets, foretell
from gradientflow.bench.results import Conditions, Results
from gradientflow.lab.workloads import load

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def found(*names: str) -> list[Foretold]:
    return [one for name in names for one in foretell(Results.read(RESULTS / f"2026-11-16-{name}.json"))]


def test_what_waits_for_the_network_is_foretold() -> None:
    """A ratchet on what was reached."""
    slow = ("resnet-50-100mbit-ablation", "resnet-50-100mbit-gradientflow")
    compared = found("ddp-against-ddp", "resnet-50-1gbit", *slow)
    coded = ("gradientflow", "ddp-fp16", "ddp-bf16")
    exact = [one for one in compared if "+" not in one.method and one.method not in coded]
    assert len(compared) == 18 and len(exact) == 11
    errors = [abs(one.error) for one in exact if not one.cpu_bound]
    assert statistics.median(errors) < 0.045 and max(errors) < 0.08


def test_ddp_buckets_of_a_given_size_are_all_of_it() -> None:
    """As timelines show: with 25 MB given, 15 MB are one bucket, not one of 1 MB and the rest."""
    profile = load("resnet-50", compute_s=0.2, scale=0.15)
    assert len(ddp_buckets(profile).messages) == 1
    messages = ddp_buckets(profile, ["buckets of 5 MB"]).messages
    sizes = [4 * sum(piece.numel for piece in message.slices) for message in messages]
    assert len(sizes) == 3 and min(sizes[:-1]) >= 5 * 2**20


def test_stragglers_are_counted_once() -> None:
    """Computing alone is as slow as the slowest rank, so what is foretold of a method whose bytes hide behind computing
    stays what it was."""
    even = Results.read(RESULTS / "2026-11-18-resnet-50-1gbit-compute-4.json")
    uneven = even.model_copy(update={"conditions": Conditions(slowdown={1: 1.5})})
    seconds = [Foreteller(results).seconds("flow") for results in (even, uneven)]
    assert seconds[0] is not None
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)


def test_what_auto_will_choose_is_not_foretold() -> None:
    results = Results.read(RESULTS / "2026-11-18-resnet-50-1gbit-compute-4.json")
    assert Foreteller(results).seconds("auto") is None
