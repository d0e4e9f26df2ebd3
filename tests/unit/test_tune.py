"""Choosing among plans: what is proposed, whose turn it is, who wins, when to begin anew."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.cost.table import Best, CostTable, Line, Paying
from gradientflow.lab.workloads import workload
from gradientflow.plan import NATIVE, Plan
from gradientflow.recipe import as_recipe
from gradientflow.tune.candidates import MOST, Candidate, candidates, of_both_kinds, rivals
from gradientflow.tune.trials import (
    DRIFT,
    PLANS,
    PROBATION,
    SHARE,
    WINDOW,
    WITHIN_STEPS,
    Seen,
    Trials,
    longest,
    midmean,
)


def cost(rate: float) -> Best:
    """A group's own all-reduce that begins slowly, and a ring that begins sooner."""
    beta = 8 / rate
    return Best({
        NATIVE: Line(alpha_s=3e-3, beta_s_per_byte=1.5 * beta), "ring": Line(alpha_s=1e-3, beta_s_per_byte=1.5 * beta)
    })  # fmt: skip


@pytest.mark.parametrize(("rate", "gated"), [(1e8, True), (1e9, False), (1e10, False), (1e10, True)])
def test_the_default_is_first_and_the_best_predicted_are_there(rate: float, gated: bool) -> None:
    profile = workload("resnet-50", compute_s=0.3)
    found = candidates(profile, 2, cost(rate), gated=gated, whole=False)
    assert found[0].recipe == "lazy" and 2 <= len(found) <= 1 + MOST
    predicted = [each.predicted_s for each in found[1:]]
    assert predicted == sorted(predicted) and predicted[0] <= found[0].predicted_s
    digests = {each.plan.model_copy(update={"schedule": "", "why": ""}).digest for each in found}
    assert len(digests) == len(found)
    for each in found:
        as_recipe(each.recipe)
        each.plan.check(profile)
        assert gated or not each.plan.stages


@pytest.mark.parametrize("gated", [(True, True, True, True, False, False), (False, False, False, True)])
def test_of_plans_with_a_gate_and_without_one_is_tried_at_least(gated: tuple[bool, ...]) -> None:
    plan = Plan(schedule="", layout=(), messages=())
    ranked = [Candidate(recipe="lazy", plan=plan, predicted_s=1.0 + at, gated=one) for at, one in enumerate(gated)]
    tried = of_both_kinds(ranked, MOST)
    assert len(tried) == MOST and {each.gated for each in tried} == {True, False}
    assert tried[:2] == tuple(ranked[:2]), "the best of both are there whatever they are"
    assert tried[2] == next(each for each in ranked if each.gated != gated[0])
    assert of_both_kinds(ranked, 2, beside=[ranked[gated.index(not gated[0])]]) == tuple(ranked[:2])
    assert of_both_kinds(ranked[:3], MOST) == tuple(ranked[:3]), "there are no others"


