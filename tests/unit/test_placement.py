"""Which server has which part of a model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.exchange.server.placement import LEAST_NBYTES, cut, partition_nbytes, shares_of, spread


@pytest.mark.parametrize("n", [2, 3, 4, 8, 32])
def test_equal_links_have_the_shares_of_byteps(n: int):
    for k in range(n + 1):
        if n == 2 and k < n:
            continue  # a worker's host takes the same in whatever its server has
        shares = shares_of(n, [1.0] * n if k < n else [], [1.0] * k)
        whole = n**2 + k * n - 2 * k
        expected = [(n - k) / whole] * n * (k < n) + [2 * (n - 1) / whole] * k
        assert shares == pytest.approx(expected, abs=1e-9)


def test_a_slow_link_has_less():
    fast, slow = shares_of(4, [], [10.0, 2.5])
    assert (fast, slow) == pytest.approx((0.8, 0.2))
    beside = shares_of(4, [1.0, 1.0, 1.0, 0.5], [])
    assert beside[3] < beside[0] and sum(beside) == pytest.approx(1)


@given(st.integers(1, 9), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_shares_fill_the_model(n: int, rates: list[float]):
    shares = shares_of(n, [1.0] * n, rates)
    assert sum(shares) == pytest.approx(1) and min(shares) >= 0


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8]), st.integers(8, 10**6))
def test_pieces_cover_a_tensor(numel: int, itemsize: int, nbytes: int):
    pieces = cut(numel, itemsize, nbytes)
    assert pieces[0][0] == 0 and pieces[-1][1] == numel
    assert all(stop == start for (_, stop), (start, _) in pairwise(pieces))
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) * itemsize <= nbytes + itemsize


@given(st.lists(st.integers(1, 4 * 10**6), min_size=1, max_size=200), st.integers(1, 9))
def test_servers_are_loaded_evenly(tensors: list[int], num_servers: int):
    nbytes = partition_nbytes(4 * sum(tensors), num_servers)
    pieces = [[4 * (stop - start) for start, stop in cut(numel, 4, nbytes)] for numel in tensors]
    homes = spread(pieces, [1 / num_servers] * num_servers)
    loads = [0] * num_servers
    for sizes, slots in zip(pieces, homes, strict=True):
        assert len(sizes) == len(slots)
        for size, slot in zip(sizes, slots, strict=True):
            loads[slot] += size
    assert max(loads) - min(loads) <= max(nbytes, LEAST_NBYTES) + 4


def test_who_has_no_share_has_no_pieces():
    assert spread([[10, 10], [10]], [0.0, 1.0]) == [(1, 1), (1,)]


def test_partitions_are_small_enough_that_servers_have_several():
    assert partition_nbytes(10**9, 1) == 4 * 10**6
    assert partition_nbytes(102 * 10**6, 4) == pytest.approx(1.06e6, rel=0.01)
    assert partition_nbytes(1000, 4) == LEAST_NBYTES
