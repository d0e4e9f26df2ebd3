"""For tests of hosts on this machine."""

from __future__ import annotations

import pytest

from gradientflow.bench.arena import arena


def needs_a_lab() -> None:
    """Skip, with the reason, where there can be none."""
    with arena(2, None) as place:
        if place.notes:
            pytest.skip(place.notes[0])
