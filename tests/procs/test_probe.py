"""The probe among real processes."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from gradientflow.cost import CostTable
from gradientflow.errors import DeadlineError, TrainingError, UsageError
from gradientflow.exchange.reach import LOOPBACK
from gradientflow.exchange.server.servers import Wanted
from gradientflow.network import SERVED, Network
from gradientflow.probe import measure_network
from gradientflow.probe.measure import links
from helpers import run_ranks

SIZES = (4, 4096, 65536, 2**20)


def _measure(world: int) -> tuple[Network, float]:
    here = {"address": LOOPBACK, "servers": Wanted(plain=True)} if world == 2 else {}
    network = measure_network(sizes=SIZES, budget_s=4.0, deadline_s=20.0, processors=True, **here)
    ones = torch.ones(1)
    dist.all_reduce(ones)  # the user's group is as it was
    return network, ones.item()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_get_the_same_network_with_every_operation_in_it(world: int) -> None:
    results = run_ranks(world, _measure, world)
    networks = [network for network, _ in results]
    assert all(network == networks[0] for network in networks)
    assert [total for _, total in results] == [world] * world
    assert (networks[0].backend, networks[0].world) == ("gloo", world)
    counted = networks[0].processors
    if world == 1:
        assert counted is None
    else:
        assert counted is not None and counted.ranks == world
        assert [way.pattern for way in counted.carrying] == (["", SERVED] if world == 2 else [""])
        assert {found.codec for found in counted.codecs} >= {"int8", "powersgd:2"}
        assert all(way.abreast_s > 0 and way.message_s > 0 for way in counted.carrying)
    whole = [("all_reduce", tuple(range(world)))] if world > 1 else []
    expected = [*whole, *(("p2p", pair) for pair in links(world)), *([("tcp", (0, 1))] if world == 2 else [])]
    assert sorted((found.operation, found.ranks) for found in networks[0].measurements) == sorted(expected)
    for found in networks[0].measurements:
        if found.operation == "tcp":
            continue
        sizes = [sample.nbytes for sample in found.samples]
        assert (*sizes, *found.skipped_nbytes) == SIZES
        assert all(sample.p10_s <= sample.median_s <= sample.p90_s for sample in found.samples)
        assert CostTable(points=found.points).seconds(10_000) > 0


def _measure_large(sizes: tuple[int, ...]) -> tuple[Network, float]:
    began_s = time.monotonic()
    return measure_network(sizes=sizes, budget_s=0.5, deadline_s=20.0), time.monotonic() - began_s


def test_sizes_that_would_take_too_long_are_left_out_and_listed() -> None:
    sizes = (4, 2**20, 2**28)
    for network, elapsed_s in run_ranks(2, _measure_large, sizes):
        for found in network.measurements:
            assert found.skipped_nbytes[-1:] == sizes[-1:]
        assert elapsed_s < 15


def _measure_some() -> Network | None:
    group = dist.new_group([0, 2])
    return measure_network(group, sizes=SIZES[:2], budget_s=2.0) if dist.get_rank() != 1 else None


def test_a_group_of_some_ranks() -> None:
    first, nothing, last = run_ranks(3, _measure_some)
    assert nothing is None and first == last
    assert (first.world, [found.ranks for found in first.of("p2p")]) == (2, [(0, 1)])


def _measure_alone() -> tuple[str, tuple[int, ...]]:
    if dist.get_rank() == 0:
        with pytest.raises(DeadlineError) as caught:
            measure_network(sizes=SIZES, budget_s=0.5, deadline_s=0.5)
        return str(caught.value), caught.value.ranks
    return "", ()


def test_a_rank_that_does_not_come_is_named() -> None:
    (words, ranks), _ = run_ranks(2, _measure_alone)
    assert ranks == (1,) and "nothing came from rank 1" in words


def _measure_and_die() -> float:
    if dist.get_rank() == 1:
        threading.Timer(0.5, os._exit, [3]).start()
    began_s = time.monotonic()
    with pytest.raises(TrainingError, match=r"rank 0 (tried|waited)"):
        for _ in range(1000):
            measure_network(sizes=SIZES, budget_s=3.0, deadline_s=3.0)
    return time.monotonic() - began_s


def test_a_rank_that_dies_ends_the_measurement() -> None:
    elapsed_s = run_ranks(2, _measure_and_die, lost=(1,))[0]
    assert elapsed_s < 20


@pytest.mark.parametrize("sizes", [(), (3,), (8, 4), (4, 4)])
def test_sizes_that_cannot_be_sent_are_refused(sizes: tuple[int, ...]) -> None:
    run_ranks(1, _refused, sizes)


def _refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="sizes must rise"):
        measure_network(sizes=sizes)


def _addressed(address: str) -> list[tuple[str, tuple[int, ...]]]:
    network = measure_network(sizes=SIZES[:2], budget_s=2.0, deadline_s=20.0, address=address)
    assert all(link.rate_bits_s > 0 for link in network.measurements)
    return [(link.operation, link.ranks) for link in network.measurements if link.operation != "all_reduce"]


def test_links_are_measured_by_a_plain_stream_where_ranks_reach_each_other() -> None:
    found = [("p2p", (0, 1)), ("tcp", (0, 1)), ("p2p", (0, 2)), ("tcp", (0, 2)), ("p2p", (1, 2)), ("tcp", (1, 2))]
    assert sorted(run_ranks(3, _addressed, "127.0.0.1")[0]) == sorted(found)


def test_an_address_that_is_not_there_leaves_only_the_stream_out() -> None:
    assert run_ranks(2, _addressed, "192.0.2.1") == [[("p2p", (0, 1))]] * 2


def _by_world() -> list[tuple[int, ...]]:
    network = measure_network(sizes=SIZES[:2], budget_s=2.0, deadline_s=20.0, smaller_worlds=True)
    return [link.ranks for link in network.of("all_reduce")]


def test_the_all_reduce_is_measured_in_smaller_worlds_too() -> None:
    assert run_ranks(3, _by_world) == [[(0, 1), (0, 1, 2)]] * 3
