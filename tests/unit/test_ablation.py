"""The parts of a recipe, one by one."""

from __future__ import annotations

import types
from typing import Any

import pytest

from gradientflow.bench.ablation import gains, stages
from gradientflow.bench.results import Ratio
from gradientflow.recipe import Recipe


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("bsp+fp16", ["bsp", "bsp+fp16"]),
        ("wfbp-ring", ["bsp-ring", "wfbp-ring"]),
        ("flow", ["bsp", "wfbp", "flow"]),
        ("lazy:4MB+csc:5%", ["bsp", "wfbp", "lazy:4MB", "lazy:4MB+csc:5%"]),
        ("lazy+csc+bf16", ["bsp", "wfbp", "lazy", "lazy+bf16", "lazy+csc+bf16"]),
    ],
)
def test_each_stage_has_one_part_more_and_the_last_is_the_recipe(recipe: str, expected: list[str]) -> None:
    found = stages(Recipe.parse(recipe))
    assert [stage.recipe for stage in found] == expected
    assert all(Recipe.parse(stage.recipe).check() for stage in found)


def test_gains_are_told_against_the_stage_before() -> None:
    parts = stages(Recipe.parse("wfbp+fp16"))
    ratio = Ratio(median=0.5, low=0.4, high=0.6)
    rows: list[Any] = [
        types.SimpleNamespace(method="ddp-best", ratio_to={}),
        types.SimpleNamespace(method="bsp", ratio_to={"ddp-best": ratio}),
        types.SimpleNamespace(method="wfbp", ratio_to={"bsp": ratio}),
        types.SimpleNamespace(method="wfbp+fp16", ratio_to={"bsp": ratio, "wfbp": ratio}),
    ]
    results: Any = types.SimpleNamespace(results=rows)
    overlap, half = gains(results, parts)
    assert overlap.startswith("overlap with backward") and overlap.endswith("0.500 (0.400 to 0.600) of bsp")
    assert half.startswith("fp16 on the wire") and half.endswith("of wfbp")
