"""What `attach` returns, whatever travels underneath: gradients (flow.py) or changes of parameters (deltas.py)."""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from torch import nn

from gradientflow.documents import Record
from gradientflow.errors import TrainingError, UsageError
from gradientflow.plan import Plan
from gradientflow.profiles import Profile
from gradientflow.saved import MOST
from gradientflow.trace import Trace
from gradientflow.tune.explain import Situation, explain

_log = logging.getLogger(__name__)

#: How long a rank waits for the others before it says so. Long enough for a checkpoint on one of them.
DEADLINE_S = 600.0


class Carried(Protocol):
    """A scheduler, say."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Crew(NamedTuple):
    """Who trains together now."""

    #: How often workers have begun together; 0 where they do not come and go.
    generation: int
    #: This one's place among them.
    rank: int
    world: int
    #: By rank, what the job calls them: as they came, a number each, for ever.
    members: tuple[int, ...]


class Memory(Record):
    """What a flow holds, in bytes."""

    pool: int = 0
    #: What a codec holds beside the pool while messages are on the wire, at most.
    wire: int = 0
    master_weights: int = 0
    #: What a codec keeps from step to step.
    remembered: int = 0
    #: Parameters as all workers had them last, and what an outer optimizer keeps.
    anchors: int = 0
    #: Where workers come and go: gradients as backward gave them, until their step is taken.
    own_gradients: int = 0


class Flow(ABC):
    """What `gradientflow.attach` returns: a model's exchange, until `close()`. A context manager.

    The training loop needs nothing of it but `no_sync()` where gradients are accumulated and `state_dict()` for
    checkpoints; the rest says what happens.
    """

    #: What it exchanges.
    _parameters: Mapping[str, nn.Parameter]

    @property
    @abstractmethod
    def step(self) -> int:
        """How many steps have been taken part in."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """What is being sent in which order."""

    @property
    def gated(self) -> bool:
        """Whether `optimizer.step()` is put off, part by part, until the next forward pass needs its result."""
        return False

    @property
    def is_trying(self) -> bool:
        """Whether plans are tried in turn, or will soon be, or what has won may yet be given up: what runs now may not
        be what will."""
        return False

    @property
    def crew(self) -> Crew | None:
        """Who trains together now; None where servers keep the parameters, and nobody knows."""
        return None

    def carry(self, **things: Carried) -> None:  # noqa: B027 - nothing to do where workers do not come and go
        """Schedulers and whatever else has a `state_dict` and belongs to this step: who joins gets the others'."""

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside only accumulate, on this rank. Enter it on all ranks alike."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when nothing that was sent is on its way, and every step that was asked for is done."""

    def count(self, num_samples: int) -> None:
        """Say how many samples are behind the next step, if workers have different numbers of them: what they change is
        weighed by it. On all workers or on none; before `optimizer.step()`. The mean of gradients is a plain one."""
        as_count(num_samples)

    def average(self) -> None:
        """Make all workers the same, now: before an evaluation that all take part in, a checkpoint, the end. Collective
        where workers are in lockstep; else what servers have is taken over. The plain mean, never a step of an outer
        optimizer."""
        self.synchronize()

    @abstractmethod
    def trace(self) -> Trace:
        """What happened on this rank, up to the last 100,000 spans."""

    @abstractmethod
    def profile(self) -> Profile:
        """The model's tensors as far as they were seen."""

    def explain(self) -> str:
        """Where this rank's time goes, what was chosen over what, and what would help: one screen, in plain words. The
        traces of all ranks say more: `gradientflow explain RUN`."""
        return explain(self._situation(), [self.trace()])

    @abstractmethod
    def _situation(self) -> Situation:
        """What is run, for an explanation."""

    @abstractmethod
    def memory(self) -> Memory:
        """Bytes held beyond the model, the optimizer and the process group."""

    @property
    def alike(self) -> bool:
        """Whether one rank's model and optimizer are everybody's between steps, as far as training depends on it."""
        return True

    def cut(self, meet: Callable[[], None]) -> None:  # noqa: B027 - in lockstep there is nothing to do
        """Before states are saved, by all ranks after the same or different numbers of steps: nothing that one rank's
        state counts as sent is missing in another's. `meet` returns when all ranks have called it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What has to be saved with a checkpoint, on every rank."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take over a `state_dict`, on all ranks together; after the model's own.

        A list of the states of all ranks may come from another world, of which each rank takes its share."""

    @abstractmethod
    def close(self) -> None:
        """Take everything away that `attach` put there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.close()
        except TrainingError as error:
            if kind is None:
                raise
            _log.warning("%s; an exception was on its way already", error)


#: Flows that are attached now.
open_flows: weakref.WeakSet[Flow] = weakref.WeakSet()


def held_by_a_flow(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of those that another flow exchanges already; two would both divide by the world."""
    held = {id(parameter) for flow in open_flows for parameter in flow._parameters.values()}
    return [name for name, parameter in parameters.items() if id(parameter) in held]


def trainable(model: nn.Module, ignored: frozenset[str] = frozenset()) -> dict[str, nn.Parameter]:
    """The parameters that are exchanged; a tied one counts once, by its first name."""
    return {n: parameter for n, parameter in model.named_parameters() if parameter.requires_grad and n not in ignored}


def as_count(num_samples: int) -> int:
    """Also of a tensor or array that is one whole number."""
    try:
        found = operator.index(num_samples)
    except TypeError:
        words = repr(num_samples).partition("\n")[0]
        raise UsageError(f"count({words:.40}): samples are counted in whole numbers") from None
    if not 0 <= found <= MOST:
        raise UsageError(f"count({found}): samples are counted from 0 to 2**53")
    return found


def as_states(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return state if isinstance(state, list | tuple) and state else [state]  # type: ignore[list-item]


@contextlib.contextmanager
def nothing_to_hold_back() -> Iterator[None]:
    """`no_sync()` where gradients stay on their worker anyway."""
    yield
