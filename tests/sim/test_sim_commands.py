"""The commands: what they print, what they write, and mistakes as one line with exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradientflow.cli import main
from gradientflow.cli.given import read_recipe
from gradientflow.cli.run import _told
from gradientflow.cost.table import CostTable, Priced
from gradientflow.lab.workloads import workload
from gradientflow.network import Network
from gradientflow.plan import NATIVE, Plan
from gradientflow.probe.measure import sample_of, summarize
from gradientflow.recipe import Recipe
from gradientflow.rundir import Run, RunDirectory
from gradientflow.runtime.settings import Settings
from gradientflow.sim.cluster import Cluster
from gradientflow.sim.compared import SHOWN
from gradientflow.sim.predict import simulate
from gradientflow.trace import Span, Trace
from gradientflow.tune.notes import Notes, Race, Tried
from gradientflow.tune.ranking import Ranking


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gradientflow", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_simulate_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "trace.json"
    words = ["--workload", "resnet-50", "--cluster", "survey-10gbe", "--recipe", "bsp", "--workers", "32"]
    assert run(monkeypatch, "simulate", *words, "--json", "--out", str(out)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples_per_s"] == pytest.approx(4920.8, rel=0.01)
    assert found["speedup"] == pytest.approx(32 * found["alone_s"] / found["iteration_s"])
    assert {"iteration_s", "exposed_s", "utilisation"} <= found.keys()
    assert Trace.read(out).of_kind("message")


def test_simulate_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "bsp", "--recipe", "wfbp-ps", "--workers", "8", "--straggler", "1:1.5"]
    assert run(monkeypatch, "simulate", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("bsp ") and lines[4].startswith("wfbp-ps ")


def test_reproduce_ends_with_its_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "paper.html"
    assert run(monkeypatch, "reproduce", "gradientflow", "--out", str(page)) == 0
    assert "410.2x" in capsys.readouterr().out and "<pre>" in page.read_text()


def test_sweep_says_who_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "sweep.csv"
    words = ["--recipe", "bsp", "--recipe", "mg-wfbp", "--workers", "8,32", "--rate", "10Gbit,100Gbit"]
    assert run(monkeypatch, "sweep", *words, "--out", str(table)) == 0
    assert capsys.readouterr().out.count("mg-wfbp") == 4
    assert len(table.read_text().splitlines()) == 1 + 2 * 2 * 2
    picture = tmp_path / "sweep.html"
    assert run(monkeypatch, "sweep", *words, "--out", str(picture)) == 0
    assert picture.read_text().count("<td ") == 4


def test_a_bake_off_is_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-16-ddp-against-ddp.json"
    assert run(monkeypatch, "compare", str(path)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("median ")


PRICE = Priced(
    ways={
        NATIVE: CostTable(points=((2**12, 1e-3), (2**20, 8e-3), (2**22, 3e-2))),
        "halving": CostTable(points=((2**12, 1e-4), (2**20, 4e-3), (2**22, 1.5e-2))),
    },
    by_size=True,
)


def test_a_run_is_compared_by_what_it_measured_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`auto`, which tried one recipe for ten steps and then ran another, exactly as predicted."""
    won, profile = Recipe.parse("wfbp-halving"), workload("alexnet", compute_s=0.05, scale=0.02)
    place = Cluster.of_prices(PRICE, "run", 4, 2)
    _, trace = simulate(profile, won, place, 4)
    lost = [Span("forward", "forward", "main", float(step), step + 0.5, step) for step in range(10)]
    later = [span._replace(step=span.step + 10) for span in trace.spans]
    tried = (Tried(recipe="lazy", predicted_s=1.0, measured_s=1.0), Tried(recipe=str(won), predicted_s=0, measured_s=0))
    notes = Notes(world=4, num_lanes=2, price=PRICE, races=(Race(first=0, end=10, why="start", tried=tried, chosen=1),))
    run_directory = RunDirectory(tmp_path / "run").create()
    run_directory.write_run(
        Run(recipe="auto", world=4, started="2026", gradientflow="0", torch="2"),
        Recipe.parse("auto"),
        Network(backend="gloo", hosts=("a",) * 4),
    )
    run_directory.write_plan(profile, won.plan(profile, 2))
    run_directory.write_trace(trace._replace(spans=(*lost, *later)))
    assert run(monkeypatch, "compare", str(run_directory.path)) == 2
    assert "auto did not measure what messages cost there: give --cluster" in capsys.readouterr().err
    notes.write(run_directory.path / "tuning.json")
    assert run(monkeypatch, "compare", str(run_directory.path)) == 0
    first, _, *messages = capsys.readouterr().out.splitlines()
    assert first.endswith("+0.0 %") and len(messages) == SHOWN
    assert all(line.split()[0] == line.split()[2] for line in messages)


