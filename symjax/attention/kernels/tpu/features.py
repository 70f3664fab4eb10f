"""Causal Performer and linear attention as TPU kernels.

The kernels compute the features and never store them. They are exponentials of random
projections, as in the Performer, or elementwise functions, as in linear attention.

The forward and the backward kernel each pass over the chunks of time once
(`chunks.py`). The state of a head, features × values, stays in VMEM. It is transposed,
so that the features lie along lanes. Exponents are to base 2, relative to a running
maximum that is rounded up to an integer: a state is then rescaled by powers of 2,
which is exact. The forward kernel saves the state before each chunk with its running
maxima, and 1 / denominator of each row. The state is saved in the dtype of the
operands, and in float32 if the features are elementwise.

Values have lanes of ones beside them, so that one product gives numerator and
denominator. Small heads share a tile of 128 lanes, for instance two of 64
(`packed_heads.py`). Their random projection is then block-diagonal, and the ones of a
head are in the lanes of the other heads' values.

Operands of products keep their dtype, and float32 products keep all bits. Sums are
float32. With bfloat16 operands the random projection is split into two bfloat16 parts,
because the absolute error of an exponent is a relative error of the feature.
Elementwise features of bfloat16 operands are float32, and their products are computed
in parts too (`tiles.product_in_parts`).

A row underflows if a key of its chunk that it does not see has much larger features
than the keys that it sees. The kernel then computes the row again, relative to its own
highest exponent.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import UNDERFLOW
from symjax.attention.kernels.tpu import tiles
from symjax.attention.kernels.tpu.chunks import (
    ChunkPlan,
    Chunks,
    ChunkVisibility,
    Kernels,
    where,
)
from symjax.attention.kernels.tpu.feature_weights import (
    EMPTY,
    ElementwiseMaps,
    FeatureOperands,
    added,
    beside,
    dtype_of,
    exact_weights,
    exponents,
    exponents_of,
    faded,
    features,
    features_of,
    for_each_underflow,
    joined,
    lane_of_ones,
    ones_of,
    own_head,
    pick,
    projection,
    queries_and_keys,
    row_divisor,
    seen_by,
    values_of,
    weights_of,
    width,
)
from symjax.attention.kernels.tpu.tiles import (
    ACROSS,
    LOG2E,
    PLAIN,
    TURNED,
    column,
    product,
    product_for,
)


def _forward(
    maps: ElementwiseMaps | None,
    plan: ChunkPlan,
    refs: FeatureOperands,
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
    multiply, dtype = product_for(refs.value.dtype), dtype_of(refs)
    seen, both = seen_by(refs), exponents(maps, plan, refs)
    underflows = []
    for head in range(plan.packed):
        query, key = exponents_of(plan, refs, seen, both, head)
        weights = weights_of(refs, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, refs, head)
        row, past = weights.row.astype(dtype), faded(before[head], weights.fade)
        scores = multiply(row, weights.key.astype(dtype), ACROSS)
        scores = jnp.where(seen.pairs, scores, 0).astype(dtype)
        earlier = where(seen.reaches, multiply(row, past, ACROSS), 0)
        rows[head] = multiply(scores, values, PLAIN) + earlier
        least = 0.0 if refs.rows is None else UNDERFLOW
        underflows.append(jnp.where(ones_of(plan, rows, head) < least, 1.0, 0.0))
        if seen.sees is not None:
            underflows[head] *= seen.sees
        new = multiply(values, weights.joining.astype(dtype), TURNED)
        sums[head] = sums[head] * weights.left + new
        running_max[head : head + 1, :] = weights.after

    def recompute(
        head: int, seen: ChunkVisibility, query: Array, key: Array, t
    ) -> None:
        own, past = exact_weights(t, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, refs, head).astype(jnp.float32)
        near = (own.sum(axis=-1, keepdims=True) * values).sum(axis=0, keepdims=True)
        past = jnp.broadcast_to(past, (8, features(plan, refs)))
        earlier = product(past, before[head].astype(jnp.float32), ACROSS)
        rows[head, pl.ds(t, 1), :] = near + earlier[:1]

    for_each_underflow(plan, refs, underflows, recompute)
    results = []
    for head in range(plan.packed):
        total = ones_of(plan, rows, head)
        scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        results.append(rows[head] * scale)
        tiles.write_row(inverse, head, jnp.where(underflows[head] > 0, -scale, scale))
    output[...] = joined(plan, results, plan.value_size).astype(output.dtype)


def _backward(
    maps: ElementwiseMaps | None,
    plan: ChunkPlan,
    refs: FeatureOperands,
    change,
    output,
    inverse,
    before,
    highest,
    query_out,
    key_out,
    value_out,
    state_change,
    query_change,
    key_change,
    value_change,
) -> None:
    """Write the gradients of a chunk.

    Args:
        state_change: first the gradient of the state after the chunk, at the end that
            of the state before it.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_change[...] = jnp.zeros_like(state_change)

    multiply, dtype = product_for(refs.value.dtype), dtype_of(refs)
    seen, both = seen_by(refs), exponents(maps, plan, refs)
    scales, changes = [], []
    for head in range(plan.packed):
        query, key = exponents_of(plan, refs, seen, both, head)
        weights = weights_of(refs, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, refs, head)
        past = faded(before[head], weights.fade)
        changes.append(_of_row(plan, change[...], output[...], head))
        read = where(seen.reaches, changes[head], 0).astype(dtype)
        row_change = changes[head].astype(dtype)
        scales.append(column(inverse[head : head + 1, :]))
        weighed = weights.row * jnp.maximum(scales[head], 0)
        row, keys = weighed.astype(dtype), weights.key.astype(dtype)
        scores = jnp.where(seen.pairs, multiply(row, keys, ACROSS), 0).astype(dtype)
        pairs = multiply(row_change, values, ACROSS)
        pairs = jnp.where(seen.pairs, pairs, 0).astype(dtype)
        later = state_change[head].astype(dtype)
        of_query = multiply(pairs, keys, PLAIN) + multiply(read, past, PLAIN)
        near, far = multiply(pairs, row, TURNED), multiply(values, later, PLAIN)
        if refs.rows is None:
            query_change[head] = of_query * scales[head] / row_divisor(query)
            key_change[head] = near + where(seen.joins, far, 0)
        else:
            query_change[head] = of_query * weighed
            key_change[head] = near * weights.key + far * weights.joining
        value_change[head] = multiply(scores, row_change, TURNED) + multiply(
            weights.joining.astype(dtype), later, ACROSS
        )
        here = multiply(read, row, TURNED) * weights.fade
        state_change[head] = state_change[head] * weights.left + here

    def recompute(
        head: int, seen: ChunkVisibility, query: Array, key: Array, t
    ) -> None:
        state = before[head].astype(jnp.float32)
        own, past = exact_weights(t, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, refs, head).astype(jnp.float32)
        row_change = pick(changes[head], t) * -pick(scales[head], t)
        pairs = own * (values * row_change).sum(axis=-1, keepdims=True)
        first = jax.lax.broadcasted_iota(jnp.int32, (8, width(plan)), 0) == 0
        first = jnp.where(first, row_change, 0.0)
        of_past = past * product(first, state, PLAIN)[:1]
        query_change[head, pl.ds(t, 1), :] = pairs.sum(axis=0, keepdims=True) + of_past
        key_change[head] += pairs
        value_change[head] += own.sum(axis=-1, keepdims=True) * row_change
        past = jnp.broadcast_to(past, (8, features(plan, refs)))
        state_change[head] += product(first, past, TURNED)

    for_each_underflow(
        plan, refs, [jnp.where(x < 0, 1.0, 0.0) for x in scales], recompute
    )
    values = [value_change[head] for head in range(plan.packed)]
    found = _of_inputs(maps, plan, refs, query_change, key_change)
    found.append(joined(plan, values, plan.value_size))
    for out, x in zip((query_out, key_out, value_out), found, strict=True):
        out[...] = x.astype(out.dtype)


