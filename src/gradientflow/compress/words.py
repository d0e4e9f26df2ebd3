"""What may be written after the colon of a codec that sends a part: `csc:10%:warmup=100:masking`."""

from __future__ import annotations

from dataclasses import dataclass

from gradientflow.compress.cast import Cast
from gradientflow.compress.csc import Csc
from gradientflow.compress.feedback import Feedback
from gradientflow.compress.warmup import WarmUp
from gradientflow.errors import RecipeError

DENSITY = 0.1
WARM_UP_STEPS = 100


@dataclass
class Words:
    """
    >>> Words.read("csc", "5%:warmup=20:masking")
    Words(density=0.05, warmup=20, chunk=0, clip=0.0, masking=True, uncorrected=False)
    """

    density: float = DENSITY
    #: Steps.
    warmup: int = WARM_UP_STEPS
    #: Elements; 0: by the size of the pool.
    chunk: int = 0
    #: Of each tensor's gradient on one rank, before anything is added up; 0: none.
    clip: float = 0.0
    #: Clear momentum where something was sent.
    masking: bool = False
    #: Leave momentum to the optimizer.
    uncorrected: bool = False

    @classmethod
    def read(cls, name: str, argument: str) -> Words:
        found = cls()
        for word in argument.split(":") if argument else ():
            key, equals, value = word.partition("=")
            try:
                if not equals and key in ("masking", "uncorrected"):
                    setattr(found, key, True)
                elif not equals:
                    found.density = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
                elif key in ("warmup", "chunk"):
                    setattr(found, key, int(value))
                elif key == "clip":
                    found.clip = float(value)
                else:
                    raise ValueError
            except ValueError:
                raise RecipeError(
                    f"+{name} cannot read {word!r}: it takes a density such as 0.1 or 10%, warmup=STEPS, "
                    "chunk=ELEMENTS, clip=NORM, masking, uncorrected; with colons between them"
                ) from None
        if not 0 < found.density <= 1:
            raise RecipeError(f"+{name} sends a share of gradients above 0 and up to 1, found {found.density:g}")
        if found.warmup < 0 or found.chunk < 0 or not 0 <= found.clip < float("inf"):
            raise RecipeError(f"+{name}: warmup, chunk and clip are not below 0, found {argument!r}")
        if found.masking and found.uncorrected:
            raise RecipeError(f"+{name}: masking clears momentum that uncorrected does not keep; use one of them")
        return found


def csc(argument: str, wire: Cast | None) -> Feedback:
    words = Words.read("csc", argument)
    return Feedback(
        Csc(wire, words.chunk),
        WarmUp(words.density, words.warmup),
        corrects=not words.uncorrected,
        masks=words.masking,
        local_clip=words.clip,
    )
