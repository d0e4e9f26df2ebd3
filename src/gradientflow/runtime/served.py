"""Workers around servers that keep the parameters: SSP, ASP, and Local SGD or DiLoCo among workers that come and go.

After a step (or `period` of them) a worker pushes what it has changed and goes on as soon as it may: under SSP when
nobody is more than `staleness` steps behind, under ASP at once, otherwise when all who are there have given theirs. It
goes on from the newest copy that has arrived, with what it has pushed itself and is not in there yet (read-my-writes),
as the servers will weigh it.

Workers need no process group: they meet through the job's store. The first to come brings the parameters; who comes
later takes what servers have.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradientflow.compress.part import is_finite
from gradientflow.compress.quantize import Codes, Int8
from gradientflow.documents import parse_json
from gradientflow.errors import DeadlineError, DisagreementError, NonFiniteError, UsageError
from gradientflow.exchange.groups import store_beside
from gradientflow.exchange.health import Process
from gradientflow.exchange.server.directory import StoreDirectory, register, store_of_job
from gradientflow.exchange.server.keys import KeyFiles
from gradientflow.exchange.server.placement import cut, partition_nbytes, spread
from gradientflow.exchange.server.replica import Held, Place, Replica
from gradientflow.exchange.server.service import Service
from gradientflow.exchange.server.table import INT8, PLAIN, shard_of
from gradientflow.exchange.server.wire import Terms
from gradientflow.exchange.verdict import Life
from gradientflow.network import Network
from gradientflow.plan import Message, Plan, Slice
from gradientflow.recipe import Recipe
from gradientflow.rundir import RunDirectory
from gradientflow.runtime.deltas import DeltaFlow, Road, shared_tensors
from gradientflow.runtime.fingerprint import describe_tensors
from gradientflow.runtime.handle import Flow, trainable
from gradientflow.runtime.leaving import run_directory
from gradientflow.runtime.settings import Settings
from gradientflow.runtime.states import Shares
from gradientflow.saved import count
from gradientflow.sync import Sync
from gradientflow.trace import MAIN, Recorder, Span

_log = logging.getLogger(__name__)

#: Pushes that servers have not answered, at most. More would only be memory: they are slower than this worker.
MOST_PENDING = 4
#: Who may go on waits for what servers have now, for so much of the time between two exchanges: what comes later is
#: used one exchange later, and training on older parameters takes more steps.
PATIENCE = 0.05
#: Who leaves waits so long to hear that everything it pushed has arrived.
LEAVE_S = 10.0
#: How often a wait looks up.
LOOK_S, ASSEMBLY_LOOK_S = 0.2, 0.005
_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class _Group:
    """Tensors of one dtype, of which all are parameters or none is: one after another in flat memory."""

    tensors: dict[str, torch.Tensor]
    averaged: bool
    #: As they were when this worker last heard of the others.
    local: torch.Tensor
    #: What a codec has not sent.
    left_over: torch.Tensor

    def gathered(self) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors.values()])

    def spread_out(self) -> None:
        """`local` into the tensors."""
        parts = torch.split(self.local, [tensor.numel() for tensor in self.tensors.values()])
        for tensor, part in zip(self.tensors.values(), parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = torch.split(flat, [tensor.numel() for tensor in self.tensors.values()])
        return {name: part.view(t.shape) for (name, t), part in zip(self.tensors.items(), parts, strict=True)}


def groups_of(tensors: Mapping[str, torch.Tensor], trained: frozenset[str]) -> list[_Group]:
    kinds: dict[tuple[torch.dtype, bool], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, name not in trained), {})[name] = tensor
    found = []
    for (_, averaged), members in kinds.items():
        group = _Group(members, averaged, torch.empty(0), torch.empty(0))
        group.local = group.gathered()
        group.left_over = torch.zeros_like(group.local)
        found.append(group)
    return found


class Assembly:
    """Where the members of a process group wait for each other; not for those who have left or are dead."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._number = 0
        store.set(f"process/{rank}", Process.this().model_dump_json())

    def come(self) -> None:
        self._number += 1
        self._store.set(f"assembly {self._number}/{self._rank}", "")
        self._store.add(f"assembly {self._number}", 1)

    @property
    def is_complete(self) -> bool:
        come, left = (self._store.add(name, 0) for name in (f"assembly {self._number}", "left"))
        return come + left >= self._world

    def missing(self) -> list[int]:
        """Ranks that might still come. Of another host it is not known who is dead."""
        return [rank for rank in range(self._world) if not self._is_here_or_gone(rank)]

    def _is_here_or_gone(self, rank: int) -> bool:
        if self._store.check([f"assembly {self._number}/{rank}"]) or self._store.check([f"left/{rank}"]):
            return True
        said = f"process/{rank}"
        if not self._store.check([said]):
            return False
        return parse_json(Process, self._store.get(said).decode(), said).life() is Life.GONE

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have left before
            self._store.set(f"left/{self._rank}", "")
            self._store.add("left", 1)


