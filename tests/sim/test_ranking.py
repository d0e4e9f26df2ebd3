"""Ranking recipes before anything runs: servers or all-reduce, what is searched, what is best, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gradientflow.errors import UsageError
from gradientflow.lab.workloads import workload
from gradientflow.network import Measurement, Network, Sample
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe, as_recipe
from gradientflow.sim.cluster import Cluster, Collective, Servers, Wire, read
from gradientflow.sim.predict import predict
from gradientflow.tune.ranking import MARGIN, Ranking, cluster_of, on_its_merits, pinned, rank

# - Servers or all-reduce


@dataclass(frozen=True)
class Setting:
    """Hosts with `each` workers on a switch, and hosts to spare."""

    model: str
    hosts: int
    bits_per_s: float
    spare: int = 0
    each: int = 1
    #: Of one step of a ring, and of a message to a server or back.
    alpha_s: float = 20e-6
    #: What a server takes to add a byte; whether ports send and receive at a time.
    add_s_per_byte: float = 0.0
    duplex: float = 1.0
    scale: float = 1.0

    @property
    def rate(self) -> float:
        return self.bits_per_s / 8

    @property
    def world(self) -> int:
        return self.hosts * self.each

    def all_reduce_s(self, nbytes: float) -> float:
        """2 (p - 1) alpha + 2 (p - 1) / p S / B; by halves, 2 lg p alpha."""
        p = self.world
        steps = min(2 * (p - 1), 2 * (p.bit_length() - 1) if p & (p - 1) == 0 else 2 * (p - 1))
        return steps * self.alpha_s + 2 * (p - 1) / p * nbytes / self.rate

    def servers_s(self, nbytes: float) -> float:
        """The best with up to `spare` hosts."""
        return min(self._servers_s(nbytes, k) for k in range(self.spare + 1))

    def _servers_s(self, nbytes: float, k: int) -> float:
        """BytePS: 2 n (n - 1) / (n^2 + k n - 2 k) S / B, with as many spare hosts as workers S / B; the busiest server
        adds up n times its share. Ports that are not duplex carry both ways one after the other. Of hosts with several
        workers, what each of them pulls but its own host's share: no more than that is claimed."""
        n, whole = self.hosts, self.hosts**2 + k * self.hosts - 2 * k
        share = 1 / n if not k else 2 * (n - 1) / whole if k < n else 1 / k
        if self.each > 1:
            ports_s = self.each * (1 - 1 / n) * nbytes / self.rate
        else:
            ports_s = (1.0 if k >= n else 2 * n * (n - 1) / whole) * nbytes / self.rate
        return 2 * self.alpha_s + max((2 - self.duplex) * ports_s, self.world * share * nbytes * self.add_s_per_byte)

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            name="a switch",
            hosts=self.hosts,
            workers_per_host=self.each,
            inside=Wire(bits_per_s=100 * self.bits_per_s) if self.each > 1 else None,
            between=Wire(bits_per_s=self.bits_per_s, latency_s=self.alpha_s),
            collective=Collective(hop_s=self.alpha_s),
            servers=Servers(sum_s_per_byte=self.add_s_per_byte, duplex=self.duplex),
        )


SETTINGS = [
    Setting("alexnet", hosts=6, bits_per_s=10e9, spare=6),
    Setting("vgg-16", hosts=5, bits_per_s=1e9, spare=2),
    Setting("vgg-16", hosts=4, bits_per_s=25e9, spare=1),
    Setting("resnet-50", hosts=4, bits_per_s=1e9, spare=4),
    Setting("resnet-50", hosts=8, bits_per_s=100e9, alpha_s=5e-3, scale=0.05),
    Setting("alexnet", hosts=4, bits_per_s=10e9, spare=1, each=4),
    Setting("vgg-16", hosts=3, bits_per_s=25e9, each=4),
    Setting("alexnet", hosts=3, bits_per_s=1e9, duplex=0.0),
    Setting("alexnet", hosts=8, bits_per_s=100e9, add_s_per_byte=0.2e-9),
    Setting("vgg-16", hosts=4, bits_per_s=100e9, spare=2, add_s_per_byte=0.15e-9),
]
RIGHT = ["servers"] * 5 + ["all-reduce"] * 5


