"""Profiles, plans, traces and run directories on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradientflow.documents import write_text
from gradientflow.errors import DocumentError
from gradientflow.network import Network
from gradientflow.plan import Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.rundir import Run, RunDirectory, now
from gradientflow.schedule import lazy
from gradientflow.trace import Recorder, Span, Trace

PROFILE = Profile(
    tensors=(
        TensorProfile(name="fc.bias", shape=(10,), backward_s=0.001, forward_order=1),
        TensorProfile(name="fc.weight", shape=(10, 20), dtype="bfloat16", forward_s=0.002),
    ),
    flops=1e6,
)
TRACE = Trace(
    rank=3,
    epoch_s=1000.0,
    spans=(
        Span("backward", "backward", "main", 1.0, 1.5, 0),
        Span("message", "fc.bias .. fc.weight", "lane 0", 1.25, 2.0, 0, {"message": 0, "nbytes": 440}),
        Span("exposed", "exposed", "main", 1.5, 2.0, 0),
        Span("exposed", "exposed", "main", 3.0, 3.25, 1),
    ),
)


def test_documents_survive_a_round_trip(tmp_path: Path) -> None:
    plan = lazy(PROFILE)
    PROFILE.write(tmp_path / "profile.json")
    plan.write(tmp_path / "plan.json")
    assert Profile.read(tmp_path / "profile.json") == PROFILE
    assert Plan.read(tmp_path / "plan.json") == plan
    assert Plan.read(tmp_path / "plan.json").digest == plan.digest


def test_sizes_and_intensity() -> None:
    assert (PROFILE.numel, PROFILE.nbytes) == (210, 10 * 4 + 200 * 2)
    assert PROFILE.intensity == pytest.approx(1e6 / 210)
    assert Profile(tensors=()).intensity == 0.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "field version: input should be 1; found 2"),
        ({"tensors": [{"shape": [1]}]}, r"field tensors.0.name: field required"),
        ({"tensors": [{"name": "a", "shape": [-1]}]}, r"tensors.0.shape: .*sizes must be 0 or more"),
        ({"tensors": [{"name": "a", "shape": [1], "backward_s": -1}]}, "backward_s: .*greater than or equal to 0"),
        ({"tensors": [{"name": "a", "shape": [1], "dtype": "float33"}]}, "expected the name of a torch dtype"),
        ({"tensors": [{"name": "a", "shape": [1]}] * 2}, "'a' is listed twice"),
        ({"tensors": [], "color": "red"}, "field color: extra inputs are not permitted"),
        ({"tensors": [{"name": "a", "shape": [1], "forward_s": "NaN"}]}, "finite number"),
    ],
)
def test_a_wrong_profile_names_file_field_and_expectation(tmp_path: Path, change: dict, complaint: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"version": 1} | change))
    with pytest.raises(DocumentError, match=complaint) as caught:
        Profile.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_what_is_no_document_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for kind in (Profile, Plan, Trace):
        with pytest.raises(DocumentError, match="file"):
            kind.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"plan\.json: No such file"):
        Plan.read(tmp_path / "plan.json")


def test_a_failed_write_leaves_the_previous_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_written_files_are_readable_by_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_trace_is_chrome_json_and_comes_back(tmp_path: Path) -> None:
    TRACE.write(tmp_path / "trace-3.json")
    events = json.loads((tmp_path / "trace-3.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    message = next(event for event in events if event.get("cat") == "message")
    assert (message["pid"], message["dur"], message["args"]["nbytes"]) == (3, pytest.approx(0.75e6), 440)
    back = Trace.read(tmp_path / "trace-3.json")
    assert (back.rank, len(back.spans)) == (3, 4)
    for ours, theirs in zip(TRACE.spans, back.spans, strict=True):
        assert ours[:3] == theirs[:3]
        assert (theirs.start_s, theirs.end_s) == (pytest.approx(ours.start_s), pytest.approx(ours.end_s))
        assert (theirs.step, theirs.args) == (ours.step, ours.args)


def test_a_recorder_forgets_the_oldest() -> None:
    recorder = Recorder(capacity=3)
    for step in range(5):
        recorder.add(Span("step", "step", "main", step, step + 1, step))
    assert [span.step for span in recorder.trace(0).spans] == [2, 3, 4]


def test_a_run_directory_gives_back_what_was_put_in(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "one").create()
    recipe, plan = Recipe.parse("lazy+fp16"), lazy(PROFILE)
    run = Run(recipe=str(recipe), world=2, started=now(), gradientflow="0", torch="0")
    network = Network(backend="gloo", hosts=("a", "b"))
    directory.write_run(run, recipe, network)
    directory.write_plan(PROFILE, plan)
    directory.write_trace(TRACE)
    again = RunDirectory(directory.path)
    assert (again.run, again.recipe, again.network) == (run, recipe, network)
    assert (again.profile, again.plan, again.traced_ranks()) == (PROFILE, plan, [3])
    assert again.trace(3).rank == 3


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DocumentError, match="cannot make the run directory"):
        RunDirectory(tmp_path / "file" / "run").create()


@pytest.mark.parametrize("path", ["/dev/null", "/", "/no/such/place/file.json"])
def test_only_files_are_replaced(path: str) -> None:
    before = os.stat(path).st_mode if os.path.exists(path) else None
    with pytest.raises(DocumentError, match=path):
        write_text(path, "text")
    assert (os.stat(path).st_mode if os.path.exists(path) else None) == before


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
