"""Has this rank done something since the last exchange that the others have not?

Ranks that run the same script do the same things. A training forward pass that no backward pass follows, or
an optimizer step without an exchange, on one rank only, is a skipped step: the ranks would go on with batches
that do not belong together, and one of them would finish early. Each rank keeps count; whether anybody's
count is not zero travels with the gradients (runtime/pool.py), and only then ranks compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from gradientflow.exchange import Control


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
    """Counts training forward passes since the last exchange, and those that backward has not reached."""

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


class Skipped(NamedTuple):
    """What a rank did since the last exchange beside what belongs to one."""

    forwards: int
    unused: int  # of them, forward passes that backward did not reach
    steps: int  # of an optimizer, without an exchange before

    @property
    def anything(self) -> bool:
        return self.unused + self.steps > 0


def compare_skips(control: Control, mine: Skipped | None) -> dict[int, str]:
    """Collective. By rank, what it did that the others did not, in words. None: this rank does not take part in
    training any more, and is not compared."""
    texts = control.gather("" if mine is None else " ".join(map(str, mine)), "compare steps")
    everyone = {rank: Skipped(*map(int, text.split())) for rank, text in enumerate(texts) if text}
    least = Skipped(*(min(values) for values in zip(*everyone.values(), strict=True)))
    found = {}
    for rank, theirs in everyone.items():
        if theirs.steps > least.steps:
            found[rank] = (
                f"rank {rank} called optimizer.step() without an exchanged backward pass before it, the other ranks"
                " did not"
            )
        # Forward passes in different numbers are fine as long as backward reaches all of them, and so are those that
        # it reaches on no rank.
        elif theirs.unused > least.unused and theirs.forwards > least.forwards:
            found[rank] = (
                f"rank {rank} ran a training forward pass that no backward pass followed, the other ranks did not (one "
                "that is not for training belongs under torch.no_grad())"
            )
    return found