@pytest.mark.parametrize(("setting", "right"), list(zip(SETTINGS, RIGHT, strict=True)), ids=str)
def test_servers_or_all_reduce(setting: Setting, right: str) -> None:
    """Closed forms decide, where they differ by more than 5 % whether communication hides or not."""
    size = workload(setting.model, scale=setting.scale).nbytes
    costs = {"all-reduce": setting.all_reduce_s(size), "servers": setting.servers_s(size)}
    compute_s = costs["all-reduce"] / 5
    wrong = next(name for name in costs if name != right)
    for iteration_s in (lambda seconds: compute_s + seconds, lambda seconds: max(compute_s, seconds)):
        assert iteration_s(costs[wrong]) > 1.05 * iteration_s(costs[right])
    profile = workload(setting.model, compute_s=compute_s, scale=setting.scale)
    found = rank(profile, setting.cluster, setting.world, spare=setting.spare, exchanges=("a2a", "halving", "ps"))
    assert {True: "servers", False: "all-reduce"}[Recipe.parse(found.best.recipe).served] == right


# - The search


def fast(**changes: object) -> Cluster:
    """Four hosts, and software that costs something."""
    given = {"name": "four", "hosts": 4, "between": Wire(bits_per_s=1e9, latency_s=1e-5)} | changes
    return Cluster(collective=Collective(launch_s=1e-4, hop_s=1e-4), **given)  # type: ignore[arg-type]


SMALL = workload("alexnet", compute_s=0.05, scale=0.02)


@pytest.fixture(scope="module")
def lossless() -> Ranking:
    return rank(SMALL, fast(), 4, spare=2)


def test_the_quickest_comes_first_and_every_recipe_is_legal(lossless: Ranking) -> None:
    times_s = [offer.prediction.iteration_s for offer in lossless.offers]
    assert times_s == sorted(times_s) and len({offer.recipe for offer in lossless.offers}) == len(times_s)
    recipes = [as_recipe(offer.recipe) for offer in lossless.offers]
    assert all(recipe.codec().lossless for recipe in recipes)
    assert {recipe.exchange.name for recipe in recipes} >= {"a2a", "halving", "ps"}
    assert not any(recipe.over_mpi for recipe in recipes)
    assert {recipe.num_servers for recipe in recipes if recipe.served} == {0, 1, 2}
    assert {recipe.lanes for recipe in recipes if not recipe.served} == {1, 2}
    assert {recipe.schedule.name for recipe in recipes} >= {"lazy", "merge", "flow", "dear", "bytescheduler"}
    assert lossless.left_out["levels"] == "hosts have one worker each"


def test_predictions_are_the_simulators(lossless: Ranking) -> None:
    for offer in lossless.offers[::20]:
        assert offer.prediction == predict(SMALL, as_recipe(offer.recipe), on_its_merits(fast()), 4)


def test_the_best_needs_least_of_those_as_good(lossless: Ranking) -> None:
    best, quickest = lossless.best, lossless.offers[0]
    assert best.prediction.iteration_s <= (1 + MARGIN) * quickest.prediction.iteration_s
    good = [o for o in lossless.offers if o.prediction.iteration_s <= (1 + MARGIN) * quickest.prediction.iteration_s]
    assert len(best.needs) == min(len(offer.needs) for offer in good)


