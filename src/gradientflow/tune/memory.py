"""What has won before, for the next run of the same model on the same machines: files in the user's cache directory.

A file an entry, so that two jobs never write the same one half each. What is in them is believed only as far as it can
be checked: a plan has to be one of this model, and is run for a few steps before it counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from gradientflow.documents import Document
from gradientflow.errors import DocumentError
from gradientflow.profiles import Profile
from gradientflow.tune.candidates import Candidate

_log = logging.getLogger(__name__)

#: Files that are kept, those that were written last; and bytes of one (a plan of 10,000 tensors takes about 2 MB).
MOST_FILES, MOST_NBYTES = 64, 8 * 2**20
#: How much longer or shorter than remembered a step may take.
TOLERANCE = 1.2
#: Steps of the check, of which the first is not counted.
CHECKED = 4


class Remembered(Document):
    """A file."""

    model: str
    cluster: str
    candidate: Candidate
    #: Of an iteration, on the slowest rank.
    iteration_s: float = Field(gt=0.0, allow_inf_nan=False)

    def still_holds(self, iteration_s: float) -> bool:
        return 1 / TOLERANCE <= iteration_s / self.iteration_s <= TOLERANCE


def fingerprint(facts: Mapping[str, object]) -> str:
    """Of whatever JSON can hold, and of nothing else.

    >>> fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint_of_model(profile: Profile, recipe: str) -> str:
    """Tensors by name, shape and type, in any order, and what is chosen among."""
    tensors = sorted([tensor.name, list(tensor.shape), *tensor.pool] for tensor in profile.tensors)
    return fingerprint({"recipe": recipe, "tensors": tensors})


class Cache:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def recall(self, model: str, cluster: str) -> Remembered | None:
        """What is remembered of the two; None, and one warning, if that cannot be read."""
        path = self._path(model, cluster)
        try:
            if not path.exists():
                return None
            if path.stat().st_size > MOST_NBYTES:
                raise DocumentError(f"{path}: larger than what is written there")
            found = Remembered.read(path)
        except (DocumentError, OSError) as error:
            _log.warning("what was remembered is not used, and written anew: %s", error)
            return None
        return found if (found.model, found.cluster) == (model, cluster) else None

    def keep(self, remembered: Remembered) -> None:
        """A directory that cannot be written to is a warning: training goes on."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            remembered.write(self._path(remembered.model, remembered.cluster))
            self._forget_the_oldest()
        except (DocumentError, OSError) as error:
            _log.warning("what has won is not remembered: %s", error)

    def _path(self, model: str, cluster: str) -> Path:
        return self.directory / f"{model}-{cluster}.json"

    def _forget_the_oldest(self) -> None:
        written = sorted(self.directory.glob("*.json"), key=os.path.getmtime)
        for path in written[:-MOST_FILES]:
            path.unlink(missing_ok=True)
