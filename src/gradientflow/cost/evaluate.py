"""One worker's iteration under a plan, in seconds.

All workers are alike and in step, so one stands for all. Compute runs tensor by tensor: forward by
`forward_order`, backward in the profile's order. A message is ready when backward is done with its last
tensor, and its lane carries messages in the plan's order, one at a time.

[Note: shared link] Lanes share one link. A message first starts up, then its bytes are on the link: `beta *
nbytes` seconds if it is alone there. An all-reduce takes many hops, and in each of them a piece of it stands in line
behind a piece of every other message that is on the link. So all get on at the same pace, large and small: one that
shares the link with another takes as long as both together. (Measured: 0.9 MB beside 10 MB, in a ring of four, ended
when that did.) Start-ups overlap with everything. That is all that several lanes gain: what they hide is start-up,
never bytes. Nor do they hide what messages take of the processors that training computes on (`host_s`), which is
added up.

Without a gate everything has arrived when backward returns. With a gate the forward pass of a tensor waits
only for the messages that hold part of it, so communication may fill the next forward pass too. Where the gate
waits stage by stage, the first tensor of a stage waits for all of the stage.

Planners, which compare hundreds of plans, ask for less: a message is a `Job`, and an iteration's length follows
from when jobs end and from the compute that has to follow them (`Moments`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gradientflow.cost.table import Best, Cost, CostTable, Encoded, Least, Line, Memo, Paying, Steps
from gradientflow.documents import Record
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.trace import MAIN, Span, Trace

#: Groups of tensor names.
Stages = Sequence[Sequence[str]]


class Timing(Record):
    """When one message was ready, was taken by its lane, and had arrived."""

    label: str
    nbytes: int
    lane: int
    ready_s: float
    start_s: float
    end_s: float


class Work(Record):
    """What the training thread did: `forward`, `backward`, or `exposed`, waiting for communication."""

    kind: str
    start_s: float
    end_s: float


class Evaluation(Record):
    """One iteration, from the end of the one before: forward, backward, and what was waited for.

    With a gate messages may end after `iteration_s`, in the next forward pass.
    """

    iteration_s: float
    compute_s: float
    messages: tuple[Timing, ...]
    work: tuple[Work, ...]

    @property
    def exposed_s(self) -> float:
        return self.iteration_s - self.compute_s

    def trace(self, num_steps: int = 1, rank: int = 0) -> Trace:
        """As if a rank had recorded it, `num_steps` times over, from second 0 on."""
        steps = (self._spans(step, step * self.iteration_s) for step in range(num_steps))
        return Trace(rank=rank, epoch_s=0.0, spans=tuple(span for spans in steps for span in spans))

    def _spans(self, step: int, began_s: float) -> Iterator[Span]:
        yield Span("step", "step", MAIN, began_s, began_s + self.iteration_s, step)
        for part in self.work:
            yield Span(part.kind, part.kind, MAIN, began_s + part.start_s, began_s + part.end_s, step)
        for index, timing in enumerate(self.messages):
            details = {"message": index, "nbytes": timing.nbytes, "waited_s": timing.start_s - timing.ready_s}
            start_s, end_s = began_s + timing.start_s, began_s + timing.end_s
            yield Span("message", timing.label, f"lane {timing.lane}", start_s, end_s, step, details)


def evaluate(profile: Profile, plan: Plan, cost: Cost, *, gated: bool = False, stages: Stages = ()) -> Evaluation:
    """What an iteration takes once training has settled.

    `stages` are names of tensors that the gate waits for together; a tensor in none of them is one by itself.

    It settles at once. Every message holds part of some tensor and forward waits for all tensors, so the lanes
    are empty whenever backward begins, and what follows is the same each time.
    """
    plan.check(profile)
    carried = _carry(profile, plan, cost)  # from the start of backward
    backward_s = profile.backward_s
    if gated:
        # From the end of backward on, which is where this iteration begins.
        arrived_s = _by_stage(_arrivals(profile, plan, carried), stages)
        work = _gated_forward(profile, {name: end_s - backward_s for name, end_s in arrived_s.items()})
    else:
        work = [Work(kind="forward", start_s=0.0, end_s=profile.forward_s)]
    turn_s = work[-1].end_s
    iteration_s = turn_s + backward_s
    work.append(Work(kind="backward", start_s=turn_s, end_s=iteration_s))
    if not gated and carried:
        last_s = turn_s + max(timing.end_s for timing in carried)
        if last_s > iteration_s:
            work.append(Work(kind="exposed", start_s=iteration_s, end_s=last_s))
            iteration_s = last_s
    taken_s = host_s(profile, cost) * sum(timing.nbytes > 0 for timing in carried)
    if taken_s:
        work.append(Work(kind="exposed", start_s=iteration_s, end_s=iteration_s + taken_s))
        iteration_s += taken_s
    return Evaluation(
        iteration_s=iteration_s,
        compute_s=profile.forward_s + backward_s,
        messages=tuple(_later(timing, turn_s) for timing in carried),
        work=tuple(work),
    )


def host_s(profile: Profile, cost: Cost) -> float:
    """What a message takes from computing: of its processor seconds, the share for which computing needs processors.

    All of them, if that is not known. (With all of them counted where compute only sleeps, `flow` fused VGG-16, 55 MB,
    into messages of 6.9 MB, and the last gradients waited behind these: 1.30 times the limit, against 1.10.)
    """
    compute_s = profile.forward_s + profile.backward_s
    share = min(1.0, profile.cpu_s / compute_s) if profile.cpu_s and compute_s else 1.0
    return share * cost.host_s


def limit_s(profile: Profile, nbytes_to_move: float, bytes_per_s: float) -> float:
    """The least an iteration can take if no gradient is changed, cut how it may be and sent in any order.

    `nbytes_to_move` is what one worker's link carries in an iteration, in the direction that carries more; an
    exact all-reduce among p moves at least 2 (p - 1) / p of the gradients.

    Three things bound it. Compute C is done by one worker; bytes take W on the link. And early layers are the
    last to have their gradients and the first to need them back: number tensors in forward order, and let W_k
    be the time tensors 1 to k take on the link. All of it lies between the end of the backward pass of tensor k,
    before which none of these gradients exists, and the start of its forward pass, which needs them all. The
    rest of the iteration is, at least, the forward pass from k to the end and backward from the end to k: all
    compute but c_k, that of the tensors before k. So

        limit = max(C, W, max over k of C - c_k + W_k).

    Backward need not be the exact reverse of forward: "the end of the backward pass of k" is then the first
    moment at which any of the tensors 1 to k has its gradient.
    """
    compute_s = profile.forward_s + profile.backward_s
    wire_s = nbytes_to_move / bytes_per_s
    wire_s_per_byte = wire_s / profile.nbytes if profile.nbytes else 0.0
    ready_s = _ready_s(profile)
    bounds, nbytes, first_s, remaining_s = [compute_s, wire_s], 0, math.inf, profile.forward_s
    for tensor in in_forward_order(profile):
        nbytes += tensor.nbytes
        first_s = min(first_s, ready_s[tensor.name])
        bounds.append(remaining_s + first_s + nbytes * wire_s_per_byte)
        remaining_s -= tensor.forward_s
    return max(bounds)


def in_forward_order(profile: Profile) -> list[TensorProfile]:
    """Where the profile does not say, forward is backward reversed."""
    return sorted(reversed(profile.tensors), key=lambda tensor: tensor.forward_order)


def _ready_s(profile: Profile) -> dict[str, float]:
    """When each gradient is there, from the start of backward."""
    ends_s = accumulate(tensor.backward_s for tensor in profile.tensors)
    return {tensor.name: end_s for tensor, end_s in zip(profile.tensors, ends_s, strict=True)}


def _arrivals(profile: Profile, plan: Plan, carried: Sequence[Timing]) -> dict[str, float]:
    """By tensor, when the last message that holds part of it has arrived."""
    arrived_s = {tensor.name: 0.0 for tensor in profile.tensors}
    numbers = plan.gathers or range(len(plan.messages))
    if plan.norms:  # nothing begins before all first halves are there
        summed_s = max((timing.end_s for timing in carried[: len(plan.messages)]), default=0.0)
        arrived_s = dict.fromkeys(arrived_s, summed_s)
    for message, timing in zip(
        [plan.messages[number] for number in numbers], carried[-len(plan.messages) :], strict=True
    ):
        for piece in message.slices:
            arrived_s[piece.tensor] = max(arrived_s[piece.tensor], timing.end_s)
    return arrived_s


def _by_stage(arrived_s: dict[str, float], stages: Stages) -> dict[str, float]:
    found_s = arrived_s.copy()
    for stage in stages:
        found_s.update(dict.fromkeys(stage, max((arrived_s[name] for name in stage), default=0.0)))
    return found_s


def _gated_forward(profile: Profile, arrived_s: dict[str, float]) -> list[Work]:
    work: list[Work] = []
    now_s = began_s = 0.0
    for tensor in in_forward_order(profile):
        waited_until_s = arrived_s[tensor.name]
        if waited_until_s > now_s:
            if now_s > began_s:
                work.append(Work(kind="forward", start_s=began_s, end_s=now_s))
            work.append(Work(kind="exposed", start_s=now_s, end_s=waited_until_s))
            now_s = began_s = waited_until_s
        now_s += tensor.forward_s
    work.append(Work(kind="forward", start_s=began_s, end_s=now_s))
    return work


def _later(timing: Timing, by_s: float) -> Timing:
    moved = {name: getattr(timing, name) + by_s for name in ("ready_s", "start_s", "end_s")}
    return timing.model_copy(update=moved)


# - The link


class Link:
    """Lanes over one link, as time goes by. [Note: shared link]

    All messages on the link get on at the same pace, each by the same part of itself, so they end in the order in which
    they came on. A common clock shows how many messages one that was there from the beginning would have got through:
    it takes as long for one as all that are there would take one after the other.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._clock = 0.0
        self._starting: list[tuple[float, int, float]] = []  # when a lane's message comes on, lane, its wire_s
        self._on_link: list[tuple[float, int, float]] = []  # by the common clock when it ends, lane, its wire_s
        self._wire_s = 0.0  # of all on the link

    @property
    def busy(self) -> bool:
        return bool(self._starting or self._on_link)

    def start(self, lane: int, start_s: float, startup_s: float, wire_s: float) -> None:
        """A free lane takes a message at `start_s`, now or later."""
        heappush(self._starting, (start_s + startup_s, lane, wire_s))

    def run(self, until_s: float = math.inf) -> int | None:
        """Let time pass until a message has arrived, and say on which lane; `None` if none has by `until_s`."""
        starting, on_link = self._starting, self._on_link
        while self.busy:
            came_s = starting[0][0] if starting else math.inf
            done_s = self.now_s + self._wire_s * (on_link[0][0] - self._clock) if on_link else math.inf
            if min(came_s, done_s) > until_s:
                break
            if came_s <= done_s:
                self._pass(came_s)
                _, lane, wire_s = heappop(starting)
                heappush(on_link, (self._clock + (wire_s > 0.0), lane, wire_s))
                self._wire_s += wire_s
            else:
                self._clock, lane, wire_s = heappop(on_link)
                self._wire_s = sum(wire_s for _, _, wire_s in on_link)
                self.now_s = done_s
                return lane
        if until_s < math.inf:
            self._pass(until_s)
        return None

    def _pass(self, until_s: float) -> None:
        self._clock = self._clock + (until_s - self.now_s) / self._wire_s if self._wire_s else 0.0
        self.now_s = until_s


