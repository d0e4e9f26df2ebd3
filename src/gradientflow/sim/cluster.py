"""A cluster as a file: hosts, workers, the links between them, and what the software costs that drives them.

    version = 1
    name = "four hosts on 10 GbE"
    hosts = 4
    workers_per_host = 1

    [between]
    protocol = "tcp"
    bits_per_s = 10e9

Everything else has a default, which is that it costs nothing. `read` takes a name (see `names`) or a file's.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import resources
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StrictInt, StrictStr, ValidationError, field_validator, model_validator

from gradientflow.cost.protocol import PROTOCOLS, protocol
from gradientflow.cost.table import Cost, CostTable, Least, Line, Priced, check_rising
from gradientflow.documents import MAX_TOML_NBYTES, Document, Record, describe, parse_data, read_text, write_text
from gradientflow.errors import DocumentError, UsageError
from gradientflow.network import BY_PATTERN, Carrying, Encoding, Network
from gradientflow.network import Processors as Counted
from gradientflow.plan import NATIVE

#: Of a ring's bandwidth, what NCCL expects of trees.
TREES = 0.92
#: Beyond these a file is mistaken, and sums of what it says need not be finite.
MOST_PLACES = 10**6
MOST_LEVELS = 20
LEAST_PARTITION_NBYTES = 1024
Seconds = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
SecondsPerByte = Annotated[float, Field(ge=0.0, le=1e3, allow_inf_nan=False)]


class Wire(Record):
    """One direction of a link."""

    protocol: str = "raw"
    bits_per_s: float = Field(ge=1.0, le=1e18, allow_inf_nan=False)
    #: In place of the protocol's own.
    efficiency: float | None = Field(default=None, ge=1e-6, le=1.0)
    latency_s: Seconds | None = None

    @field_validator("protocol")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in PROTOCOLS:
            raise ValueError(f"expected one of {', '.join(PROTOCOLS)}")
        return name

    @property
    def bytes_per_s(self) -> float:
        """That large messages get."""
        return self.bits_per_s / 8 * (self.efficiency or protocol(self.protocol).efficiency)

    @property
    def latency(self) -> float:
        return protocol(self.protocol).latency_s if self.latency_s is None else self.latency_s

    @property
    def line(self) -> Line:
        return Line(alpha_s=self.latency, beta_s_per_byte=1 / self.bytes_per_s)

    def link(self) -> Cost:
        """One message, with what was measured of small ones where the file leaves the protocol as it is."""
        if self.efficiency is None and self.latency_s is None:
            return protocol(self.protocol).link(self.bits_per_s)
        return self.line


#: Of a cable: a host's number or a switch's name.
End = StrictInt | StrictStr
_TREE = frozenset({"hosts_per_switch", "oversubscription"})
#: By kind of wiring, the fields that say more of it.
TAKES: dict[str, frozenset[str]] = {
    "switch": frozenset(),
    "fat-tree": _TREE,
    "tree": _TREE,
    "torus": frozenset({"sides"}),
    "bcube": frozenset({"sides"}),
    "graph": frozenset({"cables"}),
}


class Topology(Record):
    """How hosts are wired. `switch`: each to one that never blocks."""

    kind: Literal["switch", "fat-tree", "tree", "torus", "bcube", "graph"] = "switch"
    #: fat-tree, tree: hosts under one switch, and how many times more they could send than goes out of it.
    hosts_per_switch: int = Field(default=0, ge=0, le=MOST_PLACES)
    oversubscription: float = Field(default=1.0, ge=1.0, le=1e6, allow_inf_nan=False)
    #: torus: hosts in each direction; bcube: ports of a switch, levels (1, if not given).
    sides: tuple[Annotated[int, Field(ge=1, le=MOST_PLACES)], ...] = Field(default=(), max_length=MOST_LEVELS)
    #: graph: cables between hosts, which are called 0, 1, ..., and switches, which have names; all of one rate.
    cables: tuple[tuple[End, End], ...] = ()

    @model_validator(mode="after")
    def _says_what_its_kind_takes(self) -> Topology:
        stray = self.model_dump(exclude_defaults=True).keys() - {"kind"} - TAKES[self.kind]
        if stray:
            takes = " and ".join(sorted(TAKES[self.kind])) or "nothing else"
            raise ValueError(f"a {self.kind} takes {takes}, not {sorted(stray)[0]}")
        if self.kind == "torus" and not self.sides:
            raise ValueError("a torus takes sides, the hosts in each direction, such as [4, 4]")
        if self.kind == "bcube" and not self._is_a_bcube:
            raise ValueError("a bcube takes sides, the ports of a switch (2 or more) and the levels, such as [4, 2]")
        if self.kind == "graph" and not self.cables:
            raise ValueError('a graph takes cables, such as [[0, "switch"], [1, "switch"]]')
        return self

    @property
    def _is_a_bcube(self) -> bool:
        ports, levels = self.sides[:1], self.sides[1:]
        return (2,) <= ports and len(levels) < 2 and all(number <= MOST_LEVELS for number in levels)


class Hops(NamedTuple):
    """Seconds of a step between workers of one host, and between hosts."""

    inside_s: float
    between_s: float


class Collective(Record):
    """What an all-reduce takes whatever its size: once, and for each of a ring's 2 (p - 1) steps."""

    launch_s: Seconds = 0.0
    #: None: the latency of the wire. Our own patterns take a wire's latency anyway, and this on top of it.
    hop_s: Seconds | None = None
    #: Of a step between workers of one host, where that differs from a step between hosts.
    inside_hop_s: Seconds | None = None
    #: Whether the library takes trees where these are quicker than a ring.
    trees: bool = False
    #: What each message takes from the training thread.
    host_s: Seconds = 0.0
    #: Conversations at a time, where the recipe does not say.
    lanes: int = Field(default=1, ge=1, le=16)

    @property
    def added_s(self) -> Hops:
        """To the wires' latency, in steps of our own patterns."""
        between_s = self.hop_s or 0.0
        return Hops(between_s if self.inside_hop_s is None else self.inside_hop_s, between_s)


