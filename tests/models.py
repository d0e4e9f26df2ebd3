"""Small models of three families. The large variants hold over 2 MB, so that 1 MB and 25 MB buckets differ.

They are smooth (GELU, average pooling) and have no parameter whose gradient is rounding noise alone (an
attention key's bias is one): otherwise one flipped bit grows without bound in 50 steps and the distance
between two runs says nothing about either.
"""

from __future__ import annotations

import torch
from torch import nn


def mlp(large: bool) -> nn.Module:
    hidden = 512 if large else 48
    return nn.Sequential(nn.Linear(64, hidden), nn.GELU(), *_hidden(hidden, large), nn.Linear(hidden, 10))


def _hidden(width: int, large: bool) -> list[nn.Module]:
    return [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()] if large else []


class CNN(nn.Module):
    """Convolutions with BatchNorm, so that buffers and many small tensors are in play."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for inputs, outputs in [(1, 8), (8, 16)]:
            blocks += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.GELU()]
            blocks.append(nn.AvgPool2d(2))
        self.features = nn.Sequential(*blocks)
        hidden = 512 if large else 32
        self.head = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), *_hidden(hidden, large), nn.Linear(hidden, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


class Transformer(nn.Module):
    """Encoder layers with a class token: a parameter used outside any leaf module."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        width = 192 if large else 32
        self.embed = nn.Linear(8, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, bias=False
        )
        self.encoder = nn.TransformerEncoder(layer, 2 if large else 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.embed(images.flatten(0, 1))
        tokens = torch.cat([self.token.expand(len(rows), -1, -1), rows], dim=1)
        return self.head(self.encoder(tokens)[:, 0])


MODELS = {"mlp": mlp, "cnn": CNN, "transformer": Transformer}


def batch(rank: int, step: int, flat: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight digit-sized images and labels that depend on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    labels = torch.randint(10, (8,), generator=generator, device="cpu")
    return (images.flatten(1) if flat else images), labels


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, large: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name](large).to(dtype)


def loss_of(model: nn.Module, name: str, rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    device = next(model.parameters()).device
    images, labels = batch(rank, step, flat=name == "mlp", dtype=dtype)
    return nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
