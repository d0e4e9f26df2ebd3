"""Tensors averaged over ranks through a codec, without a flow: no hooks, no plan but the order of messages.

`Averager` is the function on tensors. `Talk` is what it and the hook for stock DDP are made of: a codec, an exchange,
and what the codec remembers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradientflow.compress import Conversation, Feedback, Parcel, is_finite
from gradientflow.errors import RecipeError, UsageError
from gradientflow.exchange import Exchange, drive
from gradientflow.plan import Message, Plan, Slice
from gradientflow.recipe import Recipe
from gradientflow.runtime.compression import Compression, joined
from gradientflow.runtime.fingerprint import compare
from gradientflow.runtime.handle import DEADLINE_S, as_states
from gradientflow.runtime.pool import extents
from gradientflow.runtime.states import COMPRESSION, RANKS, Shares, kept_by, shares
from gradientflow.saved import count, reading

#: What is to be alike on all ranks and in all calls: name, shape, dtype.
_Known = list[tuple[str, torch.Size, torch.dtype]]


class Talk:
    """One rank's part in conversations about messages that come in the same order everywhere. Collective.

    codec: as after the first "+" of a recipe, such as "int8", "csc:10%+fp16".
    """

    def __init__(
        self,
        codec: str,
        group: dist.ProcessGroup | None,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
        deadline_s: float,
    ) -> None:
        if "@" in codec:
            raise RecipeError(f"expected a codec such as 'int8' or 'csc:10%+fp16', found {codec!r}: leave '@...' out")
        recipe = Recipe.parse(f"lazy+{codec}").check()
        if not dist.is_initialized():
            raise UsageError("no process group: call torch.distributed.init_process_group() first")
        group = group or dist.group.WORLD
        assert group is not None
        self._codec = recipe.codec()
        self.compression = Compression(self._codec, scaler) if isinstance(self._codec, Feedback) else None
        self.exchange = Exchange(group, device, 1, deadline_s)
        compare(self.exchange.control, {"codec": codec})
        self._parcels: list[Parcel] = []
        self._loaded: Shares | None = None
        self._step = 0
        self._finite = True

    def lay_out(self, messages: Sequence[Mapping[str, torch.Tensor]], buffers: Sequence[torch.Tensor]) -> None:
        """messages: by name, views of what lies one after another in the buffer of each."""
        plan = Plan(
            schedule="as they come",
            layout=tuple(name for views in messages for name in views),
            messages=tuple(
                Message(slices=tuple(Slice(tensor=name, start=0, stop=v.numel()) for name, v in views.items()))
                for views in messages
            ),
        )
        shapes = [[extents(view) for view in views.values()] for views in messages]
        self._parcels = [
            Parcel(number, message, [buffer] if buffer.numel() else [], shape)
            for number, (message, buffer, shape) in enumerate(zip(plan.messages, buffers, shapes, strict=True))
        ]
        if self.compression:
            views = {name: view for message in messages for name, view in message.items()}
            if self._loaded is not None:
                # Once before, so that it is known how tensors lie; nothing is held yet.
                self.compression.lay_out(plan, self._parcels, views, self.exchange)
                self.compression.load_state_dict(self._loaded)
                self._loaded = None
            self.compression.lay_out(plan, self._parcels, views, self.exchange)

    def begin(self) -> None:
        self._finite = True
        if self.compression:
            self.compression.begin(1.0)

    def carry(self, number: int, buffer: torch.Tensor) -> None:
        """Message `number`, which is in `buffer` now: this rank's share of a sum becomes the sum."""
        parcel = self._parcels[number]
        if parcel.values:
            parcel.values[0].set_(buffer)  # type: ignore[call-overload]
            self._drive(self._codec.converse(parcel), f"message {number}")
            if not self.compression:
                self._finite &= is_finite(buffer)

    def finish(self) -> bool:
        """All messages have been carried: whether the step counts, as all ranks find alike."""
        counts = self._finite
        if self.compression:
            self._drive(self.compression.closing(), "norms")
            counts = self.compression.settle()
        self._step += 1
        return counts

    def _drive(self, conversation: Conversation, place: str) -> None:
        with torch.no_grad():
            drive(self.exchange, conversation, 0, self._step + 1, f"step {self._step}, {place}")

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"version": 1, "step": self._step}
        if self.compression:
            kept = {COMPRESSION: self._loaded.states[0] if self._loaded else self.compression.state_dict()}
            found |= kept_by(self.exchange.rank, self.exchange.world, kept)
        return found

    @reading("the state")
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """To be used when it is known how messages are laid out. One rank's own, or those of all ranks."""
        states = as_states(state)
        if any(not isinstance(each, Mapping) or each.get("version") != 1 or "step" not in each for each in states):
            raise UsageError("expected what state_dict() gave, version 1, or a list of those of all ranks")
        if self.compression and all(RANKS in each for each in states):
            given = shares(states, self.exchange.rank, self.exchange.world)
            self._loaded = Shares([dict(joined(given.of(COMPRESSION)))])
        self._step = count(states[0], "step")
        self._parcels = []

    @property
    def is_laid_out(self) -> bool:
        return bool(self._parcels)

    def close(self) -> None:
        if self.compression:
            self.compression.close()
        self.exchange.close()


