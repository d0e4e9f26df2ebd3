"""What the examples share: scikit-learn's handwritten digits, a small CNN, and options."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

BATCH = 32


def arguments(recipe: str = "lazy") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipe", default=recipe, help="how gradients travel")
    parser.add_argument("--stock", action="store_true", help="torch's own DistributedDataParallel instead")
    parser.add_argument("--out", type=Path, help="where rank 0 saves the weights")
    return parser.parse_args()


def data() -> torch.utils.data.TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return torch.utils.data.TensorDataset(
        torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    )


def batches(steps: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each of `steps` batches."""
    images, labels = data().tensors
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        mine = torch.randperm(len(labels), generator=generator)[: BATCH * world][rank::world]
        yield images[mine], labels[mine]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def finish(args: argparse.Namespace, model: nn.Module, loss: float, rank: int) -> None:
    if rank == 0:
        print(f"{'stock DDP' if args.stock else args.recipe}: loss {loss:.4f} after {args.steps} steps", flush=True)
        if args.out:
            torch.save(model.state_dict(), args.out)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves while another is still in its last collective ends both
