"""Chunks, error feedback and momentum: laws that hold whatever is sent, all ranks in one process."""

from __future__ import annotations

import copy
import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conversations import converse, converse_about_all, parcels
from gradientflow.compress import PARTS, Feedback, Momentum, Parcel, bf16, fp16, imagined
from gradientflow.compress.csc import most_important
from gradientflow.compress.feedback import MOMENTUM, RESIDUAL, summed
from gradientflow.errors import RecipeError

SIZES = [[1000, 37], [5], [2100], [64, 64, 64]]
NO_MOMENTUM = Momentum()
NAMES = [f"{number}.{place}" for number, ranges in enumerate(SIZES) for place in range(len(ranges))]


class Rank:
    """A codec and its messages; `step` gives what was left over before, and gradients, as one vector each."""

    def __init__(self, codec: Feedback, sizes: list[list[int]] = SIZES, world: int = 1, dtype=torch.float32) -> None:
        self.codec, self.world = codec, world
        self.pool = [[torch.zeros(size, dtype=dtype) for size in ranges] for ranges in sizes]
        self.parcels = parcels(self.pool)
        codec.lay_out(self.parcels, 0, world, "plan")

    def give(self, gradient: torch.Tensor) -> None:
        """As a share of the mean."""
        parts = (gradient / self.world).split([values.numel() for ranges in self.pool for values in ranges])
        for values, part in zip([values for ranges in self.pool for values in ranges], parts, strict=True):
            values.copy_(part)

    def got(self) -> torch.Tensor:
        return torch.cat([values for ranges in self.pool for values in ranges]).clone()

    def held(self, kind: str = RESIDUAL) -> torch.Tensor:
        named = self.codec.state_dict()["slots"][kind]
        return torch.cat([named[name] for name in sorted(named, key=NAMES.index)])


def numel(sizes: list[list[int]] = SIZES) -> int:
    return sum(map(sum, sizes))


def step(ranks: list[Rank], gradients: list[torch.Tensor], momentum: Momentum = NO_MOMENTUM, unit: float = 1.0) -> bool:
    """Whether it counted; bytes are those that were said."""
    for rank, gradient in zip(ranks, gradients, strict=True):
        rank.codec.begin(dict.fromkeys(NAMES, momentum), unit)
        rank.give(gradient * unit)
    return converse_about_all(ranks)


def ranks_of(world: int, argument: str = "0.1:warmup=0", wire=None, dtype=torch.float32) -> list[Rank]:
    return [Rank(PARTS["csc"](argument, wire), world=world, dtype=dtype) for _ in range(world)]


def gradients_of(world: int, seed: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel(), generator=generator, dtype=dtype) for _ in range(world)]


@pytest.mark.parametrize("wire", [None, fp16(), bf16()])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_what_is_sent_and_what_is_left_over_make_up_what_was_given(world: int, wire) -> None:
    ranks, applied = ranks_of(world, wire=wire), torch.zeros(numel(), dtype=torch.float64)
    given_so_far = torch.zeros(numel(), dtype=torch.float64)
    for number in range(12):
        gradients = gradients_of(world, number)
        given_so_far += sum(gradient.double() for gradient in gradients) / world
        assert step(ranks, gradients)
        assert all(torch.equal(rank.got(), ranks[0].got()) for rank in ranks), "ranks end with different bits"
        applied += ranks[0].got().double()
        left_over = sum(rank.held().double() for rank in ranks)
        # A sum in the wire's own precision rounds, and that is nobody's residual; a rank's own rounding is.
        tolerance = {None: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.08}[wire and wire.wire]
        tolerance *= 1.0 if wire is None or world > 1 else 1e-3
        assert torch.allclose(applied + left_over, given_so_far, atol=tolerance)
    assert float((left_over != 0).double().mean()) > 0.5, "everything was sent"


def test_alone_nothing_is_lost_to_the_last_bit() -> None:
    (rank,) = ranks_of(1)
    for number in range(8):
        before, (gradient,) = rank.held(), gradients_of(1, number)
        step([rank], [gradient])
        assert torch.equal(rank.got() + rank.held(), before + gradient)
        assert not (rank.got() * rank.held()).any(), "an element was sent and kept"


