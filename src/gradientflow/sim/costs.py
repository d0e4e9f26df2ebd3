"""What patterns cost on a cluster's wiring."""

from __future__ import annotations

import math

from gradientflow.cost.price import price
from gradientflow.cost.table import Cost, Line
from gradientflow.cost.topology import BCube, Hosts, Switch, cabled, fat_tree, torus_of
from gradientflow.cost.topology import Topology as Wiring
from gradientflow.errors import UsageError
from gradientflow.patterns import ALL_REDUCES
from gradientflow.sim.cluster import Cluster

#: Beyond this a pattern's transfers are too many to list.
MOST_WORKERS = 256


def pattern_cost(cluster: Cluster, name: str, world: int) -> Cost:
    """A message by one of our own patterns: its price for two sizes, and the line between them."""
    if name == "levels":
        return levels_cost(cluster, world)
    if world > MOST_WORKERS:
        raise UsageError(f"{name} among {world} workers is too large to be priced: give at most {MOST_WORKERS}")
    found = ALL_REDUCES[name](world)
    at = wiring(cluster, world)
    small, large = 2.0**20, 2.0**26
    seconds = price(found, small, at), price(found, large, at)
    beta = (seconds[1] - seconds[0]) / (large - small)
    alpha = max(0.0, seconds[0] - beta * small) + cluster.collective.launch_s
    return Line(alpha_s=alpha + found.num_rounds * cluster.collective.added_s.between_s, beta_s_per_byte=beta)


def levels_cost(cluster: Cluster, world: int) -> Line:
    """Scattered inside hosts, summed across them piece by piece, gathered inside: with g workers on each of n hosts

        2 (g - 1) alpha_i + 2 (g - 1) / g S beta_i + 2 (n - 1) alpha_e + 2 (n - 1) / n S beta_e,

    since all pieces of a host go through its one card.
    """
    hosts = cluster.check_world(world)
    each, added = world // hosts, cluster.collective.added_s
    alpha_s = cluster.collective.launch_s + 2 * (each - 1) * added.inside_s + 2 * (hosts - 1) * added.between_s
    beta = 0.0
    if each > 1 and cluster.inside is not None:
        alpha_s += 2 * (each - 1) * cluster.inside.latency
        beta += 2 * (each - 1) / each / cluster.inside.bytes_per_s
    if hosts > 1 and cluster.between is not None:
        alpha_s += 2 * (hosts - 1) * cluster.between.latency
        beta += 2 * (hosts - 1) / hosts / cluster.between.bytes_per_s
    return Line(alpha_s=alpha_s, beta_s_per_byte=beta)


def _hosts(cluster: Cluster, world: int) -> list[list[int]]:
    each = min(world, cluster.workers_per_host)
    return [list(range(first, first + each)) for first in range(0, world, each)]


def wiring(cluster: Cluster, world: int) -> Wiring:
    """Between workers: `topology` says how hosts are wired; workers of one host share its card."""
    hosts = cluster.check_world(world)
    if hosts == 1 or cluster.between is None:
        wire = cluster.inside or cluster.between
        if wire is None:
            raise UsageError(f"nothing is known of links between hosts of cluster {cluster.name}: add [between]")
        return Switch(world=world, alpha_s=wire.latency, beta_s_per_byte=1 / wire.bytes_per_s)
    line, kind, settings = cluster.between.line, cluster.topology.kind, cluster.topology
    if cluster.workers_per_host > 1:
        if kind != "switch":
            raise UsageError(f"cluster {cluster.name}: a {kind} of hosts with several workers each cannot be priced")
        assert cluster.inside is not None
        return Hosts(hosts=_hosts(cluster, world), inside=cluster.inside.line, between=line)
    match kind:
        case "fat-tree" | "tree":
            return fat_tree(world, settings.hosts_per_switch or world, settings.oversubscription, line)
        case "torus":
            _whole(cluster, world, math.prod(settings.sides))
            return torus_of(settings.sides, line)
        case "bcube":
            n, levels = (*settings.sides, 1)[:2]
            _whole(cluster, world, n**levels)
            return BCube(n=n, levels=levels, alpha_s=line.alpha_s, beta_s_per_byte=line.beta_s_per_byte)
        case "graph":
            try:
                found = cabled(settings.cables, line)
            except UsageError as error:
                raise UsageError(f"cluster {cluster.name}: {error}") from None
            _whole(cluster, world, found.world)
            return found
        case _:
            return Switch(world=world, alpha_s=line.alpha_s, beta_s_per_byte=line.beta_s_per_byte)


def _whole(cluster: Cluster, world: int, places: int) -> None:
    if world != places:
        raise UsageError(f"cluster {cluster.name} is a {cluster.topology.kind} of {places} hosts: give as many workers")
