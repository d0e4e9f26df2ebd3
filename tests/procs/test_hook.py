"""Codecs without a flow: under stock DDP, and as a function on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradientflow as gf
from gradientflow.errors import DisagreementError, PeerError, RecipeError, UsageError
from helpers import kept, run_ranks
from models import build, loss_of


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


class Job:
    """Training under stock DDP. codec: of our hook; "": none."""

    def __init__(
        self,
        codec: str,
        state: Any = None,
        momentum: float = 0.9,
        bucket_cap_mb: float = 0.02,
        memory_format: torch.memory_format = torch.contiguous_format,
        static_graph: bool = False,
        **more,
    ) -> None:
        torch.manual_seed(0)
        self.model = build("cnn", torch.float32, seed=0).to(memory_format=memory_format)
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True, static_graph=static_graph
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=momentum, weight_decay=1e-3)
        uses = "scaler" in more and more.get("enabled", True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6, enabled=uses)
        self.state: gf.HookState | None = None
        if codec:
            scaler = self.scaler if "scaler" in more else None
            self.state = gf.HookState(self.ddp, codec, optimizer=self.optimizer, scaler=scaler)
            self.ddp.register_comm_hook(self.state, gf.hook)
        if state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            assert self.state is not None
            self.state.load_state_dict(state["hook"])

    def run(self, steps: range, bad: int = -1) -> torch.Tensor:
        for step in steps:
            self.optimizer.zero_grad()
            loss = loss_of(self.ddp, "cnn", dist.get_rank(), step, torch.float32)
            if step == bad and dist.get_rank() == 1:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return weights(self.model)

    def saved(self) -> dict[str, Any]:
        assert self.state is not None
        model = {name: values.clone() for name, values in self.model.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict(), "hook": self.state.state_dict()}

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def against_stock() -> list[float]:
    expected = Job("").run(range(12))
    found = []
    for codec in ("topk:1", "powersgd:2:warmup=1000", "csc:1", "int8", "bf16"):
        job = Job(codec)
        found.append(float((job.run(range(12)) - expected).norm() / expected.norm()))
        assert [group["momentum"] for group in job.optimizer.param_groups] == [0.9]
        job.close()
    return found


def test_a_hook_that_sends_everything_is_stock_ddp() -> None:
    for exact, dense, chunks, int8, bf16 in run_ranks(3, against_stock):
        assert max(exact, dense, chunks) < 1e-5
        assert int8 < 0.02 and bf16 < 0.02


def static_graph() -> float:
    ends = []
    for codec in ("", "topk:1"):
        job = Job(codec, static_graph=True)
        ends.append(job.run(range(5)))
        job.close()
    return float((ends[1] - ends[0]).norm() / ends[0].norm())


def test_a_static_graph_has_its_buckets_a_step_later() -> None:
    assert run_ranks(1, static_graph)[0] < 1e-5


def goes_on() -> list[tuple[float, float]]:
    """By codec: how far a run that was stopped ends from one that was not; and the mass that other buckets lose."""
    found = []
    for codec in ("topk:5%:warmup=0", "int8", "powersgd:1:warmup=0", "csc:0.1:warmup=0"):
        whole = Job(codec)
        expected = whole.run(range(10))
        whole.close()
        first = Job(codec)
        first.run(range(6))
        state = first.saved()
        first.close()
        second = Job(codec, state)
        apart = float((second.run(range(6, 10)) - expected).norm() / expected.norm())
        second.close()
        # Other buckets: what waits is found by name. A step without a gradient, in which it is sent or stays.
        other = Job(codec, state, bucket_cap_mb=25)
        other.optimizer.param_groups[0]["momentum"] = 0.0
        before = sum(values.double() for values in _waits(state["hook"]))
        other.optimizer.zero_grad()
        (loss_of(other.ddp, "cnn", dist.get_rank(), 0, torch.float32) * 0.0).backward()
        sent = torch.cat([p.grad.reshape(-1) for p in other.model.parameters()]).double().sum()
        after = sum(values.double() for values in _waits(other.state.state_dict()))
        masses = torch.stack([before, after])
        dist.all_reduce(masses)
        found.append((apart, float((masses[1] + sent - masses[0]).abs())))
        other.close()
    return found


def changes_memory_format() -> list[float]:
    """Trainings of which one half is in channels_last, by way of a checkpoint: how far each ends from stock DDP's."""
    expected, found = Job("").run(range(8)), []
    formats = (torch.contiguous_format, torch.channels_last)
    for before, after in (formats, formats[::-1]):
        first = Job("topk:1", memory_format=before)
        first.run(range(4))
        state = first.saved()
        first.close()
        second = Job("topk:1", state, memory_format=after)
        found.append(float((second.run(range(4, 8)) - expected).norm() / expected.norm()))
        second.close()
    return found


