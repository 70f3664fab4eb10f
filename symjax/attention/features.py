"""Feature maps φ, with which the weight of a pair is φ(query)·φ(key).

Features are an amplitude times a power of e. `normalised.py` keeps the exponents below
a running maximum, so that nothing overflows and nothing that matters is lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_NORM_EPSILON = 1e-6


class LogFeatures(NamedTuple):
    """Features φ = amplitude · exp(exponent), without an amplitude of 1 or exponent 0.

    The last axis is that of features; of the exponent it is 1 where all share it.
    """

    amplitude: Any  # [… M], or None
    exponent: Any  # [… M] or [… 1], or None

    def raised(self, exponent: Array) -> "LogFeatures":
        """φ · exp(exponent)."""
        return self._replace(exponent=self.exponent + exponent)

    def where(self, keep: Array) -> "LogFeatures":
        """φ, and 0 where keep says no. keep lacks the axis of features."""
        keep = keep[..., None]
        if self.exponent is None:
            return self._replace(amplitude=jnp.where(keep, self.amplitude, 0))
        return self._replace(exponent=jnp.where(keep, self.exponent, -jnp.inf))

    def weights(self) -> Array:
        """φ itself."""
        if self.exponent is None:
            return self.amplitude
        powers = jnp.exp(self.exponent)
        return powers if self.amplitude is None else self.amplitude * powers


class Features(NamedTuple):
    """How queries and keys become features: (array, parameters) → LogFeatures.

    They act on the last axis only. Both have the same parts, and what cancels in a
    row's ratio may be left out of the query's.

    Attributes:
        pairs: (query, key, divisor) → φ(q)·φ(k) / divisor of all pairs, where a sum
            over features that change sign would lose digits.
        leading: H → how many of the first features are never negative, where no pair
            weighs less than 0 either though other features change sign.
        around: (query, key) → other features of the same products, which cancel less.
            They are made for these keys, so no state holds them; a key's first is 1.
    """

    query: Callable[[Array, Any], LogFeatures]
    key: Callable[[Array, Any], LogFeatures]
    pairs: Callable[[Array, Array, Array], Array] | None = None
    leading: Callable[[int], int] | None = None
    around: Callable[[Array, Array], tuple[LogFeatures, LogFeatures]] | None = None


class RandomFeatures(NamedTuple):
    """The parameters of random features: rows w, the scale, log factors of the rows."""

    rows: Float[Array, "M H"]
    scale: Float[Array, ""]
    offset: Float[Array, " M"] | None = None


def _project(x: Array, random: RandomFeatures) -> Array:
    """W x √scale in full precision: an error in the exponent is a factor in φ."""
    return jnp.einsum(
        "...h,mh->...m",
        x * jnp.sqrt(random.scale).astype(x.dtype),
        random.rows.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )


def _positive_query(x: Array, random: RandomFeatures) -> LogFeatures:
    """log φ = w·x' + offset without −|x'|²/2, which cancels in the ratio."""
    exponent = _project(x, random)
    if random.offset is not None:
        shape = (1,) * (x.ndim - 1) + random.offset.shape
        exponent += random.offset.astype(x.dtype).reshape(shape)
    return LogFeatures(None, exponent)


def _hyperbolic_query(x: Array, random: RandomFeatures) -> LogFeatures:
    """Both signs of every projection: (φ(x)·φ(y)) averages to cosh, with less noise."""
    projected = _project(x, random)
    return LogFeatures(None, jnp.concatenate([projected, -projected], axis=-1))


def _trigonometric_query(x: Array, random: RandomFeatures) -> LogFeatures:
    """[cos w·x', sin w·x']: (φ(x)·φ(y)) averages to exp(−|x' − y'|²/2)."""
    projected = _project(x, random)
    waves = jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1)
    return LogFeatures(waves, jnp.zeros_like(x[..., :1]))


def _relu_of_projection(x: Array, random: RandomFeatures) -> LogFeatures:
    return LogFeatures(jax.nn.relu(_project(x, random)), None)


def _with_norm(
    query: Callable[[Array, RandomFeatures], LogFeatures], sign: int = -1
) -> Features:
    """Random features of exp(q·k): the key's are the query's times exp(±|x'|²/2)."""

    def key(x: Array, random: RandomFeatures) -> LogFeatures:
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        return query(x, random).raised(
            0.5 * sign * random.scale.astype(x.dtype) * square
        )

    return Features(query, key)


def _plain(
    function: Callable[[Array], Array],
    pairs: Callable | None = None,
    leading: Callable[[int], int] | None = None,
    around: Callable | None = None,
) -> Features:
    def both(x: Array, parameters: None = None) -> LogFeatures:
        return LogFeatures(function(x), None)

    return Features(both, both, pairs, leading, around)


def _length(x: Array) -> Array:
    """|x| [… 1], with a gradient of 0 at 0."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def _unit(x: Array) -> Array:
    """[1, x / (|x| + 1e-6)]: products of these are 1 + cos."""
    length = _length(x)
    return jnp.concatenate([jnp.ones_like(length), x / (length + _NORM_EPSILON)], -1)


def _unit_around(
    query: Float[Array, "B K G T H"], key: Float[Array, "B K S H"]
) -> tuple[LogFeatures, LogFeatures]:
    """Features of 1 + cos that are small where it is: around m, the keys' direction.

    1 + q̂·k̂ = |q̂ + k̂|²/2 + (1 − |q̂|²)/2 + (1 − |k̂|²)/2 and q̂ + k̂ = (q̂ + m) + (k̂ − m)
    """
    unit, other = _unit(query)[..., 1:], _unit(key)[..., 1:]
    mean = jax.lax.stop_gradient(other.sum(axis=-2, keepdims=True))
    mean = mean / jnp.maximum(_length(mean), jnp.finfo(mean.dtype).tiny)
    row, column = unit + mean[:, :, None], other - mean
    one, ones = jnp.ones_like(row[..., :1]), jnp.ones_like(column[..., :1])
    rows = [_half_square(row) + _half_shortfall(query), one, row]
    columns = [ones, _half_square(column) + _half_shortfall(key), column]
    both = jnp.concatenate(rows, axis=-1), jnp.concatenate(columns, axis=-1)
    return LogFeatures(both[0], None), LogFeatures(both[1], None)


def _half_square(x: Array) -> Array:
    return jnp.sum(x * x, axis=-1, keepdims=True) / 2


def _half_shortfall(x: Array) -> Array:
    """(1 − |x̂|²)/2 with x̂ = x / (|x| + 1e-6)."""
    length = _length(x)
    missing = _NORM_EPSILON / (length + _NORM_EPSILON)
    return missing * (1 - missing / 2)


def _unit_pairs(query: Array, key: Array, divisor: Array) -> Array:
    """1 + cos, and 0 where that is less than the rounding error of 1."""
    row, column = (x.amplitude for x in _unit_around(query, key))
    scores = _products(row, column)
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


def _products(query: Array, key: Array) -> Float[Array, "B K G T S"]:
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("bkgth,bksh->bkgts", query, key, precision=exact)


def _squared_pairs(query: Array, key: Array, divisor: Array) -> Array:
    products = _products(query, key)
    return products * (products / divisor)


def _taylor(x: Array) -> Array:
    """Products of these are 1 + s + s²/2, exp(s) to the second order; s = q·k/√H."""
    size = x.shape[-1]
    squares = _squared(x) * (2 * size) ** -0.5
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x * size**-0.25, squares], -1)


def _taylor_pairs(query: Array, key: Array, divisor: Array) -> Array:
    scores = _products(query, key) * key.shape[-1] ** -0.5
    return 1 / divisor + scores / divisor + scores * (scores / divisor) / 2


IDENTITY = _plain(lambda x: x)
UNIT = _plain(_unit, _unit_pairs, lambda size: 1, _unit_around)
PLAIN = {
    "elu": _plain(_elu_plus_one),
    "identity": IDENTITY,
    "relu": _plain(jax.nn.relu),
    "relu2": _plain(_relu2),
    "squared": _plain(_squared, _squared_pairs, lambda size: size),
    "taylor": _plain(_taylor, _taylor_pairs, lambda size: 1),
}
_POSITIVE = _with_norm(_positive_query)
RANDOM = {
    "favor#": _POSITIVE,
    "favor++": _POSITIVE,
    "hyperbolic": _with_norm(_hyperbolic_query),
    "positive": _POSITIVE,
    "relu": Features(_relu_of_projection, _relu_of_projection),
    "trigonometric": _with_norm(_trigonometric_query, sign=1),
}


def named(who: str, table: dict[str, Features], name: str) -> Features:
    """The entry of a table of features, or an error that lists the table."""
    if name not in table:
        raise ValueError(
            f"{who}: features {name!r} is unknown: choose from {', '.join(table)}"
        )
    return table[name]


def hedgehog(
    x: Float[Array, "B T N H"], weight: Float[Array, "N H M"]
) -> Float[Array, "B T N 2M"]:
    """Learned features softmax([x W, −x W]) for `linear(features="identity")`.

    Cost: O(T H M). In float32 at least, as the features that are given by name.

    Raises:
        ValueError: a weight that does not fit.
    Source: Zhang et al. 2024, arXiv:2402.04347.
    """
    projected = _learned("hedgehog", x, weight)
    return jax.nn.softmax(jnp.concatenate([projected, -projected], axis=-1), axis=-1)


def t2r(
    x: Float[Array, "B T N H"],
    weight: Float[Array, "N H M"],
    bias: Float[Array, "N M"],
) -> Float[Array, "B T N M"]:
    """Learned features relu(x W + b) for `linear(features="identity")`.

    Cost: O(T H M). In float32 at least, as the features that are given by name. A row
    whose features are all 0 gets an output of 0.

    Raises:
        ValueError: a weight or a bias that does not fit.
    Source: Kasai et al. 2021, arXiv:2103.13076.
    """
    projected = _learned("t2r", x, weight)
    if bias.shape != projected.shape[2:]:
        raise ValueError(
            f"t2r: bias must be [N M] of x {x.shape} and weight {weight.shape}, "
            f"got {bias.shape}"
        )
    return jax.nn.relu(projected + bias[None, None].astype(projected.dtype))


def _learned(who: str, x: Array, weight: Array) -> Array:
    if x.ndim != 4 or weight.ndim != 3 or weight.shape[:2] != x.shape[2:]:
        raise ValueError(
            f"{who}: weight must be [N H M] for x [B T N H], got weight "
            f"{weight.shape} and x {x.shape}"
        )
    dtype = jnp.promote_types(jnp.result_type(x, weight), jnp.float32)
    return jnp.einsum(
        "btnh,nhm->btnm",
        x.astype(dtype),
        weight.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,
    )
