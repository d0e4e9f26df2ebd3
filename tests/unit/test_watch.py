"""A run while it trains: what is written, what is shown, and how watching ends."""

from __future__ import annotations

import io
import logging
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from gradientflow.cli import main
from gradientflow.lab.workloads import workload
from gradientflow.network import Network
from gradientflow.recipe import as_recipe
from gradientflow.rundir import Run, RunDirectory, now
from gradientflow.runtime.leaving import LiveTrace
from gradientflow.trace import MAIN, Recorder, Span, Trace
from gradientflow.tune import notes

watch = sys.modules["gradientflow.cli.watch"]  # the function has the name of its file
STEP_S = 0.1


def trained(rank: int, compute_s: float, num_steps: int = 8) -> Trace:
    spans = []
    for step in range(num_steps):
        at_s, done_s = step * STEP_S, step * STEP_S + compute_s
        message = {"message": 0, "nbytes": 4096}
        spans += [
            Span("forward", "forward", MAIN, at_s, at_s + compute_s / 2, step),
            Span("backward", "backward", MAIN, at_s + compute_s / 2, done_s, step),
            Span("message", "all", "lane 0", done_s, at_s + 0.09, step, message),
            Span("exposed", "exposed", MAIN, done_s, at_s + 0.09, step),
            Span("step", "step", MAIN, at_s, at_s + STEP_S, step),
        ]
    return Trace(rank, 0.0, tuple(spans))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    recipe, profile = as_recipe("auto"), workload("alexnet", compute_s=0.05)
    about = Run(recipe="auto", world=2, started=now(), gradientflow="0", torch="0")
    found.write_run(about, recipe, Network(backend="gloo", hosts=("a", "b")))
    found.write_plan(profile, recipe.plan(profile, 1))
    found.write_trace(trained(0, 0.04))
    found.write_trace(trained(1, 0.08))
    return found


def shown(run: RunDirectory) -> str:
    written = io.StringIO()
    Console(width=120, file=written).print(watch.screen(run, watch.look(run)))
    return written.getvalue()


def test_it_shows_step_time_exposed_share_and_who_is_slow(run: RunDirectory) -> None:
    words = shown(run)
    assert "100.0 ms" in words and "50.0 ms  50%" in words and "40.0 ms" in words, words
    assert "rank 1 computes 2.00 times as long" in words and "auto, 2 of 2 ranks, step 7" in words


@pytest.mark.parametrize("doing", ["", "racing lazy, merge"])
def test_it_shows_what_auto_is_doing(run: RunDirectory, doing: str) -> None:
    tried = notes.Tried(recipe="merge", predicted_s=0.1, measured_s=0.1)
    race = notes.Race(first=3, end=30, why="start", tried=(tried,), chosen=0)
    notes.Notes(world=2, doing=doing, races=(race,), lost_s=1.25).write(run.path / notes.FILE)
    words = shown(run)
    assert (
        f"auto is {doing}" if doing else "auto runs merge since step 30; trials have cost 1.2 s, in 1 race"
    ) in words


