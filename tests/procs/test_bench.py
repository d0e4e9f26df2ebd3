"""The bake-off: what methods must send, and one line for what was given wrongly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradientflow.bench.methods import method
from gradientflow.cli import main
from gradientflow.lab.workloads import workload


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
        (["--workload", "resnet-50", "--compute", "1", "--device", "v100"], "both say"),
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


def _refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradientflow", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and words in errors and errors.count("\n") == 1, errors


def test_what_a_method_must_send() -> None:
    profile = workload("resnet-50", compute_s=1.0)
    dense = method("ddp").must_send_nbytes(profile, 4)
    assert dense == method("lazy:4MB").must_send_nbytes(profile, 4) == 1.5 * 4 * 25_557_032
    assert (
        method("lazy+fp16").must_send_nbytes(profile, 4) == method("ddp-bf16").must_send_nbytes(profile, 4) == dense / 2
    )
    assert method("compute").must_send_nbytes(profile, 4) == 0
    assert method("ddp-powersgd").must_send_nbytes(profile, 4) < dense / 50
