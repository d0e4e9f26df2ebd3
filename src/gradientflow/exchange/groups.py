"""Process groups of our own, beside the user's and with its members.

They are built straight from the user group's store. `dist.new_group` will not do: it is collective over
the whole world, and with `use_local_synchronization` it names a group after its ranks and the number of
groups alive, so a group made after another was destroyed meets the dead one's addresses in the store and
fails to connect (torch 2.13, measured).
"""

from __future__ import annotations

import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist

from gradientflow.errors import UsageError

# How often groups have been made beside a group: the same count on all its members, since making them is a collective
# call. Not by its name: that of a world that is gone is the next one's too, whose members may not have been in it.
_generations: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves `device` in `group`."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl", or "gloo" alone
    served = dict(pair.split(":", 1) if ":" in pair else [device.type, pair] for pair in config.split(","))
    if device.type not in served:
        raise UsageError(
            f"the model is on {device.type}, which the process group ({config}) does not serve: "
            "move the model, or initialise the group with a backend for it"
        )
    return served[device.type]


def store_beside(group: dist.ProcessGroup) -> dist.Store:
    """A corner of the group's store that nobody else has used or will use. Collective."""
    generation = _generations[group] = _generations.get(group, 0) + 1
    return dist.PrefixStore(f"gradientflow/{generation}", group.get_group_store())


def new_group(backend: str, store: dist.Store, name: str, rank: int, world: int, deadline_s: float) -> Any:
    """A c10d backend object: `allreduce`, `broadcast` and the like return a `Work`. Collective."""
    classes = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
    if backend not in classes:
        raise UsageError(f"backend {backend!r} is not supported: initialise the process group with gloo or nccl")
    timeout = datetime.timedelta(seconds=deadline_s)
    return getattr(dist, classes[backend])(dist.PrefixStore(name, store), rank, world, timeout)
