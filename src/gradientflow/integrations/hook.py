"""Our codecs under stock DDP: a communication hook, and the state that goes with it.

    state = gf.HookState(ddp, "topk:1%", optimizer=optimizer)
    ddp.register_comm_hook(state, gf.hook)

Torch compares a hook's annotations with its own classes, so here they are not kept as text: no
`from __future__ import annotations`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradientflow.compress import Feedback
from gradientflow.errors import TrainingError, UsageError
from gradientflow.recipe import Recipe
from gradientflow.runtime.averager import Talk
from gradientflow.runtime.handle import DEADLINE_S
from gradientflow.runtime.optimizers import OneOptimizer

_log = logging.getLogger(__name__)

#: DDP lays its buckets out anew after the first backward pass (of a static graph: the second), and never again.
SETTLED_STEPS = 2


class HookState:
    """What `hook` needs: a codec, and what it has not sent yet. Constructing it is collective.

    ddp: the wrapped model, before the hook is registered.
    codec: as after the first "+" of a recipe, such as "int8" or "csc:10%+fp16".
    optimizer: with it, a codec that corrects momentum keeps that of SGD (docs/compression.md).
    scaler: the loop's `GradScaler`. What waits is kept without its factor, and a step that some rank cannot use comes
        as inf on all of them, so that it is skipped; without a scaler such a step comes as zeros, with a warning.
    """

    def __init__(
        self,
        ddp: nn.parallel.DistributedDataParallel,
        codec: str,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if not isinstance(ddp, nn.parallel.DistributedDataParallel):
            raise UsageError(f"expected a model in DistributedDataParallel, found {type(ddp).__name__}")
        if ddp.find_unused_parameters and isinstance(Recipe.parse(f"lazy+{codec}").check().codec(), Feedback):
            raise UsageError(
                "DDP drops what a codec sends for parameters that no rank has used: leave find_unused_parameters out, "
                "or use gradientflow.DistributedDataParallel, which lets such parameters rest"
            )
        parameters = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        device = next(iter(parameters.values())).device
        self._talk = Talk(codec, ddp.process_group, device, scaler, deadline_s)
        self._handles: list[RemovableHandle] = []
        if compression := self._talk.compression:
            compression.meet_optimizer(optimizer, self._names, aloud=True)
            if optimizer is not None:
                self._handles = OneOptimizer(optimizer).watch(
                    compression.before_update, lambda _: compression.after_update()
                )
        # On a CPU a thread of its own carries messages while backward goes on; an accelerator's stream does anyway.
        self._thread = ThreadPoolExecutor(1, "gradientflow-hook") if device.type == "cpu" else None
        self._layout: list[list[str]] = []
        self._settled_steps = SETTLED_STEPS + bool(ddp.static_graph)
        self._num_steps = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._waiting: list[_Taken] = []  # of this step, so far

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What `hook` does. Futures are fulfilled at the end of the step: only then it is known whether it counts."""
        if self._closed:
            raise UsageError(
                "this HookState is closed, and DDP still calls its hook: close it after the last step, or go on with a "
                "new DistributedDataParallel"
            )
        parameters = bucket.parameters()
        names = [self._names[parameter] for parameter in parameters]
        taken = _Taken(bucket.index(), bucket.buffer(), names, parameters, torch.futures.Future())
        known = self._num_steps >= self._settled_steps and self._talk.is_laid_out
        if known and (taken.number >= len(self._layout) or self._layout[taken.number] != names):
            raise TrainingError(
                f"DDP's bucket {taken.number} holds other parameters than in the steps before: make a new HookState "
                "with a new DistributedDataParallel, and give it this one's state_dict()"
            )
        compression = self._talk.compression
        if not self._waiting and compression and compression.update_is_due:
            raise UsageError(
                "a second exchange before optimizer.step(), and gradients hold momentum: accumulate under no_sync(), "
                'or leave momentum to the optimizer ("topk:1%:uncorrected")'
            )
        self._waiting.append(taken)
        if known:
            self._run(self._carry, taken, len(self._waiting) == 1)
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._run(self._end, waiting, known)
            self._num_steps += 1
        return taken.future

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        if self._thread is not None:
            self._thread.submit(function, *args)
        else:
            function(*args)

    def _carry(self, taken: "_Taken", begins: bool) -> None:
        if self._failure is not None:
            return
        try:
            if begins:
                self._talk.begin()
            taken.buffer.div_(self._talk.exchange.world)
            self._talk.carry(taken.number, taken.buffer)
        except BaseException as error:
            self._failure = error

    def _end(self, waiting: list["_Taken"], carried: bool) -> None:
        try:
            if not carried:
                self._lay_out(waiting)
                for taken in waiting:
                    self._carry(taken, taken is waiting[0])
            if self._failure is not None:
                raise self._failure
            if not self._talk.finish():
                self._spoil(waiting)
            for taken in waiting:
                taken.future.set_result(taken.buffer)
        except BaseException as error:
            self._failure = error
            self._talk.exchange.abandon(f"failed in a comm hook: {error or type(error).__name__}")
            for taken in waiting:
                taken.future.set_exception(error)  # type: ignore[arg-type]  # its stub says it is a result

    def _lay_out(self, waiting: list["_Taken"]) -> None:
        layout = [taken.names for taken in waiting]
        if layout != self._layout or not self._talk.is_laid_out:
            self._layout = layout
            self._talk.lay_out([taken.views() for taken in waiting], [taken.buffer.view(-1) for taken in waiting])

    def _spoil(self, waiting: list["_Taken"]) -> None:
        for taken in waiting:
            taken.buffer.fill_(float("inf") if self._scaler is not None else 0.0)
        if self._scaler is None and self._talk.exchange.rank == 0:
            _log.warning("a gradient is inf or nan on some rank: this step's are zero on all of them")

    def state_dict(self) -> dict[str, Any]:
        """What this rank has left over, by parameter name."""
        return self._talk.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """What this rank saved; or, of another number of ranks, a list of what all of them did."""
        self._talk.load_state_dict(state)

    def close(self) -> None:
        """The optimizer has its momentum back, and connections are closed. The hook cannot be used any more."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if self._thread is not None:
            self._thread.shutdown()
        self._talk.close()


class _Taken(NamedTuple):
    """A bucket of this step."""

    number: int
    buffer: torch.Tensor
    names: list[str]
    parameters: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]

    def views(self) -> dict[str, torch.Tensor]:
        """Gradients by name, as DDP lays them into the bucket, which is not as `GradBucket.gradients` shows them: with
        the strides of their parameter, if it fills a range (channels_last does)."""
        parts = torch.split(self.buffer.view(-1), [parameter.numel() for parameter in self.parameters])
        return {
            name: part.as_strided(parameter.shape, parameter.stride())
            if _fills_a_range(parameter)
            else part.view(parameter.shape)
            for name, parameter, part in zip(self.names, self.parameters, parts, strict=True)
        }


def _fills_a_range(parameter: torch.Tensor) -> bool:
    """Only then torch makes another one with the same strides."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp.register_comm_hook(state, hook)`: a bucket's mean over ranks, as the state's codec can."""
    return state.take(bucket)
