"""Options are easy to add and hard to take back: a new one is added here on purpose."""

from __future__ import annotations

import typer

from gradientflow.cli import app

OPTIONS = {
    "run": {
        "--json",
        "--max-restarts",
        "--nnodes",
        "--node-rank",
        "--out",
        "--rdzv-endpoint",
        "--recipe",
        "--workers",
    },
    "demo": {
        "--compute",
        "--epochs",
        "--json",
        "--out",
        "--rate",
        "--recipe",
        "--scale",
        "--workers",
        "--workload",
    },
    "bench": {
        "--ablation",
        "--batch",
        "--clip",
        "--compute",
        "--compute-ratio",
        "--device",
        "--hosts",
        "--iterations",
        "--jitter",
        "--loopback",
        "--max-rounds",
        "--methods",
        "--out",
        "--precision",
        "--rate",
        "--scale",
        "--straggler",
        "--workload",
    },
    "probe": {"--hosts", "--loopback", "--out", "--rate"},
    "profile": {"--out", "--steps"},
    "report": {"--out"},
}


def test_no_new_options() -> None:
    group = typer.main.get_command(app)
    assert [option for parameter in group.params for option in parameter.opts] == ["--version"]
    found = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        for name, command in group.commands.items()
    }
    assert found == OPTIONS
