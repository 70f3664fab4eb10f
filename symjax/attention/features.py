"""Feature maps φ, with which the weight of a pair is φ(query)·φ(key).

Features are an amplitude times a power of e. `normalised.py` keeps the exponents below
a running maximum, so that nothing overflows and nothing that matters is lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


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
        signed: whether features change sign, so that sums of products may cancel.
        leading: H → how many of the first features are never negative, where no pair
            weighs less than 0 either though other features change sign.
        around: (query, key) → other features of the same products, which cancel less.
            They are made for these keys, so no state holds them; a key's first is 1.
    """

    query: Callable[[Array, Any], LogFeatures]
    key: Callable[[Array, Any], LogFeatures]
    pairs: Callable[[Array, Array, Array], Array] | None = None
    signed: bool = False
    leading: Callable[[int], int] | None = None
    around: Callable[[Array, Array], tuple[LogFeatures, LogFeatures]] | None = None


def named(who: str, table: dict[str, Features], name: str) -> Features:
    """The entry of a table of features, or an error that lists the table."""
    if name not in table:
        raise ValueError(
            f"{who}: features {name!r} is unknown: choose from {', '.join(table)}"
        )
    return table[name]
