"""Parameters that are no longer the same on all ranks are found, and named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradientflow as gf
from gradientflow.runtime.sameness import checksums, differences
from helpers import run_ranks
from models import build, loss_of


def flip_a_bit(recipe: str) -> str:
    rank = dist.get_rank()
    model = build("cnn", torch.float32, seed=rank).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    name, victim = list(model.named_parameters())[2]
    with gf.attach(model, optimizer, recipe, verify_every=5) as flow:
        for step in range(20):
            if step == 12 and rank == 1:
                flow.synchronize()
                with torch.no_grad():
                    victim.view(-1).view(torch.int32)[0] ^= 1  # the last bit of one number
            optimizer.zero_grad()
            try:
                loss_of(model, "cnn", rank, step, torch.float32).backward()
            except gf.DisagreementError as error:
                assert flow.step == 15 and error.ranks == (1,) and name in str(error)
                return str(error)
            optimizer.step()
    return ""


def flip_an_anchor(recipe: str) -> str:
    """Workers' parameters differ between rounds; what they move from must not."""
    rank = dist.get_rank()
    model = build("cnn", torch.float32, seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gf.attach(model, optimizer, recipe, verify_every=3) as flow:
        for step in range(12):
            if step == 5 and rank == 1:
                flow._way._anchors["head.0.weight"].view(-1).view(torch.int32)[7] ^= 1 << 22
            optimizer.zero_grad()
            loss_of(model, "cnn", rank, step, torch.float32).backward()
            try:
                optimizer.step()
            except gf.DisagreementError as error:
                assert step == 5 and error.ranks == (1,) and "head.0.weight" in str(error)
                return str(error)
    return ""


def flip_a_master() -> str:
    """A bit that bf16 does not have."""
    rank = dist.get_rank()
    model = build("mlp", torch.bfloat16, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gf.attach(model, optimizer, "lazy", master_weights=True, verify_every=2) as flow:
        for step in range(6):
            if step == 2 and rank == 1:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].view(-1).view(torch.int32)[3] ^= 1
            optimizer.zero_grad()
            try:
                loss_of(model, "mlp", rank, step, torch.bfloat16).backward()
            except gf.DisagreementError as error:
                assert "0.weight (its master) on rank" in str(error) and flow.step == 2
                return str(error)
            optimizer.step()
    return ""


def change_a_frozen_one() -> str:
    model = build("mlp", torch.float32, seed=0)
    name, frozen = next(iter(model.named_parameters()))
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with gf.attach(model, optimizer, "lazy", verify_every=1):
        frozen.data += dist.get_rank()
        with pytest.raises(gf.DisagreementError, match=name) as found:
            for step in range(2):
                loss_of(model, "mlp", 0, step, torch.float32).backward()
                optimizer.step()
    return str(found.value)


def test_frozen_parameters_count_too() -> None:
    assert all(run_ranks(2, change_a_frozen_one))


def test_where_workers_differ_and_where_parameters_are_rounded() -> None:
    assert all("on rank 1" in words for words in run_ranks(3, flip_an_anchor, "lazy@diloco:3"))
    assert all(run_ranks(2, flip_a_master))


@pytest.mark.parametrize("recipe", ["lazy", "flow"])
def test_a_flipped_bit_is_found(recipe: str) -> None:
    assert all("on rank 1" in words for words in run_ranks(3, flip_a_bit, recipe))


def test_every_single_bit_counts() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.randn(7, 5).to(dtype)
        word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        for bit in range(8 * tensor.itemsize - 1):
            other = tensor.clone()
            other.view(-1).view(word)[3] ^= 1 << bit
            found = differences(["w", "b"], [checksums({"w": each, "b": tensor}) for each in (tensor, other, tensor)])
            assert found == {"w": [1]}, (dtype, bit)


def test_flips_that_cancel_out_and_places_that_were_swapped_are_found() -> None:
    tensor = torch.randn(5000)
    swapped, cancelling, other = tensor.clone(), tensor.clone(), tensor.clone()
    swapped[[10, 13]] = tensor[[13, 10]]
    words = cancelling.view(torch.int32)
    words[100] += 64
    words[102] -= 64
    other[-1] += 1
    for each in (swapped, cancelling, other):
        assert checksums({"w": each}) != checksums({"w": tensor})


def test_a_checksum_is_of_values_wherever_they_lie() -> None:
    for numel in (0, 1, 3, 511, 1025, 4097):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64):
            values = torch.randn(numel + 1).mul(9).to(dtype)
            assert torch.equal(checksums({"w": values[1:].clone()}), checksums({"w": values[1:]}))
