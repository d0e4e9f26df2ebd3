"""Parameters that servers keep, without sockets: clocks, parked answers, rounds, who comes and goes, lost servers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.compress.quantize import Codes, Int8
from gradientflow.exchange.server.ledger import GONE_S, Outgoing
from gradientflow.exchange.server.table import ASKED, GRACE_S, INT8, PLAIN, Tables, shard_of
from gradientflow.exchange.server.wire import (
    NO_CLOCK,
    Copy,
    Header,
    Key,
    Kind,
    Mark,
    Name,
    Refused,
    Terms,
    pack_copy,
    pack_join,
    pack_names,
    read_copy,
    read_join,
)

SPACE = 5
NUMEL = 3
NOTHING = memoryview(b"")


def raw(values: torch.Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy().tobytes())


class World:
    """A server's table of one piece, and workers that hear of it at once, unless they are deaf."""

    def __init__(self, staleness: int, world: int, momentum: float = 0.0, lr: float = 1.0, warmup: int = 0) -> None:
        self.terms = Terms(staleness, lr, momentum, warmup, world, 1)
        self.copies: dict[int, tuple[int, Copy]] = {}
        self.advanced: dict[int, int] = {}
        self.sent: dict[int, list[torch.Tensor]] = {}
        self.deaf: set[int] = set()
        self.now_s = 0.0
        self.start_server()

    def start_server(self) -> None:
        self.tables = Tables(2**20, Counter())

    def say(self, number: int, kind: Kind, payload: memoryview = NOTHING, **more) -> None:
        said = Header(kind, SPACE, nbytes=len(payload), **more)
        self.hear([*self.tables.take(b"%d" % number, said, payload, self.now_s), *self.tables.answers()])

    def join(self, number: int) -> None:
        held = {0: self.copies[number][0]} if number in self.copies else {}
        marks = self.copies[number][1].marks if number in self.copies else {}
        known = [number for number, mark in marks.items() if mark.clock != NO_CLOCK]
        self.say(number, Kind.JOIN, memoryview(pack_join(self.terms, held, known)), rank=number)

    def found(self, number: int, values: torch.Tensor) -> None:
        self.say(number, Kind.FOUND, raw(values), dtype=values.dtype)

    def push(self, number: int, change: torch.Tensor, samples: int = -1, asked: bool = False) -> None:
        self.sent.setdefault(number, []).append(change)
        self.send(number, len(self.sent[number]), samples, asked)

    def send(self, number: int, seq: int, samples: int = -1, asked: bool = False) -> None:
        change, key = self.sent[number][seq - 1], Key(0, samples + 1, PLAIN, 0)
        self.say(number, Kind.DELTA, raw(change), key=key, seq=seq, dtype=change.dtype, urgency=ASKED * asked)

    def hear(self, outgoing: list[Outgoing]) -> None:
        for each in outgoing:
            number = int(each.identity)
            if each.header.kind is Kind.STATE and number not in self.deaf:
                assert isinstance(each.payload, torch.Tensor)
                copy = read_copy(memoryview(each.payload.numpy()), each.header.dtype, NUMEL)
                before = self.copies.get(number)
                if copy.velocity is None and before:
                    copy = copy._replace(velocity=before[1].velocity)
                self.copies[number] = each.header.seq, copy
                self.advanced[number] = each.header.key.epoch
                words = pack_names([Name(each.header.key, each.header.seq)])
                self.say(number, Kind.GOT, memoryview(words))
            elif each.header.kind is Kind.WANT:
                version, copy = self.copies[number]
                payload = pack_copy(copy)
                key = Key(self.advanced.get(number, 0), NUMEL, 0, 0)
                self.say(number, Kind.GIVE, memoryview(payload.numpy()), key=key, seq=version, dtype=copy.values.dtype)

    def values(self, number: int) -> torch.Tensor:
        return self.copies[number][1].values

    def mark(self, number: int, of: int) -> Mark:
        return self.copies[number][1].marks[of]

    def begin(self, values: torch.Tensor | None = None) -> None:
        for number in range(self.terms.world):
            self.join(number)
        self.found(0, torch.zeros(NUMEL) if values is None else values)

    def lose(self, number: int) -> None:
        identity = b"%d" % number
        for _ in range(2):
            if self.tables.knows(identity):
                self.tables.unreachable(identity, self.now_s)
            self.now_s += GONE_S
        self.hear(list(self.tables.answers()))


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# - Words


