"""Finds the software constants of the survey's clusters: those with which its ResNet-50 cells come out best.

    python benchmarks/survey_calibration.py

Links are not calibrated: they have the rates that their sources say, and servers' ports are as little duplex as the
survey's authors observed. One parameter after another is moved up and down
by ever smaller factors as long as the mean absolute error of the ResNet-50 cells falls by a tenth of a per cent. Other
models are not looked at. Prints what belongs into the clusters' files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradientflow.sim.cluster import Cluster, read
from gradientflow.sim.survey import APART, CALIBRATED_ON, Cell, cells, predicted

#: What is calibrated; it starts from what the clusters' files say.
LOCKSTEP = (
    ("collective", "launch_s"),
    ("collective", "hop_s"),
    ("overheads", "harness_s"),
    ("overheads", "interference_s_per_byte"),
    ("overheads", "bus_while_computing"),
)
SERVED = (("servers", "bus_s_per_byte"), ("servers", "startup_s"))
#: A parameter is moved only if that gains so much of the mean error: less is the noise of single cells.
GAIN = 1e-3
FACTORS = (1.2, 1.08, 1.03)

Values = dict[tuple[str, str], float]


def changed(cluster: Cluster, values: Values) -> Cluster:
    for (part, name), value in values.items():
        section = getattr(cluster, part).model_copy(update={name: value})
        cluster = cluster.model_copy(update={part: section})
    return cluster


def error(values: Values, seen: Sequence[Cell]) -> float:
    clusters = {name: changed(read(name), values) for name in {cell.cluster for cell in seen}}
    return statistics.fmean(abs(predicted(cell, clusters[cell.cluster]) / cell.published - 1) for cell in seen)


def descend(start: Values, fixed: Values, seen: Sequence[Cell]) -> Values:
    values = dict(start)
    best = error(fixed | values, seen)
    print(f"{100 * best:.2f} %  of {len(seen)} cells")
    for factor in FACTORS:
        moved = True
        while moved:
            moved = False
            for key in values:
                for by in (factor, 1 / factor):
                    tried = values | {key: min(1.0, values[key] * by)}
                    found = error(fixed | tried, seen)
                    if found < best - GAIN:
                        values, best, moved = tried, found, True
                        print(f"{100 * best:.2f} %  {key[1]} = {values[key]:.4g}", flush=True)
                        break
    return values


def main() -> None:
    calibrated = [cell for cell in cells() if cell.workload == CALIBRATED_ON]
    wanted: list[tuple[Sequence[tuple[str, str]], list[Cell]]] = [
        (LOCKSTEP, [cell for cell in calibrated if not cell.method.endswith("PS") and cell.method != APART]),
        (SERVED, [cell for cell in calibrated if cell.method.endswith("PS")]),
    ]
    given = read(calibrated[0].cluster)
    found: Values = {}
    for keys, seen in wanted:
        found |= descend({(part, name): getattr(getattr(given, part), name) for part, name in keys}, found, seen)
    for (part, name), value in found.items():
        print(f"[{part}] {name} = {value:.4g}")


if __name__ == "__main__":
    main()