class Servers(Record):
    """How servers are driven."""

    #: On hosts of their own for each worker host, where the recipe does not say; 0: beside workers.
    spare_per_host: float = Field(default=0.0, ge=0.0, le=1024.0)
    #: Workers of a host sum up among themselves first: so many seconds for each byte of the model; 0: they do not.
    local_s_per_byte: SecondsPerByte = 0.0
    #: What a byte on a host's network card takes of the same bus.
    bus_s_per_byte: SecondsPerByte = 0.0
    #: 1: a port sends and receives at full rate at once; 0: one or the other.
    duplex: float = Field(default=1.0, ge=0.0, le=1.0)
    #: Of each piece, before anything else; and each way.
    startup_s: Seconds = 0.0
    hop_s: Seconds = 0.0
    #: Whether forward may begin before everything has arrived, where the recipe would have it so.
    gate: bool = True
    #: What adding a byte takes a server.
    sum_s_per_byte: SecondsPerByte = 0.0
    #: `hash`: each piece to the server that its key's hash names (BytePS: djb2). `even`: by load.
    placement: Literal["even", "hash"] = "even"
    #: Into which messages are cut; 0: as our own do it.
    partition_nbytes: int = Field(default=0, ge=0)
    #: Pieces under way in each stage; 0: to each server as many as its connections have credit for, as in our runtime.
    in_flight: int = Field(default=16, ge=0)

    @field_validator("partition_nbytes")
    @classmethod
    def _is_worth_a_message(cls, nbytes: int) -> int:
        if 0 < nbytes < LEAST_PARTITION_NBYTES:
            raise ValueError(f"give 0 or at least {LEAST_PARTITION_NBYTES} bytes")
        return nbytes


class Overheads(Record):
    """What beside computing and wires takes time."""

    #: Of a worker's one-GPU iteration, what is there only once however many workers there are.
    harness_s: Seconds = 0.0
    #: Of a one-GPU iteration, what the optimizer takes for each byte of the model, after everything else.
    update_s_per_byte: SecondsPerByte = 0.0
    #: Before each message, for all workers to say that they have it.
    negotiation_s: Seconds = 0.0
    #: Each piece of a schedule that cuts and reorders, on the training thread.
    partition_s: Seconds = 0.0
    #: Each gradient as backward yields it, and each of its bytes, to where messages are sent from; on the training
    #: thread.
    gather_s: Seconds = 0.0
    gather_s_per_byte: SecondsPerByte = 0.0
    #: Of a message of several tensors: into one buffer and back.
    copy_s_per_byte: SecondsPerByte = 0.0
    #: Computing lost for each byte that a worker sends.
    interference_s_per_byte: SecondsPerByte = 0.0
    #: What is left of the bus inside a host while its workers compute.
    bus_while_computing: float = Field(default=1.0, gt=0.0, le=1.0)
    #: A byte of memory that a codec reads or writes.
    touch_s_per_byte: SecondsPerByte = 0.0
    #: Each tensor that a codec works on by itself, whatever its size: calls, not bytes. (+csc works on whole messages.)
    encode_s: Seconds = 0.0


