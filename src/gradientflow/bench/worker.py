"""One worker of a bake-off: all methods in one job, block by block in turn.

    python -m gradientflow.bench.worker SPEC.json        (with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)

A round runs a block of iterations of every method, in an order drawn anew each time, so a slow moment of the
machine meets all methods alike, and ratios are taken within a round. A block's time runs from the end of a first,
uncounted step to the end of the last, on the slowest rank; what a method has put off then is finished before the next
block. "compute", the optimizer on and the exchange off, is always among the methods. Memory is measured before, with
one method at a time. Rank 0 writes progress to stdout, a JSON object a line, and the findings to the file the
specification names.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradientflow.bench.methods import BUCKETS_MB, POWERSGD_START, Method, method, stock_ddp, without_number
from gradientflow.bench.results import Conditions, Ratio, Result, Spread, Timeline
from gradientflow.bench.timelines import NOTED_BY_FLOWS, Phase, extent, timelines, watched, within, without
from gradientflow.bench.usage import Usage, forget_peak_memory, peak_memory, usage
from gradientflow.cost.evaluate import limit_s
from gradientflow.documents import MAX_NBYTES, Document, Record, parse_json
from gradientflow.exchange.reach import way_to_others
from gradientflow.integrations.ddp import DistributedDataParallel
from gradientflow.lab.limits import goodput
from gradientflow.lab.replay import Replay
from gradientflow.lab.stragglers import Hindered
from gradientflow.lab.workloads import timed
from gradientflow.network import SERVED, Network
from gradientflow.probe import measure_network
from gradientflow.processes import die_with_parent
from gradientflow.profiles import Profile
from gradientflow.runtime.flow import GradientFlow
from gradientflow.runtime.planning import OBSERVED_STEPS
from gradientflow.runtime.settings import CACHE_ENV, Settings
from gradientflow.trace import Span, Trace

TIMEOUT_S = 300.0
#: Of one iteration. Ranks wait no longer than that time-out for one that computes longer than they.
MOST_COMPUTE_S = 60.0
PROBE_S = 8.0
#: DDP lays its buckets out anew after the first, a hook or a plan may begin later, and begins with what lasts: threads,
#: memory.
WARM_UP_ITERATIONS = max(POWERSGD_START, OBSERVED_STEPS) + 2
#: Beyond these, iterations of a method that tries plans in turn, some at a time, until it has chosen.
TRIED, MOST_TRIED = 25, 250
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
    #: What carries the traffic, and how many workers share it.
    interface: str
    num_sharing: int
    #: Of every method in a block.
    iterations: int
    max_rounds: int
    precision: float
    #: Samples of one worker in an iteration.
    batch: int
    #: What the probe before may take, and what it measures beside the backend's own all-reduce (`patterns_of`).
    probe_s: float = PROBE_S
    patterns: tuple[str, ...] = ()
    #: Times alone: neither is memory measured nor an iteration looked at.
    brief: bool = False
    conditions: Conditions = Conditions()
    findings: str


class Progress(Record):
    done: int
    total: int
    words: str


class Findings(Document):
    limit_nbytes = MAX_NBYTES

    results: tuple[Result, ...]
    timelines: tuple[Timeline, ...]
    network: Network
    notes: tuple[str, ...] = ()


class _Block(Record):
    """What one worker spent in a block of one method, per iteration."""

    seconds: float
    cpu_s: float
    sent_nbytes: float
    #: Of all processors of its machine.
    busy_share: float


class _Entrant(NamedTuple):
    """A method on a module and an optimizer of its own: nobody's hooks run in another one's turn. All modules are on
    the same memory."""

    module: Replay
    optimizer: torch.optim.Optimizer
    #: Around the module.
    model: nn.Module

    @property
    def flow(self) -> GradientFlow | None:
        return self.model.flow if isinstance(self.model, DistributedDataParallel) else None

    def iterate(self, clip_norm: float | None, phase: Phase = contextlib.nullcontext) -> None:
        with phase("optimizer"):
            self.optimizer.zero_grad()
        with phase("forward"):
            loss = self.model()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self.module.parameters(), clip_norm)
            self.optimizer.step()

    def finish(self) -> None:
        """What a method has put off it does in its own time: nobody's messages or updates are left to the next."""
        if self.flow is not None:
            self.flow.synchronize()


