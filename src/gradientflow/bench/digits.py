"""Real data small enough for a demo: the 1797 handwritten digits of scikit-learn, and a CNN that reads them.

The images are 8 x 8 (Alpaydin and Kaynak 1998). Everything follows from fixed seeds, so that all ranks
and all methods see the same split, the same batches and the same first weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

NUM_TEST = 360
#: More than any training has epochs: two seeds share no order.
_SEEDS_APART = 2**20

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(NamedTuple):
    """Images and their labels, to train on and to test with."""

    train: Batch
    test: Batch


def load_digits(num_test: int = NUM_TEST) -> Digits:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)[order]
    targets = torch.tensor(labels, dtype=torch.int64)[order]
    return Digits((inputs[num_test:], targets[num_test:]), (inputs[:num_test], targets[:num_test]))


def batches_of_rank(data: Batch, *, epochs: int, batch: int, rank: int, world: int, seed: int = 0) -> Iterator[Batch]:
    """This rank's share of every batch: `batch` images over all ranks, drawn anew each epoch and for each seed.

    >>> data = torch.arange(10), torch.arange(10)
    >>> shares = [next(batches_of_rank(data, epochs=1, batch=4, rank=rank, world=2))[0] for rank in (0, 1)]
    >>> [len(share) for share in shares], len(set(torch.cat(shares).tolist()))
    ([2, 2], 4)
    """
    images, labels = data
    share = batch // world
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEEDS_APART * seed + epoch))
        for start in range(0, len(order) - share * world + 1, share * world):
            mine = order[start + rank * share :][:share]
            yield images[mine], labels[mine]


def build_reader(seed: int = 0) -> nn.Module:
    """About 0.62 million parameters, most of them in one layer, as in the CNNs the papers measure."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *_convolution(1, 32),
        *_convolution(32, 64),
        nn.MaxPool2d(2),
        *_convolution(64, 128),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def _convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]