class Processors(Record):
    """Cores that workers share, and what the exchange takes of them: seconds of one core, on each worker, the kernel's
    work included. As long as nobody wants more than there is, these are parts of other times, not added to them."""

    #: 0: as many as are wanted.
    cores: int = Field(default=0, ge=0, le=MOST_PLACES)
    #: That share them.
    workers: int = Field(default=1, ge=1, le=MOST_PLACES)

    @property
    def crowding(self) -> float:
        """Of all cores, what one takes that every worker is on."""
        return self.workers / self.cores if self.cores else 0.0

    @property
    def stretch(self) -> float:
        """How many times as long something takes that all workers do at once, each on a core."""
        return max(1.0, self.crowding)


class Believed(Record):
    """What planners on this cluster take messages to cost, where that is known not to be what they do."""

    workers: int = Field(ge=1)
    alpha_s: Seconds
    beta_s_per_byte: SecondsPerByte


#: (nbytes, seconds), as clocks can show them.
MeasuredPoint = tuple[Annotated[int, Field(gt=0, lt=2**62)], Annotated[float, Field(ge=1e-9, le=1e6)]]


class Measured(Record):
    """An all-reduce among so many workers, as a probe measured it."""

    workers: int = Field(ge=2)
    #: By which it goes; "": the backend's own.
    pattern: str = ""
    points: tuple[MeasuredPoint, ...] = Field(min_length=2)

    @field_validator("points")
    @classmethod
    def _makes_a_table(cls, points: tuple[MeasuredPoint, ...]) -> tuple[MeasuredPoint, ...]:
        check_rising(points)
        return points


