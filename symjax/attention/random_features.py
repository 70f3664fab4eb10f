"""Random features, whose products average to a function of query and key."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.features import Features, LogFeatures


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

    return Features(query, key, signed=sign > 0)


_POSITIVE = _with_norm(_positive_query)
RANDOM = {
    "favor#": _POSITIVE,
    "favor++": _POSITIVE,
    "hyperbolic": _with_norm(_hyperbolic_query),
    "positive": _POSITIVE,
    "relu": Features(_relu_of_projection, _relu_of_projection),
    "trigonometric": _with_norm(_trigonometric_query, sign=1),
}
