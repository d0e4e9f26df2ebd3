"""Transformers, in the order of their forward pass.

Attention itself, softmax(Q K') V, has no tensor. Its operations go to the projection before it: backward
reaches them before that projection's gradient is there, and forward runs them once its weight is.
For the same reason the output over the vocabulary, whose weight is the embedding's, goes to the layer before
it; the tied weight is where it is used first, which is where its gradient is complete.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradientflow.lab.models.layers import Layer, convolution, linear, norm, table


def vit_b_16(pixels: int) -> Iterator[Layer]:
    """Dosovitskiy et al. 2020, as in torchvision: 12 layers of width 768 over patches of 16 x 16 pixels."""
    width, patches = 768, (pixels // 16) ** 2
    tokens = patches + 1
    yield convolution("conv_proj", 3, width, 16, patches, bias=True)
    yield table("class_token", 1, 1, width)
    yield table("encoder.pos_embedding", 1, tokens, width)
    for index in range(12):
        name = f"encoder.layers.encoder_layer_{index}"
        yield norm(f"{name}.ln_1", width)
        attention = f"{name}.self_attention"
        joined = {f"{attention}.in_proj_weight": (3 * width, width), f"{attention}.in_proj_bias": (3 * width,)}
        yield Layer(joined, 2 * 3 * width * width * tokens).plus(_attention(tokens, width))
        yield linear(f"{attention}.out_proj", width, width, tokens)
        yield norm(f"{name}.ln_2", width)
        yield linear(f"{name}.mlp.0", width, 4 * width, tokens)
        yield linear(f"{name}.mlp.3", 4 * width, width, tokens)
    yield norm("encoder.ln", width)
    yield linear("heads.head", width, 1000)


def bert(depth: int, width: int, tokens: int) -> Iterator[Layer]:
    """Devlin et al. 2018 with both heads of pre-training, as Hugging Face's BertForPreTraining.

    The survey pads the vocabulary to 30528, which adds 4614 parameters to BERT-Base and 6150 to BERT-Large.
    """
    vocabulary = 30522
    yield table("bert.embeddings.word_embeddings.weight", vocabulary, width)
    yield table("bert.embeddings.token_type_embeddings.weight", 2, width)
    yield table("bert.embeddings.position_embeddings.weight", 512, width)
    yield norm("bert.embeddings.LayerNorm", width)
    for index in range(depth):
        name = f"bert.encoder.layer.{index}"
        yield linear(f"{name}.attention.self.query", width, width, tokens)
        yield linear(f"{name}.attention.self.key", width, width, tokens)
        yield linear(f"{name}.attention.self.value", width, width, tokens).plus(_attention(tokens, width))
        yield linear(f"{name}.attention.output.dense", width, width, tokens)
        yield norm(f"{name}.attention.output.LayerNorm", width)
        yield linear(f"{name}.intermediate.dense", width, 4 * width, tokens)
        yield linear(f"{name}.output.dense", 4 * width, width, tokens)
        yield norm(f"{name}.output.LayerNorm", width)
    yield linear("bert.pooler.dense", width, width)
    yield linear("cls.predictions.transform.dense", width, width, tokens)
    yield norm("cls.predictions.transform.LayerNorm", width)
    yield table("cls.predictions.bias", vocabulary).plus(2 * vocabulary * width * tokens)
    yield linear("cls.seq_relationship", width, 2)


def gpt2(depth: int, width: int, tokens: int) -> Iterator[Layer]:
    """Radford et al. 2019, as Hugging Face's GPT2LMHeadModel; its weights are stored as (inputs, outputs)."""
    vocabulary = 50257
    yield table("transformer.wte.weight", vocabulary, width)
    yield table("transformer.wpe.weight", 1024, width)
    for index in range(depth):
        name = f"transformer.h.{index}"
        yield norm(f"{name}.ln_1", width)
        yield _transposed(linear(f"{name}.attn.c_attn", width, 3 * width, tokens)).plus(_attention(tokens, width))
        yield _transposed(linear(f"{name}.attn.c_proj", width, width, tokens))
        yield norm(f"{name}.ln_2", width)
        yield _transposed(linear(f"{name}.mlp.c_fc", width, 4 * width, tokens))
        yield _transposed(linear(f"{name}.mlp.c_proj", 4 * width, width, tokens))
    yield norm("transformer.ln_f", width).plus(2 * vocabulary * width * tokens)


def _attention(tokens: int, width: int) -> int:
    """Operations of Q K' and of its product with V, all heads together."""
    return 2 * 2 * tokens * tokens * width


def _transposed(layer: Layer) -> Layer:
    return layer._replace(tensors={name: shape[::-1] for name, shape in layer.tensors.items()})
