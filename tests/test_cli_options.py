"""Options are easy to add and hard to take back: a new one is added here on purpose."""

from __future__ import annotations

import typer

from gradientflow.cli import app

OPTIONS = {
    "run": {
        "--elastic",
        "--job",
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
        "--servers",
        "--straggler",
        "--workload",
    },
    "probe": {"--hosts", "--loopback", "--out", "--rate"},
    "profile": {"--out", "--steps"},
    "report": {"--out"},
    "explain": set(),
    "watch": {"--tensorboard"},
    "simulate": {
        "--batch",
        "--cluster",
        "--compute",
        "--device",
        "--jitter",
        "--json",
        "--out",
        "--recipe",
        "--straggler",
        "--workers",
        "--workload",
    },
    "sweep": {"--cluster", "--compute", "--device", "--out", "--rate", "--recipe", "--workers", "--workload"},
    "tune": {
        "--allow",
        "--batch",
        "--clip",
        "--cluster",
        "--compute",
        "--device",
        "--exchange",
        "--json",
        "--network",
        "--out",
        "--spare",
        "--workers",
        "--workload",
    },
    "export": {
        "--batch",
        "--channels",
        "--cluster",
        "--compute",
        "--device",
        "--measured",
        "--network",
        "--out",
        "--workers",
        "--workload",
    },
    "compare": {"--cluster"},
    "cluster": {"--out"},
    "reproduce": {"--out"},
    "doctor": {"--json", "--parity", "--seconds", "--wait"},
    "server": {"--address", "--job", "--keys", "--memory", "--plain", "--slot", "--wait"},
    "keys": set(),
    "store": {"--address", "--port"},
}


def test_no_new_options() -> None:
    group = typer.main.get_command(app)
    assert [option for parameter in group.params for option in parameter.opts] == [
        "--version",
        "--install-completion",
        "--show-completion",
    ]
    found = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        for name, command in group.commands.items()
    }
    assert found == OPTIONS
