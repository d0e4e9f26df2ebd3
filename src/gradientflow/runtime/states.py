"""In a flow's state, what all ranks have alike and what each of them keeps for itself.

    {"version": 1, "step": 120, ..., "ranks": {"0 of 4": Kept({...})}}

`torch.distributed.checkpoint` writes what has one name once, whichever rank's it is, and reads the names that the
reader has already. So what a rank keeps has the rank in its name, and is one leaf, whatever is in it: a flow that has
just been attached asks for the same names as one that has run for days. `torch.save` writes a plain mapping in its
place, which `weights_only` loading takes.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gradientflow.errors import UsageError

RANKS = "ranks"
#: Of what a rank keeps, what its codec does.
COMPRESSION = "compression"
_NAME = re.compile(r"([0-9]{1,7}) of ([1-9][0-9]{0,6})")


class Kept:
    """Read like a mapping, and none: what traverses those stops here."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def keys(self) -> Iterable[str]:
        return self._values.keys()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept(copy.deepcopy(self._values, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self._values.items())


class Shares(NamedTuple):
    """What a rank goes on with."""

    #: Its own state; or, of another world, those that are this rank's to take over, all of them together once.
    states: list[dict[str, Any]]
    is_own: bool = True
    #: Ranks that saved.
    saved_by: int = 1
    #: Of what adds up over ranks; 0.0: others take it all.
    factor: float = 1.0

    def of(self, key: str) -> Shares:
        """The same for a part of each state."""
        if any(not isinstance(state.get(key), Mapping) for state in self.states):
            raise UsageError(f"the state lacks {key}: it is not what state_dict() gave")
        return self._replace(states=[state[key] for state in self.states])


def name_of(rank: int, world: int) -> str:
    return f"{rank} of {world}"


def kept_by(rank: int, world: int, values: Mapping[str, Any]) -> dict[str, dict[str, Kept]]:
    """To be put into a state."""
    return {RANKS: {name_of(rank, world): Kept(values)}}


def is_compressed(state: Mapping[str, Any]) -> bool:
    """Whether a codec has something to keep: what it has not sent yet would be lost without this state."""
    return any(COMPRESSION in kept.keys() for kept in state.get(RANKS, {}).values())


def taken_over(rank: int, world: int, saved_by: int) -> list[int]:
    """Of the ranks of another world, those whose part this one adds to its own; each of them is somebody's.

    >>> [taken_over(rank, 2, saved_by=4) for rank in range(2)], [taken_over(rank, 3, saved_by=2) for rank in range(3)]
    ([[0, 2], [1, 3]], [[0], [1], []])
    """
    return list(range(rank, saved_by, world)) if world != saved_by else [rank]


def shares(states: Sequence[Mapping[str, Any]], rank: int, world: int) -> Shares:
    """Of what some ranks saved: this one's own, or what it takes over. `UsageError` if something of that is missing."""
    found: dict[int, dict[str, Any]] = {}
    worlds = set()
    for state in states:
        ranks = state.get(RANKS)
        if not isinstance(ranks, Mapping):
            raise UsageError("the state lacks what ranks keep: it is not what state_dict() gave")
        for name, kept in ranks.items():
            matched = _NAME.fullmatch(name) if isinstance(name, str) else None
            if matched is None or not isinstance(kept, Mapping | Kept):
                raise UsageError(f"the state names {name!r:.40} as a rank: it is not what state_dict() gave")
            found[int(matched[1])] = {key: kept[key] for key in kept.keys()}
            worlds.add(int(matched[2]))
    if len(worlds) != 1:
        raise UsageError(f"the state is of worlds of {', '.join(map(str, sorted(worlds))) or 'no'} ranks, not of one")
    saved_by = worlds.pop()
    wanted = taken_over(rank, world, saved_by)
    needed = wanted or [0]  # what all of them have in common is in it too
    if any(each not in found for each in needed):
        raise UsageError(
            f"what rank {min(found)} of {saved_by} has not sent yet is not what rank {rank} of {world} has: "
            f"give load_state_dict() the state that this rank saved, or a list of those of all {saved_by} ranks"
        )
    return Shares([found[each] for each in needed], saved_by == world, saved_by, 1.0 if wanted else 0.0)
