"""One worker's iteration under a plan, in seconds.

All workers are alike and in step, so one stands for all. Compute runs tensor by tensor: forward by
`forward_order`, backward in the profile's order. A message is ready when backward is done with its last
tensor, and its lane carries messages in the plan's order, one at a time.

[Note: shared link] Lanes share one link. A message first starts up, then its bytes are on the link: `beta *
nbytes` seconds if it is alone there, k times as long while k lanes are. Start-ups overlap with everything.
That is all that several lanes gain: what they hide is start-up, never bytes.

Without a gate everything has arrived when backward returns. With a gate the forward pass of a tensor waits
only for the messages that hold part of it, so communication may fill the next forward pass too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradientflow.cost.table import Cost
from gradientflow.documents import Record
from gradientflow.plan import Plan
from gradientflow.profile import Profile, TensorProfile
from gradientflow.trace import MAIN, Span, Trace


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


def evaluate(profile: Profile, plan: Plan, cost: Cost, *, gated: bool = False) -> Evaluation:
    """What an iteration takes once training has settled.

    It settles at once. Every message holds part of some tensor and forward waits for all tensors, so the lanes
    are empty whenever backward begins, and what follows is the same each time.
    """
    plan.check(profile)
    carried = _carry(profile, plan, cost)  # from the start of backward
    backward_s = profile.backward_s
    if gated:
        # From the end of backward on, which is where this iteration begins.
        arrived_s = _arrivals(profile, plan, carried)
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
    return Evaluation(
        iteration_s=iteration_s,
        compute_s=profile.forward_s + backward_s,
        messages=tuple(_later(timing, turn_s) for timing in carried),
        work=tuple(work),
    )


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
    for tensor in _in_forward_order(profile):
        nbytes += tensor.nbytes
        first_s = min(first_s, ready_s[tensor.name])
        bounds.append(remaining_s + first_s + nbytes * wire_s_per_byte)
        remaining_s -= tensor.forward_s
    return max(bounds)


def _in_forward_order(profile: Profile) -> list[TensorProfile]:
    """Where the profile does not say, forward is backward reversed."""
    return sorted(reversed(profile.tensors), key=lambda tensor: tensor.forward_order)


def _ready_s(profile: Profile) -> dict[str, float]:
    """When each gradient is there, from the start of backward."""
    ends_s = accumulate(tensor.backward_s for tensor in profile.tensors)
    return {tensor.name: end_s for tensor, end_s in zip(profile.tensors, ends_s, strict=True)}


def _arrivals(profile: Profile, plan: Plan, carried: Sequence[Timing]) -> dict[str, float]:
    """By tensor, when the last message that holds part of it has arrived."""
    arrived_s = {tensor.name: 0.0 for tensor in profile.tensors}
    for message, timing in zip(plan.messages, carried, strict=True):
        for piece in message.slices:
            arrived_s[piece.tensor] = max(arrived_s[piece.tensor], timing.end_s)
    return arrived_s


def _gated_forward(profile: Profile, arrived_s: dict[str, float]) -> list[Work]:
    work: list[Work] = []
    now_s = began_s = 0.0
    for tensor in _in_forward_order(profile):
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


def _carry(profile: Profile, plan: Plan, cost: Cost) -> list[Timing]:
    """The plan's messages on their lanes, from the start of backward. [Note: shared link]"""
    jobs = _jobs(profile, plan, cost)
    queues: dict[int, deque[_Job]] = {}
    for job in jobs:
        queues.setdefault(job.lane, deque()).append(job)
    now_s = 0.0
    starting: dict[int, float] = {}  # lane -> when its message comes on to the link
    on_link: dict[int, float] = {}  # lane -> seconds its message would still need alone

    def take_next(lane: int) -> None:
        if queues[lane]:
            job = queues[lane][0]
            job.start_s = max(now_s, job.ready_s)
            starting[lane] = job.start_s + job.startup_s

    for lane in queues:
        take_next(lane)
    while starting or on_link:
        done_s = now_s + len(on_link) * min(on_link.values()) if on_link else math.inf
        if starting and min(starting.values()) <= done_s:
            lane = min(starting, key=starting.__getitem__)
            came_s = starting.pop(lane)
            for other in on_link:
                on_link[other] -= min(on_link[other], (came_s - now_s) / len(on_link))
            now_s = came_s
            on_link[lane] = queues[lane][0].wire_s
        else:
            lane = min(on_link, key=on_link.__getitem__)
            spent_s = on_link.pop(lane)
            for other in on_link:
                on_link[other] -= spent_s
            now_s = done_s
            queues[lane].popleft().end_s = now_s
            take_next(lane)
    return [
        Timing(label=message.label, nbytes=job.nbytes, lane=job.lane, **job.times())
        for message, job in zip(plan.messages, jobs, strict=True)
    ]


@dataclass(slots=True)
class _Job:
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


def _jobs(profile: Profile, plan: Plan, cost: Cost) -> list[_Job]:
    ready_s = _ready_s(profile)
    itemsize = {tensor.name: tensor.torch_dtype.itemsize for tensor in profile.tensors}
    jobs = []
    for message in plan.messages:
        nbytes = sum(piece.numel * itemsize[piece.tensor] for piece in message.slices)
        # A message of empty tensors is not sent.
        seconds = cost.seconds(nbytes) if nbytes else 0.0
        wire_s = min(seconds, cost.beta_s_per_byte * nbytes)
        complete_s = max(ready_s[piece.tensor] for piece in message.slices)
        jobs.append(_Job(message.lane, nbytes, complete_s, seconds - wire_s, wire_s))
    return jobs