class Bakeoff:
    def __init__(self, spec: Specification, tell: Callable[[Progress], None]) -> None:
        self._spec, self._tell = spec, tell
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._paces = Hindered(spec.conditions, spec.conditions.jitter, self._rank, self._world)
        self._memory = self._replay(None)
        self._entrants: dict[str, _Entrant] = {}
        self._methods: dict[str, Method] = {}
        self._blocks: dict[str, list[_Block]] = {}
        self._peak_memory: dict[str, int] = {}
        self._row_notes: dict[str, list[str]] = {}
        self._notes: list[str] = []

    def run(self) -> Findings:
        self._say(0, 1, "measuring the network")
        address = way_to_others(os.environ).address or None
        network = measure_network(
            budget_s=self._spec.probe_s,
            address=address,
            patterns=[name for name in self._spec.patterns if name != SERVED],
            processors=True,
            servers=Settings.from_environment().servers(0) if SERVED in self._spec.patterns else None,
        )
        names = list(dict.fromkeys(["compute", *self._spec.methods]))
        for done, name in enumerate(names):
            self._say(done, len(names), f"warming up {name}")
            self._methods[name] = self._best_ddp(name) if without_number(name) == "ddp-best" else method(name)
            self._peak_memory[name] = 0 if self._spec.brief else self._memory_alone(self._methods[name])
        for name in names:
            self._enter(name, self._methods[name].wrap)
            self._blocks[name] = []
            self._block(name, WARM_UP_ITERATIONS)
            for _ in range(MOST_TRIED // TRIED):
                if self._is_trying(name):
                    self._block(name, TRIED)
        for number in range(self._spec.max_rounds):
            # By the number alone: all ranks draw the same.
            for name in random.Random(number).sample(names, len(names)):
                self._blocks[name].append(self._block(name, self._spec.iterations, number))
            if self._agreed_enough(number + 1):
                break
        results = [self._result(name) for name in names]
        self._say(1, 1, "looking at one iteration of each method")
        watched = [] if self._spec.brief else [name for name in names if name != "compute"]
        return Findings(
            results=tuple(result for result in results if result is not None),
            timelines=tuple(line for name in watched for line in self._timelines(name)),
            network=network,
            notes=tuple(self._notes),
        )

    # - Measuring

    def _replay(self, beside: Replay | None) -> Replay:
        return Replay(self._spec.profile, seed=self._rank, fill="once", jitter=self._paces, beside=beside)

    def _enter(self, name: str, wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]) -> None:
        module = self._replay(self._memory)
        # Of all optimizers the one that computes least: on the accelerator that this stands for, none takes long.
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        self._entrants[name] = _Entrant(module, optimizer, wrap(module, optimizer))

    def _is_trying(self, name: str) -> bool:
        """As all ranks find alike."""
        flow = self._entrants[name].flow
        return flow is not None and flow.is_trying

    def _leave(self, name: str) -> None:
        model = self._entrants.pop(name).model
        if isinstance(model, DistributedDataParallel):
            model.close()
        del model
        gc.collect()  # torch's DDP is part of a cycle, and its threads go when it goes

    def _memory_alone(self, found: Method) -> int:
        """The most that a worker held in some iterations, with no other method there."""
        name = "memory"
        forget_peak_memory()
        self._enter(name, found.wrap)
        self._block(name, WARM_UP_ITERATIONS)
        most = peak_memory()
        self._leave(name)
        return most

    def _block(self, name: str, iterations: int, number: int = 0) -> _Block:
        """number: of the round, in which all methods meet the same jitter and stragglers."""
        self._paces.restart(number)
        entrant = self._entrants[name]
        dist.barrier()
        # From the end of a step to the end of a later one: what a method has put off at the end of the last iteration,
        # it had at the beginning of the first one too.
        entrant.iterate(self._spec.conditions.clip_norm)
        start_s, before = time.perf_counter(), self._usage()
        for _ in range(iterations):
            entrant.iterate(self._spec.conditions.clip_norm)
        used, seconds = self._usage().since(before), time.perf_counter() - start_s
        entrant.finish()
        slowest_s = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX)  # where nothing is exchanged, ranks are not in step
        return _Block(
            seconds=float(slowest_s) / iterations,
            cpu_s=used.cpu_s / iterations,
            sent_nbytes=used.sent_nbytes / self._spec.num_sharing / iterations,
            busy_share=min(1.0, used.busy_s / used.total_s) if used.total_s else 0.0,
        )

    def _usage(self) -> Usage:
        return usage(self._spec.interface)

    def _best_ddp(self, name: str) -> Method:
        """With the bucket size that is fastest in a pilot; it is measured anew afterwards."""
        seconds = {}
        for bucket_mb in BUCKETS_MB:
            pilot = f"pilot, {bucket_mb} MB"
            self._enter(pilot, stock_ddp(bucket_mb).wrap)
            self._block(pilot, WARM_UP_ITERATIONS)
            seconds[bucket_mb] = [self._block(pilot, 2, number).seconds for number in range(PILOT_ROUNDS)]
            self._leave(pilot)
        chosen_mb = fastest(seconds)
        self._row_notes[name] = [f"buckets of {chosen_mb} MB"]
        return stock_ddp(chosen_mb, name)

    def _agreed_enough(self, rounds: int) -> bool:
        """Rank 0 decides for all."""
        widest = max(self._ratio(name, self._base()).half_width for name in self._entrants)
        enough = [rounds >= MIN_ROUNDS and widest <= self._spec.precision]
        dist.broadcast_object_list(enough, src=0)
        total = rounds if enough[0] else max(MIN_ROUNDS, self._spec.max_rounds)
        width = f", widest interval +-{100 * widest:.1f} %" if rounds > 1 else ""
        self._say(rounds, total, f"round {rounds}{width}")
        return bool(enough[0])

    def _say(self, done: int, total: int, words: str) -> None:
        if self._rank == 0:
            self._tell(Progress(done=done, total=total, words=words))

    def _base(self) -> str:
        return next((name for name in self._spec.methods if name.startswith("ddp")), self._spec.methods[0])

    def _ratio(self, name: str, base: str) -> Ratio:
        pairs = zip(self._blocks[name], self._blocks[base], strict=True)
        return Ratio.of([mine.seconds / theirs.seconds for mine, theirs in pairs])

    # - Judging

    def _result(self, name: str) -> Result | None:
        """None if its bytes did not go where they should. Collective."""
        spec, blocks = self._spec, self._blocks[name]
        everyone: list[tuple[list[_Block], int]] = [([], 0)] * self._world
        dist.all_gather_object(everyone, (blocks, self._peak_memory[name]))
        everyones = [theirs for theirs, _ in everyone]
        cpu_s = statistics.mean(statistics.median(block.cpu_s for block in theirs) for theirs in everyones)
        sent = statistics.mean(statistics.median(block.sent_nbytes for block in theirs) for theirs in everyones)
        share = statistics.mean(statistics.median(block.busy_share for block in theirs) for theirs in everyones)
        must_send = self._methods[name].must_send_nbytes(spec.profile, self._world)
        if spec.rate and sent < LEAST_SEEN * must_send:
            self._notes.append(
                f"{name} is refused: it must send {must_send / 1e6:.1f} MB an iteration and its port carried "
                f"{sent / 1e6:.1f} MB, so its bytes went another way and its time says nothing about the network"
            )
            return None
        iteration_s = statistics.median(block.seconds for block in blocks)
        compute_s = statistics.median(block.seconds for block in self._blocks["compute"])
        return Result(
            workload=spec.workload,
            method=name,
            hosts=self._world,
            rate=spec.rate,
            iteration_s=Spread.of([block.seconds for block in blocks]),
            ratio_to={base: self._ratio(name, base) for base in spec.methods},
            samples_per_s=spec.batch * self._world / iteration_s,
            speedup=self._world * compute_s / iteration_s,
            compute_s=compute_s,
            wire_bound_s=must_send / self._bytes_per_s(),
            limit_s=max(compute_s, limit_s(_as_measured(spec.profile, compute_s), must_send, self._bytes_per_s())),
            exposed_s=iteration_s - compute_s,
            bytes_sent=sent,
            must_send=must_send,
            cpu_s=cpu_s,
            cpu_share=share,
            peak_memory_bytes=max(nbytes for _, nbytes in everyone),
            notes=(
                *self._row_notes.get(name, ()),
                *self._about_plan(name),
                *(["CPU-bound"] if share > CPU_BOUND else []),
            ),
        )

    def _about_plan(self, name: str) -> list[str]:
        """What was chosen, and how many messages its codec did not pay for."""
        flow = self._entrants[name].flow
        if flow is None:
            return []
        plan = flow.plan
        num_dense = sum(message.dense for message in plan.messages)
        dense = [f"{num_dense} of {len(plan.messages)} messages without the codec"] if num_dense else []
        chosen = plan.why.splitlines()[0].removeprefix("auto ") if plan.why.startswith("auto ") else ""
        return [chosen, *dense] if chosen else dense

    def _bytes_per_s(self) -> float:
        return goodput(self._spec.rate) / 8 if self._spec.rate else float("inf")

    # - Looking

    def _timelines(self, name: str) -> list[Timeline]:
        """One more iteration, on every rank, with its messages where they can be seen. Collective."""
        watch, messages = self._methods[name].watch, list[Span]()
        if watch is not None:
            self._leave(name)
            self._enter(name, lambda module, optimizer: watch(module, messages))
            self._block(name, WARM_UP_ITERATIONS)
        entrant = self._entrants[name]
        dist.barrier()
        entrant.iterate(self._spec.conditions.clip_norm)
        work, exposed = watched(
            lambda phase: entrant.iterate(self._spec.conditions.clip_norm, phase), list(entrant.module.parameters())
        )
        entrant.finish()
        start_s, end_s = extent(work)
        waits = [exposed]
        if entrant.flow is not None:
            trace = entrant.flow.trace()
            messages = trace.of_kind("message")
            waits = within([span for kind in NOTED_BY_FLOWS for span in trace.of_kind(kind)], start_s, end_s)
        on_the_wire = [span for span in messages if span.end_s > start_s and span.start_s < end_s]
        spans = (*without(work, waits), *waits, *on_the_wire)
        mine = Trace(rank=self._rank, epoch_s=time.time() - time.perf_counter(), spans=spans)
        traces: list[Trace] = [mine] * self._world
        dist.all_gather_object(traces, mine)
        return timelines(name, traces)


def fastest(seconds: Mapping[int, Sequence[float]]) -> int:
    """The choice with the least median, on rank 0's clock. Collective."""
    chosen = [min(seconds, key=lambda choice: statistics.median(seconds[choice]))]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _as_measured(profile: Profile, compute_s: float) -> Profile:
    """Its seconds stretched to those that were measured, the optimizer's included; one without any stays so."""
    return timed(profile, compute_s) if profile.forward_s + profile.backward_s else profile


def bake(spec: Specification, tell: Callable[[Progress], None]) -> Findings:
    """On every rank of an initialised group. Rank 0 tells how it goes."""
    return Bakeoff(spec, tell).run()


def main() -> None:
    die_with_parent()
    spec = parse_json(Specification, Path(sys.argv[1]).read_text(), sys.argv[1])
    os.environ[CACHE_ENV] = "off"  # each method begins with what it finds here and now
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    findings = bake(spec, lambda progress: print(progress.model_dump_json(), flush=True))
    if dist.get_rank() == 0:
        findings.write(spec.findings)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
