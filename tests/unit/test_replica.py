"""Workers' copies of a table, over sockets, all in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from gradientflow.exchange.server.keys import Invitation, Lock
from gradientflow.exchange.server.replica import Place, Replica
from gradientflow.exchange.server.service import Service
from gradientflow.exchange.server.table import PLAIN
from gradientflow.exchange.server.wire import Terms

LOOPBACK = "127.0.0.1"
NUMEL = 4


class Entry:
    """A directory of one slot, as some worker sees it."""

    def __init__(self, invitation: Invitation) -> None:
        self.invitation = invitation

    def __len__(self) -> int:
        return 1

    def look_up(self, slot: int) -> Invitation:
        return self.invitation

    def take_over(self, slot: int, lost: Invitation, by: Invitation) -> None:
        self.invitation = by


def turn(replicas: list[Replica], until: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not until():
        assert time.monotonic() < end_s
        for replica in replicas:
            replica.turn(0.01)


def test_workers_meet_again_when_one_of_them_has_found_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them alone lost the first; the other sees that it is missed, and asks the directory."""
    monkeypatch.setattr("gradientflow.exchange.server.table.GONE_S", 0.2)
    monkeypatch.setattr("gradientflow.exchange.server.service.LOOK_S", 0.1)
    services = [Service(LOOPBACK, Lock("plain")) for _ in range(2)]
    for service in services:
        service.start()
    entries = [Entry(services[0].invitation) for _ in range(2)]

    def terms(num_pieces: int) -> Terms:
        return Terms(-1, 1.0, 0.0, 0, 2, num_pieces)

    places, first = [Place(0, torch.float32, NUMEL)], [torch.zeros(NUMEL)]
    replicas = [
        Replica(entry, number, 5, terms, places, founding=first if number == 0 else None)
        for number, entry in enumerate(entries)
    ]
    sent = [0, 0]

    def push(number: int) -> None:
        sent[number] += 1
        change = torch.full((NUMEL,), 2.0)
        replicas[number].push(0, change, change, sent[number], None, PLAIN)

    try:
        turn(replicas, lambda: all(replica.pieces[0].version == 0 for replica in replicas))
        for number in range(2):
            push(number)
        turn(replicas, lambda: not any(replica.pieces[0].pending for replica in replicas))
        for entry in entries:
            entry.invitation = services[1].invitation
        replicas[1]._lines.doubt(0)  # it looks, the other has no reason to
        turn(replicas, lambda: not services[0].tables._tables[5].members.keys() >= {1})
        push(0)  # and hears that the other is missed
        push(1)
        turn(replicas, lambda: services[1].tables._tables[5].members.keys() == {0, 1})
        turn(replicas, lambda: not any(replica.pieces[0].pending for replica in replicas))
        for number in range(2):
            push(number)
        turn(replicas, lambda: not any(replica.pieces[0].pending for replica in replicas))
        push(0)
        turn(replicas, lambda: not replicas[0].pieces[0].pending)
        marks = replicas[0].pieces[0].marks
        assert {number: mark.seq for number, mark in marks.items()} == {0: 4, 1: 3}, "in one place"
    finally:
        for replica in replicas:
            replica.close()
        for service in services:
            service.stop()


def test_a_worker_reckons_the_velocity_that_a_server_has() -> None:
    """Which is sent when it comes, and not again. The first two rounds are averages, and leave none, nor do those that
    are asked for."""
    service = Service(LOOPBACK, Lock("plain"))
    service.start()
    entry = Entry(service.invitation)

    def terms(num_pieces: int) -> Terms:
        return Terms(0, 0.7, 0.9, 2, 1, num_pieces)

    replica = Replica(entry, 0, 5, terms, [Place(0, torch.float64, NUMEL)], founding=[torch.zeros(NUMEL).double()])
    held = replica.pieces[0]
    try:
        turn([replica], lambda: held.version == 0)
        for seq, asked in enumerate((True, False, False, False, True, False), start=1):
            change = torch.full((NUMEL,), float(seq), dtype=torch.float64)
            replica.push(0, change, change, seq, None, PLAIN, asked=asked)
            turn([replica], lambda seq=seq: held.version == seq)
            velocity = service.tables._tables[5]._pieces[0].velocity
            assert held.velocity is not None and velocity is not None
            torch.testing.assert_close(held.velocity, velocity)
            assert bool(velocity.any()) == (seq > 3)
    finally:
        replica.close()
        service.stop()
