"""A lab's hosts reach each other and nobody else, never faster than their rate, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradientflow
from gradientflow.errors import UsageError
from gradientflow.lab import Lab, LabUnavailable, check_rate, format_rate, parse_rate, warden
from gradientflow.lab.check import measure_ring
from gradientflow.lab.limits import PACKET_NBYTES, Bucket
from gradientflow.lab.shell import first_line

LIMIT_S = 20.0
PYTHON = [sys.executable, "-S", "-c"]
PORT = 7000


@pytest.fixture(scope="module")
def _possible() -> None:
    try:
        Lab(1, None).down()
    except LabUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def lab(_possible: None) -> Iterator[Lab]:
    """Three hosts whose links have no rate."""
    with Lab(3, None) as lab:
        yield lab


def output(lab: Lab, host: int, argv: list[str]) -> str:
    return subprocess.run(lab.command(host, argv), check=True, stdout=-1, text=True, timeout=LIMIT_S).stdout


def eventually(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + LIMIT_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.02)
    return holds()


LISTEN = (
    f"import socket, sys; server = socket.create_server((sys.argv[1], {PORT})); print('ready', flush=True)\n"
    "client = server.accept()[0]; total = 0\n"
    "while data := client.recv(2**16): total += len(data)\n"
    "print(total)"
)
SEND = (
    f"import socket, sys; client = socket.create_connection((sys.argv[1], {PORT}), timeout=5)\n"
    "client.sendall(bytes(int(sys.argv[2])))"
)


def transfer(lab: Lab, source: int, target: int, nbytes: int) -> int:
    """How much of `nbytes` arrived."""
    address = lab.hosts[target].address
    with lab.popen(target, [*PYTHON, LISTEN, address], stdout=subprocess.PIPE, text=True) as listener:
        assert first_line(listener.stdout)
        output(lab, source, [*PYTHON, SEND, address, str(nbytes)])
        return int(listener.communicate(timeout=LIMIT_S)[0])


# - Rates


@given(st.floats(min_value=1e3, max_value=1e12))
def test_a_rate_that_is_written_reads_as_it_was(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=1e-9)


def test_rates_that_are_written() -> None:
    written = {"1Gbit": 1e9, "100mbit": 1e8, "2.5 Gbit": 2.5e9, "64kbit": 64e3, "9600bit": 9600.0, "unshaped": None}
    assert {text: parse_rate(text) for text in written} == written


@pytest.mark.parametrize(
    "text", ["", "1", "fast", "1Gbps", "-1Gbit", "1e9bit", "1Gbit/s", "nanbit", "0Mbit", "9999Gbit"]
)
def test_what_is_no_rate_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^rate .*: expected [^\n]*bit"):
        parse_rate(text)


@given(st.floats(min_value=1e3, max_value=1e12))
def test_a_bucket_holds_two_of_the_largest_packets_and_its_queue_holds_more(rate: float) -> None:
    bucket = Bucket.of(rate)
    assert bucket.num_segments >= 1
    assert 2 * bucket.num_segments * PACKET_NBYTES <= bucket.burst_nbytes < bucket.queue_nbytes < 2**32


# - Hosts


def test_any_two_hosts_reach_each_other(lab: Lab) -> None:
    for source in range(3):
        assert transfer(lab, source, (source + 1) % 3, 10_000) == 10_000


def test_no_host_reaches_the_machine_or_beyond(lab: Lab) -> None:
    with socket.create_server(("", 0)) as here:
        port = here.getsockname()[1]
        reach = f"import socket, sys; print(socket.socket().connect_ex((sys.argv[1], {port})))"
        for address in ("127.0.0.1", "8.8.8.8", "192.168.0.1"):
            assert output(lab, 0, [*PYTHON, reach, address]).strip() != "0"


def test_the_machine_has_none_of_its_interfaces(lab: Lab) -> None:
    names = "import socket; print(*(name for _, name in socket.if_nameindex()))"
    assert set(output(lab, 0, [*PYTHON, names]).split()) == {"lo", lab.hosts[0].interface}
    assert lab.hosts[0].interface not in {name for _, name in socket.if_nameindex()}


def test_programs_are_told_the_interface_that_they_should_use(lab: Lab) -> None:
    told = [f"{library}_SOCKET_IFNAME" for library in ("GLOO", "NCCL", "TP")]
    program = lab.popen(1, ["sh", "-c", f"echo ${' $'.join(told)} $MINE; exit 3"], env={"MINE": "kept"}, stdout=-1)
    assert program.communicate(timeout=LIMIT_S)[0].decode().split() == [lab.hosts[1].interface] * 3 + ["kept"]
    assert program.returncode == 3
    assert f" {lab.hosts[1].interface}" in output(lab, 1, ["cat", "/proc/net/dev"])


def test_packets_of_a_connection_do_not_overtake_each_other(lab: Lab) -> None:
    """They would in queues of several processors, and TCP would take them for lost."""
    setting = "/proc/sys/net/core/rps_default_mask"
    if not Path(setting).exists():
        pytest.skip("this kernel has no net.core.rps_default_mask, so labs leave the order of packets to chance")
    before = Path(setting).read_text()
    for host in range(len(lab.hosts)):
        mask = subprocess.run(lab.command(host, ["cat", setting]), capture_output=True, text=True, check=True).stdout
        assert int(mask.replace(",", ""), 16) == sum(1 << one for one in os.sched_getaffinity(0))
    assert Path(setting).read_text() == before, "the machine's own is left as it is"


def test_a_host_counts_what_its_own_interface_counts(lab: Lab) -> None:
    assert all(sum(counters) == 0 for counters in lab.counters())
    transfer(lab, 0, 1, 1_000_000)
    # The last acknowledgement may still be on its way.
    assert eventually(lambda: [tuple(counters) for counters in lab.counters()] == [_inside(lab, n) for n in range(3)])
    sender, receiver, other = lab.counters()
    assert 1_000_000 < receiver.rx_bytes == sender.tx_bytes < 1_050_000
    assert other.tx_bytes == 0 and other.rx_bytes < 1000


def _inside(lab: Lab, host: int) -> tuple[int, ...]:
    line = output(lab, host, ["grep", lab.hosts[host].interface, "/proc/net/dev"])
    numbers = [int(number) for number in line.partition(":")[2].split()]
    return numbers[8], numbers[0], numbers[9], numbers[1]


# - Shaping. A busy machine can make a link slower, so only that it is never faster is asked of every run.


def test_no_link_is_faster_than_its_rate_in_either_direction(_possible: None) -> None:
    rate = 20e6
    with Lab(2, rate) as lab:
        start_s = time.monotonic()
        measure_ring(lab, seconds=0.5)
        carried = lab.counters()
        elapsed_s = time.monotonic() - start_s
        allowed_nbytes = rate / 8 * elapsed_s + Bucket.of(rate).burst_nbytes
        assert all(0 < counters.tx_bytes <= allowed_nbytes for counters in carried)
        assert all(0 < counters.rx_bytes <= allowed_nbytes for counters in carried)


def test_a_host_may_have_a_rate_of_its_own(_possible: None) -> None:
    with Lab(3, 50e6, {1: 2e6}) as lab:
        to_first, to_slow, from_slow = measure_ring(lab, seconds=0.5)
        assert max(to_slow, from_slow) < to_first


def test_rates_may_change_while_a_lab_is_up(_possible: None) -> None:
    with Lab(2, 50e6) as lab:
        before = measure_ring(lab, seconds=0.5)
        lab.reshape(2e6)
        assert max(measure_ring(lab, seconds=0.5)) < min(before)
        assert lab.rate == 2e6 and [host.rate for host in lab.hosts] == [2e6, 2e6]
    with Lab(2, None) as lab, pytest.raises(UsageError, match="links without a rate"):
        lab.reshape(1e6)


def test_links_that_are_busy_become_slower_and_do_not_stop(_possible: None) -> None:
    """What waits in their queues was let in by larger buckets."""
    with Lab(2, 1e9) as lab, ThreadPoolExecutor() as pool:
        busy = pool.submit(measure_ring, lab, seconds=1.5)
        until = time.monotonic() + 10
        while sum(one.tx_bytes for one in lab.counters()) < 10e6:
            assert time.monotonic() < until
            time.sleep(0.01)
        lab.reshape(2e7)
        assert min(busy.result(30)) > 0
        assert all(1e7 < rate < 4e7 for rate in measure_ring(lab, seconds=1.0))


def test_clouds_are_joined_by_links_of_their_own(_possible: None) -> None:
    """In a ring of four, two links lead from one cloud to the other."""
    with Lab(4, 80e6, clouds=[[0, 1], [2, 3]], between=5e6) as lab:
        across, inside, back, there = measure_ring(lab, seconds=0.5)
        assert across < 10e6 and back < 10e6  # what fits into buckets included
        assert inside > 2 * across and there > 2 * back
    with pytest.raises(UsageError, match="expected each of 3 hosts in one"):
        Lab(3, 80e6, clouds=[[0], [2]], between=5e6)


def test_a_rate_that_the_machine_carries_is_carried(_possible: None) -> None:
    with Lab(2, 5e6) as lab:
        assert eventually(lambda: _carries(lab))


def _carries(lab: Lab) -> bool:
    try:
        return min(check_rate(lab)) > 0
    except UsageError:
        return False


def test_a_rate_that_the_machine_cannot_carry_is_refused_with_both_numbers(_possible: None) -> None:
    with Lab(2, parse_rate("1000Gbit")) as lab, pytest.raises(UsageError, match=r"carries [\d.]+[MG]bit .* 956Gbit"):
        check_rate(lab)


def test_latency_is_added_or_refused_by_name(_possible: None) -> None:
    latency_s = 0.05
    try:
        with Lab(2, 1e9, latency_s=latency_s) as lab:
            start_s = time.monotonic()
            transfer(lab, 0, 1, 1)
            assert time.monotonic() - start_s > 2 * latency_s
    except UsageError as error:
        assert "netem" in str(error)
    assert not _mine()


def _mine() -> list[str]:
    return [status.name for status in Lab.status() if status.owner == os.getpid()]


# - What cannot be


@pytest.mark.parametrize(
    ("num_hosts", "rate", "rates", "words"),
    [
        (0, 1e9, {}, "1 to 250"),
        (251, 1e9, {}, "1 to 250"),
        (2, 0.0, {}, "expected 1kbit"),
        (2, float("nan"), {}, "expected 1kbit"),
        (2, 1e9, {2: 1e6}, "hosts are numbered 0 to 1"),
        (2, 1e9, {1: -1.0}, "expected 1kbit"),
    ],
)
def test_labs_that_cannot_be(num_hosts: int, rate: float, rates: dict[int, float | None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Lab(num_hosts, rate, rates)


TRY = "from gradientflow.lab import Lab, LabUnavailable\ntry: Lab(1, None)\nexcept LabUnavailable as e: print(e)"


def test_a_missing_command_is_named() -> None:
    done = subprocess.run([*PYTHON, TRY], env=_environment(PATH="/nowhere"), stdout=-1, text=True, timeout=LIMIT_S)
    assert "util-linux" in done.stdout or "iproute2" in done.stdout, done.stdout


def test_a_missing_right_is_named() -> None:
    # These limits hold inside the new user namespace only.
    forbid = "for kind in net user; do echo 0 > /proc/sys/user/max_${kind}_namespaces || exit 9; done"
    argv = ["unshare", "-Ur", "sh", "-c", f'{forbid}; exec "$@"', "sh", *PYTHON, TRY]
    done = subprocess.run(argv, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        pytest.skip(f"no user namespace to try this in: {done.stderr}")
    assert "run as root, or have user namespaces allowed" in done.stdout and done.stdout.count("\n") == 1, done.stdout


def test_a_python_that_may_not_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(LabUnavailable, match="/no/such/python"):
        Lab(1, None)


def test_a_warden_without_an_owner_says_so_in_a_line() -> None:
    argv = [sys.executable, "-I", "-S", warden.__file__, warden.MARK, "none", "4194305", "1", "1Gbit"]
    done = subprocess.run(argv, stdin=-3, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and done.stderr == "the lab's warden: [Errno 3] No such process\n"


def _environment(**changes: str) -> dict[str, str]:
    source = str(Path(gradientflow.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, *filter(None, sys.path)]), **changes}


# - Its end

OWNER = """
import os, signal, sys, threading, time
from gradientflow.lab import Lab

