"""Python in the start page, the guides and the concept pages runs, top to bottom, in a world of one."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradientflow
from documents import ROOT, python_blocks
from helpers import run_ranks

PAGES = [
    page
    for page in [
        ROOT / "docs" / "index.md",
        *sorted(ROOT.glob("docs/guides/*.md")),
        *sorted(ROOT.glob("docs/concepts/*.md")),
    ]
    if any(not block.needs or find_spec(block.needs) for block in python_blocks(page))
]


def surroundings(directory: str) -> dict[str, Any]:
    """What the guides take for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
    return {
        "gradientflow": gradientflow,
        "contextlib": contextlib,
        "torch": torch,
        "dist": dist,
        "default_hooks": default_hooks,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "batch": lambda number: torch.randn(8, 64, generator=torch.Generator().manual_seed(number)),
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "path": os.path.join(directory, "checkpoint.pt"),
        "directory": os.path.join(directory, "checkpoints"),
        "folder": os.path.join(directory, "shards"),
    }


def run_page(page: Path, directory: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    names = surroundings(directory)
    blocks = [block.text for block in python_blocks(page) if not block.needs or find_spec(block.needs)]
    if any("init_process_group" in text for text in blocks):
        dist.destroy_process_group()  # the page makes its own
    elif any(re.search(r"\bflow\.", text) for text in blocks) and "= gradientflow.attach" not in blocks[0]:
        names["flow"] = gradientflow.attach(names["model"], names["optimizer"])
    for number, text in enumerate(blocks):
        exec(compile(text, f"{page.name}, block {number + 1}", "exec"), names)
    with contextlib.suppress(KeyError):
        names["flow"].close()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return len(blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    assert run_ranks(1, run_page, page, str(tmp_path))[0] > 0
