"""A small GPT: learned positions, pre-norm blocks, tied embeddings."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.project_in(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int = 256, context: int = 64, width: int = 64, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("project_out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.last(self.blocks(self.tokens(tokens) + self.positions(places)))
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())

    def groups(self, decay: float) -> list[dict[str, object]]:
        """Weight decay for matrices, none for biases and norms."""
        parameters = list(self.parameters())
        return [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
