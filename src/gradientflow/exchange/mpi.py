"""Sums over MPI: each lane a communicator of its own, between the processes that mpirun started.

Everything else (weights, beacons, agreement) stays on the process group: MPI is here because it adds up small messages
several times quicker than Gloo does, which hands each over to a thread.

[Note: progress] An MPI library moves bytes only while somebody is inside one of its calls. So a lane that waits asks
again and again, and its asking is what carries its message. The main thread has nothing else to do meanwhile: it asks
without a pause for a while, only letting others have its core, then after longer and longer sleeps. A lane's own thread
runs beside one that computes, on few cores and under one interpreter lock, and sleeps from the start.

[Note: the end of MPI] A process that mpirun started has to finalize MPI before it exits, or mpirun calls the job
failed. To finalize waits for all other processes, and for ever if one of them will not come. So we finalize when a
script has run to its end, but do not wait long if an exchange was given up on the way; and not at all after an
exception, which is for mpirun to see. Where the script itself initialised MPI, its end is the script's too.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradientflow.documents import Record
from gradientflow.errors import UsageError
from gradientflow.exchange.control import Control
from gradientflow.exchange.road import Pending

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)

#: How long the main thread asks without a pause.
SPIN_S = 10e-3
#: Sleeps between two looks, growing from one to the other.
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 100e-6

#: After a failure, how long to wait at the end of the script for processes that may not come.
LEAVE_S = 3.0

START_WITH_MPIRUN = "start the script with mpirun, as in `mpirun -n 4 python train.py`"

#: Given up, with all that MPI may still write to; see [Note: abandoned operations] in native.py.
_given_up: list[Any] = []
#: Begun and not yet done, in all of this process.
_under_way: set[_Begun] = set()


def library() -> Any:
    """`mpi4py.MPI`, initialised so that several threads may call it at once."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no libmpi
        raise UsageError(
            f"-mpi needs mpi4py and an MPI library ({str(error).splitlines()[0]}): pip install 'gradientflow[mpi]'"
        ) from None
    if MPI.Is_finalized():
        raise UsageError("MPI is finalized already, and cannot be used again in this process")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize, MPI)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError("MPI was initialised for fewer threads than -mpi has: leave mpi4py.rc.thread_level 'multiple'")
    return MPI


class Place(Record):
    """Where MPI has put a rank."""

    rank: int
    size: int


