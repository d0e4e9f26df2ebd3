"""However a script ends, it ends soon, without a core dump and without an orphan."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from helpers import Script

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
        environment = {"KIND": kind, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
        self.ranks = [Script(path, RANK=str(rank), **environment) for rank in range(2)]

    def wait_for_word(self, rank: int, word: str) -> None:
        end_s = time.monotonic() + 30
        while not self._words(rank, word):
            assert time.monotonic() < end_s, f"rank {rank} never said {word!r}: {self.ranks[rank].stderr}"
            time.sleep(0.01)

    def _words(self, rank: int, word: str) -> list[list[str]]:
        return [line.split() for line in self.ranks[rank].stdout.splitlines() if line.startswith(word)]

    def end(self, since_s: float | None = None) -> list[tuple[int, str, float]]:
        """By rank: exit code, what it wrote to stderr, and seconds from `since_s` (or from its last word "end")."""
        outcomes = []
        for rank, script in enumerate(self.ranks):
            code = script.wait()
            ended_s = time.time()
            began_s = since_s or float(self._words(rank, "end")[-1][2])
            outcomes.append((code, script.stderr, ended_s - began_s))
        for script in self.ranks:
            assert not _left_in_session(script.pid), "processes left behind"
        return outcomes

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for script in self.ranks:
            script.kill()


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
        for script in job.ranks:
            os.kill(script.pid, signal.SIGINT)
        for code, errors, elapsed_s in job.end(began_s):
            assert code in (1, -signal.SIGINT, 130) and "KeyboardInterrupt" in errors, (code, errors)
            assert elapsed_s < LIMIT_S


@KINDS
def test_leaving_with_messages_in_flight(kind: str, tmp_path: Path) -> None:
    """Rank 0 is in backward, its lanes wait for rank 1, and the main thread ends the process."""
    script = """
    if rank == 1:
        model(torch.randn(8, 64))  # buffers are exchanged in forward
        time.sleep(4.0)  # rank 0 is gone by then
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
