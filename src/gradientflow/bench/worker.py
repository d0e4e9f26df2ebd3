"""One worker of a bake-off: all methods in one job, block by block in turn.

    python -m gradientflow.bench.worker SPEC.json        (with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)

A round runs a block of iterations of every method; who begins moves on with each round, so a slow moment of
the machine meets all methods alike, and ratios are taken within a round. A block's time runs from barrier to
barrier. "compute", the optimizer on and the exchange off, is always among the methods. Rank 0 writes progress to
stdout, a JSON object a line, and the findings to the file the specification names.
"""

from __future__ import annotations

import datetime
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradientflow.bench.comm_hooks import watched_all_reduce
from gradientflow.bench.methods import BUCKETS_MB, Method, method, stock_ddp
from gradientflow.bench.results import Ratio, Result, Spread, Timeline
from gradientflow.cost.evaluate import limit_s
from gradientflow.documents import Document, Record, parse_json
from gradientflow.errors import TrainingError
from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.lab.replay import Replay
from gradientflow.profile import Profile
from gradientflow.trace import Span

#: TCP over Ethernet with time stamps: of 1514 bytes on the wire, 1448 are data.
GOODPUT = 1448 / 1514
HEADER_NBYTES = 66
TIMEOUT_S = 300.0
WARM_UP_ITERATIONS = 2
MIN_ROUNDS = 9
PILOT_ROUNDS = 3
CPU_BOUND = 0.85
#: Less than this share of what a method must send means that its bytes took another way than the port.
LEAST_SEEN = 0.9


class Specification(Document):
    workload: str
    profile: Profile
    methods: tuple[str, ...]
    #: Bits per second of each worker's port, None if not known.
    rate: float | None
    #: Of every method in a block.
    iterations: int
    max_rounds: int
    precision: float
    #: Samples of one worker in an iteration.
    batch: int
    #: By rank: how many times longer its computing takes.
    slowdown: dict[int, float] = {}  # noqa: RUF012 - pydantic copies it
    #: Workers that share this machine's cores.
    workers_here: int
    findings: str


class Progress(Record):
    done: int
    total: int
    words: str


class Findings(Document):
    results: tuple[Result, ...]
    timelines: tuple[Timeline, ...]
    notes: tuple[str, ...] = ()


class _Block(Record):
    """What one worker spent in a block of one method, per iteration."""

    seconds: float
    cpu_s: float
    sent_nbytes: float
    peak_memory: int


