"""What a model costs, by formula: parameters and floating-point operations."""

import jax
from flax import nnx

from symjax import config
from symjax.attention import ScoreMechanism
from symjax.layers import Attention, GatedBlock
from symjax.layers.forms import form_of, has_keys
from symjax.layers.validate import sizes


def forward_flops(options: config.Model, parameters: int) -> float:
    """Operations of the forward pass a token, a multiply-add counted as two.

    2 for each weight that multiplies a token, as often as it does, plus the work of
    attention at the model's length. The compiler's own count is of no use here: it
    counts the body of a scan once.
    """
    head = options.vocabulary * options.width
    tables = head * (not options.tie_embeddings)
    if options.positions == "learned":
        tables += options.length * options.width
    weights = parameters - tables
    if options.kind == "universal":  # one block, all of its steps
        weights += (options.depth - 1) * (weights - head)
    work = sum(attention_flops(options, depth) for depth in range(options.depth))
    return 2 * weights + work


def attention_flops(options: config.Model, depth: int) -> float:
    """Operations of one layer's attention a token, its projections left out."""
    mechanism = config.mechanism_of(options, depth)
    if mechanism in config.GATED:
        return _gated_flops(options, depth)
    form, seen = form_of(mechanism), _seen(options)
    heads, _, queries, _, size, value = sizes(options)
    if isinstance(form.attend, ScoreMechanism):
        return 2 * seen * (queries * size + heads * value)
    if not has_keys(mechanism):
        return 2 * queries * (size * size + 2 * size * value)
    state = jax.eval_shape(
        lambda: Attention(options, depth, rngs=nnx.Rngs(jax.random.key(0))).init_cache(
            1, 1
        )
    )
    features = max(leaf.shape[2] for leaf in jax.tree.leaves(state))
    random = "projection" in form.operands
    drawing = 4 * options.attention.feature_count * size * random
    inside = min(options.attention.chunk_size, options.length) * (features + value)
    inside *= config.is_causal(options)
    return queries * (drawing + inside + 4 * features * value)


def _seen(options: config.Model) -> float:
    """Keys that a token sees in the mean: of a causal map half the pairs."""
    return options.length / 2 if config.is_causal(options) else options.length


def _gated_flops(options: config.Model, depth: int) -> float:
    block = nnx.eval_shape(lambda: GatedBlock(options, depth, rngs=nnx.Rngs(0)))
    if block.mechanism == "gau":
        return 2 * _seen(options) * (block.size + block.hidden)
    inside = options.attention.chunk_size * (block.size + block.hidden)
    inside *= 1 if block.causal else 2
    return inside + 4 * block.size * block.hidden


def train_flops(options: config.Model, parameters: int) -> float:
    """Operations of a training step a token: the backward pass costs two forwards."""
    return 3 * forward_flops(options, parameters)
