"""Under a flow, a codec that remembers: what it has to be told of each step, and when what it proposes counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradientflow.compress import Conversation, Feedback, Parcel
from gradientflow.compress.feedback import LEAVE, MOMENTUM, STAY, summed
from gradientflow.errors import UsageError
from gradientflow.exchange import Exchange
from gradientflow.plan import Plan
from gradientflow.runtime.momentum import BorrowedMomentum, holder_of, momenta_of, why_not
from gradientflow.runtime.optimizers import Given, held_by
from gradientflow.runtime.states import Shares

_log = logging.getLogger(__name__)


class Compression:
    """Of one rank. scaler: gradients come multiplied by its factor, and are to be remembered without."""

    def __init__(self, codec: Feedback, scaler: torch.amp.GradScaler | None) -> None:
        self._codec, self._scaler = codec, scaler
        self._rank, self._world = 0, 1
        self._optimizer: torch.optim.Optimizer | None = None
        self._names: Mapping[torch.Tensor, str] = {}
        self._momentum: BorrowedMomentum | None = None
        #: Nothing is left to remember, momentum is the optimizer's own affair: until a plan compresses something again.
        self._stands_aside = False
        #: Whether what waits is of velocities; None: nobody has said.
        self._velocities_wait: bool | None = None
        self._num_unused = 0  # steps that counted since the optimizer's last
        self._views: Mapping[str, torch.Tensor] = {}  # of gradients, in the pool

    @property
    def nbytes(self) -> int:
        return self._codec.nbytes + (self._momentum.nbytes if self._momentum else 0)

    @property
    def warmed_up(self) -> bool:
        return self._codec.warmed_up

    @property
    def update_is_due(self) -> bool:
        """Whether velocities have been sent that the optimizer has not seen."""
        return self._num_unused > 0 and self._borrows is not None and self._borrows.is_set

    @property
    def _borrows(self) -> BorrowedMomentum | None:
        """Gradients are velocities: whose."""
        return None if self._stands_aside else self._momentum

    def meet_optimizer(
        self, optimizer: torch.optim.Optimizer | None, names: Mapping[torch.Tensor, str], *, aloud: bool
    ) -> None:
        """names: of what the optimizer holds of the model. Again whenever that changes."""
        self._optimizer, self._names = optimizer, names
        if not self._codec.corrects and self._momentum is None:
            return
        objection = self._why_not_borrow()
        if not objection:
            self._borrow()
        elif aloud and self._momentum is None:
            _log.warning("gradients that wait are plain sums, no velocities: %s", objection)

    def _why_not_borrow(self) -> str:
        objection = why_not(self._optimizer)
        if objection or self._optimizer is None:
            return objection
        if any(p.requires_grad and p not in self._names for p in held_by(self._optimizer)):
            return "the optimizer also updates parameters whose gradients do not go this way"
        return ""

    def _borrow(self) -> None:
        assert isinstance(self._optimizer, torch.optim.SGD)
        self.after_update()
        decays = self._momentum.state_dict() if self._momentum else {}
        self._momentum = BorrowedMomentum(self._optimizer, self._names)
        self._momentum.load_state_dict(decays)
        if self._stands_aside:
            self._momentum.release()

    def lay_out(
        self, plan: Plan, parcels: Sequence[Parcel], views: Mapping[str, torch.Tensor], exchange: Exchange
    ) -> None:
        """views: of gradients, in the pool."""
        self._views = views
        self._rank, self._world = exchange.rank, exchange.world
        self._codec.lay_out(parcels, exchange.rank, exchange.world, plan.digest, plan.layout)
        if self._stands_aside and not self._codec.can_settle:
            self._stand(aside=False)

    def closing(self) -> Conversation:
        """What ranks ask each other when all messages of a step have been carried."""
        return self._codec.close()

    # - A step

    def begin(self, weight: float) -> None:
        """weight: of this step's gradients, beside what is left over from others."""
        self.after_update()  # a step that an exception ended was not followed by it
        if borrows := self._borrows:
            if velocities := borrows.take_velocities():  # the mean over ranks is what all of them had
                shares = {name: _as_it_lies(v / self._world, self._views[name]) for name, v in velocities.items()}
                self._codec.take_over(MOMENTUM, shares)
            if self._codec.settled:
                self._hand_back(borrows)
        self._let_wait(velocities=self._borrows is not None)
        momenta = self._borrows.momenta() if self._borrows else {}
        self._codec.begin(momenta, self._unit(), weight, self._rate())

    def _hand_back(self, momentum: BorrowedMomentum) -> None:
        shares = {name: (flat, self._views[name]) for name, flat in self._codec.give_up_velocities().items()}
        momentum.hand_back(
            {name: _as_it_is_shaped(flat * self._world, view).view(view.shape) for name, (flat, view) in shares.items()}
        )
        self._stands_aside = True
        if not self._codec.corrects:
            self._momentum = None

    def _let_wait(self, *, velocities: bool) -> None:
        """A velocity is applied as it is. A gradient goes on by momentum, and moves 1 / (1 - m) times as far."""
        if self._velocities_wait is not None and self._velocities_wait != velocities:
            left = {name: 1.0 - m for name, m in momenta_of(self._optimizer, self._names).items() if 0.0 < m < 1.0}
            self._codec.scale_residual({name: 1.0 / part if velocities else part for name, part in left.items()})
        self._velocities_wait = velocities

    def _stand(self, *, aside: bool) -> None:
        if self._momentum is not None and aside != self._stands_aside:
            self._momentum.release() if aside else self._momentum.hold()
        self._stands_aside = aside

    def _rate(self) -> float:
        """The learning rate of most parameters, as far as it is known. Only a guard asks for it."""
        if self._codec.guard is None or self._optimizer is None or not self._optimizer.param_groups:
            return 1.0
        group = max(self._optimizer.param_groups, key=lambda each: sum(p.numel() for p in each["params"]))
        return float(group.get("lr", 1.0))

    def _unit(self) -> float:
        return self._scaler.get_scale() if self._scaler and self._scaler.is_enabled() else 1.0

    def settle(self) -> bool:
        """The step is over, and ranks agree on it: whether it can be used, or leaves no trace."""
        counts = self._codec.settle()
        self._num_unused += counts
        return counts

    def guarded(self) -> dict[str, float]:
        """What the guard has seen in the step that was settled last, and decided; nothing if it did not look."""
        guard = self._codec.guard
        if guard is None or not guard.looked:
            return {}
        found = {"waiting": guard.waiting, "contraction_asked": guard.contraction}
        for number, view in enumerate(guard.views):
            found |= {f"{name} of message {number}": value for name, value in view._asdict().items()}
        return found

    def before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Given | None:
        """Gets the arguments of `step` and gives others: a closure lends momentum. Only if there is any, since another
        wrapper around the model takes a closure for the user's, and shuts its gate."""
        self._num_unused = 0
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._borrows is None or self._borrows is not holder_of(optimizer) or not self._borrows.is_set:
            return None
        return args[:1], {"closure": _Lending(self._borrows, closure)}

    def holds_momentum_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._borrows is not None and self._borrows is holder_of(optimizer)

    def after_update(self) -> None:
        if self._momentum is not None:
            self._momentum.put_back()

    def close(self) -> None:
        if self._momentum is not None:
            self._momentum.release()

    # - State

    def state_dict(self) -> dict[str, Any]:
        decays = self._momentum.state_dict() if self._momentum else {}
        codec = self._codec.state_dict()
        codec["slots"] = self._each(codec["slots"], _as_it_is_shaped)
        return {
            "codec": codec,
            "decays": decays,
            "stands_aside": self._stands_aside,
            "velocities_wait": self._velocities_wait,
        }

    def load_state_dict(self, given: Shares) -> None:
        """This rank's own; or, of another world, what it takes over."""
        state = joined(given)
        codec = state["codec"]
        self._codec.check(codec)
        if (unknown := self._codec.unknown(codec)) and self._rank == 0:
            _log.warning("the state has parameters that are not there, what waits of them is lost: %s", _some(unknown))
        for name, velocity in state["decays"].items():
            if name in self._views and velocity.shape != self._views[name].shape:
                raise UsageError(f"the state was saved for another model: {name!r} had another shape")
        lying = self._each(codec["slots"], lambda flat, view: _as_it_lies(flat.view(view.shape), view))
        self._codec.load_state_dict({**codec, "slots": lying})
        waits = state.get("velocities_wait")
        self._velocities_wait = None if waits is None else bool(waits)
        self._stand(aside=bool(state.get("stands_aside")))
        self._find_a_place_for_velocities(codec)
        if self._momentum is not None:
            self._momentum.load_state_dict(state["decays"])
            if MOMENTUM in codec["slots"]:
                self._momentum.take_velocities()  # of a step that is not the one that was saved

    def _find_a_place_for_velocities(self, codec: Mapping[str, Any]) -> None:
        """Loaded ones stay if this codec corrects momentum. Else they are the optimizer's from the next step but one
        on: in the next, ranks add up what each of them has."""
        if self._codec.corrects and self._momentum is not None:
            self._codec.let_velocities(become=STAY)
        elif MOMENTUM in codec["slots"] or codec.get("velocities", STAY) != STAY:
            if objection := self._why_not_borrow():
                self._codec.drop_velocities()
                _log.warning("what the state has of momentum is lost: %s", objection)
                return
            self._codec.let_velocities(become=codec.get("velocities", STAY) or LEAVE)
            self._borrow()

    def in_common(self) -> dict[str, Any]:
        """Of the state, what is the same on all ranks."""
        state = self.state_dict()
        return state | {"codec": state["codec"] | {"slots": {}, "part": {}, "signature": ""}}

    def begin_as(self, others: Mapping[str, Any]) -> None:
        """With what ranks have in common, and nothing left over."""
        self.load_state_dict(Shares([dict(others)]))

    def _each(
        self,
        slots: Mapping[str, Mapping[str, torch.Tensor]],
        turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Slots hold elements as they lie in memory; in a file they come as their tensor is shaped."""
        return {
            kind: {
                name: turn(flat, self._views[name]) if name in self._views else flat for name, flat in tensors.items()
            }
            for kind, tensors in slots.items()
        }


def joined(given: Shares) -> Mapping[str, Any]:
    """Of what `Compression.state_dict` gave on some ranks, what this one goes on with."""
    missing = [key for state in given.states for key in ("codec", "decays") if not isinstance(state.get(key), Mapping)]
    if missing:
        raise UsageError(f"the state of compression lacks {missing[0]}: it is not what state_dict() gave")
    if given.is_own:
        return given.states[0]
    codec = summed([state["codec"] for state in given.states], given.factor)
    first = given.states[0]
    return {"codec": codec, "decays": first["decays"], "velocities_wait": first.get("velocities_wait")}


def _some(names: Sequence[str]) -> str:
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more" if more > 0 else "")


class _Lending(NamedTuple):
    """A closure: the first thing that runs inside `step`, when hooks have had their turn. The user's own runs before
    momentum is lent, with groups as they are and gradients yet to come."""

    momentum: BorrowedMomentum
    own: Callable[[], Any] | None

    def __call__(self) -> Any:
        loss = self.own() if self.own is not None else None
        self.momentum.lend()
        return loss


def _as_it_lies(values: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Flat, in the order in which elements of the view lie in memory: with channels_last not that of its shape."""
    return values.permute(_by_stride(view)).reshape(-1)


def _as_it_is_shaped(flat: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    order = _by_stride(view)
    return (
        flat.view([view.shape[dim] for dim in order])
        .permute([order.index(dim) for dim in range(view.dim())])
        .reshape(-1)
    )


def _by_stride(view: torch.Tensor) -> list[int]:
    return sorted(range(view.dim()), key=view.stride, reverse=True)
