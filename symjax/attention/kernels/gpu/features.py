"""Normalised linear attention over features on NVIDIA GPUs, forward and backward.

    out[t] = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s)

`states.states_before` gives the state before each chunk, and `states.states_after` the
gradient of the state after each chunk. The two kernels here run all chunks in parallel.
A program computes one chunk of one query head and goes through the features by blocks
of `BLOCK`:

- forward (`_forward_chunk`): it keeps numerators [CHUNK V], scores [CHUNK CHUNK] and
  denominators [CHUNK] in registers and adds to all of them block by block;
- backward (`_backward_chunk`): it recomputes the weights of queries and keys from the
  stored shifts and denominators, and reads the stored scores.

Features may be given as exponents (`FeatureForm`). Then the weights of a row are
relative to its shift, the maximum over features m of x_m + h_m. Here x_m is the
exponent of the query, and h_m the largest exponent of the state and the keys of the
chunk. If the key of h_m comes after the row, the weights of keys that the row sees may
underflow. The denominator of such a row is tiny, which tells the caller to compute the
row again.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import finite
from symjax.attention.kernels.gpu.chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    call_kernel,
    dot,
    gradient_dtype,
    load_float32,
    pair_block,
    scalar_block,
    state_block,
    token_block,
)
from symjax.attention.kernels.gpu.feature_operands import (
    FeatureForm,
    SegmentNumbers,
    rounded,
    visible_in_chunk,
)
from symjax.attention.kernels.gpu.states import (
    FeatureStates,
    chunk_vector,
    states_after,
    states_before,
)


class FeatureResiduals(NamedTuple):
    """Residuals of the forward pass."""

    states: FeatureStates
    shift: Float[Array, "B N T"]
    denominator: Float[Array, "B N T"]  # of weights relative to the shift
    output: Float[Array, "B T N V"]  # in float32
    scores: Float[Array, "B N T CHUNK"]


def forward(
    form: FeatureForm,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    ids: SegmentNumbers,
    *,
    keep: bool,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"], FeatureResiduals | None]:
    """Return the output, its denominators, and the residuals.

    A row that sees no key is 0. T is a multiple of `CHUNK`, and M a multiple of the
    block size.

    Args:
        keep: whether to return residuals; if not, None is in their place.
    """
    batch, length, heads, size = query.shape
    width, group = value.shape[3], heads // key.shape[2]
    states = states_before(form, key, value, ids)
    rows, shape = (batch, heads, length), (batch, length, heads, width)
    stored_specs = [
        (token_block(width), shape, jnp.float32),
        (pair_block(), (*rows, CHUNK), jnp.float32),
    ]
    output, shift, denominator, *stored = call_kernel(
        partial(_forward_chunk, form),
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, group), key),
            (token_block(width, group), value),
            *ids.operands(),
            *_state_operands(states, group),
        ],
        [
            (token_block(width), shape, value.dtype),
            (scalar_block(), rows, jnp.float32),
            (scalar_block(), rows, jnp.float32),
            *(stored_specs if keep else []),
        ],
        warps=4,
        interpret=form.interpret,
    )
    if not keep:
        return output, denominator, None
    return output, denominator, FeatureResiduals(states, shift, denominator, *stored)


def _state_operands(states: FeatureStates, group: int) -> list[tuple[Any, Array]]:
    size, width = states.sums.shape[3:]
    vector = chunk_vector(size, group)
    return [
        (state_block(size, width, group), states.sums),
        (vector, states.total),
        (vector, states.highest),
    ]


def _forward_chunk(
    form, query, key, value, query_segment, key_segment, before, totals, maxima,
    output, shifts, denominators, *residuals,
):  # fmt: skip
    """Write the output, shifts and denominators of a chunk.

    If a block of features raises the shift of a row, the sums of the row so far are
    rescaled, as in online softmax.
    """
    pairs, reaches, _, continues = visible_in_chunk(query_segment, key_segment)
    block = min(BLOCK, query.shape[1])

    def add_features(i, found):
        rows, scores, denominator, shift = found
        at = pl.ds(i * block, block)
        x, y = load_float32(query.at[:, at]), load_float32(key.at[:, at])
        in_state = jnp.where(continues, maxima[at], form.nothing)
        highest = finite(form.highest(y, in_state, 0))[None, :]
        raised = form.highest(x + highest, shift, 1)
        fade = jnp.exp(shift - finite(raised))[:, None]
        row = form.query_weights(x, highest, finite(raised)[:, None])
        column = rounded(form.key_weights(y, highest))
        scores = scores * fade + dot(rounded(row), column, BY_LAST)
        row = jnp.where(reaches, row * jnp.exp(in_state[None, :] - highest), 0.0)
        row = rounded(row)
        rows = rows * fade + dot(row, jnp.where(continues, before[at, :], 0.0))
        read = row * jnp.where(continues, totals[at], 0.0)[None, :]
        read = read.sum(axis=1)
        return rows, scores, denominator * fade[:, 0] + read, raised

    start = (
        jnp.zeros(output.shape, jnp.float32),
        jnp.zeros((CHUNK, CHUNK), jnp.float32),
        jnp.zeros((CHUNK,), jnp.float32),
        _first_shift(form, query, block),
    )
    found = jax.lax.fori_loop(0, query.shape[1] // block, add_features, start)
    rows, scores, denominator, shift = found
    scores = rounded(jnp.where(pairs, scores, 0.0))
    rows += dot(scores, load_float32(value))
    denominator += scores.sum(axis=1)
    rows *= form.inverse(denominator)[:, None]
    output[...] = rows.astype(output.dtype)
    shifts[...], denominators[...] = finite(shift), denominator
    for ref, x in zip(residuals, (rows, scores), strict=False):
        ref[...] = x


def _first_shift(form, query, block: int) -> Float[Array, " CHUNK"]:
    """Return the shift of each row before the first block of features.

    It is −∞ for exponents, and 1 for bounded features. For other features it is the
    divisor of the row, the largest feature of the query. The divisor cancels in the
    output. Without it products of features would overflow or underflow long before the
    features do.
    """
    if form.has_exponents:
        return jnp.full((CHUNK,), -jnp.inf, jnp.float32)
    if form.bounded:
        return jnp.ones((CHUNK,), jnp.float32)

    def largest_of(i, largest):
        features = form.features_of(load_float32(query.at[:, pl.ds(i * block, block)]))
        return jnp.maximum(largest, features.max(axis=1))

    largest = jnp.zeros((CHUNK,), jnp.float32)
    largest = jax.lax.fori_loop(0, query.shape[1] // block, largest_of, largest)
    return jnp.where(largest > 0, largest, 1.0)


def backward(
    form: FeatureForm,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    ids: SegmentNumbers,
    residuals: FeatureResiduals,
    output_gradient: Float[Array, "B T N V"],
) -> list[Array]:
    """Return the gradients of queries, keys and values, one for each query head."""
    batch, length, heads, size = query.shape
    width, group = value.shape[3], heads // key.shape[2]
    states, shift, denominator, output, scores = residuals
    mean = (output_gradient.astype(jnp.float32) * output).sum(axis=3)
    rows = jnp.swapaxes(mean, 1, 2), shift, form.inverse(denominator)
    after = states_after(form, query, output_gradient, ids, states, rows)
    return call_kernel(
        partial(_backward_chunk, form),
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, group), key),
            (token_block(width, group), value),
            (token_block(width), output_gradient),
            *((scalar_block(), x) for x in rows),
            (pair_block(), scores),
            *ids.operands(),
            *_state_operands(states, group),
            (chunk_vector(size, group, later=1), states.highest),
            (state_block(size, width), after.sums),
            (chunk_vector(size), after.total),
        ],
        [
            (token_block(size), query.shape, query.dtype),
            (token_block(size), query.shape, gradient_dtype(key, group)),
            (token_block(width), output_gradient.shape, gradient_dtype(value, group)),
        ],
        warps=8,
        interpret=form.interpret,
    )


def _backward_chunk(
    form, query, key, value, output_gradient, mean, shift, inverse, scores,
    query_segment, key_segment, before, totals, maxima, maxima_after, after,
    totals_gradient, query_gradient, key_gradient, value_gradient,
):  # fmt: skip
    """Write the gradients of a chunk.

    The program loads queries, keys and values block by block, some of them twice, since
    registers do not hold all of them. It first scales the output's gradient by the
    power of two in 1 / denominator. Otherwise its products with features could overflow
    or underflow.

    Args:
        mean: Σ output · output gradient of each row.
        maxima, maxima_after: the largest exponents before and after the chunk.
        before: sums of the state before the chunk, and `totals` its totals.
        after: the gradients of the sums after the chunk, and `totals_gradient` of the
            totals.
    """
    visible = visible_in_chunk(query_segment, key_segment)
    pairs, reaches, joins, continues = visible
    mean, shift, inverse = (x[...][:, None] for x in (mean, shift, inverse))
    power, rest = _split_power(inverse)
    mean *= power
    changed = load_float32(output_gradient) * power
    by_scores = dot(changed, load_float32(value), BY_LAST) - mean
    by_scores = rounded(jnp.where(pairs, by_scores, 0.0))
    block, columns = min(BLOCK, query.shape[1]), min(BLOCK, value.shape[1])

    def joining_weights(at):
        keys = load_float32(key.at[:, at])
        weights = form.key_weights(keys, finite(maxima_after[at])[None, :])
        return rounded(jnp.where(joins, weights, 0.0))

    def add_written(i, found):
        at = pl.ds(i * block, block)
        return found + jnp.where(joins, dot(joining_weights(at), after[at, :]), 0.0)

    found = dot(
        rounded(scores[...] * inverse), load_float32(output_gradient), TRANSPOSED
    )
    found = jax.lax.fori_loop(0, query.shape[1] // block, add_written, found)
    value_gradient[...] = found.astype(value_gradient.dtype)

    def write_features(i, _):
        at = pl.ds(i * block, block)

        def add_states(j, found):
            here, (by_row, by_joining) = pl.ds(j * columns, columns), found
            changed = load_float32(output_gradient.at[:, here]) * power
            by_row += dot(changed, before[at, here], BY_LAST)
            written = load_float32(value.at[:, here])
            by_joining += dot(written, after[at, here], BY_LAST)
            return by_row, by_joining

        nothing = jnp.zeros((CHUNK, block), jnp.float32)
        found = jax.lax.fori_loop(
            0, value.shape[1] // columns, add_states, (nothing, nothing)
        )
        by_row = found[0] - mean * totals[at][None, :]
        by_joining = found[1] + totals_gradient[at][None, :]
        x, y = load_float32(query.at[:, at]), load_float32(key.at[:, at])
        in_state = jnp.where(continues, maxima[at], form.nothing)
        highest = finite(form.highest(y, in_state, 0))[None, :]
        row = rounded(form.query_weights(x, highest, shift) * rest)
        column = rounded(form.key_weights(y, highest))
        fade = jnp.exp(in_state[None, :] - highest)
        by_row = jnp.where(reaches, by_row * fade, 0.0)
        by_row += dot(by_scores, column)
        by_row = form.query_gradient(by_row, x, row, rest, shift)
        by_column = form.key_gradient(dot(by_scores, row, TRANSPOSED), y, column)
        by_joining = form.key_gradient(by_joining, y, joining_weights(at))
        by_column += jnp.where(joins, by_joining, 0.0)
        query_gradient[:, at] = by_row.astype(query_gradient.dtype)
        key_gradient[:, at] = by_column.astype(key_gradient.dtype)
        return 0

    jax.lax.fori_loop(0, query.shape[1] // block, write_features, 0)


def _split_power(x: Array) -> tuple[Array, Array]:
    """Split x ≥ 0 into a power of two, whose products are exact, and the other factor.

    The other factor is in [1, 2), or 0 where x is 0.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return power, jnp.where(power > 0, x / power, 0.0)
