"""The commands as a user meets them: real processes, exit codes, what is said and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradientflow import Profile, RunDirectory, __version__
from gradientflow.cli import main

COMMAND = Path(sys.executable).with_name("gradientflow")

TRAINING = """
import json, os, sys
import torch
import torch.distributed as dist
import gradientflow as gf

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gf.attach(model, optimizer, RECIPE) as flow:
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
if dist.get_rank() == 0:
    print(json.dumps(sys.argv[1:]))
dist.destroy_process_group()
"""

# The group is never used: no time is lost on importing torch.
SLEEPING = """
import os, pathlib, time
pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(100)
"""


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRADIENTFLOW")}
    return {**inherited, "GLOO_SOCKET_IFNAME": "lo", **more}


def gradientflow(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=280
    )


def gradientflow_here(
    *arguments: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> subprocess.CompletedProcess[str]:
    """The same without a process of its own, where torch is loaded already. The directory is the current one."""
    for name in [name for name in os.environ if name.startswith("GRADIENTFLOW")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["gradientflow", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    said = capfd.readouterr()
    return subprocess.CompletedProcess(arguments, ended.value.code, said.out, said.err)


def write_training(directory: Path, recipe: str | None = None) -> None:
    (directory / "train.py").write_text(TRAINING.replace("RECIPE", repr(recipe)))


def assert_refused(result: subprocess.CompletedProcess[str], words: str) -> None:
    """Wrong use: exit code 2, one line on stderr that holds `words`, nothing on stdout."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("gradientflow: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


def test_help_lists_the_commands_without_torch(tmp_path: Path) -> None:
    result = gradientflow("--help", cwd=tmp_path)
    assert result.returncode == 0
    story = ["doctor", "demo", "run", "report", "probe", "profile", "bench", "simulate", "server"]
    assert re.findall(rf"^│ ({'|'.join(story)}) ", result.stdout, re.MULTILINE) == story
    loaded = "import sys, gradientflow.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=tmp_path).returncode == 0


def test_a_shell_can_complete_what_is_typed(tmp_path: Path) -> None:
    typed = {"COMP_WORDS": "gradientflow be", "COMP_CWORD": "1", "_GRADIENTFLOW_COMPLETE": "complete_bash"}
    assert gradientflow(cwd=tmp_path, **typed).stdout.split() == ["bench"]


def test_version(tmp_path: Path) -> None:
    assert gradientflow("--version", cwd=tmp_path).stdout == f"gradientflow {__version__}\n"


def test_unknown_option_is_wrong_use(tmp_path: Path) -> None:
    result = gradientflow("run", "--bucket-size", "4", "train.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "laxy", "train.py"], "no schedule 'laxy'"),
        (["--recipe", "", "train.py"], "cannot read recipe"),
        (["--recipe", "nowhere.toml", "train.py"], "nowhere.toml"),
        (["--workers", "0", "train.py"], "--workers must be 1 or more, found 0"),
        (["nowhere.py"], "no script nowhere.py"),
        (["--nnodes", "2", "train.py"], "--rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:1", "--node-rank", "2", "train.py"], "--node-rank 2"),
        (["--out", "train.py/out", "train.py"], "not a directory"),
        (["--recipe", "lazy-mpi", "--workers", "4", "train.py"], "mpirun -n 4 python train.py"),
    ],
)
def test_run_refuses_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    options = arguments if "--out" in arguments else ["--out", "out", *arguments]
    assert_refused(gradientflow_here("run", *options, monkeypatch=monkeypatch, capfd=capfd), words)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_run_under_mpirun_would_start_workers_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    refused = gradientflow_here("run", "train.py", monkeypatch=monkeypatch, capfd=capfd)
    assert_refused(refused, "mpirun ... python train.py")


def test_run_refuses_a_directory_with_a_run_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    refused = gradientflow_here("run", "--out", "out", "train.py", monkeypatch=monkeypatch, capfd=capfd)
    assert_refused(refused, "choose another --out")


