"""A strategy for Lightning: DDP's, with our wrapper and a recipe.

    from gradientflow.integrations.lightning import GradientFlowStrategy

    trainer = Trainer(strategy=GradientFlowStrategy("lazy+bf16"), devices=4, accelerator="cpu")

Optimizers are made before the model is wrapped, so recipes with a gate (flow, dear) and codecs that keep momentum find
theirs. What codecs have not sent yet goes into Lightning's checkpoints and comes back with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradientflow.errors import UsageError
from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.integrations.extras import missing
from gradientflow.integrations.saved import KEY, Saved
from gradientflow.recipe import Recipe

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise missing("lightning") from error


class GradientFlowStrategy(DDPStrategy):
    """recipe: how gradients travel; "auto" unless said here or by `gradientflow run --recipe`.

    kwargs: of `DDPStrategy`, and of `gradientflow.DistributedDataParallel`."""

    strategy_name = "gradientflow"

    def __init__(self, recipe: Recipe | str | None = None, **kwargs: Any) -> None:
        if kwargs.get("ddp_comm_hook") is not None:
            # Lightning would leave it out on CPUs, without a word.
            raise UsageError("ddp_comm_hook: give a recipe with a codec instead, such as 'lazy+bf16'")
        super().__init__(**kwargs)
        self._recipe = recipe

    def configure_ddp(self) -> None:
        """Lightning calls it before there are optimizers; see `setup_optimizers`."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        super().configure_ddp()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        optimizers = [getattr(each, "optimizer", each) for each in self.optimizers]
        # A gate puts one optimizer's step off; of several, none is known to be the one.
        only = optimizers[0] if len(optimizers) == 1 and isinstance(optimizers[0], torch.optim.Optimizer) else None
        return DistributedDataParallel(
            model,
            device_ids=self.determine_ddp_device_ids(),
            recipe=self._recipe,
            optimizer=only,
            scaler=getattr(self.precision_plugin, "scaler", None),
            **self._ddp_kwargs,
        )

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if isinstance(self.model, DistributedDataParallel):
            checkpoint[KEY] = Saved(self.model).state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if KEY in checkpoint and isinstance(self.model, DistributedDataParallel):
            Saved(self.model).load_state_dict(checkpoint[KEY])
