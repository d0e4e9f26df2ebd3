"""Whole bake-offs and the demo, started as a user starts them: half a minute each."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradientflow.bench.arena import LabArena, Loopback
from gradientflow.bench.bakeoff import run_at
from gradientflow.bench.results import Results
from gradientflow.bench.worker import MIN_ROUNDS, Specification
from gradientflow.lab import Lab
from gradientflow.lab.workloads import workload
from gradientflow.rundir import RunDirectory
from gradientflow.trace import MAIN, Span
from labs import needs_a_lab

#: Whole runs start many processes; on busy cores that alone takes a minute.
pytestmark = pytest.mark.timeout(300)
RATE = 100e6


def _spec(*methods: str) -> Specification:
    return Specification(
        workload="resnet-50",
        profile=workload("resnet-50", compute_s=0.03, scale=0.003),
        methods=methods,
        rate=None,
        interface="",
        num_sharing=1,
        iterations=1,
        max_rounds=MIN_ROUNDS,
        precision=0.5,
        batch=8,
        probe_s=1.0,
        findings="",
    )


def test_methods_side_by_side_on_links_of_a_known_rate(tmp_path: Path) -> None:
    needs_a_lab()
    spec, said = (
        _spec("ddp", "ddp-best", "ddp-powersgd", "wfbp-ps:1", "flow", "bsp+bf16"),
        [],
    )
    with Lab(3, RATE) as lab:
        # Not through `arena`, which would measure first what a busy machine carries.
        results = run_at(LabArena(lab, RATE, num_servers=1), spec, said.append)
    assert [row.method for row in results.results] == ["compute", *spec.methods] and not results.notes
    assert [line.done for line in said if "round" in line.words] == list(range(1, MIN_ROUNDS + 1))
    rows = {row.method: row for row in results.results}
    assert rows["compute"].bytes_sent < 1e4 and rows["compute"].limit_s == pytest.approx(rows["compute"].compute_s)
    for name in spec.methods:
        row = rows[name]
        exact = row.must_send == rows["ddp"].must_send
        # Coordination and the rest of what a worker says on the wire weigh little even in a small model.
        assert 0.97 * row.must_send < row.bytes_sent < 1.03 * row.must_send + 3e4, (name, row.bytes_sent, row.must_send)
        assert row.iteration_s.n == MIN_ROUNDS and 0 < row.iteration_s.p10 <= row.iteration_s.median
        assert row.limit_s >= max(row.wire_bound_s, row.compute_s)
        assert not exact or row.iteration_s.p90 >= row.wire_bound_s
        assert row.ratio_to[name].low == row.ratio_to[name].high == 1.0
        assert row.speedup == pytest.approx(2 * row.compute_s / row.iteration_s.median)
        assert row.samples_per_s == pytest.approx(16 / row.iteration_s.median)
        assert row.peak_memory_bytes > 50e6 and row.cpu_s > 0 and 0 < row.cpu_share <= 1
        lines = [line for line in results.timelines if line.method == name]
        assert [line.rank for line in lines] == [0, 1]
        for line in lines:
            kinds = {span.kind for span in line.spans}
            waited = {"update"} if name == "flow" else {"exposed"}  # a forward pass may need nothing that is late
            assert {"forward", "backward", "message"} | waited <= kinds, (name, kinds)
            assert all(-1.0 < span.start_s < span.end_s < 60.0 for span in line.spans)
            _check_one_thing_at_a_time([span for span in line.spans if span.track == MAIN])
    assert rows["bsp+bf16"].must_send == rows["ddp"].must_send / 2
    assert results.network is not None and results.network.of("all_reduce")
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results


def _check_one_thing_at_a_time(work: list[Span]) -> None:
    ordered = sorted(work, key=lambda span: span.start_s)
    for one, other in itertools.pairwise(ordered):
        assert one.end_s <= other.start_s + 1e-9, (one, other)


def test_the_command_on_the_loopback(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ["--workload", "alexnet", "--scale", "0.002", "--compute", "0.02", "--hosts", "2", "--loopback"]
    arguments += ["--methods", "ddp,lazy", "--iterations", "3", "--max-rounds", "9", "--straggler", "1:3"]
    arguments += ["--straggler", "turn:2:2"]
    arguments += ["--jitter", "0.1", "--clip", "0.5"]
    done = subprocess.run(
        [sys.executable, "-m", "gradientflow", "bench", *arguments, "--out", str(file)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("measuring the network (0 of 1)\n")
    assert "not shaped" in done.stdout and "lazy" in done.stdout
    assert (
        "rank 1 computes 3 times as long; ranks in turn compute 2 times as long, 2 iterations each; "
        "computing jitters by 10 %; gradients clipped to a norm of 0.5" in " ".join(done.stdout.split())
    )
    document = json.loads(file.read_text())
    assert document["version"] == 1 and {"cores", "torch"} <= document["machine"].keys()
    in_turn = {"factor": 2.0, "iterations": 2}
    assert document["conditions"] == {
        "slowdown": {"1": 3.0}, "in_turn": in_turn, "at_random": None, "jitter": 0.1, "clip_norm": 0.5,
    }  # fmt: skip
    compute, ddp, lazy = document["results"]
    assert compute["compute_s"] > 0.05  # the straggler's
    assert {"low", "median", "high"} == set(lazy["ratio_to"]["ddp"]) and ddp["rate"] is None
    assert abs(ddp["bytes_sent"] / ddp["must_send"] - 1) < 0.5  # the loopback is not ours alone


def test_under_torchrun_its_world_is_used(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    bench = ["--workload", "alexnet", "--scale", "0.002", "--compute", "0.02", "--methods", "ddp,lazy",
             "--iterations", "3", "--max-rounds", "9"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gradientflow",
         "bench", *bench, "--out", str(file)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert done.stdout.count(str(file)) >= 1
    assert [row["hosts"] for row in document["results"]] == [2, 2, 2] and "not shaped" in document["place"]


def test_a_profile_without_times_can_be_measured() -> None:
    bare = workload("alexnet", scale=0.0005)
    assert not bare.forward_s + bare.backward_s
    spec = _spec("ddp", "ddp-powersgd").model_copy(update={"profile": bare})
    compute, ddp, powersgd = run_at(Loopback(2, ""), spec, lambda line: None).results
    assert ddp.limit_s == compute.compute_s and powersgd.must_send < ddp.must_send / 4


def test_demo_trains_and_replays(tmp_path: Path) -> None:
    small = ["--scale", "0.002", "--compute", "0.02", "--rate", "unshaped"]
    argv = [sys.executable, "-m", "gradientflow", "demo", "--json", "--workers", "2", "--epochs", "1", *small]
    result = subprocess.run([*argv, "--out", "out"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    trained, replayed = document["trained"], document["replayed"]
    assert (document["version"], trained["recipe"], trained["steps"]) == (1, "lazy", 11)
    for method in (trained["ddp"], trained["gradientflow"]):
        assert 0 < method["test_accuracy"] <= 1
        assert method["iteration_s"] > 0 and method["sent_nbytes"] > 1e6
        assert method["exposed_s"] == method["iteration_s"] - trained["compute_only"]["iteration_s"]
    assert trained["ddp"]["train_loss"] == pytest.approx(trained["gradientflow"]["train_loss"], rel=0.05)
    assert [row["method"] for row in replayed["results"]] == ["compute", "ddp", "lazy", "lazy+bf16", "flow"]
    assert RunDirectory(tmp_path / "out").traced_ranks() == [0, 1]
    assert "plotly" in (tmp_path / "out" / "report.html").read_text()
