"""The GradientFlow paper's headline, predicted: AlexNet on 512 GPUs, 410.2 times as fast as on one.

Sun et al. 2019 (arXiv 1902.06855) state the result, not all that it depends on. What is not stated is not fitted: it is
varied over the range that is reported or usual, and the prediction is a band.

- One GPU's speed: 95 epochs of ImageNet in 90 s at 410.2 times are at least 3297 images/s on one; 1514 thousand
  images/s on all, as later reported, would be 3692.
- Density: 85 to 90 % of the chunks are reported to be left out.
- theta, up to which messages are fused: from 1 MB to the whole model.

The rest is the cluster's file, `gradientflow-512`, which has its sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from gradientflow.documents import Record
from gradientflow.lab.workloads import workload
from gradientflow.profiles import Profile
from gradientflow.recipe import Recipe
from gradientflow.sim.cluster import Cluster, Wire, read
from gradientflow.sim.predict import after_backward, predict

SPEEDUP, WORLD, BATCH = 410.2, 512, 128
IMAGES, EPOCHS, SECONDS = 1_281_167, 95, 90.0
#: Images a second of one GPU; density; theta.
SPEEDS = (3297.0, 3500.0, 3692.0)
DENSITIES = ("10%", "12%", "15%")
THETAS = ("1MB", "4MB", "25MB", "100MB", "256MB")
#: How far the band may reach to each side of its middle.
WIDTH = 0.2
#: Of the middle of the ranges.
USUAL = 3500.0, "12%", "25MB"
NAIVE_WORLD, NAIVE_SPEEDUP = 64, 2.5
OURS = "flow-levels+csc:12%+fp16"


class Case(Record):
    images_s: float
    density: str
    theta: str
    speedup: float

    @property
    def training_s(self) -> float:
        """Of all epochs, if nothing else took time."""
        return EPOCHS * IMAGES / (self.images_s * self.speedup)


def alexnet(images_s: float) -> Profile:
    return workload("alexnet", compute_s=BATCH / images_s, batch=BATCH)


def band() -> list[Case]:
    cluster = read("gradientflow-512")
    return [
        Case(
            images_s=images_s,
            density=density,
            theta=theta,
            speedup=_speedup(alexnet(images_s), f"lazy:{theta}-ring+csc:{density}+fp16", cluster, WORLD),
        )
        for images_s, density, theta in product(SPEEDS, DENSITIES, THETAS)
    ]


def bars(world: int = WORLD) -> list[tuple[str, float]]:
    """What each technique adds to those before it."""
    cluster = read("gradientflow-512")
    images_s, density, theta = USUAL
    profile = alexnet(images_s)
    late = after_backward(profile)
    return [
        ("layer by layer, rings across hosts, TCP", _speedup(late, "wfbp-ring", _naive(cluster), world)),
        ("+ rings along hosts, RDMA", _speedup(late, "wfbp-ring", cluster, world)),
        ("+ mixed precision", _speedup(late, "wfbp-ring+fp16", cluster, world)),
        ("+ overlap", _speedup(profile, "wfbp-ring+fp16", cluster, world)),
        ("+ lazy all-reduce", _speedup(profile, f"lazy:{theta}-ring+fp16", cluster, world)),
        ("+ coarse-grained sparse", _speedup(profile, f"lazy:{theta}-ring+csc:{density}+fp16", cluster, world)),
    ]


def naive() -> float:
    """Of 64 GPUs whose software knows neither fusion, overlap nor half precision, nor which GPUs share a host: all
    eight of a host send through its one card, over TCP, which gets 55 % of such a card's rate, the middle of what is
    usual."""
    late = after_backward(alexnet(USUAL[0]))
    return _speedup(late, "wfbp-ring", _naive(read("gradientflow-512")), NAIVE_WORLD)


def _naive(cluster: Cluster) -> Cluster:
    assert cluster.between is not None
    shared = Wire(protocol="tcp", bits_per_s=56e9 / cluster.workers_per_host, efficiency=0.55)
    return cluster.model_copy(update={"between": shared})


def _speedup(profile: Profile, recipe: str, cluster: Cluster, world: int) -> float:
    return predict(profile, Recipe.parse(recipe), cluster, world).speedup


def report() -> tuple[list[str], bool]:
    """In lines, and whether the band holds what was published and is narrow enough."""
    cases = band()
    low, high = min(cases, key=lambda case: case.speedup), max(cases, key=lambda case: case.speedup)
    middle = (low.speedup + high.speedup) / 2
    half = (high.speedup - low.speedup) / 2 / middle
    holds = low.speedup <= SPEEDUP <= high.speedup and half <= WIDTH
    return list(_lines(low, high, middle, half, holds)), holds


def _lines(low: Case, high: Case, middle: float, half: float, holds: bool) -> Iterator[str]:
    yield f"AlexNet, {WORLD} workers, batch {BATCH}: published {SPEEDUP}x"
    for name, case in (("least", low), ("most", high)):
        yield (
            f"  predicted at {name} {case.speedup:.1f}x  ({case.images_s:.0f} images/s on one, density {case.density},"
            f" theta {case.theta}); {EPOCHS} epochs in {case.training_s:.0f} s, published {SECONDS:.0f} s"
        )
    yield f"  the band is {middle:.1f}x +- {100 * half:.1f} % and {'holds' if holds else 'DOES NOT HOLD'} {SPEEDUP}x"
    yield ""
    yield f"What each technique adds ({USUAL[0]:.0f} images/s, density {USUAL[1]}, theta {USUAL[2]}):"
    for name, speedup in bars():
        yield f"  {name:42} {speedup:6.1f}x  {'#' * round(speedup / 8)}"
    ours = _speedup(alexnet(USUAL[0]), OURS, read("gradientflow-512"), WORLD)
    yield f"  {'ours: ' + OURS:42} {ours:6.1f}x  {'#' * round(ours / 8)}"
    yield ""
    yield (
        f"{NAIVE_WORLD} GPUs, fp32, layer by layer after backward, all GPUs of a host through its one card over TCP:"
        f" {naive():.1f}x (published of the systems of the day: {NAIVE_SPEEDUP}x)"
    )
