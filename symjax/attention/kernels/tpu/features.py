"""Causal Performer and linear attention as TPU kernels.

The kernels compute the features of the Performer and never store them. XLA computes all
other features.

The forward and the backward kernel each pass over the chunks of time once
(`chunks.py`). The state of a head, features × values, stays in VMEM. It is transposed,
so that the features lie along lanes. Exponents are to base 2, relative to a running
maximum that is rounded up to an integer: a state is then rescaled by powers of 2,
which is exact. The forward kernel saves the state before each chunk with its running
maxima, and 1 / denominator of each row. If the kernels compute the features, the state
is saved in the dtype of the operands, and otherwise in float32.

Values have a lane of ones beside them, so that one product gives numerator and
denominator. Two heads of 64 are in one tile of 128 lanes, in the layout of the
projections. Their projection is block-diagonal, and the ones of one head are in a lane
of the other head's values.

Operands of products keep their dtype, and float32 products keep all bits. Sums are
float32. With bfloat16 operands the projection is split into two bfloat16 parts, because
the absolute error of an exponent is a relative error of the feature. A row underflows
if a later key of its chunk is much larger than the keys that the row sees. The kernel
then computes the row again, relative to its own highest exponent.
"""

from collections.abc import Iterable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.core.feature_maps import UNDERFLOW
from symjax.attention.kernels.tpu import packed_heads, tiles
from symjax.attention.kernels.tpu.chunks import (
    ChunkPlan,
    Chunks,
    ChunkVisibility,
    Kernels,
    seen_in_chunk,
    where,
)
from symjax.attention.kernels.tpu.tiles import (
    ACROSS,
    LANES,
    LOG2E,
    PLAIN,
    TURNED,
    column,
    product,
)

EMPTY = -1e30  # the running maximum before the first key


class FeatureOperands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads are joined along lanes.

    If XLA computes the features, they take the places of query and key, in float32.
    None is negative, and those of hidden keys are 0.
    """

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    # Rows of the projection of packed heads, times √scale log₂ e: [parts M H]. None if
    # XLA computes the features.
    rows: Any
    offset: Any  # added to all exponents, [1 M] of packed heads
    norm: Any  # [1], a factor of |k|²; the product is subtracted from a key's exponents
    flags: Any  # [B 1 T], or None if all tokens are visible and of one segment
    segment: Any  # [B 1 T], or None


class Weights(NamedTuple):
    """Weights of the features of one head in a chunk; all are at most 1."""

    row: Float[Array, "c M"]
    key: Float[Array, "c M"]
    fade: Float[Array, "1 M"]  # factor of the state before the chunk, in the rows
    joining: Float[Array, "c M"]  # weights of the keys in the state after the chunk
    after: Float[Array, "1 M"]  # running maximum of the state after the chunk
    left: Float[Array, "1 M"]  # factor of the state before the chunk in that after it


def width(plan: ChunkPlan) -> int:
    """Return the number of lanes of a head's values together with its ones."""
    return LANES if plan.packed > 1 else plan.value_size + LANES


def lane_of_ones(plan: ChunkPlan, head: int) -> int:
    if plan.packed == 1:
        return plan.value_size
    return (head + 1) % plan.packed * plan.value_size


def features(plan: ChunkPlan, given: FeatureOperands) -> int:
    """Return the number of features of a head, in whole tiles."""
    if given.rows is None:
        return plan.widths[1]
    return given.rows.shape[1] // plan.packed


def features_of(plan: ChunkPlan, given: FeatureOperands, head: int) -> slice:
    count = features(plan, given)
    return slice(head * count, (head + 1) * count)


def dtype_of(given: FeatureOperands) -> Any:
    """Return the dtype of features in products: float32 if XLA computes them."""
    return jnp.float32 if given.rows is None else given.value.dtype


def own_head(plan: ChunkPlan, x: Array, head: int) -> Array:
    """Return packed heads with 0 for all but one of them."""
    return x if plan.packed == 1 else packed_heads.own(x, plan.value_size, head)


def exponents(plan: ChunkPlan, given: FeatureOperands) -> list[Float[Array, "c P*M"]]:
    """Return the base-2 exponents of query and key features, or the given features.

    The last axis has the features of one packed head after those of the other.
    """
    if given.rows is None:
        return [given.query[...], given.key[...]]
    query, key = (
        added(product(x[...], y, ACROSS) for y in projection(given)) + given.offset[...]
        for x in (given.query, given.key)
    )
    square = given.key[...].astype(jnp.float32) ** 2
    norms = [
        own_head(plan, square, head).sum(axis=-1, keepdims=True) * given.norm[0]
        for head in range(plan.packed)
    ]
    parts = [key[:, features_of(plan, given, i)] - norm for i, norm in enumerate(norms)]
    return [query, jnp.concatenate(parts, axis=1)]


