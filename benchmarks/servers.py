"""What a parameter server does, and what it endures.

    python benchmarks/servers.py speed [--megabytes 64] [--steps 1000] [--out FILE]
    python benchmarks/servers.py kills [--times 50] [--out FILE]
    python benchmarks/servers.py strangers [--frames 10000] [--clients 100] [--mode plain] [--out FILE]
    python benchmarks/servers.py cut [--seconds 10] [--out FILE]

speed: one server on loopback and on one core, two workers that push a model again and again, in plain mode, with keys
    of the job's and with key files. Bytes that it received and summed, over the CPU seconds of its process, all threads
    and the kernel's part; it sends the sums back, too. And its memory, from the first steps to the last.
kills: real training of a model whose gradients are whole numbers, through two servers that are killed at random moments
    and started anew by their keepers. Every weight is checked after every step.
strangers: the same training, without kills, while frames that are none, halves, too long, of another version, repeated,
    and clients without keys come at its servers. In plain mode also who comes to the other port without a token, and
    who has one and talks nonsense there.
cut: the same training on four hosts of a lab, one of whose workers is cut off from the network for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import zmq
from torch import nn

import gradientflow as gf
from gradientflow.bench.bakeoff import this_machine
from gradientflow.compress import Sum
from gradientflow.exchange.server.client import Client, Errand
from gradientflow.exchange.server.directory import StoreDirectory, store_of_job
from gradientflow.exchange.server.keys import Invitation, KeyFiles, Lock, open_for
from gradientflow.exchange.server.placement import partition_nbytes
from gradientflow.exchange.server.service import Service, keep_freed_memory, send
from gradientflow.exchange.server.wire import MAX_NBYTES, Header, Key, Kind, pack_hello
from gradientflow.lab import Lab
from gradientflow.processes import die_with_parent

LOOPBACK = "127.0.0.1"
#: A process that measures itself says so as often.
REPORT_S = 0.5


class OneServer:
    """A directory of one."""

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation

    def __len__(self) -> int:
        return 1

    def look_up(self, slot: int) -> Invitation:
        return self._invitation

    def take_over(self, slot: int, lost: Invitation, by: Invitation) -> None:
        raise NotImplementedError


# - Speed


def serve(mode: str, keys: str, told: Any, asked: Any) -> None:
    """A server that says what it has summed, in which CPU seconds, and what it holds, whenever it is asked."""
    die_with_parent()
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    keep_freed_memory()
    files = KeyFiles.read(Path(keys)) if mode == "files" else None
    service = Service(LOOPBACK, Lock(mode, files))
    service.start()
    told.send(service.invitation.model_dump_json())
    while asked.recv():
        told.send((service.ledger.summed_nbytes, time.process_time(), resident_nbytes(), dict(service.refusals)))
    service.stop()


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def push_for_ever(rank: int, invitation: str, keys: str, numel: int, steps: int, done: Any) -> None:
    die_with_parent()
    os.sched_setaffinity(0, set(range(1, os.cpu_count() or 1)) or {0})
    torch.set_num_threads(1)
    found = Invitation.model_validate_json(invitation)
    files = KeyFiles.read(Path(keys)) if found.mode == "files" else None
    client = Client(OneServer(found), rank, 2, 1, files)
    values = torch.zeros(numel)
    for seq in range(1, steps + 1):
        values.fill_(rank + 1.0)
        ended = threading.Event()
        conversation = iter_sum(values)
        client.hold(
            Errand(
                conversation,
                1,
                0,
                seq,
                0,
                [0],
                partition_nbytes(values.nbytes, 1),
                lambda nbytes, error, e=ended: e.set(),
            )
        )
        ended.wait()
        if client.error:
            raise client.error
        assert values[0] == values[-1] == 3.0
        done.value = seq
    client.close()


def iter_sum(values: torch.Tensor) -> Any:
    yield Sum([values])


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        keys = str(Path(directory) / "keys")
        KeyFiles.write_new(Path(keys))
        for mode in ("plain", "job", "files"):
            steps = arguments.steps if mode == "plain" else max(20, arguments.steps // 5)
            row = rows[mode] = _speed_of(mode, keys, arguments.megabytes * 250_000, steps)
            print(
                f"{mode:5} {row['gb_per_cpu_s']:.2f} GB/s a core ({row['low']:.2f} to {row['high']:.2f}); a model of "
                f"{arguments.megabytes} MB takes {row['resident_first_mb']:.0f} MB after 5 % of {steps} steps, "
                f"{row['resident_last_mb']:.0f} MB at the end, {row['resident_most_mb']:.0f} MB at most",
                flush=True,
            )
    return rows


def _speed_of(mode: str, keys: str, numel: int, steps: int) -> dict[str, float]:
    context = mp.get_context("spawn")
    (told, tell), (asked, ask) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(mode, keys, tell, asked))
    server.start()
    invitation = told.recv()
    ask.send(True)
    empty_nbytes = told.recv()[2]
    dones = [context.Value("q", 0, lock=False) for _ in range(2)]
    workers = [
        context.Process(target=push_for_ever, args=(rank, invitation, keys, numel, steps, dones[rank]))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    samples: list[tuple[float, int, float, int]] = []
    while any(worker.is_alive() for worker in workers):
        time.sleep(REPORT_S)
        if min(done.value for done in dones) < 0.05 * steps:
            continue
        ask.send(True)
        nbytes, cpu_s, resident, _ = told.recv()
        samples.append((time.perf_counter(), nbytes, cpu_s, resident))
    ask.send(False)
    server.join()
    assert all(worker.exitcode == 0 for worker in workers)
    busy = samples[:-2]  # at the end, nobody pushes
    rates = [(b[1] - a[1]) / (b[2] - a[2]) / 1e9 for a, b in pairwise(busy) if b[1] > a[1]]
    resident = [sample[3] - empty_nbytes for sample in busy]
    cuts = statistics.quantiles(rates, n=40) if len(rates) > 1 else [rates[0]] * 39
    return {
        "gb_per_cpu_s": statistics.median(rates),
        "low": cuts[0],
        "high": cuts[-1],
        "gb_per_s": (busy[-1][1] - busy[0][1]) / (busy[-1][0] - busy[0][0]) / 1e9,
        "resident_first_mb": resident[0] / 1e6,
        "resident_last_mb": resident[-1] / 1e6,
        "resident_most_mb": max(resident) / 1e6,
        "steps": steps,
    }


# - Training that is checked


class Counting(nn.Module):
    """Its gradients are whole numbers that tell rank and step: sums are exact, and a share that is lost or counted
    twice shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for size in (400_000, 30_000, 3, 1_000_000, 70_000))

    def forward(self, step: int) -> torch.Tensor:
        return sum(weight.sum() for weight in self.weights) * float((dist.get_rank() + 1) * (step % 50 + 1))