@given(
    st.dictionaries(st.integers(0, 2**32 - 1), st.integers(0, 2**63), max_size=5),
    st.sets(st.integers(0, 2**31), max_size=5),
)
def test_joins_are_read_as_they_were_written(held: dict[int, int], known: set[int]) -> None:
    terms = Terms(-1, 0.7, 0.9, 5, 4, 12)
    assert read_join(memoryview(pack_join(terms, held, known))) == (terms, held, known)


@given(st.binary(max_size=200))
def test_what_is_no_join_is_refused(words: bytes) -> None:
    try:
        read_join(memoryview(words))
    except Refused:
        pass
    with pytest.raises(Refused):
        read_copy(memoryview(words), torch.float32, 1000)


def test_copies_are_read_as_they_were_written() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values, velocity = torch.randn(7).to(dtype), torch.randn(7, dtype=torch.promote_types(dtype, torch.float32))
        marks = {3: Mark(5, 6), 9: Mark(2**40, NO_CLOCK)}
        for given_ in (velocity, None):
            packed = memoryview(pack_copy(Copy(marks, values, given_)).numpy())
            found = read_copy(packed, dtype, 7)
            assert found.marks == marks and torch.equal(found.values, values)
            assert (found.velocity is None) if given_ is None else torch.equal(found.velocity, velocity)
            with pytest.raises(Refused):
                read_copy(packed[:-1], dtype, 7)


# - Clocks


def test_nobody_begins_before_all_are_there() -> None:
    world = World(staleness=1, world=2)
    world.join(0)
    world.found(0, vector(1, 2, 3))
    assert not world.copies
    world.join(1)
    assert torch.equal(world.values(0), vector(1, 2, 3)) and torch.equal(world.values(1), vector(1, 2, 3))


def test_an_answer_is_parked_until_nobody_is_too_far_behind() -> None:
    world = World(staleness=2, world=2)
    world.begin()
    for step in range(1, 3):
        world.push(0, vector(2, 0, 0))
        assert world.copies[0][0] == step
    world.push(0, vector(2, 0, 0))
    assert world.copies[0][0] == 2, "three ahead of the slowest"
    world.push(1, vector(0, 4, 0))
    assert world.copies[0][0] == 4 and torch.equal(world.values(0), vector(3, 2, 0))
    assert torch.equal(world.values(1), vector(3, 2, 0))


def test_without_a_bound_nobody_waits() -> None:
    world = World(staleness=-1, world=2)
    world.begin()
    for step in range(1, 20):
        world.push(0, vector(1, 1, 1))
        assert world.copies[0][0] == step
    assert world.mark(0, of=0) == Mark(19, 19) and world.mark(0, of=1) == Mark(0, 0)


def test_a_delta_counts_once() -> None:
    world = World(staleness=-1, world=1)
    world.begin()
    world.push(0, vector(1, 2, 3))
    for _ in range(3):
        world.send(0, 1)
    assert torch.equal(world.values(0), vector(1, 2, 3))


@pytest.mark.parametrize("seed", range(60))
def test_workers_never_drift_apart_further_than_they_may(seed: int) -> None:
    """Each goes on if its newest copy allows it. Clocks differ by staleness + 1 at most, however they are delayed."""
    dice, staleness, number = random.Random(seed), seed % 4, 2 + seed % 3
    world = World(staleness, number)
    world.begin()
    clocks = [0] * number
    for _ in range(120):
        who = dice.randrange(number)
        if dice.random() < 0.3:
            world.deaf ^= {who}
            if who not in world.deaf:  # what it did not hear is sent once more
                world.join(who)
        copy = world.copies[who][1]
        mine = copy.marks[who]
        others = min(mark.clock for mark in copy.marks.values())
        pending = clocks[who] - mine.seq
        may = pending == 0 if staleness == 0 else others >= mine.clock + pending - staleness
        if may:
            clocks[who] += 1
            world.push(who, vector(1, 0, 0))
        assert max(clocks) - min(clocks) <= staleness + 1