def exponents_of(
    plan: ChunkPlan,
    given: FeatureOperands,
    seen: ChunkVisibility,
    both: list[Array],
    head: int,
) -> list[Float[Array, "c M"]]:
    """Return the exponents of one head, with −∞ for hidden keys."""
    if given.rows is None:
        return [own_head(plan, x, head) for x in both]
    query, key = (x[:, features_of(plan, given, head)] for x in both)
    return [query, where(seen.visible, key, -jnp.inf)]


def projection(given: FeatureOperands) -> list[Float[Array, "P*M P*H"]]:
    return [given.rows[i] for i in range(given.rows.shape[0])]


def added(parts: Iterable[Array]) -> Array:
    return reduce(jnp.add, parts)


def weights_of(
    given: FeatureOperands, seen: ChunkVisibility, query: Array, key: Array, old: Array
) -> Weights:
    """Return the weights of a head's features in a chunk.

    Weights of `key` and `fade` are relative to the highest exponent of the chunk and
    the state before it; `joining` and `left` to the running maximum `after` the chunk.
    """
    if given.rows is None:
        same, joining = jnp.ones_like(old), where(seen.joins, key, 0)
        return Weights(query, key, same, joining, old, where(seen.keeps, same, 0))
    highest = jnp.maximum(old, jnp.ceil(key.max(axis=0, keepdims=True)))
    raised = query + highest
    row = jnp.exp2(raised - raised.max(axis=-1, keepdims=True))
    weights, fade = jnp.exp2(key - highest), jnp.exp2(old - highest)
    if seen.joins is None:
        return Weights(row, weights, fade, weights, highest, fade)
    joining = where(seen.joins, key, -jnp.inf)
    old = where(seen.keeps, old, EMPTY)
    after = jnp.maximum(old, jnp.ceil(joining.max(axis=0, keepdims=True)))
    left = where(seen.keeps, jnp.exp2(old - after), 0)
    return Weights(row, weights, fade, jnp.exp2(joining - after), after, left)


def faded(state: Float[Array, "w M"], fade: Float[Array, "1 M"]) -> Array:
    return (state.astype(jnp.float32) * fade).astype(state.dtype)


def exact_weights(
    t, seen: ChunkVisibility, query: Array, key: Array, old: Array
) -> list[Array]:
    """Return the weights of row t, relative to its own highest exponent.

    Returns:
        Weights [c M] for each key and feature of the chunk, and [1 M] for the state.
    """
    own = pick(query, t)
    index = jax.lax.broadcasted_iota(jnp.int32, (key.shape[0], 1), 0)
    near = jnp.where(index <= t, 1.0, 0.0)
    past = own + old
    if seen.segment is not None:
        near *= jnp.where(seen.segment == pick(seen.segment, t), 1.0, 0.0)
        past = where(pick(seen.reaches, t), past, -jnp.inf)
    pairs = where(near, key + own, -jnp.inf)
    shift = jnp.maximum(pairs.max(keepdims=True), past.max(keepdims=True))
    return [jnp.exp2(x - shift) for x in (pairs, past)]


