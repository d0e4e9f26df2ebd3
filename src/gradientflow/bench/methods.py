"""The methods that can be put side by side: stock DDP and its hooks, and every recipe of ours.

Each has a module and an optimizer of its own, and they take turns: what a wrapper puts off it finishes before its turn
ends.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

from gradientflow.bench.comm_hooks import Hook, all_reduce_hook, bf16_hook, watched
from gradientflow.bench.horovod import Horovod
from gradientflow.compress import Feedback, imagined, summed_nbytes
from gradientflow.errors import RecipeError, UsageError
from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.network import SERVED
from gradientflow.patterns import ALL_REDUCES
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe, as_recipe
from gradientflow.trace import Span

#: Bucket sizes that `ddp-best` chooses from, in MB as DDP counts them.
BUCKETS_MB = (1, 5, 25, 100)
POWERSGD_RANK = 1
#: Steps in which torch's PowerSGD hook does not compress yet; it wants two at least.
POWERSGD_START = 2


@dataclass(frozen=True)
class Method:
    name: str
    #: Wraps the module that the optimizer updates. Collective.
    wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]
    #: What one of so many ranks sends in an iteration, and what its port carries, if the exchange is optimal.
    must_send_nbytes: Callable[[Profile, int], float]
    #: Wraps the module so that messages are noted in the list. None: what `wrap` makes says so itself, or sends none.
    watch: Callable[[nn.Module, list[Span]], nn.Module] | None = None


#: Beside recipes. `ddp-best` is chosen by a pilot, see bench/worker.py.
NAMES = ("compute", "ddp", "ddp-best", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "horovod")


def numbered(names: Iterable[str]) -> tuple[str, ...]:
    """Names that are told apart where a method is asked for twice, as in an A/A test.

    >>> numbered(["ddp", "lazy", "ddp"])
    ('ddp', 'lazy', 'ddp (2)')
    """
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(found)


def patterns_of(names: Iterable[str]) -> tuple[str, ...]:
    """By which some of these methods send, servers among them.

    >>> patterns_of(["ddp", "lazy", "lazy-ring+bf16"]), patterns_of(["flow-ps:2", "ddp"])
    (('ring',), ('ps',))
    """
    recipes = [Recipe.parse(text) for text in map(without_number, names) if text not in NAMES]
    return tuple(sorted({recipe.exchange.name for recipe in recipes} & (ALL_REDUCES.keys() | {SERVED})))


def without_number(name: str) -> str:
    return re.sub(r" \(\d+\)$", "", name)


def method(name: str) -> Method:
    """By its name on the command line, or as `numbered` gives it."""
    plain = without_number(name)
    if plain == "compute":
        return Method(name, lambda module, optimizer: module, lambda profile, world: 0.0)
    if plain == "ddp":
        return stock_ddp(25, name)
    if plain == "ddp-fp16":
        return _hooked(name, default_hooks.fp16_compress_hook, _half)
    if plain == "ddp-bf16":
        return _hooked(name, bf16_hook, _half)
    if plain == "ddp-powersgd":
        # The stock hook fails with several buckets.
        return _hooked(name, powerSGD_hook.powerSGD_hook, _low_rank, bucket_cap_mb=1000, state=_powersgd_state)
    if plain == "horovod":
        return _horovod(name)
    return _recipe(name, plain)


def _recipe(name: str, text: str) -> Method:
    try:
        recipe = as_recipe(text).settled()
    except RecipeError as error:
        near = get_close_matches(text, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(NAMES)} or a recipe"
        raise UsageError(f"unknown method {text!r}: {hint} ({error})") from None

    if recipe.over_mpi:
        raise UsageError(f"method {text!r} is for workers that mpirun starts, and these are not: leave it out")

    def wrap(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return DistributedDataParallel(
            module, recipe=recipe, optimizer=optimizer, init_sync=False, gradient_as_bucket_view=True
        )

    codec = recipe.codec()

    def must_send(profile: Profile, world: int) -> float:
        dtypes = {tensor.torch_dtype for tensor in profile.tensors}
        parcels = [imagined([t.shape for t in profile.tensors if t.torch_dtype is dtype], dtype) for dtype in dtypes]
        sent = sum(codec.traffic(parcel, world).sent_nbytes for parcel in parcels)
        return sent * _through_servers(recipe, world) if recipe.served else sent

    return Method(name, wrap, must_send)


def _through_servers(recipe: Recipe, world: int) -> float:
    """Of what a worker sends if ranks exchange among themselves, what its host sends if servers add up."""
    if isinstance(recipe.codec(), Feedback):
        return 1 / (world - 1)  # at least: what is gathered is sent once, and servers send it to all
    num_spare = min(recipe.num_servers, world)
    share = (world - num_spare) / (world**2 + num_spare * world - 2 * num_spare)
    return (1 + (world - 2) * share) / summed_nbytes(1.0, world)


def stock_ddp(bucket_mb: float, name: str = "ddp") -> Method:
    return _hooked(name, None, _dense, bucket_cap_mb=bucket_mb)


def _hooked(
    name: str,
    hook: Hook | None,
    payload: Callable[[Profile], float],
    bucket_cap_mb: float = 25,
    state: Callable[[], object] = lambda: None,
) -> Method:
    def plain(module: nn.Module) -> StockDDP:
        return StockDDP(module, bucket_cap_mb=bucket_cap_mb, init_sync=False)

    def wrap(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        ddp = plain(module)
        if hook is not None:
            ddp.register_comm_hook(state(), hook)
        return ddp

    def watch(module: nn.Module, messages: list[Span]) -> nn.Module:
        ddp = plain(module)
        ddp.register_comm_hook(state(), watched(hook or all_reduce_hook, messages, sent=hook is None))
        return ddp

    return Method(name, wrap, lambda profile, world: summed_nbytes(payload(profile), world), watch)


def _exact(profile: Profile, world: int) -> float:
    return summed_nbytes(profile.nbytes, world)


def _dense(profile: Profile) -> float:
    return float(profile.nbytes)


def _half(profile: Profile) -> float:
    return 2.0 * profile.numel


def _powersgd_state() -> object:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )


def _low_rank(profile: Profile) -> float:
    """P and Q of every matrix that shrinks to less than half, everything else as it is."""
    nbytes = 0
    for tensor in profile.tensors:
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        columns = tensor.numel // max(1, rows)
        small = (rows + columns) * POWERSGD_RANK
        shrinks = len(tensor.shape) > 1 and 2 * small < tensor.numel
        nbytes += tensor.torch_dtype.itemsize * (small if shrinks else tensor.numel)
    return float(nbytes)


def _horovod(name: str) -> Method:
    if importlib.util.find_spec("horovod") is None:
        raise UsageError("method horovod needs Horovod, which is not installed: pip install horovod, or leave it out")
    return Method(name, lambda module, optimizer: Horovod(module), _exact)
