"""Small models: three families to compare methods by, and odd ones to find what a method forgot.

The families' large variants hold over 500 KB, so that buckets of 250 KB are several. They are smooth (GELU, average
pooling) and have no parameter whose gradient is rounding noise alone (an attention key's bias is one): otherwise one
flipped bit grows without bound in 50 steps and the distance between two runs says nothing about either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradientflow.tune import trials


def mlp(large: bool) -> nn.Module:
    hidden = 256 if large else 48
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
        hidden = 256 if large else 32
        self.head = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), *_hidden(hidden, large), nn.Linear(hidden, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


class Transformer(nn.Module):
    """Encoder layers with a class token: a parameter used outside any leaf module."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        width = 128 if large else 32
        self.embed = nn.Linear(8, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, bias=False
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.embed(images.flatten(0, 1))
        tokens = torch.cat([self.token.expand(len(rows), -1, -1), rows], dim=1)
        return self.head(self.encoder(tokens)[:, 0])


# - Odd ones, from images to logits like the CNN; each uses its parameters in a way of its own

WIDTH = 24


class Blocks(nn.Module):
    """Residual blocks, one after the other. Dropout gives away whoever draws from the random generator in between."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 10)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + block(x)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x)


class Checkpointed(Blocks):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(block, x, use_reentrant=self.reentrant)


class Attention(nn.Module):
    """MultiheadAttention by itself: its output layer's weight is used without the layer being called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(0, 1)
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


class TiedGPT(nn.Module):
    """The embedding is the head: needed first by the forward pass, and complete last in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.position = nn.Parameter(torch.randn(64, WIDTH) * 0.02)
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = (4 * images.flatten(1) + 8).long().clamp(0, 15)
        mask = nn.Transformer.generate_square_subsequent_mask(64)
        return self.head(self.body(self.embed(tokens) + self.position, src_mask=mask, is_causal=True)[:, -1])


class Embedded(Blocks):
    """A sum over an embedding's rows instead of the first layer."""

    def __init__(self, sparse: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.stem = nn.Embedding(16, WIDTH, sparse=sparse, max_norm=max_norm)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem((4 * images.flatten(1) + 8).long().clamp(0, 15)).mean(1)
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x)


class Borrowed(Blocks):
    """The stem's weight is used once more after the blocks, by a function, outside its owner."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x) + functional.linear(x, self.stem.weight.t())[:, :10]


class Sometimes(Blocks):
    """Blocks that are used in some training forward passes only, as `used(block, pass)` says; one that never is."""

    def __init__(self, used: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.used = used
        self.passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images.flatten(1))
        for number, block in enumerate(self.blocks):
            if self.used(number, self.passes):
                x = self.through(block, x)
        self.passes += self.training
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM holds its weights in a list of its own beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(images.flatten(0, 1))[0][:, -1])


class Doubling(torch.autograd.Function):
    """A linear map by 2w, with a backward pass of its own."""

    @staticmethod
    def forward(context, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        context.save_for_backward(x, weight)
        return x @ (2 * weight).t()

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def,override]
        x, weight = context.saved_tensors
        return gradient @ (2 * weight), 2 * gradient.t() @ x


class OwnFunction(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images.flatten(1))
        return self.head(self.blocks[0](Doubling.apply(x, self.weight)) + self.blocks[1](x) + self.blocks[2](x))


class Normed(Blocks):
    """weight_norm: the weight a layer uses is computed from two parameters whenever it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        for module in list(self.modules()):
            if isinstance(module, nn.Linear):
                nn.utils.parametrizations.weight_norm(module)


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


def pay_for_any_race() -> None:
    """Steps of tests are so short that `auto` would put its races off."""
    trials.SHARE = 1e3
