"""Decays of a head, forward and backward, on NVIDIA GPUs: all chunks side by side."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.kernels.gpu_chunks import (
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    call,
    decaying_states,
    dot,
    iota,
    number_block,
    pair_block,
    rows_of,
    state_block,
    sums_of,
    token_block,
    wide,
)


def forward(
    interpret: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K"],
) -> tuple[Array, Array, Array]:
    """The output, the state before each chunk, and the scores of its pairs."""
    sums = jnp.swapaxes(sums_of(log_decay), 1, 2)
    block = number_block(query.shape[2] // key.shape[2])
    return rows_of(_rows, interpret, query, key, value, sums, block)


def _rows(query, key, value, sums, before, output, kept):
    dtype = value.dtype
    scores = dot(query[...], key[...], BY_LAST) * _weights(sums)
    kept[...] = scores.astype(dtype)
    read = dot(query[...], before[...]) * jnp.exp2(sums[...])[:, None]
    output[...] = (read + dot(scores.astype(dtype), value[...])).astype(dtype)


def _weights(sums: Any) -> Float[Array, "CHUNK CHUNK"]:
    between = jnp.exp2(sums[...][:, None] - sums[...][None, :])
    return jnp.where(iota(0) >= iota(1), between, 0.0)


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
    sums = jnp.swapaxes(sums_of(log_decay), 1, 2)
    after = decaying_states(query, change, sums, True, interpret)
    dtype = value.dtype if shared == 1 else jnp.float32
    of_query, of_key, of_value, of_decay = call(
        _gradients,
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width, shared), value),
            (number_block(shared), sums),
            (token_block(width), change),
            (state_block(size, width, shared), before),
            (state_block(size, width), after),
            (pair_block(), scores),
        ],
        [
            (token_block(size), query.shape, query.dtype),
            (token_block(size), query.shape, dtype),
            (token_block(width), change.shape, dtype),
            (number_block(), (batch, heads, length), jnp.float32),
        ],
        warps=8,
        interpret=interpret,
    )
    return of_query, of_key, of_value, jnp.swapaxes(of_decay, 1, 2)


def _gradients(
    query, key, value, sums, change, before, after, scores,
    of_query, of_key, of_value, of_decay,
):  # fmt: skip
    """after: the gradient of the state after the chunk. A decay's gradient is the sum
    over what it fades: pairs across it, the state before, keys for the state after."""
    dtype, last = value.dtype, sums[CHUNK - 1]
    row, column = iota(0), iota(1)

    def until():  # made anew where it is used: it would take registers
        return jnp.exp2(last - sums[...])[:, None]

    weighed = dot(change[...], value[...], BY_LAST)
    grown = (weighed * wide(scores)).astype(dtype)
    later = jnp.where(row <= column, 1.0, 0.0).astype(dtype)
    fades = jnp.where(column < row, dot(later, grown), 0.0).sum(axis=1)
    weighed = (weighed * _weights(sums)).astype(dtype)

    found = dot(key[...], after[...]) * until()
    found += dot(scores[...], change[...], TRANSPOSED)
    of_value[...] = found.astype(of_value.dtype)

    found = dot(change[...], before[...], BY_LAST) * jnp.exp2(sums[...])[:, None]
    read = (found * wide(query)).sum(axis=1)
    fades += jnp.where(row <= column, read[None, :], 0.0).sum(axis=1)
    found += dot(weighed, key[...])
    of_query[...] = found.astype(of_query.dtype)

    found = dot(value[...], after[...], BY_LAST) * until()
    written = (found * wide(key)).sum(axis=1)
    fades += jnp.where(row > column, written[None, :], 0.0).sum(axis=1)
    found += dot(weighed, query[...], TRANSPOSED)
    of_key[...] = found.astype(of_key.dtype)

    through = (wide(before) * wide(after)).sum(axis=1).sum(axis=0)
    of_decay[...] = fades + through * jnp.exp2(last)
