"""What exchanging takes of processors: of an all-reduce, kernel and all, and of codecs.

Where several ranks share cores, as in a lab, an iteration may wait for those and not for the network. The system counts
seconds of the whole machine, so what it does without us is measured first and taken off; a codec is run by itself, the
group's answers made up.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gradientflow.compress import CASTS, PARTS, Answer, Codec, Feedback, Gather, Parcel, Question, Sum, imagined
from gradientflow.network import Encoding
from gradientflow.plan import Message
from gradientflow.processes import machine_s

#: Of all-reduces whose processor seconds are counted: mostly start-up, and mostly bytes.
COUNTED_NBYTES = (4096, 2**20)
#: How long a machine is watched while nothing is done: the system's clock ticks 100 times a second.
IDLE_S = 0.2
#: Codecs that are run, as recipes name them.
CODECS = ("fp16", "bf16", "csc", "topk:sampled", "int8", "powersgd:2")
#: Stretches in which an action's seconds are counted, and the fewest times it is done in each.
STRETCHES, LEAST_IN_STRETCH = 5, 10
#: A message of so many tensors, and one of a single one.
ENCODED_NBYTES, MANY = 2**21, 32
#: Messages of a step: in training none finds in caches what it had there a step ago.
ENCODED_MESSAGES = 4
ENCODED_REPEATS, SETTLING = 5, 2
#: Bytes, and how often: in passes of many small gradients, whose hooks take little, and of a single large one.
GATHERED_SMALL, GATHERED_LARGE = (4 * MANY, 50), (2**25, 15)
#: Between gradients, in which caches become others'.
GAP_S = 500e-6


def here() -> str:
    """Says which machine this is, and how many cores there are for us; nothing where the system does not."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {len(os.sched_getaffinity(0))}"
    except (OSError, AttributeError):  # not Linux
        return ""