@pytest.mark.parametrize("density", [0.05, 0.1, 0.5, 1.0])
def test_the_share_that_was_asked_for_is_sent_and_none_waits_too_long(density: float) -> None:
    ranks = ranks_of(2, f"{density}:warmup=0")
    last = torch.zeros(numel(), dtype=torch.int64)
    scale = torch.linspace(0.0, 1.0, numel()) ** 8  # most chunks never matter
    for number in range(1, 3 * math.ceil(4 / density)):
        step(ranks, [gradient * scale for gradient in gradients_of(2, number)])
        part = ranks[0].codec._part
        # The set of the next step is known by now, and its size is the budget to the chunk.
        assert int(part.chosen.sum()) == math.ceil(density * part.num_chunks)
        last[ranks[0].held() == 0] = number
        assert int((number - last)[scale > 1e-30].max()) <= 4 / density


def test_a_step_sends_the_chunks_that_norms_of_the_step_before_chose() -> None:
    ranks = ranks_of(2, "0.1:warmup=0:chunk=10")
    step(ranks, gradients_of(2, 0))  # everything
    assert all(not rank.held().any() for rank in ranks)
    large = torch.zeros(numel())
    large[40:80] = 100.0
    step(ranks, [large, torch.zeros(numel())])
    assert all(rank.codec._part.chosen[4:8].all() for rank in ranks), "norms of one rank choose for all"
    step(ranks, [large, torch.zeros(numel())])
    assert (ranks[1].got()[40:80] != 0).all()


@settings(max_examples=50, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=1, max_size=60),
    density=st.floats(0.01, 1.0),
    data=st.data(),
)
def test_the_choice_is_by_age_then_by_score_then_by_place(scores: list[float], density: float, data) -> None:
    ages = data.draw(st.lists(st.integers(0, 5), min_size=len(scores), max_size=len(scores)))
    chosen = most_important(torch.tensor(scores), torch.tensor(ages), density).nonzero().flatten().tolist()
    number = min(len(scores), math.ceil(density * len(scores)))
    by_age = sorted(range(len(scores)), key=lambda place: (-ages[place], place))[: math.ceil(0.25 * number)]
    rest = sorted(set(range(len(scores))) - set(by_age), key=lambda place: (-scores[place], place))
    assert chosen == sorted([*by_age, *rest[: number - len(by_age)]])


# - Momentum


class Sgd:
    """Stock momentum SGD's velocity of one vector."""

    def __init__(self, momentum: Momentum) -> None:
        parameter = torch.nn.Parameter(torch.zeros(numel(), dtype=torch.float64))
        self._parameter = parameter
        self._optimizer = torch.optim.SGD([parameter], 1.0, momentum.factor, nesterov=momentum.nesterov)

    def update(self, gradient: torch.Tensor) -> torch.Tensor:
        before = self._parameter.detach().clone()
        self._parameter.grad = gradient
        self._optimizer.step()
        return before - self._parameter.detach()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_sending_everything_is_stock_sgd(world: int, nesterov: bool) -> None:
    momentum = Momentum(0.9, nesterov)
    ranks, stock = ranks_of(world, "1:warmup=0", dtype=torch.float64), Sgd(momentum)
    for number in range(20):
        gradients = gradients_of(world, number, torch.float64)
        step(ranks, gradients, momentum)
        assert torch.allclose(ranks[0].got(), stock.update(sum(gradients) / world), atol=1e-12)


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_constant_gradient_gives_the_dense_velocity_in_the_long_run(nesterov: bool, masking: bool) -> None:
    words = "0.1:warmup=0:masking" if masking else "0.1:warmup=0"
    ranks = ranks_of(2, words, dtype=torch.float64)
    gradients = [torch.full((numel(),), value, dtype=torch.float64) for value in (0.5, 1.5)]
    totals = []
    for _ in range(250):
        step(ranks, gradients, Momentum(0.9, nesterov))
        totals.append(ranks[0].got())
    velocity = torch.stack(totals[100:]).mean(0)
    if masking:  # what makes it another method
        assert float(velocity.max()) < 9.5
    else:
        assert torch.allclose(velocity, torch.full_like(velocity, 10.0), rtol=0.15)
        assert abs(float(velocity.mean()) - 10.0) < 0.05


def test_masking_clears_momentum_where_something_was_sent_and_only_there() -> None:
    ranks = ranks_of(2, "0.1:warmup=0:masking")
    for number in range(5):
        step(ranks, gradients_of(2, number), Momentum(0.9))
        sent = ranks[0].held() == 0
        for rank in ranks:
            assert not rank.held(MOMENTUM)[sent].any()
            assert rank.held(MOMENTUM)[~sent].all()


