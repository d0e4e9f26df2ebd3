"""To go on from a checkpoint is to have gone on: the same bits, for every way of training in lockstep.

One law for many recipes. Each is trained with a checkpoint on the way, and from there on once more, in a flow that has
just been attached to another model; some of them also without any checkpoint. Parameters, what the optimizer keeps and
what the flow does are compared at the end.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradientflow as gf
from gradientflow.integrations.dcp import saved_flow
from gradientflow.runtime import tuning
from gradientflow.runtime.states import Kept
from helpers import kept, run_ranks
from models import Blocks, batch, pay_for_any_race

STEPS = 9


class Case(NamedTuple):
    recipe: str
    stop: int = 5
    kind: str = "sgd"
    #: Whether it is compared with a run that never saved, too: not for what is planned by the clock.
    whole: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32


FIXED = [
    Case("bsp"),
    Case("wfbp", kind="adamw"),
    Case("lazy:4KB", 0, whole=True),
    Case("lazy:4KB-ring", 1, "adamw"),
    Case("lazy+fp16"),
    Case("lazy", kind="adamw", options=(("master_weights", True),), dtype=torch.bfloat16),
    Case("lazy", options=(("broadcast_buffers", False), ("nonfinite", "skip"), ("verify_every", 2))),
    Case("lazy:4KB-ps"),
    Case("dear"),
    Case("flow", kind="adamw"),
    Case("bytescheduler"),
    Case("merge"),
    Case("lazy+csc:10%:warmup=2"),
]
CODECS = [
    Case("lazy:4KB+csc:always:10%:warmup=7", whole=True),
    Case("gradientflow:always:10%:warmup=2", kind="adamw"),
    Case("lazy:4KB+topk:always:5%:warmup=6", whole=True),
    Case("lazy:4KB+topk:always:5%:sampled:masking:warmup=2", kind="nesterov"),
    Case("lazy+topk:always:5%:guard=2%", 6, whole=True),
    Case("lazy+dgc:always:5%:warmup=2"),
    Case("lazy+gtopk:always:5%:warmup=2"),
    Case("lazy:4KB+randomk:always:10%:warmup=2"),
    Case("lazy+threshold:always:0.01:warmup=2"),
    Case("lazy+int8:always:corrected"),
    Case("lazy:4KB-ring+int8:always", kind="adamw"),
    Case("lazy:4KB+qsgd:4:always"),
    Case("lazy+efsign:always:warmup=2"),
    Case("lazy+signsgd", kind="adamw"),
    Case("lazy:4KB+powersgd:2:always:warmup=2", whole=True),
    Case("lazy+powersgd:1:always:guard=2%", 6),
    Case("lazy:4KB-ps+topk:always:5%:warmup=2"),
]
DELTAS = [
    Case("lazy@local:3", 4),
    Case("lazy@local:3", 6, "adamw"),
    Case("lazy:4KB@local:4:fragments=2:delay=1", 6, whole=True),
    Case("lazy@diloco:3:delay=1", 3, "adamw", whole=True),
    Case("lazy@diloco:2", 5),
    Case("lazy+int8@diloco:2", 5, whole=True),
    Case("lazy@diloco:2:warmup=3", 5, whole=True),
    Case("lazy@diloco:2:warmup=1", 5),
    Case("lazy:4KB@diloco:4:fragments=2:delay=1:warmup=1", 6, "adamw", whole=True),
    Case("lazy+topk:5%:warmup=2@local:2", 5),
    Case("lazy+qsgd:4@local:2", 6),
    Case("lazy@local:3:state=average", 4, "adamw"),
    Case("lazy@local:2:state=reset", 3),
    Case("lazy@local:2:start=3", 2),
    Case("lazy:4KB+topk:always:5%:warmup=2@local:2:start=4", 2),
    Case("lazy@local:2:start=3", 6),
]


class Model(Blocks):
    """Dropout, so that random numbers matter; a buffer that is not the same everywhere."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(images.flatten(1)))


class Job:
    """One training; `saved`: what it goes on from."""

    def __init__(self, case: Case, saved: dict[str, Any] | None = None) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(5 + self.rank if saved else self.rank)
        self.model = Model().to(case.dtype)
        self.optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
            "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        }[case.kind](self.model.parameters())
        self.flow = gf.attach(self.model, self.optimizer, case.recipe, **dict(case.options))
        if saved:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.flow.load_state_dict(saved["flow"])
            torch.set_rng_state(saved["random"])

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            images, labels = batch(self.rank, step, flat=True, dtype=next(self.model.parameters()).dtype)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()

    def everything(self) -> dict[str, Any]:
        self.flow.synchronize()
        state = self.flow.state_dict()
        for changing in ("plan", "recipe"):
            state.pop(changing, None)
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "flow": state}
        )


