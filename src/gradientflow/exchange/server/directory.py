"""Where servers are: entries in the job's store, one for each slot."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence

import torch.distributed as dist

from gradientflow.documents import parse_json
from gradientflow.exchange.server.keys import Invitation

#: Of servers that were started by themselves, in the store that the whole job shares.
CORNER = "gradientflow/servers"
#: A store that does not answer for so long is gone.
PATIENCE_S = 10.0


class StoreDirectory:
    """Slots by where their entries are."""

    def __init__(self, entries: Sequence[tuple[dist.Store, str]]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def look_up(self, slot: int) -> Invitation:
        store, key = self._entries[slot]
        return parse_json(Invitation, store.get(key).decode(), f"the entry of server {slot}")

    def take_over(self, slot: int, lost: Invitation, by: Invitation) -> None:
        store, key = self._entries[slot]
        store.compare_set(key, lost.model_dump_json(), by.model_dump_json())


def store_of_job(address: str, port: int, corner: str = CORNER) -> dist.Store:
    """The store that all workers of a job can find, and servers too."""
    timeout = datetime.timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(corner, store)


def claim(store: dist.Store, invitation: Invitation) -> int:
    """The next free slot. Who dies meanwhile leaves none behind that nobody has."""
    words = invitation.model_dump_json()
    return next(slot for slot in itertools.count() if store.compare_set(str(slot), "", words) == words.encode())


def register(store: dist.Store, slot: int, invitation: Invitation) -> None:
    store.set(str(slot), invitation.model_dump_json())