def test_codecs_only_where_they_are_allowed_and_never_behind_a_gate_that_would_close() -> None:
    found = rank(SMALL, fast(), 4, lossy=True, exchanges=("a2a",))
    recipes = [as_recipe(offer.recipe) for offer in found.offers]
    assert {recipe.codecs[0].name for recipe in recipes if recipe.codecs} >= {"fp16", "csc", "topk", "powersgd"}
    assert not [r for r in recipes if r.wants_gate and r.codecs and r.codecs[0].name != "bf16"]
    assert as_recipe(found.offers[0].recipe).codecs, "a slow network gains by sending less"
    assert all("less than exact gradients" in offer.needs for offer in found.offers if "+" in offer.recipe)


def test_mpi_is_there_for_those_who_ask() -> None:
    found = rank(SMALL, fast(), 4, exchanges=("mpi",))
    assert {Recipe.parse(offer.recipe).exchange.name for offer in found.offers} == {"mpi"}
    assert all("mpirun" in offer.needs for offer in found.offers)


def test_what_planners_believed_is_not_what_is_planned_on() -> None:
    """The survey's planner was told that BERT's messages start slowly, and fused almost all of them."""
    cluster = read("survey-10gbe")
    profile = workload("bert-base", device="2080ti")
    misled = predict(profile, as_recipe("mg-wfbp-a2a:1"), cluster, 32)
    ours = predict(profile, pinned("mg-wfbp-a2a:1", profile, cluster, 32), cluster, 32)
    assert misled.num_messages < ours.num_messages and ours.iteration_s < misled.iteration_s


def test_what_runs_on_cpus_only_is_not_offered_to_gpus() -> None:
    found = rank(SMALL, fast(device="v100"), 4, spare=2)
    recipes = [as_recipe(offer.recipe) for offer in found.offers]
    assert {recipe.exchange.name for recipe in recipes} == {"a2a"}
    assert "dear" not in {recipe.schedule.name for recipe in recipes}
    assert found.left_out["ps"] == "on CPUs only"
    asked = rank(SMALL, fast(device="v100"), 4, exchanges=("ps",))
    assert all("gradients on CPUs" in offer.needs for offer in asked.offers)


def test_who_cannot_be_tuned_is_told_so() -> None:
    with pytest.raises(UsageError, match="give 2 or more"):
        rank(SMALL, fast(), 1)
    with pytest.raises(UsageError, match="no tensors"):
        rank(Profile(tensors=()), fast(), 4)
    with pytest.raises(UsageError, match="give 1 to 4"):
        rank(SMALL, fast(), 5)


def test_a_plan_is_pinned_as_it_was_simulated(lossless: Ranking) -> None:
    for offer in lossless.offers[::25]:
        recipe = pinned(offer.recipe, SMALL, fast(), 4)
        assert recipe.pinned is not None and len(recipe.pinned.messages) == offer.prediction.num_messages
        assert predict(SMALL, recipe, on_its_merits(fast()), 4).iteration_s == pytest.approx(
            offer.prediction.iteration_s
        )


def test_in_a_probes_cluster_nothing_begins_at_once() -> None:
    def measured(operation: str, ranks: tuple[int, ...], alpha_s: float) -> Measurement:
        samples = [Sample(nbytes=n, median_s=alpha_s + n / 1e8, p10_s=1e-4, p90_s=1.0) for n in (2**12, 2**16, 2**20)]
        return Measurement(
            operation=operation, ranks=ranks, samples=tuple(samples), alpha_s=alpha_s, beta_s_per_byte=1e-8,
            residual=0.0, rate_bits_s=8e8,
        )  # fmt: skip

    pairs = [measured("p2p", (0, 1), alpha_s) for alpha_s in (2e-4, 9e-4, 3e-4)]
    probe = Network(backend="gloo", hosts=("a", "b"), measurements=(measured("all_reduce", (0, 1), 1e-3), *pairs))
    found = cluster_of(probe, "mine")
    assert found.between is not None and found.between.latency == 3e-4
    assert found.all_reduce(2).seconds(2**16) == Cluster.of_network(probe, "mine").all_reduce(2).seconds(2**16)
