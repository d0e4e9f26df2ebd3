"""Error feedback: what a codec did not send in one step is added to what it is given in the next.

Every codec that sends less than it is given (`Part`) is put into `Feedback`, which keeps what is left over and, for
momentum SGD, the momentum (below), in slots. One law holds for each of them: what was sent and what is left over make
up what was there before and what backward has given.

Momentum. Gradients that wait and are then multiplied by an optimizer's momentum all at once are not what momentum SGD
would have done. So velocities are sent, not gradients (momentum correction, Lin et al. 2018): each rank runs the
recursion u <- m u + g on its own gradients and feeds u, and the optimizer applies the sum as it comes. As the recursion
is linear, the sum over ranks is that of stock SGD: sending everything is dense training. Lin et al. also clear u where
they have sent ("masking"), which keeps stale gradients out and loses velocity with them: a constant gradient no longer
reaches g / (1 - m), and sending everything is SGD without momentum. It is off unless asked for.

A step that some rank cannot use (an inf or a nan anywhere) leaves no trace: see `Slots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gradientflow.compress.codec import Conversation, Parcel, Sum, Traffic
from gradientflow.compress.slots import Slots
from gradientflow.compress.warmup import WarmUp
from gradientflow.errors import UsageError

RESIDUAL = "residual"
MOMENTUM = "momentum"


class Momentum(NamedTuple):
    """Of one parameter; 0: none."""

    factor: float = 0.0
    nesterov: bool = False


class Part(Protocol):
    """A codec that sends part of what it is given, the same part on all ranks."""

    can_overflow: bool
    #: Whether all that it learnt in this step is finite, on every rank: it knows after `close`.
    finite: bool

    def lay_out(self, parcels: Sequence[Parcel], world: int) -> None:
        """For these messages from now on; the next step sends everything."""

    def begin(self, density: float) -> None:
        """A step: to send this share, from the next one on."""

    def blocks(self, parcel: Parcel, number: int) -> list[int]:
        """Elements of each of the blocks, small enough for a cache, in which range `number` of the parcel is seen."""

    def see(self, parcel: Parcel, number: int, start: int, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """`total` is what there is to send, from `start` of a range on: one of its blocks. `scratch` may be written
        to, and is as long."""

    def send(self, parcel: Parcel, totals: Sequence[torch.Tensor], unit: float) -> Conversation:
        """Send a part of `totals` and leave the rest there; the sum of what ranks sent, times `unit`, is in the
        parcel's values then, which are zero before."""

    def clear_sent(self, parcel: Parcel, ranges: Sequence[torch.Tensor]) -> None:
        """Write zeros where the last `send` of the parcel has sent something."""

    def close(self) -> Conversation:
        """After all messages of a step: learn together what the next one will send."""

    def commit(self) -> None:
        """The step counts."""

    def traffic(self, numel: int, dtype: torch.dtype, density: float) -> Traffic:
        """As a codec's."""

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt, for messages of this layout."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `state_dict` gave it; messages are laid out as they were then."""


