"""Plans whose messages go in two halves: what they hold, what they take, and in which order they are carried."""

from __future__ import annotations

import pytest

from gradientflow.cost.evaluate import evaluate
from gradientflow.cost.table import Line
from gradientflow.errors import RecipeError
from gradientflow.lab.workloads import load
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.schedule.decoupled import dear

COST = Line(alpha_s=1e-3, beta_s_per_byte=1.2e-8)


@pytest.mark.parametrize("name", ["alexnet", "resnet-50", "bert-base"])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_everything_is_summed_as_it_comes_and_gathered_as_it_is_needed(name: str, num_lanes: int) -> None:
    profile = load(name, compute_s=1.0)
    plan = dear(profile, COST, num_lanes=num_lanes)
    plan.check(profile)
    forward = {tensor.name: tensor.forward_order for tensor in profile.tensors}
    firsts = [min(forward[piece.tensor] for piece in plan.messages[number].slices) for number in plan.gathers]
    assert firsts == sorted(firsts)
    backward = {tensor.name: place for place, tensor in enumerate(profile.tensors)}
    lasts = [max(backward[piece.tensor] for piece in message.slices) for message in plan.messages]
    assert lasts == sorted(lasts)
    assert {message.pattern for message in plan.messages} == {"ring"}


def test_halves_of_an_iteration_by_hand() -> None:
    """Two tensors of 1 s each way, 2 s of backward and 1 of forward each; half a message takes 1 s.

    Backward ends at 4; the halves of the second are summed at 5, gathered at 6 (the first tensor of forward) and 7."""
    profile = load("alexnet", compute_s=1.0)
    first, second = profile.tensors[:2]
    times = {"shape": (1,), "forward_s": 1.0, "backward_s": 2.0}
    tensors = (
        first.model_copy(update=times | {"name": "late", "forward_order": 1}),
        second.model_copy(update=times | {"name": "early", "forward_order": 0}),
    )
    small = profile.model_copy(update={"tensors": tensors})
    found = evaluate(
        small,
        dear(small, Line(alpha_s=2.0, beta_s_per_byte=0.0), nbytes=4),
        Line(alpha_s=2.0, beta_s_per_byte=0.0),
        gated=True,
    )
    assert [(timing.label, timing.end_s - timing.start_s) for timing in found.messages] == [
        ("late", 1.0), ("early", 1.0), ("early", 1.0), ("late", 1.0),
    ]  # fmt: skip
    # From the end of backward on: both halves of "early" (2 s), forward 1 s, "late" has come by then, forward 1 s.
    assert found.iteration_s == 2.0 + 1.0 + 1.0 + 4.0


def test_on_a_slow_link_both_halves_hide_more_than_a_whole_can() -> None:
    profile = load("resnet-50", compute_s=1.0)
    cost = Line(alpha_s=1e-4, beta_s_per_byte=1.0 / profile.nbytes)
    found = evaluate(profile, dear(profile, cost), cost, gated=True)
    lazy = evaluate(profile, Recipe.parse("lazy").plan(profile, 1), cost)
    assert found.iteration_s < 0.95 * lazy.iteration_s


@pytest.mark.parametrize(
    ("recipe", "words"), [("dear-tree", "-ring"), ("dear+fp16", "as they are"), ("dear:0MB", "no bytes")]
)
def test_what_does_not_go_with_halves(recipe: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe.parse(recipe).check()


def test_a_plan_that_forgets_a_half_is_refused() -> None:
    profile = load("alexnet", compute_s=1.0)
    plan = dear(profile, COST)
    with pytest.raises(ValueError, match="gather every message"):
        plan.model_copy(update={"gathers": plan.gathers[:-1]}).check(profile)


def test_without_tensors_there_is_nothing_to_wait_for() -> None:
    nothing = Profile(tensors=())
    assert evaluate(nothing, dear(nothing, COST, norms=True), COST, gated=True).iteration_s == 0.0
