"""Who is cut off from the store has not seen others fall silent."""

from __future__ import annotations

import time
from typing import Self

import pytest

from gradientflow.errors import PeerError
from gradientflow.exchange import health
from gradientflow.exchange.health import Health, Process
from gradientflow.exchange.verdict import Beacon

SILENT_S = 0.6


class CuttableStore:
    def __init__(self) -> None:
        self.is_cut = False
        self._texts: dict[str, str] = {}

    def clone(self) -> Self:
        return self

    def set(self, key: str, text: str) -> None:
        self._answer()
        self._texts[key] = text

    def get(self, key: str) -> bytes:
        self._answer()
        return self._texts[key].encode()

    def _answer(self) -> None:
        if self.is_cut:
            raise ConnectionError("no answer")


def check_for(seconds: float, watched: Health, store: CuttableStore, *, peer_lives: bool) -> None:
    """Ask as a waiting thread does; meanwhile the other rank's beacon beats, or not."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if peer_lives:
            store._texts["1"] = Beacon(rank=1, beat=time.monotonic_ns()).model_dump_json()
        watched.check()
        time.sleep(0.02)


def test_silence_is_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "BEAT_S", 0.05)
    store = CuttableStore()
    elsewhere = Process(host="another machine", pid=1, started="1")
    watched = Health(store, 0, (0, 1), 60.0, (), silent_s=SILENT_S)  # type: ignore[arg-type]
    store._texts["1"] = Beacon(rank=1).model_dump_json()
    watched.announce()
    watched.start((Process.this(), elsewhere))
    try:
        time.sleep(2 * SILENT_S)  # it trains, waits for nobody, and reads nobody's beacon
        store.is_cut = True
        watched.enter("exchange", 1)
        check_for(SILENT_S, watched, store, peer_lives=True)
        store.is_cut = False
        check_for(2 * SILENT_S, watched, store, peer_lives=True)
        with pytest.raises(PeerError, match="rank 1 is silent"):
            check_for(10 * SILENT_S, watched, store, peer_lives=False)
        watched.leave()
    finally:
        watched.end()
