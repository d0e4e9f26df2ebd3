"""Plans and schedules: laws that hold for any model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.errors import RecipeError
from gradientflow.plan import Message, Plan, Slice
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.schedule import SCHEDULES, bsp, lazy, wfbp
from gradientflow.schedule.fusion import fuse

RECIPES = ("bsp", "wfbp", "lazy", "lazy:1KB", "lazy:100B")


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12))
    dtypes = draw(st.lists(st.sampled_from(["float32", "float16"]), min_size=len(shapes), max_size=len(shapes)))
    tensors = [
        TensorProfile(name=f"t{index}", shape=shape, dtype=dtype)
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    return Profile(tensors=tuple(tensors))


@given(profile=profiles(), recipe=st.sampled_from(RECIPES), num_lanes=st.integers(1, 4))
def test_every_schedule_sends_every_element_once_and_is_deterministic(
    profile: Profile, recipe: str, num_lanes: int
) -> None:
    plan = Recipe.parse(recipe).plan(profile, num_lanes)  # checks coverage
    assert sum(message.numel for message in plan.messages) == profile.numel
    assert plan.num_lanes <= num_lanes
    assert plan.digest == Recipe.parse(recipe).plan(profile, num_lanes).digest


@given(profile=profiles(), recipe=st.sampled_from(RECIPES))
def test_messages_of_a_pool_follow_the_layout(profile: Profile, recipe: str) -> None:
    plan = Recipe.parse(recipe).plan(profile, 1)
    position = {name: index for index, name in enumerate(plan.layout)}
    by_pool: dict[tuple[str, str], list[int]] = {}
    for message in plan.messages:
        pool = profile.by_name[message.slices[0].tensor].pool
        by_pool.setdefault(pool, []).extend(position[piece.tensor] for piece in message.slices)
    for positions in by_pool.values():
        assert positions == sorted(positions)


@given(profile=profiles())
def test_lazy_has_wfbp_and_bsp_at_its_ends(profile: Profile) -> None:
    assert fuse(profile, 0) == wfbp(profile).messages
    assert fuse(profile, profile.nbytes + 1) == bsp(profile).messages


@given(profile=profiles(), theta=st.integers(1, 5000))
def test_lazy_closes_a_message_at_the_threshold(profile: Profile, theta: int) -> None:
    sizes = {tensor.name: tensor.nbytes for tensor in profile.tensors}
    closed_by_end = 0
    for message in fuse(profile, theta):
        nbytes = [sizes[piece.tensor] for piece in message.slices]
        assert sum(nbytes[:-1]) < theta, "closed too late"
        closed_by_end += sum(nbytes) < theta
    assert closed_by_end <= len({tensor.pool for tensor in profile.tensors}), "only the last of a pool may be small"


def test_default_threshold_is_25_megabytes() -> None:
    tensors = tuple(TensorProfile(name=str(index), shape=(10**6,)) for index in range(14))
    assert [len(message.slices) for message in lazy(Profile(tensors=tensors)).messages] == [7, 7]


@pytest.mark.parametrize("recipe", ["bsp:1", "wfbp:4MB", "lazy:x", "lazy:4XB"])
def test_a_wrong_argument_is_refused(recipe: str) -> None:
    name, _, argument = recipe.partition(":")
    with pytest.raises(RecipeError):
        SCHEDULES[name](Profile(tensors=()), argument)


def _plan(*messages: list[tuple[str, int, int]]) -> Plan:
    return Plan(
        schedule="by hand",
        layout=("a", "b"),
        messages=tuple(
            Message(slices=tuple(Slice(tensor=t, start=start, stop=stop) for t, start, stop in pieces))
            for pieces in messages
        ),
    )


AB = Profile(tensors=(TensorProfile(name="a", shape=(10,)), TensorProfile(name="b", shape=(5,), dtype="float16")))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([[("a", 0, 10)]], "'b' has 5 elements"),
        ([[("a", 0, 10)], [("a", 5, 10)], [("b", 0, 5)]], "sent twice"),
        ([[("a", 0, 4)], [("a", 6, 10)], [("b", 0, 5)]], "never sent"),
        ([[("a", 0, 10), ("b", 0, 5)]], "mixes pools"),
        ([[("a", 0, 10)], [("c", 0, 5)]], "unknown tensor 'c'"),
    ],
)
def test_check_names_what_is_wrong(messages: list, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _plan(*messages).check(AB)


def test_a_cut_tensor_is_a_legal_plan() -> None:
    plan = _plan([("a", 4, 10)], [("b", 0, 5)], [("a", 0, 4)])
    plan.check(AB)
    assert [step for step in plan.on_lanes(2).sequence(rounds=2)] == [
        (0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1), (2, 0, 0), (2, 1, 0)
    ]  # fmt: skip


def test_the_digest_sees_order_and_lanes() -> None:
    plan, other = _plan([("a", 0, 10)], [("b", 0, 5)]), _plan([("b", 0, 5)], [("a", 0, 10)])
    assert len({plan.digest, other.digest, plan.on_lanes(2).digest}) == 3
