"""The state of linear attention with a denominator, relative to a running maximum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import einsum
from symjax.attention.features import LogFeatures


class LinearState(NamedTuple):
    """What linear attention keeps of the keys it has seen, in float32 at least.

    sums = Σ φ(k) vᵀ and total = Σ φ(k), both times exp(−running_max) when the features
    have an exponent: its maximum so far, over all features where they share it.
    """

    sums: Float[Array, "B K M V"]
    total: Float[Array, "B K M"]
    running_max: Float[Array, "B K M"] | Float[Array, "B K 1"] | None = None


def with_ones(value: Float[Array, "B K S V"]) -> Float[Array, "B K S V+1"]:
    """Values and a column of ones, whose sum is the denominator."""
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def highest_exponent(state: LinearState, key: LogFeatures) -> Array | None:
    """The running maximum after these keys: [B K M], or [B K 1] where it is shared."""
    if state.running_max is None:
        return None
    highest = key.exponent.max(axis=-2, initial=-jnp.inf)
    return jax.lax.stop_gradient(jnp.maximum(state.running_max, highest))


def key_weights(key: LogFeatures, highest: Array | None) -> Array:
    """Feature weights of at most 1, relative to a running maximum."""
    if highest is None:
        return key.weights()
    return key.raised(-finite(highest)[:, :, None]).weights()


def rescale(state: LinearState, highest: Array | None) -> LinearState:
    """The same state relative to a higher maximum."""
    if highest is None or state.running_max is None:
        return state
    decay = jnp.exp(state.running_max - finite(highest))
    return LinearState(state.sums * decay[..., None], state.total * decay, highest)


def update(state: LinearState, key: LogFeatures, value: Array) -> LinearState:
    """The state after all these keys, by products as exact as `value` is."""
    highest = highest_exponent(state, key)
    weights = key_weights(key, highest)
    state = rescale(state, highest)
    new = einsum("bksm,bksv->bkmv", weights, with_ones(value))
    return LinearState(state.sums + new[..., :-1], state.total + new[..., -1], highest)


def merge(one: LinearState, two: LinearState) -> LinearState:
    """The state that has seen the keys of both, which must be different keys.

    (c, S, z) of both, c = max: S₁ exp(c₁ − c) + S₂ exp(c₂ − c), and so z. Associative
    and commutative; an empty state changes nothing.
    """
    highest = None
    if one.running_max is not None and two.running_max is not None:
        highest = jnp.maximum(one.running_max, two.running_max)
    one, two = rescale(one, highest), rescale(two, highest)
    return LinearState(one.sums + two.sums, one.total + two.total, highest)


def finite(exponent: Array) -> Array:
    """An exponent to subtract: 0 where no key was seen, since −inf − (−inf) is NaN."""
    return jnp.where(jnp.isneginf(exponent), 0, exponent)
