"""The networks that papers on communication measure, as lists of layers: names, shapes and operations.

Nothing here computes: a model is a generator of `Layer`s in the order of its forward pass. Names and shapes
are those of the usual implementation (torchvision, timm for Inception-v4, Hugging Face for BERT and GPT-2),
so that a trace of a replayed model reads like one of the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from gradientflow.lab.models.convolutional import alexnet, densenet201, inception_v4, resnet50, vgg16
from gradientflow.lab.models.layers import Layer
from gradientflow.lab.models.transformers import bert, gpt2, vit_b_16


class Model(NamedTuple):
    """How to list a model's layers, and what one sample is unless somebody says otherwise."""

    layers: Callable[[int], Iterator[Layer]]
    batch: int
    #: Tokens of a sample of text; pixels of a side of an image.
    length: int


#: Batches of ResNet-50 and BERT, and BERT's 64 tokens, are those of the survey (Shi et al. 2020).
MODELS = {
    "alexnet": Model(alexnet, 128, 224),
    "vgg-16": Model(vgg16, 32, 224),
    "resnet-50": Model(resnet50, 64, 224),
    "inception-v4": Model(inception_v4, 64, 299),
    "densenet-201": Model(densenet201, 32, 224),
    "vit-b-16": Model(vit_b_16, 64, 224),
    "bert-base": Model(partial(bert, 12, 768), 64, 64),
    "bert-large": Model(partial(bert, 24, 1024), 8, 64),
    "gpt-2": Model(partial(gpt2, 12, 768), 8, 1024),
}