def make():
    global lab
    lab = Lab(2, 1e9, name=sys.argv[1])

maker = threading.Thread(target=make)
maker.start()
maker.join()
# Neither a shell's children nor a program that leaves its session escapes.
program = lab.popen(0, ["sh", "-c", "setsid sleep 300 & exec sleep 300"])
child = 0
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        lab.down()
        time.sleep(300)
while os.stat(f"/proc/{program.pid}/ns/net").st_ino != os.stat(lab.hosts[0].namespace).st_ino:
    time.sleep(0.01)
print(child, program.pid, *(os.stat(host.namespace).st_ino for host in lab.hosts), flush=True)
with lab:
    time.sleep(0.5)
    assert program.poll() is None
    if sys.argv[2] == "raise":
        raise SystemExit(7)
    if sys.argv[2] == "return":
        os._exit(0)
    time.sleep(300)
"""


@pytest.mark.parametrize("how", ["raise", "return", "fork", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_however_the_owner_ends(_possible: None, how: str) -> None:
    name = f"test-{os.getpid()}-{how}"
    child = 0
    with subprocess.Popen(
        [*PYTHON, OWNER, name, how], env=_environment(), stdout=subprocess.PIPE, stderr=-3, text=True
    ) as owner:
        try:
            child, program, *namespaces = (int(word) for word in first_line(owner.stdout).split())
            holders = _holders(namespaces)
            assert f"/proc/{program}/ns/net" in holders
            if how in ("raise", "return"):
                owner.wait(LIMIT_S)
            else:
                assert [status.owner for status in Lab.status() if status.name == name] == [owner.pid]
                owner.send_signal(signal.SIGKILL if how == "fork" else signal.Signals[how])
                owner.wait(LIMIT_S)
            assert eventually(lambda: name not in [status.name for status in Lab.status()])
            assert eventually(lambda: not Path(f"/proc/{program}").exists())
            # Only those: the kernel may have given the same number to a new namespace by now.
            assert eventually(lambda: not _holders(namespaces) & holders), _holders(namespaces) & holders
        finally:
            owner.kill()
            if child:
                os.kill(child, signal.SIGKILL)


def _holders(namespaces: list[int]) -> set[str]:
    """Whatever keeps one of these alive: a process in it, a descriptor, or a name that `ip netns list` would show."""
    # Not Path.glob, which raises when a process ends between finding its directory and listing it.
    places = [*glob("/proc/[0-9]*/ns/net"), *glob("/proc/[0-9]*/fd/*"), *glob("/run/netns/*")]
    return {place for place in places if _inode(place) in namespaces}


def _inode(place: str) -> int:
    try:
        return os.stat(place).st_ino
    except OSError:
        return 0


def test_labs_stand_side_by_side_and_fall_alone(_possible: None) -> None:
    with Lab(2, None) as first:
        with Lab(2, None) as second:
            assert first.hosts[0].address == second.hosts[0].address
            assert transfer(first, 0, 1, 1000) == transfer(second, 0, 1, 1000) == 1000
            assert set(_mine()) == {first.name, second.name} and first.name != second.name
        assert transfer(first, 0, 1, 1000) == 1000
    assert not _mine()


def test_a_lab_that_is_down_says_so_and_may_be_taken_down_again(lab: Lab) -> None:
    program = lab.popen(0, ["sh", "-c", "echo; exec sleep 300"], stdout=subprocess.PIPE, text=True)
    assert first_line(program.stdout)
    lab.down()
    lab.down()
    assert program.communicate(timeout=LIMIT_S) == ("", None) and program.returncode == -signal.SIGKILL
    for use in (lab.counters, lambda: lab.popen(0, ["true"])):
        with pytest.raises(UsageError, match="is down"):
            use()


def test_no_program_escapes_by_being_started_just_before_the_end(_possible: None) -> None:
    for delay_s in (0.0, 0.001, 0.002, 0.005):
        with Lab(1, None) as lab:
            program = lab.popen(0, ["sleep", "300"], stderr=subprocess.DEVNULL)
            time.sleep(delay_s)
        assert program.wait(LIMIT_S) != 0


def test_clean_ends_labs_without_an_owner_and_no_others(lab: Lab) -> None:
    name = f"test-{os.getpid()}-clean"
    with subprocess.Popen([*PYTHON, OWNER, name, ""], env=_environment(), stdout=-1, text=True) as owner:
        try:
            _, program, *_ = (int(word) for word in first_line(owner.stdout).split())
            warden = next(status.warden for status in Lab.status() if status.name == name)
            os.kill(warden, signal.SIGSTOP)
        finally:
            owner.kill()
    assert Path(f"/proc/{program}").exists()
    assert [status.name for status in Lab.clean() if status.owner == owner.pid] == [name]
    assert eventually(lambda: not Path(f"/proc/{program}").exists())
    assert _mine() == [lab.name] and transfer(lab, 0, 1, 1000) == 1000


# - What it is for

ALL_REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", f"tcp://{sys.argv[1]}:29500", rank=int(sys.argv[2]), world_size=2)
tensor = torch.ones(1_000_000)
dist.all_reduce(tensor)
assert tensor.eq(2).all()
dist.destroy_process_group()
"""


