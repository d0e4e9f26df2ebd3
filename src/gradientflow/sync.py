"""Synchronisation is two numbers: how often workers exchange, and how far apart they may drift.

BSP is (1, 0), SSP(s) (1, s), ASP (1, inf), Local SGD(h) (h, 0). Under BSP gradients travel. Otherwise each worker steps
by itself and *deltas* travel, what it has changed its parameters by since the last exchange; DiLoCo is Local SGD whose
mean delta is a gradient to an outer optimizer. (1, 0) with deltas is BSP by another way, which is for tests of it.

    @bsp
    @ssp:4                                  a worker may be four steps ahead of the slowest
    @asp
    @local:8   @local:8:start=100           every 8 steps; after 100 steps of BSP (post-local SGD)
    @diloco:50:warmup=10                    the first ten rounds plain averaging, then the outer optimizer
    @diloco:50:fragments=4:delay=2          a quarter of the model at a time, applied two steps after it was sent
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from gradientflow.documents import Record, describe
from gradientflow.errors import RecipeError
from gradientflow.outer import AVERAGE, DILOCO, Outer

#: What becomes of the optimizer's momentum, or Adam's moments, when parameters become the mean.
Moments = Literal["keep", "average", "reset"]


class Sync(Record):
    """Exchange every `period` steps; the fastest worker may be `staleness` exchanges ahead. What follows the `@` of a
    recipe.

    >>> print(Sync.parse("ssp:4"), Sync.parse("local:8").period)
    ssp:4 8
    >>> print(Sync.parse("diloco:50:fragments=4"), Sync.parse("diloco:50").outer)
    diloco:50:fragments=4 lr=0.7 momentum=0.9 warmup=0
    """

    period: int = Field(default=1, ge=1)
    staleness: float = Field(default=0, ge=0)
    #: Whether changes of parameters travel, not gradients.
    deltas: bool = False
    #: So many steps of BSP come first.
    start: int = Field(default=0, ge=0)
    outer: Outer = AVERAGE
    #: Parts of the model that are exchanged at different steps of a period.
    fragments: int = Field(default=1, ge=1)
    #: Steps between sending a fragment and taking its mean over.
    delay: int = Field(default=0, ge=0)
    moments: Moments = "keep"

    @model_validator(mode="before")
    @classmethod
    def _deltas_unless_bsp(cls, given: object) -> object:
        ordinary = {"period": 1, "staleness": 0, "outer": AVERAGE}
        if isinstance(given, dict) and any(given.get(name, usual) != usual for name, usual in ordinary.items()):
            return {**given, "deltas": True}
        return given

    @model_validator(mode="after")
    def _has_a_name(self) -> Sync:
        if self.period > 1 and self.staleness > 0:
            raise ValueError("a period above 1 together with staleness is neither Local SGD nor SSP")
        if self.staleness != math.inf and self.staleness != int(self.staleness):
            raise ValueError("staleness counts exchanges: a whole number, or inf")
        if self.staleness and not (self.outer.is_plain and self.moments == "keep" and self.start == 0):
            raise ValueError("an outer optimizer, start and state are for rounds, not for staleness")
        if self.fragments > self.period:
            raise ValueError(f"{self.fragments} fragments need a period of as many steps, it is {self.period}")
        if self.delay >= self.period // self.fragments and self.delay:
            raise ValueError(
                f"delay={self.delay}: a fragment must have arrived before the next is sent, "
                f"{self.period // self.fragments} steps later"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> Sync:
        """Read what follows the `@` of a recipe; raise `RecipeError` with what there is."""
        name, *words = text.split(":")
        options = dict(word.split("=", 1) for word in words if "=" in word)
        numbers = [word for word in words if "=" not in word]
        takes = {"bsp": 0, "asp": 0, "ssp": 1, "local": 1, "diloco": 1}.get(name)
        if takes != len(numbers) or not all(number.isascii() and number.isdigit() for number in numbers):
            raise _unreadable(text)
        if set(options) - _OPTIONS[name] or len(options) + len(numbers) < len(words):
            raise _unreadable(text)
        given: dict[str, object] = {"deltas": name != "bsp"}
        given |= {option: options[option] for option in ("start", "fragments", "delay") if option in options}
        given |= {"moments": options["state"]} if "state" in options else {}
        if name in ("ssp", "asp"):
            given["staleness"] = int(numbers[0]) if numbers else math.inf
        elif numbers:
            given["period"] = int(numbers[0])
        try:
            if name == "diloco":
                outer = {word: options[word] for word in _OUTER if word in options}
                given["outer"] = Outer.model_validate({**DILOCO.model_dump(), **outer})
            return cls.model_validate(given)
        except ValidationError as error:
            raise RecipeError(f"cannot read synchronisation {text!r}: {describe(error)}") from None

    def __str__(self) -> str:
        if not self.deltas:
            return "bsp"
        if self.staleness:
            return "asp" if self.staleness == math.inf else f"ssp:{int(self.staleness)}"
        words = ["local" if self.outer.is_plain else "diloco", str(self.period)]
        if not self.outer.is_plain:
            usual = DILOCO.model_dump()
            words += [f"{w}={v}".removesuffix(".0") for w, v in self.outer.model_dump().items() if v != usual[w]]
        words += [f"start={self.start}"] * bool(self.start)
        words += [f"fragments={self.fragments}"] * (self.fragments > 1)
        words += [f"delay={self.delay}"] * bool(self.delay)
        words += [f"state={self.moments}"] * (self.moments != "keep")
        return ":".join(words)


_OUTER = {"lr", "momentum", "warmup"}
_ROUNDS = {"start", "fragments", "delay", "state"}
_OPTIONS: dict[str, set[str]] = {
    "bsp": set(),
    "ssp": set(),
    "asp": set(),
    "local": _ROUNDS,
    "diloco": _ROUNDS | _OUTER,
}

BSP = Sync()
ASP = Sync(staleness=math.inf)


def _unreadable(text: str) -> RecipeError:
    return RecipeError(
        f"cannot read synchronisation {text!r}: write @bsp, @ssp:STALENESS, @asp, @local:PERIOD or @diloco:PERIOD, the "
        "last two with start=, fragments=, delay= or state=keep|average|reset, @diloco with lr=, momentum= or warmup="
    )
