"""The tensors in what a model returns, and whether backward reached them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))


class Forwards:
    """Counts training forward passes since the last exchange, and those that backward has not reached.

    A forward pass that no backward pass follows, on one rank only, is a skipped step: the ranks would
    go on with batches that do not belong together, and one of them would finish early.
    """

    def __init__(self) -> None:
        self.num_run = 0
        self.num_unused = 0
        self._interval = 0

    def note(self, output: object, reached: Callable[[], None], counts: bool) -> None:
        """A forward pass returned `output`; call `reached` whenever backward comes by. One that is not for
        training (`counts=False`) may happen on one rank alone."""
        # Not leaves: a parameter or an input that is handed through would keep the hook for ever.
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not tensors:
            return
        self.num_run += counts
        self.num_unused += counts
        interval, waiting = self._interval, [True] * counts

        def hook(gradient: torch.Tensor) -> None:
            if waiting and interval == self._interval:
                waiting.clear()
                self.num_unused -= 1
            reached()

        for tensor in tensors:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def exchanged(self) -> None:
        self._interval += 1
        self.num_run = self.num_unused = 0
