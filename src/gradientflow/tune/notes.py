"""`tuning.json`: what a run has measured of its network and its ranks, and what `auto` has tried and chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gradientflow.cost.table import Priced, Seconds
from gradientflow.documents import Document, Record
from gradientflow.rundir import RunDirectory

FILE = "tuning.json"


class Tried(Record):
    """A recipe in a race."""

    recipe: str
    gated: bool = False
    predicted_s: Seconds
    #: Of an iteration, on the slowest rank.
    measured_s: Seconds

    def __str__(self) -> str:
        return f"{self.recipe} with the gate" if self.gated else self.recipe


class Race(Record):
    """From one step to another, who ran and who won."""

    first: int
    #: The first step after it.
    end: int
    why: Literal["start", "drift", "remembered"]
    tried: tuple[Tried, ...] = Field(min_length=1)
    chosen: int = Field(ge=0)
    #: Seconds lost: messages that were timed, and steps by others than the winner.
    lost_s: Seconds = 0.0
    #: The winner did not keep what it had promised: what ran before it runs again.
    undone: bool = False

    @property
    def winner(self) -> Tried:
        return self.tried[min(self.chosen, len(self.tried) - 1)]


class Notes(Document):
    recipe: str = ""
    world: int = 1
    num_lanes: int = 1
    #: Something looks at all gradients before each step.
    whole: bool = False
    #: Of each rank, seconds that it computes in an iteration, when plans were made.
    computes_s: tuple[float, ...] = ()
    price: Priced | None = None
    #: What `auto` is about now, for people; "" if it is not at work.
    doing: str = ""
    races: tuple[Race, ...] = ()
    #: Lost by tuning in all, and seconds of training by the end of the last race.
    lost_s: Seconds = 0.0
    elapsed_s: Seconds = 0.0

    @classmethod
    def of(cls, run: RunDirectory) -> Notes:
        """Those of a run; one that was not priced has none."""
        path = Path(run.path) / FILE
        return cls.read(path) if path.exists() else cls()
