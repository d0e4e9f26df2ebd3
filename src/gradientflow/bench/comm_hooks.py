"""Comm hooks for stock DDP. Torch compares their annotations with its own classes, so here annotations are not
kept as text: no `from __future__ import annotations`."""

import time
from typing import Any

import torch
import torch.distributed as dist

from gradientflow.trace import Span


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's own refuses Gloo, which sums bf16 well."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work: Any = dist.all_reduce(narrow, async_op=True)

    def widen(future: torch.futures.Future[Any]) -> torch.Tensor:
        return bucket.buffer().copy_(future.value()[0])

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return future


def watched_all_reduce(messages: list[Span], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook, and a note of when."""
    start_s = time.perf_counter()
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)

    def done(future: torch.futures.Future[Any]) -> torch.Tensor:
        label, details = f"bucket {bucket.index()}", {"nbytes": bucket.buffer().nbytes}
        messages.append(Span("message", label, "buckets", start_s, time.perf_counter(), 0, details))
        result: torch.Tensor = future.value()[0]
        return result

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
    return future
