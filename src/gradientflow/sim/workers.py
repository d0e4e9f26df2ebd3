"""A plan, played through: workers that compute, a carrier that brings their messages, and the clock between them.

A worker computes tensor by tensor, as in `cost.evaluate`: forward in `forward_order`, backward in the profile's order,
then the optimizer. A message is handed over when the last of its tensors is there on all workers: a lockstep exchange
cannot begin earlier, and a server cannot end earlier. With a gate, forward waits for the stage of each tensor, and the
optimizer's work for a stage is done there; without, backward's end waits for everything.

Workers whose computing takes the same times are in step for ever, so one of them is simulated for all: what is counted
is paces, not ranks.

On an ideal cluster (no drag, no copies, one worker's pace) a simulation is what `cost.evaluate` computes, and a test
holds the two against each other for plans of any kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

from gradientflow.cost.evaluate import in_forward_order
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.sim.events import Activities, Activity, Timeline
from gradientflow.trace import MAIN, Span, Trace


@dataclass(frozen=True)
class Handed:
    """One message of one step."""

    step: int
    number: int


class Carrier(Protocol):
    """Brings messages that all workers have handed over, and says when each has arrived."""

    def carry(self, handed: Handed, arrived: Callable[[Handed, float], None]) -> None:
        """Take a message; call back with the moment at which it was taken up, when it has arrived."""


@dataclass(frozen=True)
class Conditions:
    """What workers do beside the profile: how long each takes, step by step, and what the optimizer takes."""

    #: By step, then by kind of worker: how many times as long computing takes. The last step's go on.
    paces: Sequence[Sequence[float]] = ((1.0,),)
    update_s_per_byte: float = 0.0
    #: What each message takes from the training thread, ...
    host_s: float = 0.0
    #: ... and each gradient when it is there, and each of its bytes.
    gather_s: float = 0.0
    gather_s_per_byte: float = 0.0
    #: With a gate, what each tensor takes when the step is put off, and each stage when it is caught up with.
    gate_s: float = 0.0
    stage_s: float = 0.0
    #: Without a gate, each byte that has arrived, from where messages are to where gradients are.
    scatter_s_per_byte: float = 0.0
    #: Of all processors that workers share, what a core that every worker is on is, and of that what computing takes.
    crowding: float = 0.0
    computing_share: float = 0.0
    #: Of links that computing uses too, what is left of them meanwhile.
    room: Mapping[str, float] = field(default_factory=dict)

    def pace(self, step: int, kind: int) -> float:
        return self.paces[min(step, len(self.paces) - 1)][kind]

    @property
    def num_kinds(self) -> int:
        return len(self.paces[0])


@dataclass
class Simulated:
    """When each step ended (with a gate: its backward), what the first kind of worker did, and waited for."""

    ends_s: list[float]
    compute_s: float
    trace: Trace
    #: By step, by tensor or message: seconds of waiting.
    exposed_s: list[dict[str, float]]
    #: By step, by link: seconds in which it was busy, from the beginning to the end of the step.
    busy_s: list[dict[str, float]] = field(default_factory=list)

    def iterations_s(self, skip: int) -> list[float]:
        """Of all steps but the first ones, in which things settle."""
        return [after - before for before, after in pairwise(self.ends_s[skip:])]

    def waits_s(self, skip: int) -> dict[str, float]:
        """By tensor or message, the mean over the same steps."""
        settled = self.exposed_s[skip:]
        names = {name: None for of_step in settled for name in of_step}
        return {name: statistics.fmean(of_step.get(name, 0.0) for of_step in settled) for name in names}

    def links_s(self, skip: int) -> dict[str, float]:
        """By link, the mean over the same steps."""
        before, after = self.busy_s[skip - 1], self.busy_s[-1]
        num_steps = len(self.busy_s) - skip
        return {link: (seconds - before.get(link, 0.0)) / num_steps for link, seconds in sorted(after.items())}


class _Busy(NamedTuple):
    """Seconds on a processor, whatever computing is done by."""

    seconds: float


#: What a worker wants, one thing after another: seconds to compute or of a processor, or something to wait for.
_Wants = Iterator[float | _Busy | Callable[[], bool]]


class Simulation:
    """One run."""

    def __init__(self, profile: Profile, plan: Plan, conditions: Conditions, num_steps: int, gated: bool) -> None:
        plan.check(profile)
        self._profile, self._plan, self._conditions, self._gated = profile, plan, conditions, gated
        self._num_steps, self._share = num_steps, conditions.computing_share
        self._forward = in_forward_order(profile)
        self._holders = _holders(plan)
        itemsizes = {tensor.name: tensor.torch_dtype.itemsize for tensor in profile.tensors}
        self._nbytes = [sum(p.numel * itemsizes[p.tensor] for p in message.slices) for message in plan.messages]
        self._update_s = {t.name: conditions.update_s_per_byte * t.nbytes for t in profile.tensors}
        self._stage_of = {name: names for names in plan.stages for name in names} if gated else {}
        self._missing: dict[Handed, int] = {}
        self._unarrived: dict[tuple[int, str], int] = {}  # messages of a tensor still to come
        self._open: dict[int, int] = {}  # messages of a step still to come
        self._arrived: set[Handed] = set()
        self._waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._spans: list[Span] = []
        self._ends_s: list[list[float]] = [[] for _ in range(conditions.num_kinds)]
        self._exposed_s: list[dict[str, float]] = [{} for _ in range(num_steps)]
        self._busy_s: list[dict[str, float]] = []

    def run(self, make: Callable[[Timeline, Activities], Carrier]) -> Simulated:
        """make: a carrier for this run's clock and links."""
        self._timeline = Timeline()
        self._activities = Activities(self._timeline, self._conditions.room)
        self._carrier = make(self._timeline, self._activities)
        for kind in range(self._conditions.num_kinds):
            self._advance(self._worker(kind))
        self._timeline.run()
        assert all(len(ends_s) == self._num_steps for ends_s in self._ends_s), "the simulation stands still"
        profile, conditions = self._profile, self._conditions
        update_s = max(1.0, conditions.crowding) * conditions.update_s_per_byte * profile.nbytes
        return Simulated(
            ends_s=[0.0, *(max(ends) for ends in zip(*self._ends_s, strict=True))],
            compute_s=profile.forward_s + profile.backward_s + update_s,
            trace=Trace(rank=0, epoch_s=0.0, spans=tuple(sorted(self._spans, key=lambda span: span.start_s))),
            exposed_s=self._exposed_s,
            busy_s=self._busy_s,
        )

    # - Workers

    def _worker(self, kind: int) -> _Wants:
        for step in range(self._num_steps):
            began_s = self._timeline.now_s
            yield from self._forward_pass(kind, step)
            yield from self._backward_pass(kind, step)
            if not self._gated:
                since_s = self._timeline.now_s
                yield from self._taking_back(step)
                self._waited(kind, step, "", since_s)
                yield _Busy(sum(self._update_s.values()))
            else:
                yield _Busy(self._conditions.gate_s * len(self._profile.tensors))
            yield _Busy(self._conditions.host_s * sum(nbytes > 0 for nbytes in self._nbytes))
            self._note(kind, "step", began_s, step)
            self._ends_s[kind].append(self._timeline.now_s)
            if all(len(ends_s) > step for ends_s in self._ends_s):
                self._busy_s.append(self._activities.busy_s())

    def _forward_pass(self, kind: int, step: int) -> _Wants:
        """With a gate: up to the next tensor that is not there yet; its share of the optimizer before it."""
        began_s, pace = self._timeline.now_s, self._conditions.pace(step, kind)
        gated = self._gated and step > 0
        pending_s = busy_s = 0.0
        stages = set[tuple[str, ...]]()
        for tensor in self._forward:
            if gated and not self._whole_arrived(step - 1, tensor.name):
                yield _Busy(busy_s)
                yield pending_s
                pending_s, busy_s, since_s = 0.0, 0.0, self._timeline.now_s
                yield partial(self._whole_arrived, step - 1, tensor.name)
                self._waited(kind, step, tensor.name, since_s)
            pending_s += pace * tensor.forward_s
            if gated:
                stage = self._stage_of.get(tensor.name, (tensor.name,))
                busy_s += self._update_s[tensor.name] + self._conditions.stage_s * (stage not in stages)
                stages.add(stage)
        yield _Busy(busy_s)
        yield pending_s
        self._note(kind, "forward", began_s, step)

    def _backward_pass(self, kind: int, step: int) -> _Wants:
        began_s, pace = self._timeline.now_s, self._conditions.pace(step, kind)
        for tensor in self._profile.tensors:
            yield pace * tensor.backward_s
            yield _Busy(self._conditions.gather_s + self._conditions.gather_s_per_byte * tensor.nbytes)
            self._hand_over(step, tensor.name)
        self._note(kind, "backward", began_s, step)

    def _taking_back(self, step: int) -> _Wants:
        """Message by message, as stock DDP does it; where nothing is to be done with them, when all are there."""
        if self._conditions.scatter_s_per_byte:
            for number, nbytes in enumerate(self._nbytes):
                yield partial(self._has_arrived, Handed(step, number))
                yield _Busy(self._conditions.scatter_s_per_byte * nbytes)
        yield partial(self._all_arrived, step)

    def _advance(self, worker: _Wants) -> None:
        for wanted in worker:
            if isinstance(wanted, float | int | _Busy):
                seconds, share = (wanted.seconds, 1.0) if isinstance(wanted, _Busy) else (wanted, self._share)
                if seconds > 0:
                    cores = share * self._conditions.crowding / self._conditions.num_kinds
                    self._activities.start(Activity(seconds, lambda: self._advance(worker), cores=cores))
                    return
            elif not wanted():
                self._waiting.append((wanted, lambda: self._advance(worker)))
                return

    def _note(self, kind: int, name: str, since_s: float, step: int) -> None:
        if kind == 0:
            self._spans.append(Span(name, name, MAIN, since_s, self._timeline.now_s, step))

    def _waited(self, kind: int, step: int, tensor: str, since_s: float) -> None:
        if kind == 0 and self._timeline.now_s > since_s:
            self._spans.append(Span("exposed", tensor or "exposed", MAIN, since_s, self._timeline.now_s, step))
            if tensor:
                waits = self._exposed_s[step]
                waits[tensor] = waits.get(tensor, 0.0) + self._timeline.now_s - since_s
            else:
                self._share_out(step, since_s)

    def _share_out(self, step: int, since_s: float) -> None:
        """Waiting for everything is waiting for one message after another."""
        until_s = since_s
        messages = [span for span in self._spans if span.kind == "message" and span.step == step]
        for span in sorted(messages, key=lambda span: span.end_s):
            if span.end_s > until_s:
                waits = self._exposed_s[step]
                waits[span.name] = waits.get(span.name, 0.0) + span.end_s - until_s
                until_s = span.end_s

    # - Messages

    def _hand_over(self, step: int, tensor: str) -> None:
        for number in self._holders.get(tensor, ()):
            handed = Handed(step, number)
            needed = self._missing.get(handed)
            if needed is None:
                tensors = {piece.tensor for piece in self._plan.messages[number].slices}
                needed = len(tensors) * self._conditions.num_kinds
                self._open.setdefault(step, len(self._plan.messages))
            self._missing[handed] = needed - 1
            if needed == 1:
                del self._missing[handed]
                ready_s = self._timeline.now_s
                self._carrier.carry(handed, partial(self._arrive, ready_s))

    def _arrive(self, ready_s: float, handed: Handed, taken_s: float) -> None:
        message = self._plan.messages[handed.number]
        details = {"message": handed.number, "nbytes": self._nbytes[handed.number], "waited_s": taken_s - ready_s}
        now_s = self._timeline.now_s
        self._spans.append(Span("message", message.label, f"lane {message.lane}", taken_s, now_s, handed.step, details))
        self._open[handed.step] -= 1
        self._arrived.add(handed)
        for name in {piece.tensor for piece in message.slices}:
            key = handed.step, name
            self._unarrived[key] = self._unarrived.get(key, len(self._holders[name])) - 1
        ready = [resume for wanted, resume in self._waiting if wanted()]
        self._waiting = [entry for entry in self._waiting if entry[1] not in ready]
        for resume in ready:
            resume()

    def _has_arrived(self, handed: Handed) -> bool:
        return handed in self._arrived

    def _all_arrived(self, step: int) -> bool:
        return self._open.get(step, len(self._plan.messages)) == 0

    def _whole_arrived(self, step: int, name: str) -> bool:
        return all(
            self._unarrived.get((step, other), len(self._holders.get(other, ()))) == 0
            for other in self._stage_of.get(name, (name,))
        )


def _holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    """By tensor, the messages that hold part of it."""
    found: dict[str, list[int]] = {}
    for number, message in enumerate(plan.messages):
        for name in {piece.tensor: None for piece in message.slices}:
            found.setdefault(name, []).append(number)
    return {name: tuple(numbers) for name, numbers in found.items()}
