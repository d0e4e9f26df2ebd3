"""Files and frames as an enemy or a broken disk would make them, and what is to become of them.

Each `Kind` has something valid, ways to spoil it, and whatever reads it. The law: what reads it gives a valid object or
raises one line that a user can act on, which names the file, within seconds; nothing else.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import struct
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gradientflow as gf
from gradientflow.bench.results import Results
from gradientflow.cost.table import Line
from gradientflow.documents import read_text
from gradientflow.errors import UserError
from gradientflow.exchange.server.keys import KeyFiles
from gradientflow.exchange.server.ledger import Ledger
from gradientflow.exchange.server.table import Tables
from gradientflow.exchange.server.wire import (
    Copy,
    Header,
    Key,
    Mark,
    Name,
    Refused,
    Terms,
    pack_copy,
    pack_hello,
    pack_join,
    pack_names,
    read_copy,
)
from gradientflow.exchange.server.wire import (
    Kind as FrameKind,
)
from gradientflow.network import Measurement, Network, Sample
from gradientflow.plan import Plan
from gradientflow.probe.readers import read_nccl_tests, read_osu
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.rundir import Run
from gradientflow.runtime.tuning import read_field
from gradientflow.schedule import lazy
from gradientflow.sim import cluster
from gradientflow.trace import Span, Trace, write_merged

#: Nothing here is larger than a few kilobytes.
LIMIT_S = 5.0
LONGEST_LINE = 1000

PROFILE = Profile(
    tensors=tuple(
        TensorProfile(name=f"layer.{n}.{kind}", shape=shape, forward_order=n, forward_s=1e-3, backward_s=2e-3)
        for n in range(4)
        for kind, shape in (("weight", (8, 6)), ("bias", (8,)))
    ),
    flops=1e6,
)
NETWORK = Network(
    backend="gloo",
    hosts=("a", "b"),
    measurements=tuple(
        Measurement(
            operation=operation,
            ranks=(0, 1),
            samples=tuple(
                Sample(nbytes=4**n, median_s=1e-5 * n, p10_s=1e-6 * n, p90_s=1e-4 * n, num_samples=5)
                for n in range(1, 6)
            ),
            alpha_s=1e-5,
            beta_s_per_byte=1e-9,
            residual=0.1,
            rate_bits_s=1e9,
        )
        for operation in ("all_reduce", "p2p")
    ),
)
TRACE = Trace(
    rank=1,
    epoch_s=1000.0,
    spans=tuple(
        Span("message", f"layer.{n}", "lane 0", n, n + 0.5, n, {"message": float(n), "nbytes": 64.0}) for n in range(5)
    ),
)
CLUSTER = """
version = 1
name = "two"
hosts = 4
workers_per_host = 2
[inside]
bits_per_s = 1e11
[between]
protocol = "raw"
bits_per_s = 1e10
latency_s = 1e-5
[topology]
kind = "fat-tree"
hosts_per_switch = 2
oversubscription = 2.0
[collective]
launch_s = 1e-5
trees = true
[[believed]]
workers = 8
alpha_s = 1e-4
beta_s_per_byte = 1e-10
"""
NCCL = {
    "args": ["build/all_reduce_perf", "-J"],
    "config": {"devices": [0, 1], "nthreads": 1, "ngpus": 1},
    "results": [{"size": 4**n, "out_of_place": {"time": 10.0 * n}} for n in range(1, 6)],
}
OSU = "# OSU MPI Allreduce Latency Test v7\n# Size  Avg Latency(us)\n" + "".join(
    f"{4**n}  {n}.5\n" for n in range(1, 8)
)


class Kind(NamedTuple):
    name: str
    #: "JSON", "TOML" or "bytes": how it can be spoilt beside byte by byte.
    form: str
    content: bytes
    read: Callable[[Path], object]


def _plan_of(path: Path) -> object:
    plan = Plan.read(path)
    try:
        plan.check(PROFILE)
    except ValueError as error:  # whoever reads a plan checks it against a model, and says whose it is
        raise UserError(f"{path}: {error}") from None
    return plan.digest, plan.explain(), list(plan.sequence()), plan.on_lanes(2)


def _profile_of(path: Path) -> object:
    profile = Profile.read(path)
    line = Line(alpha_s=1e-4, beta_s_per_byte=1e-9)
    try:
        return [
            Recipe.parse(recipe).plan(profile, 2, line) for recipe in ("lazy:4KB", "merge", "bytescheduler", "flow")
        ]
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _recipe_of(path: Path) -> object:
    recipe = Recipe.read(path)
    try:
        return recipe.check()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _network_of(path: Path) -> object:
    network = Network.read(path)
    try:
        return cluster.Cluster.of_network(network, "x").all_reduce(2)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _trace_of(path: Path) -> object:
    trace = Trace.read(path)
    return write_merged(path.with_suffix(".merged"), [trace, trace._replace(rank=trace.rank + 1)])


def _cluster_of(path: Path) -> object:
    found = cluster.read(path)
    try:
        return found.all_reduce(min(2, found.places))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _keys_of(path: Path) -> object:
    return KeyFiles.read(path.parent)


def kinds(directory: Path) -> list[Kind]:
    """Of files by themselves. directory: to make keys in."""
    KeyFiles.write_new(directory / "keys")
    run = Run(recipe="lazy", world=2, started="2026", gradientflow="0", torch="2")
    run.write(directory / "run.json")
    TRACE.write(directory / "trace.json")
    plan = lazy(PROFILE)
    field = {"version": 1, "candidates": [{"recipe": "lazy", "plan": plan.model_dump(), "predicted_s": 0.1}] * 2}
    return [
        Kind("plan.json", "JSON", plan.model_dump_json().encode(), _plan_of),
        Kind("profile.json", "JSON", PROFILE.model_dump_json().encode(), _profile_of),
        Kind("recipe.toml", "TOML", b'version = 1\nrecipe = "lazy:4MB-ring+csc:10%:warmup=5+fp16"\n', _recipe_of),
        Kind("local.toml", "TOML", b'version = 1\nrecipe = "lazy@diloco:50:fragments=4:delay=2"\n', _recipe_of),
        Kind("network.json", "JSON", NETWORK.model_dump_json().encode(), _network_of),
        Kind("trace.json", "JSON", (directory / "trace.json").read_bytes(), _trace_of),
        Kind("run.json", "JSON", (directory / "run.json").read_bytes(), Run.read),
        Kind("cluster.toml", "TOML", CLUSTER.encode(), _cluster_of),
        Kind("results.json", "JSON", b'{"version": 1}', Results.read),
        Kind("nccl.json", "JSON", json.dumps(NCCL).encode(), read_nccl_tests),
        Kind("osu.txt", "TOML", OSU.encode(), read_osu),
        Kind(
            "choices.json",
            "JSON",
            json.dumps(field).encode(),
            lambda path: read_field(read_text(path), str(path)),
        ),
        Kind("worker.key", "TOML", (directory / "keys" / "worker.key").read_bytes(), _keys_of),
    ]


# - Ways to spoil

DEEP = "[" * 20_000 + "]" * 20_000
HOSTILE: list[Any] = [
    None, True, -1, 0, 1,
    2**31, 2**63, -(2**64), 10**30, 1e308, float("nan"), float("inf"), -0.0, 1e-320, "", "x" * 5000,
    "../../etc/passwd", "\x00", "lazy", "float32", [], {}, [[]], [0] * 2000, {"a": {"b": []}}, "\ud800", "9" * 12,
]  # fmt: skip


def spoilt(kind: Kind, chance: random.Random) -> bytes:
    if kind.form == "JSON" and chance.random() < 0.6:
        return spoilt_json(json.loads(kind.content), chance)
    if kind.form == "TOML" and chance.random() < 0.5:
        return spoilt_words(kind.content, chance)
    return spoilt_bytes(kind.content, chance)


def spoilt_json(document: Any, chance: random.Random) -> bytes:
    document = spoilt_value(copy.deepcopy(document), chance)
    text = json.dumps(document)
    if chance.random() < 0.05:  # deeper than a parser may go
        text = text.replace("{", '{"deep": ' + DEEP + ",", 1)
    if chance.random() < 0.05:  # a number of thousands of digits
        text = text.replace("1", "9" * 6000, 1)
    if chance.random() < 0.1 and text.startswith("{"):  # twice the same name
        text = text[:1] + text[1:-1] + "," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def spoilt_value(document: Any, chance: random.Random, hostile: list[Any] = HOSTILE) -> Any:
    """One to three places of it, anywhere inside."""
    for _ in range(chance.choice([1, 1, 2, 3])):
        holder, key = _place(document, chance)
        if holder is None:
            return copy.deepcopy(chance.choice(hostile))
        match chance.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder) * chance.choice([1, 20]))
            case 1:
                holder[chance.choice(["x", "version", "", "name", "0 of 2", "99999999999 of 1"])] = copy.deepcopy(
                    chance.choice(hostile)
                )
            case 2 if isinstance(holder[key], list | dict):
                holder[key] = [holder[key]]
            case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                holder[key] = holder[key] * chance.choice([-1, 0, 1e12, 2**40, 0.5])
            case _:
                holder[key] = copy.deepcopy(chance.choice(hostile))
    return document


def _place(document: Any, chance: random.Random) -> tuple[Any, Any]:
    """A container and a key in it."""
    found: tuple[Any, Any] = (None, None)
    here = document
    while isinstance(here, list | dict) and here:
        key = chance.choice(list(here)) if isinstance(here, dict) else chance.randrange(len(here))
        found = (here, key)
        if chance.random() < 0.2:
            break
        here = here[key]
    return found


def spoilt_words(content: bytes, chance: random.Random) -> bytes:
    """Words of it replaced by others."""
    words = content.decode().split(" ")
    hostile = [
        "-1",
        "nan",
        "inf",
        "1e999",
        "9" * 6000,
        '"' + "a" * 3000 + '"',
        DEEP,
        "{}",
        '"\\u0000"',
        "[[x]]",
        "=",
        "\n",
    ]
    for _ in range(chance.choice([1, 2])):
        place = chance.randrange(len(words))
        if chance.random() < 0.5:
            words[place] = copy.deepcopy(chance.choice(hostile))
        else:
            middle = chance.randrange(len(words[place]) + 1)
            noise = "".join(chance.choices(":+-@=%.,0123456789abcxyz\u0661\u00b2", k=chance.randint(1, 12)))
            words[place] = words[place][:middle] + noise + words[place][middle:]
    return " ".join(words).encode()


def spoilt_bytes(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 10])):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                del data[place:]
            case 1:
                data[place:place] = chance.randbytes(chance.choice([1, 8, 1000]))
            case 2 if data:
                data[place % len(data)] ^= 1 << chance.randrange(8)
            case 3:
                data[place:place] = data[place : place + chance.randrange(500)] * chance.choice([1, 5])
            case _:
                del data[place : place + chance.randrange(1, 50)]
    return bytes(data)


# - The law


def judge(read: Callable[[Path], object], path: Path, name: str = "") -> tuple[str, str]:
    """What became of it, in a word; and what is wrong with that. name: what has to be named, if not the file."""
    began_s = time.monotonic()
    wrong = ""
    try:
        read(path)
        outcome = "read"
    except UserError as error:
        outcome, words = "refused", str(error)
        if "\n" in words or len(words) > LONGEST_LINE:
            wrong = f"not one line, or a long one: {words[:300]!r}"
        elif (name or path.stem) not in words:
            wrong = f"does not name the file: {words[:300]!r}"
    except (Exception, RecursionError, MemoryError) as error:
        outcome, wrong = "broke", f"{type(error).__name__}: {str(error)[:300]}"
    took_s = time.monotonic() - began_s
    if took_s > LIMIT_S:
        wrong = wrong or f"took {took_s:.0f} s"
    return outcome, wrong


def attack_file(kind: Kind, chance: random.Random, directory: Path) -> tuple[str, str]:
    path = directory / kind.name
    path.write_bytes(spoilt(kind, chance))
    path.chmod(0o600)
    outcome, wrong = judge(kind.read, path)
    return outcome, wrong and f"{kind.name}: {wrong}"


# - Checkpoints


class Evil:
    """Executed by whoever unpickles it."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._marker,))


