"""Do all ranks still hold the same parameters? A bit that flipped in memory, a seed in the wrong place or a parameter
that one rank has changed by itself would else go unnoticed for ever: averages of gradients do not show it.

Every so many steps ranks compare a checksum of each tensor, eight bytes of them, so that what differs has a name. It is
a sum of whole words in columns, each with an odd weight: a single flipped bit always changes it, and flips that cancel
each other out do, unless they are in one column. To read the parameters once is all that it costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from gradientflow.compress import Gather
from gradientflow.errors import DisagreementError
from gradientflow.exchange import Exchange

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_COLUMNS = 512
_SHOWN = 8


def differing(
    exchange: Exchange, tensors: Mapping[str, torch.Tensor], sequence: int, where: str
) -> dict[str, list[int]]:
    """Names of those that ranks do not hold alike, and who has another one than most. Collective. sequence, where: as
    of every exchange."""
    everybodys = exchange.answer(Gather(checksums(tensors)), 0, sequence, where)
    assert everybodys is not None
    return differences(list(tensors), everybodys)


def disagreement(exchange: Exchange, found: Mapping[str, list[int]], num_steps: int) -> DisagreementError:
    ranks = sorted({rank for others in found.values() for rank in others})
    return DisagreementError(
        f"after {num_steps} steps ranks do not hold the same parameters: {in_words(found)}; load a checkpoint, on all "
        "ranks",
        tuple(exchange.members[rank] for rank in ranks),
    )


def checksums(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One for each, in the order of the mapping."""
    found = [_checksum(tensor.detach()) for tensor in tensors.values()]
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    # As it lies in memory, on all ranks alike (runtime/fingerprint.py): strides are no reason to copy.
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    words = flat.view(_WORDS[flat.itemsize])
    if words.storage_offset() * words.itemsize % 8:
        words = words.clone()
    whole = words.nbytes // 8 * 8 // words.itemsize
    eights = words[:whole].view(torch.int64)  # to widen smaller ones takes longer than to read them
    in_columns = len(eights) // _COLUMNS * _COLUMNS
    sums = eights[:in_columns].view(-1, _COLUMNS).sum(dim=0)
    packed = torch.cat([sums, eights[in_columns:], words[whole:].to(torch.int64)])
    return (packed * _weights(len(packed), packed.device)).sum()


@cache
def _weights(number: int, device: torch.device) -> torch.Tensor:
    """Odd ones: no power of two becomes a multiple of 2**64 by them."""
    drawn = torch.randint(2**62, (number,), generator=torch.Generator().manual_seed(number))
    return (2 * drawn + 1).to(device)


def differences(names: Sequence[str], everybodys: Sequence[torch.Tensor]) -> dict[str, list[int]]:
    """Of each parameter that is not the same everywhere, who has another one than most; given checksums by rank."""
    rows = torch.stack(list(everybodys)).cpu()
    found = {}
    for column in (rows != rows[0]).any(dim=0).nonzero().flatten().tolist():
        values = rows[:, column].tolist()
        usual = Counter(values).most_common(1)[0][0]
        found[names[column]] = [rank for rank, value in enumerate(values) if value != usual]
    return found


def in_words(found: Mapping[str, list[int]]) -> str:
    lines = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in found.items()]
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more
