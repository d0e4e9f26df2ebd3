"""Small facts that ranks tell each other through the store: text, slowly, and with names.

Unlike a collective, a look into the store shows *who* has not spoken, so a deadline can name the missing
ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from gradientflow.errors import DeadlineError, TrainingError
from gradientflow.exchange.health import LOOK_S, Health


class Control:
    """Collective calls over `store`; every rank makes the same ones in the same order.

    members: the ranks of the group in the whole job, by their rank in the group."""

    def __init__(
        self, store: dist.Store, rank: int, members: tuple[int, ...], deadline_s: float, health: Health
    ) -> None:
        self._store = store
        self._rank = rank
        self.members = members
        self._deadline_s = deadline_s
        self._health = health
        self._round = 0

    def gather(self, text: str, purpose: str) -> list[str]:
        """Everybody's `text`, by rank."""
        keys = self._say(text, range(len(self.members)))
        return self._hear(keys, purpose)

    def from_rank(self, rank: int, text: str, purpose: str) -> str:
        """That rank's `text`, on every rank."""
        return self._hear(self._say(text, [rank]), purpose)[0]

    @contextlib.contextmanager
    def waiting_to(self, purpose: str) -> Iterator[Callable[[], None]]:
        """For a wait outside the store, between two calls here. What it gives raises if the wait is vain, and is to be
        called now and then."""
        self._health.enter("agreement", self._round, purpose)
        try:
            yield lambda: self._health.check(deadline=False)
        finally:
            self._health.leave()

    def _say(self, text: str, speakers: range | list[int]) -> dict[int, str]:
        self._round += 1
        keys = {rank: f"{self._round}/{rank}" for rank in speakers}
        if self._rank in keys:
            self._store.set(keys[self._rank], text)
        return keys

    def _hear(self, keys: dict[int, str], purpose: str) -> list[str]:
        self._health.enter("agreement", self._round, purpose)
        try:
            self._wait_for(keys, purpose)
            return [str(self._store.get(key), "utf-8") for key in keys.values()]
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise TrainingError(f"the job's store is gone: rank 0 or the launcher held it ({error})") from error
        finally:
            self._health.leave()

    def _wait_for(self, keys: dict[int, str], purpose: str) -> None:
        """By asking again and again: a wait of the store that runs out writes warnings to the terminal."""
        names, pause_s = list(keys.values()), 0.001
        look_s, end_s = time.monotonic() + LOOK_S, time.monotonic() + self._deadline_s
        while not self._store.check(names):
            now_s = time.monotonic()
            if now_s > end_s:
                raise self._too_late(keys, purpose)
            if now_s > look_s:
                self._health.check(deadline=False)
                look_s = now_s + LOOK_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _too_late(self, keys: dict[int, str], purpose: str) -> DeadlineError:
        missing = [self.members[rank] for rank, key in keys.items() if not self._store.check([key])]
        return DeadlineError(
            f"rank {self.members[self._rank]} waited {self._deadline_s:g} s to {purpose}; nothing came from rank "
            f"{', '.join(map(str, missing)) or 'somebody'}: did it get there, and does it run the same script?",
            tuple(missing),
        )