class Checkpoint:
    """One that was saved, to be spoilt again and again."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "checkpoints"
        tensors = {f"layer.{n}.weight": torch.randn(20, 10) for n in range(3)}
        gf.save(self.root, model=tensors, optimizer={"state": {0: {"step": 3}}, "lr": 0.1}, step=7)
        self.path = self.root / "1"
        self.files = {file.name: file.read_bytes() for file in self.path.iterdir()}
        self.marker = directory / "executed"

    def attack(self, chance: random.Random) -> tuple[str, str]:
        for name, content in self.files.items():
            (self.path / name).write_bytes(content)
        name = chance.choice(list(self.files))
        content = self._spoilt(name, chance)
        (self.path / name).write_bytes(content)
        if name != "manifest.json" and chance.random() < 0.7:  # an enemy knows how to sum up
            manifest = json.loads(self.files["manifest.json"])
            manifest["files"][name] = {"nbytes": len(content), "crc32": zlib.crc32(content)}
            (self.path / "manifest.json").write_text(json.dumps(manifest))
        outcome, wrong = judge(self._load, self.path / name, str(self.path))
        if self.marker.exists():
            wrong = f"{name} was executed"
            self.marker.unlink()
        return outcome, wrong and f"checkpoint, {name}: {wrong}"

    def _load(self, path: Path) -> object:
        found = gf.load(self.root)
        for value in found.get("model", {}).values() if isinstance(found.get("model"), dict) else ():
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > 2**20:
                raise AssertionError("larger than its file")
        return found

    def _spoilt(self, name: str, chance: random.Random) -> bytes:
        content = self.files[name]
        if name == "manifest.json":
            return spoilt_json(json.loads(content), chance) if chance.random() < 0.6 else spoilt_bytes(content, chance)
        match chance.randrange(7):
            case 0:
                return pickle.dumps(Evil(self.marker))
            case 1:
                into = io.BytesIO()
                torch.save({"step": Evil(self.marker)}, into)
                return into.getvalue()
            case 2:  # packed: a thousand times as long as it is
                into = io.BytesIO()
                with (
                    zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as packed,
                    zipfile.ZipFile(io.BytesIO(content)) as old,
                ):
                    for entry in old.infolist():
                        packed.writestr(entry.filename, old.read(entry) + b"\0" * chance.choice([0, 10**7]))
                return into.getvalue()
            case 3:
                return _with_pickle(content, spoilt_bytes(_pickle_of(content), chance))
            case 4:  # says that a tensor is longer than what lies there
                words = _pickle_of(content)
                return _with_pickle(content, words.replace(struct.pack("<BB", 75, 200), struct.pack("<BB", 75, 255)))
            case 5:
                into = io.BytesIO()
                torch.save(
                    spoilt_value({"model": {"a": 1.0}, "step": 3, "flow": {"ranks": {"0 of 1": {}}}}, chance), into
                )
                return into.getvalue()
            case _:
                return spoilt_bytes(content, chance)


def _pickle_of(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))


def _with_pickle(archive: bytes, words: bytes) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED) as made, zipfile.ZipFile(io.BytesIO(archive)) as old:
        for entry in old.infolist():
            made.writestr(entry.filename, words if entry.filename.endswith("data.pkl") else old.read(entry))
    return into.getvalue()


# - Frames


class Frames:
    """What a server's books are told, one frame after another, by workers that may say anything."""

    def __init__(self) -> None:
        self.ledger = Ledger(2**20)
        self.tables = Tables(2**20, Counter())
        values = torch.arange(4.0)
        raw = values.numpy().tobytes()
        names = pack_names([Name(Key(1, 0, 0, 0), 1)])
        terms = Terms(1, 1.0, 0.0, 0, 2, 1)
        copied = pack_copy(Copy({0: Mark(1, 1)}, values, None)).numpy().tobytes()
        self._said: list[tuple[Header, bytes]] = [
            (Header(FrameKind.HELLO, 7, rank=0), pack_hello(2, [])),
            (Header(FrameKind.PUSH, 7, Key(1, 0, 0, 0), 1, dtype=torch.float32), raw),
            (Header(FrameKind.RELAY, 7, Key(1, 0, 0, 0), 1, dtype=torch.float32), raw),
            (Header(FrameKind.GIVE, 7, Key(1, 0, 0, 0), 1, dtype=torch.float32), raw),
            (Header(FrameKind.GOT, 7), names),
            (Header(FrameKind.ECHO, 7), raw),
            (Header(FrameKind.BYE, 7), b""),
            (Header(FrameKind.JOIN, 9, rank=0), pack_join(terms, {0: 3}, [0, 1])),
            (Header(FrameKind.FOUND, 9, dtype=torch.float32), raw),
            (Header(FrameKind.DELTA, 9, Key(0, 0, 0, 0), 1, dtype=torch.float32), raw),
            (Header(FrameKind.GIVE, 9, Key(0, 4, 0, 0), 1, dtype=torch.float32), copied),
            (Header(FrameKind.GOT, 9), names),
            (Header(FrameKind.ASK, 9), b""),
        ]
        self._now_s = 0.0
        # Of each of the books, two workers that are known; what they say is listened to.
        for who, rank in ((b"a", 0), (b"b", 1)):
            self._tell(who, self._said[0][0]._replace(rank=rank), self._said[0][1])
        for who, rank in ((b"c", 0), (b"d", 1)):
            self._tell(who, self._said[7][0]._replace(rank=rank), pack_join(terms, {}, []))
        self._tell(b"c", *self._said[8])

    def attack(self, chance: random.Random) -> tuple[str, str]:
        header, payload = chance.choice(self._said)
        if chance.random() < 0.5:
            payload = spoilt_bytes(payload, chance)
        header = header._replace(nbytes=len(payload) if chance.random() < 0.9 else chance.choice([0, 2**26, 2**40]))
        if chance.random() < 0.5:
            header = header._replace(
                rank=chance.choice([header.rank, 0, 1, -1, 2**31 - 1]), seq=chance.choice([header.seq, 0, 2, 2**63])
            )
        frame = header.packed()
        if chance.random() < 0.3:
            frame = spoilt_bytes(frame, chance)
        who = chance.choice([b"a", b"b"] if header.space == 7 else [b"c", b"d"])
        if chance.random() < 0.05:
            who = chance.choice([b"a", b"b", b"c", b"d", b"e"])
        self._now_s += chance.choice([0.0, 0.1, 30.0])
        try:
            self._hear(who, memoryview(frame), memoryview(bytearray(payload)))
        except Refused as refused:
            if not str(refused):
                return "refused", "frames: refused without a reason"
            return "refused", ""
        except Exception as error:
            return "broke", f"frames: {type(error).__name__}: {error} at {header}, {bytes(payload)!r:.100}"
        held = self.ledger.held_nbytes + sum(table.nbytes for table in self.tables._tables.values())
        return "read", "" if held <= 2**21 else f"frames: {held} bytes are held"

    def _tell(self, who: bytes, header: Header, payload: bytes) -> None:
        said = header._replace(nbytes=len(payload)).packed()
        self._hear(who, memoryview(said), memoryview(bytearray(payload)))

    def _hear(self, who: bytes, frame: memoryview, payload: memoryview) -> None:
        """As `Service` does."""
        header = Header.read(frame, len(payload))
        of_table = header.kind is FrameKind.JOIN or self.tables.knows(who)
        books = self.tables if of_table else self.ledger
        told = [*books.take(who, header, payload, self._now_s), *self.ledger.receipts(self._now_s)]
        told += [*self.ledger.results(), *self.tables.answers(), *self.tables.look(self._now_s)]
        for outgoing in told:
            outgoing.header.packed()
            if outgoing.header.kind in (FrameKind.STATE, FrameKind.CLOCKS) and isinstance(
                outgoing.payload, torch.Tensor
            ):
                numel = 4 if outgoing.header.kind is FrameKind.STATE else 0
                read_copy(memoryview(outgoing.payload.numpy().tobytes()), torch.float32, numel)


# - States of flows


def attack_state(
    flow: gf.Flow, valid: dict[str, Any], step: Callable[[], None], chance: random.Random
) -> tuple[str, str]:
    """Load a spoilt state and take a step; then the valid one, which must go as if nothing had been."""
    state = spoilt_value(_plain(valid), chance, [*HOSTILE, torch.zeros(3), torch.full((2, 2), float("nan"))])
    try:
        flow.load_state_dict(state)
        step()
        outcome, wrong = "read", ""
    except (UserError, gf.TrainingError) as error:
        outcome, wrong = "refused", "" if "\n" not in str(error) else f"not one line: {error}"
    except Exception as error:
        outcome, wrong = "broke", f"{type(error).__name__}: {str(error)[:200]}"
    return outcome, wrong


def _plain(value: Any) -> Any:
    """A deep copy without anything but containers, tensors and values."""
    if hasattr(value, "keys"):
        return {key: _plain(value[key]) for key in value.keys()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