@given(st.lists(st.sampled_from([0.5, 1.8]), min_size=1, max_size=10), st.integers(0, 2))
def test_steps_that_are_short_at_the_cost_of_others_count_as_what_both_take(steps: list[float], hiccups: int) -> None:
    """As many of each, in any order, and no more than a quarter are hiccups."""
    both = [*steps, *(0.5 + 1.8 - step for step in steps)]
    some = min(hiccups, len(both) // 6)
    assert midmean([*both, *[50.0] * some, *[0.0] * some]) == pytest.approx(1.15)


def steps_of(trials: Trials) -> list[int]:
    """Whose turn it is in a race in which all stay about equal."""
    turns, step = [], trials.first
    while trials.winner is None:
        while step < trials.end:
            turns.append(trials.candidate(step))
            trials.took(step, 1.0 if turns[-1] else 1.01)
            step += 1
        trials.decide([trials.seen(100.0)])
    return turns


@pytest.mark.parametrize("number", [2, 3, 4])
def test_all_have_as_many_turns_and_as_few_as_was_said(number: int) -> None:
    turns = steps_of(Trials(number, first=7))
    assert len({turns.count(each) for each in range(number)}) == 1 and set(turns) == set(range(number))
    assert len(turns) == longest(number) <= 50, "settles within sixty steps, with those before it"


def race(
    seconds: list[float], noise: float = 0.05, ranks: int = 3, before_s: float = 0.0, elapsed_s: float = 1.0
) -> Trials:
    """Each rank sees its own noise, and steps in which it waits for nobody are hiccups."""
    dice = random.Random(1)
    every = [Trials(len(seconds), 3, before_s) for _ in range(ranks)]
    step = 3
    while every[0].winner is None:
        while step < every[0].end:
            for trials in every:
                hiccup = 5.0 if noise and dice.random() < 0.1 else 1.0
                trials.took(step, seconds[trials.candidate(step)] * dice.uniform(1, 1 + noise) * hiccup)
            step += 1
        seen = [trials.seen(elapsed_s) for trials in every]
        for trials in every:
            trials.decide(seen)
        assert len({(trials.winner, trials.end) for trials in every}) == 1
    return every[0]


def test_the_quickest_wins() -> None:
    assert race([1.0, 0.8, 0.7, 0.9]).winner == 2


def test_who_gains_next_to_nothing_does_not() -> None:
    assert race([1.0, 0.995, 1.2], noise=0.0).winner == 0


def test_the_slowest_rank_counts() -> None:
    trials = Trials(2, first=0)
    seen = [Seen(results_s=took, least_s=took, spent_s=0.0, elapsed_s=0.0) for took in ((1.0, 0.5), (1.0, 2.0))]
    trials.decide(seen)
    assert trials.found_s == [1.0, 2.0] and trials.winner == 0


def test_who_is_clearly_slower_is_out_after_a_round_and_others_have_its_turns() -> None:
    trials = race([1.0, 3.0, 0.99, 2.0], noise=0.0)
    assert trials.end - trials.first > longest(4) and trials.winner == 0
    num_rounds = (longest(4) - 4 * PLANS.first_block) // (2 * PLANS.block)
    first_round = PLANS.first_block * (3.0 + 2.0 - 2 * 0.99)
    assert num_rounds == 4 and trials.lost_s == pytest.approx(
        first_round + (PLANS.first_block + num_rounds * PLANS.block) * 0.01
    )


@pytest.mark.parametrize("slow", [1.05, 1.29, 2.0, 6.0])
def test_trials_cost_no_more_than_two_in_a_hundred_of_a_thousand_steps(slow: float) -> None:
    """With a round more, at most: what it costs is known when it is over."""
    trials = race([slow, 1.0, slow, slow], noise=0.0)
    assert trials.winner == 1 and trials.lost_s <= SHARE * WITHIN_STEPS * 1.0 + PLANS.first_block * 3 * (slow - 1)
    if slow <= 2:
        assert trials.lost_s <= SHARE * WITHIN_STEPS


def test_what_tuning_has_cost_before_counts() -> None:
    before_s = SHARE * WITHIN_STEPS * 0.9
    short, whole = race([1.0, 0.9, 0.95], 0.0, before_s=before_s), race([1.0, 0.9, 0.95], 0.0)
    assert short.winner == whole.winner == 1 and short.end < whole.end
    assert race([1.0, 0.9, 0.95], 0.0, before_s=before_s, elapsed_s=1e4).end == whole.end, "time goes by"


@pytest.mark.parametrize(
    ("factor", "drifts"), [(1.0, False), (1.1, False), (DRIFT + 0.1, True), (1 / (DRIFT + 0.1), True)]
)
def test_what_lasts_and_differs_is_noticed(factor: float, drifts: bool) -> None:
    trials = race([1.0, 0.8], noise=0.0)
    for step in range(WINDOW):
        assert not trials.has_drifted
        trials.took(trials.end + step, 0.8 * factor)
    assert trials.has_drifted is drifts


@pytest.mark.parametrize(("seconds", "pays"), [(0.8, True), (0.99, True), (1.0, True), (1.1, False)])
def test_a_winner_that_is_slower_by_itself_than_what_it_beat_does_not_pay(seconds: float, pays: bool) -> None:
    trials = race([1.0, 0.8], noise=0.0)
    for step in range(WINDOW):
        assert not trials.does_not_pay
        trials.took(trials.end + step, seconds)
    assert trials.does_not_pay is not pays and trials.is_on_probation
    if pays:  # hiccups of later steps may tell otherwise, until it is what things are
        for step in range(WINDOW, PROBATION):
            trials.took(trials.end + step, 1.1)
        assert trials.does_not_pay and trials.is_on_probation
        trials.took(trials.end + PROBATION, 1.1)
        assert not trials.does_not_pay and not trials.is_on_probation
    else:
        trials.settle(0)
        assert trials.winner == 0 and trials.expected_s == 1.0 and not trials.does_not_pay


def test_auto_takes_what_it_can() -> None:
    assert as_recipe("auto+bf16").tunes and as_recipe("auto+topk:1%:guard=2%").tunes
    assert str(as_recipe("auto").lossy().check()) == "auto+topk:1%:sampled:guard=2%"
    assert as_recipe("auto+bf16").lossy() == as_recipe("auto+bf16")
    for text, sentence in (
        ("auto-ring", "by itself; use auto"),
        ("auto:4MB", "by itself"),
        ("auto+topk", "under a guard"),
        ("auto+topk:guard=2%:always", "under a guard"),
        ("auto@local:8", "as DDP does"),
    ):
        with pytest.raises(ValueError, match=sentence):
            as_recipe(text)


def test_a_table_is_a_cost() -> None:
    table = CostTable(points=((4096, 1e-3), (4 * 2**20, 0.1)))
    found = candidates(workload("alexnet", compute_s=0.1), 2, Best({NATIVE: table}), gated=True, whole=True)
    assert found[0].recipe == "lazy"


def test_a_codec_is_for_messages_that_it_pays_for() -> None:
    dense = Best({NATIVE: Line(alpha_s=1e-3, beta_s_per_byte=1e-8)})
    paying = Paying(Line(alpha_s=3e-3, beta_s_per_byte=1e-9), dense, dense)
    found = candidates(workload("vgg-16", compute_s=0.1), 2, paying, gated=False, whole=False)
    sizes = {tensor.name: tensor.nbytes for tensor in workload("vgg-16").tensors}
    for each in found:
        for message in each.plan.messages:
            nbytes = sum(4 * piece.numel for piece in message.slices)
            assert message.dense is not paying.pays(nbytes) and message.pattern == NATIVE
    assert found[0].recipe == "lazy" and max(sizes.values()) > 1e8


@pytest.mark.parametrize(
    ("takes", "codecs"),
    [(0.1, [True]), (0.8, [False, True]), (1.0, [False, True]), (1.3, [False, True]), (9.0, [False])],
)
def test_a_codec_is_tried_where_prices_are_near_each_other(takes: float, codecs: list[bool]) -> None:
    """takes: of the seconds of a message as it is, those through the codec."""
    dense = Line(alpha_s=1e-3, beta_s_per_byte=1e-8)
    paying = Paying(Line(alpha_s=takes * 1e-3, beta_s_per_byte=takes * 1e-8), dense, dense)
    profile, recipe = workload("resnet-50", compute_s=0.1), as_recipe("lazy:2MB+int8")
    found = rivals(recipe, profile, 2, paying, gated=False, whole=False)
    assert ["int8" in each.recipe for each in found] == codecs, "none first: it is the one to beat"
    for each, coded in zip(found, codecs, strict=True):
        assert {message.dense for message in each.plan.messages} == {not coded}
        each.plan.check(profile)
