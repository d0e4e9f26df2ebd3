"""Does it still make sense to wait? A pure judgement from what the ranks say about themselves.

Each rank keeps a beacon in the store (exchange/health.py). A rank that waits compares its own with the
others' and gives up as soon as the wait is proven vain: somebody is dead, stopped, silent, has left, has
skipped the step, or waits for something that cannot come before this wait ends. A rank that only takes
its time is never accused; the deadline of the wait is for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from gradientflow.documents import Record

#: A stopped process is given this long to go on; a beacon may be silent for so long; two ranks that wait
#: for different things must have done so for this long. All of it, and the second in which a beacon is
#: renewed, fits into ten seconds.
STOPPED_S = 4.0
SILENT_S = 6.0
CROSSED_S = 3.0
#: Where somebody else notices that a process died, a host may be cut off for a while, and come back.
CUT_OFF_S = 20.0


class Wait(Record):
    """Something that ends only when other ranks do it too: the `number`-th of its kind since attach."""

    kind: str
    number: int
    #: For people: which message, which lane.
    detail: str = ""
    waited_s: float = 0.0

    def __str__(self) -> str:
        return self.kind + (f" ({self.detail})" if self.detail else "")


class Collective(Record):
    """A call outside this flow that ends only when all `ranks` of the job make it."""

    name: str
    ranks: tuple[int, ...]
    waited_s: float = 0.0


class Beacon(Record):
    """What a rank says about itself, about once a second."""

    rank: int
    #: Goes up with each renewal.
    beat: int = 0
    #: Exchanges finished.
    step: int = 0
    place: str = "attach"
    #: The line of the user's script that is running, e.g. "train.py:31 in main".
    line: str = ""
    wait: Wait | None = None
    #: By kind of wait, how many this rank has entered.
    entered: dict[str, int] = Field(default_factory=dict)
    collective: Collective | None = None
    #: Steps this rank has taken since its last exchange without exchanging.
    num_skipped: int = 0
    #: The backward pass of the current step is over and did not finish its exchange.
    broken_off: bool = False
    #: How it ended: "" while it has not.
    ended: str = ""
    #: Ranks, as the whole job counts them, that made it end.
    culprits: tuple[int, ...] = ()


class Life(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"  # on another machine


@dataclass(frozen=True, slots=True)
class Peer:
    """A beacon and what we know beside it."""

    beacon: Beacon
    #: The rank in the whole job, which is what people call it.
    name: int
    silent_s: float = 0.0
    life: Life = Life.UNKNOWN
    stopped_s: float = 0.0

    def last_seen(self) -> str:
        beacon = self.beacon
        words = f"last seen in step {beacon.step}, {beacon.place}"
        if beacon.wait is not None:
            words = f"last seen waiting for {beacon.wait}"
        elif beacon.collective is not None:
            words += f", in {beacon.collective.name}"
        if beacon.line:
            words += f", at {beacon.line}"
        return words + (f", {self.silent_s:.0f} s ago" if self.silent_s >= 2 else "")


@dataclass(frozen=True, slots=True)
class Verdict:
    words: str
    #: As the whole job counts them.
    culprits: tuple[int, ...]


def judge(
    me: Peer,
    wait: Wait,
    peers: Mapping[int, Peer],
    store_silent_s: float,
    patience_s: float,
    silent_s: float = SILENT_S,
) -> Verdict | None:
    """Why `wait`, which `me` is in, is vain; None if it may still end. `peers` are all ranks but `me`. No
    threshold exceeds `patience_s`. silent_s: how long a beacon may be silent."""
    silent_s = min(silent_s, patience_s)
    reasons = {rank: unable(peer, patience_s, silent_s) or _elsewhere(me, wait, peer) for rank, peer in peers.items()}
    found = {rank: reason for rank, reason in reasons.items() if reason} or _crossed(me, wait, peers, patience_s)
    if found:
        names = {**{rank: peer.name for rank, peer in peers.items()}, me.beacon.rank: me.name}
        words = "; ".join(f"rank {names[rank]} {reason}" for rank, reason in found.items())
        return Verdict(words, tuple(names[rank] for rank in found))
    for peer in peers.values():
        if peer.beacon.ended and peer.beacon.culprits:
            return Verdict(f"{peer.beacon.ended} (as rank {peer.name} found)", peer.beacon.culprits)
    if store_silent_s >= min(silent_s + 1, patience_s):
        words = (
            f"the job's store has not answered for {store_silent_s:.0f} s: the process that holds it (rank 0, unless "
            "the launcher does) is dead, stopped or cut off"
        )
        return Verdict(words, tuple(peer.name for rank, peer in peers.items() if rank == 0))
    return None


def slow(wait: Wait, peers: Mapping[int, Peer]) -> Verdict:
    """Whom to name when the deadline has passed and everybody is alive."""
    late = {rank: peers[rank] for rank in _not_in(wait, peers)}
    words = "; ".join(f"rank {peer.name} is slow: {peer.last_seen()}" for peer in late.values())
    return Verdict(
        words or "every rank is there, the network is slow or cut", tuple(peer.name for peer in late.values())
    )


def unable(peer: Peer, patience_s: float, silent_s: float) -> str:
    """Why it cannot come, whatever is waited for; "" if it can, or has said itself why not."""
    if peer.beacon.ended:
        return ""  # it said so itself: see `_elsewhere`
    if peer.life is Life.GONE:
        return f"is dead, its process no longer exists; {peer.last_seen()}"
    if peer.life is Life.STOPPED and peer.stopped_s >= min(STOPPED_S, patience_s):
        return f"is stopped (by a signal or a debugger); {peer.last_seen()}"
    # A busy process may keep its beacon waiting (one long call into C that holds the interpreter), so of a
    # process that can be seen to run, silence says nothing.
    if peer.life is Life.UNKNOWN and peer.silent_s >= silent_s:
        return f"is silent (dead, stopped or cut off); {peer.last_seen()}"
    return ""


def _elsewhere(me: Peer, wait: Wait, peer: Peer) -> str:
    beacon = peer.beacon
    if beacon.entered.get(wait.kind, 0) >= wait.number and not beacon.broken_off and not beacon.ended:
        return ""
    if beacon.ended:
        # Who left after giving its share to this wait is not the one to blame.
        given = beacon.entered.get(wait.kind, 0) >= wait.number and beacon.step > me.beacon.step
        return "" if beacon.culprits or given else f"{beacon.ended}; {peer.last_seen()}"
    if beacon.broken_off:
        return f"broke its backward pass off, an exception ended it; {peer.last_seen()}"
    # Counts begin anew with each exchange: an older beacon's says nothing about this one.
    if beacon.step == me.beacon.step and beacon.num_skipped > me.beacon.num_skipped:
        return f"skipped this step, it called optimizer.step() without an exchange; {peer.last_seen()}"
    return ""


def _crossed(me: Peer, wait: Wait, peers: Mapping[int, Peer], patience_s: float) -> dict[int, str]:
    """Ranks that wait for each other in a circle: one is not in what I wait for, because it waits for
    something that I, or one who waits for me, am not in. To blame is the one without whom there is no circle."""
    crossed_s = min(CROSSED_S, patience_s)
    everyone = {**peers, me.beacon.rank: me}
    needs = {rank: _needs(peer, everyone, crossed_s) for rank, peer in everyone.items()}
    needs[me.beacon.rank] = _not_in(wait, peers) if wait.waited_s >= crossed_s else []
    if not _reaches_a_circle(me.beacon.rank, needs):
        return {}
    reasons = {rank: f"is in something else; {peer.last_seen()}" for rank, peer in peers.items()}
    others = ", ".join(f"rank {peers[rank].name} is {peers[rank].last_seen()}" for rank in needs[me.beacon.rank])
    reasons[me.beacon.rank] = f"is in something else than the others: {others}"
    odd = [rank for rank in everyone if not _has_a_circle({r: n for r, n in needs.items() if r != rank})]
    if len(odd) != 1:  # two ranks, each of which misses the other: the other one, from here
        odd = [rank for rank in odd or needs[me.beacon.rank] if rank != me.beacon.rank]
    return {rank: reasons[rank] for rank in odd}


def _needs(peer: Peer, everyone: Mapping[int, Peer], crossed_s: float) -> list[int]:
    """The ranks that `peer` has been waiting for; [] if it may be on its way."""
    beacon = peer.beacon
    if peer.silent_s >= CROSSED_S:
        return []
    if beacon.wait is not None:
        return _not_in(beacon.wait, everyone) if beacon.wait.waited_s >= crossed_s else []
    other = beacon.collective
    if other is None or other.waited_s < crossed_s:
        return []
    members = {rank: each.beacon.collective for rank, each in everyone.items() if each.name in other.ranks}
    return [rank for rank, theirs in members.items() if theirs is None or theirs.name != other.name]


def _has_a_circle(needs: Mapping[int, list[int]]) -> bool:
    return any(_reaches_a_circle(rank, needs) for rank in needs)


def _reaches_a_circle(start: int, needs: Mapping[int, list[int]]) -> bool:
    path: list[int] = []
    cleared: set[int] = set()

    def visit(rank: int) -> bool:
        if rank in path:
            return True
        if rank in cleared:
            return False
        path.append(rank)
        found = any(visit(other) for other in needs.get(rank, ()))
        path.pop()
        cleared.add(rank)
        return found

    return visit(start)


def _not_in(wait: Wait, peers: Mapping[int, Peer]) -> list[int]:
    return [rank for rank, peer in peers.items() if peer.beacon.entered.get(wait.kind, 0) < wait.number]