def test_before_the_first_step_it_waits(tmp_path: Path) -> None:
    assert "nothing yet" in shown(RunDirectory(tmp_path))


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    monkeypatch.setattr(sys, "argv", ["gradientflow", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_ctrl_c_ends_it_cleanly(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "watch", str(run.path)) == 0
    out = capsys.readouterr()
    assert "rank 1 computes" in out.out and not out.err


def test_into_a_pipe_it_says_what_is_new(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    def pause(seconds: float) -> None:
        heard.append(capsys.readouterr().out)
        if len(heard) == 2:
            run.write_trace(trained(0, 0.04, num_steps=12))
            run.write_trace(trained(1, 0.08, num_steps=12))
        if len(heard) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", pause)
    monkeypatch.setattr(sys, "argv", ["gradientflow", "watch", str(run.path)])
    with pytest.raises(SystemExit):
        main()
    assert ["step 7" in heard[0], "step 11" in heard[2], heard[1], heard[3]] == [True, True, "", ""]


def test_scalars_go_to_tensorboard(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[tuple[str, float, int]] = []
    closed: list[bool] = []

    class Writer:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path / "board")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            closed.append(True)

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(watch.importlib.util, "find_spec", lambda name: object())
    assert command(monkeypatch, "watch", str(run.path), "--tensorboard", str(tmp_path / "board")) == 0
    assert closed and [step for *_, step in written] == [7] * 6
    assert ("exposed_share/rank 0", pytest.approx(0.5), 7) in written


def test_scalars_are_drawn_once_a_step(run: RunDirectory) -> None:
    found, written = watch.look(run), []
    newest = watch.draw(found, -1, lambda *given: written.append(given))
    assert newest == 7 and written
    before = len(written)
    assert watch.draw(found, newest, lambda *given: written.append(given)) == 7 and len(written) == before


@pytest.mark.parametrize("words", [["explain", "nowhere"], ["watch", "nowhere"], ["explain", "."]])
def test_what_is_no_run_is_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_tensorboard_it_says_how_to_get_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch.importlib.util, "find_spec", lambda name: None)
    assert command(monkeypatch, "watch", str(run.path), "--tensorboard", "board") == 2
    assert "pip install 'gradientflow[tensorboard]'" in capsys.readouterr().err


def test_a_run_is_explained_from_its_directory(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "explain", str(run.path)) == 0
    words = capsys.readouterr().out
    [exposed] = [line for line in words.splitlines() if "waiting for communication" in line]
    [behind] = [line for line in words.splitlines() if "waiting for slower ranks" in line]
    told_ms = sum(float(line.split(" ms")[0].split()[-1]) for line in (exposed, behind))
    in_trace_s = [span.duration_s for span in run.trace(0).of_kind("exposed")]
    assert told_ms == pytest.approx(1e3 * sum(in_trace_s) / len(in_trace_s), rel=0.05)
    assert "rank 1 computes 2.00 times" in words


# - While it trains


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_trace_is_written_now_and_then(tmp_path: Path) -> None:
    clock, written = Clock(), []
    recorder = Recorder(clock=clock)

    class Slowly(RunDirectory):
        def write_trace(self, trace: Trace) -> None:
            clock.now_s += 0.1
            written.append((clock.now_s, len(trace.spans)))

    live = LiveTrace(Slowly(tmp_path), recorder, 0)
    for step in range(4000):
        recorder.add(Span("step", "step", MAIN, clock.now_s, clock.now_s + 0.05, step))
        clock.now_s += 0.05
        live.step_ended()
    assert len(written) >= 3 and written[-1][1] == LiveTrace.SPANS
    spent_s = 0.1 * len(written)
    assert spent_s <= (LiveTrace.SHARE + 0.002) * (clock.now_s - 100), "one more than its share, at most"


def test_a_disk_that_is_full_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    live = LiveTrace(RunDirectory(tmp_path / "gone"), Recorder(clock=clock), 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now_s += 10.0
            live.step_ended()
    assert len(caplog.records) == 1


def test_the_latest_spans_in_their_order() -> None:
    recorder = Recorder()
    for step in range(5):
        recorder.add(Span("step", "step", MAIN, step, step + 1, step))
    assert [span.step for span in recorder.trace(0, 2).spans] == [3, 4]
    assert len(recorder.trace(0).spans) == 5


@pytest.mark.parametrize(("file", "before", "after", "word"), [
    ("recipe.toml", "auto", "nope", "nope"),
    ("plan.json", "features.0.weight", "features.0.other", "different models"),
    (notes.FILE, "merge", "garbage", "garbage"),
])  # fmt: skip
def test_explaining_files_that_do_not_fit_is_refused_in_a_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    file: str, before: str, after: str, word: str,
) -> None:  # fmt: skip
    race = notes.Race(
        first=3, end=30, why="start", chosen=0, tried=(notes.Tried(recipe="merge", predicted_s=0.1, measured_s=0.1),)
    )
    notes.Notes(world=2, races=(race,)).write(run.path / notes.FILE)
    path = run.path / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    assert command(monkeypatch, "explain", str(run.path)) == 2
    said = capsys.readouterr().err.strip()
    assert word in said and "\n" not in said
