"""Linear attention whose state decays, as TPU kernels.

One pass over chunks of 128 tokens, forward, and one back. The state of a head stays in
VMEM, values × features, so that what fades by channel lies along lanes; the state
before each chunk is saved for the backward pass, in the dtype of the products. How
pairs and states fade is in `fading.py`.

What does not wait for each other stands side by side, all levels of one product before
the next: the compiler moves no product far, and so keeps the MXU busy. With a decay a
channel a chunk of a head of 128 then takes 1,550 bundles of v5e forward instead of
2,393, and 2,999 backward instead of 4,557.

Heads lie in tiles as `lanes.py` says. States of packed heads are one block-diagonal
matrix.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from symjax.attention.kernels.blocks import ACROSS, PLAIN, TURNED, product
from symjax.attention.kernels.fading import (
    BLOCK,
    DIAGONAL,
    LEVELS,
    SINCE,
    UNTIL,
    exponents,
    fading_of,
    pairs_of,
)
from symjax.attention.kernels.lanes import of_heads, own
from symjax.attention.kernels.passes import Chunks, Kernels, Plan


class Operands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads lie side by side in lanes."""

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    by_channel: Any  # log-decays, their bfloat16 parts: [parts B T K·H], or None
    by_head: Any  # log-decays [B N/P P T], or None
    sums: Any  # of `fading.constants`
    levels: Any
    beta: Any = None  # of the delta rule, [B N/P P T]

    def chunk(self, i: int):
        """One chunk of blocks that hold several."""
        here = pl.ds(i * BLOCK, BLOCK)
        query, key, value = (x.at[here] for x in self[:3])
        of_tokens = "by_channel", "by_head", "beta"
        there = [x for x in of_tokens if getattr(self, x) is not None]
        return self._replace(
            query=query,
            key=key,
            value=value,
            **{x: getattr(self, x).at[:, here] for x in there},
        )


