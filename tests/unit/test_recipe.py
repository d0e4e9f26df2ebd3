"""The recipe grammar: printed and read back without loss; nonsense refused with a sentence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.cost.table import Line, Paying
from gradientflow.errors import DocumentError, RecipeError, UsageError
from gradientflow.outer import Outer
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Choice, Recipe, as_recipe
from gradientflow.sync import ASP, BSP, Sync

names = st.from_regex(r"[a-z][a-z0-9]{0,6}(-[a-z0-9]{1,5}){0,2}", fullmatch=True).filter(
    lambda name: not {"a2a", "mpi", "ps"} & set(name.split("-"))
)
arguments = st.from_regex(r"[A-Za-z0-9._%]{0,6}", fullmatch=True)
choices = st.builds(Choice, name=names, argument=arguments)
syncs = st.one_of(
    st.just(BSP),
    st.just(ASP),
    st.integers(1, 99).map(lambda s: Sync(staleness=s)),
    st.integers(2, 99).map(lambda h: Sync(period=h)),
    st.builds(
        lambda h, lr, rounds: Sync(period=h, outer=Outer(lr=lr, momentum=0.9, warmup=rounds)),
        st.integers(1, 9),
        st.floats(0.0, 10.0, exclude_min=True),
        st.integers(0, 10**9),
    ),
    st.builds(
        lambda f, start: Sync(period=4 * f, fragments=f, delay=2, start=start), st.integers(1, 9), st.integers(0, 9)
    ),
)
recipes = st.builds(
    Recipe,
    schedule=choices,
    exchange=st.builds(Choice, name=st.sampled_from(["a2a", "mpi", "ps"]), argument=arguments),
    codecs=st.lists(choices, max_size=3).map(tuple),
    sync=syncs,
)


@given(recipe=recipes)
def test_printing_and_reading_lose_nothing(recipe: Recipe) -> None:
    assert Recipe.parse(str(recipe)) == recipe


@pytest.mark.parametrize(
    "text",
    [
        "lazy",
        "lazy:4MB",
        "lazy-a2a:1",
        "lazy:4MB-a2a:2+fp16",
        "lazy-mpi",
        "flow-mpi:2",
        "mg-wfbp",
        "mg-wfbp-ps",
        "bytescheduler-ps@asp",
        "flow-ps+csc:0.1+fp16@ssp:4",
        "lazy+fp16@local:8",
        "lazy@local:1",
        "lazy@local:8:start=100:state=average",
        "lazy@diloco:50:lr=0.5:fragments=4:delay=2",
        "lazy@diloco:50:lr=1:warmup=7:start=100",
    ],
)
def test_canonical_texts_stay_as_they_are(text: str) -> None:
    assert str(Recipe.parse(text)) == text


def test_what_is_left_out_has_a_value() -> None:
    assert Recipe.parse("lazy-a2a@bsp") == Recipe.parse("lazy")
    parsed = Recipe.parse("flow-ps+csc:0.1+fp16@ssp:4")
    assert parsed.schedule == Choice(name="flow")
    assert parsed.exchange == Choice(name="ps")
    assert parsed.codecs == (Choice(name="csc", argument="0.1"), Choice(name="fp16"))
    assert parsed.sync == Sync(period=1, staleness=4)
    assert Recipe.parse("lazy-ps@asp").sync.staleness == math.inf


@pytest.mark.parametrize(
    "text",
    """. lazy.fp16 +fp16 lazy+ lazy++fp16 Lazy lazy@ lazy@ssp lazy@ssp:-1 lazy@local:0 lazy@local:8:often
    lazy@ssp:4:start=3 lazy@local:4:delay=4 lazy@local:2:fragments=3 lazy@local:2:state=lose lazy@diloco:5:momentum=1
    lazy@local:5:warmup=2 lazy@diloco:5:warmup lazy@diloco:5:warmup=-1 lazy@diloco:5:lr=1:momentum=0:warmup=2
    lazy: lazy- lazy@bsp@asp -ps""".split(),
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    text = text.replace(".", " ").strip()  # nothing, and words apart
    with pytest.raises(RecipeError, match="cannot read"):
        Recipe.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lazy@ssp:4", "needs a server; use -ps"),
        ("lazy@asp", "needs a server"),
        ("lazy+fp16+bf16", "use one of them"),
        ("lazy+fp16+topk", "must come last"),
        ("quick", "use bsp or wfbp or lazy"),
        ("lazy-ps:0", "not a number of servers; use -ps, or -ps:1 to -ps:999"),
        ("dear-ps", "two halves, which only a ring has"),
        ("lazy+topmost:0.1", "no codec 'topmost' in this version"),
        ("flow@local:8", "sends none; use bsp or wfbp or lazy"),
        ("lazy-best@local:8", "measured for gradients"),
        ("lazy+int8@local:8:fragments=2", "use fragments=1"),
        ("lazy-ps+topk@ssp:4", "cannot read \\+topk; use \\+bf16 or \\+fp16 or \\+int8"),
        ("lazy-ps@local:8:start=9", "for workers in lockstep"),
        ("lazy-a2a:0", "not a number of lanes"),
        ("lazy-a2a:99", "not a number of lanes"),
        ("lazy-a2a:two", "not a number of lanes"),
        ("lazy-mpi:0", "not a number of lanes; use -mpi:1 to -mpi:16"),
        ("lazy:much", "cannot read size"),
        ("lazy+fp16:3", "takes no argument"),
    ],
)
def test_illegal_recipes_say_what_to_change(text: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        as_recipe(text)


@given(recipe=recipes)
def test_files_hold_the_same_text(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("recipes") / "recipe.toml"
    recipe.write(path)
    assert Recipe.read(path) == recipe


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('recipe = "lazy"', "field version: field required"),
        ("version = 2\nrecipe = 'lazy'", "field version: input should be 1; found 2"),
        ("version = 1", "field recipe"),
        ("version = 1\nrecipe = 7", "field recipe: input should be a valid string; found 7"),
        ("version = 1\nrecipe = 'lazy+'", "field recipe: cannot read recipe 'lazy\\+'"),
        ("version = 1\nrecipe = 'lazy'\ntheta = 4", "field theta"),
        ("= = =", "expected TOML"),
    ],
)
def test_a_wrong_file_names_file_field_and_expectation(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    with pytest.raises(DocumentError, match=complaint) as caught:
        Recipe.read(path)
    assert str(path) in str(caught.value)


PROFILE = Profile(tensors=tuple(TensorProfile(name=name, shape=(100,)) for name in "abcd"))


def held(text: str, plan: str = "lazy:500") -> Recipe:
    """A recipe that pins another's plan."""
    return Recipe.parse(text).model_copy(update={"pinned": Recipe.parse(plan).plan(PROFILE, num_lanes=1)})


