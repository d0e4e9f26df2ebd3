"""The process group's own collectives (NCCL, Gloo), on lanes.

A lane is a process group of our own: what the user does on their group can never get between our
messages, and a small message on one lane is not stuck behind a large one on another. One more such group is for
weights and buffers.

[Note: abandoned operations] A Gloo operation that is given up stays alive in its thread, may write into its
tensors at any later time, and holds up the destructor of its group until its time is over. So groups that are
abandoned are never used or destroyed again, and the memory of their operations belongs to them for ever.
"""

from __future__ import annotations

import ctypes
import datetime
from typing import Any

import torch
import torch.distributed as dist

from gradientflow.exchange.groups import new_group
from gradientflow.exchange.road import Pending, TimeIsUp


class Groups:
    """A group for each lane, and one beside them. Constructing it is a collective call."""

    def __init__(self, backend: str, store: dist.Store, rank: int, world: int, num_lanes: int, limit_s: float) -> None:
        names = ["side", *(f"lane-{number}" for number in range(num_lanes))]
        self._groups: list[Any] = [new_group(backend, store, name, rank, world, limit_s) for name in names]

    @classmethod
    def none(cls) -> Groups:
        """For a world of one."""
        found = cls.__new__(cls)
        found._groups = []
        return found

    def all_reduce(self, values: torch.Tensor, lane: int) -> Pending:
        return _Operation(self._groups[1 + lane].allreduce([values]))

    def all_gather(self, into: torch.Tensor, values: torch.Tensor, lane: int) -> Pending:
        """`values` of every rank into the rows of `into`."""
        return _Operation(self._groups[1 + lane].allgather([list(into.unbind())], [values]))

    def all_to_all(
        self, into: torch.Tensor, values: torch.Tensor, into_sizes: list[int], sizes: list[int], lane: int
    ) -> Pending:
        """Of `values`, rank by rank so many, each its part; `into` holds theirs."""
        return _Operation(self._groups[1 + lane].alltoall_base(into, values, into_sizes, sizes))

    def broadcast(self, values: torch.Tensor, source: int) -> Pending:
        return _Operation(self._groups[0].broadcast(values, source))

    def abandon(self) -> None:
        """[Note: abandoned operations]."""
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups = []

    def close(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            group.shutdown()


class _Operation:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def done_within(self, patience_s: float | None) -> bool:
        try:
            if patience_s is None:
                self._work.wait()
            else:
                self._work.wait(datetime.timedelta(seconds=patience_s))
        except RuntimeError as error:
            words = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
            # The wait's own words; a failed operation has others, also when it is Gloo's time that is over.
            if words == "Operation timed out!":
                return False
            if "timed out" in words.lower() or "timeout" in words.lower():
                raise TimeIsUp(words) from error
            raise ConnectionError(words) from error
        return True
