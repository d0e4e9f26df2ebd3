"""The gradient pool: a flat buffer a (device, dtype), gradients in the order in which backward yields them.

A parameter's `.grad` is a view into the pool, so a message is a range of the pool and needs no packing.
Behind the gradients of one buffer lies one more element for every tensor, its presence: 1 if this rank has
a gradient for it in this step; one that is 1 if this rank has skipped something that other ranks may
have done; and one that is 1 if it asks for another plan. They travel with the first message that is complete only
when backward ends; after the sum they tell, at no extra message, which tensors no rank used, and whether ranks
have to talk. Only "zero or not" is ever asked of them, which survives every codec.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from gradientflow.compress import Parcel
from gradientflow.plan import Message, Plan

_Key = tuple[torch.device, torch.dtype]


class _Buffer:
    """The tensors of one device and dtype, then room for `num_extra` elements."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], num_extra: int) -> None:
        self.names = tuple(parameters)
        self.numel = sum(parameter.numel() for parameter in parameters.values())
        self.size = self.numel + num_extra
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, parameter in parameters.items():
            self.offsets[name] = offset
            offset += parameter.numel()
        self.flat = torch.empty(0)

    def view(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Shaped like the parameter, with its strides where these fill a range (channels_last does)."""
        start = self.offsets[name]
        flat = self.flat[start : start + parameter.numel()]
        if _fills_a_range(parameter):
            return flat.as_strided(parameter.shape, parameter.stride())
        return flat.view(parameter.shape)


class Pool:
    """Buffers for `parameters` (name -> parameter), laid out as the plan says.

    A new layout of the same parameters takes over the memory of the `previous` pool, contents and all.
    presence_apart: keep presence out of the messages; somebody else sums it.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, torch.Tensor],
        previous: Pool | None = None,
        presence_apart: bool = False,
    ) -> None:
        members: dict[_Key, dict[str, torch.Tensor]] = {}
        for name in plan.layout:
            parameter = parameters[name]
            members.setdefault((parameter.device, parameter.dtype), {})[name] = parameter
        #: The message that carries presence. It cannot leave before backward has ended.
        self.carrier = _last_to_be_ready(plan, parameters)
        last_tensor = plan.messages[self.carrier].slices[0].tensor if plan.messages else ""
        self._names = plan.layout
        num_extra = 0 if presence_apart else len(self._names) + 2
        self._buffers: dict[_Key, _Buffer] = {
            key: _Buffer(tensors, num_extra if last_tensor in tensors else 0) for key, tensors in members.items()
        }
        for key, buffer in self._buffers.items():
            old = previous._buffers.get(key) if previous else None
            reused = old is not None and old.size == buffer.size
            device, dtype = key
            buffer.flat = old.flat if old and reused else torch.zeros(buffer.size, device=device, dtype=dtype)
        self._buffer_of = {name: buffer for buffer in self._buffers.values() for name in buffer.names}
        self.views = {name: self.place(name, parameters[name]) for name in self._buffer_of}
        carrier = self._buffer_of.get(last_tensor)
        if carrier is None:
            self.presence = torch.zeros(len(self._names) + 2)
        elif presence_apart:
            self.presence = torch.zeros(len(self._names) + 2, device=carrier.flat.device)
        else:
            self.presence = carrier.flat[carrier.numel :]

    @property
    def nbytes(self) -> int:
        return sum(buffer.flat.nbytes for buffer in self._buffers.values())

    def place(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A new view of where the parameter's gradient lies."""
        return self._buffer_of[name].view(name, parameter)

    def parcel(self, index: int, message: Message, flags_apart: bool) -> Parcel:
        """Message `index` of the plan as a codec gets it."""
        flags = self.presence if flags_apart and index == self.carrier else None
        shapes = [extents(self.views[piece.tensor]) for piece in message.slices]
        return Parcel(index, message, self.ranges(index, message, with_presence=flags is None), shapes, flags)

    def ranges(self, index: int, message: Message, with_presence: bool = True) -> list[torch.Tensor]:
        """Message `index` of the plan as flat ranges, neighbours joined."""
        buffer = self._buffer_of[message.slices[0].tensor]
        bounds = [
            (buffer.offsets[piece.tensor] + piece.start, buffer.offsets[piece.tensor] + piece.stop)
            for piece in message.slices
        ]
        if index == self.carrier and with_presence:
            bounds.append((buffer.numel, buffer.size))
        joined: list[tuple[int, int]] = []
        for start, stop in bounds:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return [buffer.flat[start:stop] for start, stop in joined if stop > start]

    def parts(
        self, index: int, message: Message, spans_of: Callable[[torch.Tensor], Sequence[tuple[int, int]]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What lies in some spans of each of a message's ranges, tensor by tensor. Presence is no tensor."""
        buffer = self._buffer_of[message.slices[0].tensor]
        edges = [buffer.offsets[name] for name in buffer.names]
        for values in self.ranges(index, message):
            begin = values.storage_offset() - buffer.flat.storage_offset()
            for start, stop in ((begin + start, min(begin + stop, buffer.numel)) for start, stop in spans_of(values)):
                place = bisect_right(edges, start) - 1
                while start < stop:
                    end = min(stop, edges[place + 1] if place + 1 < len(edges) else buffer.numel)
                    if start < end:
                        yield buffer.names[place], buffer.flat[start:end]
                    start, place = max(start, end), place + 1

    @property
    def version(self) -> int:
        """Grows with every write that torch counts."""
        return sum(buffer.flat._version for buffer in self._buffers.values())

    def scale(self, factor: float) -> None:
        """Multiply all gradients, presence too."""
        for buffer in self._buffers.values():
            buffer.flat.mul_(factor)

    def mark_absent(self, absent: set[str], skipped: bool, asks: bool = False) -> None:
        """State which tensors this rank has a gradient for in this step, all but `absent`, whether it skipped
        anything, and whether it asks for another plan."""
        self.presence.fill_(1)
        self.presence[-2] = float(skipped)
        self.presence[-1] = float(asks)
        for index, name in enumerate(self._names) if absent else ():
            if name in absent:
                self.presence[index] = 0

    def absent_everywhere(self, absent: set[str]) -> set[str]:
        """Of the tensors absent here, those that no rank had: to be asked after the sum."""
        if not absent:
            return set()
        present = zip(self._names, self.presence[:-2].tolist(), strict=True)
        return {name for name, somewhere in present if name in absent and not somewhere}

    def somebody_skipped(self) -> bool:
        """To be asked after the sum. Not known on an accelerator, which would have to be waited for."""
        return self.presence.device.type == "cpu" and bool(self.presence[-2] != 0)

    def somebody_asks(self) -> bool:
        """As `somebody_skipped`."""
        return self.presence.device.type == "cpu" and bool(self.presence[-1] != 0)


def _last_to_be_ready(plan: Plan, parameters: Mapping[str, torch.Tensor]) -> int:
    """Of the messages that hold part of what backward yields last, the first that goes."""
    filled = [name for name in plan.layout if parameters[name].numel()]
    holding = (
        index
        for index, message in enumerate(plan.messages)
        if filled and any(piece.tensor == filled[-1] for piece in message.slices)
    )
    return next(holding, len(plan.messages) - 1)


def extents(view: torch.Tensor) -> tuple[int, ...]:
    """In the order in which they lie in memory."""
    order = sorted(range(view.dim()), key=view.stride, reverse=True)
    return tuple(view.shape[dim] for dim in order)


def _fills_a_range(parameter: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return parameter.numel() > 0
