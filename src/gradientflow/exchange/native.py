"""The process group's own all-reduce (NCCL, Gloo, ...), on lanes.

A lane is a process group of our own with the same members: what the user does on their group can never
get between our messages, and small messages on one lane are not stuck behind large ones on another. One
more such group carries control traffic (fingerprints, buffers), which may come at any time.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from gradientflow.compress import Sum
from gradientflow.errors import DeadlineError, TrainingError

# Small tensors are packed up to this size before they are broadcast, larger ones go by themselves, in place.
PACK_NBYTES = 4 * 2**20


class Native:
    """`num_lanes` groups beside `group`, all with its members. Constructing it is a collective call."""

    def __init__(self, group: dist.ProcessGroup, num_lanes: int, deadline_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.backend = str(dist.get_backend(group))
        self.deadline_s = deadline_s
        self._timeout = datetime.timedelta(seconds=deadline_s)
        ranks = dist.get_process_group_ranks(group)
        self._control = self._new_group(ranks)
        self._lanes = [self._new_group(ranks) for _ in range(num_lanes)]

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def answer(self, question: Sum, lane: int) -> None:
        """Carry out a codec's question in place. Returns when the result is there (on an accelerator: when
        it is queued on the current stream)."""
        if self.world == 1:
            return
        group = self._lanes[lane]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in question.tensors]
        for work in works:
            self._wait(work)

    def sum_control(self, tensor: torch.Tensor) -> None:
        """Sum a small tensor in place, beside all lanes."""
        self._wait(dist.all_reduce(tensor, group=self._control, async_op=True))

    def gather_objects(self, value: object) -> list[object]:
        """Everybody's `value`, by rank."""
        values: list[object] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self._control)
        except RuntimeError as error:
            raise self._explained(error) from error
        return values

    def object_of_rank_0(self, value: object) -> object:
        """Rank 0's `value`, on every rank."""
        values = [value]
        try:
            dist.broadcast_object_list(values, src=dist.get_global_rank(self._control, 0), group=self._control)
        except RuntimeError as error:
            raise self._explained(error) from error
        return values[0]

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Rank 0's values into everybody's `tensors`, small ones packed."""
        if self.world == 1:
            return
        source = dist.get_global_rank(self._control, 0)
        for pack in _packs(tensors):
            # One contiguous tensor is its own pack: no copy of a large parameter.
            flat = pack[0].view(-1) if len(pack) == 1 and pack[0].is_contiguous() else _join(pack)
            self._wait(dist.broadcast(flat, src=source, group=self._control, async_op=True))
            if flat.data_ptr() != pack[0].data_ptr():
                _split(flat, pack)

    def close(self) -> None:
        """Give the connections back; harmless when the user has destroyed all process groups first."""
        groups, self._lanes = [*self._lanes, self._control], []
        for group in groups:
            try:
                dist.destroy_process_group(group)
            except (AssertionError, RuntimeError, ValueError):
                return

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup:
        try:
            group = dist.new_group(ranks, timeout=self._timeout, backend=self.backend, use_local_synchronization=True)
        except RuntimeError as error:
            raise self._explained(error) from error
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        try:
            if self.backend == "nccl":
                # Orders the current stream behind the work. With a timeout NCCL would block this thread
                # instead; its watchdog holds the lane to the deadline the group was made with.
                work.wait()
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> TrainingError:
        words = str(error).strip().splitlines()[0]
        if "imed out" in words or "imeout" in words:
            return DeadlineError(f"no answer from the group within {self.deadline_s:g} s ({words})")
        return TrainingError(f"the group's communication failed ({words})")


def _packs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups of at most `PACK_NBYTES` on one device, or one larger tensor."""
    packs: list[list[torch.Tensor]] = []
    open_packs: dict[torch.device, list[torch.Tensor]] = {}
    # Wide elements first, so that every piece of the joined bytes starts at a multiple of its own width.
    for tensor in sorted((tensor.detach() for tensor in tensors), key=lambda tensor: -tensor.itemsize):
        if not tensor.numel():
            continue
        pack = open_packs.get(tensor.device)
        if pack is None or sum(member.nbytes for member in pack) + tensor.nbytes > PACK_NBYTES:
            pack = open_packs[tensor.device] = []
            packs.append(pack)
        pack.append(tensor)
    return packs


def _join(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in pack])


def _split(flat: torch.Tensor, pack: Sequence[torch.Tensor]) -> None:
    for tensor, piece in zip(pack, torch.split(flat, [tensor.nbytes for tensor in pack]), strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