@dataclass(slots=True)
class Job:
    """A message on its way."""

    lane: int
    nbytes: int
    ready_s: float
    startup_s: float
    wire_s: float
    start_s: float = 0.0
    end_s: float = 0.0

    def times(self) -> dict[str, float]:
        return {"ready_s": self.ready_s, "start_s": self.start_s, "end_s": self.end_s}


def carry(jobs: Sequence[Job]) -> None:
    """Set when each job starts and ends: each lane carries its own in the order given, from second 0 on."""
    if all(job.lane == 0 for job in jobs):
        end_s = 0.0
        for job in jobs:
            job.start_s = max(end_s, job.ready_s)
            end_s = job.end_s = job.start_s + job.startup_s + job.wire_s
        return
    link = Link()
    queues: dict[int, deque[Job]] = {}
    for job in jobs:
        queues.setdefault(job.lane, deque()).append(job)

    def take_next(lane: int) -> None:
        if queues[lane]:
            job = queues[lane][0]
            job.start_s = max(link.now_s, job.ready_s)
            link.start(lane, job.start_s, job.startup_s, job.wire_s)

    for lane in queues:
        take_next(lane)
    while link.busy:
        done = link.run()
        assert done is not None
        queues[done].popleft().end_s = link.now_s
        take_next(done)