def test_tensors_may_differ_in_momentum() -> None:
    (rank,) = ranks_of(1, "1:warmup=0", dtype=torch.float64)
    momenta = {name: Momentum(0.1 * place, place % 2 == 1) for place, name in enumerate(NAMES)}
    stocks = {name: Sgd(momentum) for name, momentum in momenta.items()}
    sizes = [size for ranges in SIZES for size in ranges]
    for number in range(6):
        (gradient,) = gradients_of(1, number, torch.float64)
        rank.codec.begin(momenta)
        rank.give(gradient)
        for parcel in rank.parcels:
            converse([rank.codec.converse(parcel)])
        converse([rank.codec.close()])
        assert rank.codec.settle()
        expected = [stocks[name].update(gradient).split(sizes)[place] for place, name in enumerate(NAMES)]
        assert torch.allclose(rank.got(), torch.cat(expected), atol=1e-12)


# - Steps that do not count


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("momentum", [Momentum(), Momentum(0.9), Momentum(0.9, True)])
def test_a_step_with_an_inf_anywhere_leaves_no_trace(bad: float, momentum: Momentum) -> None:
    spoiled, calm = ranks_of(3), ranks_of(3)
    for number in range(6):
        gradients = gradients_of(3, number)
        if number == 3:
            poisoned = [gradient.clone() for gradient in gradients_of(3, 99)]
            poisoned[1][1234] = bad
            assert not step(spoiled, poisoned, momentum)
        assert step(spoiled, gradients, momentum) and step(calm, gradients, momentum)
        for one, other in zip(spoiled, calm, strict=True):
            assert torch.equal(one.got(), other.got()) and torch.equal(one.held(), other.held())


def test_an_overflow_on_the_wire_alone_is_left_for_a_scaler() -> None:
    ranks = ranks_of(2, wire=fp16())
    calm = gradients_of(2, 0)
    assert step(ranks, calm)
    before = [rank.held() for rank in ranks]
    huge = [torch.full((numel(),), 1000.0) for _ in range(2)]  # halves fit into fp16, their sum does not
    assert not step(ranks, huge, unit=100.0)
    assert all(torch.equal(rank.held(), then) for rank, then in zip(ranks, before, strict=True))
    assert step(ranks, calm)


@pytest.mark.parametrize("world", [1, 3, 5])
def test_without_a_scaler_what_the_wire_cannot_carry_waits(world: int) -> None:
    ranks = ranks_of(world, "1:warmup=0", wire=fp16())
    huge, applied = [torch.full((numel(),), 100000.0 * (1 + rank)) for rank in range(world)], torch.zeros(numel())
    assert step(ranks, huge)
    applied += ranks[0].got()
    assert applied.isfinite().all() and (applied > 50000).all()
    for _ in range(12):
        assert step(ranks, [torch.zeros(numel())] * world)
        applied += ranks[0].got()
    assert torch.allclose(applied, sum(huge) / world, rtol=1e-2)
    assert all(float(rank.held().abs().max()) < 1e-2 for rank in ranks)


@pytest.mark.parametrize("momentum", [Momentum(), Momentum(0.5)])
def test_a_scalers_factor_does_not_show(momentum: Momentum) -> None:
    scaled, plain = ranks_of(2), ranks_of(2)
    for number, unit in enumerate([1024.0, 1024.0, 2048.0, 512.0, 1.0]):
        gradients = gradients_of(2, number)
        step(scaled, gradients, momentum, unit)
        step(plain, gradients, momentum)
        assert torch.equal(scaled[0].got() / unit, plain[0].got())
        assert torch.equal(scaled[1].held(), plain[1].held()), "residuals are in unscaled units"


# - State


def test_going_on_from_a_saved_state_changes_no_bit() -> None:
    whole, first = ranks_of(2), ranks_of(2)
    for number in range(10):
        if number == 5:
            states = [copy.deepcopy(rank.codec.state_dict()) for rank in first]
            first = [Rank(PARTS["csc"]("0.1:warmup=0", None), world=2) for _ in range(2)]
            for rank, state in zip(first, states, strict=True):
                rank.codec.load_state_dict(state)
                rank.codec.lay_out(rank.parcels, 0, 2, "plan")
        gradients = gradients_of(2, number)
        step(whole, gradients, Momentum(0.9))
        step(first, gradients, Momentum(0.9))
        assert torch.equal(whole[0].got(), first[0].got())
        assert torch.equal(whole[1].held(), first[1].held())