class Averager:
    """`average_(tensors)` makes each the mean over ranks, as a codec can: what that leaves over is remembered by name,
    and is part of the next call. Constructing one and calling it are collective.

    codec: as after the first "+" of a recipe, such as "int8", "csc:10%+fp16".
    process_group: the default one unless given.
    device: where tensors are.
    deadline_s: how long any one wait for ranks that are alive may last.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> averager, weight = Averager("int8"), torch.tensor([1.0, -2.0])
    >>> averager.average_({"weight": weight}), weight
    (True, tensor([ 1., -2.]))
    >>> averager.close()
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        codec: str,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._talk = Talk(codec, process_group, torch.device(device), None, deadline_s)
        self._known: _Known = []
        self._buffers: list[torch.Tensor] = []
        self._views: list[dict[str, torch.Tensor]] = []

    @torch.no_grad()
    def average_(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """In place. False if some rank's hold inf or nan: then all of them are left as they are, and so is what was
        left over. The same names, shapes and dtypes on all ranks and in every call: one that is refused is the last,
        on all ranks."""
        try:
            self._check(tensors)
            if not self._talk.is_laid_out:
                self._lay_out(tensors)
            if not tensors:
                return True
            self._talk.begin()
            for number, (buffer, views) in enumerate(zip(self._buffers, self._views, strict=True)):
                for name, view in views.items():
                    torch.div(tensors[name], self._talk.exchange.world, out=view)
                self._talk.carry(number, buffer)
            counts = self._talk.finish()
        except BaseException as error:
            self._talk.exchange.abandon(f"failed in average_(): {error or type(error).__name__}")
            raise
        for views in self._views if counts else ():
            for name, view in views.items():
                tensors[name].copy_(view)
        return counts

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(tensors, Mapping) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
        ):
            raise UsageError('expected tensors by name, as in average_({"weight": weight})')
        for name, tensor in tensors.items():
            if not tensor.dtype.is_floating_point or tensor.layout is not torch.strided:
                kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
                raise UsageError(f"expected dense tensors of floating-point numbers, found {kind} as {name!r}")
        if self._known and _known(tensors) != self._known:
            raise UsageError(
                "average_() was given other tensors than before, or in another order: what is left over belongs to "
                "those; make another Averager for these"
            )

    def _lay_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        known = _known(tensors)
        described = {f"tensor {n}": f"{name}, {tuple(shape)}, {dtype}" for n, (name, shape, dtype) in enumerate(known)}
        compare(self._talk.exchange.control, described)
        if not tensors:
            return
        dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
        self._buffers, self._views = [], []
        for dtype in dtypes:
            ours = {name: tensor for name, tensor in tensors.items() if tensor.dtype is dtype}
            device = next(iter(ours.values())).device
            buffer = torch.zeros(sum(tensor.numel() for tensor in ours.values()), dtype=dtype, device=device)
            parts = torch.split(buffer, [tensor.numel() for tensor in ours.values()])
            self._buffers.append(buffer)
            self._views.append({name: part.view(ours[name].shape) for name, part in zip(ours, parts, strict=True)})
        self._talk.lay_out(self._views, self._buffers)
        self._known = known

    def state_dict(self) -> dict[str, Any]:
        """What this rank has left over, by name."""
        return self._talk.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """What this rank saved; or, of another number of ranks, a list of what all of them did."""
        self._talk.load_state_dict(state)

    def close(self) -> None:
        """Let go of connections. What is left over is gone, unless `state_dict()` was taken before."""
        self._talk.close()


def _known(tensors: Mapping[str, torch.Tensor]) -> _Known:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
