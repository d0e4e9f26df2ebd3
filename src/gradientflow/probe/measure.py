"""Times all-reduce and point-to-point messages over the process group that is there.

Everything runs on a group of our own beside the user's, so that a measurement that fails leaves theirs usable.
Ranks agree on the number of repetitions before each size: rank 0 decides for the all-reduce, the lower
rank of a pair for a link. Larger sizes are left out, on all ranks alike, once they would take more time
than is left.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from gradientflow.compress import Sum
from gradientflow.cost import Line
from gradientflow.cost.table import Best, CostTable
from gradientflow.errors import DeadlineError, PeerError, TrainingError, UsageError
from gradientflow.exchange.control import Control
from gradientflow.exchange.groups import backend_for, new_group, store_beside
from gradientflow.exchange.health import Health
from gradientflow.exchange.links import Links
from gradientflow.exchange.server.placement import LEAST_NBYTES
from gradientflow.exchange.server.servers import Servers, Wanted
from gradientflow.exchange.staged import Staged, peers_of
from gradientflow.network import (
    ABREAST_NBYTES,
    BY_PATTERN,
    SERVED,
    Carrying,
    Measurement,
    Network,
    Processors,
    Sample,
)
from gradientflow.patterns import ALL_REDUCES
from gradientflow.plan import NATIVE
from gradientflow.probe.processors import (
    COUNTED_NBYTES,
    counted_s,
    encodings,
    gathered_s,
    here,
    line,
)
from gradientflow.probe.stream import Receiver, send

#: 4 B to 64 MiB; in steps of 1.5 and 1.33 where messages of gradients usually are.
SIZES = (
    4, 64, 1024, 4096,
    *(factor * 2**power for power in range(13, 19) for factor in (2, 3)), 2**20,
    *(2**power for power in range(21, 27)),
)  # fmt: skip
#: All of it stays below a minute, also at 100 Mbit/s.
BUDGET_S = 45.0
#: The all-reduce's part of the budget; links share the rest.
ALL_REDUCE_SHARE = 0.4
#: Patterns' part of the whole, if there are any.
PATTERNS_SHARE = 0.3
#: Of counting processor seconds, if that is wanted.
PROCESSORS_SHARE = 0.25
#: A link's part for each of two streams that tell its rate, and the most one takes.
STREAM_SHARE, STREAM_S = 0.25, 1.0
#: A plain stream is given up after this much more: a firewall may swallow it.
STREAM_PATIENCE_S = 5.0
#: The largest message of a stream.
MAX_STREAMED = 4 * 2**20
MIN_REPEATS, MAX_REPEATS = 5, 50
#: Under way at a time through servers; and their sizes, which servers do not cut.
PIECES_OF_A_WORKER, SERVED_NBYTES = 4, (4096, LEAST_NBYTES)
#: Of small messages, on each of two lanes; and so many times as long as counting processor seconds.
ABREAST_IN_STRETCH, ABREAST_TIMES = 20, 3
#: Of connections that take turns, where ranks share processors: by a single pair of groups among four ranks on two
#: cores it was 3.4, 6.2 and 6.7 ms in three labs, steady in each of them; by five in turn 4.7 to 5.0 in five labs.
ABREAST_PAIRS, MOST_WITH_PAIRS = 5, 8
#: Up to this size a message is mostly start-up, by other rules (MPI libraries and NCCL change protocols).
SMALL_NBYTES = 16 * 2**10


def measure_network(
    group: dist.ProcessGroup | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    budget_s: float = BUDGET_S,
    deadline_s: float = 60.0,
    address: str | None = None,
    smaller_worlds: bool = False,
    patterns: Sequence[str] = (),
    processors: bool = False,
    servers: Wanted | None = None,
) -> Network:
    """The all-reduce among all ranks, and messages from rank 0 to every other and between neighbours. Collective.

    With `smaller_worlds` also the all-reduce among the first 2, 4, 8 ... ranks: how it grows with the world.

    With an `address` at which the others can reach this rank, links are also measured by a plain TCP stream, which
    tells a slow link from a slow backend; and all-reduces by the named `patterns` are measured beside the group's own.

    With `processors` also what exchanging takes of those; with `servers`, through such ones too.

    Takes about `budget_s` at most; larger sizes that would take longer are left out and listed as skipped. No
    wait is longer than `budget_s + deadline_s`. All ranks return the same.
    """
    if not dist.is_initialized():
        raise UsageError("there is no process group to measure: call init_process_group first, or start with torchrun")
    if not sizes or any(nbytes < 4 or nbytes % 4 for nbytes in sizes) or list(sizes) != sorted(set(sizes)):
        raise UsageError("sizes must rise and be multiples of 4, since float32 is sent")
    group = group or dist.group.WORLD
    assert group is not None
    prober = _Prober(group, tuple(sizes), deadline_s + budget_s, address)
    try:
        processors_s = PROCESSORS_SHARE * budget_s if processors else 0.0
        sizes_of_worlds = worlds(prober.world) if smaller_worlds else [prober.world]
        found = prober.run(budget_s - processors_s, sizes_of_worlds, patterns)
        if not processors:
            return found
        return found.model_copy(update={"processors": prober.processors(patterns, servers, processors_s)})
    finally:
        prober.close()


def links(world: int) -> list[tuple[int, int]]:
    """Rank 0 and every other, then neighbours.

    >>> links(4)
    [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]
    """
    return [(0, rank) for rank in range(1, world)] + [(rank, rank + 1) for rank in range(1, world - 1)]


def worlds(world: int) -> list[int]:
    """Powers of two below, and the whole.

    >>> worlds(6), worlds(2)
    ([2, 4, 6], [2])
    """
    return [2**power for power in range(1, 10) if 2**power < world] + [world]


def summarize(
    operation: str, ranks: Sequence[int], samples: Sequence[Sample], skipped_nbytes: Sequence[int] = ()
) -> Measurement:
    """What the samples come to: the nearest line, and the rate of the link."""
    points = [(sample.nbytes, sample.median_s) for sample in samples]
    fitted = [point for point in points if point[0] >= SMALL_NBYTES]
    if len(fitted) < 2:
        fitted = points
    if len(fitted) < 2:
        fitted = [(0, points[0][1]), *points]  # one size: all of it is start-up, for all that is known
    line, errors = Line.fit(fitted)
    return Measurement(
        operation=operation,
        ranks=tuple(ranks),
        samples=tuple(samples),
        skipped_nbytes=tuple(skipped_nbytes),
        alpha_s=line.alpha_s,
        beta_s_per_byte=line.beta_s_per_byte,
        residual=max(map(abs, errors)),
        rate_bits_s=8 * _share_on_a_link(operation, len(ranks)) * _bytes_per_s(points),
    )


def _bytes_per_s(points: Sequence[tuple[int, float]]) -> float:
    """The median slope among the largest sizes: start-up falls out, and one size that was disturbed does not count."""
    largest, seconds = points[-1]
    tail = [point for point in points if 16 * point[0] >= largest]
    slopes = [(s2 - s1) / (n2 - n1) for (n1, s1), (n2, s2) in combinations(tail, 2) if n2 >= 2 * n1]
    slope = statistics.median(slopes) if slopes else 0.0
    return 1 / slope if slope > 0 else largest / seconds


def _share_on_a_link(operation: str, world: int) -> float:
    """Bytes on one rank's link for each byte of the operation, if nothing is sent twice."""
    if operation in ("p2p", "tcp"):
        return 1.0
    return (2 if operation.startswith("all_reduce") else 1) * (world - 1) / world


