"""What each part of a recipe gains: its parts switched on one by one, from a bare exchange after backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradientflow.bench.results import Results
from gradientflow.compress import CASTS
from gradientflow.errors import UsageError
from gradientflow.recipe import Choice, Recipe


class Stage(NamedTuple):
    """A recipe and what it has that the one before it has not."""

    recipe: str
    adds: str


def stages(recipe: Recipe) -> tuple[Stage, ...]:
    """
    >>> [stage.recipe for stage in stages(Recipe.parse("gradientflow"))]
    ['bsp-ring', 'wfbp-ring', 'lazy-ring', 'lazy-ring+fp16', 'lazy-ring+csc+fp16']
    """
    bare = recipe.model_copy(update={"schedule": Choice(name="bsp"), "codecs": ()})
    found = [(bare, f"-{recipe.exchange.name} alone")]
    if recipe.schedule.name != "bsp":
        found.append((bare.model_copy(update={"schedule": Choice(name="wfbp")}), "overlap with backward"))
    if recipe.schedule.name not in ("bsp", "wfbp"):
        found.append((bare.model_copy(update={"schedule": recipe.schedule}), f"messages as {recipe.schedule} has them"))
    casts = tuple(codec for codec in recipe.codecs if codec.name in CASTS)
    if casts:
        found.append((recipe.model_copy(update={"codecs": casts}), f"{casts[0].name} on the wire"))
    if casts != recipe.codecs:
        found.append((recipe, " and ".join(str(codec) for codec in recipe.codecs if codec not in casts)))
    if len(found) == 1:
        raise UsageError(f"recipe '{recipe}' has no parts to switch on")
    return tuple(Stage(str(each), adds) for each, adds in found)


def gains(results: Results, parts: Sequence[Stage]) -> list[str]:
    """Each stage against the one before it, in words."""
    rows = {row.method: row for row in results.results}
    lines, before = [], ""
    for recipe, adds in parts:
        if recipe not in rows:
            continue
        ratio = rows[recipe].ratio_to.get(before)
        if ratio is not None:
            lines.append(f"{adds:<36} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of {before}")
        before = recipe
    return lines
