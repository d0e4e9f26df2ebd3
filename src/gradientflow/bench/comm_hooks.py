"""Comm hooks for stock DDP. Torch compares their annotations with its own classes, so here annotations are not
kept as text: no `from __future__ import annotations`."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradientflow.trace import Span

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's own refuses Gloo, which sums bf16 well."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work: Any = dist.all_reduce(narrow, async_op=True)

    def widen(future: torch.futures.Future[Any]) -> torch.Tensor:
        return bucket.buffer().copy_(future.value()[0])

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return future


def all_reduce_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook."""
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return future


def watched(hook: Hook, messages: list[Span], sent: bool) -> Hook:
    """`hook`, and a note of when its messages began and ended, and of their size if they are `sent` as they are."""

    def watching(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        start_s = time.perf_counter()
        label, details = f"bucket {bucket.index()}", {"nbytes": float(bucket.buffer().nbytes)} if sent else {}

        def done(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            messages.append(Span("message", label, "buckets", start_s, time.perf_counter(), 0, details))
            return future.value()

        future: torch.futures.Future[torch.Tensor] = hook(state, bucket).then(done)
        return future

    return watching


def _first(future: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