def pick(x: Array, t) -> Array:
    """Return row t of an array [c n], as [1 n]."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index == t, x, 0).sum(axis=0, keepdims=True)


def for_each_underflow(
    plan: ChunkPlan,
    given: FeatureOperands,
    underflows: list[Float[Array, "c 1"]],
    recompute: Any,
) -> None:
    """Call recompute(head, seen, query, key, t) for each row t that underflows.

    Args:
        underflows: for each head, 1 for rows that underflow and 0 for others.
    """

    if given.rows is None:
        return

    @pl.when(added(underflows).max() > 0)
    def _():
        seen, both = seen_by(given), exponents(plan, given)
        for head in range(plan.packed):
            query, key = exponents_of(plan, given, seen, both, head)
            step = partial(recompute, head, seen, query, key)

            def body(t, _, some=underflows[head], step=step) -> None:
                pl.when(pick(some, t).max() > 0)(lambda: step(t))

            jax.lax.fori_loop(0, plan.block, body, None)


def seen_by(given: FeatureOperands) -> ChunkVisibility:
    return seen_in_chunk(given.query.shape[0], given.flags, given.segment)


def values_of(
    plan: ChunkPlan, given: FeatureOperands, head: int
) -> Float[Array, "c w"]:
    """Return the values of a head with ones beside them, in the dtype of products."""
    value = given.value[...]
    return beside(plan, value.astype(dtype_of(given)), head, 1)


def beside(plan: ChunkPlan, x: Array, head: int, other: Any) -> Float[Array, "c w"]:
    """Return the values of a head, with `other` in the lanes beside them."""
    if plan.packed > 1:
        own = packed_heads.is_own(x.shape, plan.value_size, head)
        return jnp.where(own, x, jnp.asarray(other, x.dtype))
    tile = jnp.broadcast_to(jnp.asarray(other, x.dtype), (x.shape[0], LANES))
    return jnp.concatenate([x, tile], axis=1)


def joined(plan: ChunkPlan, heads: list[Array], size: int) -> Array:
    """Return one array with the own lanes of each packed head."""
    if plan.packed == 1:
        return heads[0][:, :size]
    return added(own_head(plan, x, i) for i, x in enumerate(heads))


def ones_of(plan: ChunkPlan, rows: Any, head: int) -> Float[Array, "c 1"]:
    """Return the sum of the weights of a head."""
    lane = lane_of_ones(plan, head)
    return rows[head, :, lane : lane + 1]


def _forward(
    plan: ChunkPlan,
    given: FeatureOperands,
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
    seen, both = seen_by(given), exponents(plan, given)
    underflows = []
    for head in range(plan.packed):
        query, key = exponents_of(plan, given, seen, both, head)
        weights = weights_of(given, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, given, head)
        dtype = values.dtype
        row, past = weights.row.astype(dtype), faded(before[head], weights.fade)
        scores = product(row, weights.key.astype(dtype), ACROSS)
        scores = jnp.where(seen.pairs, scores, 0).astype(dtype)
        earlier = where(seen.reaches, product(row, past, ACROSS), 0)
        rows[head] = product(scores, values, PLAIN) + earlier
        least = 0.0 if given.rows is None else UNDERFLOW
        underflows.append(jnp.where(ones_of(plan, rows, head) < least, 1.0, 0.0))
        if seen.sees is not None:
            underflows[head] *= seen.sees
        new = product(values, weights.joining.astype(dtype), TURNED)
        sums[head] = sums[head] * weights.left + new
        running_max[head : head + 1, :] = weights.after

    def recompute(
        head: int, seen: ChunkVisibility, query: Array, key: Array, t
    ) -> None:
        own, past = exact_weights(t, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, given, head).astype(jnp.float32)
        near = (own.sum(axis=-1, keepdims=True) * values).sum(axis=0, keepdims=True)
        past = jnp.broadcast_to(past, (8, features(plan, given)))
        earlier = product(past, before[head].astype(jnp.float32), ACROSS)
        rows[head, pl.ds(t, 1), :] = near + earlier[:1]

    for_each_underflow(plan, given, underflows, recompute)
    results = []
    for head in range(plan.packed):
        total = ones_of(plan, rows, head)
        scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        results.append(rows[head] * scale)
        tiles.write_row(inverse, head, jnp.where(underflows[head] > 0, -scale, scale))
    output[...] = joined(plan, results, plan.value_size).astype(output.dtype)


def _backward(
    plan: ChunkPlan,
    given: FeatureOperands,
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
        state_change: the gradient of the state, which goes from that after the chunk
            to that before it.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_change[...] = jnp.zeros_like(state_change)

    seen, both = seen_by(given), exponents(plan, given)
    scales, changes = [], []
    for head in range(plan.packed):
        query, key = exponents_of(plan, given, seen, both, head)
        weights = weights_of(given, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, given, head)
        dtype, past = values.dtype, faded(before[head], weights.fade)
        changes.append(_of_row(plan, change[...], output[...], head))
        read = where(seen.reaches, changes[head], 0).astype(dtype)
        grow = changes[head].astype(dtype)
        scales.append(column(inverse[head : head + 1, :]))
        weighed = weights.row * jnp.maximum(scales[head], 0)
        row, keys = weighed.astype(dtype), weights.key.astype(dtype)
        scores = jnp.where(seen.pairs, product(row, keys, ACROSS), 0).astype(dtype)
        pairs = product(grow, values, ACROSS)
        pairs = jnp.where(seen.pairs, pairs, 0).astype(dtype)
        later = state_change[head].astype(dtype)
        of_query = product(pairs, keys, PLAIN) + product(read, past, PLAIN)
        near, far = product(pairs, row, TURNED), product(values, later, PLAIN)
        if given.rows is None:
            query_change[head] = of_query * scales[head]
            key_change[head] = near + where(seen.joins, far, 0)
        else:
            query_change[head] = of_query * weighed
            key_change[head] = near * weights.key + far * weights.joining
        value_change[head] = product(scores, grow, TURNED) + product(
            weights.joining.astype(dtype), later, ACROSS
        )
        here = product(read, row, TURNED) * weights.fade
        state_change[head] = state_change[head] * weights.left + here

    def recompute(
        head: int, seen: ChunkVisibility, query: Array, key: Array, t
    ) -> None:
        state = before[head].astype(jnp.float32)
        own, past = exact_weights(t, seen, query, key, highest[head : head + 1, :])
        values = values_of(plan, given, head).astype(jnp.float32)
        grow = pick(changes[head], t) * -pick(scales[head], t)
        pairs = own * (values * grow).sum(axis=-1, keepdims=True)
        first = jax.lax.broadcasted_iota(jnp.int32, (8, width(plan)), 0) == 0
        first = jnp.where(first, grow, 0.0)
        of_past = past * product(first, state, PLAIN)[:1]
        query_change[head, pl.ds(t, 1), :] = pairs.sum(axis=0, keepdims=True) + of_past
        key_change[head] += pairs
        value_change[head] += own.sum(axis=-1, keepdims=True) * grow
        past = jnp.broadcast_to(past, (8, features(plan, given)))
        state_change[head] += product(first, past, TURNED)

    for_each_underflow(
        plan, given, [jnp.where(x < 0, 1.0, 0.0) for x in scales], recompute
    )
    values = [value_change[head] for head in range(plan.packed)]
    found = _of_inputs(plan, given, query_change, key_change)
    found.append(joined(plan, values, plan.value_size))
    for out, x in zip((query_out, key_out, value_out), found, strict=True):
        out[...] = x.astype(out.dtype)


def _of_row(
    plan: ChunkPlan, change: Array, output: Array, head: int
) -> Float[Array, "c w"]:
    """Return the gradients of a head's numerators and, in the lane of ones, of its
    denominators, all times the denominators."""
    change, output = change.astype(jnp.float32), output.astype(jnp.float32)
    along = own_head(plan, change * output, head).sum(axis=-1, keepdims=True)
    own = beside(plan, change, head, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, own.shape, 1)
    return jnp.where(lane == lane_of_ones(plan, head), -along, own)


def _of_inputs(
    plan: ChunkPlan, given: FeatureOperands, query_change, key_change
) -> list[Array]:
    """Return the gradients of queries and keys, which may be given features.

    Args:
        query_change, key_change: the gradients of given features, or of exponents.
    """
    heads = range(plan.packed)
    if given.rows is None:
        count = features(plan, given)
        both = ([x[head] for head in heads] for x in (query_change, key_change))
        return [joined(plan, x, count) for x in both]
    query, key = (_from_exponents(plan, given, x) for x in (query_change, key_change))
    for head in heads:
        total = key_change[head].sum(axis=-1, keepdims=True)
        own = own_head(plan, given.key[...].astype(jnp.float32), head)
        key -= own * (total * (2 / LOG2E * given.norm[0]))
    return [query, key]


def _from_exponents(
    plan: ChunkPlan, given: FeatureOperands, change: Any
) -> Float[Array, "c P*H"]:
    """Return the part of the gradient of queries or keys x that comes from w·x."""
    return added(
        product(
            change[head].astype(given.key.dtype),
            y[features_of(plan, given, head)],
            PLAIN,
        )
        for head in range(plan.packed)
        for y in projection(given)
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
    tiles. Those of float32 count six times.
    """
    tokens = plan.batch * plan.heads * plan.length
    count = features(plan, operands)
    passes = tiles.mxu_passes(dtype_of(operands))
    parts = 0 if operands.rows is None else operands.rows.shape[0]
    lanes = parts * plan.widths[1]
    products = [
        passes * count * (x * lanes + y * plan.block + z * width(plan))
        for x, y, z in ((2, 2, 2), (4, 5, 4))
    ]
    return [(2 * tokens * x, 2 * tokens * count) for x in products]


# With `saved=False` the backward pass under `jax.checkpoint` runs the forward kernel
# again. The states would take much memory, and computing them again takes little time.
PERFORMER = Kernels(
    "performer",
    _forward,
    _backward,
    _specs,
    _kept,
    _scratch,
    _cost,
    dtype_of,
    saved=False,
    reads_output=True,
)
