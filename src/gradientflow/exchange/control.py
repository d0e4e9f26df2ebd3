"""Small facts that ranks tell each other through the store: text, slowly, and with names.

Unlike a collective, a look into the store shows *who* has not spoken, so a deadline can name the missing
ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from gradientflow.errors import DeadlineError, PeerError, TrainingError
from gradientflow.exchange.health import LOOK_S, Health

#: In the store, beside hellos: who was the last to stop waiting for others, its hello and its words.
_GAVE_UP = "gave up"


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

    def meet(self, purpose: str) -> str:
        """A name that these processes have in common, and no others ever had: torchrun keeps a store through restarts,
        and with it what processes said that are gone.

        Each says hello with a word of its own, and then what it makes of all words that it found. When all make the
        same of them, each has found each: nobody who is gone can have made anything of a word that is new.

        Who gives up leaves its word and why: whoever comes later and finds it does not wait."""
        ranks = range(len(self.members))
        hellos, seen = [f"hello/{rank}" for rank in ranks], [f"seen/{rank}" for rank in ranks]
        hello, made = secrets.token_hex(16), ""
        self._store.set(hellos[self._rank], hello)

        def met() -> bool:
            nonlocal made
            if not self._store.check(hellos):
                return False
            words = [self._store.get(key).decode() for key in hellos]
            if (now := hashlib.sha256("".join(words).encode()).hexdigest()) != made:
                made = now
                self._store.set(seen[self._rank], made)
                self._raise_if_given_up(words, purpose)
            return self._store.check(seen) and all(self._store.get(key).decode() == made for key in seen)

        def missing() -> list[int]:
            if silent := [rank for rank in ranks if not self._store.check([hellos[rank]])]:
                return silent
            return [
                rank
                for rank in ranks
                if not self._store.check([seen[rank]]) or self._store.get(seen[rank]).decode() != made
            ]

        try:
            self._wait_until(met, missing, purpose)
        except DeadlineError as error:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._store.set(_GAVE_UP, json.dumps([self._rank, hello, str(error)]))
            raise
        return made

    def _raise_if_given_up(self, hellos: list[str], purpose: str) -> None:
        """Once: the next time they may meet again, and this rank be there first."""
        if self._store.check([_GAVE_UP]):
            rank, hello, why = json.loads(self._store.get(_GAVE_UP))
            told = f"told/{self._rank}"
            if hellos[rank] == hello and not (self._store.check([told]) and self._store.get(told).decode() == hello):
                self._store.set(told, hello)
                name = self.members[rank]
                words = f"rank {self.members[self._rank]} came to {purpose}, and rank {name} has given up: {why}"
                raise PeerError(words, (name,))

    def to_rank(self, rank: int, text: str, purpose: str) -> list[str]:
        """Everybody's `text` on that rank, which takes it out of the store; [] on the others, who do not wait."""
        keys = self._say(text, range(len(self.members)))
        if self._rank != rank:
            return []
        heard = self._hear(keys, purpose)
        for key in keys.values():
            self._store.delete_key(key)
        return heard

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
        names = list(keys.values())
        self._wait_until(
            lambda: bool(self._store.check(names)),
            lambda: [rank for rank, key in keys.items() if not self._store.check([key])],
            purpose,
        )
        return [str(self._store.get(key), "utf-8") for key in names]

    def _wait_until(self, done: Callable[[], bool], missing: Callable[[], list[int]], purpose: str) -> None:
        self._health.enter("agreement", self._round, purpose)
        try:
            self._poll(done, missing, purpose)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            words = str(error).partition("\n")[0]
            raise TrainingError(f"the job's store is gone: rank 0 or the launcher held it ({words})") from error
        finally:
            self._health.leave()

    def _poll(self, done: Callable[[], bool], missing: Callable[[], list[int]], purpose: str) -> None:
        """By asking again and again: a wait of the store that runs out writes warnings to the terminal."""
        pause_s = 0.001
        look_s, end_s = time.monotonic() + LOOK_S, time.monotonic() + self._deadline_s
        while not done():
            now_s = time.monotonic()
            if now_s > end_s:
                raise self._too_late(missing(), purpose)
            if now_s > look_s:
                try:
                    self._health.check(deadline=False)
                except PeerError:
                    if done():  # who has said what it had to say may go
                        return
                    raise
                look_s = now_s + LOOK_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _too_late(self, missing: list[int], purpose: str) -> DeadlineError:
        names = tuple(self.members[rank] for rank in missing)
        return DeadlineError(
            f"rank {self.members[self._rank]} waited {self._deadline_s:g} s to {purpose}; nothing came from rank "
            f"{', '.join(map(str, names)) or 'somebody'}: did it get there, and does it run the same script?",
            names,
        )
