"""Patterns: what every one of them must keep, and what each costs in rounds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.errors import UsageError
from gradientflow.patterns import (
    ALL_REDUCES,
    Pattern,
    Transfer,
    bcube,
    chunk_bounds,
    doubling_all_gather,
    halving_reduce_scatter,
    in_turn,
    mirrored,
    ring_all_gather,
    ring_reduce_scatter,
    star,
    torus,
    tree_reduce,
    two_level,
)

WORLDS = [*range(1, 18), 32, 33]
POWERS_OF_TWO = [1, 2, 4, 8, 16, 32]

HOSTS: list[list[list[int]]] = [
    [[0]],
    [[0, 1, 2, 3]],
    [[0], [1], [2]],
    [[0, 1], [2, 3]],
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    [[0, 3], [1, 4], [5, 2]],
    [[0, 1, 2], [3]],
    [[6, 1], [2, 3, 4], [0], [5, 7, 8, 9, 10]],
]

FLAT = [make(world) for make in ALL_REDUCES.values() for world in WORLDS]
WIRED = [
    *(two_level(hosts) for hosts in HOSTS),
    *(torus(x, y) for x, y in [(1, 1), (1, 3), (3, 1), (2, 2), (3, 4), (4, 3), (5, 5)]),
    *(bcube(n, levels) for n, levels in [(1, 1), (1, 2), (2, 1), (2, 4), (3, 2), (3, 3), (4, 2), (5, 1)]),
]
ALL_REDUCING = [*FLAT, *(star(world, root=world - 1) for world in WORLDS), *WIRED]
SCATTERING = [
    *(ring_reduce_scatter(world) for world in WORLDS),
    *(halving_reduce_scatter(world) for world in POWERS_OF_TWO),
]
GATHERING = [
    *(ring_all_gather(world) for world in WORLDS),
    *(doubling_all_gather(world) for world in POWERS_OF_TWO),
]
REDUCING = [tree_reduce(world) for world in WORLDS]
EVERY = [*ALL_REDUCING, *SCATTERING, *GATHERING, *REDUCING]

#: On one port a rank sends to one other rank at a time and receives from one. In a star the root deals with all
#: others at once, in a BCube a rank with all others at each of its switches.
SINGLE_PORTED = [pattern for pattern in EVERY if pattern.name not in {"star", "bcube"}]


def title(pattern: Pattern) -> str:
    return f"{pattern.name}-{pattern.world}"


def lg(world: int) -> int:
    """Rounded down."""
    return world.bit_length() - 1


def run(pattern: Pattern, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """What every rank has of every chunk afterwards, if it had `values[rank][chunk]` before."""
    now = [list(chunks) for chunks in values]
    for transfers in pattern.rounds():
        before = [list(chunks) for chunks in now]
        for transfer in transfers:
            to, sent = now[transfer.destination], before[transfer.source]
            for chunk in range(transfer.start, transfer.stop):
                to[chunk] = to[chunk] + sent[chunk] if transfer.add else sent[chunk]
    return now


def contribution(rank: int) -> int:
    """Sums of these tell how often each rank is in them: digits in base 1000."""
    return 1000**rank


def contributions(pattern: Pattern) -> list[list[int]]:
    return [[contribution(rank)] * pattern.num_chunks for rank in range(pattern.world)]


def everyone_once(pattern: Pattern) -> int:
    return sum(contribution(rank) for rank in range(pattern.world))


# - What a pattern does


@pytest.mark.parametrize("pattern", ALL_REDUCING, ids=title)
def test_an_all_reduce_leaves_everyones_part_once_in_every_chunk_everywhere(pattern: Pattern) -> None:
    ended = run(pattern, contributions(pattern))
    assert ended == [[everyone_once(pattern)] * pattern.num_chunks] * pattern.world


@pytest.mark.parametrize("pattern", SCATTERING, ids=title)
def test_a_reduce_scatter_leaves_a_rank_the_sum_of_its_own_chunk(pattern: Pattern) -> None:
    assert pattern.num_chunks == pattern.world
    ended = run(pattern, contributions(pattern))
    assert [chunks[rank] for rank, chunks in enumerate(ended)] == [everyone_once(pattern)] * pattern.world


@pytest.mark.parametrize("pattern", GATHERING, ids=title)
def test_an_all_gather_gives_everyone_every_ranks_chunk(pattern: Pattern) -> None:
    ranks = range(pattern.world)
    assert pattern.num_chunks == pattern.world
    ended = run(pattern, [[f"chunk {chunk}" if chunk == rank else "" for chunk in ranks] for rank in ranks])
    assert ended == [[f"chunk {chunk}" for chunk in ranks]] * pattern.world


@pytest.mark.parametrize("pattern", REDUCING, ids=title)
def test_a_reduction_ends_at_rank_0_and_its_mirror_brings_the_sum_back(pattern: Pattern) -> None:
    there = run(pattern, contributions(pattern))
    assert there[0] == [everyone_once(pattern)]
    back = Pattern("back", pattern.world, 1, mirrored(pattern.transfers))
    assert run(back, there) == [[everyone_once(pattern)]] * pattern.world


@pytest.mark.parametrize("pattern", ALL_REDUCING, ids=title)
def test_all_ranks_end_with_the_same_bits(pattern: Pattern) -> None:
    # Magnitudes far apart, so that each order of additions rounds differently.
    random = np.random.default_rng(pattern.world)
    shape = (pattern.world, pattern.num_chunks, 5)
    values = (random.standard_normal(shape) * 10.0 ** random.integers(-4, 5, shape)).astype(np.float32)
    ended = np.array(run(pattern, [list(chunks) for chunks in values]))
    assert ended.dtype == np.float32
    assert all(chunks.tobytes() == ended[0].tobytes() for chunks in ended)
    size = np.abs(values).sum(axis=0, dtype=np.float64)
    assert np.all(np.abs(ended[0] - values.sum(axis=0, dtype=np.float64)) <= 1e-6 * size)


def test_a_star_adds_in_the_order_of_ranks() -> None:
    values = [[np.float32(value)] for value in (1e8, 1.0, -1e8, 1.0)]
    assert run(star(4), values)[3][0] == np.float32(1.0)  # ((1e8 + 1) - 1e8) + 1, the first 1 lost
    assert run(star(4, root=2), values)[0][0] == np.float32(2.0)  # ((-1e8 + 1e8) + 1) + 1


# - What a pattern keeps


@pytest.mark.parametrize("pattern", EVERY, ids=title)
def test_transfers_are_sorted_and_within_the_world_and_the_message(pattern: Pattern) -> None:
    rounds = [transfer.round for transfer in pattern.transfers]
    assert rounds == sorted(rounds) and set(rounds) == set(range(pattern.num_rounds))
    for transfer in pattern.transfers:
        assert transfer.source != transfer.destination
        assert transfer.source in range(pattern.world) and transfer.destination in range(pattern.world)
        assert 0 <= transfer.start < transfer.stop <= pattern.num_chunks


@pytest.mark.parametrize("pattern", EVERY, ids=title)
def test_what_arrives_in_a_round_leaves_no_choice(pattern: Pattern) -> None:
    for transfers in pattern.rounds():
        arrivals = [(t.destination, chunk, t) for t in transfers for chunk in range(t.start, t.stop)]
        assert len({(rank, chunk, t.source) for rank, chunk, t in arrivals}) == len(arrivals)
        replaced = [(rank, chunk) for rank, chunk, t in arrivals if not t.add]
        added = {(rank, chunk) for rank, chunk, t in arrivals if t.add}
        assert len(set(replaced)) == len(replaced) and not added & set(replaced)


@pytest.mark.parametrize("pattern", SINGLE_PORTED, ids=title)
def test_single_ported_patterns_use_a_port_once_a_round(pattern: Pattern) -> None:
    for transfers in pattern.rounds():
        assert len({t.source for t in transfers}) == len(transfers) == len({t.destination for t in transfers})


@pytest.mark.parametrize("pattern", EVERY, ids=title)
def test_turns_hold_each_ranks_transfers_in_order(pattern: Pattern) -> None:
    for rank in range(pattern.world):
        turns = pattern.rounds_of(rank)
        rounds = [{transfer.round for transfer in (*turn.sends, *turn.receives)} for turn in turns]
        assert all(len(numbers) == 1 for numbers in rounds)
        assert [min(numbers) for numbers in rounds] == sorted({min(numbers) for numbers in rounds})
        sends = [transfer for turn in turns for transfer in turn.sends]
        receives = [transfer for turn in turns for transfer in turn.receives]
        assert sends == [transfer for transfer in pattern.transfers if transfer.source == rank]
        assert receives == [transfer for transfer in pattern.transfers if transfer.destination == rank]


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_a_pattern_bears_the_name_it_is_chosen_by(name: str) -> None:
    assert ALL_REDUCES[name](4).name == name


# - Rounds and bytes


def power_in(world: int) -> int:
    return 1 << lg(world)


def fold(world: int) -> int:
    return world != power_in(world)


def up(world: int) -> int:
    """lg p, rounded up."""
    return (world - 1).bit_length()


#: Rounds among p ranks, and what goes through the busiest port in one direction as a share of the message.
CLOSED_FORMS: dict[str, tuple[Callable[[int], int], Callable[[int], Fraction | int]]] = {
    "ring": (lambda p: 2 * (p - 1), lambda p: Fraction(2 * (p - 1), p)),
    "tree": (lambda p: 2 * up(p), up),
    "doubling": (lambda p: lg(p) + 2 * fold(p), lambda p: lg(p) + fold(p)),
    "halving": (
        lambda p: 2 * lg(p) + 2 * fold(p),
        lambda p: Fraction(2 * (power_in(p) - 1), power_in(p)) + fold(p),
    ),
    "star": (lambda p: 2 if p > 1 else 0, lambda p: p - 1),
    "ring-reduce-scatter": (lambda p: p - 1, lambda p: Fraction(p - 1, p)),
    "ring-all-gather": (lambda p: p - 1, lambda p: Fraction(p - 1, p)),
    "halving-reduce-scatter": (lg, lambda p: Fraction(p - 1, p)),
    "doubling-all-gather": (lg, lambda p: Fraction(p - 1, p)),
    "tree-reduce": (up, up),
}


def busiest_port(pattern: Pattern, numel: int, itemsize: int) -> int:
    ranks = range(pattern.world)
    sent = [pattern.bytes_sent(rank, numel, itemsize) for rank in ranks]
    received = [pattern.bytes_received(rank, numel, itemsize) for rank in ranks]
    assert sum(sent) == sum(received)
    return max(sent + received)


@pytest.mark.parametrize("pattern", [*FLAT, *SCATTERING, *GATHERING, *REDUCING], ids=title)
def test_rounds_and_bytes_of_flat_patterns(pattern: Pattern) -> None:
    num_rounds, share = CLOSED_FORMS[pattern.name]
    assert pattern.num_rounds == num_rounds(pattern.world)
    numel = 3 * pattern.num_chunks
    assert busiest_port(pattern, numel, itemsize=4) == share(pattern.world) * 4 * numel


@pytest.mark.parametrize(("num_hosts", "size"), [(1, 4), (3, 1), (2, 2), (4, 3), (3, 8)])
def test_rounds_and_bytes_of_two_levels(num_hosts: int, size: int) -> None:
    hosts = [range(host * size, (host + 1) * size) for host in range(num_hosts)]
    pattern, numel = two_level(hosts), 5 * num_hosts * size
    assert pattern.num_rounds == 2 * (size - 1) + 2 * (num_hosts - 1)
    inside, across = Fraction(2 * (size - 1), size), Fraction(2 * (num_hosts - 1), num_hosts * size)
    assert busiest_port(pattern, numel, itemsize=2) == (inside + across) * 2 * numel
    crossing = Pattern("crossing", pattern.world, pattern.num_chunks, crossing_hosts(pattern, hosts))
    assert all(crossing.bytes_sent(rank, numel, 2) == across * 2 * numel for rank in range(pattern.world))


def test_hosts_that_differ_have_a_leader_each() -> None:
    hosts = [[6, 1], [2, 3, 4], [0], [5, 7, 8, 9, 10]]
    pattern = two_level(hosts)
    assert pattern.num_rounds == 2 * 3 + 2 * (4 - 1)
    crossing = crossing_hosts(pattern, hosts)
    assert {transfer.source for transfer in crossing} == {6, 2, 0, 5}
    assert len(crossing) == 2 * (4 - 1) * 4


def crossing_hosts(pattern: Pattern, hosts: Sequence[Sequence[int]]) -> tuple[Transfer, ...]:
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    return tuple(t for t in pattern.transfers if host_of[t.source] != host_of[t.destination])


@pytest.mark.parametrize(("x", "y"), [(1, 1), (4, 1), (1, 4), (3, 4), (5, 2)])
def test_rounds_and_bytes_of_a_torus(x: int, y: int) -> None:
    pattern, numel = torus(x, y), 7 * x * y
    assert pattern.num_rounds == 2 * (x + y - 2)
    share = Fraction(2 * (x - 1), x) + Fraction(2 * (y - 1), y * x)
    assert busiest_port(pattern, numel, itemsize=4) == share * 4 * numel
    for transfer in pattern.transfers:
        (row, column), (to_row, to_column) = divmod(transfer.source, x), divmod(transfer.destination, x)
        assert (to_row, to_column) in {(row, (column + 1) % x), ((row + 1) % y, column)}


@pytest.mark.parametrize(("n", "levels"), [(2, 1), (2, 4), (3, 2), (4, 2), (3, 3)])
def test_rounds_and_bytes_of_a_bcube(n: int, levels: int) -> None:
    pattern, world = bcube(n, levels), n**levels
    numel = 2 * pattern.num_chunks
    assert pattern.num_rounds == 2 * levels
    assert busiest_port(pattern, numel, itemsize=4) == Fraction(2 * (world - 1), world) * 4 * numel
    for transfers in pattern.rounds():
        used = [(t.source, differing_digits(t.source, t.destination, n, levels)) for t in transfers]
        assert all(len(levels_used) == 1 for _, levels_used in used)
        # Every port is busy in every round, and each with as many bytes as the others.
        assert {(rank, level) for rank, (level,) in used} == {
            (r, level) for r in range(world) for level in range(levels)
        }
        assert len({t.stop - t.start for t in transfers}) == 1


def differing_digits(one: int, other: int, n: int, levels: int) -> list[int]:
    return [level for level in range(levels) if one // n**level % n != other // n**level % n]


# - Pieces


@given(numel=st.integers(0, 10**6), num_chunks=st.integers(1, 200))
def test_chunks_cover_the_message_and_are_even(numel: int, num_chunks: int) -> None:
    bounds = chunk_bounds(numel, num_chunks)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert len(sizes) == num_chunks and bounds[0] == 0 and bounds[-1] == numel
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1


@given(numel=st.integers(0, 10**6), num_chunks=st.integers(1, 50), finer=st.integers(1, 20))
def test_edges_of_coarse_chunks_are_edges_of_finer_ones(numel: int, num_chunks: int, finer: int) -> None:
    assert chunk_bounds(numel, num_chunks * finer)[::finer] == chunk_bounds(numel, num_chunks)


@given(pattern=st.sampled_from(ALL_REDUCING), numel=st.integers(0, 5000), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_what_is_sent_is_received_whatever_the_size(pattern: Pattern, numel: int, itemsize: int) -> None:
    ranks = range(pattern.world)
    sent = sum(pattern.bytes_sent(rank, numel, itemsize) for rank in ranks)
    assert sent == sum(pattern.bytes_received(rank, numel, itemsize) for rank in ranks)
    # No all-reduce can do with less: each of p - 1 parts has to be added, and each sum to reach the other ranks.
    assert sent >= 2 * (pattern.world - 1) * numel * itemsize


@given(hosts=st.permutations(range(12)), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_any_hosts_reduce(hosts: list[int], sizes: list[int]) -> None:
    ranks = iter([rank for rank in hosts if rank < sum(sizes)] + list(range(12, sum(sizes))))
    pattern = two_level([[next(ranks) for _ in range(size)] for size in sizes])
    assert pattern.world == sum(sizes)
    assert run(pattern, contributions(pattern)) == [[everyone_once(pattern)] * pattern.num_chunks] * pattern.world


def test_stages_follow_each_other_and_keep_the_order_within_a_round() -> None:
    one, other = Transfer(0, 0, 1, 0, 1, True), Transfer(1, 1, 0, 0, 1, True)
    assert [transfer.round for transfer in in_turn([one, other], [], [one])] == [0, 1, 2]
    side_by_side = [other, one._replace(source=2), one]
    assert in_turn(side_by_side) == (one._replace(source=2), one, other)


@pytest.mark.parametrize("pattern", EVERY, ids=title)
def test_a_mirror_of_a_mirror_is_the_pattern_without_additions(pattern: Pattern) -> None:
    copies = tuple(transfer._replace(add=False) for transfer in pattern.transfers)
    assert mirrored(mirrored(pattern.transfers)) == copies


# - What cannot be


@pytest.mark.parametrize("make", [*ALL_REDUCES.values(), ring_reduce_scatter, ring_all_gather, tree_reduce])
def test_a_world_without_ranks_is_refused(make: Callable[[int], Pattern]) -> None:
    with pytest.raises(UsageError, match="at least one rank"):
        make(0)


@pytest.mark.parametrize("make", [halving_reduce_scatter, doubling_all_gather])
@pytest.mark.parametrize("world", [3, 6, 33])
def test_halves_in_pairs_need_a_power_of_two(make: Callable[[int], Pattern], world: int) -> None:
    with pytest.raises(UsageError, match=f"power of two, not {world} ranks"):
        make(world)


@pytest.mark.parametrize("hosts", [[], [[]], [[0], []], [[0, 1], [1]], [[1, 2]], [[0], [2]]])
def test_hosts_that_do_not_share_out_the_ranks_are_refused(hosts: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="hosts must share out ranks"):
        two_level(hosts)


def test_shapes_without_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="must be one of its ranks, not 4"):
        star(4, root=4)
    with pytest.raises(UsageError, match="not 0 by 3"):
        torus(0, 3)
    with pytest.raises(UsageError, match="not 2 and 0"):
        bcube(2, 0)
