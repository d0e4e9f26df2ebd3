"""What a recipe takes on a cluster: the runtime's own plan, its codec's own traffic, played through.

    predict(workload("resnet-50", device="2080ti"), as_recipe("lazy"), read("survey-10gbe"), 32).iteration_s

A profile's seconds are what one worker alone takes for an iteration. Where a cluster says what of that is the
optimizer's (`update_s_per_byte`) and what is there only once (`harness_s`), the rest is computing. Speed-ups are over
that one worker, as published ones are, and at most the number of workers: `harness_s`, which is not there again, is no
merit of the network's.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gradientflow.compress import CASTS, EXACT, Codec, Traffic, imagined, summed_nbytes
from gradientflow.cost.evaluate import startup_and_wire_s
from gradientflow.cost.table import Cost, CostTable
from gradientflow.documents import Record
from gradientflow.errors import UsageError
from gradientflow.lab.stragglers import Straggling
from gradientflow.lab.workloads import timed
from gradientflow.plan import Message, Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import Choice, Recipe
from gradientflow.sim.carriers import BUS, WIRE, Lanes, Links, Load, Servers
from gradientflow.sim.clocks import steps_s
from gradientflow.sim.cluster import Cluster, Overheads, Processors
from gradientflow.sim.costs import pattern_cost
from gradientflow.sim.events import Activities, Timeline
from gradientflow.sim.served import pieces
from gradientflow.sim.workers import Carrier, Conditions, Simulated, Simulation
from gradientflow.sync import BSP, Sync
from gradientflow.trace import Trace

#: Steps of which the first settles; more where steps differ.
CALM_STEPS, VARYING_STEPS = 3, 60
#: Workers that are simulated one by one.
MOST_KINDS = 8
#: Codecs that do not work tensor by tensor.
BY_MESSAGE = frozenset({"csc"})
#: Sizes of messages that the runtime measures before it plans (`runtime.pricing`).
PRICED_NBYTES = tuple(2**power for power in range(12, 23, 2))
#: Cut and reordered by the schedule itself.
PIECEMEAL = frozenset({"bytescheduler"})
#: What a gate takes of the training thread for each tensor, and for each stage beside updating bytes, in units of what
#: gathering a gradient takes: that was 14 to 45 us in labs of four workers on two cores, where ResNet-50's 161 tensors
#: in twelve stages took 8.5 ms a step more of the training thread than without a gate, and each stage 0.15 ms.
GATE, STAGE = 1.0, 7.0
#: Of an iteration, beside waiting for messages: computing of whoever is slower than the profile, ...
SLOWER = "slower workers"
#: ... and what exchanging takes of computing: gathering gradients, handing messages over, links and cores in common.
HELD_UP = "computing held up"
#: What is left where sums of seconds cancel out.
ROUNDING_S = 1e-9


class Varying(Straggling):
    """Computing that is not always the same: stragglers, and a factor that each rank draws anew for each step, evenly
    around 1 and with this standard deviation, as in `gradientflow bench`."""

    jitter: float = 0.0
    seed: int = 0

    @property
    def changes(self) -> bool:
        return self.jitter > 0 or super().changes

    def paces(self, world: int, num_steps: int) -> list[list[float]]:
        """By step, of each kind of worker: those that are always alike are one kind."""
        if not self.changes:
            return [sorted({self.slowdown.get(rank, 1.0) for rank in range(world)}, reverse=True)]
        return self.ranks(world, num_steps)

    def slowest(self, world: int) -> float:
        """How many times as long computing takes on the slowest worker, where nobody waits for anybody."""
        by_worker = zip(*self.ranks(world), strict=True)
        return max(statistics.fmean(paces) for paces in by_worker)

    def ranks(self, world: int, num_steps: int = VARYING_STEPS) -> list[list[float]]:
        """By step, of each worker."""
        draw, dice = random.Random(self.seed), random.Random(f"stragglers {self.seed}")

        def pace(rank: int, step: int) -> float:
            reach = math.sqrt(3) * self.jitter
            return draw.uniform(1 - reach, 1 + reach) * self.factor(rank, world, step, dice)

        return [[pace(rank, step) for rank in range(world)] for step in range(num_steps if self.changes else 1)]


class Prediction(Record):
    """Seconds of an iteration once training has settled."""

    recipe: str
    cluster: str
    workers: int
    iteration_s: float
    p50_s: float
    p95_s: float
    #: What one worker alone takes.
    alone_s: float
    #: What an iteration takes longer than computing and updating.
    exposed_s: float
    #: By tensor or message that is waited for, the most first; with `SLOWER` and `HELD_UP` all of `exposed_s`.
    exposed_by: dict[str, float]
    #: By link, of the time.
    utilisation: dict[str, float]
    num_messages: int
    #: Bytes that a worker sends in an iteration.
    sent_nbytes: float

    @property
    def speedup(self) -> float:
        return self.workers * min(1.0, self.alone_s / self.iteration_s) if self.iteration_s else float(self.workers)

    def samples_per_s(self, batch: float) -> float:
        return self.workers * batch / self.iteration_s if self.iteration_s else math.inf


def predict(
    profile: Profile,
    recipe: Recipe,
    cluster: Cluster,
    world: int,
    varying: Varying | None = None,
    *,
    whole: bool = False,
) -> Prediction:
    """See the module's description. whole: something looks at all gradients before each step, such as clipping."""
    return simulate(profile, recipe, cluster, world, varying, whole=whole)[0]