def test_gloo_sends_through_the_links(_possible: None) -> None:
    with Lab(2, None) as lab:
        argv = [sys.executable, "-c", ALL_REDUCE, lab.hosts[0].address]
        with lab.popen(0, [*argv, "0"]) as first, lab.popen(1, [*argv, "1"]) as second:
            assert [rank.wait(60.0) for rank in (first, second)] == [0, 0]
        for counters in lab.counters():
            assert 4_000_000 < counters.tx_bytes < 4_400_000


@pytest.mark.slow
def test_all_of_this_holds_without_root(_possible: None) -> None:
    if os.geteuid():
        pytest.skip("there is no root in this run, so all of it was without")
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv to give up root with")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    python = next(filter(lambda each: _runs(nobody, each), (sys.executable, "/usr/bin/python3")), None)
    if python is None:
        pytest.skip("no Python with this one's packages that an unprivileged user may run")
    # Not how fast links are, which does not depend on who made them; and of the ways in which an owner ends, half.
    left_out = ("gloo", "busy", "machine_c", "may_change", "fork", "return", "SIGTERM", "written")
    argv = [python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", f"not ({' or '.join(left_out)})", __file__]
    done = subprocess.run([*nobody, *argv], env=_environment(HOME="/tmp"), capture_output=True, text=True, timeout=100)
    if "no right to make a network namespace" in done.stdout:
        pytest.skip("this kernel grants no user namespaces")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "SKIPPED [1]" in done.stdout, done.stdout


def _runs(nobody: list[str], python: str) -> bool:
    code = "import sys, subprocess, pytest; sys.exit(subprocess.call([sys.executable, '-c', '']))"
    return subprocess.run([*nobody, python, "-c", code], env=_environment(), stderr=-3, timeout=LIMIT_S).returncode == 0
