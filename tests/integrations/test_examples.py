"""Each example does 20 steps that equal the same script with stock DDP.

With two workers a sum has one order only, so weights are to be equal to the last bit; a codec that sends everything
sends it in an order of its own, so there it is float64 to 1e-10. Examples run as a reader would start them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
#: Of one script; most take ten seconds.
LIMIT_S = 100.0

#: What a script gave with stock DDP, for tests that differ in our recipe only.
_stock: dict[str, dict[str, torch.Tensor]] = {}

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*argv: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        words = process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{argv} did not end: {process.communicate()[0]}")
    assert process.returncode == 0, words
    return words


def both(directory: Path, *argv: str, ours: tuple[str, ...] = ()) -> list[dict[str, torch.Tensor]]:
    """Weights after 20 steps, with us and with stock DDP."""
    script = " ".join(argv)
    if script not in _stock:
        _stock[script] = weights(directory / "stock.pt", *argv, "--stock")
    return [weights(directory / "ours.pt", *argv, *ours), _stock[script]]


def weights(file: Path, *argv: str) -> dict[str, torch.Tensor]:
    run(*argv, "--steps", "20", "--out", str(file))
    found: dict[str, torch.Tensor] = torch.load(file)
    return found


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)


def trained(weights: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> bool:
    return all(not torch.equal(weights[name], first[name]) for name in first if name.endswith("weight"))


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What the digits' examples begin with."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from digits import build

    return build().state_dict()


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain_attach", ()),
        ("plain_attach", ("--recipe", "flow")),
        ("plain_drop_in", ()),
    ],
)
def test_plain_pytorch(name: str, options: tuple[str, ...], tmp_path: Path, first: dict[str, torch.Tensor]) -> None:
    found, expected = both(tmp_path, *TORCHRUN, f"examples/{name}.py", ours=options)
    assert largest_difference(found, expected) == 0 and trained(found, first)


@pytest.mark.timeout(3 * LIMIT_S)
def test_stock_ddp_with_our_hook(tmp_path: Path, first: dict[str, torch.Tensor]) -> None:
    argv = (*TORCHRUN, "examples/ddp_hook.py", "--double")
    found, expected = both(tmp_path, *argv, ours=("--codec", "csc:100%"))
    assert largest_difference(found, expected) <= 1e-10
    assert trained(found, {name: values.double() for name, values in first.items()})


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("options", [(), ("--recipe", "dear")])
def test_lightning(options: tuple[str, ...], tmp_path: Path, first: dict[str, torch.Tensor]) -> None:
    pytest.importorskip("lightning", reason="make test-integrations has it")
    found, expected = both(tmp_path, "examples/lightning_digits.py", ours=options)
    assert largest_difference(found, expected) == 0 and trained(found, first)


@pytest.mark.timeout(3 * LIMIT_S)
def test_accelerate(tmp_path: Path, first: dict[str, torch.Tensor]) -> None:
    pytest.importorskip("accelerate", reason="make test-integrations has it")
    found, expected = both(tmp_path, *TORCHRUN, "examples/accelerate_digits.py")
    assert largest_difference(found, expected) == 0 and trained(found, first)


@pytest.mark.timeout(3 * LIMIT_S)
def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="make test-integrations has it")
    argv = (*TORCHRUN, "examples/transformers_trainer.py", "--work", str(tmp_path))
    found, expected = both(tmp_path, *argv)
    assert largest_difference(found, expected) == 0


#: One cluster for both, since starting it is what takes longest.
ON_RAY = """
import os, sys, ray, ray_digits
from digits import arguments
files = sys.argv[1:]
ray.init(num_cpus=3, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
for file, options in zip(files, ([], ["--stock"]), strict=True):
    sys.argv[1:] = ["--out", file, *options]
    ray_digits.fit(arguments())
ray.shutdown()
"""


@pytest.mark.timeout(3 * LIMIT_S)
def test_ray(tmp_path: Path, first: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="make test-integrations has it")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    files = [tmp_path / "ours.pt", tmp_path / "stock.pt"]
    run("-c", ON_RAY, *map(str, files))
    found, expected = (torch.load(file) for file in files)
    assert largest_difference(found, expected) == 0 and trained(found, first)
