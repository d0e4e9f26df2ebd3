"""For `torch.distributed.checkpoint`: what a flow saved there, whatever world did.

In a world of the same size nothing of this is needed: a flow's `state_dict()` can be saved and loaded there like any
other. What ranks keep for themselves has the rank in its name, so another world has other names to ask for.

    state = {"model": model.state_dict(), "flow": saved_flow(path)}
    torch.distributed.checkpoint.load(state, checkpoint_id=path)
    flow.load_state_dict(state["flow"])

torch's own reader unpickles what it finds: load there what you trust. `gradientflow.load` does not.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gradientflow.errors import DocumentError
from gradientflow.runtime.states import RANKS, taken_over


def saved_flow(
    directory: str | os.PathLike[str], name: str = "flow", process_group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """A state to load what was saved as `name` into: of ranks, those whose part this one takes over."""
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except Exception as error:  # torch unpickles it, and raises whatever it stumbles over
        words = str(error).partition("\n")[0]
        raise DocumentError(f"{directory}: its .metadata cannot be read; {type(error).__name__}: {words}") from None
    paths = {key: path for key, path in (metadata.planner_data or {}).items() if path[0] == name}
    if not paths:
        raise DocumentError(f"{directory}: holds nothing that was saved as {name!r}")
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    found: dict[str, Any] = {}
    for key, (_, *path) in paths.items():
        if not path or not all(isinstance(part, str) for part in path):
            raise DocumentError(f"{directory}: {key} is not of a flow")
        if path[0] == RANKS:
            matched = re.fullmatch("([0-9]+) of ([0-9]+)", str(path[1]))
            if matched is None:
                raise DocumentError(f"{directory}: {key} is not of a flow")
            if int(matched[1]) not in (taken_over(rank, world, int(matched[2])) or [0]):
                continue
        into = found
        for part in path[:-1]:
            into = into.setdefault(part, {})
        about = metadata.state_dict_metadata[key]
        if isinstance(about, TensorStorageMetadata):
            into[path[-1]] = torch.empty(about.size, dtype=about.properties.dtype)
        else:
            into[path[-1]] = None
    return found