def test_a_checkpoint_fits_another_memory_format() -> None:
    assert max(run_ranks(1, changes_memory_format)[0]) < 1e-5


def _waits(state: dict[str, Any]) -> list[torch.Tensor]:
    slots = kept(state)["compression"]["codec"]["slots"]["residual"]
    return [slots[name].sum() for name in sorted(slots)]


def test_what_waits_is_saved_by_name_and_found_in_other_buckets() -> None:
    # DDP's first buckets are not its later ones, so a codec that looks at whole buckets goes on otherwise.
    for found in run_ranks(2, goes_on):
        assert all(apart < 0.05 and lost < 1e-3 for apart, lost in found), found


def skips_a_bad_step() -> tuple[bool, bool]:
    """With a scaler: as if it had not been. Without: the weights stay finite."""
    with_it = Job("topk:5%:warmup=0", scaler=True)
    found = with_it.run(range(9), bad=5)
    scale = with_it.scaler.get_scale()
    with_it.close()
    plain = Job("topk:5%:warmup=0")
    finite = bool(plain.run(range(9), bad=5).isfinite().all())
    plain.close()
    torch.manual_seed(0)
    off = Job("int8", scaler=True, enabled=False)  # as loops have it that train in full precision today
    finite &= bool(off.run(range(6), bad=3).isfinite().all())
    off.close()
    return scale == 128.0 and bool(found.isfinite().all()), finite


def test_a_step_that_one_rank_cannot_use_poisons_nothing() -> None:
    assert run_ranks(2, skips_a_bad_step) == [(True, True)] * 2


def averages() -> list[float]:
    """By codec, what the mean of many calls misses, relative to one call's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for codec in ("int8", "topk:10%:warmup=0:uncorrected", "efsign:warmup=0", "powersgd:2:warmup=0", "fp16"):
        averager = gf.Averager(codec)
        sums = [torch.zeros(60, 50), torch.zeros(50)]
        for _ in range(60):
            torch.manual_seed(rank)
            tensors = {"weight": torch.randn(60, 50), "bias": torch.randn(50)}
            assert averager.average_(tensors)
            for total, tensor in zip(sums, tensors.values(), strict=True):
                total += tensor / 60
        expected = [torch.zeros(60, 50), torch.zeros(50)]
        for other in range(world):
            torch.manual_seed(other)
            for total in expected:
                total += torch.randn(total.shape) / world
        state = averager.state_dict()
        averager.close()
        again = gf.Averager(codec)
        again.load_state_dict(state)
        again.average_({"weight": torch.zeros(60, 50), "bias": torch.zeros(50)})
        again.close()
        found.append(max(float((a - b).norm() / b.norm()) for a, b in zip(sums, expected, strict=True)))
    bad = gf.Averager("int8")
    tensors = {"weight": torch.full((4, 4), float("nan") if rank else 1.0)}
    assert not bad.average_(tensors) and (rank or tensors["weight"].eq(1.0).all())
    bad.close()
    return found


def test_tensors_are_averaged_and_what_is_left_over_comes_later() -> None:
    for found in run_ranks(3, averages):
        assert max(found) < 0.3, found
        assert found[0] < 0.01


def of_other_worlds(states: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Averagers that load what three ranks left over: what this one has before and after a call about nothing."""
    averager = gf.Averager("topk:10%:warmup=0")
    averager.load_state_dict(states)
    before = kept(averager.state_dict())["compression"]["codec"]["slots"]["residual"]["weight"].clone()
    zeros = {"weight": torch.zeros(20, 10)}
    averager.average_(zeros)
    after = kept(averager.state_dict())["compression"]["codec"]["slots"]["residual"]["weight"]
    averager.close()
    return before, zeros["weight"].reshape(-1) / dist.get_world_size() + after


def leaves_over() -> dict[str, Any]:
    averager = gf.Averager("topk:10%:warmup=0")
    torch.manual_seed(dist.get_rank())
    averager.average_({"weight": torch.randn(20, 10)})
    state = averager.state_dict()
    averager.close()
    return state


