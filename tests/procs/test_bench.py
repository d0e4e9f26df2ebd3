"""The bake-off: what methods must send, and one line for what was given wrongly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradientflow.bench.arena import Loopback, arena, start
from gradientflow.bench.methods import method
from gradientflow.cli import main
from gradientflow.errors import TrainingError
from gradientflow.lab import Lab
from gradientflow.lab.workloads import workload
from labs import needs_a_lab

#: Whole runs start many processes; on busy cores that alone takes a minute.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "resnet50000"], "did you mean"),
        (["--workload", "no-such-file.json"], "no-such-file.json"),
        (["--workload", "resnet-50", "--methods", "dpd"], "did you mean ddp"),
        (["--workload", "resnet-50", "--methods", "horovod"], "horovod"),
        (["--workload", "resnet-50", "--rate", "fast"], "fast"),
        (["--workload", "resnet-50", "--hosts", "1"], "--hosts"),
        (["--workload", "resnet-50", "--straggler", "9"], "RANK:FACTOR"),
        (["--workload", "resnet-50", "--out", "/no/such/place.json"], "no directory"),
        (["--workload", "resnet-50", "--out", "/tmp"], "no file"),
        (["--workload", "resnet-50", "--out", "/dev/null"], "no file"),
        (["--workload", "resnet-50", "--scale", "much"], "--scale"),
        (["--workload", "resnet-50", "--no-such-option"], "--no-such-option"),
        ([], "--workload"),
        (["--workload", "resnet-50", "--compute", "1", "--device", "v100"], "--compute and --device both say"),
        (["--workload", "resnet-50", "--compute", "-1"], "--compute -1: give 0 to 60 seconds"),
        (["--workload", "resnet-50", "--compute", "nan"], "--compute nan"),
        (["--workload", "resnet-50", "--compute", "1e9"], "--compute 1e+09: give 0 to 60 seconds"),
        (["--workload", "resnet-50", "--compute-ratio", "-1"], "--compute-ratio -1"),
        (["--workload", "resnet-50", "--compute-ratio", "1e9"], "60 s at most"),
        (["--workload", "resnet-50", "--compute", "1", "--straggler", "1:100"], "60 s at most"),
        (["--workload", "resnet-50", "--scale", "0"], "--scale 0"),
        (["--workload", "resnet-50", "--rate", "1Gbit,50Mbit"], "--rate 1Gbit,50Mbit: write RATE,HOST:RATE"),
        (["--workload", "resnet-50", "--rate", "1Gbit,4:50Mbit"], "hosts are 0 to 3"),
        (["--workload", "resnet-50", "--rate", "1Gbit,1:slow"], "'slow'"),
        (["--workload", "resnet-50", "--loopback", "--rate", "unshaped,1:1Gbit"], "leave one of them out"),
        (["--workload", "resnet-50", "--rate", "1kbit"], "--rate 1000 bit/s: expected 1Mbit to 1000Gbit"),
        (["--workload", "some.json", "--device", "v100"], "leave --device out"),
        (["--workload", "resnet-50", "--methods", ","], "--methods is empty"),
        (["--workload", "resnet-50", "--methods", "ddp,lazy-mpi"], "'lazy-mpi' is for workers that mpirun starts"),
        (["--workload", "resnet-50", "--precision", "2"], "--precision"),
        (["--workload", "resnet-50", "--straggler", "1:inf"], "factors"),
        (["--workload", "resnet-50", "--jitter", "0.6"], "--jitter 0.6"),
        (["--workload", "resnet-50", "--jitter", "-0.1"], "--jitter -0.1"),
        (["--workload", "resnet-50", "--jitter", "nan"], "--jitter nan"),
        (["--workload", "resnet-50", "--clip", "0"], "--clip 0"),
        (["--workload", "resnet-50", "--clip", "nan"], "--clip nan"),
        (["--workload", "resnet-50", "--loopback", "--rate", "1Gbit"], "leave one of them out"),
        (["--workload", "resnet-50", "--loopback", "--compute-ratio", "1"], "give a --rate"),
        (["--workload", "bert-large", "--hosts", "64"], "--scale"),
        (["--workload", "resnet-50", "--ablation", "bsp"], "'bsp' has no parts"),
        (["--workload", "resnet-50", "--ablation", "lazyy"], "no schedule 'lazyy'"),
        (["--workload", "resnet-50", "--ablation", "flow", "--methods", "ddp"], "leave --methods out"),
        (["--workload", "resnet-50", "--methods", "lazy+csc:2"], "above 0 and up to 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(["bench", *arguments], words, monkeypatch, capsys)


def test_a_profile_with_negative_times_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"version": 1, "tensors": [{"name": "a", "shape": [2], "forward_s": -1}]}')
    _refused(["bench", "--workload", str(path)], "forward_s", monkeypatch, capsys)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ("", "no tensors"),
        ('{"name": "a", "shape": [0]}', "no elements"),
        ('{"name": "a", "shape": [2], "dtype": "int64"}', "int64"),
        ('{"name": "a", "shape": [2], "dtype": "float8_e4m3fn"}', "float8"),
        ('{"name": "a", "shape": [2]}, {"name": "a.b", "shape": [2]}', "'a'"),
        ('{"name": "forward", "shape": [2]}', "'forward'"),
        ('{"name": "", "shape": [2]}', "''"),
    ],
)
def test_a_profile_that_no_model_can_have_is_refused(
    tensors: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(f'{{"version": 1, "tensors": [{tensors}]}}')
    _refused(["bench", "--workload", str(path)], words, monkeypatch, capsys)


def _refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradientflow", *arguments])
    before = _namespaces()
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and words in errors and errors.count("\n") == 1, errors
    assert _namespaces() == before and not [lab for lab in Lab.status() if lab.owner == os.getpid()]


def _namespaces() -> list[str]:
    return sorted(path.name for path in Path("/run/netns").glob("*"))


def test_a_rate_that_the_machine_cannot_carry_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_a_lab()
    _refused(["bench", "--workload", "alexnet", "--scale", "0.01", "--rate", "900Gbit"], "carries", monkeypatch, capsys)


def test_what_a_method_must_send() -> None:
    profile = workload("resnet-50", compute_s=1.0)
    dense = method("ddp").must_send_nbytes(profile, 4)
    assert dense == method("lazy:4MB").must_send_nbytes(profile, 4) == 1.5 * 4 * 25_557_032
    assert (
        method("lazy+fp16").must_send_nbytes(profile, 4) == method("ddp-bf16").must_send_nbytes(profile, 4) == dense / 2
    )
    assert method("compute").must_send_nbytes(profile, 4) == 0
    assert method("ddp-powersgd").must_send_nbytes(profile, 4) < dense / 50


# - Whole runs


def test_hosts_of_a_lab_may_have_rates_of_their_own() -> None:
    needs_a_lab()
    with arena(2, None, {1: 50e6}) as place:
        assert (place.words, place.rate) == ("lab, unshaped a port, host 1 50Mbit", 50e6)


def test_a_worker_that_fails_ends_all_and_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"worker \d failed .*no_such_module"):
        start(Loopback(2, ""), "gradientflow.no_such_module", [], lambda line: None, 60.0, logs=tmp_path)
    assert "no_such_module" in (tmp_path / "worker-0.log").read_text()


def test_a_worker_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(TrainingError, match=r"worker 0 cannot be started: .*/no/such/python"):
        start(Loopback(2, ""), "gradientflow.bench.worker", [], lambda line: None, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_a_bench_is_stopped(number: signal.Signals) -> None:
    arguments = ["--workload", "alexnet", "--scale", "0.002", "--compute", "5", "--hosts", "2", "--loopback"]
    with subprocess.Popen(
        [sys.executable, "-m", "gradientflow", "bench", *arguments], stdout=-3, stderr=subprocess.PIPE
    ) as bench:
        workers = _wait_for(lambda: _workers_of(bench.pid))
        time.sleep(5.0)  # until they train
        bench.send_signal(number)
        assert bench.wait(20.0) in (-number, 128 + number)
        assert _wait_for(lambda: not any(map(_runs, workers)))


def _runs(pid: int) -> bool:
    """One that has ended stays in /proc until whoever has inherited it asks, which some first processes never do."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] if len(children) == 2 else []


def _wait_for(found: object) -> list[int]:
    for _ in range(300):
        if value := found():  # type: ignore[operator]
            return value  # type: ignore[no-any-return]
        time.sleep(0.1)
    raise AssertionError("not within 30 s")