def sample_of(nbytes: int, seconds: Sequence[float]) -> Sample:
    """Median and spread of some repetitions."""
    if len(seconds) == 1:
        low = middle = high = seconds[0]
    else:
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        low, middle, high = deciles[0], statistics.median(seconds), deciles[-1]
    return Sample(nbytes=nbytes, median_s=middle, p10_s=low, p90_s=high, num_samples=len(seconds))


def _streamed(pair: tuple[int, int], nbytes: int, seconds: float) -> Measurement:
    return Measurement(
        operation="tcp",
        ranks=pair,
        samples=(sample_of(nbytes, [seconds]),),
        alpha_s=0.0,
        beta_s_per_byte=seconds / nbytes,
        residual=0.0,
        rate_bits_s=8 * nbytes / seconds,
    )


class _Prober:
    """One rank's part in measuring."""

    def __init__(self, group: dist.ProcessGroup, sizes: tuple[int, ...], limit_s: float, address: str | None) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self._device = _device(group)
        self.backend = backend_for(group, self._device)
        self._sizes = sizes
        self.limit_s = limit_s
        self._limit = datetime.timedelta(seconds=limit_s)
        store = store_beside(group)
        # Never started: here ranks wait for each other in pairs, which is not what its verdicts are about.
        health = Health(dist.PrefixStore("beacons", store), self.rank, self.members, limit_s, ())
        self._control = Control(dist.PrefixStore("control", store), self.rank, self.members, limit_s, health)
        self._hosts = tuple(self._control.gather(socket.gethostname(), "meet the other ranks for a measurement"))
        self.addresses = self._control.gather(address or "", "meet the other ranks for a measurement")
        self._store = store
        self.group: Any = self._group_of(self.world) if self.world > 1 else None
        self._beside: list[Any] = []  # more of them, as lanes have
        # Written, not just reserved: reading memory that was never written reads one page of zeros over and over.
        self.buffer = torch.empty(sizes[-1] // 4, device=self._device).zero_()
        self.number = torch.zeros(1, dtype=torch.int64, device=self._device)

    def _group_of(self, size: int, name: str = "probe") -> Any:
        """Of the first `size` ranks, of which this is one."""
        try:
            return new_group(self.backend, self._store, f"{name}-{size}", self.rank, size, self.limit_s)
        except RuntimeError as error:
            raise self._failure("connect to the other ranks", (), error) from error

    def run(self, budget_s: float, sizes: list[int], patterns: Sequence[str]) -> Network:
        found: list[Measurement] = []
        pairs = links(self.world)
        by_pattern_s = PATTERNS_SHARE * budget_s if patterns and pairs and all(self.addresses) else 0.0
        budget_s -= by_pattern_s
        for size in sizes if pairs else []:
            if self.rank < size:
                found += self._all_reduce(size, ALL_REDUCE_SHARE * budget_s / len(sizes))
            self._from(0, f"wait for the first {size} ranks to measure their all-reduce")
        if by_pattern_s:
            found += self._patterns(patterns, by_pattern_s)
        for pair in pairs:
            if self.rank in pair:
                found += _Pair(self, pair).measure((1 - ALL_REDUCE_SHARE) * budget_s / len(pairs))
            one, other = (self.members[rank] for rank in pair)
            self._from(pair[0], f"wait for ranks {one} and {other} to measure their link")
        several = TypeAdapter(list[Measurement])
        texts = self._control.gather(several.dump_json(found).decode(), "exchange what was measured")
        everything = [measurement for text in texts for measurement in several.validate_json(text)]
        return Network(backend=self.backend, hosts=self._hosts, measurements=tuple(everything))

    def processors(self, patterns: Sequence[str], servers: Wanted | None, budget_s: float) -> Processors | None:
        """What the all-reduce takes of them on rank 0's machine, if there are other ranks and the system counts it. All
        ranks get the same."""
        if self.world == 1:
            return None
        machines = self._control.gather(here(), "say which machines they are on")
        if not all(machines):
            return None
        cores, sharing = int(machines[0].split()[1]), machines.count(machines[0])
        patterns = patterns if all(self.addresses) else ()
        each_s = budget_s / (1 + len(COUNTED_NBYTES)) / (1 + len(patterns) + (servers is not None))
        buffer = torch.zeros(max(COUNTED_NBYTES) // 4, device=self._device)

        other = torch.zeros_like(buffer)

        def native(nbytes: int) -> None:
            """Two, as lanes have them: together they take less of processors than one after the other."""
            parts = [[both[: nbytes // 4]] for both in (buffer, other)]
            starts = [partial(self.group.allreduce, part) for part in parts]
            self.do_all(starts, f"all-reduce {nbytes} bytes", ())

        small = [both[: ABREAST_NBYTES // 4] for both in (buffer, other)]
        if self._device.type == "cpu":  # NCCL's communicators are not for two threads at a time
            num_pairs = ABREAST_PAIRS if sharing == self.world <= MOST_WITH_PAIRS else 1
            self._beside = [self._group_of(self.world, f"beside-{number}") for number in range(2 * num_pairs - 1)]
        pairs = list(zip(*[iter([self.group, *self._beside])] * 2, strict=False))

        def on_lane(lane: int, turn: int) -> None:
            group = pairs[turn % len(pairs)][lane]
            self.do(lambda: group.allreduce([small[lane]]), f"all-reduce {ABREAST_NBYTES} bytes")

        carrying = [self._carrying("", native, on_lane, sharing * 2, each_s)]
        if patterns:
            with self._staged(patterns) as run:
                for name in patterns:

                    def once(nbytes: int, name: str = name) -> None:
                        run(name, buffer[: nbytes // 4], 0)

                    def by_pattern(lane: int, turn: int, name: str = name) -> None:
                        run(name, small[lane], lane)

                    carrying.append(self._carrying(name, once, by_pattern, sharing, each_s))
        if servers is not None and all(self.addresses) and self._device.type == "cpu":
            carrying.append(self._served(servers, buffer, sharing, each_s))
        native(4)  # all at once from here on: what computes gets slower by that, and its memory too
        # On an accelerator that computes it is no processor's work.
        gather_s, gather_s_per_byte = gathered_s() if self._device.type == "cpu" else (0.0, 0.0)
        found = Processors(
            cores=cores,
            ranks=sharing,
            carrying=tuple(carrying),
            gather_s=gather_s,
            gather_s_per_byte=gather_s_per_byte,
            codecs=encodings(self.world) if self._device.type == "cpu" else (),
        )
        text = self._control.gather(found.model_dump_json(), "exchange what messages take of processors")[0]
        return Processors.model_validate_json(text)

    def _served(self, wanted: Wanted, buffer: torch.Tensor, sharing: int, each_s: float) -> Carrying:
        """Of a piece of a sum through servers, on each worker and its part of the servers, when several are under way
        and go to all servers alike."""
        corner = (dist.PrefixStore("served", self._store), self._control, self.rank, self.members)
        servers = Servers(wanted, self.addresses[self.rank], *corner, self.limit_s)
        pieces = PIECES_OF_A_WORKER * self.world

        def several(nbytes: int) -> float:
            """Until each of them is there, the mean."""
            asked, start_s, times_s = [], time.perf_counter(), []
            for lane in range(pieces):
                asked.append(servers.ask(Sum([buffer[: nbytes // 4].clone()]), lane))
            for each in asked:
                if not each.done_within(self.limit_s):
                    raise DeadlineError(f"servers did not answer within {self.limit_s:g} s; {servers.lost}")
                times_s.append(time.perf_counter() - start_s)
            return statistics.fmean(times_s)

        try:
            message_s, byte_s = self._counted(several, SERVED_NBYTES, sharing * pieces, each_s)
            repeats = round(each_s / max(1e-6, several(ABREAST_NBYTES)))
            repeats = self._agree_in(self.group)(max(MIN_REPEATS, min(MAX_REPEATS, repeats)))
            abreast_s = statistics.fmean(several(ABREAST_NBYTES) for _ in range(repeats))
            self._from(0, "leave servers")  # what others still fetch is there until then
        except BaseException:
            servers.abandon()
            raise
        servers.close()
        return Carrying(pattern=SERVED, message_s=message_s, byte_s=byte_s, abreast_s=abreast_s, abreast=pieces)

    def _carrying(
        self,
        pattern: str,
        once: Callable[[int], None],
        on_lane: Callable[[int, int], None],
        sharing: int,
        each_s: float,
    ) -> Carrying:
        """once: of so many bytes. on_lane: of a few, on a lane, by the connections whose turn it is; lanes may be used
        by threads at the same time."""
        message_s, byte_s = self._counted(once, COUNTED_NBYTES, sharing, each_s)
        abreast_s = self._abreast(on_lane, each_s) if self._device.type == "cpu" else 0.0
        return Carrying(pattern=pattern, message_s=message_s, byte_s=byte_s, abreast_s=abreast_s)

    def _counted(
        self, once: Callable[[int], object], sizes: Sequence[int], sharing: int, each_s: float
    ) -> tuple[float, float]:
        """Processor seconds of a message, and of each of its bytes; sharing: of `once`, on all ranks."""
        points, agree = [], self._agree_in(self.group)
        for nbytes in sizes:
            once(nbytes)
            repeats = agree(max(MIN_REPEATS, round(each_s / max(1e-6, _timed(once, nbytes)))))
            points.append((nbytes, counted_s(partial(once, nbytes), repeats) / repeats / sharing))
        return line(points)

    def _abreast(self, on_lane: Callable[[int, int], None], budget_s: float) -> float:
        """Of each message, where two threads send them one after the other, as lanes do."""
        agree = self._agree_in(self.group)

        def stretch(turn: int) -> float:
            def several(lane: int) -> None:
                for _ in range(ABREAST_IN_STRETCH):
                    on_lane(lane, turn)

            start_s = time.perf_counter()
            list(threads.map(several, range(2)))
            return (time.perf_counter() - start_s) / ABREAST_IN_STRETCH

        with ThreadPoolExecutor(2, "gradientflow-probe") as threads:
            for turn in range(ABREAST_PAIRS):
                for lane in range(2):
                    on_lane(lane, turn)  # connects
            once_s = ABREAST_IN_STRETCH * stretch(0)
            number = agree(max(MIN_REPEATS, min(MAX_REPEATS, round(ABREAST_TIMES * budget_s / once_s))))
            # Some take ten times as long as others, and that counts; a moment unlike all others does not.
            return statistics.median(map(stretch, range(number)))

    def close(self) -> None:
        for group in (self.group, *self._beside):
            if group is not None:
                group.shutdown()

    def _all_reduce(self, size: int, budget_s: float) -> list[Measurement]:
        group = self.group if size == self.world else self._group_of(size)

        def once(nbytes: int) -> None:
            self.do(lambda: group.allreduce([self.buffer[: nbytes // 4]]), f"all-reduce {nbytes} bytes")

        samples, skipped = self.sweep(once, self._agree_in(group), budget_s)
        if group is not self.group:
            group.shutdown()
        return [summarize("all_reduce", range(size), samples, skipped)] if self.rank == 0 else []

    def _patterns(self, names: Sequence[str], budget_s: float) -> list[Measurement]:
        """All-reduces over connections of our own."""
        found = []
        with self._staged(names) as run:
            for name in names:

                def once(nbytes: int, name: str = name) -> None:
                    run(name, self.buffer[: nbytes // 4], 0)

                samples, skipped = self.sweep(once, self._agree_in(self.group), budget_s / len(names))
                found.append(summarize(f"{BY_PATTERN}{name}", range(self.world), samples, skipped))
        return found if self.rank == 0 else []

    @contextlib.contextmanager
    def _staged(self, names: Sequence[str]) -> Iterator[Callable[[str, torch.Tensor, int], None]]:
        """Runs a pattern on some values, on one of two lanes."""
        connections = Links(self.addresses[self.rank], self._control, self.rank, self.limit_s)
        patterns = {name: ALL_REDUCES[name](self.world) for name in names}
        connections.connect({peer for one in patterns.values() for peer in peers_of(one, self.rank)}, num_lanes=2)
        staged = Staged(connections, patterns, self.rank, num_lanes=2)

        def too_long() -> None:
            raise DeadlineError(f"one message by a pattern took longer than {self.limit_s:g} s")

        try:
            yield lambda name, values, lane: staged.run(name, values, lane, too_long, self.limit_s)
        except OSError as error:
            raise PeerError(f"rank {self.members[self.rank]} lost a connection ({error})", ()) from error
        finally:
            staged.close()

    def _agree_in(self, group: Any) -> Callable[[int], int]:
        def agree(number: int) -> int:
            self.number.fill_(number)
            self.do(lambda: group.broadcast(self.number, 0), "agree on repetitions")
            return int(self.number.item())

        return agree

    def sweep(
        self, once: Callable[[int], None], agree: Callable[[int], int], budget_s: float, num_ways: int = 1
    ) -> tuple[list[Sample], tuple[int, ...]]:
        """Time `once` for each size, and say which were left out; `agree` gives everybody the leader's number."""
        once(self._sizes[0])  # connects
        end_s = time.perf_counter() + budget_s
        nbytes, seconds = self._sizes[0], _timed(once, self._sizes[0])
        samples: list[Sample] = []
        for index, next_nbytes in enumerate(self._sizes):
            # Too much rather than too little: start-up, which is all that small sizes take, does not grow.
            predicted_s = seconds * max(next_nbytes, SMALL_NBYTES) / max(nbytes, SMALL_NBYTES)
            if samples and not agree(_affordable(predicted_s, end_s - time.perf_counter())):
                return samples, self._sizes[index:]
            nbytes = next_nbytes
            repeats = agree(_num_repeats(_timed(once, nbytes), budget_s))
            times_s = [_timed(once, nbytes) for _ in range(repeats)]
            seconds = statistics.median(times_s)
            samples.append(sample_of(nbytes, [each_s / num_ways for each_s in times_s]))
        return samples, ()

    def _from(self, source: int, purpose: str) -> int:
        """`source`'s number, on all ranks."""
        self.do(lambda: self.group.broadcast(self.number, source), purpose)
        return int(self.number.item())

    def do(self, start: Callable[[], dist.Work], purpose: str, with_ranks: tuple[int, ...] = ()) -> None:
        self.do_all([start], purpose, with_ranks)

    def do_all(self, starts: Sequence[Callable[[], dist.Work]], purpose: str, with_ranks: tuple[int, ...]) -> None:
        """All are started, then waited for. A connection that is gone may fail either."""
        try:
            for work in [start() for start in starts]:
                work.wait(self._limit)
                if self._device.type != "cpu":
                    torch.accelerator.synchronize(self._device)
        except RuntimeError as error:
            raise self._failure(purpose, with_ranks, error) from error

    def _failure(self, purpose: str, with_ranks: tuple[int, ...], error: RuntimeError) -> TrainingError:
        words = str(error).strip().partition("\n")[0]
        kind = DeadlineError if re.search("timed out|timeout", words, re.IGNORECASE) else PeerError
        return kind(f"rank {self.members[self.rank]} tried to {purpose}, and the group failed ({words})", with_ranks)


class _Pair:
    """One rank's part in measuring the link between two; the first of them leads."""

    def __init__(self, prober: _Prober, pair: tuple[int, int]) -> None:
        self._prober, self._pair = prober, pair
        self._leads = prober.rank == pair[0]
        self._other = pair[1] if self._leads else pair[0]
        self._name = prober.members[self._other]  # as the whole job calls it

    def measure(self, budget_s: float) -> list[Measurement]:
        stream_s = min(STREAM_S, STREAM_SHARE * budget_s)
        samples, skipped = self._prober.sweep(self._there_and_back, self._agree, budget_s - 2 * stream_s, num_ways=2)
        rate = self._rate(samples, stream_s)
        found = summarize("p2p", self._pair, samples, skipped).model_copy(update={"rate_bits_s": 8 * rate})
        plain = self._plain(stream_s)
        return [found, *plain] if self._leads else []

    def _plain(self, stream_s: float) -> list[Measurement]:
        """A plain TCP stream from the one that leads to the other; nothing where they cannot reach each other."""
        address, limit_s = self._prober.addresses[self._pair[1]], self._prober.limit_s
        if not address:
            return []
        if self._leads:
            port, token = self._tell(0), self._tell(0)
            if port:
                with contextlib.suppress(OSError):  # then the other's count says so
                    send(address, port, token, stream_s, STREAM_PATIENCE_S)
            nbytes, nanoseconds = self._tell(0), self._tell(0)
            return [_streamed(self._pair, nbytes, nanoseconds * 1e-9)] if nbytes else []
        try:
            receiver = Receiver(address)
        except OSError:  # no address of this machine
            for _ in range(4):
                self._tell(0)
            return []
        self._tell(receiver.port)
        self._tell(receiver.token)
        try:
            found = receiver.receive(stream_s, min(limit_s, stream_s + STREAM_PATIENCE_S))
        except OSError:
            found = None
        self._tell(found.nbytes if found else 0)
        self._tell(round(found.seconds * 1e9) if found else 0)
        return []

    def _tell(self, number: int) -> int:
        """What the one that does not lead says, on both."""
        self._prober.number.fill_(number)
        (self._receive if self._leads else self._send)(self._prober.number)
        return int(self._prober.number.item())

    def _rate(self, samples: Sequence[Sample], stream_s: float) -> float:
        """Bytes a second of a stream in one direction, from the difference of two lengths.

        A shaped link lets some hundred kilobytes through at once after a pause, and in a ping-pong each
        direction pauses all the time: at 100 Mbit/s its times up to 512 KiB came to 111 Mbit/s.
        """
        guess = _bytes_per_s([(sample.nbytes, sample.median_s) for sample in samples])
        fitting = [sample.nbytes for sample in samples if sample.nbytes <= min(MAX_STREAMED, guess * stream_s / 16)]
        nbytes = self._agree(fitting[-1] if fitting else samples[0].nbytes)
        num_messages = self._agree(max(1, math.floor(guess * stream_s / 4 / nbytes)))
        self._stream(nbytes, 1)
        short_s = _timed(lambda number: self._stream(nbytes, number), num_messages)
        long_s = _timed(lambda number: self._stream(nbytes, number), 3 * num_messages)
        if long_s <= short_s:
            return 3 * num_messages * nbytes / long_s
        return 2 * num_messages * nbytes / (long_s - short_s)

    def _there_and_back(self, nbytes: int) -> None:
        for step in (self._send, self._receive) if self._leads else (self._receive, self._send):
            step(self._prober.buffer[: nbytes // 4])

    def _stream(self, nbytes: int, num_messages: int) -> None:
        values = self._prober.buffer[: nbytes // 4]
        step = self._sending(values) if self._leads else self._receiving(values)
        self._do([step] * num_messages, f"stream {num_messages} messages of {nbytes} bytes with")
        (self._receive if self._leads else self._send)(self._prober.number)  # all of it has arrived

    def _agree(self, number: int) -> int:
        self._prober.number.fill_(number)
        (self._send if self._leads else self._receive)(self._prober.number)
        return int(self._prober.number.item())

    def _send(self, values: torch.Tensor) -> None:
        self._do([self._sending(values)], f"send {values.nbytes} bytes to")

    def _receive(self, values: torch.Tensor) -> None:
        self._do([self._receiving(values)], f"receive {values.nbytes} bytes from")

    def _sending(self, values: torch.Tensor) -> Callable[[], dist.Work]:
        return lambda: cast(dist.Work, self._prober.group.send([values], self._other, 0))

    def _receiving(self, values: torch.Tensor) -> Callable[[], dist.Work]:
        return lambda: cast(dist.Work, self._prober.group.recv([values], self._other, 0))

    def _do(self, starts: Sequence[Callable[[], dist.Work]], purpose: str) -> None:
        self._prober.do_all(starts, f"{purpose} rank {self._name}", (self._name,))


def _affordable(predicted_s: float, left_s: float) -> bool:
    """Each size may take two thirds of the time that is left."""
    return (1 + MIN_REPEATS) * predicted_s < left_s * 2 / 3


def _num_repeats(once_s: float, budget_s: float) -> int:
    """A fortieth of the budget each, or as few as make a median."""
    return max(MIN_REPEATS, min(MAX_REPEATS, math.floor(budget_s / 40 / once_s)))


def _timed(once: Callable[[int], object], nbytes: int) -> float:
    start_s = time.perf_counter()
    once(nbytes)
    return time.perf_counter() - start_s


def _device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def osu_table(network: Network) -> str:
    """The measurements as the OSU benchmarks print theirs, with the spread beside the median."""
    lines = [f"# {network.backend}, {network.world} ranks: {', '.join(network.hosts)}"]
    for found in network.measurements:
        if found.operation == "tcp":
            one, other = found.ranks
            lines += ["", f"# plain TCP stream from rank {one} to {other}: {found.rate_bits_s / 1e6:.1f} Mbit/s"]
            continue
        ranks = " and ".join(map(str, found.ranks)) if found.operation == "p2p" else f"0 to {len(found.ranks) - 1}"
        lines += [
            "",
            f"# {found.operation} among ranks {ranks}",
            f"# {found.alpha_s * 1e6:.1f} us + {found.beta_s_per_byte * 1e9:.4g} ns a byte from "
            f"{SMALL_NBYTES} bytes on, within {found.residual:.0%}; {found.rate_bits_s / 1e6:.1f} Mbit/s on a link",
        ]
        if found.skipped_nbytes:
            sizes = ", ".join(map(str, found.skipped_nbytes))
            lines.append(f"# no time for sizes {sizes}")
        lines.append("# Size        Median Latency(us)        P10(us)        P90(us)    Samples")
        for sample in found.samples:
            spread = f"{sample.p10_s * 1e6:15.2f}{sample.p90_s * 1e6:15.2f}{sample.num_samples:11d}"
            lines.append(f"{sample.nbytes:<14d}{sample.median_s * 1e6:18.2f}{spread}")
    if network.processors:
        lines += ["", *_in_words(network.processors)]
    if choice := quickest(network):
        lines += ["", f"# quickest all-reduce among {network.world} ranks: {choice}"]
    return "\n".join(lines) + "\n"


def _in_words(found: Processors) -> Iterator[str]:
    yield f"# processors: {found.ranks} ranks share {found.cores} cores; on each rank a message takes of them"
    for way in found.carrying:
        words = f"{1e6 * way.message_s:.0f} us, and {1e9 * way.byte_s:.2f} ns a byte"
        if way.abreast_s:
            words += f"; {way.abreast} of {ABREAST_NBYTES} bytes abreast last {1e6 * way.abreast_s:.0f} us"
        yield f"#   by {way.pattern or NATIVE}: {words}"


def ways(network: Network) -> Best | None:
    """The all-reduces of the whole world that were measured, the group's own first; None if that was all."""
    of_all = [found for found in network.measurements if len(found.ranks) == network.world > 1]
    native = [found for found in of_all if found.operation == "all_reduce" and len(found.samples) > 1]
    ours = {
        found.operation.removeprefix(BY_PATTERN): CostTable(points=found.points)
        for found in of_all
        if found.operation.startswith(BY_PATTERN) and len(found.samples) > 1
    }
    return Best({NATIVE: CostTable(points=native[0].points), **ours}) if native and ours else None


def quickest(network: Network) -> str:
    """By size, in words."""
    best = ways(network)
    if best is None:
        return ""
    sizes = [nbytes for nbytes, _ in next(found for found in network.measurements if found.samples).points]
    runs = [(name, list(run)) for name, run in groupby(sizes, key=best.pick)]
    last = runs[-1][0]
    return ", ".join(
        [*(f"{name} up to {run[-1]} bytes" for name, run in runs[:-1]), f"then {last}" if runs[1:] else last]
    )
