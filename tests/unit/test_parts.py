"""Every codec that sends a part keeps the same laws, whatever the number of ranks; all of them in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from conversations import converse, converse_about_all
from gradientflow.compress import PARTS, Feedback, Momentum, Parcel, fp16
from gradientflow.compress.draws import drawing
from gradientflow.compress.feedback import MOMENTUM, RESIDUAL, summed
from gradientflow.compress.lowrank import PowerSgd, orthonormal
from gradientflow.compress.quantize import Int8, Qsgd, Sign
from gradientflow.compress.sparsify import about_largest, largest, one_of_each_stratum
from gradientflow.errors import RecipeError, UsageError
from gradientflow.plan import Message, Plan, Slice
from gradientflow.recipe import Recipe

#: As recipes write them; all but the last two leave over what they do not send.
RECIPES = {
    "csc": "0.2:warmup=0",
    "topk": "0.1:warmup=0",
    "dgc": "0.1:warmup=0",
    "gtopk": "0.1:warmup=0",
    "randomk": "0.2:warmup=0",
    "threshold": "1.5:warmup=0",
    "int8": "",
    "efsign": "warmup=0",
    "powersgd": "2:warmup=0",
    "qsgd": "4",
    "signsgd": "",
}
FORGET = ("qsgd", "signsgd")
WORLDS = [1, 2, 3, 5]
SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (16, 12, 3, 3), "b.bias": (16,), "c": (70, 21), "d": (9,)}
#: A matrix of its own, several tensors in two ranges, a matrix cut within a row, and nothing but a bias.
MESSAGES = [
    [("a.weight", 0, 1200)],
    [("a.bias", 0, 40), ("b.weight", 0, 1728), ("b.bias", 0, 16), ("c", 0, 777)],
    [("c", 777, 1470)],
    [("d", 0, 9)],
]
SIZES = {name: math.prod(shape) for name, shape in SHAPES.items()}
NUMEL = sum(SIZES.values())


class Rank:
    """A codec and the gradients that it works on; tensors lie one after another, with a gap before b.bias."""

    def __init__(self, codec: Feedback, rank: int = 0, world: int = 1, messages=MESSAGES, dtype=torch.float32) -> None:
        self.codec, self.world = codec, world
        self.tensors = {name: torch.zeros(size, dtype=dtype) for name, size in SIZES.items()}
        self.parcels = [self._parcel(number, message) for number, message in enumerate(messages)]
        codec.lay_out(self.parcels, rank, world, str(messages))

    def _parcel(self, number: int, slices: list[tuple[str, int, int]]) -> Parcel:
        message = Message(slices=tuple(Slice(tensor=n, start=start, stop=stop) for n, start, stop in slices))
        # Two ranges where there are several slices: the second begins in the middle of the message.
        memory = torch.zeros(message.numel, dtype=self.tensors["d"].dtype)
        half = sum(stop - start for _, start, stop in slices[: len(slices) // 2])
        ranges = [part for part in (memory[:half], memory[half:]) if len(part)]
        offset = 0
        for name, start, stop in slices:
            self.__dict__.setdefault("views", {})[name, start] = memory[offset : offset + stop - start]
            offset += stop - start
        return Parcel(number, message, ranges, [SHAPES[name] for name, _, _ in slices])

    def give(self, gradient: torch.Tensor) -> None:
        """As a share of the mean."""
        named = dict(zip(SIZES, (gradient / self.world).split(list(SIZES.values())), strict=True))
        for (name, start), view in self.views.items():
            view.copy_(named[name][start : start + len(view)])

    def got(self) -> torch.Tensor:
        for (name, start), view in self.views.items():
            self.tensors[name][start : start + len(view)] = view
        return torch.cat([self.tensors[name] for name in SIZES]).clone()

    def held(self, kind: str = RESIDUAL) -> torch.Tensor:
        named = self.codec.state_dict()["slots"][kind]
        return torch.cat([named[name] for name in SIZES])


def ranks_of(name: str, world: int, argument: str | None = None, **more) -> list[Rank]:
    argument = RECIPES[name] if argument is None else argument
    return [Rank(PARTS[name](argument, None), rank, world, **more) for rank in range(world)]


def gradients_of(world: int, seed: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator, dtype=dtype) for _ in range(world)]


def step(ranks: list[Rank], gradients: list[torch.Tensor], momentum: float = 0.0, unit: float = 1.0) -> bool:
    """Whether it counted."""
    for rank, gradient in zip(ranks, gradients, strict=True):
        rank.codec.begin(dict.fromkeys(SIZES, Momentum(momentum)), unit)
        rank.give(gradient * unit)
    return converse_about_all(ranks)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_sent_and_what_is_left_over_make_up_what_was_given(name: str, world: int) -> None:
    ranks = ranks_of(name, world)
    applied, given = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for number in range(12):
        gradients = gradients_of(world, number)
        given += sum(gradient.double() for gradient in gradients) / world
        assert step(ranks, gradients)
        assert all(torch.equal(rank.got(), ranks[0].got()) for rank in ranks), "ranks end with different bits"
        applied += ranks[0].got().double()
        left_over = sum(rank.held().double() for rank in ranks)
        if name in FORGET:
            assert not left_over.any()
        else:
            assert torch.allclose(applied + left_over, given, atol=2e-5)
    assert name in FORGET or float((left_over != 0).double().mean()) > 0.5, "everything was sent"
    biases = torch.cat([torch.full((size,), len(SHAPES[name]) == 1) for name, size in SIZES.items()])
    if name != "csc":
        assert torch.allclose(applied[biases], given[biases], atol=2e-5), "biases are to arrive whole, every step"
        assert not left_over[biases].any()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("csc", "threshold")])
def test_each_message_asks_for_what_traffic_says(name: str, world: int) -> None:
    ranks = ranks_of(name, world)
    for rank, gradient in zip(ranks, gradients_of(world, 0), strict=True):
        rank.codec.begin({})
        rank.give(gradient)
    aside = 0
    for number, parcel in enumerate(ranks[0].parcels):
        asked = converse([rank.codec.converse(rank.parcels[number]) for rank in ranks])
        biases = 4 * sum(s.numel for s in parcel.message.slices if len(SHAPES[s.tensor]) == 1)
        biases *= name != "powersgd"  # which has a sum to take them along
        said = ranks[0].codec.traffic(parcel, world)
        if biases == parcel.nbytes:
            assert asked == (0, 0) and said.nbytes == biases
        else:
            assert asked == (said.rounds, said.nbytes - biases)
        aside += biases
    rounds, nbytes = converse([rank.codec.close() for rank in ranks])
    if name == "powersgd":
        assert rounds == 0
    else:
        assert (rounds, nbytes) == (1, aside + 4), "all that is not compressed goes together, with one number more"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_that_one_rank_cannot_use_leaves_no_trace(name: str, bad: float) -> None:
    argument = RECIPES[name]
    runs = []
    for spoils in (False, True):
        ranks = ranks_of(name, 3, argument)
        for number in range(6):
            if spoils and number in (0, 3):
                spoilt = gradients_of(3, 99)
                spoilt[1][number * 700 + 5] = bad
                assert not step(ranks, spoilt, momentum=0.9)
            assert step(ranks, gradients_of(3, number), momentum=0.9)
        runs.append((ranks[0].got(), *(rank.held() for rank in ranks)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_was_saved_goes_on_to_the_bit(name: str) -> None:
    ranks = ranks_of(name, 3)
    for number in range(4):
        step(ranks, gradients_of(3, number), momentum=0.9)
    again = ranks_of(name, 3)
    for place, (rank, saved) in enumerate(zip(again, ranks, strict=True)):
        rank.codec.load_state_dict(copy.deepcopy(saved.codec.state_dict()))
        rank.codec.lay_out(rank.parcels, place, 3, str(MESSAGES))
    for number in range(4, 8):
        for side in (ranks, again):
            step(side, gradients_of(3, number), momentum=0.9)
        assert torch.equal(ranks[0].got(), again[0].got())
        assert all(torch.equal(a.held(), b.held()) for a, b in zip(ranks, again, strict=True))


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    """As torch.empty gives it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_full_of_nan")
def test_nothing_waits_after_a_checkpoint_of_messages_that_go_as_they_are() -> None:
    ranks = ranks_of("topk", 2)
    for _ in range(2):
        states = [copy.deepcopy(rank.codec.state_dict()) for rank in ranks]
        for place, (rank, state) in enumerate(zip(ranks, states, strict=True)):
            rank.parcels = [p._replace(message=p.message.model_copy(update={"dense": True})) for p in rank.parcels]
            rank.codec.load_state_dict(state)
            rank.codec.lay_out(rank.parcels, place, 2, "dense")
        for number in range(4):
            assert step(ranks, gradients_of(2, number))
            assert not any(rank.held().any() for rank in ranks)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FORGET])
