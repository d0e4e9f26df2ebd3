"""Codecs: what is done to a message so that less of it has to travel.

A codec is a short conversation with the group; see `compress.codec`. This room is tensor mathematics and
knows no network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from gradientflow.compress.cast import Cast, bf16, fp16
from gradientflow.compress.codec import (
    EXACT,
    Answer,
    Codec,
    Conversation,
    Exact,
    Gather,
    Parcel,
    Question,
    Sum,
    Swap,
    Traffic,
    alone,
    imagined,
    summed_nbytes,
)
from gradientflow.compress.feedback import Feedback, Momentum
from gradientflow.compress.part import is_finite
from gradientflow.compress.words import KINDS, part

#: Name in a recipe -> constructor from the argument as written after the colon, "" if none: precisions on the wire,
CASTS: dict[str, Callable[[str], Cast]] = {"fp16": fp16, "bf16": bf16}
#: and codecs that send a part, in any of those.
PARTS: dict[str, Callable[[str, Cast | None], Feedback]] = {name: functools.partial(part, name) for name in KINDS}

__all__ = [
    "CASTS",
    "EXACT",
    "KINDS",
    "PARTS",
    "Answer",
    "Cast",
    "Codec",
    "Conversation",
    "Exact",
    "Feedback",
    "Gather",
    "Momentum",
    "Parcel",
    "Question",
    "Sum",
    "Swap",
    "Traffic",
    "alone",
    "bf16",
    "fp16",
    "imagined",
    "is_finite",
    "part",
    "summed_nbytes",
]
