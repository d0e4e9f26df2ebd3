"""Whatever is in a file or a frame: a valid object, or one line that says which file and why. See hostile.py; ten
thousand of each are `benchmarks/trust.py files`."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradientflow as gf
from gradientflow.documents import MAX_TOML_NBYTES
from gradientflow.errors import DocumentError
from helpers import run_ranks
from hostile import Checkpoint, Frames, attack_file, attack_state, judge, kinds

SHORT = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def every(room: Path) -> list:
    found = kinds(room)
    where = room / "keys"
    for kind in found:
        place = where if kind.name == "worker.key" else room
        (place / kind.name).write_bytes(kind.content)
        if kind.name != "results.json":  # the least that is valid is long
            outcome, wrong = judge(kind.read, place / kind.name)
            assert (outcome, wrong) == ("read", ""), kind.name
    return found


@SHORT
@given(chance=st.integers(0, 2**64 - 1).map(random.Random))
def test_files(every: list, room: Path, chance: random.Random) -> None:
    kind = chance.choice(every)
    _, wrong = attack_file(kind, chance, room / "keys" if kind.name == "worker.key" else room)
    assert not wrong


@pytest.fixture(scope="module")
def checkpoint(room: Path) -> Checkpoint:
    return Checkpoint(room)


@settings(SHORT, max_examples=50)
@given(chance=st.integers(0, 2**64 - 1).map(random.Random))
def test_checkpoints(checkpoint: Checkpoint, chance: random.Random) -> None:
    _, wrong = checkpoint.attack(chance)
    assert not wrong


@settings(SHORT, max_examples=30)
@given(chance=st.integers(0, 2**64 - 1).map(random.Random))
def test_frames(chance: random.Random) -> None:
    frames = Frames()
    for _ in range(40):
        _, wrong = frames.attack(chance)
        assert not wrong


def states(seed: int, times: int) -> list[str]:
    """Spoilt ones for flows that run."""
    chance, found = random.Random(seed), []
    for recipe in (
        "lazy:1KB+topk:always:5%:warmup=2",
        "lazy+powersgd:1:always:guard=2%",
        "lazy@local:2:delay=1",
        "lazy",
    ):
        model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.ReLU(), torch.nn.Linear(20, 20))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        flow = gf.attach(model, optimizer, recipe)

        def step(model=model, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 20)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()
        valid = flow.state_dict()
        for _ in range(times):
            outcome, wrong = attack_state(flow, valid, step, chance)
            found.append(f"{recipe}: {wrong}" if wrong else outcome)
            if outcome != "read":
                flow.close()
                flow = gf.attach(model, optimizer, recipe)
                flow.load_state_dict(valid)
        flow.close()
    return found


def test_states() -> None:
    (found,) = run_ranks(1, states, 0, 12)
    assert set(found) == {"read", "refused"}, [each for each in found if ":" in each]


def test_what_has_no_size_is_not_read_for_ever(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="/dev/zero: more than"):
        gf.Recipe.read("/dev/zero")
    pipe = tmp_path / "recipe.toml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('version = 1\nrecipe = "lazy"\n'))
    writer.start()
    assert str(gf.Recipe.read(pipe)) == "lazy"
    writer.join()
    pipe.unlink()
    (tmp_path / "long.toml").write_text("#" * (MAX_TOML_NBYTES + 1))
    with pytest.raises(DocumentError, match=r"long\.toml: more than"):
        gf.Recipe.read(tmp_path / "long.toml")


@pytest.mark.parametrize("depth", [102, 3000, 20_000])
def test_names_within_names_have_an_end(tmp_path: Path, depth: int) -> None:
    for number, text in enumerate((f"recipe.{'.'.join('a' * depth)} = 1\n", f"[{'.'.join('a' * depth)}]\n")):
        path = tmp_path / f"{number}.toml"
        path.write_text(f"version = 1\n{text}")
        with pytest.raises(DocumentError, match="names within others") as caught:
            gf.Recipe.read(path)
        assert "\n" not in str(caught.value)


def test_nothing_here_unpickles_or_evaluates() -> None:
    """What is loaded by torch is loaded as weights; and no other way of executing a file is there."""
    source = Path(gf.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        for loading in text.split("torch.load(")[1:]:
            assert "weights_only=True" in loading.split("\n")[0], path
        for word in ("pickle.load", "pickle.Unpickler", "yaml.load", "marshal", "eval(", "exec(", "shelve"):
            assert word not in text.replace(".eval()", ""), (path, word)
