"""A recipe: exchange x schedule x codec x synchronisation, and the one grammar for writing it.

    schedule[:argument] [-exchange[:lanes]] [+codec[:argument]]... [@sync[:argument]]

    lazy                      fuse up to 25 MB, the process group's own all-reduce
    lazy:4MB-a2a:1+fp16       4 MB, one lane, half precision on the wire
    lazy-ring                 our own ring over connections of our own
    lazy-mpi                  MPI's all-reduce, in a script that mpirun starts
    gradientflow              the GradientFlow paper's backend: lazy-ring+csc+fp16
    flow-ps+csc:0.1+fp16@ssp:4

The same text is used in calls, on the command line and in `recipe.toml`. Reading is separate from
judging: `Recipe.parse` accepts every sentence of the grammar, `Recipe.check` is the only place that says
which parts exist and which fit together.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from typing import Literal

from pydantic import ValidationError

from gradientflow.compress import CASTS, EXACT, KINDS, PARTS, Codec, Feedback
from gradientflow.cost.evaluate import even_stages
from gradientflow.cost.table import Best, Cost, Paying
from gradientflow.documents import Record, describe, read_text, write_text
from gradientflow.errors import DocumentError, RecipeError
from gradientflow.patterns import ALL_REDUCES, HALVES, QUICKEST
from gradientflow.plan import NATIVE, Message, Plan
from gradientflow.profiles import Profile
from gradientflow.schedule import DECOUPLED, FOR_A_GATE, PRICED, SCHEDULES, WITH_A_SIZE, Terms
from gradientflow.schedule.sizes import parse_nbytes
from gradientflow.sync import BSP, Sync

DEFAULT = "lazy"
#: All messages by this pattern.
PATTERNS = (*ALL_REDUCES, "levels")
#: a2a: the group's own all-reduce. mpi: MPI's. best: each message by what was measured to be quickest at its size.
EXCHANGES = ("a2a", "mpi", "best", *PATTERNS)
#: More would wait less and cost more: AdamW on 604 tensors takes 15 ms at once, 18 ms in twenties, 38 ms in pairs.
NUM_STAGES = 32
#: What each stage costs is to be less than a hundredth of the computing.
STAGE_S = 200e-6

# Names may hold dashes (mg-wfbp); the shortest match leaves a trailing -a2a or -ps to the exchange.
_NAME = r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*?"
_ARGUMENT = r"[A-Za-z0-9._%]+"
_WORDS = rf"{_ARGUMENT}(?:[:=]{_ARGUMENT})*"
_HEAD = re.compile(rf"({_NAME})(?::({_WORDS}))?(?:-({'|'.join(EXCHANGES)}|ps)(?::({_ARGUMENT}))?)?")
_CODEC = re.compile(rf"({_NAME})(?::({_WORDS}))?")
#: The paper's whole backend.
GRADIENTFLOW = "gradientflow"


class Choice(Record):
    """A name and what was written after its colon."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


