"""What the environment may say, read once, when `attach` is called.

GRADIENTFLOW=off            attach a plain, DDP-equivalent exchange instead (to bisect a problem)
GRADIENTFLOW_RECIPE=...     the recipe; set by `gradientflow run --recipe`
GRADIENTFLOW_RUN=DIR        write the run directory there; set by `gradientflow run --out`
GRADIENTFLOW_CACHE=off      `auto` remembers nothing and recalls nothing; else in XDG_CACHE_HOME, or ~/.cache
GRADIENTFLOW_KEYS=DIR       of servers: keys that `gradientflow keys` made, for encryption and authentication
GRADIENTFLOW_PLAIN=1        of servers: no encryption on a network where everybody may read and change gradients
GRADIENTFLOW_ELASTIC=1      workers come and go; set by `gradientflow run --elastic`
WORLD_SIZE=N                of workers that come and go: so many begin together
GLOO_SOCKET_IFNAME=NAME     the interface towards the other ranks; without it, the one towards MASTER_ADDR
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradientflow.errors import UsageError
from gradientflow.exchange.reach import LOOPBACK, way_to_others
from gradientflow.exchange.server.servers import Wanted
from gradientflow.recipe import AUTO, DEFAULT, Recipe, as_recipe

SWITCH_ENV = "GRADIENTFLOW"
RECIPE_ENV = "GRADIENTFLOW_RECIPE"
RUN_ENV = "GRADIENTFLOW_RUN"
CACHE_ENV = "GRADIENTFLOW_CACHE"
KEYS_ENV = "GRADIENTFLOW_KEYS"
PLAIN_ENV = "GRADIENTFLOW_PLAIN"
ELASTIC_ENV = "GRADIENTFLOW_ELASTIC"


@dataclass(frozen=True)
class Settings:
    on: bool = True
    recipe: str = ""
    run_directory: Path | None = None
    #: Where what has won is remembered; None: nowhere.
    cache: Path | None = None
    #: At which the other ranks reach this one.
    address: str = LOOPBACK
    #: Where its store is; "" if nobody said.
    job: tuple[str, int] = ("", 0)
    keys: Path | None = None
    plain: bool = False
    #: Workers that begin together.
    world: int = 1
    #: They come and go, each by itself.
    elastic: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        switch = environment.get(SWITCH_ENV, "on")
        if switch not in ("on", "off"):
            raise UsageError(f"{SWITCH_ENV}={switch!r}: write on or off")
        remembers = environment.get(CACHE_ENV, "on")
        if remembers not in ("on", "off"):
            raise UsageError(f"{CACHE_ENV}={remembers!r}: write on or off")
        run_directory, keys = environment.get(RUN_ENV), environment.get(KEYS_ENV)
        return cls(
            on=switch == "on",
            recipe=environment.get(RECIPE_ENV, ""),
            run_directory=Path(run_directory) if run_directory else None,
            cache=_cache_of(environment) if remembers == "on" else None,
            address=way_to_others(environment).address or LOOPBACK,
            job=job_of(environment),
            keys=Path(keys) if keys else None,
            plain=_is_set(PLAIN_ENV, environment),
            world=_world_of(environment),
            elastic=_is_set(ELASTIC_ENV, environment),
        )

    def servers(self, num_spare: int) -> Wanted:
        """What a recipe with so many servers of their own asks for here."""
        if num_spare and not self.job[0]:
            raise UsageError(
                f"{num_spare} servers are to be found in the job's store, at MASTER_ADDR and MASTER_PORT, which are "
                "not set: start the job with torchrun or `gradientflow run`"
            )
        return Wanted(num_spare, self.job, self.keys, self.plain)

    def choose(self, recipe: Recipe | str | None) -> Recipe:
        """The recipe of the call or of the environment; both only if they say the same."""
        asked = as_recipe(recipe) if recipe is not None else None
        told = as_recipe(self.recipe) if self.recipe else None
        if asked is not None and told is not None and asked != told:
            raise UsageError(
                f"the script attaches recipe '{asked}' and {RECIPE_ENV} says '{told}': leave one of them out"
            )
        # What auto needs, races over many steps among the same workers, is not there where they come and go.
        return asked or told or as_recipe(DEFAULT if self.elastic else AUTO)


def _is_set(name: str, environment: Mapping[str, str]) -> bool:
    told = environment.get(name, "0")
    if told not in ("0", "1"):
        raise UsageError(f"{name}={told!r}: write 1 or 0")
    return told == "1"


def _cache_of(environment: Mapping[str, str]) -> Path | None:
    """The XDG base directory specification wants other paths than absolute ones ignored."""
    told, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    base = Path(told) if Path(told).is_absolute() else Path(home) / ".cache" if Path(home).is_absolute() else None
    return base / "gradientflow" / "auto" if base else None


def _world_of(environment: Mapping[str, str]) -> int:
    told = environment.get("WORLD_SIZE", "1")
    if not told.isdecimal() or int(told) < 1:
        raise UsageError(f"WORLD_SIZE={told!r}: expected a number of workers")
    return int(told)


def job_of(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where the workers' store is, as the launcher says; "" if it does not."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    return (address, int(port)) if address and port.isdecimal() else ("", 0)
