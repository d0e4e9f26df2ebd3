"""Which neighbours travel together, when gradients have to be there at the end of backward.

`mg_wfbp` is the published greedy rule, `merge` the optimum. Both read what a message costs; neither cuts a tensor.
Both plan for one lane: with several, start-ups overlap, and what was worth merging may no longer be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product

import numpy as np
from numpy.typing import NDArray

from gradientflow.cost.evaluate import seconds_of_each
from gradientflow.cost.table import Cost
from gradientflow.plan import Message, Plan, Slice
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.schedule.fusion import fuse

#: Of the lattice that `merge` searches when a model has several pools: about 0.2 s.
MOST_STATES = 5_000


@dataclass(frozen=True, slots=True)
class _Pool:
    """The tensors that may share a message, and when each is ready, from the start of backward."""

    tensors: tuple[TensorProfile, ...]
    ready_s: tuple[float, ...]

    def message(self, start: int, stop: int) -> Message:
        """Tensors `start` to `stop`."""
        return Message(slices=tuple(Slice(tensor=t.name, start=0, stop=t.numel) for t in self.tensors[start:stop]))


def _pools(profile: Profile) -> list[_Pool]:
    members: dict[tuple[str, str], list[tuple[TensorProfile, float]]] = {}
    ready_s = accumulate(tensor.backward_s for tensor in profile.tensors)
    for tensor, seconds in zip(profile.tensors, ready_s, strict=True):
        members.setdefault(tensor.pool, []).append((tensor, seconds))
    return [_Pool(*zip(*pool, strict=True)) for pool in members.values()]


def _plan(schedule: str, profile: Profile, messages: Sequence[Message]) -> Plan:
    layout = tuple(tensor.name for tensor in profile.tensors)
    return Plan(schedule=schedule, layout=layout, messages=tuple(messages))


# - As published


def mg_wfbp(profile: Profile, cost: Cost) -> Plan:
    """MG-WFBP (Shi, Chu and Li, INFOCOM 2019 and TPDS 2021): merged-gradient wait-free back-propagation.

    The message that holds layer l takes in layer l - 1, the next that backward reaches, if l - 1 is ready before
    the message could start or less than one start-up later. The start-up `a` of the paper's line a + b * nbytes is
    what no bytes would take; of a table, what its smallest message takes.

    Deviations: tensors stand for layers, as in the authors' code. The paper knows one pool; here each is merged by
    itself, as if the others were not there, and messages go in the order in which they are ready. Not taken
    over from the authors' later copies: merging below 8192 elements come what may, and start-ups that were
    multiplied by hand.
    """
    ready: list[tuple[float, Message]] = []
    for pool in _pools(profile):
        ready += [(pool.ready_s[stop - 1], pool.message(start, stop)) for start, stop in _merged(pool, cost)]
    return _plan("mg-wfbp", profile, [message for _, message in sorted(ready, key=lambda entry: entry[0])])


def _merged(pool: _Pool, cost: Cost) -> Iterator[tuple[int, int]]:
    """Ranges of tensors.

    The paper recomputes all start times after each merge. Only that of the open message changes: its members
    count as sent in no time, so it starts when its last one is ready or the message before it has ended.
    """
    startup_s = cost.seconds(0)
    first, nbytes, free_s = 0, 0, 0.0
    for index, (tensor, ready_s) in enumerate(zip(pool.tensors, pool.ready_s, strict=True)):
        nbytes += tensor.nbytes
        start_s = max(free_s, ready_s)
        end_s = start_s + (cost.seconds(nbytes) if nbytes else 0.0)
        if index + 1 < len(pool.tensors):
            next_s = pool.ready_s[index + 1]
            hidden = next_s >= end_s
            if not hidden and next_s - start_s < startup_s:
                continue
        yield first, index + 1
        first, nbytes, free_s = index + 1, 0, end_s


# - The optimum


def merge(profile: Profile, cost: Cost) -> Plan:
    """The messages of whole neighbouring tensors with which communication ends first.

    With f[i] the earliest end of the first i tensors, the last message of which holds tensors j to i,

        f[i] = min over j < i of max(f[j], ready[i]) + cost(bytes from j to i).

    To end earlier is never worse for what follows, whatever the cost, so this is exact for tables too.

    Several pools share the link but no message. State is then how far each pool has got, f a table over all such
    states, and the last message one of any pool: exact again, and for one pool the same. Where there would be
    more than `MOST_STATES`, neighbours are fused first, evenly by bytes, until there are not; the result is then
    compared with `mg_wfbp`, and with fusing at a few thresholds, and the best is taken.
    """
    return merges(profile, cost, (math.inf,))[0]


def merges(profile: Profile, cost: Cost, margins: Sequence[float]) -> list[Plan]:
    """`merge`, and variants that end as early with fewer messages.

    In `merge` each message ends as early as it can, which is more than the end needs. With a margin, messages are
    joined wherever the end stays the same and would even if the joint message took `margin` times as long.
    """
    pools = _pools(profile)
    atoms = [_Atoms.single(pool) for pool in pools]
    most = math.inf if len(pools) < 2 else MOST_STATES ** (1 / len(pools)) - 1
    lattice = _Lattice([group.at_most(most) for group in atoms], cost)
    found = [_plan("merge", profile, lattice.messages(pools, margin)) for margin in margins]
    if all(len(group.stops) <= most for group in atoms):
        return found
    others = [mg_wfbp(profile, cost).messages]
    others += [fuse(profile, theta) for theta in (0, 2.0**16, 2.0**20, 2.0**24, math.inf)]
    ends_s = [_end_s(pools, messages, cost) for messages in others]
    known = _plan("merge", profile, others[ends_s.index(min(ends_s))])
    return [plan if _end_s(pools, plan.messages, cost) <= min(ends_s) else known for plan in found]


def _end_s(pools: Sequence[_Pool], messages: Sequence[Message], cost: Cost) -> float:
    """On one lane."""
    tensors = {
        t.name: (t.nbytes, ready_s) for pool in pools for t, ready_s in zip(pool.tensors, pool.ready_s, strict=True)
    }
    end_s = 0.0
    for message in messages:
        nbytes = sum(tensors[piece.tensor][0] for piece in message.slices)
        ready_s = max(tensors[piece.tensor][1] for piece in message.slices)
        end_s = max(end_s, ready_s) + (cost.seconds(nbytes) if nbytes else 0.0)
    return end_s


@dataclass(frozen=True, slots=True)
class _Atoms:
    """Runs of a pool's tensors that are not taken apart: where each stops, in tensors and bytes, and is ready."""

    stops: tuple[int, ...]
    edges: NDArray[np.float64]
    ready_s: tuple[float, ...]

    @classmethod
    def single(cls, pool: _Pool) -> _Atoms:
        edges = np.array([0, *accumulate(tensor.nbytes for tensor in pool.tensors)], dtype=np.float64)
        return cls(tuple(range(1, len(pool.tensors) + 1)), edges, pool.ready_s)

    def at_most(self, most: float) -> _Atoms:
        if len(self.stops) <= most:
            return self
        parts = np.minimum(self.edges[1:] * (int(most) / max(self.edges[-1], 1.0)), int(most) - 1).astype(int)
        kept = [index for index, part in enumerate(parts) if index + 1 == len(parts) or parts[index + 1] != part]
        return _Atoms(
            tuple(self.stops[index] for index in kept),
            self.edges[[0, *(index + 1 for index in kept)]],
            tuple(self.ready_s[index] for index in kept),
        )