def obeys(case: Case, directory: str) -> str:
    """ "" if it does."""
    first = Job(case)
    first.run(0, case.stop)
    gf.save(directory, first.flow, model=first.model, optimizer=first.optimizer, step=case.stop)
    first.run(case.stop, STEPS)
    expected = first.everything()
    first.flow.close()
    saved = gf.load(directory)
    assert saved["step"] == case.stop
    second = Job(case, saved)
    second.run(case.stop, STEPS)
    found = second.everything()
    second.flow.close()
    if wrong := different(found, expected, ""):
        return wrong
    if not case.whole:
        return ""
    never_saved = Job(case)
    never_saved.run(0, STEPS)
    found = never_saved.everything()
    never_saved.flow.close()
    return different(found, expected, "never saved")


def different(one: Any, other: Any, where: str) -> str:
    """The first place in which they are."""
    if isinstance(one, dict | Kept):
        if sorted(map(str, one.keys())) != sorted(map(str, other.keys())):
            return f"{where}: {list(one.keys())} and {list(other.keys())}"
        return next((d for key in one.keys() if (d := different(one[key], other[key], f"{where}.{key}"))), "")
    if isinstance(one, list | tuple):
        return next(
            (d for n, (a, b) in enumerate(zip(one, other, strict=True)) if (d := different(a, b, f"{where}.{n}"))), ""
        )
    if isinstance(one, torch.Tensor):
        return "" if torch.equal(one, other) else f"{where}: {(one.double() - other.double()).abs().max()}"
    return "" if one == other else f"{where}: {one!r} and {other!r}"


def obey(cases: list[Case], directory: str) -> dict[str, str]:
    found = {}
    for number, case in enumerate(cases):
        where = tempfile.mkdtemp(dir=directory) if dist.get_world_size() == 1 else f"{directory}/{number}"
        found[f"{case}"] = obeys(case, where)
    return {case: words for case, words in found.items() if words}


@pytest.mark.parametrize("cases", [FIXED, CODECS, DELTAS], ids=["plans", "codecs", "deltas"])
def test_to_go_on_is_to_have_gone_on(cases: list[Case], tmp_path: Path) -> None:
    assert run_ranks(2, obey, cases, str(tmp_path)) == [{}, {}]


def test_three_ranks_and_codecs_that_cut_by_rank(tmp_path: Path) -> None:
    cases = [Case("lazy+int8:always"), Case("lazy:4KB+qsgd:4:always"), Case("lazy+gtopk:always:5%:warmup=2")]
    assert run_ranks(3, obey, cases, str(tmp_path)) == [{}] * 3


def race(directory: str) -> tuple[bool, bool]:
    """Whether plans race again after a checkpoint in the middle of a race, and not after it."""
    pay_for_any_race()
    tuning.PLANS = tuning.PLANS._replace(rounds=1)  # so that it is over after some twenty steps
    pins = []
    for stop in (6, 24):
        first = Job(Case("auto"))
        first.run(0, stop)
        plan = first.flow.plan
        gf.save(f"{directory}/{stop}", first.flow, model=first.model, optimizer=first.optimizer)
        first.flow.close()
        second = Job(Case("auto"), gf.load(f"{directory}/{stop}"))
        plans = set()
        for step in range(stop, stop + 12):
            second.run(step, step + 1)
            plans.add(second.flow.plan.digest)
        second.flow.close()
        pins.append(plans == {plan.digest})
    return not pins[0], pins[1]


def test_auto_goes_on_with_what_it_has_chosen(tmp_path: Path) -> None:
    assert run_ranks(2, race, str(tmp_path)) == [(True, True)] * 2


# - Through torch.distributed.checkpoint

RESHARDED = "lazy:4KB+topk:always:5%:warmup=0"


