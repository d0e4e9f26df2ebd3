"""When does a plan no longer fit what training does?

A plan is made from a few steps at the start. Two things show that training has become another: gradients are
looked at before every step, or no longer, so that order is worth nothing, or something; and lanes stand before a
message that is not ready while others behind it are. Either has to last. Each rank judges for itself, its wish
travels with presence (runtime/pool.py), and all ranks plan anew together.
"""

from __future__ import annotations

#: Steps in a row that have to show the same.
STREAK = 4
#: Of a step: lanes that stand this long lose what another order could gain.
IDLE_SHARE = 0.1
#: Steps before the first wish is heard; twice as many before each one after it.
PATIENCE = 20


class Replanning:
    def __init__(self) -> None:
        self._whole = False  # what the plan was made for
        self._num_other = self._num_idle = 0
        self._not_before = 0
        self._patience = PATIENCE

    def saw(self, whole: bool) -> None:
        """A step was asked for; `whole`: after all gradients had been touched."""
        self._num_other = self._num_other + 1 if whole != self._whole else 0

    def stood(self, idle_s: float, step_s: float) -> None:
        """Of the last step, a lane stood idle for so long."""
        self._num_idle = self._num_idle + 1 if idle_s > IDLE_SHARE * step_s else 0

    def wanted(self, step: int, shut: bool) -> bool:
        """Whether to ask for another plan; `shut`: the gate it was made for is no longer there."""
        lasts = self._num_other >= STREAK or self._num_idle >= STREAK
        return step >= self._not_before and (shut or lasts)

    def agreed(self, step: int) -> bool:
        """A plan is being made. Returns whether steps are whole."""
        if self._num_other:
            self._whole = not self._whole
        self._num_other = self._num_idle = 0
        self._not_before = step + self._patience
        self._patience *= 2
        return self._whole
