"""`Part`: what a mechanism adds to its layer besides queries, keys and values.

A mechanism that adds weights has a `Part` in a file here. `part_of` in
`symjax.layers.parts.table` returns it: the line of the mechanism in `PARTS`, or else
`SCORES` for score mechanisms and an empty `Part` for others. The layer, its decoding
state, conversion, cost, sharding and evaluation read the `Part`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from symjax import attention, config


class Constant(nnx.Variable):
    """Array that is stored with the weights and never optimised."""


class Sizes(NamedTuple):
    """Heads and sizes of a layer.

    Attributes:
        heads: N, the number of output heads.
        kv_heads: K, the number of value heads.
        queries: number of query heads. Without differential maps it is N. Differential
            V1 and V2 have N signal heads and N/r noise heads, where r is
            model.attention.signals, 1 by default.
        keys: number of key heads. Without differential V1 it is K. V1 has K signal keys
            and min(K, number of noise heads) noise keys.
        head_size: features of a query or key.
        value_size: features of a value.
    """

    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    value_size: int

    @property
    def head_groups(self) -> int:
        """Number of groups of heads that share a noise head, a sink and an ALiBi slope.

        It is the number of noise heads. Without differential V1 or V2 each head is a
        group.
        """
        return self.queries - self.heads or self.heads

    def repeat_noise(self) -> "Sizes":
        """Return the sizes with a noise head for each signal head."""
        return self._replace(queries=2 * self.heads, keys=2 * self.kv_heads)


def repeat_heads(x: Array, heads: int, times: int, axis: int = -1) -> Array:
    """Repeat each head along an axis; the copies of a head are adjacent.

    Args:
        heads: number of heads of the axis [heads · entries].
    """
    before, after = x.shape[:axis], x.shape[axis:][1:]
    repeated = jnp.repeat(x.reshape(*before, heads, -1, *after), times, len(before))
    return repeated.reshape(*before, -1, *after)


def repeat_key_heads(
    weights: Any, source: config.Model, target: config.Model, axis: int = -1
) -> Any:
    """Repeat each key/value head of the source up to the number that the target has."""
    before, after = (x.kv_heads or x.heads for x in (source, target))
    if before == after:
        return weights
    repeated = partial(repeat_heads, heads=before, times=after // before, axis=axis)
    return jax.tree.map(repeated, weights)


def named_options(options: config.Model, mechanism: str) -> dict[str, Any]:
    """Return the values of a mechanism's options that are keys of model.attention."""
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

    A token reads and writes a state of features × values, and is paired with the tokens
    of its chunk.

    Args:
        mixer: `symjax.layers.mixer.Mixer`.
        features: number of features of a query or key.
    """
    value, options = mixer.sizes.value_size, dict(mixer.options)
    pairs = min(options.get("chunk_size", 0), length) * (features + value)
    return mixer.sizes.queries * (pairs + 4 * features * value)


class Part(NamedTuple):
    """Additions of one mechanism to its layer; all are optional.

    `layer` is the attention layer, `model` the model's configuration, `source` and
    `target` the configurations of two models.

    Attributes:
        weights: (model, depth, sizes, rngs) → attributes of the layer by name:
            parameters, constants, modules or numbers.
        operands: (layer, x, operands) → the operands of a call, changed or added to.
        output: (layer, mixed, operands) → the output per head, before its norm.
        state: layer → arguments of the mechanism's empty state besides sizes and
            options.
        head_norm: True adds an RMSNorm per head, for recurrences whose rows are not
            divided by a denominator.
        options: (model, mechanism) → options of the mechanism. By default they are
            the keys of model.attention with the same names.
        keys: model.attention → names of its configuration keys that the part reads,
            except options of the mechanism.
        learned: values of model.attention.features, such as "hedgehog", whose maps have
            weights.
        feature_count: (model.attention, head size) → features of a query or key after
            the mechanism's map; by default the head size.
        flops: (mixer, model.attention, length) → operations per token without the
            projections; by default those of scores or of a recurrence.
        rules: sharding rules, (pattern of the path in the layer, mesh axes).
        owned: names of weights that conversion drops if only the source has them. If
            only the target has them, they keep their initial values.
        kept_constants: pairs (name of a constant, key of model.attention). Conversion
            keeps the constant if source and target have the same value of the key.
        convert: (weights, source, target) → the weights of a layer of the target.
        check: (source, target) → None; raises if the same weights compute another
            function in the target.
        features: options of the mechanism → the feature map φ, if the weight of a pair
            is φ(q)·φ(k) and φ is not random.
        exponential: whether weights are exp(score), divided by the sum of their row.
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
    kept_constants: tuple[tuple[str, str], ...] = ()
    convert: Callable[..., dict[str, Any]] | None = None
    check: Callable[[config.Model, config.Model], None] | None = None
    features: Callable[[dict[str, Any]], Any] | None = None
    exponential: bool = False
