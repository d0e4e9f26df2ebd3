"""`gradientflow simulate`: what recipes would take on a cluster that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradientflow.cli.given import STRAGGLER_HELP, read_recipe
from gradientflow.errors import UsageError

if TYPE_CHECKING:
    from gradientflow.profiles import Profile
    from gradientflow.sim.cluster import Cluster
    from gradientflow.sim.predict import Prediction, Varying

#: Of one option or argument: everything that says how long computing takes.
DEVICE_HELP = "Whose published speed to take: 2080ti, v100-amp, ...; the cluster's own if none is given."


def simulate(
    workload: Annotated[str, typer.Option(help="A model's name, or a profile's file (.json).")] = "resnet-50",
    cluster: Annotated[
        str, typer.Option(help="A cluster's name or file (.toml), or a probe's (.json).")
    ] = "survey-10gbe",
    recipe: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    workers: Annotated[int, typer.Option(help="0: as many as the cluster has places.")] = 0,
    batch: Annotated[int, typer.Option(help="Samples of one worker; 0: the usual.")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    compute: Annotated[float, typer.Option(help="Seconds that one worker computes; 0: by the device.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Standard deviation of computing, as a share of it.")] = 0.0,
    straggler: Annotated[list[str] | None, typer.Option(help=STRAGGLER_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="The timeline of the (first) recipe, for Perfetto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Predict iteration time, throughput and exposed communication of recipes on a cluster."""
    from gradientflow.documents import check_writable
    from gradientflow.sim.cluster import read
    from gradientflow.sim.predict import simulate as simulate_one

    if out is not None:
        check_writable(out)
    place = read(cluster)
    num_workers = workers or place.places
    place.check_world(num_workers)
    profile, samples = read_workload(workload, place, device, batch, compute)
    varying = read_varying(jitter, straggler or [], num_workers)
    chosen = [read_recipe(text) for text in recipe or ["lazy"]]
    found = []
    for number, one in enumerate(chosen):
        prediction, trace = simulate_one(profile, one, place, num_workers, varying)
        found.append(prediction)
        if out is not None and number == 0:
            trace.write(out)
    if as_json:
        rows = [as_record(prediction, samples) for prediction in found]
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=1))
        return
    print(f"{workload} on {place.name}, {num_workers} workers; computing alone takes {found[0].alone_s * 1e3:.1f} ms\n")
    print(table(found, samples))
    if out is not None:
        print(f"\nThe timeline of {chosen[0]} is in {out}")


def read_workload(name: str, cluster: Cluster, device: str, batch: int, compute: float) -> tuple[Profile, int]:
    """A profile with times, and the samples of one worker's iteration."""
    from gradientflow.lab.workloads import load, usual_batch

    if compute < 0:
        raise UsageError(f"--compute {compute:g}: give 0 or more seconds")
    if name.endswith(".json"):
        return load(name, compute_s=compute or None), batch or 1
    samples = batch or usual_batch(name)
    if compute:
        return load(name, compute_s=compute, batch=samples), samples
    chosen = device or cluster.device
    if not chosen:
        raise UsageError(
            f"cluster {cluster.name} does not say how fast its workers compute: give --device or --compute"
        )
    return load(name, device=chosen, batch=samples), samples


def read_varying(jitter: float, stragglers: list[str], world: int) -> Varying:
    from gradientflow.sim.predict import Varying

    if not 0.0 <= jitter <= 0.5:
        raise UsageError(f"--jitter {jitter:g}: give 0 to 0.5")
    return Varying.parse(stragglers, world).model_copy(update={"jitter": jitter})


def as_record(prediction: Prediction, samples: int) -> dict[str, object]:
    # Where nothing takes time there is no rate, and JSON has no infinity.
    return prediction.model_dump() | {
        "samples_per_s": prediction.samples_per_s(samples) if prediction.iteration_s else None,
        "speedup": prediction.speedup,
        "batch": samples,
    }


def table(found: list[Prediction], samples: int) -> str:
    width = max(len("recipe"), *(len(prediction.recipe) for prediction in found))
    lines = [f"{'recipe':{width}}  iteration   p95       samples/s  speed-up  exposed    messages  waits most for"]
    for one in found:
        waits = next((f"{name} {seconds * 1e3:.1f} ms" for name, seconds in one.exposed_by.items()), "nothing")
        lines.append(
            f"{one.recipe:{width}}  {one.iteration_s * 1e3:7.1f} ms  {one.p95_s * 1e3:6.1f} ms "
            f"{one.samples_per_s(samples):10.1f}  {one.speedup:7.2f}x  {one.exposed_s * 1e3:6.1f} ms  "
            f"{one.num_messages:8}  {waits}"
        )
    return "\n".join(lines)
