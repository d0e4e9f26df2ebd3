"""Tensors that wait when they are touched: gradients on their way, and parameters that are still to be updated.

Both stand in for a plain tensor and step aside for good at the first use of its values, wherever that is: in the
next forward pass, in clipping or logging, in a checkpoint. What only asks for a shape or a dtype goes through.

[Note: every use] A parameter's values can be read through Python only by a torch function, and a class of its own
sees all of those (`__torch_function__`); an observation of where parameters were used once would not see where they
are used next time. A tensor may change its class: torch's own lazy parameters do. Code that goes around Python
(TorchScript, CUDA graphs, extensions) sees memory, not classes; runtime/gate.py stands at the doors of modules for
it. Gradients are also written by autograd's C++, so theirs dispatches below Python too (`__torch_dispatch__`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradientflow.runtime.autograd import foreach_mul_, foreach_norm, foreach_zero_

_T = torch.Tensor

# Ask for no values. What this version of torch does not have, nobody asks for.
_ATTRIBUTES = """
    device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr
    is_xpu itemsize layout name nbytes ndim output_nr requires_grad shape _version _backward_hooks
    _post_accumulate_grad_hooks
"""
_METHODS = """
    __len__ detach_ dim element_size get_device is_complex is_contiguous is_floating_point is_signed ndimension
    nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset
    stride
"""
#: As torch's dispatch names them.
_VALUELESS: frozenset[Any] = frozenset(
    [getattr(_T, name).__get__ for name in _ATTRIBUTES.split() if hasattr(_T, name)]
    + [getattr(_T, name) for name in _METHODS.split() if hasattr(_T, name)]
    + [getattr(_T.grad, name) for name in ("__get__", "__set__", "__delete__")]
    + [getattr(_T.requires_grad, "__set__")]  # noqa: B009 - mypy takes it for a bool
)
_ZERO: frozenset[Any] = frozenset([_T.zero_, foreach_zero_])
#: What `clip_grad_norm_` calls, for one gradient or for many.
_NORM: frozenset[Any] = frozenset([torch.linalg.vector_norm, foreach_norm])
_SCALE: frozenset[Any] = frozenset([_T.mul_, foreach_mul_])


def _tensors_in(values: object) -> Iterator[torch.Tensor]:
    """In arguments of torch functions: tensors, and lists, tuples and dicts of them."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_in(value)
    elif isinstance(values, dict):
        yield from _tensors_in(list(values.values()))


# - Gradients

Factor = float | torch.Tensor


class UnfinishedGradient(torch.Tensor):
    """What `.grad` is while the average is on its way into `plain`."""

    plain: torch.Tensor
    _touched: Callable[[], None]
    _zero_later: Callable[[], bool]
    _norm: Callable[[], torch.Tensor | None]
    _scale_later: Callable[[Factor], bool]

    @staticmethod
    def of(
        plain: torch.Tensor,
        touched: Callable[[], None],
        zero_later: Callable[[], bool] = lambda: False,
        norm: Callable[[], torch.Tensor | None] = lambda: None,
        scale_later: Callable[[Factor], bool] = lambda factor: False,
    ) -> UnfinishedGradient:
        """Call `touched` before any use of values. To be zeroed or multiplied, it first offers that to `zero_later` and
        `scale_later`, which say whether they will see to it; asked for its norm it first asks `norm`."""
        gradient: UnfinishedGradient = torch.Tensor._make_subclass(UnfinishedGradient, plain)
        gradient.plain, gradient._touched, gradient._zero_later = plain, touched, zero_later
        gradient._norm, gradient._scale_later = norm, scale_later
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ZERO:
            gradients = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            later = [isinstance(gradient, cls) and gradient._zero_later() for gradient in gradients]
            if all(later):
                return args[0]
            if func is foreach_zero_:
                args = ([gradient for gradient, seen_to in zip(gradients, later, strict=True) if not seen_to],)
        elif func in _NORM and not kwargs and (norms := _norms(*args)) is not None:
            return norms if func is foreach_norm else norms[0]
        elif func in _SCALE and not kwargs and _scaled_later(*args):
            return None if func is foreach_mul_ else args[0]
        if func not in _VALUELESS:
            _touch_all(args, kwargs)
        return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """From C++: autograd adds to a gradient that is still on its way."""
        _touch_all(args, kwargs)
        return func(*_plain(args), **_plain(kwargs or {}))


