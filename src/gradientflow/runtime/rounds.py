"""Rounds of workers in lockstep: every `period` steps, the mean of what they have changed their tensors by.

    delta = tensor - anchor          what this worker has done since all of them had the same
    mean of the workers' deltas      by the recipe's plan, exchange and codec, as gradients would travel
    anchor <- outer(anchor, mean)    on every worker alike
    tensor <- anchor

A *fragment* is a part of the model with a round of its own; fragments take turns within a period, so that traffic is
spread over it. With a delay the mean is taken over some steps after it was asked for, and travels meanwhile. What the
worker has done in those steps is kept: the tensor moves by what the round changed, anchor minus what it was when the
delta was taken.

Deltas are weighed by the samples that workers have counted since their last round of the fragment, else alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradientflow.compress import Feedback, Sum, is_finite
from gradientflow.errors import DisagreementError, NonFiniteError, UsageError
from gradientflow.exchange import Exchange
from gradientflow.outer import AVERAGE
from gradientflow.plan import Message, Plan
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Choice, Recipe
from gradientflow.runtime.compression import Compression
from gradientflow.runtime.pool import Pool
from gradientflow.runtime.pump import Pump
from gradientflow.runtime.sameness import differing, disagreement
from gradientflow.runtime.sharded import own_part
from gradientflow.runtime.states import COMPRESSION, Shares
from gradientflow.runtime.streams import streams_for
from gradientflow.saved import count
from gradientflow.trace import MAIN, Recorder, Span

_log = logging.getLogger(__name__)


class _Fragment:
    """Part of the plan, and where its deltas lie."""

    def __init__(self, plan: Plan, tensors: Mapping[str, torch.Tensor], flags_apart: bool) -> None:
        self.plan = plan
        self.pool = Pool(plan, tensors)
        self.views = self.pool.views
        self.parcels = [
            self.pool.parcel(n, message, flags_apart=flags_apart) for n, message in enumerate(plan.messages)
        ]
        #: Of each tensor, what it was when its delta was taken. Nothing: no round is under way.
        self.sent: dict[str, torch.Tensor] = {}
        #: Whether the mean that is in the views may be used. None: it is on its way, or there is none.
        self.usable: bool | None = None
        #: Samples that had been counted when it was sent last.
        self.num_samples = 0
        #: Means that the outer optimizer has taken.
        self.num_taken = 0


class Rounds:
    """Of `tensors`, by name; of those that are not `trained` (buffers) the plain mean is taken.

    trained: parameters as the optimizer holds them; `tensors` has this rank's own parts of them."""

    def __init__(
        self,
        recipe: Recipe,
        exchange: Exchange,
        tensors: Mapping[str, torch.Tensor],
        trained: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        recorder: Recorder,
        raise_nonfinite: bool,
        verify_every: int,
    ) -> None:
        self._sync, self._exchange, self._recorder = recipe.sync, exchange, recorder
        self._tensors, self._trained, self._optimizer = tensors, trained, optimizer
        self._raise_nonfinite = raise_nonfinite
        self._verify_every, self._verified_at = verify_every, 0
        codec = recipe.codec()
        self._compression = Compression(codec, None) if isinstance(codec, Feedback) else None
        profile = Profile(tensors=tuple(TensorProfile.of(name, tensor) for name, tensor in tensors.items()))
        self.plan = _planned(recipe, profile, exchange.num_lanes)
        flags_apart = self._compression is not None
        self._fragments = [
            _Fragment(part, tensors, flags_apart) for part in _parts(self.plan, profile, self._sync.fragments)
        ]
        self._outer = {name: self._sync.outer if name in trained else AVERAGE for name in tensors}
        self._anchors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._velocities = {
            name: torch.zeros_like(anchor) for name, anchor in self._anchors.items() if self._outer[name].momentum
        }
        self._num_steps = self._num_rounds = 0
        self._num_samples = 0
        self._counts = False  # somebody says how many samples there are
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self._pump = Pump(exchange, codec, streams_for(device, exchange.num_lanes), recorder)
        if self._compression:
            fragment = self._fragments[0]
            self._compression.lay_out(fragment.plan, fragment.parcels, fragment.views, exchange)

    # - Steps

    def count(self, num_samples: int) -> None:
        self._counts = True
        self._num_samples += num_samples

    @torch.no_grad()
    def stepped(self) -> None:
        """The worker has taken a step by itself."""
        self._num_steps += 1
        health = self._exchange.health
        health.step, health.place, health.trainer = self._num_steps, "training by itself", threading.get_ident()
        place, number = (self._num_steps - 1) % self._sync.period + 1, len(self._fragments)
        sent_at = [(index + 1) * self._sync.period // number for index in range(number)]
        for fragment, at in zip(self._fragments, sent_at, strict=True):
            # What was saved under another delay is taken over before the fragment is sent again, if not sooner.
            if fragment.sent and place in (at, (at + self._sync.delay - 1) % self._sync.period + 1):
                self._take_over(fragment)
        for fragment, at in zip(self._fragments, sent_at, strict=True):
            if place == at:
                self._send(fragment)
                if not self._sync.delay:
                    self._take_over(fragment)
        if place == self._sync.period and self._verify_every:
            self._verify(self._verify_every)

    def _verify(self, every: int) -> None:
        """At the first end of a period after so many steps: workers' own parameters may differ, what they move from may
        not."""
        if self._num_steps // every == self._verified_at // every:
            return
        self._verified_at = self._num_steps
        began_s = self._recorder.clock()
        compared = {**self._anchors, **{f"{name} (its momentum)": v for name, v in self._velocities.items()}}
        where = f"what round {self._num_rounds} gave"
        found = differing(self._exchange, compared, self._num_rounds + 1, where)
        self._recorder.add(Span("verify", "parameters", MAIN, began_s, self._recorder.clock(), self._num_steps))
        if found:
            raise disagreement(self._exchange, found, self._num_steps)

    @torch.no_grad()
    def average(self) -> None:
        """A round of everything, now. It takes the plain mean, whatever the outer optimizer: that one sees what comes
        after. So to average twice, or after a round, changes nothing."""
        self.finish()
        for fragment in self._fragments:
            self._send(fragment, asked=True)
            self._take_over(fragment, asked=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Take over what is on its way."""
        for fragment in self._fragments:
            if fragment.sent:
                self._take_over(fragment)

    def _send(self, fragment: _Fragment, *, asked: bool = False) -> None:
        self._num_rounds += 1
        weight = self._weigh(fragment, asked)
        for name, view in fragment.views.items():
            torch.sub(self._tensors[name], self._anchors[name], out=view).mul_(weight)
            fragment.sent[name] = self._tensors[name].detach().clone() if self._sync.delay else self._tensors[name]
        fragment.pool.mark_absent(set(), False)
        closing = None
        if self._compression:
            self._compression.begin(1.0)
            closing = self._compression.closing
        self._pump.load(fragment.plan, fragment.parcels, closing)
        self._pump.begin(self._num_rounds)
        if self._sync.delay:
            self._pump.launch(range(len(fragment.plan.messages)))

    def _weigh(self, fragment: _Fragment, asked: bool) -> float:
        """This worker's part of the mean. Ranks must be about the same round."""
        exchange, counted = self._exchange, self._num_samples - fragment.num_samples
        fragment.num_samples = self._num_samples
        what = 2.0 * self._fragments.index(fragment) + asked
        told = torch.tensor([counted, self._counts, what, what**2], dtype=torch.float64)
        exchange.answer(Sum([told]), 0, self._num_rounds + 1, f"round {self._num_rounds}, samples")
        everybodys, num_counting, whats, squares = told.tolist()
        if whats**2 != exchange.world * squares:
            raise DisagreementError(
                f"round {self._num_rounds}: some ranks call average() and others do not, or after other steps: call it "
                "on all of them"
            )
        if num_counting not in (0, exchange.world):
            raise DisagreementError(
                f"{num_counting:.0f} of {exchange.world} ranks count their samples: call count() on all of them, or "
                "on none"
            )
        return counted / everybodys if everybodys else 1.0 / exchange.world

    def _wait_for(self, fragment: _Fragment) -> bool:
        """Until its mean is there: whether it may be used."""
        if fragment.usable is not None:
            return fragment.usable
        began_s = self._recorder.clock()
        self._pump.finish(() if self._sync.delay else range(len(fragment.plan.messages)))
        self._recorder.add(Span("exposed", "round", MAIN, began_s, self._recorder.clock(), self._num_steps))
        counts = self._compression is None or self._compression.settle()
        # The same on all ranks: they have the same sum.
        fragment.usable = counts and all(is_finite(view) for view in fragment.views.values())
        return fragment.usable

    def _take_over(self, fragment: _Fragment, *, asked: bool = False) -> None:
        """asked: by `average()`, a moment ago. Else the worker may have gone on since the fragment was sent."""
        usable = self._wait_for(fragment)
        sent, fragment.sent, fragment.usable = fragment.sent, {}, None
        if not usable:
            self._go_back()
            return
        for name, mean in fragment.views.items():
            tensor, anchor = self._tensors[name], self._anchors[name]
            outer = AVERAGE if asked else self._outer[name]
            outer.advance_(anchor, mean, self._velocities.get(name), fragment.num_taken)
            if asked or sent[name] is tensor:
                tensor.copy_(anchor)
            else:
                tensor.add_(anchor - sent[name])
        fragment.num_taken += not asked
        if self._sync.moments == "reset":
            self._forget_moments(fragment.views)
        elif self._sync.moments == "average":
            self._average_moments(fragment.views)

    # - The optimizer's own state

    def _forget_moments(self, names: Mapping[str, object]) -> None:
        for name in names.keys() & self._trained.keys():
            self._optimizer.state.pop(self._trained[name], None)

    def _average_moments(self, names: Mapping[str, object]) -> None:
        """Of all that is shaped as its parameter, but for counters of steps, which are the same on all workers. A
        parameter that some worker has not used yet has none there: of it they stay as they are."""
        found = [
            [
                own_part(value)
                for parameter in ([self._trained[name]] if name in self._trained else [])
                for kind, value in sorted(self._optimizer.state.get(parameter, {}).items())
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and kind != "step"
            ]
            for name in names
        ]
        lacking = torch.tensor([not values for values in found], dtype=torch.float64)
        self._exchange.answer(Sum([lacking]), 0, self._num_rounds + 1, f"round {self._num_rounds}, who has moments")
        moments = [value for values, lack in zip(found, lacking.tolist(), strict=True) if not lack for value in values]
        for dtype in sorted({value.dtype for value in moments}, key=str):
            ours = [value for value in moments if value.dtype is dtype]
            flat = torch.cat([value.reshape(-1) for value in ours]).div_(self._exchange.world)
            self._exchange.answer(Sum([flat]), 0, self._num_rounds + 1, f"round {self._num_rounds}, moments")
            for value, mean in zip(ours, torch.split(flat, [value.numel() for value in ours]), strict=True):
                value.copy_(mean.view(value.shape))

    def _go_back(self) -> None:
        """Some worker's parameters are inf or nan: all of them go back to where they were the same."""
        words = f"round {self._num_rounds}: some worker's parameters are inf or nan"
        for name, tensor in self._tensors.items():
            tensor.copy_(self._anchors[name])
        for fragment in self._fragments:
            fragment.sent, fragment.usable = {}, None
        self._forget_moments(self._tensors)
        if self._raise_nonfinite:
            raise NonFiniteError(f"{words}; all have gone back to their last mean")
        if self._exchange.rank == 0:
            _log.warning("%s: all go back to their last mean, and optimizers begin anew", words)

    # - State

    def cut(self, meet: Callable[[], None]) -> None:
        """Workers are in lockstep: what one of them has sent, all have."""

    def memory(self) -> tuple[int, int, int]:
        """Bytes of deltas, on the wire, and of what is kept."""
        kept = [*self._anchors.values(), *self._velocities.values()]
        kept += [each for fragment in self._fragments for each in fragment.sent.values()] if self._sync.delay else []
        return (
            sum(fragment.pool.nbytes for fragment in self._fragments),
            self._pump.wire_nbytes() + (self._compression.nbytes if self._compression else 0),
            sum(tensor.nbytes for tensor in kept),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._num_steps,
            "rounds": self._num_rounds,
            "taken": [fragment.num_taken for fragment in self._fragments],
            "anchors": {name: anchor.clone() for name, anchor in self._anchors.items()},
            "velocities": {name: velocity.clone() for name, velocity in self._velocities.items()},
        }

    def kept(self) -> dict[str, Any]:
        """Waits for what is on its way, and leaves it to be taken over in its turn."""
        on_their_way = {}
        for index, fragment in enumerate(self._fragments):
            if fragment.sent:
                usable = self._wait_for(fragment)
                means = {name: view.clone() for name, view in fragment.views.items()}
                sent = {name: tensor.detach().clone() for name, tensor in fragment.sent.items()}
                on_their_way[index] = {"sent": sent, "means": means, "usable": usable}
        found: dict[str, Any] = {
            "samples": self._num_samples,
            "counts": self._counts,
            "counted": [fragment.num_samples for fragment in self._fragments],
            "on_their_way": on_their_way,
        }
        return found | ({COMPRESSION: self._compression.state_dict()} if self._compression else {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], given: Shares) -> None:
        """What is on its way is waited for, and forgotten: lanes write to where what was saved goes.

        Of another world, what was on its way is the first's that it takes over: all of them get the same mean."""
        for fragment in self._fragments:
            if fragment.sent:
                self._wait_for(fragment)
        kept = given.states[0]
        lacking = {"steps", "rounds", "taken", "anchors"} - state.keys()
        lacking |= {"samples", "counts", "counted", "on_their_way"} - kept.keys()
        if lacking or not len(kept["counted"]) == len(state["taken"]) == len(self._fragments):
            raise UsageError("the state was saved with another synchronisation, or is not what state_dict() gave")
        steps, rounds, samples = count(state, "steps"), count(state, "rounds"), count(kept, "samples")
        for ours, theirs in ((self._anchors, state["anchors"]), (self._velocities, state.get("velocities", {}))):
            if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
                raise UsageError("the state was saved for another model or another outer optimizer")
            for name in ours:
                ours[name].copy_(theirs[name])
        self._num_steps, self._num_rounds, self._verified_at = steps, rounds, steps
        self._num_samples, self._counts = samples, bool(kept["counts"])
        for fragment, counted, taken in zip(self._fragments, kept["counted"], state["taken"], strict=True):
            fragment.num_samples, fragment.num_taken, fragment.sent, fragment.usable = (
                int(counted),
                int(taken),
                {},
                None,
            )
        for index, saved in kept["on_their_way"].items():
            fragment = self._fragments[int(index)]
            if not saved["sent"].keys() == saved["means"].keys() == fragment.views.keys():
                raise UsageError("the state was saved for another model")
            for name, view in fragment.views.items():
                if saved["sent"][name].shape != view.shape or saved["means"][name].shape != view.shape:
                    raise UsageError(f"the state was saved for another model: {name!r} had another shape")
                view.copy_(saved["means"][name])
            fragment.sent, fragment.usable = dict(saved["sent"]), bool(saved["usable"])
        if self._compression:
            self._compression.load_state_dict(given.of(COMPRESSION))
            fragment = self._fragments[0]
            self._compression.lay_out(fragment.plan, fragment.parcels, fragment.views, self._exchange)

    def close(self) -> None:
        self._pump.close()
        if self._compression:
            self._compression.close()
        self._exchange.close()

    def abandon(self, words: str) -> None:
        self._exchange.abandon(words)
        self._pump.close()


def _planned(recipe: Recipe, profile: Profile, num_lanes: int) -> Plan:
    """As the schedule says; fused into no more than a fragment, unless it says how much."""
    total = sum(tensor.nbytes for tensor in profile.tensors)
    if recipe.sync.fragments > 1 and recipe.schedule == Choice(name="lazy"):
        recipe = recipe.model_copy(
            update={"schedule": Choice(name="lazy", argument=str(max(1, total // recipe.sync.fragments)))}
        )
    return recipe.plan(profile, num_lanes)


def _parts(plan: Plan, profile: Profile, number: int) -> list[Plan]:
    """Messages in a row, of about equal bytes; fewer parts if there are fewer messages."""
    nbytes = {tensor.name: tensor.nbytes for tensor in profile.tensors}
    total, reached = max(1, sum(nbytes.values())), 0
    groups: list[list[Message]] = [[] for _ in range(number)]
    for message in plan.messages:
        groups[min(number - 1, number * reached // total)].append(message)
        reached += sum(nbytes[piece.tensor] for piece in message.slices)
    return [
        plan.model_copy(
            update={"messages": tuple(group), "layout": tuple(piece.tensor for m in group for piece in m.slices)}
        )
        for group in groups
        if group
    ]
