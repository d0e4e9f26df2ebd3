"""Well-known models as profiles: what a network has to carry, and how long computing takes, without the model.

    workload("resnet-50", device="2080ti")                       batch 64 at the speed that was published
    workload("bert-base", compute_ratio=1.0, wire_s=2.5)         as much to compute as to send
    load("profile.json", scale=0.1)                              a measured model, a tenth of its size

Sizes are exact. Seconds are shared out by operations: two thirds to backward, and within a layer all to the
tensor that forward uses last. That tensor's gradient comes first, so no gradient of a layer is there before
the layer was computed, and no layer runs before all its weights are there.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple

from gradientflow.errors import UsageError
from gradientflow.lab.models import MODELS
from gradientflow.lab.models.layers import Layer
from gradientflow.profiles import Profile, TensorProfile

#: Backward multiplies twice for each multiplication of forward: once for the weight, once for the input.
FORWARD, BACKWARD = 1 / 3, 2 / 3


class Speed(NamedTuple):
    """Samples that one device trains in a second, and tokens of a sample where it is text."""

    samples_s: float
    source: str
    tokens: int | None = None


_SURVEY = "survey's repository, fp32; the GPU is not named there and taken to be a 2080 Ti"
_LAMBDA = "Lambda's PyTorch benchmark"
_LAMBDA_TF = "Lambda's TensorFlow benchmark"
_SQUAD = "Lambda's PyTorch benchmark, SQuAD"
_NVIDIA = "NVIDIA's DeepLearningExamples, pre-training"
_TIMM = "timm's benchmark, NCHW"
_LLM_C = "llm.c: 524288 tokens in 0.3 s on 8 GPUs, their communication included"

#: Published training speeds of one GPU: fp32 (tf32 from the A100 on), and mixed precision under "-amp".
SPEEDS: dict[str, dict[str, Speed]] = {
    "alexnet": {
        "2080ti": Speed(4184, _LAMBDA_TF),
        "2080ti-amp": Speed(5297, _LAMBDA_TF),
        "v100": Speed(5132, _LAMBDA_TF),
        "v100-amp": Speed(9319, _LAMBDA_TF),
        "a100": Speed(10187, _LAMBDA_TF),
        "a100-amp": Speed(16487, _LAMBDA_TF),
    },
    "vgg-16": {
        "2080ti": Speed(190, _LAMBDA_TF),
        "2080ti-amp": Speed(400, _LAMBDA_TF),
        "v100": Speed(249, _LAMBDA_TF),
        "v100-amp": Speed(456, _LAMBDA_TF),
        "a100": Speed(504, _LAMBDA_TF),
        "a100-amp": Speed(1190, _LAMBDA_TF),
    },
    "resnet-50": {
        "2080ti": Speed(253.1, _SURVEY),
        "2080ti-amp": Speed(770, _LAMBDA_TF),
        "v100": Speed(369, _LAMBDA),
        "v100-amp": Speed(833, _LAMBDA),
        "a100": Speed(1066, _LAMBDA),
        "a100-amp": Speed(1582, _LAMBDA),
        "h100": Speed(1893, _LAMBDA),
        "h100-amp": Speed(2790, _LAMBDA),
    },
    "inception-v4": {
        "2080ti": Speed(84, _LAMBDA_TF),
        "2080ti-amp": Speed(198, _LAMBDA_TF),
        "v100": Speed(122, _LAMBDA_TF),
        "v100-amp": Speed(357, _LAMBDA_TF),
        "a100": Speed(276, _LAMBDA_TF),
        "a100-amp": Speed(587, _LAMBDA_TF),
    },
    "densenet-201": {"3090-amp": Speed(447, _TIMM)},
    "vit-b-16": {"3090-amp": Speed(391, _TIMM)},
    "bert-base": {
        "2080ti": Speed(212.8, _SURVEY, tokens=64),
        "v100": Speed(42, _SQUAD, tokens=384),
        "v100-amp": Speed(189, _SQUAD, tokens=384),
        "a100": Speed(239, _SQUAD, tokens=384),
        "a100-amp": Speed(443, _SQUAD, tokens=384),
        "h100": Speed(433, _SQUAD, tokens=384),
        "h100-amp": Speed(867, _SQUAD, tokens=384),
    },
    "bert-large": {
        "2080ti": Speed(49.0, _SURVEY, tokens=64),
        "v100": Speed(50, _NVIDIA, tokens=128),
        "v100-amp": Speed(224, _NVIDIA, tokens=128),
        "a100": Speed(317, _NVIDIA, tokens=128),
        "a100-amp": Speed(580, _NVIDIA, tokens=128),
        "h100": Speed(147, _SQUAD, tokens=384),
        "h100-amp": Speed(309, _SQUAD, tokens=384),
    },
    "gpt-2": {"a100-amp": Speed(524288 / 0.3 / 8 / 1024, _LLM_C, tokens=1024)},
}


def workload(
    name: str,
    *,
    compute_s: float | None = None,
    compute_ratio: float | None = None,
    wire_s: float | None = None,
    device: str | None = None,
    batch: int | None = None,
    scale: float = 1.0,
) -> Profile:
    """The profile of the model called `name`, spelt in any way: resnet-50, ResNet50.

    Forward and backward together take `compute_s` seconds, or `compute_ratio` times `wire_s`, or what `device`
    needs for a batch; without any of these, times are 0. `scale` makes a model that is smaller throughout:
    parameters, operations and a device's seconds go down alike; `compute_s` is taken as it is.

    >>> profile = workload("ResNet-50", compute_s=0.3)
    >>> profile.numel, len(profile.tensors), profile.tensors[0].name, round(profile.backward_s, 6)
    (25557032, 161, 'fc.bias', 0.2)
    """
    given = _compute_s(compute_s, compute_ratio, wire_s, device)
    known = _known("model", name, MODELS)
    model = MODELS[known]
    batch, length = model.batch if batch is None else batch, model.length
    if batch < 1:
        raise UsageError(f"a batch of {batch} trains nothing: give 1 or more")
    if device is not None:
        speed = SPEEDS[known][_known(f"speed of {known} on", device, SPEEDS[known], "; for others give the seconds")]
        given, length = scale * batch / speed.samples_s, speed.tokens or length
    profile = scaled(_profile(list(model.layers(length)), batch), scale)
    return timed(profile, 0.0 if given is None else given)


def usual_batch(name: str) -> int:
    """Samples of one worker in an iteration, where nothing else is said."""
    return MODELS[_known("model", name, MODELS)].batch


def load(
    source: str | os.PathLike[str],
    *,
    compute_s: float | None = None,
    compute_ratio: float | None = None,
    wire_s: float | None = None,
    device: str | None = None,
    batch: int | None = None,
    scale: float = 1.0,
) -> Profile:
    """A workload by name, or a profile from a file whose name ends in `.json`.

    Such a file lists the tensors in the order in which backward yields their gradients; all but name and
    shape may be left out:

        {"version": 1, "flops": 8.2e9, "tensors": [
            {"name": "fc.bias", "shape": [10], "dtype": "float32", "forward_order": 1, "backward_s": 0.002},
            {"name": "fc.weight", "shape": [10, 64], "forward_order": 0, "forward_s": 0.001}]}

    Its times are kept, or made to add up to what is asked for.
    """
    if not os.fspath(source).endswith(".json"):
        return workload(
            os.fspath(source),
            compute_s=compute_s,
            compute_ratio=compute_ratio,
            wire_s=wire_s,
            device=device,
            batch=batch,
            scale=scale,
        )
    if device is not None or batch is not None:
        raise UsageError(f"{source} is a profile of one device and batch: leave `device` and `batch` out")
    given = _compute_s(compute_s, compute_ratio, wire_s, device)
    profile = scaled(Profile.read(source), scale)
    if not profile.tensors:
        raise UsageError(f"{source} lists no tensors: there is nothing to exchange")
    return profile if given is None else timed(profile, given)


def timed(profile: Profile, compute_s: float) -> Profile:
    """The same profile with its times multiplied so that forward and backward together take `compute_s`."""
    _check("compute_s", compute_s)
    present_s = profile.forward_s + profile.backward_s
    if present_s == 0.0 < compute_s:
        raise UsageError("the profile holds no times to go by: measure it first, or ask for no seconds")
    factor = compute_s / present_s if present_s else 0.0
    return profile.model_copy(
        update={
            "tensors": tuple(
                tensor.model_copy(
                    update={"forward_s": tensor.forward_s * factor, "backward_s": tensor.backward_s * factor}
                )
                for tensor in profile.tensors
            )
        }
    )


def scaled(profile: Profile, scale: float) -> Profile:
    """A model with as many tensors, each `scale` times as large; times are left as they are.

    Matrices stay matrices: both sides shrink alike, and kernels of convolutions keep their size.

    >>> one = Profile(tensors=(TensorProfile(name="conv.weight", shape=(256, 64, 3, 3)),))
    >>> scaled(one, 0.25).tensors[0].shape
    (128, 32, 3, 3)
    """
    if not 0.0 < scale <= 1.0:
        raise UsageError(f"scale is {scale}: give more than 0 and at most 1")
    tensors = tuple(tensor.model_copy(update={"shape": _shrunk(tensor.shape, scale)}) for tensor in profile.tensors)
    return profile.model_copy(update={"tensors": tensors, "flops": profile.flops * scale})


def _shrunk(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    if scale == 1.0 or not shape or not math.prod(shape):
        return shape
    sizes = list(shape)
    *shorter, longest = sorted(range(2 if len(shape) > 3 else len(shape)), key=shape.__getitem__)[-2:]
    for side in shorter:
        sizes[side] = max(1, round(shape[side] * math.sqrt(scale)))
    # Rounding to a whole number costs least on the longest side, so that one makes up for the other's.
    others = math.prod(sizes) // sizes[longest]
    sizes[longest] = max(1, round(math.prod(shape) * scale / others))
    return tuple(sizes)


def _profile(layers: list[Layer], batch: int) -> Profile:
    """In backward order, with one second of compute in all."""
    flops = sum(layer.flops for layer in layers)
    tensors: list[TensorProfile] = []
    for layer in layers:
        last = len(layer.tensors) - 1
        for index, (name, shape) in enumerate(layer.tensors.items()):
            share = layer.flops / flops if index == last else 0.0
            tensors.append(
                TensorProfile(
                    name=name,
                    shape=shape,
                    forward_order=len(tensors),
                    forward_s=FORWARD * share,
                    backward_s=BACKWARD * share,
                )
            )
    return Profile(tensors=tuple(reversed(tensors)), flops=flops / FORWARD * batch)


def _compute_s(
    compute_s: float | None, compute_ratio: float | None, wire_s: float | None, device: str | None
) -> float | None:
    """The seconds that were asked for, if any; raise unless they were asked for in one way."""
    ways = {"compute_s": compute_s, "compute_ratio": compute_ratio, "device": device}
    given = [way for way, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both say how long computing takes: give one of them")
    if (compute_ratio is None) != (wire_s is None):
        raise UsageError("compute_ratio is a multiple of wire_s: give both or neither")
    if compute_ratio is not None and wire_s is not None:
        return _check("compute_ratio", compute_ratio) * _check("wire_s", wire_s)
    return None if compute_s is None else _check("compute_s", compute_s)


def _check(name: str, value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise UsageError(f"{name} is {value}: give a finite number, 0 or more")
    return value


def _known(kind: str, name: str, names: Iterable[str], advice: str = "") -> str:
    """The one of `names` that is meant: case and punctuation do not count."""
    spellings = {_letters(known): known for known in names}
    if _letters(name) in spellings:
        return spellings[_letters(name)]
    close = get_close_matches(_letters(name), spellings, n=1, cutoff=0.5)
    guess = f"; did you mean {spellings[close[0]]}?" if close else ""
    raise UsageError(f"no {kind} {name!r}: there are {', '.join(spellings.values())}{advice}{guess}")


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