def predict_plan(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    world: int,
    varying: Varying | None = None,
    *,
    cast: str = "",
) -> Prediction:
    """Of messages that somebody else planned, by the backend's own all-reduce, without a gate, and copied back to where
    gradients are: stock DDP's buckets."""
    cluster.check_world(world)
    cluster = _alone(cluster) if world == 1 else cluster
    computing = _computing(profile, cluster)
    traffics = _traffics(plan, computing, CASTS[cast]("") if cast else EXACT, world)
    cost = cluster.all_reduce(world)
    encodings_s = _encodings_s(computing, plan, traffics, [cast] if cast else [], cluster)
    make = _lanes(plan, traffics, encodings_s, cost, cluster, world)
    # What a gradient takes whatever its size is what Python's hooks take; DDP's are none.
    conditions = dataclasses.replace(
        _conditions(computing, cluster, cost, world),
        gather_s=0.0,
        scatter_s_per_byte=cluster.overheads.gather_s_per_byte,
    )
    work = _Work(computing, plan, make, conditions, False)
    return _predicted(plan.schedule, profile, cluster, world, BSP, work, traffics, varying or Varying())[0]


def simulate(
    profile: Profile,
    recipe: Recipe,
    cluster: Cluster,
    world: int,
    varying: Varying | None = None,
    *,
    whole: bool = False,
) -> tuple[Prediction, Trace]:
    """A prediction, and its steps as a rank would have recorded them."""
    if recipe.tunes:
        raise UsageError(f"{recipe} chooses while it trains: gradientflow tune simulates what it may choose from")
    recipe = recipe.settled()
    cluster.check_world(world)
    cluster = _alone(cluster) if world == 1 else cluster
    computing = _computing(profile, cluster)
    gated = _is_gated(recipe, cluster, world)
    cost = message_cost(cluster, recipe, world)
    varying = varying or Varying()
    # The plan of all is the slowest worker's.
    slowed = timed(computing, varying.slowest(world) * (computing.forward_s + computing.backward_s))
    plan = _plan(_as_observed(slowed, cluster), recipe, cluster, world, cost, gated=gated, whole=whole)
    traffics = _traffics(plan, computing, recipe.codec(), world)
    encodings_s = _encodings_s(computing, plan, traffics, [choice.name for choice in recipe.codecs], cluster)
    make: Make
    if recipe.served:
        sizes = [_nbytes(traffic, world) for traffic in traffics]
        parcels = list(zip(sizes, encodings_s, strict=True))
        make = partial(Servers, *pieces(computing, plan, parcels, recipe, cluster, world))
    else:
        names = [choice.name for choice in recipe.codecs]
        make = _lanes(plan, traffics, encodings_s, cost, cluster, world, recipe.exchange.name, names)
    piecemeal = recipe.schedule.name in PIECEMEAL and not recipe.served
    conditions = _conditions(computing, cluster, cost, world, cluster.overheads.partition_s if piecemeal else 0.0)
    # What looks at all gradients waits for all of them, unless norms go between the halves.
    work = _Work(computing, plan, make, conditions, gated and (plan.norms or not whole))
    return _predicted(str(recipe), profile, cluster, world, recipe.sync, work, traffics, varying)


