"""Merging: the optimum against all cuts there are, and MG-WFBP against its paper's rule."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientflow.cost import Cost, CostTable, Line, evaluate, ring_all_reduce
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.schedule import bsp, wfbp
from gradientflow.schedule.fusion import fuse
from gradientflow.schedule.merge import merge, merges, mg_wfbp

TIMES = st.integers(0, 20).map(float)


def model(*layers: tuple[int, float], dtypes: str = "") -> Profile:
    """Layers (elements, backward_s) in backward order; of float16 where `dtypes` says h."""
    return Profile(
        tensors=tuple(
            TensorProfile(
                name=f"t{index}",
                shape=(numel,),
                backward_s=backward_s,
                dtype="float16" if dtypes[index : index + 1] == "h" else "float32",
            )
            for index, (numel, backward_s) in enumerate(layers)
        )
    )


@st.composite
def profiles(draw: st.DrawFn, most: int = 10, mixed: bool = False) -> Profile:
    layers = draw(st.lists(st.tuples(st.integers(0, 30), TIMES), min_size=1, max_size=most))
    dtypes = draw(st.text("sh", min_size=len(layers), max_size=len(layers))) if mixed else ""
    return model(*layers, dtypes=dtypes)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    line = Line(alpha_s=draw(TIMES), beta_s_per_byte=draw(st.sampled_from([0.0, 0.25, 1.0])))
    seconds = sorted(draw(st.lists(TIMES, min_size=3, max_size=3)))
    table = CostTable(points=tuple((size, s + 1) for size, s in zip((4, 40, 400), seconds, strict=True)))
    return draw(st.sampled_from([line, table, ring_all_reduce(line, 3), ring_all_reduce(table, 3)]))


def cuts(profile: Profile, pool: tuple[str, str]) -> Iterator[list[list[TensorProfile]]]:
    """All ways to cut the tensors of a pool into messages."""
    tensors = [tensor for tensor in profile.tensors if tensor.pool == pool]
    for number in range(len(tensors)):
        for inner in combinations(range(1, len(tensors)), number):
            yield [tensors[a:b] for a, b in pairwise((0, *inner, len(tensors)))]


def end_s(profile: Profile, messages: list[list[TensorProfile]], cost: Cost) -> float:
    ready_s, now_s = {}, 0.0
    for tensor in profile.tensors:
        now_s += tensor.backward_s
        ready_s[tensor.name] = now_s
    end_s = 0.0
    for message in messages:
        nbytes = sum(tensor.nbytes for tensor in message)
        end_s = max(end_s, *(ready_s[t.name] for t in message)) + (cost.seconds(nbytes) if nbytes else 0.0)
    return end_s


def found_end_s(profile: Profile, plan: Plan, cost: Cost) -> float:
    plan.check(profile)
    return evaluate(profile, plan, cost).iteration_s - profile.forward_s


# - The optimum


@given(profile=profiles(), cost=costs())
def test_merge_is_the_best_of_all_cuts(profile: Profile, cost: Cost) -> None:
    best_s = min(end_s(profile, messages, cost) for messages in cuts(profile, profile.tensors[0].pool))
    assert found_end_s(profile, merge(profile, cost), cost) == pytest.approx(best_s)


@settings(max_examples=50)
@given(profile=profiles(most=5, mixed=True), cost=costs())
def test_with_several_pools_it_is_the_best_of_all_cuts_and_orders(profile: Profile, cost: Cost) -> None:
    pools = list(dict.fromkeys(tensor.pool for tensor in profile.tensors))
    best_s = min(
        end_s(profile, list(order), cost)
        for parts in product(*(cuts(profile, pool) for pool in pools))
        for order in permutations([message for part in parts for message in part])
    )
    assert found_end_s(profile, merge(profile, cost), cost) == pytest.approx(best_s)


@given(profile=profiles(mixed=True), cost=costs(), theta=st.integers(0, 200))
def test_merge_is_never_worse(profile: Profile, cost: Cost, theta: int) -> None:
    least_s = found_end_s(profile, merge(profile, cost), cost)
    lazy = wfbp(profile).model_copy(update={"messages": fuse(profile, theta)})
    for other in (wfbp(profile), bsp(profile), lazy, mg_wfbp(profile, cost)):
        assert least_s <= found_end_s(profile, other, cost) + 1e-9


@given(profile=profiles(mixed=True), cost=costs())
def test_a_model_of_too_many_states_is_made_coarser(profile: Profile, cost: Cost) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules[merge.__module__], "MOST_STATES", 9)
        least_s = found_end_s(profile, merge(profile, cost), cost)
    for other in (wfbp(profile), bsp(profile), mg_wfbp(profile, cost)):
        assert least_s <= found_end_s(profile, other, cost) + 1e-9


@given(profile=profiles(mixed=True), cost=costs(), margin=st.sampled_from([1.0, 1.5, 3.0]))
def test_with_a_margin_it_ends_as_early(profile: Profile, cost: Cost, margin: float) -> None:
    eager, joined = merges(profile, cost, (math.inf, margin))
    assert found_end_s(profile, joined, cost) == pytest.approx(found_end_s(profile, eager, cost))


def test_with_a_margin_there_are_fewer_messages_where_compute_hides_them() -> None:
    profile, line = model(*[(10, 5.0)] * 100), Line(alpha_s=1.0, beta_s_per_byte=0.01)
    eager, joined = merges(profile, line, (math.inf, 2.0))
    assert len(eager.messages) == 100
    assert len(joined.messages) < 30
    assert len(joined.messages[-1].slices) == 1, "what cannot be hidden stays small"


def test_without_start_up_each_by_itself_and_with_nothing_else_one() -> None:
    profile = model(*[(10, 1.0)] * 8)
    alone = merge(profile, Line(alpha_s=0.0, beta_s_per_byte=1.0))
    assert found_end_s(profile, alone, Line(alpha_s=0.0, beta_s_per_byte=1.0)) == pytest.approx(1.0 + 320)
    assert len(merge(profile, Line(alpha_s=1e3, beta_s_per_byte=0.0)).messages) == 1


def test_models_of_nothing() -> None:
    line = Line(alpha_s=1.0, beta_s_per_byte=1.0)
    for profile in (Profile(tensors=()), model((0, 1.0), (0, 0.0))):
        for schedule in (merge, mg_wfbp):
            schedule(profile, line).check(profile)


# - MG-WFBP


def published(profile: Profile, alpha_s: float, beta_s_per_byte: float) -> list[int]:
    """The paper's algorithm as the authors' code has it, layers in forward order: tensors a message."""
    layers = list(reversed(profile.tensors))
    num, size = len(layers), [layer.nbytes for layer in layers]
    ready_s = [sum(layer.backward_s for layer in layers[index:]) for index in range(num)]
    taken_s = [alpha_s + beta_s_per_byte * nbytes for nbytes in size]

    def starts_s() -> list[float]:
        starts_s = [0.0] * num
        starts_s[-1] = ready_s[-1]
        for index in reversed(range(num - 1)):
            starts_s[index] = max(starts_s[index + 1] + taken_s[index + 1], ready_s[index])
        return starts_s

    groups, open_ = [], 0
    for index in range(num - 1, 0, -1):
        open_ += 1
        start_s, next_s = starts_s()[index], ready_s[index - 1]
        if next_s < start_s + taken_s[index] and (start_s > next_s or next_s - start_s < alpha_s):
            size[index - 1] += size[index]
            taken_s[index], taken_s[index - 1] = 0.0, alpha_s + beta_s_per_byte * size[index - 1]
        else:
            groups.append(open_)
            open_ = 0
    return [*groups, open_ + 1]


@given(
    layers=st.lists(st.tuples(st.integers(1, 30), TIMES), min_size=1, max_size=12),
    alpha_s=st.integers(1, 20).map(float),
)
def test_mg_wfbp_merges_as_published(layers: list[tuple[int, float]], alpha_s: float) -> None:
    profile = model(*layers)
    plan = mg_wfbp(profile, Line(alpha_s=alpha_s, beta_s_per_byte=0.25))
    assert [len(message.slices) for message in plan.messages] == published(profile, alpha_s, 0.25)


#: GoogLeNet on 8 K80 nodes: elements, and microseconds of backward, of its 64 layers in forward order. From the
#: logs published with MG-WFBP (hclhkbu/B-Caffe, logdata/tmp8comm.log), weight and bias of a layer added up.
GOOGLENET = (
    (9472, 15143.7), (4160, 3825.38), (110784, 21038.8), (12352, 2641.02), (18560, 3080.61), (110720, 6052.77),
    (3136, 1952.83), (12864, 1119.52), (6208, 2047.23), (32896, 4329.54), (32896, 4242.4), (221376, 7513.63),
    (8256, 2643.9), (76928, 3101.5), (16448, 3380.64), (92352, 4733.76), (46208, 2681.41), (179968, 5296.16),
    (7744, 1470.69), (19264, 871.456), (30784, 2137.12), (65664, 1476.58), (2098176, 703.008), (1025024, 460.512),
    (82112, 4075.14), (57472, 2911.97), (226048, 3050.18), (12352, 1793.25), (38464, 1612.45), (32832, 2221.54),
    (65664, 3096.32), (65664, 3116.74), (295168, 3534.24), (12352, 1673.63), (38464, 1461.28), (32832, 2246.59),
    (57472, 2735.94), (73920, 3884.7), (373568, 4892.67), (16448, 1745.82), (51264, 1556.86), (32832, 2292.83),
    (67712, 1424.9), (2098176, 703.968), (1025024, 469.76), (135424, 5788.32), (84672, 4642.24), (461120, 5166.24),
    (16960, 3048.51), (102528, 2581.73), (67712, 3296.7), (213248, 3990.82), (133312, 3214.59), (461120, 2036.86),
    (26688, 1212.67), (102528, 1015.55), (106624, 2499.81), (319872, 2876.35), (159936, 3467.62), (663936, 2355.17),
    (40000, 1420.0), (153728, 1250.91), (106624, 2564.19), (1025024, 461.088),
)  # fmt: skip


@pytest.mark.parametrize(
    ("alpha_us", "beta_us_per_byte", "wfbp_ms", "mg_wfbp_ms", "num_messages", "bsp_ms"),
    [
        (830.2, 3.337e-3, 232.18, 206.29, 9, 384.75),
        (991.3, 2.319e-3, 206.41, 206.41, 25, 330.43),
        (146.6, 2.459e-3, 205.57, 205.57, 30, 337.08),
        (99.9, 1.691e-3, 205.50, 205.50, 48, 295.93),
    ],
)
def test_googlenet(
    alpha_us: float, beta_us_per_byte: float, wfbp_ms: float, mg_wfbp_ms: float, num_messages: int, bsp_ms: float
) -> None:
    """Lines that were fitted to all-reduces of 8, 8, 4 and 2 nodes; ends from the start of backward."""
    profile = model(*[(numel, micros * 1e-6) for numel, micros in reversed(GOOGLENET)])
    line = Line(alpha_s=alpha_us * 1e-6, beta_s_per_byte=beta_us_per_byte * 1e-6)
    plan = mg_wfbp(profile, line)
    assert len(plan.messages) == num_messages
    ends_s = [found_end_s(profile, other, line) for other in (wfbp(profile), plan, bsp(profile))]
    assert [1e3 * end_s for end_s in ends_s] == pytest.approx([wfbp_ms, mg_wfbp_ms, bsp_ms], abs=0.01)
    assert found_end_s(profile, merge(profile, line), line) <= ends_s[1] + 1e-12


def test_mg_wfbp_is_not_optimal_by_its_own_model() -> None:
    """It asks of each layer whether to wait for the next one, and never adds up for how long it has waited."""
    profile, line = model(*[(250_000, 177e-6)] * 400), Line(alpha_s=300e-6, beta_s_per_byte=0.15e-9)
    assert len(mg_wfbp(profile, line).messages) == 1
    assert found_end_s(profile, mg_wfbp(profile, line), line) > 1.5 * found_end_s(profile, merge(profile, line), line)


def test_the_start_up_of_a_table_is_its_smallest_message() -> None:
    table = CostTable(points=((4, 2.0), (4000, 2.5)))
    near, far = model((1, 1.0), (1, 1.9), (1, 0.0)), model((1, 1.0), (1, 2.1))
    assert [len(plan.messages) for plan in (mg_wfbp(near, table), mg_wfbp(far, table))] == [1, 2]


def test_pools_are_merged_by_themselves() -> None:
    profile = model((4, 1.0), (4, 1.0), (4, 1.0), (4, 1.0), dtypes="shsh")
    plan = mg_wfbp(profile, Line(alpha_s=9.0, beta_s_per_byte=0.0))
    assert [[piece.tensor for piece in message.slices] for message in plan.messages] == [["t0", "t2"], ["t1", "t3"]]