def train(stop: str) -> None:
    """Until the file `stop` is there. Rank 0 prints what it has found."""
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flow = gf.attach(model, optimizer, "bytescheduler:200KB-ps:2", deadline_s=60)
    world, step, expected, wrong, longest_s = dist.get_world_size(), 0, 0.0, 0.0, 0.0
    go_on, last_s = torch.ones(1), time.monotonic()
    while go_on.item():
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        expected -= sum(rank + 1 for rank in range(world)) * (step % 50 + 1) / world
        step += 1
        for weight in model.weights:
            wrong = max(wrong, float((weight.detach() - expected).abs().max()))
        if abs(expected) > 2**20:  # beyond 2**24 float32 has no exact sums
            expected = 0.0
            with torch.no_grad():
                for weight in model.weights:
                    weight.zero_()
        longest_s = max(longest_s, time.monotonic() - last_s)
        last_s = time.monotonic()
        if step % 5 == 0:
            go_on[0] = not Path(stop).exists()
            dist.broadcast(go_on, 0)
    flow.close()
    if dist.get_rank() == 0:
        print(json.dumps({"steps": step, "wrong": wrong, "longest_step_s": longest_s}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Job:
    """Two workers and two servers with their keepers, all through the command line."""

    def __init__(self, directory: Path, *options: str, lab: Lab | None = None) -> None:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = self.port = probe.getsockname()[1]
        self._stop = directory / "stop"
        told = {"MASTER_ADDR": lab.hosts[0].address if lab else LOOPBACK, "MASTER_PORT": str(port)}
        told |= {"OMP_NUM_THREADS": "1"} | ({"GRADIENTFLOW_PLAIN": "1"} if lab else {"GLOO_SOCKET_IFNAME": "lo"})
        environment = {**os.environ, **told}

        def popen(host: int, argv: list[str], **more: Any) -> subprocess.Popen[Any]:
            """Workers first, then servers."""
            return lab.popen(host, argv, **more) if lab else subprocess.Popen(argv, **more)

        command = [sys.executable, "-m", "gradientflow", "server", *options]
        self.logs = [directory / f"server-{slot}.log" for slot in range(2)]
        self._servers = [
            popen(
                2 + slot,
                [*command, "--slot", str(slot)],
                env=environment,
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for slot, log in enumerate(self.logs)
        ]
        self._workers = [
            popen(
                rank,
                [sys.executable, __file__, "train", str(self._stop)],
                env={**environment, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def lines(self, slot: int) -> list[str]:
        """In which a server said that it serves: endpoint and process."""
        return re.findall(r"serves at (\S+), mode \w+, process \d+", self.logs[slot].read_text())

    def process(self, slot: int) -> int:
        return int(re.findall(r"serves at .* process (\d+)", self.logs[slot].read_text())[-1])

    def wait_for(self, slot: int, times: int) -> None:
        end_s = time.monotonic() + 180
        while len(self.lines(slot)) < times:
            assert time.monotonic() < end_s, f"server {slot} is not there"
            time.sleep(0.01)

    def alive(self) -> bool:
        return all(worker.poll() is None for worker in self._workers)

    def end(self) -> dict[str, Any]:
        """What rank 0 found, and what servers refused."""
        self._stop.touch()
        found, _ = self._workers[0].communicate(timeout=120)
        assert self._workers[0].returncode == 0 and self._workers[1].wait(60) == 0, "a worker failed"
        for server in self._servers:
            server.wait(30)
        refused = [re.findall(r"added up, (.*) refused", log.read_text()) for log in self.logs]
        return {**json.loads(found), "refused": refused}

    def close(self) -> None:
        for process in [*self._workers, *self._servers]:
            process.kill()
            process.wait()


def kills(arguments: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory))
        try:
            for slot in range(2):
                job.wait_for(slot, 1)
            time.sleep(5.0)
            pauses_s = []
            for number in range(arguments.times):
                slot = chance.randrange(2)
                before = len(job.lines(slot))
                began_s = time.monotonic()
                os.kill(job.process(slot), signal.SIGKILL)
                job.wait_for(slot, before + 1)
                pauses_s.append(time.monotonic() - began_s)
                assert job.alive(), f"a worker ended after kill {number + 1}"
                time.sleep(chance.uniform(0.0, 1.0))
            found = job.end()
        finally:
            job.close()
    found |= {"kills": arguments.times, "another_after_s": statistics.median(pauses_s)}
    print(
        f"{found['kills']} kills in {found['steps']} steps: largest error {found['wrong']}, longest step "
        f"{found['longest_step_s']:.2f} s, another server after {found['another_after_s']:.2f} s"
    )
    return found


def strangers(arguments: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        KeyFiles.write_new(keys)
        files = KeyFiles.read(keys) if arguments.mode == "files" else None
        if files:
            os.environ["GRADIENTFLOW_KEYS"] = str(keys)
        job = Job(Path(directory), *(("--keys", str(keys)) if files else ()))
        try:
            for slot in range(2):
                job.wait_for(slot, 1)
            time.sleep(5.0)
            before = [_resident_of(job.process(slot)) for slot in range(2)]
            entries = StoreDirectory([(store_of_job(LOOPBACK, job.port), str(slot)) for slot in range(2)])
            invitations = [entries.look_up(slot) for slot in range(2)]
            for number in range(arguments.clients):
                _knock(invitations[number % 2], number)
            _badly_behaved(invitations, files, arguments.frames, chance)
            if not files:
                _at_the_other_port(invitations, arguments.clients, chance)
            _raw(invitations, arguments.clients, chance)
            time.sleep(6.0)
            after = [_resident_of(job.process(slot)) for slot in range(2)]
            assert job.alive()
            found = job.end()
        finally:
            job.close()
    found |= {"grown_mb": [(b - a) / 1e6 for a, b in zip(before, after, strict=True)]}
    print(json.dumps(found, indent=1))
    return found


def cut_off(arguments: argparse.Namespace) -> dict[str, Any]:
    with Lab(4, 1e9) as lab, tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), "--plain", lab=lab)
        try:
            for slot in range(2):
                job.wait_for(slot, 1)
            time.sleep(10.0)
            with lab.cut_off(1):
                time.sleep(arguments.seconds)
            time.sleep(5.0)
            assert job.alive()
            found = job.end()
        finally:
            job.close()
    print(
        f"cut off for {arguments.seconds:g} s in {found['steps']} steps: largest error {found['wrong']}, longest step "
        f"{found['longest_step_s']:.1f} s"
    )
    return found


def _resident_of(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _knock(invitation: Invitation, number: int) -> None:
    """Without a key, with another one, in plain mode."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if number % 3 == 1:
        public, secret = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_serverkey = zmq.curve_keypair()[0]
    elif number % 3 == 2:
        socket.plain_username, socket.plain_password = b"worker", b"guess"
    socket.connect(invitation.endpoint)
    for _ in range(3):
        socket.send_multipart([_push().packed(), b"x" * 1000])
    time.sleep(0.02)
    context.destroy(linger=0)


def _push() -> Header:
    return Header(Kind.PUSH, 1, Key(1, 0, 0, 0), 1, nbytes=1000, dtype=torch.float32)


def _badly_behaved(invitations: list[Invitation], files: KeyFiles | None, number: int, chance: random.Random) -> None:
    """Who has the keys and sends what nobody should."""
    context = zmq.Context()
    sockets = []
    for invitation in invitations:
        socket = context.socket(zmq.DEALER)
        socket.linger = 1000
        open_for(socket, invitation, files)
        socket.connect(invitation.endpoint)
        sockets.append(socket)
    good = _push().packed()
    for frame in range(number):
        kind = frame % 6
        header, payload = good, b"x" * 1000
        if kind == 0:
            header = chance.randbytes(chance.randrange(100))
        elif kind == 1:
            header = good[: chance.randrange(len(good))]
        elif kind == 2:
            header = good[:-8] + struct.pack("<Q", chance.choice([2**63, MAX_NBYTES + 1, 999, 10**12]))
        elif kind == 3:
            header = good[:4] + bytes([chance.randrange(2, 256)]) + good[5:]
        elif kind == 4:
            payload = chance.randbytes(chance.randrange(2000))
        sockets[frame % len(sockets)].send_multipart([header, payload])
    time.sleep(2.0)
    context.destroy()


def _at_the_other_port(invitations: list[Invitation], number: int, chance: random.Random) -> None:
    """Who has no token, and who has one and sends what nobody should."""
    large = _push()._replace(nbytes=100_000).packed()
    spoilt = [
        b"XXXX" + large[4:],
        large[:4] + b"\x07" + large[5:],
        large[:-8] + struct.pack("<Q", 10**12),
        _push().packed(),
    ]
    context = zmq.Context()
    for each in range(number):
        there = invitations[each % len(invitations)]
        line = context.socket(zmq.DEALER)
        line.linger = 0
        open_for(line, there, None)
        line.connect(there.endpoint)
        hello = pack_hello(1, [])
        send(line, Header(Kind.HELLO, 1000 + each, rank=0, nbytes=len(hello)), hello)
        port, token = struct.unpack("<H16s", _offer_to(line))
        for words in (chance.randbytes(5000), token + spoilt[each % len(spoilt)] + bytes(100_000)):
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection((there.address, port), timeout=5) as connection,
            ):
                connection.sendall(words)
                assert connection.recv(1) == b"", "it was let in"
        send(line, Header(Kind.BYE, 1000 + each), None)
        line.close(linger=1000)
    context.destroy()


def _offer_to(line: zmq.Socket[bytes]) -> bytes:
    while True:
        head, *rest = line.recv_multipart()
        if Header.read(memoryview(head), sum(map(len, rest))).kind is Kind.CHANNEL:
            return rest[0]


def _raw(invitations: list[Invitation], number: int, chance: random.Random) -> None:
    """Who does not even speak ZeroMQ."""
    for each in range(number):
        there = invitations[each % len(invitations)]
        with socket.create_connection((there.address, there.port), timeout=5) as connection:
            connection.sendall(chance.randbytes(chance.randrange(1, 5000)))


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fast = commands.add_parser("speed")
    fast.add_argument("--megabytes", type=int, default=64)
    fast.add_argument("--steps", type=int, default=1000)
    deadly = commands.add_parser("kills")
    deadly.add_argument("--times", type=int, default=50)
    strange = commands.add_parser("strangers")
    strange.add_argument("--frames", type=int, default=10_000)
    strange.add_argument("--clients", type=int, default=100)
    strange.add_argument("--mode", choices=["plain", "files"], default="files")
    apart = commands.add_parser("cut")
    apart.add_argument("--seconds", type=float, default=10.0)
    for command in (deadly, strange):
        command.add_argument("--seed", type=int, default=0)
    for command in (fast, deadly, strange, apart):
        command.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(f"load before the start: {os.getloadavg()[0]:.2f}")
    ways = {"speed": speed, "kills": kills, "strangers": strangers, "cut": cut_off}
    found = ways[arguments.command](arguments)
    if arguments.out:
        words = re.sub(r" --out \S+", "", " ".join(["python", "benchmarks/servers.py", *sys.argv[1:]]))
        result = {"machine": this_machine().model_dump(), "command": words, "found": found}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
