"""Commands that documents print, run as they are printed, by a reader who has a script and a model.

Names of hosts become this machine's loopback and ports become free ones. Bake-offs are the same with a tiny model: the
options that say how long they take are replaced (`SHORTER`). What is not run here says why (`ELSEWHERE`), and a command
that is in neither list fails `test_no_command_is_left_out`. A file that a command reads is written by the command that
documents print for that (`SOURCES`), if it is not there yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from documents import PAGES, ROOT, commands
from gradientflow.lab import Lab, LabUnavailable

BIN = str(Path(sys.executable).parent)
LIMIT_S = 100.0
#: What takes the place of options that bake-offs are given.
SHORTER = {"--scale": "0.01", "--compute": "0.02", "--iterations": "9", "--max-rounds": "9"}
LONGER = {"--compute-ratio", "--device", *SHORTER}

TRAIN = r"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import gradientflow


def build():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, torch.randn(8, 32), lambda model, images: model(images).square().mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    epochs = parser.parse_args().epochs
    elastic = os.environ.get("GRADIENTFLOW_ELASTIC") == "1"
    if not elastic and "OMPI_COMM_WORLD_SIZE" in os.environ:
        gradientflow.init_from_mpi()
    elif not elastic:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, images, loss = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flow = gradientflow.attach(model, optimizer)
    while flow.step < 30 * epochs:
        optimizer.zero_grad()
        loss(model, images).backward()
        optimizer.step()
    print(f"trained {flow.step} steps\n", end="", flush=True)  # whole, beside others
    flow.close()
    if dist.is_initialized():
        dist.destroy_process_group()
"""


class Group(NamedTuple):
    """Commands that are at work at the same time."""

    printed: tuple[str, ...]
    #: By one of them.
    says: str
    #: All but the last one go on for ever.
    for_ever: bool = False


def one(printed: str, says: str = "") -> Group:
    return Group((printed,), says)