def test_another_layout_and_another_world_keep_the_mass(name: str) -> None:
    ranks = ranks_of(name, 3)
    for number in range(4):
        step(ranks, gradients_of(3, number))
    before = sum(rank.held().double() for rank in ranks)
    messages = [[("d", 0, 9), ("c", 0, 1470)], [("b.weight", 0, 1000)], [("b.weight", 1000, 1728), *MESSAGES[0]]]
    messages.append([("a.bias", 0, 40), ("b.bias", 0, 16)])
    states = [rank.codec.state_dict() for rank in ranks]
    for world in (2, 5):
        fresh = ranks_of(name, world, messages=messages)
        for place, rank in enumerate(fresh):
            rank.codec.load_state_dict(summed(states, 1.0 / world))
            rank.codec.lay_out(rank.parcels, place, world, "")
        assert torch.allclose(sum(rank.held().double() for rank in fresh), before, atol=1e-5)
        gradients = gradients_of(world, 9)
        assert step(fresh, gradients)
        after = fresh[0].got().double() + sum(rank.held().double() for rank in fresh)
        assert torch.allclose(after, before + sum(g.double() for g in gradients) / world, atol=2e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_a_scaler_changes_nothing_but_the_unit(name: str) -> None:
    plain, scaled = ranks_of(name, 2), ranks_of(name, 2)
    for number in range(5):
        gradients = gradients_of(2, number)
        step(plain, gradients)
        step(scaled, gradients, unit=1024.0)
        assert torch.allclose(scaled[0].got() / 1024.0, plain[0].got(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    ranks = ranks_of(name, 3, dtype=dtype)
    applied, given = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for number in range(3):
        gradients = gradients_of(3, number, dtype)
        given += sum((gradient / 3).double() for gradient in gradients)
        assert step(ranks, gradients)
        applied += ranks[0].got().double()
        assert all(torch.equal(rank.got(), ranks[0].got()) for rank in ranks)
    left_over = sum(rank.held().double() for rank in ranks)
    tolerance = {torch.float64: 2e-6, torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]
    assert name in FORGET or torch.allclose(applied + left_over, given, atol=tolerance)


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "words"), [*RECIPES.items(), ("topk", "0.1:guard=2%"), ("powersgd", "2:guard=2%")])
def test_torchs_default_precision_changes_nothing(
    name: str, words: str, dtype: torch.dtype, default_dtype: Callable[[torch.dtype], None]
) -> None:
    runs = []
    for default in (torch.float32, dtype):
        default_dtype(default)
        ranks = ranks_of(name, 2, words)
        for number in range(7):
            counted = step(ranks, [gradient * (1e38 if number == 3 else 1.0) for gradient in gradients_of(2, number)])
            assert counted or number == 3
        runs.append((ranks[0].got(), *(rank.held() for rank in ranks)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FORGET])
def test_warm_up_sends_everything_at_first(name: str) -> None:
    words = RECIPES[name].replace("warmup=0", "warmup=10") or "warmup=10"
    ranks = ranks_of(name, 2, words)
    for number in range(2):
        gradients = gradients_of(2, number)
        step(ranks, gradients)
        assert torch.allclose(ranks[0].got(), sum(gradients) / 2, atol=1e-6)
        assert not any(rank.held().any() for rank in ranks)
    for number in range(12):
        step(ranks, gradients_of(2, number))
    assert any(rank.held().any() for rank in ranks)


@pytest.mark.parametrize("name", ["topk", "gtopk", "randomk", "csc"])
def test_with_momentum_a_constant_gradient_reaches_its_long_run_velocity(name: str) -> None:
    ranks = ranks_of(name, 2)
    gradients, applied = gradients_of(2, 0), torch.zeros(NUMEL, dtype=torch.float64)
    for _ in range(250):
        step(ranks, gradients, momentum=0.5)
        applied += ranks[0].got().double()
    # 250 steps of g / (1 - m), less what momentum takes to get going and what waits.
    assert torch.allclose(applied / 250, sum(gradients).double() / 2 * 2, atol=0.5)


def test_masking_clears_what_was_sent_of_momentum_and_of_what_waits() -> None:
    (rank,) = ranks_of("dgc", 1)
    step([rank], gradients_of(1, 0), momentum=0.9)
    matrices = torch.cat([torch.full((size,), len(SHAPES[name]) > 1) for name, size in SIZES.items()])
    sent = (rank.got() != 0) & matrices
    assert sent.any() and not rank.held()[sent].any() and not rank.held(MOMENTUM)[sent].any()
    assert rank.held(MOMENTUM)[~sent].all(), "biases, which never wait, keep theirs"


def test_dgc_without_momentum_is_sampled_top_k() -> None:
    dgc, topk = ranks_of("dgc", 2), ranks_of("topk", 2, "0.1:warmup=0:sampled")
    for number in range(5):
        for ranks in (dgc, topk):
            step(ranks, gradients_of(2, number))
        assert torch.equal(dgc[0].got(), topk[0].got())


def test_half_precision_beside_a_codec_that_packs_itself_is_refused() -> None:
    for name in ("int8", "topk", "powersgd"):
        with pytest.raises(RecipeError, match="leave the other precision out"):
            PARTS[name]("", fp16())


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("warmup=-1", "takes warmup=STEPS, found '-1'"),
        ("clip=-1", "takes clip=NORM, found '-1'"),
        ("-1", "takes a share of gradients .* found '-1'"),
        ("1e-400", "takes a share of gradients .* found '1e-400'"),
        ("warmup=", "cannot read ''.* warmup=STEPS"),
        ("1e-3", "'1e-3' is not written as .* 0.001"),
    ],
)
def test_of_a_codec_that_exists_the_value_is_wrong(written: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe.parse(f"lazy+topk:{written}")


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_without_elements_is_nothing_to_tell_of(name: str) -> None:
    message = Message(slices=(Slice(tensor="w", start=0, stop=0),))
    codec = PARTS[name](RECIPES[name], None)
    codec.lay_out([Parcel(0, message, [], [(0, 3)], torch.zeros(3))], 0, 1, "", ["w"])
    codec.begin({})
    converse([codec.close()])
    assert codec.settle()


@pytest.mark.parametrize("name", RECIPES)
def test_messages_for_which_it_does_not_pay_go_as_they_are(name: str) -> None:
    """Beside others that do not; and what waited when that was decided is sent at once."""
    ranks = ranks_of(name, 3)
    for number in range(3):
        step(ranks, gradients_of(3, number))
    before = sum(rank.held().double() for rank in ranks)
    for place, rank in enumerate(ranks):
        dense = [parcel.number in (0, 3) for parcel in rank.parcels]
        rank.parcels = [
            parcel._replace(message=parcel.message.model_copy(update={"dense": is_dense}))
            for parcel, is_dense in zip(rank.parcels, dense, strict=True)
        ]
        rank.codec.lay_out(rank.parcels, place, 3, "another plan")
    gradients = gradients_of(3, 9)
    for _ in range(4):  # after some steps a message that always goes so is not even looked at
        assert step(ranks, gradients)
        sent = ranks[0].got().double()
        assert all(torch.equal(rank.got(), ranks[0].got()) for rank in ranks)
        left_over = sum(rank.held().double() for rank in ranks)
        given = sum(gradient.double() for gradient in gradients) / 3 + before
        whole = slice(0, SIZES["a.weight"])
        assert torch.allclose(sent[whole], given[whole], atol=1e-5) and not left_over[whole].any()
        if name not in FORGET:
            assert torch.allclose(sent + left_over, given, atol=2e-5)
        before = left_over
    assert name in FORGET or left_over.any()
    spoilt = gradients_of(3, 5)
    spoilt[2][7] = math.inf  # in a message that goes as it is
    assert not step(ranks, spoilt)


def test_a_plan_says_once_that_messages_go_as_they_are() -> None:
    message = Message(slices=(Slice(tensor="d", start=0, stop=9),), dense=True)
    plan = Plan(schedule="lazy", layout=("d",), messages=(message,))
    chosen = plan.model_copy(update={"why": f"a race chose this\n{plan.explain()}"})
    assert chosen.explain() == chosen.why
    assert (
        plan.model_copy(update={"why": "sent last"}).explain().startswith("sent last; 1 of 1 messages go as they are")
    )


@pytest.mark.parametrize("size", [1e15, 1e19, 1e37])
@pytest.mark.parametrize("name", RECIPES)
def test_large_numbers_are_carried_or_the_step_does_not_count(name: str, size: float) -> None:
    ranks = ranks_of(name, 2)
    for number in range(2):
        counted = step(ranks, [gradient * size for gradient in gradients_of(2, number)])
        assert not counted or ranks[0].got().isfinite().all()
        assert all(rank.held().isfinite().all() for rank in ranks)
    assert size > 1e18 or counted


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "csc"])
def test_biases_that_leave_the_range_of_half_precision_do_not_count(name: str) -> None:
    ranks = ranks_of(name, 2, dtype=torch.float16)
    large = torch.zeros(NUMEL, dtype=torch.float16)
    large[-3:] = 40000.0
    assert step(ranks, [large, large])
    assert not step(ranks, [large * 0.9, large * 0.9], unit=1.0, momentum=0.0) or ranks[0].got().isfinite().all()
    for rank in ranks:
        rank.codec.begin({}, 1.0, weight=2.0)  # as if others had run out of inputs
        rank.give(large)
    assert not converse_about_all(ranks)