# - Rounds


def test_a_round_is_the_mean_of_those_who_are_there() -> None:
    world = World(staleness=0, world=3)
    world.begin(vector(10, 10, 10))
    world.push(0, vector(3, 0, 0))
    world.push(2, vector(0, 0, 6))
    assert world.copies[0][0] == 0
    world.push(1, vector(0, 9, 0))
    for number in range(3):
        assert torch.equal(world.values(number), vector(11, 13, 12))


def test_samples_weigh() -> None:
    world = World(staleness=0, world=2)
    world.begin()
    world.push(0, vector(4, 0, 0), samples=1)
    world.push(1, vector(0, 4, 0), samples=3)
    assert torch.equal(world.values(0), vector(1, 3, 0))
    world = World(staleness=3, world=2)
    world.begin()
    world.push(0, vector(4, 0, 0), samples=1)  # of the other it is not known yet
    world.push(1, vector(0, 4, 0), samples=3)
    assert torch.equal(world.values(1), vector(2, 3, 0))


def test_who_has_no_samples_counts_for_nothing_unless_nobody_has_any() -> None:
    world = World(staleness=0, world=2)
    world.begin()
    world.push(0, vector(4, 0, 0), samples=8)
    world.push(1, vector(0, 4, 0), samples=0)
    torch.testing.assert_close(world.values(0), vector(4, 0, 0))
    for number in range(2):
        world.push(number, vector(0, 0, 2 + number * 2), samples=0)
    torch.testing.assert_close(world.values(0), vector(4, 0, 3))


def test_samples_are_counted_by_all_or_by_none() -> None:
    world = World(staleness=0, world=2)
    world.begin()
    world.push(0, vector(4, 0, 0), samples=64)
    with pytest.raises(Refused, match="samples"):
        world.push(1, vector(0, 4, 0))


