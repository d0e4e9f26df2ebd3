"""Races under a flow: one rank proposes plans, all of them race, and what was quickest runs from then on.

`auto` races recipes. Any recipe with a codec that is for messages only for which it pays races against itself without,
where prices do not tell them apart: that is put off until the codec does what it will do in the long run.

What has won for `auto` is remembered (tune/memory.py): the next run of the same model on the same machines begins with
it, and races only if it is not as quick as it was.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Callable

from pydantic import Field

from gradientflow.compress.feedback import CLEARED
from gradientflow.cost.table import Best, Paying
from gradientflow.documents import Document, parse_json
from gradientflow.errors import RecipeError
from gradientflow.exchange import Exchange
from gradientflow.plan import NATIVE, Plan
from gradientflow.profiles import Profile
from gradientflow.recipe import DEFAULT, as_recipe
from gradientflow.runtime.pricing import TooDear
from gradientflow.trace import MAIN, Recorder, Span
from gradientflow.tune.candidates import MOST, Candidate, candidates, kind, of_both_kinds
from gradientflow.tune.memory import CHECKED, Cache, Remembered, fingerprint, fingerprint_of_model
from gradientflow.tune.notes import Notes, Race, Tried
from gradientflow.tune.trials import PLANS, Budget, Seen, Trials, Turns, allowance_s, midmean

_log = logging.getLogger(__name__)

#: Steps before a plan that no longer fits is given up; twice as many before each one after it.
PATIENCE = 100
#: With a codec and without. A step more than memories take to be empty gives momentum back to the optimizer. More steps
#: than `auto` has: there are two plans, seldom three, and they may differ by little.
CODECS = Turns(first_block=CLEARED + 8, block=CLEARED + 8, skipped=CLEARED + 2, rounds=5)
#: What a race that was cut short has cost, so many times, is to be paid for by steps before the next.
AGAIN = 2.0
#: Wishes, as ranks tell them to each other.
ANEW, BACK, NONE = "anew", "back", ""


class _Field(Document):
    """Who takes part."""

    candidates: tuple[Candidate, ...] = Field(min_length=1)


def read_field(text: str, source: str) -> tuple[Candidate, ...]:
    return parse_json(_Field, text, source).candidates


def write_field(field: tuple[Candidate, ...]) -> str:
    return _Field(candidates=field).model_dump_json()


class Tuning:
    """Off until it `begin`s or recalls. note: called with what is to be known of it, whenever that changes."""

    def __init__(
        self, recorder: Recorder, cache: Cache | None = None, note: Callable[[Notes], None] = lambda notes: None
    ) -> None:
        self._recorder, self._cache, self._note = recorder, cache, note
        self._began_s = recorder.clock()
        self._field: tuple[Candidate, ...] = ()
        self._waiting: tuple[Candidate, ...] = ()  # for their race to begin
        self._turns = PLANS
        self._trials = Trials(1, 0)
        self._chosen: Plan | None = None
        self._not_before, self._patience = 0, PATIENCE
        self._is_put_off = False  # the default runs only until a race can be paid for
        self._is_cut = False  # there was no time for all that were worth a try, as this rank knows
        self._was_apart = self._was_apart_before = False
        self._lost_s = 0.0
        self._keys = "", ""  # of the model and of the cluster
        self._remembered: Remembered | None = None  # and being checked
        self._checked: list[float] = []
        self.notes = Notes()

    @property
    def is_on(self) -> bool:
        return bool(self._field)

    @property
    def is_racing(self) -> bool:
        return self.is_on and self._chosen is None

    @property
    def is_on_probation(self) -> bool:
        """Whether what has won may yet be given up, since it runs by itself for the first time."""
        return self._chosen is not None and self._turns is PLANS and self._trials.is_on_probation

    @property
    def is_put_off(self) -> bool:
        """Whether a first race waits until steps have paid for it."""
        return self._is_put_off

    def is_due(self, step: int) -> bool:
        """Whether what was put off is to be by now. All ranks know it, nobody need ask."""
        return self._is_put_off and step >= self._not_before

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def rivals(self) -> tuple[Candidate, ...]:
        """Who races with a codec and without, or will; none, if that is over."""
        return self._waiting or (self._field if self.is_racing and self._turns is CODECS else ())

    def remember(self, race: Race) -> None:
        """One that was over when the state was saved from which this flow goes on."""
        # What earlier ones cost, and what went before, is not in the state.
        since_s = race.end * race.winner.measured_s
        self.notes = self.notes.model_copy(update={"races": (race,), "lost_s": race.lost_s, "elapsed_s": since_s})
        self._note(self.notes)

    def know(self, notes: Notes) -> None:
        """Facts that were found, beside what is known already."""
        kept = self.notes.model_dump(include={"lost_s", "elapsed_s", "doing"})
        self.notes = notes.model_copy(update={"races": self.notes.races, **kept})
        self._note(self.notes)

    # - Remembering

    def recall(self, exchange: Exchange, observed: Profile, recipe: str, device: str, step: int, gated: bool) -> bool:
        """Collective. Whether something is remembered; it then runs from this step on, at first to be checked."""
        cluster = self._cluster(exchange, device, gated)
        self._keys = fingerprint_of_model(observed, recipe), cluster
        own = ""
        if exchange.rank == 0 and self._cache is not None:
            found = self._cache.recall(*self._keys)
            if found is not None and self._fits(found, exchange, observed, gated):
                own = found.model_dump_json()
            elif found is not None:
                _log.warning("what is remembered, %s, is no plan for this model here: left out", found.candidate)
        heard = exchange.control.from_rank(0, own, "hear what rank 0 remembers")
        if not heard:
            return False
        self._remembered = parse_json(Remembered, heard, "what rank 0 remembers")
        self._field, self._checked = (self._remembered.candidate,), []
        self._trials, self._chosen = Trials(1, step), None
        self._tell(f"checking {self._remembered.candidate}, which has won before")
        return True

    def _cluster(self, exchange: Exchange, device: str, gated: bool) -> str:
        """Who shares a host with whom, and what the hosts are; not their names, which are others in each job of a
        cluster. How quick their links are shows in the check."""
        here = f"{socket.gethostname()} {platform.machine()} {os.cpu_count()} {device}"
        hosts = exchange.control.gather(here, "compare machines")
        names = [host.split(" ", 1)[0] for host in hosts]
        facts = {
            "placement": [names.index(name) for name in names],
            "machines": [host.split(" ", 1)[1] for host in hosts],
            "backend": exchange.backend,
            "lanes": exchange.num_lanes,
            "patterns": list(exchange.patterns),
            "gated": gated,
        }
        return fingerprint(facts)

    def _fits(self, found: Remembered, exchange: Exchange, observed: Profile, gated: bool) -> bool:
        plan = found.candidate.plan
        ways = {NATIVE, *exchange.patterns}
        try:
            recipe = as_recipe(found.candidate.recipe)
            plan.check(observed)
        except (RecipeError, ValueError):
            return False
        return (
            not (recipe.tunes or recipe.served or recipe.sync.deltas)
            and plan.num_lanes <= exchange.num_lanes
            and {message.pattern for message in plan.messages} <= ways
            and not plan.gathers
            and (gated or not plan.stages)
            and bool(plan.stages) == found.candidate.gated
        )

    def _keep(self) -> None:
        recalls = self._cache is not None and self._turns is PLANS
        if not recalls or not self._trials.expected_s or self._trials.winner is None:
            return
        assert self._cache is not None
        model, cluster = self._keys
        won = self._field[self._trials.winner]
        seconds = self._trials.expected_s
        self._cache.keep(Remembered(model=model, cluster=cluster, candidate=won, iteration_s=seconds))

    def _check(self, exchange: Exchange, step: int) -> bool:
        """Collective. Whether what was remembered holds no longer."""
        assert self._remembered is not None
        told = exchange.control.gather(repr(midmean(self._checked[1:])), "compare what was remembered with what is")
        now_s = max(float(text) for text in told)
        remembered, self._remembered = self._remembered, None
        if not remembered.still_holds(now_s):
            self._field = ()
            return True
        self._trials.found_s = [now_s]
        self._trials.settle(0)
        self._settled(exchange, step, "remembered", 0.0)
        return False

    # - Racing

    def budget(self, exchange: Exchange, step_s: float) -> Budget:
        """Collective. step_s: of a step so far; later ones go by what they take now."""
        elapsed_s = self._recorder.clock() - self._began_s
        step_s = min(self._trials.recent_s or step_s, elapsed_s)
        told = exchange.control.gather(f"{elapsed_s!r} {step_s!r}", "compare what tuning may cost")
        elapsed_s, step_s = (max(map(float, column)) for column in zip(*map(str.split, told), strict=True))
        return Budget(max(0.0, allowance_s(step_s, elapsed_s) - self._lost_s), step_s, elapsed_s)

    def put_off(
        self,
        exchange: Exchange,
        planner: int,
        observed: Profile,
        default: Plan,
        budget: Budget,
        price: TooDear,
        step: int,
        began_s: float,
    ) -> None:
        """Collective. Timing messages would cost more than it may: what has won, or the default, runs until steps so
        far have paid for it. That, too, is one rank's plan: gradients may come in another order on each. began_s: when
        messages began to be timed, by the recorder's clock."""
        if self._chosen is None and not self.notes.races:
            own = (Candidate(recipe=DEFAULT, plan=default, predicted_s=budget.step_s),)
            self._field, self._turns = self._hear(exchange, planner, observed, own), PLANS
            self._trials, self._chosen, self._is_put_off = Trials(1, step), self._field[0].plan, True
        self._lose(exchange, began_s)
        if self._chosen is None:
            return  # what was loaded goes on, and is asked about again where it does not fit (runtime/replanning.py)
        self._not_before = step + max(PATIENCE, budget.affordable_in(price.seconds, self._lost_s))
        words = f"waiting for step {self._not_before}: timing messages takes {price.seconds:.2g} s, too much before it"
        if self._is_put_off:
            self._chosen = self._chosen.model_copy(update={"why": f"auto is {words}"})
        self._tell(words)

    def _lose(self, exchange: Exchange, began_s: float) -> None:
        """Collective. On the slowest rank, in which nobody trained."""
        mine = repr(self._recorder.clock() - began_s)
        self._lost_s += max(map(float, exchange.control.gather(mine, "compare what tuning took")))
        self.notes = self.notes.model_copy(update={"lost_s": self._lost_s})

    def begin(
        self,
        exchange: Exchange,
        planner: int,
        observed: Profile,
        cost: Best | Paying,
        step: int,
        budget: Budget,
        began_s: float,
        *,
        gated: bool,
        whole: bool,
    ) -> None:
        """Collective. The race begins with this step. One rank's plans: the last digit of a logarithm is the
        processor's own affair. began_s: when messages began to be timed, by the recorder's clock."""
        own: tuple[Candidate, ...] = ()
        if exchange.rank == planner:
            spent_s = self._recorder.clock() - began_s + budget.planning_s
            most = budget.num_rivals(spent_s, MOST)
            self._is_cut = most < MOST
            found = candidates(
                observed,
                exchange.num_lanes,
                cost,
                gated=gated,
                whole=whole,
                most=most,
                within_s=budget.planning_s,
            )
            own = self._with_what_runs(found, gated)
        self._field, self._turns, self._is_put_off = self._hear(exchange, planner, observed, own), PLANS, False
        self._lose(exchange, began_s)
        self._trials, self._chosen = Trials(len(self._field), step, self._lost_s, self._turns), None
        self._tell(f"racing {', '.join(map(str, self._field))}")
        if self._trials.winner is not None:  # nobody to race with
            self._chosen = self._field[0].plan
            self._not_before, self._patience = step + self._patience, 2 * self._patience
            self._tell("")

    def _hear(
        self, exchange: Exchange, planner: int, observed: Profile, own: tuple[Candidate, ...]
    ) -> tuple[Candidate, ...]:
        words = write_field(own) if exchange.rank == planner else ""
        heard = exchange.control.from_rank(planner, words, f"hear what rank {planner} would try")
        found = read_field(heard, f"rank {planner}'s candidates")
        for each in found:
            each.plan.check(observed)
        return found

    def prepare(self, exchange: Exchange, planner: int, observed: Profile, own: tuple[Candidate, ...]) -> Plan:
        """Collective. Races those that one rank proposes, if there are several, when it is told to. Returns what is to
        run until then.

        own: as the planner found them."""
        found = self._hear(exchange, planner, observed, own)
        self.wait_with(found if len(found) > 1 else ())
        return min(found, key=lambda each: each.predicted_s).plan

    def wait_with(self, field: tuple[Candidate, ...]) -> None:
        self._field, self._waiting, self._chosen = (), field, None

    def race(self, step: int) -> None:
        """Those that wait, from this step on. The same on all ranks, which need not talk about it."""
        self._field, self._waiting, self._turns = self._waiting, (), CODECS
        self._trials = Trials(len(self._field), step, self._lost_s, self._turns)
        self._tell(f"racing {', '.join(map(str, self._field))}")

    def _with_what_runs(self, found: tuple[Candidate, ...], gated: bool) -> tuple[Candidate, ...]:
        """What has won the last race is the one to beat, by one rival fewer: a change is to be answered soon."""
        stands = self._trials.winner is not None and not self._is_put_off
        if self._chosen is None or not stands or (self._chosen.stages and not gated):
            return found
        assert self._trials.winner is not None
        runs = self._field[self._trials.winner]
        others = sorted(
            (each for each in found if kind(each.plan) != kind(runs.plan)), key=lambda each: each.predicted_s
        )
        return (runs, *of_both_kinds(others, min(MOST - 1, len(found) - 1), beside=(runs,)))

    def plan_at(self, step: int) -> Plan:
        """The same on all ranks."""
        return self._chosen or self._field[self._trials.candidate(step)].plan

    def stand_apart(self) -> None:
        """Between this step and the next one, something other than training is done."""
        self._was_apart = True

    def step_began(self, exchange: Exchange, step: int, before_s: float, now_s: float) -> bool:
        """The one before began then. Collective when a round or a check ends. Returns whether a race has to begin,
        because what was remembered holds no longer."""
        seconds = now_s - before_s
        # If every step is, that is what steps are like.
        is_apart = self._was_apart and not self._was_apart_before
        self._was_apart, self._was_apart_before = False, self._was_apart
        if self._remembered is not None:
            if step > self._trials.first:
                self._checked.append(seconds)
                self._note_trial(0, step - 1, before_s, now_s)
            return len(self._checked) >= CHECKED and self._check(exchange, step)
        racing = self._trials.winner is None
        if racing and step > self._trials.first:
            self._note_trial(self._trials.candidate(step - 1), step - 1, before_s, now_s)
        if racing or not is_apart:  # in a race all have the same; after it, it is no drift
            self._trials.took(step - 1, seconds)
        if racing and step >= self._trials.end:
            mine = self._trials.seen(now_s - self._began_s).model_dump_json()
            told = exchange.control.gather(mine, "compare what plans took")
            self._trials.decide([parse_json(Seen, text, "what plans took") for text in told])
            if self._trials.winner is not None:
                why = "drift" if self.notes.races else "start"
                self._lost_s += self._trials.lost_s
                self._settled(exchange, step, why, self._trials.lost_s)
        return False

    def _note_trial(self, candidate: int, step: int, before_s: float, now_s: float) -> None:
        name = str(self._field[candidate])
        self._recorder.add(Span("trial", name, MAIN, before_s, now_s, step, {"candidate": candidate}))

    def _settled(self, exchange: Exchange, step: int, why: str, lost_s: float) -> None:
        trials = self._trials
        assert trials.winner is not None
        winner = self._field[trials.winner]
        tried = tuple(
            Tried(recipe=each.recipe, gated=each.gated, predicted_s=each.predicted_s, measured_s=measured)
            for each, measured in zip(self._field, trials.found_s, strict=True)
        )
        race = Race.model_validate(
            {"first": trials.first, "end": step, "why": why, "tried": tried, "chosen": trials.winner, "lost_s": lost_s}
        )
        self._choose(winner, race)
        self._not_before, self._patience = step + self._patience, 2 * self._patience
        if exchange.rank == 0:
            self._keep()
        args = {"lost_s": self._lost_s, "iteration_s": trials.expected_s}
        now_s = self._recorder.clock()
        self._recorder.add(Span("tuned", str(winner), MAIN, now_s, now_s, step, args))

    def _choose(self, winner: Candidate, race: Race) -> None:
        self._chosen = winner.plan.model_copy(update={"why": self._why(winner, race)})
        races = (*(self.notes.races[:-1] if race.undone else self.notes.races), race)
        elapsed_s = self._recorder.clock() - self._began_s
        self.notes = self.notes.model_copy(update={"races": races, "lost_s": self._lost_s, "elapsed_s": elapsed_s})
        self._tell("")

    # - Afterwards

    def wish(self, step: int) -> str:
        """What this rank would have: another race, what ran before, or nothing."""
        if self._chosen is None:
            return NONE
        # With a codec steps vary more than a few of them after the race can tell, and those of the race were many.
        if self._turns is PLANS and self._trials.does_not_pay and not self.notes.races[-1].undone:
            return BACK
        if step < self._not_before:
            return NONE
        if self._is_put_off:
            return ANEW
        elapsed_s = self._recorder.clock() - self._began_s
        may_s = allowance_s(self._trials.expected_s, elapsed_s)
        if self._trials.has_drifted and self._lost_s < may_s:
            return ANEW
        was_cut = self._turns is PLANS and (self._is_cut or self._trials.was_cut)
        if was_cut and AGAIN * self._lost_s < may_s:
            return ANEW
        if self.notes.doing:  # steps are what they were before what was put off had to be
            self._tell("")
        return NONE

    def heed(self, exchange: Exchange, step: int) -> bool:
        """Collective, when somebody had a wish. Whether there is to be a race; else it is done, or out of date."""
        wishes = exchange.control.gather(self.wish(step), "compare what to do about a plan")
        if ANEW in wishes:
            return True
        if BACK in wishes and self._trials.winner:
            self._trials.settle(0)
            self._choose(self._field[0], self.notes.races[-1].model_copy(update={"chosen": 0, "undone": True}))
            if exchange.rank == 0:
                self._keep()
        return False

    def _tell(self, doing: str) -> None:
        self.notes = self.notes.model_copy(update={"doing": doing})
        self._note(self.notes)

    def _why(self, winner: Candidate, race: Race) -> str:
        rows = [
            f"{each} {1e3 * each.measured_s:.1f} ms (predicted {1e3 * each.predicted_s:.1f})" for each in race.tried
        ]
        how = {"remembered": "remembered", "start": "tried", "drift": "tried again"}[race.why]
        back = "\nwhat had won was given up: it took longer by itself than in the race" if race.undone else ""
        who = "auto" if self._turns is PLANS else "a race"
        return f"{who} chose {winner}\n{how}: {', '.join(rows)}{back}\n{winner.plan.explain()}"
