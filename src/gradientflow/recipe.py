"""A recipe: exchange x schedule x codec x synchronisation, and the one grammar for writing it.

    schedule[:argument] [-exchange[:lanes]] [+codec[:argument]]... [@sync[:argument]]

    lazy                      fuse up to 25 MB, the process group's own all-reduce
    lazy:4MB-a2a:1+fp16       4 MB, one lane, half precision on the wire
    lazy-ring                 our own ring over connections of our own
    lazy-mpi                  MPI's all-reduce, in a script that mpirun starts
    bytescheduler-ps          servers add up, beside the workers; -ps:4 with four servers on hosts of their own
    gradientflow              the GradientFlow paper's backend: lazy-ring+csc+fp16
    flow-ps+csc:0.1+fp16@ssp:4

The same text is used in calls, on the command line and in `recipe.toml`, which may also pin the plan. Reading is
separate from judging: `Recipe.parse` accepts every sentence of the grammar, `Recipe.check` is the only place that
says which parts exist and which fit together.
"""

from __future__ import annotations

import json
import os
import re
from typing import Literal

import torch
from pydantic import ValidationError

from gradientflow.compress import CASTS, EXACT, KINDS, PARTS, Codec, Feedback, imagined, summed_nbytes
from gradientflow.cost.evaluate import Stages, even_stages
from gradientflow.cost.table import Best, Cost, Encoded, Paying, Steps
from gradientflow.documents import MAX_TOML_NBYTES, Record, describe, parse_data, read_text, write_text
from gradientflow.errors import DocumentError, RecipeError, UsageError
from gradientflow.patterns import ALL_REDUCES, HALVES, QUICKEST
from gradientflow.plan import NATIVE, Message, Plan
from gradientflow.profiles import Profile
from gradientflow.schedule import DECOUPLED, FOR_A_GATE, PRICED, SCHEDULES, WITH_A_SIZE, Terms
from gradientflow.schedule.sizes import parse_nbytes
from gradientflow.sync import BSP, Sync

DEFAULT = "lazy"
#: All messages by this pattern.
PATTERNS = (*ALL_REDUCES, "levels")
#: Of these, `auto` tries which is quickest.
TRIED = ("ring", "halving")
#: a2a: the group's own all-reduce. mpi: MPI's. best: each message by what was measured to be quickest at its size. ps:
#: through servers.
EXCHANGES = ("a2a", "mpi", "best", "ps", *PATTERNS)
#: What a server can decode that keeps parameters, and adds deltas to them.
DELTA_CODECS = frozenset({"fp16", "bf16", "int8"})
#: More would wait less and cost more: AdamW on 604 tensors takes 15 ms at once, 18 ms in twenties, 38 ms in pairs.
NUM_STAGES = 32
#: What each stage costs is to be less than a hundredth of the computing.
STAGE_S = 200e-6

# Names may hold dashes (mg-wfbp); the shortest match leaves a trailing -a2a or -ps to the exchange.
_NAME = r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*?"
_ARGUMENT = r"[A-Za-z0-9._%]+"
_WORDS = rf"{_ARGUMENT}(?:[:=]{_ARGUMENT})*"
_HEAD = re.compile(rf"({_NAME})(?::({_WORDS}))?(?:-({'|'.join(EXCHANGES)})(?::({_ARGUMENT}))?)?")
_CODEC = re.compile(rf"({_NAME})(?::({_WORDS}))?")
#: The paper's whole backend.
GRADIENTFLOW = "gradientflow"
#: Measures, tries and chooses by itself, ...
AUTO = "auto"
#: ... and, where lossy recipes are allowed, by this codec what it pays for.
GUARDED = "topk:1%:sampled:guard=2%"


