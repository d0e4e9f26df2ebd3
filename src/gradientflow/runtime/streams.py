"""Ordering between backward, the lanes and the optimizer on devices that run asynchronously.

On the host there is nothing to order: a value is there when the call returns. On an accelerator a lane
works on a stream of its own: it starts behind the event recorded when its message became complete, and
whoever drains the lanes makes its own stream wait for theirs.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Streams(Protocol):
    def mark_ready(self, message: int) -> None:
        """Called where the message's last gradient was written."""

    def carry(self, message: int, lane: int) -> AbstractContextManager[object]:
        """Work inside comes after the message's gradients."""

    def join(self) -> None:
        """What the caller does from here on comes after everything carried."""


class HostStreams:
    """Nothing to order."""

    def mark_ready(self, message: int) -> None:
        pass

    def carry(self, message: int, lane: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def join(self) -> None:
        pass


class DeviceStreams:
    """A stream a lane. Not run in this project's tests, which have no accelerator."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        self._device = device
        self._lanes = [torch.Stream(device) for _ in range(num_lanes)]
        self._ready: dict[int, torch.Event] = {}

    def mark_ready(self, message: int) -> None:
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        self._ready[message] = event

    def carry(self, message: int, lane: int) -> AbstractContextManager[object]:
        stream = self._lanes[lane]
        stream.wait_event(self._ready.pop(message))
        return stream

    def join(self) -> None:
        here = torch.accelerator.current_stream(self._device)
        for stream in self._lanes:
            here.wait_stream(stream)


def streams_for(device: torch.device, num_lanes: int) -> Streams:
    return HostStreams() if device.type == "cpu" else DeviceStreams(device, num_lanes)
