"""Ranks that meet in a store where others have met before."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from gradientflow.errors import DeadlineError, PeerError
from gradientflow.exchange import Control, Health


def control(store: dist.Store, rank: int, deadline_s: float = 20.0) -> Control:
    members = (0, 1)
    health = Health(dist.PrefixStore("beacons", store), rank, members, deadline_s, ())
    return Control(dist.PrefixStore("control", store), rank, members, deadline_s, health)


def meet(store: dist.Store, first: int) -> list[str]:
    names = ["", ""]

    def work(rank: int) -> None:
        time.sleep(0.2 * (rank != first))
        names[rank] = control(store, rank).meet("meet")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return names


def test_what_processes_said_that_are_gone_is_taken_for_nobodys() -> None:
    store = dist.HashStore()
    found = [meet(store, first) for first in (0, 1, 0, 1)]
    assert all(mine == theirs != "" for mine, theirs in found)
    assert len({mine for mine, _ in found}) == 4


def test_who_does_not_come_is_named_though_it_was_there_before() -> None:
    store = dist.HashStore()
    meet(store, 0)
    with pytest.raises(DeadlineError, match=r"waited 0\.3 s to meet; nothing came from rank 1"):
        control(store, 0, deadline_s=0.3).meet("meet")


def test_who_comes_after_another_has_given_up_hears_why() -> None:
    store = dist.HashStore()
    for first in (0, 1):
        with pytest.raises(DeadlineError):
            control(store, 0, deadline_s=0.3).meet("meet")
        began_s = time.monotonic()
        with pytest.raises(PeerError, match=r"^rank 1 came to meet, and rank 0 has given up: rank 0 waited") as said:
            control(store, 1).meet("meet")
        assert time.monotonic() - began_s < 5 and said.value.ranks == (0,)
        assert all(meet(store, first)), "both come again"