class Choice(Record):
    """A name and what was written after its colon."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


class Recipe(Record):
    """The four choices: schedule, exchange, codecs and synchronisation, as one text.

    `parse` reads any that is well formed, `check` says whether there is such a one here. Two that are written alike are
    equal, and `str` gives the text back.

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
    #: Made elsewhere, by `gradientflow tune`: runs in place of what the schedule would plan here.
    pinned: Plan | None = None

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
        if self.sync.staleness and not self.served:
            raise self._illegal(f"@{self.sync} lets workers drift apart, which needs a server", "-ps, or @bsp")
        if self.served and not re.fullmatch("|[1-9][0-9]{0,2}", self.exchange.argument):
            raise self._illegal(f"{self.exchange.argument!r} is not a number of servers", "-ps, or -ps:1 to -ps:999")
        if self.exchange.argument and not self.served and not re.fullmatch("[1-9]|1[0-6]", self.exchange.argument):
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
        if self.pinned is not None:
            self._check_pinned(self.pinned)
        if self.tunes:
            return self._check_auto()
        self._exists("schedule", self.schedule.name, [*SCHEDULES, *PRICED, AUTO])
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
        self.model_copy(update={"pinned": None}).plan(Profile(tensors=()), num_lanes=1)
        self.codec()
        if self.sync.deltas:
            self._check_deltas()
        return self

    def _check_auto(self) -> Recipe:
        if self.exchange != Choice(name="a2a") or self.schedule.argument:
            raise self._illegal("auto chooses schedule and exchange by itself", AUTO)
        codec = self.codec()
        if self.sync.deltas or (isinstance(codec, Feedback) and (codec.guard is None or codec.always)):
            raise self._illegal(
                "auto chooses among recipes that train as DDP does, or under a guard",
                f"{AUTO}, {AUTO}+bf16 or {AUTO}+{GUARDED}",
            )
        return self

    def _check_pinned(self, plan: Plan) -> None:
        if self.tunes or self.sync.deltas:
            why = "auto makes its own plans" if self.tunes else f"@{self.sync} sends no gradients"
            raise self._illegal(f"{why}, and a plan is pinned", "another recipe, or leave the plan out")
        if bool(plan.gathers) != (self.schedule.name in DECOUPLED):
            raise self._illegal(f"the pinned plan is {plan.schedule}'s", "the recipe that it was made for")
        strange = {message.pattern for message in plan.messages} - {NATIVE, *self.patterns}
        if strange:
            raise self._illegal(f"the pinned plan goes by {', '.join(sorted(strange))}", "the recipe it was made for")

    @property
    def tunes(self) -> bool:
        """Whether what it runs is decided by trying."""
        return self.schedule.name == AUTO

    def lossy(self) -> Recipe:
        """`auto` that may compress, under a guard; with a codec of its own, itself."""
        return self if self.codecs else self.model_copy(update={"codecs": (_codec(AUTO, GUARDED),)})

    def _check_deltas(self) -> None:
        """What is made for gradients is not for what parameters have changed by."""
        sync = self.sync
        if self.schedule.name not in SCHEDULES:
            raise self._illegal(
                f"{self.schedule.name} plans by when backward yields gradients, and @{sync} sends none",
                " or ".join(SCHEDULES),
            )
        if self.exchange.name == "best":
            raise self._illegal("-best is measured for gradients", "-a2a, -ring or another pattern")
        if isinstance(self.codec(), Feedback) and sync.fragments > 1:
            raise self._illegal(
                f"whether a round counts is known when all of it has arrived, with {self.codecs[0].name}", "fragments=1"
            )
        if sync.moments == "average" and sync.fragments > 1:
            raise self._illegal("state=average takes all moments at once", "fragments=1, or state=keep")
        if not self.served:
            return
        names = [choice.name for choice in self.codecs]
        if len(names) > 1 or not set(names) <= DELTA_CODECS:
            codecs = " or ".join(f"+{name}" for name in sorted(DELTA_CODECS))
            raise self._illegal(f"servers keep parameters under @{sync} and cannot read +{'+'.join(names)}", codecs)
        for words, said in (
            (f"start={sync.start}", sync.start),
            (f"fragments={sync.fragments}", sync.fragments > 1),
            (f"delay={sync.delay}", sync.delay),
            ("state=average", sync.moments == "average"),
        ):
            if said:
                raise self._illegal(f"{words} is for workers in lockstep", "-a2a or -ring, or leave it out")

    @property
    def needs_cost(self) -> bool:
        """Whether planning looks at what messages cost."""
        if self.pinned is not None:
            return False
        return self.schedule.name in PRICED or self.exchange.name == "best" or self.weighs or self.tunes

    @property
    def weighs(self) -> bool:
        """Whether its codec is for messages only for which it pays."""
        codec = self.codec()
        return isinstance(codec, Feedback) and not codec.always and not self.sync.deltas

    @property
    def patterns(self) -> tuple[str, ...]:
        """By which patterns messages may be carried, beside the group's own all-reduce."""
        if self.schedule.name in DECOUPLED:
            return (*HALVES, QUICKEST, *(["ring"] if self.exchange.name == "ring" else []))
        if self.exchange.name == "best":
            return PATTERNS
        if self.tunes:
            return () if isinstance(self.codec(), Feedback) else TRIED
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
        """Whether sums are made by MPI."""
        return self.exchange.name == "mpi"

    @property
    def served(self) -> bool:
        """Whether sums are made by servers."""
        return self.exchange.name == "ps"

    @property
    def num_servers(self) -> int:
        """On hosts of their own."""
        return int(self.exchange.argument or 0) if self.served else 0

    @property
    def wants_gate(self) -> bool:
        """Whether the schedule is made for a forward pass that waits layer by layer."""
        return self.schedule.name in FOR_A_GATE or self.tunes

    def plan(
        self,
        profile: Profile,
        num_lanes: int,
        cost: Cost | None = None,
        *,
        gated: bool = False,
        whole: bool = False,
        words: bool = True,
    ) -> Plan:
        """The schedule's plan for `profile`, dealt over lanes. One that needs to know costs is `lazy` until they are
        known. With a gate it says what that waits for; if steps are `whole`, because something looks at all gradients
        before each of them, it waits for everything all the same. `words=False` is for those who compare plans, and
        look only at what they do."""
        compute_s = profile.forward_s + profile.backward_s
        num_stages = max(4, min(NUM_STAGES, int(compute_s / 100 / STAGE_S)))
        stages = even_stages(profile, num_stages) if gated else ()
        if self.pinned is not None:
            return self._as_pinned(self.pinned, profile, num_lanes, stages, norms=gated and whole)
        if self.tunes:
            plan = SCHEDULES[DEFAULT](profile, "")
        elif self.schedule.name not in PRICED:
            plan = SCHEDULES[self.schedule.name](profile, self.schedule.argument)
        elif cost is None:
            plan = SCHEDULES["lazy"](profile, "").model_copy(
                update={"schedule": f"{self.schedule.name}, not yet priced"}
            )
        else:
            terms = Terms(cost, num_lanes, gated, whole, stages, words)
            plan = PRICED[self.schedule.name](profile, self.schedule.argument, terms)
        plan = self._carried(plan.on_lanes(num_lanes), profile, cost).model_copy(update={"stages": stages})
        plan.check(profile)
        return plan

    def _as_pinned(self, pinned: Plan, profile: Profile, num_lanes: int, stages: Stages, *, norms: bool) -> Plan:
        """What was pinned, with stages if there is a gate here."""
        update = {"stages": stages and (pinned.stages or stages), "norms": norms and bool(pinned.gathers)}
        plan = pinned.on_lanes(num_lanes).model_copy(update=update)
        try:
            plan.check(profile)
        except ValueError as error:
            raise UsageError(
                f"the plan that recipe '{self}' pins is of another model: {error}. Tune with this model's profile, or "
                "leave the line `plan = ...` out of the recipe's file"
            ) from None
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

    def priced(self, cost: Cost, world: int, touch_s_per_byte: float, encode_s_per_byte: float | None = None) -> Cost:
        """What messages take that cost so much as they are: what its codec leaves of their bytes, and the codec's own
        computing; where that is for messages only for which it pays, both ways.

        encode_s_per_byte: that computing, if it was measured; else it follows from what the codec touches."""
        codec = self.codec()
        if codec is EXACT:
            return cost
        probe = imagined([(1024, 1024)], torch.float32)
        traffic = codec.traffic(probe, world)
        fraction = traffic.sent_nbytes / max(1.0, summed_nbytes(probe.nbytes, world))
        if encode_s_per_byte is None:
            encode_s_per_byte = traffic.touched_nbytes / probe.nbytes * touch_s_per_byte
        encoded = Encoded(Steps(cost, 1, fraction), encode_s_per_byte)
        return Paying(encoded, cost, cost) if self.weighs else encoded

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
        return 0 if self.served else int(self.exchange.argument or 0)

    def _exists(self, part: str, name: str, known: list[str]) -> None:
        if name not in known:
            raise self._illegal(f"there is no {part} {name!r} in this version", " or ".join(known))

    def _illegal(self, why: str, instead: str) -> RecipeError:
        return RecipeError(f"recipe {str(self)!r}: {why}; use {instead}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """A `recipe.toml`: `version = 1`, `recipe = "..."` and, if a plan is pinned, `plan = "plan.json"` beside it."""
        data = parse_data(read_text(path, MAX_TOML_NBYTES), str(path), "TOML")
        try:
            file = _File.model_validate(data)
            recipe = cls.parse(file.recipe)
        except ValidationError as error:
            raise DocumentError(f"{path}: {describe(error)}") from None
        except RecipeError as error:
            raise DocumentError(f"{path}: field recipe: {error}") from None
        if not file.plan:
            return recipe
        return recipe.model_copy(update={"pinned": Plan.read(os.path.join(os.path.dirname(path), file.plan))})

    def write(self, path: str | os.PathLike[str]) -> None:
        """What `read` reads. A pinned plan is written beside it, as `plan.json`."""
        text = f"version = 1\nrecipe = {json.dumps(str(self))}\n"
        if self.pinned is not None:
            self.pinned.write(os.path.join(os.path.dirname(path), _PLAN))
            text += f"plan = {json.dumps(_PLAN)}\n"
        write_text(path, text)


_PLAN = "plan.json"


class _File(Record):
    version: Literal[1]
    recipe: str
    plan: str = ""


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A checked recipe from either form, or from its file: "recipe.toml"."""
    if not isinstance(recipe, Recipe | str):
        raise RecipeError(f"expected a recipe such as 'lazy', found {recipe!r}")
    if isinstance(recipe, Recipe):
        return recipe.check()
    if not recipe.endswith(".toml"):
        return Recipe.parse(recipe).check()
    try:
        return Recipe.read(recipe).check()
    except RecipeError as error:
        raise RecipeError(f"{recipe}: {error}") from None


def _settled(codec: Choice) -> Choice:
    if codec.name not in KINDS or "warmup" not in KINDS[codec.name].takes:
        return codec
    words = [word for word in codec.argument.split(":") if word and not word.startswith("guard=")]
    return codec.model_copy(update={"argument": ":".join([*words, "warmup=0"])})


def _codec(text: str, codec: str) -> Choice:
    matched = _CODEC.fullmatch(codec)
    if matched is None:
        known, _, argument = codec.partition(":")
        if known not in KINDS:
            raise _unreadable(text, f"{codec!r} is not a codec", "a name such as +fp16 or +csc:0.1")
        try:
            KINDS[known].read(known, argument)
        except RecipeError as error:
            raise RecipeError(f"cannot read recipe {text!r}: {error}") from None
        raise _unreadable(text, f"{argument!r} is not written as +{known} takes it", "numbers such as 0.001, 10% or 5")
    name, argument = matched.groups(default="")
    return Choice(name=name, argument=argument)


def _unreadable(text: str, why: str, expected: str) -> RecipeError:
    return RecipeError(f"cannot read recipe {text!r}: {why}; expected {expected}")