class Mpi:
    """A communicator for each lane. Constructing it is a collective call; `wait` waits for others, and may raise."""

    def __init__(self, control: Control, num_lanes: int, wait: Callable[[Pending], None]) -> None:
        self._mpi = library()
        world = self._mpi.COMM_WORLD
        own = Place(rank=world.rank, size=world.size)
        texts = control.gather(own.model_dump_json(), "learn the other ranks' places in MPI")
        places = [Place.model_validate_json(text) for text in texts]
        _check(places)
        self._lanes: list[MPI.Intracomm] = []
        # In the order of the torch group, which need not be MPI's.
        group = world.group.Incl([place.rank for place in places])
        connecting = _Call(lambda: self._connect(group, num_lanes))
        try:
            wait(connecting)
        except BaseException:
            _given_up.append(connecting)
            raise

    def all_reduce(self, values: torch.Tensor, lane: int) -> Pending:
        assert values.is_contiguous()
        kind, operation = _arithmetic(values.dtype)
        memory = self._mpi.buffer.fromaddress(values.data_ptr(), values.nbytes)
        try:
            request = self._lanes[lane].Iallreduce(self._mpi.IN_PLACE, [memory, values.numel(), kind], operation)
        except self._mpi.Exception as error:
            raise ConnectionError(_words(error)) from error
        return _Begun(request, (values,), self._mpi.Exception)

    def all_gather(self, into: torch.Tensor, values: torch.Tensor, lane: int) -> Pending:
        """`values` of every rank into the rows of `into`."""
        assert values.is_contiguous() and into.is_contiguous()
        own, everyone = (self._mpi.buffer.fromaddress(x.data_ptr(), x.nbytes) for x in (values, into))
        try:
            request = self._lanes[lane].Iallgather([own, self._mpi.BYTE], [everyone, values.nbytes, self._mpi.BYTE])
        except self._mpi.Exception as error:
            raise ConnectionError(_words(error)) from error
        return _Begun(request, (values, into), self._mpi.Exception)

    def all_to_all(
        self, into: torch.Tensor, values: torch.Tensor, into_sizes: list[int], sizes: list[int], lane: int
    ) -> Pending:
        """Of `values`, rank by rank so many, each its part; `into` holds theirs."""
        assert values.is_contiguous() and into.is_contiguous()

        def spread(tensor: torch.Tensor, counts: list[int]) -> list[Any]:
            memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
            nbytes = [count * tensor.itemsize for count in counts]
            return [memory, nbytes, list(itertools.accumulate(nbytes[:-1], initial=0)), self._mpi.BYTE]

        try:
            request = self._lanes[lane].Ialltoallv(spread(values, sizes), spread(into, into_sizes))
        except self._mpi.Exception as error:
            raise ConnectionError(_words(error)) from error
        return _Begun(request, (values, into), self._mpi.Exception)

    def abandon(self) -> None:
        _given_up.append(self._lanes)
        self._lanes = []

    def close(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.Free()

    def _connect(self, group: MPI.Group, num_lanes: int) -> None:
        # Of the members alone: other ranks of the job know nothing of it.
        first = self._mpi.COMM_WORLD.Create_group(group)
        self._lanes = [first, *(first.Dup() for _ in range(num_lanes - 1))]
        for lane in self._lanes:
            lane.Set_errhandler(self._mpi.ERRORS_RETURN)
        group.Free()


class _Begun:
    """An operation that was begun. It keeps the memory that MPI reads and writes."""

    def __init__(self, request: MPI.Request, memory: tuple[torch.Tensor, ...], failure: type[Exception]) -> None:
        self._request, self._memory, self._failure = request, memory, failure
        _under_way.add(self)

    def done_within(self, patience_s: float | None) -> bool:
        """[Note: progress]"""
        began_s = time.perf_counter()
        end_s = began_s + (float("inf") if patience_s is None else patience_s)
        spin_s = SPIN_S if threading.current_thread() is threading.main_thread() else 0.0
        sleep_s = SHORTEST_SLEEP_S
        try:
            while not self._request.Test():
                now_s = time.perf_counter()
                if now_s > end_s:
                    return False
                if now_s - began_s < spin_s:
                    os.sched_yield()
                else:
                    time.sleep(sleep_s)
                    sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)
        except self._failure as error:
            raise ConnectionError(_words(error)) from error
        _under_way.discard(self)
        return True


class _Call:
    """A call that cannot be asked whether it is done, on a thread of its own."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._work, name="gradientflow-mpi", daemon=True)
        self._thread.start()

    def done_within(self, patience_s: float | None) -> bool:
        self._thread.join(patience_s)
        if self._error is not None:
            raise ConnectionError(_words(self._error)) from self._error
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._error = error


def _check(places: list[Place]) -> None:
    """Alike on all ranks, since all see the same places."""
    if len({place.size for place in places}) > 1 or len({place.rank for place in places}) < len(places):
        found = ", ".join(f"{rank} is {place.rank} of {place.size}" for rank, place in enumerate(places))
        raise UsageError(f"the ranks are not the processes of one MPI job (in MPI, rank {found}): {START_WITH_MPIRUN}")


@functools.cache
def _arithmetic(dtype: torch.dtype) -> tuple[Any, Any]:
    """As what MPI moves elements, and how it adds them."""
    mpi = library()
    native = {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.complex64: mpi.C_FLOAT_COMPLEX,
        torch.complex128: mpi.C_DOUBLE_COMPLEX,
    }
    if dtype in native:
        return native[dtype], mpi.SUM
    if dtype in (torch.float16, torch.bfloat16):
        return mpi.UINT16_T, mpi.Op.Create(_adding(dtype), commute=True)
    raise UsageError(f"-mpi has no sum of {dtype}; use -a2a")


def _adding(dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """MPI knows no half precision: torch adds what MPI brings."""

    def add(theirs: Any, ours: Any, kind: Any) -> None:
        torch.frombuffer(ours, dtype=dtype).add_(torch.frombuffer(theirs, dtype=dtype))

    return add


def _words(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _finalize(mpi: Any) -> None:
    """[Note: the end of MPI]"""
    if hasattr(sys, "last_value") or mpi.Is_finalized():
        return
    try:
        _Call(mpi.Finalize).done_within(LEAVE_S if _given_up or _under_way else None)
    except ConnectionError as error:
        _log.warning("MPI could not be finalized: %s", error)