def _norms(of: Any, order: object = 2, *more: object) -> list[torch.Tensor] | None:
    """Without waiting for any gradient, or not at all."""
    gradients = of if isinstance(of, list | tuple) else [of]
    if more or order != 2 or not all(isinstance(gradient, UnfinishedGradient) for gradient in gradients):
        return None
    norms = [gradient._norm() for gradient in gradients]
    known = [norm for norm in norms if norm is not None]
    return known if len(known) == len(norms) else None


def _scaled_later(of: Any, factor: Any) -> bool:
    """Those that cannot be scaled later have been touched, and are scaled now."""
    if type(factor) is torch.Tensor and factor.ndim == 0 and not factor.requires_grad:
        factor = factor.clone()  # the user's may change before it is used
    elif not isinstance(factor, float | int):
        return False
    gradients = of if isinstance(of, list | tuple) else [of]
    for gradient in gradients:
        if not (isinstance(gradient, UnfinishedGradient) and gradient._scale_later(factor)):
            _touch_all(gradient, None)
            _plain(gradient).mul_(factor)
    return True


def _touch_all(args: object, kwargs: object) -> None:
    for tensor in _tensors_in([args, kwargs]):
        if isinstance(tensor, UnfinishedGradient):
            tensor._touched()


def _plain(values: Any) -> Any:
    if isinstance(values, UnfinishedGradient):
        return values.plain
    if isinstance(values, list | tuple):
        return type(values)(_plain(value) for value in values)
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    return values


# - Parameters

#: Brings a parameter up to date. The argument: whether a compiled region used it.
Touched = Callable[[bool], None]
#: By identity of a parameter that waits. It holds no tuples: so many of them a step make the garbage collector run.
_pending: dict[int, Touched] = {}
#: By class of those, the one that they had.
_original: dict[type[nn.Parameter], type[nn.Parameter]] = {}


def make_pending(parameter: nn.Parameter, touched: Touched) -> None:
    """From now on any use of its values calls `touched` first, which has to call `make_plain`."""
    _pending[id(parameter)] = touched
    parameter.__class__ = _pending_type(type(parameter))


def make_plain(parameter: nn.Parameter) -> None:
    del _pending[id(parameter)]
    parameter.__class__ = _original[type(parameter)]


#: Calls a function as if a parameter's class were not one of ours.
_as_plain: Callable[[Any, Sequence[type], tuple[Any, ...], dict[str, Any]], Any] = nn.Parameter.__torch_function__


class _Pending:
    """Comes before the parameter's own class."""

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VALUELESS:
            return _as_plain(func, kinds, args, kwargs or {})
        _bring_up_to_date(args, kwargs, torch.compiler.is_compiling())
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _pending[id(self)](False)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _pending[id(self)](False)
        return self.__reduce_ex__(protocol)


_GET, _SET, _DELETE = (getattr(_T.grad, name) for name in ("__get__", "__set__", "__delete__"))


class _QuickGrad:
    """`.grad` asks for no values, and `zero_grad` asks for it twice a parameter: 0.3 us so, 1.3 by way of
    `__torch_function__`."""

    @property
    def grad(self) -> Any:
        return _as_plain(_GET, (), (self,), {})

    @grad.setter
    def grad(self, gradient: Any) -> None:
        _as_plain(_SET, (), (self, gradient), {})

    @grad.deleter
    def grad(self) -> None:
        _as_plain(_DELETE, (), (self,), {})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _bring_up_to_date(args: object, kwargs: object, compiled: bool) -> None:
    found = [_pending[id(tensor)] for tensor in _tensors_in([args, kwargs]) if id(tensor) in _pending]
    # Hidden in an argument that we do not look into: it may be any of them.
    for touched in found or list(_pending.values()):
        touched(compiled)


@functools.cache
def _pending_type(original: type[nn.Parameter]) -> type[nn.Parameter]:
    is_plain = inspect.getattr_static(original, "grad") is inspect.getattr_static(_T, "grad")
    # Code of its own in a user's class sees what it always sees.
    bases = (_QuickGrad, _Pending, original) if is_plain else (_Pending, original)
    kind: type[nn.Parameter] = types.new_class(f"Pending{original.__name__}", bases)
    _original[kind] = original
    return kind
