"""What a model costs, by formula: parameters and floating-point operations."""

from collections import Counter

import jax
from flax import nnx

from symjax import config
from symjax.layers.parts.part import recurrence_flops, score_flops
from symjax.layers.parts.table import part_of
from symjax.models import transformer


def forward_flops(options: config.Model, parameters: int) -> float:
    """Operations of the forward pass a token, a multiply-add counted as two.

    2 for each weight that multiplies a token, as often as it does, plus the work of
    attention at the model's length. XLA's cost analysis is no alternative: it counts
    the body of a scan once.
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
    """Operations of one layer's attention a token, its projections left out."""
    found = []

    def count() -> None:  # traced, so that no weight is made
        rngs = nnx.Rngs(jax.random.key(0))
        (layer, *_) = transformer.block(options, depth, rngs).attentions
        default = score_flops if layer.mixer.form.state is None else recurrence_flops
        flops = part_of(layer.mixer.mechanism).flops or default
        found.append(flops(layer, options.length))

    jax.eval_shape(count)
    return found[0]


def train_flops(options: config.Model, parameters: int) -> float:
    """Operations of a training step a token: the backward pass costs two forwards."""
    return 3 * forward_flops(options, parameters)
