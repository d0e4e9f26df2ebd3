"""Sparse gradients (`nn.Embedding(sparse=True)`) travel beside the plan: their size is known only when they
are there. After the last message each is summed as what it is, rows and values, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gradientflow.compress import Sum
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
        self._ask([held], step, "which sparse gradients there are")
        for (name, parameter), gradient, (present, dense) in zip(
            self._parameters, gradients, held.tolist(), strict=True
        ):
            if not present:
                continue
            mine = _sparse(gradient, parameter)
            mine = torch.sparse_coo_tensor(
                mine.indices(), mine.values() / num_contributing, mine.shape, is_coalesced=True, check_invariants=False
            )
            self._ask([mine], step, f"sparse gradient of {name!r}")
            if not joined:
                parameter.grad = mine.to_dense() if dense else mine.coalesce()

    def _ask(self, tensors: list[torch.Tensor], step: int, what: str) -> None:
        self._exchange.answer(Sum(tensors), 0, step + 1, f"step {step}, {what}")


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