def counted_s(once: Callable[[], object], repeats: int) -> float:
    """Processor seconds of the machine in which `once` was done so often, less what it takes while nothing is done.

    In stretches, each after a look at the idle machine, of which the median counts: what other programs do for a moment
    is not ours."""
    stretches = min(STRETCHES, max(1, repeats // LEAST_IN_STRETCH))
    shares = [repeats // stretches + (number < repeats % stretches) for number in range(stretches)]
    return repeats * statistics.median(_own_s(once, share) / share for share in shares)


def _own_s(once: Callable[[], object], repeats: int) -> float:
    idle_s, passed_s = _spent(lambda: time.sleep(IDLE_S), 1)
    spent_s, seconds = _spent(once, repeats)
    return max(0.0, spent_s - idle_s / passed_s * seconds)


def _spent(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    (before_s, _), start_s = machine_s(), time.perf_counter()
    for _ in range(repeats):
        action()
    return machine_s()[0] - before_s, time.perf_counter() - start_s


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Through two points, neither part below 0: what a message takes, and each of its bytes.

    >>> line([(1000, 2.0), (2000, 3.0)])
    (1.0, 0.001)
    """
    (small, small_s), (large, large_s) = points
    byte_s = max(0.0, (large_s - small_s) / (large - small))
    return max(0.0, small_s - byte_s * small), byte_s


def gathered_s() -> tuple[float, float]:
    """Of gradients that are scaled into a pool as backward yields them: for each, and for each of their bytes, where
    both are too large for caches. Backward rests between them, as where something is computed: one after the other in
    a tight loop they take a quarter of what they take then (6 and 25 us, four ranks on two cores)."""
    small_s = _gathered_s(*GATHERED_SMALL, MANY) / MANY
    return small_s, max(0.0, _gathered_s(*GATHERED_LARGE, 1) - small_s) / GATHERED_LARGE[0]


def _gathered_s(nbytes: int, repeats: int, num_tensors: int) -> float:
    """How much longer backward takes with hooks that gather. With and without in turn: what changes meanwhile, as
    processors' speed does, meets both alike (one after the other it was 2 to 35 us of a gradient that takes 10)."""
    numel = nbytes // 4 // num_tensors
    plain, gathered = ([torch.zeros(numel, requires_grad=True) for _ in range(num_tensors)] for _ in range(2))
    pool = torch.ones(nbytes // 4)
    views = [pool[number * numel : (number + 1) * numel] for number in range(num_tensors)]
    number_of = {id(parameter): number for number, parameter in enumerate(gathered)}

    def gather(parameter: torch.Tensor) -> None:
        view = views[number_of[id(parameter)]]
        assert parameter.grad is not None
        torch.mul(parameter.grad, 0.25, out=view)
        parameter.grad = view

    def backward_s(parameters: list[torch.Tensor]) -> float:
        loss = torch.stack([_Gap.apply(parameter.sum()) for parameter in parameters]).sum()  # type: ignore[no-untyped-call]
        start_s = time.thread_time()
        loss.backward()  # type: ignore[no-untyped-call]
        took_s = time.thread_time() - start_s
        for parameter in parameters:
            parameter.grad = None
        return took_s

    for parameter in gathered:
        parameter.register_post_accumulate_grad_hook(gather)  # type: ignore[no-untyped-call]
    more_s = [backward_s(gathered) - backward_s(plain) for _ in range(repeats)]
    return max(0.0, statistics.median(more_s))


class _Gap(torch.autograd.Function):
    """Backward takes a rest there, as it does where something is computed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(GAP_S)
        return gradient


def encodings(world: int) -> tuple[Encoding, ...]:
    """Of the codecs that are usual. Takes about a second."""
    return tuple(encoding(word, world) for word in CODECS)


def encoding(word: str, world: int) -> Encoding:
    """What a codec computes among so many ranks."""
    one_s, many_s = (_encoded_s(word, number, world) for number in (1, MANY))
    tensor_s = max(0.0, many_s - one_s) / (MANY - 1)
    return Encoding(codec=word, byte_s=max(0.0, one_s - tensor_s) / ENCODED_NBYTES, tensor_s=tensor_s)


def _encoded_s(word: str, num_tensors: int, world: int) -> float:
    """A message of so many square matrices, and its part of what a step is closed with."""
    name, _, argument = word.partition(":")
    codec: Codec = CASTS[name](argument) if name in CASTS else PARTS[name](_settled(name, argument), None)
    numel = ENCODED_NBYTES // 4
    rows = 2 ** ((numel // num_tensors).bit_length() // 2)
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    shapes = [(rows, numel // num_tensors // rows)] * num_tensors
    parcels = [_parcel(number, shapes, noise.clone()) for number in range(ENCODED_MESSAGES)]
    if isinstance(codec, Feedback):
        codec.lay_out(parcels, 0, world, "")
        codec.begin({})
    times_s = []
    with torch.no_grad():
        for _ in range(SETTLING + ENCODED_REPEATS):
            for parcel in parcels:
                parcel.values[0].copy_(noise)
            start_s = time.thread_time()
            for parcel in parcels:
                _converse(codec.converse(parcel), world)
            if isinstance(codec, Feedback):
                _converse(codec.close(), world)
                codec.settle()
                codec.begin({})
            times_s.append((time.thread_time() - start_s) / len(parcels))
    return statistics.median(times_s[SETTLING:])


def _parcel(number: int, shapes: Sequence[tuple[int, ...]], values: torch.Tensor) -> Parcel:
    found = imagined(shapes, values.dtype)
    slices = [piece.model_copy(update={"tensor": f"{number}.{piece.tensor}"}) for piece in found.message.slices]
    return found._replace(number=number, message=Message(slices=tuple(slices)), values=[values])


def _settled(name: str, argument: str) -> str:
    """Without warm-up, for all messages."""
    return ":".join(word for word in (argument, "warmup=0", "always") if word)


def _converse(conversation: object, world: int) -> None:
    """With a group in which everybody has what this rank has."""
    question: Question | None
    answer: Answer = None
    while True:
        try:
            question = conversation.send(answer)  # type: ignore[attr-defined]
        except StopIteration:
            return
        assert question is not None
        answer = _answer(question, world)


def _answer(question: Question, world: int) -> Answer:
    if isinstance(question, Sum):
        return None
    if isinstance(question, Gather):
        return [question.tensor] * world
    mine = torch.cat(list(question.outgoing))
    return [mine.new_zeros(numel) if numel > len(mine) else mine[:numel] for numel in question.incoming]