RUN_TWO_HOSTS = (
    "gradientflow run --nnodes 2 --node-rank {} --rdzv-endpoint host-0:29500 --workers 4 --recipe flow-ps:2 train.py"
)
PRINTED = [
    one("gradientflow doctor", "torch"),
    one("gradientflow profile model.py:build"),
    one("gradientflow profile train.py:build"),
    one("gradientflow profile model.py:make --out profile.json", "profile.json"),
    one("gradientflow probe --hosts 4 --rate 1Gbit", "bytes"),
    one("gradientflow probe --out network.json", "network.json"),
    one("gradientflow bench --workload profile.json --rate 1Gbit --methods ddp-best,lazy,flow,lazy+bf16", "lazy+bf16"),
    one(
        "gradientflow bench --workload resnet-50 --hosts 4 --rate 1Gbit --compute 1.2 --methods "
        "ddp,ddp-best,lazy,lazy+bf16 --out results.json",
        "results.json",
    ),
    one("gradientflow compare results.json", "lazy"),
    one("gradientflow report results.json", ".html"),
    one("gradientflow report results.json --out page.html", "page.html"),
    one("gradientflow report learning.json", ".html"),
    one("gradientflow cluster network.json --out mine.toml", "mine.toml"),
    one("gradientflow simulate --workload bert-base --cluster cloud-25gbe --workers 16 --recipe flow", "flow"),
    one("gradientflow simulate --workload bert-base --cluster survey-10gbe --workers 32 --recipe lazy --recipe flow"),
    one(
        "gradientflow simulate --workload bert-base --cluster survey-10gbe --workers 32 --recipe wfbp --recipe flow "
        "--recipe wfbp-ps",
        "wfbp-ps",
    ),
    one(
        "gradientflow simulate --workload gpt-2 --cluster cloud-25gbe --workers 16 --recipe lazy --recipe "
        "lazy@diloco:50",
        "diloco",
    ),
    one("gradientflow simulate --workload profile.json --cluster cloud-25gbe --workers 16 --recipe lazy --recipe flow"),
    one("gradientflow simulate --workload profile.json --cluster network.json --recipe gradientflow:10%"),
    one("gradientflow sweep --workload bert-base --rate 10Gbit,25Gbit,100Gbit --out who-wins.html", "who-wins.html"),
    one("gradientflow reproduce survey", "MAE"),
    one("gradientflow reproduce gradientflow", "410"),
    one("gradientflow tune --workload bert-base --cluster survey-10gbe --workers 32", "of DDP's"),
    one("gradientflow tune --workload profile.json --network network.json --out tuned", "tuned"),
    one("gradientflow export ddp --workload profile.json --network network.json --out buckets.json", "buckets by"),
    one("gradientflow export horovod --workload profile.json --network network.json", "HOROVOD"),
    one("gradientflow export nccl --cluster survey-10gbe --channels 2 --out nccl_tuner.conf"),
    one(
        "gradientflow export nccl --measured ring-ll.json --measured ring-simple.json --measured tree-ll.json",
        "allreduce",
    ),
    one("gradientflow keys keys", "keys"),
    one("torchrun --standalone --nproc-per-node 2 train.py", "trained 30 steps"),
    one("torchrun --standalone --nproc-per-node 4 train.py", "trained 30 steps"),
    one("torchrun --nproc-per-node 4 train.py", "trained 30 steps"),
    one("gradientflow run --workers 2 --out runs/first train.py", "trained 30 steps"),
    one("gradientflow report runs/first", "run.html"),
    one("gradientflow run --workers 4 --out runs/now train.py", "trained 30 steps"),
    one("gradientflow report runs/now", "run.html"),
    one("gradientflow run --workers 2 --recipe lazy+bf16 train.py", "trained 30 steps"),
    one("gradientflow run --recipe lazy:4MB --workers 4 train.py --epochs 3", "trained 90 steps"),
    one("gradientflow run --recipe lazy-ring train.py", "trained 30 steps"),
    one("gradientflow run --recipe flow-best train.py", "trained 30 steps"),
    one("gradientflow run --recipe tuned/recipe.toml train.py", "trained 30 steps"),
    one("gradientflow run --workers 4 --recipe bytescheduler-ps train.py", "trained 30 steps"),
    one("gradientflow report runs/20261116-020000-lazy", "run.html"),
    one("gradientflow explain runs/20261116-020000-auto", "computing"),
    one("mpirun -n 4 --bind-to none python train.py", "trained 30 steps"),
    one("gradientflow run --elastic --workers 4 --recipe lazy --max-restarts 3 train.py", "trained"),
    one("gradientflow run --elastic --workers 4 --recipe lazy-ps:2@ssp:4 --max-restarts 3 train.py", "trained"),
    Group(
        (
            "gradientflow store --port 29500",
            "gradientflow run --elastic --job HOST:29500 --workers 4 --recipe lazy train.py",
        ),
        "trained",
        for_ever=True,
    ),
    Group(
        (
            "gradientflow store --port 29500",
            "gradientflow server --job HOST:29500",
            "gradientflow server --job HOST:29500",
            "gradientflow run --elastic --job HOST:29500 --workers 4 --recipe lazy-ps:2@ssp:4 train.py",
        ),
        "trained",
        for_ever=True,
    ),
    Group(
        (
            "gradientflow server --job host-0:29500",
            "gradientflow server --job host-0:29500",
            RUN_TWO_HOSTS.format(1),
            RUN_TWO_HOSTS.format(0),
        ),
        "trained 30 steps",
    ),
    Group(
        tuple(
            f"gradientflow run --nnodes 2 --node-rank {rank} --rdzv-endpoint host-0:29400 --workers 4 --recipe flow "
            "train.py"
            for rank in (1, 0)
        ),
        "trained 30 steps",
    ),
    Group(
        (
            "torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "
            "host-0:29400 train.py",
        )
        * 2,
        "trained 30 steps",
    ),
    Group(
        (
            "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host-0:29400 -m gradientflow "
            "doctor",
        )
        * 4,
        "",
    ),
    Group(
        (
            "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m gradientflow "
            "bench --workload bert-base --device a100 --out results.json",
        )
        * 4,
        "results.json",
    ),
]

RUN = "gradientflow run --workers 2 --out {} train.py"
#: By file, what writes it.
SOURCES = {
    "network.json": "gradientflow probe --out network.json",
    "profile.json": "gradientflow profile model.py:make --out profile.json",
    "results.json": "gradientflow bench --workload resnet-50 --methods ddp,lazy --out results.json",
    "tuned/recipe.toml": "gradientflow tune --workload profile.json --network network.json --out tuned",
    "runs/first": RUN.format("runs/first"),
    "runs/now": "gradientflow run --workers 4 --out runs/now train.py",
    # Named after the moment that a reader's run began.
    "runs/20261116-020000-lazy": RUN.format("runs/20261116-020000-lazy"),
    "runs/20261116-020000-auto": RUN.format("runs/20261116-020000-auto --recipe auto"),
}

