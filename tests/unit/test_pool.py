"""The pool: views, ranges and presence, for plans that fuse and plans that cut."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.plan import Message, Plan, Slice
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.runtime.pool import Pool
from gradientflow.schedule import bsp


def parameters() -> dict[str, torch.Tensor]:
    return {
        "a": torch.zeros(4, 3),
        "b": torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "c": torch.zeros(5, dtype=torch.float64),
        "empty": torch.zeros(0, 2),
        "scalar": torch.zeros(()),
        "holes": torch.zeros(6, 4)[:, ::2],
    }


def profile(tensors: dict[str, torch.Tensor]) -> Profile:
    return Profile(tensors=tuple(TensorProfile.of(name, tensor) for name, tensor in tensors.items()))


def whole(plan: Plan, pool: Pool) -> list[torch.Tensor]:
    return [part for index, message in enumerate(plan.messages) for part in pool.ranges(index, message)]


def test_a_fused_message_is_one_range_of_memory() -> None:
    tensors = parameters()
    plan = bsp(profile(tensors))
    pool = Pool(plan, tensors)
    for index, message in enumerate(plan.messages):
        assert len(pool.ranges(index, message)) == 1


def test_views_have_the_shape_and_where_possible_the_strides_of_their_parameters() -> None:
    tensors = parameters()
    pool = Pool(bsp(profile(tensors)), tensors)
    for name, view in pool.views.items():
        assert view.shape == tensors[name].shape and view.dtype == tensors[name].dtype
    assert pool.views["b"].stride() == tensors["b"].stride()
    assert pool.views["holes"].is_contiguous()


@given(cuts=st.lists(st.integers(0, 12), max_size=4), order=st.randoms(use_true_random=False))
def test_every_element_is_in_exactly_one_range(cuts: list[int], order) -> None:
    """Cut `a` at random places, issue the pieces in random order, and add one to every range."""
    tensors = parameters()
    bounds = sorted({0, 12, *cuts})
    pieces = [Slice(tensor="a", start=start, stop=stop) for start, stop in itertools.pairwise(bounds)]
    rest = [Slice(tensor=n, start=0, stop=t.numel()) for n, t in tensors.items() if n != "a"]
    messages = [Message(slices=(piece,)) for piece in [*pieces, *rest]]
    order.shuffle(messages)
    plan = Plan(schedule="cut", layout=tuple(tensors), messages=tuple(messages))
    plan.check(profile(tensors))
    pool = Pool(plan, tensors)
    pool.mark_absent({"scalar"}, skipped=False)
    for part in whole(plan, pool):
        part += 1
    for view in pool.views.values():
        assert torch.equal(view, torch.ones_like(view))
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert (
        sum(part.numel() for part in whole(plan, pool)) == elements + len(tensors) + 2
    )  # presence, "skipped" and "asks"


def test_presence_travels_and_tells_who_had_none() -> None:
    tensors = parameters()
    plan = bsp(profile(tensors))
    ranks = [Pool(plan, tensors) for _ in range(2)]
    absent = [{"a", "scalar"}, {"a", "c"}]
    for pool, theirs, skipped in zip(ranks, absent, (False, True), strict=True):
        pool.mark_absent(theirs, skipped)
    assert not any(pool.somebody_asks() for pool in ranks)
    for parts in zip(*(whole(plan, pool) for pool in ranks), strict=True):
        total = parts[0] + parts[1]
        for part in parts:
            part.copy_(total)
    for pool, theirs in zip(ranks, absent, strict=True):
        assert pool.absent_everywhere(theirs) == {"a"}
        assert pool.somebody_skipped()
        assert not pool.somebody_asks()


def test_presence_rides_on_the_first_message_that_needs_the_last_gradient() -> None:
    tensors = {"early": torch.zeros(4), "late": torch.zeros(6), "none": torch.zeros(0)}
    parts = [("late", 4, 6), ("early", 0, 4), ("late", 0, 4), ("none", 0, 0)]
    messages = tuple(Message(slices=(Slice(tensor=name, start=a, stop=b),)) for name, a, b in parts)
    pool = Pool(Plan(schedule="cut", layout=tuple(tensors), messages=messages), tensors)
    assert pool.carrier == 0
    assert sum(part.numel() for part in pool.ranges(0, messages[0])) == 2 + len(tensors) + 2


def test_a_new_layout_takes_over_the_memory() -> None:
    tensors = parameters()
    pool = Pool(bsp(profile(tensors)), tensors)
    floats = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    again = Pool(bsp(profile({"c": tensors["c"], **dict(reversed(floats.items()))})), tensors, pool)
    assert again.nbytes == pool.nbytes
    same = Pool(bsp(profile(tensors)), tensors, again)
    for name in ("a", "c"):
        assert same.views[name].untyped_storage().data_ptr() == again.views[name].untyped_storage().data_ptr()
    assert same.views["a"].data_ptr() != again.views["a"].data_ptr()
