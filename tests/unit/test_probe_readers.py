"""Tables from samples, and from what other programs print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.cost import CostTable, Line
from gradientflow.errors import DocumentError, UsageError
from gradientflow.network import Measurement, Network, Sample
from gradientflow.probe import measure_network, osu_table, read_nccl_tests, read_osu
from gradientflow.probe.measure import SIZES, links, quickest, sample_of, summarize
from gradientflow.probe.processors import CODECS, encoding, gathered_s

# - Summaries


@given(seconds=st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_a_sample_holds_median_and_spread(seconds: list[float]) -> None:
    sample = sample_of(4, seconds)
    slack = 1 + 1e-9
    assert min(seconds) <= sample.p10_s * slack
    assert sample.p10_s <= sample.median_s * slack and sample.median_s <= sample.p90_s * slack
    assert sample.p90_s <= max(seconds) * slack
    assert sample.num_samples == len(seconds)


@given(
    bytes_per_s=st.floats(1e6, 1e10), alpha_s=st.floats(0, 1e-2), burst=st.integers(0, 2**20), world=st.integers(2, 16)
)
def test_the_rate_sees_neither_start_up_nor_a_burst(bytes_per_s: float, alpha_s: float, burst: int, world: int) -> None:
    """A shaped link lets `burst` bytes through at once after a pause."""
    seconds = {nbytes: 1e-6 + alpha_s + max(0, nbytes - burst) / bytes_per_s for nbytes in SIZES}
    samples = [sample_of(nbytes, [seconds[nbytes]]) for nbytes in SIZES]
    link = summarize("p2p", (0, 1), samples)
    assert link.rate_bits_s == pytest.approx(8 * bytes_per_s, rel=0.01)
    ring = summarize("all_reduce", range(world), samples)
    assert ring.rate_bits_s == pytest.approx(2 * (world - 1) / world * link.rate_bits_s)


def test_a_line_is_fitted_where_gradients_travel() -> None:
    line = Line(alpha_s=1e-3, beta_s_per_byte=1e-9)
    samples = [sample_of(4, [1e-5]), *(sample_of(nbytes, [line.seconds(nbytes)]) for nbytes in SIZES if nbytes > 16000)]
    found = summarize("all_reduce", (0, 1), samples)
    assert (found.alpha_s, found.beta_s_per_byte) == (pytest.approx(1e-3), pytest.approx(1e-9))
    assert found.residual < 1e-6
    assert CostTable(points=found.points).seconds(2**20) == line.seconds(2**20)


def test_one_size_is_better_than_none() -> None:
    found = summarize("p2p", (0, 1), [sample_of(1000, [0.5])], skipped_nbytes=(2000,))
    assert (found.alpha_s, found.rate_bits_s) == (pytest.approx(0.5), pytest.approx(16000.0))


@pytest.mark.parametrize("world", range(1, 6))
def test_every_rank_has_a_link_to_rank_0_and_to_its_neighbours(world: int) -> None:
    assert {(0, rank) for rank in range(1, world)} <= set(links(world))
    assert {(rank, rank + 1) for rank in range(world - 1)} <= set(links(world))
    assert len(set(links(world))) == len(links(world))


# - The document

NETWORK = Network(
    backend="gloo",
    hosts=("a", "b"),
    measurements=(
        summarize("all_reduce", (0, 1), [sample_of(n, [n * 1e-8]) for n in (4, 65536, 2**20)], skipped_nbytes=(2**21,)),
        summarize("p2p", (0, 1), [sample_of(n, [n * 1e-8, n * 1.1e-8]) for n in (4, 65536)]),
    ),
)


def test_a_network_survives_a_round_trip(tmp_path: Path) -> None:
    NETWORK.write(tmp_path / "network.json")
    assert Network.read(tmp_path / "network.json") == NETWORK
    assert [found.ranks for found in NETWORK.of("p2p")] == [(0, 1)]
    assert (NETWORK.world, NETWORK.of("all_gather")) == (2, ())


def test_a_network_that_was_not_measured_is_one_too(tmp_path: Path) -> None:
    (tmp_path / "network.json").write_text('{"version": 1, "backend": "gloo", "hosts": ["a"]}')
    assert Network.read(tmp_path / "network.json") == Network(backend="gloo", hosts=("a",))


def test_sizes_out_of_order_are_refused() -> None:
    samples = (Sample(nbytes=8, median_s=1, p10_s=1, p90_s=1), Sample(nbytes=4, median_s=1, p10_s=1, p90_s=1))
    with pytest.raises(ValueError, match="sizes must rise: 4 follows 8"):
        Measurement(operation="p2p", ranks=(0, 1), samples=samples, alpha_s=0, beta_s_per_byte=0, residual=0,
                    rate_bits_s=1)  # fmt: skip


def test_the_printed_table_says_everything() -> None:
    text = osu_table(NETWORK)
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert [row[0] for row in rows] == ["4", "65536", "1048576", "4", "65536"]
    assert [float(figure) for figure in rows[1][1:]] == [655.36, 655.36, 655.36, 1]
    assert "gloo, 2 ranks: a, b" in text and "no time for sizes 2097152" in text and "800.0 Mbit/s" in text


def test_measuring_needs_a_process_group() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        measure_network()


# - nccl-tests


def _nccl(program: str = "all_reduce_perf", **changes: Any) -> dict[str, Any]:
    def row(size: int, microseconds: float, **more: Any) -> dict[str, Any]:
        figures = {"time": microseconds, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0.0}
        return {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
                "out_of_place": figures | {"time": 2 * microseconds}, "in_place": figures, **more}  # fmt: skip

    return {
        "version": 2,
        "args": [f"/opt/nccl-tests/build/{program}", "-b", "8"],
        "config": {"nthreads": 1, "ngpus": 2, "devices": [{"rank": 0}, {"rank": 2}]},
        "results": [
            row(0, 1.0),
            row(65536, 50.0),
            row(1048576, 400.0, in_place_per_iter={"times_us": [300.0, 400.0, 500.0]}),
            row(65536, 70.0),
        ],
    } | changes


def _write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_nccl_tests_are_read_in_place_and_by_iteration(tmp_path: Path) -> None:
    found = read_nccl_tests(_write(tmp_path / "out.json", _nccl()))
    assert (found.operation, found.ranks) == ("all_reduce", (0, 1, 2, 3))
    assert found.points == ((65536, pytest.approx(60e-6)), (1048576, pytest.approx(400e-6)))
    assert [sample.num_samples for sample in found.samples] == [2, 3]
    assert found.samples[1].p90_s == pytest.approx(480e-6)


def test_nccl_tests_point_to_point_and_cpu_time(tmp_path: Path) -> None:
    document = _nccl("sendrecv_perf")
    document["results"] = [{"size": 1024, "out_of_place": {"cpu_time": 7.0}, "in_place": None}]
    found = read_nccl_tests(_write(tmp_path / "out.json", document))
    assert (found.operation, found.ranks, found.points) == ("p2p", (0, 1), ((1024, pytest.approx(7e-6)),))


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("{", "expected JSON"),
        ("[]", "expected what nccl-tests writes"),
        (_nccl(results=[]), "expected rows"),
        (_nccl(results=[{"size": 8, "in_place": {"time": "nan"}}]), "field median_s"),
        (_nccl(results=[{"size": 8}]), "expected what nccl-tests writes"),
        (_nccl("alltoall_perf"), "'alltoall_perf' is none of all_reduce_perf"),
        (_nccl(config={"nthreads": 1, "ngpus": 1, "devices": [{}]}), "two processes or more"),
    ],
)
def test_what_is_no_nccl_test_is_refused_in_one_line(tmp_path: Path, document: Any, complaint: str) -> None:
    path = _write(tmp_path / "out.json", document)
    with pytest.raises(DocumentError, match=complaint) as caught:
        read_nccl_tests(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# - OSU

# Figures of 10 GbE, 8 nodes, from MG-WFBP's logs (B-Caffe, logdata/allreduce8.log).
ALL_REDUCE = """
# OSU MPI Allreduce Latency Test v5.4.0
# Size       Avg Latency(us)
1024                  101.89
65536                1110.54
1048576              4678.91
"""
FULL = """some MPI warning
# OSU MPI-CUDA Allreduce Latency Test v7.5
# Datatype: MPI_INT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
65536                 120.00            100.00            150.00        1000
131072                 240                200.00            300.00         100
"""
LATENCY = "# OSU MPI Latency Test v7.3\n# Size          Latency (us)\n0   1.0\n4   2.0\n1024   3.5\n"
BANDWIDTH = "# OSU MPI Bandwidth Test v7.4\n# Size      Bandwidth (MB/s)\n1    2.0\n1000000   100.00\n4000000  125.0\n"


@pytest.mark.parametrize(
    ("text", "world", "operation", "points"),
    [
        (ALL_REDUCE, 8, "all_reduce", ((1024, 101.89e-6), (65536, 1110.54e-6), (1048576, 4678.91e-6))),
        (FULL, 4, "all_reduce", ((65536, 120e-6), (131072, 240e-6))),
        (LATENCY, 2, "p2p", ((4, 2e-6), (1024, 3.5e-6))),
        (BANDWIDTH, 2, "p2p", ((1, 0.5e-6), (1000000, 0.01), (4000000, 0.032))),
    ],
)
def test_osu_output(
    tmp_path: Path, text: str, world: int, operation: str, points: tuple[tuple[int, float], ...]
) -> None:
    found = read_osu(_write(tmp_path / "osu.txt", text), world)
    assert (found.operation, len(found.ranks)) == (operation, world)
    assert found.points == tuple((nbytes, pytest.approx(seconds)) for nbytes, seconds in points)


def test_a_ring_on_10_gigabit_stays_below_its_rate(tmp_path: Path) -> None:
    assert 1e9 < read_osu(_write(tmp_path / "osu.txt", ALL_REDUCE), 8).rate_bits_s < 10e9


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "found 0"),
        (ALL_REDUCE + LATENCY, "found 2"),
        ("# OSU MPI Barrier Latency Test v5.8\n 8.32\n", "'Barrier Latency' is none of Allreduce Latency"),
        ("# OSU MPI Latency Test v5.8\n", "expected rows"),
        ("# OSU MPI Bandwidth Test v3.1\n1 0.00\n", "field median_s"),
    ],
)
def test_what_is_no_osu_output_is_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = _write(tmp_path / "osu.txt", text)
    with pytest.raises(DocumentError, match=complaint) as caught:
        read_osu(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def by_size(operation: str, *microseconds: float) -> Measurement:
    sizes = (1024, 65536, 2**20)
    samples = [sample_of(nbytes, [1e-6 * time]) for nbytes, time in zip(sizes, microseconds, strict=True)]
    return summarize(operation, range(4), samples)


def test_the_quickest_all_reduce_by_size_in_words() -> None:
    native, ring = by_size("all_reduce", 200, 300, 1000), by_size("all_reduce by ring", 50, 299, 2000)
    network = Network(backend="gloo", hosts=("a",) * 4, measurements=(native, ring))
    assert quickest(network) == "ring up to 1024 bytes, then native"  # 1 % is no reason to change
    assert quickest(network.model_copy(update={"measurements": (native,)})) == ""
    slow = by_size("all_reduce by ring", 500, 500, 5000)
    assert quickest(network.model_copy(update={"measurements": (native, slow)})) == "native"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As workers have where they share cores; on a busy machine several threads of torch wait for each other."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("word", CODECS)
def test_codecs_are_run_with_a_group_that_is_made_up(word: str) -> None:
    found = encoding(word, world=3)
    assert found.codec == word and found.byte_s > 0 and found.tensor_s >= 0


@pytest.mark.usefixtures("one_thread")
def test_gradients_are_gathered() -> None:
    each_s, byte_s = gathered_s()
    assert each_s >= 0 and byte_s >= 0