class Cluster(Document):
    """See the module's description."""

    name: str
    source: str = ""
    hosts: int = Field(ge=1, le=MOST_PLACES)
    workers_per_host: int = Field(default=1, ge=1, le=1024)
    #: Of which published speeds are taken (`lab.workloads`), where nothing else is said.
    device: str = ""
    inside: Wire | None = None
    between: Wire | None = None
    topology: Topology = Topology()
    collective: Collective = Collective()
    servers: Servers = Servers()
    overheads: Overheads = Overheads()
    processors: Processors = Processors()
    #: What messages take of them; the first one's is for ways that are not there.
    carrying: tuple[Carrying, ...] = ()
    #: What codecs compute, where that was measured; else `overheads` says it for all of them.
    codecs: tuple[Encoding, ...] = ()
    believed: tuple[Believed, ...] = ()
    measured: tuple[Measured, ...] = ()

    @model_validator(mode="after")
    def _is_wired(self) -> Cluster:
        if self.places > MOST_PLACES:
            raise ValueError(f"hosts times workers_per_host is {self.places}, and at most {MOST_PLACES} are simulated")
        if self.workers_per_host > 1 and self.inside is None:
            raise ValueError("workers share hosts, and [inside] does not say how they are connected")
        if self.hosts > 1 and self.between is None and not self.measured:
            raise ValueError("there are several hosts, and [between] does not say how they are connected")
        return self

    @property
    def places(self) -> int:
        return self.hosts * self.workers_per_host

    @property
    def wires(self) -> list[tuple[str, Wire]]:
        """Its links, and where they are."""
        given = (("inside", self.inside), ("between", self.between))
        return [(where, wire) for where, wire in given if wire is not None]

    def check_world(self, world: int) -> int:
        """The number of hosts that so many workers take, filled one after another."""
        if not 1 <= world <= self.places:
            places = f"{self.hosts} hosts x {self.workers_per_host}"
            raise UsageError(
                f"cluster {self.name} has {self.places} places ({places}): give 1 to {self.places} workers"
            )
        hosts = math.ceil(world / self.workers_per_host)
        if world > self.workers_per_host and world % self.workers_per_host:
            raise UsageError(
                f"workers fill hosts of {self.workers_per_host} in cluster {self.name}: give a multiple of it"
            )
        return hosts

    def slowest(self, world: int) -> Wire:
        """The link that a ring through so many workers waits for."""
        wires = []
        if min(world, self.workers_per_host) > 1:
            wires.append(self.inside)
        if self.check_world(world) > 1:
            wires.append(self.between)
        found = [wire for wire in wires if wire is not None]
        return min(found, key=lambda wire: wire.bytes_per_s)

    def measured_by(self, pattern: str, world: int) -> Cost | None:
        """A message by a pattern, if a probe measured it."""
        found = (one for one in self.measured if (one.workers, one.pattern) == (world, pattern))
        return next((CostTable(points=one.points) for one in found), None)

    def all_reduce(self, world: int) -> Cost:
        """A message among so many workers by the backend's own all-reduce."""
        self.check_world(world)
        if world == 1:
            return Line(alpha_s=0.0, beta_s_per_byte=0.0)
        for found in self.measured:
            if found.workers == world and not found.pattern:
                return CostTable(
                    points=found.points, software_s=self.collective.launch_s, host_s=self.collective.host_s
                )
        if self.measured and self.between is None:
            sizes = ", ".join(str(found.workers) for found in self.measured)
            raise UsageError(f"cluster {self.name} was measured with {sizes} workers: give that, or add [between]")
        startup_s = self.collective.launch_s + self.ring_hops_s(world)
        beta_s_per_byte = 2 * (world - 1) / world / self.slowest(world).bytes_per_s
        ring = Line(alpha_s=startup_s, beta_s_per_byte=beta_s_per_byte, host_s=self.collective.host_s)
        return Least((ring, self._tree(world))) if self.collective.trees else ring

    @property
    def hops_s(self) -> Hops:
        """Of the backend's own all-reduce."""
        settings = self.collective
        inside_s, between_s = (0.0 if wire is None else wire.latency for wire in (self.inside, self.between))
        if settings.hop_s is not None:
            inside_s = between_s = settings.hop_s
        return Hops(inside_s if settings.inside_hop_s is None else settings.inside_hop_s, between_s)

    def ring_hops_s(self, world: int) -> float:
        """What the steps of a ring through all hosts in turn take, whatever is sent."""
        hosts, hops = self.check_world(world), self.hops_s
        between = 2 * (hosts - 1) if hosts > 1 else 0
        return between * hops.between_s + (2 * (world - 1) - between) * hops.inside_s

    def _tree(self, world: int) -> Line:
        """Two binary trees over hosts, a chain inside each, as NCCL's: full bandwidth, and steps that grow slowly."""
        hosts, hops, settings = self.check_world(world), self.hops_s, self.collective
        chain_s = (min(world, self.workers_per_host) - 1) * hops.inside_s
        steps_s = chain_s + math.ceil(math.log2(hosts)) * hops.between_s
        beta_s_per_byte = 2 / (TREES * self.slowest(world).bytes_per_s)
        return Line(alpha_s=settings.launch_s + 2 * steps_s, beta_s_per_byte=beta_s_per_byte, host_s=settings.host_s)

    def carried_by(self, pattern: str) -> Carrying:
        """What a message takes of processors; by the backend's own all-reduce where the pattern was not measured."""
        wanted = (pattern, "", *(one.pattern for one in self.carrying))
        found = (one for name in wanted for one in self.carrying if one.pattern == name)
        return next(found, Carrying(message_s=0.0, byte_s=0.0))

    def abreast_s(self, pattern: str, world: int) -> float:
        """What small messages were seen to take beside others; 0: they were not, among so many workers."""
        return self.carried_by(pattern).abreast_s if world == self.places else 0.0

    def encoding(self, codec: str) -> Encoding | None:
        """What a codec computes, by its name, whatever its arguments."""
        return next((found for found in self.codecs if found.codec.partition(":")[0] == codec), None)

    def belief(self, world: int) -> Cost | None:
        for found in self.believed:
            if found.workers == world:
                return Line(alpha_s=found.alpha_s, beta_s_per_byte=found.beta_s_per_byte)
        return None

    # - Files

    @classmethod
    def of_prices(cls, priced: Priced, name: str, world: int, num_lanes: int) -> Cluster:
        """What a run measured of its own messages."""
        own = priced.ways.get(NATIVE) or next(iter(priced.ways.values()))

        def points(table: CostTable) -> tuple[tuple[int, float], ...]:
            return tuple((nbytes, priced.count * seconds) for nbytes, seconds in table.points)

        try:
            return cls(
                name=name,
                source="measured by the run",
                hosts=world,
                collective=Collective(launch_s=own.software_s, host_s=own.host_s, lanes=num_lanes),
                overheads=Overheads(touch_s_per_byte=priced.touch_s_per_byte),
                measured=(
                    Measured(workers=world, points=points(own)),
                    *(
                        Measured(workers=world, pattern=way, points=points(table))
                        for way, table in priced.ways.items()
                        if way != NATIVE
                    ),
                ),
            )
        except ValidationError as error:
            raise _no_cluster(name, error) from None

    @classmethod
    def of_network(cls, network: Network, name: str) -> Cluster:
        """What a probe measured, as a cluster of as many workers."""
        try:
            return cls._of_network(network, name)
        except ValidationError as error:
            raise _no_cluster(name, error) from None

    @classmethod
    def _of_network(cls, network: Network, name: str) -> Cluster:
        found = max(network.of("all_reduce"), key=lambda one: len(one.ranks), default=None)
        if found is None:
            raise UsageError("the network file holds no all-reduce: run gradientflow probe to measure one")
        rates = [[one.rate_bits_s for one in network.of(operation)] for operation in ("p2p", "tcp")]
        medians = [statistics.median(found) for found in rates if found]
        between = Wire(bits_per_s=max(medians)) if medians else None
        patterns = {
            one.operation.removeprefix(BY_PATTERN): one.points
            for one in network.measurements
            if one.operation.startswith(BY_PATTERN) and len(one.ranks) == network.world and len(one.samples) > 1
        }
        return cls(
            name=name,
            source=f"gradientflow probe, {network.backend}",
            hosts=network.world,
            between=between,
            collective=Collective(lanes=1 if network.backend == "nccl" else 2),
            **(_counted(network.processors) if network.processors else {}),
            measured=(
                Measured(workers=len(found.ranks), points=found.points),
                *(Measured(workers=network.world, pattern=name, points=points) for name, points in patterns.items()),
            ),
        )

    def write_toml(self, path: str | os.PathLike[str]) -> None:
        write_text(path, _toml(self.model_dump(exclude_defaults=True, mode="json") | {"version": 1}))


