"""The MPI exchange, in jobs that mpirun starts. This file is also what they run: `mpirun python test_mpi.py JOB`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import ONE_BUCKET, STEPS_FOR_BITS, train
from torch import nn

import gradientflow as gf
from gradientflow.compress import Gather, Sum, Swap
from gradientflow.exchange import Exchange
from gradientflow.exchange.mpi import _Begun
from helpers import run_ranks

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpirun: pip install 'gradientflow[mpi]'",
)

LIMIT_S = 10.0
VICTIM = 1


def mpirun(world: int, job: str, *options: str, timeout_s: float = 90.0) -> tuple[int, list[dict[str, Any]], str]:
    """Its exit code, what ranks have told, and its stderr."""
    command = [
        MPIRUN,
        "-n",
        str(world),
        "--oversubscribe",
        "--bind-to",
        "none",
        *options,
        sys.executable,
        __file__,
        job,
    ]
    search = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **root, "PYTHONPATH": search, "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, [json.loads(line) for line in output.splitlines() if line.startswith("{")], errors


# - Jobs


def tell(**facts: Any) -> None:
    os.write(1, (json.dumps({"rank": dist.get_rank(), **facts}) + "\n").encode())  # at once: lines must not mix


def sums() -> None:
    """Of all dtypes; on two lanes at once; and among some of the ranks, in an order of their own."""
    with pytest.raises(gf.UsageError, match="set up already"):
        gf.init_from_mpi()
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (
        str(rank),
        str(rank),
        str(world),
    )
    exchange = Exchange(dist.group.WORLD, torch.device("cpu"), 2, 30.0, mpi=True)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for numel in (1, 1000, 200_001):
            shares = [torch.arange(numel).remainder(5).add(each).to(dtype) for each in range(world)]
            exchange.answer(Sum([ours := shares[rank].clone()]), lane=1)
            assert torch.equal(ours, sum(shares)), (dtype, numel)
            gathered = exchange.answer(Gather(shares[rank]), lane=1)
            assert all(torch.equal(one, other) for one, other in zip(gathered, shares, strict=True)), (dtype, numel)
            parts = [shares[rank][: numel * to // world] for to in range(world)]
            swapped = exchange.answer(Swap(parts, [numel * rank // world] * world), lane=1)
            assert all(torch.equal(s, t[: numel * rank // world]) for s, t in zip(swapped, shares, strict=True))
            torch.manual_seed(rank)
            exchange.answer(Sum([rounded := torch.randn(numel).to(dtype)]), lane=0)
            everybodys: list[Any] = [None] * world
            dist.all_gather_object(everybodys, rounded)
            assert all(torch.equal(rounded, theirs) for theirs in everybodys), (dtype, numel)
    with ThreadPoolExecutor(2) as lanes:
        list(lanes.map(lambda lane: _many_sums(exchange, lane), range(2)))
    exchange.close()
    some = dist.new_group([world - 1, 0], sort_ranks=False) if world > 2 else dist.group.WORLD
    if rank in (0, world - 1):
        exchange = Exchange(some, torch.device("cpu"), 1, 30.0, mpi=True)
        exchange.answer(Sum([ours := torch.full((1000,), 1.0 + rank)]), lane=0)
        assert torch.equal(ours, torch.full((1000,), 1.0 + world))
        exchange.close()
    tell(sums="right")


def three_ranks() -> None:
    sums()
    parity()


def two_ranks() -> None:
    parity()
    nobody_closes()


def _many_sums(exchange: Exchange, lane: int) -> None:
    for number in range(50):
        exchange.answer(Sum([ours := torch.full((1 + 997 * number,), lane + 1.0)]), lane)
        assert torch.equal(ours, torch.full_like(ours, (lane + 1.0) * exchange.world)), (lane, number)


def parity() -> None:
    dtype = torch.float32 if dist.get_world_size() == 2 else torch.float64
    methods = (ONE_BUCKET, "wfbp-mpi:2", "gated flow-mpi")
    for method in methods:
        weights, checksums = train(method, "mlp", "sgd", dtype, STEPS_FOR_BITS)
        tell(method=method, checksums=checksums, weights=weights[::97].tolist())


def _training() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gf.attach(model, optimizer, "wfbp-mpi:2", deadline_s=60)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()

    return step


def _lose(how: signal.Signals) -> None:
    step = _training()
    for _ in range(5):
        step()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), how)
    began_s = time.monotonic()
    try:
        step()
    except gf.PeerError as error:
        tell(words=str(error), culprits=error.ranks, waited_s=time.monotonic() - began_s)
        raise


def one_dies() -> None:
    _lose(signal.SIGKILL)


def one_stops() -> None:
    _lose(signal.SIGSTOP)


def nobody_closes() -> None:
    """Nor ends what was put off."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gf.attach(model, optimizer, "flow-mpi")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    tell(end="reached")


