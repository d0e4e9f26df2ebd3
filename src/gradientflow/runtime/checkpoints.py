"""Checkpoints that a crash cannot spoil: `save` and `load`, for all ranks of a job together.

    checkpoints/                    what is given; on a file system that all ranks see
        41/  42/                    complete ones, the highest number is the newest
            manifest.json           who saved, and size and checksum of each file
            common.pt               what all ranks have alike, written by rank 0
            rank-0.pt, rank-1.pt    what each keeps for itself
        .partial-43-1f0c            one that is being written, or was when somebody was killed
            writer.json             the process that began it
        .removed-40-77ab            one that is on its way out

A checkpoint is written under another name, each file down to the disk, and has its number only when all of it is there:
renaming a directory is one step. What is loaded was complete once, is as long as it was then and has the same checksum.
Files are read as data: archives without compression, no longer than they are, of tensors, numbers, words and containers
of these (`weights_only`).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import re
import secrets
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field

from gradientflow.documents import Document, Record, write_text
from gradientflow.errors import DocumentError, GradientFlowError, UsageError
from gradientflow.exchange.control import Control
from gradientflow.exchange.health import Health, Process
from gradientflow.exchange.verdict import Life
from gradientflow.runtime.handle import DEADLINE_S, Flow
from gradientflow.runtime.states import RANKS, name_of, taken_over

_log = logging.getLogger(__name__)

MANIFEST, COMMON, WRITER = "manifest.json", "common.pt", "writer.json"
#: Names in a checkpoint that are this module's own.
FLOW, RANDOM, RANDOM_CUDA = "flow", "random", "random_cuda"
#: Of a pickle inside an archive: it names tensors, of which there are at most some thousands.
MAX_PICKLE_NBYTES = 64 * 2**20
#: What a tensor that repeats itself may take when it is copied.
EXPANDED_NBYTES = 16 * 2**20
#: Read at a time for a checksum.
_BLOCK = 2**20
_PARTIAL, _REMOVED = ".partial-", ".removed-"
#: What was begun by a process that cannot be looked at, on another host, is removed after so long.
FORSAKEN_S = 3600.0

T = TypeVar("T")


class File(Record):
    nbytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=2**32)


class Manifest(Document):
    """`manifest.json`."""

    world: int = Field(ge=1, le=10**6)
    saved: str
    files: dict[str, File]


# - Saving


def save(
    directory: str | os.PathLike[str],
    flow: Flow | None = None,
    *,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
    deadline_s: float = DEADLINE_S,
    **states: Any,
) -> Path | None:
    """Write a checkpoint of `flow` and `states` into `directory`, where the `keep` newest stay. Returns where it is.

    Collective. `states` are things with a `state_dict()`, such as model and optimizer, or plain values; where workers
    differ (Local SGD, DiLoCo, SSP, ASP) each rank's are saved, else rank 0's. The state of torch's random generator is
    saved beside them, as "random". If it fails on any rank it does on all, and the checkpoints from before are as they
    were. A rank that does not come is named: at once if it is dead, else after `deadline_s`.

    Where workers come and go (`gradientflow run --elastic`) the first of them writes what all have alike, by itself;
    the others do not wait for it, and get None.

        gf.save("checkpoints", flow, model=model, optimizer=optimizer, step=step)
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: at least the newest checkpoint has to stay")
    if taken := {FLOW, RANDOM, RANDOM_CUDA, RANKS} & states.keys():
        raise UsageError(f"{min(taken)!r} is a name of the checkpoint's own: give it another")
    crew = flow.crew if flow else None
    if crew is not None and crew.generation and crew.rank:
        return None
    with _meeting(process_group, deadline_s, "write a checkpoint") as ranks:
        if flow is not None:
            flow.cut(ranks.meet)
        ranks.from_first(lambda: _claim(Path(directory), process_group))
        return _save(Path(directory), flow, states, ranks, keep)