def test_another_layout_and_another_world_keep_the_mass() -> None:
    ranks = ranks_of(4)
    for number in range(3):
        step(ranks, gradients_of(4, number), Momentum(0.9))
    before = {kind: sum(rank.held(kind).double() for rank in ranks) for kind in (RESIDUAL, MOMENTUM)}
    assert before[RESIDUAL].any()
    states = [rank.codec.state_dict() for rank in ranks]
    for world in (1, 3):
        others = [Rank(PARTS["csc"]("0.1:warmup=0", None), world=world) for _ in range(world)]
        for rank in others:
            rank.codec.load_state_dict(summed(states, 1 / world))
            rank.codec.lay_out(list(rank.parcels), 0, world, "another plan")
        for kind, mass in before.items():
            assert torch.allclose(sum(rank.held(kind).double() for rank in others), mass, atol=1e-6)
        assert step(others, gradients_of(world, 7), Momentum(0.9))


def test_messages_may_be_cut_anew_within_tensors() -> None:
    from gradientflow.plan import Message, Slice

    codec, pool = PARTS["csc"]("0.2:warmup=0", None), torch.zeros(100)

    def cut(*edges: int) -> list[Parcel]:
        messages = [Message(slices=(Slice(tensor="w", start=a, stop=b),)) for a, b in itertools.pairwise(edges)]
        return [
            Parcel(number, message, [pool[message.slices[0].start : message.slices[0].stop]])
            for number, message in enumerate(messages)
        ]

    for number, edges in enumerate([(0, 30, 100), (0, 100), (0, 1, 2, 99, 100)]):
        laid = cut(*edges)
        before = codec.state_dict()["slots"].get(RESIDUAL, {}).get("w", torch.zeros(100))
        codec.lay_out(laid, 0, 1, f"plan {number}")
        assert torch.equal(codec.state_dict()["slots"][RESIDUAL]["w"], before)
        for seed in range(3):
            codec.begin({})
            pool.copy_(torch.randn(100, generator=torch.Generator().manual_seed(seed)))
            for parcel in laid:
                converse([codec.converse(parcel)])
            converse([codec.close()])
            assert codec.settle()


def test_warm_up_goes_from_everything_to_the_target_and_counts_steps_that_counted() -> None:
    ranks, seen = ranks_of(1, "0.1:warmup=10"), []
    for number in range(12):
        (gradient,) = gradients_of(1, number)
        bad = gradient.clone()
        bad[0] = float("inf")
        assert not step(ranks, [bad])
        seen.append(float(ranks[0].codec._part.chosen.double().mean()))
        step(ranks, [gradient])
    assert seen == pytest.approx([1, 1, 0.63, 0.63, 0.4, 0.4, 0.25, 0.25, 0.16, 0.16, 0.1, 0.1], abs=0.01)


# - What it takes


@pytest.mark.parametrize("wire", [None, fp16()])
def test_bytes_on_the_wire_are_those_of_the_chosen_chunks(wire) -> None:
    ranks = ranks_of(2, wire=wire)
    for number in range(4):
        part = ranks[0].codec._part
        itemsize = 4 if wire is None else 2
        said = itemsize * int(part._lengths[part.chosen].sum())
        for rank, gradient in zip(ranks, gradients_of(2, number), strict=True):
            rank.codec.begin({})
            rank.give(gradient)
        asked = [converse([rank.codec.converse(rank.parcels[n]) for rank in ranks])[1] for n in range(len(SIZES))]
        assert sum(asked) == said
        rounds, nbytes = converse([rank.codec.close() for rank in ranks])
        assert (rounds, nbytes) == (1, 4 * part.num_chunks)
        assert all(rank.codec.settle() for rank in ranks)
    assert said == pytest.approx(ranks[0].codec.traffic(imagined([(numel(),)], torch.float32), 2).nbytes, rel=0.05)


