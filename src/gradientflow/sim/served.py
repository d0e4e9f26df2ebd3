"""Through servers: who has which piece, and which links it takes there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from gradientflow.cost.evaluate import in_forward_order
from gradientflow.errors import UsageError
from gradientflow.exchange.server.placement import cut, partition_nbytes, shares_of, spread
from gradientflow.exchange.server.window import CREDIT_NBYTES
from gradientflow.network import SERVED
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.schedule import FOR_A_GATE
from gradientflow.sim.carriers import BUS, Links, Piece, Stage
from gradientflow.sim.cluster import Cluster

#: More servers, if they are loaded evenly, are one with a port for all of them.
MOST_APART = 16
#: Beyond this, dealing out takes longer than anybody waits.
MOST_SERVERS = 2**16


@dataclass(frozen=True)
class _Place:
    """Those who push and those who serve. Workers of a host that sum up among themselves push once."""

    cluster: Cluster
    hosts: int
    pushing: int
    num_beside: int
    num_spare: int

    @property
    def shares(self) -> list[float]:
        """Of each server, as the runtime deals them out."""
        if self.pushing == 1:
            return [1.0]
        return shares_of(self.pushing, [1.0] * self.num_beside, [1.0] * self.num_spare)

    @property
    def pooled(self) -> bool:
        return self.num_beside + self.num_spare > MOST_APART and self.cluster.servers.placement == "even"


def pieces(
    profile: Profile, plan: Plan, parcels: Sequence[tuple[float, float]], recipe: Recipe, cluster: Cluster, world: int
) -> tuple[list[list[Piece]], int]:
    """Each message cut, and each piece with a server; and how many are under way in a stage. parcels: its bytes, and
    what a codec computes before."""
    hosts, settings = cluster.check_world(world), cluster.servers
    inside = settings.local_s_per_byte > 0 and min(world, cluster.workers_per_host) > 1
    pushing = hosts if settings.local_s_per_byte else world
    num_spare = recipe.num_servers or round(settings.spare_per_host * hosts)
    if hosts + num_spare > MOST_SERVERS:
        raise UsageError(f"{hosts + num_spare} servers are too many to be simulated: give at most {MOST_SERVERS}")
    place = _Place(cluster, hosts, pushing, 0 if num_spare >= pushing else hosts, num_spare)
    shares = place.shares
    apart = MOST_APART if place.pooled else len(shares)
    limit = settings.partition_nbytes or partition_nbytes(max(1, round(sum(size for size, _ in parcels))), apart)
    cuts = [[stop - start for start, stop in cut(round(size), 1, limit)] for size, _ in parcels]
    slots = _hashed(profile, plan, cuts, len(shares)) if settings.placement == "hash" else spread(cuts, shares)
    urgencies = _urgencies(profile, plan) if recipe.schedule.name in FOR_A_GATE else [0] * len(cuts)
    travels = _travels(place)
    local_links = {BUS: 1.0}

    def stages(nbytes: int, server: int) -> tuple[Stage, ...]:
        local = [Stage("local", 0.0, nbytes * settings.local_s_per_byte, local_links)] if inside else []
        return (*local, *(travels(nbytes, server) if pushing > 1 and nbytes else ()))

    drag_s_per_byte = 2 * cluster.overheads.interference_s_per_byte
    crowding, carrying = cluster.processors.crowding, cluster.carried_by(SERVED)
    startup_s = settings.startup_s
    if carrying.pattern == SERVED:
        # In it was, in the mean, what processors did for half of the pieces that were under way with this one.
        others_s = carrying.abreast / 2 * crowding * carrying.message_s
        startup_s += max(0.0, cluster.abreast_s(SERVED, world) - others_s)

    def cores_s(nbytes: int, server: int) -> float:
        """As it was measured; else a hop takes of processors what it takes in a ring, which has 2 (p - 1) on each of p
        workers."""
        if carrying.pattern == SERVED:
            return crowding * (carrying.message_s + carrying.byte_s * nbytes)
        hops = 2 * (pushing - (server < place.num_beside))
        in_ring = max(1, 2 * (world - 1))
        return crowding * hops * (carrying.message_s / world + carrying.byte_s * nbytes) / in_ring

    found = [
        [
            Piece(
                urgency,
                stages(nbytes, server),
                drag_s_per_byte * nbytes,
                startup_s + encode_s,
                cores_s(nbytes, server),
            )
            for nbytes, server in zip(parts, servers, strict=True)
        ]
        for urgency, parts, servers, (_, encode_s) in zip(urgencies, cuts, slots, parcels, strict=True)
    ]
    return found, settings.in_flight or max(1, CREDIT_NBYTES // limit)


def _urgencies(profile: Profile, plan: Plan) -> list[int]:
    """What forward needs first goes first."""
    first_use = {tensor.name: place for place, tensor in enumerate(in_forward_order(profile))}
    return [min(first_use[piece.tensor] for piece in message.slices) for message in plan.messages]


def _travels(place: _Place) -> Callable[[int, int], tuple[Stage, ...]]:
    wire, settings = place.cluster.between, place.cluster.servers
    if wire is None:
        return lambda nbytes, server: ()
    line = wire.line
    ways = cache(_pooled_ways if place.pooled else _ways)

    def travels(nbytes: int, server: int) -> tuple[Stage, ...]:
        seconds = nbytes * line.beta_s_per_byte
        # Stages of different names do not keep each other waiting.
        to = "" if settings.in_flight else f" {server}"
        named = zip((f"push{to}", f"pull{to}"), ways(place, server), strict=True)
        return tuple(Stage(name, settings.hop_s + line.alpha_s, seconds, links) for name, links in named)

    return travels


def _ways(place: _Place, server: int) -> tuple[Links, Links]:
    """Push and pull of one piece, for all workers at once: how many times its seconds it takes of each port. A host's
    port carries what its workers send and, if a server is beside them, what it gets from all others; its own stays
    inside."""
    each = place.pushing / place.hosts
    if server >= place.num_beside:  # on a host of its own
        push = {"up": each, f"server {server} down": float(place.pushing)}
        pull = {"down": each, f"server {server} up": float(place.pushing)}
    else:
        others = [host for host in range(place.hosts) if host != server]
        push = {f"{host} up": each for host in others} | {f"{server} down": len(others) * each}
        pull = {f"{host} down": each for host in others} | {f"{server} up": len(others) * each}
    return _with_hosts(place, push, pull, f"server {server} sums", place.pushing)


def _pooled_ways(place: _Place, server: int) -> tuple[Links, Links]:
    """The mean over all servers of its kind."""
    each = place.pushing / place.hosts
    if server >= place.num_beside:
        share = place.pushing / place.num_spare
        push, pull = {"up": each, "servers down": share}, {"down": each, "servers up": share}
        return _with_hosts(place, push, pull, "servers sum", share)
    mean = each * (place.hosts - 1) / place.hosts
    both = {"up": mean, "down": mean}
    return _with_hosts(place, both, both, "servers sum", place.pushing / place.hosts)


def _with_hosts(place: _Place, push: Links, pull: Links, sums: str, adders: float) -> tuple[Links, Links]:
    """What the hosts add to it: ports that are not duplex, the bus behind them, and adding up."""
    settings = place.cluster.servers
    assert place.cluster.between is not None
    rate = place.cluster.between.bytes_per_s
    bus = {BUS: settings.bus_s_per_byte * rate}
    adding = {sums: adders * settings.sum_s_per_byte * rate}
    push = half_duplex(push, settings.duplex) | bus | adding
    pull = half_duplex(pull, settings.duplex) | bus
    return _used(push), _used(pull)


def _used(links: Links) -> Links:
    return {link: share for link, share in links.items() if share}


def half_duplex(links: Links, duplex: float) -> dict[str, float]:
    """What a port sends keeps it from receiving, and the other way round, unless it is full duplex.

    >>> half_duplex({"0 up": 2.0}, 0.25)
    {'0 up': 2.0, '0 down': 1.5}
    """
    found = dict(links)
    for link, share in links.items():
        other = link.removesuffix("up") + "down" if link.endswith("up") else link.removesuffix("down") + "up"
        found[other] = found.get(other, 0.0) + (1 - duplex) * share
    return found


def _hashed(profile: Profile, plan: Plan, cuts: Sequence[Sequence[int]], num_servers: int) -> list[tuple[int, ...]]:
    """BytePS 0.2: a tensor's key is its place among the sorted names, a piece's the tensor's and its own; the server is
    the key's djb2 hash."""
    place = {name: index for index, name in enumerate(sorted(tensor.name for tensor in profile.tensors))}
    found: dict[int, tuple[int, ...]] = {}
    pieces_of: dict[str, int] = {}
    for number in sorted(range(len(cuts)), key=lambda number: plan.messages[number].slices[0].start):
        name = plan.messages[number].slices[0].tensor
        first = pieces_of.get(name, 0)
        pieces_of[name] = first + len(cuts[number])
        keys = range((place[name] << 16) + first, (place[name] << 16) + pieces_of[name])
        found[number] = tuple(_djb2(str(key)) % num_servers for key in keys)
    return [found[number] for number in range(len(cuts))]


def _djb2(text: str) -> int:
    value = 5381
    for letter in text.encode():
        value = (value * 33 + letter) % 2**64
    return value
