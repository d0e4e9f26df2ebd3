"""Who takes part in an exchange, and where they meet: the members of a process group, or a generation of workers that
come and go (roster.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradientflow.exchange.groups import backend_for, store_beside
from gradientflow.exchange.health import Process


@dataclass(frozen=True)
class Members:
    #: This one's place among them.
    rank: int
    #: By rank, what the whole job calls them.
    names: tuple[int, ...]
    #: A corner of the job's store that is theirs alone.
    store: dist.Store
    backend: str
    #: By rank, where that is known beforehand; else ().
    processes: tuple[Process, ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Members:
        """Collective."""
        names = tuple(dist.get_process_group_ranks(group))
        return cls(dist.get_rank(group), names, store_beside(group), backend_for(group, device))