def _claim(path: Path, given: dist.ProcessGroup | None) -> str:
    """Of one job, one group of ranks saves into a directory: who loads the newest must not get another's."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or given is None or dist.get_world_size(given) == dist.get_world_size():
        return ""
    store, key = dist.PrefixStore("gradientflow/checkpoints", world.get_group_store()), f"who saves {path.resolve()}"
    ours = ", ".join(map(str, dist.get_process_group_ranks(given)))
    theirs = store.compare_set(key, "", ours).decode()
    if set(ours.split(", ")).isdisjoint(theirs.split(", ")):
        raise UsageError(
            f"{path}: another group, of ranks {theirs}, saves into it, and these are {ours}: let one group save what "
            "all have, or give each a directory of its own"
        )
    store.set(key, ours)  # torchrun keeps a store through restarts, after which groups may be others
    return ""


def _save(path: Path, flow: Flow | None, states: Mapping[str, Any], ranks: _Ranks, keep: int) -> Path:
    everybodys, own = ranks.agreed(lambda: _sorted(flow, states, ranks))
    partial = path / ranks.from_first(lambda: _begin(path))
    try:
        written = {f"rank-{ranks.rank}.pt": own} | ({COMMON: everybodys} if ranks.rank == 0 else {})
        told = ranks.to_first(lambda: {name: _write(partial / name, state) for name, state in written.items()})
        files = {name: File.model_validate(file) for each in told for name, file in each.items()}
        return path / ranks.from_first(lambda: _finish(path, partial, ranks.world, files, keep))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _sorted(flow: Flow | None, states: Mapping[str, Any], ranks: _Ranks) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one rank writes for all, and what each writes."""
    found = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in states.items()}
    own: dict[str, Any] = {RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        own[RANDOM_CUDA] = torch.cuda.get_rng_state()
    if flow is None:
        return found, own
    state = flow.state_dict()
    kept = state.pop(RANKS, {})
    if flow.crew is not None and flow.crew.generation:
        return {FLOW: state, **found}, own  # who comes later begins with nothing left over
    if not kept.keys() <= {name_of(ranks.rank, ranks.world)}:
        raise UsageError("the flow is of other ranks than those that save: give its process_group to save() and load()")
    own[FLOW] = {RANKS: kept} if kept else {}
    return ({FLOW: state, **found}, own) if flow.alike else ({FLOW: state}, {**own, **found})


def _begin(path: Path) -> str:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise DocumentError(f"{path}: is no directory, and checkpoints need one: give another") from None
    _clear(path)
    name = f"{_PARTIAL}{max(_numbers(path), default=0) + 1}-{secrets.token_hex(4)}"
    (path / name).mkdir()
    (path / name / WRITER).write_text(Process.this().model_dump_json())
    return name


def _clear(path: Path) -> None:
    """Remove what nobody will finish."""
    for old in path.glob(f"{_REMOVED}*"):
        shutil.rmtree(old, ignore_errors=True)
    for old in path.glob(f"{_PARTIAL}*"):
        writer, life = None, Life.UNKNOWN
        with contextlib.suppress(OSError, ValueError):  # it may be torn, or just being written
            writer = Process.model_validate_json((old / WRITER).read_text())
            life = writer.life()
        if writer is not None and writer != Process.this() and life in (Life.RUNNING, Life.STOPPED):
            raise UsageError(
                f"{path}: another job, process {writer.pid}, is saving into it: give each a directory of its own"
            )
        with contextlib.suppress(OSError):  # its writer may finish it now
            if life is not Life.UNKNOWN or time.time() - old.stat().st_mtime > FORSAKEN_S:
                shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, state: Mapping[str, Any]) -> dict[str, int]:
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: rank 0 made it, and it is not here: give a directory that all ranks share")
    with open(path, "xb", buffering=0) as raw:
        file = _Written(raw)
        try:
            torch.save(dict(state), file)  # type: ignore[arg-type]
            os.fsync(raw.fileno())
        except Exception as error:
            why = file.failed or (error if isinstance(error, OSError) else None)
            if why is None:
                raise
            raise DocumentError(f"{path}: {why.strerror or why}") from None
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        raise UsageError(
            f"a checkpoint holds tensors, numbers, words and containers of these, found {unsafe[0]}: save what it is "
            "made of, or leave it out"
        )
    return {"nbytes": path.stat().st_size, "crc32": _crc32(path)}


class _Written:
    """A file for `torch.save`, which has words of its own for whatever goes wrong there ("unexpected pos 25088")."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        left = memoryview(content).cast("B")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.failed = error
            raise
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Nothing is held back."""


