"""`save` and `load` of one process: what is kept, what is refused, and in which words."""

from __future__ import annotations

import os
import resource
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import gradientflow as gf
from gradientflow.errors import DocumentError, UsageError
from gradientflow.exchange.health import Process, _started


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = gf.save(tmp_path / "runs" / "one", model=model, optimizer=optimizer, step=3, losses=[0.5, 0.25])
    random_numbers = torch.rand(3)
    assert path == tmp_path / "runs" / "one" / "1"
    found = gf.load(tmp_path / "runs" / "one")
    assert (found["step"], found["losses"]) == (3, [0.5, 0.25])
    assert torch.equal(found["model"]["weight"], model.weight)
    torch.set_rng_state(found["random"])
    assert torch.equal(torch.rand(3), random_numbers)
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    other.load_state_dict(found["optimizer"])


def test_there_may_be_none_yet(tmp_path: Path) -> None:
    assert gf.load(tmp_path / "nowhere") == {}
    with pytest.raises(DocumentError, match="no checkpoint 4; there are none"):
        gf.load(tmp_path, 4)


def test_the_newest_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for step in range(12):
        gf.save(tmp_path, step=step, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["10", "11", "12", "notes.txt"]
    assert gf.load(tmp_path)["step"] == 11 and gf.load(tmp_path, 10)["step"] == 9
    with pytest.raises(UsageError, match="keep=0"):
        gf.save(tmp_path, keep=0)


def test_what_cannot_be_loaded_as_data_is_not_saved(tmp_path: Path) -> None:
    gf.save(tmp_path, step=1)
    with pytest.raises(gf.UserError, match=r"containers of these, found .*Path") as caught:
        gf.save(tmp_path, step=2, path=tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="'random' is a name of the checkpoint's own"):
        gf.save(tmp_path, random=1)
    assert os.listdir(tmp_path) == ["1"] and gf.load(tmp_path)["step"] == 1


def spoil(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif how == "damaged":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize(("how", "words"), [
    ("torn", "common.pt: torn: it has"), ("damaged", "common.pt: damaged"), ("missing", "common.pt: No such file"),
])  # fmt: skip
def test_a_spoilt_file_is_named(tmp_path: Path, how: str, words: str) -> None:
    gf.save(tmp_path, step=1)
    gf.save(tmp_path, step=2)
    spoil(tmp_path / "2" / "common.pt", how)
    with pytest.raises(DocumentError, match=words) as caught:
        gf.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert gf.load(tmp_path, 1)["step"] == 1


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    gf.save(tmp_path, step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # to the writer, what a full disk is
    try:
        with pytest.raises(DocumentError, match=r"common\.pt: File too large$"):
            gf.save(tmp_path, weights=[torch.zeros(5_000) for _ in range(10)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["1"] and gf.load(tmp_path)["step"] == 1


def begun(directory: Path, name: str, writer: Process | None) -> Path:
    partial = directory / f".partial-{name}"
    partial.mkdir()
    (partial / "common.pt").write_bytes(b"half")
    if writer is not None:
        (partial / "writer.json").write_text(writer.model_dump_json())
    return partial


def test_what_another_writes_is_left_to_it_while_it_lives(tmp_path: Path) -> None:
    this = Process.this()
    elsewhere, unsigned = (
        begun(tmp_path, name, each) for name, each in (("1-a", this.model_copy(update={"host": "b"})), ("1-c", None))
    )
    for dead in (this, this.model_copy(update={"started": "1"})):
        begun(tmp_path, "1-d", dead)
        gf.save(tmp_path, step=1, keep=1)
        assert not (tmp_path / ".partial-1-d").exists() and elsewhere.exists() and unsigned.exists()
    os.utime(elsewhere, (1, 1))
    parent = this.model_copy(update={"pid": os.getppid(), "started": _started(os.getppid())})
    theirs = begun(tmp_path, "3-e", parent)
    with pytest.raises(DocumentError, match=rf"another job, process {os.getppid()}, is saving into it: give each"):
        gf.save(tmp_path, step=2)
    assert theirs.exists()
    (theirs / "writer.json").unlink()
    gf.save(tmp_path, step=3, keep=1)
    assert sorted(os.listdir(tmp_path)) == [".partial-1-c", ".partial-3-e", "3"]


def test_what_is_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for call in (lambda: gf.save(tmp_path / "file", step=1), lambda: gf.load(tmp_path / "file")):
        with pytest.raises(DocumentError, match="file"):
            call()


def test_directories_of_others_stay_whatever_they_are_called(tmp_path: Path) -> None:
    for name in ("1", "2", "30"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    for step in range(4):
        gf.save(tmp_path, step=step, keep=2)
    assert sorted(os.listdir(tmp_path), key=int) == ["1", "2", "30", "33", "34"]
    assert all((tmp_path / name / "thesis.txt").read_text() == "mine" for name in ("1", "2", "30"))


def test_links_and_pipes_are_no_checkpoints(tmp_path: Path) -> None:
    gf.save(tmp_path, step=1)
    (tmp_path / "77").symlink_to("77")
    assert gf.load(tmp_path)["step"] == 1
    (tmp_path / "1" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "1" / "manifest.json")
    with pytest.raises(DocumentError, match="is no file"):
        gf.load(tmp_path)
    with pytest.raises(DocumentError, match="checkpoints need one"):
        gf.save(tmp_path / "77", step=1)


def test_archives_are_not_unpacked(tmp_path: Path) -> None:
    from gradientflow.runtime.checkpoints import read_states

    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 50_000_000)
    with pytest.raises(DocumentError, match=r"bomb\.pt: is packed"):
        read_states(tmp_path / "bomb.pt")
