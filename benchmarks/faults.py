"""Does every rank notice when another fails, and does nobody cry wolf on a busy machine?

    python benchmarks/faults.py faults [--times 20] [--out FILE]
    python benchmarks/faults.py calm [--minutes 10] [--hogs 8] [--out FILE]

faults: four workers train over loopback; the store is in rank 0's process, and dies with it. At a random moment,
one to four seconds after the first step, a random rank is killed, is stopped or skips a step (see `misbehave`).
Bars: each other rank raises an error of ours that names it within 10 s, and is gone, not by a signal, 5 s after
that; a rank that misbehaved and lives ends by itself too; no process is left behind.

calm: the same training beside busy loops; every half minute or so a rank sleeps for seconds, or holds the
interpreter in one call for eight. Bars: no error; equal weights on all ranks at the end.

What is random follows from --seed, save where in a step a signal hits: `place` in the result says where it did.
An interpreter that has torch loaded needs a second of CPU time to end, after all exit handlers, so the 5 s want a
machine with little else to do; `handlers_s` in the result is the part before that.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import itertools
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import nn

import gradientflow as gf

WORLD = 4
RANKS = range(WORLD)
RECIPES = ("lazy", "wfbp", "bsp")
SKIPS = "skips a step"
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, SKIPS: None}
# attach refuses to step alone, on the rank itself.
MISDEEDS = {
    "attach": ["forward only", "barrier", "breaks off", "leaves"],
    "drop-in": ["forward only", "barrier", "breaks off", "leaves", "steps alone"],
}
NOTICE_S = 10.0
LEAVE_S = 5.0
#: Longer than any run with a fault should take.
LIMIT_S = 60.0


# - A worker


class Order(NamedTuple):
    """What a worker is told."""

    way: str
    recipe: str
    seed: int
    #: Train for so long, all ranks together. 0: until something happens.
    seconds: float = 0.0
    #: What this rank does wrong, and how long after the first step.
    misdeed: str = ""
    delay_s: float = 0.0
    #: How long after the first step, how, and for how long this rank pauses.
    pauses: Sequence[tuple[float, str, float]] = ()


class Diary:
    """What a worker does, for whom it may concern; one that is killed has written it too."""

    def __init__(self, path: Path) -> None:
        self._facts = open(path.with_suffix(".facts"), "a", buffering=1)
        self._place = os.open(path.with_suffix(".place"), os.O_CREAT | os.O_WRONLY)

    def note(self, **facts: Any) -> None:
        self._facts.write(json.dumps(facts) + "\n")

    def at(self, place: str) -> None:
        os.pwrite(self._place, place.ljust(16).encode(), 0)


class Training:
    def __init__(self, order: Order, diary: Diary) -> None:
        layers = [(nn.Linear(160, 160), nn.BatchNorm1d(160), nn.ReLU()) for _ in range(6)]
        self.net = nn.Sequential(*itertools.chain(*layers), nn.Linear(160, 10))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        if order.way == "attach":
            self.model: Any = self.net
            self.flow = gf.attach(self.net, self.optimizer, order.recipe)
        else:
            self.model = gf.DistributedDataParallel(self.net, recipe=order.recipe)
            self.flow = self.model.flow
        self._at = diary.at

    def forward(self) -> torch.Tensor:
        self._at("forward")
        return self.model(torch.randn(64, 160)).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.forward()
        self._at("backward")
        loss.backward()
        self._at("optimizer")
        self.optimizer.step()
        self._at("between steps")


def misbehave(how: str, training: Training, draw: random.Random) -> None:
    """Skip a step; the caller then goes on with the next."""
    if how == "forward only":
        training.forward()
    elif how == "barrier":
        dist.barrier()
    elif how == "steps alone":
        with training.model.no_sync():
            training.step()
    elif how == "breaks off":
        layer = draw.choice(list(training.net))
        with layer.register_forward_hook(_fail_in_backward), contextlib.suppress(ZeroDivisionError):
            training.step()
    elif how == "leaves":
        training.flow.close()
        time.sleep(draw.choice([0, 12]))  # what comes after a loop may take a while, or not
        sys.exit()


def _fail_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in a backward hook")

    output.register_hook(fail)


def pause(how: str, seconds: float) -> None:
    if how == "sleeps":
        time.sleep(seconds)
    else:  # as one long call into C does: no other thread of this process runs Python meanwhile
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def work(rank: int, port: int, directory: str, order: Order) -> None:
    diary = Diary(Path(directory, str(rank)))
    atexit.register(lambda: diary.note(handlers_s=time.time()))  # the first one runs last
    try:
        torch.set_num_threads(1)
        torch.manual_seed(order.seed + rank)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
        train(order, diary, random.Random(order.seed))
    except Exception as error:
        ours = isinstance(error, gf.GradientFlowError)
        facts = {"error": type(error).__name__, "text": str(error), "ranks": getattr(error, "ranks", ())}
        diary.note(error_s=time.time(), ours=ours, **facts)
        raise  # and leave the rest to the interpreter, as a script does that knows nothing of this


def train(order: Order, diary: Diary, draw: random.Random) -> None:
    training = Training(order, diary)
    training.step()
    diary.note(started=True)
    began_s = time.monotonic()
    misdeed, pauses, step_s = order.misdeed, list(order.pauses), []
    for number in itertools.count(1):
        now_s = time.monotonic() - began_s
        if misdeed and now_s > order.delay_s:
            diary.note(fault_s=time.time())
            misbehave(misdeed, training, draw)
            misdeed = ""
        elif pauses and now_s > pauses[0][0]:
            pause(*pauses.pop(0)[1:])
        step_began_s = time.monotonic()
        training.step()
        step_s.append(time.monotonic() - step_began_s)
        if not order.seconds:
            # No collective call but the flow's: who waits in one of torch's is not ours to wake.
            assert now_s < LIMIT_S, "nothing has happened"
        elif number % 20 == 0:
            over = torch.tensor([now_s > order.seconds])
            dist.broadcast(over, 0)
            if over:
                break
    training.flow.close()
    weights = sum(float(parameter.detach().double().abs().sum()) for parameter in training.net.parameters())
    diary.note(steps=len(step_s), median_step_s=statistics.median(step_s), weights=weights, pauses_left=len(pauses))
    dist.barrier()
    dist.destroy_process_group()


# - Processes


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]], directory: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each command, in a session of its own, none of which outlives the block."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with open(Path(directory, f"{number}.log"), "w") as log:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                process = subprocess.Popen(
                    [sys.executable, *command], env=environment, start_new_session=True, **streams
                )
            started.append(process)
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


@contextlib.contextmanager
def crew_for(orders: Sequence[Order]) -> Iterator[Crew]:
    """The workers, all of which have done their first step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        tasks = [json.dumps([rank, port, directory, order]) for rank, order in enumerate(orders)]
        with running([[__file__, "worker", task] for task in tasks], directory) as processes:
            crew = Crew(Path(directory), processes)
            crew.wait_for_start()
            yield crew


