"""`gradientflow doctor --parity` on this machine: what it measures is parity, and what it says of time is a ratio."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.timeout(240)
def test_parity_and_a_a_on_this_machine() -> None:
    argv = [sys.executable, "-m", "gradientflow", "doctor", "--parity", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["parity"]
    assert found["world"] == 2 and found["ranks_are_identical"]
    assert found["gradients"] <= 1e-6 and found["weights"] <= 1e-10
    for ratio in (found["ours_to_ddp"], found["ddp_to_ddp"]):
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