class Served:
    """The road over `replica`. pieces: of each piece, its group and where it lies in it. assembly: if workers are a
    process group."""

    def __init__(
        self,
        recipe: Recipe,
        replica: Replica,
        groups: Sequence[_Group],
        pieces: Sequence[tuple[int, int, int]],
        optimizer: torch.optim.Optimizer,
        recorder: Recorder,
        deadline_s: float,
        beside: Service | None,
        raise_nonfinite: bool,
        assembly: Assembly | None,
        num_workers: int,
    ) -> None:
        self._sync: Sync = recipe.sync
        self._replica, self._groups, self._pieces = replica, groups, pieces
        self._optimizer, self._recorder, self._deadline_s = optimizer, recorder, deadline_s
        self._beside, self._raise_nonfinite = beside, raise_nonfinite
        self._assembly, self._num_workers = assembly, num_workers
        self._codec = recipe.codecs[0].name if recipe.codecs else ""
        self._num_steps = self._seq = 0
        self._num_samples: int | None = None
        self._went_on_s = recorder.clock()
        self.plan = _plan_of(str(recipe.schedule), groups)
        self._wait(lambda held: held.version >= 0, "get the parameters that servers have")
        self._take_over()

    # - Steps

    def count(self, num_samples: int) -> None:
        self._num_samples = (self._num_samples or 0) + num_samples

    def stepped(self) -> None:
        self._num_steps += 1
        if self._num_steps % self._sync.period == 0:
            self._exchange(self._may_go_on)
        else:
            self._replica.turn(0.0)  # a server that was lost is looked for in time

    @torch.no_grad()
    def average(self) -> None:
        """Without a process group nobody can tell who is to come: this worker has what servers have then."""
        self._exchange(_is_answered, asked=True)
        if self._assembly is None or self._sync.staleness == 0:
            return
        # Everybody's deltas are in; nobody adds another one before everybody has got what they sum up to.
        self._assemble(self._assembly)
        self._ask()
        self._assemble(self._assembly)

    @torch.no_grad()
    def _ask(self) -> None:
        """For what servers have, with nothing of this worker's own."""
        self._push([torch.zeros_like(group.local) for group in self._groups], in_full=True)
        self._wait(_is_answered, "get what all have pushed")
        self._take_over()

    def _assemble(self, assembly: Assembly) -> None:
        assembly.come()
        end_s = time.monotonic() + self._deadline_s
        look_s = time.monotonic() + LOOK_S
        while not assembly.is_complete:
            self._replica.turn(ASSEMBLY_LOOK_S)
            if time.monotonic() < look_s:
                continue
            look_s = time.monotonic() + LOOK_S
            missing = assembly.missing()
            if not missing:
                return
            if time.monotonic() > end_s:
                names = ", ".join(map(str, missing))
                raise DeadlineError(
                    f"waited {self._deadline_s:g} s for all workers to call average(): rank {names} did not",
                    tuple(missing),
                )

    def finish(self) -> None:
        self._wait(_is_answered, "hear that everything has arrived")

    def cut(self, meet: Callable[[], None]) -> None:
        """A cut is consistent if the parameters that are saved hold all that any worker counts as pushed, and nothing
        else. Servers apply pushes in one order: each worker pushes what it has and waits until it is in; when all have,
        each asks once more, and gets what everybody pushed. What a codec has not sent is in no parameters, and saved by
        the worker that keeps it.

        Under rounds (staleness 0) the first exchange is one that all of them took part in."""
        self._exchange(_is_answered, asked=True)
        meet()
        if self._sync.staleness:
            self._ask()
            meet()  # who goes on must not push before all have asked

    @torch.no_grad()
    def _exchange(self, enough: Callable[[Held], bool], *, asked: bool = False) -> None:
        """asked: out of turn, for a plain mean."""
        counts = self._num_samples != 0
        changes = [self._change(group, counts) for group in self._groups]
        if not all(is_finite(change) for change in changes):
            self._go_back()
            changes = [torch.zeros_like(change) for change in changes]
        self._push(changes, in_full=not counts, asked=asked)
        began_s = self._recorder.clock()
        self._wait(enough, f"go on after exchange {self._seq}")
        until_s = began_s + PATIENCE * (began_s - self._went_on_s)
        while self._recorder.clock() < until_s and any(held.pending for held in self._replica.pieces):
            self._replica.turn(until_s - self._recorder.clock())
        self._went_on_s = self._recorder.clock()
        self._recorder.add(Span("exposed", "exchange", MAIN, began_s, self._recorder.clock(), self._num_steps))
        self._take_over()
        if self._sync.moments == "reset":
            self._optimizer.state.clear()

    def _push(self, changes: Sequence[torch.Tensor], *, in_full: bool = False, asked: bool = False) -> None:
        """in_full: as they are, whatever the codec."""
        self._seq += 1
        samples, self._num_samples = self._num_samples, self._num_samples and 0
        for number, (group, start, stop) in enumerate(self._pieces):
            change = changes[group][start:stop]
            payload, code = (change, PLAIN) if in_full else self._written(self._groups[group], change, start, stop)
            self._replica.push(number, change, payload, self._seq, samples, code, asked=asked)

    def _change(self, group: _Group, counts: bool) -> torch.Tensor:
        """counts: samples are behind it, or nobody counts them. Else it is nothing, and what a codec has left over
        waits; where all are waited for, servers see that, and take the mean if nobody has any."""
        if not counts and self._sync.staleness:
            return torch.zeros_like(group.local)
        change = group.gathered().sub_(group.local)
        return change.add_(group.left_over) if self._codec and counts else change

    def _written(self, group: _Group, change: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """What is pushed, and how it is written. What that leaves over is kept."""
        if not self._codec or group.averaged:
            return change, PLAIN
        left = group.left_over[start:stop]
        if self._codec in _CASTS:
            payload = change.to(_CASTS[self._codec])
            left.copy_(change).sub_(payload.to(change.dtype))
            return payload, PLAIN
        codes = Codes(Int8(), shard_of(len(change)), change.device)
        waits = change.float()
        codes.write(change.float(), waits, lambda like: like)
        left.copy_(waits)
        return codes.flat, INT8

    def _may_go_on(self, held: Held) -> bool:
        if self._sync.staleness == 0:
            return _is_answered(held)
        if len(held.pending) > MOST_PENDING:
            return False
        clocks = held.clocks()
        mine = clocks.get(self._replica.number)
        if mine is None:
            return _is_answered(held)  # its first: it has to be there before others count on it
        return min(clocks.values()) >= mine + len(held.pending) - self._sync.staleness

    def _wait(self, enough: Callable[[Held], bool], purpose: str) -> None:
        end_s = time.monotonic() + self._deadline_s
        self._replica.turn(0.0)
        while not all(enough(held) for held in self._replica.pieces):
            self._replica.turn(LOOK_S)
            if time.monotonic() > end_s:
                raise DeadlineError(f"waited {self._deadline_s:g} s to {purpose}; {self._who_is_behind()}")

    def _who_is_behind(self) -> str:
        if lost := self._replica.lost:
            return lost
        self._replica.ask_clocks()
        for _ in range(5):
            self._replica.turn(LOOK_S)
        clocks: dict[int, int] = {}
        for held in self._replica.pieces:
            for number, clock in held.clocks(newest=True).items():
                clocks[number] = min(clock, clocks.get(number, clock))
        if not clocks:
            return "servers have no parameters yet: have all workers come, and the one that brings them?"
        slowest = min(clocks.values())
        names = ", ".join(str(number) for number, clock in sorted(clocks.items()) if clock == slowest)
        return f"worker {names} is at clock {slowest}, this one ({self._replica.number}) at {self._seq}"

    @torch.no_grad()
    def _take_over(self) -> None:
        """The newest copies, and what is pushed and not in there."""
        for held, (number, start, stop) in zip(self._replica.pieces, self._pieces, strict=True):
            local = self._groups[number].local[start:stop]
            local.copy_(held.values)
            part = 1.0 / max(1, len(held.clocks()))
            for delta in held.pending:
                local.add_(delta.change, alpha=part)
        for group in self._groups:
            group.spread_out()

    def _go_back(self) -> None:
        words = f"worker {self._replica.number}: its parameters are inf or nan"
        for group in self._groups:
            group.left_over.zero_()
        self._optimizer.state.clear()
        if self._raise_nonfinite:
            raise NonFiniteError(f"{words}; what servers have is as before")
        _log.warning("%s: it goes back to what servers have, and its optimizer begins anew", words)

    # - State

    def memory(self) -> tuple[int, int, int]:
        pending = sum(d.payload.nbytes + d.change.nbytes for held in self._replica.pieces for d in held.pending)
        kept = sum(held.values.nbytes for held in self._replica.pieces)
        kept += sum(group.local.nbytes + (group.left_over.nbytes if self._codec else 0) for group in self._groups)
        return 0, pending, kept

    def state_dict(self) -> dict[str, Any]:
        return {"parameters": "are the model's"}

    def kept(self) -> dict[str, Any]:
        left = {name: part.clone() for group in self._groups for name, part in group.named(group.left_over).items()}
        return {"steps": self._num_steps, "left_over": left}

    def load_state_dict(self, state: Mapping[str, Any], given: Shares) -> None:
        """Parameters are what servers have: whoever is to bring others loads them before it attaches."""
        named = {name: part for group in self._groups for name, part in group.named(group.left_over).items()}
        for each in given.states:
            if not {"steps", "left_over"} <= each.keys() or each["left_over"].keys() != named.keys():
                raise UsageError("the state was saved with another synchronisation or model")
            if any(each["left_over"][name].shape != part.shape for name, part in named.items()):
                raise UsageError("the state was saved for another model")
        # Servers take the mean: as much of it is sent in all, however many workers there are now.
        factor = 1.0 if given.is_own else given.factor * self._num_workers / given.saved_by
        for name, part in named.items():
            part.copy_(sum(each["left_over"][name] for each in given.states) * factor)
        self._num_steps = count(given.states[0], "steps")

    def close(self) -> None:
        self._leave()
        if not self._replica.deliver(min(LEAVE_S, self._deadline_s)):
            _log.warning("worker %d leaves, and what it pushed last may be missing", self._replica.number)
        self._replica.close()
        if self._beside is not None:
            # Others may need what this worker's server keeps.
            self._beside.stop(patience_s=self._deadline_s)

    def abandon(self, words: str) -> None:
        self._leave()
        self._replica.abandon()
        if self._beside is not None:
            self._beside.stop()

    def _leave(self) -> None:
        if self._assembly is not None:
            self._assembly.leave()


def _is_answered(held: Held) -> bool:
    return not held.pending


# - Meeting


def open_served(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    process_group: dist.ProcessGroup | None,
    settings: Settings,
    deadline_s: float,
    raise_nonfinite: bool = False,
) -> Flow:
    """With a process group, of its members; without, as one of the job's workers, whoever they are."""
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise UsageError(f"recipe '{recipe}': -ps runs on CPUs only")
    if complex_ones := [name for name, parameter in trainable(model).items() if parameter.is_complex()]:
        raise UsageError(f"recipe '{recipe}': servers keep real numbers, {complex_ones[0]!r} is complex; leave -ps out")
    wanted = settings.servers(recipe.num_servers)
    if dist.is_initialized():
        group = process_group or dist.group.WORLD
        assert group is not None
        store, world = store_beside(group), dist.get_world_size(group)
        number = dist.get_rank(group)
        assembly = Assembly(store, number, world)
    else:
        if not recipe.num_servers or not settings.job[0]:
            raise UsageError(
                f"recipe '{recipe}': torch.distributed is not set up. Call init_process_group() first; or, for workers "
                "that come and go, name the number of servers (-ps:1) and start the job with `gradientflow run "
                "--elastic`, or set MASTER_ADDR and MASTER_PORT to where `gradientflow store` runs"
            )
        store, world = dist.PrefixStore("table", store_of_job(*settings.job)), settings.world
        number = store.add("workers", 1) - 1
        assembly = None
    beside: Service | None = None
    if not recipe.num_servers:
        beside = Service(settings.address, wanted.lock_at(settings.address))
        register(dist.PrefixStore("servers", store), number, beside.invitation)
        beside.start()
    num_servers = recipe.num_servers or world
    entries = store_of_job(*settings.job) if recipe.num_servers else dist.PrefixStore("servers", store)
    try:
        _wait_for_keys(entries, [str(slot) for slot in range(num_servers)], deadline_s, "servers")
        where = StoreDirectory([(entries, str(slot)) for slot in range(num_servers)])
        groups = groups_of(shared_tensors(model), frozenset(trainable(model)))
        places, pieces = _placed(groups, num_servers)
        facts = {"recipe": str(recipe), "servers": str(num_servers)}
        facts |= describe_tensors("shared", shared_tensors(model)) | _frozen(model)
        may_be_first = number == 0 or not dist.is_initialized()
        space, world, is_first = _meet(store, number, facts, world, deadline_s, may_be_first)
    except BaseException:
        if beside is not None:
            beside.stop()
        raise
    sync = recipe.sync
    staleness = -1 if sync.staleness == math.inf else int(sync.staleness)
    files = KeyFiles.read(wanted.keys) if wanted.keys else None
    founding = [groups[group].local[start:stop] for group, start, stop in pieces] if is_first else None

    def terms(num_pieces: int) -> Terms:
        return Terms(staleness, sync.outer.lr, sync.outer.momentum, sync.outer.warmup, world, num_pieces)

    def open_road(recorder: Recorder) -> tuple[Road, RunDirectory | None]:
        replica = Replica(where, number, space, terms, places, files, founding)
        try:
            rest = (optimizer, recorder, deadline_s, beside, raise_nonfinite, assembly, world)
            network = Network(backend="servers", hosts=(socket.gethostname(),))
            directory = run_directory(settings.run_directory, recipe, world, network, is_first=is_first)
            return Served(recipe, replica, groups, pieces, *rest), directory
        except BaseException:
            replica.abandon()
            if beside is not None:
                beside.stop()
            raise

    return DeltaFlow(model, optimizer, recipe, number, (number, max(world, number + 1)), open_road)


def _placed(groups: Sequence[_Group], num_servers: int) -> tuple[list[Place], list[tuple[int, int, int]]]:
    total = sum(group.local.nbytes for group in groups)
    nbytes = partition_nbytes(total, num_servers)
    pieces = [
        (number, start, stop)
        for number, group in enumerate(groups)
        for start, stop in cut(group.local.numel(), group.local.itemsize, nbytes)
    ]
    sizes = [[(stop - start) * groups[number].local.itemsize for number, start, stop in pieces]]
    (slots,) = spread(sizes, [1.0 / num_servers] * num_servers)
    places = [
        Place(slot, groups[number].local.dtype, stop - start, groups[number].averaged)
        for slot, (number, start, stop) in zip(slots, pieces, strict=True)
    ]
    return places, pieces


class _Meeting(NamedTuple):
    #: What the table is known by.
    space: int
    #: How many begin.
    world: int
    #: Whether this worker brings the parameters.
    is_first: bool


def _meet(
    store: dist.Store, number: int, facts: Mapping[str, str], world: int, deadline_s: float, may_be_first: bool
) -> _Meeting:
    """The first worker says what it has, the others compare. Not by number, where workers come and go: whoever has a
    number may die before it has come this far."""
    if may_be_first:
        space = secrets.randbits(56)
        words = json.dumps({"space": space, "world": world, "facts": dict(facts)})
        if store.compare_set("facts", "", words) == words.encode():
            return _Meeting(space, world, True)
    _wait_for_keys(store, ["facts"], deadline_s, "the first worker")
    first = json.loads(store.get("facts"))
    theirs: dict[str, str] = first["facts"]
    for item in dict.fromkeys([*theirs, *facts]):
        if theirs.get(item) != facts.get(item):
            raise DisagreementError(
                f"worker {number}, {item}: expected {theirs.get(item, 'nothing of that name')} (as on the first), "
                f"found {facts.get(item, 'nothing of that name')}; nothing was sent"
            )
    return _Meeting(int(first["space"]), int(first["world"]), False)


def _frozen(model: nn.Module) -> dict[str, str]:
    """What is not exchanged must be the same from the beginning."""
    digest = hashlib.sha256()
    names = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            names.append(name)
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {"frozen parameters": f"{len(names)} of digest {digest.hexdigest()[:16]}"} if names else {}


def _wait_for_keys(store: dist.Store, keys: list[str], deadline_s: float, what: str) -> None:
    end_s, pause_s = time.monotonic() + deadline_s, 0.005
    while not store.check(keys):
        if time.monotonic() > end_s:
            missing = [key for key in keys if not store.check([key])]
            raise DeadlineError(f"waited {deadline_s:g} s for {what}; missing: {', '.join(missing)}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def _plan_of(schedule: str, groups: Sequence[_Group]) -> Plan:
    """A message for each group: servers know pieces by name, and there is no order."""
    messages = [
        Message(
            slices=tuple(Slice(tensor=name, start=0, stop=tensor.numel()) for name, tensor in group.tensors.items())
        )
        for group in groups
    ]
    layout = tuple(name for group in groups for name in group.tensors)
    return Plan(schedule=f"{schedule}, kept by servers", layout=layout, messages=tuple(messages))
