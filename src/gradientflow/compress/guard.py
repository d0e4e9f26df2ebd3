"""The guard: as little as a budget allows.

What waits has not been learnt yet. To first order, sending all of it now would lower the loss by the learning rate
times <g, e>: e, what is left over on all ranks together, g, the gradient. Every step that was taken has lowered it by
the learning rate times <g, u>, of the update u. The user's budget is the part that the first may be of the sum of the
second: of what training has gained so far, how much may be on its way. Early it has gained little, so that most is
sent; later, as gains add up and the learning rate falls, less and less has to be.

None of these vectors is known to one rank. So ranks exchange sketches of theirs, sums of rows under random signs, which
are short, can be added up and keep inner products on average; and the squares of their lengths. In sampled steps a few
hundred numbers for each message say how much was sent (its contraction: 1 - |left over|^2 / |meant|^2, over all ranks),
how much waits for every gradient (|left over| / |gradient|), and the cosine between what was sent and what was meant.
All ranks see the same numbers, so they decide alike; and the same run decides the same again.

Two rules follow. The budget moves the contraction that is asked of all messages; each message's density moves so that
it keeps that. It is never below what the recipe says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradientflow.compress.codec import Parcel
from gradientflow.errors import UsageError

#: Steps from one sample to the next.
EVERY = 5
#: Numbers in a sketch; inner products are right within 1 / sqrt(this) of the lengths' product. One more is the square
#: of the length.
WIDTH = 128
#: Sketches of a message.
_GRADIENT, _MEANT, _LEFT = range(3)
#: At the beginning.
CONTRACTION = 0.5
LEAST_CONTRACTION = 1e-4
#: From one sample to the next.
STRICTER, LAXER = 1.5, 1 / 1.5
DENSER, SPARSER = 2.0, 0.5
#: A message that contracts by this much more than it has to sends less.
AMPLE = 1.5
#: From here on indices cost as much as they save.
WHOLE = 0.5


class View(NamedTuple):
    """Of one message, in a sampled step."""

    density: float
    contraction: float
    residual_ratio: float
    cosine: float


class Guard:
    """budget: of what has been gained, the part that may wait. floor: the least density."""

    def __init__(self, budget: float, floor: float) -> None:
        self._budget, self._floor = budget, floor
        self._densities: list[float] = []
        self._contraction = CONTRACTION
        self._gained = 0.0
        self._rate = 1.0
        self._sampling = False
        self._sketches = _sketches(0)
        self._signs: dict[int, torch.Tensor] = {}
        self._next: dict[str, Any] | None = None
        #: Whether the last step that counted was sampled.
        self.looked = False
        #: What the last sample showed, by message.
        self.views: tuple[View, ...] = ()
        #: Of what has been gained, the part that waited then.
        self.waiting = 0.0

    def lay_out(self, parcels: Sequence[Parcel]) -> None:
        """Messages of another layout send as much as those before did on average."""
        mean = sum(self._densities) / len(self._densities) if self._densities else 1.0
        self._densities = [mean] * len(parcels)
        self._signs = {}

    def begin(self, step: int, rate: float) -> None:
        self._sampling, self._rate, self._next = step % EVERY == 0, rate, None
        self._sketches = _sketches(len(self._densities) if self._sampling else 0)

    @property
    def contraction(self) -> float:
        """Asked of all messages."""
        return self._contraction

    def density(self, message: int) -> float:
        return self._densities[message]

    def given(self, parcel: Parcel, unit: float) -> None:
        """What this rank has of the gradient."""
        if self._sampling:
            self._note(parcel, _GRADIENT, [values / unit for values in parcel.values])

    def meant(self, parcel: Parcel, total: torch.Tensor) -> None:
        if self._sampling:
            self._note(parcel, _MEANT, [total])

    def left(self, parcel: Parcel, total: torch.Tensor) -> None:
        if self._sampling:
            self._note(parcel, _LEFT, [total])

    def _note(self, parcel: Parcel, kind: int, ranges: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([values.float() for values in ranges]) if len(ranges) > 1 else ranges[0].float()
        signs = self._signs_of(parcel.number, len(flat), flat.device)
        whole = len(flat) // WIDTH * WIDTH
        sketch = signs[:-1] @ flat[:whole].view(-1, WIDTH)
        sketch[: len(flat) - whole] += signs[-1] * flat[whole:]
        self._sketches[parcel.number, kind, :WIDTH] = sketch.cpu()
        self._sketches[parcel.number, kind, WIDTH] = flat.dot(flat).cpu()

    def _signs_of(self, message: int, numel: int, device: torch.device) -> torch.Tensor:
        if message not in self._signs:
            generator = torch.Generator().manual_seed(message)
            draws = torch.randint(2, (numel // WIDTH + 1,), generator=generator)
            self._signs[message] = (2 * draws - 1).to(device, torch.float32)
        return self._signs[message]

    def tells(self) -> list[torch.Tensor]:
        """To be summed over ranks, in place."""
        return [self._sketches.view(-1)] if self._sampling else []

    def learns(self) -> None:
        """What it told has been summed."""
        if not self._sampling:
            return
        squares = self._sketches[:, :, WIDTH].double()
        gradients, meant, left = (self._sketches[:, kind, :WIDTH].double() for kind in (_GRADIENT, _MEANT, _LEFT))
        sent = meant - left
        waits = self._rate * float((gradients * left).sum())
        gained = self._gained + EVERY * self._rate * max(0.0, float((gradients * sent).sum()))
        part = max(0.0, waits) / gained if gained > 0 else math.inf
        views = tuple(
            View(
                density,
                1.0 - _ratio(square[_LEFT], square[_MEANT]),
                math.sqrt(_ratio(square[_LEFT], square[_GRADIENT])),
                _ratio(u @ m, u.norm() * m.norm()),
            )
            for density, square, m, u in zip(self._densities, squares, meant, sent, strict=True)
        )
        asked = self._contraction
        if part > self._budget:
            asked = min(1.0, asked * STRICTER)
        elif part < self._budget / 2:
            asked = max(LEAST_CONTRACTION, asked * LAXER)
        self._next = {
            "densities": [self._moved(view, asked) for view in views],
            "contraction": asked,
            "gained": gained,
            "views": views,
            "waiting": part,
        }

    def _moved(self, view: View, asked: float) -> float:
        if view.contraction < asked:
            return min(1.0, view.density * DENSER)
        if view.contraction > AMPLE * asked:
            return max(self._floor, view.density * SPARSER)
        return view.density

    def commit(self) -> None:
        """The step counts."""
        self.looked = self._next is not None
        if self._next is not None:
            self._densities = self._next["densities"]
            self._contraction, self._gained = self._next["contraction"], self._next["gained"]
            self.views, self.waiting = self._next["views"], self._next["waiting"]

    def state_dict(self) -> dict[str, Any]:
        return {"densities": list(self._densities), "contraction": self._contraction, "gained": self._gained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._densities = list(state["densities"])
        self._contraction, self._gained = float(state["contraction"]), float(state["gained"])

    def check(self, num_messages: int) -> None:
        """Raise unless what was loaded can be gone on with."""
        shares = [*self._densities, self._contraction]
        if len(self._densities) != num_messages or not all(map(_is_share, shares)) or not 0 <= self._gained < math.inf:
            raise UsageError("what a guard has learnt is not what state_dict() gave")


def _sketches(num_messages: int) -> torch.Tensor:
    return torch.zeros(num_messages, 3, WIDTH + 1, dtype=torch.float32)


def _is_share(value: object) -> bool:
    return isinstance(value, float | int) and 0.0 <= value <= 1.0


def _ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one / other) if other else 0.0
