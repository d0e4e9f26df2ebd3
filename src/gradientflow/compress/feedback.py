"""Error feedback: what a codec did not send in one step is added to what it is given in the next.

Every codec that sends less than it is given (`Part`) is put into `Feedback`, which keeps what is left over and, for
momentum SGD, the momentum (below), in slots. One law holds for each of them, unless it says that it `forgets`: what was
sent and what is left over make up what was there before and what backward has given.

Momentum. Gradients that wait and are then multiplied by an optimizer's momentum all at once are not what momentum SGD
would have done. So velocities are sent, not gradients (momentum correction, Lin et al. 2018): each rank runs the
recursion u <- m u + g on its own gradients and feeds u, and the optimizer applies the sum as it comes. As the recursion
is linear, the sum over ranks is that of stock SGD: sending everything is dense training. Lin et al. also clear u where
they have sent ("masking"), which keeps stale gradients out and loses velocity with them: a constant gradient no longer
reaches g / (1 - m), and sending everything is SGD without momentum. It is off unless asked for, and spares what never
waits.

Messages that go as they are, because the codec would take longer, keep nothing waiting. If all of them do so, momentum
is all that is remembered, and an optimizer can as well have it back: ranks then share velocities out evenly once, and
the codec is `settled`.

Tensors that the codec does not take, such as biases, are summed as they are when all messages of a step have been
carried, together with whatever else ranks have to tell each other then.

A step that some rank cannot use (an inf or a nan anywhere) leaves no trace: see `Slots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradientflow.compress.codec import Conversation, Parcel, Sum, Traffic, summed_once
from gradientflow.compress.guard import WHOLE, Guard
from gradientflow.compress.part import Part, blocks_of, is_finite, pieces, ranges
from gradientflow.compress.slots import Slots
from gradientflow.compress.warmup import WarmUp
from gradientflow.errors import UsageError
from gradientflow.saved import count, reading

RESIDUAL = "residual"
MOMENTUM = "momentum"
#: Steps after which both memories of a message that goes as it is are empty.
CLEARED = 2
#: What becomes of velocities: they stay, are to be shared out evenly in the next step, have been.
STAY, LEAVE, SHARED = range(3)


class Momentum(NamedTuple):
    """Of one parameter; 0: none."""

    factor: float = 0.0
    nesterov: bool = False


class Feedback:
    """A codec that sends what `part` does, and what it left over later.

    local_clip: no tensor's gradient of a rank may have a norm above this / sqrt(ranks), before anything else is done.
    """

    lossless = False

    def __init__(
        self,
        part: Part,
        warm_up: WarmUp,
        *,
        corrects: bool = True,
        masks: bool = False,
        local_clip: float = 0.0,
        always: bool = True,
        guard: Guard | None = None,
    ) -> None:
        self._part, self._warm_up = part, warm_up
        #: Decides what to send, instead of the warm-up.
        self.guard = guard
        #: Whether all messages are for it; else those that it gains time for.
        self.always = always
        #: Whether momentum, if the optimizer has any, is to be kept here.
        self.corrects = corrects
        self._masks, self._local_clip = masks, local_clip
        self._slots = Slots()
        self._parcels: Sequence[Parcel] = ()
        self._world = 1
        self._signature = ""
        self._flagged: Sequence[str] = ()
        self._loose: list[list[tuple[int, int]]] = []  # by message, where tensors lie that the part does not take
        self._aside: dict[int, torch.Tensor] = {}  # what there is of them in this step
        self._overflown: list[int] = []  # messages of this step; lanes append to it side by side
        self._flags_are_summed = False
        self._density = 1.0
        self._finite = True
        self._unit = self._weight = 1.0
        self._momenta: Mapping[str, Momentum] = {}
        self._runs: dict[int, list[list[tuple[int, int, Momentum]]]] = {}
        #: Steps that counted.
        self._num_steps = 0
        self._num_dense = 0  # of them, since messages that go as they are have been doing so
        self._all_pass = False  # every message goes as it is, and loses nothing by that
        self._velocities = STAY
        self._loaded: Mapping[str, Any] | None = None

    @property
    def can_overflow(self) -> bool:
        return self._part.can_overflow

    @property
    def nbytes(self) -> int:
        """Of everything that is remembered."""
        return self._slots.nbytes

    @property
    def can_settle(self) -> bool:
        """Whether no message is for it, so that nothing will wait."""
        return self._all_pass

    @property
    def warmed_up(self) -> bool:
        """Whether it does what it will do in the long run. (With a guard that is never sure.)"""
        return self.guard is None and self._num_steps >= self._warm_up.num_steps

    @property
    def settled(self) -> bool:
        """Whether all ranks have the same share of velocities, which are to be remembered elsewhere: as nothing waits
        and nothing will, or because they were asked to `leave`."""
        return self._velocities == SHARED or (self._all_pass and self._num_dense > CLEARED)

    def traffic(self, parcel: Parcel, world: int) -> Traffic:
        if parcel.message.dense:
            return summed_once(parcel.nbytes, world)
        aside = summed_once(sum(stop - start for start, stop in self._loose_of(parcel)) * parcel.dtype.itemsize, world)
        if aside.nbytes == parcel.nbytes:
            return aside
        taken = self._part.traffic(parcel, self._warm_up.target, world)
        return taken._replace(nbytes=taken.nbytes + aside.nbytes, sent_nbytes=taken.sent_nbytes + aside.sent_nbytes)

    # - Around steps

    def lay_out(
        self, parcels: Sequence[Parcel], rank: int, world: int, signature: str, flagged: Sequence[str] = ()
    ) -> None:
        """For these messages from now on; what is held moves over. The next step sends everything, unless what was
        loaded is of the same `signature`: then it goes on as it would have.

        flagged: tensors of which the first flags say whether any rank has used them."""
        self._flagged, self._num_dense = flagged, 0
        self._parcels, self._world, self._signature, self._runs = parcels, world, signature, {}
        self._slots.lay_out(parcels)
        self._slots.need(RESIDUAL)
        self._all_pass = all(self._passes(parcel) for parcel in parcels)
        self._loose = [self._loose_of(parcel) for parcel in parcels]
        # Of messages that go as they are the part knows nothing.
        self._part.lay_out([p._replace(values=[]) if p.message.dense else p for p in parcels], rank, world)
        if self.guard:
            self.guard.lay_out(parcels)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            with reading("what a codec keeps"):
                self._take_up(loaded, signature)

    def _take_up(self, loaded: Mapping[str, Any], signature: str) -> None:
        self._slots.forget()
        self._slots.need(RESIDUAL)
        self._slots.load(loaded["slots"])
        if loaded["signature"] == signature and loaded.get("codec") == type(self._part).__name__:
            self._part.load_state_dict(loaded["part"])
            self._num_dense = count(loaded, "num_dense")
        if self.guard and "guard" in loaded:
            self.guard.load_state_dict(loaded["guard"])
            if loaded["signature"] != signature:
                self.guard.lay_out(self._parcels)
            self.guard.check(len(self._parcels))

    def begin(self, momenta: Mapping[str, Momentum], unit: float = 1.0, weight: float = 1.0, rate: float = 1.0) -> None:
        """A step, in which gradients come multiplied by `unit` and are to be given back so. Those of this step, not
        what is left over, count `weight` times. rate: how far the optimizer will go with them."""
        self._unit, self._weight = unit, weight
        if momenta != self._momenta:
            self._momenta, self._runs = dict(momenta), {}
        if any(momentum.factor for momentum in momenta.values()):
            self._slots.need(MOMENTUM)
        self._density = self._warm_up.density(self._num_steps + self._part.chooses_ahead)
        densities = None
        if self.guard:
            self.guard.begin(self._num_steps, rate)
            densities = [self.guard.density(parcel.number) for parcel in self._parcels]
        self._part.begin(self._density, self._num_steps, densities)
        self._aside, self._overflown, self._flags_are_summed = {}, [], False

    def close(self) -> Conversation:
        """One question for everything that ranks have to tell each other beside messages."""
        flags = [parcel.flags for parcel in self._parcels if parcel.flags is not None]
        told_flags = [] if self._flags_are_summed else flags
        aside = [self._aside[number] for number in sorted(self._aside)]
        told = [*aside, *told_flags, *self._part.tells(), *(self.guard.tells() if self.guard else ())]
        if any(tensor.numel() for tensor in told):
            dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in aside) else torch.float32
            device = next((parcel.values[0].device for parcel in self._parcels if parcel.values), told[0].device)
            packed = torch.cat([tensor.to(device, dtype) for tensor in told])
            yield Sum([packed])
            for tensor, summed_up in zip(told, torch.split(packed, [len(tensor) for tensor in told]), strict=True):
                tensor.copy_(summed_up)
        for parcel in (self._parcels[number] for number in self._aside):
            self._put_in(parcel, self._aside[parcel.number])
            self._check_range(parcel, self._aside[parcel.number])
        self._finite = self._part.learns() and not self._overflown
        if self.guard:
            self.guard.learns()
        if flags and (MOMENTUM in self._slots.kinds or self._part.forgets):
            self._let_rest({name for name, used in zip(self._flagged, flags[0].tolist(), strict=False) if not used})
        leave = self._velocities == LEAVE or (self._all_pass and self._num_dense == CLEARED)
        if leave and MOMENTUM in self._slots.kinds:
            yield from self._share_velocities()

    def _share_velocities(self) -> Conversation:
        """Among ranks, evenly: their sum stays what it is."""
        for parcel in self._parcels:
            if parcel.values:
                velocity = self._slots.proposed(MOMENTUM, parcel)
                yield Sum([velocity])
                velocity.div_(self._world)

    def _let_rest(self, unused: set[str]) -> None:
        """An optimizer leaves alone what has no gradient on any rank. So do velocities; and as what was sent of such
        tensors holds some, it has not been sent. Where nothing ever waits there is nothing to send either."""
        resting = {name for name in unused if self._part.forgets or self._momenta.get(name, Momentum()).factor}
        for parcel in self._parcels if resting else ():
            places = zip(_places(parcel), pieces(parcel), strict=True)
            for (name, number, *bounds), (_, _, _, start, stop) in places:
                if name in resting:
                    parcel.values[number][slice(*bounds)] = 0.0
                    for kind in self._slots.kinds:
                        self._slots.proposed(kind, parcel)[start:stop] = self._slots.now(kind, parcel)[start:stop]

    def settle(self) -> bool:
        """All conversations of the step have ended: whether it counts, as all ranks find alike."""
        if self._finite:
            self._slots.commit()
            self._part.commit()
            if self.guard:
                self.guard.commit()
            self._num_steps += 1
            self._num_dense += 1
            if self._velocities == LEAVE:
                self._velocities = SHARED
        return self._finite

    # - A message

    def converse(self, parcel: Parcel) -> Conversation:
        if self._never_waits(parcel):
            yield from self._pass_on(parcel)
            return
        total, loose = self._slots.proposed(RESIDUAL, parcel), self._loose[parcel.number]
        if self._local_clip:
            self._clip(parcel)
        if self.guard:
            self.guard.given(parcel, self._unit)
        self._accumulate(parcel, total)
        if self.guard:
            self.guard.meant(parcel, total)
        if self._goes_whole(parcel):
            yield from self._send_whole(parcel, total)
        else:
            if loose:
                self._aside[parcel.number] = torch.cat([total[start:stop] for start, stop in loose])
                for start, stop in loose:
                    total[start:stop] = 0.0
            if sum(stop - start for start, stop in loose) < len(total):
                yield from self._part.send(parcel, total, self._unit)
                if self._masks and MOMENTUM in self._slots.kinds:
                    self._mask(parcel, self._slots.proposed(MOMENTUM, parcel))
            for start, stop in [(0, len(total))] if self._part.forgets else loose:
                total[start:stop] = 0.0
        if self.guard:
            self.guard.left(parcel, total)
        self._check_range(parcel, total)

    def _mask(self, parcel: Parcel, velocity: torch.Tensor) -> None:
        """Clear velocities of what was sent, but for tensors that never wait."""
        spared = [(start, stop, velocity[start:stop].clone()) for start, stop in self._loose[parcel.number]]
        self._part.clear_sent(parcel, velocity)
        for start, stop, values in spared:
            velocity[start:stop] = values

    def _check_range(self, parcel: Parcel, remembered: torch.Tensor) -> None:
        """What is remembered in a wider type may be too much for gradients."""
        if parcel.dtype.itemsize < remembered.itemsize and not all(is_finite(values) for values in parcel.values):
            self._overflown.append(parcel.number)

    def _goes_whole(self, parcel: Parcel) -> bool:
        if self.guard and self.guard.density(parcel.number) >= WHOLE:
            return True
        return parcel.message.dense or (self._density >= 1 and not self._part.sends_all)

    def _never_waits(self, parcel: Parcel) -> bool:
        """Goes as it is, has been doing so, and loses nothing by being written in the precision of gradients."""
        return self._num_dense >= CLEARED and MOMENTUM not in self._slots.kinds and self._passes(parcel)

    def _passes(self, parcel: Parcel) -> bool:
        if not parcel.message.dense or self.guard:
            return False
        return not parcel.values or parcel.dtype.itemsize >= self._slots.now(RESIDUAL, parcel).itemsize

    def _pass_on(self, parcel: Parcel) -> Conversation:
        """What goes as it is and has been doing so: nothing of it waits, and nothing will."""
        if self._local_clip:
            self._clip(parcel)
        if self._weight != 1.0:
            for values in parcel.values:
                values.mul_(self._weight)
        with_flags = _joined(parcel)
        self._flags_are_summed |= with_flags is not None
        yield Sum(with_flags or parcel.values)
        if not all(is_finite(values) for values in parcel.values):
            self._overflown.append(parcel.number)

    def _send_whole(self, parcel: Parcel, total: torch.Tensor) -> Conversation:
        """As it is; what the precision of gradients takes away is left over."""
        for values, part in zip(parcel.values, ranges(parcel, total), strict=True):
            values.copy_(part if self._unit == 1.0 else part * self._unit)
            part.sub_(values, alpha=1.0 / self._unit)
        yield Sum(parcel.values)
        if not all(is_finite(values) for values in parcel.values):
            self._overflown.append(parcel.number)

    def _loose_of(self, parcel: Parcel) -> list[tuple[int, int]]:
        """Where in the message tensors lie that the part does not take."""
        found: list[tuple[int, int]] = []
        for _, shape, _, start, stop in pieces(parcel):
            if not self._part.takes(shape):
                joins = found and found[-1][1] == start
                found.append((found.pop()[0] if joins else start, stop))
        return found

    def _put_in(self, parcel: Parcel, aside: torch.Tensor) -> None:
        """Sums of what the part does not take, into their places."""
        loose, offset = self._loose[parcel.number], 0
        for first, values in _starts(parcel):
            for start, stop in loose:
                low, high = max(start, first), min(stop, first + len(values))
                if low < high:
                    values[low - first : high - first] = aside[offset : offset + high - low] * self._unit
                    offset += high - low

    def _accumulate(self, parcel: Parcel, total: torch.Tensor) -> None:
        """Move gradients to what was left over, block by block, each of which is read from memory once."""
        remembered = [total, self._slots.now(RESIDUAL, parcel)]
        if MOMENTUM in self._slots.kinds:
            remembered += [self._slots.now(MOMENTUM, parcel), self._slots.proposed(MOMENTUM, parcel)]
        kinds = [parcel.values, *(ranges(parcel, values) for values in remembered)]
        seen, clears = not parcel.message.dense, not (self._part.overwrites or self._goes_whole(parcel))
        sizes = [self._part.blocks(parcel, n) if seen else blocks_of(v) for n, v in enumerate(parcel.values)]
        scratch = total.new_empty(max(map(max, sizes)))
        for number, (operands, runs) in enumerate(zip(zip(*kinds, strict=True), self._runs_of(parcel), strict=True)):
            alike = len(runs) == 1
            for first, last, momentum in runs if not alike else ():
                self._add(momentum, *(operand[first:last] for operand in operands))
            start = 0
            for block in zip(*(torch.split(operand, sizes[number]) for operand in operands), strict=True):
                if alike:
                    self._add(runs[0][2], *block)
                gradient, there, *_ = block
                if seen:
                    self._part.see(parcel, number, start, there, scratch)
                if clears:
                    gradient.zero_()
                start += there.numel()

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
            "num_dense": self._num_dense,
            "slots": self._slots.named(),
            "signature": self._signature,
            "codec": type(self._part).__name__,
            "part": self._part.state_dict(),
            "velocities": self._velocities,
            **({"guard": self.guard.state_dict()} if self.guard else {}),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless this could be loaded."""
        missing = {"num_steps", "slots", "signature", "part"} - state.keys()
        if missing:
            raise UsageError(f"the state of compression lacks {', '.join(sorted(missing))}")
        count(state, "num_steps")
        if state.get("velocities", STAY) not in (STAY, LEAVE, SHARED):
            raise UsageError(f"the state of compression has {state['velocities']!r:.40} for velocities")
        if unknown := state["slots"].keys() - {RESIDUAL, MOMENTUM}:
            raise UsageError(
                f"the state of compression has {min(map(str, unknown)):.40} of parameters, which none keeps"
            )
        self._slots.check(state["slots"])

    def unknown(self, state: Mapping[str, Any]) -> list[str]:
        """Of what could be loaded, names of parameters that no message is about."""
        return self._slots.unknown(state["slots"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """To be used from the next `lay_out` on."""
        self.check(state)
        self._num_steps = count(state, "num_steps")
        self._velocities = state.get("velocities", STAY)
        self._loaded = state

    def let_velocities(self, become: int) -> None:
        """Whatever was to become of them."""
        self._velocities = become
        if self._loaded is not None:
            self._loaded = {**self._loaded, "velocities": become}

    def drop_velocities(self) -> None:
        """Of what was loaded."""
        assert self._loaded is not None
        self._loaded = {**self._loaded, "slots": {k: v for k, v in self._loaded["slots"].items() if k != MOMENTUM}}
        self.let_velocities(become=STAY)

    def give_up_velocities(self) -> dict[str, torch.Tensor]:
        """This rank's shares, by parameter name: to be remembered elsewhere from now on."""
        self._velocities = STAY
        return self._slots.give_up(MOMENTUM) if MOMENTUM in self._slots.kinds else {}

    def scale_residual(self, factors: Mapping[str, float]) -> None:
        """What waits, by parameter name: to be given to an optimizer that makes more of it, or less."""
        for parcel in self._parcels:
            residual = self._slots.now(RESIDUAL, parcel)
            for name, _, _, start, stop in pieces(parcel):
                residual[start:stop] *= factors.get(name, 1.0)

    def take_over(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """What has been remembered elsewhere until now, by parameter name."""
        self._slots.load({kind: {name: values.reshape(-1) for name, values in tensors.items()}})


def _joined(parcel: Parcel) -> list[torch.Tensor] | None:
    """The parcel's ranges, the last of them with its flags, if those lie behind it; None: they do not, or there are
    none."""
    flags, last = parcel.flags, parcel.values[-1]
    if flags is None or flags.dtype != last.dtype or flags.data_ptr() != last.data_ptr() + last.nbytes:
        return None
    return [*parcel.values[:-1], last.as_strided((last.numel() + flags.numel(),), (1,))]


def _starts(parcel: Parcel) -> Iterator[tuple[int, torch.Tensor]]:
    """The parcel's ranges, and where in the message each of them begins."""
    start = 0
    for values in parcel.values:
        yield start, values
        start += values.numel()


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
    velocities = min(LEAVE, states[0].get("velocities", STAY))  # shares are no longer even
    return {**states[0], "slots": slots, "signature": "", "velocities": velocities}
