"""Partition and priority: the toy of the ByteScheduler paper, and laws of the order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientflow.cost import Cost, Line, evaluate
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.schedule import wfbp
from gradientflow.schedule.priority import PARTITION_NBYTES, bytescheduler, p3

TIMES = st.integers(0, 20).map(float)


def model(*layers: tuple[int, float, float]) -> Profile:
    """Layers (elements, forward_s, backward_s) in forward order, backward in reverse."""
    tensors = [
        TensorProfile(name=f"t{index}", shape=(numel,), forward_order=index, forward_s=f, backward_s=b)
        for index, (numel, f, b) in enumerate(layers)
    ]
    return Profile(tensors=tuple(reversed(tensors)))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Backward in any order, of two dtypes."""
    layers = draw(st.lists(st.tuples(st.integers(0, 20), TIMES, TIMES), min_size=1, max_size=6))
    tensors = [
        tensor.model_copy(update={"dtype": draw(st.sampled_from(["float32", "float16"]))})
        for tensor in model(*layers).tensors
    ]
    return Profile(tensors=tuple(draw(st.permutations(tensors))))


LINES = st.builds(Line, alpha_s=TIMES, beta_s_per_byte=st.sampled_from([0.0, 0.25, 1.0]))


# - The toy: three layers, two units of time for each forward and backward, 3, 6 and 3 units to push and to pull.

TOY = model((3, 2.0, 2.0), (6, 2.0, 2.0), (3, 2.0, 2.0))
UNIT = Line(alpha_s=0.0, beta_s_per_byte=0.25)  # an element in one unit of time


def push_and_pull_s(plan: Plan) -> float:
    """From the start of backward to the end of the next forward pass. Two links, one each way: a message is pulled
    after it was pushed, and each link carries messages in the plan's order."""
    ready_s = {"t2": 2.0, "t1": 4.0, "t0": 6.0}
    pushed_s = pulled_s = 0.0
    arrived_s = dict.fromkeys(ready_s, 0.0)
    for message in plan.messages:
        name = message.slices[0].tensor
        pushed_s = max(pushed_s, ready_s[name]) + message.numel
        pulled_s = max(pulled_s, pushed_s) + message.numel
        arrived_s[name] = pulled_s
    now_s = 0.0
    for name in ("t0", "t1", "t2"):
        now_s = max(now_s, arrived_s[name]) + 2.0
    return now_s


def test_the_papers_toy() -> None:
    by_need = bytescheduler(TOY, UNIT, partition_nbytes=4, credit_nbytes=4)
    assert "".join(message.label[1] for message in by_need.messages) == "221100011112"
    assert push_and_pull_s(wfbp(TOY)) == 26
    assert push_and_pull_s(by_need) == 18


def test_the_toy_on_one_link() -> None:
    # From the start of backward: t0 is there at 9, t1 at 13, t2 at 14; forward 9 to 11, 13 to 15, 15 to 17.
    by_need = bytescheduler(TOY, UNIT, partition_nbytes=4)
    assert evaluate(TOY, by_need, UNIT, gated=True).iteration_s == pytest.approx(17.0)
    assert evaluate(TOY, wfbp(TOY), UNIT, gated=True).iteration_s == pytest.approx(20.0)


# - Laws


@given(profile=profiles(), cost=LINES, partition=st.integers(1, 50), num_lanes=st.integers(1, 3))
def test_every_element_once_in_pieces_dealt_in_turn(
    profile: Profile, cost: Cost, partition: int, num_lanes: int
) -> None:
    plan = bytescheduler(profile, cost, partition_nbytes=partition, num_lanes=num_lanes)
    plan.check(profile)
    assert plan == plan.on_lanes(num_lanes)
    assert plan.digest == bytescheduler(profile, cost, partition_nbytes=partition, num_lanes=num_lanes).digest
    itemsize = {tensor.name: tensor.torch_dtype.itemsize for tensor in profile.tensors}
    for message in plan.messages:
        (piece,) = message.slices
        assert piece.numel * itemsize[piece.tensor] <= max(partition, itemsize[piece.tensor])


@given(profile=profiles(), cost=LINES, partition=st.integers(4, 50))
def test_nothing_goes_while_something_more_urgent_is_ready(profile: Profile, cost: Cost, partition: int) -> None:
    plan = bytescheduler(profile, cost, partition_nbytes=partition)
    after_s = _forward_left_s(profile)
    timings = evaluate(profile, plan, cost).messages
    for index, timing in enumerate(timings):
        for later in timings[index + 1 :]:
            if later.ready_s < timing.start_s - 1e-6:
                assert after_s[later.label] <= after_s[timing.label] + 1e-6


def _forward_left_s(profile: Profile) -> dict[str, float]:
    left_s, found = profile.forward_s, {}
    for tensor in sorted(profile.tensors, key=lambda tensor: tensor.forward_order):
        found[tensor.name] = left_s
        left_s -= tensor.forward_s
    return found


@settings(max_examples=50)
@given(data=st.data(), profile=profiles(), cost=LINES, num_lanes=st.integers(1, 3))
def test_other_times_than_planned_make_lanes_wait_and_change_nothing_else(
    data: st.DataObject, profile: Profile, cost: Cost, num_lanes: int
) -> None:
    plan = bytescheduler(profile, cost, partition_nbytes=16, num_lanes=num_lanes)
    otherwise = Profile(tensors=tuple(t.model_copy(update={"backward_s": data.draw(TIMES)}) for t in profile.tensors))
    found = evaluate(otherwise, plan, cost, gated=True)
    by_lane: dict[int, float] = {}
    for timing in found.messages:
        assert timing.end_s < float("inf")
        assert timing.start_s >= by_lane.get(timing.lane, 0.0) - 1e-6
        by_lane[timing.lane] = timing.end_s


def test_credit_holds_lanes_back() -> None:
    profile = model((4, 1.0, 1.0), (4, 1.0, 0.0))  # both ready within one second, t1 first
    cost = Line(alpha_s=10.0, beta_s_per_byte=0.0)

    def order(credit_nbytes: int) -> str:
        plan = bytescheduler(profile, cost, partition_nbytes=4, credit_nbytes=credit_nbytes, num_lanes=3)
        return "".join(message.label[1] for message in plan.messages)

    # With credit for three, three pieces of t1 are away before t0 comes; with credit for one, one is.
    assert (order(12), order(4)) == ("11100001", "10000111")


def test_a_piece_larger_than_the_credit_goes_by_itself() -> None:
    plan = bytescheduler(TOY, UNIT, partition_nbytes=100, credit_nbytes=1, num_lanes=2)
    assert [message.numel for message in plan.messages] == [3, 6, 3]


def test_defaults() -> None:
    profile = model((2_500_000, 1.0, 1.0))
    assert [4 * message.numel for message in bytescheduler(profile, UNIT).messages] == [PARTITION_NBYTES] * 2 + [
        2_000_000
    ]
    assert {4 * message.numel for message in p3(profile, UNIT).messages} == {200_000}
    assert p3(profile, UNIT).schedule == "p3"


def test_models_of_nothing() -> None:
    for profile in (Profile(tensors=()), model((0, 1.0, 1.0))):
        bytescheduler(profile, UNIT).check(profile)
