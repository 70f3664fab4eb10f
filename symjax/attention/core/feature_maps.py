"""Feature maps φ of linear attention: their results, properties and parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.arguments import check_choice
from symjax.attention.core.where import where

# The denominator of a row is divided by exp(shift), so that it does not overflow, with
# shift = max over features of (exponent of the query + c). Here c is the largest
# exponent of the feature in the state and in all keys of the chunk. If a later key,
# which the row does not see, has a much larger exponent, all terms of the row are far
# below 1. The row has underflowed if Σ |terms of the denominator| is below 1e-20 =
# e⁻⁴⁶.
UNDERFLOW = 1e-20


class LogFeatures(NamedTuple):
    """Features φ = amplitude · exp(exponent), along the last axis.

    An amplitude of None is 1, an exponent of None is 0. If all features share one
    exponent, the last axis of `exponent` has length 1.

    Attributes:
        source: the arrays that `Features.pairs` and `Features.centred` compute with,
            for instance the vector that φ maps; None for maps without these functions.
    """

    amplitude: Any  # [… M], or None
    exponent: Any  # [… M] or [… 1], or None
    source: Any = None

    def times_exp(self, exponent: Array) -> "LogFeatures":
        """Return φ · exp(exponent)."""
        return self._replace(exponent=self.exponent + exponent)

    def where(self, keep: Array) -> "LogFeatures":
        """Return φ where `keep` is True, else 0; `keep` has no axis of features.

        The source is not changed.
        """
        keep = keep[..., None]
        if self.exponent is None:
            return self._replace(amplitude=where(keep, self.amplitude, 0))
        return self._replace(exponent=where(keep, self.exponent, -jnp.inf))

    def weights(self) -> Array:
        """Return φ as one array."""
        if self.exponent is None:
            return self.amplitude
        powers = jnp.exp(self.exponent)
        return powers if self.amplitude is None else self.amplitude * powers


def finite(exponent: Array) -> Array:
    """Return an exponent that can be subtracted: 0 in place of −∞.

    The exponent is −∞ if no key was seen, and −∞ − (−∞) would be NaN.
    """
    return where(exponent == -jnp.inf, 0, exponent)


def row_shift(query: LogFeatures) -> Array:
    """Return the largest exponent of each row [… 1], a constant to the gradient."""
    highest = query.exponent.max(axis=-1, keepdims=True)
    return finite(jax.lax.stop_gradient(highest))


class Features(NamedTuple):
    """A feature map φ of queries and one of keys, and their properties.

    Attributes:
        query, key: (array [… H], parameters) → LogFeatures [… M]. They act on the last
            axis only. Either both results have an amplitude or neither has; likewise an
            exponent. The map of queries may leave out a factor that all features of a
            query share: it cancels in the division by the denominator.
        pairs: (einsum, φ(q), φ(k), divisor) → weights φ(q)·φ(k) / divisor of all pairs,
            computed from the sources of the features. It is for maps whose features
            change sign, since a sum over such features may lose digits. The divisor is
            the number by which `Normalised.prepare` has divided φ(q). Without `pairs`,
            weights are sums over features.
        signed: whether features change sign, so that sums of products may cancel.
        nonnegative_count: for maps whose features change sign, although the weights of
            pairs do not; None for other maps. A function H → n: the first n features of
            a key are never negative. "squared" has n = H (the squares), "taylor" and
            cosine have n = 1 (the number 1). A row whose denominator is only rounding
            error becomes a mean of the values, in which a key has the sum of these n
            features as its weight (`recurrent.cancellation`).
        centred: (φ(q), φ(k)) → other features with the same products φ(q)·φ(k), whose
            terms cancel less. For example, with m the mean of all keys, q·k is the
            product of [q·m, q] and [1, k − m]. Only bidirectional attention can use
            them, since it knows all keys. The first feature of every key must be 1.
        bounded: whether φ = [1, u] with |u| ≤ 1, as in cosine. Then no weight φ(q)·φ(k)
            is negative, and its |terms| sum to at most 2. GPU kernels take such maps
            even if features change sign.
        elementwise: whether each feature is a function of one channel and is never
            negative.
        in_kernels: whether kernels may compute elementwise features; otherwise XLA
            computes them before the kernel. If True, the map must be the same function
            of queries and of keys, for blocks of any shape, made of comparisons,
            exponentials and arithmetic: kernels for TPUs have no expm1 and no erf.
            NVIDIA kernels compute features only if the head size is 16, 32 or a
            multiple of 64.
        exponential: the signs of the random rows w in features exp(±w·x √scale +
            offset): (1,) for those of w, (1, −1) for those of w and then those of −w.
            Features of a key are also multiplied by exp(−scale |x|²/2). Empty for other
            features.
        has_exponents: whether features have an exponent, so that rows may underflow.
    """

    query: Callable[[Array, Any], LogFeatures]
    key: Callable[[Array, Any], LogFeatures]
    pairs: Callable[[Callable, LogFeatures, LogFeatures, Any], Array] | None = None
    signed: bool = False
    nonnegative_count: Callable[[int], int] | None = None
    centred: Callable[[LogFeatures, LogFeatures], tuple] | None = None
    bounded: bool = False
    elementwise: bool = False
    in_kernels: bool = False
    exponential: tuple[int, ...] = ()
    has_exponents: bool = False


class FeatureParameters(NamedTuple):
    """Parameters of random features: rows w, the scale, and offsets of exponents."""

    rows: Float[Array, "M H"]
    scale: Float[Array, ""]
    offset: Float[Array, " M"] | None = None


def feature_map(who: str, table: dict[str, Features], name: str) -> Features:
    """Return the feature map of a table that has this name.

    Raises:
        ValueError: an unknown name; the error lists the names of the table.
    """
    check_choice(who, "features", name, table)
    return table[name]
