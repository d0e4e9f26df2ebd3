"""Who computes longer, and when."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.errors import UsageError
from gradientflow.lab.stragglers import Hindered, Straggling
from gradientflow.sim.predict import Varying


@pytest.mark.parametrize(
    "text",
    [
        *("4:2", "-1:2", "2", "", "²:2", "1:nan", "1:inf", "1:1000", "1:0", "1:2:3", "often:5:0.2"),
        *("turn", "turn:0.5", "turn:5:0", "turn:5:1.5", "turn:5:1:1"),
        *("random:5", "random:5:0", "random:5:1.1", "random:5:nan", "random:nan:0.5"),
    ],
)
def test_what_cannot_be_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match=r"--straggler .*: write RANK:FACTOR.*; ranks are 0 to 3"):
        Straggling.parse([text], world=4)


@pytest.mark.parametrize("texts", [["1:2", "1:3"], ["turn:2", "turn:3:4"], ["random:2:0.5", "random:3:0.5"]])
def test_one_kind_is_given_once(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="given twice"):
        Straggling.parse(texts, world=4)


@given(world=st.integers(1, 8), length=st.integers(1, 5), iteration=st.integers(0, 1000))
def test_in_turn_one_rank_is_slow_at_a_time_and_all_are_in_their_turn(world: int, length: int, iteration: int) -> None:
    straggling, dice = Straggling.parse([f"turn:5:{length}"], world), random.Random(0)
    factors = [straggling.factor(rank, world, iteration, dice) for rank in range(world)]
    assert sorted(factors) == [1.0] * (world - 1) + [5.0]
    later = [straggling.factor(rank, world, iteration + length, dice) for rank in range(world)]
    assert later.index(5.0) == (factors.index(5.0) + 1) % world


def test_at_random_each_rank_is_slow_by_itself_and_as_often_as_was_said() -> None:
    straggling = Straggling.parse(["random:5:0.2", "1:2"], world=2)
    ranks = [Hindered(straggling, 0.0, rank, 2) for rank in range(2)]
    drawn = [[rank.draw() for _ in range(4000)] for rank in ranks]
    assert set(drawn[0]) == {1.0, 5.0} and set(drawn[1]) == {2.0, 10.0}
    slow = [[factor == max(factors) for factor in factors] for factors in drawn]
    assert all(0.17 < sum(each) / 4000 < 0.23 for each in slow)
    assert 0.03 < sum(a and b for a, b in zip(*slow, strict=True)) / 4000 < 0.05  # 0.2 times 0.2
    assert straggling.most == 10.0


def test_a_round_has_the_same_factors_each_time_and_another_one_others() -> None:
    paces = Hindered(Straggling.parse(["random:5:0.5", "turn:3:2"], world=3), 0.2, 1, 3)
    rounds = []
    for number in (0, 1, 2, 0):
        paces.restart(number)
        rounds.append([paces.draw() for _ in range(6)])
    assert rounds[0] == rounds[3] and rounds[0] != rounds[1] != rounds[2]


def test_with_few_iterations_to_a_round_all_ranks_have_their_turn() -> None:
    straggling = Straggling.parse(["turn:5:10"], world=4)
    slow = set()
    for number in range(4):
        for rank in range(4):
            paces = Hindered(straggling, 0.0, rank, 4)
            paces.restart(number)
            if paces.draw() == 5.0:
                slow.add((number, rank))
    assert slow == {(number, number) for number in range(4)}


def test_the_simulator_has_the_same_stragglers() -> None:
    turns = Varying.parse(["turn:5:2"], world=3)
    assert turns.paces(3, 4) == [[5.0, 1.0, 1.0], [5.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 5.0, 1.0]]
    steps = Varying.parse(["random:5:0.2"], world=3).ranks(3, 1000)
    assert 0.17 < sum(factor == 5.0 for step in steps for factor in step) / 3000 < 0.23
