"""Master weights: half-precision parameters, updated in float32 by the user's own optimizer.

A float32 copy of every fp16 or bf16 parameter takes its place in the optimizer's groups. Once gradients
are averaged they are widened into the copies' `.grad`, where `GradScaler.unscale_` and clipping find them
(clip what the optimizer holds, not `model.parameters()`); after `optimizer.step()` the copies are rounded
back into the model. Small updates that half precision would swallow add up in the copies (Micikevicius
et al. 2018; the GradientFlow paper trains this way).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from gradientflow.errors import UsageError

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Swaps the half-precision members of `parameters` in the optimizer for float32 copies."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self._models = {name: p for name, p in parameters.items() if p.dtype in _HALF and p in held}
        if not self._models:
            raise UsageError("master_weights=True, but the optimizer holds no fp16 or bf16 parameter of the model")
        self._masters = {name: nn.Parameter(p.detach().float()) for name, p in self._models.items()}
        self._swap({self._models[name]: master for name, master in self._masters.items()})

    @property
    def nbytes(self) -> int:
        return sum(master.nbytes for master in self._masters.values())

    def parameters(self) -> Iterable[nn.Parameter]:
        """The float32 copies."""
        return self._masters.values()

    def by_name(self) -> Mapping[str, nn.Parameter]:
        return self._masters

    def take_gradients(self) -> None:
        """Move averaged gradients to the copies. The model's own are dropped: `optimizer.zero_grad()` no
        longer reaches them."""
        for name, master in self._masters.items():
            gradient = self._models[name].grad
            if gradient is None:
                continue
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad += gradient
            self._models[name].grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies into the model."""
        for name, master in self._masters.items():
            self._models[name].copy_(master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over values that were loaded into the model."""
        for name, master in self._masters.items():
            master.copy_(self._models[name])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: master.detach().clone() for name, master in self._masters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if set(state) != set(self._masters):
            missing = sorted(set(state) ^ set(self._masters))
            raise UsageError(f"the saved master weights are of another model; they differ in {', '.join(missing[:5])}")
        for name, master in self._masters.items():
            master.copy_(state[name])
        self.publish()

    def restore(self) -> None:
        """Give the optimizer the model's own parameters back."""
        self._swap({master: self._models[name] for name, master in self._masters.items()})

    def _swap(self, replacement: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [replacement.get(parameter, parameter) for parameter in group["params"]]
        for old, new in replacement.items():
            if old in self._optimizer.state:
                state = self._optimizer.state.pop(old)
                self._optimizer.state[new] = {
                    key: value.to(new.dtype) if torch.is_tensor(value) and value.shape == new.shape else value
                    for key, value in state.items()
                }