class _Lattice:
    """How far each pool has got: all such states, and for each the earliest end and the message that led there."""

    def __init__(self, atoms: Sequence[_Atoms], cost: Cost) -> None:
        self._atoms, self._cost = atoms, cost
        # One pool asks once for each.
        self._costs_to = cache(self._costs) if len(atoms) > 1 else self._costs
        shape = tuple(len(group.stops) + 1 for group in atoms)
        self._end_s = np.zeros(shape)
        self._count = np.zeros(shape, dtype=int)
        self._last: dict[_State, tuple[int, int]] = {}
        self._final = tuple(size - 1 for size in shape)
        for state in product(*(range(size) for size in shape)):
            if any(state):
                # Equal ends: fewer messages.
                options = [self._shortest(state, pool) for pool, reached in enumerate(state) if reached]
                self._end_s[state], self._count[state], *last = min(options)
                self._last[state] = (last[0], last[1])

    def messages(self, pools: Sequence[_Pool], margin: float) -> list[Message]:
        found, state = [], self._final
        due_s = float(self._end_s[state])
        while any(state):
            pool, start = self._widest(state, due_s, margin) or self._last[state]
            stops = (0, *self._atoms[pool].stops)
            found.append(pools[pool].message(stops[start], stops[state[pool]]))
            due_s -= float(self._costs_to(pool, state[pool])[start])
            state = (*state[:pool], start, *state[pool + 1 :])
        return found[::-1]

    def _shortest(self, state: _State, pool: int) -> tuple[float, int, int, int]:
        """The last message, if it is of `pool`: when it ends, how many there are then, the pool, where it starts."""
        ends_s, counts = self._ends_s(state, pool, 1.0), self._count[_before(state, pool)]
        ties = np.flatnonzero(ends_s <= ends_s.min())
        start = int(ties[counts[ties].argmin()])
        return float(ends_s[start]), int(counts[start]) + 1, pool, start

    def _widest(self, state: _State, due_s: float, margin: float) -> tuple[int, int] | None:
        if margin == math.inf:
            return None
        for pool, reached in enumerate(state):
            if reached:
                in_time = np.flatnonzero(self._ends_s(state, pool, margin) <= due_s)
                if len(in_time):
                    return pool, int(in_time[0])
        return None

    def _ends_s(self, state: _State, pool: int, margin: float) -> NDArray[np.float64]:
        ready_s = self._atoms[pool].ready_s[state[pool] - 1]
        starts_s = np.maximum(self._end_s[_before(state, pool)], ready_s)
        return np.asarray(starts_s + margin * self._costs_to(pool, state[pool]))

    def _costs(self, pool: int, reached: int) -> NDArray[np.float64]:
        """Seconds of the messages that end at an atom, by where they start."""
        edges = self._atoms[pool].edges
        return seconds_of_each(self._cost, edges[reached] - edges[:reached])


_State = tuple[int, ...]


def _before(state: _State, pool: int) -> tuple[int | slice, ...]:
    """All states from which one message of `pool` leads here."""
    return (*state[:pool], slice(state[pool]), *state[pool + 1 :])
