"""What a run leaves behind, if somebody asked for it."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import torch

from gradientflow.errors import DocumentError
from gradientflow.network import Network
from gradientflow.recipe import Recipe
from gradientflow.rundir import Run, RunDirectory, now
from gradientflow.trace import Recorder

_log = logging.getLogger(__name__)

#: A script that attaches several flows gets a directory for each: RUN, RUN/flow-2, ...
_run_directories = itertools.count(1)


def run_directory(
    path: Path | None, recipe: Recipe, world: int, network: Network, *, is_first: bool
) -> RunDirectory | None:
    """There, if anywhere; the first of the workers says in it what is run."""
    if path is None:
        return None
    from gradientflow import __version__

    number = next(_run_directories)
    directory = RunDirectory(path if number == 1 else path / f"flow-{number}").create()
    if is_first:
        run = Run(recipe=str(recipe), world=world, started=now(), gradientflow=__version__, torch=torch.__version__)
        directory.write_run(run, recipe, network)
    return directory


class LiveTrace:
    """A run's trace as a file while it trains, for who watches: its latest spans, now and then, by the training thread.

    Writing takes no more than `SHARE` of the time. A file that cannot be written is one warning: training goes on."""

    EVERY_S, SHARE, SPANS = 2.0, 0.002, 1000

    def __init__(self, directory: RunDirectory, recorder: Recorder, rank: int) -> None:
        self._directory, self._recorder, self._rank = directory, recorder, rank
        self._next_s = recorder.clock() + self.EVERY_S

    def step_ended(self) -> None:
        began_s = self._recorder.clock()
        if began_s < self._next_s:
            return
        try:
            self._directory.write_trace(self._recorder.trace(self._rank, self.SPANS))
        except DocumentError as error:
            self._next_s = float("inf")
            _log.warning("nobody can watch this run any longer: %s", error)
            return
        self._next_s = began_s + max(self.EVERY_S, (self._recorder.clock() - began_s) / self.SHARE)