def test_a_pinned_plan_is_what_is_run(tmp_path: Path) -> None:
    recipe = held("merge").check()
    assert recipe.pinned is not None and not recipe.needs_cost
    assert recipe.plan(PROFILE, 2) == recipe.pinned.on_lanes(2)
    shuffled = PROFILE.model_copy(update={"tensors": PROFILE.tensors[::-1]})
    assert recipe.plan(shuffled, 1).messages == recipe.pinned.messages
    gated = recipe.plan(PROFILE, 1, gated=True)
    assert sorted(name for stage in gated.stages for name in stage) == list("abcd")
    recipe.write(tmp_path / "recipe.toml")
    assert as_recipe(str(tmp_path / "recipe.toml")) == recipe
    assert str(recipe) == "merge"


def test_a_pinned_plan_of_something_else_is_refused(tmp_path: Path) -> None:
    other = Profile(tensors=PROFILE.tensors[:3])
    with pytest.raises(UsageError, match=r"of another model: .*\bd\b.* leave the line `plan = ...` out"):
        held("lazy").check().plan(other, 1)
    for text, plan, why in (
        ("auto", "lazy", "auto makes its own plans"),
        ("lazy@local:4", "lazy", "sends no gradients"),
        ("dear", "lazy", "pinned plan is lazy's"),
        ("lazy", "lazy-halving", "goes by halving"),
    ):
        with pytest.raises(RecipeError, match=why):
            held(text, plan).check()
    held("lazy").write(tmp_path / "recipe.toml")
    (tmp_path / "plan.json").unlink()
    with pytest.raises(DocumentError, match=r"plan\.json"):
        as_recipe(str(tmp_path / "recipe.toml"))


def test_a_codec_is_for_messages_that_gain_by_it() -> None:
    """From 100 bytes on; what is smaller goes as it is, and the plan says so."""
    tensors = tuple(TensorProfile(name=f"t{n}", shape=(size,)) for n, size in enumerate((5, 50, 5000)))
    encoded, dense = Line(alpha_s=1e-3, beta_s_per_byte=1e-9), Line(alpha_s=1e-6, beta_s_per_byte=1e-5)
    recipe = Recipe.parse("wfbp+int8").check()
    assert recipe.needs_cost and recipe.weighs
    plan = recipe.plan(Profile(tensors=tensors), num_lanes=1, cost=Paying(encoded, dense, dense))
    assert {message.numel: message.dense for message in plan.messages} == {5: True, 50: False, 5000: False}
    assert "1 of 3 messages go as they are" in plan.explain()
    without = recipe.plan(Profile(tensors=tensors), num_lanes=1)
    assert not any(message.dense for message in without.messages) and without.digest != plan.digest
    for always in ("wfbp+int8:always", "wfbp+signsgd", "wfbp+fp16", "wfbp"):
        assert not Recipe.parse(always).weighs
