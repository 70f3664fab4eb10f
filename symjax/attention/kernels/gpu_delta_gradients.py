"""Gradients of the delta rule on NVIDIA GPUs, of all chunks side by side.

With w what tokens miss, u = β w what they write, and r the gradient of u, that of
values is β r, that of β is r·w, and a key asks its state like a query whose row has the
gradient −β r.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels import gpu_channels, gpu_heads
from symjax.attention.kernels.gpu_chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    call,
    dot,
    iota,
    number_block,
    pair_block,
    state_block,
    summed,
    token_block,
    wide,
)


def gradients(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    missing: Float[Array, "B T K V"],
    sums: Float[Array, "B T K H"] | Float[Array, "B K T"],
    beta: Float[Array, "B K T"],
    change: Float[Array, "B T N V"],
    of_written: Float[Array, "B T N V"],
    before: Float[Array, "B K chunks H V"],
    after: Float[Array, "B N chunks H V"],
    scores: Float[Array, "B N T CHUNK"],
) -> tuple[Array, ...]:
    """Those of query, key, value, decay and β, each of query heads.

    Args:
        of_written, after: gradients, of u and of the state after each chunk.
    """
    batch, length, heads, size = query.shape
    width, shared = change.shape[3], heads // key.shape[2]
    grid = length // CHUNK, heads, batch
    rows, numbers, pairs = token_block(width), number_block(shared), pair_block()
    operands = [
        (token_block(width, shared), missing),
        (numbers, beta),
        (rows, change),
        (rows, of_written),
    ]
    dtype = summed(key, shared)
    of_numbers = number_block(), (batch, heads, length), jnp.float32
    results = [(rows, change.shape, dtype), of_numbers]
    if sums.ndim == 3:
        of_value, of_beta, of_query, of_key, of_decay = call(
            _gradients,
            grid,
            [
                *operands,
                (token_block(size), query),
                (token_block(size, shared), key),
                (numbers, sums),
                (state_block(size, width, shared), before),
                (state_block(size, width), after),
                (pairs, scores),
            ],
            [
                *results,
                (token_block(size), query.shape, query.dtype),
                (token_block(size), query.shape, dtype),
                of_numbers,
            ],
            warps=4,
            interpret=interpret,
        )
        of_decay = jnp.swapaxes(of_decay, 1, 2)
    else:
        narrow = [(rows, change.shape, key.dtype), (pairs, scores.shape, key.dtype)]
        of_value, of_beta, written, erased, of_queries, of_keys = call(
            _of_pairs,
            grid,
            operands,
            results + [x for x in narrow for _ in range(2)],
            warps=8,
            interpret=interpret,
        )
        states = before, after
        of_query, of_key, of_decay = gpu_channels.of_channels(
            interpret,
            (query.dtype, jnp.float32, jnp.float32),
            *(query, key, written, sums, change, *states, of_queries),
        )
        asking, joined, decays = gpu_channels.of_channels(
            interpret,
            (jnp.float32,) * 3,
            jnp.repeat(key, shared, axis=2),
            *(key, written, sums, erased, *states, of_keys),
            joins=False,
        )
        of_key = (of_key + asking + joined).astype(dtype)
        of_decay += decays
    return of_query, of_key, of_value, of_decay, jnp.swapaxes(of_beta, 1, 2)


def _of_rows(
    missing: Any, beta: Any, of_written: Any, of_value: Any, of_beta: Any
) -> tuple[Float[Array, "CHUNK V"], Float[Array, "CHUNK V"]]:
    """Writes the gradients of values and β. Returns what is written to the state, and
    the gradient of what keys read of it."""
    dtype, strength = missing.dtype, beta[...][:, None]
    missed, changed = wide(missing), wide(of_written)
    of_beta[...] = (missed * changed).sum(axis=1)
    of_value[...] = (strength * changed).astype(of_value.dtype)
    return (strength * missed).astype(dtype), (-strength * changed).astype(dtype)


def _of_pairs(
    missing, beta, change, of_written,
    of_value, of_beta, written, erased, of_queries, of_keys,
):  # fmt: skip
    u, e = _of_rows(missing, beta, of_written, of_value, of_beta)
    written[...], erased[...] = u, e
    of_queries[...] = gpu_channels.mirrored(change[...], u)
    pairs = gpu_channels.mirrored(e, u)
    of_keys[...] = jnp.where(iota(0) == iota(1), jnp.zeros_like(pairs), pairs)


def _gradients(
    missing, beta, change, of_written, query, key, sums, before, after, scores,
    of_value, of_beta, of_query, of_key, of_decay,
):  # fmt: skip
    """A decay's gradient is the sum over what it fades: pairs across it, the state
    before, which queries and keys ask, and keys for the state after."""
    written, erased = _of_rows(missing, beta, of_written, of_value, of_beta)
    of_queries, fades = gpu_heads.of_pairs(change[...], written, wide(scores), sums)
    pairs = dot(key[...], key[...], BY_LAST) * gpu_heads.weights(sums, 1)
    of_keys, more = gpu_heads.of_pairs(erased, written, pairs, sums, since=1)
    block = min(BLOCK, query.shape[1])

    def part(i, fades):
        at = pl.ds(i * block, block)
        asking, keys, state = query.at[:, at], key.at[:, at], before.at[at, :]
        reading = gpu_heads.of_reading
        found, read = reading(asking, keys, change[...], of_queries, sums, state)
        of_query[:, at] = found.astype(of_query.dtype)
        whole = dot(of_queries, asking[...], TRANSPOSED)
        found, erases = reading(keys, keys, erased, of_keys, sums, state)
        whole += found + dot(of_keys, keys[...], TRANSPOSED)
        given = keys, written, sums, state, after.at[at, :]
        found, joins = gpu_heads.of_writing(*given)
        of_key[:, at] = (whole + found).astype(of_key.dtype)
        return fades + read + erases + joins

    of_decay[...] = jax.lax.fori_loop(0, query.shape[1] // block, part, fades + more)