def _no_cluster(name: str, error: ValidationError) -> UsageError:
    return UsageError(f"what was measured of {name} is no cluster: {describe(error)}")


def _counted(found: Counted) -> dict[str, Any]:
    """Of a cluster."""
    return {
        "overheads": Overheads(gather_s=found.gather_s, gather_s_per_byte=found.gather_s_per_byte),
        "processors": Processors(cores=found.cores, workers=found.ranks),
        "carrying": found.carrying,
        "codecs": found.codecs,
    }


def names() -> list[str]:
    """Clusters that come with the package."""
    files = resources.files("gradientflow.sim") / "clusters"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def read(name: str | os.PathLike[str]) -> Cluster:
    """A named cluster, or one from a file: a cluster's TOML, or a probe's JSON."""
    text = os.fspath(name)
    if text.endswith(".json"):
        return Cluster.of_network(Network.read(text), os.path.basename(text).removesuffix(".json"))
    if text.endswith(".toml"):
        return parse(read_text(text, MAX_TOML_NBYTES), text)
    if text not in names():
        near = get_close_matches(text, names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"no cluster {text!r}: there are {', '.join(names())}, or give a .toml or .json file{hint}")
    return parse((resources.files("gradientflow.sim") / "clusters" / f"{text}.toml").read_text(), f"{text}.toml")


def parse(text: str, source: str) -> Cluster:
    data = parse_data(text, source, "TOML")
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        raise DocumentError(f"{source}: {describe(error)}") from None


def _toml(values: dict[str, Any]) -> str:
    """Plain values first, then tables, then lists of tables."""
    plain = {key: value for key, value in values.items() if not _is_table(value) and not _is_tables(value)}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if _is_table(value):
            lines += ["", f"[{key}]", *(f"{inner} = {_value(found)}" for inner, found in value.items())]
        elif _is_tables(value):
            for table in value:
                lines += ["", f"[[{key}]]", *(f"{inner} = {_value(found)}" for inner, found in table.items())]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], dict)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # as JSON has it, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return repr(value)
