"""Sparse gradients (`nn.Embedding(sparse=True)`) travel beside the plan: their size is known only when they
are there. After the last message each is summed as what it is, rows and values, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from gradientflow.compress import Gather, Question, Sum
from gradientflow.exchange import Exchange


def sparse_names(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Those of `parameters` whose gradients will be sparse, as their modules say."""
    owners = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    weights = {id(module.weight) for module in owners}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in weights)


class SparseSums:
    """Averages the gradients of `parameters`, which may be sparse, dense or missing on any rank."""

    def __init__(self, exchange: Exchange, parameters: Mapping[str, nn.Parameter]) -> None:
        self.names = frozenset(parameters)
        self._exchange = exchange
        self._parameters = list(parameters.items())

    @torch.no_grad()
    def sum(self, step: int, num_contributing: int, joined: bool) -> None:
        """Collective. `joined`: this rank gives nothing and takes nothing."""
        if not self._parameters:
            return
        gradients = [None if joined else parameter.grad for _, parameter in self._parameters]
        device = self._parameters[0][1].device
        # How many ranks have one at all, and how many have it dense: a row that is missing is a zero.
        held = torch.tensor([[g is not None, g is not None and not g.is_sparse] for g in gradients], device=device)
        held = held.to(torch.float32)
        self._ask(Sum([held]), step, "which sparse gradients there are")
        for (name, parameter), gradient, (present, dense) in zip(
            self._parameters, gradients, held.tolist(), strict=True
        ):
            if not present:
                continue
            mine = _sparse(gradient, parameter)
            mine = torch.sparse_coo_tensor(
                mine.indices(), mine.values() / num_contributing, mine.shape, is_coalesced=True, check_invariants=False
            )
            what = f"sparse gradient of {name!r}"
            if self._exchange.sums_sparse:
                self._ask(Sum([mine]), step, what)
            else:
                mine = self._sum_rows(mine, step, what)
            if not joined:
                parameter.grad = mine.to_dense() if dense else mine.coalesce()

    def _sum_rows(self, mine: torch.Tensor, step: int, what: str) -> torch.Tensor:
        """Everybody is told everybody's rows, filled up to the longest, and adds them up in the order of ranks."""
        numbers = self._ask(Gather(torch.tensor([mine.indices().numel()], device=mine.device)), step, what)
        sizes = [int(number) for number in numbers]
        padding = max(sizes) - sizes[self._exchange.rank]
        rows, width = mine.values(), math.prod(mine.shape[1:])
        indices = self._ask(Gather(F.pad(mine.indices()[0], (0, padding))), step, what)
        values = self._ask(Gather(F.pad(rows.reshape(-1), (0, padding * width))), step, what)
        return torch.sparse_coo_tensor(
            torch.cat([each[:size] for each, size in zip(indices, sizes, strict=True)])[None],
            torch.cat(
                [each[: size * width].view(size, *rows.shape[1:]) for each, size in zip(values, sizes, strict=True)]
            ),
            mine.shape,
            check_invariants=False,
        )

    def _ask(self, question: Question, step: int, what: str) -> Sequence[torch.Tensor]:
        return self._exchange.answer(question, 0, step + 1, f"step {step}, {what}") or ()


def _sparse(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """As rows (one sparse dimension), coalesced."""
    if gradient is None:
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    if not gradient.is_sparse:
        gradient = gradient.detach().to_sparse(1)
    return gradient.detach().coalesce()
