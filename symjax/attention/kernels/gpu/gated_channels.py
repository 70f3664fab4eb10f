"""Decays of a channel, forward and backward, on NVIDIA GPUs: all chunks side by side.

Pairs of a chunk are split by level, as in a merge sort: the highest bit in which their
times differ. A pair fades from the key to the boundary between them, and from there to
the query. At one level a token is either before its boundary or after it, so that it
takes one exponential a channel, and one matrix is both operands of the product:

    x_t = (q_t or k_t) · (the decay between t and its boundary),   scores = x xᵀ
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from symjax.attention.kernels.gpu.chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    call,
    decaying_states,
    dot,
    iota,
    pair_block,
    rows_of,
    state_block,
    summed,
    sums_of,
    token_block,
    wide,
)

LEVELS = CHUNK.bit_length() - 1


def forward(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K H"],
) -> tuple[Array, Array, Array]:
    """The output, the state before each chunk, and the scores of its pairs."""
    sums = sums_of(log_decay)
    block = token_block(key.shape[3], query.shape[2] // key.shape[2])
    return rows_of(_rows, interpret, query, key, value, sums, block)


def _parts(size: int) -> list[Any]:
    """Of the channels of a head, so many as registers hold."""
    block = min(BLOCK, size)
    return [pl.ds(first, block) for first in range(0, size, block)]


def _level(query, key, sums, level: Any, at: Any) -> tuple[Array, Array, Array]:
    """x [CHUNK channels], its decays, and whether a token is after its boundary.

    What is loaded depends on the level: else the compiler moves the loads out of the
    loop over levels, where they take registers.
    """
    time = jax.lax.iota(jnp.int32, CHUNK)
    boundary = ((time >> (level + 1)) << (level + 1)) + (1 << level) - 1
    between = sums[time + (level >> LEVELS), at] - sums[boundary, at]
    after = ((time >> level) & 1 == 1)[:, None]
    fade = jnp.exp2(jnp.where(after, between, -between))
    asks = jnp.broadcast_to(after, fade.shape)
    asking = plt.load(query.at[:, at], mask=asks, other=0).astype(jnp.float32)
    asked = plt.load(key.at[:, at], mask=~asks, other=0).astype(jnp.float32)
    return (asking + asked) * fade, fade, after


def _rows(query, key, value, sums, before, output, kept):
    write_rows(query, key, value[...], sums, before, output, kept)


def scores_of(query: Any, key: Any, sums: Any) -> Float[Array, "CHUNK CHUNK"]:
    time, dtype = jax.lax.iota(jnp.int32, CHUNK), query.dtype
    scores = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for at in _parts(query.shape[1]):
        own = dot(query[:, at], key[:, at], BY_LAST)
        scores += jnp.where(iota(0) == iota(1), own, 0.0)

        def step(level, scores, at=at):
            x = _level(query, key, sums, level, at)[0].astype(dtype)
            block = time >> level
            earlier = jnp.where(block & 1 == 0, block + 1, -1)
            pairs = block[:, None] == earlier[None, :]
            return scores + jnp.where(pairs, dot(x, x, BY_LAST), 0.0)

        scores = jax.lax.fori_loop(0, LEVELS, step, scores)
    return scores


def write_rows(query, key, value: Array, sums, before, output, kept) -> None:
    dtype = value.dtype
    scores = scores_of(query, key, sums)
    kept[...] = scores.astype(dtype)
    found = dot(scores.astype(dtype), value)
    for at in _parts(query.shape[1]):
        asking = query[:, at].astype(jnp.float32) * jnp.exp2(sums[:, at])
        found += dot(asking.astype(dtype), before[at, :])
    output[...] = found.astype(dtype)


def backward(
    interpret: Any,
    given: Sequence[Array],
    kept: Sequence[Array],
    change: Float[Array, "B T N V"],
) -> tuple[Array, Array, Array, Array]:
    """Gradients of the four operands given to `forward`, each of query heads."""
    query, key, value, log_decay = given
    before, scores = kept
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    sums = sums_of(log_decay)
    after = decaying_states(query, change, sums, True, interpret)
    dtype = summed(value, shared)
    of_value, of_scores = call(
        _of_values_and_scores,
        (length // CHUNK, heads, batch),
        [
            (token_block(size, shared), key),
            (token_block(width, shared), value),
            (token_block(size, shared), sums),
            (token_block(width), change),
            (pair_block(), scores),
            (state_block(size, width), after),
        ],
        [
            (token_block(width), change.shape, dtype),
            (pair_block(), scores.shape, scores.dtype),
        ],
        warps=8,
        interpret=interpret,
    )
    dtypes = query.dtype, dtype, jnp.float32
    given = query, key, value, sums, change, before, after, of_scores
    of_query, of_key, of_decay = of_channels(interpret, dtypes, *given)
    return of_query, of_key, of_value, of_decay


def of_channels(
    interpret: Any,
    dtypes: tuple,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T _ V"],
    sums: Float[Array, "B T K H"],
    change: Float[Array, "B T N V"],
    before: Float[Array, "B _ chunks H V"],
    after: Float[Array, "B N chunks H V"],
    of_scores: Float[Array, "B N T CHUNK"],
    *,
    joins: bool = True,
) -> list[Array]:
    """The gradients of queries, keys and decays, each of query heads.

    joins: with what keys and decays do to the state after a chunk.
    """
    _, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    shared_values, shared_states = heads // value.shape[2], heads // before.shape[1]
    block = min(BLOCK, size)
    parts = size // block
    mine, common = (token_block(block, x, parts, split=True) for x in (1, shared))
    return call(
        partial(_of_channels, joins),
        (parts * (length // CHUNK), heads, len(query)),
        [
            (mine, query),
            (common, key),
            (token_block(width, shared_values, parts), value),
            (common, sums),
            (token_block(width, 1, parts), change),
            (state_block(block, width, shared_states, parts), before),
            (state_block(block, width, 1, parts), after),
            (pair_block(parts=parts), of_scores),
            *(
                (pl.BlockSpec(x.shape, lambda *_: (0, 0, 0)), x)
                for x in _tables(value.dtype)
            ),
        ],
        [(mine, query.shape, x) for x in dtypes],
        warps=4,
        interpret=interpret,
    )


def _of_values_and_scores(
    key, value, sums, change, scores, after, of_value, of_scores
):  # fmt: skip
    """Gradients of values, and of scores as `mirrored`.

    after: the gradient of the state after the chunk.
    """
    dtype = change.dtype
    of_scores[...] = mirrored(change[...], value[...])
    found, size = dot(scores[...], change[...], TRANSPOSED), key.shape[1]
    block = min(BLOCK, size)

    def part(i, found):
        at = pl.ds(i * block, block)
        fade = jnp.exp2(sums[CHUNK - 1, at][None, :] - sums[:, at])
        joining = (key[:, at].astype(jnp.float32) * fade).astype(dtype)
        return found + dot(joining, after[at, :])

    found = jax.lax.fori_loop(0, size // block, part, found)
    of_value[...] = found.astype(of_value.dtype)


def mirrored(
    change: Float[Array, "CHUNK V"], value: Float[Array, "CHUNK V"]
) -> Float[Array, "CHUNK CHUNK"]:
    """The gradients of scores, above the diagonal those of the same pairs."""
    below, above = dot(change, value, BY_LAST), dot(value, change, BY_LAST)
    return jnp.where(iota(0) >= iota(1), below, above).astype(change.dtype)


def _tables(dtype: Any) -> tuple[Array, Array]:
    """Of each level, the pairs of tokens; and the decays u that a token t takes on the
    way to its boundary. Two more of the latter: u ≤ t, and u > t."""
    u, t = np.arange(CHUNK)[:, None], np.arange(CHUNK)
    pairs, taken = [], []
    for level in range(LEVELS):
        pairs.append((u ^ t) >> level == 1)
        after = (t >> level) & 1 == 1
        taken.append((u >> level == t >> level) & np.where(after, u <= t, u > t))
    taken += [u <= t, u > t]
    return jnp.asarray(np.stack(pairs), dtype), jnp.asarray(np.stack(taken), dtype)


def _of_channels(
    joins, query, key, value, sums, change, before, after, of_scores, pairs, taken,
    of_query, of_key, of_decay,
):  # fmt: skip
    """Gradients of queries, keys and decays, of one part of the channels.

    A decay's gradient is the sum over the tokens that take it of x · its gradient: no
    sum cancels another, and a decay of 0 has none.
    """
    size, width, dtype = query.shape[1], value.shape[1], value.dtype
    time, last = jax.lax.iota(jnp.int32, CHUNK), sums[CHUNK - 1, :]

    def through_states(i, found):
        at, (by_query, by_key, through) = pl.ds(i * block, block), found
        by_query += dot(change[:, at], before[:, at], BY_LAST)
        if joins:
            through += (wide(before.at[:, at]) * wide(after.at[:, at])).sum(axis=1)
            by_key += dot(value[:, at], after[:, at], BY_LAST)
        return by_query, by_key, through

    block, nothing = min(BLOCK, width), jnp.zeros((CHUNK, size), jnp.float32)
    start = nothing, nothing, jnp.zeros((size,), jnp.float32)
    found = jax.lax.fori_loop(0, width // block, through_states, start)
    by_query, by_key, through = found
    by_query *= jnp.exp2(sums[...])
    by_key *= jnp.exp2(last[None, :] - sums[...])
    by_decay = dot(taken[LEVELS], (by_query * wide(query)).astype(dtype))
    by_decay += dot(taken[LEVELS + 1], (by_key * wide(key)).astype(dtype))
    by_decay += (through * jnp.exp2(last))[None, :]
    own = of_scores[time, time].astype(jnp.float32)[:, None]
    by_query += own * wide(key)
    by_key += own * wide(query)

    def step(level, sums_so_far):
        by_query, by_key, by_decay = sums_so_far
        x, fade, later = _level(query, key, sums, level, pl.ds(0, size))
        by_x = dot(of_scores[...] * pairs[level], x.astype(dtype))
        by_decay += dot(taken[level], (by_x * x).astype(dtype))
        by_x *= fade
        by_query += jnp.where(later, by_x, 0.0)
        by_key += jnp.where(later, 0.0, by_x)
        return by_query, by_key, by_decay

    found = jax.lax.fori_loop(0, LEVELS, step, (by_query, by_key, by_decay))
    for ref, x in zip((of_query, of_key, of_decay), found, strict=True):
        ref[...] = x.astype(ref.dtype)
