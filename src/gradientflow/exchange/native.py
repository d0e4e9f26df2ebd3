"""The process group's own all-reduce (NCCL, Gloo), on lanes.

A lane is a process group of our own: what the user does on their group can never get between our
messages, and a small message on one lane is not stuck behind a large one on another. One more such group
moves initial weights and buffers, which may come at any time.

[Note: abandoned operations] A Gloo operation that is given up stays alive in its thread, may write into its
tensors at any later time, and holds up the destructor of its group until its time is over. So a failed
exchange is `abandon`ed: its groups are never used or destroyed again, its memory belongs to it for ever,
and `renewed` builds another with the ranks that come.
"""

from __future__ import annotations

import ctypes
import datetime
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradientflow.compress import Sum
from gradientflow.errors import DeadlineError, DisagreementError, TrainingError
from gradientflow.exchange.control import Control
from gradientflow.exchange.groups import backend_for, new_group, store_beside
from gradientflow.exchange.health import LOOK_S, Health, Process

# Small tensors are packed up to this size before they are broadcast; larger ones go by themselves, in place.
PACK_NBYTES = 4 * 2**20


class Moment(IntEnum):
    """What a broadcast is for."""

    START = 0
    TRAINING = 1
    EVALUATION = 2
    JOIN = 3


class Stamp(NamedTuple):
    """A point of training, the same on all ranks."""

    step: int
    moment: Moment

    def __str__(self) -> str:
        words = ["the start", "a training forward pass", "a forward pass for evaluation", "the end of uneven inputs"]
        return f"{words[self.moment]}, step {self.step}"


