"""Trains a small model with stock DDP and with us on the user's own machines: the same results, and what a step takes.

DDP is there twice: two methods that are the same differ by so much here.
"""

from __future__ import annotations

import datetime
import time
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from gradientflow.bench.results import Ratio
from gradientflow.doctor.meeting import Meeting
from gradientflow.documents import Record
from gradientflow.runtime.attach import attach

WIDTH, LAYERS, BATCH = 512, 8, 16
STEPS = 20
ROUNDS = 15
#: Of one method in one round.
BLOCK_S = 0.3
LIMIT_S = 60.0
#: As in tests/procs/test_parity.py.
MOST_GRADIENT, MOST_WEIGHT = 1e-6, 1e-10


class Parity(Record):
    world: int
    device: str
    backend: str
    #: Largest difference of a gradient, relative to its tensor's largest element; float32, from equal weights.
    gradients: float
    #: Largest difference of a weight after 20 steps in float64.
    weights: float
    ranks_are_identical: bool
    ddp_step_s: float
    #: Of the time of a step, with its 95 % interval.
    ours_to_ddp: Ratio
    ddp_to_ddp: Ratio

    @property
    def holds(self) -> bool:
        return self.gradients <= MOST_GRADIENT and self.weights <= MOST_WEIGHT and self.ranks_are_identical

    @property
    def words(self) -> list[str]:
        equal = "bit for bit the same" if self.ranks_are_identical else "NOT the same"
        ours, theirs = self.ours_to_ddp, self.ddp_to_ddp
        return [
            f"{self.world} ranks on {self.device}, {self.backend}: gradients differ from DDP's by {self.gradients:.1e} "
            f"(at most {MOST_GRADIENT:g}), float64 weights after {STEPS} steps by {self.weights:.1e} (at most "
            f"{MOST_WEIGHT:g}); ranks are {equal}",
            f"a step takes {1e3 * self.ddp_step_s:.1f} ms with DDP; lazy to DDP {ours.median:.3f} ({ours.low:.3f} to "
            f"{ours.high:.3f}), DDP to itself {theirs.median:.3f} ({theirs.low:.3f} to {theirs.high:.3f})",
        ]


def measure_parity(meeting: Meeting, local_rank: int) -> Parity:
    """On all ranks of the meeting together, each on its accelerator if there is one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("parity", meeting.store),
        rank=meeting.rank,
        world_size=meeting.world,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )
    try:
        ddp_s, ours_to_ddp, ddp_to_ddp = _times(device)
        weights, identical = _weights(device)
        return Parity(
            world=meeting.world,
            device=str(device.type),
            backend=backend,
            gradients=_gradients(device),
            weights=weights,
            ranks_are_identical=identical,
            ddp_step_s=ddp_s,
            ours_to_ddp=ours_to_ddp,
            ddp_to_ddp=ddp_to_ddp,
        )
    finally:
        dist.barrier()
        dist.destroy_process_group()


class _Training:
    def __init__(
        self, ours: bool, device: torch.device, dtype: torch.dtype = torch.float32, layers: int = LAYERS
    ) -> None:
        torch.manual_seed(0)
        stages = [stage for _ in range(layers) for stage in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*stages).to(device, dtype)
        self._device, self._dtype = device, dtype
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._flow = attach(self.model, self.optimizer, "lazy:1MB") if ours else None
        self._forward: nn.Module = self.model if ours else DistributedDataParallel(self.model, bucket_cap_mb=1)

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64).to(self._device, self._dtype)
        self.optimizer.zero_grad()
        mse_loss(self._forward(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()

    def close(self) -> None:
        if self._flow is not None:
            self._flow.close()


def _gradients(device: torch.device) -> float:
    ours, theirs = _Training(True, device), _Training(False, device)
    worst = 0.0
    for number in range(STEPS // 2):
        ours.model.load_state_dict(theirs.model.state_dict())
        ours.backward(number)
        theirs.step(number)
        for mine, reference in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            assert mine.grad is not None and reference.grad is not None
            scale = reference.grad.abs().max().clamp_min(1e-30)
            worst = max(worst, float((mine.grad - reference.grad).abs().max() / scale))
    ours.close()
    return _worst_of_all(worst, device)


def _weights(device: torch.device) -> tuple[float, bool]:
    both = [_Training(ours, device, torch.float64, layers=2) for ours in (True, False)]
    for number in range(STEPS):
        for training in both:
            training.step(number)
    ours, theirs = (torch.cat([p.detach().view(-1) for p in each.model.parameters()]) for each in both)
    both[0].close()
    checksums: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(checksums, zlib.crc32(ours.cpu().numpy().tobytes()))
    return _worst_of_all(float((ours - theirs).abs().max()), device), len(set(checksums)) == 1


def _worst_of_all(mine: float, device: torch.device) -> float:
    worst = torch.tensor([mine], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _times(device: torch.device) -> tuple[float, Ratio, Ratio]:
    """Of a step with DDP, and what lazy and DDP again take of it; from blocks that ran in turn."""
    trainings = {"ddp": _Training(False, device), "ours": _Training(True, device), "again": _Training(False, device)}
    names = list(trainings)
    # Buckets and pools are laid out in the first steps.
    num_steps = max(2, round(BLOCK_S / max(_block(trainings[name].step, 5, device) / 5 for name in names)))
    num_steps = int(_worst_of_all(num_steps, device))
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS):
        for name in names[number % 3 :] + names[: number % 3]:
            found[name].append(_block(trainings[name].step, num_steps, device) / num_steps)
    for training in trainings.values():
        training.close()
    ratios = {
        name: Ratio.of([mine / ddp for mine, ddp in zip(found[name], found["ddp"], strict=True)])
        for name in ("ours", "again")
    }
    return sorted(found["ddp"])[ROUNDS // 2], ratios["ours"], ratios["again"]


def _block(step: Callable[[int], None], num_steps: int, device: torch.device) -> float:
    """From barrier to barrier, on the slowest rank."""
    dist.barrier()
    start_s = time.perf_counter()
    for number in range(num_steps):
        step(number)
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - start_s
