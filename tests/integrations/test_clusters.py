"""The files for clusters: hosts of a lab are the machines, Slurm is Slurm where it is installed, and what the operator
of Kubernetes would do is done here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
import slurm
import torch
from pydantic import BaseModel, ConfigDict, Field
from test_examples import LIMIT_S, ROOT, largest_difference

from gradientflow.lab import Lab, LabUnavailable

CLUSTERS = ROOT / "examples" / "clusters"
BIN = str(Path(sys.executable).parent)
COMMON = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        with Lab(2, None) as lab:
            yield lab
    except LabUnavailable as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def started(argv: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, of which nothing is left behind."""
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=COMMON | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ended_well(process: subprocess.Popen[str]) -> str:
    words = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, words
    return words


def test_shell_files_are_shell() -> None:
    for path in (*CLUSTERS.glob("*.sh"), *CLUSTERS.glob("*.sbatch")):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_job_on_two_hosts_goes_on_when_one_is_lost(lab: Lab, tmp_path: Path) -> None:
    checkpoint, losses = tmp_path / "gpt", tmp_path / "losses.json"
    script = ["examples/gpt/train.py", "--steps", "200", "--save-every", "20", "--accumulate", "1", "--batch", "2"]
    script += ["--resume", "--checkpoint", str(checkpoint), "--losses", str(losses)]
    told = {"HEAD": lab.hosts[0].address, "NNODES": "1:2", "RDZV_CONF": "last_call_timeout=2,join_timeout=60"}
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(
                started(
                    lab.command(number, [str(CLUSTERS / "torchrun.sh"), *script]),
                    **told,
                    ADDRESS=lab.hosts[number].address,
                )
            )
            for number in range(2)
        ]
        end_s = time.monotonic() + LIMIT_S
        while not any(checkpoint.glob("[0-9]*")):  # one that is whole
            assert time.monotonic() < end_s and hosts[0].poll() is None
            time.sleep(0.1)
        for pid in running_on(lab, 1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        words = ended_well(hosts[0])
    found = json.loads(losses.read_text())
    assert len(found) == 200 and found[-1] < found[0]
    assert "2 workers, from step 0" in words
    again = re.search(r"1 workers, from step (\d+)", words)
    assert again and int(again[1]) >= 20, words


def running_on(lab: Lab, host: int) -> list[int]:
    """torchrun, and its workers, which have sessions of their own."""
    inside = os.stat(lab.hosts[host].namespace).st_ino
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.stat(entry / "ns" / "net").st_ino == inside:
                found.append(int(entry.name))
    return found


SRUN = """#!/usr/bin/env bash
# A stand-in: the command once a node, all of them here.
while [[ $1 == --* ]]; do shift; done
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & children+=($!); done
for child in "${children[@]}"; do wait "$child" || exit 1; done
"""


@pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())
@pytest.mark.timeout(2 * LIMIT_S)
def test_slurm_trains_on_two_nodes(lab: Lab, tmp_path: Path) -> None:
    """A job of Slurm's own controller on two nodes of its own, each with its name and its network."""
    out, written = tmp_path / "weights.pt", tmp_path / "job.out"
    (tmp_path / "slurm").mkdir()
    with slurm.started(lab, tmp_path / "slurm") as cluster:
        submit = ["sbatch", "--wait", f"--chdir={ROOT}", f"--output={written}", str(CLUSTERS / "slurm.sbatch")]
        script = ["examples/plain_attach.py", "--out", str(out)]
        with started(cluster.on(0, [*submit, *script]), SLURM_CONF=cluster.environment["SLURM_CONF"]) as job:
            said = job.communicate(timeout=LIMIT_S)[0]
        words = written.read_text() if written.exists() else ""
        assert job.returncode == 0, said + words + cluster.log()
        assert "NumNodes=2" in cluster.ask("scontrol", "show", "job", "1")
    assert "lazy: loss" in words
    assert out.exists()


@pytest.mark.skipif(not slurm.missing(), reason="Slurm's own daemons run instead")
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_slurm_file_trains_with_what_slurm_would_tell(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "host-[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    slurm |= {"PATH": f"{tmp_path}:{COMMON['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    out = tmp_path / "weights.pt"
    with started(
        ["bash", str(CLUSTERS / "slurm.sbatch"), "examples/plain_attach.py", "--out", str(out)], **slurm
    ) as job:
        assert "lazy: loss" in ended_well(job)
    assert out.exists()


# What the definition of PyTorchJob (kubeflow.org/v1) and the operator's own check ask of the fields that our file has.
# Typed in from their names and types: the definition itself is half a megabyte. Other fields are refused here.
QUANTITY = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE])?$"
Strict = ConfigDict(extra="forbid", strict=True)


class Variable(BaseModel):
    model_config = Strict
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    value: str


class Resources(BaseModel):
    model_config = Strict
    limits: dict[str, Annotated[str, Field(pattern=QUANTITY)]]


class Container(BaseModel):
    model_config = Strict
    name: Literal["pytorch"]  # one of this name in each replica
    image: str = Field(min_length=1)
    workingDir: str
    command: list[str]
    env: list[Variable]
    resources: Resources


class Pod(BaseModel):
    model_config = Strict
    containers: list[Container] = Field(min_length=1)


class Template(BaseModel):
    model_config = Strict
    spec: Pod


class Replica(BaseModel):
    model_config = Strict
    replicas: int = Field(ge=0)
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: Template


class Master(Replica):
    replicas: Literal[1]


class Replicas(BaseModel):
    model_config = Strict
    Master: Master
    Worker: Replica


class Specification(BaseModel):
    model_config = Strict
    pytorchReplicaSpecs: Replicas


class Metadata(BaseModel):
    model_config = Strict
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")


class PyTorchJob(BaseModel):
    model_config = Strict
    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: Specification


@pytest.mark.timeout(2 * LIMIT_S)
def test_the_kubernetes_file_trains_with_what_the_operator_tells(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="make test-integrations has it")
    job = PyTorchJob.model_validate(yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text()))
    replicas = job.spec.pytorchReplicaSpecs
    assert (replicas.Master.replicas, replicas.Worker.replicas) == (1, 3)
    containers = [each.template.spec.containers[0] for each in (replicas.Master, replicas.Worker)]
    assert containers[0] == containers[1]
    told = {each.name: each.value for each in containers[0].env} | {"GLOO_SOCKET_IFNAME": "lo"}
    operator = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": "2"}
    command = list(containers[0].command)
    with contextlib.ExitStack() as stack:
        pods = [stack.enter_context(started(command, **told, **operator, RANK=str(rank))) for rank in range(2)]
        words = [ended_well(pod) for pod in pods]
    assert "lazy: loss" in words[0]


@pytest.mark.timeout(3 * LIMIT_S)
def test_mpirun_trains_as_stock_ddp(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="pip install 'gradientflow[mpi]'")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "GLOO_SOCKET_IFNAME": "lo"}
    weights = []
    for options in ([], ["--stock"]):
        out = tmp_path / f"weights{len(weights)}.pt"
        argv = [str(CLUSTERS / "mpirun.sh"), "examples/mpi_digits.py", "--out", str(out), *options]
        with started(argv, **root, HOSTS="localhost:2", MPI_OPTIONS="--oversubscribe") as job:
            ended_well(job)
        weights.append(torch.load(out))
    assert largest_difference(*weights) == 0
