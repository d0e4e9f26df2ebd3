"""Buckets for stock DDP: the best that it can be told.

DDP takes whole tensors in the order in which backward yields them and closes a bucket when it holds its limit or more.
From torch 2.13 on each bucket may have a limit of its own, `bucket_cap_mb_list`. So a plan of whole tensors in backward
order is told by the sizes of its messages: prefix sums reach each limit exactly where a message ends.
"""

from __future__ import annotations

from gradientflow.documents import Record
from gradientflow.errors import UsageError
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.schedule.fusion import BUCKET_NBYTES, FIRST_BUCKET_NBYTES, buckets
from gradientflow.sim.cluster import Cluster
from gradientflow.sim.predict import plan_for, predict_plan
from gradientflow.tune.ranking import on_its_merits

#: Those that neither cut nor reorder.
SCHEDULES = ("merge", "mg-wfbp", "lazy:1MB", "lazy:4MB", "lazy:16MB", "lazy:64MB", "wfbp", "bsp")
#: Of an iteration: what else gains less is not worth a list.
MARGIN = 0.005


class Buckets(Record):
    """`bucket_cap_mb_list`, and seconds of an iteration with it and with what DDP does by itself."""

    bucket_cap_mb_list: tuple[float, ...]
    schedule: str
    iteration_s: float
    stock_s: float


def best_buckets(profile: Profile, cluster: Cluster, world: int) -> Buckets:
    """By simulation."""
    here = on_its_merits(cluster)
    lanes = here.collective.lanes

    def took(plan: Plan) -> float:
        return predict_plan(profile, plan.on_lanes(lanes), here, world).iteration_s

    stock = buckets(profile, BUCKET_NBYTES, FIRST_BUCKET_NBYTES)
    found = [(took(stock), stock)]
    for name in SCHEDULES:
        plan = plan_for(profile, Recipe.parse(f"{name}-a2a:1"), here, world)
        found.append((took(plan), plan))
    quickest_s, plan = min(found, key=lambda one: one[0])
    if quickest_s > (1 - MARGIN) * found[0][0]:
        quickest_s, plan = found[0]
    return Buckets(
        bucket_cap_mb_list=caps_mb(profile, plan), schedule=plan.schedule, iteration_s=quickest_s, stock_s=found[0][0]
    )


def caps_mb(profile: Profile, plan: Plan) -> tuple[float, ...]:
    """A plan as DDP's list. In MiB, and exact: DDP multiplies by 2^20 and cuts off what is behind the point.

    >>> from gradientflow.profiles import TensorProfile
    >>> profile = Profile(tensors=tuple(TensorProfile(name=name, shape=(2**18,)) for name in "abc"))
    >>> caps_mb(profile, buckets(profile, 2**21, 1))
    (1.0, 2.0)
    """
    if len({tensor.pool for tensor in profile.tensors}) > 1:
        raise UsageError(
            "gradients are of several dtypes or devices, and DDP begins its list anew for each: none is right for all"
        )
    sent = [piece for message in plan.messages for piece in message.slices]
    whole = [(tensor.name, 0, tensor.numel) for tensor in profile.tensors]
    if [(piece.tensor, piece.start, piece.stop) for piece in sent] != whole:
        raise UsageError(f"{plan.schedule} cuts or reorders tensors, which DDP cannot be told")
    itemsize = profile.tensors[0].torch_dtype.itemsize if profile.tensors else 1
    return tuple(message.numel * itemsize / 2**20 for message in plan.messages)