def test_flags_travel_whatever_is_chosen() -> None:
    codec, flags = PARTS["csc"]("0.1:warmup=0", fp16()), torch.zeros(3)
    values = torch.zeros(500)
    parcel = parcels([[values]])[0]._replace(flags=flags)
    codec.lay_out([parcel], 0, 1, "plan")
    for _ in range(3):
        flags.copy_(torch.tensor([1.0, 0.0, 1.0]))
        codec.begin({})
        rounds, nbytes = converse([codec.converse(parcel)])
        converse([codec.close()])
        assert codec.settle() and rounds == 1 and nbytes >= 6
        assert flags.tolist() == [1.0, 0.0, 1.0]


def test_half_precision_gradients_are_left_over_in_float32() -> None:
    ranks = ranks_of(2, dtype=torch.bfloat16)
    step(ranks, gradients_of(2, 0))
    step(ranks, gradients_of(2, 1))
    assert ranks[0].held().dtype is torch.float32 and ranks[0].got().dtype is torch.bfloat16


def test_a_local_clip_bounds_each_tensor_before_anything_is_added() -> None:
    (rank,) = ranks_of(1, "1:warmup=0:clip=2")
    step([rank], [torch.full((numel(),), 10.0)])
    sizes = [size for ranges in SIZES for size in ranges]
    assert all(float(part.norm()) == pytest.approx(2.0, rel=1e-5) for part in rank.got().split(sizes))
    step([rank], [torch.zeros(numel())])
    assert not rank.got().any() and rank.got().isfinite().all()


@pytest.mark.parametrize(
    ("name", "argument", "words"),
    [
        ("csc", "0", "above 0 and up to 1"),
        ("csc", "1.5", "above 0 and up to 1"),
        ("topk", "150%", "above 0 and up to 1"),
        ("dgc", "nan", "above 0 and up to 1"),
        ("csc", "often", "cannot read 'often'"),
        ("csc", "0.1:warmup=x", "cannot read 'x': it takes warmup=STEPS"),
        ("csc", "0.1:speed=3", "cannot read 'speed=3'"),
        ("csc", "0.1:warmup=-1", "warmup=STEPS"),
        ("csc", "0.1:masking:uncorrected", "one of them"),
        ("int8", "4", "cannot read '4'"),
        ("qsgd", "3", "2, 4 or 8 bits"),
        ("powersgd", "0", "a rank from 1"),
        ("powersgd", "1.5", "a rank from 1"),
        ("threshold", "-1", "a magnitude above 0"),
        ("randomk", "0.1:sampled", "cannot read 'sampled'"),
        ("powersgd", "200%", "cannot read '200%'"),
        ("csc", "0.1:chunk=50%", "cannot read '50%'"),
        ("topk", "1%:5%", "cannot read '5%'"),
    ],
)
def test_bad_words_are_refused_with_what_to_write(name: str, argument: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        PARTS[name](argument, None)


def test_a_half_precision_model_stays_finite_whatever_waits() -> None:
    ranks = ranks_of(2, dtype=torch.float16)
    for _ in range(4):  # more than fp16 can hold
        assert step(ranks, [torch.full((numel(),), 60000.0, dtype=torch.float16)] * 2)
        assert all(torch.isfinite(rank.held()).all() and torch.isfinite(rank.got()).all() for rank in ranks)


def test_one_message_does_not_undo_what_another_has_found(monkeypatch) -> None:
    (rank,) = ranks_of(1, wire=fp16())
    found = iter([False])
    monkeypatch.setattr(sys.modules["gradientflow.compress.csc"], "is_finite", lambda values: next(found, True))
    assert not step([rank], gradients_of(1, 0))
    assert step([rank], gradients_of(1, 0))


def test_a_step_that_does_not_count_leaves_ages_alone() -> None:
    (rank,) = ranks_of(1)
    for number in range(3):
        step([rank], gradients_of(1, number))
    before = rank.codec.state_dict()["part"]["ages"]
    rank.codec.begin({})
    rank.give(gradients_of(1, 3)[0])
    for parcel in rank.parcels:
        converse([rank.codec.converse(parcel)])
    converse([rank.codec.close()])
    assert torch.equal(rank.codec.state_dict()["part"]["ages"], before)


def test_a_local_clip_measures_half_precision_in_float32() -> None:
    (rank,) = ranks_of(1, "1:clip=1000", dtype=torch.float16)
    step([rank], [torch.full((numel(),), 6000.0, dtype=torch.float16)])
    assert 900 < float(rank.got()[:1000].float().norm()) < 1100
