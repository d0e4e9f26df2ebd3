"""What a flow has to save, where a library writes checkpoints on one rank only.

Codecs with error feedback keep something else on every rank, so the file that one rank writes has to hold what all of
them keep. `Flow.load_state_dict` takes such a list, from a world of any size.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gradientflow.integrations.ddp import DistributedDataParallel

#: Of a checkpoint that belongs to a library.
KEY = "gradientflow"


class Saved:
    """The state of a wrapper's flow, of all ranks together. Both methods are collective."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        group = self._wrapper.process_group
        states: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(states, self._wrapper.flow.state_dict(), group=group)
        return {"ranks": states}

    def load_state_dict(self, state: dict[str, list[dict[str, Any]]]) -> None:
        self._wrapper.flow.load_state_dict(state["ranks"])
