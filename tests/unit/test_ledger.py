"""What a server does with what workers say, in whatever order they say it."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientflow.exchange.server.ledger import GONE_S, Ledger, Outgoing
from gradientflow.exchange.server.window import LEAD_NBYTES, Window, abreast
from gradientflow.exchange.server.wire import (
    EVERYONE,
    VERSION,
    Header,
    Key,
    Kind,
    Name,
    Refused,
    pack_hello,
    pack_names,
)

SPACE = 7
KEY = Key(1, 0, 0, 0)
NOTHING = memoryview(b"")


def payload(*values: float) -> memoryview:
    return memoryview(bytearray(torch.tensor(values, dtype=torch.float32).numpy().tobytes()))


def header(kind: Kind, key: Key = KEY, seq: int = 1, nbytes: int = 0, **more) -> Header:
    return Header(kind, SPACE, key, seq, nbytes=nbytes, dtype=torch.float32, **more)


class Workers:
    """Of one ledger: what they were told."""

    def __init__(self, world: int, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger(2**30)
        self.world = world
        self.told: dict[bytes, list[tuple[Header, object]]] = {}
        for rank in range(world):
            self.hello(rank)

    def hello(self, rank: int, identity: bytes = b"", holdings: list[Name] | None = None) -> None:
        words = pack_hello(self.world, holdings or [])
        said = Header(Kind.HELLO, SPACE, rank=rank, nbytes=len(words))
        self.say(identity or b"%d" % rank, said, memoryview(bytearray(words)))

    def say(self, identity: bytes, said: Header, data: memoryview = NOTHING) -> list[Outgoing]:
        found = [*self.ledger.take(identity, said, data, 0.0), *self.ledger.results(), *self.ledger.receipts(1.0)]
        for outgoing in found:
            value = outgoing.payload
            copy = value.clone().tolist() if isinstance(value, torch.Tensor) else value
            self.told.setdefault(outgoing.identity, []).append((outgoing.header, copy))
        return found

    def push(self, rank: int, *values: float, key: Key = KEY, seq: int = 1) -> list[Outgoing]:
        return self.say(b"%d" % rank, header(Kind.PUSH, key, seq, 4 * len(values)), payload(*values))

    def got(self, rank: int, key: Key = KEY, seq: int = 1) -> list[Outgoing]:
        words = pack_names([Name(key, seq)])
        return self.say(b"%d" % rank, Header(Kind.GOT, SPACE, nbytes=len(words)), memoryview(words))

    def results_of(self, identity: bytes) -> list[object]:
        return [value for said, value in self.told.get(identity, []) if said.kind is Kind.RESULT]


def test_a_sum_goes_to_everybody_once_all_have_given():
    workers = Workers(3)
    workers.push(0, 1.0, 2.0)
    workers.push(2, 100.0, 200.0)
    assert not workers.results_of(b"0")
    workers.push(1, 10.0, 20.0)
    assert [workers.results_of(b"%d" % rank) for rank in range(3)] == [[[111.0, 222.0]]] * 3
    assert workers.ledger.held_nbytes == 8
    for rank in range(3):
        workers.got(rank)
    assert workers.ledger.held_nbytes == 0


def test_a_share_counts_once():
    workers = Workers(2)
    for _ in range(3):
        workers.push(0, 1.0)
    workers.push(1, 2.0)
    assert workers.results_of(b"1") == [[3.0]]
    workers.push(1, 2.0)  # the sum is there, and on its way
    for rank in range(2):
        workers.got(rank)
    workers.push(0, 1.0)  # and settled
    assert workers.ledger.refusals["repeated"] == 4
    assert workers.ledger.held_nbytes == 0


def test_two_sums_of_a_key_at_most():
    """Who has the first one pushes for the second while another still fetches the first."""
    workers = Workers(2)
    workers.push(0, 1.0)
    workers.push(1, 2.0)
    workers.got(0)
    workers.push(0, 5.0, seq=2)
    assert workers.ledger.held_nbytes == 8
    workers.got(1)
    workers.push(1, 6.0, seq=2)
    assert workers.results_of(b"1") == [[3.0], [11.0]]


def test_to_push_for_the_next_sum_is_to_have_this_one():
    """What is said on two ways comes in any order: a share may overtake the word that the sum before has come."""
    workers = Workers(2)
    workers.push(0, 1.0)
    workers.push(1, 2.0)
    for seq in (2, 3):
        for rank in range(2):
            workers.push(rank, 5.0, seq=seq)
        assert workers.ledger.held_nbytes == 4
    workers.got(0)  # at last, of the first
    assert workers.results_of(b"0") == [[3.0], [10.0], [10.0]]


def test_who_runs_ahead_fills_no_memory():
    workers = Workers(2)
    workers.push(0, 1.0)
    for seq in range(2, 50):
        with pytest.raises(Refused, match="ahead"):
            workers.push(0, 1.0, seq=seq)  # of the one before, rank 1 has given nothing
    assert workers.ledger.held_nbytes == 4
    workers.push(1, 2.0)
    workers.push(0, 1.0, seq=2)
    assert workers.ledger.held_nbytes == 8
    relay = Key(1, 1, 0, 0)
    workers.say(b"0", header(Kind.RELAY, relay, nbytes=4, rank=1), payload(4.0))
    with pytest.raises(Refused, match="ahead"):
        workers.say(b"0", header(Kind.RELAY, relay, 2, nbytes=4, rank=1), payload(4.0))


def test_who_fetches_nothing_fills_no_memory():
    ledger = Workers(2).ledger
    for who in (b"0", b"1"):
        ledger.take(who, header(Kind.PUSH, nbytes=4), payload(1.0), 0.0)
    with pytest.raises(Refused, match="ahead"):
        ledger.take(b"0", header(Kind.PUSH, seq=2, nbytes=4), payload(1.0), 0.0)
    assert ledger.held_nbytes == 4


def test_what_was_not_sent_has_not_come():
    """Who says so would have its results forgotten here and kept for sending, as many as it likes."""
    ledger = Workers(1).ledger
    ledger.take(b"0", header(Kind.PUSH, nbytes=4), payload(1.0), 0.0)
    words = pack_names([Name(KEY, 1)])
    ledger.take(b"0", Header(Kind.GOT, SPACE, nbytes=len(words)), memoryview(words), 0.0)
    assert ledger.held_nbytes == 4
    with pytest.raises(Refused, match="ahead"):
        ledger.take(b"0", header(Kind.PUSH, seq=2, nbytes=4), payload(1.0), 0.0)


def test_results_of_plans_that_are_over_are_not_sent_any_more():
    ledger = Workers(1).ledger
    for epoch in range(1, 9):
        ledger.take(b"0", header(Kind.PUSH, Key(epoch, 0, 0, 0), nbytes=4), payload(1.0), 0.0)
    assert ledger.held_nbytes == 4
    assert [outgoing.header.key.epoch for outgoing in ledger.results()] == [8]


def test_shares_that_were_overtaken_count_for_nothing():
    workers = Workers(2)
    for seq in range(50, 0, -1):
        workers.push(0, 1.0, seq=seq)
    assert workers.ledger.held_nbytes == 4 and workers.ledger.refusals["repeated"] == 49


def test_what_is_refused_changes_nothing():
    workers = Workers(2, Ledger(6))
    for rank in range(2):
        workers.push(rank, 1.0)
    workers.got(1)
    with pytest.raises(Refused, match="memory"):
        workers.push(0, 1.0, 2.0, seq=2)
    assert workers.ledger.held_nbytes == 4  # it may still be asked for


def test_names_without_bytes_are_too_many_some_day(monkeypatch):
    monkeypatch.setattr("gradientflow.exchange.server.ledger.MAX_NAMES", 10)
    workers = Workers(2)
    for number in range(10):
        workers.push(0, key=Key(1, number, 0, 0))
    with pytest.raises(Refused, match="memory"):
        workers.push(0, key=Key(1, 10, 0, 0))
    with pytest.raises(Refused, match="names"):
        workers.hello(1, b"again", [Name(KEY, seq) for seq in range(11)])


def test_a_worker_is_of_one_space():
    workers = Workers(2)
    words = pack_hello(2, [])
    with pytest.raises(Refused, match="somebody else"):
        workers.say(b"0", Header(Kind.HELLO, SPACE + 1, rank=0, nbytes=len(words)), memoryview(bytearray(words)))


def test_who_comes_back_with_a_sum_is_not_ahead():
    """Its word that it has it was lost with the connection."""
    workers = Workers(2)
    for rank in range(2):
        workers.push(rank, 1.0)
    workers.got(1)
    workers.hello(0, b"again", [Name(KEY, 1)])
    assert workers.ledger.held_nbytes == 0
    workers.say(b"again", header(Kind.PUSH, seq=2, nbytes=4), payload(2.0))
    workers.push(1, 2.0, seq=2)
    assert workers.results_of(b"again") == [[4.0]]


def test_a_relay_reaches_whom_it_is_for_and_its_sender_hears_of_it():
    workers = Workers(3)
    said = header(Kind.RELAY, nbytes=4, rank=2)
    workers.say(b"0", said, payload(4.0))
    assert [workers.results_of(b"%d" % rank) for rank in range(3)] == [[], [], [[4.0]]]
    assert [said for said, _ in workers.told[b"2"] if said.kind is Kind.RESULT][-1].rank == 0  # whose it is
    workers.got(2)
    assert workers.told[b"0"][-1][0].kind is Kind.PASSED
    everyone = header(Kind.RELAY, Key(1, 1, 0, 0), nbytes=4, rank=EVERYONE)
    workers.say(b"1", everyone, payload(8.0))
    assert [workers.results_of(b"%d" % rank)[-1:] for rank in range(3)] == [[[8.0]], [], [[8.0]]]


def test_who_comes_back_gets_what_it_missed():
    workers = Workers(2)
    workers.push(0, 1.0)
    workers.push(1, 2.0)
    workers.got(0)
    workers.hello(1, b"again")
    workers.say(b"again", header(Kind.PUSH, nbytes=4), payload(2.0))  # it cannot know that this had come
    assert workers.results_of(b"again") == [[3.0]]
    assert workers.ledger.refusals == {"repeated": 1}
    with pytest.raises(Refused, match="no hello"):
        workers.push(1, 2.0)  # from before


def test_results_wait_for_room_and_a_share_that_needs_no_receipt_gets_none():
    ledger, room = Workers(2).ledger, {b"0": 0, b"1": 2}
    for key in (KEY, Key(1, 1, 0, 0)):
        for who in (b"0", b"1"):
            assert not list(ledger.take(who, header(Kind.PUSH, key, nbytes=4), payload(1.0), 0.0, receipt=False))
    assert not ledger.owes_receipts
    found = []
    for outgoing in ledger.results(lambda who: room[who] > 0):
        room[outgoing.identity] -= 1
        ledger.sent(outgoing)
        found.append((outgoing.identity, outgoing.header.key.message))
    assert found == [(b"1", 0), (b"1", 1)]
    assert ledger.held_nbytes == 8  # until they say that they have it
    assert [outgoing.identity for outgoing in ledger.results()] == [b"0", b"0"]


def test_a_new_server_asks_for_a_sum_that_somebody_has():
    """Rank 0 has it and has gone on, rank 1 lacks it: it is not made again."""
    for first in (0, 1):
        workers = Workers(0)
        workers.world = 2
        order = [lambda w=workers: w.hello(0, holdings=[Name(KEY, 1)]), lambda w=workers: _come_and_push(w)]
        for act in order if first == 0 else reversed(order):
            act()
        assert Kind.WANT in [said.kind for said, _ in workers.told[b"0"]]
        workers.say(b"0", header(Kind.GIVE, nbytes=4), payload(3.5))
        assert workers.results_of(b"1") == [[3.5]]
        assert workers.results_of(b"0") == []
        workers.got(1)
        assert workers.ledger.held_nbytes == 0


def _come_and_push(workers: Workers) -> None:
    workers.hello(1)
    workers.push(1, 2.0)


def test_what_nobody_asked_for_is_refused():
    workers = Workers(2)
    workers.push(0, 1.0)
    with pytest.raises(Refused, match="not asked for"):
        workers.say(b"1", header(Kind.GIVE, nbytes=4), payload(9.0))
    workers.push(1, 2.0)
    assert workers.results_of(b"0") == [[3.0]]


def test_shares_of_different_sizes_are_nobodys_sum():
    workers = Workers(2)
    workers.push(0, 1.0)
    workers.push(1, 2.0, 3.0)
    for rank in range(2):
        words = [value for said, value in workers.told[b"%d" % rank] if said.kind is Kind.REFUSED]
        assert "rank 1 pushed 8 bytes" in words[-1].decode()


def test_a_new_plan_lets_the_old_ones_sums_go():
    workers = Workers(2)
    workers.push(0, 1.0)
    workers.push(1, 1.0)
    new = Key(2, 0, 0, 0)
    workers.push(0, 1.0, key=new)
    assert workers.ledger.held_nbytes == 8
    workers.push(1, 1.0, key=new)  # so it has the old ones, too
    assert workers.ledger.held_nbytes == 4
    workers.push(0, 1.0)
    assert workers.ledger.refusals["repeated"] == 1


def test_limits_of_memory_and_of_worlds():
    workers = Workers(2, Ledger(6))
    workers.push(0, 1.0)
    with pytest.raises(Refused, match="memory"):
        workers.push(0, 1.0, key=Key(1, 1, 0, 0))
    workers.push(1, 1.0)
    assert workers.results_of(b"0") == [[2.0]]
    words = pack_hello(2**31, [])
    with pytest.raises(Refused, match="rank"):
        workers.say(b"x", Header(Kind.HELLO, 99, rank=0, nbytes=len(words)), memoryview(bytearray(words)))


def test_others_hear_of_a_worker_whose_connection_is_gone_for_good():
    workers = Workers(3)
    ledger = workers.ledger
    assert ledger.unreachable(b"1", 10.0) == []
    assert ledger.unreachable(b"1", 10.0 + GONE_S - 0.1) == []
    said = ledger.unreachable(b"1", 10.0 + GONE_S)
    assert {outgoing.identity for outgoing in said} == {b"0", b"2"}
    assert all(outgoing.header.kind is Kind.LOST and outgoing.header.rank == 1 for outgoing in said)
    assert ledger.unreachable(b"1", 99.0) == []


def test_who_said_good_bye_is_not_missed():
    workers = Workers(2)
    workers.say(b"1", Header(Kind.BYE, SPACE))
    ledger = workers.ledger
    assert ledger.unreachable(b"1", 0.0) == ledger.unreachable(b"1", 9.0) == []
    workers.say(b"0", Header(Kind.BYE, SPACE))
    with pytest.raises(Refused, match="no hello"):
        workers.push(0, 1.0)


class Learner:
    """A worker as simple as can be: pushes a share of each key in turn, keeps the last sum of each."""

    def __init__(self, rank: int, world: int, num_keys: int) -> None:
        self.rank, self.world = rank, world
        self.keys = [Key(1, number, 0, 0) for number in range(num_keys)]
        self.done = dict.fromkeys(self.keys, 0)  # seq
        self.sums: dict[Key, float] = {}
        self.history: list[tuple[Key, int, float]] = []

    def share(self, seq: int) -> float:
        return float((self.rank + 1) * 1000 + seq)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 4))
def test_servers_may_die_at_any_time_and_every_share_counts_once(seed: int, world: int, num_kills: int):
    """Messages are delivered one by one, of a random connection; at random moments the server and all that is on its
    way are gone and a new one begins with nothing."""
    chance = random.Random(seed)
    num_keys, num_steps = 3, 4
    learners = [Learner(rank, world, num_keys) for rank in range(world)]
    kills = sorted(chance.randrange(1, 40 * world) for _ in range(num_kills))
    moment = 0
    while any(min(learner.done.values()) < num_steps for learner in learners):
        ledger = Ledger(2**20)
        up: list[deque] = [deque() for _ in learners]
        down: list[deque] = [deque() for _ in learners]
        for learner in learners:
            holdings = [Name(key, seq) for key, seq in learner.done.items() if seq]
            words = pack_hello(world, holdings)
            hello = Header(Kind.HELLO, SPACE, rank=learner.rank, nbytes=len(words))
            up[learner.rank].append((hello, memoryview(bytearray(words))))
            for key, seq in learner.done.items():
                if seq < num_steps:
                    _push(up, learner, key, seq + 1)
        kill_at = kills.pop(0) if kills else None
        while any(up) or any(down):
            moment += 1
            if kill_at is not None and moment >= kill_at:
                break
            rank = chance.choice([rank for rank in range(world) if up[rank] or down[rank]])
            learner = learners[rank]
            if up[rank] and (not down[rank] or chance.random() < 0.5):
                said, data = up[rank].popleft()
                for outgoing in [*ledger.take(b"%d" % rank, said, data, 0.0), *ledger.results()]:
                    value = outgoing.payload
                    value = value.clone() if isinstance(value, torch.Tensor) else value
                    down[int(outgoing.identity)].append((outgoing.header, value))
                continue
            said, value = down[rank].popleft()
            if said.kind is Kind.WANT and learner.done[said.key] == said.seq:
                give = said._replace(kind=Kind.GIVE, nbytes=4)
                up[rank].append((give, payload(learner.sums[said.key])))
            elif said.kind is Kind.RESULT:
                words = pack_names([Name(said.key, said.seq)])
                up[rank].append((Header(Kind.GOT, SPACE, nbytes=len(words)), memoryview(words)))
                if said.seq == learner.done[said.key] + 1:
                    learner.done[said.key] = said.seq
                    learner.sums[said.key] = float(value[0])
                    learner.history.append((said.key, said.seq, float(value[0])))
                    if said.seq < num_steps:
                        _push(up, learner, said.key, said.seq + 1)
            assert said.kind is not Kind.REFUSED
    for learner in learners:
        assert len(learner.history) == num_keys * num_steps
        for _, seq, value in learner.history:
            assert value == sum(other.share(seq) for other in learners)


def _push(up: list[deque], learner: Learner, key: Key, seq: int) -> None:
    up[learner.rank].append((header(Kind.PUSH, key, seq, 4), payload(learner.share(seq))))


# - Windows


def test_no_connection_gets_far_ahead_and_none_waits_for_what_has_been_sent():
    windows: dict[str, Window[int, int]] = {"fast": Window(), "slow": Window(), "small": Window()}
    windows["small"].weight = 0.125
    half = LEAD_NBYTES // 2
    for name, window in windows.items():
        for number in range(8):
            window.add(number, 0, half if name != "small" else half // 8, number)
    room, sent = {"slow": 0}, {name: 0 for name in windows}

    def send() -> None:
        for name, number in abreast(windows, lambda name: room.get(name, 1) > 0):
            windows[name].arrived(number)
            sent[name] += 1
            if name in room:
                room[name] -= 1

    send()
    assert sent == {"fast": 3, "slow": 0, "small": 3}
    room["slow"] = 1
    send()
    assert sent == {"fast": 4, "slow": 1, "small": 4}
    room["slow"] = 100
    send()
    assert sent == {"fast": 8, "slow": 8, "small": 8}
    assert not any(window.waiting_nbytes for window in windows.values())


def test_the_most_urgent_goes_first_and_no_more_than_there_is_credit_for():
    window: Window[str, str] = Window(credit_nbytes=10)
    window.add("late", 5, 6, "late")
    window.add("soon", 1, 6, "soon")
    window.add("huge", 9, 100, "huge")
    assert window.next() == "soon"
    assert window.next() is None
    window.add("at once", 0, 4, "at once")
    assert window.next() == "at once"
    window.arrived("soon")
    window.arrived("soon")  # said twice
    assert window.next() == "late"
    window.add("late", 5, 6, "late")  # under way
    window.arrived("late")
    window.arrived("at once")
    assert window.next() == "huge"  # alone it may
    assert window.next() is None


# - Headers


@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_no_bytes_are_a_header_unless_they_are(frame: bytes, nbytes: int):
    try:
        found = Header.read(memoryview(frame), nbytes)
    except Refused:
        return
    assert found.packed() == frame


def test_headers_survive_the_way():
    for kind in Kind:
        said = Header(kind, 2**63, Key(1, 2**31, 3, 4), 2**40, -5, 6, torch.bfloat16, 48)
        assert Header.read(memoryview(said.packed()), 48) == said


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda frame: b"XXXX" + frame[4:], "not ours"),
        (lambda frame: frame[:4] + bytes([VERSION + 1]) + frame[5:], "version"),
        (lambda frame: frame[:5] + b"\xff" + frame[6:], "kind"),
        (lambda frame: frame[:6] + b"\xff" + frame[7:], "type of a payload"),
        (lambda frame: frame[:-8] + b"\xff" * 8, "length of a payload"),
        (lambda frame: frame[:-1], "length of a header"),
        (lambda frame: frame + b"x", "length of a header"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(change, why: str):
    frame = header(Kind.PUSH, nbytes=4).packed()
    with pytest.raises(Refused, match=why):
        Header.read(memoryview(change(frame)), 4)


def test_each_worker_has_one_unfinished_sum_of_a_key_at_most():
    workers = Workers(4)
    for rank in range(4):
        workers.push(rank, 1.0, seq=10 * (rank + 1))  # as no honest worker would
        with pytest.raises(Refused, match="ahead"):
            workers.push(rank, 1.0, seq=10 * (rank + 1) + 1)
    assert workers.ledger.held_nbytes == 4 * 4