def test_a_cluster_can_be_taken_and_edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    assert run(monkeypatch, "cluster", "cloud-25gbe", "--out", str(out)) == 0
    out.write_text(out.read_text().replace("25000000000.0", "50e9"))
    assert run(monkeypatch, "simulate", "--cluster", str(out), "--workers", "4") == 0


def test_where_nothing_takes_time_there_is_no_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    workload("alexnet", scale=0.01).write(path)
    words = ["--workload", str(path), "--cluster", "cloud-25gbe", "--workers", "1", "--json"]
    assert run(monkeypatch, "simulate", *words) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["samples_per_s"] is None and found["speedup"] == 1


FOUR = """
version = 1
name = "four"
hosts = 4

[between]
bits_per_s = 1e9
latency_s = 1e-4

[collective]
launch_s = 1e-3
"""


def test_what_tune_writes_can_be_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "four.toml").write_text(FOUR)
    profile = workload("alexnet", compute_s=0.05, scale=0.02)
    profile.write(tmp_path / "profile.json")
    out = tmp_path / "made" / "tuned"
    words = ["tune", "--workload", str(tmp_path / "profile.json"), "--cluster", str(tmp_path / "four.toml")]
    assert run(monkeypatch, *words, "--workers", "4", "--exchange", "a2a", "--out", str(out)) == 0
    said = capsys.readouterr().out
    ranking = Ranking.read(out / "ranking.json")
    for word in ("iteration", "speed-up", "exposed", "needs", ranking.best.recipe, str(out / "recipe.toml")):
        assert word in said
    recipe = read_recipe(str(out / "recipe.toml"))
    assert str(recipe) == ranking.best.recipe and recipe.pinned == Plan.read(out / "plan.json")
    # As `gradientflow run` hands it to workers.
    monkeypatch.chdir(out)
    told = _told("recipe.toml", recipe)
    assert Settings(recipe=told).choose(None) == recipe and told == str(out / "recipe.toml")
    assert not recipe.needs_cost and recipe.plan(profile, recipe.lanes).messages == recipe.pinned.messages
    assert run(monkeypatch, "simulate", *words[1:], "--recipe", str(out / "recipe.toml")) == 0


def test_tune_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "four.toml").write_text(FOUR)
    words = ["--workload", "alexnet", "--compute", "0.1", "--cluster", str(tmp_path / "four.toml"), "--spare", "1"]
    assert run(monkeypatch, "tune", *words, "--exchange", "ps", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] in [offer["recipe"] for offer in found["offers"]] and found["ddp_s"] > 0
    assert {"iteration_s", "speedup", "exposed_s", "needs"} <= found["offers"][0].keys()
    assert {offer["recipe"].split("-")[1] for offer in found["offers"]} == {"ps", "ps:1"}