def test_the_outer_optimizer_is_torchs_nesterov() -> None:
    world = World(staleness=0, world=2, momentum=0.9, lr=0.7)
    world.begin(vector(1, 2, 3))
    judge = torch.nn.Parameter(vector(1, 2, 3))
    outer = torch.optim.SGD([judge], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(5):
        changes = [torch.randn(NUMEL) for _ in range(2)]
        for number, change in enumerate(changes):
            world.push(number, change)
        judge.grad = -(changes[0] + changes[1]) / 2
        outer.step()
        torch.testing.assert_close(world.values(step % 2), judge.detach())


def test_a_round_that_all_ask_for_is_no_step_of_the_outer_optimizer() -> None:
    """It uses up no round of the warm-up and leaves the velocity alone, also on a server that was lost meanwhile."""
    world = World(staleness=0, world=2, momentum=0.5, lr=0.5, warmup=1)
    world.begin()

    def all_push(asked: bool) -> float:
        before = world.values(0)[0].item()
        for who in range(2):
            world.push(who, vector(2, 2, 2), asked=asked)
        return world.values(0)[0].item() - before

    assert [all_push(asked) for asked in (True, False, True)] == [2.0, 2.0, 2.0]
    world.start_server()
    for who in range(2):
        world.join(who)
    assert all_push(False) == 0.5 * (2.0 + 0.5 * 2.0)
    velocity = world.tables._tables[SPACE]._pieces[0].velocity
    assert all_push(True) == 2.0 and velocity[0] == 2.0
    for who in range(2):
        world.push(who, vector(0, 0, 0), asked=who == 0)
    assert velocity[0] == 1.0, "one of them only"


def test_one_workers_inf_is_not_everybodys() -> None:
    for staleness in (0, 1):
        world = World(staleness, world=2)
        world.begin()
        world.push(0, vector(float("inf"), 1, float("nan")))
        world.push(1, vector(2, 2, 2))
        assert torch.equal(world.values(1), vector(1, 1, 1))


def test_codes_are_read() -> None:
    world = World(staleness=-1, world=1)
    world.begin()
    codes = Codes(Int8(), shard_of(NUMEL), torch.device("cpu"))
    codes.write(vector(1, -1, 0.5), None, lambda like: like)
    world.say(0, Kind.DELTA, raw(codes.flat), key=Key(0, 0, INT8, 0), seq=1, dtype=torch.uint8)
    torch.testing.assert_close(world.values(0), vector(1, -1, 0.5), rtol=0, atol=0.005)
    with pytest.raises(Refused, match="length"):
        world.say(0, Kind.DELTA, raw(codes.flat[:-4]), key=Key(0, 0, INT8, 0), seq=2, dtype=torch.uint8)


def test_small_changes_do_not_vanish_in_half_precision() -> None:
    world = World(staleness=-1, world=1)
    world.begin(torch.ones(NUMEL, dtype=torch.bfloat16))
    for _ in range(100):
        world.push(0, torch.full((NUMEL,), 0.001, dtype=torch.bfloat16))
    assert world.values(0).dtype is torch.bfloat16 and float(world.values(0)[0]) == pytest.approx(1.1, abs=0.01)


# - Coming and going


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_dies_or_leaves_is_not_waited_for(staleness: int) -> None:
    world = World(staleness, world=3)
    world.begin()
    for _ in range(staleness + 1):
        for number in (0, 1):
            world.push(number, vector(3, 3, 3))
    heard = world.copies[0][0]
    assert heard <= 2 * staleness, "waits for the third"
    world.lose(2)
    assert world.copies[0][0] > heard and world.copies[1][0] > heard
    world.say(1, Kind.BYE)
    for _ in range(5):
        heard = world.copies[0][0]
        world.push(0, vector(1, 1, 1))
        assert world.copies[0][0] == heard + 1, "alone"


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_comes_later_is_waited_for_from_its_first_push_on(staleness: int) -> None:
    world = World(staleness, world=1)
    world.begin()
    for _ in range(5):
        world.push(0, vector(1, 0, 0))
    world.join(7)
    assert torch.equal(world.values(7), vector(5, 0, 0))
    world.push(0, vector(1, 0, 0))
    assert torch.equal(world.values(0), vector(6, 0, 0)), "not waited for yet"
    world.push(7, vector(0, 2, 0))
    if staleness == 0:
        world.push(0, vector(0, 0, 0))
    assert torch.equal(world.values(7), vector(6, 1, 0))
    pushed = 0
    while world.mark(0, of=0).seq == len(world.sent[0]):
        world.push(0, vector(0, 0, 0))
        pushed += 1
        assert pushed <= staleness + 2, "it is waited for"
    world.push(7, vector(0, 0, 0))
    assert world.mark(0, of=0).seq == len(world.sent[0])


# - Lost servers


@pytest.mark.parametrize("seed", range(120))
def test_a_lost_server_loses_nothing_and_counts_nothing_twice(seed: int) -> None:
    """Whole numbers: what is in the end there is the sum of what was pushed, as the pushes were weighed."""
    dice, staleness, number = random.Random(seed), (-1, 0, 1, 3)[seed % 4], 1 + seed % 3
    world = World(staleness, number, lr=1.0)
    world.begin()
    for step in range(40):
        who = dice.randrange(number)
        copy = world.copies[who][1]
        pending = len(world.sent.get(who, [])) - copy.marks[who].seq
        others = min(mark.clock for mark in copy.marks.values())
        may = pending == 0 if staleness <= 0 else others >= copy.marks[who].clock + pending - staleness
        if may and step < 34:
            world.push(who, vector(number, step * number, who * number))
        if dice.random() < 0.15:
            world.deaf ^= {who}
            if who not in world.deaf:
                world.join(who)
        if dice.random() < 0.15:
            world.start_server()
            for each in dice.sample(range(number), number):
                world.join(each)
            for each in range(number):
                again(world, each)
    world.deaf = set()
    for each in range(number):
        world.join(each)
        again(world, each)
    for level in range(max(map(len, world.sent.values()), default=0)):  # nobody is to be parked
        for each in range(number):
            if len(world.sent.get(each, [])) <= level:
                world.push(each, vector(0, 0, 0))
    everything = sum((torch.stack(sent).sum(0) for sent in world.sent.values()), start=vector(0, 0, 0))
    for each in range(number):
        world.join(each)
        assert torch.equal(world.values(each) * number, everything)


def again(world: World, number: int) -> None:
    """Push what the newest copy does not have."""
    seq = world.copies[number][1].marks.get(number, Mark(0, 0)).seq
    for each in range(seq + 1, len(world.sent.get(number, [])) + 1):
        world.send(number, each)


def test_the_newest_copy_is_taken_even_if_a_newcomer_is_first() -> None:
    world = World(staleness=0, world=2, momentum=0.5)
    world.begin(vector(1, 1, 1))
    world.push(0, vector(2, 2, 2))
    world.deaf = {1}
    world.push(1, vector(2, 2, 2))
    moved = world.values(0).clone()
    world.copies[0] = 1, world.copies[0][1]._replace(velocity=vector(2, 2, 2))  # as a worker reckons
    world.start_server()
    world.join(9)
    world.join(1)  # has an older one, and knows that there is another
    assert 9 not in world.copies
    world.deaf = set()
    world.join(0)
    assert torch.equal(world.values(9), moved) and torch.equal(world.values(1), moved)
    assert world.copies[9][1].velocity is not None and world.copies[9][1].velocity[0] == 2


def test_who_was_away_when_its_last_deltas_were_lost_goes_on() -> None:
    """It had the newest copy and comes back to a table that went on from an older one."""
    world = World(staleness=-1, world=2)
    world.begin()
    world.push(0, vector(2, 0, 0))
    world.deaf = {1}
    world.push(1, vector(0, 2, 0))
    world.push(0, vector(2, 0, 0))
    world.deaf = {0, 1}  # of the two, the copy of worker 0 is newer, and it stays away
    world.start_server()
    world.deaf = set()
    world.join(1)
    world.now_s += GRACE_S
    world.hear(list(world.tables.look(world.now_s)))
    again(world, 1)
    world.join(0)
    world.push(0, vector(4, 0, 0))
    assert world.mark(0, of=0).seq == 3, "its third delta counts"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_holder_that_was_asked_and_comes_anew_is_asked_again(staleness: int) -> None:
    world = World(staleness, world=2)
    world.begin(vector(1, 2, 3))
    version, copy = world.copies[0]
    world.start_server()
    world.join(1)
    words = memoryview(pack_join(world.terms, {0: version}, copy.marks))
    said = Header(Kind.JOIN, SPACE, rank=0, nbytes=len(words))
    asked = list(world.tables.take(b"0", said, words, 0.0))
    assert [each.header.kind for each in asked] == [Kind.WANT]  # which is lost with the connection
    world.copies[1] = world.copies[0]
    if asked[0].identity == b"0":
        world.join(0)
    else:
        world.join(1)
    assert world.tables._tables[SPACE].is_open


def test_a_server_that_is_lost_while_it_hands_out_the_first_values() -> None:
    """One of two pieces has reached somebody; the other is still the founder's alone."""
    world = World(staleness=1, world=2)
    world.terms = world.terms._replace(num_pieces=2)
    world.copies[1] = 0, Copy({0: Mark(0, 0), 1: Mark(0, 0)}, vector(1, 2, 3))
    world.join(0)
    for index in range(2):
        world.say(0, Kind.FOUND, raw(vector(1, 2, 3)), key=Key(0, 0, 0, index), dtype=torch.float32)
    world.join(1)
    assert world.tables._tables[SPACE].is_open
    assert torch.equal(world.values(0), vector(1, 2, 3))


def test_who_comes_again_gets_what_the_outer_optimizer_keeps() -> None:
    world = World(staleness=0, world=2, momentum=0.5)
    world.begin()
    world.deaf = {1}
    for _ in range(3):
        for number in range(2):
            world.push(number, vector(2, 2, 2))
    world.deaf = set()
    world.copies[1] = world.copies[1][0], world.copies[1][1]._replace(velocity=None)
    world.join(1)
    assert world.copies[1][1].velocity is not None and world.copies[1][1].velocity[0] == 3.5


def test_rounds_before_the_outer_optimizer_leave_no_velocity_also_on_a_server_that_was_lost() -> None:
    world = World(staleness=0, world=2, momentum=0.5, lr=0.5, warmup=2)
    world.begin()
    expected = []
    for number, velocity in enumerate((0.0, 0.0, 2.0, 3.0)):
        for who in range(2):
            world.push(who, vector(2, 2, 2))
        expected.append(2.0 if number < 2 else 0.5 * (2.0 + 0.5 * velocity))
        assert world.values(0)[0] == sum(expected)
        assert world.tables._tables[SPACE]._pieces[0].velocity[0] == velocity
        if number == 0:
            world.start_server()
            for who in range(2):
                world.join(who)


def test_who_does_not_come_back_is_not_waited_for_longer_than_a_while() -> None:
    world = World(staleness=1, world=2)
    world.begin(vector(1, 2, 3))
    world.start_server()
    world.join(0)
    assert not world.tables._tables[SPACE].is_open
    world.now_s += GRACE_S
    world.hear(list(world.tables.look(world.now_s)))
    assert world.tables._tables[SPACE].is_open


def test_others_terms_are_refused() -> None:
    world = World(staleness=1, world=1)
    world.begin()
    world.terms = world.terms._replace(staleness=2)
    with pytest.raises(Refused, match="terms"):
        world.join(3)
    for kind in (Kind.DELTA, Kind.FOUND, Kind.GIVE):
        with pytest.raises(Refused):
            world.say(0, kind, raw(vector(1, 1, 1)), key=Key(0, 0, 0, 5), seq=1, dtype=torch.float32)


def test_numbers_that_cannot_be_counted_on_from_are_refused() -> None:
    world = World(staleness=1, world=1)
    world.begin()
    with pytest.raises(Refused, match="number"):
        world.say(0, Kind.GIVE, raw(vector(1, 1, 1)), key=Key(2**32 - 1, NUMEL, 0, 0), dtype=torch.float32)
    for seq in (2**63, 2**64 - 1):
        world.sent[0] = [vector(1, 1, 1)]
        with pytest.raises(Refused, match="number"):
            world.say(0, Kind.DELTA, raw(vector(1, 1, 1)), key=Key(0, 0, PLAIN, 0), seq=seq, dtype=torch.float32)
        for mark in (Mark(seq, 0), Mark(0, seq - 1)):
            with pytest.raises(Refused, match="copy"):
                read_copy(memoryview(pack_copy(Copy({0: mark}, vector(1, 1, 1))).numpy()), torch.float32, NUMEL)


def test_one_connection_is_one_worker() -> None:
    world = World(staleness=1, world=1)
    world.begin()
    words = memoryview(pack_join(world.terms, {}, ()))
    for space, number in ((SPACE, 3), (SPACE + 1, 0)):
        with pytest.raises(Refused, match="somebody else"):
            world.tables.take(b"0", Header(Kind.JOIN, space, rank=number, nbytes=len(words)), words, 0.0)
    assert world.tables._tables.keys() == {SPACE} and world.tables._tables[SPACE].members.keys() == {0}


def test_who_turns_out_to_be_gone_while_others_are_answered() -> None:
    world = World(staleness=-1, world=3)
    world.deaf = {0, 1, 2}
    for number in range(3):
        world.join(number)
    said = Header(Kind.FOUND, SPACE, nbytes=4 * NUMEL, dtype=torch.float32)
    list(world.tables.take(b"0", said, raw(vector(1, 2, 3)), 0.0))
    told = []
    for each in world.tables.answers():
        told.append(each.identity)
        if each.identity == b"0":
            for now_s in (0.0, GONE_S):
                world.tables.unreachable(b"0", now_s)
    assert told == [b"0", b"1", b"2"]


def test_tables_whose_workers_are_gone_make_room() -> None:
    world = World(staleness=1, world=1)
    world.tables = Tables(4 * 4 * NUMEL, Counter())
    world.begin()
    said = Header(Kind.FOUND, SPACE + 1, nbytes=4 * NUMEL, dtype=torch.float32)
    words = memoryview(pack_join(world.terms, {}, ()))
    list(world.tables.take(b"9", Header(Kind.JOIN, SPACE + 1, rank=0, nbytes=len(words)), words, 0.0))
    with pytest.raises(Refused, match="memory"):
        world.tables.take(b"9", said, raw(vector(1, 2, 3)), 0.0)
    world.lose(0)
    world.tables.take(b"9", said, raw(vector(1, 2, 3)), 0.0)
    assert world.tables._tables.keys() == {SPACE + 1} and world.tables._tables[SPACE + 1].is_open