class Crew:
    """Workers, and what they have written."""

    def __init__(self, directory: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self._directory = directory
        self.processes = processes
        #: By rank: when it had gone, and its exit code.
        self.exits: dict[int, tuple[float, int]] = {}

    def wait_for_start(self) -> None:
        end_s = time.monotonic() + 2 * LIMIT_S
        while not all(self.facts(rank).get("started") for rank in RANKS):
            self.wait_for_exit(RANKS, 0.05)
            if self.exits or time.monotonic() > end_s:
                raise RuntimeError("the workers did not start: " + "\n".join(map(self.last_words, RANKS)))

    def wait_for_exit(self, ranks: Sequence[int], limit_s: float) -> None:
        """Until all `ranks` have gone, or `limit_s` has passed."""
        end_s = time.monotonic() + limit_s
        while not self.exits.keys() >= set(ranks) and time.monotonic() < end_s:
            time.sleep(0.02)
            for rank, process in enumerate(self.processes):
                if rank not in self.exits and process.poll() is not None:
                    self.exits[rank] = (time.time(), process.returncode)

    def facts(self, rank: int) -> dict[str, Any]:
        path = self._directory / f"{rank}.facts"
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(itertools.chain(*(json.loads(line).items() for line in lines)))

    def place(self, rank: int) -> str:
        return (self._directory / f"{rank}.place").read_text().strip()

    def last_words(self, rank: int) -> str:
        return (self._directory / f"{rank}.log").read_text()[-3000:]

    def end(self, rank: int) -> dict[str, Any]:
        """How a worker ended; no code if it has not."""
        facts = self.facts(rank)
        known = ("error", "text", "ranks", "ours", "error_s", "handlers_s")
        gone_s, code = self.exits.get(rank, (None, None))
        return {"rank": rank, "code": code, **{key: facts[key] for key in known if key in facts}, "gone_s": gone_s}

    def left_behind(self) -> list[str]:
        """When all should be gone: sessions that still hold a process."""
        left = []
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 0)
                left.append(f"session {process.pid} is left behind")
        return left


