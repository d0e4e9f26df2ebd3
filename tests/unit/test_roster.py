"""Generations of workers: all of them agree on who is in, whoever comes, leaves or dies."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gradientflow.errors import DeadlineError, DisagreementError, PeerError, TrainingError
from gradientflow.exchange import roster
from gradientflow.exchange.health import Process, _started
from gradientflow.exchange.roster import Generation, Roster, Worker
from gradientflow.runtime.regrouping import Stand, behind, most_advanced


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def begun(world: int, deadline_s: float = 10.0) -> tuple[dist.Store, list[Roster]]:
    store = dist.HashStore()
    rosters = [Roster(store, world, deadline_s) for _ in range(world)]
    generations = at_once(*(each.enter for each in rosters))
    assert {generation.numbers for generation in generations} == {tuple(range(world))}
    return store, rosters


def test_who_begins_together_is_in_the_first_generation() -> None:
    _, rosters = begun(3)
    assert [each.members("gloo").rank for each in rosters] == [0, 1, 2]


def test_who_has_left_is_not_waited_for_and_who_knocks_comes_in() -> None:
    store, (first, second, third) = begun(3)
    second.leave()
    newcomer = Roster(store, 1, 10.0)
    assert not first.somebody_waits()

    def when_it_knocks() -> Generation:
        while not first.somebody_waits():
            first._looked_s = 0.0
        return first.enter()

    generations = at_once(newcomer.enter, when_it_knocks, third.enter)
    assert {generation.numbers for generation in generations} == {(0, 2, 3)}
    assert [worker.members("gloo").rank for worker in (first, third, newcomer)] == [0, 1, 2]


def test_who_comes_back_too_late_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "GRACE_S", 0.1)
    _, (first, second) = begun(2)
    assert first.enter(late=[1]).numbers == (0,)
    with pytest.raises(PeerError, match="the others went on without it in generation 2"):
        second.enter()


def test_who_is_alive_and_does_not_come_is_waited_for_until_the_deadline() -> None:
    _, (first, _second) = begun(2, deadline_s=0.5)
    assert first.enter().numbers == (0,)


def test_a_dead_member_is_not_waited_for_and_a_job_whose_members_are_all_dead_begins_anew() -> None:
    store = dist.HashStore()
    with subprocess.Popen(["sleep", "60"]) as program:
        gone = Process(host=Process.this().host, pid=program.pid, started=_started(program.pid))
        program.kill()
    ours = Roster(store, 1, 10.0)
    dead = Generation(number=1, workers=(Worker(number=7, process=gone),))
    store.set("1/workers", dead.model_dump_json())
    assert ours.enter().numbers == (0,)


def test_a_job_that_all_have_left_is_over() -> None:
    store, (first, second) = begun(2)
    first.leave()
    second.leave()
    with pytest.raises(TrainingError, match="the job is over"):
        Roster(store, 1, 10.0).enter()


def test_too_few_is_a_deadline_with_a_number() -> None:
    with pytest.raises(DeadlineError, match="missing: worker 2 more"):
        Roster(dist.HashStore(), 3, 0.2).enter()


def test_another_model_is_refused() -> None:
    store = dist.HashStore()
    Roster(store, 2, 1.0).compare({"recipe": "lazy"})
    with pytest.raises(DisagreementError, match=r"worker 1, recipe: expected lazy .* found flow"):
        Roster(store, 2, 1.0).compare({"recipe": "flow"})


def stands(*steps: int, joins: int = 0) -> list[Stand]:
    return [Stand(step=step, joins=False) for step in steps] + [Stand(step=0, joins=True)] * joins


def test_the_most_advanced_survivor_is_everybodys_source() -> None:
    assert most_advanced(stands(4, 5, 5)) == 1 and behind(stands(4, 5, 5)) == {0}
    assert most_advanced(stands(3, 3, joins=1)) == 0 and behind(stands(3, 3, joins=1)) == {2}
    assert most_advanced(stands(joins=2)) == 0 and behind(stands(joins=2)) == {1}
    assert behind(stands(2, 2)) == set()
    # A worker that has just come may have loaded a checkpoint: those who train go on with what they have.
    assert most_advanced([Stand(step=90, joins=True), Stand(step=1, joins=False)]) == 1
