"""Random features of the Performer: of exp(q·k), as powers of e."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import einsum, sum_dtype
from symjax.attention.features import Features, LogFeatures


class RandomFeatures(NamedTuple):
    """The parameters of random features: rows w, the scale, log factors of the rows."""

    rows: Float[Array, "M H"]
    scale: Float[Array, ""]
    offset: Float[Array, " M"] | None = None


def _project(x: Array, random: RandomFeatures) -> Array:
    """W x √scale in full precision: an error in the exponent is a factor in φ.

    bfloat16 inputs have 8 bits, so that three products with bfloat16 parts of W √scale,
    summed in float32, are as exact as one of float32, and faster.
    """
    if x.dtype != jnp.bfloat16:
        x = x * jnp.sqrt(random.scale).astype(x.dtype)
        return einsum("...h,mh->...m", x, random.rows.astype(x.dtype))
    rest = (random.rows * jnp.sqrt(random.scale)).astype(jnp.float32)
    parts = []
    for _ in range(2):
        parts.append(jax.lax.stop_gradient(jax.lax.reduce_precision(rest, 8, 7)))
        rest = rest - parts[-1]
    parts = jnp.concatenate([rest, *parts[::-1]], axis=-1)
    return einsum("...h,mh->...m", jnp.concatenate([x] * 3, axis=-1), parts)


def _positive_query(x: Array, random: RandomFeatures) -> LogFeatures:
    """log φ = w·x' + offset without −|x'|²/2, which cancels in the ratio."""
    exponent = _project(x, random)
    if random.offset is not None:
        shape = (1,) * (x.ndim - 1) + random.offset.shape
        exponent += random.offset.astype(exponent.dtype).reshape(shape)
    return LogFeatures(None, exponent)


def _hyperbolic_query(x: Array, random: RandomFeatures) -> LogFeatures:
    """Both signs of every projection: (φ(x)·φ(y)) averages to cosh, with less noise."""
    projected = _project(x, random)
    return LogFeatures(None, jnp.concatenate([projected, -projected], axis=-1))


def _trigonometric_query(x: Array, random: RandomFeatures) -> LogFeatures:
    """[cos w·x', sin w·x']: (φ(x)·φ(y)) averages to exp(−|x' − y'|²/2)."""
    projected = _project(x, random)
    waves = jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1)
    return LogFeatures(waves, jnp.zeros_like(waves[..., :1]))


def _relu_of_projection(x: Array, random: RandomFeatures) -> LogFeatures:
    return LogFeatures(jax.nn.relu(_project(x, random)), None)


def _with_norm(
    query: Callable[[Array, RandomFeatures], LogFeatures],
    sizes: Callable[[int, RandomFeatures], tuple[int, int]],
    sign: int = -1,
) -> Features:
    """Random features of exp(q·k): the key's are the query's times exp(±|x'|²/2)."""

    def key(x: Array, random: RandomFeatures) -> LogFeatures:
        features, x = query(x, random), x.astype(sum_dtype(x))
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        return features.raised(0.5 * sign * random.scale.astype(x.dtype) * square)

    return Features(query, key, sizes, signed=sign > 0, rounded=sign < 0)


def _one(size: int, random: RandomFeatures) -> tuple[int, int]:
    """A feature of each row, with its exponent."""
    return len(random.rows), len(random.rows)


def _two(size: int, random: RandomFeatures) -> tuple[int, int]:
    return 2 * len(random.rows), 2 * len(random.rows)


def _waves(size: int, random: RandomFeatures) -> tuple[int, int]:
    """Two features of each row; all share an exponent."""
    return 2 * len(random.rows), 1


def _no_exponent(size: int, random: RandomFeatures) -> tuple[int, int]:
    return len(random.rows), 0


_POSITIVE = _with_norm(_positive_query, _one)
RANDOM = {
    "favor#": _POSITIVE,
    "favor++": _POSITIVE,
    "hyperbolic": _with_norm(_hyperbolic_query, _two),
    "positive": _POSITIVE,
    "relu": Features(_relu_of_projection, _relu_of_projection, _no_exponent),
    "trigonometric": _with_norm(_trigonometric_query, _waves, sign=1),
}
