"""Ranks that save again and again until they are killed; and what is left then."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradientflow as gf
from gradientflow.runtime.states import name_of
from helpers import _CONTEXT, _rank

#: Of each file, so that writing takes a while.
NUMEL = 400_000
RECIPE = "lazy+topk:always:1%:warmup=0"


def job() -> tuple[torch.nn.Module, torch.optim.Optimizer, gf.Flow]:
    torch.manual_seed(0)
    model = torch.nn.Linear(NUMEL // 100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, gf.attach(model, optimizer, RECIPE)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, NUMEL // 100)).sum().backward()
    optimizer.step()


def save_for_ever(directory: str) -> None:
    model, optimizer, flow = job()
    if saved := gf.load(directory):
        restore(saved, model, optimizer, flow)
    while True:
        step(model, optimizer)
        number = flow.step
        gf.save(directory, flow, model=model, optimizer=optimizer, step=number, values=torch.full((1000,), number))


def restore(saved: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, flow: gf.Flow) -> None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    flow.load_state_dict(saved["flow"])


def goes_on(directory: str) -> int:
    """The step that was saved, by ranks that have taken another."""
    model, optimizer, flow = job()
    saved = gf.load(directory)
    check(saved, dist.get_rank(), dist.get_world_size())
    restore(saved, model, optimizer, flow)
    step(model, optimizer)
    assert flow.step == saved["step"] + 1
    flow.close()
    return int(saved["step"])


def check(saved: dict[str, Any], rank: int, world: int) -> None:
    """All parts of it are of one step."""
    assert saved["flow"]["step"] == saved["step"] and bool((saved["values"] == saved["step"]).all())
    assert name_of(rank, world) in saved["flow"]["ranks"]
    for kept in saved["flow"]["ranks"].values():
        assert kept["compression"]["codec"]["num_steps"] == saved["step"]


def kill_while_saving(directory: Path, world: int, chance: random.Random) -> tuple[int, int, bool]:
    """One job that goes on from what is there, killed at a random moment, one of its ranks a moment before the others.
    Returns the last step that was saved by then, that which is loaded, and whether something half written was left."""
    before = newest(directory)
    rendezvous = directory.parent / f"rendezvous-{chance.randrange(2**60)}"
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        args = (rank, world, str(rendezvous), theirs, save_for_ever, (str(directory),))
        processes.append(_CONTEXT.Process(target=_rank, args=args))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        end_s = time.monotonic() + 60
        while newest(directory) <= before:
            assert time.monotonic() < end_s and all(process.is_alive() for process in processes), "nothing is saved"
            time.sleep(0.002)
        time.sleep(chance.random() * 0.15)
        first = chance.randrange(world)
        os.kill(processes[first].pid, signal.SIGKILL)
        time.sleep(chance.choice([0.0, 0.0, 0.02]))
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        rendezvous.unlink(missing_ok=True)
    complete = newest(directory)
    torn = any(directory.glob(".partial-*"))
    saved = gf.load(directory)
    check(saved, 0, world)
    return complete, int(saved["step"]), torn


def newest(directory: Path) -> int:
    """The number of the newest."""
    return max((int(path.name) for path in directory.glob("[0-9]*")), default=0)
