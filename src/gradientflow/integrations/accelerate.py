"""Hugging Face Accelerate: its `Accelerator`, whose DDP is ours.

    from gradientflow.integrations.accelerate import Accelerator

    accelerator = Accelerator("lazy+bf16", cpu=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

Everything that Accelerate does beside (devices, mixed precision, accumulation, data, checkpoints) is as it was. A world
of one, FSDP, DeepSpeed, Megatron and tensor parallelism are left to Accelerate alone, with its own words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.integrations.extras import missing
from gradientflow.integrations.saved import Saved
from gradientflow.recipe import Recipe
from gradientflow.runtime.states import is_compressed

try:
    import accelerate
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate") from error


class Accelerator(accelerate.Accelerator):
    """recipe: how gradients travel; "auto" unless said here or by `gradientflow run --recipe`.

    ddp: more of the keywords of `gradientflow.DistributedDataParallel`.
    kwargs: of Accelerate's own class."""

    def __init__(self, recipe: Recipe | str | None = None, *, ddp: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._recipe = recipe
        self._ddp = dict(ddp or {})
        self._optimizer: torch.optim.Optimizer | None = None
        super().__init__(**kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        models = [each for each in args if isinstance(each, nn.Module)]
        self._optimizer = optimizers[0] if len(optimizers) == len(models) == 1 else None
        try:
            return super().prepare(*args, **kwargs)
        finally:
            self._optimizer = None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        prepared = getattr(model, "_is_accelerate_prepared", False)
        if evaluation_mode or prepared or not replicates(self, model):
            done: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return done
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        wrapper = wrap(self, model, self._optimizer, self._recipe, self._ddp)
        if is_compressed(wrapper.flow.state_dict()):
            # Not always: Accelerate refuses checkpoints that lack a part, and those of its own class have none of ours.
            self.register_for_checkpointing(Saved(wrapper))
        return wrapper


def replicates(accelerator: Any, model: nn.Module) -> bool:
    """Whether Accelerate would wrap the model in torch's DistributedDataParallel."""
    kinds = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU, DistributedType.MULTI_NPU}
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return trains and accelerator.distributed_type in kinds and not accelerator.parallelism_config


def wrap(
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    recipe: Recipe | str | None,
    more: dict[str, Any],
) -> DistributedDataParallel:
    """What Accelerate does with torch's class, with ours; `model` is on its device, and autocast if it is to be."""
    handler, device = accelerator.ddp_handler, accelerator.device
    wrapper = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        recipe=recipe,
        optimizer=optimizer,
        scaler=accelerator.scaler,
        **(handler.to_kwargs() if handler is not None else {}),
        **more,
    )
    if handler is not None:
        handler.register_comm_hook(wrapper)
    setattr(wrapper, "_is_accelerate_prepared", True)  # noqa: B010 - Accelerate asks for it
    return wrapper
