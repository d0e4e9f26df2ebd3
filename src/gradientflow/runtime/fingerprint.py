"""Ranks compare what they are about to do before anything touches the wire.

Gloo aborts the process from a C++ thread when shapes differ, and adds up the wrong tensors without a word
when only the order does. So every rank states its tensors and its plan first, and on any difference all
ranks raise the same diff.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from gradientflow.errors import DisagreementError
from gradientflow.exchange import Control
from gradientflow.plan import Plan

_MAX_LINES = 12


def describe_tensors(kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What must be alike on all ranks, in words: `{"tensor fc.bias": "torch.float32 [10] at 3"}`.

    Strides count, where they say anything: gradients are summed as they lie in memory.
    """
    return {
        f"{kind} {name}": f"{tensor.dtype} {list(tensor.shape)}{_strides(tensor)} at {position}"
        for position, (name, tensor) in enumerate(tensors.items())
    }


def _strides(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return ""
    return f" strides {[stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]}"


def describe_plan(plan: Plan) -> dict[str, str]:
    return {"plan": f"{plan.schedule}, {len(plan.messages)} messages, digest {plan.digest}"}


def compare(control: Control, fingerprint: Mapping[str, str]) -> None:
    """Collective. Raise `DisagreementError`, with the same text on every rank, unless all are equal."""
    text = json.dumps(fingerprint)
    purpose = "compare models and plans"
    if len(set(control.gather(hashlib.sha256(text.encode()).hexdigest(), purpose))) == 1:
        return
    everyone: list[dict[str, str]] = [json.loads(theirs) for theirs in control.gather(text, purpose)]
    lines = [line for rank, theirs in enumerate(everyone) for line in _differences(everyone[0], rank, theirs)]
    shown = lines[:_MAX_LINES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    raise DisagreementError("ranks do not hold the same model and plan; nothing was sent:\n  " + "\n  ".join(shown))


def _differences(expected: Mapping[str, str], rank: int, found: Mapping[str, str]) -> list[str]:
    nothing = "nothing of that name"
    return [
        f"rank {rank}, {item}: expected {expected.get(item, nothing)} (as on rank 0), found {found.get(item, nothing)}"
        for item in dict.fromkeys([*expected, *found])
        if expected.get(item) != found.get(item)
    ]
