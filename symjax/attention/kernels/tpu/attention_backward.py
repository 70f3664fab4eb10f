"""The backward kernels: gradients of queries, keys, values and λ."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from symjax.attention.kernels.intervals import RowIntervals, blocks_of_keys
from symjax.attention.kernels.operands import result
from symjax.attention.kernels.tpu import attention_plan, tiles
from symjax.attention.kernels.tpu.attention_plan import (
    AttentionOperands,
    AttentionPlan,
    BlockVisits,
)
from symjax.attention.kernels.tpu.tiles import LOG2E


def row_sums(
    plan: AttentionPlan,
    change: Float[Array, "B T N*V"],
    output: Float[Array, "B T N*V"],
    second: Float[Array, "B T N*V"] | None,
    lam: Float[Array, "B N 1 T"] | None,
) -> Float[Array, "B N maps T"]:
    """Return Σ_s w dw of every row and map, with its weights w and their gradients dw.

    The sum equals change · (the output of the map), where `change` is the gradient of
    the output. The output of the first map is output + λ second. The sums of the second
    map are without its factor −λ.
    """
    size = tiles.equal_block(plan.length, plan.block)

    def rows(b, n, i):
        return b, n, i

    spec, both = tiles.head_blocks(plan.value_size, size, rows), lam is not None
    lam_spec = attention_plan.by_row(1, size, rows) if both else None
    sums = (plan.batch, plan.heads, plan.maps, plan.length)
    sums = result(change, sums, jnp.float32)
    arrays = [change, output, second, lam]
    return pl.pallas_call(
        _row_sums,
        out_shape=sums,
        grid=(plan.batch, plan.heads, -(-plan.length // size)),
        in_specs=[spec, spec, spec if both else None, lam_spec],
        out_specs=attention_plan.by_row(plan.maps, size, rows),
        compiler_params=tiles.compiler(3),
        cost_estimate=tiles.estimate(0, 0, [*arrays, sums]),
        interpret=plan.interpret,
        name="attention_row_sums",
    )(*arrays)


def _row_sums(change, output, second, lam, sums) -> None:
    def along(x) -> Float[Array, "r 1"]:
        both = change[...].astype(jnp.float32) * x[...].astype(jnp.float32)
        return both.sum(axis=-1, keepdims=True)

    first = along(output)
    if lam is not None:
        other = along(second)
        first += tiles.column(lam[...]) * other
        tiles.write_row(sums, 1, other)
    tiles.write_row(sums, 0, first)


def backward(
    plan: AttentionPlan,
    operands: AttentionOperands,
    intervals: RowIntervals,
    change: Float[Array, "B T N*V"],
    normaliser: Float[Array, "B N maps T"],
    sums: Float[Array, "B N maps T"],
    dtypes: list,
) -> list[Array]:
    """Return the gradients of query, key and value, in the layout of `operands`.

    Args:
        sums: what `row_sums` returns.
        dtypes: of the three gradients.
    """
    size, keys = (tiles.equal_block(x, plan.block) for x in (plan.length, plan.keys))
    wide = operands.query.dtype.itemsize + jnp.dtype(dtypes[0]).itemsize
    row = plan.query_width * wide + plan.value_size * change.dtype.itemsize
    held = attention_plan.held(plan, plan.length, size, row)
    # A stretch is the rows that are in VMEM at once.
    stretch, count = held * size, -(-plan.keys // keys)
    stretches = -(-plan.length // stretch)
    bounds = blocks_of_keys(intervals, plan.keys, size, keys)
    visits, scalars = BlockVisits.of(bounds, intervals.first)

    def rows(b, k, j, g, i, scalars):
        near = visits.nearest(scalars, b, j, i, held)
        return b, k * plan.groups + g, near

    def columns(b, k, j, g, i, scalars):
        return b, k, j

    # Gradients of queries are complete only after the last block of keys.
    def finished(b, k, j, g, i, scalars):
        last = jnp.where(j == count - 1, 1, 0)
        return b, k * plan.groups + g * last, i * last

    specs = attention_plan.specs(plan, operands, rows, columns, (stretch, keys))
    row_spec = attention_plan.by_row(plan.maps, stretch, rows)
    accumulators = (
        (plan.groups, stretches * stretch, plan.query_width),
        (keys, plan.key_width),
        (keys, plan.value_size),
    )
    results = [
        result(x, x.shape, dtype) for x, dtype in zip(operands[:3], dtypes, strict=True)
    ]
    return pl.pallas_call(
        partial(_kernel, plan, visits, size),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.batch, plan.kv_heads, count, plan.groups, stretches),
            in_specs=[
                specs,
                tiles.head_blocks(plan.value_size, stretch, rows),
                row_spec,
                row_spec,
            ],
            out_specs=[
                tiles.head_blocks(plan.query_width, stretch, finished),
                specs.key,
                specs.value,
            ],
            scratch_shapes=[pltpu.VMEM(x, jnp.float32) for x in accumulators],
        ),
        compiler_params=tiles.compiler(2, 3),
        cost_estimate=attention_plan.cost(
            plan, operands, 3 * plan.maps, 2, [change, normaliser, sums, results]
        ),
        interpret=plan.interpret,
        name="attention_backward",
    )(scalars, operands, change, normaliser, sums)


def _kernel(
    plan: AttentionPlan,
    visits: BlockVisits,
    size: int,
    scalars,
    refs: AttentionOperands,
    change,
    normaliser,
    sums,
    query_out,
    key_out,
    value_out,
    query_sum,
    key_sum,
    value_sum,
) -> None:
    """Add up the gradients of a block of keys and of the rows in VMEM that see it.

    Matrices of pairs are [keys rows]. So numbers per row are along lanes, and only the
    product for the gradient of queries needs a transpose.
    """
    example, block, group, stretch = (pl.program_id(i) for i in (0, 2, 3, 4))
    keys, held = refs.key.shape[0], refs.query.shape[0] // size
    resident = pl.ds(stretch * held * size, held * size)
    first = (group == 0) & (stretch == 0)
    last = (group == pl.num_programs(3) - 1) & (stretch == pl.num_programs(4) - 1)

    @pl.when(first)
    def _():
        key_sum[...] = jnp.zeros_like(key_sum)
        value_sum[...] = jnp.zeros_like(value_sum)

    @pl.when(block == 0)
    def _():
        empty = held * size, plan.query_width
        query_sum[group, resident, :] = jnp.zeros(empty, jnp.float32)

    def step(i, masked: bool) -> None:
        at = pl.ds((i - stretch * held) * size, size)
        key, value = refs.key[...], refs.value[...]
        query, row_change, seen = refs.query[at, :], change[at, :], None
        if masked:
            row, column = i * size, block * keys
            key, value = (
                attention_plan.within(x, column, plan.keys) for x in (key, value)
            )
            query, row_change = (
                attention_plan.within(x, row, plan.length) for x in (query, row_change)
            )
            seen = _seen(plan, refs, at, row, column, scalars[scalars.shape[0] - 1])
        weights_change = tiles.product(value, row_change, tiles.ACROSS)
        for x in range(plan.maps):
            own_query = attention_plan.branch(query, plan.head_size, x)
            own_key = attention_plan.branch(key, plan.head_size, x)
            weights = _weights(plan, refs, x, at, own_query, own_key, normaliser)
            combined = combined + weights if x else weights
            scores_change = weights * (weights_change - sums[x : x + 1, at])
            if refs.factor is not None:
                scores_change *= refs.factor[:, at]
            scores_change = _only(seen, scores_change).astype(query.dtype)
            lanes = slice(x * plan.head_size, (x + 1) * plan.head_size)
            key_lanes = lanes if plan.key_maps == 2 else slice(0, plan.head_size)
            key_sum[:, key_lanes] += tiles.product(
                scores_change, own_query, tiles.PLAIN
            )
            query_sum[group, pl.ds(i * size, size), lanes] += tiles.product(
                scores_change, own_key, tiles.TURNED
            )
        combined = _only(seen, combined).astype(row_change.dtype)
        value_sum[...] += tiles.product(combined, row_change, tiles.PLAIN)

    bounds = visits.bounds(scalars, example, block)
    attention_plan.visit(bounds, stretch * held, (stretch + 1) * held, step)

    @pl.when(last)
    def _():
        key_out[...] = (key_sum[...] * plan.scale).astype(key_out.dtype)
        value_out[...] = value_sum[...].astype(value_out.dtype)

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        found = query_sum[group, resident, :] * plan.scale
        query_out[...] = found.astype(query_out.dtype)


def _weights(
    plan: AttentionPlan,
    refs: AttentionOperands,
    x: int,
    at,
    query: Array,
    key: Array,
    normaliser,
) -> Float[Array, "k r"]:
    """Return the weights of map x. Those of the second map are multiplied by −λ."""
    scores = tiles.product(key, query, tiles.ACROSS) * (plan.scale * LOG2E)
    if refs.factor is not None:
        scores *= refs.factor[:, at]
    # Scores of 1e9 are rounded differently here and in the forward kernel. Without the
    # minimum exp2 of the difference could overflow.
    weights = jnp.exp2(jnp.minimum(scores - normaliser[x : x + 1, at], 0))
    return weights * -refs.lam[:, at] if x == 1 else weights


def _seen(
    plan: AttentionPlan, refs: AttentionOperands, at, row, column, first
) -> Bool[Array, "k r"]:
    """Return the visible pairs of a block of keys and a block of rows.

    Args:
        row, column: first row and first key of the blocks.
        first: the position of row 0.
    """
    intervals = exists = None
    if refs.rows is not None:
        intervals = [refs.rows[x : x + 1, at] for x in range(3)]
    if refs.exists is not None:
        exists = tiles.column(refs.exists[...])
    shape = refs.key.shape[0], at.size
    place = first + row, column, intervals, exists
    seen = attention_plan.visible(plan, 1, shape, *place)
    if plan.length % at.size:
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        seen &= index < plan.length - row
    return seen


def _only(seen: Bool[Array, "k r"] | None, pairs: Array) -> Float[Array, "k r"]:
    return pairs if seen is None else jnp.where(seen, pairs, 0)
