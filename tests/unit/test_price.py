"""Prices of patterns: the closed forms of the literature, and laws where there is none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow import cost
from gradientflow.cost import BCube, Hosts, Line, Switch, Topology, Torus, price
from gradientflow.errors import UsageError
from gradientflow.patterns import (
    ALL_REDUCES,
    Pattern,
    Transfer,
    bcube,
    doubling_all_gather,
    halving_doubling,
    halving_reduce_scatter,
    in_turn,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    torus,
    two_level,
)

WORLDS = [*range(1, 18), 32, 33]
POWERS_OF_TWO = [1, 2, 4, 8, 16, 32]

#: alpha, beta, gamma and S: none of them is small beside the others in any formula below.
A, B, G, S = 3e-5, 1e-9, 2e-10, 100_000.0


def lg(world: int) -> int:
    """Rounded down."""
    return world.bit_length() - 1


def up(world: int) -> int:
    """lg p, rounded up."""
    return (world - 1).bit_length()


def switch(world: int) -> Switch:
    return Switch(world, alpha_s=A, beta_s_per_byte=B)


def priced(pattern: Pattern) -> float:
    return price(pattern, S, switch(pattern.world), gamma_s_per_byte=G)


def in_racks(num_racks: int, size: int, inside: Line, between: Line) -> Hosts:
    return Hosts([range(rack * size, (rack + 1) * size) for rack in range(num_racks)], inside, between)


# - Closed forms on a switch


def fold_s(world: int) -> float:
    """What ranks beyond a power of two cost the algorithms that pair ranks."""
    return 0.0 if world in POWERS_OF_TWO else 2 * (A + S * B) + S * G


def halving_s(world: int) -> float:
    p = 1 << lg(world)
    return 2 * lg(p) * A + 2 * (p - 1) / p * S * B + (p - 1) / p * S * G + fold_s(world)


CLOSED_FORMS: dict[str, Callable[[int], float]] = {
    "ring": lambda p: 2 * (p - 1) * A + 2 * (p - 1) / p * S * B + (p - 1) / p * S * G,
    "tree": lambda p: 2 * up(p) * (A + S * B) + up(p) * S * G,
    "doubling": lambda p: lg(p) * (A + S * B + S * G) + fold_s(p),
    "halving": halving_s,
    # A parameter server with p - 1 workers, push and then pull.
    "star": lambda p: (2 * A + 2 * (p - 1) * S * B + (p - 1) * S * G) if p > 1 else 0.0,
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_all_reduces_on_a_switch(name: str, world: int) -> None:
    assert priced(ALL_REDUCES[name](world)) == pytest.approx(CLOSED_FORMS[name](world), rel=1e-12)


@pytest.mark.parametrize("world", WORLDS)
def test_halves_of_the_ring_on_a_switch(world: int) -> None:
    share = (world - 1) / world
    scatter_s = (world - 1) * A + share * S * (B + G)
    assert priced(ring_reduce_scatter(world)) == pytest.approx(scatter_s, rel=1e-12)
    assert priced(ring_all_gather(world)) == pytest.approx((world - 1) * A + share * S * B, rel=1e-12)


@pytest.mark.parametrize("world", POWERS_OF_TWO)
def test_halves_in_pairs_on_a_switch(world: int) -> None:
    share = (world - 1) / world
    scatter_s = lg(world) * A + share * S * (B + G)
    assert priced(halving_reduce_scatter(world)) == pytest.approx(scatter_s, rel=1e-12)
    assert priced(doubling_all_gather(world)) == pytest.approx(lg(world) * A + share * S * B, rel=1e-12)


@pytest.mark.parametrize("world", WORLDS)
def test_the_rings_price_is_that_of_its_steps(world: int) -> None:
    steps = cost.ring_all_reduce(Line(alpha_s=A, beta_s_per_byte=B), world)
    assert price(ring_all_reduce(world), S, switch(world)) == pytest.approx(steps.seconds(S), rel=1e-12)


# - Closed forms elsewhere

INSIDE, BETWEEN = Line(alpha_s=A, beta_s_per_byte=B), Line(alpha_s=7 * A, beta_s_per_byte=5 * B)


@pytest.mark.parametrize(("n", "g"), [(1, 4), (3, 1), (2, 2), (4, 3), (3, 8)])
def test_two_levels_on_hosts_with_a_shared_card(n: int, g: int) -> None:
    topology = in_racks(n, g, INSIDE, BETWEEN)
    inside_s = 2 * (g - 1) * INSIDE.alpha_s + 2 * (g - 1) / g * S * INSIDE.beta_s_per_byte
    between_s = 2 * (n - 1) * BETWEEN.alpha_s + 2 * (n - 1) / n * S * BETWEEN.beta_s_per_byte
    assert price(two_level(topology.hosts), S, topology) == pytest.approx(inside_s + between_s, rel=1e-12)


def test_leaders_on_hosts_that_differ() -> None:
    hosts = [[6, 1], [2, 3, 4], [0], [5, 7, 8, 9, 10]]
    largest, n = 5, len(hosts)
    up_s = up(largest) * INSIDE.seconds(S)
    between_s = 2 * (n - 1) * BETWEEN.alpha_s + 2 * (n - 1) / n * S * BETWEEN.beta_s_per_byte
    assert price(two_level(hosts), S, Hosts(hosts, INSIDE, BETWEEN)) == pytest.approx(2 * up_s + between_s, rel=1e-12)


@pytest.mark.parametrize(("n", "g"), [(2, 2), (4, 3), (3, 8)])
def test_a_ring_in_the_order_of_hosts_crosses_each_card_once_a_round(n: int, g: int) -> None:
    p = n * g
    ring_s = price(ring_all_reduce(p), S, in_racks(n, g, INSIDE, BETWEEN))
    assert ring_s == pytest.approx(2 * (p - 1) * BETWEEN.seconds(S / p), rel=1e-12)


@pytest.mark.parametrize(("p", "r", "o"), [(8, 2, 2), (16, 4, 4), (32, 8, 3)])
def test_halving_in_racks_with_too_thin_uplinks(p: int, r: int, o: int) -> None:
    # r ranks share an uplink of r / o times their own bandwidth.
    uplink = Line(alpha_s=A, beta_s_per_byte=B * o / r)
    topology = in_racks(p // r, r, INSIDE, uplink)
    near_first_s = 2 * lg(p) * A + 2 * S * B * ((1 - 1 / r) + o * (1 / r - 1 / p))
    far_first_s = 2 * lg(p) * A + 2 * S * B * (o * (1 - r / p) + (r - 1) / p)
    far_first = in_turn(halving_reduce_scatter(p).transfers, doubling_all_gather(p).transfers)
    assert price(halving_doubling(p), S, topology) == pytest.approx(near_first_s, rel=1e-12)
    assert price(Pattern("far first", p, p, far_first), S, topology) == pytest.approx(far_first_s, rel=1e-12)
    assert near_first_s < far_first_s


@pytest.mark.parametrize(("x", "y"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (5, 2)])
def test_rings_along_both_sides_of_a_torus(x: int, y: int) -> None:
    along_x_s = 2 * (x - 1) * A + 2 * (x - 1) / x * S * B
    along_y_s = 2 * (y - 1) * A + 2 * (y - 1) / y * (S / x) * B
    assert price(torus(x, y), S, Torus(x, y, A, B)) == pytest.approx(along_x_s + along_y_s, rel=1e-12)


@pytest.mark.parametrize(("n", "levels"), [(2, 1), (2, 4), (3, 2), (4, 2), (3, 3)])
def test_all_ports_of_a_bcube(n: int, levels: int) -> None:
    num_servers = n**levels
    closed_s = 2 * levels * A + 2 * (1 - 1 / num_servers) * S * B / levels
    assert price(bcube(n, levels), S, BCube(n, levels, A, B)) == pytest.approx(closed_s, rel=1e-12)


# - Laws

SECONDS = st.floats(1e-7, 1e-2)
PER_BYTE = st.floats(1e-12, 1e-7)
NBYTES = st.floats(1, 1e9)


@given(world=st.sampled_from(POWERS_OF_TWO), alpha_s=SECONDS, beta=PER_BYTE, gamma=PER_BYTE, nbytes=NBYTES)
def test_halving_is_never_dearer_than_the_ring_on_a_switch(
    world: int, alpha_s: float, beta: float, gamma: float, nbytes: float
) -> None:
    topology = Switch(world, alpha_s, beta)
    halving_s = price(halving_doubling(world), nbytes, topology, gamma_s_per_byte=gamma)
    assert halving_s <= price(ring_all_reduce(world), nbytes, topology, gamma_s_per_byte=gamma) * (1 + 1e-9)


@given(
    name=st.sampled_from(list(ALL_REDUCES)),
    world=st.integers(1, 17),
    alpha_s=SECONDS,
    beta=PER_BYTE,
    gamma=PER_BYTE,
    nbytes=NBYTES,
)
def test_no_all_reduce_beats_the_lower_bounds(
    name: str, world: int, alpha_s: float, beta: float, gamma: float, nbytes: float
) -> None:
    seconds = price(ALL_REDUCES[name](world), nbytes, Switch(world, alpha_s, beta), gamma_s_per_byte=gamma)
    assert seconds * (1 + 1e-9) >= (world - 1) / world * nbytes * (2 * beta + gamma)
    if name != "star":  # its root sends more than one message at a time
        assert seconds * (1 + 1e-9) >= up(world) * alpha_s


TOPOLOGIES: list[Topology] = [
    Switch(12, A, B),
    Hosts([[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]], INSIDE, BETWEEN),
    Hosts([[0, 1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11]], INSIDE, BETWEEN),
    Torus(4, 3, A, B),
    Torus(12, 1, A, B),
    BCube(12, 1, A, B),
    BCube(4, 2, A, B),
    BCube(2, 4, A, B),
]


@given(
    name=st.sampled_from(list(ALL_REDUCES)),
    topology=st.sampled_from(TOPOLOGIES),
    fewer=st.floats(0, 1e9),
    more=st.floats(0, 1e9),
)
def test_more_bytes_take_longer_everywhere(name: str, topology: Topology, fewer: float, more: float) -> None:
    pattern = ALL_REDUCES[name](topology.world)
    fewer, more = sorted((fewer, more))
    assert 0 < price(pattern, fewer, topology) <= price(pattern, more, topology) * (1 + 1e-9)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_one_transfer_takes_the_latency_of_its_way_and_the_slowest_links_bytes(topology: Topology) -> None:
    for source in range(topology.world):
        for destination in set(range(topology.world)) - {source}:
            alone = Pattern("alone", topology.world, 1, (Transfer(0, source, destination, 0, 1, False),))
            lines = [topology.link(name) for name in topology.route(source, destination)]
            expected_s = sum(line.alpha_s for line in lines) + S * max(line.beta_s_per_byte for line in lines)
            assert price(alone, S, topology) == pytest.approx(expected_s, rel=1e-12)


def test_transfers_over_one_link_share_it_and_adding_comes_on_top() -> None:
    both = (Transfer(0, 1, 0, 0, 1, True), Transfer(0, 2, 0, 1, 2, True))
    seconds = price(Pattern("both", 3, 2, both), S, switch(3), gamma_s_per_byte=G)
    assert seconds == pytest.approx(A + 2 * (S / 2) * B + S * G, rel=1e-12)


@pytest.mark.parametrize(("one", "other"), [((0, 2), (1, 3)), ((2, 0), (3, 1))])
def test_workers_of_a_host_share_its_card_on_the_way_out_and_in(one: tuple[int, int], other: tuple[int, int]) -> None:
    both = (Transfer(0, *one, 0, 1, False), Transfer(0, *other, 1, 2, False))
    seconds = price(Pattern("both", 4, 2, both), S, Hosts([[0, 1], [2], [3]], INSIDE, BETWEEN))
    assert seconds == pytest.approx(BETWEEN.seconds(S), rel=1e-12)


def test_a_slow_transfer_does_not_slow_one_that_shares_no_link_with_it() -> None:
    # Many bytes on a quick link and few on one that begins late: the longer of the two, not the worst of both.
    apart = (Transfer(0, 0, 1, 0, 9, False), Transfer(0, 2, 3, 9, 10, False))
    late = Line(alpha_s=7 * A, beta_s_per_byte=0.0)
    seconds = price(Pattern("apart", 4, 10, apart), S, Hosts([[0, 1], [2], [3]], INSIDE, late))
    assert seconds == pytest.approx(max(A + 0.9 * S * B, 7 * A), rel=1e-12)


# - Patterns and the wires they were made for


@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
def test_a_pattern_made_for_the_wires_beats_the_ring_on_them(nbytes: float) -> None:
    rows = in_racks(4, 8, INSIDE, BETWEEN)
    for topology, own in [
        (rows, two_level(rows.hosts)),
        (Torus(6, 6, A, B), torus(6, 6)),
        (BCube(4, 2, A, B), bcube(4, 2)),
    ]:
        own_s = price(own, nbytes, topology)
        assert own_s < price(ring_all_reduce(topology.world), nbytes, topology)


# - Routes


@given(x=st.integers(1, 7), y=st.integers(1, 7), data=st.data())
def test_routes_on_a_torus_are_the_shortest_and_go_from_neighbour_to_neighbour(
    x: int, y: int, data: st.DataObject
) -> None:
    source, destination = data.draw(st.integers(0, x * y - 1)), data.draw(st.integers(0, x * y - 1))
    hops = Torus(x, y, A, B).route(source, destination)
    (row, column), (to_row, to_column) = divmod(source, x), divmod(destination, x)
    across, down = (to_column - column) % x, (to_row - row) % y
    assert len(hops) == min(across, x - across) + min(down, y - down)
    stops = [source, *(hop[1] for hop in hops)]
    assert stops[-1] == destination and list(hops) == list(pairwise(stops))
    for one, other in pairwise(stops):
        (row, column), (to_row, to_column) = divmod(one, x), divmod(other, x)
        assert (abs(to_column - column) in {0, 1, x - 1}) and (abs(to_row - row) in {0, 1, y - 1})
        assert (row == to_row) != (column == to_column)


@given(n=st.integers(2, 5), levels=st.integers(1, 4), data=st.data())
def test_routes_in_a_bcube_pass_one_switch_for_each_digit_that_differs(
    n: int, levels: int, data: st.DataObject
) -> None:
    source, destination = data.draw(st.integers(0, n**levels - 1)), data.draw(st.integers(0, n**levels - 1))
    links = BCube(n, levels, A, B).route(source, destination)
    differing = {level for level in range(levels) if source // n**level % n != destination // n**level % n}
    here = source
    for (out, sender, level), (into, receiver, same_level) in zip(links[::2], links[1::2], strict=True):
        assert (out, into) == ("out", "in") and sender == here and level == same_level
        assert (receiver - sender) % n**level == 0 and receiver // n ** (level + 1) == sender // n ** (level + 1)
        differing.remove(level)
        here = receiver
    assert here == destination and not differing


# - What has no price


def test_a_pattern_needs_a_topology_of_its_size() -> None:
    with pytest.raises(UsageError, match="among 4 ranks has no price on a topology of 5"):
        price(ring_all_reduce(4), S, switch(5))


def test_hosts_that_do_not_share_out_the_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="hosts must share out ranks"):
        Hosts([[0, 1], [1]], INSIDE, BETWEEN)
