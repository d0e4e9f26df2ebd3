"""How long a process has been stopped: since it was last known to run, not since it was first seen stopped."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gradientflow.exchange.health import Health, Process, _started
from gradientflow.exchange.verdict import Life


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as found:
        yield found
        found.kill()


def test_two_short_stops_are_not_one_long_one(program: subprocess.Popen[bytes]) -> None:
    other = Process(host=Process.this().host, pid=program.pid, started=_started(program.pid))
    health = Health(dist.HashStore(), 0, (0, 1), 60.0, (Process.this(), other))

    def stopped_s() -> float:
        end_s = time.monotonic() + 20
        while (peer := health.peers()[1]).life is not Life.STOPPED:
            assert time.monotonic() < end_s
        return peer.stopped_s

    program.send_signal(signal.SIGSTOP)
    health.enter("gradients", 1)
    stopped_s()
    time.sleep(1.0)
    assert stopped_s() >= 1.0
    health.leave()
    program.send_signal(signal.SIGCONT)  # it takes part in the first step, and nobody has to wait for it
    program.send_signal(signal.SIGSTOP)
    health.enter("gradients", 2)
    assert stopped_s() < 1.0
    health.leave()
