"""What every codec keeps, driven by hand over several ranks in one process."""

from __future__ import annotations

import pytest
import torch

from conversations import converse, parcels
from gradientflow.compress import CASTS, EXACT, Codec, imagined

ALL: dict[str, Codec] = {"exact": EXACT} | {name: make("") for name, make in CASTS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("name", ALL)
def test_laws(name: str, world: int, dtype: torch.dtype) -> None:
    codec = ALL[name]
    torch.manual_seed(0)
    everyone = [[torch.randn(100).to(dtype), torch.randn(7).to(dtype)] for _ in range(world)]
    expected = [sum(rank[part].double() for rank in everyone) for part in range(2)]
    rounds, nbytes = converse([codec.converse(parcels([ranges])[0]) for ranges in everyone])
    assert (rounds, nbytes) == codec.traffic(imagined([(107,)], dtype), world)[:2], "traffic() must say what was asked"
    for ranges in everyone:
        for ours, first, exact in zip(ranges, everyone[0], expected, strict=True):
            assert ours.dtype == dtype
            assert torch.equal(ours, first), "ranks must end bit-identical"
            wire = min(dtype.itemsize, 4 if codec.lossless else 2)
            tolerance = {8: 1e-14, 4: 1e-6, 2: 0.05}[wire]
            assert torch.allclose(ours.double(), exact, rtol=tolerance, atol=tolerance * world)


def test_half_precision_halves_the_bytes_of_float32_only() -> None:
    for name in ("fp16", "bf16"):
        assert ALL[name].traffic(imagined([(10,)], torch.float32), 2).nbytes == 20
        assert ALL[name].traffic(imagined([(10,)], torch.float16), 2).nbytes == 20
        assert ALL[name].traffic(imagined([(10,)], torch.float64), 2).nbytes == 20


def test_only_fp16_can_overflow() -> None:
    assert [name for name, codec in ALL.items() if codec.can_overflow] == ["fp16"]
    values = [[torch.tensor([60000.0])], [torch.tensor([60000.0])]]
    converse([ALL["fp16"].converse(parcels([ranges])[0]) for ranges in values])
    assert values[0][0].isinf().all() and values[1][0].isinf().all()
