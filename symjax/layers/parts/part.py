"""Parts of an attention layer for its mechanism, beside queries, keys and values.

A family of mechanisms has a file with its weights and a `Part`, which `PARTS` in
`symjax.layers.parts.table` names. The layer, its decoding state, conversion, cost,
sharding and evaluation loop over these declarations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import PartitionSpec

from symjax import attention, config


class Constant(nnx.Variable):
    """An array that is stored with the weights and never optimised."""


class Sizes(NamedTuple):
    """Heads of a layer. With differential V1 keys and queries have two branches."""

    heads: int  # of the output
    kv_heads: int
    queries: int  # query heads, branches counted
    keys: int
    head_size: int  # of queries and keys
    value_size: int


def named_options(options: config.Model, mechanism: str) -> dict[str, Any]:
    """The options of a mechanism that are keys of model.attention."""
    known = {*config.Attention.__dataclass_fields__}
    known -= set() if config.is_causal(options) else {"chunk_size"}
    names = attention.MECHANISMS[mechanism].options
    return {x: getattr(options.attention, x) for x in names if x in known}


def score_flops(mixer: Any, length: int) -> float:
    """Return the operations per token of scores and of weights times values.

    A causal map has half of the pairs, a window the pairs of its band.

    Args:
        mixer: `symjax.layers.mixer.Mixer`.
    """
    sizes = mixer.sizes
    width = min(dict(mixer.options).get("window", length), length)
    # The mean number of tokens that a token sees on one side.
    seen = width - width**2 / (2 * length)
    seen *= 1 if mixer.causal else 2
    return 2 * seen * (sizes.queries * sizes.head_size + sizes.heads * sizes.value_size)


def recurrence_flops(mixer: Any, features: int, length: int) -> float:
    """Return the operations per token of a recurrence.

    A state of features × values is read and written, and the pairs of a chunk are
    computed as a map.

    Args:
        mixer: `symjax.layers.mixer.Mixer`.
        features: of a query or key.
    """
    value, options = mixer.sizes.value_size, dict(mixer.options)
    pairs = min(options.get("chunk_size", 0), length) * (features + value)
    return mixer.sizes.queries * (pairs + 4 * features * value)


class Part(NamedTuple):
    """One mechanism's part of a layer. What it does not declare, it does not need.

    Attributes:
        weights: (options, depth, sizes, rngs) → name of an attribute of the layer → a
            parameter, a constant, a module or a number.
        operands: (layer, x, operands) → the operands of a call, with more or others.
        output: (layer, mixed, operands) → the output of every head, before its norm.
        state: layer → what the empty state takes beside sizes and options.
        head_norm: an RMSNorm of every head follows, since the mechanism has no
            denominator.
        options: (options of the model, mechanism) → options of the mechanism, where
            they are not the keys of the same names.
        keys: keys of model.attention that are not options of the mechanism, but mean
            something to it where model.attention is the argument.
        learned: values of model.attention.features that are weights of the layer.
        feature_count: (model.attention, head size) → features of a query or key after
            the mechanism's map; by default the head size.
        flops: (mixer, model.attention, length) → operations per token without the
            projections, unless those of scores or of a recurrence.
        rules: of sharding, (pattern of the path in the layer, axes).
        owned: weights that another mechanism has no use for.
        drawn: (constant, the key of model.attention that it is drawn by).
        convert: (weights, source, target) → the weights of a layer of the target.
        check: (source, target) raises if the same weights would be another function.
        features: options → the feature maps φ of weights φ(q)·φ(k), if they are plain.
        exponential: weights are exp(score) over the sum of their row.
    """

    weights: Callable[..., dict[str, Any]] | None = None
    operands: Callable[..., dict[str, Any]] | None = None
    output: Callable[..., Any] | None = None
    state: Callable[[Any], dict[str, Any]] | None = None
    head_norm: bool = False
    options: Callable[[config.Model, str], dict[str, Any]] | None = None
    keys: Callable[[config.Attention], tuple[str, ...]] | None = None
    learned: tuple[str, ...] = ()
    feature_count: Callable[[config.Attention, int], int] = lambda chosen, size: size
    flops: Callable[[Any, config.Attention, int], float] | None = None
    rules: tuple[tuple[str, PartitionSpec], ...] = ()
    owned: tuple[str, ...] = ()
    drawn: tuple[tuple[str, str], ...] = ()
    convert: Callable[..., dict[str, Any]] | None = None
    check: Callable[[config.Model, config.Model], None] | None = None
    features: Callable[[dict[str, Any]], Any] | None = None
    exponential: bool = False
