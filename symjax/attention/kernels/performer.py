"""Causal Performer and linear attention as TPU kernels.

Features of the Performer are made in here and never kept in memory; others are given.

One pass over chunks of time, forward, and one back. The state, features × values of a
head, stays in VMEM, transposed: what fades by feature then lies along lanes. Exponents
are to base 2 and refer to a running maximum that is rounded up to an integer, so that a
state fades by powers of 2, exactly. Saved for the backward pass are the state before
each chunk, in the dtype of the operands, and the denominator of each row.

A value is read with ones beside it: numerator and denominator are lanes of one product.
Heads of 64 lie two by two in a tile of 128 lanes, as projections leave them, and are
not taken apart: their projection is block-diagonal, and the ones of one head stand
where the values of the other are.

Products are of the operands as they are (float32 ones with all their bits), sums are
float32, and the projection counts by two bfloat16 parts where operands are bfloat16: an
error of an exponent is a factor of a feature. A row whose keys a later key of its chunk
pushed out of float32 is computed once more by itself, with its own highest exponent.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.kernels import blocks
from symjax.attention.kernels import performer_chunk as chunk
from symjax.attention.kernels.blocks import (
    ACROSS,
    LOG2E,
    PLAIN,
    TURNED,
    column,
    product,
)
from symjax.attention.kernels.passes import Chunks, Kernels, Plan
from symjax.attention.kernels.performer_chunk import EMPTY, Operands, features, width
from symjax.attention.kernels.seen import Seen, where

LOST = 1e-20  # a denominator below this has lost its keys


def _forward(
    plan: Plan,
    given: Operands,
    output,
    inverse,
    before,
    highest,
    sums,
    running_max,
    rows,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        running_max[...] = jnp.full_like(running_max, EMPTY)

    before[...] = sums[...].astype(before.dtype)
    highest[...] = running_max[...]
    seen, both = chunk.seen_by(given), chunk.exponents(plan, given)
    lost = []
    for head in range(plan.packed):
        query, key = chunk.exponents_of(plan, given, seen, both, head)
        weights = chunk.weights_of(given, seen, query, key, highest[head : head + 1, :])
        values = chunk.values_of(plan, given, head)
        dtype = values.dtype
        row, past = weights.row.astype(dtype), chunk.faded(before[head], weights.fade)
        scores = product(row, weights.key.astype(dtype), ACROSS)
        scores = jnp.where(seen.pairs, scores, 0).astype(dtype)
        earlier = where(seen.reaches, product(row, past, ACROSS), 0)
        rows[head] = product(scores, values, PLAIN) + earlier
        least = 0.0 if given.rows is None else LOST
        lost.append(jnp.where(chunk.ones_of(plan, rows, head) < least, 1.0, 0.0))
        if seen.sees is not None:
            lost[head] *= seen.sees
        new = product(values, weights.joining.astype(dtype), TURNED)
        sums[head] = sums[head] * weights.left + new
        running_max[head : head + 1, :] = weights.after

    def rescue(head: int, seen: Seen, query: Array, key: Array, t) -> None:
        own, past = chunk.exactly(t, seen, query, key, highest[head : head + 1, :])
        values = chunk.values_of(plan, given, head).astype(jnp.float32)
        near = (own.sum(axis=-1, keepdims=True) * values).sum(axis=0, keepdims=True)
        past = jnp.broadcast_to(past, (8, features(plan, given)))
        earlier = product(past, before[head].astype(jnp.float32), ACROSS)
        rows[head, pl.ds(t, 1), :] = near + earlier[:1]

    chunk.each_lost(plan, given, lost, rescue)
    results = []
    for head in range(plan.packed):
        total = chunk.ones_of(plan, rows, head)
        scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        results.append(rows[head] * scale)
        blocks.write_row(inverse, head, jnp.where(lost[head] > 0, -scale, scale))
    output[...] = chunk.joined(plan, results, plan.value_size).astype(output.dtype)


def _backward(
    plan: Plan,
    given: Operands,
    change,
    output,
    inverse,
    before,
    highest,
    query_out,
    key_out,
    value_out,
    grown,
    query_change,
    key_change,
    value_change,
) -> None:
    """`grown` is the gradient of the state after the chunk, then of the one before."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        grown[...] = jnp.zeros_like(grown)

    seen, both = chunk.seen_by(given), chunk.exponents(plan, given)
    scales, changes = [], []
    for head in range(plan.packed):
        query, key = chunk.exponents_of(plan, given, seen, both, head)
        weights = chunk.weights_of(given, seen, query, key, highest[head : head + 1, :])
        values = chunk.values_of(plan, given, head)
        dtype, past = values.dtype, chunk.faded(before[head], weights.fade)
        changes.append(_of_row(plan, change[...], output[...], head))
        read = where(seen.reaches, changes[head], 0).astype(dtype)
        grow = changes[head].astype(dtype)
        scales.append(column(inverse[head : head + 1, :]))
        weighed = weights.row * jnp.maximum(scales[head], 0)
        row, keys = weighed.astype(dtype), weights.key.astype(dtype)
        scores = jnp.where(seen.pairs, product(row, keys, ACROSS), 0).astype(dtype)
        pairs = product(grow, values, ACROSS)
        pairs = jnp.where(seen.pairs, pairs, 0).astype(dtype)
        later = grown[head].astype(dtype)
        asked = product(pairs, keys, PLAIN) + product(read, past, PLAIN)
        near, far = product(pairs, row, TURNED), product(values, later, PLAIN)
        if given.rows is None:
            query_change[head] = asked * scales[head]
            key_change[head] = near + where(seen.joins, far, 0)
        else:
            query_change[head] = asked * weighed
            key_change[head] = near * weights.key + far * weights.joining
        value_change[head] = product(scores, grow, TURNED) + product(
            weights.joining.astype(dtype), later, ACROSS
        )
        here = product(read, row, TURNED) * weights.fade
        grown[head] = grown[head] * weights.left + here

    def rescue(head: int, seen: Seen, query: Array, key: Array, t) -> None:
        state = before[head].astype(jnp.float32)
        own, past = chunk.exactly(t, seen, query, key, highest[head : head + 1, :])
        values = chunk.values_of(plan, given, head).astype(jnp.float32)
        grow = chunk.pick(changes[head], t) * -chunk.pick(scales[head], t)
        pairs = own * (values * grow).sum(axis=-1, keepdims=True)
        first = jax.lax.broadcasted_iota(jnp.int32, (8, width(plan)), 0) == 0
        first = jnp.where(first, grow, 0.0)
        of_past = past * product(first, state, PLAIN)[:1]
        query_change[head, pl.ds(t, 1), :] = pairs.sum(axis=0, keepdims=True) + of_past
        key_change[head] += pairs
        value_change[head] += own.sum(axis=-1, keepdims=True) * grow
        past = jnp.broadcast_to(past, (8, features(plan, given)))
        grown[head] += product(first, past, TURNED)

    chunk.each_lost(plan, given, [jnp.where(x < 0, 1.0, 0.0) for x in scales], rescue)
    values = [value_change[head] for head in range(plan.packed)]
    found = _of_inputs(plan, given, query_change, key_change)
    found.append(chunk.joined(plan, values, plan.value_size))
    for out, x in zip((query_out, key_out, value_out), found, strict=True):
        out[...] = x.astype(out.dtype)


