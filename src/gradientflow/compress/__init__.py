"""Codecs: what is done to a message so that less of it has to travel.

A codec is a short conversation with the group; see `compress.codec`. This room is tensor mathematics and
knows no network.
"""

from __future__ import annotations

from collections.abc import Callable

from gradientflow.compress.cast import bf16, fp16
from gradientflow.compress.codec import EXACT, Codec, Conversation, Exact, Sum, Traffic

#: Name in a recipe -> constructor from the argument as written after the colon, "" if none.
CODECS: dict[str, Callable[[str], Codec]] = {"fp16": fp16, "bf16": bf16}

__all__ = ["CODECS", "EXACT", "Codec", "Conversation", "Exact", "Sum", "Traffic", "bf16", "fp16"]