def startup_and_wire_s(cost: Cost, nbytes: float) -> tuple[float, float]:
    """A message's seconds in two parts: with the link free for others, and on it. Nothing is sent for no bytes."""
    seconds = cost.seconds(nbytes) if nbytes else 0.0
    wire_s = min(seconds, cost.beta_s_per_byte * nbytes)
    return seconds - wire_s, wire_s


def _carry(profile: Profile, plan: Plan, cost: Cost) -> list[Timing]:
    """The plan's messages on their lanes, from the start of backward. Decoupled: all first halves, all second."""
    if plan.gathers:
        firsts = _jobs(profile, plan, Steps(cost, 0.5, 1.0))
        jobs = firsts + [dataclasses.replace(firsts[number], ready_s=0.0) for number in plan.gathers]
        messages = [*plan.messages, *(plan.messages[number] for number in plan.gathers)]
    else:
        jobs, messages = _jobs(profile, plan, cost), list(plan.messages)
    carry(jobs)
    return [
        Timing(label=message.label, nbytes=job.nbytes, lane=job.lane, **job.times())
        for message, job in zip(messages, jobs, strict=True)
    ]


def _jobs(profile: Profile, plan: Plan, cost: Cost) -> list[Job]:
    ready_s = _ready_s(profile)
    itemsize = {tensor.name: tensor.torch_dtype.itemsize for tensor in profile.tensors}
    jobs = []
    for message in plan.messages:
        nbytes = sum(piece.numel * itemsize[piece.tensor] for piece in message.slices)
        complete_s = max(ready_s[piece.tensor] for piece in message.slices)
        jobs.append(Job(message.lane, nbytes, complete_s, *startup_and_wire_s(cost, nbytes)))
    return jobs


