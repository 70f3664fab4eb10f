"""Feature maps φ without random rows; the weight of a pair is φ(query)·φ(key).

`PLAIN` has the feature maps of linear attention by name; they have no parameters.
`UNIT` is the map of cosine attention. `hedgehog` and `t2r` are maps with learned
weights, which a layer applies before it calls `linear`. The maps of the Performer are
in `symjax.attention.random_features`.

If features change sign, the terms of φ(query)·φ(key) may cancel and lose digits. So
"squared", "taylor" and `UNIT` also have a function `pairs`, which computes the weights
of pairs without features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.arguments import check_floating
from symjax.attention.core.feature_maps import Features, LogFeatures
from symjax.attention.core.products import einsum, products
from symjax.attention.core.where import where

_NORM_EPSILON = 1e-6
PAIRS = "bkgth,bksh->bkgts"  # queries and keys → scores
Product = Callable[..., Array]  # an einsum


def plain(function: Callable[[Array], Array], **traits: Any) -> Features:
    """Return a feature map for `PLAIN` that is one function of queries and keys.

        PLAIN["softplus"] = plain(jax.nn.softplus)

    Args:
        function: acts on the last axis; it is the map of queries and of keys.
        traits: attributes of `Features`, by name.
    """

    def mapped(x: Array, parameters: None = None) -> LogFeatures:
        return LogFeatures(function(x), None, x if "pairs" in traits else None)

    return Features(mapped, mapped, **traits)


def _elu_plus_one(x: Array) -> Array:
    """Return elu(x) + 1, as eˣ for negative x: (eˣ − 1) + 1 would be 0 below −17."""
    return where(x > 0, x + 1, jnp.exp(where(x > 0, 0, x)))


def _relu2(x: Array) -> Array:
    """Return relu(x)²."""
    return jnp.square(jax.nn.relu(x))


def _squared(x: Array) -> Array:
    """Return all x_i x_j with i ≤ j. Products of these H (H + 1)/2 features are (q·k)².

    Pairs with i ≠ j are multiplied by √2. They are products of x with x rotated by 1,
    2, … H/2 places. If H is even, the rotation by H/2 places has each pair twice, and
    only its first half is taken.
    """
    size = x.shape[-1]
    ring = jnp.concatenate([x, x], axis=-1)
    pairs = [x * x]
    for distance in range(1, size // 2 + 1):
        count = size // 2 if 2 * distance == size else size
        other = ring[..., distance : distance + count]
        pairs.append(2**0.5 * x[..., :count] * other)
    return jnp.concatenate(pairs, axis=-1)


def _squared_pairs(
    product: Product, query: LogFeatures, key: LogFeatures, divisor: Array
) -> Array:
    """Return (q·k)² / divisor of all pairs."""
    scores = product(PAIRS, query.source, key.source)
    return scores * (scores / divisor)


def _taylor(x: Array) -> Array:
    """Return features whose products are 1 + s + s²/2, with s = q·k/√H."""
    size = x.shape[-1]
    squares = _squared(x) * (2 * size) ** -0.5
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x * size**-0.25, squares], -1)


def _taylor_pairs(
    product: Product, query: LogFeatures, key: LogFeatures, divisor: Array
) -> Array:
    """Return (1 + s + s²/2) / divisor of all pairs."""
    scores = product(PAIRS, query.source, key.source) * key.source.shape[-1] ** -0.5
    return 1 / divisor + scores / divisor + scores * (scores / divisor) / 2


class _Direction(NamedTuple):
    """x̂ = x / (|x| + 1e-6), and its length |x| / (|x| + 1e-6)."""

    unit: Float[Array, "*rows H"]
    length: Float[Array, "*rows"]  # |x̂|
    shortfall: Float[Array, "*rows"]  # 1 − |x̂|², without cancellation


class _Shifted(NamedTuple):
    """Vector and number of a query or key: 1 + cos = v_q·v_k + n_q + n_k."""

    vector: Float[Array, "*rows H"]
    number: Float[Array, "*rows"]


def _length(x: Array) -> Float[Array, "*rows"]:
    """Return |x|, with a gradient of 0 at 0."""
    square = einsum("...h,...h->...", x, x)
    tiny = float(jnp.finfo(square.dtype).tiny)
    return jnp.sqrt(where(square < tiny, tiny, square))


def _one_and_unit(x: Array, parameters: None = None) -> LogFeatures:
    """Return [1, x̂]. Products of these features are 1 + cos."""
    length = _length(x)
    inverse = 1 / (length + _NORM_EPSILON)
    unit = einsum("...h,...->...h", x, inverse)
    length, missing = length * inverse, _NORM_EPSILON * inverse
    shortfall = where(missing < 0.5, missing * (1 + length), 1 - length * length)
    features = jnp.concatenate([jnp.ones_like(unit[..., :1]), unit], -1)
    return LogFeatures(features, None, _Direction(unit, length, shortfall))


def _around_the_keys(query: LogFeatures, key: LogFeatures) -> tuple[_Shifted, _Shifted]:
    """Return vectors and numbers of queries and keys, small where 1 + cos is small.

    The vectors are q̂ + m and k̂ − m. 1 + cos does not depend on m, since

    1 + q̂·k̂ = |q̂ + k̂|²/2 + (1 − |q̂|²)/2 + (1 − |k̂|²)/2 and q̂ + k̂ = (q̂ + m) + (k̂ − m)

    m = max |k̂| Σ k̂ / |Σ k̂| has the direction of the mean key and the length of the
    longest k̂, so that k̂ − m is 0 if all keys are equal.
    """
    queries, keys = query.source, key.source
    units, lengths = jax.lax.stop_gradient((keys.unit, keys.length))
    mean = units.sum(axis=-2, keepdims=True)
    longest = lengths.max(axis=-1, keepdims=True)
    mean *= (longest / _length(mean))[..., None]
    row, column = queries.unit + mean[:, :, None], keys.unit - mean
    return _shifted(row, queries.shortfall), _shifted(column, keys.shortfall)


def _shifted(vector: Array, shortfall: Array) -> _Shifted:
    """Return the vector and half the sum of its squared length and the shortfall."""
    square = einsum("...h,...h->...", vector, vector)
    return _Shifted(vector, (square + shortfall) / 2)


def _centred(query: LogFeatures, key: LogFeatures) -> tuple[LogFeatures, LogFeatures]:
    """Return the features of 1 + cos that `Features.centred` describes."""
    (row, of_row), (column, of_column) = _around_the_keys(query, key)
    of_row, of_column = of_row[..., None], of_column[..., None]
    rows = of_row, jnp.ones_like(of_row), row
    columns = jnp.ones_like(of_column), of_column, column
    both = jnp.concatenate(rows, axis=-1), jnp.concatenate(columns, axis=-1)
    return LogFeatures(both[0], None), LogFeatures(both[1], None)


def _unit_pairs(
    product: Product, query: LogFeatures, key: LogFeatures, divisor: None
) -> Array:
    """Return 1 + cos of all pairs; 0 if it is less than the rounding error of 1."""
    (row, of_row), (column, of_column) = _around_the_keys(query, key)
    numbers = of_row[..., None] + of_column[:, :, None, None]
    scores = product(PAIRS, row, column) + numbers
    return where(scores > jnp.finfo(scores.dtype).eps / 2, scores, 0)


def hedgehog(
    x: Float[Array, "B T N H"], weight: Float[Array, "N H M"]
) -> Float[Array, "B T N 2M"]:
    """Return the learned features softmax([x W, −x W]).

    Pass them to `linear(features="identity")` as query and key. Cost O(T H M). The
    features are float32 at least.

    Raises:
        ValueError: the weight does not fit x.
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

    Pass them to `linear(features="identity")` as query and key. Cost O(T H M). The
    features are float32 at least. A query whose features are all 0 gets an output of 0.

    Raises:
        ValueError: the weight or the bias does not fit x.
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
UNIT = Features(
    _one_and_unit,
    _one_and_unit,
    pairs=_unit_pairs,
    signed=True,
    nonnegative_count=lambda size: 1,
    centred=_centred,
    bounded=True,
)
# Values of model.attention.features for the mechanism "linear".
PLAIN = {
    "elu": plain(_elu_plus_one, elementwise=True, in_kernels=True),
    "identity": IDENTITY,
    "relu": plain(jax.nn.relu, elementwise=True, in_kernels=True),
    "relu2": plain(_relu2, elementwise=True, in_kernels=True),
    "squared": plain(
        _squared, pairs=_squared_pairs, signed=True, nonnegative_count=lambda size: size
    ),
    "taylor": plain(
        _taylor, pairs=_taylor_pairs, signed=True, nonnegative_count=lambda size: 1
    ),
}
