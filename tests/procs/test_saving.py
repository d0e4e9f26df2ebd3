"""A checkpoint is whole or not there: ranks that die, fail or differ while they save."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradientflow as gf
from gradientflow.errors import DeadlineError, PeerError
from helpers import run_ranks
from saving import goes_on, kill_while_saving, newest


def test_who_is_killed_while_saving_leaves_what_was_saved_before(tmp_path: Path) -> None:
    directory, chance, steps = tmp_path / "checkpoints", random.Random(0), []
    directory.mkdir()
    for _ in range(3):
        complete, step, _ = kill_while_saving(directory, 2, chance)
        # A step is saved once, under the next number.
        assert step == complete
        steps.append(step)
    assert steps == sorted(set(steps))
    assert run_ranks(2, goes_on, str(directory)) == [newest(directory)] * 2
    assert len(list(directory.iterdir())) <= 3, "the two newest, and one that nobody finished"


def fails_on_one(directory: str) -> str:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gf.attach(model, optimizer, "lazy@local:2") as flow:
        gf.save(directory, flow, model=model, step=1)
        # Workers differ, so each writes its own: one of them what cannot be written.
        odd = object() if dist.get_rank() == 1 else 2
        with pytest.raises(gf.UserError) as caught:
            gf.save(directory, flow, model=model, step=2, odd=odd)
        assert gf.load(directory)["step"] == 1
        with pytest.raises(gf.UserError, match=r"^ZeroDivisionError: division by zero \(rank 1\)$"):
            gf.save(directory, flow, model=model, loader=_Divides())
        gf.save(directory, flow, model=model, step=3)
        assert gf.load(directory)["step"] == 3 and gf.load(directory, 1)["step"] == 1
    return str(caught.value)


class _Divides:
    def state_dict(self) -> dict[str, float]:
        return {"share": 1 / (1 - dist.get_rank())}


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    found = run_ranks(2, fails_on_one, str(tmp_path))
    assert found[0] == found[1] and "rank 1" in found[0] and "\n" not in found[0]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def saves_alone(directory: str) -> str:
    model = nn.Linear(3, 2)
    flow = gf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "lazy")
    gf.save(directory, flow, model=model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        gf.save(directory, flow, model=model)
    with pytest.raises(DeadlineError, match="nothing came from rank 1"):
        flow.close()  # with it goes what is known of rank 1
        gf.save(directory, model=model, deadline_s=0.5)
    return str(caught.value)


def test_who_does_not_come_to_save_is_named(tmp_path: Path) -> None:
    words = run_ranks(2, saves_alone, str(tmp_path), lost=(1,))[0]
    assert "write a checkpoint" in words and "rank 1 is dead" in words and "\n" not in words
    assert os.listdir(tmp_path) == ["1"]


def clouds_go_on(directory: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """DDP inside two clouds, a flow across; the ranks of one across-group save."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    words, found = "", []
    for first in (0, 3):
        torch.manual_seed(rank)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=inside)
        with gf.attach(model, optimizer, "lazy@diloco:2", process_group=across) as flow:
            if first:
                saved = gf.load(directory, process_group=across)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                flow.load_state_dict(saved["flow"])
            for number in range(first, 6):
                if number == 3 and not first:
                    dist.barrier()
                    if rank % 2 == 0:
                        gf.save(directory, flow, process_group=across, model=model, optimizer=optimizer)
                    dist.barrier()
                    if rank % 2:
                        with pytest.raises(gf.UserError) as caught:
                            gf.save(directory, flow, process_group=across, model=model)
                        words = str(caught.value)
                optimizer.zero_grad()
                wrapped(torch.full((1, 6), rank + number + 1.0)).square().sum().backward()
                optimizer.step()
        found.append(model.weight.detach().clone())
    return found[0], found[1], words


def test_one_group_of_ranks_saves_for_all(tmp_path: Path) -> None:
    for rank, (whole, parts, words) in enumerate(run_ranks(4, clouds_go_on, str(tmp_path))):
        assert torch.equal(whole, parts)
        assert ("another group, of ranks 0, 2, saves into it, and these are 1, 3" in words) == bool(rank % 2)
    assert os.listdir(tmp_path) == ["1"]


# - SSP and ASP: a cut


def cuts(directory: str, recipe: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Workers that have taken different numbers of steps save: parameters are the same for all of them, and hold all
    that was pushed."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model.weight.detach().clone()
    with gf.attach(model, optimizer, recipe) as flow:
        for _ in range(2 + rank):
            optimizer.zero_grad()
            (model.weight * (rank + 1.0)).sum().backward()  # each step moves every weight by -(rank + 1)
            optimizer.step()
        gf.save(directory, flow, model=model, optimizer=optimizer)
        moved = (model.weight.detach() - start).clone()
    saved = gf.load(directory)
    model.load_state_dict(saved["model"])
    loaded = model.weight.detach().clone()
    with gf.attach(model, optimizer, recipe) as flow:  # servers that are new begin with it
        flow.load_state_dict(saved["flow"])
        assert torch.equal(model.weight, loaded)
        left = next(iter(flow.state_dict()["ranks"].values()))["left_over"]["weight"]
        return moved, left, flow.step


@pytest.mark.parametrize("recipe", ["lazy-ps@ssp:3", "lazy-ps@asp", "lazy-ps+int8@ssp:3"])
def test_workers_that_drift_apart_are_saved_at_a_cut(tmp_path: Path, recipe: str) -> None:
    found = run_ranks(2, cuts, str(tmp_path), recipe)
    # Servers take the mean: steps of both workers, halved.
    everything = torch.full((3, 4), -(2 * 1.0 + 3 * 2.0) / 2)
    for moved, _, step in found:
        assert torch.equal(moved, found[0][0])
        assert step in (2, 3)
    kept = sum(left for _, left, _ in found) / 2
    assert torch.allclose(found[0][0] + kept, everything, atol=1e-5)
    assert [step for _, _, step in found] == [2, 3]