class Feedback:
    """A codec that sends what `part` does, and what it left over later.

    local_clip: no tensor's gradient of a rank may have a norm above this / sqrt(ranks), before anything else is done.
    """

    lossless = False

    def __init__(
        self, part: Part, warm_up: WarmUp, *, corrects: bool = True, masks: bool = False, local_clip: float = 0.0
    ) -> None:
        self._part, self._warm_up = part, warm_up
        #: Whether momentum, if the optimizer has any, is to be kept here.
        self.corrects = corrects
        self._masks, self._local_clip = masks, local_clip
        self._slots = Slots()
        self._parcels: Sequence[Parcel] = ()
        self._world = 1
        self._signature = ""
        self._flagged: Sequence[str] = ()
        self._unit = self._weight = 1.0
        self._momenta: Mapping[str, Momentum] = {}
        self._runs: dict[int, list[list[tuple[int, int, Momentum]]]] = {}
        #: Steps that counted.
        self._num_steps = 0
        self._loaded: Mapping[str, Any] | None = None

    @property
    def can_overflow(self) -> bool:
        return self._part.can_overflow

    @property
    def nbytes(self) -> int:
        """Of everything that is remembered."""
        return self._slots.nbytes

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        return self._part.traffic(numel, dtype, self._warm_up.target)

    # - Around steps

    def lay_out(self, parcels: Sequence[Parcel], world: int, signature: str, flagged: Sequence[str] = ()) -> None:
        """For these messages from now on; what is held moves over. The next step sends everything, unless what was
        loaded is of the same `signature`: then it goes on as it would have.

        flagged: tensors of which the first flags say whether any rank has used them."""
        self._flagged = flagged
        self._parcels, self._world, self._signature, self._runs = parcels, world, signature, {}
        self._slots.lay_out(parcels)
        self._slots.need(RESIDUAL)
        self._part.lay_out(parcels, world)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._slots.load(loaded["slots"])
            if loaded["signature"] == signature:
                self._part.load_state_dict(loaded["part"])

    def begin(self, momenta: Mapping[str, Momentum], unit: float = 1.0, weight: float = 1.0) -> None:
        """A step, in which gradients come multiplied by `unit` and are to be given back so. Those of this step, not
        what is left over, count `weight` times."""
        self._unit, self._weight = unit, weight
        if momenta != self._momenta:
            self._momenta, self._runs = dict(momenta), {}
        if any(momentum.factor for momentum in momenta.values()):
            self._slots.need(MOMENTUM)
        self._part.begin(self._warm_up.density(self._num_steps + 1))

    def close(self) -> Conversation:
        if MOMENTUM in self._slots.kinds:
            yield from self._let_rest(self._unused())
        yield from self._part.close()

    def _unused(self) -> set[str]:
        """Tensors that no rank has used in this step: known when messages have been carried."""
        flags = next((parcel.flags for parcel in self._parcels if parcel.flags is not None), None)
        if flags is None:
            return set()
        return {name for name, used in zip(self._flagged, flags.tolist(), strict=False) if not used}

    def _let_rest(self, unused: set[str]) -> Conversation:
        """An optimizer leaves alone what has no gradient. So do velocities: they stay, and what was sent of such
        tensors is sent anew without them."""
        moving = {name for name in unused if self._momenta.get(name, Momentum()).factor}
        for parcel in self._parcels if moving else ():
            places = [(number, slice(*bounds)) for name, number, *bounds in _places(parcel) if name in moving]
            if not places:
                continue
            waits = [torch.ones_like(values, dtype=torch.bool) for values in parcel.values]
            self._part.clear_sent(parcel, waits)
            residuals, totals = self._slots.now(RESIDUAL, parcel), self._slots.proposed(RESIDUAL, parcel)
            velocities, proposed = self._slots.now(MOMENTUM, parcel), self._slots.proposed(MOMENTUM, parcel)
            for number, here in places:
                proposed[number][here] = velocities[number][here]
                totals[number][here] = residuals[number][here] * waits[number][here]
            sent = [~waits[number][here] for number, here in places]
            waiting = [residuals[number][here] for number, here in places]
            again = torch.cat([values[picked] for values, picked in zip(waiting, sent, strict=True)])
            if len(again):
                yield Sum([again])
            sums = torch.split(again * self._unit, [int(picked.sum()) for picked in sent])
            for (number, here), picked, summed_up in zip(places, sent, sums, strict=True):
                parcel.values[number][here][picked] = summed_up.to(parcel.values[number].dtype)

    def settle(self) -> bool:
        """All conversations of the step have ended: whether it counts, as all ranks find alike."""
        if self._part.finite:
            self._slots.commit()
            self._part.commit()
            self._num_steps += 1
        return self._part.finite

    # - A message

    def converse(self, parcel: Parcel) -> Conversation:
        totals = self._slots.proposed(RESIDUAL, parcel)
        if self._local_clip:
            self._clip(parcel)
        self._accumulate(parcel, totals)
        yield from self._part.send(parcel, totals, self._unit)
        if self._masks and MOMENTUM in self._slots.kinds:
            self._part.clear_sent(parcel, self._slots.proposed(MOMENTUM, parcel))

    def _accumulate(self, parcel: Parcel, totals: Sequence[torch.Tensor]) -> None:
        """Move gradients to what was left over, block by block, each of which is read from memory once."""
        residuals = self._slots.now(RESIDUAL, parcel)
        kinds = [parcel.values, totals, residuals]
        if MOMENTUM in self._slots.kinds:
            kinds += [self._slots.now(MOMENTUM, parcel), self._slots.proposed(MOMENTUM, parcel)]
        sizes = [self._part.blocks(parcel, number) for number in range(len(parcel.values))]
        scratch = totals[0].new_empty(max(map(max, sizes)))
        for number, (operands, runs) in enumerate(zip(zip(*kinds, strict=True), self._runs_of(parcel), strict=True)):
            alike = len(runs) == 1
            for first, last, momentum in runs if not alike else ():
                self._add(momentum, *(operand[first:last] for operand in operands))
            start = 0
            for block in zip(*(torch.split(operand, sizes[number]) for operand in operands), strict=True):
                if alike:
                    self._add(runs[0][2], *block)
                gradient, total, *_ = block
                self._part.see(parcel, number, start, total, scratch)
                gradient.zero_()
                start += total.numel()

    def _add(
        self,
        momentum: Momentum,
        gradient: torch.Tensor,
        total: torch.Tensor,
        residual: torch.Tensor,
        before: torch.Tensor | None = None,
        velocity: torch.Tensor | None = None,
    ) -> None:
        """Write `total`, and the `velocity` that the one `before` becomes."""
        if self._unit != self._weight:
            # In the precision that is remembered: a factor is there because half precision would lose what this gives.
            gradient = gradient.to(total.dtype).mul_(self._weight / self._unit)
        if before is None or velocity is None:
            torch.add(residual, gradient, out=total)
            return
        torch.add(gradient, before, alpha=momentum.factor, out=velocity)
        if momentum.nesterov:  # as torch.optim.SGD: g + m u
            torch.add(residual, velocity, alpha=momentum.factor, out=total)
            total.add_(gradient)
        else:
            torch.add(residual, velocity, out=total)

    def _runs_of(self, parcel: Parcel) -> list[list[tuple[int, int, Momentum]]]:
        """Where in each range which momentum applies."""
        if parcel.number not in self._runs:
            kinds = {self._momenta.get(piece.tensor, Momentum()) for piece in parcel.message.slices}
            if len(kinds) == 1:
                momentum = kinds.pop()
                self._runs[parcel.number] = [[(0, values.numel(), momentum)] for values in parcel.values]
            else:
                runs: list[list[tuple[int, int, Momentum]]] = [[] for _ in parcel.values]
                for name, number, start, stop in _places(parcel):
                    runs[number].append((start, stop, self._momenta.get(name, Momentum())))
                self._runs[parcel.number] = runs
        return self._runs[parcel.number]

    def _clip(self, parcel: Parcel) -> None:
        """Each tensor's part of the message by itself. Values are shares of a mean: gradients divided by ranks."""
        limit = self._local_clip / self._world**1.5 * self._unit
        for _, number, start, stop in _places(parcel):
            values = parcel.values[number][start:stop]
            norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
            values.mul_(torch.clamp(limit / norm, max=1.0))  # a norm of 0 gives inf, and 1

    # - State

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, by parameter name; and what only messages of this layout can use."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {
            "num_steps": self._num_steps,
            "slots": self._slots.named(),
            "signature": self._signature,
            "part": self._part.state_dict(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless this could be loaded."""
        missing = {"num_steps", "slots", "signature", "part"} - state.keys()
        if missing:
            raise UsageError(f"the state of compression lacks {', '.join(sorted(missing))}")
        self._slots.check(state["slots"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """To be used from the next `lay_out` on."""
        self.check(state)
        self._num_steps = int(state["num_steps"])
        self._loaded = state

    def take_over(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """What has been remembered elsewhere until now, by parameter name."""
        self._slots.load({kind: {name: values.reshape(-1) for name, values in tensors.items()}})


def _places(parcel: Parcel) -> Iterator[tuple[str, int, int, int]]:
    """Of each slice: its tensor, the range it lies in, and from where to where."""
    number, start = 0, 0
    for piece in parcel.message.slices:
        if not piece.numel:
            continue
        if start == parcel.values[number].numel():
            number, start = number + 1, 0
        yield piece.tensor, number, start, start + piece.numel
        start += piece.numel


def summed(states: Sequence[Mapping[str, Any]], share: float) -> dict[str, Any]:
    """One rank's `share` of what the ranks of another world remembered: every element's sum over ranks stays what it
    was."""
    slots: dict[str, dict[str, torch.Tensor]] = {}
    for state in states:
        for kind, tensors in state["slots"].items():
            into = slots.setdefault(kind, {})
            for name, values in tensors.items():
                into[name] = into[name] + values if name in into else values.clone()
    for tensors in slots.values():
        for values in tensors.values():
            values.mul_(share)
    return {**states[0], "slots": slots, "signature": ""}
