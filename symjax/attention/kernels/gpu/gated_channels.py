"""Gated linear attention with a decay for each channel, on NVIDIA GPUs.

Kernels are arranged as in `gated`. The scores of a chunk's pairs differ: with a decay
for each channel they are not the product of q·k and one decay. So pairs are split by
level, as in a merge sort. The level of a pair is the highest bit in which its two times
differ, so that the two tokens are in different halves of a block. The decay of a pair
is the decay from the key to the boundary of the halves, times the decay from there to
the query. At each level a token is either before its boundary or after it. So a token
needs one exponential per channel, and one matrix x is both operands of the product:

    x_t = (q_t or k_t) · (the decay between t and its boundary),   scores = x xᵀ

There are three kernels. A program of the first two computes one chunk of one query
head, by blocks of `BLOCK` channels, which registers hold:

- `_forward_chunk` writes the output and the scores;
- `_values_and_scores` writes the gradients of values and of scores;
- `_channels` writes the gradients of queries, keys and decays. Its program computes one
  block of channels of a chunk, and recomputes x at each level.
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
    call_kernel,
    decay_sums,
    decaying_states,
    dot,
    forward_by,
    gradient_dtype,
    iota,
    load_float32,
    pair_block,
    state_block,
    token_block,
)

LEVELS = CHUNK.bit_length() - 1


def forward(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K H"],
) -> tuple[Array, Array, Array]:
    """Return the output, the state before each chunk, and the scores of its pairs."""
    sums = decay_sums(log_decay)
    block = token_block(key.shape[3], query.shape[2] // key.shape[2])
    return forward_by(_forward_chunk, interpret, query, key, value, sums, block)


def _forward_chunk(query, key, value, sums, before, output, stored_scores):
    write_output(query, key, value[...], sums, before, output, stored_scores)


def write_output(
    query, key, written: Array, sums, before, output, stored_scores
) -> None:
    """Write the output and the scores of a chunk; arguments as in `gated`."""
    dtype = written.dtype
    scores = pair_scores(query, key, sums)
    stored_scores[...] = scores.astype(dtype)
    found = dot(scores.astype(dtype), written)
    for at in _channel_blocks(query.shape[1]):
        reading = query[:, at].astype(jnp.float32) * jnp.exp2(sums[:, at])
        found += dot(reading.astype(dtype), before[at, :])
    output[...] = found.astype(dtype)


def pair_scores(query: Any, key: Any, sums: Any) -> Float[Array, "CHUNK CHUNK"]:
    """Return Σ_h q_th k_sh · (the decay of h from s to t), and 0 where s is after t."""
    time, dtype = jax.lax.iota(jnp.int32, CHUNK), query.dtype
    scores = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for at in _channel_blocks(query.shape[1]):
        own = dot(query[:, at], key[:, at], BY_LAST)
        scores += jnp.where(iota(0) == iota(1), own, 0.0)

        def add_level(level, scores, at=at):
            x = _faded_to_boundary(query, key, sums, level, at)[0].astype(dtype)
            block = time >> level
            earlier = jnp.where(block & 1 == 0, block + 1, -1)
            pairs = block[:, None] == earlier[None, :]
            return scores + jnp.where(pairs, dot(x, x, BY_LAST), 0.0)

        scores = jax.lax.fori_loop(0, LEVELS, add_level, scores)
    return scores


def _channel_blocks(size: int) -> list[Any]:
    """Split the channels of a head into blocks that registers hold."""
    block = min(BLOCK, size)
    return [pl.ds(first, block) for first in range(0, size, block)]


def _faded_to_boundary(
    query, key, sums, level: Any, at: Any
) -> tuple[Array, Array, Array]:
    """Return x [CHUNK channels], its decays, and which tokens are after their boundary.

    For tokens after their boundary x has queries, for the others keys.

    The indices or masks of all loads depend on the level. Otherwise the compiler moves
    the loads out of the loop over levels, and the loaded arrays occupy registers.
    """
    time = jax.lax.iota(jnp.int32, CHUNK)
    boundary = ((time >> (level + 1)) << (level + 1)) + (1 << level) - 1
    between = sums[time + (level >> LEVELS), at] - sums[boundary, at]
    after = ((time >> level) & 1 == 1)[:, None]
    fade = jnp.exp2(jnp.where(after, between, -between))
    is_query = jnp.broadcast_to(after, fade.shape)
    queries = plt.load(query.at[:, at], mask=is_query, other=0).astype(jnp.float32)
    keys = plt.load(key.at[:, at], mask=~is_query, other=0).astype(jnp.float32)
    return (queries + keys) * fade, fade, after


def backward(
    interpret: Any,
    operands: Sequence[Array],
    residuals: Sequence[Array],
    output_gradient: Float[Array, "B T N V"],
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of the operands of `forward`, one for each query head.

    Args:
        residuals: the states and the scores that `forward` returned.
    """
    query, key, value, log_decay = operands
    before, scores = residuals
    batch, length, heads, size = query.shape
    width, group = value.shape[3], heads // key.shape[2]
    sums = decay_sums(log_decay)
    after = decaying_states(query, output_gradient, sums, True, interpret)
    dtype = gradient_dtype(value, group)
    value_gradient, scores_gradient = call_kernel(
        _values_and_scores,
        (length // CHUNK, heads, batch),
        [
            (token_block(size, group), key),
            (token_block(width, group), value),
            (token_block(size, group), sums),
            (token_block(width), output_gradient),
            (pair_block(), scores),
            (state_block(size, width), after),
        ],
        [
            (token_block(width), output_gradient.shape, dtype),
            (pair_block(), scores.shape, scores.dtype),
        ],
        warps=8,
        interpret=interpret,
    )
    query_gradient, key_gradient, decay_gradient = channel_gradients(
        interpret,
        (query.dtype, dtype, jnp.float32),
        *(query, key, value, sums, output_gradient, before, after, scores_gradient),
    )
    return query_gradient, key_gradient, value_gradient, decay_gradient


def _values_and_scores(
    key, value, sums, output_gradient, scores, after, value_gradient, scores_gradient
):  # fmt: skip
    """Write the gradients of values, and those of scores by `mirrored_gradients`.

    Args:
        after: the gradient of the state after the chunk.
    """
    dtype = output_gradient.dtype
    scores_gradient[...] = mirrored_gradients(output_gradient[...], value[...])
    found = dot(scores[...], output_gradient[...], TRANSPOSED)
    size = key.shape[1]
    block = min(BLOCK, size)

    def add_block(i, found):
        at = pl.ds(i * block, block)
        fade = jnp.exp2(sums[CHUNK - 1, at][None, :] - sums[:, at])
        joining = (key[:, at].astype(jnp.float32) * fade).astype(dtype)
        return found + dot(joining, after[at, :])

    found = jax.lax.fori_loop(0, size // block, add_block, found)
    value_gradient[...] = found.astype(value_gradient.dtype)


def mirrored_gradients(
    output_gradient: Float[Array, "CHUNK V"], value: Float[Array, "CHUNK V"]
) -> Float[Array, "CHUNK CHUNK"]:
    """Return the gradients of scores below the diagonal, and mirrored above it."""
    below = dot(output_gradient, value, BY_LAST)
    above = dot(value, output_gradient, BY_LAST)
    return jnp.where(iota(0) >= iota(1), below, above).astype(output_gradient.dtype)


def channel_gradients(
    interpret: Any,
    dtypes: tuple,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T _ V"],
    sums: Float[Array, "B T K H"],
    output_gradient: Float[Array, "B T N V"],
    before: Float[Array, "B _ chunks H V"],
    after: Float[Array, "B N chunks H V"],
    scores_gradient: Float[Array, "B N T CHUNK"],
    *,
    joins: bool = True,
) -> list[Array]:
    """Return the gradients of queries, keys and decays, one for each query head.

    Args:
        dtypes: of the three gradients.
        before, after: the state before each chunk; the gradient of the state after it.
        joins: whether to add what keys and decays contribute to the state after the
            chunk.
    """
    _, length, heads, size = query.shape
    width, group = value.shape[3], heads // key.shape[2]
    value_group, state_group = heads // value.shape[2], heads // before.shape[1]
    block = min(BLOCK, size)
    blocks = size // block
    of_query_head, of_key_head = (
        token_block(block, x, blocks, split=True) for x in (1, group)
    )
    return call_kernel(
        partial(_channels, joins),
        (blocks * (length // CHUNK), heads, len(query)),
        [
            (of_query_head, query),
            (of_key_head, key),
            (token_block(width, value_group, blocks), value),
            (of_key_head, sums),
            (token_block(width, 1, blocks), output_gradient),
            (state_block(block, width, state_group, blocks), before),
            (state_block(block, width, 1, blocks), after),
            (pair_block(blocks=blocks), scores_gradient),
            *(
                (pl.BlockSpec(x.shape, lambda *_: (0, 0, 0)), x)
                for x in _level_tables(value.dtype)
            ),
        ],
        [(of_query_head, query.shape, x) for x in dtypes],
        warps=4,
        interpret=interpret,
    )


def _level_tables(dtype: Any) -> tuple[Array, Array]:
    """Return two tables of 0/1 matrices, one of each for every level.

    Matrices [u, t] of the first table are 1 for the pairs of tokens of the level. Those
    of the second table are 1 if the decay of token u is between token t and its
    boundary. The second table has two more: u ≤ t for decays from the start of the
    chunk, and u > t for decays to its end.
    """
    u, t = np.arange(CHUNK)[:, None], np.arange(CHUNK)
    pairs, passed = [], []
    for level in range(LEVELS):
        pairs.append((u ^ t) >> level == 1)
        after = (t >> level) & 1 == 1
        passed.append((u >> level == t >> level) & np.where(after, u <= t, u > t))
    passed += [u <= t, u > t]
    return jnp.asarray(np.stack(pairs), dtype), jnp.asarray(np.stack(passed), dtype)


def _channels(
    joins, query, key, value, sums, output_gradient, before, after, scores_gradient,
    pairs, passed, query_gradient, key_gradient, decay_gradient,
):  # fmt: skip
    """Write the gradients of queries, keys and decays for one block of channels.

    The gradient of a log-decay is the sum of x · (the gradient of x) over the tokens
    whose factor in x includes that decay. No sums are subtracted, since that would lose
    digits. A decay of 0 has the gradient 0.
    """
    size, width, dtype = query.shape[1], value.shape[1], value.dtype
    time, last = jax.lax.iota(jnp.int32, CHUNK), sums[CHUNK - 1, :]

    def add_states(i, found):
        at, (by_query, by_key, through) = pl.ds(i * block, block), found
        by_query += dot(output_gradient[:, at], before[:, at], BY_LAST)
        if joins:
            products = load_float32(before.at[:, at]) * load_float32(after.at[:, at])
            through += products.sum(axis=1)
            by_key += dot(value[:, at], after[:, at], BY_LAST)
        return by_query, by_key, through

    block, nothing = min(BLOCK, width), jnp.zeros((CHUNK, size), jnp.float32)
    start = nothing, nothing, jnp.zeros((size,), jnp.float32)
    found = jax.lax.fori_loop(0, width // block, add_states, start)
    by_query, by_key, through = found
    by_query *= jnp.exp2(sums[...])
    by_key *= jnp.exp2(last[None, :] - sums[...])
    by_decay = dot(passed[LEVELS], (by_query * load_float32(query)).astype(dtype))
    by_decay += dot(passed[LEVELS + 1], (by_key * load_float32(key)).astype(dtype))
    by_decay += (through * jnp.exp2(last))[None, :]
    own = scores_gradient[time, time].astype(jnp.float32)[:, None]
    by_query += own * load_float32(key)
    by_key += own * load_float32(query)

    def add_level(level, found):
        by_query, by_key, by_decay = found
        x, fade, after = _faded_to_boundary(query, key, sums, level, pl.ds(0, size))
        by_x = dot(scores_gradient[...] * pairs[level], x.astype(dtype))
        by_decay += dot(passed[level], (by_x * x).astype(dtype))
        by_x *= fade
        by_query += jnp.where(after, by_x, 0.0)
        by_key += jnp.where(after, 0.0, by_x)
        return by_query, by_key, by_decay

    found = jax.lax.fori_loop(0, LEVELS, add_level, (by_query, by_key, by_decay))
    gradients = query_gradient, key_gradient, decay_gradient
    for ref, x in zip(gradients, found, strict=True):
        ref[...] = x.astype(ref.dtype)
