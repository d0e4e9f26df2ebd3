"""The process group's own all-reduce (NCCL, Gloo), on lanes.

A lane is a process group of our own: what the user does on their group can never get between our
messages, and a small message on one lane is not stuck behind a large one on another. One more such group
moves initial weights and buffers, which may come at any time.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from gradientflow.compress import Sum
from gradientflow.errors import DeadlineError, TrainingError
from gradientflow.exchange.control import Control
from gradientflow.exchange.groups import backend_for, new_group, store_beside

# Small tensors are packed up to this size before they are broadcast; larger ones go by themselves, in place.
PACK_NBYTES = 4 * 2**20


class Native:
    """Lanes over the members of `group`, for tensors on `device`. Constructing it is a collective call."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_lanes: int, deadline_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.global_rank = dist.get_rank()
        self.world = dist.get_world_size(group)
        self.backend = backend_for(group, device)
        self.deadline_s = deadline_s
        self.num_lanes = num_lanes or _default_lanes(self.backend)
        self._timeout = datetime.timedelta(seconds=deadline_s)
        store = store_beside(group)
        self.control = Control(dist.PrefixStore("control", store), self.rank, self.world, deadline_s)
        self.control.gather("here", "meet the other ranks in attach()")
        names = ["side", *(f"lane-{number}" for number in range(self.num_lanes))] if self.world > 1 else []
        self._groups = [new_group(self.backend, store, name, self.rank, self.world, deadline_s) for name in names]

    def answer(self, question: Sum, lane: int) -> None:
        """Carry out a codec's question in place. Returns when the result is there (on an accelerator: when
        it is queued on the current stream)."""
        if self.world == 1:
            return
        group = self._groups[1 + lane]
        for work in [group.allreduce([tensor]) for tensor in question.tensors]:
            self._wait(work)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Rank 0's values into everybody's `tensors`, small ones packed. Beside all lanes."""
        if self.world == 1:
            return
        for pack in _packs(tensors):
            # One contiguous tensor is its own pack: no copy of a large parameter.
            alone = len(pack) == 1 and pack[0].is_contiguous()
            flat = pack[0].view(-1).view(torch.uint8) if alone else _join(pack)
            self._wait(self._groups[0].broadcast(flat, 0))
            if not alone:
                _split(flat, pack)

    def close(self) -> None:
        """Give the connections back."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.shutdown()

    def _wait(self, work: dist.Work) -> None:
        try:
            if self.backend == "nccl":
                # Orders the current stream behind the work. With a timeout NCCL would block this thread
                # instead; its watchdog holds the lane to the deadline the group was made with.
                work.wait()
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            words = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
            if "timed out" in words.lower() or "timeout" in words.lower():
                raise DeadlineError(f"no answer from the group within {self.deadline_s:g} s ({words})") from error
            raise TrainingError(f"the group's communication failed ({words})") from error


def _default_lanes(backend: str) -> int:
    """Two lanes hide one message's start-up behind the other's transfer. NCCL's communicators compete for
    the same GPU, so there it is one unless the recipe asks for more."""
    return 1 if backend == "nccl" else 2


def _packs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups of at most `PACK_NBYTES`, or one larger tensor."""
    packs: list[list[torch.Tensor]] = []
    room = 0
    # Wide elements first, so that every piece of the joined bytes starts at a multiple of its own width.
    # `.data`: a buffer may be written between two forward passes whose backward is still to come.
    for tensor in sorted((tensor.data for tensor in tensors), key=lambda tensor: -tensor.itemsize):
        if not tensor.numel():
            continue
        if tensor.nbytes > room:
            packs.append([])
            room = PACK_NBYTES
        packs[-1].append(tensor)
        room -= tensor.nbytes
    return packs


def _join(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in pack])


def _split(flat: torch.Tensor, pack: Sequence[torch.Tensor]) -> None:
    for tensor, piece in zip(pack, torch.split(flat, [tensor.nbytes for tensor in pack]), strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
