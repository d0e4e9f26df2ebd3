"""However a script ends, it ends soon, without a core dump and without an orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

#: 5 s on a machine that does nothing else (benchmarks/faults.py); these tests share two cores with others.
LIMIT_S = 10.0

PRELUDE = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
from torch import nn
import gradientflow as gf
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 1))
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
KIND = os.environ["KIND"]
if KIND == "attach":
    model, flow = module, gf.attach(module, optimizer, "wfbp")
else:
    model = gf.DistributedDataParallel(module, recipe="wfbp")
    flow = model.flow

def step():
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()

def say(word):
    print(f"{word} {rank} {time.time()}", flush=True)

step()
"""


class Job:
    """Two ranks of a script, over a store held by rank 0."""

    def __init__(self, kind: str, script: str, tmp_path: Path) -> None:
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(script))
        port = _free_port()
        environment = os.environ | {
            "KIND": kind, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(path)],
                env=environment | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(2)
        ]

    def wait_for_word(self, rank: int, word: str) -> None:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(word):
                return
        raise AssertionError(f"rank {rank} never said {word!r}: {self.ranks[rank].stderr.read()}")  # type: ignore[union-attr]

    def end(self, since_s: float | None = None) -> list[tuple[int, str, float]]:
        """By rank: exit code, what it wrote to stderr, and seconds from `since_s` (or from its last word "end")."""
        outcomes = []
        for process in self.ranks:
            out, errors = process.communicate(timeout=60)
            ended_s = time.time()
            words = [line.split() for line in out.splitlines() if line.startswith("end")]
            began_s = since_s or float(words[-1][2])
            outcomes.append((process.returncode, errors, ended_s - began_s))
        for process in self.ranks:
            assert not _left_in_session(process.pid), "processes left behind"
        return outcomes

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _left_in_session(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(entry.name)
    return found


KINDS = pytest.mark.parametrize("kind", ["attach", "drop-in"])


@KINDS
def test_falling_off_the_end_without_closing(kind: str, tmp_path: Path) -> None:
    with Job(kind, "say('end')", tmp_path) as job:
        for code, errors, elapsed_s in job.end():
            assert code == 0 and elapsed_s < LIMIT_S, errors


@KINDS
@pytest.mark.parametrize(
    "script",
    [
        "flow.close(); flow.close(); dist.destroy_process_group(); say('end')",
        "dist.destroy_process_group(); flow.close(); flow.close(); say('end')",
        "dist.destroy_process_group(); say('end')",
    ],
    ids=["closed twice", "group destroyed first", "group destroyed, never closed"],
)
def test_any_order_of_closing(kind: str, script: str, tmp_path: Path) -> None:
    with Job(kind, script, tmp_path) as job:
        for code, errors, elapsed_s in job.end():
            assert code == 0 and elapsed_s < LIMIT_S, errors


@KINDS
def test_an_exception_in_the_loop_of_one_rank_ends_both(kind: str, tmp_path: Path) -> None:
    """Rank 0 goes on to its next step and is told that rank 1 has left."""
    script = """
    say('end')
    if rank == 1:
        raise ZeroDivisionError('in the loop')
    step()
    """
    with Job(kind, script, tmp_path) as job:
        (first, words, elapsed_s), (second, trouble, soon_s) = job.end()
        assert (first, second) == (1, 1)
        assert "PeerError" in words and "rank 1 has left" in words and elapsed_s < 2 * LIMIT_S, words
        assert "ZeroDivisionError: in the loop" in trouble and soon_s < LIMIT_S


@KINDS
def test_ctrl_c_while_waiting_for_another_rank(kind: str, tmp_path: Path) -> None:
    """Both get the signal, as from a terminal: rank 0 in the middle of an exchange, rank 1 asleep."""
    script = """
    say('end')
    if rank == 1:
        time.sleep(60)
    step()
    """
    with Job(kind, script, tmp_path) as job:
        for rank in range(2):
            job.wait_for_word(rank, "end")
        time.sleep(1.5)
        began_s = time.time()
        for process in job.ranks:
            os.kill(process.pid, signal.SIGINT)
        for code, errors, elapsed_s in job.end(began_s):
            assert code in (1, -signal.SIGINT, 130) and "KeyboardInterrupt" in errors, (code, errors)
            assert elapsed_s < LIMIT_S


@KINDS
def test_leaving_with_messages_in_flight(kind: str, tmp_path: Path) -> None:
    """Rank 0 is in backward, its lanes wait for rank 1, and the main thread ends the process."""
    script = """
    if rank == 1:
        model(torch.randn(8, 64))  # buffers are exchanged in forward
        time.sleep(8.0)  # rank 0 is gone by then
        say('end')
        sys.exit(0)
    def leave(gradient):
        time.sleep(0.5)
        say('end')
        sys.exit(3)
    module[0].weight.register_hook(leave)
    step()
    """
    with Job(kind, script, tmp_path) as job:
        (code, errors, elapsed_s), (other, words, _) = job.end()
        assert code == 3 and elapsed_s < LIMIT_S, errors
        assert other == 0, words


@KINDS
def test_forked_data_loader_workers(kind: str, tmp_path: Path) -> None:
    """A forked worker holds copies of everything and no threads: it must neither talk nor hang."""
    script = """
    data = torch.utils.data.TensorDataset(torch.randn(64, 64))
    loader = torch.utils.data.DataLoader(data, 8, num_workers=2, multiprocessing_context="fork")
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    say('end')
    """
    with Job(kind, script, tmp_path) as job:
        for code, errors, elapsed_s in job.end():
            assert code == 0 and elapsed_s < LIMIT_S, errors


@KINDS
def test_a_forked_child_may_close_and_exit(kind: str, tmp_path: Path) -> None:
    script = """
    child = os.fork()
    if child == 0:
        flow.close()
        sys.exit(0)
    os.waitpid(child, 0)
    step()
    say('end')
    """
    with Job(kind, script, tmp_path) as job:
        for code, errors, elapsed_s in job.end():
            assert code == 0 and elapsed_s < LIMIT_S, errors
