"""States of normalised linear attention on NVIDIA GPUs: before each chunk of time, and
their gradients after it.

Of exponents of features a state refers to the largest one of a key so far, feature by
feature, so that every factor is at most 1.

Programs for blocks of features and of values go from chunk to chunk.

What kernels of linear attention with a denominator share on NVIDIA GPUs: numbers of
TF32, tokens in whole chunks and which see each other, and blocks of states.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from symjax.attention.core.feature_maps import LOST, Features, finite
from symjax.attention.core.meshes import vary_alike
from symjax.attention.core.operands import Tokens
from symjax.attention.core.sequence import starts
from symjax.attention.kernels.gpu.chunks import (
    BLOCK,
    CHUNK,
    SIZES,
    TRANSPOSED,
    all_numbers,
    all_states,
    all_tokens,
    call,
    dot,
    filled,
    iota,
    parts,
    wide,
)
from symjax.attention.kernels.operands import VisibleTokens


def rounded(x: Array) -> Array:
    """To the nearest number of TF32: tensor cores may cut off the bits that they do not
    take, and what is cut off alike of all that a sum adds up stays in it."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    found = jax.lax.bitcast_convert_type((bits + 0x1000) & -0x2000, jnp.float32)
    return jnp.where(x == x, found, x)  # the bits of a NaN may all be 1


