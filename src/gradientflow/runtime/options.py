"""How a flow behaves beside what its recipe says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

NonFinite = Literal["pass", "raise", "skip"]
Allow = Literal["lossless", "lossy"]


@dataclass(frozen=True)
class Options:
    #: Buffers become rank 0's before each training forward, as under DDP.
    broadcast_buffers: bool = True
    #: Update fp16 and bf16 parameters through float32 copies.
    master_weights: bool = False
    #: An inf on the fp16 wire is somebody else's to find (a GradScaler's).
    overflow_is_handled: bool = False
    #: What to do about an averaged gradient that is inf or nan, on all ranks alike: nothing, raise
    #: `NonFiniteError`, or drop the gradients of this step so that `optimizer.step()` changes nothing.
    nonfinite: NonFinite = "pass"
    #: `.grad` is a view of the pool: no copy, but the next backward pass overwrites what was kept by reference.
    gradients_are_views: bool = True
    #: The first step counts how often each gradient arrives in one backward pass; reentrant checkpoints may
    #: then share parameters.
    static_graph: bool = False
    #: A backward pass from the model's output takes part in the exchange even if it reaches no parameter.
    may_use_none: bool = False
    #: Whoever made the flow calls `begin_forward` and `end_forward`; else hooks on the model do.
    forward_is_told: bool = False
    #: Compare parameters with the other ranks' every so many steps; 0: never.
    verify_every: int = 0
    #: `optimizer.step()` may be put off, part by part, until the next forward pass needs its result.
    gate: bool = False
    #: The loop's, if the flow was told.
    scaler: torch.amp.GradScaler | None = field(default=None, repr=False)
    #: Names of parameters and buffers to leave alone.
    ignored: frozenset[str] = field(default_factory=frozenset)
