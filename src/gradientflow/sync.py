"""Synchronisation is two numbers: how often workers exchange, and how far apart they may drift.

BSP is (1, 0), SSP(s) (1, s), ASP (1, inf), Local SGD(h) (h, 0). Gradients travel when it is (1, 0),
parameter changes otherwise.
"""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from gradientflow.documents import Record
from gradientflow.errors import RecipeError


class Sync(Record):
    """Exchange every `period` steps; the fastest worker may be `staleness` exchanges ahead.

    >>> print(Sync.parse("ssp:4"), Sync.parse("local:8").period)
    ssp:4 8
    """

    period: int = Field(default=1, ge=1)
    staleness: float = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _has_a_name(self) -> Sync:
        if self.period > 1 and self.staleness > 0:
            raise ValueError("a period above 1 together with staleness is neither Local SGD nor SSP")
        if self.staleness != math.inf and self.staleness != int(self.staleness):
            raise ValueError("staleness counts exchanges: a whole number, or inf")
        return self

    @classmethod
    def parse(cls, text: str) -> Sync:
        name, colon, argument = text.partition(":")
        if name in ("bsp", "asp") and not colon:
            return BSP if name == "bsp" else ASP
        if name in ("ssp", "local") and argument.isascii() and argument.isdigit():
            number = int(argument)
            if name == "ssp":
                return cls(staleness=number)
            if number >= 1:
                return cls(period=number)
        raise RecipeError(f"cannot read synchronisation {text!r}: write @bsp, @ssp:STALENESS, @asp or @local:PERIOD")

    def __str__(self) -> str:
        if self.staleness == math.inf:
            return "asp"
        if self.staleness:
            return f"ssp:{int(self.staleness)}"
        return "bsp" if self.period == 1 else f"local:{self.period}"


BSP = Sync()
ASP = Sync(staleness=math.inf)
