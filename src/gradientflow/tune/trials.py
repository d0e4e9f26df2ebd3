"""A race between plans: which of them is run at which step, and which has won.

Candidates take turns in short blocks, several times over, so that what else the machines do meets all of them. Which
one a step is for follows from its number alone. After each round ranks compare what they measured; the slowest rank's
seconds count, since all wait for it. Who is clearly slower runs no more, so that a race costs little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

from gradientflow.documents import Record


class Turns(NamedTuple):
    """How long candidates run at a time."""

    #: Steps of a block, in the first round and after it, ...
    first_block: int
    block: int
    #: ... of which so many do not count: memory is laid out anew.
    skipped: int
    #: If nobody is out.
    rounds: int


#: Of plans that send the same.
PLANS = Turns(first_block=3, block=4, skipped=1, rounds=3)
#: Who takes so many times as long as the quickest in each step is out, after the first round and after others.
FIRST_DROP, DROP = 1.3, 1.1
#: Another plan than the first has to gain so much.
MARGIN = 0.02
#: After the race: seconds of so many steps, against those of the winner in it.
WINDOW = 12
#: Steps after the race within which its winner may be given up.
PROBATION = 2 * WINDOW
#: What lasts and differs by more than this factor is another network, or another model.
DRIFT = 1.3
#: Of all time, or of the first steps if they are not over yet: what trials may cost.
SHARE, WITHIN_STEPS = 0.02, 1000
#: Of what tuning may cost, for timing messages and for making plans; the rest is for the race.
PRICING, PLANNING = 0.4, 0.3
#: A plan that has not been tried may take so many times as long as the default.
RISK = 2.3
#: Of a candidate that had no steps; JSON knows no infinity.
NEVER_S = 1e9


def midmean(seconds: Sequence[float]) -> float:
    """The mean of the middle half: hiccups of a machine do not count, and steps that take turns do. With a gate a step
    may be short at the cost of the next one, and a median of such steps is one of the two.

    >>> midmean([0.1, 0.3, 0.1, 0.3, 0.1, 0.3, 9.0, 0.1])
    0.2
    >>> midmean([0.1, 0.2, 9.0])
    0.2
    """
    cut = (len(seconds) + 1) // 4
    return mean(sorted(seconds)[cut : len(seconds) - cut])


def longest(number: int, turns: Turns = PLANS) -> int:
    """Steps of a race between so many. If some are out early, the others have more turns."""
    return number * (turns.first_block + (turns.rounds - 1) * turns.block) if number > 1 else 0


def allowance_s(iteration_s: float, elapsed_s: float) -> float:
    """What trials may have cost by now. The beginning may borrow from the steps to come."""
    return SHARE * max(elapsed_s, WITHIN_STEPS * iteration_s)


class Budget(NamedTuple):
    """Seconds that tuning may cost from now on, as all ranks agree, and how they are shared out: messages are timed,
    plans are made, and with what is left they race."""

    may_s: float
    #: Of a step as it is now.
    step_s: float
    #: Since tuning began.
    elapsed_s: float

    @property
    def pricing_s(self) -> float:
        return PRICING * self.may_s

    @property
    def planning_s(self) -> float:
        return PLANNING * self.may_s

    def num_rivals(self, spent_s: float, most: int) -> int:
        """Of the default, of which a first round can be afforded, each in steps of more than twice its length.

        >>> [Budget(20.0, 1.0, 5.0).num_rivals(spent_s, most=3) for spent_s in (0.0, 9.0, 12.0, 30.0)]
        [3, 2, 2, 1]
        """
        a_rival_s = PLANS.first_block * (RISK - 1) * self.step_s
        return max(1, min(most, int((self.may_s - spent_s) / a_rival_s)))

    def affordable_in(self, cost_s: float, lost_s: float) -> int:
        """Steps after which pricing may cost as much, as steps are now.

        >>> [Budget(0.2, 0.01, elapsed_s).affordable_in(cost_s=0.4, lost_s=0.0) for elapsed_s in (0.0, 10.0, 90.0)]
        [5000, 4000, 0]
        """
        paid_s = (cost_s / PRICING + lost_s) / SHARE
        return math.ceil(max(0.0, paid_s - self.elapsed_s) / max(self.step_s, 1e-6))


class Seen(Record):
    """What one rank tells the others when a round is over."""

    #: Of each candidate, what its steps take (`midmean`).
    results_s: tuple[float, ...]
    #: The quickest of them: a machine that does something else meanwhile makes steps slow, never quick.
    least_s: tuple[float, ...]
    #: All steps of the race.
    spent_s: float
    elapsed_s: float


class Trials:
    """Of `number` candidates, from the step with number `first` on. before_s: what tuning has cost already."""

    def __init__(self, number: int, first: int, before_s: float = 0.0, turns: Turns = PLANS) -> None:
        self.number, self.first, self._before_s = number, first, before_s
        self._turns = turns
        self.running = list(range(number))
        self._round, self._round_first = 0, first
        self._seconds: list[list[float]] = [[] for _ in range(number)]
        self._switches: list[tuple[int, float]] = []  # to whom; the step that began with it
        self._num_spent = 0
        self._recent: list[float] = []
        self._num_after = 0  # steps since the race
        self.winner: int | None = 0 if number == 1 else None
        #: Of each candidate, as far as it ran, on the slowest rank.
        self.found_s: list[float] = []
        self.expected_s = 0.0
        self.lost_s = 0.0
        #: By what it may cost, before it was decided.
        self.was_cut = False

    @property
    def _block(self) -> int:
        return self._turns.first_block if self._round == 0 else self._turns.block

    @property
    def end(self) -> int:
        """The first step after this round."""
        return self._round_first + len(self.running) * self._block

    def candidate(self, step: int) -> int:
        """Whose turn it is.

        >>> [Trials(2, first=10).candidate(step) for step in (10, 12, 13, 15)]
        [0, 0, 1, 1]
        """
        if self.winner is not None:
            return self.winner
        place = min((step - self._round_first) // self._block, len(self.running) - 1)
        # Back and forth: what changes steadily meanwhile meets all alike.
        return self.running[place if self._round % 2 == 0 else -1 - place]

    def took(self, step: int, seconds: float) -> None:
        """From the end of the step before to the end of this one."""
        if self.winner is not None:
            self._recent = [*self._recent, seconds][-WINDOW:]
            self._num_after += 1
            if not self.expected_s and self.recent_s is not None:
                self.expected_s = self.recent_s  # there was no race to tell
        elif self._round_first <= step < self.end:
            self._num_spent += 1
            if (step - self._round_first) % self._block >= self._turns.skipped:
                self._seconds[self.candidate(step)].append(seconds)
            else:
                self._switches.append((self.candidate(step), seconds))

    def seen(self, elapsed_s: float) -> Seen:
        """As this rank saw it."""
        results = tuple(midmean(seconds) if seconds else NEVER_S for seconds in self._seconds)
        least = tuple(min(seconds, default=NEVER_S) for seconds in self._seconds)
        return Seen(results_s=results, least_s=least, spent_s=self._spent_s(results), elapsed_s=elapsed_s)

    def _spent_s(self, results_s: Sequence[float]) -> float:
        """A hiccup of the machine is no trial's fault."""
        steps_s = sum(len(seconds) * results_s[each] for each, seconds in enumerate(self._seconds) if seconds)
        more_s = [max(0.0, seconds - results_s[each]) for each, seconds in self._switches]
        switches_s = sum(results_s[each] for each, _ in self._switches) + len(more_s) * median(more_s or [0.0])
        return steps_s + switches_s

    def decide(self, everybodys: Sequence[Seen]) -> None:
        """A round is over. All ranks give the same, and find the same."""
        found = self.found_s = [max(results) for results in zip(*(one.results_s for one in everybodys), strict=True)]
        least = [max(results) for results in zip(*(one.least_s for one in everybodys), strict=True)]
        quickest = min(self.running, key=found.__getitem__)
        self.lost_s = max(0.0, max(one.spent_s for one in everybodys) - self._num_spent * found[quickest])
        drop = FIRST_DROP if self._round == 0 else DROP
        self._round_first, self._round = self.end, self._round + 1
        self.running = [each for each in self.running if least[each] <= drop * found[quickest]]
        may_s = allowance_s(found[quickest], max(one.elapsed_s for one in everybodys)) - self._before_s
        self.was_cut = len(self.running) > 1 and self.lost_s > may_s
        if self.end - self.first > longest(self.number, self._turns) or len(self.running) == 1 or self.was_cut:
            gains = found[quickest] < (1 - MARGIN) * found[0]
            self.settle(quickest if gains else 0)

    def settle(self, winner: int) -> None:
        self.winner, self.expected_s = winner, self.found_s[winner]
        self._recent, self._num_after = [], 0

    @property
    def recent_s(self) -> float | None:
        """What a step takes now; None: too few of them are over since the race."""
        return midmean(self._recent) if len(self._recent) == WINDOW else None

    @property
    def is_on_probation(self) -> bool:
        """Whether the winner may yet be found not to pay (`does_not_pay`)."""
        return bool(self.winner) and self._num_after <= PROBATION

    @property
    def does_not_pay(self) -> bool:
        """Whether the winner takes longer, now that it runs alone, than the first of the candidates took. Said soon
        after the race only: what comes later is drift, which would have met the other as well."""
        if not self.winner or self.recent_s is None or self._num_after > PROBATION:
            return False
        return self.recent_s > (1 + MARGIN) * self.found_s[0]

    @property
    def has_drifted(self) -> bool:
        """Whether steps have long taken another time than they did when this plan won."""
        if not self.expected_s or self.recent_s is None:
            return False
        return max(self.recent_s / self.expected_s, self.expected_s / max(self.recent_s, 1e-9)) > DRIFT