def test_what_waits_is_shared_out_among_another_number_of_ranks() -> None:
    states = run_ranks(3, leaves_over)
    waits = sum(kept(state)["compression"]["codec"]["slots"]["residual"]["weight"] for state in states)
    shares = run_ranks(2, of_other_worlds, states)
    assert torch.allclose(sum(before for before, _ in shares), waits, atol=1e-6)
    assert torch.allclose(sum(after for _, after in shares), waits, atol=1e-6)


def misuses() -> list[str]:
    """What goes wrong on some or all of two ranks, in words."""
    said = []
    model = build("cnn", torch.float32, seed=0)
    with pytest.raises(UsageError, match="leave find_unused_parameters out"):
        gf.HookState(DistributedDataParallel(model, find_unused_parameters=True), "topk:1%")
    job = Job("topk:1%")
    job.run(range(3))
    loss_of(job.ddp, "cnn", dist.get_rank(), 0, torch.float32).backward()
    try:
        loss_of(job.ddp, "cnn", dist.get_rank(), 0, torch.float32).backward()
    except (UsageError, RuntimeError) as error:
        said.append(str(error))
    job.close()
    averager = gf.Averager("int8", deadline_s=20)
    averager.average_({"x": torch.ones(4, 4)})
    try:
        averager.average_({"x": torch.ones(4, 5)})
    except UsageError as error:
        said.append(str(error))
    averager.close()
    order = ("x", "y") if dist.get_rank() else ("y", "x")
    averager = gf.Averager("int8", deadline_s=20)
    try:
        averager.average_({name: torch.ones(4, 4) for name in order})
    except DisagreementError as error:
        said.append(str(error))
    averager.close()
    return said


def test_what_would_go_wrong_is_refused() -> None:
    for said in run_ranks(2, misuses):
        assert len(said) == 3, said
        assert "accumulate under no_sync()" in said[0]
        assert "other tensors than before" in said[1] and "tensor 0" in said[2]


def one_is_refused() -> list[str]:
    """Calls that one rank cannot make: what ranks are told."""
    said = []
    for known, given in (({}, {1: torch.ones(4)}), ({"x": torch.ones(4)}, {}), ({"x": torch.ones(4)}, {"y": None})):
        averager = gf.Averager("int8", deadline_s=20)
        averager.average_(known)
        try:
            averager.average_(given if dist.get_rank() else {"x": torch.ones(4)})
        except (UsageError, PeerError) as error:
            said.append(str(error))
        averager.close()
    return said


def test_nobody_waits_for_a_rank_whose_call_is_refused() -> None:
    others, own = run_ranks(2, one_is_refused)
    assert len(own) == len(others) == 3
    for words, refused in zip(others, own, strict=True):
        assert f"failed in average_(): {refused}" in words


def refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="expected a model in DistributedDataParallel"):
        gf.HookState(model, "int8")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="no codec 'int9'"):
        gf.HookState(DistributedDataParallel(model), "int9")
    with pytest.raises(RecipeError, match="expected a codec such as"):
        gf.HookState(DistributedDataParallel(model), "int8@local:3")
    with pytest.raises(RecipeError, match="expected a codec such as"):
        gf.Averager("int8@local:3")
    ddp = DistributedDataParallel(model)
    state = gf.HookState(ddp, "int8")
    ddp.register_comm_hook(state, gf.hook)
    ddp(torch.ones(1, 3)).sum().backward()
    state.close()
    with pytest.raises(UsageError, match="this HookState is closed"):
        ddp(torch.ones(1, 3)).sum().backward()
    averager = gf.Averager("int8")
    with pytest.raises(UsageError, match="version 1"):
        averager.load_state_dict({"step": 3})
    assert averager.average_({})
    averager.average_({"x": torch.ones(2)})
    with pytest.raises(UsageError, match="other tensors than before"):
        averager.average_({})
    averager.close()
    for given, words in (
        ([torch.ones(3)], "tensors by name"),
        ({1: torch.ones(3)}, "tensors by name"),
        ({"count": torch.ones(3, dtype=torch.int64)}, "floating-point numbers, found torch.int64 as 'count'"),
        ({"rows": torch.eye(3).to_sparse()}, "dense tensors .* found torch.sparse_coo as 'rows'"),
    ):
        averager = gf.Averager("int8")
        with pytest.raises(UsageError, match=words):
            averager.average_(given)
        averager.close()


def test_what_cannot_be_is_refused() -> None:
    run_ranks(1, refused)