def test_a_probe_is_tuned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = (2**12, 2**16, 2**20, 2**24)
    measurements = (
        summarize("all_reduce", range(4), [sample_of(nbytes, [1e-3 + nbytes / 5e7]) for nbytes in sizes]),
        summarize("p2p", (0, 1), [sample_of(nbytes, [2e-4 + nbytes / 1e8]) for nbytes in sizes]),
    )
    Network(backend="gloo", hosts=tuple("abcd"), measurements=measurements).write(tmp_path / "network.json")
    words = ["--network", str(tmp_path / "network.json"), "--workload", "alexnet", "--compute", "0.1"]
    assert run(monkeypatch, "tune", *words, "--exchange", "a2a", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cluster"], found["workers"]) == ("network", 4)
    assert found["ddp_s"] >= workload("alexnet").nbytes / 5e7, "no quicker than what was measured"
    assert run(monkeypatch, "export", "ddp", *words) == 0


def test_exports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--workload", "bert-base", "--cluster", "cloud-25gbe", "--workers", "16"]
    assert run(monkeypatch, "export", "ddp", *words) == 0
    said = capsys.readouterr()
    caps = json.loads(said.out)["bucket_cap_mb_list"]
    assert sum(caps) * 2**20 == workload("bert-base").nbytes and f"{len(caps)} buckets by merge" in said.err
    assert run(monkeypatch, "export", "horovod", *words, "--out", str(tmp_path / "env.sh")) == 0
    assert (tmp_path / "env.sh").read_text().startswith("# ")
    assert run(monkeypatch, "export", "nccl", *words[2:], "--channels", "2") == 0
    assert "allreduce,0," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["tune", "--workload", "alexnet"], "give --network FILE"),
        (["tune", "--workload", "alexnet", "--network", "a.json", "--cluster", "b"], "one of them"),
        (["tune", "--workload", "alexnet", "--network", "survey-10gbe"], "a .json file"),
        (["tune", "--workload", "alexnet", "--network", "nowhere.json"], "nowhere.json"),
        (["tune", "--cluster", "survey-10gbe"], "--workload"),
        (["tune", "--workload", "alexnet", "--cluster", "survey-10gbe", "--workers", "6"], "give a multiple"),
        (["tune", "--workload", "alexnet", "--cluster", "survey-10gbe", "--exchange", "best"], "give one of a2a"),
        (["tune", "--workload", "alexnet", "--cluster", "survey-10gbe", "--spare", "-1"], "0 or more hosts"),
        (["tune", "--workload", "alexnet", "--cluster", "survey-10gbe", "--out", "/dev/null/x"], "/dev/null"),
        (["export", "ddp", "--cluster", "survey-10gbe"], "give --workload"),
        (["export", "ddp", "--workload", "alexnet", "--cluster", "survey-10gbe", "--channels", "2"], "are for nccl"),
        (["export", "nccl", "--workload", "alexnet", "--cluster", "survey-10gbe"], "leave it out"),
        (["export", "nccl", "--cluster", "survey-10gbe", "--channels", "0"], "give 1 to 64"),
        (["export", "nccl", "--measured", "a.json", "--workers", "4"], "leave --network"),
        (["export", "nccl", "--measured", "nowhere.json"], "nowhere.json"),
        (["export", "nccl", "--cluster", "cloud-25gbe", "--workers", "1"], "give 2 or more"),
        (["simulate", "--cluster", "nowhere"], "no cluster 'nowhere'"),
        (["simulate", "--workers", "64"], "has 32 places"),
        (["simulate", "--workers", "6"], "give a multiple"),
        (["simulate", "--workload", "gpt-2"], "no speed of gpt-2"),
        (["simulate", "--straggler", "2"], "RANK:FACTOR"),
        (["simulate", "--jitter", "-1"], "0 to 0.5"),
        (["simulate", "--recipe", "nonsense"], "no schedule"),
        (["simulate", "--recipe", "auto"], "gradientflow tune"),
        (["sweep", "--recipe", "auto"], "gradientflow tune"),
        (["cluster", "--out", "all.toml"], "gradientflow cluster NAME --out all.toml"),
        (["sweep", "--workers", "many"], "write numbers"),
        (["sweep", "--out", "rows.txt"], "ends in .csv"),
        (["compare", "nothing.txt"], "neither"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert run(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1
