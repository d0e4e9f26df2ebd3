"""The pictures of the concept pages, drawn from what the project itself computes, measured or decides.

    python docs/pictures.py        writes docs/concepts/pictures/*.svg

They are kept in the repository; `tests/test_pictures.py` draws them anew and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

import torch
from drawing import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, WIDTH, Picture, shortened

from gradientflow.bench.results import Results
from gradientflow.compress import imagined
from gradientflow.cost.evaluate import Evaluation, evaluate
from gradientflow.cost.table import Best, Line, ring_all_reduce
from gradientflow.exchange.server.placement import shares_of
from gradientflow.exchange.verdict import Beacon, Life, Peer, Wait, judge
from gradientflow.lab.workloads import workload
from gradientflow.patterns import ALL_REDUCES, Pattern
from gradientflow.plan import NATIVE
from gradientflow.profiles import Profile, TensorProfile
from gradientflow.recipe import Recipe
from gradientflow.sim.clocks import ends_s
from gradientflow.sim.cluster import read
from gradientflow.sim.predict import predict
from gradientflow.tune.candidates import candidates
from gradientflow.tune.trials import Trials

HERE = Path(__file__).parent
PICTURES = HERE / "concepts" / "pictures"
RESULTS = HERE.parent / "benchmarks" / "results"

#: Four hosts at 1 Gbit/s: 50 us until a transfer begins, then 118 MB/s.
LINK = Line(alpha_s=50e-6, beta_s_per_byte=1 / 118e6)
WORLD = 4
COLOURS = {"forward": SKY, "backward": BLUE, "exposed": VERMILLION}
MESSAGES = (ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLUE)


# - Plan and pool


def plan() -> Picture:
    """One small model, two plans of it."""
    sizes = {"1.weight": 60_000, "1.bias": 12_000, "2.weight": 90_000, "2.bias": 12_000, "3.weight": 220_000}
    order = {name: number for number, name in enumerate(sizes)}
    tensors = [TensorProfile(name=n, shape=(s,), forward_order=order[n], backward_s=1e-3) for n, s in sizes.items()]
    profile = Profile(tensors=tuple(reversed(tensors)))
    cost = ring_all_reduce(LINK, WORLD)
    plans = [Recipe.parse(text).plan(profile, 1, cost) for text in ("lazy:400KB", "bytescheduler:300KB")]
    picture = Picture("A pool of gradients, and two plans that send it", 250)
    left, wide = 10.0, WIDTH - 20.0
    scale = wide / profile.numel
    starts, reached = {}, 0
    for name in plans[0].layout:
        starts[name], reached = reached, reached + sizes[name]
    picture.text(left, 22, "the pool: gradients in the order in which backward yields them", bold=True)
    for name in plans[0].layout:
        x, width = left + scale * starts[name], scale * sizes[name]
        picture.bar(x, 32, width, 30, GREY, f"{name}, {sizes[name]} elements", edge="#fff")
        picture.text(x + 6, 52, shortened(name, width - 8))
    for row, (one, words) in enumerate(zip(plans, ("neighbours fused", "large tensors cut"), strict=True)):
        y = 104 + 76 * row
        picture.text(left, y - 10, f"{one.schedule}: {len(one.messages)} messages, {words}", bold=True)
        for number, message in enumerate(one.messages):
            for piece in message.slices:
                x = left + scale * (starts[piece.tensor] + piece.start)
                says = f"message {number}: {piece.tensor}, elements {piece.start} to {piece.stop}"
                picture.bar(x, y, scale * piece.numel, 30, MESSAGES[number % len(MESSAGES)], says)
            reach = [starts[p.tensor] + edge for p in message.slices for edge in (p.start, p.stop)]
            picture.text(left + scale * sum(reach) / len(reach), y + 20, f"{number}", anchor="middle", bold=True)
    picture.text(left, 240, "Numbers say in which order messages leave.", colour=FAINT)
    return picture


# - Timelines


def timelines(title: str, rows: Sequence[tuple[str, Evaluation]]) -> Picture:
    """Two iterations of each, over one axis."""
    left, top, row_height = 10.0, 40.0, 92.0
    longest_s = max(2 * found.iteration_s for _, found in rows)
    scale = (WIDTH - 20.0) / longest_s
    picture = Picture(title, top + row_height * len(rows) + 24)
    legend = [*((COLOURS[kind], kind) for kind in ("forward", "backward")), (ORANGE, "messages on their way")]
    picture.legend(20, [*legend, (VERMILLION, "training waits")])
    for number, (words, found) in enumerate(rows):
        y = top + row_height * number
        picture.text(left, y + 14, words, bold=True)
        lasted = f"{found.iteration_s * 1e3:.0f} ms an iteration"
        picture.text(WIDTH - 10, y + 14, lasted, anchor="end", colour=FAINT)
        for span in found.trace(num_steps=2).spans:
            if span.kind == "step" or span.start_s >= longest_s:
                continue
            lane = 2 + int(span.track.removeprefix("lane ")) if span.kind == "message" else 0
            place = y + 22 + (24 if lane else 0) + (14 * (lane - 2) if lane else 0)
            height = 22 if span.kind != "message" else 12
            colour = COLOURS.get(span.kind, ORANGE)
            says = f"{span.name}, {span.duration_s * 1e3:.1f} ms"
            width = scale * (min(span.end_s, longest_s) - span.start_s)
            picture.bar(left + scale * span.start_s, place, width, height, colour, says)
    return picture


def _played(recipe: str, profile: Profile, *, gated: bool = False) -> Evaluation:
    cost = ring_all_reduce(LINK, WORLD)
    plan = Recipe.parse(recipe).plan(profile, 2, cost, gated=gated)
    return evaluate(profile, plan, cost, gated=gated, stages=plan.stages)


def schedule() -> Picture:
    profile = workload("densenet-201", compute_s=1.0)
    chosen = {
        "bsp: everything after backward": "bsp",
        "wfbp: each gradient by itself": "wfbp",
        "merge: fused so that the end of backward is soonest": "merge",
    }
    return timelines(
        "DenseNet-201 under three schedules, four hosts, 1 Gbit/s",
        [(words, _played(recipe, profile)) for words, recipe in chosen.items()],
    )


def gate() -> Picture:
    profile = workload("resnet-50", compute_s=1.3)
    rows = [
        ("merge, no gate: forward begins when everything has arrived", _played("merge", profile)),
        ("flow, with the gate: each layer waits for its own", _played("flow", profile, gated=True)),
    ]
    return timelines("ResNet-50 without the gate and with it, four hosts, 1 Gbit/s", rows)


# - Patterns


def patterns() -> Picture:
    """Who sends to whom, round by round."""
    names = ("ring", "tree", "halving", "star")
    panel, height = (WIDTH - 20) / 2, 168.0
    picture = Picture("Four all-reduces among four ranks, round by round", 2 * height + 34)
    picture.legend(18, [(BLUE, "is added to what is there"), (ORANGE, "takes its place")])
    for number, name in enumerate(names):
        _rounds(picture, name, ALL_REDUCES[name](WORLD), 10 + panel * (number % 2), 30 + height * (number // 2), panel)
    return picture


def _rounds(picture: Picture, name: str, pattern: Pattern, x: float, y: float, panel: float) -> None:
    busiest = max(pattern.bytes_received(rank, 1200, 1) for rank in range(pattern.world)) / 1200
    picture.text(x, y + 16, name, bold=True)
    words = f"{pattern.num_rounds} rounds, at most {busiest:g} messages into a rank"
    picture.text(x + 58, y + 16, words, colour=FAINT, size=12)
    first, step = x + 30, (panel - 60) / pattern.num_rounds
    rows = [y + 44 + 30 * rank for rank in range(pattern.world)]
    for rank, row in enumerate(rows):
        picture.line([(first, row), (first + step * pattern.num_rounds, row)], GREY)
        picture.dot(first - 14, row, 9, INK, f"{rank}")
    for transfer in pattern.transfers:
        start = first + step * transfer.round
        ends = [(start + 0.1 * step, rows[transfer.source]), (start + 0.9 * step, rows[transfer.destination])]
        picture.line(ends, BLUE if transfer.add else ORANGE, width=1.6, arrow=True)


# - Codecs


def codec() -> Picture:
    """What codecs say they will send of one message."""
    parcel = imagined([(1024, 1024)], torch.float32)
    names = ["", "bf16", "int8", "csc:10%+fp16", "topk:1%", "efsign", "powersgd:2"]
    rows = []
    for name in names:
        recipe = Recipe.parse(f"lazy+{name}" if name else "lazy").check().settled()
        traffic = recipe.codec().traffic(parcel, WORLD)
        rows.append((f"+{name}" if name else "as it is", traffic.rounds, traffic.sent_nbytes))
    picture = Picture("What codecs send of a message of 4 MiB, four ranks", 44 + 30 * len(rows))
    picture.text(10, 20, "one message of 1024 x 1024 float32, four ranks", bold=True)
    most = max(nbytes for *_, nbytes in rows)
    for number, (name, rounds, nbytes) in enumerate(rows):
        y = 36 + 30 * number
        picture.text(10, y + 16, name)
        width = 330 * nbytes / most
        picture.bar(140, y, width, 22, ORANGE)
        questions = f"{rounds} question{'s' * (rounds > 1)} to the group"
        picture.text(148 + width, y + 16, f"{nbytes / 1e6:.2f} MB, {questions}", colour=FAINT)
    return picture


# - Synchronisation


def synchronisation() -> Picture:
    """Three workers, each slow at another time."""
    steps, slow = 12, 5.0
    paces = [[slow if (step + 2 * rank) % 6 == 0 else 1.0 for rank in range(3)] for step in range(steps)]
    rows = [
        ("@bsp: all wait for all, every step", ends_s(0, paces, 1.0, 0.0)),
        ("@ssp:2: a worker may be two steps ahead", ends_s(2, paces, 1.0, 0.0)),
        ("@asp: nobody waits", ends_s(math.inf, paces, 1.0, 0.0)),
        ("@local:4: all wait for all, every fourth step", _in_rounds(4, paces)),
    ]
    left, scale = 40.0, (WIDTH - 60.0) / max(own_s[-1] for _, ends in rows for own_s in ends)
    picture = Picture("Twelve steps of three workers that are slow now and then", 24 + 92 * len(rows))
    picture.legend(18, [(BLUE, "a step"), (PURPLE, "a slow step"), (VERMILLION, "waiting")])
    for number, (words, ends) in enumerate(rows):
        y = 34 + 92 * number
        picture.text(10, y + 12, words, bold=True)
        picture.text(WIDTH - 10, y + 12, f"done after {max(own[-1] for own in ends):g}", anchor="end", colour=FAINT)
        for rank, own_s in enumerate(ends):
            row = y + 20 + 20 * rank
            picture.text(12, row + 13, f"{rank}", colour=FAINT)
            for step, (before_s, after_s) in enumerate(pairwise(own_s)):
                began_s = after_s - paces[step][rank]
                if began_s > before_s:
                    picture.bar(left + scale * before_s, row, scale * (began_s - before_s), 16, VERMILLION, "waits")
                colour = PURPLE if paces[step][rank] > 1 else BLUE
                picture.bar(left + scale * began_s, row, scale * (after_s - began_s), 16, colour, f"step {step}")
    return picture


def _in_rounds(period: int, paces: Sequence[Sequence[float]]) -> list[list[float]]:
    """Alone for a period, then all together."""
    found = [[0.0] for _ in paces[0]]
    for first in range(0, len(paces), period):
        began_s = max(own_s[-1] for own_s in found)
        alone = ends_s(math.inf, paces[first : first + period], 1.0, 0.0)
        for own_s, more_s in zip(found, alone, strict=True):
            own_s += [began_s + end_s for end_s in more_s[1:]]
    return found


# - Cost and simulator


def simulator() -> Picture:
    """Predicted speed-ups on a published cluster."""
    cluster, counts = read("survey-10gbe"), (1, 2, 4, 8, 16, 32)
    profile = workload("bert-base", device=cluster.device)
    recipes = {"bsp": VERMILLION, "lazy": ORANGE, "flow": BLUE, "lazy+fp16": GREEN}
    lines = {
        recipe: [predict(profile, Recipe.parse(recipe), cluster, workers).speedup for workers in counts]
        for recipe in recipes
    }
    picture = Picture("Predicted speed-up of BERT-Base on 10 Gbit/s Ethernet", 330)
    picture.text(10, 20, "BERT-Base on survey-10gbe: times as fast as one worker", bold=True)
    left, right, bottom, top = 50.0, WIDTH - 130.0, 290.0, 40.0
    most = max(max(values) for values in lines.values())

    def at(index: int, value: float) -> tuple[float, float]:
        return left + (right - left) * index / (len(counts) - 1), bottom - (bottom - top) * value / most

    for value in range(0, int(most) + 1, max(1, int(most) // 5)):
        y = at(0, value)[1]
        picture.line([(left, y), (right, y)], GREY)
        picture.text(left - 8, y + 4, f"{value}", anchor="end", colour=FAINT)
    for index, workers in enumerate(counts):
        picture.text(at(index, 0)[0], bottom + 20, f"{workers}", anchor="middle", colour=FAINT)
    picture.text((left + right) / 2, bottom + 36, "workers", anchor="middle", colour=FAINT)
    free = top
    for recipe in sorted(recipes, key=lambda name: -lines[name][-1]):
        points = [at(index, value) for index, value in enumerate(lines[recipe])]
        picture.line(points, recipes[recipe], width=2.2)
        free = max(free, points[-1][1] + 4)  # names do not lie on each other
        picture.text(right + 8, free, f"{recipe} {lines[recipe][-1]:.1f}x", colour=recipes[recipe])
        free += 16
    return picture


# - Bench


def bench() -> Picture:
    """A bake-off that was measured."""
    found = Results.read(RESULTS / "2026-11-16-resnet-50-1gbit-flow.json")
    rows = sorted(found.results, key=lambda row: -row.iteration_s.median)
    picture = Picture("Iterations measured on four hosts of a lab at 1 Gbit/s", 60 + 34 * len(rows))
    picture.text(10, 20, f"ResNet-50, {found.place}, measured {found.started[:10]}", bold=True)
    most_s = max(row.iteration_s.p90 for row in rows)
    for number, row in enumerate(rows):
        y, spread = 36 + 34 * number, row.iteration_s
        scale = 480 / most_s
        picture.text(10, y + 16, row.method)
        picture.bar(100, y, scale * row.compute_s, 22, BLUE, "computing")
        if spread.median > row.compute_s:
            picture.bar(100 + scale * row.compute_s, y, scale * (spread.median - row.compute_s), 22, VERMILLION)
        picture.line([(100 + scale * spread.p10, y + 11), (100 + scale * spread.p90, y + 11)], INK, width=2)
        against = f", {row.ratio_to['ddp-best'].median:.2f} of ddp-best" if row.method != "ddp-best" else ""
        words = f"{spread.median:.2f} s{against}"
        picture.text(110 + scale * spread.p90, y + 16, words, colour=FAINT)
    picture.legend(52 + 34 * len(rows), [(BLUE, "computing"), (VERMILLION, "waiting"), (INK, "p10 to p90")])
    return picture


# - Tuner


def tuner() -> Picture:
    """Whose turn it is in a race between the plans that should be quickest."""
    profile = workload("resnet-50", compute_s=1.3)
    cost = Best({NATIVE: ring_all_reduce(LINK, WORLD)})
    raced = candidates(profile, 2, cost, gated=True, whole=False)
    trials = Trials(len(raced), first=3)
    picture = Picture("A race between plans, step by step", 76 + 26 * len(raced))
    picture.text(10, 20, "steps 0 to 2 measure; then candidates take turns, back and forth", bold=True)
    left, steps = 330.0, trials.end + 3
    width = (WIDTH - 10 - left) / steps
    for number, each in enumerate(raced):
        y = 34 + 26 * number
        picture.text(10, y + 14, f"{each}: {each.predicted_s * 1e3:.0f} ms foretold")
        for step in range(trials.first, trials.end):
            if trials.candidate(step) == number:
                picture.bar(left + width * step, y, width, 18, MESSAGES[number], f"step {step}")
    bottom = 34 + 26 * len(raced)
    picture.bar(left, 34, width * trials.first, bottom - 42, GREY, "lazy, while times are taken")
    for step in (0, trials.first, trials.end):
        picture.text(left + width * step, bottom + 12, f"{step}", anchor="middle", colour=FAINT)
    words = f"step {trials.end}: ranks compare seconds, and the quickest runs from then on"
    picture.text(WIDTH - 10, bottom + 34, words, anchor="end", colour=FAINT)
    return picture


# - Servers


def servers() -> Picture:
    """Shares of hosts, and what an exchange takes by them."""
    picture = Picture("Shares of servers beside four workers, as spare hosts come", 232)
    picture.text(10, 20, "shares of the model among four workers and hosts that only serve", bold=True)
    left, wide = 150.0, 330.0
    for row, spare in enumerate((0, 1, 2, 4)):
        beside = spare < WORLD
        shares = shares_of(WORLD, [1.0] * WORLD if beside else [], [1.0] * spare)
        y, x = 36 + 44 * row, left
        picture.text(10, y + 19, f"{spare} spare host{'s' * (spare != 1)}")
        for number, share in enumerate(shares):
            worker = beside and number < WORLD
            who = f"worker {number}" if worker else f"spare {number - WORLD * beside}"
            picture.bar(x, y, wide * share, 28, SKY if worker else GREEN, f"{who}: {share:.3f} of the model")
            x += wide * share
        picture.text(left + wide + 14, y + 19, f"{_exchange(shares, spare):.2f} model sizes a link", colour=FAINT)
    picture.legend(222, [(SKY, "beside a worker"), (GREEN, "on a host of its own")])
    return picture


def _exchange(shares: Sequence[float], spare: int) -> float:
    """What the busiest link takes in, in sizes of the model."""
    beside = [1 + (WORLD - 2) * share for share in shares[: len(shares) - spare]]
    return max([1.0, *beside, *(WORLD * share for share in shares[len(shares) - spare :])])


# - Health


def health() -> Picture:
    """Four ranks, one of which is in something else, and what is said about it."""
    waiting = Wait(kind="gradients", number=18, detail="step 17, message 2 on lane 0", waited_s=1.0)
    beacons = [
        Beacon(
            rank=rank, step=17, place="backward", line="train.py:31 in main", wait=waiting, entered={"gradients": 18}
        )
        for rank in range(WORLD)
    ]
    beacons[2] = beacons[2].model_copy(update={"wait": None, "entered": {"gradients": 17}})
    lives = [Life.RUNNING, Life.RUNNING, Life.GONE, Life.RUNNING]
    peers = [Peer(beacon, name=beacon.rank, life=life) for beacon, life in zip(beacons, lives, strict=True)]
    verdict = judge(peers[0], waiting, {peer.name: peer for peer in peers[1:]}, 0.0, 600.0)
    assert verdict is not None
    picture = Picture("Ranks that wait, and the verdict about the one that does not come", 236)
    places = [(130, 60), (330, 60), (330, 170), (130, 170)]
    missing = verdict.culprits[0]
    for place in places:
        if place != places[missing]:
            picture.line(_between(place, places[missing], 26), FAINT, dashed=True, arrow=True)
    for peer, (x, y) in zip(peers, places, strict=True):
        colour = VERMILLION if peer.name == missing else BLUE
        picture.dot(x, y, 22, colour, f"{peer.name}")
    picture.text(430, 50, "each rank looks at all beacons in the store", bold=True)
    picture.text(430, 72, f"rank 0 waits for {waiting.kind}", colour=FAINT)
    picture.text(430, 90, f"({waiting.detail})", colour=FAINT)
    picture.text(430, 122, "verdict:", bold=True)
    for number, words in enumerate(wrap(verdict.words, 44)):
        picture.text(430, 142 + 18 * number, words, colour=VERMILLION)
    return picture


def _between(start: tuple[float, float], stop: tuple[float, float], short: float) -> list[tuple[float, float]]:
    """A line from one to the other that ends so far before both."""
    (x, y), (to_x, to_y) = start, stop
    cut = short / math.dist(start, stop)
    return [(x + cut * (to_x - x), y + cut * (to_y - y)), (to_x - cut * (to_x - x), to_y - cut * (to_y - y))]


ALL: dict[str, Callable[[], Picture]] = {
    each.__name__: each
    for each in (plan, schedule, gate, patterns, codec, synchronisation, simulator, bench, tuner, servers, health)
}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, draw in ALL.items():
        (PICTURES / f"{name}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main()
