"""Sequential part of normalised linear attention on NVIDIA GPUs: passes over states.

`states_before` returns the state before each chunk. `states_after` returns the gradient
of the state after each chunk, by a pass in reverse time.

A program holds one block of a head's state in registers, `BLOCK` rows and columns at
most, and visits the chunks in order. It writes the block before it adds a chunk.

There are three pairs of such passes: these, `chunks.decaying_states` and those of the
delta rule (`delta.py`). They share their blocks and products.
Their loops differ: here a state also has totals and running maxima, and a chunk may
begin a segment; a decay has only factors; the delta rule solves for what it writes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import finite
from symjax.attention.kernels.gpu.chunks import (
    CHUNK,
    TRANSPOSED,
    all_scalars,
    all_states,
    all_tokens,
    blocks_of_state,
    call_kernel,
    dot,
    load_float32,
)
from symjax.attention.kernels.gpu.feature_operands import (
    FeatureForm,
    SegmentNumbers,
    rounded,
)


class FeatureStates(NamedTuple):
    """States of normalised linear attention before each chunk, or their gradients.

    All weights are relative to `highest`, the largest exponent of each feature among
    the keys so far, so that every factor is at most 1. It is −∞ before the first key,
    and 0 for features without exponents. Every block of values has a copy of `total`
    and `highest`, since each program writes its own.
    """

    sums: Float[Array, "B K chunks M V"]  # Σ φ(k_s) v_s
    total: Float[Array, "B K blocks chunks M"]  # Σ φ(k_s)
    highest: Float[Array, "B K blocks chunks+1 M"]  # also after the last chunk


def chunk_vector(size: int, group: int = 1, later: int = 0) -> Any:
    """Return the block [M] of an array [B heads blocks chunks M].

    Args:
        later: number of chunks between the chunk of the program and that of the block.
    """
    return pl.BlockSpec(
        (None, None, None, None, size),
        lambda i, n, b: (b, n // group, 0, i + later, 0),
    )


def _all_vectors(count: int, size: int, group: int, row: Any, column: Any) -> Any:
    """Return the block [chunks M] of an array [B heads blocks chunks M]."""
    return pl.BlockSpec(
        (None, None, None, count, size),
        lambda i, n, b: (b, n // group, column(i), 0, row(i)),
    )


def states_before(
    form: FeatureForm,
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    ids: SegmentNumbers,
) -> FeatureStates:
    """Return the states of normalised linear attention before each chunk."""
    batch, length, heads, size = key.shape
    m, v, row, column = blocks_of_state(key, value)
    count, blocks = length // CHUNK, value.shape[3] // v

    def vectors(count: int) -> tuple[Any, tuple, Any]:
        spec = _all_vectors(count, m, 1, row, column)
        return spec, (batch, heads, blocks, count, size), jnp.float32

    shape = batch, heads, count, size, value.shape[3]
    states = call_kernel(
        partial(_pass_forward, form),
        (blocks * (size // m), heads, batch),
        [
            (all_tokens(length, m, 1, row), key),
            (all_tokens(length, v, 1, column), value),
            *ids.operands(),
        ],
        [
            (all_states(count, m, v, row, column), shape, jnp.float32),
            vectors(count),
            vectors(count + 1),
        ],
        warps=4,
        stages=3,
        interpret=form.interpret,
    )
    return FeatureStates(*states)


def _pass_forward(
    form, key, value, query_segment, key_segment, before, totals, maxima
):  # fmt: skip
    """Write the state before each chunk: sums, totals and largest exponents.

    After a chunk the state has the keys of one segment, that of the chunk's last token.
    """

    def add_chunk(i, state):
        sums, total, highest, previous = state
        before[i], totals[i], maxima[i] = rounded(sums), total, highest
        here, last = pl.ds(i * CHUNK, CHUNK), query_segment[i * CHUNK + CHUNK - 1]
        keeps, joins = previous == last, (key_segment[here] == last)[:, None]
        x, y = load_float32(key.at[here, :]), load_float32(value.at[here, :])
        kept = jnp.where(keeps, highest, form.nothing)
        highest = form.highest(jnp.where(joins, x, form.nothing), kept, 0)
        reference = finite(highest)
        weights = form.key_weights(x, reference[None, :])
        weights = rounded(jnp.where(joins, weights, 0.0))
        fade = jnp.exp(kept - reference)
        sums = jnp.where(keeps, sums * fade[:, None], 0.0)
        sums += dot(weights, jnp.where(joins, y, 0.0), TRANSPOSED)
        total = jnp.where(keeps, total * fade, 0.0) + weights.sum(axis=0)
        return sums, total, highest, last

    count, size, width = before.shape
    start = jnp.zeros((size, width), jnp.float32), jnp.zeros((size,), jnp.float32)
    lowest = jnp.full((size,), form.nothing, jnp.float32)
    start = *start, lowest, query_segment[0]
    _, _, maxima[count], _ = jax.lax.fori_loop(0, count, add_chunk, start)


def states_after(
    form: FeatureForm,
    query: Float[Array, "B T N M"],
    output_gradient: Float[Array, "B T N V"],
    ids: SegmentNumbers,
    states: FeatureStates,
    rows: tuple[Array, Array, Array],
) -> FeatureStates:
    """Return the gradients of the states after each chunk.

    The largest exponents are constants and have no gradient.

    Args:
        rows: three arrays [B N T]: for each row Σ output · output gradient, the shift,
            and 1 / denominator.
    """
    batch, length, heads, size = query.shape
    m, v, row, column = blocks_of_state(query, output_gradient)
    count, blocks = length // CHUNK, output_gradient.shape[3] // v
    group = heads // states.highest.shape[1]
    shape = batch, heads, count, size, output_gradient.shape[3]
    sums_gradient, total_gradient = call_kernel(
        partial(_pass_backward, form),
        (blocks * (size // m), heads, batch),
        [
            (all_tokens(length, m, 1, row), query),
            (all_tokens(length, v, 1, column), output_gradient),
            *((all_scalars(length, 1), x) for x in rows),
            *ids.operands(),
            (_all_vectors(count + 1, m, group, row, column), states.highest),
        ],
        [
            (all_states(count, m, v, row, column), shape, jnp.float32),
            (
                _all_vectors(count, m, 1, row, column),
                (batch, heads, blocks, count, size),
                jnp.float32,
            ),
        ],
        warps=4,
        stages=3,
        interpret=form.interpret,
    )
    return FeatureStates(sums_gradient, total_gradient, states.highest)


def _pass_backward(
    form, query, output_gradient, mean, shift, inverse, query_segment, _, maxima,
    after, totals,
):  # fmt: skip
    """Write the gradient of the state after each chunk, from the last chunk on."""
    count, size, width = after.shape

    def add_chunk(i, state):
        i, (sums, total) = count - 1 - i, state
        after[i], totals[i] = rounded(sums), total
        here, last = pl.ds(i * CHUNK, CHUNK), query_segment[i * CHUNK + CHUNK - 1]
        previous = query_segment[jnp.maximum(i * CHUNK - 1, 0)]
        highest = maxima[i]
        keeps, reaches = previous == last, (query_segment[here] == previous)[:, None]
        row = load_float32(query.at[here, :])
        row = form.query_weights(row, highest[None, :], shift[here][:, None])
        row = rounded(jnp.where(reaches, row * inverse[here][:, None], 0.0))
        fade = jnp.exp(highest - finite(maxima[i + 1]))
        changed = jnp.where(reaches, load_float32(output_gradient.at[here, :]), 0.0)
        by_total = row * jnp.where(reaches, mean[here][:, None], 0.0)
        sums = jnp.where(keeps, sums * fade[:, None], 0.0)
        total = jnp.where(keeps, total * fade, 0.0) - by_total.sum(axis=0)
        return sums + dot(row, changed, TRANSPOSED), total

    start = jnp.zeros((size, width), jnp.float32), jnp.zeros((size,), jnp.float32)
    jax.lax.fori_loop(0, count, add_chunk, start)
