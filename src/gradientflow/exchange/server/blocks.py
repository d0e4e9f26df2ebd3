"""Memory for what arrives, which is used again once nobody refers to it.

The system gives large memory page by page, each cleared, and takes it back when it is freed. That a block is free is
read from its reference count: views of it, as memoryviews, arrays or tensors, all hold it, so one that is still sent or
summed from somewhere is never handed out.
"""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
from numpy.typing import NDArray

#: Blocks of about one size are one size.
STEP_NBYTES = 64 * 1024


def _references(blocks: deque[NDArray[np.uint8]]) -> int:
    """To the newest of the blocks."""
    return sys.getrefcount(blocks[-1])


#: To one that nobody uses. How many there are while one counts is the interpreter's affair.
_FREE = _references(deque([np.empty(0, dtype=np.uint8)]))


class Blocks:
    """Of one thread. It holds no more than was in use at one time, rounded up."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[NDArray[np.uint8]]] = {}

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(size * len(blocks) for size, blocks in self._by_size.items())

    def get(self, nbytes: int) -> memoryview:
        """Writable; what is in it is anything."""
        size = -(-nbytes // STEP_NBYTES) * STEP_NBYTES
        blocks = self._by_size.setdefault(size, deque())
        for _ in range(len(blocks)):
            blocks.rotate(-1)
            if _references(blocks) == _FREE:
                return blocks[-1].data[:nbytes]
        self._drop_free(size)
        block = np.empty(size, dtype=np.uint8)
        blocks.append(block)
        return block.data[:nbytes]

    def _drop_free(self, nbytes: int) -> None:
        """Of other sizes, as much as is to be had anew."""
        for blocks in self._by_size.values():
            for _ in range(len(blocks)):
                if nbytes <= 0:
                    return
                blocks.rotate(-1)
                if _references(blocks) == _FREE:
                    nbytes -= blocks.pop().nbytes
