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
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import finite
from symjax.attention.kernels.gpu.chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    call,
    dot,
    number_block,
    pair_block,
    state_block,
    summed,
    token_block,
    wide,
)
from symjax.attention.kernels.gpu.states import (
    Form,
    Ids,
    States,
    of_chunk,
    rounded,
    seen_in_chunk,
    states_after,
    states_before,
)


class Kept(NamedTuple):
    """What the gradient needs. The denominator of a row is of weights that its shift
    made at most 1."""

    states: States
    shift: Float[Array, "B N T"]
    denominator: Float[Array, "B N T"]
    output: Float[Array, "B T N V"]  # not rounded
    scores: Float[Array, "B N T CHUNK"]


def forward(
    form: Form,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    ids: Ids,
    *,
    keep: bool,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"], Kept | None]:
    """The output, its denominators, and what to keep. A row that sees nothing is 0.

    T is a multiple of `CHUNK`, and M of a block.
    """
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    states = states_before(form, key, value, ids)
    rows, shape = (batch, heads, length), (batch, length, heads, width)
    more = [
        (token_block(width), shape, jnp.float32),
        (pair_block(), (*rows, CHUNK), jnp.float32),
    ]
    output, shift, denominator, *found = call(
        partial(_rows, form),
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width, shared), value),
            *ids.operands(),
            *_of_states(states, shared),
        ],
        [
            (token_block(width), shape, value.dtype),
            (number_block(), rows, jnp.float32),
            (number_block(), rows, jnp.float32),
            *(more if keep else []),
        ],
        warps=4,
        interpret=form.interpret,
    )
    kept = Kept(states, shift, denominator, *found) if keep else None
    return output, denominator, kept


