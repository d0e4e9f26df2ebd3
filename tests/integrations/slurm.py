"""Slurm as it is, on the hosts of a lab: a controller on the first, a node on each; its files in a directory of yours.

Each host has a name of its own, which all of them know, as machines of a cluster have.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradientflow.lab import Lab

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
LIMIT_S = 30

# Nothing is authenticated: the switch of a lab has no way out.
SETTINGS = """
ClusterName=lab
SlurmctldHost=host-0({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """Why there can be none here; "" if there can. To be asked for: its daemons took from 20 s to more than 100."""
    if os.environ.get("GRADIENTFLOW_TEST_SLURM") != "1":
        return "Slurm's own daemons run if GRADIENTFLOW_TEST_SLURM=1"
    lacks = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacks:
        return f"no {', '.join(lacks)}: apt-get install slurm-wlm"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class Slurm:
    def __init__(self, lab: Lab, directory: Path) -> None:
        self._lab, self._directory = lab, directory
        names = {f"host-{number}": host.address for number, host in enumerate(lab.hosts)}
        nodes = [f"NodeName={name} NodeAddr={address} CPUs=8 State=UNKNOWN" for name, address in names.items()]
        (directory / "state").mkdir()
        (directory / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        head = lab.hosts[0].address
        settings = SETTINGS.format(head=head, directory=directory, nodes="\n".join(nodes))
        (directory / "slurm.conf").write_text(settings.lstrip())
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def on(self, number: int, argv: Sequence[str]) -> list[str]:
        """A command on a host that has a name."""
        named = f'hostname host-{number} && mount --bind "{self._directory}/hosts" /etc/hosts && exec "$@"'
        return self._lab.command(number, ["unshare", "--uts", "--mount", "sh", "-c", named, "sh", *argv])

    def ask(self, *argv: str) -> str:
        """What one of Slurm's own commands says on the first host."""
        done = subprocess.run(
            self.on(0, argv), env=self.environment, cwd=self._directory, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}{self.log()}"
        return done.stdout

    def log(self) -> str:
        return "".join(f"\n{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self._directory.glob("*.log")))

    def wait_until_up(self) -> None:
        end_s = time.monotonic() + LIMIT_S
        idle = ""
        while idle.split() != ["idle"] * len(self._lab.hosts):
            assert time.monotonic() < end_s, f"nodes are {idle!r}{self.log()}"
            time.sleep(0.1)
            with contextlib.suppress(AssertionError):  # the controller may not listen yet
                idle = self.ask("sinfo", "--noheader", "--Node", "--format=%t")


@contextlib.contextmanager
def started(lab: Lab, directory: Path) -> Iterator[Slurm]:
    """Up, with all nodes idle. Daemons end with it, or with the lab at the latest."""
    slurm = Slurm(lab, directory)
    commands = [slurm.on(0, ["slurmctld", "-D", "-c"])]
    commands += [slurm.on(number, ["slurmd", "-D", "-N", f"host-{number}"]) for number in range(len(lab.hosts))]
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=slurm.environment, stderr=subprocess.DEVNULL))
        slurm.wait_until_up()
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