class Recipe(Record):
    """The four choices.

    >>> recipe = Recipe.parse("lazy+fp16")
    >>> recipe.schedule.name, [codec.name for codec in recipe.codecs]
    ('lazy', ['fp16'])
    >>> str(Recipe.parse("gradientflow:5%"))
    'lazy-ring+csc:5%+fp16'
    >>> str(Recipe.parse("flow-ps+csc:0.1+fp16@ssp:4"))
    'flow-ps+csc:0.1+fp16@ssp:4'
    """

    schedule: Choice
    exchange: Choice = Choice(name="a2a")
    codecs: tuple[Choice, ...] = ()
    sync: Sync = BSP

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Read a recipe; raise `RecipeError` with what is wrong and where."""
        body, at, sync = text.partition("@")
        head, *codecs = body.split("+")
        matched = _HEAD.fullmatch(head)
        if matched is None:
            raise _unreadable(text, f"{head!r} is not a schedule", "a name such as lazy, lazy:4MB or lazy-a2a")
        schedule, argument, exchange, exchange_argument = matched.groups(default="")
        chosen = tuple(_codec(text, codec) for codec in codecs)
        if schedule == GRADIENTFLOW:
            chosen = (Choice(name="csc", argument=argument), *(chosen or (Choice(name="fp16"),)))
            schedule, argument, exchange = DEFAULT, "", exchange or "ring"
        return cls(
            schedule=Choice(name=schedule, argument=argument),
            exchange=Choice(name=exchange or "a2a", argument=exchange_argument),
            codecs=chosen,
            sync=Sync.parse(sync) if at else BSP,
        )

    def __str__(self) -> str:
        exchange = "" if self.exchange == Choice(name="a2a") else f"-{self.exchange}"
        codecs = "".join(f"+{codec}" for codec in self.codecs)
        sync = "" if self.sync == BSP else f"@{self.sync}"
        return f"{self.schedule}{exchange}{codecs}{sync}"

    def check(self) -> Recipe:
        """Raise `RecipeError` unless every part exists and the parts fit together. Returns itself."""
        if self.sync.staleness and self.exchange.name != "ps":
            raise self._illegal(f"@{self.sync} lets workers drift apart, which needs a server", "-ps, or @bsp")
        if self.exchange.name == "ps" and self.exchange.argument:
            raise self._illegal("-ps takes no argument", "-ps")
        if self.exchange.argument and not re.fullmatch("[1-9]|1[0-6]", self.exchange.argument):
            lanes = f"-{self.exchange.name}:1 to -{self.exchange.name}:16"
            raise self._illegal(f"{self.exchange.argument!r} is not a number of lanes", lanes)
        casts = [codec.name for codec in self.codecs if codec.name in CASTS]
        if len(casts) > 1:
            raise self._illegal(f"{' and '.join(casts)} are both wire precisions", "one of them")
        if casts and self.codecs[-1].name != casts[0]:
            raise self._illegal(f"+{casts[0]} must come last: it packs what the others send", "it at the end")
        schedule, _, exchange = self.schedule.name.rpartition("-")
        if schedule in {*SCHEDULES, *PRICED} and self.schedule.name not in PRICED:
            self._exists("exchange", exchange, list(EXCHANGES))
        self._exists("schedule", self.schedule.name, [*SCHEDULES, *PRICED])
        if self.schedule.name in PRICED and self.schedule.argument:
            if self.schedule.name not in WITH_A_SIZE:
                raise self._illegal(f"{self.schedule.name} takes no argument", self.schedule.name)
            if not parse_nbytes(self.schedule.argument):
                raise self._illegal("a partition of no bytes", f"{self.schedule.name}:4MB")
        self._exists("exchange", self.exchange.name, list(EXCHANGES))
        if self.schedule.name in DECOUPLED:
            if self.exchange.name not in ("a2a", "ring"):
                raise self._illegal(f"{self.schedule.name} has two halves, which only a ring has", "-a2a or -ring")
            if self.codecs:
                raise self._illegal(f"{self.schedule.name} sends gradients as they are", str(self.schedule))
        for choice in self.codecs:
            self._exists("codec", choice.name, [*CASTS, *PARTS])
        if len(self.codecs) - len(casts) > 1:
            raise self._illegal("a codec is to send a part of what another sends", "one of them")
        if self.sync != BSP:
            raise self._illegal(f"@{self.sync} is not available in this version", "@bsp")
        self.plan(Profile(tensors=()), num_lanes=1)
        self.codec()
        return self

    @property
    def needs_cost(self) -> bool:
        """Whether planning looks at what messages cost."""
        return self.schedule.name in PRICED or self.exchange.name == "best" or self.weighs

    @property
    def weighs(self) -> bool:
        """Whether its codec is for messages only for which it pays."""
        codec = self.codec()
        return isinstance(codec, Feedback) and not codec.always

    @property
    def patterns(self) -> tuple[str, ...]:
        """By which patterns messages may be carried, beside the group's own all-reduce."""
        if self.schedule.name in DECOUPLED:
            return (*HALVES, QUICKEST, *(["ring"] if self.exchange.name == "ring" else []))
        if self.exchange.name == "best":
            return PATTERNS
        if self.exchange.name not in PATTERNS:
            return ()
        small = [QUICKEST] if isinstance(self.codec(), Feedback) else []
        return tuple(dict.fromkeys([self.exchange.name, *small]))

    @property
    def mesh(self) -> bool:
        """Whether ranks may have something for each of the others."""
        return isinstance(self.codec(), Feedback)

    @property
    def over_mpi(self) -> bool:
        return self.exchange.name == "mpi"

    @property
    def wants_gate(self) -> bool:
        """Whether the schedule is made for a forward pass that waits layer by layer."""
        return self.schedule.name in FOR_A_GATE

    def plan(
        self, profile: Profile, num_lanes: int, cost: Cost | None = None, *, gated: bool = False, whole: bool = False
    ) -> Plan:
        """The schedule's plan for `profile`, dealt over lanes. One that needs to know costs is `lazy` until they are
        known. With a gate it says what that waits for; if steps are `whole`, because something looks at all gradients
        before each of them, it waits for everything all the same."""
        compute_s = profile.forward_s + profile.backward_s
        num_stages = max(4, min(NUM_STAGES, int(compute_s / 100 / STAGE_S)))
        stages = even_stages(profile, num_stages) if gated else ()
        if self.schedule.name not in PRICED:
            plan = SCHEDULES[self.schedule.name](profile, self.schedule.argument)
        elif cost is None:
            plan = SCHEDULES["lazy"](profile, "").model_copy(
                update={"schedule": f"{self.schedule.name}, not yet priced"}
            )
        else:
            terms = Terms(cost, num_lanes, gated, whole, stages)
            plan = PRICED[self.schedule.name](profile, self.schedule.argument, terms)
        plan = self._carried(plan.on_lanes(num_lanes), profile, cost).model_copy(update={"stages": stages})
        plan.check(profile)
        return plan

    def _carried(self, plan: Plan, profile: Profile, cost: Cost | None) -> Plan:
        """Each message by its pattern, and by the codec if that pays."""
        itemsizes = {tensor.name: tensor.torch_dtype.itemsize for tensor in profile.tensors}

        def nbytes(message: Message) -> int:
            return message.numel * itemsizes[message.slices[0].tensor]

        if isinstance(cost, Paying):
            paying, cost = cost, cost.dense
            plan = plan.compressed_if(lambda message: paying.pays(nbytes(message)))
        if self.exchange.name in PATTERNS and not plan.gathers:
            return plan.carried_by(lambda message: self.exchange.name)
        if not isinstance(cost, Best):
            return plan
        best = cost
        return plan.carried_by(
            lambda message: NATIVE if self.weighs and not message.dense else best.pick(nbytes(message))
        )

    def codec(self) -> Codec:
        """A new one: it may remember."""
        wires = [CASTS[choice.name](choice.argument) for choice in self.codecs if choice.name in CASTS]
        wire = wires[0] if wires else None
        parts = [PARTS[choice.name](choice.argument, wire) for choice in self.codecs if choice.name in PARTS]
        return parts[0] if parts else wire or EXACT

    def settled(self) -> Recipe:
        """As it runs in the long run: without warm-up, at the density that a guard ends with."""
        return self.model_copy(update={"codecs": tuple(_settled(choice) for choice in self.codecs)})

    @property
    def lanes(self) -> int:
        """How many lanes the recipe asks for; 0 leaves it to the exchange."""
        return int(self.exchange.argument or 0)

    def _exists(self, part: str, name: str, known: list[str]) -> None:
        if name not in known:
            raise self._illegal(f"there is no {part} {name!r} in this version", " or ".join(known))

    def _illegal(self, why: str, instead: str) -> RecipeError:
        return RecipeError(f"recipe {str(self)!r}: {why}; use {instead}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """A `recipe.toml`: `version = 1` and `recipe = "..."`."""
        try:
            file = _File.model_validate(tomllib.loads(read_text(path)))
            return cls.parse(file.recipe)
        except tomllib.TOMLDecodeError as error:
            raise DocumentError(f"{path}: expected TOML; {error}") from None
        except ValidationError as error:
            raise DocumentError(f"{path}: {describe(error)}") from None
        except RecipeError as error:
            raise DocumentError(f"{path}: field recipe: {error}") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        write_text(path, f"version = 1\nrecipe = {json.dumps(str(self))}\n")


class _File(Record):
    version: Literal[1]
    recipe: str


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A checked recipe from either form."""
    if not isinstance(recipe, Recipe | str):
        raise RecipeError(f"expected a recipe such as 'lazy', found {recipe!r}")
    return (Recipe.parse(recipe) if isinstance(recipe, str) else recipe).check()


def _settled(codec: Choice) -> Choice:
    if codec.name not in KINDS or "warmup" not in KINDS[codec.name].takes:
        return codec
    words = [word for word in codec.argument.split(":") if word and not word.startswith("guard=")]
    return codec.model_copy(update={"argument": ":".join([*words, "warmup=0"])})


def _codec(text: str, codec: str) -> Choice:
    matched = _CODEC.fullmatch(codec)
    if matched is None:
        raise _unreadable(text, f"{codec!r} is not a codec", "a name such as +fp16 or +csc:0.1")
    name, argument = matched.groups(default="")
    return Choice(name=name, argument=argument)


def _unreadable(text: str, why: str, expected: str) -> RecipeError:
    return RecipeError(f"cannot read recipe {text!r}: {why}; expected {expected}")