class Native:
    """Lanes over the members of `group`, for tensors on `device`. Constructing it is a collective call."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        num_lanes: int,
        deadline_s: float,
        previous: Native | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.global_rank = dist.get_rank()
        self.world = dist.get_world_size(group)
        self.backend = backend_for(group, device)
        self.deadline_s = deadline_s
        self.num_lanes = num_lanes or _default_lanes(self.backend)
        self._group, self._device = group, device
        self._abandoned = False
        self._num_broadcasts = 0
        self._store: dist.Store = dist.PrefixStore("again", previous._store) if previous else store_beside(group)
        known: tuple[Process, ...] = previous.health.processes if previous else ()
        #: The ranks of the group as the whole job counts them.
        self.members = tuple(dist.get_process_group_ranks(group))
        beacons = dist.PrefixStore("beacons", self._store)
        self.health: Health = Health(beacons, self.rank, self.members, deadline_s, known)
        control = dist.PrefixStore("control", self._store)
        self.control = Control(control, self.rank, self.world, deadline_s, self.health)
        self._groups: list[Any] = []
        try:
            self._meet("meet the other ranks again after a failure" if previous else "meet the other ranks")
        except BaseException:
            self.health.end("gave up meeting the other ranks")
            raise

    def _meet(self, purpose: str) -> None:
        self.health.announce()
        texts = self.control.gather(Process.this().model_dump_json(), purpose)
        names = ["side", *(f"lane-{number}" for number in range(self.num_lanes))] if self.world > 1 else []
        # Gloo's own time limit is a backstop: our waits end earlier, and with names.
        limit_s = self.deadline_s + 30
        self._groups = [new_group(self.backend, self._store, name, self.rank, self.world, limit_s) for name in names]
        self.health.start([Process.model_validate_json(text) for text in texts])

    def answer(self, question: Sum, lane: int, number: int = 0, detail: str = "") -> None:
        """Carry out a codec's question in place. Returns when the result is there (on an accelerator: when
        it is queued on the current stream). `number` and `detail` say which exchange this is part of."""
        if self.world == 1:
            return
        group = self._groups[1 + lane]
        self.health.enter("gradients", number, detail)
        try:
            for work in [group.allreduce([tensor]) for tensor in question.tensors]:
                self._wait(work)
        finally:
            self.health.leave()

    def broadcast(self, tensors: Iterable[torch.Tensor], stamp: Stamp, source: int = 0) -> None:
        """Rank `source`'s values into everybody's `tensors`, small ones packed. Beside all lanes.

        The stamp says at which point of training this is; it travels along, since a rank that makes one call
        more than the others would otherwise hand them stale values for ever.
        """
        if self.world == 1:
            return
        self._num_broadcasts += 1
        self.health.enter("broadcast", self._num_broadcasts, str(stamp))
        try:
            theirs = torch.tensor(stamp, device=self._device)
            for pack in _packs([theirs, *tensors]):
                # One contiguous tensor is its own pack: no copy of a large parameter.
                alone = len(pack) == 1 and pack[0].is_contiguous()
                flat = pack[0].view(-1).view(torch.uint8) if alone else _join(pack)
                self._wait(self._groups[0].broadcast(flat, source))
                if not alone:
                    _split(flat, pack)
        finally:
            self.health.leave()
        # To look at it would make an accelerator wait.
        if self._device.type == "cpu" and (found := Stamp(*theirs.tolist())) != stamp:
            raise DisagreementError(
                f"rank {self.rank} is at {stamp} and got what rank {source} sent at {found}: one of them made a "
                "forward pass that the other did not (to evaluate on one rank, call the unwrapped module)"
            )

    def abandon(self, words: str, culprits: tuple[int, ...] = ()) -> None:
        """[Note: abandoned operations]. The other ranks read `words` about this one, and stop waiting."""
        self._abandoned = True
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups = []
        self.health.end(words, culprits)

    def renewed(self) -> Native:
        """Another exchange with the same members, after this one was abandoned on all of them. Collective."""
        return Native(self._group, self._device, self.num_lanes, self.deadline_s, self)

    def close(self) -> None:
        """Give the connections back."""
        self.health.end()
        groups, self._groups = self._groups, []
        for group in groups:
            group.shutdown()

    def _wait(self, work: dist.Work) -> None:
        if self.backend == "nccl":
            # Orders the current stream behind the work. With a timeout NCCL would block this thread
            # instead; its watchdog holds the lane to the deadline the group was made with.
            self._attempt(work, None)
            return
        patience = datetime.timedelta(seconds=min(LOOK_S, self.deadline_s))
        while not self._attempt(work, patience):
            if self._abandoned:
                raise TrainingError("this exchange was given up")
            self.health.check()

    def _attempt(self, work: dist.Work, patience: datetime.timedelta | None) -> bool:
        """Wait for `work`; False if it is not done after `patience`."""
        try:
            if patience is None:
                work.wait()
            else:
                work.wait(patience)
        except RuntimeError as error:
            words = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
            # The wait's own words; a failed operation has others, also when it is Gloo's time that is over.
            if words == "Operation timed out!":
                return False
            if "timed out" in words.lower() or "timeout" in words.lower():
                raise DeadlineError(f"no answer from the group within {self.deadline_s:g} s ({words})") from error
            if self._abandoned or self.backend == "nccl":
                raise TrainingError(f"the group's communication failed ({words})") from error
            raise self.health.find_culprit(words) from error
        return True


def _default_lanes(backend: str) -> int:
    """Two lanes hide one message's start-up behind the other's transfer. NCCL's communicators compete for
    the same GPU, so there it is one unless the recipe asks for more."""
    return 1 if backend == "nccl" else 2


def _packs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups of at most `PACK_NBYTES`, or one larger tensor."""
    packs: list[list[torch.Tensor]] = []
    room = 0
    # Wide elements first, so that every piece of the joined bytes starts at a multiple of its own width.
    # `.data`: a buffer may be written between two forward passes whose backward is still to come.
    for tensor in sorted((tensor.data for tensor in tensors), key=lambda tensor: -tensor.itemsize):
        if not tensor.numel():
            continue
        if tensor.nbytes > room:
            packs.append([])
            room = PACK_NBYTES
        packs[-1].append(tensor)
        room -= tensor.nbytes
    return packs


def _join(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    # A slice with a step is "reshaped" to another view of itself, whose bytes are not in a row.
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in pack])


def _split(flat: torch.Tensor, pack: Sequence[torch.Tensor]) -> None:
    for tensor, piece in zip(pack, torch.split(flat, [tensor.nbytes for tensor in pack]), strict=True):
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
