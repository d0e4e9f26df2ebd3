"""Collectives as data: lists of transfers that one executor can run and one pricer can cost.

No tensors and no network: a pattern says who sends what to whom, not how.
"""

from collections.abc import Callable

from gradientflow.patterns.flat import (
    doubling_all_gather,
    halving_doubling,
    halving_reduce_scatter,
    recursive_doubling,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    star,
    tree,
    tree_reduce,
)
from gradientflow.patterns.levels import bcube, check_hosts, torus, two_level
from gradientflow.patterns.pattern import Pattern, Transfer, Turn, chunk_bounds, in_turn, mirrored

#: All-reduces that need to know nothing but how many ranks there are.
ALL_REDUCES: dict[str, Callable[[int], Pattern]] = {
    "ring": ring_all_reduce,
    "tree": tree,
    "doubling": recursive_doubling,
    "halving": halving_doubling,
    "star": star,
}

#: For what is small and waited for.
QUICKEST = "doubling"
#: The two halves of those that have some, by name.
HALVES: dict[str, Callable[[int], Pattern]] = {
    "ring/scatter": ring_reduce_scatter,
    "ring/gather": ring_all_gather,
}


def scatter_of(name: str) -> str:
    """The name of an all-reduce's first half."""
    return f"{name}/scatter"


def gather_of(name: str) -> str:
    """The name of an all-reduce's second half."""
    return f"{name}/gather"


__all__ = [
    "ALL_REDUCES",
    "HALVES",
    "QUICKEST",
    "Pattern",
    "Transfer",
    "Turn",
    "bcube",
    "check_hosts",
    "chunk_bounds",
    "doubling_all_gather",
    "gather_of",
    "halving_doubling",
    "halving_reduce_scatter",
    "in_turn",
    "mirrored",
    "recursive_doubling",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "scatter_of",
    "star",
    "torus",
    "tree",
    "tree_reduce",
    "two_level",
]
