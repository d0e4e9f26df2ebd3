"""Ray Train: `prepare_model` as `ray.train.torch` has it, with our wrapper.

    from gradientflow.integrations.ray import prepare_model

    def train_one_worker():
        model = prepare_model(Net(), "lazy+bf16")
        ...

    TorchTrainer(train_one_worker, scaling_config=ScalingConfig(num_workers=4)).fit()

Ray starts the workers and their process group. `model.flow.state_dict()` belongs into what each worker reports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.integrations.extras import missing
from gradientflow.recipe import Recipe

try:
    import ray.train
    import ray.train.torch
except ImportError as error:
    raise missing("ray") from error


def prepare_model(
    model: nn.Module,
    recipe: Recipe | str | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    move_to_device: bool | torch.device = True,
    **ddp: Any,
) -> nn.Module:
    """The model on this worker's device, in our wrapper if there are other workers.

    optimizer: for recipes with a gate, and codecs that keep momentum; made from this model's parameters.
    ddp: more of the keywords of `gradientflow.DistributedDataParallel`."""
    model = ray.train.torch.prepare_model(model, move_to_device=move_to_device, parallel_strategy=None)
    if ray.train.get_context().get_world_size() == 1:
        return model
    device = next(model.parameters()).device
    ids: list[int | torch.device] | None = None if device.type == "cpu" else [device]
    return DistributedDataParallel(model, device_ids=ids, recipe=recipe, optimizer=optimizer, **ddp)
