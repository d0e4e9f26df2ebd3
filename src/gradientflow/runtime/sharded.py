"""Parameters in shards (FSDP2's `fully_shard`): each rank holds a part of each, as a DTensor.

Workers that step by themselves can average such parts: those of ranks that hold the *same* part, the replicate
dimension of a mesh. Gradients cannot travel by a flow of ours: FSDP decides what is summed when, and hands over flat
shards (`set_all_reduce_hook`), which `Averager` can take.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist

from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def in_shards(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    # Not imported for this: that takes a second, and who has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, in the same memory; of a tensor that is not in shards, that itself."""
    return tensor.to_local().detach() if in_shards(tensor) else tensor


def first_in_shards(tensors: Mapping[str, torch.Tensor]) -> str:
    """The name of one; "" if there is none."""
    return next((name for name, tensor in tensors.items() if in_shards(tensor)), "")


def describe_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Where this rank's parts lie: the same on all ranks that may average them."""
    return {
        f"shard {name}": f"{tensor.device_mesh.get_coordinate()} of {tensor.device_mesh.shape}, {tensor.placements}"
        for name, tensor in tensors.items()
        if in_shards(tensor)
    }


def check_group(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Raise unless the group's other members hold no other part of the same tensors: their mean would be nonsense."""
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for name, tensor in tensors.items():
        if in_shards(tensor) and others & set(tensor.device_mesh.mesh.flatten().tolist()):
            raise UsageError(
                f"{name!r} is in shards over ranks that process_group holds too: shard along one dimension of a mesh, "
                "fully_shard(model, mesh=mesh['shard']), and attach along the other, "
                "process_group=mesh['replicate'].get_group()"
            )
