"""The survey's table against what this simulator says: published throughput, predicted throughput, cell by cell.

Software constants of the survey's clusters are calibrated on its ResNet-50 cells (benchmarks/survey_calibration.py) and
everything else is predicted: so errors are reported of the other models, ResNet-50's beside them.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources

from gradientflow.documents import Record
from gradientflow.lab.workloads import usual_batch, workload
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.sim.cluster import Cluster, read
from gradientflow.sim.predict import predict

#: Its methods, as recipes. ByteScheduler cut at 4,000,000 parameters, BytePS at 4,096,000 bytes.
METHODS = {
    "BSP-A2A": "bsp",
    "WFBP-A2A": "wfbp",
    "MG-WFBP": "mg-wfbp",
    "ByteScheduler-A2A": "bytescheduler:16MB",
    "BSP-PS": "bsp-ps",
    "WFBP-PS": "wfbp-ps",
    "ByteScheduler-PS": "bytescheduler-ps",
}
CALIBRATED_ON = "resnet-50"
#: Has an overhead of its own, and is judged by itself.
APART = "ByteScheduler-A2A"
#: What errors must stay below, in per cent: mean and worst of the six methods, mean of the one apart.
MEAN, WORST, MEAN_APART = 5.0, 15.0, 10.0
#: Winners count where the second is so much slower.
MARGIN = 0.03


class Cell(Record):
    """One measurement."""

    workload: str
    cluster: str
    method: str
    workers: int
    published: float

    @property
    def setting(self) -> tuple[str, str, int]:
        return self.workload, self.cluster, self.workers


class Compared(Record):
    cell: Cell
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.cell.published - 1


class Verdict(Record):
    """Errors in per cent, over the cells that nothing was calibrated on."""

    mean: float
    worst: float
    mean_apart: float
    winners: int
    settings: int

    @property
    def words(self) -> str:
        return f"MAE {self.mean:.1f} % worst {self.worst:.1f} % winners {self.winners}/{self.settings}"

    @property
    def holds(self) -> bool:
        within = self.mean <= MEAN and self.worst <= WORST and self.mean_apart <= MEAN_APART
        return within and self.winners == self.settings


@cache
def cells() -> tuple[Cell, ...]:
    text = (resources.files("gradientflow.sim") / "published" / "survey.toml").read_text()
    return tuple(
        Cell(workload=table["workload"], cluster=table["cluster"], method=method, workers=workers, published=value)
        for table in tomllib.loads(text)["tables"]
        for method, values in table["samples_per_s"].items()
        for workers, value in zip(table["workers"], values, strict=True)
    )


@cache
def _profile(name: str, device: str) -> Profile:
    return workload(name, device=device)


def predicted(cell: Cell, cluster: Cluster | None = None) -> float:
    """Samples per second. cluster: in place of the cell's own."""
    cluster = cluster or _cluster(cell.cluster)
    recipe = Recipe.parse(METHODS[cell.method])
    found = predict(_profile(cell.workload, cluster.device), recipe, cluster, cell.workers)
    return found.samples_per_s(usual_batch(cell.workload))


_cluster = cache(read)


def compare(wanted: Iterable[Cell]) -> list[Compared]:
    return [Compared(cell=cell, predicted=predicted(cell)) for cell in wanted]


def judge(compared: Sequence[Compared]) -> Verdict:
    unseen = [one for one in compared if one.cell.workload != CALIBRATED_ON]
    six = [100 * abs(one.error) for one in unseen if one.cell.method != APART]
    apart = [100 * abs(one.error) for one in unseen if one.cell.method == APART]
    right, num = winners(compared)
    return Verdict(
        mean=statistics.fmean(six), worst=max(six), mean_apart=statistics.fmean(apart), winners=right, settings=num
    )


def winners(compared: Sequence[Compared]) -> tuple[int, int]:
    """In how many settings the predicted winner is the published one, of those with a clear one; of the six methods."""
    right = num = 0
    for setting in dict.fromkeys(one.cell.setting for one in compared):
        found = [one for one in compared if one.cell.setting == setting and one.cell.method != APART]
        first, second, *_ = sorted((one.cell.published for one in found), reverse=True)
        if first > (1 + MARGIN) * second:
            num += 1
            best = max(found, key=lambda one: one.predicted)
            right += best.cell.published == first
    return right, num