# - For planners


@dataclass(frozen=True, slots=True)
class Moments:
    """What a profile says of time, tensor by tensor in its own order, in seconds from the start of backward.

    Forward resumes at the latest wait, and nothing but compute follows it. So an iteration takes the longest of
    all compute and, over all tensors, arrival plus the compute that follows.
    """

    ready_s: tuple[float, ...]  # the gradient is there; never falls
    after_s: tuple[float, ...]  # compute that follows once it has arrived everywhere
    compute_s: float

    @classmethod
    def of(cls, profile: Profile, *, gated: bool, stages: Stages = ()) -> Moments:
        left_s = profile.forward_s
        after_s = dict.fromkeys((tensor.name for tensor in profile.tensors), left_s)
        if gated:
            for tensor in in_forward_order(profile):
                after_s[tensor.name] = left_s
                left_s -= tensor.forward_s
            after_s = _by_stage(after_s, stages)
        names = [tensor.name for tensor in profile.tensors]
        ready_s = _ready_s(profile)
        return cls(
            ready_s=tuple(ready_s[name] for name in names),
            after_s=tuple(after_s[name] for name in names),
            compute_s=profile.forward_s + profile.backward_s,
        )

    def iteration_s(self, jobs: Sequence[Job], after_s: Iterable[float]) -> float:
        """With these messages and the compute that follows each: the most of any of its tensors."""
        carry(jobs)
        ends_s = [job.end_s + follows_s for job, follows_s in zip(jobs, after_s, strict=True)]
        return max([self.compute_s, *ends_s])


def even_stages(profile: Profile, most: int) -> Stages:
    """At most `most` stages of tensors that are neighbours in forward order, alike in bytes and forward seconds.

    What a gate can wait for is the runtime's affair; this stands for it where that is not known.
    """
    tensors, nbytes, forward_s = in_forward_order(profile), profile.nbytes, profile.forward_s
    weights = [_share(tensor.nbytes, nbytes) + _share(tensor.forward_s, forward_s) for tensor in tensors]
    total = sum(weights)
    stages: dict[int, list[str]] = {}
    for tensor, so_far in zip(tensors, accumulate(weights), strict=True):
        number = min(most - 1, int(most * so_far / total * (1 - 1e-9))) if total else 0
        stages.setdefault(number, []).append(tensor.name)
    return tuple(tuple(stage) for stage in stages.values())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def seconds_of_each(cost: Cost, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """`cost.seconds` of many sizes at once; 0 for no bytes."""
    seconds: NDArray[np.float64] = np.where(nbytes > 0, _seconds(cost, nbytes), 0.0)
    return seconds


def _seconds(cost: Cost, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
    match cost:
        case Line():
            return cost.alpha_s + cost.beta_s_per_byte * nbytes
        case Steps():
            return cost.count * _seconds(cost.cost, nbytes * cost.fraction)
        case Memo():
            return _seconds(cost.cost, nbytes)
        case Encoded():
            return cost.compute_s_per_byte * nbytes + _seconds(cost.cost, nbytes)
        case Least():
            return np.asarray(np.min([_seconds(one, nbytes) for one in cost.costs], axis=0))
        case Best():
            ways = np.array([_seconds(way, nbytes) for way in cost.ways.values()])
            quickest = ways.min(axis=0)
            return np.asarray(np.where(quickest < (1 - cost.MARGIN) * ways[0], quickest, ways[0]))
        case Paying():
            encoded, plain, dense = (_seconds(one, nbytes) for one in (cost.encoded, cost.plain, cost.dense))
            return np.asarray(np.where(encoded < (1 - cost.margin) * plain, encoded, dense))
        case CostTable():
            sizes, seconds = np.array(cost.points, dtype=np.float64).T
            within = np.exp(np.interp(np.log(np.maximum(nbytes, sizes[0])), np.log(sizes), np.log(seconds)))
            beyond = np.maximum(0.0, nbytes - sizes[-1]) * cost.beta_s_per_byte
            return np.asarray(cost.software_s + within + beyond)
        case _:
            return np.array([cost.seconds(size) for size in nbytes.tolist()])
