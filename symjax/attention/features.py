"""Feature maps φ, with which attention is φ(query)·φ(key).

A mechanism of the linear family is its feature map: `execution.py` runs all of them.
Features come as an amplitude times a power of e, and the engine keeps exponents below a
running maximum, so that nothing overflows and nothing that matters is lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_NORM_EPSILON = 1e-6


class Powers(NamedTuple):
    """Features φ = amplitude · exp(exponent), without an amplitude of 1 or exponent 0.

    The last axis is that of features; of the exponent it is 1 where all share it.
    """

    amplitude: Any  # [… M], or None
    exponent: Any  # [… M] or [… 1], or None

    def raised(self, exponent: Array) -> "Powers":
        """φ · exp(exponent)."""
        return self._replace(exponent=self.exponent + exponent)

    def where(self, keep: Array) -> "Powers":
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
    """How queries and keys become features: functions (array, parameters) → Powers.

    They act on the last axis only. Both have the same parts, and what cancels in a
    row's ratio may be left out of the query's.
    """

    query: Callable[[Array, Any], Powers]
    key: Callable[[Array, Any], Powers]


class Draw(NamedTuple):
    """What random features are made of: rows w, the scale, and log factors of the w."""

    rows: Float[Array, "M H"]
    scale: Float[Array, ""]
    offset: Float[Array, " M"] | None = None


def _project(x: Array, draw: Draw) -> Array:
    """W x √scale in full precision: an error in the exponent is a factor in φ."""
    return jnp.einsum(
        "...h,mh->...m",
        x * jnp.sqrt(draw.scale).astype(x.dtype),
        draw.rows.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )


def _positive_query(x: Array, draw: Draw) -> Powers:
    """log φ = w·x' + offset without −|x'|²/2, which cancels in the ratio."""
    exponent = _project(x, draw)
    if draw.offset is not None:
        shape = (1,) * (x.ndim - 1) + draw.offset.shape
        exponent += draw.offset.astype(x.dtype).reshape(shape)
    return Powers(None, exponent)


def _hyperbolic_query(x: Array, draw: Draw) -> Powers:
    """Both signs of every projection: (φ(x)·φ(y)) averages to cosh, with less noise."""
    projected = _project(x, draw)
    return Powers(None, jnp.concatenate([projected, -projected], axis=-1))


def _trigonometric_query(x: Array, draw: Draw) -> Powers:
    """[cos w·x', sin w·x']: (φ(x)·φ(y)) averages to exp(−|x' − y'|²/2)."""
    projected = _project(x, draw)
    waves = jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1)
    return Powers(waves, jnp.zeros_like(x[..., :1]))


def _relu_of_projection(x: Array, draw: Draw) -> Powers:
    return Powers(jax.nn.relu(_project(x, draw)), None)


def _with_norm(query: Callable[[Array, Draw], Powers], sign: int = -1) -> Features:
    """Random features of exp(q·k): the key's are the query's times exp(±|x'|²/2)."""

    def key(x: Array, draw: Draw) -> Powers:
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        return query(x, draw).raised(0.5 * sign * draw.scale.astype(x.dtype) * square)

    return Features(query, key)


def _plain(function: Callable[[Array], Array]) -> Features:
    def both(x: Array, parameters: None = None) -> Powers:
        return Powers(function(x), None)

    return Features(both, both)


def _unit(x: Array) -> Array:
    """[1, x / (|x| + 1e-6)]: products of these are 1 + cos."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    norm = jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)
    return jnp.concatenate([jnp.ones_like(square), x / (norm + _NORM_EPSILON)], axis=-1)


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


def _taylor(x: Array) -> Array:
    """Products of these are 1 + s + s²/2, exp(s) to the second order; s = q·k/√H."""
    size = x.shape[-1]
    squares = _squared(x) * (2 * size) ** -0.5
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x * size**-0.25, squares], -1)


IDENTITY = _plain(lambda x: x)
UNIT = _plain(_unit)
PLAIN = {
    "elu": _plain(_elu_plus_one),
    "identity": IDENTITY,
    "relu": _plain(jax.nn.relu),
    "relu2": _plain(_relu2),
    "squared": _plain(_squared),
    "taylor": _plain(_taylor),
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