#: By how a command begins.
ELSEWHERE = {
    "gradientflow bench ": "a minute each even so: those above stand for all, and tests/test_commands.py parses all",
    "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host-0:29400 -m gradientflow probe": (
        "as without torchrun, above; tests/procs/test_probe.py probes a world that is there"
    ),
    "make ": "what this is part of; `make run` and `make chaos` take minutes to half an hour",
    "pip ": "test_wheel.py",
    "python benchmarks/": "measurements, of minutes to hours",
    "python examples/ray_digits.py": "test_examples.py",
    "torchrun --standalone --nproc-per-node 4 examples/gpt/": "test_gpt.py",
    "examples/clusters/": "test_clusters.py",
    "sbatch ": "test_clusters.py",
    "kubectl ": "test_clusters.py: there is no Kubernetes here",
    "gradientflow doctor --parity": "test_doctor_parity.py",
    "gradientflow watch ": "it never ends: tests/unit/test_watch.py",
    "gradientflow server --job host-0:29500 --keys keys": "tests/procs/test_servers.py trains with key files",
    "gradientflow server --job HOST:PORT": "the same as with a port, above",
    "gradientflow run --nnodes 4 --node-rank 0 --rdzv-endpoint HOST:PORT": "four hosts, as two above",
    "gradientflow --install-completion": "it writes to the reader's shell",
}


def test_no_command_is_left_out() -> None:
    found = {shlex.join(each.words) for page in PAGES for each in commands(page) if not each.mentioned}
    run = {shlex.join(shlex.split(printed)) for group in PRINTED for printed in group.printed}
    assert run <= found, f"no document prints this any more: {run - found}"
    assert not {each for each in found - run if not each.startswith(tuple(ELSEWHERE))}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader types."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "train.py").write_text(TRAIN)
    (desk / "model.py").write_text(TRAIN.replace("def build", "def make") + "\nbuild = make\n")
    shutil.copy(ROOT / "benchmarks" / "results" / "2026-11-16-accuracy-digits.json", desk / "learning.json")
    for name, seconds in (("ring-ll", 2e-5), ("ring-simple", 4e-5), ("tree-ll", 3e-5)):
        (desk / f"{name}.json").write_text(json.dumps(nccl_tests(name, seconds)))
    return desk


def nccl_tests(name: str, seconds: float) -> dict[str, object]:
    """As nccl-tests would write it."""
    algorithm, protocol = name.split("-")
    return {
        "args": ["all_reduce_perf"],
        "env": [f"NCCL_ALGO={algorithm}", f"NCCL_PROTO={protocol}"],
        "config": {"nthreads": 1, "ngpus": 1, "devices": [{"rank": rank, "host": f"h{rank}"} for rank in range(4)]},
        "results": [
            {"size": size, "in_place": {"time": 1e6 * (seconds + size / 1e9)}} for size in (1024, 65536, 2**20)
        ],
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def typed(printed: str, port: int) -> list[str]:
    """What the reader types on this machine."""
    words = shlex.split(
        re.sub(r"(HOST|host-0)\b", "127.0.0.1", printed).replace("29500", str(port)).replace("29400", str(port))
    )
    if "bench" in words:
        for option in [word for word in words if word in LONGER]:
            at = words.index(option)
            del words[at : at + 2]
        words += [word for pair in SHORTER.items() for word in pair]
    return words


@contextlib.contextmanager
def started(words: list[str], desk: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "COLUMNS": "200",
    }
    process = subprocess.Popen(
        words,
        cwd=desk,
        env=environment,
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
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(0.2)
                os.killpg(process.pid, signal.SIGKILL)


def supply(printed: str, desk: Path) -> None:
    """Whatever it reads and is not there."""
    for name, source in SOURCES.items():
        if name in printed and printed != source and not (desk / name).exists():
            supply(source, desk)
            with started(typed(source, free_port()), desk) as process:
                words = process.communicate(timeout=LIMIT_S)[0]
            assert process.returncode == 0, words


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("group", PRINTED, ids=[" & ".join(dict.fromkeys(group.printed)) for group in PRINTED])
def test_a_printed_command_works(group: Group, desk: Path) -> None:
    if group.printed[0].startswith(("gradientflow probe", "gradientflow bench")):
        skip_without_lab()
    port = free_port()
    for printed in group.printed:
        supply(printed, desk)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(typed(printed, port), desk)) for printed in group.printed]
        words = ""
        for process in processes[-1:] if group.for_ever else reversed(processes):
            words += process.communicate(timeout=LIMIT_S)[0]
            assert process.returncode == 0, words
        assert group.says in words, words


def skip_without_lab() -> None:
    try:
        with Lab(1, None):
            pass
    except LabUnavailable as error:
        pytest.skip(str(error))