def _finish(path: Path, partial: Path, world: int, files: Mapping[str, File], keep: int) -> str:
    for name, file in files.items():
        there = partial / name
        if not there.is_file() or there.stat().st_size != file.nbytes:
            raise UsageError(f"{there}: a rank wrote it, rank 0 cannot see it: give a directory that all ranks share")
    manifest = Manifest(world=world, saved=datetime.now(UTC).isoformat(timespec="seconds"), files=dict(files))
    write_text(partial / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    _sync(partial / MANIFEST)
    (partial / WRITER).unlink(missing_ok=True)
    _sync(partial)
    number = max(_numbers(path), default=0) + 1
    os.rename(partial, path / str(number))
    _sync(path)
    with contextlib.suppress(OSError):  # what is new is there, whatever becomes of the old
        # Of other directories that happen to be numbers none is ours to remove.
        for old in sorted(each for each in _numbers(path) if (path / str(each) / MANIFEST).is_file())[:-keep]:
            # Away from its number first: one that is half removed must not look like one.
            going = path / f"{_REMOVED}{old}-{secrets.token_hex(4)}"
            os.rename(path / str(old), going)
            shutil.rmtree(going, ignore_errors=True)
    return str(number)


def _sync(path: Path) -> None:
    """Down to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# - Loading


def load(
    directory: str | os.PathLike[str],
    number: int | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    deadline_s: float = DEADLINE_S,
) -> dict[str, Any]:
    """What `save` was given, of the newest checkpoint in `directory` or of the one with that number; {} if there is
    none yet. Collective.

    This rank's own where ranks differ. In a world of another size, what codecs have not sent is shared out among the
    ranks there are now.

        flow = gf.attach(model, optimizer, recipe)
        if saved := gf.load("checkpoints"):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            flow.load_state_dict(saved["flow"])  # the last of them
            torch.set_rng_state(saved["random"])  # only in a world of the same size
    """
    path = Path(directory)
    with _meeting(process_group, deadline_s, "read a checkpoint") as ranks:
        chosen = ranks.from_first(lambda: _chosen(path, number))
        if not chosen:
            _log.info("no checkpoint in %s yet", path)
            return {}
        return ranks.agreed(lambda: _read_all(path / chosen, ranks.rank, ranks.world))


def _chosen(path: Path, number: int | None) -> str:
    found = _numbers(path)
    if number is not None and number not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise DocumentError(f"{path}: no checkpoint {number}; there are {there}")
    return str(number or max(found)) if found else ""


def _numbers(path: Path) -> list[int]:
    try:
        names = [entry.name for entry in os.scandir(path) if _is_directory(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror or error}") from None
    return [int(name) for name in names if re.fullmatch("[1-9][0-9]{0,17}", name)]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _read_all(path: Path, rank: int, world: int) -> dict[str, Any]:
    if (path / MANIFEST).exists() and not (path / MANIFEST).is_file():  # a pipe would be waited for
        raise DocumentError(f"{path / MANIFEST}: is no file")
    manifest = Manifest.read(path / MANIFEST)
    taken = taken_over(rank, world, manifest.world) or [0]
    own = [_read(path, f"rank-{each}.pt", manifest) for each in taken]
    common = _read(path, COMMON, manifest)
    found = {**own[0], **common}
    if world != manifest.world:
        # Some ranks would draw the same numbers.
        found.pop(RANDOM, None)
        found.pop(RANDOM_CUDA, None)
    if FLOW in common:
        if not isinstance(common[FLOW], Mapping):
            raise DocumentError(f"{path / COMMON}: expected a flow's state, found {type(common[FLOW]).__name__}")
        kept: dict[str, Any] = {}
        for each, state in zip(taken, own, strict=True):
            ranks = state.get(FLOW, {}).get(RANKS, {}) if isinstance(state.get(FLOW), Mapping) else {}
            kept |= {name_of(each, manifest.world): value for value in ranks.values()}
        found[FLOW] = {**common[FLOW], **({RANKS: kept} if kept else {})}
    return found


def _read(path: Path, name: str, manifest: Manifest) -> dict[str, Any]:
    file, expected = path / name, manifest.files.get(name)
    if expected is None:
        raise DocumentError(f"{path / MANIFEST}: {name} is not in its list: the checkpoint is not whole")
    try:
        nbytes = file.stat().st_size
        if nbytes != expected.nbytes:
            raise DocumentError(f"{file}: torn: it has {nbytes} bytes, and had {expected.nbytes} when it was saved")
        if _crc32(file) != expected.crc32:
            raise DocumentError(f"{file}: damaged: its checksum is not that of what was saved")
    except OSError as error:
        raise DocumentError(f"{file}: {error.strerror or error}") from None
    return read_states(file)


def read_states(file: Path) -> dict[str, Any]:
    """What `torch.save` wrote, or a `DocumentError`; no part of it is executed or made larger than the file is."""
    try:
        _check_archive(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except DocumentError:
        raise
    except OSError as error:
        raise DocumentError(f"{file}: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise DocumentError(f"{file}: holds what no checkpoint does; {str(error).splitlines()[0]:.120}") from None
    except Exception as error:  # torch's reader raises whatever it stumbles over
        raise DocumentError(f"{file}: is no checkpoint that can be read; {type(error).__name__}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise DocumentError(f"{file}: expected states by name, found {type(found).__name__}")
    _check_tensors(file, found)
    return found


def _check_tensors(file: Path, states: object) -> None:
    """One number may be seen as millions of them, which take memory when somebody copies them."""
    waiting, seen = [states], set[int]()
    while waiting:
        here = waiting.pop()
        if isinstance(here, torch.Tensor) and here.layout == torch.strided:
            if here.numel() * here.itemsize > max(here.untyped_storage().nbytes(), EXPANDED_NBYTES):
                raise DocumentError(f"{file}: a tensor in it is longer than what lies there")
        elif isinstance(here, Mapping | list | tuple) and id(here) not in seen:  # one may be inside itself
            seen.add(id(here))
            waiting.extend(here.values() if isinstance(here, Mapping) else here)


def _check_archive(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or total > file.stat().st_size:
        raise DocumentError(f"{file}: is packed, or says that it is longer than it is: torch.save writes neither")
    if any(e.filename.endswith(".pkl") and e.file_size > MAX_PICKLE_NBYTES for e in entries):
        raise DocumentError(f"{file}: its list of tensors is longer than {MAX_PICKLE_NBYTES} bytes")


def _crc32(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


# - Together


class _Ranks:
    """Of a process group; without `control`, a rank is alone."""

    def __init__(self, rank: int, world: int, control: Control | None, purpose: str) -> None:
        self.rank, self.world = rank, world
        self._control, self._purpose = control, purpose

    def agreed(self, work: Callable[[], T]) -> T:
        """What `work` gave here; if it failed on any rank, it does on all."""
        outcome, error = _tried(work)
        self._confer(None, error)
        return outcome  # type: ignore[return-value]

    def from_first(self, work: Callable[[], str]) -> str:
        """What it gave on rank 0."""
        return str(self._confer(*(_tried(work) if self.rank == 0 else ("", None)))[0])

    def to_first(self, work: Callable[[], T]) -> list[T]:
        """What it gave on each rank, on rank 0."""
        return self._confer(*_tried(work))

    def meet(self) -> None:
        self._confer(None, None)

    def _confer(self, outcome: Any, error: Exception | None) -> list[Any]:
        """Rank 0 hears everybody's outcome, and tells the others its own; all hear whose failed."""
        if self._control is None:
            heard, failed = [outcome], _words(error)
        else:
            texts = self._control.to_rank(0, json.dumps([outcome, _words(error)]), self._purpose)
            said = [json.loads(text) for text in texts]  # on rank 0
            heard = [outcome for outcome, _ in said]
            failed = next((f"{words} (rank {rank})" for rank, (_, words) in enumerate(said) if words), "")
            told = self._control.from_rank(0, json.dumps([heard[:1], failed]), self._purpose)
            first, failed = json.loads(told)
            heard = heard or first
        if failed:
            raise DocumentError(failed) from error
        return heard


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the others have to hear of it, whatever it is
        return None, error


def _words(error: Exception | None) -> str:
    if error is None:
        return ""
    words = str(error).partition("\n")[0]
    return words if isinstance(error, GradientFlowError | OSError) and words else f"{type(error).__name__}: {words}"


@contextlib.contextmanager
def _meeting(given: dist.ProcessGroup | None, deadline_s: float, purpose: str) -> Iterator[_Ranks]:
    """Ranks that read or write together. Through the store: a collective would wait for one that does not come for as
    long as the group was told, and then not say for whom."""
    group = (given or dist.group.WORLD) if dist.is_initialized() else None
    if group is None or dist.get_world_size(group) == 1:
        yield _Ranks(0, 1, None, purpose)
        return
    rank, members = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    store = dist.PrefixStore("gradientflow/checkpoints", group.get_group_store())
    health = Health(dist.PrefixStore("beacons", store), rank, members, deadline_s, ())
    health.announce()
    try:
        corner = dist.PrefixStore(Control(store, rank, members, deadline_s, health).meet(purpose), store)
        yield _Ranks(rank, len(members), Control(corner, rank, members, deadline_s, health), purpose)
    finally:
        health.end()
