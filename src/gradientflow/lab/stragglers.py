"""Who computes longer than others, and when: always, one after the other, or each at random moments of its own.

2:1.5           rank 2, always 1.5 times as long
turn:5:10       one rank at a time, five times as long, for ten iterations each
random:5:0.2    every rank by itself, five times as long in a fifth of its iterations
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Self

from pydantic import Field

from gradientflow.documents import Record
from gradientflow.errors import UsageError
from gradientflow.lab.replay import Jitter

LEAST, MOST = 0.01, 100.0
_WRITTEN = "RANK:FACTOR, turn:FACTOR:ITERATIONS or random:FACTOR:SHARE, such as 2:1.5, turn:5:10 or random:5:0.2"


class InTurn(Record):
    """One rank at a time, so many iterations each."""

    factor: float = Field(ge=1, le=MOST)
    iterations: int = Field(default=1, ge=1)


class AtRandom(Record):
    """Every rank by itself, in this share of its iterations."""

    factor: float = Field(ge=1, le=MOST)
    share: float = Field(gt=0, le=1)


class Straggling(Record):
    """All that is given holds together: factors multiply.

    >>> Straggling.parse(["2:1.5", "turn:5:10"], world=4).in_turn.iterations
    10
    """

    #: By rank: how many times longer its computing always takes.
    slowdown: dict[int, float] = {}  # noqa: RUF012 - pydantic copies it
    in_turn: InTurn | None = None
    at_random: AtRandom | None = None

    @classmethod
    def parse(cls, texts: Sequence[str], world: int) -> Self:
        """Raises `UsageError`, about an option --straggler."""
        slowdown: dict[int, float] = {}
        kinds: dict[str, InTurn | AtRandom] = {}
        for number, text in enumerate(texts):
            kind, *words = text.split(":")
            if any(other.split(":")[0] == kind for other in texts[:number]):
                raise UsageError(f"--straggler {text}: {kind} is given twice")
            try:
                numbers = [float(word) for word in words]
                if kind == "turn" and len(words) in (1, 2):
                    kinds["in_turn"] = InTurn(factor=numbers[0], iterations=int(words[1]) if words[1:] else 1)
                elif kind == "random" and len(words) == 2:
                    kinds["at_random"] = AtRandom(factor=numbers[0], share=numbers[1])
                elif len(words) == 1 and int(kind) in range(world) and LEAST <= numbers[0] <= MOST:
                    slowdown[int(kind)] = numbers[0]
                else:
                    raise ValueError
            except ValueError:  # of pydantic too
                raise UsageError(
                    f"--straggler {text}: write {_WRITTEN}; ranks are 0 to {world - 1}, factors up to {MOST:g}"
                ) from None
        return cls.model_validate({"slowdown": slowdown, **kinds})

    @property
    def changes(self) -> bool:
        """Whether it is not the same in every iteration."""
        return self.in_turn is not None or self.at_random is not None

    @property
    def most(self) -> float:
        """The largest factor that some iteration may have."""
        kinds = (self.in_turn.factor if self.in_turn else 1.0) * (self.at_random.factor if self.at_random else 1.0)
        return max([1.0, *self.slowdown.values()]) * kinds

    def factor(self, rank: int, world: int, iteration: int, dice: random.Random) -> float:
        """How many times longer a rank computes in an iteration. The dice are thrown if something is at random."""
        found = self.slowdown.get(rank, 1.0)
        if self.in_turn and iteration // self.in_turn.iterations % world == rank:
            found *= self.in_turn.factor
        if self.at_random and dice.random() < self.at_random.share:
            found *= self.at_random.factor
        return found

    @property
    def told(self) -> list[str]:
        """
        >>> Straggling.parse(["2:1.5", "random:5:0.2"], world=4).told
        ['rank 2 computes 1.5 times as long', 'each rank computes 5 times as long in 20 % of its iterations']
        """
        found = [f"rank {rank} computes {factor:g} times as long" for rank, factor in sorted(self.slowdown.items())]
        if self.in_turn:
            factor, number = self.in_turn.factor, self.in_turn.iterations
            found.append(f"ranks in turn compute {factor:g} times as long, {number} iterations each")
        if self.at_random:
            share = f"{100 * self.at_random.share:g} %"
            found.append(f"each rank computes {self.at_random.factor:g} times as long in {share} of its iterations")
        return found


class Hindered(Jitter):
    """The factors of one rank's iterations: jitter, and what makes it straggle."""

    def __init__(self, straggling: Straggling, jitter: float, rank: int, world: int) -> None:
        self._straggling, self._rank, self._world = straggling, rank, world
        super().__init__(jitter, seed=rank)

    def restart(self, number: int) -> None:
        """Turns begin with another rank at each number: where few iterations belong to one, all have their turn."""
        super().restart(number)
        self._dice = random.Random(f"stragglers {self._rank} {number}")
        length = self._straggling.in_turn.iterations if self._straggling.in_turn else 0
        self._iteration = number * length

    def draw(self) -> float:
        factor = self._straggling.factor(self._rank, self._world, self._iteration, self._dice)
        self._iteration += 1
        return super().draw() * factor
