"""A bake-off against the simulator: what it says of the same methods, from the probe and from computing alone.

Of a bake-off's file three things are used: its probe's network, the workload with its scale, and how long an iteration
took in which nothing was exchanged. The methods' own times are what predictions are held against.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence

from gradientflow.bench.methods import without_number
from gradientflow.bench.results import Result, Results
from gradientflow.documents import Record
from gradientflow.errors import UsageError, UserError
from gradientflow.lab.workloads import load
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.schedule.fusion import BUCKET_NBYTES, buckets
from gradientflow.sim.cluster import Cluster
from gradientflow.sim.predict import Varying, predict, predict_plan

#: What a codec takes for a byte of memory that it reads or writes, alone (benchmarks/codecs.py), ...
TOUCH_S_PER_BYTE = 0.1e-9
#: ... and for each tensor, where every worker has a core; workers share cores. Fitted on bake-offs of codecs
#: (2026-11-16-resnet-50-pays-*.json): 30 to 45 ms for the 161 tensors of ResNet-50, whichever the codec and its bytes.
ENCODE_S = 0.22e-3
#: Computing that is lost for each byte that a worker sends, since processors carry it: in
#: 2026-11-16-resnet-50-1gbit-flow.json backward takes 70 ms longer than alone while 153 MB are on their way, with two
#: workers on a core.
INTERFERENCE_S_PER_BYTE = 0.23e-9


class Foretold(Record):
    """A method: measured and predicted seconds of an iteration."""

    workload: str
    method: str
    measured_s: float
    predicted_s: float
    #: Processors were what limited it, ...
    cpu_bound: bool
    #: ... and how busy they were.
    cpu_share: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Foreteller:
    """What is known before a bake-off's methods are measured: the network, and an iteration without exchange."""

    def __init__(self, results: Results, scale: float | None = None) -> None:
        """results: of computing alone, or of a whole bake-off, of which nothing else is looked at."""
        alone = next((result for result in results.results if result.method == "compute"), None)
        if results.network is None or alone is None or not results.network.of("all_reduce"):
            raise UsageError("there is no network or no computing alone: measure with gradientflow bench")
        self._cluster = _cluster(results)
        scale = _scale(results.command) if scale is None else scale
        self._world = alone.hosts
        self._varying = Varying.model_validate(results.conditions.model_dump(exclude={"clip_norm"}))
        # A bake-off's time is that of its slowest rank, whose computing is slowed down already.
        compute_s = alone.iteration_s.median / self._varying.slowest(self._world)
        profile = load(alone.workload, compute_s=compute_s, scale=scale)
        self._profile = profile.model_copy(update={"cpu_s": alone.cpu_s})
        self._clips = results.conditions.clip_norm is not None

    def seconds(self, method: str, notes: Sequence[str] = ()) -> float | None:
        """Of an iteration; None if the simulator does not know the method, or what it will choose. notes: on what
        `ddp-best` chose."""
        name, profile, world = without_number(method), self._profile, self._world
        if name == "compute" or name in ("ddp-powersgd", "horovod"):
            return None
        if name.startswith("ddp"):
            plan = ddp_buckets(profile, notes)
            cast = name.removeprefix("ddp-") if name in ("ddp-bf16", "ddp-fp16") else ""
            return predict_plan(profile, plan, self._cluster, world, self._varying, cast=cast).iteration_s
        try:
            recipe = Recipe.parse(name).check()
        except UserError:
            return None
        if recipe.tunes:
            return None
        return predict(profile, recipe, self._cluster, world, self._varying, whole=self._clips).iteration_s


def foretell(results: Results) -> list[Foretold]:
    """Of every method that can be simulated, but computing itself; none if the file lacks what that takes."""
    try:
        foreteller = Foreteller(results)
    except UsageError:
        return []
    found = [(result, foreteller.seconds(result.method, result.notes)) for result in results.results]
    return [against(result, predicted_s) for result, predicted_s in found if predicted_s is not None]


def against(result: Result, predicted_s: float) -> Foretold:
    """What was predicted of a method, and what it took."""
    return Foretold(
        workload=result.workload,
        method=result.method,
        measured_s=result.iteration_s.median,
        predicted_s=predicted_s,
        cpu_bound=any("CPU-bound" in note for note in result.notes),
        cpu_share=result.cpu_share,
    )


def summary(found: Sequence[Foretold]) -> str:
    """
    >>> one = Foretold(workload="w", method="m", measured_s=1.0, predicted_s=1.1, cpu_bound=False)
    >>> summary([one])
    'median 10.0 % worst 10.0 % of 1 methods'
    """
    errors = [100 * abs(one.error) for one in found]
    return f"median {statistics.median(errors):.1f} % worst {max(errors):.1f} % of {len(errors)} methods"


def _cluster(results: Results) -> Cluster:
    assert results.network is not None
    cluster = Cluster.of_network(results.network, results.place)
    if results.network.processors is not None:
        # What the bake-off's optimizer does to a byte, in passes over memory: two are read and one is written.
        update = {"update_s_per_byte": 1.5 * cluster.overheads.gather_s_per_byte}
        return cluster.model_copy(update={"overheads": cluster.overheads.model_copy(update=update)})
    # A file of a version that did not count what processors do.
    crowding = max(1.0, results.network.world / results.machine.cores)
    costs = {
        "touch_s_per_byte": TOUCH_S_PER_BYTE,
        "encode_s": ENCODE_S,
        "interference_s_per_byte": INTERFERENCE_S_PER_BYTE,
    }
    overheads = cluster.overheads.model_copy(update={name: crowding * seconds for name, seconds in costs.items()})
    return cluster.model_copy(update={"overheads": overheads})


def _scale(command: str) -> float:
    words = shlex.split(command)
    return float(words[words.index("--scale") + 1]) if "--scale" in words else 1.0


def ddp_buckets(profile: Profile, notes: Sequence[str] = ()) -> Plan:
    """Of stock DDP in a bake-off. That gives their size, and then DDP's first one is as large as the others; two travel
    at a time, as Gloo has two threads."""
    nbytes = _bucket_nbytes(notes)
    return buckets(profile, nbytes, nbytes).on_lanes(2)


def _bucket_nbytes(notes: Sequence[str]) -> float:
    """`ddp-best` says in a note which size it chose."""
    for note in notes:
        if note.startswith("buckets of "):
            return float(note.split()[2]) * 2**20
    return BUCKET_NBYTES
