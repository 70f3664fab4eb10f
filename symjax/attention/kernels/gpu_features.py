"""Normalised linear attention over features on NVIDIA GPUs, forward and backward.

    out[t] = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s)

Of exponents a row refers to the largest beside those of its chunk's keys and of the
state, which is its shift. It may lose the keys that it sees to a later one that way,
and its denominator tells.

All chunks stand side by side, and go from block to block of features.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from symjax.attention.features import finite
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
from symjax.attention.kernels.gpu_states import (
    Form,
    States,
    all_ids,
    rounded,
    states_after,
    states_before,
)


class Kept(NamedTuple):
    """What the gradient needs. The denominator of a row is times exp(−shift)."""

    states: States
    output: Float[Array, "B T N V"]
    shift: Float[Array, "B N T"]
    denominator: Float[Array, "B N T"]
    scores: Float[Array, "B N T CHUNK"]


def forward(
    form: Form,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    segment: Int[Array, "B T"],
) -> Kept:
    """T is a multiple of `CHUNK`, and M of a block. A row that sees nothing is 0."""
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    states = states_before(form, key, value, segment)
    rows = batch, heads, length
    found = call(
        partial(_rows, form),
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width, shared), value),
            (all_ids(length), segment),
            *_of_states(states, shared),
        ],
        [
            (token_block(width), (batch, length, heads, width), jnp.float32),
            (number_block(), rows, jnp.float32),
            (number_block(), rows, jnp.float32),
            (pair_block(), (*rows, CHUNK), jnp.float32),
        ],
        warps=4,
        interpret=form.interpret,
    )
    return Kept(states, *found)


def backward(
    form: Form,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    segment: Int[Array, "B T"],
    kept: Kept,
    change: Float[Array, "B T N V"],
) -> list[Array]:
    """Gradients of queries, keys and values, each of query heads."""
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    mean = (change.astype(jnp.float32) * kept.output).sum(axis=3)
    rows = jnp.swapaxes(mean, 1, 2), kept.shift, _inverse(kept.denominator)
    after = states_after(form, query, change, segment, kept.states, rows)
    highest = kept.states.highest
    return call(
        partial(_gradients, form),
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width, shared), value),
            (token_block(width), change),
            *((number_block(), x) for x in rows),
            (pair_block(), kept.scores),
            (all_ids(length), segment),
            *_of_states(kept.states, shared),
            (_of_chunk(size, shared, later=1), highest),
            (state_block(size, width), after.sums),
            (_of_chunk(size), after.total),
        ],
        [
            (token_block(size), query.shape, jnp.float32),
            (token_block(size), query.shape, jnp.float32),
            (token_block(width), change.shape, summed(value, shared)),
        ],
        warps=8,
        interpret=form.interpret,
    )


def _of_chunk(size: int, shared: int = 1, later: int = 0) -> Any:
    """[M] of [B heads blocks chunks M], `later` so many chunks."""
    return pl.BlockSpec(
        (None, None, None, None, size),
        lambda i, n, b: (b, n // shared, 0, i + later, 0),
    )


def _of_states(states: States, shared: int) -> list[tuple[Any, Array]]:
    size, width = states.sums.shape[3:]
    numbers = _of_chunk(size, shared)
    return [
        (state_block(size, width, shared), states.sums),
        (numbers, states.total),
        (numbers, states.highest),
    ]


def _inverse(denominator: Array) -> Array:
    return jnp.where(denominator > 0, 1 / denominator, 0.0)


def _seen(segment: Any) -> tuple[Array, Array, Array]:
    """Of a chunk: the pairs that see each other [CHUNK CHUNK], the rows that the state
    before reaches and the tokens that join the one after [CHUNK 1]."""
    first = pl.program_id(0) * CHUNK
    now = segment[pl.ds(first, CHUNK)]
    pairs = (iota(0) >= iota(1)) & (now[:, None] == now[None, :])
    before, last = segment[jnp.maximum(first - 1, 0)], segment[first + CHUNK - 1]
    return pairs, (now == before)[:, None], (now == last)[:, None]


def _rows(
    form, query, key, value, segment, before, totals, maxima,
    output, shifts, denominators, kept,
):  # fmt: skip
    """Weights of pairs and what is read of the state, by one block of features after
    the other: where one raises a row's shift, what was found so far shrinks."""
    pairs, reaches, _ = _seen(segment)
    block = min(BLOCK, query.shape[1])

    def part(i, found):
        output, scores, denominator, shift = found
        at = pl.ds(i * block, block)
        x, y, since = query[:, at], key[:, at], maxima[at]
        highest = finite(form.highest(y, since, 0))
        raised = form.highest(x + highest[None, :], shift, 1)
        fade = jnp.exp(shift - finite(raised))
        row = form.weights(x, highest[None, :] - finite(raised)[:, None])
        column = rounded(form.weights(y, -highest[None, :]))
        scores = scores * fade[:, None] + dot(rounded(row), column, BY_LAST)
        row *= jnp.exp(since - highest)[None, :]
        row = rounded(jnp.where(reaches, row, 0.0))
        output = output * fade[:, None] + dot(row, before[at, :])
        read = (row * totals[at][None, :]).sum(axis=1)
        return output, scores, denominator * fade + read, raised

    start = (
        jnp.zeros(output.shape, jnp.float32),
        jnp.zeros((CHUNK, CHUNK), jnp.float32),
        jnp.zeros((CHUNK,), jnp.float32),
        jnp.full((CHUNK,), form.nothing, jnp.float32),
    )
    found = jax.lax.fori_loop(0, query.shape[1] // block, part, start)
    rows, scores, denominator, shift = found
    scores = rounded(jnp.where(pairs, scores, 0.0))
    kept[...] = scores
    rows += dot(scores, wide(value))
    denominator += scores.sum(axis=1)
    output[...] = rows * _inverse(denominator)[:, None]
    shifts[...], denominators[...] = finite(shift), denominator


def _gradients(
    form, query, key, value, change, mean, shift, inverse, scores, segment,
    before, totals, maxima, until, after, of_totals,
    of_query, of_key, of_value,
):  # fmt: skip
    """maxima, until: the largest exponents before and after the chunk.

    What a program loads again, and in parts, is what registers do not hold.
    """
    pairs, reaches, joins = _seen(segment)
    mean, shift, inverse = (x[...][:, None] for x in (mean, shift, inverse))
    weighed = dot(change[...], value[...], BY_LAST) - mean
    weighed = rounded(jnp.where(pairs, weighed, 0.0))
    block, some = min(BLOCK, query.shape[1]), min(BLOCK, value.shape[1])

    def joining(at):
        fades = form.weights(key[:, at], -finite(until[at])[None, :])
        return rounded(jnp.where(joins, fades, 0.0))

    def written(i, found):
        at = pl.ds(i * block, block)
        return found + dot(joining(at), after[at, :])

    found = dot(rounded(scores[...] * inverse), wide(change), TRANSPOSED)
    found = jax.lax.fori_loop(0, query.shape[1] // block, written, found)
    of_value[...] = found.astype(of_value.dtype)

    def part(i, _):
        at = pl.ds(i * block, block)

        def through_states(j, found):
            here, (by_row, by_joining) = pl.ds(j * some, some), found
            by_row += dot(wide(change.at[:, here]), before[at, here], BY_LAST)
            by_joining += dot(wide(value.at[:, here]), after[at, here], BY_LAST)
            return by_row, by_joining

        nothing = jnp.zeros((CHUNK, block), jnp.float32)
        found = jax.lax.fori_loop(
            0, value.shape[1] // some, through_states, (nothing, nothing)
        )
        by_row = found[0] - mean * totals[at][None, :]
        by_joining = found[1] + of_totals[at][None, :]
        y, since = key[:, at], maxima[at]
        highest = finite(form.highest(y, since, 0))
        row = form.weights(query[:, at], highest[None, :] - shift)
        row = rounded(row * inverse)
        column = rounded(form.weights(y, -highest[None, :]))
        by_row = jnp.where(reaches, by_row * jnp.exp(since - highest)[None, :], 0.0)
        by_row += dot(weighed, column)
        by_column = dot(weighed, row, TRANSPOSED)
        of_query[:, at] = by_row * form.slope(row, inverse)
        by_joining *= form.slope(joining(at), jnp.where(joins, 1.0, 0.0))
        of_key[:, at] = by_column * form.slope(column, 1.0) + by_joining
        return 0

    jax.lax.fori_loop(0, query.shape[1] // block, part, 0)