def masses(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of everything that waits, summed over ranks."""
    found = {}
    for kind, tensors in kept(state)["compression"]["codec"]["slots"].items():
        found[kind] = torch.cat([tensors[name].double() for name in sorted(tensors)])
        dist.all_reduce(found[kind])
    return found


def written(job: Job) -> dict[str, Any]:
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "flow": job.flow.state_dict()}


def moves(path: str, before: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Go on from what another world saved, if any did; save. Of what waits: after loading, and when it is saved."""
    job = Job(Case(RESHARDED))
    if before:
        state = written(job) | {"flow": saved_flow(before)}
        dcp.load(state, checkpoint_id=before)
        job.model.load_state_dict(state["model"])
        job.flow.load_state_dict(state["flow"])
    loaded = masses(job.flow.state_dict())
    job.run(0, 3)
    dcp.save(written(job), checkpoint_id=path)
    saved = masses(job.flow.state_dict())
    job.flow.close()
    return {kind: (loaded.get(kind, torch.zeros(0)), saved[kind]) for kind in saved}


def test_a_checkpoint_of_torchs_that_is_spoilt_is_named(tmp_path: Path) -> None:
    for content in (None, b"\x80\x04no pickle"):
        if content is not None:
            (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(gf.UserError, match=r"its \.metadata cannot be read; \w+: .") as caught:
            saved_flow(tmp_path)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_waits_moves_from_world_to_world(tmp_path: Path) -> None:
    before, expected = "", {}
    for number, world in enumerate((4, 2, 3)):
        path = str(tmp_path / str(number))
        (found, *others) = run_ranks(world, moves, path, before)
        for kind, (loaded, _) in found.items():
            if before:
                assert expected[kind].abs().sum() > 1.0
                assert torch.allclose(loaded, expected[kind], atol=1e-6), (world, kind)
            assert all(torch.equal(loaded, other[kind][0]) for other in others)
        before, expected = path, {kind: saved for kind, (_, saved) in found.items()}


def through_dcp(path: str, recipe: str) -> str:
    """In the same world a flow's state is loaded like any other, into that of one that has just been attached."""
    job, fresh = Job(Case(recipe)), None
    job.run(0, 4)
    dcp.save(written(job), checkpoint_id=path)
    random_state = torch.get_rng_state()
    job.run(4, STEPS)
    expected = job.everything()
    job.flow.close()
    fresh = Job(Case(recipe))
    state = written(fresh) | {"optimizer": expected["optimizer"]}  # torch's have no state before their first step
    fresh.flow.close()
    dcp.load(state, checkpoint_id=path)
    again = Job(Case(recipe), {**state, "random": random_state})
    again.run(4, STEPS)
    found = again.everything()
    again.flow.close()
    for statistics in ("norm.running_mean", "norm.running_var"):  # of which torch has kept some rank's
        del found["model"][statistics], expected["model"][statistics]
    return different(found, expected, "")


def all_through_dcp(path: str, recipes: list[str]) -> list[str]:
    return [through_dcp(f"{path}/{number}", recipe) for number, recipe in enumerate(recipes)]


def test_states_of_flows_are_like_any_other_to_torch(tmp_path: Path) -> None:
    recipes = ["lazy", RESHARDED, "lazy:4KB+powersgd:2:always:warmup=2"]
    assert run_ranks(2, all_through_dcp, str(tmp_path), recipes) == [[""] * 3] * 2


def as_the_guide_says(path: str, recipe: str) -> str:
    """docs/guides/checkpoints.md: nothing of the first job is left when the second one begins."""

    def asked(job: Job) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(job.model, job.optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "flow": job.flow.state_dict()}

    job = Job(Case(recipe, kind="adamw"))
    job.run(0, 4)
    dcp.save(asked(job), checkpoint_id=path)
    random_state = torch.get_rng_state()
    job.run(4, STEPS)
    expected = job.everything()
    job.flow.close()
    again = Job(Case(recipe, kind="adamw"))
    state = asked(again)
    dcp.load(state, checkpoint_id=path)
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    again.flow.load_state_dict(state["flow"])
    torch.set_rng_state(random_state)
    again.run(4, STEPS)
    found = again.everything()
    again.flow.close()
    for statistics in ("norm.running_mean", "norm.running_var"):
        del found["model"][statistics], expected["model"][statistics]
    return different(found, expected, "")


def test_optimizers_come_back_through_torchs_checkpoints(tmp_path: Path) -> None:
    for number, recipe in enumerate(["lazy", RESHARDED]):
        assert run_ranks(2, as_the_guide_says, str(tmp_path / str(number)), recipe) == [""] * 2
