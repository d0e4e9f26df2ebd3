"""Hugging Face's `Trainer`, whose DDP is ours.

    from gradientflow.integrations.transformers import Trainer

    Trainer(model=model, args=TrainingArguments(...), train_dataset=data, recipe="lazy+bf16").train()

For other trainers, put the mixin before them: `class Mine(GradientFlowMixin, Seq2SeqTrainer): ...`. A world of one,
FSDP, DeepSpeed and tensor parallelism are left to them alone. What codecs have not sent yet is saved with
checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradientflow.integrations.extras import missing
from gradientflow.integrations.saved import Saved
from gradientflow.recipe import Recipe

try:
    import transformers

    from gradientflow.integrations.accelerate import replicates, wrap
    from gradientflow.integrations.ddp import DistributedDataParallel
except ImportError as error:
    raise missing("transformers", "transformers and accelerate") from error

#: In a checkpoint's directory.
FILE = "gradientflow.pt"


class GradientFlowMixin:
    """recipe: how gradients travel; "auto" unless said here or by `gradientflow run --recipe`.

    ddp: more of the keywords of `gradientflow.DistributedDataParallel`."""

    def __init__(
        self, *args: Any, recipe: Recipe | str | None = None, ddp: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._recipe = recipe
        self._ddp = dict(ddp or {})
        super().__init__(*args, **kwargs)

    def _wrap_model(self: Any, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        if wrapped is not model or not training or isinstance(model, DistributedDataParallel):
            return wrapped
        if not replicates(self.accelerator, model):
            return wrapped
        # The trainer asks Accelerate for the whole of it only where nobody has wrapped the model.
        model = self.accelerator.prepare_model(model, evaluation_mode=True)
        return wrap(self.accelerator, model, self.optimizer, self._recipe, self._ddp)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if isinstance(self.model_wrapped, DistributedDataParallel):
            state = Saved(self.model_wrapped).state_dict()
            if self.args.should_save:
                torch.save(state, Path(output_dir) / FILE)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None or not isinstance(self.model_wrapped, DistributedDataParallel):
            return
        path = Path(checkpoint) / FILE
        if path.exists():
            Saved(self.model_wrapped).load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


class Trainer(GradientFlowMixin, transformers.Trainer):
    """`transformers.Trainer` with a recipe; see `GradientFlowMixin`."""
