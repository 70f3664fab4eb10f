"""Feature maps φ without random numbers; a pair then weighs φ(query)·φ(key).

`PLAIN` maps the names of linear attention to feature maps without parameters. `UNIT` is
the map of cosine attention. `hedgehog` and `t2r` are maps with learned weights, which a
layer applies itself. `symjax.attention.random_features` has the maps of the Performer.

A sum of products of features that change sign may cancel, and then loses digits. So
"squared", "taylor" and `UNIT` also have `pairs`, which computes the weights of pairs
without their features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.arguments import check_floating
from symjax.attention.core.feature_maps import Features, LogFeatures
from symjax.attention.core.products import einsum, products, squared_length

_NORM_EPSILON = 1e-6
PAIRS = "bkgth,bksh->bkgts"  # queries and keys → scores
Product = Callable[..., Array]  # an einsum


def plain(function: Callable[[Array], Array], **traits: Any) -> Features:
    """Return the entry of `PLAIN` for one function of queries and keys.

        PLAIN["softplus"] = plain(jax.nn.softplus)

    Args:
        function: acts on the last axis; it is the map of queries and of keys.
        traits: attributes of `Features`.
    """

    def mapped(x: Array, parameters: None = None) -> LogFeatures:
        return LogFeatures(function(x), None)

    return Features(mapped, mapped, **traits)


def _elu_plus_one(x: Array) -> Array:
    """Return elu(x) + 1, and eˣ for negative x: (eˣ − 1) + 1 would be 0 below −17."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def _relu2(x: Array) -> Array:
    """Return relu(x)²."""
    return jnp.square(jax.nn.relu(x))


def _squared(x: Array) -> Array:
    """Return all x_i x_j with i ≤ j. Products of these H (H + 1)/2 features are (q·k)².

    Pairs with i ≠ j are multiplied by √2. They are computed as products of x with x
    turned by 1, 2, … H/2 places, so that each product is one of long vectors. A turn by
    H/2 places has each pair twice; only its first half is taken.
    """
    size = x.shape[-1]
    ring = jnp.concatenate([x, x], axis=-1)
    pairs = [x * x]
    for distance in range(1, size // 2 + 1):
        count = size // 2 if 2 * distance == size else size
        other = ring[..., distance : distance + count]
        pairs.append(2**0.5 * x[..., :count] * other)
    return jnp.concatenate(pairs, axis=-1)


def _squared_pairs(product: Product, query: Array, key: Array, divisor: Array) -> Array:
    """Return (q·k)² / divisor of all pairs."""
    scores = product(PAIRS, query, key)
    return scores * (scores / divisor)


def _taylor(x: Array) -> Array:
    """Return features whose products are 1 + s + s²/2, with s = q·k/√H.

    That is exp(s) to the second order.
    """
    size = x.shape[-1]
    squares = _squared(x) * (2 * size) ** -0.5
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x * size**-0.25, squares], -1)


def _taylor_pairs(product: Product, query: Array, key: Array, divisor: Array) -> Array:
    """Return (1 + s + s²/2) / divisor of all pairs."""
    scores = product(PAIRS, query, key) * key.shape[-1] ** -0.5
    return 1 / divisor + scores / divisor + scores * (scores / divisor) / 2


class _Direction(NamedTuple):
    """x̂ = x / (|x| + 1e-6), and its length |x| / (|x| + 1e-6)."""

    unit: Float[Array, "*rows H"]
    length: Float[Array, "*rows 1"]  # |x̂|
    half_shortfall: Float[Array, "*rows 1"]  # (1 − |x̂|²)/2, without cancellation


def _length(x: Array) -> Float[Array, "*rows 1"]:
    """Return |x|, with a gradient of 0 at 0."""
    square = squared_length(x)
    return jnp.sqrt(jnp.maximum(square, jnp.finfo(square.dtype).tiny))


def _direction(x: Float[Array, "*rows H"]) -> _Direction:
    """Return x̂, its length and (1 − |x̂|²)/2."""
    length = _length(x)
    inverse = 1 / (length + _NORM_EPSILON)
    unit = einsum("...h,...i->...h", x, inverse)
    length, missing = length * inverse, _NORM_EPSILON * inverse
    shortfall = jnp.where(
        missing < 0.5, missing * (1 - missing / 2), (1 - length * length) / 2
    )
    return _Direction(unit, length, shortfall)


def _one_and_unit(x: Array) -> Array:
    """Return [1, x̂]. Products of these features are 1 + cos."""
    unit = einsum("...h,...i->...h", x, 1 / (_length(x) + _NORM_EPSILON))
    return jnp.concatenate([jnp.ones_like(unit[..., :1]), unit], -1)


