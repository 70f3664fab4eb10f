"""Decays of a head, forward and backward, on NVIDIA GPUs: all chunks side by side."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.kernels.gpu.chunks import (
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
    summed,
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
    write_rows(query, key, value[...], sums, before, output, kept)


def scores_of(query: Any, key: Any, sums: Any) -> Float[Array, "CHUNK CHUNK"]:
    return dot(query[...], key[...], BY_LAST) * weights(sums)


def write_rows(query, key, value: Array, sums, before, output, kept) -> None:
    scores = scores_of(query, key, sums)
    kept[...] = scores.astype(value.dtype)
    read = dot(query[...], before[...]) * jnp.exp2(sums[...])[:, None]
    output[...] = (read + dot(scores.astype(value.dtype), value)).astype(value.dtype)


def weights(sums: Any, since: int = 0) -> Float[Array, "CHUNK CHUNK"]:
    """What is left at each token of each one that is so long past."""
    between = jnp.exp2(sums[...][:, None] - sums[...][None, :])
    return jnp.where(iota(0) - iota(1) >= since, between, 0.0)


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
    dtype = summed(value, shared)
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
    found = dot(key[...], after[...]) * until(sums)
    found += dot(scores[...], change[...], TRANSPOSED)
    of_value[...] = found.astype(of_value.dtype)
    rows, written = change[...], value[...]
    weighed, fades = of_pairs(rows, written, wide(scores), sums)
    found, read = of_reading(query, key, rows, weighed, sums, before)
    of_query[...] = found.astype(of_query.dtype)
    found, joined = of_writing(key, written, sums, before, after)
    found += dot(weighed, query[...], TRANSPOSED)
    of_key[...] = found.astype(of_key.dtype)
    of_decay[...] = fades + read + joined


def until(sums: Any) -> Float[Array, "CHUNK 1"]:
    """The decays after each token; made anew where used, since it takes registers."""
    return jnp.exp2(sums[CHUNK - 1] - sums[...])[:, None]


def of_pairs(
    change: Float[Array, "CHUNK V"],
    written: Float[Array, "CHUNK V"],
    scores: Float[Array, "CHUNK CHUNK"],
    sums: Any,
    since: int = 0,
) -> tuple[Float[Array, "CHUNK CHUNK"], Float[Array, " CHUNK"]]:
    """The gradients of products with keys `since` so many tokens, and of decays, by
    that of the rows."""
    row, column = iota(0), iota(1)
    weighed = dot(change, written, BY_LAST)
    grown = (weighed * scores).astype(written.dtype)
    later = jnp.where(row <= column, 1.0, 0.0).astype(written.dtype)
    fades = jnp.where(column < row, dot(later, grown), 0.0).sum(axis=1)
    return (weighed * weights(sums, since)).astype(written.dtype), fades


def of_reading(
    query: Any,
    key: Any,
    change: Float[Array, "CHUNK V"],
    weighed: Float[Array, "CHUNK CHUNK"],
    sums: Any,
    before: Any,
) -> tuple[Float[Array, "CHUNK H"], Float[Array, " CHUNK"]]:
    """The gradients of what asks, and of decays by what it reads of the state."""
    found = dot(change, before[...], BY_LAST) * jnp.exp2(sums[...])[:, None]
    read = (found * wide(query)).sum(axis=1)
    fades = jnp.where(iota(0) <= iota(1), read[None, :], 0.0).sum(axis=1)
    return found + dot(weighed, key[...]), fades


def of_writing(
    key: Any,
    written: Float[Array, "CHUNK V"],
    sums: Any,
    before: Any,
    after: Any,
) -> tuple[Float[Array, "CHUNK H"], Float[Array, " CHUNK"]]:
    """The gradients of keys, and of decays, by that of the state after the chunk."""
    found = dot(written, after[...], BY_LAST) * until(sums)
    joined = (found * wide(key)).sum(axis=1)
    fades = jnp.where(iota(0) > iota(1), joined[None, :], 0.0).sum(axis=1)
    through = (wide(before) * wide(after)).sum(axis=1).sum(axis=0)
    return found, fades + through * jnp.exp2(sums[CHUNK - 1])
