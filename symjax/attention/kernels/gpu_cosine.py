"""Causal cosine attention on NVIDIA GPUs: weights 1 + q̂·k̂, with x̂ = x / (|x| + 1e-6).

One pass over time for the states before each chunk, then all chunks side by side, from
block to block of a head; backward the same in reverse. Directions are made in here, of
inputs and their lengths. A state is Σ k̂ vᵀ, Σ k̂, Σ v and the number of its keys.

What cancels is taken around a centre, as on a TPU (`cosine.py`): pairs around the mean
of their keys' directions, and a state around the mean of its values. Products that
cancel take operands of float32 in two parts of TF32 each, and lose 2⁻²². Weights of
pairs meet values as TF32, and are rounded so in their sum, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.cosine import EPSILON, ROUNDING
from symjax.attention.kernels.gpu_chunks import (
    BLOCK,
    BY_LAST,
    CHUNK,
    TRANSPOSED,
    all_numbers,
    all_states,
    all_tokens,
    call,
    dot,
    number_block,
    pair_block,
    parts,
    state_block,
    token_block,
    wide,
)
from symjax.attention.kernels.gpu_normalised import (
    Ids,
    all_sums,
    of_chunk,
    rounded,
    seen_in_chunk,
)


class Given(NamedTuple):
    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    asking: Float[Array, "B N T"]  # the lengths of queries
    asked: Float[Array, "B K T"]  # and of keys
    ids: Ids

    @property
    def shared(self) -> int:
        return self.query.shape[2] // self.key.shape[2]

    def operands(self) -> list[tuple[Any, Array]]:
        """For a grid of chunks."""
        query, key, value, asking, asked, ids = self
        return [
            (token_block(query.shape[3]), query),
            (token_block(key.shape[3], self.shared), key),
            (token_block(value.shape[3], self.shared), value),
            (number_block(), asking),
            (number_block(self.shared), asked),
            *ids.operands(),
        ]


class States(NamedTuple):
    """Before each chunk. What a program for a block of the first finds beside it stands
    once for each block that it does not depend on."""

    rest: Float[Array, "B K chunks H V"]  # Σ k̂ (v − mean)ᵀ
    total: Float[Array, "B K blocks chunks H"]  # Σ k̂
    mean: Float[Array, "B K blocks chunks V"]
    count: Float[Array, "B K blocks chunks"]

    def operands(self, shared: int) -> list[tuple[Any, Array]]:
        chunks, size, width = self.rest.shape[2:]
        return [
            (state_block(size, width, shared), self.rest),
            (of_chunk(size, shared), self.total),
            (of_chunk(width, shared), self.mean),
            (counts_block(chunks, shared), self.count),
        ]


class Kept(NamedTuple):
    """What the gradient needs."""

    states: States
    output: Float[Array, "B T N V"]  # not rounded
    weights: Float[Array, "B N T CHUNK"]  # of pairs
    past: Float[Array, "B N T"]  # the sum of the weights of what the state holds
    scale: Float[Array, "B N T"]  # 1 / the sum of all weights


def forward(
    given: Given, *, keep: bool, interpret: Any
) -> tuple[Float[Array, "B T N V"], Kept | None]:
    """The output, and what to keep. A row that sees nothing is 0."""
    batch, length, heads = given.query.shape[:3]
    width = given.value.shape[3]
    states = _states_before(given, interpret)
    rows, shape = (batch, heads, length), (batch, length, heads, width)
    more = [
        (token_block(width), shape, jnp.float32),
        (pair_block(), (*rows, CHUNK), jnp.float32),
        (number_block(), rows, jnp.float32),
        (number_block(), rows, jnp.float32),
    ]
    output, *found = call(
        _rows,
        (length // CHUNK, heads, batch),
        [*given.operands(), *states.operands(given.shared)],
        [(token_block(width), shape, given.value.dtype), *(more if keep else [])],
        warps=8,
        interpret=interpret,
    )
    return output, Kept(states, *found) if keep else None


def exact(one: Array, two: Array, contract: tuple = ((1,), (0,))) -> Array:
    """The product of float32, or of bfloat16, which is TF32 already."""
    pieces = []
    for x in (one, two):
        high = x.astype(jnp.float32)
        pieces.append([high])
        if x.dtype == jnp.float32:
            high = rounded(x)
            pieces[-1] = [high, rounded(x - high)]
    (one, *rest), (two, *others) = pieces
    found = dot(one, two, contract)
    for x in rest:
        found += dot(x, two, contract)
    for x in others:
        found += dot(one, x, contract)
    return found


def direction(x: Any, length: Array) -> Array:
    return x[...].astype(jnp.float32) / (length + EPSILON)[:, None]


class Programs(NamedTuple):
    """For blocks of states, that go from chunk to chunk."""

    grid: tuple[int, int, int]
    tokens: list[Any]  # blocks of x and y
    results: list[tuple[Any, tuple, Any]]  # for what is like Σ x yᵀ, Σ x and Σ y

    @classmethod
    def of(cls, x: Float[Array, "B T N H"], y: Float[Array, "B T N V"]):
        batch, length, heads, size = x.shape
        h, v, row, column = parts(x, y)
        count, width = length // CHUNK, y.shape[3]
        rows, columns = size // h, width // v
        by_row = all_sums(count, h, 1, row, column)
        by_column = all_sums(count, v, 1, column, row)
        states = all_states(count, h, v, row, column)
        results = [
            (states, (batch, heads, count, size, width)),
            (by_row, (batch, heads, columns, count, size)),
            (by_column, (batch, heads, rows, count, width)),
        ]
        return cls(
            (rows * columns, heads, batch),
            [all_tokens(length, h, 1, row), all_tokens(length, v, 1, column)],
            [(spec, shape, jnp.float32) for spec, shape in results],
        )


def counts_block(chunks: int, shared: int) -> Any:
    """[chunks] of [B heads blocks chunks]."""
    return pl.BlockSpec(
        (None, None, None, chunks), lambda i, n, b: (b, n // shared, 0, 0)
    )


def _states_before(given: Given, interpret: Any) -> States:
    _, key, value, _, lengths, ids = given
    grid, blocks, results = Programs.of(key, value)
    length, chunks = key.shape[1], key.shape[1] // CHUNK
    counts = pl.BlockSpec((None, None, None, chunks), lambda i, n, b: (b, n, i, 0))
    found = call(
        _before,
        grid,
        [
            *zip(blocks, (key, value), strict=True),
            (all_numbers(length, 1), lengths),
            *ids.operands(),
        ],
        [*results, (counts, (*grid[::-1], chunks), jnp.float32)],
        warps=4,
        stages=3,
        interpret=interpret,
    )
    return States(*found)


def _before(key, value, length, segment, shown, rests, totals, means, counts):
    def step(i, state):
        sums, total, first, number, previous = state
        mean = first / jnp.maximum(number, 1)
        rests[i], totals[i] = _around(sums, total, mean), total
        means[i], counts[i] = mean, number
        here, last = pl.ds(i * CHUNK, CHUNK), segment[i * CHUNK + CHUNK - 1]
        keeps, joins = previous == last, (shown[here] == last)[:, None]
        unit = jnp.where(joins, direction(key.at[here, :], length[here]), 0.0)
        new = jnp.where(joins, value[here, :], jnp.zeros((), value.dtype))
        sums = jnp.where(keeps, sums, 0.0) + exact(unit, new, TRANSPOSED)
        total = jnp.where(keeps, total, 0.0) + unit.sum(axis=0)
        first = jnp.where(keeps, first, 0.0) + wide(new).sum(axis=0)
        number = jnp.where(keeps, number, 0.0) + joins.astype(jnp.float32).sum()
        return sums, total, first, number, last

    count, size, width = rests.shape
    start = [jnp.zeros(x, jnp.float32) for x in ((size, width), size, width, ())]
    jax.lax.fori_loop(0, count, step, (*start, segment[0]))


def _around(sums: Array, total: Array, mean: Array) -> Float[Array, "H V"]:
    """Σ k̂ (v − mean)ᵀ, 0 where that is below the rounding of the sums."""
    means = total[:, None] * mean[None, :]
    rest = sums - means
    return jnp.where(jnp.abs(rest) <= 8 * ROUNDING * jnp.abs(means), 0.0, rest)


def _rows(
    query, key, value, asking, asked, segment, shown, rest, totals, mean, counts,
    output, *kept,
):  # fmt: skip
    """Weights of pairs and sums of weights, by one block of directions after the other,
    then the output, by one block of values after the other."""
    pairs, reaches, _, continues = seen_in_chunk(segment, shown)
    asking, asked = asking[...], asked[...]
    size, number = query.shape[1], counts[pl.program_id(0)]
    block, some = min(BLOCK, size), min(BLOCK, value.shape[1])

    def of_pairs(i, found):
        weights, half_rows, half_columns, along = found
        at = pl.ds(i * block, block)
        unit = direction(query.at[:, at], asking)
        row, column = centred(unit, direction(key.at[:, at], asked), asked)
        weights += exact(row, column, BY_LAST)
        half_rows += (row * row).sum(axis=1) / 2
        half_columns += (column * column).sum(axis=1) / 2
        along += (unit * totals[at][None, :]).sum(axis=1)
        return weights, half_rows, half_columns, along

    shapes = (CHUNK, CHUNK), CHUNK, CHUNK, CHUNK
    start = tuple(jnp.zeros(x, jnp.float32) for x in shapes)
    found = jax.lax.fori_loop(0, size // block, of_pairs, start)
    weights, half_rows, half_columns, along = found
    weights += (half_rows + _half_shortfall(asking))[:, None]
    weights += (half_columns + _half_shortfall(asked))[None, :]
    weights = jnp.where(pairs & (weights > ROUNDING / 2), weights, 0.0)
    weights = rounded(weights)
    least = ROUNDING * number
    past = jnp.where(reaches[:, 0], jnp.maximum(number + along, least), 0.0)
    whole = weights.sum(axis=1) + past
    scale = jnp.where(whole > 0, 1 / jnp.where(whole > 0, whole, 1.0), 0.0)

    def of_values(j, _):
        here = pl.ds(j * some, some)

        def read(i, found):
            at = pl.ds(i * block, block)
            state = jnp.where(continues, rest[at, here], 0.0)
            return found + exact(direction(query.at[:, at], asking), state)

        rows = jnp.zeros((CHUNK, some), jnp.float32)
        rows = jax.lax.fori_loop(0, size // block, read, rows)
        rows = jnp.where((past > least)[:, None], rows, 0.0)
        rows += jnp.where(reaches, past[:, None] * mean[here][None, :], 0.0)
        rows += dot(weights, wide(value.at[:, here]))
        rows *= scale[:, None]
        output[:, here] = rows.astype(output.dtype)
        if kept:
            kept[0][:, here] = rows
        return 0

    jax.lax.fori_loop(0, value.shape[1] // some, of_values, 0)
    for ref, x in zip(kept[1:], (weights, past, scale), strict=False):
        ref[...] = x


def centred(unit: Array, keys: Array, asked: Array) -> tuple[Array, Array]:
    """q̂ + m and k̂ − m with m = Σ |k̂| k̂ / Σ |k̂|, by the lengths of keys."""
    weight = (1 - EPSILON / (asked + EPSILON))[:, None]
    mean = (keys * weight).sum(axis=0) / jnp.where(weight.sum() > 0, weight.sum(), 1.0)
    return unit + mean[None, :], keys - mean[None, :]


def _half_shortfall(length: Array) -> Array:
    """(1 − |x̂|²)/2"""
    missing = EPSILON / (length + EPSILON)
    return missing * (1 - missing / 2)
