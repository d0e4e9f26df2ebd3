"""The pump keeps the plan's order on every lane, whatever becomes ready first and whoever carries it."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from conversations import parcels
from gradientflow.compress import EXACT, Conversation, Sum
from gradientflow.errors import DeadlineError, TrainingError
from gradientflow.plan import NATIVE, Message, Plan, Slice
from gradientflow.runtime.pump import Pump
from gradientflow.runtime.streams import HostStreams
from gradientflow.trace import Recorder


class RecordingExchange:
    """Answers after a moment; notes what was carried on which lane, by which thread."""

    deadline_s = 1.0
    patterns = ()

    def __init__(self, num_lanes: int, fail_at: int = -1) -> None:
        self.num_lanes = num_lanes
        self.fail_at = fail_at
        self.carried: dict[int, list[int]] = {lane: [] for lane in range(num_lanes)}
        self.threads: list[str] = []
        self._busy = [False] * num_lanes

    def answer(self, question: Sum, lane: int, number: int = 0, detail: str = "", pattern: str = NATIVE) -> None:
        assert not self._busy[lane], "two conversations on one lane"
        self._busy[lane] = True
        time.sleep(random.random() * 0.002)
        message = int(question.tensors[0][0])
        if message == self.fail_at:
            raise TrainingError("the wire broke")
        self.carried[lane].append(message)
        self.threads.append(threading.current_thread().name)
        self._busy[lane] = False


def plan_of(num_messages: int, num_lanes: int) -> Plan:
    messages = tuple(Message(slices=(Slice(tensor=str(i), start=0, stop=1),)) for i in range(num_messages))
    names = tuple(str(i) for i in range(num_messages))
    return Plan(schedule="test", layout=names, messages=messages).on_lanes(num_lanes)


def loaded(exchange: RecordingExchange, num_messages: int) -> tuple[Pump, Recorder]:
    recorder = Recorder()
    pump = Pump(exchange, EXACT, HostStreams(), recorder)  # type: ignore[arg-type]
    pump.load(
        plan_of(num_messages, exchange.num_lanes), parcels([[torch.tensor([float(i)])] for i in range(num_messages)])
    )
    return pump, recorder


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_each_lane_keeps_the_plans_order_whatever_is_ready_first(num_lanes: int) -> None:
    exchange = RecordingExchange(num_lanes)
    pump, recorder = loaded(exchange, 9)
    order = random.Random(1)
    for step in range(20):
        pump.begin(step)
        early = order.sample(range(9), order.randrange(10))
        for message in early:
            pump.ready(message)
        pump.finish([message for message in range(9) if message not in early])
    pump.close()
    for lane in range(num_lanes):
        assert exchange.carried[lane] == list(range(lane, 9, num_lanes)) * 20
    assert len(recorder.trace(0).of_kind("message")) == 9 * 20


def test_a_single_message_is_carried_by_the_caller_and_starts_no_thread() -> None:
    exchange = RecordingExchange(2)
    pump, _ = loaded(exchange, 1)
    for step in range(3):
        pump.begin(step)
        pump.finish([0])
    assert set(exchange.threads) == {threading.main_thread().name}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gradientflow")]
    pump.close()


def test_messages_that_are_ready_early_are_carried_before_anyone_drains() -> None:
    exchange = RecordingExchange(1)
    pump, _ = loaded(exchange, 3)
    for step in range(3):
        pump.begin(step)
        exchange.carried[0].clear()
        exchange.threads.clear()
        pump.ready(0)
        pump.ready(1)
        deadline_s = time.monotonic() + 10
        while exchange.carried[0] != [0, 1] and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert exchange.carried[0] == [0, 1]
        assert exchange.threads == ["gradientflow-lane-0"] * 2
        pump.finish([2])
        assert exchange.threads[2] == threading.main_thread().name
    pump.close()


def test_the_training_thread_takes_over_a_backlog_and_slow_is_not_stuck() -> None:
    """Each message takes almost the deadline; many of them are no reason to give up."""
    exchange = RecordingExchange(1)
    exchange.deadline_s = 0.05
    answer = exchange.answer
    exchange.answer = lambda question, lane, *place: (time.sleep(0.04), answer(question, lane))  # type: ignore[method-assign, assignment, return-value]
    pump, _ = loaded(exchange, 6)
    pump.begin(0)
    for message in range(5):
        pump.ready(message)
    time.sleep(0.01)
    pump.finish([5])
    pump.close()
    assert exchange.carried[0] == list(range(6))
    assert exchange.threads == ["gradientflow-lane-0"] + [threading.main_thread().name] * 5


@pytest.mark.parametrize("fail_at", [0, 3])
def test_what_goes_wrong_on_a_lane_is_raised_where_it_is_drained(fail_at: int) -> None:
    exchange = RecordingExchange(2, fail_at)
    pump, _ = loaded(exchange, 4)
    pump.begin(0)
    for message in range(3):
        pump.ready(message)
    with pytest.raises(TrainingError, match="the wire broke"):
        pump.finish([3])
    pump.close()


def test_a_lane_that_does_not_move_runs_into_the_deadline() -> None:
    exchange = RecordingExchange(1)
    exchange.deadline_s = 0.05
    release = threading.Event()
    exchange.answer = lambda question, lane, *place: release.wait(10)  # type: ignore[method-assign, assignment, return-value]
    pump, _ = loaded(exchange, 2)
    pump.begin(0)
    pump.ready(0)
    time.sleep(0.05)
    with pytest.raises(DeadlineError, match="lane 0 has not moved"):
        pump.finish([1])
    release.set()
    pump.close()


# - In two halves


def norms() -> Conversation:
    yield Sum([torch.tensor([99.0])])


def decoupled(num_messages: int, num_lanes: int) -> Plan:
    gathers = tuple(reversed(range(num_messages)))
    plan = plan_of(num_messages, num_lanes).model_copy(update={"gathers": gathers, "norms": True})
    return plan.carried_by(lambda message: "ring")


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_lanes_sum_everything_then_norms_then_gather(num_lanes: int) -> None:
    exchange = RecordingExchange(num_lanes)
    pump = Pump(exchange, EXACT, HostStreams(), Recorder())  # type: ignore[arg-type]
    messages = parcels([[torch.tensor([float(number)])] for number in range(7)])
    pump.load(decoupled(7, num_lanes), messages, norms)
    order = random.Random(2)
    for step in range(10):
        pump.begin(step)
        early = order.sample(range(7), order.randrange(8))
        for message in early:
            pump.ready(message)
        pump.launch([message for message in range(7) if message not in early])
        pump.wait_for_closing()
        assert all(set(exchange.carried[lane][-100:]) >= set(range(lane, 7, num_lanes)) for lane in range(num_lanes))
        pump.wait(range(7))
        pump.finish([])
    pump.close()
    for lane in range(num_lanes):
        own = list(range(lane, 7, num_lanes))
        assert exchange.carried[lane] == [*own, *([99] if lane == 0 else []), *reversed(own)] * 10


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_a_closing_conversation_comes_when_all_lanes_have_carried_everything(num_lanes: int) -> None:
    exchange = RecordingExchange(num_lanes)
    pump = Pump(exchange, EXACT, HostStreams(), Recorder())  # type: ignore[arg-type]
    begun = []

    def closing() -> Conversation:
        begun.append(sum(map(len, exchange.carried.values())))
        yield Sum([torch.tensor([99.0])])

    pump.load(plan_of(7, num_lanes), parcels([[torch.tensor([float(number)])] for number in range(7)]), closing)
    order = random.Random(3)
    for step in range(10):
        pump.begin(step)
        early = order.sample(range(7), order.randrange(8))
        for message in early:
            pump.ready(message)
        pump.finish([message for message in range(7) if message not in early])
        assert begun[step] == 8 * step + 7
    pump.close()
    assert exchange.carried[0][-1] == 99
