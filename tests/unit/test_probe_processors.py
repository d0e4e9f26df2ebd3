"""What exchanging takes of processors, as a probe counts it."""

from __future__ import annotations

import pytest

from gradientflow.probe import processors
from gradientflow.probe.processors import IDLE_S, counted_s, encoding


class Machine:
    """A clock, and processors' seconds: other programs always take half a core, and two whole ones for a moment."""

    def __init__(self, burst: tuple[float, float]) -> None:
        self.now_s = self.busy_s = 0.0
        self._burst = burst

    def machine_s(self) -> tuple[float, float]:
        return self.busy_s, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.spend(seconds, 0.0)

    def spend(self, seconds: float, ours: float) -> None:
        begin, end = self._burst
        overlap_s = max(0.0, min(end, self.now_s + seconds) - max(begin, self.now_s))
        self.busy_s += ours + 0.5 * seconds + 2.0 * overlap_s
        self.now_s += seconds


@pytest.mark.parametrize("burst", [(0.0, 0.0), (0.0, 0.5), (1.0, 2.1), (2.5, 2.6)])
def test_what_others_do_for_a_moment_is_not_coun(monkeypatch: pytest.MonkeyPatch, burst: tuple[float, float]) -> None:
    machine = Machine(burst)
    monkeypatch.setattr(processors, "machine_s", machine.machine_s)
    monkeypatch.setattr(processors, "time", machine)
    found_s = counted_s(lambda: machine.spend(0.01, ours=0.004), 250)
    assert found_s == pytest.approx(250 * 0.004)
    assert machine.now_s == pytest.approx(250 * 0.01 + processors.STRETCHES * IDLE_S)


def test_few_repeats_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine((0.0, 0.0))
    monkeypatch.setattr(processors, "machine_s", machine.machine_s)
    monkeypatch.setattr(processors, "time", machine)
    assert counted_s(lambda: machine.spend(0.1, ours=0.02), 7) == pytest.approx(7 * 0.02)
    assert machine.now_s == pytest.approx(0.7 + IDLE_S)


@pytest.mark.parametrize("word", ["bf16", "int8"])
def test_codecs_are_run_on_several_messages(word: str) -> None:
    found = encoding(word, 4)
    assert found.byte_s > 0
