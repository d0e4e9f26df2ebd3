"""When a plan no longer fits."""

from __future__ import annotations

from itertools import pairwise

from gradientflow.runtime.replanning import PATIENCE, STREAK, Replanning


def test_steps_that_have_become_whole_are_planned_for_once() -> None:
    replanning = Replanning()
    for _ in range(STREAK):
        assert not replanning.wanted(50, shut=False)
        replanning.saw(whole=True)
    assert replanning.wanted(50, shut=False)
    assert replanning.agreed(50)
    for _ in range(STREAK):
        replanning.saw(whole=True)
    assert not replanning.wanted(500, shut=False)


def test_now_and_then_is_not_a_reason() -> None:
    replanning = Replanning()
    for step in range(100):
        replanning.saw(whole=step % 3 == 0)
        replanning.stood(idle_s=float(step % 4 == 0), step_s=1.0)
        assert not replanning.wanted(step, shut=False)


def test_lanes_that_keep_standing_are_one_with_growing_patience() -> None:
    replanning, asked = Replanning(), []
    for step in range(40 * PATIENCE):
        replanning.stood(idle_s=0.5, step_s=1.0)
        if replanning.wanted(step, shut=False):
            asked.append(step)
            assert not replanning.agreed(step)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps == [PATIENCE * 2**number for number in range(len(gaps))] and len(gaps) >= 3


def test_a_gate_that_is_shut_is_planned_for_at_once() -> None:
    assert Replanning().wanted(0, shut=True)
