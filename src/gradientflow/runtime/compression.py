"""Under a flow, a codec that remembers: what it has to be told of each step, and when what it proposes counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradientflow.compress import Conversation, Feedback, Parcel
from gradientflow.compress.feedback import MOMENTUM, summed
from gradientflow.errors import UsageError
from gradientflow.exchange import Exchange
from gradientflow.plan import Plan
from gradientflow.runtime.momentum import BorrowedMomentum, holder_of, why_not
from gradientflow.runtime.optimizers import Given, held_by

_log = logging.getLogger(__name__)


class Compression:
    """Of one rank. scaler: gradients come multiplied by its factor, and are to be remembered without."""

    def __init__(self, codec: Feedback, scaler: torch.amp.GradScaler | None) -> None:
        self._codec, self._scaler = codec, scaler
        self._rank, self._world = 0, 1
        self._optimizer: torch.optim.Optimizer | None = None
        self._momentum: BorrowedMomentum | None = None
        self._num_unused = 0  # steps that counted since the optimizer's last
        self._views: Mapping[str, torch.Tensor] = {}  # of gradients, in the pool

    @property
    def nbytes(self) -> int:
        return self._codec.nbytes + (self._momentum.nbytes if self._momentum else 0)

    @property
    def update_is_due(self) -> bool:
        """Whether velocities have been sent that the optimizer has not seen."""
        return self._num_unused > 0 and self._momentum is not None and self._momentum.is_set

    def meet_optimizer(
        self, optimizer: torch.optim.Optimizer | None, names: Mapping[torch.Tensor, str], *, aloud: bool
    ) -> None:
        """names: of what the optimizer holds of the model. Again whenever that changes."""
        self._optimizer = optimizer
        if not self._codec.corrects:
            return
        objection = why_not(optimizer)
        if (
            optimizer is not None
            and not objection
            and any(p.requires_grad and p not in names for p in held_by(optimizer))
        ):
            objection = "the optimizer also updates parameters whose gradients do not go this way"
        if not objection:
            assert isinstance(optimizer, torch.optim.SGD)
            self.after_update()
            decays = self._momentum.state_dict() if self._momentum else {}
            self._momentum = BorrowedMomentum(optimizer, names)
            self._momentum.load_state_dict(decays)
        elif aloud and self._momentum is None:
            _log.warning("gradients that wait are plain sums, no velocities: %s", objection)

    def lay_out(
        self, plan: Plan, parcels: Sequence[Parcel], views: Mapping[str, torch.Tensor], exchange: Exchange
    ) -> None:
        """views: of gradients, in the pool."""
        self._views = views
        self._rank, self._world = exchange.rank, exchange.world
        self._codec.lay_out(parcels, exchange.rank, exchange.world, plan.digest, plan.layout)

    def closing(self) -> Conversation:
        """What ranks ask each other when all messages of a step have been carried."""
        return self._codec.close()

    # - A step

    def begin(self, weight: float) -> None:
        """weight: of this step's gradients, beside what is left over from others."""
        self.after_update()  # a step that an exception ended was not followed by it
        if self._momentum is None:
            self._codec.begin({}, self._unit(), weight, self._rate())
            return
        if velocities := self._momentum.take_velocities():  # the mean over ranks is what all of them had
            shares = {name: _as_it_lies(values / self._world, self._views[name]) for name, values in velocities.items()}
            self._codec.take_over(MOMENTUM, shares)
        self._codec.begin(self._momentum.momenta(), self._unit(), weight, self._rate())

    def _rate(self) -> float:
        """The learning rate of most parameters, as far as it is known."""
        if self._optimizer is None or not self._optimizer.param_groups:
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
        """Gets the arguments of `step` and gives others: a closure lends momentum."""
        self._num_unused = 0
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._momentum is None or self._momentum is not holder_of(optimizer):
            return None
        return args[:1], {"closure": _Lending(self._momentum, closure)}

    def holds_momentum_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._momentum is not None and self._momentum is holder_of(optimizer)

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
        return {"rank": self._rank, "world": self._world, "codec": codec, "decays": decays}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """One rank's, to be this one's again; or those of all ranks of another world, of which each takes its share."""
        state = share_of(states, self._rank, self._world)
        codec = state["codec"]
        self._codec.check(codec)
        lying = self._each(codec["slots"], lambda flat, view: _as_it_lies(flat.view(view.shape), view))
        self._codec.load_state_dict({**codec, "slots": lying})
        if self._momentum is not None:
            self._momentum.load_state_dict(state["decays"])

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


def share_of(states: Sequence[Mapping[str, Any]], rank: int, world: int) -> Mapping[str, Any]:
    """Of what `Compression.state_dict` gave on some ranks, what this one goes on with."""
    missing = [key for state in states for key in ("rank", "world", "codec", "decays") if key not in state]
    if missing:
        raise UsageError(f"the state of compression lacks {missing[0]}: it is not what state_dict() gave")
    worlds = {int(state["world"]) for state in states}
    ranks = sorted(int(state["rank"]) for state in states)
    own = [state for state in states if (state["rank"], state["world"]) == (rank, world)]
    if own and (len(states) == 1 or ranks == list(range(*worlds))):
        return own[0]
    if len(worlds) == 1 and ranks == list(range(*worlds)):
        codec = summed([state["codec"] for state in states], 1.0 / world)
        return {"rank": rank, "world": world, "codec": codec, "decays": states[0]["decays"]}
    saved_by = min(worlds)
    raise UsageError(
        f"what rank {ranks[0]} of {saved_by} has not sent yet is not what rank {rank} of {world} has: "
        f"give load_state_dict() the state that this rank saved, or a list of those of all {saved_by} ranks"
    )


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
