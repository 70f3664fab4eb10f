"""Sums over the keys of linear attention, and rows read from them.

`LinearState` holds the sums over the keys of one sequence so far. `update` adds keys,
`merge` adds two states, and `query_state` reads rows. `divide` turns `RowSums`, the
numerators and denominators of rows, into rows of output.

Exponents. Features φ = exp(exponent) can leave the range of float32, although the ratio
of numerator and denominator does not:

- The state is divided by exp(running_max). For each feature running_max is the largest
  exponent of a key so far. When a key with a larger exponent comes, the state is
  rescaled.
- A row is divided by exp(shift). The shift is the maximum, over the features, of the
  query's exponent + running_max.
- So every exponential is at most 1. Example with one feature: keys have the exponents
  100 and 90, and a query has 5. Then running_max is 100, the shift is 105, and the
  denominator is 1 + e⁻¹⁰. No ε is needed.
- Dividing by exp(running_max) and by exp(shift) does not change the output. The query's
  factor exp(running_max) undoes the division of the state, and exp(shift) cancels in
  the ratio. running_max and shift are constants to the gradient.

Features that change sign lose digits if their products cancel. Therefore a state of
features with a `Features.nonnegative_count` is read by `cancellation.read_around_mean`.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import LogFeatures, finite, row_shift
from symjax.attention.core.products import einsum
from symjax.attention.core.where import where
from symjax.attention.recurrent.cancellation import read_around_mean


class LinearState(NamedTuple):
    """State of linear attention: sums over the keys that were read, float32 at least.

    Attributes:
        sums: Σ φ(k) vᵀ exp(−running_max).
        total: Σ φ(k) exp(−running_max).
        running_max: the largest exponent of these keys, for each feature, or one for
            all features if they share their exponent. None for features without an
            exponent; then the factor exp(−running_max) is 1.
    """

    sums: Float[Array, "B K M V"]
    total: Float[Array, "B K M"]
    running_max: Float[Array, "B K M"] | Float[Array, "B K 1"] | None = None


class RowSums(NamedTuple):
    """Numerators and denominators of output rows, both divided by exp(shift)."""

    numerator: Float[Array, "B K G T V"]
    denominator: Float[Array, "B K G T"]
    # Σ |terms of the denominator|; the denominator itself if no weight is negative.
    magnitude: Float[Array, "B K G T"]
    shift: Float[Array, "B K G T"]


class Arithmetic(NamedTuple):
    """Settings of the products and sums of features.

    Attributes:
        product: an einsum, more precise if terms may cancel.
        signed: whether terms may cancel.
        nonnegative_count: number of the first features of a key that are never
            negative, from `Features.nonnegative_count`. If it is not 0,
            `read_around_mean` reads the state.
        bounded: as in `Features`.
    """

    product: Callable[..., Array]
    signed: bool
    nonnegative_count: int
    bounded: bool = False


def empty_like(state: LinearState) -> LinearState:
    """Return the empty state with the shapes of `state`."""
    highest = state.running_max
    if highest is not None:
        highest = jnp.full_like(highest, -jnp.inf)
    sums, total = (jnp.zeros_like(x) for x in state[:2])
    return LinearState(sums, total, highest)


def highest_exponent(state: LinearState | None, key: LogFeatures) -> Array | None:
    """Return the running maximum after these keys.

    It is [B K M], [B K 1] if features share their exponent, or None without exponents.
    """
    if key.exponent is None:
        return None
    highest = key.exponent.max(axis=-2, initial=-jnp.inf)
    if state is not None:
        highest = jnp.maximum(cast(Array, state.running_max), highest)
    return jax.lax.stop_gradient(highest)


def query_weights(query: LogFeatures, highest: Array | None) -> tuple[Array, Array]:
    """Return the weights by which rows read a state that is divided by exp(highest).

    Returns:
        Weights [B K G T M] of at most 1, already divided by exp(shift), and the shift
        [B K G T].
    """
    if highest is None:
        weights = query.weights()
        return weights, jnp.zeros_like(weights[..., 0])
    query = query.times_exp(highest[:, :, None, None])
    shift = row_shift(query)
    return query.times_exp(-shift).weights(), shift[..., 0]


def key_weights(key: LogFeatures, highest: Array | None) -> Array:
    """Return the features of keys, divided by exp(highest)."""
    if highest is None:
        return key.weights()
    return key.times_exp(-finite(highest)[:, :, None]).weights()


def rescale(state: LinearState, highest: Array | None) -> LinearState:
    """Return the same state with a higher running maximum."""
    if highest is None or state.running_max is None:
        return state
    decay = jnp.exp(state.running_max - finite(highest))
    return LinearState(state.sums * decay[..., None], state.total * decay, highest)


def update(
    arithmetic: Arithmetic, state: LinearState | None, key: LogFeatures, value: Array
) -> LinearState:
    """Return the state after all these keys.

    Args:
        state: the state before them; None is the empty one.
    """
    highest = highest_exponent(state, key)
    weights = key_weights(key, highest)
    sums = arithmetic.product("bksm,bksv->bkmv", weights, value)
    total = weights.sum(axis=-2)
    if state is not None:
        before = rescale(state, highest)
        sums, total = before.sums + sums, before.total + total
    return LinearState(sums, total, highest)


def merge(one: LinearState, two: LinearState) -> LinearState:
    """Return the state that has read the keys of both states.

    With the running maxima c₁ and c₂ and c = max(c₁, c₂), the sums of the result are
    S = S₁ exp(c₁ − c) + S₂ exp(c₂ − c), and its totals likewise.
    """
    highest = None
    if one.running_max is not None and two.running_max is not None:
        highest = jnp.maximum(one.running_max, two.running_max)
    one, two = rescale(one, highest), rescale(two, highest)
    return LinearState(one.sums + two.sums, one.total + two.total, highest)


def query_state(
    arithmetic: Arithmetic, state: LinearState, query: LogFeatures
) -> RowSums:
    """Return the sums of rows that see the state and no other keys."""
    row, shift = query_weights(query, state.running_max)
    return sums_from_weights(arithmetic, state, row, shift)


def sums_from_weights(
    arithmetic: Arithmetic,
    state: LinearState,
    row: Float[Array, "B K G T M"],
    shift: Float[Array, "B K G T"],
    scores: Float[Array, "B K G T S"] | None = None,
    value: Float[Array, "B K S V"] | None = None,
) -> RowSums:
    """Return the sums of rows from their weights.

    Args:
        row: weights of the features of the state, divided by exp(shift).
        scores: weights of keys that the state does not have; None: there are none.
        value: the values of these keys.
    """
    denominator = arithmetic.product("bkgtm,bkm->bkgt", row, state.total)
    magnitude = denominator
    if arithmetic.bounded:
        # Bounded features are [1, u] with |u| ≤ 1. So the first total is the number of
        # keys in the state, and the first weight of a row is 1, or 0 if the row does
        # not see the state. The |terms| of a key are 1 and those of u·u', at most 1 in
        # sum. So those of a row add up to at most twice the number of keys.
        firsts = row[..., 0], state.total[..., 0]
        magnitude = 2 * jnp.einsum("bkgt,bk->bkgt", *firsts)
    elif arithmetic.signed:
        magnitude = arithmetic.product(
            "bkgtm,bkm->bkgt", *map(_magnitude, (row, state.total))
        )
    if arithmetic.nonnegative_count:
        numerator, denominator = read_around_mean(
            arithmetic.product,
            arithmetic.nonnegative_count,
            *state[:2],
            row,
            denominator,
            magnitude,
        )
        magnitude = denominator
    else:
        numerator = arithmetic.product("bkgtm,bkmv->bkgtv", row, state.sums)
    if scores is not None:
        numerator = numerator + arithmetic.product("bkgts,bksv->bkgtv", scores, value)
        denominator = denominator + scores.sum(axis=-1)
        if arithmetic.signed and not arithmetic.nonnegative_count:
            magnitude = magnitude + _magnitude(scores).sum(axis=-1)
        else:  # no pair has a negative weight
            magnitude = denominator
    return RowSums(numerator, denominator, jax.lax.stop_gradient(magnitude), shift)


def _magnitude(x: Array) -> Array:
    """Return |x|, a constant to the gradient."""
    return jnp.abs(jax.lax.stop_gradient(x))


def divide(rows: RowSums) -> Float[Array, "*rows V"]:
    """Return numerator / denominator, and 0 if the denominator is only rounding error.

    The quotient n/d is computed as (n/c) / (d/c), where c = d is a constant to the
    gradient. The gradient of a plain quotient has d², which may underflow.
    """
    tolerance = 8 * jnp.finfo(rows.denominator.dtype).eps
    constant, magnitude = jax.lax.stop_gradient((rows.denominator, rows.magnitude))
    nonzero = jnp.abs(constant) > tolerance * magnitude
    scale = 1 / where(nonzero, constant, jnp.inf)
    ones = where(nonzero, rows.denominator * scale, 1)
    return einsum("...v,...->...v", rows.numerator * scale[..., None], 1 / ones)
