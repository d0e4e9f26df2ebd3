"""Does the machine carry what a lab promises? A rate that it cannot is refused, not measured against."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

from gradientflow.errors import UsageError
from gradientflow.lab import traffic
from gradientflow.lab.hosts import Lab
from gradientflow.lab.limits import format_rate, goodput
from gradientflow.lab.shell import first_line

#: Of what TCP can have of a link's rate. Below it the machine, not the link, would be what is measured.
ENOUGH = 0.9
#: Half a second carries 40 packets then; of a slower link it says little.
LEAST_RATE = 1e6

_PORT = 7070
_WARM_UP_S = 0.3


def check_rate(lab: Lab, seconds: float = 0.5) -> tuple[float, ...]:
    """What each host receives, as by `measure_ring`; an error if that is not what links of their rates carry."""
    received = measure_ring(lab, seconds)
    for number, host in enumerate(lab.hosts):
        rates = [rate for rate in (host.rate, lab.hosts[number - 1].rate) if rate is not None]
        if rates and received[number] < ENOUGH * goodput(min(rates)):
            raise UsageError(
                f"this machine carries {_rounded(received[number])} to host {number} while all hosts send, where TCP on"
                f" a link of {format_rate(min(rates))} has {_rounded(goodput(min(rates)))}: choose a lower rate or"
                " fewer hosts, or stop what else runs here"
            )
    return received


def measure_ring(lab: Lab, seconds: float) -> tuple[float, ...]:
    """What each host receives, in bits per second, while every host sends to the next; a lone one to itself.

    All at once, since that is what a ring all-reduce does, and what two cores may not carry although they carry one
    pair."""
    with contextlib.ExitStack() as stack:
        programs = []
        for number, host in enumerate(lab.hosts):
            following = lab.hosts[(number + 1) % len(lab.hosts)]
            argv = [sys.executable, "-I", "-S", traffic.__file__, host.address, following.address, str(_PORT)]
            program = lab.popen(number, argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.enter_context(program)
            stack.callback(program.kill)
            programs.append(program)
        for number, program in enumerate(programs):
            if not first_line(program.stdout):
                raise UsageError(f"host {number} did not connect for the measurement: is its port {_PORT} in use?")
        time.sleep(_WARM_UP_S)
        before, before_s = lab.counters(), time.monotonic()
        time.sleep(seconds)
        after, after_s = lab.counters(), time.monotonic()
    return tuple(
        8 * (late.rx_bytes - early.rx_bytes) / (after_s - before_s) for early, late in zip(before, after, strict=True)
    )


def _rounded(rate: float) -> str:
    return format_rate(float(f"{rate:.3g}"))