def _of_row(
    plan: ChunkPlan, change: Array, output: Array, head: int
) -> Float[Array, "c w"]:
    """Return the gradients of a head's numerators, times its denominators.

    The lane of ones has the gradients of the denominators, times the denominators.
    """
    change, output = change.astype(jnp.float32), output.astype(jnp.float32)
    along = own_head(plan, change * output, head).sum(axis=-1, keepdims=True)
    own = beside(plan, change, head, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, own.shape, 1)
    return jnp.where(lane == lane_of_ones(plan, head), -along, own)


def _of_inputs(
    maps: ElementwiseMaps | None,
    plan: ChunkPlan,
    refs: FeatureOperands,
    query_change,
    key_change,
) -> list[Array]:
    """Return the gradients of the operands `query` and `key`.

    Those of hidden keys are arbitrary. `VisibleTokens`, which replaces hidden keys by
    0, replaces their gradients by 0, too.

    Args:
        query_change, key_change: the gradients of exponents. With `maps`, those of
            features.
    """
    heads = range(plan.packed)
    if maps is not None:
        count = features(plan, refs)
        both = ([x[head] for head in heads] for x in (query_change, key_change))
        changes = [joined(plan, x, count) for x in both]
        return list(jax.vjp(partial(maps, plan), *queries_and_keys(refs))[1](changes))
    query, key = (_from_exponents(plan, refs, x) for x in (query_change, key_change))
    for head in heads:
        total = key_change[head].sum(axis=-1, keepdims=True)
        own = own_head(plan, refs.key[...].astype(jnp.float32), head)
        key -= own * (total * (2 / LOG2E * refs.norm[0]))
    return [query, key]


