"""The guard: what it sees is right, what it decides is alike on all ranks, and it sends as little as it may."""

from __future__ import annotations

import copy

import pytest
import torch

from conversations import converse, converse_about_all
from gradientflow.compress import PARTS, Feedback, Parcel
from gradientflow.compress.feedback import RESIDUAL
from gradientflow.compress.guard import EVERY, WHOLE
from gradientflow.errors import RecipeError
from gradientflow.plan import Message, Slice

SHAPES = [(50, 40), (120, 30)]
NUMEL = 50 * 40 + 120 * 30


class Rank:
    """Of a least-squares problem whose data ranks have different parts of."""

    def __init__(self, codec: Feedback, rank: int, world: int) -> None:
        self.codec = codec
        generator = torch.Generator().manual_seed(1)
        self.target = torch.randn(NUMEL, generator=generator)
        self.scale = torch.logspace(0, -2, NUMEL)[torch.randperm(NUMEL, generator=generator)]
        self.noise = torch.Generator().manual_seed(100 + rank)
        self.weights = torch.zeros(NUMEL)
        memory = torch.zeros(NUMEL)
        self.views = list(torch.split(memory, [2000, 3600]))
        self.parcels = [
            Parcel(n, Message(slices=(Slice(tensor=str(n), start=0, stop=len(v)),)), [v], [SHAPES[n]])
            for n, v in enumerate(self.views)
        ]
        self.world = world
        codec.lay_out(self.parcels, rank, world, "plan")

    @property
    def loss(self) -> float:
        return float((self.scale * (self.weights - self.target) ** 2).sum() / 2)

    def give(self, noise: float = 0.05) -> None:
        gradient = self.scale * (self.weights - self.target)
        gradient = gradient + noise * torch.randn(NUMEL, generator=self.noise) * self.scale
        for view, part in zip(self.views, (gradient / self.world).split([2000, 3600]), strict=True):
            view.copy_(part)


def run(ranks: list[Rank], steps: range, total: int, highest: float = 0.5) -> int:
    """Bytes that a rank asked for."""
    nbytes = 0
    for step in steps:
        rate = highest * (1 - step / total)
        for rank in ranks:
            rank.codec.begin({}, rate=rate)
            rank.give()
        for number in range(2):
            nbytes += converse([rank.codec.converse(rank.parcels[number]) for rank in ranks])[1]
        nbytes += converse([rank.codec.close() for rank in ranks])[1]
        assert all([rank.codec.settle() for rank in ranks])
        for rank in ranks:
            rank.weights -= rate * torch.cat(rank.views)
        assert all(torch.equal(rank.weights, ranks[0].weights) for rank in ranks)
    return nbytes


def ranks_of(words: str, world: int = 3, name: str = "topk") -> list[Rank]:
    return [Rank(PARTS[name](words, None), rank, world) for rank in range(world)]


def test_it_sees_what_the_sum_over_ranks_is() -> None:
    ranks = ranks_of("2%:guard=5%")
    run(ranks, range(4 * EVERY + 1), 200)
    guard = ranks[0].codec.guard
    assert guard is not None and all(rank.codec.guard.views == guard.views for rank in ranks)
    # The last step was sampled: what is left over now is what it saw.
    left = sum(torch.cat(list(rank.codec.state_dict()["slots"][RESIDUAL].values())) for rank in ranks)
    for number, (view, there) in enumerate(zip(guard.views, left.split([2000, 3600]), strict=True)):
        if view.density >= WHOLE:
            assert not there.any() and view.contraction == pytest.approx(1.0, abs=1e-6)
        else:
            assert 0 < view.contraction < 1 and 0 < view.cosine <= 1 and view.residual_ratio > 0
            assert view.cosine**2 == pytest.approx(view.contraction, abs=0.35)
            length = sum(float((rank.codec.state_dict()["slots"][RESIDUAL][str(number)] ** 2).sum()) for rank in ranks)
            assert view.residual_ratio > 0 and length > 0


