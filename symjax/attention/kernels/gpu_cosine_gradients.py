"""Gradients of cosine attention on NVIDIA GPUs: those of states after each chunk by one
pass back over time, then those of all chunks side by side.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.cosine import ROUNDING
from symjax.attention.kernels.gpu_chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    all_numbers,
    call,
    dot,
    number_block,
    pair_block,
    state_block,
    summed,
    token_block,
    wide,
)
from symjax.attention.kernels.gpu_cosine import (
    Given,
    Kept,
    Programs,
    centred,
    counts_block,
    direction,
    exact,
)
from symjax.attention.kernels.gpu_normalised import of_chunk, rounded, seen_in_chunk


def backward(
    given: Given, kept: Kept, change: Float[Array, "B T N V"], *, interpret: Any
) -> list[Array]:
    """By query heads: gradients of directions of queries and of keys, in which so many
    times the direction itself is too much; of values; and these numbers, of queries
    and of keys [B N T]."""
    query, key, value = given[:3]
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], given.shared
    states, output, weights, past, scale = kept
    along = (change.astype(jnp.float32) * output).sum(axis=3)
    along = jnp.swapaxes(along, 1, 2)
    after = _states_after(given, change, along, kept, interpret)
    numbers = number_block(), (batch, heads, length), jnp.float32
    return call(
        _gradients,
        (length // CHUNK, heads, batch),
        [
            *given.operands(),
            *states.operands(shared),
            (token_block(width), change),
            *((number_block(), x) for x in (along, past, scale)),
            (pair_block(), weights),
            (state_block(size, width), after[0]),
            (of_chunk(size), after[1]),
            (of_chunk(width), after[2]),
        ],
        [
            (token_block(size), query.shape, jnp.float32),
            (token_block(size), query.shape, jnp.float32),
            (token_block(width), change.shape, summed(value, shared)),
            numbers,
            numbers,
        ],
        warps=8,
        interpret=interpret,
    )


def _states_after(
    given: Given, change: Array, along: Array, kept: Kept, interpret: Any
) -> list[Array]:
    """Gradients of Σ k̂ vᵀ, Σ k̂ and Σ v after each chunk, of query heads."""
    query, lengths = given.query, given.asking
    grid, blocks, results = Programs.of(query, change)
    length, count = query.shape[1], kept.states.count
    numbers = lengths, along, kept.past, kept.scale
    return call(
        _after,
        grid,
        [
            *zip(blocks, (query, change), strict=True),
            *((all_numbers(length, 1), x) for x in numbers),
            *given.ids.operands(),
            (counts_block(count.shape[3], given.shared), count),
        ],
        results,
        warps=4,
        stages=3,
        interpret=interpret,
    )


def _after(
    query, change, length, along, past, scale, segment, _, counts,
    after, totals, firsts,
):  # fmt: skip
    count, size, width = after.shape

    def step(i, state):
        i, (sums, total, first) = count - 1 - i, state
        after[i], totals[i], firsts[i] = sums, total, first
        here, last = pl.ds(i * CHUNK, CHUNK), segment[i * CHUNK + CHUNK - 1]
        previous = segment[jnp.maximum(i * CHUNK - 1, 0)]
        keeps, reaches = previous == last, segment[here] == previous
        reads = past[here] > ROUNDING * counts[i]
        row = direction(query.at[here, :], length[here]) * scale[here][:, None]
        row = jnp.where((reaches & reads)[:, None], row, 0.0)
        less = row * jnp.where(reaches, along[here], 0.0)[:, None]
        changed = change[here, :]
        changed = jnp.where(reaches[:, None], changed, jnp.zeros((), changed.dtype))
        # Rows that do not read have ε Σ v in place of Σ v + q̂·Σ k̂ vᵀ.
        lifted = jnp.where(reads, 1.0, ROUNDING) * scale[here]
        lifted = jnp.where(reaches[:, None], wide(changed) * lifted[:, None], 0.0)
        sums = jnp.where(keeps, sums, 0.0) + exact(row, changed, TRANSPOSED)
        total = jnp.where(keeps, total, 0.0) - less.sum(axis=0)
        first = jnp.where(keeps, first, 0.0) + lifted.sum(axis=0)
        return sums, total, first

    start = [jnp.zeros(x, jnp.float32) for x in ((size, width), size, width)]
    jax.lax.fori_loop(0, count, step, tuple(start))


def _gradients(
    query, key, value, asking, asked, segment, shown, rest, totals, mean, counts,
    change, along, past, scale, weights, after, of_totals, of_first,
    of_query, of_key, of_value, by_row, by_key,
):  # fmt: skip
    _, reaches, joins, continues = seen_in_chunk(segment, shown)
    asking, asked = asking[...], asked[...]
    number = counts[pl.program_id(0)]
    reads = reaches & (past[...] > ROUNDING * number)[:, None]
    along, scale = along[...][:, None], scale[...][:, None]
    size, width = query.shape[1], value.shape[1]
    block, some = min(BLOCK, size), min(BLOCK, width)

    def of_values(j, _):
        here = pl.ds(j * some, some)

        def written(i, found):
            at = pl.ds(i * block, block)
            return found + exact(direction(key.at[:, at], asked), after[at, here])

        found = jnp.broadcast_to(of_first[here][None, :], (CHUNK, some))
        found = jax.lax.fori_loop(0, size // block, written, found)
        found = jnp.where(joins, found, 0.0)
        given = rounded(weights[...] * scale)
        found += dot(given, wide(change.at[:, here]), TRANSPOSED)
        of_value[:, here] = found.astype(of_value.dtype)
        return 0

    jax.lax.fori_loop(0, width // some, of_values, 0)

    of_pairs = dot(change[...], value[...], BY_LAST)
    of_pairs = jnp.where(weights[...] > 0, scale * (of_pairs - along), 0.0)
    rows, columns = of_pairs.sum(axis=1), of_pairs.sum(axis=0)
    by_row[...], by_key[...] = rows, columns
    of_mean = (wide(change) * mean[...][None, :]).sum(axis=1)[:, None]

    def through(state, tokens, at):
        def read(j, found):
            here = pl.ds(j * some, some)
            return found + exact(tokens[:, here], state(at, here), BY_LAST)

        nothing = jnp.zeros((CHUNK, block), jnp.float32)
        return jax.lax.fori_loop(0, width // some, read, nothing)

    def before(*at):
        return jnp.where(continues, rest[at], 0.0)

    def later(*at):
        return after[at]

    def around(at):
        unit = direction(query.at[:, at], asking)
        return centred(unit, direction(key.at[:, at], asked), asked)

    def of_asking(i, _):
        at = pl.ds(i * block, block)
        found = through(before, change, at)
        found += (of_mean - along) * totals[at][None, :]
        found = jnp.where(reads, scale * found, 0.0)
        row, column = around(at)
        of_query[:, at] = found + exact(of_pairs, column) + rows[:, None] * row
        return 0

    def of_asked(i, _):
        at = pl.ds(i * block, block)
        found = through(later, value, at) + of_totals[at][None, :]
        found = jnp.where(joins, found, 0.0)
        row, column = around(at)
        found += exact(of_pairs, row, TRANSPOSED) + columns[:, None] * column
        of_key[:, at] = found
        return 0

    jax.lax.fori_loop(0, size // block, of_asking, 0)
    jax.lax.fori_loop(0, size // block, of_asked, 0)
