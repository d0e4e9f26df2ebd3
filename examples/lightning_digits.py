"""Lightning with `GradientFlowStrategy`; everything else is a LightningModule as it is written anyway.

pip install 'gradientflow[demo,lightning]'
python examples/lightning_digits.py
"""

import os

import lightning
import torch
from digits import BATCH, arguments, build, data, finish
from torch.nn.functional import cross_entropy


class Reader(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    args = arguments()
    if args.stock:
        strategy = lightning.pytorch.strategies.DDPStrategy()
    else:
        from gradientflow.integrations.lightning import GradientFlowStrategy

        strategy = GradientFlowStrategy(args.recipe)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=args.steps, gradient_clip_val=5.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=os.devnull,
    )  # fmt: skip
    reader = Reader()
    trainer.fit(reader, torch.utils.data.DataLoader(data(), BATCH))
    finish(args, reader.model, float(trainer.callback_metrics["loss"]), trainer.global_rank)


if __name__ == "__main__":
    main()