def whole_blocks(size: int) -> int:
    """So many features at least that blocks divide them."""
    block = min(BLOCK, max(SIZES[0], 1 << (size - 1).bit_length()))
    return -(-size // block) * block


def in_blocks(x: Float[Array, "B T N M"], nothing: float) -> Array:
    missing = [(0, 0)] * 3 + [(0, whole_blocks(x.shape[3]) - x.shape[3])]
    return jnp.pad(x, missing, constant_values=nothing)


class Ids(NamedTuple):
    """Numbers of segments, those of hidden keys −1."""

    query: Int[Array, "B T"]
    key: Int[Array, "B T"]

    @classmethod
    def of(cls, tokens: Tokens) -> tuple[Array, Array, Array, "Ids"]:
        """Query, key and value, 0 where hidden, and their numbers, in whole chunks."""
        query, key, value, visible, segment = VisibleTokens.of(tokens)
        if visible is None:
            visible = jnp.ones(query.shape[:2], bool)
        if segment is None:
            segment = jnp.zeros(query.shape[:2], jnp.int32)
        query, key, value, visible = map(filled, (query, key, value, visible))
        # In the last segment: no other one continues behind the rows.
        missing = [(0, 0), (0, visible.shape[1] - segment.shape[1])]
        segment = jnp.pad(segment, missing, mode="edge")
        ids = cls(segment, jnp.where(visible, segment, -1))
        return vary_alike((query, key, value, ids))

    def operands(self) -> list[tuple[Any, Array]]:
        spec = pl.BlockSpec((None, self.key.shape[1]), lambda i, n, b: (b, 0))
        return [(spec, x) for x in self]


def mean_weights(query: Float[Array, "B T N M"], ids: Ids) -> Float[Array, "B T N M"]:
    """Divide the features of each query by the number of keys that it sees.

    The divisor cancels in the output. It makes the denominator of a row its mean weight
    instead of a sum, which can be compared with the rounding error of one weight.
    """
    visible = ids.key >= 0
    count = jnp.cumsum(visible, axis=1)
    before = jnp.where(starts(ids.query), count - visible, 0)
    count -= jax.lax.cummax(before, axis=1)
    return query / jnp.maximum(count, 1).astype(query.dtype)[..., None, None]


def all_sums(count: int, size: int, shared: int, row: Any, column: Any) -> Any:
    """[chunks M] of [B heads blocks chunks M]."""
    return pl.BlockSpec(
        (None, None, None, count, size),
        lambda i, n, b: (b, n // shared, column(i), 0, row(i)),
    )


def of_chunk(size: int, shared: int = 1, later: int = 0) -> Any:
    """[M] of [B heads blocks chunks M], of the chunk so many `later`."""
    return pl.BlockSpec(
        (None, None, None, None, size),
        lambda i, n, b: (b, n // shared, 0, i + later, 0),
    )


def seen_in_chunk(segment: Any, shown: Any) -> tuple[Array, Array, Array, Array]:
    """Of a chunk: the pairs that see each other [CHUNK CHUNK], the rows that the state
    before reaches and the tokens that join the one after [CHUNK 1], and whether any row
    is reached. What is not may be NaN, and is not even multiplied by 0."""
    first = pl.program_id(0) * CHUNK
    here = pl.ds(first, CHUNK)
    row, column = segment[here], shown[here]
    pairs = (iota(0) >= iota(1)) & (row[:, None] == column[None, :])
    before, last = segment[jnp.maximum(first - 1, 0)], segment[first + CHUNK - 1]
    continues = segment[first] == before
    return pairs, (row == before)[:, None], (column == last)[:, None], continues


ROUNDING = 2.0**-10  # of a weight of bounded features, which are rounded to TF32


class Form(NamedTuple):
    """How features are given: by `exponents`, as they are, or, with `features`, by what
    these take, number by number.

    bounded: features are at most 1 and may change sign, and a denominator is the mean
        weight of its row.
    """

    exponents: bool
    features: Features | None = None
    interpret: Any = False
    bounded: bool = False

    @property
    def nothing(self) -> float:
        """What stands for no key: its exponent, or its feature."""
        return -jnp.inf if self.exponents else 0.0

    def of(self, x: Array) -> Array:
        """Features that are given without exponents."""
        if self.features is None:
            return x
        return self.features.key(x, None).amplitude

    def asking(self, x: Array, highest: Array, shift: Array) -> Array:
        """The weights of a query, at most 1 with its shift, which without exponents is
        a divisor. In this order, since the shift is such a sum itself."""
        return jnp.exp((x + highest) - shift) if self.exponents else self.of(x) / shift

    def asked(self, x: Array, highest: Array) -> Array:
        return jnp.exp(x - highest) if self.exponents else self.of(x)

    def of_asking(
        self, change: Array, x: Array, row: Array, inverse: Array, shift: Array
    ) -> Array:
        """The gradient of x by that of its weights over the denominator, `row`. Small
        factors meet large ones first."""
        if self.exponents:
            return change * row
        return change * inverse * self._slope(x) / shift

    def of_asked(self, change: Array, x: Array, weights: Array) -> Array:
        return change * (weights if self.exponents else self._slope(x))

    def _slope(self, x: Array) -> Array:
        return jax.jvp(self.of, (x,), (jnp.ones_like(x),))[1]

    def inverse(self, denominator: Array) -> Array:
        """0 for rows that see nothing, and those that lost what they see."""
        least = LOST if self.exponents else jnp.finfo(jnp.float32).tiny
        least = ROUNDING if self.bounded else least
        return jnp.where(denominator < least, 0.0, 1 / denominator)

    def highest(self, x: Array, so_far: Array, axis: int) -> Array:
        return jnp.maximum(so_far, x.max(axis=axis)) if self.exponents else so_far


class States(NamedTuple):
    """Before each chunk; the largest exponent also after the last one. Once for each
    block of values: they are all the same."""

    sums: Float[Array, "B K chunks M V"]
    total: Float[Array, "B K blocks chunks M"]
    highest: Float[Array, "B K blocks chunks M"]


def states_before(
    form: Form,
    key: Float[Array, "B T K M"],
    value: Float[Array, "B T K V"],
    ids: Ids,
) -> States:
    batch, length, heads, size = key.shape
    m, v, row, column = parts(key, value)
    count, blocks = length // CHUNK, value.shape[3] // v

    def numbers(count: int) -> tuple[Any, tuple, Any]:
        spec = all_sums(count, m, 1, row, column)
        return spec, (batch, heads, blocks, count, size), jnp.float32

    shape = batch, heads, count, size, value.shape[3]
    found = call(
        partial(_before, form),
        (blocks * (size // m), heads, batch),
        [
            (all_tokens(length, m, 1, row), key),
            (all_tokens(length, v, 1, column), value),
            *ids.operands(),
        ],
        [
            (all_states(count, m, v, row, column), shape, jnp.float32),
            numbers(count),
            numbers(count + 1),
        ],
        warps=4,
        stages=3,
        interpret=form.interpret,
    )
    return States(*found)


def _before(form, key, value, segment, shown, before, totals, maxima):
    def step(i, state):
        sums, total, highest, previous = state
        before[i], totals[i], maxima[i] = rounded(sums), total, highest
        here, last = pl.ds(i * CHUNK, CHUNK), segment[i * CHUNK + CHUNK - 1]
        keeps, joins = previous == last, (shown[here] == last)[:, None]
        x, y = wide(key.at[here, :]), wide(value.at[here, :])
        left = jnp.where(keeps, highest, form.nothing)
        highest = form.highest(jnp.where(joins, x, form.nothing), left, 0)
        reference = finite(highest)
        weights = form.asked(x, reference[None, :])
        weights = rounded(jnp.where(joins, weights, 0.0))
        fade = jnp.exp(left - reference)
        sums = jnp.where(keeps, sums * fade[:, None], 0.0)
        sums += dot(weights, jnp.where(joins, y, 0.0), TRANSPOSED)
        total = jnp.where(keeps, total * fade, 0.0) + weights.sum(axis=0)
        return sums, total, highest, last

    count, size, width = before.shape
    start = jnp.zeros((size, width), jnp.float32), jnp.zeros((size,), jnp.float32)
    lowest = jnp.full((size,), form.nothing, jnp.float32)
    state = jax.lax.fori_loop(0, count, step, (*start, lowest, segment[0]))
    maxima[count] = state[2]


def states_after(
    form: Form,
    query: Float[Array, "B T N M"],
    change: Float[Array, "B T N V"],
    ids: Ids,
    states: States,
    rows: tuple[Array, Array, Array],
) -> States:
    """The gradients of the states after each chunk, but for the largest exponents,
    which are constants."""
    batch, length, heads, size = query.shape
    m, v, row, column = parts(query, change)
    count, blocks = length // CHUNK, change.shape[3] // v
    shared = heads // states.highest.shape[1]
    shape = batch, heads, count, size, change.shape[3]
    of_sums, of_total = call(
        partial(_after, form),
        (blocks * (size // m), heads, batch),
        [
            (all_tokens(length, m, 1, row), query),
            (all_tokens(length, v, 1, column), change),
            *((all_numbers(length, 1), x) for x in rows),
            *ids.operands(),
            (all_sums(count + 1, m, shared, row, column), states.highest),
        ],
        [
            (all_states(count, m, v, row, column), shape, jnp.float32),
            (
                all_sums(count, m, 1, row, column),
                (batch, heads, blocks, count, size),
                jnp.float32,
            ),
        ],
        warps=4,
        stages=3,
        interpret=form.interpret,
    )
    return States(of_sums, of_total, states.highest)


def _after(
    form, query, change, mean, shift, inverse, segment, _, maxima, after, totals
):  # fmt: skip
    count, size, width = after.shape

    def step(i, state):
        i, (sums, total) = count - 1 - i, state
        after[i], totals[i] = rounded(sums), total
        here, last = pl.ds(i * CHUNK, CHUNK), segment[i * CHUNK + CHUNK - 1]
        previous = segment[jnp.maximum(i * CHUNK - 1, 0)]
        since = maxima[i]
        keeps, reaches = previous == last, (segment[here] == previous)[:, None]
        row = wide(query.at[here, :])
        row = form.asking(row, since[None, :], shift[here][:, None])
        row = rounded(jnp.where(reaches, row * inverse[here][:, None], 0.0))
        fade = jnp.exp(since - finite(maxima[i + 1]))
        changed = jnp.where(reaches, wide(change.at[here, :]), 0.0)
        less = row * jnp.where(reaches, mean[here][:, None], 0.0)
        sums = jnp.where(keeps, sums * fade[:, None], 0.0)
        total = jnp.where(keeps, total * fade, 0.0) - less.sum(axis=0)
        return sums + dot(row, changed, TRANSPOSED), total

    start = jnp.zeros((size, width), jnp.float32), jnp.zeros((size,), jnp.float32)
    jax.lax.fori_loop(0, count, step, start)
