"""Our own bake-offs, foretold from their probes: exact methods that processors did not limit."""

from __future__ import annotations

import statistics
from pathlib import Path

from gradientflow.bench.predicted import Foretold, foretell
from gradientflow.bench.results import Results

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
