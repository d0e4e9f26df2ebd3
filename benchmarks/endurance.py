"""Hours of faults in one job: is every step right, and do memory, threads and descriptors stay what they were?

    python benchmarks/endurance.py [--minutes 120] [--seed 0] [--pace 0.1] [--out FILE]

Three hosts of a lab with a worker each, which do not see each other's processes. They train chapter after chapter, each
with a recipe and faults drawn by --seed: the same seed is the same story, but for where in a step a fault hits. Every
process stays from chapter to chapter unless a fault takes it; that of the first host is never taken, and what it uses
is watched. There are two kinds of chapters:

come and go: workers are killed, stopped and cut off, briefly and for long; who is lost is replaced by another one
together: one process group, every exchange and the gate; workers are stopped and cut off briefly, and must not notice

What is trained, and how it is judged, is chaos.py's: gradients are whole numbers that tell worker and step, so weights
follow from who took part; with codecs that leave something over all must have the same bits. Steps take --pace seconds,
slept, so that it can run beside other things.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chaos
import torch
import torch.distributed as dist

from gradientflow.bench.bakeoff import this_machine
from gradientflow.cli.elastic import open_store
from gradientflow.lab import Lab
from gradientflow.processes import die_with_parent

HOSTS = 3
#: Seconds of quiet between two faults, and the number of faults in a chapter.
QUIET_S = (5.0, 40.0)
FAULTS = (3, 10)
#: What one group can have beside: a gate, servers beside the workers, halves.
EXACT = (*chaos.EXACT, *chaos.LOCKSTEP, "flow-ring", "lazy-halving")
TOGETHER = (*EXACT, *chaos.ALIKE)
COME_AND_GO = (*chaos.EXACT, *chaos.ALIKE)
KILL, STOP, LONG_STOP, CUT, LONG_CUT = "kill", "stop", "stop for long", "cut off", "cut off for long"


# - The story, as data


class Fault(NamedTuple):
    after_s: float
    what: str
    host: int
    seconds: float


class Chapter(NamedTuple):
    number: int
    recipe: str
    come_and_go: bool
    faults: tuple[Fault, ...]

    @property
    def exact(self) -> bool:
        return self.recipe in EXACT


def chapter_of(seed: int, number: int) -> Chapter:
    draw = random.Random(f"endurance {seed} {number}")
    come_and_go = draw.random() < 0.6
    recipe = draw.choice(COME_AND_GO if come_and_go else TOGETHER)
    return Chapter(number, recipe, come_and_go, tuple(_faults(draw, come_and_go)))


def _faults(draw: random.Random, come_and_go: bool) -> Iterator[Fault]:
    for _ in range(draw.randint(*FAULTS)):
        what = draw.choice([KILL, KILL, STOP, LONG_STOP, CUT, LONG_CUT] if come_and_go else [STOP, CUT])
        # What is on the first host stays: the store, and the worker that is watched.
        host = draw.randrange(0 if what in (STOP, CUT) else 1, HOSTS)
        yield Fault(draw.uniform(*QUIET_S), what, host, draw.uniform(0.3, 2.5))


# - A worker


def worker(top: Path, number: int, host: int, pace_s: float) -> None:
    """From the chapter that is open when it comes, until there are no more."""
    die_with_parent()
    chaos.log_to(top / f"{number}.log")
    os.environ["GRADIENTFLOW_PLAIN"] = "1"  # servers on a network of the lab
    torch.set_num_threads(1)
    last = -1
    while (page := _page_after(last, top)) is not None:
        _live_through(page, top / str(page["number"]), number, host, pace_s)
        last = page["number"]


def _page_after(last: int, top: Path) -> dict[str, Any] | None:
    while True:
        page = json.loads((top / "page.json").read_text())
        if page is None or page["number"] != last:
            return page
        time.sleep(0.05)


def _live_through(page: dict[str, Any], directory: Path, number: int, host: int, pace_s: float) -> None:
    place, come_and_go = page["place"], page["come_and_go"]
    told = {"MASTER_ADDR": place[0], "MASTER_PORT": str(place[1]), "WORLD_SIZE": str(HOSTS)}
    os.environ.update(told | {"GRADIENTFLOW_ELASTIC": "1" if come_and_go else "0"})
    if not come_and_go:
        store = dist.TCPStore(*place, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=host, world_size=HOSTS)
    training = chaos.Training(page["recipe"], directory / f"{number}.diary", deadline_s=20.0)
    stop = directory / "stop"
    while not (stop.exists() and training.num_steps >= int(stop.read_text())):
        time.sleep(pace_s)
        training.step()
    training.close()
    if not come_and_go:
        dist.destroy_process_group()


def hold_stores(address: str) -> None:
    """Opens another one for each line that it reads, and says where."""
    die_with_parent()
    held = None
    for _ in sys.stdin:
        held = open_store(address, 0)
        print(held.port, flush=True)
    del held


# - All workers


class Company(chaos.LabCrew):
    """Workers that stay from chapter to chapter."""

    def __init__(self, top: Path, lab: Lab, pace_s: float) -> None:
        self.lab, self._top, self._pace_s = lab, top, pace_s
        self._address = lab.hosts[0].address
        argv = [sys.executable, __file__, "--hold-stores", self._address]
        self._held = lab.popen(0, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.workers: dict[int, Any] = {}
        self._num_started = 0

    def start(self) -> None:
        number, self._num_started = self._num_started, self._num_started + 1
        taken = {worker.host for worker in self.workers.values()}
        host = next(each for each in range(HOSTS) if each not in taken)
        task = json.dumps([str(self._top), number, host, self._pace_s])
        self.workers[number] = self.launch_apart([sys.executable, __file__, "--worker", task])

    def log_of(self, number: int) -> str:
        path = self._top / f"{number}.log"
        return path.read_text() if path.exists() else ""

    def turn_to(self, chapter: Chapter | None) -> None:
        """None: there are no more, and workers end."""
        page = None
        if chapter:
            self._held.stdin.write("\n")
            self._held.stdin.flush()
            place = (self._address, int(self._held.stdout.readline()))
            page = {"place": place, **chapter._asdict()}
            self.directory = self._top / str(chapter.number)
            self.directory.mkdir()
        chaos.replace(self._top / "page.json", json.dumps(page))

    def end(self) -> None:
        """All leave the chapter after the same step, and stay."""
        last = max(self.last(number)["step"] for number in self.workers) + 30
        chaos.replace(self.directory / "stop", str(last))
        self.wait_for(lambda: all(self.last(number)["step"] >= last - 1 for number in self.workers))

    def live_through(self, chapter: Chapter) -> list[chaos.Trial]:
        self.turn_to(chapter)
        while len(self.workers) < HOSTS:
            self.start()
        self.wait_for(lambda: all(self.last(number)["step"] >= 3 for number in self.workers))
        trials = []
        for fault in chapter.faults:
            time.sleep(fault.after_s)
            trials.append(self._suffer(fault)._replace(more={"chapter": chapter.number, "recipe": chapter.recipe}))
            if len(self.workers) < HOSTS:
                self.start()
                self.train(1, together=HOSTS)
        self.end()
        return trials

    def _suffer(self, fault: Fault) -> chaos.Trial:
        victim = self.on(fault.host)
        by_name: dict[str, Callable[[], chaos.Trial]] = {
            KILL: lambda: chaos.kill_one(self, victim),
            STOP: lambda: chaos.stop_briefly(self, victim, fault.seconds),
            LONG_STOP: lambda: chaos.stop_for_long(self, victim),
            CUT: lambda: chaos.cut_briefly(self, fault.host, fault.seconds),
            LONG_CUT: lambda: chaos.cut_for_long(self, fault.host),
        }
        return by_name[fault.what]()


# - What it used


def used(diaries: dict[str, list[dict[str, Any]]]) -> list[tuple[float, dict[str, int]]]:
    """When, and what, by the worker of the first host, which nothing happens to: its number is 0."""
    return [(facts["at_s"], facts["usage"]) for facts in diaries.get("0", []) if "usage" in facts]


def flatness(uses: list[tuple[float, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """By what is used: medians of each quarter of the time, and growth an hour, the slope of a line through all but the
    first quarter, in which caches fill."""
    if len(uses) < 8:
        return {}
    quarter = len(uses) // 4
    hours = [(at_s - uses[0][0]) / 3600 for at_s, _ in uses]
    found = {}
    for name in uses[0][1]:
        values = [float(use[name]) for _, use in uses]
        medians = [statistics.median(values[k * quarter : (k + 1) * quarter]) for k in range(4)]
        slope = statistics.linear_regression(hours[quarter:], values[quarter:]).slope
        found[name] = {f"quarter {k + 1}": value for k, value in enumerate(medians)}
        found[name] |= {"most": max(values), "growth an hour": round(slope, 3)}
    return found


# - All of it


class Endurance:
    """A story told until so many minutes are over. When somebody fails, all begin anew with the next chapter."""

    def __init__(self, seed: int, pace_s: float) -> None:
        self._seed, self._pace_s = seed, pace_s
        self._began_s = time.monotonic()
        self._trials: list[chaos.Trial] = []
        self._chapters: list[dict[str, Any]] = []
        #: Of the company that was there for longest.
        self._uses: list[tuple[float, dict[str, int]]] = []

    def run(self, minutes: float, report: Callable[[dict[str, Any]], None]) -> bool:
        """Whether all went well."""
        with Lab(HOSTS, 1e9) as lab:
            while self._hours() < minutes / 60:
                self._with_one_company(lab, minutes, report)
        return all(trial.survived for trial in self._trials) and not any(c["problems"] for c in self._chapters)

    def _with_one_company(self, lab: Lab, minutes: float, report: Callable[[dict[str, Any]], None]) -> None:
        uses: list[tuple[float, dict[str, int]]] = []
        with tempfile.TemporaryDirectory() as directory:
            company = Company(Path(directory), lab, self._pace_s)
            try:
                while self._hours() < minutes / 60:
                    chapter = chapter_of(self._seed, len(self._chapters))
                    failure = ""
                    try:
                        self._trials += company.live_through(chapter)
                    except chaos.Failed as error:
                        failure = str(error)
                        self._trials.append(chaos.Trial("endurance", False, words=failure))
                    self._chapters.append(judged(chapter, chaos.read_diaries(company.directory), failure))
                    uses += used(chaos.read_diaries(company.directory))
                    self._uses = max(self._uses, uses, key=len)
                    report(self.found())
                    if failure:
                        return
                company.turn_to(None)
                for each in company.workers.values():
                    each.join(chaos.LIMIT_S)
            finally:
                company.close()

    def _hours(self) -> float:
        return (time.monotonic() - self._began_s) / 3600

    def found(self) -> dict[str, Any]:
        return {
            "hours": round(self._hours(), 3),
            "steps": sum(chapter["steps"] for chapter in self._chapters),
            "faults": sum((Counter(chapter["faults"]) for chapter in self._chapters), Counter()),
            "survived": sum(trial.survived for trial in self._trials),
            "failed": sum(not trial.survived for trial in self._trials),
            "problems": sum(len(chapter["problems"]) for chapter in self._chapters),
            "used": flatness(self._uses),
            "rows": chaos.rows([trial._asdict() for trial in self._trials]),
            "chapters": self._chapters,
            "uses": self._uses,
        }


def judged(chapter: Chapter, diaries: dict[str, list[dict[str, Any]]], failure: str) -> dict[str, Any]:
    history = chaos.history_of(diaries, exact=chapter.exact)
    return {
        "recipe": chapter.recipe,
        "come_and_go": chapter.come_and_go,
        "faults": Counter(fault.what for fault in chapter.faults),
        "steps": history.num_steps,
        "orphans": history.num_orphans,
        "problems": history.problems[:5],
        "failure": failure,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a step, slept")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--hold-stores", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        top, *task = json.loads(given.worker)
        worker(Path(top), *task)
        return
    if given.hold_stores:
        hold_stores(given.hold_stores)
        return
    words = re.sub(r" --out \S+", "", shlex.join(["python", "benchmarks/endurance.py", *sys.argv[1:]]))
    result = {"machine": this_machine().model_dump(), "command": words, "load_before": os.getloadavg()[0]}

    def report(found: dict[str, Any]) -> None:
        last = found["chapters"][-1]
        print(
            f"{found['hours']:.2f} h, {last['recipe']}: {last['steps']} steps, {last['problems'] or 'right'}",
            flush=True,
        )
        if last["failure"]:
            print(last["failure"], file=sys.stderr)
        if given.out:
            given.out.write_text(json.dumps(result | found, indent=1) + "\n")

    endurance = Endurance(given.seed, given.pace)
    fine = endurance.run(given.minutes, report)
    print(
        json.dumps(
            {name: value for name, value in endurance.found().items() if name not in ("chapters", "uses")}, indent=1
        )
    )
    sys.exit(not fine)


if __name__ == "__main__":
    main()