def backward(
    form: Form,
    query: Float[Array, "B T N M"],
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    ids: Ids,
    kept: Kept,
    change: Float[Array, "B T N V"],
) -> list[Array]:
    """Gradients of queries, keys and values, each of query heads."""
    batch, length, heads, size = query.shape
    width, shared = value.shape[3], heads // key.shape[2]
    states, shift, denominator, output, scores = kept
    mean = (change.astype(jnp.float32) * output).sum(axis=3)
    rows = jnp.swapaxes(mean, 1, 2), shift, form.inverse(denominator)
    after = states_after(form, query, change, ids, states, rows)
    return call(
        partial(_gradients, form),
        (length // CHUNK, heads, batch),
        [
            (token_block(size), query),
            (token_block(size, shared), key),
            (token_block(width, shared), value),
            (token_block(width), change),
            *((number_block(), x) for x in rows),
            (pair_block(), scores),
            *ids.operands(),
            *_of_states(states, shared),
            (of_chunk(size, shared, later=1), states.highest),
            (state_block(size, width), after.sums),
            (of_chunk(size), after.total),
        ],
        [
            (token_block(size), query.shape, query.dtype),
            (token_block(size), query.shape, summed(key, shared)),
            (token_block(width), change.shape, summed(value, shared)),
        ],
        warps=8,
        interpret=form.interpret,
    )


def _of_states(states: States, shared: int) -> list[tuple[Any, Array]]:
    size, width = states.sums.shape[3:]
    numbers = of_chunk(size, shared)
    return [
        (state_block(size, width, shared), states.sums),
        (numbers, states.total),
        (numbers, states.highest),
    ]


def _rows(
    form, query, key, value, segment, shown, before, totals, maxima,
    output, shifts, denominators, *kept,
):  # fmt: skip
    """Weights of pairs and what is read of the state, by one block of features after
    the other: where one raises a row's shift, what was found so far shrinks."""
    pairs, reaches, _, continues = seen_in_chunk(segment, shown)
    block = min(BLOCK, query.shape[1])

    def part(i, found):
        rows, scores, denominator, shift = found
        at = pl.ds(i * block, block)
        x, y = wide(query.at[:, at]), wide(key.at[:, at])
        since = jnp.where(continues, maxima[at], form.nothing)
        highest = finite(form.highest(y, since, 0))[None, :]
        raised = form.highest(x + highest, shift, 1)
        fade = jnp.exp(shift - finite(raised))[:, None]
        row = form.asking(x, highest, finite(raised)[:, None])
        column = rounded(form.asked(y, highest))
        scores = scores * fade + dot(rounded(row), column, BY_LAST)
        row = jnp.where(reaches, row * jnp.exp(since[None, :] - highest), 0.0)
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
    found = jax.lax.fori_loop(0, query.shape[1] // block, part, start)
    rows, scores, denominator, shift = found
    scores = rounded(jnp.where(pairs, scores, 0.0))
    rows += dot(scores, wide(value))
    denominator += scores.sum(axis=1)
    rows *= form.inverse(denominator)[:, None]
    output[...] = rows.astype(output.dtype)
    shifts[...], denominators[...] = finite(shift), denominator
    for ref, x in zip(kept, (rows, scores), strict=False):
        ref[...] = x


def _first_shift(form, query, block: int) -> Float[Array, " CHUNK"]:
    """The largest feature of each query, by which all are divided: products of features
    would leave float32 long before they do. It cancels."""
    if form.exponents:
        return jnp.full((CHUNK,), -jnp.inf, jnp.float32)
    if form.bounded:
        return jnp.ones((CHUNK,), jnp.float32)

    def part(i, largest):
        features = form.of(wide(query.at[:, pl.ds(i * block, block)]))
        return jnp.maximum(largest, features.max(axis=1))

    largest = jnp.zeros((CHUNK,), jnp.float32)
    largest = jax.lax.fori_loop(0, query.shape[1] // block, part, largest)
    return jnp.where(largest > 0, largest, 1.0)


def _gradients(
    form, query, key, value, change, mean, shift, inverse, scores, segment, shown,
    before, totals, maxima, until, after, of_totals,
    of_query, of_key, of_value,
):  # fmt: skip
    """maxima, until: the largest exponents before and after the chunk.

    What a program loads again, and in parts, is what registers do not hold. Changes
    meet denominators first, or their products with features would leave float32.
    """
    pairs, reaches, joins, continues = seen_in_chunk(segment, shown)
    mean, shift, inverse = (x[...][:, None] for x in (mean, shift, inverse))
    power, rest = _in_powers(inverse)
    mean *= power
    weighed = dot(wide(change) * power, wide(value), BY_LAST) - mean
    weighed = rounded(jnp.where(pairs, weighed, 0.0))
    block, some = min(BLOCK, query.shape[1]), min(BLOCK, value.shape[1])

    def joining(at):
        fades = form.asked(wide(key.at[:, at]), finite(until[at])[None, :])
        return rounded(jnp.where(joins, fades, 0.0))

    def written(i, found):
        at = pl.ds(i * block, block)
        return found + jnp.where(joins, dot(joining(at), after[at, :]), 0.0)

    found = dot(rounded(scores[...] * inverse), wide(change), TRANSPOSED)
    found = jax.lax.fori_loop(0, query.shape[1] // block, written, found)
    of_value[...] = found.astype(of_value.dtype)

    def part(i, _):
        at = pl.ds(i * block, block)

        def through_states(j, found):
            here, (by_row, by_joining) = pl.ds(j * some, some), found
            by_row += dot(wide(change.at[:, here]) * power, before[at, here], BY_LAST)
            by_joining += dot(wide(value.at[:, here]), after[at, here], BY_LAST)
            return by_row, by_joining

        nothing = jnp.zeros((CHUNK, block), jnp.float32)
        found = jax.lax.fori_loop(
            0, value.shape[1] // some, through_states, (nothing, nothing)
        )
        by_row = found[0] - mean * totals[at][None, :]
        by_joining = found[1] + of_totals[at][None, :]
        x, y = wide(query.at[:, at]), wide(key.at[:, at])
        since = jnp.where(continues, maxima[at], form.nothing)
        highest = finite(form.highest(y, since, 0))[None, :]
        row = rounded(form.asking(x, highest, shift) * rest)
        column = rounded(form.asked(y, highest))
        by_row = jnp.where(reaches, by_row * jnp.exp(since[None, :] - highest), 0.0)
        by_row += dot(weighed, column)
        by_row = form.of_asking(by_row, x, row, rest, shift)
        by_column = form.of_asked(dot(weighed, row, TRANSPOSED), y, column)
        by_joining = form.of_asked(by_joining, y, joining(at))
        by_column += jnp.where(joins, by_joining, 0.0)
        of_query[:, at] = by_row.astype(of_query.dtype)
        of_key[:, at] = by_column.astype(of_key.dtype)
        return 0

    jax.lax.fori_loop(0, query.shape[1] // block, part, 0)


def _in_powers(x: Array) -> tuple[Array, Array]:
    """A power of two, by which nothing is rounded, and what x is of it."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return power, jnp.where(power > 0, x / power, 0.0)
