"""Gradients of the delta rule on NVIDIA GPUs, all chunks in parallel.

Let w be the errors of tokens, u = β w what tokens write, and r the gradient of u. The
gradient of values is β r, and the gradient of β is r·w. A key reads the state before
its token, like a query whose output has the gradient −β r. The kernels of `delta`
compute w, r and the states.

A program computes one chunk of one query head. With a decay for each head, one kernel
writes all gradients (`_backward_chunk`). With a decay for each channel three kernels
run (`gradients`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.gpu import gated, gated_channels
from symjax.attention.kernels.gpu.chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    call_kernel,
    dot,
    gradient_dtype,
    iota,
    load_float32,
    pair_block,
    scalar_block,
    state_block,
    token_block,
)


def gradients(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    errors: Float[Array, "B T K V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    beta: Float[Array, "B K T"],
    output_gradient: Float[Array, "B T N V"],
    written_gradient: Float[Array, "B T N V"],
    before: Float[Array, "B K chunks H V"],
    after: Float[Array, "B N chunks H V"],
    scores: Float[Array, "B N T CHUNK"],
) -> tuple[Array, ...]:
    """Return the gradients of query, key, value, decay and β, all chunks in parallel.

    Decays per head take one kernel. Decays per channel take three: one for values, β
    and pairs (`_values_and_pairs`), and `channel_gradients` twice, for queries that
    read the state and for keys that read it.

    Args:
        after: the gradient of the state after each chunk.
    """
    batch, length, heads, size = query.shape
    width, group = output_gradient.shape[3], heads // key.shape[2]
    grid = length // CHUNK, heads, batch
    rows, scalars, pairs = token_block(width), scalar_block(group), pair_block()
    operands = [
        (token_block(width, group), errors),
        (scalars, beta),
        (rows, output_gradient),
        (rows, written_gradient),
    ]
    dtype = gradient_dtype(key, group)
    one_per_token = scalar_block(), (batch, heads, length), jnp.float32
    results = [(rows, output_gradient.shape, dtype), one_per_token]
    if sums.ndim == 3:
        (
            value_gradient, beta_gradient, query_gradient, key_gradient, decay_gradient
        ) = call_kernel(
            _backward_chunk,
            grid,
            [
                *operands,
                (token_block(size), query),
                (token_block(size, group), key),
                (scalars, sums),
                (state_block(size, width, group), before),
                (state_block(size, width), after),
                (pairs, scores),
            ],
            [
                *results,
                (token_block(size), query.shape, query.dtype),
                (token_block(size), query.shape, dtype),
                one_per_token,
            ],
            warps=4,
            interpret=interpret,
        )  # fmt: skip
        decay_gradient = jnp.swapaxes(decay_gradient, 1, 2)
    else:
        like_rows = rows, output_gradient.shape, key.dtype
        like_pairs = pairs, scores.shape, key.dtype
        value_gradient, beta_gradient, written, erased, by_queries, by_keys = (
            call_kernel(
                _values_and_pairs,
                grid,
                operands,
                [*results, like_rows, like_rows, like_pairs, like_pairs],
                warps=8,
                interpret=interpret,
            )
        )
        states = before, after
        query_gradient, key_gradient, decay_gradient = gated_channels.channel_gradients(
            interpret,
            (query.dtype, jnp.float32, jnp.float32),
            *(query, key, written, sums, output_gradient, *states, by_queries),
        )
        as_queries, as_keys, decays = gated_channels.channel_gradients(
            interpret,
            (jnp.float32,) * 3,
            jnp.repeat(key, group, axis=2),
            *(key, written, sums, erased, *states, by_keys),
            joins=False,
        )
        key_gradient = (key_gradient + as_queries + as_keys).astype(dtype)
        decay_gradient += decays
    beta_gradient = jnp.swapaxes(beta_gradient, 1, 2)
    return query_gradient, key_gradient, value_gradient, decay_gradient, beta_gradient


def _write_values_and_beta(
    errors: Any,
    beta: Any,
    written_gradient: Any,
    value_gradient: Any,
    beta_gradient: Any,
) -> tuple[Float[Array, "CHUNK V"], Float[Array, "CHUNK V"]]:
    """Write the gradients of values and β.

    Returns:
        What tokens write to the state, and the gradient of what keys read from it.
    """
    dtype, strength = errors.dtype, beta[...][:, None]
    missed, changed = load_float32(errors), load_float32(written_gradient)
    beta_gradient[...] = (missed * changed).sum(axis=1)
    value_gradient[...] = (strength * changed).astype(value_gradient.dtype)
    return (strength * missed).astype(dtype), (-strength * changed).astype(dtype)


def _values_and_pairs(
    errors, beta, output_gradient, written_gradient,
    value_gradient, beta_gradient, written, erased, by_queries, by_keys,
):  # fmt: skip
    """Write what `channel_gradients` needs, and the gradients of values and β.

    Args:
        written: what tokens write.
        erased: the gradient of what keys read from the state.
        by_queries, by_keys: the mirrored gradients of the pairs of a query and a key,
            and of two keys.
    """
    u, e = _write_values_and_beta(
        errors, beta, written_gradient, value_gradient, beta_gradient
    )
    written[...], erased[...] = u, e
    by_queries[...] = gated_channels.mirrored_gradients(output_gradient[...], u)
    pairs = gated_channels.mirrored_gradients(e, u)
    by_keys[...] = jnp.where(iota(0) == iota(1), jnp.zeros_like(pairs), pairs)


def _backward_chunk(
    errors, beta, output_gradient, written_gradient, query, key, sums, before, after,
    scores, value_gradient, beta_gradient, query_gradient, key_gradient, decay_gradient,
):  # fmt: skip
    """Write the gradients of a chunk, with a decay for each head.

    The gradient of a decay has a term for everything that the decay multiplies:

    - pairs of an earlier and a later token;
    - the state before the chunk, as queries and keys read it, and as it remains after
      the chunk;
    - what keys add to the state after the chunk.

    Channels are processed in blocks.
    """
    written, erased = _write_values_and_beta(
        errors, beta, written_gradient, value_gradient, beta_gradient
    )
    by_queries, by_decay = gated.pair_gradients(
        output_gradient[...], written, load_float32(scores), sums
    )
    pairs = dot(key[...], key[...], BY_LAST) * gated.pair_decays(sums, 1)
    by_keys, more = gated.pair_gradients(erased, written, pairs, sums, distance=1)
    block = min(BLOCK, query.shape[1])

    def write_channels(i, by_decay):
        at = pl.ds(i * block, block)
        queries, keys, state = query.at[:, at], key.at[:, at], before.at[at, :]
        reading = gated.reading_gradients
        found, read = reading(
            queries, keys, output_gradient[...], by_queries, sums, state
        )
        query_gradient[:, at] = found.astype(query_gradient.dtype)
        total = dot(by_queries, queries[...], TRANSPOSED)
        found, erases = reading(keys, keys, erased, by_keys, sums, state)
        total += found + dot(by_keys, keys[...], TRANSPOSED)
        found, joins = gated.writing_gradients(
            keys, written, sums, state, after.at[at, :]
        )
        key_gradient[:, at] = (total + found).astype(key_gradient.dtype)
        return by_decay + read + erases + joins

    decay_gradient[...] = jax.lax.fori_loop(
        0, query.shape[1] // block, write_channels, by_decay + more
    )
