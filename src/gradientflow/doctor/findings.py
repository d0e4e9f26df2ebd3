"""Judges what was seen: pure functions from facts and measurements to what there is to mend."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from gradientflow.doctor.facts import Facts
from gradientflow.doctor.links import Carried
from gradientflow.exchange.reach import is_loopback

#: A host or link below this share of what is usual among the others holds everybody up.
SLOW = 0.5
#: Seconds. Traces are corrected for it, but logs, certificates and job schedulers are not.
MOST_SKEW_S = 0.5
LEAST_TORCH, BELOW_TORCH = (2, 13), (3,)


class Finding(NamedTuple):
    """fix: training will not work, or will be much slower than it need be; note: good to know."""

    check: str
    weight: Literal["ok", "note", "fix"]
    words: str
    #: What to do about it.
    mend: str = ""


def judge_versions(everyone: Sequence[Facts]) -> list[Finding]:
    found = []
    first = everyone[0]
    for what in ("gradientflow", "torch", "python", "byteorder"):
        values: dict[str, list[Facts]] = {}
        for facts in everyone:
            values.setdefault(_comparable(what, getattr(facts, what)), []).append(facts)
        if len(values) > 1:
            usual = max(values, key=lambda value: len(values[value]))
            others = [facts for value, who in values.items() if value != usual for facts in who]
            words = f"{what} is {usual} on {len(values[usual])} of {len(everyone)} ranks, but " + ", ".join(
                f"{getattr(facts, what)} on {facts.name}" for facts in others[:4]
            )
            found.append(Finding("versions", "fix", words, f"install the same {what} on all hosts"))
    for facts in everyone:
        number = tuple(int(part) for part in facts.torch.split("+")[0].split(".")[:2] if part.isdecimal())
        if not LEAST_TORCH <= number < BELOW_TORCH:
            words = f"torch {facts.torch} on {facts.name} is not one that gradientflow works with"
            found.append(Finding("versions", "fix", words, "pip install 'torch>=2.13,<3'"))
    if not found:
        words = f"gradientflow {first.gradientflow}, torch {first.torch}, Python {first.python}, {first.platform}"
        found.append(Finding("versions", "ok", words))
    return found


def judge_backend(facts: Facts) -> Finding:
    if "gloo" not in facts.backends:
        return Finding("backend", "fix", "this torch has no Gloo", "install a build of torch with Gloo")
    if facts.accelerators and "nccl" not in facts.backends and facts.accelerators[0].startswith("cuda"):
        return Finding("backend", "fix", "there are GPUs, but this torch has no NCCL", "install a CUDA build of torch")
    devices = f"{len(facts.accelerators)} accelerators" if facts.accelerators else "no accelerator: training on the CPU"
    return Finding("backend", "ok", f"{', '.join(facts.backends)}; {devices}")


def judge_interfaces(everyone: Sequence[Facts]) -> list[Finding]:
    """Of one host, loopback is right; between hosts it is the trap that Gloo falls into without a word."""
    several = len({facts.machine for facts in everyone}) > 1
    found = []
    for facts in everyone:
        lead = facts.route_interface
        mend = f"on {facts.host}, export GLOO_SOCKET_IFNAME={lead}"
        if lead in ("", "lo"):
            mend = f"on {facts.host}, set GLOO_SOCKET_IFNAME to what `ip route get OTHER-HOST` names after `dev`"
        if facts.told_interface and facts.told_interface not in facts.interfaces:
            words = (
                f"{facts.name}: GLOO_SOCKET_IFNAME={facts.told_interface}, and there is no such interface; there are "
                f"{', '.join(facts.interfaces)}"
            )
            found.append(Finding("interface", "fix", words, mend))
        elif not facts.address:
            words = f"{facts.name}: interface {facts.interface} has no address"
            found.append(Finding("interface", "fix", words, mend))
        elif several and is_loopback(facts.address):
            words = f"{facts.name}: listens on {facts.interface}, which other hosts cannot reach"
            found.append(Finding("interface", "fix", words, mend))
        elif several and facts.listens_on_loopback:
            words = (
                f"{facts.name}: its host name leads to {facts.gloo_address}, so Gloo would listen on loopback and "
                "other hosts would wait for ever"
            )
            found.append(Finding("interface", "fix", words, mend))
    if not found:
        ways = sorted({f"{facts.interface} ({facts.address})" for facts in everyone})
        found.append(Finding("interface", "ok", ", ".join(ways[:6]) + (", ..." if len(ways) > 6 else "")))
        if not several and everyone[0].listens_on_loopback and len(everyone[0].interfaces) > 1:
            words = "this host's name leads to a loopback address: with other hosts, Gloo needs GLOO_SOCKET_IFNAME set"
            found.append(Finding("interface", "note", words))
    return found


def can_be_reached(facts: Facts, several: bool) -> bool:
    """Whether it is worth while to try; `several`: hosts."""
    there = not facts.told_interface or facts.told_interface in facts.interfaces
    return bool(facts.address) and there and not (several and is_loopback(facts.address))


def judge_reach(everyone: Sequence[Facts], carried: Carried) -> list[Finding]:
    """Ways that do not work, by the host that cannot be reached."""
    by_rank = {facts.rank: facts for facts in everyone}
    blocked: dict[int, list[tuple[int, str]]] = {}
    for (source, target), what in sorted(carried.items()):
        if isinstance(what, str):
            blocked.setdefault(target, []).append((source, what))
    found = []
    for target, ways in blocked.items():
        facts = by_rank[target]
        sources = ", ".join(str(source) for source, _ in ways)
        if facts.told_interface and facts.route_interface not in ("lo", facts.interface):
            words = (
                f"{facts.name} is at interface {facts.interface}, where rank {sources} cannot reach it: {ways[0][1]}"
            )
            mend = f"on {facts.host}, export GLOO_SOCKET_IFNAME={facts.route_interface}"
            found.append(Finding("interface", "fix", words, mend))
        else:
            words = f"rank {sources} cannot reach {facts.name}: {ways[0][1]}"
            mend = (
                "let the hosts reach each other at all TCP ports (those of `sysctl net.ipv4.ip_local_port_range` at "
                "least): Gloo, NCCL and gradientflow listen where the system lets them"
            )
            found.append(Finding("ports", "fix", words, mend))
    if carried and not found:
        found.append(Finding("ports", "ok", f"{len(carried)} ways between hosts, all of them open"))
    return found


def judge_rates(everyone: Sequence[Facts], carried: Carried) -> list[Finding]:
    """Who holds the others up. A host's own link shows in its best rate: everybody's ways to a slow host are slow."""
    rates = {way: rate for way, rate in carried.items() if not isinstance(rate, str)}
    if not rates:
        return []
    by_rank = {facts.rank: facts for facts in everyone}
    ranks = sorted({rank for way in rates for rank in way})
    slow: set[int] = set()
    found = []
    for direction, end in (("sends", 0), ("receives", 1)):
        best = {rank: max((rate for way, rate in rates.items() if way[end] == rank), default=0.0) for rank in ranks}
        for rank in ranks:
            others = [rate for other, rate in best.items() if other != rank]
            if len(ranks) > 2 and best[rank] < SLOW * statistics.median(others):
                words = (
                    f"{by_rank[rank].name} {direction} at most {_bits(best[rank])}, where the other hosts have "
                    f"{_bits(statistics.median(others))}; in an all-reduce all wait for the slowest"
                )
                mend = (
                    f"on {by_rank[rank].host}, look at the speed its interface {by_rank[rank].interface} has agreed on "
                    f"(`ethtool {by_rank[rank].interface}`), its cable and port, limits (`tc qdisc`), other traffic"
                )
                if rank not in slow:
                    found.append(Finding("bandwidth", "fix", words, mend))
                slow.add(rank)
    usual = statistics.median(rates.values())
    for (source, target), rate in sorted(rates.items()):
        if not {source, target} & slow and rate < SLOW * usual and len(ranks) > 2:
            words = (
                f"from {by_rank[source].name} to {by_rank[target].name}: {_bits(rate)}, where {_bits(usual)} is usual"
            )
            found.append(
                Finding("bandwidth", "fix", words, "look at the way between them: a switch, a route, another job")
            )
    if len(ranks) == 2 and min(rates.values()) < SLOW * max(rates.values()):
        words = " and ".join(f"{_bits(rate)} from rank {way[0]} to {way[1]}" for way, rate in sorted(rates.items()))
        found.append(Finding("bandwidth", "fix", words, "one direction is much slower: look at duplex and at limits"))
    (source, target), least = min(rates.items(), key=lambda item: item[1])
    words = f"slowest {_bits(least)}, from rank {source} to rank {target}; usual {_bits(usual)}"
    found.append(Finding("bandwidth", "ok" if not found else "note", words))
    return found


def judge_clocks(skews_s: Mapping[int, float | None]) -> list[Finding]:
    """Of ranks, against rank 0's."""
    known = {rank: skew for rank, skew in skews_s.items() if skew is not None}
    found = [
        Finding("clocks", "fix", f"rank {rank}'s clock is {skew:+.1f} s off rank 0's", "run NTP (chrony) on all hosts")
        for rank, skew in sorted(known.items())
        if abs(skew) > MOST_SKEW_S
    ]
    if known and not found:
        found.append(Finding("clocks", "ok", f"within {1e3 * max(map(abs, known.values())):.0f} ms of rank 0's"))
    return found


def _comparable(what: str, value: str) -> str:
    """Python's patch level and how torch was built do not keep ranks apart."""
    if what == "python":
        return ".".join(value.split(".")[:2])
    return value.split("+")[0] if what == "torch" else value


def _bits(nbytes_per_s: float) -> str:
    """
    >>> _bits(12_000_000), _bits(1.2e9)
    ('96 Mbit/s', '9.6 Gbit/s')
    """
    bits = 8 * nbytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
