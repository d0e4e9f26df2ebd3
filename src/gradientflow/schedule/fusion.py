"""GradientFlow's lazy all-reduce, and the two schedules at its ends.

Backward extends a region of the gradient pool that is ready and not yet sent; when the region reaches
the threshold theta it is sent as one message, and what is left goes at the end of backward (Sun et al.
2019, section "lazy all-reduce"). theta = 0 is wait-free back-propagation (WFBP: each tensor as soon as
it is ready), theta = infinity is BSP (one message after backward).
"""

from __future__ import annotations

import math

from gradientflow.errors import RecipeError
from gradientflow.plan import Message, Plan, Slice
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.schedule.sizes import parse_nbytes

#: The paper's theta is not known; this is the size of DDP's buckets.
DEFAULT_THETA = 25 * 10**6
#: Stock DDP's own, the first and the others.
FIRST_BUCKET_NBYTES, BUCKET_NBYTES = 2**20, 25 * 2**20


def fuse(profile: Profile, theta: float) -> tuple[Message, ...]:
    """Messages of consecutive tensors, each closed once it holds `theta` bytes.

    Tensors of different pools cannot share a message; each pool has its own open region, and messages are
    in the order in which their last tensor is ready.

    >>> tensors = tuple(TensorProfile(name=n, shape=(100,)) for n in "abc")
    >>> [m.label for m in fuse(Profile(tensors=tensors), theta=600)]
    ['a .. b', 'c']
    """
    messages: list[Message] = []
    regions: dict[tuple[str, str], list[TensorProfile]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for tensor in profile.tensors:
        region = regions.setdefault(tensor.pool, [])
        region.append(tensor)
        sizes[tensor.pool] = sizes.get(tensor.pool, 0) + tensor.nbytes
        if sizes[tensor.pool] >= theta:
            messages.append(_message(region))
            regions[tensor.pool], sizes[tensor.pool] = [], 0
    messages += [_message(region) for region in regions.values() if region]
    return tuple(messages)


def bsp(profile: Profile, argument: str = "") -> Plan:
    """Everything after the whole backward pass: one message (one a pool, where dtypes are mixed)."""
    _takes_nothing("bsp", argument)
    return _plan("bsp", profile, math.inf)


def wfbp(profile: Profile, argument: str = "") -> Plan:
    """Each tensor by itself, as soon as its gradient is ready."""
    _takes_nothing("wfbp", argument)
    return _plan("wfbp", profile, 0)


def lazy(profile: Profile, argument: str = "") -> Plan:
    """Fuse until theta: `lazy` for the default, `lazy:4MB` for another."""
    theta = parse_nbytes(argument) if argument else DEFAULT_THETA
    return _plan(f"lazy:{argument}" if argument else "lazy", profile, theta)


def buckets(profile: Profile, limit_nbytes: float, first_nbytes: float) -> Plan:
    """Stock DDP's: as `lazy`, but with a first one of its own size, so that something is sent early."""
    tensors, nbytes, head = profile.tensors, 0, 0
    while head < len(tensors) and nbytes < first_nbytes:
        nbytes += tensors[head].nbytes
        head += 1
    parts = [profile.model_copy(update={"tensors": part}) for part in (tensors[:head], tensors[head:])]
    messages = (*fuse(parts[0], math.inf), *fuse(parts[1], limit_nbytes))
    return Plan(schedule="ddp", layout=tuple(tensor.name for tensor in tensors), messages=messages)


def _plan(schedule: str, profile: Profile, theta: float) -> Plan:
    layout = tuple(tensor.name for tensor in profile.tensors)
    return Plan(schedule=schedule, layout=layout, messages=fuse(profile, theta))


def _message(tensors: list[TensorProfile]) -> Message:
    return Message(slices=tuple(Slice(tensor=tensor.name, start=0, stop=tensor.numel) for tensor in tensors))


def _takes_nothing(schedule: str, argument: str) -> None:
    if argument:
        raise RecipeError(f"{schedule} takes no argument, found {argument!r}: write {schedule}")
