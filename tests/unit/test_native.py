"""The process group's own all-reduce on lanes: threads of this process stand for ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from gradientflow.exchange.native import Groups

SIZES = (1, 5, 1000, 100_003)


def values_of(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("world", range(1, 10))
def test_every_rank_has_the_sum_to_the_last_bit(world: int) -> None:
    store = dist.HashStore()

    def rank_does(rank: int) -> list[torch.Tensor]:
        groups = Groups("gloo", store, rank, world, 2, 30.0)
        found = []
        for number, numel in enumerate(SIZES):
            values = values_of(rank, numel)
            assert groups.all_reduce(values, number % 2).done_within(30.0)
            found.append(values)
        return found

    with ThreadPoolExecutor(world) as pool:
        results = [future.result(60) for future in [pool.submit(rank_does, rank) for rank in range(world)]]
    for number, numel in enumerate(SIZES):
        expected = sum(values_of(rank, numel).double() for rank in range(world))
        for result in results:
            torch.testing.assert_close(result[number].double(), expected, rtol=1e-6, atol=1e-5)
            assert torch.equal(result[number], results[0][number])
