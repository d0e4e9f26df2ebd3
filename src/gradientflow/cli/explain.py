"""`gradientflow explain`: a run in plain words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradientflow.errors import DocumentError, UsageError


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory: what `run --out` was given.")],
) -> None:
    """Say where a run's time goes, what was chosen over what, who is slow, and what would help."""
    from gradientflow.rundir import RunDirectory
    from gradientflow.tune.explain import Situation
    from gradientflow.tune.explain import explain as in_words
    from gradientflow.tune.notes import Notes

    found = RunDirectory(run)
    if not run.is_dir():
        raise UsageError(f"{run} is no directory: give what `gradientflow run --out` was given")
    ranks = found.traced_ranks()
    if not ranks:
        raise UsageError(f"{run} holds no trace: run with `gradientflow run --out {run}`, and close the flow")
    traces = [found.trace(rank) for rank in ranks]
    profile, plan = found.profile, found.plan
    try:
        plan.check(profile)
    except ValueError as error:
        raise DocumentError(f"{run}: plan.json and profile.json are of different models: {error}") from None
    situation = Situation(profile, plan, found.recipe.check(), found.run.world, Notes.of(found))
    print(in_words(situation, traces))
