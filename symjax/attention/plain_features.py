"""Features without parameters: of linear attention by name, and of 1 + cos.

Weights of pairs are computed without features where these would cancel.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import einsum
from symjax.attention.features import Features, LogFeatures, squared_length

_NORM_EPSILON = 1e-6
PAIRS = "bkgth,bksh->bkgts"
Product = Callable[..., Array]  # an einsum


def plain(
    function: Callable[[Array], Array],
    pairs: Callable | None = None,
    signed: bool = False,
    leading: Callable[[int], int] | None = None,
    around: Callable | None = None,
    bounded: bool = False,
) -> Features:
    """Return the entry of `PLAIN` for a function of the last axis: jax.nn.softplus.

    The other arguments are those of `Features`.
    """

    def both(x: Array, parameters: None = None) -> LogFeatures:
        return LogFeatures(function(x), None)

    return Features(both, both, pairs, signed, leading, around, bounded)


def _length(x: Array) -> Array:
    """|x| [… 1], with a gradient of 0 at 0."""
    square = squared_length(x)
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def _unit(x: Array) -> Array:
    """[1, x / (|x| + 1e-6)]: products of these are 1 + cos."""
    length = _length(x)
    unit = einsum("...h,...i->...h", x, 1 / (length + _NORM_EPSILON))
    return jnp.concatenate([jnp.ones_like(length), unit], -1)


def _unit_around(
    query: Float[Array, "B K G T H"], key: Float[Array, "B K S H"]
) -> tuple[LogFeatures, LogFeatures]:
    """Features of 1 + cos that are small where it is: around m, the keys' direction.

    1 + q̂·k̂ = |q̂ + k̂|²/2 + (1 − |q̂|²)/2 + (1 − |k̂|²)/2 and q̂ + k̂ = (q̂ + m) + (k̂ − m)

    m = max |k̂| Σ k̂ / |Σ k̂|: beside it no vectors far below 1e-6 are lost.
    """
    unit, other = _unit(query)[..., 1:], _unit(key)[..., 1:]
    lengths = _length(key)
    longest = (lengths / (lengths + _NORM_EPSILON)).max(-2, keepdims=True, initial=0)
    mean = other.sum(axis=-2, keepdims=True)
    mean, longest = jax.lax.stop_gradient((mean, longest))
    length = _length(mean)
    mean *= longest / jnp.where(length > 0, length, jnp.inf)
    row, column = unit + mean[:, :, None], other - mean
    one, ones = jnp.ones_like(row[..., :1]), jnp.ones_like(column[..., :1])
    rows = [squared_length(row) / 2 + _half_shortfall(query), one, row]
    columns = [ones, squared_length(column) / 2 + _half_shortfall(key), column]
    both = jnp.concatenate(rows, axis=-1), jnp.concatenate(columns, axis=-1)
    return LogFeatures(both[0], None), LogFeatures(both[1], None)


def _half_shortfall(x: Array) -> Array:
    """(1 − |x̂|²)/2 with x̂ = x / (|x| + 1e-6): no form cancels, nor its derivative."""
    length = _length(x)
    unit, missing = (y / (length + _NORM_EPSILON) for y in (length, _NORM_EPSILON))
    return jnp.where(missing < 0.5, missing * (1 - missing / 2), (1 - unit * unit) / 2)


def _unit_pairs(product: Product, query: Array, key: Array, divisor: Array) -> Array:
    """1 + cos, and 0 where that is less than the rounding error of 1."""
    row, column = (x.amplitude for x in _unit_around(query, key))
    scores = product(PAIRS, row, column)
    return jnp.where(scores > jnp.finfo(scores.dtype).eps / 2, scores, 0) / divisor


def _elu_plus_one(x: Array) -> Array:
    """elu(x) + 1, with eˣ itself below 0: (eˣ − 1) + 1 is 0 from x = −17 on."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def _squared(x: Array) -> Array:
    """All x_i x_j with i ≤ j: products of these are (q·k)².

    Pairs are taken by their distance on a ring, in whole vectors; at distance H/2 each
    pair would come twice.
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
    scores = product(PAIRS, query, key)
    return scores * (scores / divisor)


def _taylor(x: Array) -> Array:
    """Products of these are 1 + s + s²/2, exp(s) to the second order; s = q·k/√H."""
    size = x.shape[-1]
    squares = _squared(x) * (2 * size) ** -0.5
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x * size**-0.25, squares], -1)


def _taylor_pairs(product: Product, query: Array, key: Array, divisor: Array) -> Array:
    scores = product(PAIRS, query, key) * key.shape[-1] ** -0.5
    return 1 / divisor + scores / divisor + scores * (scores / divisor) / 2


IDENTITY = plain(lambda x: x, signed=True)
UNIT = plain(_unit, _unit_pairs, True, lambda size: 1, _unit_around, bounded=True)
PLAIN = {
    "elu": plain(_elu_plus_one),
    "identity": IDENTITY,
    "relu": plain(jax.nn.relu),
    "relu2": plain(_relu2),
    "squared": plain(_squared, _squared_pairs, True, lambda size: size),
    "taylor": plain(_taylor, _taylor_pairs, True, lambda size: 1),
}
ELEMENTWISE = PLAIN["elu"], PLAIN["relu"], PLAIN["relu2"]  # and never negative
