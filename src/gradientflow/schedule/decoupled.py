"""All-reduce in two halves: gradients are summed in backward, and gathered before the next forward pass needs them.

DeAR (Zhang et al., ICDCS 2023): a ring all-reduce is a reduce-scatter and an all-gather of the same length. The first
half goes as gradients come; the second goes in the order of the next forward pass, and needs a gate. Nothing is
negotiated and no byte is sent twice; and since norms are known between the halves, clipping waits for the first half
only.
"""

from __future__ import annotations

from gradientflow.cost.evaluate import Stages, evaluate
from gradientflow.cost.table import Cost
from gradientflow.plan import Message, Plan
from gradientflow.profiles import Profile
from gradientflow.schedule.fusion import bsp, fuse

#: What messages are fused up to, unless one size is asked for: the one that is predicted to end earliest.
SIZES_NBYTES = (1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 25_000_000)


def dear(
    profile: Profile,
    cost: Cost,
    *,
    nbytes: int | None = None,
    num_lanes: int = 1,
    gated: bool = True,
    norms: bool = False,
    stages: Stages = (),
) -> Plan:
    """Messages of up to `nbytes`, or of the best of `SIZES_NBYTES`. With `norms` of all tensors between the halves.

    Deviations: DeAR groups tensors by a size that it tunes while training; ours is predicted. Its second half updates
    nothing on the way; ours is followed by the optimizer's share of a stage.
    """
    plans = [_plan(profile, size, norms).on_lanes(num_lanes) for size in ((nbytes,) if nbytes else SIZES_NBYTES)]
    return min(reversed(plans), key=lambda plan: evaluate(profile, plan, cost, gated=gated, stages=stages).iteration_s)


def _plan(profile: Profile, nbytes: int, norms: bool) -> Plan:
    messages = fuse(profile, nbytes)
    first_use = {tensor.name: (tensor.forward_order, -place) for place, tensor in enumerate(profile.tensors)}

    def needed(number: int) -> tuple[int, int]:
        return min(first_use[piece.tensor] for piece in messages[number].slices)

    gathers = tuple(sorted(range(len(messages)), key=needed))
    update = {"schedule": "dear", "messages": messages, "gathers": gathers, "norms": norms}
    plan = bsp(profile).model_copy(update=update)
    return plan.carried_by(_by_ring)


def _by_ring(message: Message) -> str:
    return "ring"
