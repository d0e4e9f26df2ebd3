"""The gradient pool: a flat buffer a (device, dtype), gradients in the order in which backward yields them.

A parameter's `.grad` is a view into the pool, so a message is a range of the pool and needs no packing.
Behind the gradients lies one more element a tensor, its presence: 1 if this rank has a gradient for it
in this step. Presence travels with the buffer's last message; after the sum it tells, at no extra
message, which tensors no rank used. Only "zero or not" is ever asked of it, which survives every codec.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradientflow.plan import Message, Plan

_Key = tuple[torch.device, torch.dtype]


class _Buffer:
    """The tensors of one device and dtype, then their presence."""

    def __init__(self, key: _Key, parameters: Mapping[str, torch.Tensor], flat: torch.Tensor | None) -> None:
        self.key = key
        self.names = tuple(parameters)
        self.numel = sum(parameter.numel() for parameter in parameters.values())
        device, dtype = key
        self.flat = torch.zeros(self.numel + len(parameters), device=device, dtype=dtype) if flat is None else flat
        self.presence = self.flat[self.numel :]
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, parameter in parameters.items():
            self.offsets[name] = offset
            offset += parameter.numel()

    def view(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Shaped like the parameter, with its strides where these fill a range (channels_last does)."""
        start = self.offsets[name]
        flat = self.flat[start : start + parameter.numel()]
        return (
            flat.as_strided(parameter.shape, parameter.stride())
            if _fills_a_range(parameter)
            else (flat.view(parameter.shape))
        )


class Pool:
    """Buffers for `parameters` (name -> parameter), laid out as the plan says.

    A new layout of the same parameters takes over the memory of the `previous` pool, contents and all.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, torch.Tensor], previous: Pool | None = None) -> None:
        members: dict[_Key, dict[str, torch.Tensor]] = {}
        for name in plan.layout:
            parameter = parameters[name]
            members.setdefault((parameter.device, parameter.dtype), {})[name] = parameter
        memory = {buffer.key: buffer.flat for buffer in previous._buffers} if previous else {}
        self._buffers: list[_Buffer] = [_Buffer(key, tensors, memory.get(key)) for key, tensors in members.items()]
        self._buffer_of = {name: buffer for buffer in self._buffers for name in buffer.names}
        self.views = {name: buffer.view(name, parameters[name]) for name, buffer in self._buffer_of.items()}
        last = {id(self._buffer_of[message.slices[0].tensor]): index for index, message in enumerate(plan.messages)}
        #: Messages that carry presence: the last of each buffer. They cannot leave before backward has ended.
        self.carry_presence = frozenset(last.values())

    @property
    def nbytes(self) -> int:
        return sum(buffer.flat.nbytes for buffer in self._buffers)

    def ranges(self, index: int, message: Message) -> list[torch.Tensor]:
        """Message `index` of the plan as flat ranges, neighbours joined."""
        buffer = self._buffer_of[message.slices[0].tensor]
        bounds = [
            (buffer.offsets[piece.tensor] + piece.start, buffer.offsets[piece.tensor] + piece.stop)
            for piece in message.slices
        ]
        if index in self.carry_presence:
            bounds.append((buffer.numel, buffer.flat.numel()))
        joined: list[tuple[int, int]] = []
        for start, stop in bounds:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return [buffer.flat[start:stop] for start, stop in joined if stop > start]

    def mark_absent(self, absent: set[str]) -> None:
        """State which tensors this rank has a gradient for in this step: all but `absent`."""
        for buffer in self._buffers:
            buffer.presence.fill_(1)
            for index, name in enumerate(buffer.names) if absent else ():
                if name in absent:
                    buffer.presence[index] = 0

    def absent_everywhere(self, absent: set[str]) -> set[str]:
        """Of the tensors absent here, those that no rank had: to be asked after the sum."""
        if not absent:
            return set()
        return {
            name
            for buffer in self._buffers
            for name, present in zip(buffer.names, buffer.presence.tolist(), strict=True)
            if name in absent and not present
        }


def _fills_a_range(parameter: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return parameter.numel() > 0
