"""Codecs that send a part, by name, and what may be written after their colon: `csc:10%:warmup=100:masking`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gradientflow.compress.cast import Cast
from gradientflow.compress.csc import Csc
from gradientflow.compress.feedback import Feedback
from gradientflow.compress.guard import Guard
from gradientflow.compress.lowrank import GUARDED_FLOOR, PowerSgd
from gradientflow.compress.part import Part
from gradientflow.compress.quantize import Int8, Qsgd, Quantized, Sign, Voted
from gradientflow.compress.sparsify import GTopK, RandomK, Threshold, TopK
from gradientflow.compress.warmup import STAGES, WarmUp
from gradientflow.errors import RecipeError

WARM_UP_STEPS = 100


@dataclass(frozen=True)
class Words:
    """What a codec is told."""

    #: Share of elements.
    density: float = 0.5
    threshold: float = 0.0
    bits: int = 8
    rank: int = 0
    #: Steps.
    warmup: int = 0
    #: Elements; 0: by the size of the pool.
    chunk: int = 0
    #: Of each tensor's gradient on one rank, before anything is added up; 0: none.
    clip: float = 0.0
    #: Whether momentum is kept here, not by the optimizer.
    corrected: bool = False
    #: Clear momentum where something was sent.
    masking: bool = False
    #: Choose by a threshold that a sample suggests.
    sampled: bool = False
    #: For all messages, not just for those that gain by it.
    always: bool = False
    #: Of what training has gained, the part that may wait; 0: no guard.
    guard: float = 0.0


#: How a value is read, and what is wrong with it if that fails or it is not within bounds.
_VALUES: dict[str, tuple[type[int] | type[float], Callable[[float], bool], str]] = {
    "density": (float, lambda value: 0 < value <= 1, "a share of gradients above 0 and up to 1, such as 0.1 or 10%"),
    "threshold": (float, lambda value: 0 < value < math.inf, "a magnitude above 0, such as 0.001"),
    "bits": (int, lambda value: value in (2, 4, 8), "2, 4 or 8 bits"),
    "rank": (int, lambda value: 1 <= value <= 1024, "a rank from 1 to 1024"),
    "warmup": (int, lambda value: value >= 0, "warmup=STEPS"),
    "chunk": (int, lambda value: value >= 0, "chunk=ELEMENTS"),
    "clip": (float, lambda value: 0 <= value < math.inf, "clip=NORM"),
    "guard": (float, lambda value: 0 < value < 1, "guard=BUDGET, such as guard=2%"),
}
_FLAGS = {
    "masking": {"masking": True},
    "corrected": {"corrected": True},
    "uncorrected": {"corrected": False},
    "sampled": {"sampled": True},
    "always": {"always": True},
}


@dataclass(frozen=True)
class Kind:
    """A codec: what it is made of, what it takes beside a number, and what holds unless it is told otherwise."""

    make: Callable[[Words, Cast | None], Part]
    default: Words
    #: What a number alone is.
    number: str
    takes: tuple[str, ...]
    #: Steps of warm-up are all dense, not of rising density.
    abrupt: bool = False
    #: Whether values may travel in half precision.
    narrows: bool = False

    def read(self, name: str, argument: str) -> Words:
        found, numbers = self.default, 0
        for word in argument.split(":") if argument else ():
            key, equals, value = word.partition("=")
            if not equals and key in self.takes and key in _FLAGS:
                found = replace(found, **_FLAGS[key])
            elif equals and key in self.takes and key in _VALUES:
                found = replace(found, **{key: _number(name, key, value)})  # type: ignore[arg-type]
            elif not equals and self.number and not numbers:
                numbers += 1
                found = replace(found, **{self.number: _number(name, self.number, word)})  # type: ignore[arg-type]
            else:
                raise RecipeError(f"+{name} cannot read {word!r}: it takes {self._usage()}")
        if found.masking and not found.corrected:
            raise RecipeError(f"+{name}: masking clears momentum that uncorrected does not keep; use one of them")
        if found.guard and found.warmup and "warmup=" in argument:
            raise RecipeError(f"+{name}: a guard decides what is sent at first too, without warmup; use one of them")
        return found

    def _usage(self) -> str:
        words = [_VALUES[self.number][2]] if self.number else []
        words += [_VALUES[word][2] if word in _VALUES else word for word in self.takes]
        return f"{', '.join(words)}; with colons between them"


def _number(name: str, key: str, text: str) -> float:
    read, is_good, wanted = _VALUES[key]
    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") and read is float else read(text)
    except ValueError:
        raise RecipeError(f"+{name} cannot read {text!r}: it takes {wanted}") from None
    if not is_good(value):
        raise RecipeError(f"+{name} takes {wanted}, found {text!r}")
    return value


_SPARSE = ("warmup", "clip", "masking", "uncorrected", "always")
_GUARDED = (*_SPARSE, "guard")
_WHOLE = ("warmup", "corrected", "always")

KINDS: dict[str, Kind] = {
    "csc": Kind(
        lambda words, wire: Csc(wire, words.chunk),
        Words(density=0.1, warmup=WARM_UP_STEPS, corrected=True),
        "density",
        (*_SPARSE, "chunk"),
        narrows=True,
    ),
    "topk": Kind(
        lambda words, _: TopK(words.sampled),
        Words(density=0.01, warmup=WARM_UP_STEPS, corrected=True),
        "density",
        (*_GUARDED, "sampled"),
    ),
    "dgc": Kind(
        lambda words, _: TopK(sampled=True),
        Words(density=0.001, warmup=WARM_UP_STEPS, corrected=True, masking=True),
        "density",
        ("warmup", "clip", "always", "guard"),
    ),
    "gtopk": Kind(
        lambda words, _: GTopK(), Words(density=0.001, warmup=WARM_UP_STEPS, corrected=True), "density", _GUARDED
    ),
    "randomk": Kind(
        lambda words, _: RandomK(), Words(density=0.1, warmup=WARM_UP_STEPS, corrected=True), "density", _GUARDED
    ),
    "threshold": Kind(
        lambda words, _: Threshold(words.threshold),
        Words(threshold=0.001, warmup=WARM_UP_STEPS, corrected=True),
        "threshold",
        _SPARSE,
        abrupt=True,
    ),
    "int8": Kind(lambda words, _: Quantized(Int8()), Words(), "", _WHOLE, abrupt=True),
    "qsgd": Kind(lambda words, _: Quantized(Qsgd(words.bits), forgets=True), Words(), "bits", _WHOLE, abrupt=True),
    "efsign": Kind(lambda words, _: Quantized(Sign()), Words(warmup=WARM_UP_STEPS), "", _WHOLE, abrupt=True),
    # Signs and gradients are not of one size: a model gets the ones or the others.
    "signsgd": Kind(lambda words, _: Voted(), Words(always=True), "", ("corrected",), abrupt=True),
    "powersgd": Kind(
        lambda words, _: PowerSgd(words.rank),
        Words(density=GUARDED_FLOOR, rank=2, warmup=WARM_UP_STEPS),
        "rank",
        (*_WHOLE, "guard"),
        abrupt=True,
    ),
}


def part(name: str, argument: str = "", wire: Cast | None = None) -> Feedback:
    """A new codec, as a recipe names it."""
    kind = KINDS[name]
    words = kind.read(name, argument)
    if wire is not None and not kind.narrows:
        raise RecipeError(f"+{name} says itself how its values travel: leave the other precision out")
    return Feedback(
        kind.make(words, wire),
        WarmUp(words.density, 0 if words.guard else words.warmup, stages=1 if kind.abrupt else STAGES),
        corrects=words.corrected,
        masks=words.masking,
        local_clip=words.clip,
        always=words.always,
        guard=Guard(words.guard, words.density) if words.guard else None,
    )
