"""A lab: hosts on one machine, each a network namespace with a link of its own to a switch.

    with Lab(4, rate=1e9) as lab:
        program = lab.popen(0, ["python", "train.py"])

Links are veth pairs held to their rate in both directions; the switch is a bridge in one more namespace without a way
out, so nothing leaves the machine and labs never meet. As root, or in a user namespace where the kernel grants one.
`warden` holds it all and takes it down when the owner ends, however it ends.

Programs on a host see its interface in `ip` and /proc/net/dev. /sys/class/net still shows the machine's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

from gradientflow.errors import UsageError
from gradientflow.lab import warden
from gradientflow.lab.limits import Bucket, check_range, format_rate, qdiscs
from gradientflow.lab.shell import LIMIT_S, Batch, LabUnavailable, find, first_line, run, run_all

#: Of every host; a name no interface of the machine has, so that neither is taken for the other.
INTERFACE = "lab0"
MOST_HOSTS = 250

_numbers = itertools.count()


class Host(NamedTuple):
    address: str
    #: As `nsenter --net=` takes it.
    namespace: str
    interface: str
    #: Bits per second each way; None: not held to any.
    rate: float | None


class Counters(NamedTuple):
    """What a host's interface has carried so far.

    As interfaces count: TCP's segments that came as one packet (see `limits`) are one packet with one header. So bytes
    are the payload and at most 4.6 % more, where on the wire each full segment carries 66 bytes of headers."""

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int


class LabStatus(NamedTuple):
    """A lab on this machine, anybody's."""

    name: str
    owner: int
    owner_lives: bool
    #: Of the owner's user.
    uid: int
    num_hosts: int
    rate: str
    #: The process that holds it.
    warden: int


