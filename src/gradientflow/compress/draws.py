"""Random numbers that ranks share, or that a run can repeat."""

from __future__ import annotations

import hashlib

import torch


def drawing(*seed: int) -> torch.Generator:
    """Follows from all of these numbers. Torch's generator itself looks at the lowest 32 bits of its seed alone.

    >>> draws = {float(torch.rand(1, generator=drawing(step, 7))) for step in range(1000)}
    >>> len(draws)
    1000
    """
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
