"""Clusters as files: names, round trips, probes, and every mistake in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradientflow.cost.nccl import MODELS, Job
from gradientflow.errors import DocumentError, UsageError
from gradientflow.network import Carrying, Encoding, Measurement, Network, Processors, Sample
from gradientflow.sim.cluster import Cluster, names, parse, read


@pytest.mark.parametrize("name", names())
def test_named_clusters_read_and_write(name: str, tmp_path: Path) -> None:
    cluster = read(name)
    assert cluster.name == name and cluster.source
    cluster.write_toml(tmp_path / "again.toml")
    assert read(tmp_path / "again.toml") == cluster
    assert cluster.all_reduce(cluster.places).seconds(2**20) > 0
    assert cluster.collective.hop_s is not None  # published or calibrated, not taken from a protocol


@pytest.mark.parametrize("name", ["a\nb", 'a "b" \\ c', "\t\x00\x1f\x7f", "café \U0001f600"])
def test_names_of_any_letters_are_written_as_they_are(name: str, tmp_path: Path) -> None:
    cluster = read("cloud-25gbe").model_copy(update={"name": name})
    cluster.write_toml(tmp_path / "again.toml")
    assert read(tmp_path / "again.toml") == cluster


def test_the_clusters_that_are_asked_for() -> None:
    wanted = {"survey-10gbe", "survey-ib-rdma", "survey-ib-tcp", "gradientflow-512", "v100-nvlink-4"}
    assert wanted | {"a100-200g", "h100-400g", "cloud-25gbe", "cloud-100gbe"} <= set(names())


def measured(operation: str, ranks: tuple[int, ...], seconds: float) -> Measurement:
    samples = tuple(
        Sample(nbytes=nbytes, median_s=seconds + nbytes / 1e8, p10_s=1e-3, p90_s=1.0)
        for nbytes in (2**12, 2**16, 2**20)
    )
    return Measurement(
        operation=operation,
        ranks=ranks,
        samples=samples,
        alpha_s=seconds,
        beta_s_per_byte=1e-8,
        residual=0.0,
        rate_bits_s=8e8,
    )


def test_a_probe_is_a_cluster(tmp_path: Path) -> None:
    network = Network(
        backend="gloo",
        hosts=("a", "b", "c"),
        measurements=(measured("all_reduce", (0, 1, 2), 1e-3), measured("p2p", (0, 1), 1e-4)),
    )
    network.write(tmp_path / "network.json")
    cluster = read(tmp_path / "network.json")
    assert cluster.places == 3 and cluster.all_reduce(3).seconds(2**16) == pytest.approx(1e-3 + 2**16 / 1e8)
    cluster.write_toml(tmp_path / "cluster.toml")
    assert read(tmp_path / "cluster.toml") == cluster
    with pytest.raises(UsageError, match="run gradientflow probe"):
        Cluster.of_network(Network(backend="gloo", hosts=("a", "b")), "nothing")


def test_a_probe_that_counted_processors(tmp_path: Path) -> None:
    encoding = Encoding(codec="topk:sampled", byte_s=1e-9, tensor_s=1e-5)
    native = Carrying(message_s=1e-4, byte_s=2e-9, abreast_s=2e-3)
    carrying = native, Carrying(pattern="ring", message_s=1e-5, byte_s=1e-9)
    counted = Processors(cores=2, ranks=3, carrying=carrying, gather_s_per_byte=3e-10, codecs=(encoding,))
    all_reduce, ring = measured("all_reduce", (0, 1, 2), 1e-3), measured("all_reduce by ring", (0, 1, 2), 1e-4)
    network = Network(backend="gloo", hosts=("a", "b", "c"), measurements=(all_reduce, ring), processors=counted)
    network.write(tmp_path / "network.json")
    cluster = read(tmp_path / "network.json")
    assert cluster.processors.crowding == 1.5 and cluster.encoding("topk") == encoding
    assert cluster.encoding("int8") is None
    assert [cluster.carried_by(name) for name in ("ring", "tree")] == [carrying[1], carrying[0]]
    assert cluster.measured_by("ps", 3) is None
    by_ring = cluster.measured_by("ring", 3)
    assert by_ring is not None and by_ring.seconds(2**16) < cluster.all_reduce(3).seconds(2**16)
    cluster.write_toml(tmp_path / "cluster.toml")
    assert read(tmp_path / "cluster.toml") == cluster
    old = network.model_dump(mode="json", exclude={"processors"})
    assert Cluster.of_network(Network.model_validate(old), "old").processors.crowding == 0


HEAD = 'version = 1\nname = "x"\nhosts = 2\n'
WIRED = HEAD + "[between]\nbits_per_s = 1e9\n"


def measuring(points: str) -> str:
    return f"[[measured]]\nworkers = 2\npoints = [{points}]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD, "between"),
        (HEAD + "[between]\nbits_per_s = 0", "greater than or equal to 1"),
        (HEAD + '[between]\nprotocol = "carrier pigeon"\nbits_per_s = 1e9', "tcp, ib-rdma"),
        (HEAD + "[between]\nbits_per_s = 1e9\ncolour = 1", "colour"),
        (HEAD + "workers_per_host = 2\n[between]\nbits_per_s = 1e9", "inside"),
        (HEAD + "[between", "TOML"),
        (HEAD + "[between]\nbits_per_s = 1e300", r"bits_per_s: .* less than"),
        (HEAD + "[between]\nbits_per_s = 1e-300", r"bits_per_s: .* greater than"),
        (HEAD + "[between]\nbits_per_s = 1e9\nefficiency = nan", "efficiency"),
        (HEAD + "[between]\nbits_per_s = 1e9\nefficiency = 1e-300", "efficiency"),
        (HEAD + "[between]\nbits_per_s = 1e9\nlatency_s = inf", "latency_s: .* finite"),
        (WIRED + "[collective]\nhop_s = inf", "hop_s: .* finite"),
        (WIRED + "[collective]\nhop_s = 1e300", "hop_s: .* less than"),
        (WIRED + "[overheads]\ngather_s = inf", "gather_s: .* finite"),
        (WIRED + "[overheads]\nbus_while_computing = nan", "bus_while_computing"),
        (WIRED + "[servers]\nspare_per_host = 1e9", "spare_per_host: .* less than"),
        (WIRED + "[servers]\nspare_per_host = nan", "spare_per_host"),
        (WIRED + "[servers]\nduplex = nan", "duplex"),
        (WIRED + "[servers]\npartition_nbytes = 1", "0 or at least 1024"),
        (WIRED + '[topology]\nkind = "torus"', "a torus takes sides"),
        (WIRED + '[topology]\nkind = "torus"\nsides = [-2, -2]', "sides.0: .* greater than"),
        (WIRED + '[topology]\nkind = "bcube"', "a bcube takes sides"),
        (WIRED + '[topology]\nkind = "bcube"\nsides = [2, 2, 2]', "a bcube takes sides"),
        (WIRED + '[topology]\nkind = "bcube"\nsides = [2, -1]', "sides.1: .* greater than"),
        (WIRED + '[topology]\nkind = "bcube"\nsides = [2, 100000]', "a bcube takes sides"),
        (WIRED + '[topology]\nkind = "fat-tree"\noversubscription = inf', "oversubscription: .* finite"),
        (WIRED + '[topology]\nkind = "graph"', "a graph takes cables"),
        (WIRED + '[topology]\nkind = "graph"\ncables = [[0, true], [0, 1]]', "cables.0.1"),
        (WIRED + "[topology]\nhosts_per_switch = 4", "a switch takes nothing else, not hosts_per_switch"),
        (WIRED + measuring("[1024, 1e-3]"), "points"),
        (WIRED + measuring("[4096, 1e-3], [1024, 1e-3]"), "sizes must rise"),
        (WIRED + measuring("[1024, 1e-3], [1024, 1e-3]"), "sizes must rise"),
        (WIRED + measuring("[1024, nan], [4096, 1e-3]"), "points.0.1"),
        (WIRED + measuring("[1024, -1.0], [4096, 1e-3]"), "points.0.1"),
        (WIRED + measuring("[1024, 1e-300], [4096, 1e-300]"), "points.0.1"),
        (WIRED + measuring("[-1024, 1e-3], [4096, 1e-3]"), "points.0.0"),
        ('version = 1\nname = "x"\nhosts = 100000\nworkers_per_host = 100\n[inside]\nbits_per_s = 1e9', "at most"),
        ('version = 1\nname = "x"\nhosts = 0', "hosts"),
    ],
)
def test_mistakes_are_one_line(text: str, words: str) -> None:
    with pytest.raises(DocumentError, match=words) as caught:
        parse(text, "mine.toml")
    assert str(caught.value).startswith("mine.toml: ") and "\n" not in str(caught.value)


def test_a_probe_of_the_impossible_is_one_line() -> None:
    quick = measured("all_reduce", (0, 1), 1e-3).model_copy(update={"rate_bits_s": 1e300})
    probes = [(quick,), (quick, quick.model_copy(update={"operation": "p2p"}))]
    assert Cluster.of_network(Network(backend="gloo", hosts=("a", "b"), measurements=probes[0]), "mine").between is None
    with pytest.raises(UsageError, match="what was measured of mine is no cluster: field bits_per_s"):
        Cluster.of_network(Network(backend="gloo", hosts=("a", "b"), measurements=probes[1]), "mine")


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(UsageError, match="did you mean survey-10gbe"):
        read("survey-10gb")


def test_nccl_picks_as_its_source_says() -> None:
    """2.30 on one host of eight A100, and on four."""
    model, mib = MODELS["2.30"], 2**20
    alone, four = Job(1, 8, 240.0), Job(4, 8, 160.0)
    assert [model.choose(size * mib, alone)[1:] for size in (1, 4, 25)] == [
        ("ring", "ll"),
        ("ring", "ll128"),
        ("ring", "simple"),
    ]
    assert {model.choose(size * mib, four)[1:] for size in (1, 4, 25)} == {("tree", "ll128")}
    largest = model.choose(256 * mib, four)
    assert largest[1:] == ("ring", "simple") and largest.seconds == pytest.approx(3.6e-3, rel=0.02)