def plan_for(profile: Profile, recipe: Recipe, cluster: Cluster, world: int, *, whole: bool = False) -> Plan:
    """What `simulate` plays through."""
    cluster.check_world(world)
    cluster, recipe = _alone(cluster) if world == 1 else cluster, recipe.settled()
    gated, cost = _is_gated(recipe, cluster, world), message_cost(cluster, recipe, world)
    observed = _as_observed(_computing(profile, cluster), cluster)
    return _plan(observed, recipe, cluster, world, cost, gated=gated, whole=whole)


def _is_gated(recipe: Recipe, cluster: Cluster, world: int) -> bool:
    gate = cluster.servers.gate or not recipe.served
    return recipe.wants_gate and world > 1 and not recipe.sync.deltas and gate


Make = Callable[[Timeline, Activities], Carrier]


@dataclass(frozen=True)
class _Work:
    """Everything that a simulation takes but paces."""

    profile: Profile
    plan: Plan
    make: Make
    conditions: Conditions
    gated: bool

    def simulated(self, paces: Sequence[Sequence[float]], num_steps: int) -> Simulated:
        conditions = dataclasses.replace(self.conditions, paces=paces)
        return Simulation(self.profile, self.plan, conditions, num_steps, self.gated).run(self.make)


def _predicted(
    name: str,
    profile: Profile,
    cluster: Cluster,
    world: int,
    sync: Sync,
    work: _Work,
    traffics: Sequence[Traffic],
    varying: Varying,
) -> tuple[Prediction, Trace]:
    computing_s = work.profile.forward_s + work.profile.backward_s
    if not sync.deltas or world == 1:
        num_steps = VARYING_STEPS if varying.changes else CALM_STEPS
        paces = varying.paces(world, num_steps)
        slower_s = computing_s * (statistics.fmean(max(of_step) for of_step in paces[1:] or paces) - 1)
        # Without a gate all begin a step together and wait for its slowest. With one that is a little too slow: who was
        # slow in one step may be quick in the next.
        if not work.gated or len(paces[0]) > MOST_KINDS:
            paces = [[max(of_step)] for of_step in paces]
        found = work.simulated(paces, num_steps)
        times_s = found.iterations_s(1)
    else:  # what parameters have changed by travels when the step is done, and behind no backward pass
        found = dataclasses.replace(work, profile=after_backward(work.profile)).simulated([[1.0]], CALM_STEPS)
        exchange_s = found.iterations_s(1)[-1] - found.compute_s
        times_s = steps_s(sync, varying.ranks(world), found.compute_s, exchange_s)
        slower_s = statistics.fmean(times_s) - statistics.fmean(steps_s(sync, [[1.0]], found.compute_s, exchange_s))
    mean_s = statistics.fmean(times_s)
    exposed_s = max(0.0, mean_s - found.compute_s)
    waits_s = {name: seconds / sync.period for name, seconds in found.waits_s(1).items()}
    links_s = {link: seconds / sync.period for link, seconds in found.links_s(1).items()}
    prediction = Prediction(
        recipe=name,
        cluster=cluster.name,
        workers=world,
        iteration_s=mean_s,
        p50_s=statistics.median(times_s),
        p95_s=sorted(times_s)[min(len(times_s) - 1, int(0.95 * len(times_s)))],
        alone_s=profile.forward_s + profile.backward_s,
        exposed_s=exposed_s,
        exposed_by=_exposed_by(exposed_s, slower_s, waits_s),
        utilisation={link: seconds / max(mean_s, 1e-30) for link, seconds in links_s.items()},
        num_messages=len(work.plan.messages),
        sent_nbytes=sum(traffic.sent_nbytes for traffic in traffics) / sync.period,
    )
    return prediction, found.trace