def test_a_state_of_another_codec_leaves_what_waits() -> None:
    (saved,) = ranks_of("topk", 1)
    step([saved], gradients_of(1, 0), momentum=0.9)
    for name in ("powersgd", "csc", "int8"):
        (rank,) = ranks_of(name, 1)
        rank.codec.load_state_dict(saved.codec.state_dict())
        rank.codec.lay_out(rank.parcels, 0, 1, str(MESSAGES))
        assert torch.equal(rank.held(), saved.held())
        assert step([rank], gradients_of(1, 1))


def test_a_state_of_which_no_name_is_known_is_refused() -> None:
    (saved,) = ranks_of("topk", 1)
    step([saved], gradients_of(1, 0), momentum=0.9)
    state = saved.codec.state_dict()
    slots = {
        kind: {f"module.{name}": values for name, values in named.items()} for kind, named in state["slots"].items()
    }
    (rank,) = ranks_of("topk", 1, "20%")
    with pytest.raises(UsageError, match=r"another model: it has 'module.a.bias', and nothing of .*'a.bias'"):
        rank.codec.load_state_dict(state | {"slots": slots})


def test_going_back_to_a_state_without_momentum_forgets_it() -> None:
    (rank,) = ranks_of("topk", 1)
    step([rank], gradients_of(1, 0))
    before = copy.deepcopy(rank.codec.state_dict())
    step([rank], gradients_of(1, 1), momentum=0.9)
    rank.codec.load_state_dict(before)
    rank.codec.lay_out(rank.parcels, 0, 1, str(MESSAGES))
    assert set(rank.codec.state_dict()["slots"]) == {RESIDUAL}


