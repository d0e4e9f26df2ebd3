"""The examination: of this machine alone, or of all ranks of a job together."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradientflow.doctor.facts import Facts, facts_here
from gradientflow.doctor.findings import (
    Finding,
    can_be_reached,
    judge_backend,
    judge_clocks,
    judge_interfaces,
    judge_rates,
    judge_reach,
    judge_versions,
)
from gradientflow.doctor.links import Carried, measure_links
from gradientflow.doctor.meeting import Meeting, NotReached
from gradientflow.lab import Lab, LabUnavailable

#: Beyond what single waits take: for ranks that are busy with somebody else.
_PATIENCE_S = 30.0
_COLLECTIVE_S = 20.0


def examine_here(environment: Mapping[str, str]) -> list[Finding]:
    """What can be seen without other ranks."""
    facts = facts_here(environment)
    return [*judge_versions([facts]), judge_backend(facts), *judge_interfaces([facts]), _lab()]


class Examination(NamedTuple):
    #: Of all ranks, on rank 0; on others only what they could not tell rank 0.
    found: list[Finding]
    #: Where all ranks are together and can add up; None where they are not.
    meeting: Meeting | None


def examine_together(environment: Mapping[str, str], wait_s: float, seconds: float) -> Examination:
    """Collective. seconds: how long each way between hosts is measured."""
    facts = facts_here(environment)
    try:
        meeting = Meeting(environment, wait_s)
    except NotReached as error:
        found = Finding("ports", "fix", f"{facts.name} cannot reach rank 0: {error}", error.mend)
        return Examination([found], None)
    try:
        return _examine(meeting, facts, wait_s, seconds)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        words = f"{facts.name}: the job's store is gone ({str(error).splitlines()[0]})"
        return Examination([Finding("ranks", "fix", words, "see what rank 0 and the launcher said last")], None)


def _examine(meeting: Meeting, facts: Facts, wait_s: float, seconds: float) -> Examination:
    meeting.tell("facts", facts.as_text())
    if meeting.rank == 0:
        seen = _lead(meeting, facts, wait_s, seconds)
        here = meeting.hear("facts", range(meeting.world), 0.0)
        # Nobody may find the store gone, which this process may hold.
        meeting.hear("done", [rank for rank in here if rank != 0], _PATIENCE_S)
        return Examination(seen, meeting if seen[-1] == _collective_works(meeting.world) else None)
    works = _follow(meeting, facts, wait_s, seconds)
    return Examination([], meeting if works else None)


def _lead(meeting: Meeting, mine: Facts, wait_s: float, seconds: float) -> list[Finding]:
    heard = meeting.hear("facts", range(meeting.world), wait_s)
    everyone = [Facts.of_text(text) for _, text in sorted(heard.items())]
    found = [*_judge_absence(meeting, heard, wait_s), *judge_versions(everyone), judge_backend(mine)]
    found += judge_interfaces(everyone)
    hosts: dict[str, int] = {}
    for facts in everyone:
        if can_be_reached(facts, several=len({each.machine for each in everyone}) > 1):
            hosts.setdefault(facts.machine, facts.rank)
    speakers = sorted(hosts.values())
    meeting.tell("speakers", json.dumps(speakers))
    found += judge_clocks({rank: meeting.skew_of(rank) for rank in speakers if rank != 0})
    if len(speakers) > 1:
        found += _judge_links(meeting, everyone, speakers, mine.address, seconds)
    whole = len(heard) == meeting.world and not any(each.weight == "fix" for each in found)
    meeting.tell("collective", "yes" if whole else "no")
    if whole:
        found.append(_all_reduce(meeting))
    elif any(each.weight == "fix" for each in found):
        found.append(Finding("collective", "note", "not tried: mend the rest first"))
    return found


def _follow(meeting: Meeting, facts: Facts, wait_s: float, seconds: float) -> bool:
    """Whether all ranks could add up."""
    told = meeting.hear("speakers", [0], wait_s + _PATIENCE_S).get(0)
    speakers = json.loads(told) if told else []
    if meeting.rank in speakers:
        meeting.answer(_PATIENCE_S)
        carried = measure_links(meeting, speakers, facts.address, seconds)
        meeting.tell("carried", json.dumps([[*way, what] for way, what in carried.items()]))
    patience_s = _PATIENCE_S + 10 * len(speakers) * (seconds + 1)
    works = meeting.hear("collective", [0], patience_s).get(0) == "yes"
    if works:
        works = _all_reduce(meeting) == _collective_works(meeting.world)
    meeting.tell("done", "")
    return works


def _judge_absence(meeting: Meeting, heard: Mapping[int, str], wait_s: float) -> list[Finding]:
    missing = [str(rank) for rank in range(meeting.world) if rank not in heard]
    if not missing:
        return [Finding("ranks", "ok", f"all {meeting.world} are here")]
    words = f"nothing came from rank {', '.join(missing)} of {meeting.world} within {wait_s:g} s"
    mend = (
        f"start `gradientflow doctor` there; where it runs already, it says what it cannot reach ({meeting.address}:"
        f"{meeting.port} must be open)"
    )
    return [Finding("ranks", "fix", words, mend)]


def _judge_links(
    meeting: Meeting, everyone: list[Facts], speakers: list[int], address: str, seconds: float
) -> list[Finding]:
    carried: Carried = {}
    if 0 in speakers:
        carried |= measure_links(meeting, speakers, address, seconds)
    others = [rank for rank in speakers if rank != 0]
    for _, text in sorted(meeting.hear("carried", others, _PATIENCE_S + 10 * len(speakers) * (seconds + 1)).items()):
        carried |= {(source, target): what for source, target, what in json.loads(text)}
    return [*judge_reach(everyone, carried), *judge_rates(everyone, carried)]


def _all_reduce(meeting: Meeting) -> Finding:
    """The proof: a process group of all ranks, and one sum."""
    limit = datetime.timedelta(seconds=_COLLECTIVE_S)
    try:
        store = dist.PrefixStore("collective", meeting.store)
        dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=meeting.world, timeout=limit)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        words = f"Gloo's all-reduce failed: {str(error).splitlines()[0]}"
        return Finding("collective", "fix", words, "look at GLOO_SOCKET_IFNAME and at the ports between the hosts")
    if int(ones.item()) != meeting.world:
        return Finding("collective", "fix", f"{meeting.world} ones add up to {ones.item():g}", "report this as a bug")
    return _collective_works(meeting.world)


def _collective_works(world: int) -> Finding:
    return Finding("collective", "ok", f"{world} ranks have added up over Gloo")


def _lab() -> Finding:
    """Whether `gradientflow bench` can have hosts on this machine. Training needs none of it."""
    try:
        Lab(2, 1e9).down()
    except LabUnavailable as error:
        return Finding("lab", "note", f"no lab on this machine, only loopback: {error}")
    return Finding("lab", "ok", "this machine can have a lab: `gradientflow bench`")