def _from_exponents(
    plan: ChunkPlan, refs: FeatureOperands, change: Any
) -> Float[Array, "c P*H"]:
    """Return the part of the gradient of queries or keys x that comes from w·x."""
    return added(
        product(
            change[head].astype(refs.key.dtype),
            y[features_of(plan, refs, head)],
            PLAIN,
        )
        for head in range(plan.packed)
        for y in projection(refs)
    ) * (1 / LOG2E)


def _specs(
    plan: ChunkPlan, operands: FeatureOperands, chunks: Chunks
) -> FeatureOperands:
    values, keys = plan.widths
    tokens = chunks.by_query(keys), chunks.by_key(keys), chunks.by_key(values)
    norm = None if operands.norm is None else pl.BlockSpec(memory_space=pltpu.SMEM)
    rows, offset = chunks.whole(operands.rows), chunks.whole(operands.offset)
    of_examples = map(chunks.of_examples, operands[6:])
    return FeatureOperands(*tokens, rows, offset, norm, *of_examples)


def _kept(plan: ChunkPlan, operands: FeatureOperands) -> list[tuple]:
    """Return shapes and dtypes of the residuals of a chunk.

    They are 1/denominator of each row (negative for a row that underflowed), the state
    before the chunk, and the running maxima of that state.
    """
    state, peaks, _ = _scratch(plan, operands)[0]
    kinds = jnp.float32, dtype_of(operands), jnp.float32
    return list(zip([(plan.packed, plan.block), state, peaks], kinds, strict=True))


def _scratch(plan: ChunkPlan, operands: FeatureOperands) -> tuple[list, list]:
    """Return the shapes in VMEM for the forward and the backward kernel.

    Forward: the state, its running maxima and the rows. Backward: the gradients of the
    state, queries, keys and values.
    """
    count, lanes = features(plan, operands), width(plan)
    state, rows = (plan.packed, lanes, count), (plan.packed, plan.block, lanes)
    of_features = plan.packed, plan.block, count
    return [state, (plan.packed, count), rows], [state, of_features, of_features, rows]


def _cost(plan: ChunkPlan, operands: FeatureOperands) -> list[tuple[int, int]]:
    """Return FLOPs and exponentials of the forward and the backward kernel.

    FLOPs are those of products for exponents, for pairs and for the state, in whole
    tiles, times their passes on the MXU. Products of float32 features with bfloat16
    values take fewer passes than those of two float32 arrays.
    """
    tokens = plan.batch * plan.heads * plan.length
    count = features(plan, operands)
    full = mixed = tiles.mxu_passes(dtype_of(operands))
    if operands.rows is None and operands.value.dtype == jnp.bfloat16:
        full, mixed = 3, 2
    parts = 0 if operands.rows is None else operands.rows.shape[0]
    projected = full * parts * plan.widths[1] * count
    scored, valued = plan.block * count, plan.block * width(plan)
    of_state = count * width(plan)
    per_token = [
        2 * projected + full * scored + mixed * valued + (full + mixed) * of_state,
        4 * projected
        + 3 * full * scored
        + (full + mixed) * valued
        + (3 * full + mixed) * of_state,
    ]
    return [(2 * tokens * x, 2 * tokens * count) for x in per_token]


def feature_kernels(maps: ElementwiseMaps | None) -> Kernels:
    """Return the kernels of elementwise features, or for None of random features.

    With `saved=False` the backward pass under `jax.checkpoint` runs the forward kernel
    again. The states would take much memory, and computing them again takes little
    time.
    """
    return Kernels(
        "performer" if maps is None else "linear",
        partial(_forward, maps),
        partial(_backward, maps),
        _specs,
        _kept,
        _scratch,
        _cost,
        dtype_of,
        saved=False,
        reads_output=True,
    )
