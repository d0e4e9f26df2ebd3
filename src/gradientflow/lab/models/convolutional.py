"""Convolutional networks for ImageNet's 1000 classes, in the order of their forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from gradientflow.lab.models.layers import Layer, convolution, linear, norm

CLASSES = 1000

Kernel = int | tuple[int, int]


def alexnet(pixels: int) -> Iterator[Layer]:
    """Krizhevsky 2014, "One weird trick", as in torchvision."""
    side, channels = (pixels + 4 - 11) // 4 + 1, 3
    for index, outputs, kernel, pooled in (
        (0, 64, 11, True), (3, 192, 5, True), (6, 384, 3, False), (8, 256, 3, False), (10, 256, 3, True)
    ):  # fmt: skip
        yield convolution(f"features.{index}", channels, outputs, kernel, side * side, bias=True)
        channels = outputs
        side = (side - 3) // 2 + 1 if pooled else side
    yield linear("classifier.1", channels * 6 * 6, 4096)
    yield linear("classifier.4", 4096, 4096)
    yield linear("classifier.6", 4096, CLASSES)


def vgg16(pixels: int) -> Iterator[Layer]:
    """Simonyan and Zisserman 2014, configuration D, without batch norm."""
    index, side, channels = 0, pixels, 3
    for outputs, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            yield convolution(f"features.{index}", channels, outputs, 3, side * side, bias=True)
            index, channels = index + 2, outputs  # an activation in between
        index, side = index + 1, side // 2
    yield linear("classifier.0", channels * 7 * 7, 4096)
    yield linear("classifier.3", 4096, 4096)
    yield linear("classifier.6", 4096, CLASSES)


def resnet50(pixels: int) -> Iterator[Layer]:
    """He et al. 2015; the stride is in the 3 x 3 convolution, as in torchvision."""
    side = pixels // 2
    yield convolution("conv1", 3, 64, 7, side * side)
    yield norm("bn1", 64)
    side, channels = side // 2, 64
    for stage, (width, repeats) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(repeats):
            name, before = f"layer{stage}.{block}", side * side
            if stage > 1 and block == 0:
                side //= 2
            after = side * side
            yield convolution(f"{name}.conv1", channels, width, 1, before)
            yield norm(f"{name}.bn1", width)
            yield convolution(f"{name}.conv2", width, width, 3, after)
            yield norm(f"{name}.bn2", width)
            yield convolution(f"{name}.conv3", width, 4 * width, 1, after)
            yield norm(f"{name}.bn3", 4 * width)
            if block == 0:
                yield convolution(f"{name}.downsample.0", channels, 4 * width, 1, after)
                yield norm(f"{name}.downsample.1", 4 * width)
            channels = 4 * width
    yield linear("fc", channels, CLASSES)


def densenet201(pixels: int) -> Iterator[Layer]:
    """Huang et al. 2016: each layer adds 32 channels to all that came before it."""
    growth, bottleneck = 32, 128
    side, channels = pixels // 2, 64
    yield convolution("features.conv0", 3, channels, 7, side * side)
    yield norm("features.norm0", channels)
    side //= 2
    for block, repeats in enumerate((6, 12, 48, 32), start=1):
        for layer in range(1, repeats + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            yield norm(f"{name}.norm1", channels)
            yield convolution(f"{name}.conv1", channels, bottleneck, 1, side * side)
            yield norm(f"{name}.norm2", bottleneck)
            yield convolution(f"{name}.conv2", bottleneck, growth, 3, side * side)
            channels += growth
        if block < 4:
            yield norm(f"features.transition{block}.norm", channels)
            yield convolution(f"features.transition{block}.conv", channels, channels // 2, 1, side * side)
            side, channels = side // 2, channels // 2
    yield norm("features.norm5", channels)
    yield linear("classifier", channels, CLASSES)


#: Inception-v4's blocks: convolutions as (module, inputs, outputs, kernel); "^" marks those that shrink the image.
_INCEPTION: dict[str, tuple[tuple[str, int, int, Kernel], ...]] = {
    "3a": (("conv^", 64, 96, 3),),
    "4a": (
        ("branch0.0", 160, 64, 1), ("branch0.1^", 64, 96, 3),
        ("branch1.0", 160, 64, 1), ("branch1.1", 64, 64, (1, 7)), ("branch1.2", 64, 64, (7, 1)),
        ("branch1.3^", 64, 96, 3),
    ),
    "5a": (("conv^", 192, 192, 3),),
    "A": (
        ("branch0", 384, 96, 1),
        ("branch1.0", 384, 64, 1), ("branch1.1", 64, 96, 3),
        ("branch2.0", 384, 64, 1), ("branch2.1", 64, 96, 3), ("branch2.2", 96, 96, 3),
        ("branch3.1", 384, 96, 1),
    ),
    "A to B": (
        ("branch0^", 384, 384, 3),
        ("branch1.0", 384, 192, 1), ("branch1.1", 192, 224, 3), ("branch1.2^", 224, 256, 3),
    ),
    "B": (
        ("branch0", 1024, 384, 1),
        ("branch1.0", 1024, 192, 1), ("branch1.1", 192, 224, (1, 7)), ("branch1.2", 224, 256, (7, 1)),
        ("branch2.0", 1024, 192, 1), ("branch2.1", 192, 192, (7, 1)), ("branch2.2", 192, 224, (1, 7)),
        ("branch2.3", 224, 224, (7, 1)), ("branch2.4", 224, 256, (1, 7)),
        ("branch3.1", 1024, 128, 1),
    ),
    "B to C": (
        ("branch0.0", 1024, 192, 1), ("branch0.1^", 192, 192, 3),
        ("branch1.0", 1024, 256, 1), ("branch1.1", 256, 256, (1, 7)), ("branch1.2", 256, 320, (7, 1)),
        ("branch1.3^", 320, 320, 3),
    ),
    "C": (
        ("branch0", 1536, 256, 1),
        ("branch1_0", 1536, 384, 1), ("branch1_1a", 384, 256, (1, 3)), ("branch1_1b", 384, 256, (3, 1)),
        ("branch2_0", 1536, 384, 1), ("branch2_1", 384, 448, (3, 1)), ("branch2_2", 448, 512, (1, 3)),
        ("branch2_3a", 512, 256, (1, 3)), ("branch2_3b", 512, 256, (3, 1)),
        ("branch3.1", 1536, 256, 1),
    ),
}  # fmt: skip


def inception_v4(pixels: int) -> Iterator[Layer]:
    """Szegedy et al. 2016, as in timm; images are 299 pixels wide."""
    side = (pixels - 3) // 2 + 1
    yield from _convolution_and_norm("features.0", 3, 32, 3, side)
    side -= 2
    yield from _convolution_and_norm("features.1", 32, 32, 3, side)
    yield from _convolution_and_norm("features.2", 32, 64, 3, side)
    blocks = ["3a", "4a", "5a", *["A"] * 4, "A to B", *["B"] * 7, "B to C", *["C"] * 3]
    for index, block in enumerate(blocks, start=3):
        # Without padding: 4a's last convolutions lose a border, the others that shrink have a stride of two.
        shrunk = side - 2 if block == "4a" else (side - 3) // 2 + 1
        for module, inputs, outputs, kernel in _INCEPTION[block]:
            here = shrunk if module.endswith("^") else side
            yield from _convolution_and_norm(f"features.{index}.{module.rstrip('^')}", inputs, outputs, kernel, here)
        if any(module.endswith("^") for module, *_ in _INCEPTION[block]):
            side = shrunk
    yield linear("last_linear", 1536, CLASSES)


def _convolution_and_norm(name: str, inputs: int, outputs: int, kernel: Kernel, side: int) -> Iterator[Layer]:
    yield convolution(f"{name}.conv", inputs, outputs, kernel, side * side)
    yield norm(f"{name}.bn", outputs)