def _exposed_by(exposed_s: float, slower_s: float, waits_s: Mapping[str, float]) -> dict[str, float]:
    """waits_s: of one worker, who may be waiting for slower ones; and of whole exchanges, part of which steps may hide.

    >>> _exposed_by(4.0, 1.0, {"a": 1.0, "b": 1.5})
    {'b': 1.5, 'slower workers': 1.0, 'a': 1.0, 'computing held up': 0.5}
    >>> _exposed_by(3.0, 1.0, {"a": 4.0})
    {'a': 2.0, 'slower workers': 1.0}
    """
    slower_s = min(max(0.0, slower_s), exposed_s)
    waited_s = sum(waits_s.values())
    share = min(1.0, (exposed_s - slower_s) / waited_s) if waited_s else 0.0
    found = {SLOWER: slower_s, **{name: share * seconds for name, seconds in waits_s.items()}}
    found[HELD_UP] = exposed_s - sum(found.values())
    return dict(sorted(((k, v) for k, v in found.items() if v > ROUNDING_S), key=lambda entry: -entry[1]))


def _conditions(profile: Profile, cluster: Cluster, cost: Cost, world: int, partition_s: float = 0.0) -> Conditions:
    overheads = cluster.overheads
    update_s = overheads.update_s_per_byte * profile.nbytes
    computing_s = profile.forward_s + profile.backward_s
    return Conditions(
        crowding=cluster.processors.crowding,
        computing_share=min(1.0, max(0.0, profile.cpu_s - update_s) / computing_s) if computing_s else 0.0,
        gather_s=overheads.gather_s,
        gather_s_per_byte=overheads.gather_s_per_byte,
        gate_s=GATE * overheads.gather_s,
        stage_s=STAGE * overheads.gather_s,
        update_s_per_byte=overheads.update_s_per_byte,
        host_s=cost.host_s + partition_s if world > 1 else 0.0,
        room={BUS: overheads.bus_while_computing} if overheads.bus_while_computing < 1 else {},
    )


def _plan(
    profile: Profile, recipe: Recipe, cluster: Cluster, world: int, cost: Cost, *, gated: bool, whole: bool
) -> Plan:
    """As the runtime would plan it, on what it would believe."""
    if recipe.served and cluster.servers.partition_nbytes and recipe.schedule.name in PIECEMEAL:
        recipe = recipe.model_copy(update={"schedule": Choice(name="wfbp")})  # the servers' own software cuts
    believed = cluster.belief(world) or recipe.priced(
        _with_hosts(cost, cluster, recipe.exchange.name),
        world,
        cluster.overheads.touch_s_per_byte,
        _encode_s_per_byte(recipe, cluster),
    )
    num_lanes = 1 if recipe.served else recipe.lanes or cluster.collective.lanes
    return recipe.plan(profile, num_lanes, believed, gated=gated, whole=whole, words=False)


def _lanes(
    plan: Plan,
    traffics: Sequence[Traffic],
    encodings_s: Sequence[float],
    cost: Cost,
    cluster: Cluster,
    world: int,
    pattern: str = "",
    codecs: Sequence[str] = (),
) -> Make:
    links = _ring_links(cluster, world)
    loads = [
        _load(message, traffic, encode_s, cost, cluster, world, links, pattern)
        for message, traffic, encode_s in zip(plan.messages, traffics, encodings_s, strict=True)
    ]
    return partial(Lanes, plan, loads, closing=_closing(plan, codecs, cost, cluster, world, links, pattern))


