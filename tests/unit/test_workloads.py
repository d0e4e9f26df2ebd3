"""Well-known models as profiles: exact sizes, and laws of how time and size are shared out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientflow.errors import DocumentError, UsageError
from gradientflow.lab.models import MODELS
from gradientflow.lab.workloads import SPEEDS, load, scaled, timed, workload
from gradientflow.profiles import Profile, TensorProfile

#: Parameters, tensors, largest tensor, per cent of tensors below 64 KiB, operations of forward on one sample.
FACTS = {
    "alexnet": (61_100_840, 16, 37_748_736, 50, 1.43e9),
    "vgg-16": (138_357_544, 32, 102_760_448, 53, 30.9e9),
    "resnet-50": (25_557_032, 161, 2_359_296, 68, 8.2e9),
    "inception-v4": (42_679_816, 449, 1_536_000, 67, 24.5e9),
    "densenet-201": (20_013_928, 604, 1_920_000, 67, 8.6e9),
    "vit-b-16": (86_567_656, 152, 2_359_296, 66, 35.1e9),
    "bert-base": (110_106_428, 206, 23_440_896, 63, 14.1e9),
    "bert-large": (336_226_108, 398, 31_254_528, 63, 43.2e9),
    "gpt-2": (124_439_808, 148, 38_597_376, 66, 292e9),
}


def test_all_models_are_known_facts() -> None:
    assert list(MODELS) == list(FACTS) == list(SPEEDS)


@pytest.mark.parametrize("name", FACTS)
def test_sizes_are_those_of_the_real_model(name: str) -> None:
    numel, num_tensors, largest, small_percent, flops = FACTS[name]
    profile = workload(name)
    assert (profile.numel, len(profile.tensors)) == (numel, num_tensors)
    assert max(tensor.numel for tensor in profile.tensors) == largest
    small = sum(tensor.nbytes < 2**16 for tensor in profile.tensors)
    assert round(100 * small / num_tensors) == small_percent
    assert profile.flops / MODELS[name].batch / 3 == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tokens", "flops"),
    [("bert-base", 128, 28.5e9), ("bert-base", 512, 121e9), ("bert-large", 128, 87.2e9), ("bert-large", 512, 368e9)],
)
def test_operations_grow_with_the_text(name: str, tokens: int, flops: float) -> None:
    assert sum(layer.flops for layer in MODELS[name].layers(tokens)) == pytest.approx(flops, rel=0.003)


@pytest.mark.parametrize(
    ("model", "tensor", "shape"),
    [
        ("alexnet", "classifier.1.weight", (4096, 9216)),
        ("vgg-16", "features.28.weight", (512, 512, 3, 3)),
        ("resnet-50", "layer4.0.downsample.0.weight", (2048, 1024, 1, 1)),
        ("inception-v4", "features.21.branch2_3b.conv.weight", (256, 512, 3, 1)),
        ("inception-v4", "features.3.conv.bn.bias", (96,)),
        ("densenet-201", "features.denseblock4.denselayer32.norm1.weight", (1888,)),
        ("densenet-201", "features.transition3.conv.weight", (896, 1792, 1, 1)),
        ("vit-b-16", "encoder.layers.encoder_layer_11.self_attention.in_proj_weight", (2304, 768)),
        ("vit-b-16", "encoder.pos_embedding", (1, 197, 768)),
        ("bert-base", "bert.encoder.layer.11.attention.self.value.bias", (768,)),
        ("bert-large", "cls.predictions.bias", (30522,)),
        ("gpt-2", "transformer.h.0.attn.c_attn.weight", (768, 2304)),
    ],
)
def test_names_and_shapes_are_the_usual_ones(model: str, tensor: str, shape: tuple[int, ...]) -> None:
    assert workload(model).by_name[tensor].shape == shape


@pytest.mark.parametrize("name", FACTS)
def test_time_is_shared_by_operations_and_comes_before_the_layers_gradients(name: str) -> None:
    profile = workload(name, compute_s=3.0)
    assert profile.forward_s == pytest.approx(1.0)
    assert profile.backward_s == pytest.approx(2.0)
    assert [tensor.forward_order for tensor in profile.tensors] == list(reversed(range(len(profile.tensors))))
    layers = list(MODELS[name].layers(MODELS[name].length))
    flops, position = sum(layer.flops for layer in layers), 0
    for layer in reversed(layers):
        first, *others = profile.tensors[position : position + len(layer.tensors)]
        assert [first.name, *(other.name for other in others)] == list(reversed(layer.tensors))
        assert first.forward_s == pytest.approx(layer.flops / flops)
        assert first.backward_s == pytest.approx(2 * layer.flops / flops)
        assert all(other.forward_s == other.backward_s == 0.0 for other in others)
        position += len(layer.tensors)


@pytest.mark.parametrize(("model", "device"), [(model, device) for model in SPEEDS for device in SPEEDS[model]])
def test_a_device_takes_the_time_of_its_published_speed(model: str, device: str) -> None:
    speed = SPEEDS[model][device]
    profile = workload(model, device=device, batch=10)
    assert speed.source
    assert profile.forward_s + profile.backward_s == pytest.approx(10 / speed.samples_s)
    length = speed.tokens or MODELS[model].length
    assert profile.flops == pytest.approx(30 * sum(layer.flops for layer in MODELS[model].layers(length)))


def test_a_smaller_model_keeps_a_devices_ratio_of_computing_to_sending() -> None:
    full, tenth = (workload("resnet-50", device="2080ti", scale=scale) for scale in (1.0, 0.1))
    assert full.forward_s + full.backward_s == pytest.approx(64 / 253.1)
    assert tenth.backward_s == pytest.approx(full.backward_s / 10)
    assert tenth.intensity == pytest.approx(full.intensity, rel=0.01)


def test_compute_as_a_multiple_of_the_wires_time() -> None:
    profile = workload("vgg16", compute_ratio=0.5, wire_s=4.0)
    assert profile.forward_s + profile.backward_s == pytest.approx(2.0)


def test_no_times_unless_asked() -> None:
    assert workload("gpt-2").forward_s == workload("gpt-2").backward_s == 0.0


SHAPES = st.lists(st.integers(1, 600), max_size=3).map(tuple) | st.tuples(
    st.integers(1, 300), st.integers(1, 300), st.integers(1, 7), st.integers(1, 7)
)


@given(shape=SHAPES, scale=st.floats(1e-4, 1.0))
def test_a_scaled_tensor_is_right_to_a_row_and_of_the_same_kind(shape: tuple[int, ...], scale: float) -> None:
    before = Profile(tensors=(TensorProfile(name="a", shape=shape, backward_s=1.0),), flops=8.0)
    after = scaled(before, scale)
    (tensor,) = after.tensors
    assert len(tensor.shape) == len(shape)
    assert all(1 <= new <= max(old, 1) for new, old in zip(tensor.shape, shape, strict=True))
    assert tensor.shape[2:] == shape[2:] or len(shape) == 3, "kernels keep their size"
    longest = max(range(2 if len(shape) > 3 else len(shape)), key=lambda side: (shape[side], side), default=None)
    row = tensor.numel if longest is None else tensor.numel // tensor.shape[longest]
    assert abs(tensor.numel - scale * before.numel) <= row
    assert (after.flops, tensor.backward_s) == (8.0 * scale, 1.0)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("name", FACTS)
def test_a_scaled_model_has_the_same_tensors_and_the_same_share_in_the_largest(name: str, scale: float) -> None:
    full, small = workload(name), workload(name, scale=scale)
    assert [tensor.name for tensor in small.tensors] == [tensor.name for tensor in full.tensors]
    assert small.numel == pytest.approx(scale * full.numel, rel=0.005)
    largest = max(tensor.numel for tensor in full.tensors)
    assert max(tensor.numel for tensor in small.tensors) == pytest.approx(scale * largest, rel=0.03)
    assert scaled(full, 1.0) == full


@pytest.mark.parametrize("spelling", ["resnet-50", "ResNet50", "resnet_50", "RESNET 50"])
def test_a_name_may_be_spelt_in_any_way(spelling: str) -> None:
    assert len(workload(spelling).tensors) == 161


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"name": "resnet5"}, r"no model 'resnet5': there are alexnet, .*gpt-2; did you mean resnet-50\?"),
        ({"name": "zzz"}, r"no model 'zzz': there are alexnet, .*gpt-2$"),
        ({"device": "rtx2080ti"}, r"on 'rtx2080ti': there are 2080ti, .*; for others .*; did you mean 2080ti\?"),
        ({"compute_s": 1.0, "device": "v100"}, "compute_s and device both say"),
        ({"compute_ratio": 1.0}, "give both or neither"),
        ({"wire_s": 1.0}, "give both or neither"),
        ({"compute_s": -1.0}, "compute_s is -1.0"),
        ({"compute_s": math.nan}, "compute_s is nan"),
        ({"compute_ratio": 1.0, "wire_s": math.inf}, "wire_s is inf"),
        ({"batch": 0}, "give 1 or more"),
        ({"scale": 0.0}, "more than 0 and at most 1"),
        ({"scale": 2.0, "device": "v100"}, "more than 0 and at most 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        load(options.pop("name", "resnet-50"), **options)
    assert "\n" not in str(caught.value)


def test_a_file_keeps_its_times_or_gets_others_in_proportion(tmp_path: Path) -> None:
    written = workload("alexnet", compute_s=3.0)
    written.write(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == written
    again = load(str(tmp_path / "profile.json"), compute_ratio=2.0, wire_s=3.0, scale=0.1)
    assert again.tensors[0].backward_s == pytest.approx(2 * written.tensors[0].backward_s)
    assert again.numel == pytest.approx(written.numel / 10, rel=0.01)


def test_a_file_that_is_wrong_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for tensors, complaint in [
        ([{"name": "a", "shape": [1], "forward_s": -1}], "forward_s: .*greater than or equal to 0"),
        ([{"name": "a", "shape": [1]}] * 2, "'a' is listed twice"),
    ]:
        path.write_text(json.dumps({"tensors": tensors}))
        with pytest.raises(DocumentError, match=complaint) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DocumentError, match="No such file"):
        load(tmp_path / "none.json")
    Profile(tensors=(TensorProfile(name="a", shape=(1,)),)).write(path)
    with pytest.raises(UsageError, match="no times to go by"):
        load(path, compute_s=1.0)
    for options in ({"device": "v100"}, {"batch": 3}):
        with pytest.raises(UsageError, match="leave `device` and `batch` out"):
            load(path, **options)


def test_a_file_without_tensors_is_no_workload(tmp_path: Path) -> None:
    Profile(tensors=()).write(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match="lists no tensors"):
        load(tmp_path / "nothing.json")


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    documented = (load.__doc__ or "").split("left out:\n")[1].split("Its times")[0]
    (tmp_path / "profile.json").write_text(documented)
    profile = load(tmp_path / "profile.json")
    assert [tensor.name for tensor in profile.tensors] == ["fc.bias", "fc.weight"]


def test_times_can_be_taken_away() -> None:
    assert timed(workload("alexnet", compute_s=3.0), 0.0) == workload("alexnet")