@pytest.mark.slow
def test_run_leaves_a_complete_run_directory(tmp_path: Path) -> None:
    write_training(tmp_path)
    # --no and --r are abbreviations of several options of torchrun.
    passed = ["--lr", "0.1", "--no", "--r", "--recipe", "other", "--", "x"]
    result = gradientflow(
        "run", "--recipe", "wfbp", "--workers", "2", "--out", "out", "train.py", *passed, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == passed
    assert "wfbp" in result.stderr and str(tmp_path / "out") in result.stderr

    directory = RunDirectory(tmp_path / "out")
    assert (directory.run.recipe, directory.run.world) == ("wfbp", 2)
    assert str(directory.recipe) == "wfbp"
    assert len(directory.network.hosts) == 2
    directory.plan.check(directory.profile)
    assert directory.traced_ranks() == [0, 1]
    assert len(directory.trace(1).of_kind("step")) == 5


@pytest.mark.slow
def test_run_names_its_directory_after_the_recipe_and_reports_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_training(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    arguments = ["--json", "--recipe", "lazy:1MB", "train.py", "--quiet"]
    result = gradientflow_here("run", *arguments, monkeypatch=monkeypatch, capfd=capfd)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["version"] == 1
    assert (summary["recipe"], summary["world"], summary["steps"]) == ("lazy:1MB", 1, 5)
    assert summary["iteration_s"] > summary["exposed_s"] >= 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.endswith("-lazy-1MB") and summary["run_directory"] == str(made)
    assert '["--quiet"]' in result.stderr


@pytest.mark.slow
def test_run_shows_both_recipes_when_script_and_option_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_training(tmp_path, recipe="bsp")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    arguments = ["--recipe", "lazy", "--out", "out", "train.py"]
    result = gradientflow_here("run", *arguments, monkeypatch=monkeypatch, capfd=capfd)
    assert result.returncode == 1
    assert "the script attaches recipe 'bsp' and GRADIENTFLOW_RECIPE says 'lazy'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_run_says_which_rank_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no data here')\ntime.sleep(60)"
    )
    result = gradientflow("run", "--workers", "2", "train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "no data here" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last == "gradientflow: train.py failed: rank 1 was the first to fail, with exit code 1; its output is above"
    assert not (tmp_path / "runs").exists()


def test_run_says_that_nothing_was_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    monkeypatch.chdir(tmp_path)
    result = gradientflow_here("run", "train.py", monkeypatch=monkeypatch, capfd=capfd)
    assert result.returncode == 1
    assert result.stdout == "trained\n"
    assert "never called gradientflow.attach" in result.stderr.splitlines()[-1]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_stops_the_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPING)
    notes = [tmp_path / "pid-0", tmp_path / "pid-1"]
    with subprocess.Popen(
        [COMMAND, "run", "--workers", "2", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        deadline_s = time.monotonic() + 60
        while not all(note.exists() and note.read_text() for note in notes):
            assert time.monotonic() < deadline_s and command.poll() is None
            time.sleep(0.1)
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=10)
    assert command.returncode == 130
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "gradientflow: stopped by SIGINT"
    assert not any(is_running(int(note.read_text())) for note in notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "1"], "--workers must be from 2"),
        (["--epochs", "0"], "--epochs must be 1 or more"),
        (["--recipe", "lazy+gzip"], "no codec 'gzip'"),
    ],
)
def test_demo_refuses_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(gradientflow_here("demo", *arguments, monkeypatch=monkeypatch, capfd=capfd), words)
    assert not list(tmp_path.iterdir())


def test_demo_says_how_to_get_its_data(tmp_path: Path) -> None:
    without = "import sys; sys.modules['sklearn'] = None; sys.argv = ['gradientflow', 'demo']\n"
    result = subprocess.run(
        [sys.executable, "-c", f"{without}from gradientflow.cli import main; main()"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert_refused(result, "pip install 'gradientflow[demo]'")


# - Servers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which job? give --job HOST:PORT"),
        (["--job", "here"], "write HOST:PORT"),
        (["--job", "127.0.0.1:1", "--slot", "-1"], "slots count from 0"),
        (["--job", "127.0.0.1:1", "--keys", "keys", "--plain"], "leave one of them out"),
        (["--job", "127.0.0.1:1", "--keys", "keys"], "make keys with `gradientflow keys DIRECTORY`"),
        (["--job", "127.0.0.1:1", "--address", "192.0.2.1"], "cannot listen at 192.0.2.1"),
        (["--job", "127.0.0.1:1", "--memory", "much"], "cannot read size 'much'"),
        (["--job", "127.0.0.1:1", "--wait", "0"], "give seconds above 0"),
    ],
)
def test_servers_refuse_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert_refused(gradientflow_here("server", *arguments, monkeypatch=monkeypatch, capfd=capfd), words)


def test_keys_are_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    made = gradientflow_here("keys", "keys", monkeypatch=monkeypatch, capfd=capfd)
    assert made.returncode == 0 and "GRADIENTFLOW_KEYS=keys" in made.stdout
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["server.key", "worker.key"]
    assert_refused(gradientflow_here("keys", "keys", monkeypatch=monkeypatch, capfd=capfd), "is there already")


# - Profile

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), torch.ones(4, 8), lambda m, b: m(b).sum()

def nothing():
    return None
"""


def test_profile_of_a_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model", raising=False)
    result = gradientflow_here("profile", "model.py:build", "--steps", "2", monkeypatch=monkeypatch, capfd=capfd)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    assert result.returncode == 0, result.stderr
    found = Profile.read(tmp_path / "profile.json")
    assert {tensor.name for tensor in found.tensors[:2]} == {"2.weight", "2.bias"}  # backward begins at the end
    assert found.numel == 8 * 16 + 16 + 16 * 2 + 2 and found.forward_s > 0 and found.backward_s > 0 and found.flops > 0
    assert "4 tensors" in result.stdout


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("model.py", "FILE.py:FUNCTION"),
        ("nowhere.py:build", "no file nowhere.py"),
        ("model.py:biuld", "has no function biuld"),
        ("model.py:nothing", "has to return (model, batch, loss)"),
        ("no.such.module:build", "No module named"),
    ],
)
def test_profile_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], target: str, words: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model", raising=False)
    assert_refused(gradientflow_here("profile", target, monkeypatch=monkeypatch, capfd=capfd), words)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    assert not (tmp_path / "profile.json").exists()