def _closing(
    plan: Plan, codecs: Sequence[str], cost: Cost, cluster: Cluster, world: int, links: Links, pattern: str
) -> Load | None:
    """A codec that sends a part ends a step with one more small sum, of flags and of what it does not take. Where what
    it computes was not measured, `encode_s` stands for this too."""
    part = _computing_codec(codecs)
    if world == 1 or part in ("", *CASTS) or cluster.encoding(part) is None:
        return None
    if all(message.dense for message in plan.messages):
        return None
    flags = imagined([(len(plan.layout),)], torch.float32)
    return _load(
        Message(slices=flags.message.slices), EXACT.traffic(flags, world), 0.0, cost, cluster, world, links, pattern
    )


def _alone(cluster: Cluster) -> Cluster:
    """One worker takes what the profile says, whatever that is made of."""
    return cluster.model_copy(update={"overheads": Overheads(), "processors": Processors()})


def _computing(profile: Profile, cluster: Cluster) -> Profile:
    """What of a worker's iteration is computing."""
    overheads, alone_s = cluster.overheads, profile.forward_s + profile.backward_s
    if 0 < overheads.harness_s >= alone_s:
        raise UsageError(
            f"cluster {cluster.name}: harness_s is {overheads.harness_s:g} and one worker's iteration takes "
            f"{alone_s:g} s, of which it is a part: lower it, or say that computing takes longer"
        )
    # Workers that update side by side share cores.
    beside_s = overheads.harness_s + cluster.processors.stretch * overheads.update_s_per_byte * profile.nbytes
    return timed(profile, max(0.0, alone_s - beside_s))


def _as_observed(profile: Profile, cluster: Cluster) -> Profile:
    """As the runtime sees it where workers share cores, hooks that gather gradients included."""
    if not cluster.processors.cores:
        return profile
    overheads = cluster.overheads
    gathers_s = [overheads.gather_s + overheads.gather_s_per_byte * tensor.nbytes for tensor in profile.tensors]
    tensors = tuple(
        tensor.model_copy(update={"backward_s": tensor.backward_s + cluster.processors.stretch * gather_s})
        for tensor, gather_s in zip(profile.tensors, gathers_s, strict=True)
    )
    return profile.model_copy(update={"tensors": tensors, "cpu_s": profile.cpu_s + sum(gathers_s)})


def after_backward(profile: Profile) -> Profile:
    """The same with all gradients at the end of backward."""
    first, *others = profile.tensors
    tensors = [first.model_copy(update={"backward_s": profile.backward_s})]
    tensors += [tensor.model_copy(update={"backward_s": 0.0}) for tensor in others]
    return profile.model_copy(update={"tensors": tuple(tensors)})


def message_cost(cluster: Cluster, recipe: Recipe, world: int) -> Cost:
    """Of a message as it is, by the way that the recipe names."""
    name = recipe.exchange.name
    if (measured := cluster.measured_by(name, world)) is not None:
        return measured
    rings = ("a2a", "mpi", "best", "ring")
    if recipe.served or world == 1 or (name in rings and cluster.topology.kind == "switch"):
        return cluster.all_reduce(world)
    return pattern_cost(cluster, "ring" if name in rings else name, world)


def _with_hosts(cost: Cost, cluster: Cluster, pattern: str) -> Cost:
    """As the runtime prices messages where cores are shared: by fewer sizes, and with what each takes of the training
    thread. Simulations know that from what is wanted of cores."""
    if not cluster.processors.cores or not isinstance(cost, CostTable):
        return cost
    points = tuple((nbytes, cost.seconds(nbytes)) for nbytes in PRICED_NBYTES)
    host_s = min(1.0, cluster.processors.crowding) * cluster.carried_by(pattern).message_s
    return CostTable(points=points, host_s=cost.host_s + host_s)


