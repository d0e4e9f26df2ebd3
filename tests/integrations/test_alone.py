"""What integrations leave to their library, and what they refuse; in one process, without a group."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gradientflow.errors import UsageError


def test_a_world_of_one_is_left_to_accelerate() -> None:
    pytest.importorskip("accelerate", reason="make test-integrations has it")
    from gradientflow.integrations.accelerate import Accelerator

    model = nn.Linear(2, 2)
    prepared, _ = Accelerator("lazy", cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert prepared is model


def test_a_hook_that_lightning_would_leave_out_is_refused() -> None:
    pytest.importorskip("lightning", reason="make test-integrations has it")
    from gradientflow.integrations.lightning import GradientFlowStrategy

    with pytest.raises(UsageError, match="recipe with a codec"):
        GradientFlowStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)
