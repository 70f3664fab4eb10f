"""Floating-point operations of a model by formula, and its memory to decode."""

from collections import Counter
from dataclasses import replace

import jax

from symjax import config
from symjax.layers.mixer import mixer_of
from symjax.layers.parts.part import recurrence_flops, score_flops
from symjax.layers.parts.table import part_of
from symjax.models.build import abstract, decoder_of


def forward_flops(options: config.Model, parameters: int) -> float:
    """Return the operations of the forward pass per token; a multiply-add counts two.

    Each weight costs 2 operations for each time that it multiplies a token. The
    operations of attention in a row of model.length tokens are added. XLA's cost
    analysis cannot replace the formula: it counts the body of a scan once.

    Args:
        parameters: number of weights of the model.
    """
    head = options.vocabulary * options.width
    tables = head * (not options.tie_embeddings)
    if options.positions == "learned":
        tables += options.length * options.width
    weights = parameters - tables
    if options.kind == "universal":  # one block, all of its steps
        weights += (options.depth - 1) * (weights - head)
    names = [config.mechanism_of(options, depth) for depth in range(options.depth)]
    work = sum(
        count * attention_flops(options, names.index(name))
        for name, count in Counter(names).items()
    )
    return 2 * weights + work


def attention_flops(options: config.Model, depth: int) -> float:
    """Return the operations per token of one layer's attention without projections."""
    mixer, chosen = mixer_of(options, depth), options.attention
    mixer = replace(mixer, sizes=mixer.mechanism_sizes)
    part = part_of(mixer.mechanism)
    if part.flops is not None:
        return part.flops(mixer, chosen, options.length)
    if mixer.entry.state is None:
        return score_flops(mixer, options.length)
    features = part.feature_count(chosen, mixer.sizes.head_size)
    return recurrence_flops(mixer, features, options.length)


def train_flops(options: config.Model, parameters: int) -> float:
    """Return the operations of a training step per token: three forward passes.

    The backward pass costs as much as two.
    """
    return 3 * forward_flops(options, parameters)


def decoding_bytes(options: config.Model, length: int) -> int:
    """Return the bytes of the decoding cache of one text: keys and values, or states.

    Args:
        length: tokens of the text, its prompt included.
    Raises:
        ValueError: the model is an encoder, which does not decode.
    """
    model = decoder_of(abstract(options))
    cache = jax.eval_shape(lambda: model.init_cache(1, length))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
