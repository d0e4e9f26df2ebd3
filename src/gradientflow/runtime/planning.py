"""Which plan a flow runs next.

The first steps show in which order gradients come and how long that takes; a plan is made of it. It is made anew when
training has become another (runtime/replanning.py), and under `auto` several are raced (runtime/tuning.py). Nothing of
that is one rank's own affair: what says "collective" is called by all ranks at the same step, and they all get the same
plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gradientflow.compress import EXACT, Codec, Feedback
from gradientflow.cost.table import Best, Cost, Paying, Priced
from gradientflow.documents import parse_json
from gradientflow.errors import UsageError
from gradientflow.exchange import Exchange
from gradientflow.patterns import scatter_of
from gradientflow.plan import NATIVE, Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import DEFAULT, Recipe, as_recipe
from gradientflow.runtime.fingerprint import compare, describe_plan
from gradientflow.runtime.pricing import TooDear, measure_cost, measure_paying
from gradientflow.runtime.replanning import Replanning
from gradientflow.runtime.tuning import Tuning, read_field, write_field
from gradientflow.trace import Recorder
from gradientflow.tune.candidates import Candidate, rivals
from gradientflow.tune.memory import Cache
from gradientflow.tune.notes import Notes, Race

_log = logging.getLogger(__name__)

#: Of schedules that go by time: the first pass through a model takes longer than those after it.
OBSERVED_STEPS = 3
#: So many times as long as timing messages takes timing them with a codec, too.
PAYING_TIMES = 4.0


class Observed(NamedTuple):
    """What a flow knows of itself when plans are made."""

    step: int
    profile: Profile
    #: That runs.
    plan: Plan
    #: Of all gradients.
    nbytes: int
    device: torch.device
    #: Whether forward passes can wait layer by layer.
    gated: bool
    #: Whether workers come and go.
    changes: bool


class Saved(NamedTuple):
    """What a state says of plans."""

    plan: Plan
    is_settled: bool
    #: Who was to race with a codec and without.
    rivals: tuple[Candidate, ...] = ()
    race: Race | None = None


class Planning:
    """Of one flow, over one exchange.

    observes: whether the plan that runs first is a guess.
    note: called with what is to be known of costs and races, whenever that changes.
    written: called with each plan that was made, and what of."""

    def __init__(
        self,
        recipe: Recipe,
        codec: Codec,
        exchange: Exchange,
        recorder: Recorder,
        cache: Cache | None,
        *,
        observes: bool,
        by_time: bool,
        note: Callable[[Notes], None],
        written: Callable[[Profile, Plan], None],
    ) -> None:
        self._recipe, self._codec, self._exchange, self._recorder = recipe, codec, exchange, recorder
        self._cache, self._note, self._written = cache, note, written
        self._observes, self._num_to_observe = observes, OBSERVED_STEPS if by_time else 1
        self._replanning = Replanning()
        self._cost: Cost | None = None
        self._next: Plan | None = None
        self._same: Plan | None = None  # as what runs, until something else does
        self.observe()

    def observe(self) -> None:
        """From now on, if plans are made of what is seen at all."""
        self.is_observing, self._num_observed = self._observes, 0
        self._asked_early = False  # for another plan, as was learnt when other ranks might be anywhere
        self._step_s = math.inf  # the shortest
        self._tuning = Tuning(self._recorder, self._cache, self._note)

    @property
    def notes(self) -> Notes:
        return self._tuning.notes

    @property
    def is_trying(self) -> bool:
        return self._tuning.is_racing or self._tuning.is_waiting or self._tuning.is_on_probation

    def take(self) -> Plan | None:
        """What is to be laid out now, if that is another plan."""
        plan, self._next = self._next, None
        if plan is not None:
            self._same = None
        return plan

    def put(self, plan: Plan) -> None:
        """To be laid out next."""
        self._next = plan

    # - States

    def state_dict(self, runs: Plan) -> dict[str, Any]:
        """A plan that is only a guess yet, or one of several that are being tried, is not to be kept for ever."""
        tuning = self._tuning
        settled = not (self.is_observing or tuning.is_put_off or (tuning.is_racing and not tuning.rivals))
        found = {"plan": (self._next or runs).model_dump_json(), "settled": settled}
        if tuning.rivals:
            found["rivals"] = write_field(tuning.rivals)
        elif settled and tuning.notes.races:
            found["race"] = tuning.notes.races[-1].model_dump_json()
        return found

    def read(self, state: Mapping[str, Any], profile: Profile) -> Saved | None:
        """Collective. None: it says nothing that holds here."""
        plan = parse_json(Plan, state["plan"], "the saved plan")
        if self._recipe.tunes and (strange := self._strange_ways(plan)):
            # It won where ranks reached each other by connections of our own: chosen anew where they do not.
            if self._exchange.rank == 0:
                _log.warning("the saved plan goes by %s, which there is not here: auto chooses anew", min(strange))
            compare(self._exchange.control, describe_plan(plan))
            return None
        field: tuple[Candidate, ...] = ()
        if "rivals" in state and self._weighs_by_trial:
            field = tuple(
                each.model_copy(update={"plan": self._as_here(each.plan, profile)})
                for each in read_field(state["rivals"], "the saved plans that were to be tried")
            )
        here = self._as_here(plan, profile)
        same = describe_plan(plan) | {f"rival {n}": each.plan.digest for n, each in enumerate(field)}
        compare(self._exchange.control, same)
        race = parse_json(Race, state["race"], "the saved race") if "race" in state else None
        return Saved(here, state.get("settled", True), field, race)

    def go_on(self, saved: Saved, profile: Profile) -> None:
        """With what was found to be best, or where it was not yet found."""
        self.observe()
        self.is_observing = self._observes and not saved.is_settled
        plan = saved.plan
        if self.is_observing and plan.stages:  # what arrives under the forward pass is not observed
            plan = self._recipe.plan(profile, self._exchange.num_lanes)
        self.put(plan)
        self._tuning.wait_with(saved.rivals)
        if saved.race is not None:
            self._tuning.remember(saved.race)

    def _as_here(self, plan: Plan, profile: Profile) -> Plan:
        """One that was saved. Lanes are this world's own affair: a state saved on another backend may count others."""
        plan = plan.on_lanes(self._exchange.num_lanes)
        try:
            plan.check(profile)
        except ValueError as error:
            raise UsageError(f"the state was saved for another model: {error}") from None
        if strange := self._strange_ways(plan):
            raise UsageError(f"the saved plan goes by {min(strange)!r:.40}, which '{self._recipe}' does not")
        return plan

    def _strange_ways(self, plan: Plan) -> set[str]:
        """Patterns that messages cannot be carried by here."""
        goes_by = {message.pattern for message in plan.messages} - {NATIVE}
        return {scatter_of(name) if plan.gathers else name for name in goes_by} - {*self._exchange.patterns}

    # - Steps

    def stood(self, idle_s: float, step_s: float) -> None:
        """Of the last step, a lane stood for so long before a message that was not ready."""
        self._replanning.stood(idle_s, step_s)

    def saw(self, whole: bool) -> None:
        """Something looked at all gradients before the optimizer's step."""
        self._replanning.saw(whole)

    def stand_apart(self) -> None:
        """Between this step and the next one, something other than training is done."""
        self._tuning.stand_apart()

    def step_begins(
        self,
        observe: Callable[[], Observed],
        runs: Plan,
        step: int,
        before_s: float,
        now_s: float,
        *,
        is_settled: bool,
    ) -> bool:
        """Collective where plans are made or compared; returns whether they were made. before_s: when the step before
        began; 0.0: there was none. is_settled: a codec does what it will do in the long run."""
        if before_s:  # a first step takes longer, and some after it
            self._step_s = min(self._step_s, now_s - before_s)
        was_asked, self._asked_early = self._asked_early, False
        if was_asked:
            self._plan_anew(observe())
            now_s = self._recorder.clock()
        if self._tuning.is_waiting and is_settled:
            self._tuning.race(step)
        if not self._tuning.is_on:
            return was_asked
        holds_no_longer = self._tuning.step_began(self._exchange, step, before_s, now_s)
        if holds_no_longer:
            self._plan_anew(observe())
        self._run(self._tuning.plan_at(step), runs)
        return was_asked or holds_no_longer

    def _run(self, plan: Plan, runs: Plan) -> None:
        """Nothing is laid out anew for a plan that is the same. To find that out takes a microsecond a slice, so of
        each plan it is found out once."""
        self._next = None
        if plan is runs or plan is self._same:
            return
        if plan == runs:
            self._same = plan
        else:
            self._next = plan

    def asks(self, step: int, *, is_shut: bool) -> bool:
        """Whether this rank would have another plan. is_shut: the gate that it was made for is no longer there."""
        if not self._recipe.needs_cost or self.is_observing:
            return False
        if self._tuning.is_on:
            return bool(self._tuning.wish(step))
        return self._replanning.wanted(step, shut=is_shut)

    def heard_early(self, step: int, somebody_asks: bool) -> None:
        """Ranks learn it at different moments, and one may wait for another meanwhile: they plan at the next step."""
        self._asked_early = somebody_asks or self._tuning.is_due(step)

    def step_ended(self, observe: Callable[[], Observed], step: int, somebody_asks: bool) -> None:
        """Collective where plans are made."""
        if self.is_observing:
            self._num_observed += 1  # by who has run out of inputs, too: ranks agree on when to meet
            if self._num_observed == 1 and self._recall(observe):
                self.is_observing = False
            elif self._num_observed >= self._num_to_observe:
                self._plan_anew(observe())
        elif somebody_asks or self._tuning.is_due(step):
            self._plan_anew(observe())

    # - Plans

    def _recall(self, observe: Callable[[], Observed]) -> bool:
        """Collective, at the end of the first step: whether a plan is remembered that may be as good as it was."""
        if not self._recipe.tunes:
            return False
        now = observe()
        facts = (str(self._recipe), now.device.type, now.step, now.gated)
        if not self._tuning.recall(self._exchange, now.profile, *facts):
            return False
        self._compare_compute(now.profile, None, False)
        self._next = self._tuning.plan_at(now.step)
        self._written(now.profile, self._next)
        return True

    def _plan_anew(self, now: Observed) -> None:
        """Collective, when every rank is here: at the end of the first exchanged backward passes, or when somebody
        has asked for it."""
        self.is_observing = False
        if self._tuning.is_on:
            if not self._tuning.heed(self._exchange, now.step):
                self._next = self._tuning.plan_at(now.step)
                return
            self._cost = None  # that is why there is another race
        plan = self._raced(now) if self._recipe.tunes else self._planned(now)
        if plan is None:
            return
        compare(self._exchange.control, describe_plan(plan))
        if plan != now.plan:
            self._next = plan
        self._written(now.profile, plan)

    def _planned(self, now: Observed) -> Plan:
        """Collective. One rank's plan, not one rank's profile: the last digit of a logarithm is the processor's own
        affair. The slowest rank's: all wait for its gradients, whatever their own times are."""
        exchange, recipe, price = self._exchange, self._recipe, self.notes.price
        if recipe.needs_cost and self._cost is None:
            measured = self._measure_cost(now)
            assert isinstance(measured, Priced), "no limit was given"
            price = measured
        whole = self._replanning.agreed(now.step)
        planner = self._compare_compute(now.profile, price, whole)
        if isinstance(self._cost, Paying) and self._weighs_by_trial and not now.changes:
            found: tuple[Candidate, ...] = ()
            if exchange.rank == planner:
                found = rivals(recipe, now.profile, exchange.num_lanes, self._cost, gated=now.gated, whole=whole)
            return self._tuning.prepare(exchange, planner, now.profile, found)
        own = ""
        if exchange.rank == planner:
            own = recipe.plan(
                now.profile, exchange.num_lanes, self._cost, gated=now.gated, whole=whole
            ).model_dump_json()
        heard = exchange.control.from_rank(planner, own, f"hear rank {planner}'s plan")
        plan = parse_json(Plan, heard, f"rank {planner}'s plan")
        plan.check(now.profile)
        return plan

    def _raced(self, now: Observed) -> Plan | None:
        """Collective. Begins a race, unless that would cost more than it may. None: what runs goes on."""
        exchange, tuning, began_s = self._exchange, self._tuning, self._recorder.clock()
        budget = tuning.budget(exchange, self._step_s)
        price = self._measure_cost(now, budget.pricing_s)
        whole = self._replanning.agreed(now.step)
        planner = self._compare_compute(now.profile, self.notes.price if isinstance(price, TooDear) else price, whole)
        if isinstance(price, TooDear):
            default = as_recipe(DEFAULT).plan(now.profile, exchange.num_lanes)
            if self._recipe.weighs:  # not known to pay for any message
                default = default.compressed_if(lambda message: False)
            tuning.put_off(exchange, planner, now.profile, default, budget, price, now.step, began_s)
        else:
            assert isinstance(self._cost, Best | Paying)
            facts = (now.profile, self._cost, now.step, budget, began_s)
            tuning.begin(exchange, planner, *facts, gated=now.gated, whole=whole)
        return tuning.plan_at(now.step) if tuning.is_on else None

    @property
    def _weighs_by_trial(self) -> bool:
        """Whether real steps tell if a codec pays, where prices do not. Not under a guard, whose densities are others
        in each step."""
        codec, recipe = self._codec, self._recipe
        return isinstance(codec, Feedback) and recipe.weighs and not recipe.tunes and codec.guard is None

    def _compare_compute(self, observed: Profile, price: Priced | None, whole: bool) -> int:
        """Collective. Who computes slowest."""
        mine = repr(observed.forward_s + observed.backward_s)
        found = [float(text) for text in self._exchange.control.gather(mine, "compare compute")]
        notes = Notes(
            recipe=str(self._recipe),
            world=self._exchange.world,
            num_lanes=self._exchange.num_lanes,
            whole=whole,
            computes_s=tuple(found),
            price=price,
        )
        self._tuning.know(notes)
        return max(range(self._exchange.world), key=found.__getitem__)

    def _measure_cost(self, now: Observed, within_s: float = math.inf) -> Priced | TooDear:
        """Collective. within_s: the same on all ranks."""
        exchange, recipe = self._exchange, self._recipe
        weighs = recipe.weighs and exchange.world > 1
        price = measure_cost(
            exchange,
            EXACT if recipe.weighs else self._codec,
            now.device,
            now.step,
            by_size=recipe.exchange.name == "best" or recipe.tunes,
            most_nbytes=now.nbytes,
            within_s=within_s / PAYING_TIMES if weighs else within_s,
        )
        if isinstance(price, TooDear):
            return price._replace(seconds=PAYING_TIMES * price.seconds) if weighs else price
        self._cost = price.cost()
        if weighs:
            new_codec = recipe.settled().codec
            self._cost = measure_paying(exchange, new_codec, self._cost, now.device, now.step, now.nbytes)
        return price