def _forward(plan: Plan, given: Operands, output, before, state) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    before[...] = state[...].astype(before.dtype)
    query, key, value = (x[...] for x in given[:3])
    dtype, wide = value.dtype, jnp.float32
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    heads, fading = range(plan.packed), fading_of(plan, given)
    queries = [own(wide_query, plan.head_size, i) for i in heads]
    scores = [_of_level(given, DIAGONAL, x.astype(dtype), key, 0) for x in queries]
    faded = [(wide_key * x).astype(dtype) for x in fading.factors]
    for i in heads:
        asking = [(queries[i] * x).astype(dtype) for x in fading.factors]
        found = [product(x, y, ACROSS) for x, y in zip(asking, faded, strict=True)]
        for level, x in zip(fading.levels, found, strict=True):
            scores[i] = jnp.where(pairs_of(given.levels, level), x, scores[i])
    rows = product((wide_query * fading.since).astype(dtype), before[...], ACROSS)
    for i in heads:
        own_value = own(value, plan.value_size, i)
        own_scores = (scores[i] * fading.weights[i]).astype(dtype)
        rows += product(own_scores, own_value, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(value, (wide_key * fading.until).astype(dtype), TURNED)
    state[...] = state[...] * fading.through + of_heads(plan.sizes, new)


def _backward(
    plan: Plan,
    given: Operands,
    change,
    before,
    query_out,
    key_out,
    value_out,
    decay_out,
    grown,
) -> None:
    """`grown` is the gradient of the state after the chunk, then of the one before."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        grown[...] = jnp.zeros_like(grown)

    query, key, value, change = (x[...] for x in (*given[:3], change))
    dtype, wide = value.dtype, jnp.float32
    change = change.astype(dtype)
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    heads, fading = range(plan.packed), fading_of(plan, given)
    changes = [own(change, plan.value_size, i) for i in heads]
    pairs = [
        (
            product(x, value, ACROSS) * fading.weights[i],
            product(value, x, ACROSS) * fading.turned_weights[i],
        )
        for i, x in enumerate(changes)
    ]

    def of_pairs(level: int, asking: Array, faded: Array, scores: list) -> tuple:
        """The gradients of these, of the pairs of a level; `scores` gets them."""
        of_query = of_key = jnp.zeros_like(asking)
        for i in heads:
            row, past = (
                own(x, plan.head_size, i).astype(dtype) for x in (asking, faded)
            )
            scores[i] = _of_level(given, level, row, past, scores[i])
            by_row, by_key = (
                jnp.where(pairs_of(given.levels, level, j), x, 0).astype(dtype)
                for j, x in enumerate(pairs[i])
            )
            of_query += product(by_row, past, PLAIN)
            of_key += product(by_key, row, PLAIN)
        return of_query, of_key

    scores: list = [0] * plan.packed
    query_change, key_change = of_pairs(DIAGONAL, wide_query, wide_key, scores)
    asked = [(wide_query * x, wide_key * x) for x in fading.factors]
    grown_by = [
        of_pairs(level, *x, scores)
        for level, x in zip(fading.levels, asked, strict=True)
    ]
    for factor, (of_query, of_key) in zip(fading.factors, grown_by, strict=True):
        query_change += of_query * factor
        key_change += of_key * factor
    decay_change: Any = 0.0
    for level, x, y in zip(fading.levels, asked, grown_by, strict=True):
        decay_change += fading.grown(level, x[0] * y[0] + x[1] * y[1])
    decay_change += fading.grown_by_pairs(
        [x * y for x, (y, _) in zip(scores, pairs, strict=True)]
    )

    asking, joining = wide_query * fading.since, wide_key * fading.until
    later = grown[...].astype(dtype)
    of_query = product(change, before[...], PLAIN)
    of_key = product(value, later, PLAIN)
    query_change += of_query * fading.since
    key_change += of_key * fading.until
    query_out[...] = query_change.astype(query_out.dtype)
    key_out[...] = key_change.astype(key_out.dtype)
    decay_change += fading.grown(SINCE, of_query * asking)
    decay_change += fading.grown(UNTIL, of_key * joining)
    of_state = grown[...] * before[...].astype(wide) * fading.through
    of_state = of_state.sum(axis=0, keepdims=True)
    decay_out[...] = decay_change + fading.grown_by_state(of_state)
    value_change = product(joining.astype(dtype), later, ACROSS)
    for i in heads:
        own_scores = (scores[i] * fading.weights[i]).astype(dtype)
        value_change += product(own_scores, changes[i], TURNED)
    value_out[...] = value_change.astype(value_out.dtype)
    here = product(change, asking.astype(dtype), TURNED)
    grown[...] = grown[...] * fading.through + of_heads(plan.sizes, here)


def _of_level(given: Operands, level: int, query: Array, key: Array, other: Any):
    """The products of the pairs of a level; elsewhere `other`."""
    return jnp.where(pairs_of(given.levels, level), product(query, key, ACROSS), other)


def levels_of(operands: Operands) -> int:
    """How many levels of pairs there are, beside those of a token with itself."""
    return 1 if operands.by_channel is None else LEVELS


def passes(operands: Operands) -> int:
    """Of the MXU for a product of the operands."""
    return 6 if operands.value.dtype == jnp.float32 else 1


def recurrent(
    name: str, forward: Any, backward: Any, kept: Any, products: Any, together: int = 1
) -> Kernels:
    """The kernels of a recurrence, by the passes of the MXU that `products` counts: of
    a chunk's rows over a tile of 128 columns, forward and back."""

    def cost(plan: Plan, operands: Operands) -> list[tuple[int, int]]:
        tokens = math.prod(plan.grid) * plan.block
        counts = zip(products(plan, operands), exponents(plan, operands), strict=True)
        return [
            (2 * tokens * (x + sums) * BLOCK * plan.widths[1], tokens * exponentials)
            for x, (sums, exponentials) in counts
        ]

    def states(plan: Plan, operands: Operands) -> list[list]:
        return [[plan.widths]] * 2

    return Kernels(
        name,
        forward,
        backward,
        _specs,
        kept,
        states,
        cost,
        more=_more,
        shared=4,
        together=together,
    )


def _specs(plan: Plan, operands: Operands, chunks: Chunks) -> Operands:
    values, keys = plan.widths
    by_channel = None
    if operands.by_channel is not None:
        shape = operands.by_channel.shape[0], None, plan.block, keys
        by_channel = pl.BlockSpec(
            shape, lambda b, n, i: (0, b, chunks.turn(i), chunks.key_head(n))
        )
    return Operands(
        chunks.by_query(keys),
        chunks.by_key(keys),
        chunks.by_key(values),
        by_channel,
        chunks.of_tiles(operands.by_head),
        chunks.whole(operands.sums),
        chunks.whole(operands.levels),
        chunks.of_tiles(operands.beta),
    )


def _more(operands: Operands, specs: Operands) -> list[tuple]:
    """Log-decays, those of channels by query head, and β."""
    found = []
    if operands.by_channel is not None:
        found.append((operands.query, specs.query))
    of_heads = (operands.by_head, specs.by_head), (operands.beta, specs.beta)
    return found + [(x, spec) for x, spec in of_heads if x is not None]


def _kept(plan: Plan, operands: Operands) -> list[tuple]:
    """The state before a chunk."""
    return [(plan.widths, operands.value.dtype)]


def _products(plan: Plan, operands: Operands) -> tuple[int, int]:
    levels, each = levels_of(operands), passes(operands)
    forward, backward = levels + 2, 3 * levels + 6
    return each * (plan.packed * forward + 2), each * (plan.packed * backward + 4)


DECAY = recurrent("decay", _forward, _backward, _kept, _products)
