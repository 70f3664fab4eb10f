"""Types of feature maps: features with exponents, and the maps that make them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Below this a chunk that refers to its highest exponent has lost its early rows.
LOST = 1e-20


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


def finite(exponent: Array) -> Array:
    """An exponent to subtract: 0 where no key was seen, since −inf − (−inf) is NaN."""
    return jnp.where(jnp.isneginf(exponent), 0, exponent)


def row_shift(query: LogFeatures) -> Array:
    """The largest exponent of each row, to subtract; a constant to the gradient."""
    highest = query.exponent.max(axis=-1, keepdims=True)
    return finite(jax.lax.stop_gradient(highest))


class Features(NamedTuple):
    """How queries and keys become features: (array, parameters) → LogFeatures.

    They act on the last axis only. Both have the same parts, and what cancels in a
    row's ratio may be left out of the query's.

    Attributes:
        pairs: (einsum, query, key, divisor) → φ(q)·φ(k) / divisor of all pairs, where a
            sum over features that change sign would lose digits.
        signed: whether features change sign, so that sums of products may cancel.
        leading: H → how many of the first features are never negative, where no pair
            weighs less than 0 either though other features change sign.
        around: (query, key) → other features of the same products, which cancel less.
            They are made for these keys, so no state holds them; a key's first is 1.
        bounded: whether no feature exceeds 1 and no pair weighs less than 0. The mean
            weight of a row then has a known rounding error, so that kernels can add up
            features that change sign.
        elementwise: whether each feature is a function of one number, never negative,
            so that kernels can compute it.
        exponential: the signs s of features exp(s w·x √scale + offset) of random rows
            w, times exp(−scale |x|²/2) for a key; empty for other features.
        exponents: whether features have an exponent, so that rows may underflow.
    """

    query: Callable[[Array, Any], LogFeatures]
    key: Callable[[Array, Any], LogFeatures]
    pairs: Callable[[Callable, Array, Array, Any], Array] | None = None
    signed: bool = False
    leading: Callable[[int], int] | None = None
    around: Callable[[Array, Array], tuple[LogFeatures, LogFeatures]] | None = None
    bounded: bool = False
    elementwise: bool = False
    exponential: tuple[int, ...] = ()
    exponents: bool = False


class RandomFeatures(NamedTuple):
    """The parameters of random features: rows w, the scale, log factors of the rows."""

    rows: Float[Array, "M H"]
    scale: Float[Array, ""]
    offset: Float[Array, " M"] | None = None
