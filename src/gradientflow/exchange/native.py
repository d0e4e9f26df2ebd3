"""The process group's own collectives (NCCL, Gloo), on lanes.

A lane is a process group of our own: what the user does on their group can never get between our
messages, and a small message on one lane is not stuck behind a large one on another. One more such group is for
weights and buffers.

[Note: abandoned operations] A Gloo operation that is given up stays alive in its thread, may write into its
tensors at any later time, and holds up the destructor of its group until its time is over. So groups that are
abandoned are never used again, and the memory of their operations belongs to them until Gloo has given up too: then,
when the next groups are made, they go.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist

from gradientflow.exchange.groups import new_group
from gradientflow.exchange.road import Pending, TimeIsUp


class Groups:
    """A group for each lane, and one beside them. Constructing it is a collective call."""

    def __init__(self, backend: str, store: dist.Store, rank: int, world: int, num_lanes: int, limit_s: float) -> None:
        _bury()
        names = ["side", *(f"lane-{number}" for number in range(num_lanes))]
        self._groups: list[Any] = [new_group(backend, store, name, rank, world, limit_s) for name in names]
        self._running: list[dict[int, dist.Work]] = [{} for _ in names]

    @classmethod
    def none(cls) -> Groups:
        """For a world of one."""
        found = cls.__new__(cls)
        found._groups, found._running = [], []
        return found

    def all_reduce(self, values: torch.Tensor, lane: int) -> Pending:
        return self._begun(1 + lane, self._groups[1 + lane].allreduce([values]))

    def all_gather(self, into: torch.Tensor, values: torch.Tensor, lane: int) -> Pending:
        """`values` of every rank into the rows of `into`."""
        return self._begun(1 + lane, self._groups[1 + lane].allgather([list(into.unbind())], [values]))

    def all_to_all(
        self, into: torch.Tensor, values: torch.Tensor, into_sizes: list[int], sizes: list[int], lane: int
    ) -> Pending:
        """Of `values`, rank by rank so many, each its part; `into` holds theirs."""
        return self._begun(1 + lane, self._groups[1 + lane].alltoall_base(into, values, into_sizes, sizes))

    def broadcast(self, values: torch.Tensor, source: int) -> Pending:
        return self._begun(0, self._groups[0].broadcast(values, source))

    def _begun(self, number: int, work: dist.Work) -> Pending:
        running = self._running[number]
        running[id(work)] = work
        return _Operation(work, running)

    def abandon(self) -> None:
        """[Note: abandoned operations]."""
        for group, running in zip(self._groups, self._running, strict=False):  # a second time there are none
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # not even at the end of the process
            _abandoned.append((group, running))
        self._groups = []

    def close(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            group.shutdown()


class Connecting:
    """Groups that are being made, in a thread: who dies meanwhile would be waited for until Gloo's time is over."""

    def __init__(self, backend: str, store: dist.Store, rank: int, world: int, num_lanes: int, limit_s: float) -> None:
        self._found: list[Groups | Exception] = []
        facts = (backend, store, rank, world, num_lanes, limit_s)
        self._thread = threading.Thread(target=self._make, args=facts, name="gradientflow-connecting", daemon=True)
        self._thread.start()

    def _make(self, *facts: Any) -> None:
        try:
            self._found.append(Groups(*facts))
        except Exception as error:
            self._found.append(error)

    def done_within(self, patience_s: float | None) -> bool:
        self._thread.join(patience_s)
        if self._found and isinstance(error := self._found[0], Exception):
            raise ConnectionError(str(error).partition("\n")[0]) from error
        return bool(self._found)

    @property
    def groups(self) -> Groups:
        (found,) = self._found
        assert isinstance(found, Groups)
        return found


#: Groups that were given up, each with the operations that it may still be in.
_abandoned: list[tuple[Any, dict[int, dist.Work]]] = []


def _bury() -> None:
    """Let those go that are in nothing any more."""
    for group, running in _abandoned.copy():
        if all(work.is_completed() for work in running.values()):
            _abandoned.remove((group, running))
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


class _Operation:
    """running: it is in there until it has succeeded."""

    def __init__(self, work: dist.Work, running: dict[int, dist.Work]) -> None:
        self._work, self._running = work, running

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
        self._running.pop(id(self._work), None)
        return True