class Bakeoff:
    def __init__(self, spec: Specification) -> None:
        self._spec = spec
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        profile = _slowed(spec.profile, spec.slowdown.get(self._rank, 1.0))
        self._module = Replay(profile, seed=self._rank, lend=False)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-3, momentum=0.9)
        self._models: dict[str, nn.Module] = {}
        self._methods: dict[str, Method] = {}
        self._blocks: dict[str, list[_Block]] = {}
        self._notes: dict[str, list[str]] = {}

    def run(self) -> Findings:
        asked = dict.fromkeys(["compute", *self._spec.methods])
        for name in asked:
            self._add(name, self._best_ddp() if name == "ddp-best" else method(name))
        for name in self._models:
            self._block(name, WARM_UP_ITERATIONS)
        names = list(self._models)
        for number in range(self._spec.max_rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                self._blocks[name].append(self._block(name, self._spec.iterations))
            if self._agreed_enough(number + 1):
                break
        results = tuple(self._result(name) for name in names if name in self._spec.methods or name == "compute")
        return Findings(results=results, timelines=tuple(self._timelines(names)))

    # - Measuring

    def _add(self, name: str, found: Method) -> None:
        self._methods[name] = found
        self._models[name] = found.wrap(self._module)
        self._blocks[name] = []
        self._notes.setdefault(name, [])

    def _block(self, name: str, iterations: int) -> _Block:
        for other in self._models.values():
            if isinstance(other, DistributedDataParallel):
                other.flow.exchanging = False  # until its own forward pass says so
        model = self._models[name]
        _forget_peak_memory()
        dist.barrier()
        start_s, cpu_s, sent = time.perf_counter(), _cpu_s(), _sent_nbytes()
        for _ in range(iterations):
            self._optimizer.zero_grad()
            model().backward()
            self._optimizer.step()
        cpu_s, sent = _cpu_s() - cpu_s, _sent_nbytes() - sent
        dist.barrier()
        elapsed_s = time.perf_counter() - start_s
        return _Block(
            seconds=elapsed_s / iterations,
            cpu_s=cpu_s / iterations,
            sent_nbytes=sent / iterations,
            peak_memory=_peak_memory(),
        )

    def _best_ddp(self) -> Method:
        """The bucket size that is fastest in a pilot on rank 0's clock; it is measured anew afterwards."""
        medians = {}
        for bucket_mb in BUCKETS_MB:
            name = f"pilot, {bucket_mb} MB"
            self._add(name, stock_ddp(bucket_mb))
            self._block(name, WARM_UP_ITERATIONS)
            medians[bucket_mb] = statistics.median(self._block(name, 2).seconds for _ in range(PILOT_ROUNDS))
            del self._models[name], self._methods[name], self._blocks[name]
        chosen = [min(medians, key=lambda bucket_mb: medians[bucket_mb])]
        dist.broadcast_object_list(chosen, src=0)
        self._notes["ddp-best"] = [f"buckets of {chosen[0]} MB"]
        return stock_ddp(chosen[0], "ddp-best")

    def _agreed_enough(self, rounds: int) -> bool:
        """Rank 0 decides for all."""
        enough = [False]
        if self._rank == 0:
            widths = [self._ratio(name, base).half_width for name in self._models for base in (self._base(),)]
            enough[0] = rounds >= MIN_ROUNDS and max(widths) <= self._spec.precision
            words = f"round {rounds}, widest interval +-{100 * max(widths):.1f} %"
            total = rounds if enough[0] else self._spec.max_rounds
            print(Progress(done=rounds, total=total, words=words).model_dump_json(), flush=True)
        dist.broadcast_object_list(enough, src=0)
        return enough[0]

    def _base(self) -> str:
        return next((name for name in self._spec.methods if name.startswith("ddp")), self._spec.methods[0])

    def _ratio(self, name: str, base: str) -> Ratio:
        pairs = zip(self._blocks[name], self._blocks[base], strict=True)
        return Ratio.of([mine.seconds / theirs.seconds for mine, theirs in pairs])

    # - Judging

    def _result(self, name: str) -> Result:
        spec, blocks = self._spec, self._blocks[name]
        everyone: list[list[_Block]] = [[] for _ in range(self._world)]
        dist.all_gather_object(everyone, blocks)
        cpu_s = sum(statistics.median(block.cpu_s for block in theirs) for theirs in everyone)
        sent = statistics.mean(statistics.median(block.sent_nbytes for block in theirs) for theirs in everyone)
        seconds = [block.seconds for block in blocks]
        iteration_s = statistics.median(seconds)
        compute_s = statistics.median(block.seconds for block in self._blocks["compute"])
        must_send = self._methods[name].must_send_nbytes(spec.profile, self._world)
        bytes_per_s = spec.rate * GOODPUT / 8 if spec.rate else float("inf")
        share = cpu_s * spec.workers_here / self._world / (os.cpu_count() or 1) / iteration_s
        notes = list(self._notes[name])
        if share > CPU_BOUND:
            notes.append("CPU-bound")
        if spec.rate and sent < LEAST_SEEN * must_send:
            raise TrainingError(
                f"{name} must send {must_send / 1e6:.1f} MB an iteration and its port carried {sent / 1e6:.1f} MB: the "
                "bytes went another way, so the time says nothing about the network"
            )
        return Result(
            workload=spec.workload,
            method=name,
            hosts=self._world,
            rate=spec.rate,
            iteration_s=Spread.of(seconds),
            ratio_to={base: self._ratio(name, base) for base in spec.methods},
            samples_per_s=spec.batch * self._world / iteration_s,
            speedup=self._world * compute_s / iteration_s,
            compute_s=compute_s,
            wire_bound_s=must_send / bytes_per_s,
            limit_s=max(compute_s, limit_s(spec.profile, must_send, bytes_per_s)) if spec.rate else compute_s,
            exposed_s=iteration_s - compute_s,
            bytes_sent=sent,
            must_send=must_send,
            cpu_s=cpu_s / self._world,
            cpu_share=share,
            peak_memory_bytes=max(block.peak_memory for theirs in everyone for block in theirs),
            notes=tuple(notes),
        )

    # - Looking

    def _timelines(self, names: list[str]) -> list[Timeline]:
        """One more iteration of each method, with its messages where they can be seen."""
        found = []
        for name in names:
            if name == "compute":
                continue
            model = self._models[name]
            messages: list[Span] = []
            if name in ("ddp", "ddp-best"):
                cap = getattr(model, "bucket_bytes_cap", 25 * 2**20) / 2**20
                model = nn.parallel.DistributedDataParallel(self._module, bucket_cap_mb=cap, init_sync=False)
                model.register_comm_hook(messages, watched_all_reduce)
                self._models[name] = model
                self._block(name, 2)  # buckets are laid out anew after the first
                messages.clear()
            start_s = time.perf_counter()
            self._block(name, 1)
            end_s = time.perf_counter()
            if isinstance(model, DistributedDataParallel):
                spans = [span for span in model.flow.trace().spans if span.start_s >= start_s]
            else:
                spans = [*messages, Span("step", "iteration", "main", start_s, end_s, 0)]
            moved = [s._replace(start_s=s.start_s - start_s, end_s=s.end_s - start_s) for s in spans]
            found.append(Timeline(method=name, spans=tuple(moved)))
        return found


def _slowed(profile: Profile, factor: float) -> Profile:
    tensors = tuple(
        tensor.model_copy(update={"forward_s": factor * tensor.forward_s, "backward_s": factor * tensor.backward_s})
        for tensor in profile.tensors
    )
    return profile.model_copy(update={"tensors": tensors})


# - What the system counts


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _sent_nbytes() -> float:
    """Bytes of data that this worker's interface has sent, its packets' headers taken off."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return float(fields[8]) - HEADER_NBYTES * float(fields[9])
    return 0.0


def _forget_peak_memory() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # then the peak is that of the whole run
        pass


def _peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    return 0


def bake(spec: Specification) -> Findings:
    """On every rank of an initialised group."""
    return Bakeoff(spec).run()


def main(say: Callable[[str], None] = print) -> None:
    spec = parse_json(Specification, Path(sys.argv[1]).read_text(), sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    findings = bake(spec)
    if dist.get_rank() == 0:
        findings.write(spec.findings)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
