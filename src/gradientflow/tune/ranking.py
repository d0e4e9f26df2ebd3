"""Every recipe that could run on a cluster, simulated, the quickest first.

    rank(workload("resnet-50", device="2080ti"), read("survey-10gbe"), 32).best.recipe

Exchanges x schedules x lanes x codecs, each as far as `Recipe.check` lets them go together and the simulator can tell
them apart: `-ring` and `-best` are priced as the group's own all-reduce, so they are not tried beside it. Plans are
made on what messages cost, whatever a cluster's own planners believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradientflow.documents import Document, Record
from gradientflow.errors import RecipeError, UsageError
from gradientflow.network import Network
from gradientflow.patterns import ALL_REDUCES
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.schedule import DECOUPLED, FOR_A_GATE
from gradientflow.schedule.fusion import BUCKET_NBYTES, FIRST_BUCKET_NBYTES, buckets
from gradientflow.sim.cluster import Cluster
from gradientflow.sim.costs import pattern_cost
from gradientflow.sim.predict import Prediction, message_cost, plan_for, predict, predict_plan

#: `lazy` comes first: it shows whether an exchange can be quick enough.
SCHEDULES = (
    *("lazy", "bsp", "wfbp", "lazy:1MB", "lazy:4MB", "lazy:16MB", "lazy:64MB", "mg-wfbp", "merge", "flow"),
    *("dear", "bytescheduler", "bytescheduler:1MB"),
)
#: Servers cut messages by themselves: sizes make no difference.
SERVED = ("lazy", "wfbp", "bytescheduler", "flow")
LANES = (1, 2)
#: Where a codec has a guard, with it.
CODECS = ("bf16", "fp16", "int8", "csc:10%+fp16", "topk:1%:guard=2%", "powersgd:4:guard=2%")
#: Those that leave the gate open: they can neither overflow nor remember.
WITH_A_GATE = frozenset({"bf16"})
PATTERNS = (*(name for name in ALL_REDUCES if name != "ring"), "levels")
#: MPI is there for those who ask for it.
EXCHANGES = ("a2a", *PATTERNS, "ps")
#: What runs on GPUs, in this version.
ON_GPUS = frozenset({"a2a"})
#: What predictions cannot tell apart: within this, what needs least is best.
MARGIN = 0.01


class Offer(Record):
    """A recipe, what it should take, and what it needs beside a process group."""

    recipe: str
    prediction: Prediction
    needs: tuple[str, ...] = ()


class Ranking(Document):
    """The quickest first."""

    workers: int
    cluster: str
    offers: tuple[Offer, ...]
    #: Stock DDP with the buckets it has if nothing is said.
    ddp_s: float
    #: Exchanges that were not simulated, and why.
    left_out: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it

    @property
    def best(self) -> Offer:
        """What needs least of those that are as good as the quickest."""
        limit_s = (1 + MARGIN) * self.offers[0].prediction.iteration_s
        good = [offer for offer in self.offers if offer.prediction.iteration_s <= limit_s]
        return min(good, key=lambda offer: len(offer.needs))


def rank(
    profile: Profile,
    cluster: Cluster,
    world: int,
    *,
    lossy: bool = False,
    exchanges: tuple[str, ...] = (),
    spare: int | None = None,
    whole: bool = False,
) -> Ranking:
    """lossy: codecs too. exchanges: only by these; (): by all that run there. spare: hosts that servers may have for
    themselves; None: as many as the cluster says. whole: something looks at all gradients before each step, such as
    clipping."""
    if world < 2:
        raise UsageError(f"{world} worker has nobody to exchange gradients with: give 2 or more")
    if not profile.tensors:
        raise UsageError("the workload has no tensors: there is nothing to exchange")
    here = on_its_merits(cluster)
    search = _Search(profile, here, world, lossy, whole)
    hosts = here.check_world(world)
    num_spare = round(cluster.servers.spare_per_host * hosts) if spare is None else spare
    if hosts == 1 and here.servers.local_s_per_byte:
        num_spare = 0  # one host's workers add up by themselves
    for exchange in exchanges or EXCHANGES:
        if not exchanges and search.on_gpus and exchange not in ON_GPUS:
            search.left_out[exchange] = "on CPUs only"
        else:
            search.through(exchange, num_spare)
    if not search.offers:
        why = "; ".join(f"{exchange}: {why}" for exchange, why in search.left_out.items())
        raise UsageError(f"nothing can be simulated there: {why}")
    stock = buckets(profile, BUCKET_NBYTES, FIRST_BUCKET_NBYTES).on_lanes(here.collective.lanes)
    return Ranking(
        workers=world,
        cluster=cluster.name,
        offers=tuple(sorted(search.offers, key=lambda offer: offer.prediction.iteration_s)),
        ddp_s=predict_plan(profile, stock, here, world).iteration_s,
        left_out=search.left_out,
    )


def pinned(text: str, profile: Profile, cluster: Cluster, world: int, *, whole: bool = False) -> Recipe:
    """A recipe with the plan that `rank` simulates."""
    recipe = Recipe.parse(text)
    plan = plan_for(profile, recipe, on_its_merits(cluster), world, whole=whole)
    return recipe.model_copy(update={"pinned": plan}).check()


def on_its_merits(cluster: Cluster) -> Cluster:
    """Planners know what messages cost, recipes say how many servers there are, and servers are our own unless the
    cluster knows better."""
    in_flight = cluster.servers.in_flight if "in_flight" in cluster.servers.model_fields_set else 0
    servers = cluster.servers.model_copy(update={"spare_per_host": 0.0, "in_flight": in_flight})
    return cluster.model_copy(update={"believed": (), "servers": servers})


def cluster_of(network: Network, name: str) -> Cluster:
    """A probe, as `Cluster.of_network`; and what goes from one rank to another takes as long as was measured to begin.
    Without that, servers and patterns would begin at once, and all-reduces alone, which were measured, would not."""
    cluster, probed = Cluster.of_network(network, name), network.of("p2p")
    if cluster.between is None or not probed:
        return cluster
    wire = cluster.between.model_copy(update={"latency_s": sorted(one.alpha_s for one in probed)[len(probed) // 2]})
    return cluster.model_copy(update={"between": wire})


@dataclass
class _Search:
    profile: Profile
    cluster: Cluster
    world: int
    lossy: bool
    whole: bool

    def __post_init__(self) -> None:
        self.offers: list[Offer] = []
        self.left_out: dict[str, str] = {}
        # Clusters' devices are those whose speeds are published: GPUs.
        self.on_gpus = bool(self.cluster.device) or any(one.device != "cpu" for one in self.profile.tensors)

    def through(self, exchange: str, num_spare: int) -> None:
        if exchange == "ps":
            self._servers(num_spare)
        elif exchange in PATTERNS and (why_not := self._why_not(exchange)):
            self.left_out[exchange] = why_not
        else:
            for lanes in LANES:
                self._schedules(f"{exchange}:{lanes}", SCHEDULES)

    def _servers(self, num_spare: int) -> None:
        if self.cluster.between is None:
            self.left_out["ps"] = "nothing is known of links between hosts"
            return
        for number in _halvings(min(num_spare, self.world)):
            self._schedules(f"ps:{number}" if number else "ps", SERVED, least_s=self._ports_s(number))

    def _schedules(self, exchange: str, schedules: tuple[str, ...], least_s: float = 0.0) -> None:
        """least_s: nothing exact by this exchange takes less."""
        for number, schedule in enumerate(schedules):
            if not number or least_s <= self._quickest_s:
                self._simulate(f"{schedule}-{exchange}")
        for codec in CODECS if self.lossy else ():
            for schedule in schedules:
                # Otherwise the runtime would close the gate, and without one it is no better than the others.
                if codec in WITH_A_GATE or schedule.partition(":")[0] not in FOR_A_GATE:
                    self._simulate(f"{schedule}-{exchange}+{codec}")

    def _simulate(self, text: str) -> None:
        try:
            recipe = Recipe.parse(text).check()
        except RecipeError:
            return  # parts that do not fit together
        if self.on_gpus and recipe.schedule.name in DECOUPLED:
            return
        found = predict(self.profile, recipe, self.cluster, self.world, whole=self.whole)
        needs = tuple(_needs(recipe, self.cluster, self.on_gpus))
        self.offers.append(Offer(recipe=str(recipe), prediction=found, needs=needs))

    @property
    def _quickest_s(self) -> float:
        return min((offer.prediction.iteration_s for offer in self.offers), default=float("inf"))

    def _why_not(self, pattern: str) -> str:
        """What keeps a pattern from being of any use here; "" if nothing does."""
        if pattern == "levels" and min(self.world, self.cluster.workers_per_host) == 1:
            return "hosts have one worker each"
        try:
            cost = pattern_cost(self.cluster, pattern, self.world)
        except UsageError as error:
            return str(error)
        theirs = message_cost(self.cluster, Recipe.parse("lazy"), self.world)
        sizes = [2.0**power for power in range(10, 1 + max(10, self.profile.nbytes.bit_length()))]
        if all(cost.seconds(nbytes) >= theirs.seconds(nbytes) for nbytes in sizes):
            return "at every size slower than the group's own all-reduce"
        return ""

    def _ports_s(self, num_spare: int) -> float:
        """Of the busiest port with one worker a host (BytePS): 2 n (n - 1) / (n^2 + k n - 2 k) of the model."""
        wire, n, k = self.cluster.between, self.world, num_spare
        if wire is None or self.cluster.workers_per_host > 1:
            return 0.0
        share = 1.0 if k >= n else 2 * n * (n - 1) / (n**2 + k * n - 2 * k)
        return share * self.profile.nbytes / wire.bytes_per_s


def _halvings(most: int) -> Iterator[int]:
    """
    >>> list(_halvings(12))
    [12, 6, 3, 1, 0]
    """
    while most:
        yield most
        most //= 2
    yield 0


def _needs(recipe: Recipe, cluster: Cluster, on_gpus: bool) -> Iterator[str]:
    if on_gpus and recipe.exchange.name not in ON_GPUS:
        yield "gradients on CPUs"
    if recipe.wants_gate and (cluster.servers.gate or not recipe.served):
        yield "the gate"
    if recipe.num_servers:
        yield f"{recipe.num_servers} more host{'s' * (recipe.num_servers > 1)}, for servers"
    elif recipe.served:
        yield "servers beside workers"
    elif recipe.over_mpi:
        yield "mpirun"
    elif recipe.exchange.name in PATTERNS:
        yield "connections of its own"
    if recipe.codecs:
        yield "less than exact gradients"
