"""What the doctor concludes from facts and rates, without a network."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from gradientflow.doctor.facts import Facts
from gradientflow.doctor.findings import (
    judge_clocks,
    judge_interfaces,
    judge_rates,
    judge_reach,
    judge_versions,
)
from gradientflow.doctor.links import rounds


def hosts(number: int) -> list[Facts]:
    return [
        Facts(
            rank=rank,
            host=f"host-{rank}",
            machine=str(rank),
            gradientflow="0.1.0",
            torch="2.13.0+cpu",
            python="3.11.7",
            byteorder="little",
            interface="eth0",
            address=f"10.0.0.{rank + 1}",
            route_interface="eth0",
            gloo_address=f"10.0.0.{rank + 1}",
            interfaces=("lo", "eth0"),
        )
        for rank in range(number)
    ]


def to_mend(findings: list) -> list[str]:
    return [f"{each.words} -> {each.mend}" for each in findings if each.weight == "fix"]


@given(st.integers(min_value=0, max_value=12))
def test_every_pair_meets_once_and_nobody_is_in_two_at_a_time(number: int) -> None:
    found = rounds(range(number))
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(number), 2))
    for pairs in found:
        players = list(itertools.chain(*pairs))
        assert len(players) == len(set(players))


@given(st.integers(3, 6), st.data())
def test_exactly_the_slow_hosts_link_is_named(number: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, number - 1))
    ways = itertools.permutations(range(number), 2)
    usual = {way: data.draw(st.floats(0.8e8, 1.2e8)) for way in ways}
    assert not to_mend(judge_rates(hosts(number), dict(usual)))
    rates = {way: rate / 10 if slow in way else rate for way, rate in usual.items()}
    (words,) = to_mend(judge_rates(hosts(number), dict(rates)))
    assert f"host-{slow}," in words and words.count("host-") == 2  # in the words, and in what to do


def test_one_slow_way_between_good_hosts_is_named_by_both_ends() -> None:
    rates: dict = {way: 1e8 for way in itertools.permutations(range(4), 2)} | {(1, 2): 1e7}
    (words,) = to_mend(judge_rates(hosts(4), rates))
    assert "host-1," in words and "host-2," in words


def test_ranks_of_one_host_may_listen_on_loopback_and_those_of_several_may_not() -> None:
    one = [dataclasses.replace(facts, machine="same", address="127.0.0.1", interface="lo") for facts in hosts(2)]
    assert not to_mend(judge_interfaces(one))
    trapped = hosts(3)
    trapped[1] = dataclasses.replace(trapped[1], gloo_address="127.0.1.1")
    (words,) = to_mend(judge_interfaces(trapped))
    assert "host-1" in words and "127.0.1.1" in words and "GLOO_SOCKET_IFNAME=eth0" in words


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    wrong = [dataclasses.replace(hosts(1)[0], told_interface="ib0", address="", interface="ib0")]
    (words,) = to_mend(judge_interfaces(wrong))
    assert "ib0" in words and "lo, eth0" in words


def test_a_way_that_is_closed_is_a_matter_of_ports_unless_the_interface_is_wrong() -> None:
    everyone = hosts(2)
    (words,) = to_mend(judge_reach(everyone, {(0, 1): 1e8, (1, 0): "10.0.0.1:4000 cannot be reached"}))
    assert "rank 1 cannot reach rank 0" in words
    everyone[0] = dataclasses.replace(everyone[0], told_interface="docker0", interface="docker0")
    (words,) = to_mend(judge_reach(everyone, {(1, 0): "172.17.0.1:4000 cannot be reached"}))
    assert "GLOO_SOCKET_IFNAME=eth0" in words


def test_versions_that_do_not_matter_are_let_pass() -> None:
    everyone = hosts(3)
    everyone[1] = dataclasses.replace(everyone[1], torch="2.13.0+cu130", python="3.11.9")
    assert not to_mend(judge_versions(everyone))
    everyone[1] = dataclasses.replace(everyone[1], torch="2.12.1")
    assert any("2.12.1 on rank 1" in words for words in to_mend(judge_versions(everyone)))


def test_clocks_are_judged_by_their_distance() -> None:
    assert not to_mend(judge_clocks({1: 0.01, 2: -0.2, 3: None}))
    (words,) = to_mend(judge_clocks({1: 0.01, 2: -7.0}))
    assert "rank 2" in words and "-7.0 s" in words