def _encode_s_per_byte(recipe: Recipe, cluster: Cluster) -> float | None:
    """If it was measured."""
    measured = cluster.encoding(_computing_codec([choice.name for choice in recipe.codecs]))
    return cluster.processors.stretch * measured.byte_s if measured else None


def _traffics(plan: Plan, profile: Profile, codec: Codec, world: int) -> list[Traffic]:
    """What each message's conversation will take, as the codec itself says."""
    tensors = profile.by_name

    def traffic(message: Message) -> Traffic:
        shapes = [
            tensors[piece.tensor].shape if piece.numel == tensors[piece.tensor].numel else (piece.numel,)
            for piece in message.slices
        ]
        parcel = imagined(shapes, tensors[message.slices[0].tensor].torch_dtype)
        return (EXACT if message.dense else codec).traffic(parcel, world)

    return [traffic(message) for message in plan.messages]


def _computing_codec(codecs: Sequence[str]) -> str:
    """Of a part in half precision the part is what computes."""
    return next((name for name in codecs if name not in CASTS), codecs[0] if codecs else "")


def _encodings_s(
    profile: Profile, plan: Plan, traffics: Sequence[Traffic], codecs: Sequence[str], cluster: Cluster
) -> list[float]:
    """What the codec computes for each message: as it was measured, else by the bytes and tensors that it touches."""
    overheads, tensors = cluster.overheads, profile.by_name
    part = _computing_codec(codecs)
    measured = cluster.encoding(part)
    call_s = 0.0 if part in ("", *CASTS, *BY_MESSAGE) else overheads.encode_s

    def seconds(message: Message, traffic: Traffic) -> float:
        if measured is None or message.dense:
            calls = 0 if message.dense else len(message.slices)
            return overheads.touch_s_per_byte * traffic.touched_nbytes + call_s * calls
        nbytes = sum(piece.numel * tensors[piece.tensor].torch_dtype.itemsize for piece in message.slices)
        return measured.byte_s * nbytes + measured.tensor_s * len(message.slices)

    return [seconds(message, traffic) for message, traffic in zip(plan.messages, traffics, strict=True)]


def _load(
    message: Message,
    traffic: Traffic,
    encode_s: float,
    cost: Cost,
    cluster: Cluster,
    world: int,
    links: Links,
    pattern: str,
) -> Load:
    """Rounds one after another, each of its part of the bytes; the codec's computing and copies before them."""
    overheads = cluster.overheads
    nbytes = _nbytes(traffic, world)
    if not nbytes:
        return Load(0.0, 0.0)
    startup_s, wire_s = startup_and_wire_s(cost, nbytes / traffic.rounds)
    copies = len(message.slices) > 1
    before_s = overheads.negotiation_s + overheads.copy_s_per_byte * nbytes * copies
    crowding, carrying = cluster.processors.crowding, cluster.carried_by(pattern)
    return Load(
        before_s + traffic.rounds * startup_s,
        traffic.rounds * wire_s,
        traffic.rounds * max(0.0, cluster.abreast_s(pattern, world) - startup_s),
        overheads.interference_s_per_byte * traffic.sent_nbytes,
        links,
        encode_s,
        cores_s=crowding * (traffic.rounds * carrying.message_s + carrying.byte_s * nbytes),
        encode_cores_s=crowding * encode_s,
    )


def _nbytes(traffic: Traffic, world: int) -> float:
    """Of the message whose sum would put as much on the wire."""
    return traffic.sent_nbytes / summed_nbytes(1.0, world) if world > 1 else 0.0


def _ring_links(cluster: Cluster, world: int) -> Links:
    """Of a ring's seconds on the wire, what the bus inside a host would take."""
    if cluster.inside is None or min(world, cluster.workers_per_host) < 2:
        return {WIRE: 1.0}
    return {WIRE: 1.0, BUS: cluster.slowest(world).bytes_per_s / cluster.inside.bytes_per_s}
