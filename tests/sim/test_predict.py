"""Predictions: closed forms, laws, clocks, servers, and sizes that nobody has at home."""

from __future__ import annotations

import pytest

from gradientflow.cost.price import price
from gradientflow.errors import RecipeError, UsageError
from gradientflow.lab.workloads import workload
from gradientflow.network import Carrying
from gradientflow.patterns import ring_all_reduce, two_level
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.schedule import bsp
from gradientflow.sim.clocks import steps_s
from gradientflow.sim.cluster import Cluster, Collective, Measured, Overheads, Processors, Topology, Wire, names, read
from gradientflow.sim.compared import compare_run
from gradientflow.sim.costs import levels_cost, pattern_cost, wiring
from gradientflow.sim.predict import GATE, HELD_UP, SLOWER, STAGE, Varying, plan_for, predict, simulate
from gradientflow.sync import ASP, Sync

RATE = 1e9  # bytes per second


def cluster(hosts: int = 8, workers_per_host: int = 1, **more: object) -> Cluster:
    return Cluster(
        name="here",
        hosts=hosts,
        workers_per_host=workers_per_host,
        inside=Wire(bits_per_s=80e9) if workers_per_host > 1 else None,
        between=Wire(bits_per_s=8 * RATE),
        **more,
    )


def model(*nbytes: int, compute_s: float = 0.3) -> Profile:
    """Equal layers, all with as long to compute."""
    each_s = compute_s / len(nbytes)
    tensors = [
        TensorProfile(
            name=f"t{i}", shape=(size // 4,), forward_order=i, forward_s=each_s / 3, backward_s=2 * each_s / 3
        )
        for i, size in enumerate(nbytes)
    ]
    return Profile(tensors=tuple(reversed(tensors)))


BIG = model(40_000_000, 40_000_000, 20_000_000)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bsp_is_computing_and_one_ring(world: int) -> None:
    """2 (p - 1) alpha + 2 (p - 1) / p S / B."""
    here = cluster(collective=Collective(hop_s=1e-3))
    found = predict(BIG, Recipe.parse("bsp"), here, world)
    expected_s = 2 * (world - 1) * 1e-3 + 2 * (world - 1) / world * BIG.nbytes / RATE
    assert found.exposed_s == pytest.approx(expected_s)
    assert found.sent_nbytes == pytest.approx(2 * (world - 1) / world * BIG.nbytes)


def test_dedicated_servers_take_a_models_time() -> None:
    """As many servers as workers: S / B if pieces are pushed and pulled side by side, plus what fills the pipeline."""
    found = predict(model(*[4_000_000] * 50), Recipe.parse("bsp-ps:8"), cluster(), 8)
    assert 0.2 < found.exposed_s < 0.2 * 1.6


@pytest.mark.parametrize(("spare", "gain"), [(0, 1.0), (2, 1.19), (4, 1.375), (6, 1.56), (8, 1.75)])
def test_byteps_table_for_eight_hosts(spare: int, gain: float) -> None:
    """2 n (n - 1) M / ((n^2 + k n - 2 k) B): what the busiest port carries under the runtime's own placement."""
    name = f"bsp-ps:{spare}" if spare else "bsp-ps"
    found = predict(model(*[4_000_000] * 96, compute_s=0.0), Recipe.parse(name), cluster(), 8)
    nbytes = 96 * 4_000_000
    busiest_s = max(found.utilisation.values()) * found.iteration_s
    ring_s = 2 * 7 / 8 * nbytes / RATE
    assert ring_s / busiest_s == pytest.approx(gain, rel=0.02)


def test_codecs_send_less_and_compute() -> None:
    here = cluster(overheads=Overheads(touch_s_per_byte=1e-10))
    exact, half, sparse = (predict(BIG, Recipe.parse(text), here, 8) for text in ("bsp", "bsp+fp16", "bsp+csc:10%"))
    assert half.sent_nbytes == pytest.approx(exact.sent_nbytes / 2)
    assert half.iteration_s < exact.iteration_s
    assert sparse.sent_nbytes < 0.12 * exact.sent_nbytes
    # Where it does not pay, messages go as they are, as in the runtime; half precision is not weighed.
    slow = cluster(overheads=Overheads(touch_s_per_byte=1e-8))
    assert predict(BIG, Recipe.parse("bsp+csc:10%"), slow, 8).iteration_s == pytest.approx(exact.iteration_s)
    assert predict(BIG, Recipe.parse("bsp+fp16"), slow, 8).iteration_s > exact.iteration_s


def test_mixed_levels_are_the_patterns_price() -> None:
    """The closed form of two levels, and its transfers link by link."""
    here = cluster(hosts=4, workers_per_host=2)
    line = levels_cost(here, 8)
    for nbytes in (2.0**20, 2.0**26):
        hosts = [[2 * host, 2 * host + 1] for host in range(4)]
        assert line.seconds(nbytes) == pytest.approx(price(two_level(hosts), nbytes, wiring(here, 8)), rel=1e-6)


@pytest.mark.parametrize(
    ("topology", "factor"),
    [
        (Topology(), 1.0),
        (Topology(kind="fat-tree", hosts_per_switch=4, oversubscription=4.0), 1.0),  # one flow each way over an uplink
        (Topology(kind="fat-tree", hosts_per_switch=1, oversubscription=2.0), 2.0),
        (Topology(kind="torus", sides=(4, 2)), 1.0),
        (Topology(kind="graph", cables=tuple((host, (host + 1) % 8) for host in range(8))), 1.0),
    ],
)
def test_a_ring_on_any_wiring(topology: Topology, factor: float) -> None:
    nbytes = 2.0**24
    here = cluster(topology=topology)
    expected_s = 2 * 7 / 8 * nbytes / RATE
    assert price(ring_all_reduce(8), nbytes, wiring(here, 8)) == pytest.approx(factor * expected_s, rel=0.01)
    assert pattern_cost(here, "ring", 8).seconds(nbytes) == pytest.approx(factor * expected_s, rel=0.01)


SLOW_TO_BEGIN = Wire(protocol="tcp", bits_per_s=8 * RATE, latency_s=0.02)


def test_every_way_pays_a_wires_latency() -> None:
    """The backend's own ring as ours, on a switch as under one of a fat tree."""
    here = Cluster(name="here", hosts=8, between=SLOW_TO_BEGIN)
    under_one = here.model_copy(update={"topology": Topology(kind="fat-tree")})
    nbytes = 2.0**24
    ring_s = here.all_reduce(8).seconds(nbytes)
    assert here.all_reduce(8).seconds(0) == pytest.approx(14 * 0.02)
    assert pattern_cost(here, "ring", 8).seconds(nbytes) == pytest.approx(ring_s)
    assert pattern_cost(under_one, "ring", 8).seconds(nbytes) == pytest.approx(ring_s)
    taken = {predict(BIG, Recipe.parse("wfbp"), place, 8).iteration_s for place in (here, under_one)}
    assert max(taken) == pytest.approx(min(taken))


@pytest.mark.parametrize(
    ("collective", "ring_s"),
    [
        (Collective(), 2 * 0.02 + 4 * 0.001),
        (Collective(inside_hop_s=0.0), 2 * 0.02),
        (Collective(hop_s=0.0), 0.0),
        (Collective(hop_s=0.003), 6 * 0.003),
        (Collective(hop_s=0.003, inside_hop_s=0.001), 2 * 0.003 + 4 * 0.001),
    ],
)
def test_a_step_takes_what_the_file_says_or_what_the_wire_does(collective: Collective, ring_s: float) -> None:
    inside = Wire(bits_per_s=80e9, latency_s=0.001)
    here = Cluster(
        name="here", hosts=2, workers_per_host=2, inside=inside, between=SLOW_TO_BEGIN, collective=collective
    )
    assert here.all_reduce(4).seconds(0) == pytest.approx(ring_s)


def test_links_that_are_too_slow_for_far_partners() -> None:
    """Halving and doubling crosses the oversubscribed uplink with everything, a ring with one flow."""
    here = cluster(topology=Topology(kind="fat-tree", hosts_per_switch=4, oversubscription=4.0))
    assert pattern_cost(here, "halving", 8).seconds(2.0**24) > 1.3 * pattern_cost(here, "ring", 8).seconds(2.0**24)


# - Not in step

PACES = Varying(slowdown={3: 2.0})


def test_bsp_is_as_fast_as_the_slowest_and_asp_as_all_together() -> None:
    compute_s, exposed_s = 1.0, 0.25
    ranks = PACES.ranks(4)
    fully = steps_s(Sync(staleness=0), ranks, compute_s, exposed_s)
    free = steps_s(ASP, ranks, compute_s, exposed_s)
    assert sum(fully) / len(fully) == pytest.approx(2.25, rel=2e-3)
    # Three steps in 1.25 s, one in 2.25 s: in the long run the mean of rates.
    assert len(free) / sum(free) == pytest.approx((3 / 1.25 + 1 / 2.25) / 4, rel=0.01)


def test_staleness_helps_against_jitter_and_never_hurts() -> None:
    ranks = Varying(jitter=0.3, seed=1).ranks(8)
    means = [sum(found) / len(found) for s in (0, 1, 4, 16) for found in [steps_s(Sync(staleness=s), ranks, 1.0, 0.0)]]
    assert means == sorted(means, reverse=True) and means[0] > 1.3 > means[-1]


def test_local_steps_share_one_exchange() -> None:
    ranks = Varying().ranks(4)
    for period in (1, 2, 8):
        found = steps_s(Sync(period=period), ranks, 1.0, 0.5)
        assert sum(found) / len(found) == pytest.approx(1.0 + 0.5 / period)
    fragments = Sync(period=8, fragments=2, delay=1)  # two of 2 s each, of which a step hides 1 s
    assert steps_s(fragments, ranks, 1.0, 4.0)[0] == pytest.approx(1.0 + 2 * 1.0 / 8)


def test_deltas_hide_behind_no_backward_pass() -> None:
    ring_s = 2 * 7 / 8 * BIG.nbytes / RATE
    assert predict(BIG, Recipe.parse("wfbp"), cluster(), 8).exposed_s < 0.9 * ring_s
    for period in (2, 4):
        found = predict(BIG, Recipe.parse(f"wfbp@local:{period}"), cluster(), 8)
        assert found.exposed_s == pytest.approx(ring_s / period)
        assert found.sent_nbytes == pytest.approx(2 * 7 / 8 * BIG.nbytes / period)


def test_jitter_has_percentiles_and_is_the_same_each_time() -> None:
    calm = predict(BIG, Recipe.parse("wfbp"), cluster(), 8)
    varied = [predict(BIG, Recipe.parse("wfbp"), cluster(), 8, Varying(jitter=0.1)) for _ in range(2)]
    assert varied[0] == varied[1]
    assert calm.p50_s == calm.p95_s < varied[0].p50_s < varied[0].p95_s


@pytest.mark.parametrize("name", names())
def test_no_speedup_is_above_the_number_of_workers(name: str) -> None:
    place = read(name)
    profile = workload("resnet-50", device=place.device)
    for world in {max(2, place.workers_per_host), min(32, place.places)}:
        for recipe in ("bsp", "flow", "lazy+powersgd:2", "gradientflow:10%", "lazy@local:8", "lazy-ps"):
            assert predict(profile, Recipe.parse(recipe), place, world).speedup <= world * (1 + 1e-9), (recipe, world)


# - Where time goes

#: A bus in common, a codec, computing that messages hold up, and a training thread that they take time from.
BUSY = {
    "collective": Collective(launch_s=1e-3, host_s=1e-4),
    "overheads": Overheads(
        update_s_per_byte=1e-11,
        gather_s=1e-4,
        interference_s_per_byte=1e-11,
        bus_while_computing=0.7,
        touch_s_per_byte=1e-11,
    ),
    "processors": Processors(cores=2, workers=4),
    "carrying": (Carrying(message_s=1e-3, byte_s=1e-9),),
}
LIKE_THIS = [
    *("bsp", "wfbp", "lazy", "flow", "bytescheduler:1MB", "dear", "flow-a2a:2", "lazy+csc:10%", "lazy-ps", "flow-ps"),
    *("bytescheduler-ps:4", "lazy@local:4", "wfbp@diloco:8:fragments=2:delay=1", "lazy-ps@ssp:2", "lazy-ps@asp"),
]


@pytest.mark.parametrize("varying", [Varying(), Varying(slowdown={1: 1.5}), Varying(jitter=0.2)], ids=str)
@pytest.mark.parametrize("recipe", LIKE_THIS)
def test_no_link_is_busier_than_always_and_all_waiting_is_for_something(recipe: str, varying: Varying) -> None:
    many_layers = model(*[5_000_000] * 5)
    for place in (cluster(), cluster(hosts=4, workers_per_host=2, **BUSY)):
        found = predict(many_layers, Recipe.parse(recipe), place, 8, varying)
        assert 0 < max(found.utilisation.values()) <= 1 + 1e-9
        assert sum(found.exposed_by.values()) == pytest.approx(found.exposed_s, abs=1e-6)


def test_many_small_messages_wait_for_each_other_where_a_probe_saw_that() -> None:
    """Two lanes, 100 messages that are start-up only: 50 times what two abreast take, not what one takes alone."""
    small = model(*[4] * 100, compute_s=0.0)
    for abreast_s, each_s in ((0.0, 1e-3), (5e-4, 1e-3), (5e-3, 5e-3)):
        carrying = (Carrying(message_s=0.0, byte_s=0.0, abreast_s=abreast_s),)
        place = cluster(collective=Collective(launch_s=1e-3, lanes=2), carrying=carrying)
        found = predict(small, Recipe.parse("wfbp"), place, 8)
        assert found.iteration_s == pytest.approx(50 * each_s, rel=0.05)
        fewer = predict(small, Recipe.parse("wfbp"), place, 4)
        assert fewer.iteration_s == pytest.approx(50 * 1e-3, rel=0.05), "of other worlds it says nothing"


def test_pieces_through_servers_take_of_processors_what_a_probe_counted() -> None:
    """50 ms a piece and host, four hosts on two cores, 10 messages; beside that, what pieces wait for nobody's work."""
    few, hosts = model(*[4] * 10, compute_s=0.0), {"hosts": 4, "processors": Processors(cores=2, workers=4)}
    for abreast_s, more_s in ((0.0, 0.0), (0.3, 0.0), (0.4 + 0.25, 0.25)):
        counted = Carrying(pattern="ps", message_s=5e-2, byte_s=0.0, abreast_s=abreast_s, abreast=8)
        place = cluster(carrying=(Carrying(message_s=0.0, byte_s=0.0), counted), **hosts)
        found = predict(few, Recipe.parse("wfbp-ps"), place, 4)
        assert found.iteration_s == pytest.approx(10 * 4 / 2 * 5e-2 + more_s, rel=0.05)
    assert predict(few, Recipe.parse("wfbp-ps"), place, 1).iteration_s == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("recipe", ["lazy", "flow"])
def test_a_link_that_computing_hides_is_busy_as_long_as_bytes_take(recipe: str) -> None:
    found = predict(model(*[5_000_000] * 20, compute_s=1.0), Recipe.parse(recipe), cluster(), 8)
    assert found.utilisation["wire"] * found.iteration_s == pytest.approx(2 * 7 / 8 * 100_000_000 / RATE, rel=1e-6)


def test_local_steps_share_what_an_exchange_takes() -> None:
    """Of links too, and message by message."""
    each = predict(BIG, Recipe.parse("wfbp@local:1"), cluster(), 8)
    for period in (4, 8):
        found = predict(BIG, Recipe.parse(f"wfbp@local:{period}"), cluster(), 8)
        assert found.exposed_by == pytest.approx({name: s / period for name, s in each.exposed_by.items()})
        busy_s, of_each_s = (one.utilisation["wire"] * one.iteration_s for one in (found, each))
        assert busy_s == pytest.approx(of_each_s / period)


def test_who_waits_for_a_straggler_is_told_so() -> None:
    found = predict(BIG, Recipe.parse("wfbp"), cluster(), 8, Varying(slowdown={1: 2.0}))
    assert next(iter(found.exposed_by.items())) == (SLOWER, pytest.approx(0.3))
    held_up = cluster(overheads=Overheads(gather_s=0.1))
    assert predict(BIG, Recipe.parse("wfbp"), held_up, 8).exposed_by[HELD_UP] == pytest.approx(0.3)


def test_a_gate_takes_of_the_training_thread_for_each_tensor_and_stage() -> None:
    """Where messages are free, that is all that the exchange takes."""
    small, each_s = model(*[400] * 40, compute_s=1.0), 1e-4
    overheads = Overheads(gather_s=each_s)
    free = cluster(overheads=overheads, processors=Processors(cores=8, workers=8))
    plain, gated = (simulate(small, Recipe.parse(recipe), free, 8) for recipe in ("wfbp", "flow"))
    num_stages = len(plan_for(small, Recipe.parse("flow"), free, 8).stages)
    assert plain[0].iteration_s == pytest.approx(1.0 + 40 * each_s, rel=1e-3)
    assert gated[0].iteration_s == pytest.approx(1.0 + ((1 + GATE) * 40 + STAGE * num_stages) * each_s, rel=1e-3)


def test_plans_are_made_of_what_the_runtime_sees() -> None:
    """Gathering takes time in backward, so that gradients come later than they are computed."""
    layers, slow = model(*[1_000_000] * 40, compute_s=0.1), Overheads(gather_s=5e-3)
    many = cluster(overheads=slow, processors=Processors(cores=8, workers=8))
    enough = cluster(overheads=slow)
    assert plan_for(layers, Recipe.parse("merge"), many, 8) != plan_for(layers, Recipe.parse("merge"), enough, 8)


# - The trace, and size


def test_a_trace_is_what_a_rank_would_have_recorded() -> None:
    found, trace = simulate(BIG, Recipe.parse("flow"), cluster(), 8)
    assert {span.kind for span in trace.spans} >= {"forward", "backward", "message"}
    sent = sum(span.args["nbytes"] for span in trace.of_kind("message") if span.step == 1)
    assert sent == BIG.nbytes and found.num_messages == len({span.args["message"] for span in trace.of_kind("message")})


def test_many_workers_are_one() -> None:
    """Those that behave alike are simulated once, however many there are."""
    profile, place = workload("bert-large", device="h100-amp"), read("h100-400g")
    few, many = (predict(profile, Recipe.parse("lazy"), place, world) for world in (1024, 16384))
    assert few.iteration_s < many.iteration_s < 2 * few.iteration_s
    paces = Varying(slowdown={7: 1.5, 9: 1.5}).paces(16384, 1)
    assert paces == [[1.5, 1.0]]


# - Wrong use


def test_more_workers_than_places() -> None:
    with pytest.raises(UsageError, match="give 1 to 8 workers"):
        predict(BIG, Recipe.parse("lazy"), cluster(), 9)


@pytest.mark.parametrize("harness_s", [0.31, 5.0])
def test_what_is_there_once_is_a_part_of_an_iteration(harness_s: float) -> None:
    with pytest.raises(UsageError, match=r"harness_s is .* lower it"):
        predict(BIG, Recipe.parse("lazy"), cluster(overheads=Overheads(harness_s=harness_s)), 8)


def test_a_graph_in_two_parts() -> None:
    apart = tuple((host, host + 1) for host in range(0, 8, 2))
    with pytest.raises(UsageError, match=r"cluster here: .* in 4 parts \(no way leads from 0, 1 to 2, 3\)"):
        predict(BIG, Recipe.parse("lazy"), cluster(topology=Topology(kind="graph", cables=apart)), 8)


def test_a_pattern_where_links_are_not_known() -> None:
    unknown = Cluster(name="x", hosts=4, measured=(Measured(workers=4, points=((2**12, 1e-3), (2**20, 1e-2))),))
    assert predict(BIG, Recipe.parse("lazy"), unknown, 4).iteration_s > 0
    with pytest.raises(UsageError, match="nothing is known of links"):
        predict(BIG, Recipe.parse("lazy-tree"), unknown, 4)


def test_too_many_servers() -> None:
    with pytest.raises(UsageError, match="give at most 65536"):
        predict(BIG, Recipe.parse("lazy-ps:1000000000"), cluster(), 8)


def test_too_many_for_a_pattern() -> None:
    with pytest.raises(UsageError, match="at most 256"):
        predict(BIG, Recipe.parse("lazy-tree"), cluster(hosts=512), 512)


def test_plans_are_the_runtimes() -> None:
    """The very plan that the recipe makes, not one of the simulator's own."""
    plan: Plan = bsp(BIG)
    assert predict(BIG, Recipe.parse("bsp"), cluster(), 8).num_messages == len(plan.messages)
    with pytest.raises(RecipeError):
        Recipe.parse("nothing-of-the-kind:x").check()


def test_a_run_is_compared_message_by_message() -> None:
    """A run that went exactly as predicted, and one in which a message took twice as long."""
    recipe = Recipe.parse("wfbp")
    _, trace = simulate(BIG, recipe, cluster(), 8)
    exact = list(compare_run(BIG, recipe, cluster(), 8, trace))
    assert exact[0].endswith("+0.0 %")
    late = trace._replace(
        spans=tuple(
            span._replace(end_s=span.end_s + span.duration_s) if (span.kind, span.name) == ("message", "t1") else span
            for span in trace.spans
        )
    )
    assert list(compare_run(BIG, recipe, cluster(), 8, late))[2].endswith(" t1")
    with pytest.raises(UsageError, match="run longer"):
        list(compare_run(BIG, recipe, cluster(), 8, trace._replace(spans=())))