def _of_row(plan: Plan, change: Array, output: Array, head: int) -> Float[Array, "c w"]:
    """The gradients of a head's numerators and, in the lane of ones, of their
    denominators, times these."""
    change, output = change.astype(jnp.float32), output.astype(jnp.float32)
    along = chunk.own_head(plan, change * output, head).sum(axis=-1, keepdims=True)
    own = chunk.beside(plan, change, head, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, own.shape, 1)
    return jnp.where(lane == chunk.lane_of_ones(plan, head), -along, own)


def _of_inputs(plan: Plan, given: Operands, query_change, key_change) -> list[Array]:
    """The gradients of queries and keys by those of features that are given, or of the
    exponents of others."""
    heads = range(plan.packed)
    if given.rows is None:
        count = features(plan, given)
        both = ([x[head] for head in heads] for x in (query_change, key_change))
        return [chunk.joined(plan, x, count) for x in both]
    query, key = (_from_exponents(plan, given, x) for x in (query_change, key_change))
    for head in heads:
        total = key_change[head].sum(axis=-1, keepdims=True)
        own = chunk.own_head(plan, given.key[...].astype(jnp.float32), head)
        key -= own * (total * (2 / LOG2E * given.norm[0]))
    return [query, key]


def _from_exponents(plan: Plan, given: Operands, change: Any) -> Float[Array, "c P*H"]:
    """The gradient of what exponents are made of, by w·x alone."""
    return chunk.added(
        product(
            change[head].astype(given.key.dtype),
            y[chunk.features_of(plan, given, head)],
            PLAIN,
        )
        for head in range(plan.packed)
        for y in chunk.projection(given)
    ) * (1 / LOG2E)


def _specs(plan: Plan, operands: Operands, chunks: Chunks) -> Operands:
    values, keys = plan.widths
    tokens = chunks.by_query(keys), chunks.by_key(keys), chunks.by_key(values)
    norm = None if operands.norm is None else pl.BlockSpec(memory_space=pltpu.SMEM)
    rows, offset = chunks.whole(operands.rows), chunks.whole(operands.offset)
    of_examples = map(chunks.of_examples, operands[6:])
    return Operands(*tokens, rows, offset, norm, *of_examples)


def _kept(plan: Plan, operands: Operands) -> list[tuple]:
    """Of a chunk: 1/denominator of each row, negative where it was lost; the state
    before; its running maxima."""
    state, peaks, _ = _scratch(plan, operands)[0]
    kinds = jnp.float32, chunk.dtype_of(operands), jnp.float32
    return list(zip([(plan.packed, plan.block), state, peaks], kinds, strict=True))


def _scratch(plan: Plan, operands: Operands) -> tuple[list, list]:
    """The state, its running maxima and a head's rows; gradients of it and of a head's
    queries, keys and values."""
    count, lanes = features(plan, operands), width(plan)
    state, rows = (plan.packed, lanes, count), (plan.packed, plan.block, lanes)
    of_features = plan.packed, plan.block, count
    return [state, (plan.packed, count), rows], [state, of_features, of_features, rows]


def _cost(plan: Plan, operands: Operands) -> list[tuple[int, int]]:
    """By multiply-adds of a token and head, in whole tiles; float32 ones count as six:
    those for chunk.exponents, for pairs and for the state."""
    tokens = plan.batch * plan.heads * plan.length
    count = features(plan, operands)
    passes = blocks.mxu_passes(chunk.dtype_of(operands))
    parts = 0 if operands.rows is None else operands.rows.shape[0]
    lanes = parts * plan.widths[1]
    products = [
        passes * count * (x * lanes + y * plan.block + z * width(plan))
        for x, y, z in ((2, 2, 2), (4, 5, 4))
    ]
    return [(2 * tokens * x, 2 * tokens * count) for x in products]


PERFORMER = Kernels(
    "performer", _forward, _backward, _specs, _kept, _scratch, _cost, chunk.dtype_of
)
