"""What other stacks can be told: DDP's buckets, Horovod's environment, rows of NCCL's tuner plugin."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from gradientflow.cost.table import Line
from gradientflow.errors import DocumentError, UsageError
from gradientflow.lab.workloads import workload
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import as_recipe
from gradientflow.schedule.fusion import buckets
from gradientflow.sim.cluster import Cluster, Collective, Measured, Wire, read
from gradientflow.tune.for_ddp import best_buckets, caps_mb
from gradientflow.tune.for_horovod import THRESHOLD_NBYTES, Gradients, best_environment, iteration_s
from gradientflow.tune.for_nccl import LARGEST_NBYTES, Row, read_tested, rows_of_model, rows_of_tests, text

SLOW = Cluster(
    name="slow", hosts=8, between=Wire(bits_per_s=1e9), collective=Collective(launch_s=1e-3, hop_s=1e-4)
)  # fmt: skip

# - DDP


def test_caps_are_the_messages_of_the_merge_plan() -> None:
    profile = workload("densenet-201", compute_s=1.5)
    found = best_buckets(profile, SLOW, 8)
    plan = as_recipe(found.schedule).plan(profile, 1, SLOW.all_reduce(8))
    assert found.schedule == "merge" and found.iteration_s < found.stock_s
    assert [int(cap * 2**20) for cap in found.bucket_cap_mb_list] == [4 * message.numel for message in plan.messages]


def test_where_nothing_gains_ddp_keeps_its_own() -> None:
    profile = workload("alexnet", compute_s=10.0, scale=0.01)
    found = best_buckets(profile, SLOW, 8)
    assert found.schedule == "ddp" and found.iteration_s == found.stock_s


def test_what_ddp_cannot_be_told_is_refused() -> None:
    profile = workload("resnet-50", compute_s=0.1)
    plan = as_recipe("bytescheduler").plan(profile, 1, Line(alpha_s=1e-4, beta_s_per_byte=1e-8))
    with pytest.raises(UsageError, match="cuts or reorders"):
        caps_mb(profile, plan)
    mixed = Profile(
        tensors=(TensorProfile(name="a", shape=(4,)), TensorProfile(name="b", shape=(4,), dtype="bfloat16"))
    )
    with pytest.raises(UsageError, match="several dtypes"):
        caps_mb(mixed, buckets(mixed, 8, 8))


def test_stock_buckets_close_when_they_are_full() -> None:
    tensors = tuple(TensorProfile(name=name, shape=(100,)) for name in "abcdef")
    plan: Plan = buckets(Profile(tensors=tensors), limit_nbytes=900, first_nbytes=401)
    assert [message.label for message in plan.messages] == ["a .. b", "c .. e", "f"]
    plan.check(Profile(tensors=tensors))


# - Horovod


def test_horovods_cycle_by_hand() -> None:
    """Ready at 1, 2 and 3 s, 1 s each and 1 s to start: with cycles of 2 s the first two go together."""
    tensors = tuple(TensorProfile(name=name, shape=(25,), backward_s=1.0) for name in "abc")
    gradients, costs = Gradients.of(Profile(tensors=tensors)), [Line(alpha_s=1.0, beta_s_per_byte=0.01)]
    assert iteration_s(gradients, costs, 1000, 2.0) == pytest.approx(2 + 3 + 2)
    assert iteration_s(gradients, costs, 1000, 2.0, phase_s=1.5) == pytest.approx(1.5 + 2 + 3)
    assert iteration_s(gradients, costs, 1000, 1.0) == pytest.approx(1 + 2 + 3)
    assert iteration_s(gradients, costs, 0, 2.0) == pytest.approx(2 + 2 + 2 + 2)
    assert iteration_s(gradients, [*costs, Line(alpha_s=0.5, beta_s_per_byte=0.0)], 1000, 2.0) == pytest.approx(8)


def test_horovod_keeps_its_own_values_unless_others_gain() -> None:
    profile = workload("resnet-50", compute_s=0.5, scale=0.1)
    found = best_environment(profile, SLOW, 8)
    assert found.variables == {"HOROVOD_FUSION_THRESHOLD": str(THRESHOLD_NBYTES), "HOROVOD_CYCLE_TIME": "1"}
    assert found.iteration_s == found.stock_s
    crowded = SLOW.model_copy(update={"workers_per_host": 8, "inside": Wire(bits_per_s=1e12)})
    levels = best_environment(profile, crowded, 64)
    assert levels.variables["HOROVOD_HIERARCHICAL_ALLREDUCE"] == "1", "a ring through all of them has 126 steps"
    assert levels.iteration_s < 0.99 * levels.stock_s


def test_horovods_cache_holds_all_names() -> None:
    tensors = tuple(TensorProfile(name=str(number), shape=(9,)) for number in range(1500))
    assert best_environment(Profile(tensors=tensors), SLOW, 8).variables["HOROVOD_CACHE_CAPACITY"] == "3000"


# - NCCL


def at(rows: list[Row], nbytes: int) -> Row:
    """The plugin's rule: the first that matches."""
    return next(row for row in rows if row.min_nbytes <= nbytes <= row.max_nbytes)


