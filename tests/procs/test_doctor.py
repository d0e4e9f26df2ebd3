"""The doctor finds what is wrong with a job's hosts, names the host, and finds nothing where nothing is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gradientflow
from gradientflow.doctor.examination import examine_together
from gradientflow.doctor.meeting import Meeting
from gradientflow.errors import UsageError
from gradientflow.lab import Lab, LabUnavailable

#: Generous: machines that run tests are busy ones.
LIMIT_S = 110.0
PORT = 29500

Findings = list[dict[str, str]]


@pytest.fixture(scope="module")
def _possible() -> None:
    try:
        Lab(1, 1e9).down()
    except LabUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def lab(_possible: None) -> Iterator[Lab]:
    with Lab(2, None) as lab:
        yield lab


def examine(lab: Lab, told: Mapping[int, Mapping[str, str]] | None = None, wait_s: float = 60.0) -> list[Findings]:
    """By rank, what the doctor has to say on each host of a lab, where some are told something of their own."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": str(PORT)}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(len(lab.hosts)):
            words = {"RANK": str(rank), "WORLD_SIZE": str(len(lab.hosts)), **(told or {}).get(rank, {})}
            argv = ["env", *(f"{name}={value}" for name, value in words.items()), sys.executable, "-m", "gradientflow"]
            argv += ["doctor", "--json", "--wait", str(wait_s), "--seconds", "0.3"]
            process = lab.popen(rank, argv, env=common, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        return [_said(process) for process in processes]


def _said(process: subprocess.Popen[str]) -> Findings:
    out, errors = process.communicate(timeout=LIMIT_S)
    findings: Findings = json.loads(out)["findings"] if out else []
    broken = any(each["weight"] == "fix" for each in findings)
    assert process.returncode == int(broken), errors
    return findings


def to_mend(findings: Findings) -> dict[str, str]:
    """Words and what to do, by check."""
    return {each["check"]: f"{each['words']} -> {each['mend']}" for each in findings if each["weight"] == "fix"}


def test_healthy_hosts_add_up_and_a_host_shaped_to_a_tenth_is_named(_possible: None) -> None:
    with Lab(3, 300e6, rates={2: 30e6}) as lab:
        first, *others = examine(lab)
    assert others == [[], []]
    mend = to_mend(first)
    assert mend.keys() == {"bandwidth"}, first
    assert "rank 2" in mend["bandwidth"] and "10.77.0.3" in mend["bandwidth"] and "ethtool lab0" in mend["bandwidth"]
    assert {each["check"] for each in first if each["weight"] == "ok"} >= {"ranks", "versions", "interface", "ports"}


def test_interfaces_that_other_hosts_cannot_reach_are_named_with_the_right_one(_possible: None) -> None:
    """One rank listens on loopback, another on an interface that leads elsewhere."""
    elsewhere = "ip link add elsewhere type veth peer name nowhere && ip address add 172.31.9.1/24 dev elsewhere"
    with Lab(3, None) as lab:
        subprocess.run(lab.command(2, ["sh", "-c", f"{elsewhere} && ip link set elsewhere up"]), check=True)
        first, *_ = examine(lab, {1: {"GLOO_SOCKET_IFNAME": "lo"}, 2: {"GLOO_SOCKET_IFNAME": "elsewhere"}})
    loopback, wrong = (each for each in first if each["weight"] == "fix")
    assert loopback["check"] == wrong["check"] == "interface", first
    assert "rank 1" in loopback["words"] and "127.0.0.1" in loopback["words"]
    assert "rank 2" in wrong["words"] and "172.31.9.1" in wrong["words"]
    assert all("GLOO_SOCKET_IFNAME=lab0" in each["mend"] for each in (loopback, wrong))


def close_ports(lab: Lab, host: int, ports: str) -> None:
    """Towards others, as a firewall does."""
    subprocess.run(
        lab.command(host, ["ip", "rule", "add", "ipproto", "tcp", "dport", ports, "unreachable"]), check=True
    )


def test_a_closed_port_of_the_store_is_said_where_it_is_closed_and_where_it_is_missed(lab: Lab) -> None:
    close_ports(lab, 1, str(PORT))
    first, second = examine(lab, wait_s=4.0)
    assert "rank 1" in to_mend(first)["ranks"] and f"{lab.hosts[0].address}:{PORT}" in to_mend(first)["ranks"]
    assert f"{lab.hosts[0].address}:{PORT} cannot be reached" in to_mend(second)["ports"]
    assert "firewall" in to_mend(second)["ports"]


def test_mismatched_versions_and_closed_ports_between_hosts_are_found_together(lab: Lab, tmp_path: Path) -> None:
    package = Path(gradientflow.__file__).parent
    other = tmp_path / "gradientflow"
    other.mkdir()
    for entry in package.iterdir():
        if entry.name != "__init__.py":
            (other / entry.name).symlink_to(entry)
    text = (package / "__init__.py").read_text()
    (other / "__init__.py").write_text(text.replace(gradientflow.__version__, "0.0.9"))
    close_ports(lab, 1, "32768-60999")
    first, _ = examine(lab, {1: {"PYTHONPATH": str(tmp_path)}})
    mend = to_mend(first)
    assert mend.keys() == {"versions", "ports"}, first
    assert "rank 1 cannot reach rank 0" in mend["ports"] and "ip_local_port_range" in mend["ports"]
    assert "0.0.9 on rank 1" in mend["versions"] and gradientflow.__version__ in mend["versions"]


@pytest.mark.parametrize("environment", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "x"}])
def test_a_world_that_is_not_described_is_wrong_use(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="torchrun"):
        Meeting(environment, 1.0)


def test_a_store_that_goes_away_is_said_in_words() -> None:
    """Rank 0 holds it and ends; the other waits for it and is told."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first = Meeting({**world, "RANK": "0"}, 5.0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(examine_together, {**world, "RANK": "1"}, 20.0, 0.3)
        assert first.hear("facts", [1])
        del first
        (finding,) = other.result(timeout=30).found
    assert finding.weight == "fix" and "rank 1" in finding.words and "store is gone" in finding.words