def test_it_sends_more_while_little_has_been_gained_and_less_later_and_ends_where_dense_does() -> None:
    steps = 240
    ends, sent = {}, {}
    for name, words in {"all": "1:warmup=0", "floor": "0.1%:warmup=0", "guarded": "0.1%:guard=2%"}.items():
        ranks = ranks_of(words)
        first = run(ranks, range(steps // 2), steps)
        sent[name] = (first, run(ranks, range(steps // 2, steps), steps))
        ends[name] = ranks[0].loss
    gained = Rank(PARTS["topk"]("1%", None), 0, 1).loss - ends["all"]
    assert ends["floor"] - ends["all"] > 0.02 * gained, "the least density alone would have done"
    assert ends["guarded"] - ends["all"] < 0.02 * gained, "the budget"
    assert sent["guarded"][1] < sent["guarded"][0] < sent["all"][0]
    assert sent["guarded"][1] < 0.2 * sent["all"][1]


def test_a_larger_budget_sends_less() -> None:
    sent = []
    for budget in ("0.02%", "0.5%", "10%"):
        ranks = ranks_of(f"0.1%:guard={budget}")
        sent.append(run(ranks, range(60), 60))
    assert sent[0] > sent[1] > sent[2]


def test_it_moves_ranks_of_factors() -> None:
    """From whole messages down to what the recipe says; and back up, if more is asked for."""
    ranks, seen = ranks_of("1:guard=1%", name="powersgd"), []
    for start in range(0, 100, EVERY):
        run(ranks, range(start, start + EVERY), 100)
        seen.append(ranks[0].codec.state_dict()["part"]["ranks"][1])
    assert seen[0] > 8 and min(seen) < 4, seen
    strict = ranks_of("1:guard=0.01%", name="powersgd")
    run(strict, range(100), 100)
    assert strict[0].codec.state_dict()["part"]["ranks"][1] > seen[-1]
    assert strict[0].loss < ranks[0].loss


@pytest.mark.parametrize(("name", "words"), [("topk", "0.1%:guard=2%"), ("powersgd", "1:guard=1%")])
def test_it_decides_the_same_again_and_goes_on_from_a_checkpoint(name: str, words: str) -> None:
    whole, again = ranks_of(words, name=name), ranks_of(words, name=name)
    run(whole, range(60), 60)
    run(again, range(33), 60)
    for number, rank in enumerate(again):
        fresh = PARTS[name](words, None)
        fresh.load_state_dict(copy.deepcopy(rank.codec.state_dict()))
        fresh.lay_out(rank.parcels, number, 3, "plan")
        rank.codec = fresh
    run(again, range(33, 60), 60)
    assert torch.equal(whole[0].weights, again[0].weights)
    assert whole[0].codec.guard.views == again[0].codec.guard.views


def test_a_step_that_does_not_count_decides_nothing() -> None:
    ranks = ranks_of("0.1%:guard=2%")
    run(ranks, range(2 * EVERY), 60)
    before = ranks[0].codec.guard.state_dict()
    for rank in ranks:
        rank.codec.begin({}, rate=0.1)
        rank.give()
    ranks[1].views[0][7] = float("nan")
    assert not converse_about_all(ranks)
    assert ranks[0].codec.guard.state_dict() == before


def test_a_budget_is_a_part() -> None:
    for words in ("guard=0", "guard=100%", "guard=nan"):
        with pytest.raises(RecipeError, match="guard=BUDGET"):
            PARTS["topk"](f"1%:{words}", None)
    with pytest.raises(RecipeError, match="cannot read 'guard=1%'"):
        PARTS["int8"]("guard=1%", None)


def test_a_guard_has_no_warm_up() -> None:
    with pytest.raises(RecipeError, match="without warmup"):
        PARTS["topk"]("1%:guard=2%:warmup=10", None)
    assert PARTS["topk"]("1%:guard=2%:warmup=0", None).guard is not None