@pytest.mark.parametrize("name", ["survey-10gbe", "survey-ib-tcp"])
def test_the_surveys_cluster_has_ll_for_what_is_small_and_rings_for_what_is_large(name: str) -> None:
    rows = rows_of_model(read(name), 32)
    for nbytes in range(64, 64 * 1024, 4 * 61):
        assert at(rows, nbytes).protocol in ("ll", "ll128"), nbytes
    for power in range(40):
        row = at(rows, 10**6 * 2**power // 2**20 + 10**6)
        assert (row.algorithm, row.protocol) == ("ring", "simple")
    assert {(row.num_nodes, row.num_ranks) for row in rows} == {(8, 32)}


@pytest.mark.parametrize(("name", "world"), [("survey-ib-rdma", 32), ("a100-200g", 64), ("v100-nvlink-4", 4)])
def test_rows_cover_every_size_once(name: str, world: int) -> None:
    rows = rows_of_model(read(name), world)
    assert rows[0].min_nbytes == 0 and rows[-1].max_nbytes == LARGEST_NBYTES
    assert all(after.min_nbytes == row.max_nbytes + 1 for row, after in pairwise(rows))
    assert all((row.algorithm, row.protocol) != (after.algorithm, after.protocol)
               for row, after in pairwise(rows))  # fmt: skip


def test_links_that_nobody_measured_are_not_made_up() -> None:
    unknown = Cluster(name="dark", hosts=4, measured=(Measured(workers=4, points=((1, 1.0), (2, 2.0))),))
    with pytest.raises(UsageError, match="nothing is known of links"):
        rows_of_model(unknown, 4)


def test_the_file_is_what_a_plugin_reads() -> None:
    """Ten fields, no spaces, lines below 256 characters, comments with a hash."""
    lines = text(rows_of_model(read("survey-10gbe"), 32, channels=2), ["a remark"]).splitlines()
    assert lines[0] == "# a remark" and lines[1].startswith(
        "# collective,min_bytes,max_bytes,algorithm,protocol,channels"
    )
    for line in lines[2:]:
        fields = line.split(",")
        assert len(fields) == 10 and " " not in line and len(line) < 256
        assert fields[0] == "allreduce" and fields[3] in ("ring", "tree") and fields[4] in ("ll", "ll128", "simple")
        assert fields[5:] == ["2", "8", "32", "-1", "-1"]


def written(path: Path, algorithm: str, protocol: str, us: dict[int, float], program: str = "all_reduce_perf") -> Path:
    """As nccl-tests -J writes it, on two hosts with two GPUs each."""
    env = [f"NCCL_ALGO={algorithm}", f"NCCL_PROTO={protocol}", "NCCL_MIN_NCHANNELS=4", "NCCL_MAX_NCHANNELS=4", "PWD"]
    devices = [{"rank": rank, "host": f"h{rank // 2}"} for rank in range(4)]
    results = [{"size": size, "in_place": {"time": time}} for size, time in us.items()]
    document = {"args": [program], "env": env, "config": {"nthreads": 1, "ngpus": 1, "devices": devices}}
    path.write_text(json.dumps(document | {"results": results}))
    return path


def test_what_nccl_tests_measured_decides(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "ll.json", "Tree", "LL", {1024: 10.0, 2**20: 1000.0}),
        written(tmp_path / "simple.json", "ring", "simple", {1024: 40.0, 2**20: 400.0}),
        written(tmp_path / "gather.json", "NVLSTree", "Simple", {1024: 5.0, 4096: 6.0}, program="all_gather_perf"),
    ]
    rows = rows_of_tests([read_tested(path) for path in files])
    small, large, gather = rows
    assert (small.algorithm, small.protocol, small.channels) == ("tree", "ll", 4)
    assert (large.algorithm, large.protocol) == ("ring", "simple")
    assert (gather.collective, gather.algorithm, gather.num_nodes, gather.num_ranks) == ("allgather", "nvls_tree", 2, 4)
    table = [read_tested(path).table for path in files]
    border = large.min_nbytes
    assert table[0].seconds(border - 1) <= table[1].seconds(border - 1)
    assert table[0].seconds(border) >= table[1].seconds(border)


def test_tests_that_do_not_say_how_they_ran_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="NCCL_ALGO set to one of tree, ring"):
        read_tested(written(tmp_path / "a.json", "Tree,Ring", "LL", {1024: 1.0, 2048: 2.0}))
    with pytest.raises(DocumentError, match="two sizes"):
        read_tested(written(tmp_path / "b.json", "Ring", "LL", {1024: 1.0}))
    with pytest.raises(DocumentError, match="no collective"):
        read_tested(written(tmp_path / "c.json", "Ring", "LL", {1024: 1.0, 2048: 2.0}, program="sendrecv_perf"))
    one = read_tested(written(tmp_path / "d.json", "Ring", "LL", {1024: 1.0, 2048: 2.0}))
    with pytest.raises(UsageError, match="leave one out"):
        rows_of_tests([one, one])