@pytest.mark.parametrize("name", ["randomk", "topk", "csc"])
def test_only_matrices_are_drawn_and_masked(name: str) -> None:
    (rank,) = ranks_of(name, 1, f"{RECIPES[name]}:masking")
    matrices = torch.cat([torch.full((size,), len(SHAPES[n]) > 1) for n, size in SIZES.items()])
    few = torch.zeros(NUMEL)
    few[~matrices] = 1.0
    few[:5] = 1.0
    step([rank], [few], momentum=0.9)
    if name != "csc":
        assert (rank.held(MOMENTUM)[~matrices] == 1.0).all()
    step([rank], gradients_of(1, 0), momentum=0.9)
    if name == "randomk":
        sent = int((rank.got() != 0)[matrices].sum())
        asked = [sum(s.numel for s in p.message.slices if len(SHAPES[s.tensor]) > 1) for p in rank.parcels]
        assert sent == sum(math.ceil(0.2 * number) for number in asked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounding_leaves_of_messages_without_a_codec_is_sent_too(dtype: torch.dtype) -> None:
    ranks = ranks_of("efsign", 2, dtype=dtype)
    for place, rank in enumerate(ranks):
        rank.parcels = [p._replace(message=p.message.model_copy(update={"dense": True})) for p in rank.parcels]
        rank.codec.lay_out(rank.parcels, place, 2, "dense")
    applied, given = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for number in range(8):
        gradients = gradients_of(2, number, dtype)
        given += sum((gradient / 2).double() for gradient in gradients)
        assert step(ranks, gradients)
        applied += ranks[0].got().double()
    left_over = sum(rank.held().double() for rank in ranks)
    assert float((applied + left_over - given).abs().max()) < (0.15 if dtype is torch.bfloat16 else 0.02)


# - Choosing elements


@pytest.mark.parametrize("numel", [1, 7, 5000, 200_000])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.5])
def test_a_sampled_threshold_finds_about_as_many_of_the_largest(numel: int, density: float) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 3
    number = math.ceil(density * numel)
    found, exact = about_largest(values, number), largest(values, number)
    assert 0.8 * number <= len(found) <= number
    assert len(found.unique()) == len(found)
    assert values[found].abs().sum() >= 0.95 * values[exact].abs().sum() * len(found) / number


