"""The run directory: what one run leaves behind, and what every later command reads.

    run.json      what ran: recipe, world, versions, when
    recipe.toml   the recipe, ready to be given to the next run
    profile.json  the model's tensors as measured
    plan.json     what was sent in which order
    network.json  the workers and the backend between them; measurements, once links have been probed
    tuning.json   what messages were measured to cost, and what `auto` tried and chose
    trace-R.json  what happened on rank R (Perfetto); while it trains, the last of it, every few seconds

Rank 0 writes all but the traces. A file is replaced whole or not at all. A script that attaches a second
flow has its files in `flow-2/`. `gradientflow report` adds `run.html` and `trace.json`, all ranks in one;
`gradientflow demo` adds `comparison.json`, `results.json`, `report.html` and workers' logs.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from gradientflow.documents import Document
from gradientflow.errors import DocumentError
from gradientflow.network import Network
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.trace import Trace


class Run(Document):
    """`run.json`."""

    recipe: str
    world: int
    started: str
    gradientflow: str
    torch: str
    python: str = platform.python_version()
    machine: str = platform.platform()


class RunDirectory:
    """What one run leaves behind: recipe, profile, plan, network, and a trace of each rank.

    `gradientflow run` makes one, and every later command reads it. A property reads its file anew each time, and raises
    `DocumentError` if that is not there or holds something else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     RunDirectory(path).write_trace(Trace(rank=1, epoch_s=0.0, spans=()))
    ...     RunDirectory(path).traced_ranks()
    [1]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def create(self) -> RunDirectory:
        """Make the directory, if it is not there. Returns itself."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DocumentError(f"{self.path}: cannot make the run directory; {error.strerror}") from None
        return self

    def write_run(self, run: Run, recipe: Recipe, network: Network) -> None:
        """`run.json`, `recipe.toml` and `network.json`."""
        run.write(self.path / "run.json")
        recipe.write(self.path / "recipe.toml")
        network.write(self.path / "network.json")

    def write_plan(self, profile: Profile, plan: Plan) -> None:
        """`profile.json` and `plan.json`."""
        profile.write(self.path / "profile.json")
        plan.write(self.path / "plan.json")

    def write_trace(self, trace: Trace) -> None:
        """`trace-R.json` of its rank."""
        trace.write(self.path / f"trace-{trace.rank}.json")

    @property
    def run(self) -> Run:
        """What ran, from `run.json`."""
        return Run.read(self.path / "run.json")

    @property
    def recipe(self) -> Recipe:
        """The recipe, from `recipe.toml`."""
        return Recipe.read(self.path / "recipe.toml")

    @property
    def profile(self) -> Profile:
        """The model as it was seen, from `profile.json`."""
        return Profile.read(self.path / "profile.json")

    @property
    def plan(self) -> Plan:
        """What was sent, from `plan.json`."""
        return Plan.read(self.path / "plan.json")

    @property
    def network(self) -> Network:
        """Workers and what is between them, from `network.json`."""
        return Network.read(self.path / "network.json")

    def trace(self, rank: int) -> Trace:
        """What happened on a rank."""
        return Trace.read(self.path / f"trace-{rank}.json")

    def traced_ranks(self) -> list[int]:
        """Those that have left a trace."""
        stems = (path.stem.removeprefix("trace-") for path in self.path.glob("trace-*.json"))
        return sorted(int(stem) for stem in stems if stem.isdigit())


def now() -> str:
    """The time as `run.json` states it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
