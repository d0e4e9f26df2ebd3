"""Small facts that ranks tell each other through the store: text, slowly, and with names.

Unlike a collective, a look into the store shows *who* has not spoken, so a deadline can name the missing
ranks.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist

from gradientflow.errors import DeadlineError


class Control:
    """Collective calls over `store`; every rank makes the same ones in the same order."""

    def __init__(self, store: dist.Store, rank: int, world: int, deadline_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._deadline_s = deadline_s
        self._round = 0

    def gather(self, text: str, purpose: str) -> list[str]:
        """Everybody's `text`, by rank."""
        keys = self._say(text, range(self._world))
        return self._hear(keys, purpose)

    def from_rank_0(self, text: str, purpose: str) -> str:
        """Rank 0's `text`, on every rank."""
        return self._hear(self._say(text, [0]), purpose)[0]

    def missing_at(self, place: str) -> list[int]:
        """State that this rank is stuck at `place`; the ranks that have not said so some seconds later.

        Ranks run into their deadlines one after the other, as they began to wait one after the other.
        """
        patience_s = min(self._deadline_s, 10.0)
        keys = {rank: f"{place}/{rank}" for rank in range(self._world)}
        try:
            self._store.set(keys[self._rank], "here")
            self._store.wait(list(keys.values()), datetime.timedelta(seconds=patience_s))
            return []
        except RuntimeError:
            return self._silent(keys)

    def _say(self, text: str, speakers: range | list[int]) -> dict[int, str]:
        self._round += 1
        keys = {rank: f"{self._round}/{rank}" for rank in speakers}
        if self._rank in keys:
            self._store.set(keys[self._rank], text)
        return keys

    def _hear(self, keys: dict[int, str], purpose: str) -> list[str]:
        try:
            self._store.wait(list(keys.values()), datetime.timedelta(seconds=self._deadline_s))
        except RuntimeError as error:  # DistStoreError
            missing = ", ".join(map(str, self._silent(keys))) or "somebody"
            raise DeadlineError(
                f"rank {self._rank} waited {self._deadline_s:g} s to {purpose}; nothing came from rank "
                f"{missing}: did it get there, and does it run the same script?"
            ) from error
        return [str(self._store.get(key), "utf-8") for key in keys.values()]

    def _silent(self, keys: dict[int, str]) -> list[int]:
        try:
            return [rank for rank, key in keys.items() if not self._store.check([key])]
        except RuntimeError:
            return []  # the store itself is gone