class Lab:
    """Up when constructed; down after `with`, `down()`, or the end of this process.

    rate: bits per second of every link, each way; None leaves links as fast as the machine is.
    rates: for single hosts, by number.
    name: shown by `Lab.status`; need not be unique.
    clouds: hosts that have a switch of their own, by number; () puts all of them at one.
    between: bits per second of each cloud's link to the others, each way.
    latency_s: added to every packet's way from host to host; needs netem in the kernel."""

    def __init__(
        self,
        num_hosts: int,
        rate: float | None,
        rates: Mapping[int, float | None] = MappingProxyType({}),
        name: str | None = None,
        *,
        clouds: Sequence[Sequence[int]] = (),
        between: float | None = None,
        latency_s: float = 0.0,
    ) -> None:
        if not 1 <= num_hosts <= MOST_HOSTS:
            raise UsageError(f"a lab of {num_hosts} hosts: expected 1 to {MOST_HOSTS}")
        unknown = [number for number in rates if number not in range(num_hosts)]
        if unknown:
            raise UsageError(f"a rate for host {unknown[0]}: hosts are numbered 0 to {num_hosts - 1}")
        if clouds and sorted(itertools.chain(*clouds)) != list(range(num_hosts)):
            raise UsageError(f"clouds {[list(cloud) for cloud in clouds]}: expected each of {num_hosts} hosts in one")
        by_host = [rates.get(number, rate) for number in range(num_hosts)]
        for each in (*by_host, between):
            if each is not None:
                check_range(each)
        self._clouds, self._between = clouds or [range(num_hosts)], between
        if not 0.0 <= latency_s <= 10.0:
            raise UsageError(f"latency_s={latency_s}: expected 0 to 10 seconds")
        self.name = name or f"lab-{os.getpid()}-{next(_numbers)}"
        self.rate, self.latency_s = rate, latency_s
        #: Of the largest bucket so far.
        self._burst_nbytes = max((Bucket.of(each, num_hosts).burst_nbytes for each in by_host if each), default=0)
        self.hosts: tuple[Host, ...] = ()
        self._owner = os.getpid()
        self._warden, self._into_users, namespaces = _start_warden(self.name, num_hosts, format_rate(rate))
        try:
            self.hosts = tuple(
                Host(f"10.77.0.{number}", namespace, INTERFACE, own_rate)
                for number, namespace, own_rate in zip(itertools.count(1), namespaces, by_host)
            )
            self._wire()
        except BaseException:
            self.down()
            raise

    # - Programs

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs on a host, from whatever program. Gloo, NCCL and TensorPipe are told to use the
        host's interface."""
        interface = self.hosts[host].interface
        told = [f"{library}_SOCKET_IFNAME={interface}" for library in ("GLOO", "NCCL", "TP")]
        return [*self._entrance(self.hosts[host].namespace), "env", *told, *argv]

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A program on a host; `options` are those of `subprocess.Popen`. It does not outlive the lab."""
        return subprocess.Popen(self.command(host, argv), **options)

    # - Traffic

    def counters(self) -> tuple[Counters, ...]:
        """By host. Read at the switch's ends of the links, which is one file for all: what a host sends its port
        receives, so these are the numbers of the host's own interface."""
        ports: dict[str, list[int]] = {}
        for line in Path(f"/proc/{self._warden_alive()}/net/dev").read_text().splitlines()[2:]:
            device, _, numbers = line.partition(":")
            ports[device.strip()] = [int(number) for number in numbers.split()]
        return tuple(
            Counters(tx_bytes=port[0], rx_bytes=port[8], tx_packets=port[1], rx_packets=port[9])
            for port in (ports[_port(number)] for number in range(len(self.hosts)))
        )

    @contextlib.contextmanager
    def cut_off(self, host: int) -> Iterator[None]:
        """Meanwhile no packet comes or goes; connections are not told."""
        switch = self._entrance(f"/proc/{self._warden_alive()}/ns/net")
        run_all([Batch(switch, "ip", [f"link set {_port(host)} down"])])
        try:
            yield
        finally:
            run_all([Batch(switch, "ip", [f"link set {_port(host)} up"])])

    def reshape(self, rate: float) -> None:
        """From now on all hosts have this rate, in bits per second. Of a lab that is shaped; packets in queues stay."""
        # Buckets never shrink: a packet that waits in a bucket and no longer fits into it stops the link for ever.
        if any(host.rate is None for host in self.hosts) or self.latency_s:
            raise UsageError(f"{self.name} has links without a rate, or with latency: make a new lab")
        check_range(rate)
        num_hosts = len(self.hosts)
        bucket = Bucket.of(rate, num_hosts)
        self._burst_nbytes = max(self._burst_nbytes, bucket.burst_nbytes)
        change = f"qdisc change dev {{}} root handle 1: {bucket._replace(burst_nbytes=self._burst_nbytes)}"
        switch = self._entrance(f"/proc/{self._warden_alive()}/ns/net")
        ports = Batch(switch, "tc", [change.format(_port(number)) for number in range(num_hosts)])
        inside = [Batch(self._entrance(host.namespace), "tc", [change.format(host.interface)]) for host in self.hosts]
        run_all([ports, *inside])
        self.rate = rate
        self.hosts = tuple(host._replace(rate=rate) for host in self.hosts)

    # - Its end

    def down(self) -> None:
        """Take the lab down and kill what still runs on its hosts. In a forked child this does nothing."""
        if os.getpid() != self._owner or self._warden.returncode is not None:
            return
        assert self._warden.stdin
        # A word, not only the end of file: a forked child may hold the pipe open.
        with contextlib.suppress(BrokenPipeError):
            self._warden.stdin.write("down\n")
            self._warden.stdin.close()
        try:
            self._warden.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # - All labs of the machine

    @staticmethod
    def status() -> list[LabStatus]:
        """The labs that are up, whosever they are."""
        found = (_status_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
        return sorted(status for status in found if status)

    @staticmethod
    def clean() -> list[LabStatus]:
        """Take down labs whose owner is gone and whose warden did not notice, being stopped; they are returned.

        Another user's are left alone, unless this is root."""
        gone = [status for status in Lab.status() if not status.owner_lives]
        return [status for status in gone if _end(status.warden)]

    # - Inside

    def _wire(self) -> None:
        switch = self._entrance(f"/proc/{self._warden_alive()}/ns/net")
        if self.latency_s:
            words = run(Batch(switch, "tc", qdiscs("lo", None, self.latency_s)))
            if words:
                raise UsageError(
                    f"latency_s={self.latency_s:g} needs netem, which this kernel does not offer: leave it 0 ({words})"
                )
        links, shapes = self._switches()
        batches: list[Batch] = []
        switch_of = {number: _switch(index) for index, cloud in enumerate(self._clouds) for number in cloud}
        for number, host in enumerate(self.hosts):
            port, inside = _port(number), self._entrance(host.namespace)
            links.append(
                f"link add {port} mtu 1500 type veth peer name {host.interface} mtu 1500 netns {host.namespace}"
            )
            links.append(f"link set {port} master {switch_of[number]} up")
            shapes += qdiscs(port, host.rate, num_hosts=len(self.hosts))
            set_up = ["link set lo up", f"address add {host.address}/24 dev {host.interface}"]
            if host.rate is not None:
                num_segments = Bucket.of(host.rate, len(self.hosts)).num_segments
                set_up.append(f"link set {host.interface} gso_max_segs {num_segments}")
            batches.append(Batch(inside, "ip", [*set_up, f"link set {host.interface} up"]))
            batches.append(Batch(inside, "tc", qdiscs(host.interface, host.rate, self.latency_s, len(self.hosts))))
        run_all([Batch(switch, "ip", links)])
        run_all([batch for batch in [Batch(switch, "tc", shapes), *batches] if batch.lines])

    def _switches(self) -> tuple[list[str], list[str]]:
        """One for each cloud; if there are several, another one that joins them."""
        links: list[str] = []
        shapes: list[str] = []
        names = [_switch(index) for index in range(len(self._clouds))]
        for name in [*names, _CORE] if len(names) > 1 else names:
            links.append(f"link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
            links.append(f"link set {name} up")
        for index, name in enumerate(names) if len(names) > 1 else ():
            near, far = f"up{index}", f"down{index}"
            links.append(f"link add {near} mtu 1500 type veth peer name {far} mtu 1500")
            links += [f"link set {near} master {name} up", f"link set {far} master {_CORE} up"]
            shapes += [line for end in (near, far) for line in qdiscs(end, self._between, num_hosts=len(self.hosts))]
        return links, shapes

    def _entrance(self, namespace: str) -> list[str]:
        users = [f"--user=/proc/{self._warden_alive()}/ns/user", "--preserve-credentials"]
        return [find("nsenter"), *(users if self._into_users else ()), f"--net={namespace}", "--"]

    def _warden_alive(self) -> int:
        if self._warden.returncode is not None:
            raise UsageError(f"{self.name} is down: make a new lab")
        return self._warden.pid


_CORE = "core"


def _port(host: int) -> str:
    return f"host{host}"


def _switch(cloud: int) -> str:
    return f"switch{cloud}"


def _start_warden(name: str, num_hosts: int, rate: str) -> tuple[subprocess.Popen[str], bool, list[str]]:
    """The warden, whether it is in a user namespace of its own, and where the hosts' namespaces are."""
    if sys.platform != "linux":
        raise LabUnavailable("a lab needs network namespaces, which are Linux's: use a Linux machine")
    for command in ("ip", "tc", "nsenter"):
        find(command)
    reasons = []
    for prefix in ([], [find("unshare"), "--user", "--map-root-user", "--"]):
        argv = [*prefix, sys.executable, "-I", "-S", warden.__file__, warden.MARK]
        try:
            process = subprocess.Popen(
                [*argv, name, str(os.getpid()), str(num_hosts), rate],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is the owner's
            )
        except OSError as error:  # a user who may not run this Python
            reasons.append(str(error))
            continue
        assert process.stdout and process.stderr
        with process.stdout, process.stderr:
            descriptors = first_line(process.stdout).split()
            if descriptors:
                return process, bool(prefix), [f"/proc/{process.pid}/fd/{each}" for each in descriptors]
            process.kill()
            reasons.append(" ".join(process.communicate(timeout=LIMIT_S)[1].split()))
    raise LabUnavailable(
        f"no right to make a network namespace, neither directly ({reasons[0]}) nor inside a user namespace"
        f" ({reasons[1]}): run as root, or have user namespaces allowed (sysctl user.max_user_namespaces,"
        " kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    )


def _status_of(pid: int) -> LabStatus | None:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
        if len(argv) < 5 or argv[-5] != warden.MARK:
            return None
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        about = {field: words.split() for field, _, words in (line.partition(":") for line in lines)}
        if len(about["NSpid"]) > 1:  # in a container, where processes are numbered otherwise
            return None
        name, owner, num_hosts, rate = argv[-4:]
        # A process whose parent ended gets another.
        return LabStatus(name, int(owner), about["PPid"] == [owner], int(about["Uid"][0]), int(num_hosts), rate, pid)
    except (OSError, ValueError):  # it has just ended, or only looks like one
        return None


def _end(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            signal.pidfd_send_signal(process, signal.SIGCONT)
            return bool(select.select([process], [], [], LIMIT_S)[0])
        finally:
            os.close(process)
    except OSError:
        return False
