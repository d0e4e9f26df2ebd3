"""The executor on real sockets: threads of this process stand for ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradientflow.errors import DeadlineError
from gradientflow.exchange.control import Control
from gradientflow.exchange.links import GULP_NBYTES, Links
from gradientflow.exchange.reach import LOOPBACK, way_to_others
from gradientflow.exchange.staged import PIECE_NBYTES, Staged, owned, peers_of
from gradientflow.patterns import ALL_REDUCES, Pattern, ring_all_gather, ring_reduce_scatter, two_level

WORLDS = range(1, 10)
PATTERNS: dict[str, Callable[[int], Pattern]] = {
    **ALL_REDUCES,
    "levels": lambda world: two_level([list(range(world))[start : start + 2] for start in range(0, world, 2)]),
}
#: None, fewer elements than ranks, some, and several strips.
SIZES = (0, 1, 5, 1000, 3 * PIECE_NBYTES // 4 + 1)


class NoHealth:
    def enter(self, kind: str, number: int, detail: str = "") -> None: ...

    def leave(self) -> None: ...

    def check(self, *, deadline: bool = True) -> None: ...


def look() -> None: ...


def on_ranks(
    world: int, work: Callable[[Staged, int], object], patterns: dict[str, Pattern], address: str = LOOPBACK
) -> list[object]:
    """What `work` returns on each rank."""
    store = dist.HashStore()

    def rank_does(rank: int) -> object:
        control = Control(store, rank, tuple(range(world)), 20.0, NoHealth())  # type: ignore[arg-type]
        links = Links(address, control, rank, 20.0)
        links.connect({peer for pattern in patterns.values() for peer in peers_of(pattern, rank)}, num_lanes=2)
        staged = Staged(links, patterns, rank, num_lanes=2)
        try:
            return work(staged, rank)
        finally:
            control.gather("", "end together")
            staged.close()

    with ThreadPoolExecutor(world) as pool:
        return [future.result(60) for future in [pool.submit(rank_does, rank) for rank in range(world)]]


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_has_the_sum_to_the_last_bit(name: str, world: int) -> None:
    def work(staged: Staged, rank: int) -> list[torch.Tensor]:
        found = []
        for number, numel in enumerate(SIZES):
            values = values_of(rank, numel)
            staged.run(name, values, number % 2, look, 1.0)
            found.append(values)
        return found

    results = on_ranks(world, work, {name: PATTERNS[name](world)})
    for number, numel in enumerate(SIZES):
        expected = sum(values_of(rank, numel).double() for rank in range(world))
        for result in results:
            torch.testing.assert_close(result[number].double(), expected, rtol=1e-6, atol=1e-5)
            assert torch.equal(result[number], results[0][number])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_any_dtype(dtype: torch.dtype) -> None:
    def work(staged: Staged, rank: int) -> torch.Tensor:
        values = torch.full((1000,), rank + 1).to(dtype)
        staged.run("ring", values, 0, look, 1.0)
        return values

    for values in on_ranks(3, work, {"ring": ALL_REDUCES["ring"](3)}):
        assert isinstance(values, torch.Tensor) and values.dtype == dtype and values.tolist() == [6.0] * 1000


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("numel", SIZES)
def test_scatter_then_gather_is_an_all_reduce(world: int, numel: int) -> None:
    """After the first half each rank has its own part, to the bits that all have after the second."""
    patterns = {"scatter": ring_reduce_scatter(world), "gather": ring_all_gather(world)}

    def work(staged: Staged, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        values = values_of(rank, numel)
        staged.run("scatter", values, 0, look, 1.0)
        own = [values[start:stop].clone() for start, stop in owned(patterns["scatter"], rank, numel, 4)]
        staged.run("gather", values, 1, look, 1.0)
        return own, values

    results = on_ranks(world, work, patterns)
    for rank, (own, values) in enumerate(results):
        assert torch.equal(values, results[0][1])
        spans = owned(patterns["scatter"], rank, numel, 4)
        assert all(torch.equal(piece, values[slice(*span)]) for piece, span in zip(own, spans, strict=True))
    everything = sorted(span for rank in range(world) for span in owned(patterns["scatter"], rank, numel, 4))
    assert sum(stop - start for start, stop in everything) == numel


def test_many_messages_in_a_row_keep_their_order() -> None:
    def work(staged: Staged, rank: int) -> list[float]:
        found = []
        for number in range(200):
            values = torch.full((1 + 37 * (number % 5),), float(number * (rank + 1)))
            staged.run(("ring", "doubling", "star")[number % 3], values, 0, look, 1.0)
            found.append(float(values[-1]))
        return found

    for found in on_ranks(4, work, {name: ALL_REDUCES[name](4) for name in ("ring", "doubling", "star")}):
        assert found == [10.0 * number for number in range(200)]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_hosts_that_have_ipv6_alone() -> None:
    address = way_to_others({"MASTER_ADDR": "::1"}).address
    assert address == "::1"

    def work(staged: Staged, rank: int) -> list[float]:
        values = torch.full((3,), rank + 1.0)
        staged.run("ring", values, 0, look, 1.0)
        return list(values.tolist())

    assert on_ranks(2, work, {"ring": ALL_REDUCES["ring"](2)}, address) == [[3.0] * 3] * 2


def test_strangers_at_the_port_hold_nobody_up() -> None:
    """They say nothing and stay: before the ranks call, and in greater number than there is time for one by one."""
    store = dist.HashStore()
    strangers_are_there = threading.Barrier(2)

    def rank_does(rank: int) -> float:
        control = Control(store, rank, (0, 1), 20.0, NoHealth())  # type: ignore[arg-type]
        links = Links(LOOPBACK, control, rank, 20.0)
        with contextlib.ExitStack() as stack:
            if rank == 1:
                where = (LOOPBACK, links._server.getsockname()[1])
                for _ in range(40):
                    stack.enter_context(socket.create_connection(where, timeout=20.0))
            strangers_are_there.wait(20)
            began_s = time.monotonic()
            links.connect({1 - rank}, num_lanes=2)
            links.close()
            return time.monotonic() - began_s

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(rank_does, range(2), timeout=60)) < 10.0


def test_who_waits_in_vain_looks_up_and_may_stop() -> None:
    """Rank 1 never sends; rank 0 must neither hang nor spin, and its `look` ends it."""
    looked = threading.Event()

    def work(staged: Staged, rank: int) -> str:
        if rank == 1:
            assert looked.wait(20)
            return "never came"

        def give_up() -> None:
            looked.set()
            raise DeadlineError("enough")

        with pytest.raises(DeadlineError, match="enough"):
            staged.run("ring", torch.zeros(10), 0, give_up, 0.05)
        return "gave up"

    assert on_ranks(2, work, {"ring": ALL_REDUCES["ring"](2)}) == ["gave up", "never came"]


def test_a_rank_that_goes_away_is_noticed_at_once() -> None:
    def work(staged: Staged, rank: int) -> str:
        if rank == 1:
            staged.close()
            return "left"
        with pytest.raises(ConnectionError):
            staged.run("ring", torch.zeros(GULP_NBYTES), 0, look, 20.0)
        return "noticed"

    assert on_ranks(2, work, {"ring": ALL_REDUCES["ring"](2)}) == ["noticed", "left"]