def test_of_mostly_zeros_only_others_are_chosen() -> None:
    values = torch.zeros(100_000)
    values[::1000] = 1.0
    assert sorted(about_largest(values, 5000).tolist()) == list(range(0, 100_000, 1000))


def test_random_elements_are_all_equally_likely() -> None:
    counts = torch.zeros(30)
    for seed in range(3000):
        counts[one_of_each_stratum(30, 7, drawing(seed))] += 1
    assert float((counts - 700).abs().max()) < 5 * math.sqrt(700)


def test_random_elements_are_others_in_every_step() -> None:
    numel, steps = 1000, 2000
    found = torch.zeros(numel)
    codec = PARTS["randomk"]("0.1%:warmup=0", None)
    slices = (Slice(tensor="a", start=0, stop=numel),)
    parcel = Parcel(0, Message(slices=slices), [torch.zeros(numel)], [(numel, 1)])
    codec.lay_out([parcel], 0, 1, "")
    for _ in range(steps):
        codec.begin({})
        parcel.values[0].fill_(1.0)
        converse([codec.converse(parcel)])
        converse([codec.close()])
        codec.settle()
        found += parcel.values[0]
    # One in a thousand of them each time: 135 of a thousand have not been drawn in two thousand steps.
    assert abs(int((found == 0).sum()) - 135) < 50


