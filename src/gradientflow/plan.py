"""What is sent, in which order: the narrow waist between planners, the runtime and the simulator.

A `Plan` is an ordered tuple of messages, a message a tuple of slices of tensors. Fusion is one message
with many slices, partition many messages with one slice each: one form for both.

[Note: plan order] On a lockstep exchange every rank issues the plan's messages in the plan's order, lane
by lane. Ranks that issue equal-shaped collectives in different orders get wrong sums and no error (Gloo,
measured), so the order is never decided at run time; what is decided at run time is only *when*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from pydantic import Field, model_validator

from gradientflow.documents import Document, Record
from gradientflow.profiles import Profile

#: The group's own all-reduce, instead of a pattern of ours.
NATIVE = "native"


class Slice(Record):
    """Elements `start` to `stop` of a tensor, counted along its flattened storage.

    >>> Slice(tensor="fc.weight", start=0, stop=10).numel
    10
    """

    #: By its name in the model.
    tensor: str
    start: int = Field(ge=0)
    stop: int = Field(ge=0)

    @model_validator(mode="after")
    def _runs_forward(self) -> Slice:
        if self.stop < self.start:
            raise ValueError(f"slice of {self.tensor!r} ends at {self.stop}, before its start {self.start}")
        return self

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start


class Message(Record):
    """Slices that travel together, on one lane. All of one dtype and device.

    >>> bias, weight = Slice(tensor="bias", start=0, stop=4), Slice(tensor="weight", start=0, stop=40)
    >>> Message(slices=(bias, weight)).numel
    44
    """

    slices: tuple[Slice, ...] = Field(min_length=1)
    lane: int = Field(default=0, ge=0, lt=256)
    #: Who sends what to whom: a name of `patterns`, or the group's own.
    pattern: str = NATIVE
    #: As it is, because the recipe's codec would take longer.
    dense: bool = False

    @property
    def numel(self) -> int:
        """How many elements, of all slices together."""
        return sum(piece.numel for piece in self.slices)

    @property
    def label(self) -> str:
        """A short name for people: the first and the last tensor.

        >>> Message(slices=(Slice(tensor="fc.bias", start=0, stop=4),)).label
        'fc.bias'
        """
        first, last = self.slices[0].tensor, self.slices[-1].tensor
        return first if first == last else f"{first} .. {last}"


class Plan(Document):
    """Messages in the order in which they are issued. Every element of every tensor is in one of them, once.

    A file too: `plan.write("plan.json")`, `Plan.read("plan.json")`.

    >>> from gradientflow import Recipe, TensorProfile
    >>> layers = [TensorProfile(name=name, shape=(1000, 1000)) for name in ("last", "middle", "first")]
    >>> plan = Recipe.parse("lazy:5MB").plan(Profile(tensors=tuple(layers)), num_lanes=1)
    >>> [message.label for message in plan.messages]
    ['last .. middle', 'first']
    >>> print(plan.explain())
    lazy:5MB: 2 messages for 3 tensors on 1 lane, 0 cuts
    """

    #: What made it, for people.
    schedule: str
    #: Tensor names in the order in which they lie in the gradient pool.
    layout: tuple[str, ...]
    messages: tuple[Message, ...]
    #: What the gate waits for together, in forward order; none: gradients are final when backward returns.
    stages: tuple[tuple[str, ...], ...] = ()
    #: Decoupled: each message is reduced and scattered in the order of `messages`, so that every rank has a part of
    #: the sum; when a lane has done all of its own, they are gathered, in this order. (): messages go whole.
    gathers: tuple[int, ...] = ()
    #: Between the two, ranks tell each other the norm of each tensor, for whoever clips by it.
    norms: bool = False
    #: What its planner had to say about it.
    why: str = ""

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when both would send the same things in the same order."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """What is done and, if its planner said so, why and what it is expected to take."""
        num_dense = sum(message.dense for message in self.messages)
        dense = f"; {num_dense} of {len(self.messages)} messages go as they are, a codec would take longer"
        if self.why:
            return self.why + dense * (num_dense > 0 and dense not in self.why)
        num_cut = len([None for message in self.messages for _ in message.slices]) - len(self.layout)
        gate = f"; the gate waits for {len(self.stages)} stages" if self.stages else ""
        messages = f"{len(self.messages)} message{'s' * (len(self.messages) != 1)} for {len(self.layout)} tensors"
        lanes = f"{self.num_lanes} lane{'s' * (self.num_lanes > 1)}"
        return f"{self.schedule}: {messages} on {lanes}, {max(0, num_cut)} cuts{gate}{dense * (num_dense > 0)}"

    @property
    def num_lanes(self) -> int:
        """On how many lanes its messages are."""
        return 1 + max((message.lane for message in self.messages), default=0)

    def sequence(self, rounds: int = 1) -> Iterator[tuple[int, int, int]]:
        """The static (message, round, lane) sequence. A lane carries one conversation at a time, so all
        rounds of a message come before the next message of its lane."""
        for index, message in enumerate(self.messages):
            for number in range(rounds):
                yield index, number, message.lane

    def on_lanes(self, num_lanes: int) -> Plan:
        """The same messages dealt in turn over `num_lanes` lanes."""
        messages = tuple(
            message.model_copy(update={"lane": index % num_lanes}) for index, message in enumerate(self.messages)
        )
        return self.model_copy(update={"messages": messages})

    def carried_by(self, pattern: Callable[[Message], str]) -> Plan:
        """The same messages, each by the pattern that is named for it."""
        messages = tuple(message.model_copy(update={"pattern": pattern(message)}) for message in self.messages)
        return self.model_copy(update={"messages": messages})

    def compressed_if(self, pays: Callable[[Message], bool]) -> Plan:
        """The same messages, those as they are for which a codec does not pay."""
        messages = tuple(message.model_copy(update={"dense": not pays(message)}) for message in self.messages)
        return self.model_copy(update={"messages": messages})

    def check(self, profile: Profile) -> None:
        """Raise `ValueError` unless every element of every tensor is sent exactly once, from one pool a message."""
        tensors = profile.by_name
        if sorted(self.layout) != sorted(tensors):
            different = sorted(set(self.layout) ^ set(tensors)) or ["a tensor listed twice"]
            raise ValueError(f"the plan and the profile hold different tensors: {', '.join(different[:5])}")
        if self.gathers and sorted(self.gathers) != list(range(len(self.messages))):
            raise ValueError("the plan does not gather every message exactly once")
        staged = sorted(name for stage in self.stages for name in stage)
        if staged and staged != sorted(tensors):
            raise ValueError("the plan's stages do not hold every tensor exactly once")
        sent: dict[str, list[Slice]] = {name: [] for name in self.layout}
        for index, message in enumerate(self.messages):
            for piece in message.slices:
                if piece.tensor not in sent:
                    raise ValueError(f"message {index} holds an unknown tensor {piece.tensor!r}")
                sent[piece.tensor].append(piece)
            pools = {tensors[piece.tensor].pool for piece in message.slices}
            if len(pools) > 1:
                raise ValueError(f"message {index} mixes pools {sorted(pools)}; a message is of one dtype and device")
        for name, pieces in sent.items():
            reached = 0
            for piece in sorted(pieces, key=lambda piece: (piece.start, piece.stop)):
                if piece.start != reached:
                    fault = "sent twice" if piece.start < reached else "never sent"
                    raise ValueError(f"elements of {name!r} next to {reached} are {fault}")
                reached = piece.stop
            if reached != tensors[name].numel:
                raise ValueError(f"{name!r} has {tensors[name].numel} elements, the plan ends at {reached}")