def _around_the_keys(
    query: Float[Array, "B K G T H"], key: Float[Array, "B K S H"]
) -> tuple[LogFeatures, LogFeatures]:
    """Return other features of 1 + cos, which are small if 1 + cos is small.

    They cancel less than [1, x̂]. With m the direction of the keys,

    1 + q̂·k̂ = |q̂ + k̂|²/2 + (1 − |q̂|²)/2 + (1 − |k̂|²)/2 and q̂ + k̂ = (q̂ + m) + (k̂ − m)

    The length of m = max |k̂| Σ k̂ / |Σ k̂| is that of the longest key, so that the
    features also keep their digits if all keys are far shorter than 1e-6.
    """
    queries, keys = _direction(query), _direction(key)
    mean = keys.unit.sum(axis=-2, keepdims=True)
    longest = keys.length.max(-2, keepdims=True, initial=0)
    mean, longest = jax.lax.stop_gradient((mean, longest))
    mean *= longest / _length(mean)
    row, column = queries.unit + mean[:, :, None], keys.unit - mean
    row_one, column_one = jnp.ones_like(queries.length), jnp.ones_like(keys.length)
    rows = [squared_length(row) / 2 + queries.half_shortfall, row_one, row]
    columns = [column_one, squared_length(column) / 2 + keys.half_shortfall, column]
    both = jnp.concatenate(rows, axis=-1), jnp.concatenate(columns, axis=-1)
    return LogFeatures(both[0], None), LogFeatures(both[1], None)


def _unit_pairs(product: Product, query: Array, key: Array, divisor: None) -> Array:
    """Return 1 + cos of all pairs; 0 if it is less than the rounding error of 1."""
    row, column = (x.amplitude for x in _around_the_keys(query, key))
    scores = product(PAIRS, row, column)
    return jnp.where(scores > jnp.finfo(scores.dtype).eps / 2, scores, 0)


def hedgehog(
    x: Float[Array, "B T N H"], weight: Float[Array, "N H M"]
) -> Float[Array, "B T N 2M"]:
    """Return the learned features softmax([x W, −x W]).

    Pass them to `linear(features="identity")` as query and key. Cost O(T H M). They are
    float32 at least, as the features of `PLAIN` are.

    Raises:
        ValueError: a weight that does not fit.
    Source: Zhang et al. 2024, arXiv:2402.04347.
    """
    projected = _projected("hedgehog", x, weight)
    return jax.nn.softmax(jnp.concatenate([projected, -projected], axis=-1), axis=-1)


def t2r(
    x: Float[Array, "B T N H"],
    weight: Float[Array, "N H M"],
    bias: Float[Array, "N M"],
) -> Float[Array, "B T N M"]:
    """Return the learned features relu(x W + b).

    Pass them to `linear(features="identity")` as query and key. Cost O(T H M). They are
    float32 at least, as the features of `PLAIN` are. A query whose features are all 0
    gets an output of 0.

    Raises:
        ValueError: a weight or a bias that does not fit.
    Source: Kasai et al. 2021, arXiv:2103.13076.
    """
    projected = _projected("t2r", x, weight)
    check_floating("t2r", bias=bias)
    if bias.shape != projected.shape[2:]:
        raise ValueError(
            f"t2r: bias must be [N M] of x {x.shape} and weight {weight.shape}, "
            f"got {bias.shape}"
        )
    return jax.nn.relu(projected + bias[None, None].astype(projected.dtype))


def _projected(who: str, x: Array, weight: Array) -> Float[Array, "B T N M"]:
    """Return x W, in float32 at least; raise if the weight does not fit."""
    check_floating(who, x=x, weight=weight)
    if x.ndim != 4 or weight.ndim != 3 or weight.shape[:2] != x.shape[2:]:
        raise ValueError(
            f"{who}: weight must be [N H M] for x [B T N H], got weight "
            f"{weight.shape} and x {x.shape}"
        )
    dtype = jnp.promote_types(jnp.result_type(x, weight), jnp.float32)
    wide = x.astype(dtype), weight.astype(dtype)
    return products(x, weight)("btnh,nhm->btnm", *wide)


IDENTITY = plain(lambda x: x, signed=True)
UNIT = plain(
    _one_and_unit,
    pairs=_unit_pairs,
    signed=True,
    nonnegative=lambda size: 1,
    centred=_around_the_keys,
    bounded=True,
)
# Values of model.attention.features for the mechanism "linear".
PLAIN = {
    "elu": plain(_elu_plus_one, elementwise=True),
    "identity": IDENTITY,
    "relu": plain(jax.nn.relu, elementwise=True),
    "relu2": plain(_relu2, elementwise=True),
    "squared": plain(
        _squared, pairs=_squared_pairs, signed=True, nonnegative=lambda size: size
    ),
    "taylor": plain(
        _taylor, pairs=_taylor_pairs, signed=True, nonnegative=lambda size: 1
    ),
}
