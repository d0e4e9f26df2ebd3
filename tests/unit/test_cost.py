"""What a message costs: laws of tables and lines."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradientflow.cost import Cost, CostTable, Line, Steps, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from gradientflow.errors import UsageError

SIZES = st.integers(1, 10**9)
SECONDS = st.floats(1e-6, 1e3)


@st.composite
def points(draw: st.DrawFn, *, rising: bool = False) -> tuple[tuple[int, float], ...]:
    sizes = sorted(draw(st.sets(SIZES, min_size=2, max_size=12)))
    seconds = draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes)))
    return tuple(zip(sizes, sorted(seconds) if rising else seconds, strict=True))


@st.composite
def lines(draw: st.DrawFn) -> Line:
    return Line(alpha_s=draw(st.floats(0, 1)), beta_s_per_byte=draw(st.floats(0, 1e-6)))


COSTS = lines() | points().map(lambda points: CostTable(points=points))


# - Tables


@given(points=points(), software_s=st.floats(0, 1))
def test_a_table_is_exact_where_it_was_measured(points: tuple[tuple[int, float], ...], software_s: float) -> None:
    table = CostTable(points=points, software_s=software_s)
    for nbytes, seconds in points:
        assert table.seconds(nbytes) == software_s + seconds


@given(points=points(), share=st.floats(0, 1))
def test_between_two_sizes_seconds_lie_between_theirs(points: tuple[tuple[int, float], ...], share: float) -> None:
    table = CostTable(points=points)
    for (below, seconds_below), (above, seconds_above) in pairwise(points):
        low, high = sorted((seconds_below, seconds_above))
        assert low * (1 - 1e-9) <= table.seconds(below + share * (above - below)) <= high * (1 + 1e-9)


@given(points=points(rising=True), sizes=st.lists(st.floats(0, 1e11), min_size=2))
def test_a_table_rises_if_its_points_do(points: tuple[tuple[int, float], ...], sizes: list[float]) -> None:
    seconds = [CostTable(points=points).seconds(nbytes) for nbytes in sorted(sizes)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(seconds))


@given(points=points(), nbytes=st.floats(0, 1e12))
def test_the_ends_of_a_table(points: tuple[tuple[int, float], ...], nbytes: float) -> None:
    table, (smallest, first_s), (largest, last_s) = CostTable(points=points), points[0], points[-1]
    assert table.seconds(min(nbytes, smallest)) == first_s
    beyond_s = table.seconds(largest + nbytes) - last_s
    assert beyond_s == pytest.approx(table.beta_s_per_byte * nbytes, rel=1e-6, abs=1e-9 * last_s)


@given(cost=COSTS, nbytes=st.floats(0, 1e12))
def test_no_cost_is_negative(cost: Cost, nbytes: float) -> None:
    assert cost.seconds(nbytes) >= 0
    assert cost.beta_s_per_byte >= 0


def test_a_power_law_is_a_straight_line_in_log_log() -> None:
    table = CostTable(points=tuple((n, math.sqrt(n)) for n in (4, 16, 4096)))
    for nbytes in (5, 9, 100, 1000):
        assert table.seconds(nbytes) == pytest.approx(math.sqrt(nbytes))


def test_only_the_largest_sizes_say_how_a_table_goes_on() -> None:
    # A jump as at an MPI library's change of algorithm: small sizes know nothing of the line above it.
    line = Line(alpha_s=1e-3, beta_s_per_byte=1e-9)
    table = CostTable(points=((4, 1e-5), (1024, 2e-5), *((n, line.seconds(n)) for n in (2**14, 2**15, 2**16, 2**17))))
    assert table.beta_s_per_byte == pytest.approx(1e-9)
    assert table.seconds(2**20) == pytest.approx(line.seconds(2**20))


@pytest.mark.parametrize(
    "points",
    [(), ((4, 1.0),), ((4, 1.0), (4, 2.0)), ((8, 1.0), (4, 2.0)), ((0, 1.0), (4, 2.0)), ((4, 0.0), (8, 1.0)),
     ((4, math.inf), (8, 1.0)), ((4, 1.0), (8, math.nan))],
)  # fmt: skip
def test_a_table_refuses_what_is_no_measurement(points: tuple) -> None:
    with pytest.raises(ValidationError):
        CostTable(points=points)


# - Lines


@given(line=lines(), sizes=st.sets(SIZES, min_size=2, max_size=12))
def test_a_fit_finds_the_line_that_made_the_points(line: Line, sizes: set[int]) -> None:
    line = Line(alpha_s=line.alpha_s + 1e-6, beta_s_per_byte=line.beta_s_per_byte)
    found, errors = Line.fit([(nbytes, line.seconds(nbytes)) for nbytes in sizes])
    assert max(map(abs, errors)) < 1e-6
    for nbytes in sizes:
        assert found.seconds(nbytes) == pytest.approx(line.seconds(nbytes), rel=1e-6)


@given(points=points(), alpha=st.floats(0.5, 2), beta=st.floats(0.5, 2), extra=st.floats(0, 1e-3))
def test_no_other_line_has_smaller_relative_errors(
    points: tuple[tuple[int, float], ...], alpha: float, beta: float, extra: float
) -> None:
    found, errors = Line.fit(points)
    other = Line(alpha_s=found.alpha_s * alpha + extra, beta_s_per_byte=found.beta_s_per_byte * beta)
    theirs = sum((other.seconds(nbytes) / seconds - 1) ** 2 for nbytes, seconds in points)
    assert sum(error**2 for error in errors) <= theirs * (1 + 1e-6) + 1e-9


def test_errors_are_relative_and_signed() -> None:
    line, errors = Line.fit([(10, 1.0), (20, 4.0), (30, 3.0)])
    for (nbytes, seconds), error in zip([(10, 1.0), (20, 4.0), (30, 3.0)], errors, strict=True):
        assert line.seconds(nbytes) == pytest.approx(seconds * (1 + error))


def test_times_that_fall_with_size_make_a_constant_and_steep_ones_no_negative_start() -> None:
    assert Line.fit([(1, 3.0), (2, 2.0), (3, 1.0)])[0].beta_s_per_byte == 0.0
    assert Line.fit([(1, 0.1), (2, 2.0), (3, 9.0)])[0].alpha_s == 0.0


@pytest.mark.parametrize("points", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)]])
def test_one_size_makes_no_line(points: list[tuple[int, float]]) -> None:
    with pytest.raises(UsageError, match="two sizes"):
        Line.fit(points)


# - Collectives from links


@given(line=lines(), world=st.integers(1, 64), nbytes=SIZES)
def test_rings_follow_the_closed_form(line: Line, world: int, nbytes: int) -> None:
    alpha, beta, p = line.alpha_s, line.beta_s_per_byte, world
    whole = 2 * (p - 1) * alpha + 2 * (p - 1) / p * nbytes * beta
    assert ring_all_reduce(line, p).seconds(nbytes) == pytest.approx(whole)
    halves = ring_reduce_scatter(line, p).seconds(nbytes) + ring_all_gather(line, p).seconds(nbytes)
    assert halves == pytest.approx(whole)
    assert ring_all_reduce(line, p).beta_s_per_byte == pytest.approx(2 * (p - 1) / p * beta)


@given(cost=COSTS, nbytes=SIZES)
def test_one_step_of_everything_is_the_cost_itself(cost: Cost, nbytes: int) -> None:
    same = Steps(cost, 1, 1.0)
    assert (same.seconds(nbytes), same.beta_s_per_byte) == (cost.seconds(nbytes), cost.beta_s_per_byte)
