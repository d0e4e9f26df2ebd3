"""`DistributedDataParallel` with torch's interface and our runtime: change the import, keep the script.

    from gradientflow import DistributedDataParallel as DDP

The class is a subclass of torch's, so `isinstance` holds wherever libraries ask; of its machinery only
the dispatch of `torch.compile` and a helper that moves inputs are used. What differs from stock, all of
it where stock hangs, raises late or is silently wrong, is in docs/drop-in.md.
"""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from gradientflow.errors import NothingToTrainError, UsageError
from gradientflow.exchange import Moment
from gradientflow.recipe import Recipe
from gradientflow.runtime.attach import open_flow
from gradientflow.runtime.autograd import distributed_context, inside_backward
from gradientflow.runtime.flow import GradientFlow
from gradientflow.runtime.handle import DEADLINE_S
from gradientflow.runtime.options import NonFinite, Options
from gradientflow.runtime.pooled import PooledFlow
from gradientflow.runtime.settings import Settings

_log = logging.getLogger(__name__)

#: What torch's class takes and this one does not, with what to do instead.
_REFUSED = {
    "mixed_precision": "use torch.autocast, or a recipe with +bf16 for the wire",
    "delay_all_reduce_named_params": "the plan decides when a gradient is sent",
    "param_to_hook_all_reduce": "the plan decides when a gradient is sent",
    "bucket_cap_mb_list": "give a recipe, e.g. recipe='lazy:4MB'",
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """See torch's class for its arguments. Five are ours:

    recipe: how gradients travel, see `gradientflow.recipe`; `bucket_cap_mb` is short for "lazy:<size>".
    deadline_s: how long any one wait for ranks that are alive may last.
    nonfinite: what to do about an averaged gradient that is inf or nan; see `gradientflow.attach`.
    optimizer: with it, a recipe that is made for a gate (flow, bytescheduler) has one: backward may return while
        gradients travel, and `optimizer.step()` is put off, part by part, until forward needs its result. A codec
        that keeps gradients for later keeps SGD's momentum too.
    scaler: the loop's `GradScaler`; see `gradientflow.attach`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: object = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        recipe: Recipe | str | None = None,
        deadline_s: float = DEADLINE_S,
        nonfinite: NonFinite = "pass",
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        given = locals()
        nn.Module.__init__(self)
        Joinable.__init__(self)
        for argument, instead in _REFUSED.items():
            if given[argument] is not None:
                raise UsageError(f"{argument} is not supported here: {instead}")
        if dim != 0:
            raise UsageError(f"dim={dim}: inputs are not split here; every process feeds its own")
        if not isinstance(module, nn.Module):
            raise UsageError(f"expected a torch.nn.Module as module, found {type(module).__name__}")
        self.process_group = _group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._set_devices(module, device_ids, output_device)
        self.module = module
        self.dim = dim
        if broadcast_buffers is not None:
            warnings.warn(
                "`broadcast_buffers` is deprecated in torch: `forward_sync_buffers` says the same about forward "
                "passes, and leaves the first synchronisation as it is",
                FutureWarning,
                stacklevel=2,
            )
        if broadcast_buffers is not None and forward_sync_buffers is None:
            forward_sync_buffers = broadcast_buffers
            init_sync_buffers = broadcast_buffers
        else:
            forward_sync_buffers = True if forward_sync_buffers is None else forward_sync_buffers
            init_sync_buffers = True
        self.forward_sync_buffers = forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        #: For torch.compile, which cuts the graph where a bucket is full so that gradients come early.
        self.bucket_bytes_cap = int((bucket_cap_mb or 25) * 2**20)
        self.logger = None
        self.mixed_precision = None
        self._recipe = _recipe(recipe, bucket_cap_mb)
        self._deadline_s = deadline_s
        self._nonfinite = nonfinite
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"expected a torch.optim.Optimizer as optimizer, found {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._scaler = scaler
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._comm_hook_names: list[str] = []
        self._divide_by_initial_world_size = True
        self._last_error = ""
        self._has_joined = False
        #: For scripts that pass it on to torch's own broadcasts.
        self.broadcast_bucket_size = 250 * 2**20
        self._flow: GradientFlow | None = None
        self._open(parameters=init_sync, buffers=init_sync and init_sync_buffers)

    def _set_devices(self, module: nn.Module, device_ids: Any, output_device: Any) -> None:
        parameters = [p for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
        if not any(parameter.requires_grad for parameter in parameters):
            raise NothingToTrainError(
                "no parameter of the module requires a gradient, so there is nothing to average: use the module itself"
            )
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = False
        if device_ids is not None and len(device_ids) > 1:
            raise UsageError(f"device_ids={device_ids}: one process drives one device, give it alone or None")
        if self.device_type == "cpu" and (device_ids or output_device is not None):
            raise UsageError(
                f"device_ids={device_ids}, output_device={output_device}: the module is on the CPU, give None"
            )
        self.device_ids = [torch.device(x).index if isinstance(x, str | torch.device) else x for x in device_ids or []]
        if output_device is not None and torch.device(output_device) != self.device:
            raise UsageError(f"output_device={output_device}: outputs stay on the module's device, {self.device}")
        self.output_device = self.device_ids[0] if self.device_ids else None
        self.use_side_stream_for_tensor_copies = True

    # - The flow

    @property
    def flow(self) -> GradientFlow:
        """What runs underneath: plan, trace, profile, memory. A copy or an unpickled wrapper meets the other
        ranks when it is first used for training."""
        if self._flow is None:
            self._open(parameters=False, buffers=False)
            assert self._flow is not None
        return self._flow

    def _open(self, *, parameters: bool, buffers: bool) -> None:
        options = Options(
            broadcast_buffers=self.forward_sync_buffers,
            nonfinite=self._nonfinite,
            gradients_are_views=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            may_use_none=self.find_unused_parameters,
            forward_is_told=True,
            overflow_is_handled=self._scaler is not None and self._scaler.is_enabled(),
            scaler=self._scaler,
            ignored=frozenset(self.parameters_to_ignore),
        )
        flow = open_flow(
            self.module,
            self._optimizer,
            self._recipe,
            self.process_group,
            options,
            deadline_s=self._deadline_s,
            broadcast_parameters=parameters,
            broadcast_first_buffers=buffers,
        )
        flow.exchanging = False  # until a forward pass of this wrapper says so
        self._flow = flow
        for hook, state in self._comm_hooks:
            self._use_comm_hook(state, hook)
        # The flow holds hooks and threads; it goes when this object goes.
        weakref.finalize(self, flow.close)

    def close(self) -> None:
        """Take everything away that the wrapper put on the module. The module stays usable by itself."""
        if self._flow is not None:
            self._flow.close()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DistributedDataParallel:
        """What `.to()`, `.double()` and their kind go through. One that changes nothing may be called on one rank."""
        before = _kinds(self.module)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._flow is not None and _kinds(self.module) != before:
            self._flow.look_again()
        return self

    # - Forward

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
            self._post_forward(output)
            return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        training = torch.is_grad_enabled() and not inside_backward()
        if training:
            if self.flow.step == 0:
                _refuse_optimizers_in_backward(self.module)
            self.flow.begin_forward()
            # Whether backward exchanges is decided here, as stock does: the forward pass belongs into no_sync().
            self.flow.arm(self.require_backward_grad_sync)
            self.flow.follow_context(distributed_context())
        self._meet_joined()
        if self._syncs_buffers() and not inside_backward():
            self._sync_buffers()
        if self._join_config.enable:
            self._common(float(self.require_backward_grad_sync))
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])  # type: ignore[no-untyped-call]
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _post_forward(self, output: Any) -> None:
        if inside_backward():
            return
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self.flow.end_forward(output)

    def _syncs_buffers(self) -> bool:
        return self.require_forward_param_sync and self.forward_sync_buffers and self._flow is not None

    def _sync_buffers(self) -> None:
        if self._join_config.enable:
            # Rank 0 may have run out of inputs, and its buffers be old.
            self.flow.broadcast(self._buffers_to_sync(), Moment.JOIN, self._common_rank(True))
        else:
            moment = Moment.TRAINING if self.training and torch.is_grad_enabled() else Moment.EVALUATION
            self.flow.broadcast(self._buffers_to_sync(), moment)

    def _buffers_to_sync(self) -> list[torch.Tensor]:
        return [b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore]

    # - Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self._has_joined = True
        return _Shadow(self)

    def _meet_joined(self) -> None:
        work = Join.notify_join_context(self)
        world = dist.get_world_size(self.process_group)
        if work is not None:
            work.wait()
            world = world if self._divide_by_initial_world_size else int(work.get_future().value()[0].item())
        if self._flow is not None:
            self._flow.contribute(world)

    def _common(self, mine: float) -> bool:
        """Whether any rank says yes. Only under `join`, where joined ranks ask too."""
        answer = torch.tensor([mine], device=self.device)
        dist.all_reduce(answer, group=self.process_group)
        return bool(answer.item())

    def _common_rank(self, candidate: bool) -> int:
        """The highest rank that is a candidate. Collective."""
        highest = torch.tensor([self._distributed_rank if candidate else -1], device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(highest.item())

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        source = self._authoritative_rank = self._common_rank(is_last_joiner)
        parameters = [p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]
        buffers = self._buffers_to_sync() if self.forward_sync_buffers else []
        self.flow.broadcast([*parameters, *buffers], Moment.JOIN, source)

    # - Comm hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's; a second hook sees in `bucket.buffer()` what the first one's future gave, and so on."""
        try:
            _check_comm_hook(hook)
        except Exception as error:
            self._last_error = str(error)
            raise
        self._use_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))
        self._comm_hook_names.append(getattr(hook, "__qualname__", str(hook)))

    def _use_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        flow = self.flow
        if not isinstance(flow, PooledFlow):
            raise UsageError("GRADIENTFLOW=off runs no comm hooks: take the hook or the setting away")
        flow.use_comm_hook(lambda bucket: hook(state, bucket))

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self._comm_hook_names[-1] = str(comm_hook_type)

    # - What torch's class has beside

    @property
    def reducer(self) -> _Reducer:  # type: ignore[override]
        return _Reducer(self)

    def will_sync_module_buffers(self) -> bool:
        return self._syncs_buffers() and bool(self._buffers_to_sync())

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        if self._flow is not None and self._flow.step:
            self._last_error = "static_graph should be called before training loop starts"
            raise RuntimeError(self._last_error)
        self.static_graph = True
        self.close()
        self._open(parameters=False, buffers=False)
        if self.find_unused_parameters:
            warnings.warn("static_graph finds unused parameters by itself; leave find_unused_parameters", stacklevel=2)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """A few of torch's fields, for people who print them; `flow.trace()` and `flow.profile()` know more."""
        flow = self._flow
        hooks = ", ".join(self._comm_hook_names)
        return {
            **({"comm_hook": hooks} if hooks else {}),
            "join_uneven_inputs": int(self._has_joined),
            "world_size": dist.get_world_size(self.process_group),
            "rank": self._distributed_rank,
            "module_name": type(self.module).__name__,
            "iteration": flow.step if flow else 0,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "has_error": int(bool(self._last_error)),
            "error": self._last_error,
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise UsageError(f"the sample rate must be 1 or more, found {sample_rate}")

    def _remove_autograd_hooks(self) -> None:
        self.close()

    def _check_reducer_finalized(self) -> None:
        self.flow.synchronize()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are handed on as they are; there is nothing to clone."""

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("hooks on buffers are not supported: average what you need in a forward hook of the module")

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("a fused optimizer is not supported: gradients are final when backward() returns, step() then")

    def _update_process_group(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("the process group cannot change: close() this wrapper and build another")

    def _set_sparse_metadata(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("sparse gradients need no metadata here")

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise UsageError("a wrapper on a group of its own cannot be copied or pickled: save its state_dict()")
        return {key: value for key, value in self.__dict__.items() if key not in ("process_group", "_flow")} | {
            "_optimizer": None,  # the original's
            "_scaler": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.process_group = _group(None, None)
        self._flow = None


class _Reducer:
    """What libraries that drive torch's class by hand ask its reducer for."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def _rebuild_buckets(self) -> bool:
        """The plan is made anew by itself."""
        return False

    def prepare_for_backward(self, outputs: object) -> None:
        """The next backward pass exchanges, although the forward pass ran without."""
        self._wrapper.flow.arm(True)


class _Shadow(JoinHook):
    """What a rank without inputs does while the others still have some."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        wrapper = self._wrapper
        if wrapper._syncs_buffers():
            source = wrapper._common_rank(False)
            wrapper.flow.broadcast(wrapper._buffers_to_sync(), Moment.JOIN, source)
        exchanges = wrapper._common(0.0)
        wrapper.require_forward_param_sync = exchanges
        if exchanges:
            wrapper.flow.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._wrapper._sync_final_model(is_last_joiner)


def _kinds(module: nn.Module) -> list[tuple[int, torch.dtype, torch.device]]:
    return [(id(parameter), parameter.dtype, parameter.device) for parameter in module.parameters()]


def _group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise UsageError("process_group and device_mesh say the same thing: give one of them")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise UsageError(f"device_mesh has {device_mesh.ndim} dimensions: give the one that replicates the model")
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    found = process_group or dist.group.WORLD
    if found is None or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not set up: call torch.distributed.init_process_group() first, and start the "
            "script with torchrun or `gradientflow run`"
        )
    return found


def _recipe(recipe: Recipe | str | None, bucket_cap_mb: float | None) -> Recipe | str | None:
    if bucket_cap_mb is None:
        return recipe
    if recipe is not None:
        raise UsageError(f"recipe='{recipe}' and bucket_cap_mb={bucket_cap_mb}: leave one of them out")
    if bucket_cap_mb <= 0:
        raise UsageError(f"bucket_cap_mb must be above 0, found {bucket_cap_mb}")
    told = Settings.from_environment().recipe
    if told:
        _log.warning("bucket_cap_mb=%s is not used: the recipe '%s' was chosen for this run", bucket_cap_mb, told)
        return None
    return f"lazy:{max(1, round(bucket_cap_mb * 2**20))}"


def _refuse_optimizers_in_backward(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UsageError(
                f"an optimizer is to update {name!r} inside backward, before its gradient is an average: call step() "
                "after backward() instead"
            )


def _check_comm_hook(hook: Callable[..., Any]) -> None:
    if not callable(hook):
        raise TypeError(f"a comm hook must be callable with (state, bucket), found {type(hook).__name__}")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    wrong = bucket is not None and bucket.annotation not in (
        inspect.Parameter.empty,
        dist.GradBucket,
        "dist.GradBucket",
    )
    if wrong:
        raise UsageError("a comm hook's bucket is a torch.distributed.GradBucket; its annotation says something else")
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (inspect.Signature.empty, future) and not isinstance(
        signature.return_annotation, str
    ):
        raise UsageError("a comm hook returns a torch.futures.Future[torch.Tensor]; its annotation says something else")