# - Faults


def fault_run(fault: str, way: str, recipe: str, misdeed: str, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    victim, delay_s = draw.choice(RANKS), draw.uniform(1.0, 4.0)
    others = [rank for rank in RANKS if rank != victim]
    orders = [Order(way, recipe, seed) for _ in RANKS]
    orders[victim] = orders[victim]._replace(misdeed=misdeed, delay_s=delay_s)
    with crew_for(orders) as crew:
        fault_s, place, number = 0.0, misdeed, FAULTS[fault]
        if number:
            time.sleep(delay_s)
            place = crew.place(victim)
            crew.processes[victim].send_signal(number)
            fault_s = time.time()
        crew.wait_for_exit(others, LIMIT_S)
        if fault != "stopped":
            crew.wait_for_exit([victim], 20.0)
        fault_s = crew.facts(victim).get("fault_s", fault_s)
        ends = [crew.end(rank) for rank in others]
        problems = [words for end in ends for words in survivors_problems(end, victim, fault_s)]
        problems += victims_problems(crew.end(victim), misdeed)
        words = {rank: crew.last_words(rank) for rank in RANKS} if problems else {}
        result = {"fault": fault, "way": way, "recipe": recipe, "seed": seed, "place": place, "fault_s": fault_s}
        result |= {"victim": crew.end(victim), "survivors": ends, "last_words": words}
    return {**result, "problems": problems + crew.left_behind()}


def survivors_problems(end: dict[str, Any], victim: int, fault_s: float) -> Iterator[str]:
    me = f"rank {end['rank']}"
    if end["code"] is None:
        yield f"{me} is still there"
    elif end["code"] < 0:
        yield f"{me} ended by signal {-end['code']}"
    if not end.get("ours"):
        yield f"{me} raised no error of ours, but {end.get('error')}: {end.get('text')}"
        return
    # Texts say who speaks, too ("rank 1 of 4, step 7: ..."), and who found out, so `ranks` goes first.
    if victim not in (end["ranks"] or [int(number) for number in re.findall(r"\brank (\d+)\b(?! of)", end["text"])]):
        yield f"{me} does not name rank {victim}: {end['text']}"
    if not end["error_s"] - fault_s < NOTICE_S:
        yield f"{me} noticed after {end['error_s'] - fault_s:.1f} s"
    if end["gone_s"] and end["gone_s"] - end["error_s"] > LEAVE_S:
        handlers_s = end.get("handlers_s", end["gone_s"]) - end["error_s"]
        yield f"{me} left after {end['gone_s'] - end['error_s']:.1f} s, {handlers_s:.1f} s of it in exit handlers"


def victims_problems(end: dict[str, Any], misdeed: str) -> Iterator[str]:
    """A rank that skipped a step hears of it, as do all; out of its own barrier it comes with an error of torch's."""
    expected = {"": True, "leaves": end["code"] == 0, "barrier": end["code"] == 1}
    if not expected.get(misdeed, end["code"] == 1 and end.get("ours")):
        yield f"rank {end['rank']}, which misbehaved, ended with {end}"


def faults(times: int, seed: int) -> dict[str, Any]:
    plan: list[tuple[str, str, str, str, int]] = []
    misdeeds = {way: itertools.cycle(each) for way, each in MISDEEDS.items()}
    for number, fault in itertools.product(range(times), FAULTS):
        way, recipe = list(MISDEEDS)[number % 2], RECIPES[number // 2 % 3]
        plan.append((fault, way, recipe, next(misdeeds[way]) if fault == SKIPS else "", seed + len(plan)))
    runs = [fault_run(*row) for row in track(plan, "failing", console=Console(stderr=True))]
    return {
        "summary": [summary(fault, [run for run in runs if run["fault"] == fault]) for fault in FAULTS],
        "runs": runs,
    }


def summary(fault: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    told = [(run, end) for run in runs for end in run["survivors"] if end.get("ours")]
    times = {
        "notice_s": [end["error_s"] - run["fault_s"] for run, end in told],
        "handlers_s": [end["handlers_s"] - end["error_s"] for _, end in told if "handlers_s" in end],
        "leave_s": [end["gone_s"] - end["error_s"] for _, end in told if end["gone_s"]],
    }
    return {
        "fault": fault,
        "runs": len(runs),
        "fine": sum(not run["problems"] for run in runs),
        "places": Counter(run["place"] for run in runs),
        "others_named_too": sum(bool({*end["ranks"]} - {run["victim"]["rank"]}) for run, end in told),
        **{name: _spread(values) for name, values in times.items()},
    }


def _spread(values: list[float]) -> dict[str, float]:
    values = sorted(values) or [0.0]
    return {"median": statistics.median(values), "p90": values[int(0.9 * len(values))], "max": values[-1]}


def show_faults(figures: dict[str, Any], console: Console) -> None:
    table = Table("fault", "runs", "fine", "noticed: s", "p90", "max", "gone: s", "p90", "max")
    for row in figures["summary"]:
        times = [f"{row[name][kind]:.1f}" for name in ("notice_s", "leave_s") for kind in ("median", "p90", "max")]
        table.add_row(row["fault"], str(row["runs"]), str(row["fine"]), *times)
    console.print(table)
    for row in figures["summary"]:
        console.print(f"{row['fault']}: " + ", ".join(f"{number} {place}" for place, number in row["places"].items()))
    for run in figures["runs"]:
        for problem in run["problems"]:
            what = [run[name] for name in ("fault", "place", "way", "recipe", "seed")]
            console.print(escape(f"{what}: {problem}"))


# - Calm


def calm_run(way: str, seconds: float, seed: int) -> dict[str, Any]:
    draw, at_s, ways = random.Random(seed), 5.0, itertools.cycle(["sleeps", "holds the interpreter"])
    pauses: list[list[tuple[float, str, float]]] = [[] for _ in RANKS]
    while at_s < seconds - 15.0:
        how = next(ways)
        draw.choice(pauses).append((at_s, how, draw.uniform(2.0, 9.0) if how == "sleeps" else 8.0))
        at_s += draw.uniform(15.0, 45.0)
    with crew_for([Order(way, "lazy", seed, seconds, pauses=mine) for mine in pauses]) as crew:
        crew.wait_for_exit(RANKS, seconds + 5 * LIMIT_S)
        ends, facts = [crew.end(rank) for rank in RANKS], [crew.facts(rank) for rank in RANKS]
        problems = [
            f"rank {r}: exit code {ends[r]['code']}\n{crew.last_words(r)}" for r in RANKS if ends[r]["code"] != 0
        ]
    problems += crew.left_behind()
    if len({(each.get("steps"), each.get("weights")) for each in facts}) > 1 or any(
        e.get("pauses_left") for e in facts
    ):
        problems.append(f"the ranks did not end alike: {facts}")
    taken = Counter(how for mine in pauses for _, how, _ in mine)
    return {
        "way": way,
        **facts[0],
        "pauses": taken,
        "errors": sum("error" in end for end in ends),
        "problems": problems,
    }


def calm(minutes: float, num_hogs: int, seed: int) -> dict[str, Any]:
    hog = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10000))"
    with tempfile.TemporaryDirectory() as directory, running([["-c", hog]] * num_hogs, directory):
        ways = track(MISDEEDS, "training", console=Console(stderr=True))
        return {"hogs": num_hogs, "minutes": minutes, "runs": [calm_run(way, minutes * 30.0, seed) for way in ways]}


def show_calm(figures: dict[str, Any], console: Console) -> None:
    table = Table("way", "steps", "ms a step", "pauses", "errors", title=f"{figures['hogs']} busy loops beside")
    for run in figures["runs"]:
        pauses = ", ".join(f"{number} {how}" for how, number in run["pauses"].items())
        step_ms = run.get("median_step_s", 0.0) * 1e3
        table.add_row(run["way"], str(run.get("steps")), f"{step_ms:.0f}", pauses, str(run["errors"]))
    console.print(table)
    for problem in itertools.chain(*(run["problems"] for run in figures["runs"])):
        console.print(escape(problem))


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        *where, order = json.loads(sys.argv[2])
        work(*where, Order(*order))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "calm"])
    parser.add_argument("--times", type=int, default=20, help="faults: runs of each kind")
    parser.add_argument("--minutes", type=float, default=10.0, help="calm: in all, half for each way")
    parser.add_argument("--hogs", type=int, default=8, help="calm: busy loops beside")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # clean up, as after Ctrl-C
    figures: dict[str, Any] = {
        "version": 1,
        "command": " ".join(["python", *sys.argv]),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__},
        "load_at_start": os.getloadavg()[0],
    }
    if options.what == "faults":
        figures |= faults(options.times, options.seed)
        show_faults(figures, Console())
    else:
        figures |= calm(options.minutes, options.hogs, options.seed)
        show_calm(figures, Console())
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(any(run["problems"] for run in figures["runs"]))


if __name__ == "__main__":
    main()