# - Tests

Found = tuple[int, list[dict[str, Any]], str]


@pytest.fixture(scope="module")
def of_two() -> Found:
    return mpirun(2, "two_ranks")


@pytest.fixture(scope="module")
def of_three() -> Found:
    return mpirun(3, "three_ranks")


@needs_mpi
def test_sums_are_right_and_the_same_on_all_ranks(of_three: Found) -> None:
    _, told, errors = of_three
    assert sum("sums" in fact for fact in told) == 3, errors


@needs_mpi
def test_three_ranks_train_as_ddp(of_three: Found) -> None:
    code, told, errors = of_three
    told = [fact for fact in told if "method" in fact]
    assert code == 0 and len(told) == 3 * 3, errors
    reference = torch.tensor(next(fact["weights"] for fact in told if fact["method"] == ONE_BUCKET))
    for method in {fact["method"] for fact in told}:
        assert len({tuple(fact["checksums"]) for fact in told if fact["method"] == method}) == 1, method
        weights = next(fact["weights"] for fact in told if fact["method"] == method)
        assert (torch.tensor(weights) - reference).abs().max() <= 1e-10, method


@needs_mpi
def test_two_ranks_train_bit_by_bit_as_ddp(of_two: Found) -> None:
    _, told, errors = of_two
    told = [fact for fact in told if "method" in fact]
    assert len(told) == 2 * 3, errors
    expected = next(fact["checksums"] for fact in told if fact["method"] == ONE_BUCKET)
    for fact in told:
        assert fact["checksums"] == expected, fact["method"]


@needs_mpi
def test_a_script_that_falls_off_its_end_has_succeeded(of_two: Found) -> None:
    code, told, errors = of_two
    assert code == 0 and sum("end" in fact for fact in told) == 2 and not errors, errors


@needs_mpi
@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        ("one_dies", ["--with-ft", "ulfm", "--mca", "btl", "tcp,self", "--mca", "pml", "ob1"], "is dead"),
        ("one_stops", [], "is stopped"),
    ],
    ids=["dead", "stopped"],
)
def test_the_others_name_who_does_not_come_and_all_of_them_end(job: str, options: list[str], words: str) -> None:
    code, told, errors = mpirun(3, job, *options)
    assert code != 0
    assert {fact["rank"] for fact in told} == {0, 2}, errors
    for fact in told:
        assert f"rank {VICTIM} {words}" in fact["words"] and fact["culprits"] == [VICTIM]
        assert fact["waited_s"] < LIMIT_S


def attach_over_mpi() -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(gf.UsageError) as refused:
        gf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "lazy-mpi")
    return str(refused.value)


@needs_mpi
def test_without_mpirun_it_says_to_use_it() -> None:
    for words in run_ranks(2, attach_over_mpi):
        assert "start the script with mpirun" in words


def test_without_mpi4py_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradientflow.exchange import mpi

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(gf.UsageError, match="pip install 'gradientflow\\[mpi\\]'"):
        mpi.library()


def test_a_wait_ends_in_time_and_failures_are_broken_connections() -> None:
    class Never:
        def Test(self) -> bool:
            return False

    class Broken:
        def Test(self) -> bool:
            raise ArithmeticError("MPI_ERR_PROC_FAILED: Process Failure\nand more")

    began_s = time.monotonic()
    assert not _Begun(Never(), (), ArithmeticError).done_within(0.05)
    assert 0.05 <= time.monotonic() - began_s < 1.0
    with pytest.raises(ConnectionError, match=r"Process Failure$"):
        _Begun(Broken(), (), ArithmeticError).done_within(0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gf.init_from_mpi(60)
    globals()[sys.argv[1]]()
