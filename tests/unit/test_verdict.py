"""Whether waiting is vain, case by case, and never when somebody may still come."""

from __future__ import annotations

from typing import Any

import pytest

from gradientflow.exchange.verdict import Beacon, Collective, Life, Peer, Wait, judge, slow

GRADIENTS = Wait(kind="gradients", number=6, detail="step 5, message 0", waited_s=5.0)


def peer(rank: int, *, life: Life = Life.RUNNING, silent_s: float = 0.0, stopped_s: float = 0.0, **said: Any) -> Peer:
    said = {"step": 5, "place": "forward", "line": "train.py:31 in main", **said}
    return Peer(Beacon(rank=rank, **said), 10 + rank, silent_s, life, stopped_s)


def there(rank: int) -> Peer:
    """In the same exchange."""
    return peer(rank, wait=GRADIENTS, entered={"gradients": 6})


def verdict(others: list[Peer], wait: Wait = GRADIENTS, store_silent_s: float = 0.0, patience_s: float = 600.0) -> Any:
    me = peer(0, wait=wait, entered={wait.kind: wait.number, "broadcast": 6})
    return judge(me, wait, {p.beacon.rank: p for p in others}, store_silent_s, patience_s)


@pytest.mark.parametrize(
    ("culprit", "words"),
    [
        (peer(2, life=Life.GONE), "rank 12 is dead"),
        (peer(2, life=Life.STOPPED, stopped_s=4.5), "rank 12 is stopped"),
        (peer(2, life=Life.UNKNOWN, silent_s=6.5), "rank 12 is silent"),
        (peer(2, ended="has left"), "rank 12 has left"),
        (peer(2, broken_off=True, entered={"gradients": 6}), "rank 12 broke its backward pass off"),
        (peer(2, num_skipped=1), "rank 12 skipped this step"),
    ],
)
def test_a_rank_that_will_not_come_is_named_with_where_it_was_last_seen(culprit: Peer, words: str) -> None:
    found = verdict([there(1), culprit, there(3)])
    assert found.words.startswith(words) and "train.py:31 in main" in found.words
    assert found.culprits == (12,)


@pytest.mark.parametrize(
    "late",
    [
        peer(2),
        peer(2, silent_s=60.0),  # one long call into C; its process runs
        peer(2, life=Life.STOPPED, stopped_s=1.0, silent_s=1.0),
        peer(2, life=Life.UNKNOWN, silent_s=3.0),
        peer(2, step=6, ended="has left", entered={"gradients": 6}),  # after giving its share
        peer(2, step=6, num_skipped=1, entered={"gradients": 6}),
        peer(2, step=4, num_skipped=3, entered={"gradients": 4}),  # an old beacon, from before its last exchange
        peer(2, collective=Collective(name="barrier", ranks=(12, 99), waited_s=100.0)),  # not with us
    ],
)
def test_a_rank_that_may_still_come_is_waited_for(late: Peer) -> None:
    assert verdict([there(1), late, there(3)]) is None


def test_what_one_rank_found_the_others_believe() -> None:
    finder = peer(1, ended="waited 5 s: rank 17 is dead", culprits=(17,))
    found = verdict([finder, there(2)])
    assert "rank 17 is dead (as rank 11 found)" in found.words and found.culprits == (17,)


def test_a_circle_of_waits_is_proven_by_who_is_not_in_what() -> None:
    broadcast = Wait(kind="broadcast", number=7, waited_s=5.0)
    crossed = peer(2, wait=broadcast, entered={"gradients": 5, "broadcast": 7})
    assert verdict([there(1), crossed]).culprits == (12,)
    # The same, but everybody has entered that broadcast: it is slow, not vain.
    slow_broadcast = peer(2, wait=broadcast.model_copy(update={"number": 6}), entered={"gradients": 5, "broadcast": 6})
    others = [there(1).beacon.model_copy(update={"entered": {"gradients": 6, "broadcast": 6}}), slow_broadcast.beacon]
    assert verdict([Peer(beacon, 10 + beacon.rank, 0.0, Life.RUNNING) for beacon in others]) is None
    # A rank that computes could still enter it.
    assert verdict([peer(1), peer(2, wait=broadcast.model_copy(update={"waited_s": 1.0}))]) is None


def test_the_odd_one_out_is_named_also_by_itself_and_by_who_only_waits_along() -> None:
    """Rank 2 sits in a barrier; rank 1 is stuck before the exchange, in a broadcast, for want of rank 2."""
    barrier = Collective(name="torch.distributed.barrier", ranks=(10, 11, 12), waited_s=4.0)
    odd = peer(2, collective=barrier, entered={"gradients": 5, "broadcast": 5})
    along_wait = Wait(kind="broadcast", number=6, waited_s=4.0)
    along = peer(1, wait=along_wait, entered={"gradients": 5, "broadcast": 6})
    assert verdict([along, odd]).culprits == (12,)
    # From rank 1's side, and from a rank that is the odd one itself.
    zero = peer(0, wait=GRADIENTS, entered={"gradients": 6, "broadcast": 6})
    assert judge(along, along_wait, {0: zero, 2: odd}, 0.0, 600.0).culprits == (12,)  # type: ignore[union-attr]
    late = Wait(kind="broadcast", number=7, waited_s=4.0)
    alone = peer(2, wait=late, entered={"gradients": 5, "broadcast": 7})
    one = peer(1, wait=GRADIENTS, entered={"gradients": 6, "broadcast": 6})
    found = judge(alone, late, {0: zero, 1: one}, 0.0, 600.0)
    assert (
        found is not None and found.culprits == (12,) and "rank 12 is in something else than the others" in found.words
    )
    assert verdict([one, alone]).culprits == (12,)


def test_a_circle_through_a_collective_of_the_users() -> None:
    stuck = peer(2, collective=Collective(name="torch.distributed.barrier", ranks=(10, 11, 12), waited_s=4.0))
    found = verdict([there(1), stuck])
    assert found.culprits == (12,) and "in torch.distributed.barrier" in found.words


def test_a_silent_store_is_its_holders_fault_and_a_deadline_names_who_is_slow() -> None:
    assert verdict([there(1)], store_silent_s=8.0).words.startswith("the job's store has not answered for 8 s")
    assert verdict([there(1)], store_silent_s=3.0) is None
    found = slow(GRADIENTS, {1: there(1), 2: peer(2, place="optimizer.step()")})
    assert found.culprits == (12,) and "rank 12 is slow: last seen in step 5, optimizer.step()" in found.words


def test_no_threshold_exceeds_the_patience() -> None:
    stopped = peer(2, life=Life.STOPPED, stopped_s=2.0)
    assert verdict([stopped]) is None and verdict([stopped], patience_s=2.0) is not None