def test_qsgd_rounds_otherwise_in_every_step() -> None:
    ranks, (gradient,) = ranks_of("qsgd", 1), gradients_of(1, 0)
    applied = torch.zeros(NUMEL)
    for _ in range(200):
        step(ranks, [gradient])
        applied += ranks[0].got() / 200
    assert float((applied - gradient).abs().max()) < 5 * (math.sqrt(512) / 7) / math.sqrt(200)


def test_what_gtopk_drops_on_the_way_is_left_over_where_it_was_dropped() -> None:
    ranks = ranks_of("gtopk", 5)
    gradients = gradients_of(5, 1)
    step(ranks, gradients)
    kept = int((ranks[0].got() != 0).sum())
    biases = sum(size for name, size in SIZES.items() if len(SHAPES[name]) == 1)
    most = sum(
        math.ceil(0.1 * sum(s.numel for s in p.message.slices if len(SHAPES[s.tensor]) > 1)) for p in ranks[0].parcels
    )
    assert 0.7 * most <= kept - biases <= most


# - Few bits


def encoded(scheme, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    rows = values.clone().view(-1, scheme.block)
    codes = torch.zeros(len(rows), scheme.block * scheme.bits // 8, dtype=torch.uint8)
    scales = torch.zeros(len(rows))
    generator = torch.Generator().manual_seed(seed)
    scheme.encode(
        rows,
        scheme.block,
        codes,
        scales,
        torch.empty_like(rows),
        lambda like: torch.rand(like.shape, generator=generator),
    )
    found = torch.full_like(rows, math.nan)
    scheme.decode(codes, scales, found)
    return found.view(-1)


def test_int8_is_within_half_a_level_of_its_block() -> None:
    values = torch.randn(4096) * torch.logspace(-20, 10, 4096)
    blocks, found = values.view(-1, 256), encoded(Int8(), values).view(-1, 256)
    assert ((found - blocks).abs() <= blocks.abs().amax(1, keepdim=True) / 254 * 1.0001).all()
    assert not encoded(Int8(), torch.zeros(512)).any()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_right_on_average_and_its_variance_is_bounded(bits: int) -> None:
    scheme, values = Qsgd(bits), torch.randn(512)
    found = torch.stack([encoded(scheme, values, seed) for seed in range(600)])
    levels, norm = 2 ** (bits - 1) - 1, float(values.norm())
    assert ((found.mean(0) - values).abs() < 5 * norm / levels / math.sqrt(600)).all()
    bound = min(512 / levels**2, math.sqrt(512) / levels) * norm**2
    assert float((found - values).square().sum(1).mean()) <= bound
    assert not encoded(scheme, torch.zeros(512)).any()


def test_a_sign_has_the_mean_magnitude_of_its_block() -> None:
    values = torch.randn(2 * Sign.block)
    found = encoded(Sign(), values).view(2, -1)
    assert torch.equal(found > 0, values.view(2, -1) >= 0)
    assert torch.allclose(found.abs(), values.view(2, -1).abs().mean(1, keepdim=True).expand_as(found), rtol=1e-5)


@pytest.mark.parametrize(("name", "scheme"), [("int8", Int8()), ("efsign", Sign())])
def test_what_a_rank_sums_itself_it_encodes_once(name: str, scheme) -> None:
    ranks, shard = ranks_of(name, 2), 5 * 128 if name == "efsign" else 3 * 256
    weight = slice(0, SIZES["a.weight"])
    before = [torch.zeros(SIZES["a.weight"])] * 2
    for number in range(3):
        gradients = gradients_of(2, number)
        step(ranks, gradients)
        first, second = (g[weight] / 2 + left for g, left in zip(gradients, before, strict=True))
        sums = first[:shard] + encoded(scheme, second[:shard])
        assert torch.allclose(ranks[0].got()[:shard], encoded(scheme, sums), atol=1e-6)
        assert torch.allclose(ranks[0].held()[:shard], sums - encoded(scheme, sums), atol=1e-6)
        before = [rank.held()[weight] for rank in ranks]


def test_a_vote_is_the_majoritys_sign() -> None:
    ranks, gradients = ranks_of("signsgd", 3), gradients_of(3, 0)
    step(ranks, gradients)
    expected = torch.stack([gradient.sign() for gradient in gradients]).sum(0).sign()
    matrices = torch.cat([torch.full((size,), len(SHAPES[name]) > 1) for name, size in SIZES.items()])
    assert torch.equal(ranks[0].got()[matrices], expected[matrices])


@pytest.mark.parametrize("name", ["efsign", "signsgd"])
def test_elements_without_a_gradient_do_not_drift_under_one_bit(name: str) -> None:
    ranks = ranks_of(name, 2)
    rests = torch.zeros(NUMEL, dtype=torch.bool)
    rests[100:300] = True
    applied = torch.zeros(NUMEL)
    for number in range(50):
        step(ranks, [gradient.masked_fill(rests, 0.0) for gradient in gradients_of(2, number)])
        applied += ranks[0].got()
    assert float(applied[rests].abs().max()) < 3.0, "no more than a few steps' magnitude"


def test_ranks_that_never_agree_do_not_move_anything() -> None:
    ranks, (gradient,) = ranks_of("signsgd", 2), gradients_of(1, 0)
    applied = torch.zeros(NUMEL)
    for _ in range(10):
        step(ranks, [gradient, -gradient])
        applied += ranks[0].got()
    assert not applied.any()


@pytest.mark.parametrize("name", FORGET)
def test_what_no_rank_uses_stays_where_nothing_waits(name: str) -> None:
    codec, flags = PARTS[name](RECIPES[name], None), torch.zeros(2)
    slices = tuple(Slice(tensor=tensor, start=0, stop=600) for tensor in ("used", "unused"))
    parcel = Parcel(0, Message(slices=slices), [torch.zeros(1200)], [(20, 30), (20, 30)], flags)
    codec.lay_out([parcel], 0, 1, "", ["used", "unused"])
    codec.begin({})
    parcel.values[0][:600], flags[0] = 1.0, 1.0
    converse([codec.converse(parcel)])
    converse([codec.close()])
    assert codec.settle()
    assert parcel.values[0][:600].any() and not parcel.values[0][600:].any()


# - Low rank


def resnet18() -> list[tuple[int, ...]]:
    """As it is for CIFAR10."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if stage and not block:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "ratio"), [(1, 243.3), (2, 135.8), (4, 72.1)])
def test_powersgd_compresses_resnet18_as_its_paper_says(rank: int, ratio: float) -> None:
    shapes = resnet18()
    assert sum(map(math.prod, shapes)) == 11_173_962
    slices = tuple(Slice(tensor=str(n), start=0, stop=math.prod(shape)) for n, shape in enumerate(shapes))
    parcel = Parcel(0, Message(slices=slices), [torch.empty(11_173_962, device="meta")], shapes)
    traffic = PARTS["powersgd"](str(rank), None).traffic(parcel, 16)
    assert 4 * 11_173_962 / traffic.nbytes == pytest.approx(ratio, abs=0.05)


def powersgd_ranks(
    shapes: dict[str, tuple[int, ...]], world: int, rank: int
) -> list[tuple[PowerSgd, Parcel, torch.Tensor]]:
    found = []
    for place in range(world):
        slices = tuple(Slice(tensor=name, start=0, stop=math.prod(shape)) for name, shape in shapes.items())
        memory = torch.zeros(sum(map(math.prod, shapes.values())))
        parcel = Parcel(0, Message(slices=slices), [memory], list(shapes.values()))
        part = PowerSgd(rank)
        part.lay_out([parcel], place, world)
        part.begin(0.5, 0)
        found.append((part, parcel, torch.zeros_like(memory)))
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_powersgd_is_exact_on_matrices_of_its_rank(world: int) -> None:
    torch.manual_seed(0)
    ranks = powersgd_ranks({"one": (60, 40), "two": (60, 40), "three": (30, 8, 3, 3)}, world, rank=2)
    lefts = [torch.randn(60, 2), torch.randn(60, 2), torch.randn(30, 2)]
    expected = torch.zeros_like(ranks[0][2])
    for _, _, total in ranks:
        total.copy_(
            torch.cat([(left @ torch.randn(2, n)).flatten() for left, n in zip(lefts, (40, 40, 72), strict=True)])
        )
        expected += total
    converse([part.send(parcel, total, 1.0) for part, parcel, total in ranks])
    for _, parcel, total in ranks:
        assert torch.allclose(parcel.values[0], expected, atol=1e-4)
        assert float(total.abs().max()) < 1e-4, "nothing is left over"


def test_matrices_in_a_batch_are_what_they_are_alone() -> None:
    torch.manual_seed(0)
    ((part, parcel, total),) = powersgd_ranks({name: (50, 20) for name in "abc"}, 1, rank=1)
    total.copy_(torch.randn(3000))
    before, starts = total.clone(), part.state_dict()["q"][0].view(3, 20)
    converse([part.send(parcel, total, 1.0)])
    for number in range(3):
        ((alone, one, rest),) = powersgd_ranks({"x": (50, 20)}, 1, rank=1)
        alone.load_state_dict({"q": [starts[number].clone()], "ranks": [1]})
        rest.copy_(before[number * 1000 : (number + 1) * 1000])
        converse([alone.send(one, rest, 1.0)])
        assert torch.allclose(one.values[0], parcel.values[0][number * 1000 : (number + 1) * 1000], atol=1e-6)


@pytest.mark.parametrize("columns", [torch.zeros(20, 3), torch.ones(20, 3), torch.eye(20)[:, [0, 0, 1]]])
def test_any_columns_give_an_orthonormal_basis_of_what_they_span(columns: torch.Tensor) -> None:
    basis = orthonormal(columns.unsqueeze(0))[0]
    assert torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-6)
    assert torch.allclose(basis @ (basis.T @ columns), columns, atol=1e-5)


def test_powersgd_goes_on_after_gradients_of_zero() -> None:
    ranks = ranks_of("powersgd", 2)
    for number in range(10):
        gradients = [torch.zeros(NUMEL)] * 2 if number < 3 else gradients_of(2, 0)
        assert step(ranks, gradients)
    assert ranks[0].got().isfinite().all() and float(ranks[0].got().norm()) > 1.0
