"""What the environment may say, read once, when `attach` is called.

GRADIENTFLOW=off            attach a plain, DDP-equivalent exchange instead (to bisect a problem)
GRADIENTFLOW_RECIPE=...     the recipe; set by `gradientflow run --recipe`
GRADIENTFLOW_RUN=DIR        write the run directory there; set by `gradientflow run --out`
GLOO_SOCKET_IFNAME=NAME     the interface towards the other ranks; without it, the one towards MASTER_ADDR
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradientflow.errors import UsageError
from gradientflow.exchange.reach import LOOPBACK, way_to_others
from gradientflow.recipe import DEFAULT, Recipe, as_recipe

SWITCH_ENV = "GRADIENTFLOW"
RECIPE_ENV = "GRADIENTFLOW_RECIPE"
RUN_ENV = "GRADIENTFLOW_RUN"


@dataclass(frozen=True)
class Settings:
    on: bool = True
    recipe: str = ""
    run_directory: Path | None = None
    #: At which the other ranks reach this one.
    address: str = LOOPBACK

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        switch = environment.get(SWITCH_ENV, "on")
        if switch not in ("on", "off"):
            raise UsageError(f"{SWITCH_ENV}={switch!r}: write on or off")
        run_directory = environment.get(RUN_ENV)
        return cls(
            on=switch == "on",
            recipe=environment.get(RECIPE_ENV, ""),
            run_directory=Path(run_directory) if run_directory else None,
            address=way_to_others(environment).address or LOOPBACK,
        )

    def choose(self, recipe: Recipe | str | None) -> Recipe:
        """The recipe of the call or of the environment; both only if they say the same."""
        asked = as_recipe(recipe) if recipe is not None else None
        told = as_recipe(self.recipe) if self.recipe else None
        if asked is not None and told is not None and asked != told:
            raise UsageError(
                f"the script attaches recipe '{asked}' and {RECIPE_ENV} says '{told}': leave one of them out"
            )
        return asked or told or as_recipe(DEFAULT)
