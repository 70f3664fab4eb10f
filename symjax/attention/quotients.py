"""Rows of linear attention: numerators and denominators, and their ratio."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import einsum
from symjax.attention.features import LogFeatures
from symjax.attention.linear_state import LinearState, finite, with_ones


class Rows(NamedTuple):
    """Rows of output before the division; all but the shift are times exp(−shift)."""

    numerator: Float[Array, "B K G T V"]
    denominator: Float[Array, "B K G T"]
    size: Float[Array, "B K G T"]  # of the denominator's terms, before signs cancel
    shift: Float[Array, "B K G T"]


class Weights(NamedTuple):
    """What rows weigh: features of a state, and beside it keys, all times exp(−shift).

    The scores are None where there are no keys beside the state.
    """

    row: Float[Array, "B K G T M"]
    shift: Float[Array, "B K G T"]
    scores: Float[Array, "B K G T S"] | None = None


def row_weights(query: LogFeatures, highest: Array | None) -> Weights:
    """Feature weights of at most 1, and the logarithm that was divided out of a row."""
    if highest is None:
        weights = query.weights()
        return Weights(weights, jnp.zeros_like(weights[..., 0]))
    query = query.raised(highest[:, :, None, None])
    shift = finite(largest_exponent(query))
    return Weights(query.raised(-shift).weights(), shift[..., 0])


def largest_exponent(query: LogFeatures) -> Array:
    """That of each row, a constant to the gradient."""
    return jax.lax.stop_gradient(query.exponent.max(axis=-1, keepdims=True))


def rows_of(
    state: LinearState,
    weights: Weights,
    value: Float[Array, "B K S V"],
    signed: bool,
    leading: int = 0,
) -> Rows:
    """Rows that see the state and, beside it, keys of these values by their scores.

    Numerator and denominator are columns of the same products, which are as exact as
    `value` is.

    Args:
        signed: terms may cancel, so that the size of a denominator is another sum.
        leading: not 0: no weight is negative, nor are so many of a key's first
            features.
    """
    row, shift, scores = weights
    if leading:
        found = _centred(state, row, leading)
        size = found[..., -1]
    else:
        wide = jnp.concatenate([state.sums, state.total[..., None]], axis=-1)
        found = einsum("bkgtm,bkmv->bkgtv", row.astype(value.dtype), wide)
        size = _size(state, row) if signed else found[..., -1]
    if scores is not None:
        beside = einsum("bkgts,bksv->bkgtv", scores, with_ones(value))
        found = found + beside
        size = size + (jnp.abs(scores).sum(axis=-1) if signed else beside[..., -1])
    return Rows(found[..., :-1], found[..., -1], size, shift)


def _size(state: LinearState, row: Float[Array, "B K G T M"]) -> Array:
    """That of the terms of row·total, whatever their signs."""
    return einsum("bkgtm,bkm->bkgt", jnp.abs(row), jnp.abs(state.total))


def _centred(
    state: LinearState,
    row: Float[Array, "B K G T M"],
    leading: int,
) -> Float[Array, "B K G T V+1"]:
    """Numerator and denominator whose ratio is bounded where features cancel.

    row·sums = row·(sums − total meanᵀ) + denominator · mean. Both sides of the division
    then share the rounding of the denominator, and what does not cancel is the spread
    of the values around their mean, in which a key weighs the sum of its leading
    features. A difference below the rounding of the sums is 0: the ratio of one key, or
    of keys of one value, is this value. A denominator below its own rounding is lifted
    to that, and the ratio is the mean.
    """
    weight = state.total[..., :leading].sum(axis=-1)
    mean = state.sums[..., :leading, :].sum(axis=-2)
    mean = mean / jnp.where(weight > 0, weight, 1)[..., None]
    constant = jax.lax.stop_gradient(mean)
    means = state.total[..., None] * constant[:, :, None]
    rest = state.sums - means
    noise = 8 * jnp.finfo(rest.dtype).eps * jnp.abs(means)
    rest = rest - jax.lax.stop_gradient(jnp.where(jnp.abs(rest) <= noise, rest, 0))
    wide = jnp.concatenate([rest, state.total[..., None]], axis=-1)
    found = einsum("bkgtm,bkmv->bkgtv", row, wide)
    numerator, denominator = found[..., :-1], found[..., -1:]
    size = jax.lax.stop_gradient(_size(state, row))[..., None]
    least = jnp.finfo(size.dtype).eps * size
    lifted = denominator < least
    denominator = jnp.where(lifted, least, denominator)
    numerator = numerator + denominator * constant[:, :, None, None]
    numerator = jnp.where(lifted, least * mean[:, :, None, None], numerator)
    return jnp.concatenate([numerator, denominator], axis=-1)


def divide(rows: Rows) -> Float[Array, "B K G T V"]:
    """numerator / denominator, and zeros where that is nothing but rounding.

    Both are first divided by the constant denominator: the gradient of a plain quotient
    holds its square, which overflows where it does not.
    """
    tolerance = 8 * jnp.finfo(rows.denominator.dtype).eps
    constant, size = jax.lax.stop_gradient((rows.denominator, rows.size))
    some = jnp.abs(constant) > tolerance * size
    scale = jnp.where(some, 1 / jnp.where(some, constant, 1), 0)
    ones = jnp.where(some, rows.denominator * scale, 1)
    return rows.numerator * scale[..., None] / ones[..., None]
