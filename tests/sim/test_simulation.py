"""Simulations: what the evaluator computes, event by event; and what it cannot: paces, drag, servers, priority."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientflow.cost import Cost, Line, evaluate
from gradientflow.cost.evaluate import startup_and_wire_s
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.schedule import bsp, mg_wfbp, wfbp
from gradientflow.schedule.decoupled import dear
from gradientflow.sim.carriers import Lanes, Load, Piece, Servers, Stage
from gradientflow.sim.events import Activities, Activity, Timeline, fair_speeds
from gradientflow.sim.workers import Conditions, Simulated, Simulation
from unit.test_evaluate import model, plans, profiles
from unit.test_merge import GOOGLENET

COSTS = st.builds(Line, alpha_s=st.integers(0, 9).map(float), beta_s_per_byte=st.sampled_from([0.0, 0.25, 1.0]))


def by_tensor(profile: Profile, plan: Plan) -> Plan:
    """With a gate before every tensor."""
    return plan.model_copy(update={"stages": tuple((tensor.name,) for tensor in profile.tensors)})


def simulated(
    profile: Profile,
    plan: Plan,
    cost: Cost,
    *,
    gated: bool = False,
    conditions: Conditions | None = None,
    drag: float = 0.0,
) -> Simulated:
    itemsize = {tensor.name: tensor.torch_dtype.itemsize for tensor in profile.tensors}
    nbytes = [sum(piece.numel * itemsize[piece.tensor] for piece in message.slices) for message in plan.messages]
    parts = [startup_and_wire_s(cost, size) for size in nbytes]
    loads = [Load(startup_s, wire_s, drag_s=drag * wire_s) for startup_s, wire_s in parts]
    simulation = Simulation(profile, plan, conditions or Conditions(), 4, gated)
    return simulation.run(lambda timeline, activities: Lanes(plan, loads, timeline, activities))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), profile=profiles(), cost=COSTS, gated=st.booleans())
def test_an_ideal_simulation_is_the_evaluators(data: st.DataObject, profile: Profile, cost: Line, gated: bool) -> None:
    plan = by_tensor(profile, data.draw(plans(profile)))
    found = simulated(profile, plan, cost, gated=gated)
    expected = evaluate(profile, plan, cost, gated=gated, stages=plan.stages)
    assert found.iterations_s(1)[-1] == pytest.approx(expected.iteration_s, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(profile=profiles(reverse=True), cost=COSTS, lanes=st.integers(1, 2), norms=st.booleans())
def test_halves_are_the_evaluators(profile: Profile, cost: Line, lanes: int, norms: bool) -> None:
    plan = by_tensor(profile, dear(profile, cost, nbytes=40, num_lanes=lanes, norms=norms))
    found = simulated(profile, plan, cost, gated=True)
    expected = evaluate(profile, plan, cost, gated=True, stages=plan.stages)
    assert found.iterations_s(1)[-1] == pytest.approx(expected.iteration_s, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), profile=profiles(), cost=COSTS, drag=st.sampled_from([0.1, 0.5]))
def test_simulations_repeat_and_drag_never_helps(
    data: st.DataObject, profile: Profile, cost: Line, drag: float
) -> None:
    # One lane: with several, to be late may change who shares the link with whom, for the better.
    plan = data.draw(plans(profile)).on_lanes(1)
    calm, dragged, again = (simulated(profile, plan, cost, drag=share) for share in (0.0, drag, drag))
    assert dragged.ends_s == again.ends_s and dragged.trace == again.trace
    assert dragged.ends_s[-1] >= calm.ends_s[-1] - 1e-9


def test_drag_takes_its_share_of_computing() -> None:
    # The message of the last layer is on the wire for 4 s, in which backward of the first gets on at 3/4.
    profile = model((4, 1.0, 6.0), (16, 1.0, 1.0))
    found = simulated(profile, wfbp(profile), Line(alpha_s=0.0, beta_s_per_byte=0.25), drag=0.25)
    assert found.iterations_s(1)[-1] == pytest.approx(2.0 + 1.0 + 6.0 + 4 * 0.25 + 1.0)


def test_everybody_waits_for_the_slowest() -> None:
    profile = model((8, 1.0, 2.0), (8, 1.0, 2.0))
    cost = Line(alpha_s=1.0, beta_s_per_byte=0.25)
    both = simulated(profile, wfbp(profile), cost, conditions=Conditions(paces=((1.0, 1.5),)))
    slow = simulated(profile, wfbp(profile), cost, conditions=Conditions(paces=((1.5,),)))
    assert both.ends_s == pytest.approx(slow.ends_s)


def test_what_is_waited_for_adds_up() -> None:
    profile = model((400, 1.0, 2.0), (800, 1.0, 2.0))
    for plan in (wfbp(profile), bsp(profile)):
        found = simulated(profile, plan, Line(alpha_s=0.5, beta_s_per_byte=0.01))
        exposed_s = found.iterations_s(1)[-1] - found.compute_s
        assert sum(found.exposed_s[-1].values()) == pytest.approx(exposed_s)


def test_the_optimizer_comes_last_or_stage_by_stage() -> None:
    profile = model((4, 1.0, 2.0), (4, 1.0, 2.0))
    conditions = Conditions(update_s_per_byte=0.25)
    for gated in (False, True):
        plan = by_tensor(profile, bsp(profile))
        found = simulated(profile, plan, Line(alpha_s=3.0, beta_s_per_byte=0.0), gated=gated, conditions=conditions)
        assert found.iterations_s(1)[-1] == pytest.approx(2.0 + 4.0 + 3.0 + 2.0)


def test_lanes_share_a_processor_for_their_codecs() -> None:
    profile = model((4, 0.0, 0.0), (4, 0.0, 0.0))
    plan = wfbp(profile).on_lanes(2)
    loads = [Load(0.0, 1.0, encode_s=2.0), Load(0.0, 1.0, encode_s=2.0)]
    found = Simulation(profile, plan, Conditions(), 3, gated=False).run(partial(Lanes, plan, loads))
    assert found.iterations_s(1)[-1] == pytest.approx(2 * 2.0 + 2 * 1.0)


def test_a_step_is_closed_when_all_messages_have_been_carried() -> None:
    profile = model((4, 0.0, 0.0), (4, 0.0, 0.0))
    plan = wfbp(profile).on_lanes(2)
    loads = [Load(0.0, 4.0), Load(1.0, 0.5)]
    make = partial(Lanes, plan, loads, closing=Load(3.0, 0.0))
    found = Simulation(profile, plan, Conditions(), 3, gated=False).run(make)
    assert found.iterations_s(1)[-1] == pytest.approx(4.0 + 0.5 + 3.0)


# - Links


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 3.0]), min_size=1), min_size=1, max_size=6
    )
)
def test_shares_are_max_min_fair(links: list[dict[str, float]]) -> None:
    transfers = [Activity(1.0, lambda: None, shares) for shares in links]
    fair_speeds(transfers)
    loads = {link: sum(one.links.get(link, 0.0) * one.speed for one in transfers) for link in "abc"}
    assert all(load <= 1 + 1e-9 for load in loads.values())
    for one in transfers:  # each has a full link on which nobody is faster
        assert any(
            loads[link] >= 1 - 1e-9 and one.speed >= max(o.speed for o in transfers if link in o.links) - 1e-9
            for link in one.links
        )


def test_links_have_less_room_while_somebody_computes() -> None:
    timeline, done = Timeline(), []
    activities = Activities(timeline, {"bus": 0.5})
    activities.start(Activity(4.0, lambda: done.append(("sent", timeline.now_s)), {"bus": 1.0}))
    activities.start(Activity(2.0, lambda: done.append(("computed", timeline.now_s))))
    timeline.run()
    assert done == [("computed", 2.0), ("sent", 5.0)]


def ended_s(*wanted: float) -> list[float]:
    """Two seconds of work each, that take so much of all cores."""
    timeline, done = Timeline(), dict[int, float]()
    activities = Activities(timeline)
    for number, cores in enumerate(wanted):
        links = {f"thread {number}": 1.0} if number % 2 else {}
        note = partial(lambda number: done.update({number: timeline.now_s}), number)
        activities.start(Activity(2.0, note, links, cores=cores))
    timeline.run()
    return [done[number] for number in range(len(wanted))]


def test_work_on_cores_is_slowed_down_when_there_are_too_few() -> None:
    assert ended_s(0.5, 0.5) == [2.0, 2.0]
    assert ended_s(1.0, 1.0) == [4.0, 4.0]
    assert ended_s(0.0, 1.0, 1.0) == [2.0, 4.0, 4.0], "what sleeps is in nobody's way, nor is anybody in its"
    assert ended_s(1.0, 0.25, 0.25)[0] == pytest.approx(3.0)


def test_crowded_workers() -> None:
    """Two workers on a core: what runs there takes twice as long, what sleeps does not."""
    profile = model((4, 1.0, 2.0))
    loads = [Load(1.0, 2.0, cores_s=1.5)]
    for share, computing_s in ((0.0, 3.0), (0.5, 3.0), (1.0, 6.0)):
        conditions = Conditions(update_s_per_byte=0.5, gather_s_per_byte=0.25, crowding=2.0, computing_share=share)
        found = Simulation(profile, bsp(profile), conditions, 3, gated=False).run(partial(Lanes, bsp(profile), loads))
        assert found.iterations_s(1)[-1] == pytest.approx(computing_s + 2 * 1.0 + 3.0 + 2 * 2.0)


def test_messages_are_copied_back_while_others_are_on_their_way() -> None:
    """4 bytes each, one lane: sent from 1 to 5 and from 5 to 9; the first is copied from 5 on, the second from 9 on."""
    profile = model((4, 0.0, 0.5), (4, 0.0, 1.0))
    plan, loads = wfbp(profile), [Load(0.0, 4.0)] * 2
    for scatter_s_per_byte, expected_s in ((0.0, 9.0), (0.5, 9.0 + 2.0), (1.5, 5.0 + 6.0 + 6.0)):
        conditions = Conditions(scatter_s_per_byte=scatter_s_per_byte)
        found = Simulation(profile, plan, conditions, 3, gated=False).run(partial(Lanes, plan, loads))
        assert found.iterations_s(1)[-1] == pytest.approx(expected_s)


def test_messages_that_were_quick_alone_slow_each_other_down() -> None:
    profile = model((4, 0.0, 0.0), (4, 0.0, 0.0))
    plan = wfbp(profile).on_lanes(2)
    for cores_s, expected_s in ((0.5, 2.0), (1.6, 2.0 * 1.6), (9.0, 2.0 * 2.0)):
        make = partial(Lanes, plan, [Load(2.0, 0.0, cores_s=cores_s)] * 2)
        found = Simulation(profile, plan, Conditions(), 3, gated=False).run(make)
        assert found.iterations_s(1)[-1] == pytest.approx(expected_s)


def test_a_message_that_begins_beside_another_takes_longer_to_start() -> None:
    """A first one on a free machine, a second beside it, a third when both are done."""
    profile = model((4, 0.0, 9.0), (4, 0.0, 0.0), (4, 0.0, 0.0))
    loads = [Load(2.0, 1.0, beside_s=1.5, cores_s=0.5)] * 3
    for num_lanes, ends_s in ((2, [3.0, 4.5, 12.0]), (1, [3.0, 6.0, 12.0])):
        plan = wfbp(profile).on_lanes(num_lanes)
        found = Simulation(profile, plan, Conditions(), 1, gated=False).run(partial(Lanes, plan, loads))
        took = sorted(span.end_s for span in found.trace.of_kind("message"))
        assert took == pytest.approx(ends_s, abs=1e-6)


# - ByteScheduler's toy: three layers, two units each way; pushes and pulls of 3, 6 and 3 units on links of their own.

TOY = model((12, 2.0, 2.0), (24, 2.0, 2.0), (12, 2.0, 2.0))
FORWARD = {"t0": 0, "t1": 1, "t2": 2}


def toy_s(units: int | None, *, urgent: bool) -> float:
    """From the start of backward to the end of the next forward pass; pieces of so many units, or whole layers."""
    plan = by_tensor(TOY, wfbp(TOY))
    pieces = []
    for message in plan.messages:
        length = units or message.numel
        urgency = FORWARD[message.slices[0].tensor] if urgent else 0
        stages = (Stage("push", 0.0, float(length), {"up": 1.0}), Stage("pull", 0.0, float(length), {"down": 1.0}))
        pieces.append([Piece(urgency, stages) for _ in range(message.numel // length)])
    simulation = Simulation(TOY, plan, Conditions(), 3, gated=True)
    found = simulation.run(lambda timeline, activities: Servers(pieces, 1, timeline, activities))
    forward_ends_s = [span.end_s for span in found.trace.of_kind("forward")]
    backward_starts_s = [span.start_s for span in found.trace.of_kind("backward")]
    return forward_ends_s[-1] - backward_starts_s[-2]


def test_bytescheduler_toy() -> None:
    assert toy_s(None, urgent=False) == pytest.approx(26)
    assert toy_s(1, urgent=True) == pytest.approx(18)


def test_mg_wfbp_on_the_googlenet_trace() -> None:
    """Eight K80 nodes, alpha 830.2 us, beta 3.337 ns a byte: when communication ends after the start of backward."""
    layers = [(4 * numel, 0.0, micros * 1e-6) for numel, micros in GOOGLENET]
    profile = model(*layers)
    cost = Line(alpha_s=830.2e-6, beta_s_per_byte=3.337e-9)
    plans_of = {(9, 206.29): mg_wfbp(profile, cost), (64, 232.18): wfbp(profile), (1, 384.75): bsp(profile)}
    for (num_messages, end_ms), plan in plans_of.items():
        found = simulated(profile, plan, cost)
        assert len(plan.messages) == num_messages
        assert 1e3 * found.iterations_s(1)[-1] == pytest.approx(end_ms, abs=0.01)
