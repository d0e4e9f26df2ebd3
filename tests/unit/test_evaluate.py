"""Iterations under a plan: closed forms of the literature, toy numbers by hand, and laws for any plan."""

from __future__ import annotations

from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientflow.cost import Cost, CostTable, Line, evaluate, limit_s
from gradientflow.cost.evaluate import host_s
from gradientflow.plan import Message, Plan, Slice
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.schedule import bsp, wfbp
from gradientflow.schedule.fusion import fuse
from gradientflow.trace import Trace

TIMES = st.integers(0, 20).map(float)


def model(*layers: tuple[int, float, float]) -> Profile:
    """Layers (nbytes, forward_s, backward_s) in forward order."""
    tensors = [
        TensorProfile(name=f"t{index}", shape=(nbytes // 4,), forward_order=index, forward_s=f, backward_s=b)
        for index, (nbytes, f, b) in enumerate(layers)
    ]
    return Profile(tensors=tuple(reversed(tensors)))


def cut(profile: Profile, *pieces: tuple[str, int, int], lanes: tuple[int, ...] = ()) -> Plan:
    """One message a piece (tensor, first byte, last byte), on the lanes given."""
    return Plan(
        schedule="by hand",
        layout=tuple(tensor.name for tensor in profile.tensors),
        messages=tuple(
            Message(slices=(Slice(tensor=tensor, start=start // 4, stop=stop // 4),), lane=lane)
            for (tensor, start, stop), lane in zip(pieces, lanes or (0,) * len(pieces), strict=True)
        ),
    )


@st.composite
def profiles(draw: st.DrawFn, *, reverse: bool = False) -> Profile:
    """Backward is any order, or forward reversed."""
    layers = draw(st.lists(st.tuples(st.integers(0, 20).map(lambda n: 4 * n), TIMES, TIMES), min_size=1, max_size=6))
    profile = model(*layers)
    return profile if reverse else Profile(tensors=tuple(draw(st.permutations(profile.tensors))))


@st.composite
def plans(draw: st.DrawFn, profile: Profile) -> Plan:
    """Tensors cut anywhere, pieces thrown together in any order, on up to three lanes."""
    pieces = []
    for tensor in profile.tensors:
        cuts = sorted({0, tensor.numel, *draw(st.sets(st.integers(0, tensor.numel), max_size=2))})
        stops = cuts[1:] or [0]
        starts = [0, *stops[:-1]]
        pieces += [Slice(tensor=tensor.name, start=a, stop=b) for a, b in zip(starts, stops, strict=True)]
    pieces = draw(st.permutations(pieces))
    messages: list[Message] = []
    while pieces:
        size = draw(st.integers(1, 3))
        messages.append(Message(slices=tuple(pieces[:size]), lane=draw(st.integers(0, 2))))
        pieces = pieces[size:]
    return Plan(schedule="any", layout=tuple(t.name for t in profile.tensors), messages=tuple(messages))


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    line = Line(alpha_s=draw(TIMES), beta_s_per_byte=draw(st.sampled_from([0.0, 0.25, 1.0])))
    points = tuple((nbytes, line.seconds(nbytes) + draw(TIMES) + 1) for nbytes in (4, 40, 400))
    return draw(st.sampled_from([line, CostTable(points=points)]))


# - Closed forms


@given(profile=profiles(), cost=costs())
def test_bsp_is_compute_and_one_message(profile: Profile, cost: Cost) -> None:
    communication_s = cost.seconds(profile.nbytes) if profile.nbytes else 0.0
    found = evaluate(profile, bsp(profile), cost)
    assert found.iteration_s == pytest.approx(profile.forward_s + profile.backward_s + communication_s)
    assert found.exposed_s == pytest.approx(communication_s)


@given(profile=profiles(), cost=costs(), theta=st.sampled_from([0, 30, 100]))
def test_wfbp_and_fusion_follow_their_recurrence(profile: Profile, cost: Cost, theta: int) -> None:
    backward_s = dict(zip([t.name for t in profile.tensors], _running_sum(profile), strict=True))
    messages = fuse(profile, theta)
    ended_s = 0.0
    for message in messages:
        nbytes = 4 * message.numel
        ready_s = profile.forward_s + backward_s[message.slices[-1].tensor]
        ended_s = max(ready_s, ended_s) + (cost.seconds(nbytes) if nbytes else 0.0)
    plan = wfbp(profile).model_copy(update={"messages": messages})
    expected_s = max(ended_s, profile.forward_s + profile.backward_s)
    assert evaluate(profile, plan, cost).iteration_s == pytest.approx(expected_s)


def _running_sum(profile: Profile) -> list[float]:
    return [sum(t.backward_s for t in profile.tensors[: index + 1]) for index in range(len(profile.tensors))]


# - By hand

TWO = model((40, 1.0, 2.0), (80, 1.0, 2.0))  # t1 is ready at 4, t0 at 6; compute 6


def test_messages_queue_behind_each_other_on_a_lane() -> None:
    found = evaluate(TWO, wfbp(TWO), Line(alpha_s=1.0, beta_s_per_byte=0.1))
    assert [(m.label, m.ready_s, m.start_s, m.end_s) for m in found.messages] == [
        ("t1", 4.0, 4.0, 13.0),
        ("t0", 6.0, 13.0, 18.0),
    ]
    assert (found.iteration_s, found.compute_s, found.exposed_s) == (18.0, 6.0, 12.0)
    assert [(w.kind, w.start_s, w.end_s) for w in found.work] == [
        ("forward", 0.0, 2.0), ("backward", 2.0, 6.0), ("exposed", 6.0, 18.0)
    ]  # fmt: skip


def test_two_lanes_overlap_start_up_and_share_the_link() -> None:
    # t1 is alone on the link from 5, with t0 from 7. Three quarters of t1 are left then, and both keep pace, a whole of
    # each in 8 + 4 s: t1 is done at 7 + 9 = 16. A quarter of t0 is left, alone: 17.
    found = evaluate(TWO, wfbp(TWO).on_lanes(2), Line(alpha_s=1.0, beta_s_per_byte=0.1))
    assert [(m.start_s, m.end_s) for m in found.messages] == [
        (4.0, pytest.approx(16.0)),
        (6.0, pytest.approx(17.0)),
    ]


def test_a_small_message_beside_a_large_one_takes_as_long_as_both() -> None:
    """In every hop its piece stands behind the other's."""
    profile = model((4, 0.0, 0.0), (96, 0.0, 0.0))
    found = evaluate(profile, wfbp(profile).on_lanes(2), Line(alpha_s=0.0, beta_s_per_byte=0.1))
    assert [message.end_s for message in found.messages] == [pytest.approx(10.0)] * 2


def test_a_gate_lets_communication_run_into_the_next_forward_pass() -> None:
    # From the start of backward: t1 on the link 2 to 10, t0 10 to 14. Forward t0 waits until 14, t1 follows.
    cost = Line(alpha_s=0.0, beta_s_per_byte=0.1)
    in_order = evaluate(TWO, wfbp(TWO), cost, gated=True)
    assert in_order.iteration_s == pytest.approx(16.0)
    # t0 first on a link that t1 leaves half way: t1 2 to 4, t0 4 to 8, t1 8 to 14. Forward t0 8 to 9, t1 14 to 15.
    by_need = cut(TWO, ("t1", 0, 20), ("t0", 0, 40), ("t1", 20, 80))
    found = evaluate(TWO, by_need, cost, gated=True)
    assert found.iteration_s == pytest.approx(15.0)
    assert [(w.kind, w.start_s, pytest.approx(w.end_s)) for w in found.work] == [
        ("exposed", 0.0, 4.0), ("forward", 4.0, 5.0), ("exposed", 5.0, 10.0), ("forward", 10.0, 11.0),
        ("backward", 11.0, 15.0),
    ]  # fmt: skip
    assert max(message.end_s for message in found.messages) > found.iteration_s


def test_empty_tensors_and_empty_models_cost_nothing() -> None:
    empty = model((0, 1.0, 1.0))
    for gated in (False, True):
        assert evaluate(empty, wfbp(empty), Line(alpha_s=9.0, beta_s_per_byte=1.0), gated=gated).iteration_s == 2.0
        nothing = Profile(tensors=())
        assert evaluate(nothing, bsp(nothing), Line(alpha_s=9.0, beta_s_per_byte=1.0), gated=gated).iteration_s == 0.0


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="different tensors"):
        evaluate(TWO, wfbp(model((4, 0.0, 0.0))), Line(alpha_s=0.0, beta_s_per_byte=0.0))


# - Laws


@given(data=st.data(), profile=profiles(), cost=costs(), gated=st.booleans())
def test_time_is_accounted_for(data: st.DataObject, profile: Profile, cost: Cost, gated: bool) -> None:
    plan = data.draw(plans(profile))
    found = evaluate(profile, plan, cost, gated=gated)
    assert found.exposed_s >= -1e-9
    assert sum(w.end_s - w.start_s for w in found.work if w.kind == "exposed") == pytest.approx(found.exposed_s)
    assert sum(w.end_s - w.start_s for w in found.work) == pytest.approx(found.iteration_s)
    assert sum(message.nbytes for message in found.messages) == profile.nbytes
    by_lane: dict[int, float] = {}
    for message in found.messages:
        alone_s = cost.seconds(message.nbytes) if message.nbytes else 0.0
        assert message.start_s >= message.ready_s
        assert message.end_s >= message.start_s + alone_s - 1e-6
        assert message.start_s >= by_lane.get(message.lane, 0.0) - 1e-6, "one at a time, in plan order"
        by_lane[message.lane] = message.end_s


@given(data=st.data(), profile=profiles(), cost=costs())
def test_a_gate_never_hurts(data: st.DataObject, profile: Profile, cost: Cost) -> None:
    plan = data.draw(plans(profile))
    open_s = evaluate(profile, plan, cost).iteration_s
    assert evaluate(profile, plan, cost, gated=True).iteration_s <= open_s + 1e-6


@given(profile=profiles(), num_lanes=st.integers(1, 4))
def test_without_start_up_lanes_gain_nothing(profile: Profile, num_lanes: int) -> None:
    line, plan = Line(alpha_s=0.0, beta_s_per_byte=0.25), wfbp(profile)
    assert evaluate(profile, plan.on_lanes(num_lanes), line).iteration_s == pytest.approx(
        evaluate(profile, plan, line).iteration_s
    )


@given(data=st.data(), profile=profiles(), cost=costs())
def test_a_gated_iteration_is_the_period_of_many(data: st.DataObject, profile: Profile, cost: Cost) -> None:
    plan = data.draw(plans(profile)).on_lanes(1)
    begins_s = _many_gated(profile, plan, cost, num_steps=5)
    found = evaluate(profile, plan, cost, gated=True)
    for earlier, later in pairwise(begins_s):
        assert later - earlier == pytest.approx(found.iteration_s)


def _many_gated(profile: Profile, plan: Plan, cost: Cost, num_steps: int) -> list[float]:
    """Step by step on one lane, from a cold start: when each backward pass began."""
    now_s, lane_free_s, begins_s = 0.0, 0.0, []
    arrived_s = {tensor.name: 0.0 for tensor in profile.tensors}
    for _ in range(num_steps):
        for tensor in sorted(profile.tensors, key=lambda tensor: tensor.forward_order):
            now_s = max(now_s, arrived_s[tensor.name]) + tensor.forward_s
        begins_s.append(now_s)
        ready_s = {}
        for tensor in profile.tensors:
            now_s += tensor.backward_s
            ready_s[tensor.name] = now_s
        arrived_s = {tensor.name: 0.0 for tensor in profile.tensors}
        for message in plan.messages:
            names = {piece.tensor for piece in message.slices}
            lane_free_s = max(lane_free_s, *(ready_s[name] for name in names))
            lane_free_s += cost.seconds(4 * message.numel) if message.numel else 0.0
            arrived_s |= {name: max(lane_free_s, arrived_s[name]) for name in names}
    return begins_s


# - The limit


@settings(max_examples=300)
@given(data=st.data(), profile=profiles(), alpha_s=TIMES, gated=st.booleans())
def test_no_plan_beats_the_limit(data: st.DataObject, profile: Profile, alpha_s: float, gated: bool) -> None:
    plan = data.draw(plans(profile))
    found = evaluate(profile, plan, Line(alpha_s=alpha_s, beta_s_per_byte=0.25), gated=gated)
    assert found.iteration_s >= limit_s(profile, profile.nbytes, bytes_per_s=4.0) - 1e-6


@given(profile=profiles(reverse=True))
def test_the_limit_is_the_formula(profile: Profile) -> None:
    forward = list(reversed(profile.tensors))
    compute_s, wire_s = profile.forward_s + profile.backward_s, profile.nbytes / 4
    bounds = [compute_s, wire_s]
    for k in range(len(forward)):
        before_s = sum(tensor.forward_s + tensor.backward_s for tensor in forward[:k])
        bounds.append(compute_s - before_s + sum(tensor.nbytes for tensor in forward[: k + 1]) / 4)
    assert limit_s(profile, profile.nbytes, bytes_per_s=4.0) == pytest.approx(max(bounds))


@pytest.mark.parametrize(
    ("layers", "limit"),
    [
        ([(4, 5.0, 5.0), (4, 5.0, 5.0)], 21.0),  # compute, and the first tensor's byte that nothing can hide
        ([(0, 5.0, 5.0), (40, 5.0, 5.0)], 20.0),  # just hidden behind the first layer's compute: 10 of 10
        ([(0, 1.0, 1.0), (40, 1.0, 1.0)], 12.0),  # the wire, and the compute of the layer that owns it
        ([(40, 1.0, 1.0), (0, 1.0, 1.0)], 14.0),  # an early tensor: nothing of it can be hidden
        ([(40, 0.0, 0.0)], 10.0),  # the wire alone
    ],
)
def test_limits_by_hand(layers: list[tuple[int, float, float]], limit: float) -> None:
    assert limit_s(model(*layers), sum(nbytes for nbytes, _, _ in layers), bytes_per_s=4.0) == pytest.approx(limit)


def test_the_best_of_all_orders_reaches_the_limit_where_it_can() -> None:
    profile = model((8, 1.0, 2.0), (16, 2.0, 1.0), (8, 3.0, 2.0))
    # The last layer's tensor in two: one part while nothing else is there, the other after all the rest.
    pieces = [("t2", 0, 4), ("t2", 4, 8), ("t1", 0, 8), ("t1", 8, 16), ("t0", 0, 8)]
    line = Line(alpha_s=0.0, beta_s_per_byte=1.0)
    plans = [cut(profile, *order) for order in permutations(pieces)]
    best_s = min(evaluate(profile, plan, line, gated=True).iteration_s for plan in plans)
    assert best_s == pytest.approx(limit_s(profile, profile.nbytes, bytes_per_s=1.0))


def test_what_has_to_be_moved_scales_with_the_exchange() -> None:
    profile = model((40, 0.0, 0.0))
    assert limit_s(profile, 2 * 3 / 4 * 40, bytes_per_s=10.0) == pytest.approx(6.0)
    assert limit_s(Profile(tensors=()), 0, bytes_per_s=1.0) == 0.0


# - Traces


def test_an_evaluation_is_a_trace(tmp_path: Path) -> None:
    found = evaluate(TWO, wfbp(TWO).on_lanes(2), Line(alpha_s=1.0, beta_s_per_byte=0.1))
    trace = found.trace(num_steps=3)
    assert [span.start_s for span in trace.of_kind("step")] == pytest.approx([0.0, 17.0, 34.0])
    assert {span.track for span in trace.of_kind("message")} == {"lane 0", "lane 1"}
    assert sum(span.duration_s for span in trace.of_kind("exposed")) == pytest.approx(3 * found.exposed_s)
    trace.write(tmp_path / "trace-0.json")
    assert Trace.read(tmp_path / "trace-0.json").of_kind("message")[1].args == {
        "message": 1, "nbytes": 40, "waited_s": 0.0
    }  # fmt: skip


def test_what_messages_take_of_processors_counts_as_far_as_computing_needs_them() -> None:
    profile, cost = model((8, 2.0, 3.0), (4, 1.0, 4.0)), Line(alpha_s=0.0, beta_s_per_byte=0.0, host_s=0.5)
    plan = wfbp(profile)
    for cpu_s, share in ((0.0, 1.0), (1.0, 0.1), (5.0, 0.5), (10.0, 1.0), (40.0, 1.0)):  # 0: not known
        seen = profile.model_copy(update={"cpu_s": cpu_s})
        assert host_s(seen, cost) == pytest.approx(0.5 * share)
        assert evaluate(seen, plan, cost).iteration_s == pytest.approx(10.0 + 2 * 0.5 * share)
