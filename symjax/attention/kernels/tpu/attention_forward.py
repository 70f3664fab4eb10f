"""The forward kernel: one pass over the keys, for one map or for two."""

from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.kernels.intervals import RowIntervals, blocks_of_rows
from symjax.attention.kernels.operands import result
from symjax.attention.kernels.tpu import attention_plan, tiles
from symjax.attention.kernels.tpu.attention_plan import (
    AttentionOperands,
    AttentionPlan,
    BlockVisits,
)
from symjax.attention.kernels.tpu.tiles import LANES, LOG2E

EMPTY = -1e30  # the running max of a row that has seen no key


def forward(
    plan: AttentionPlan, operands: AttentionOperands, intervals: RowIntervals
) -> tuple[Array, Array | None, Float[Array, "B N maps T"]]:
    """Return the outputs and what the backward kernel needs.

    Returns:
        output: [B T N·V].
        second: [B T N·V], the outputs of the second map alone; None for one map.
        normaliser: log₂ Σ exp(score) of every row and map.
    """
    size, keys = (tiles.equal_block(x, plan.block) for x in (plan.length, plan.keys))
    row = plan.key_width * operands.key.dtype.itemsize
    row += plan.value_size * operands.value.dtype.itemsize
    held = attention_plan.held(plan, plan.keys, keys, row)
    count = -(-plan.length // size)
    bounds = blocks_of_rows(intervals, plan.keys, size, keys)
    visits, scalars = BlockVisits.of(bounds, intervals.first)

    def rows(b, n, i, j, scalars):
        return b, n, i

    def columns(b, n, i, j, scalars):
        return b, n // plan.groups, visits.nearest(scalars, b, i, j, held)

    query, dtype = operands.query, operands.value.dtype
    output = (plan.batch, plan.length, plan.heads * plan.value_size)
    output = result(query, output, dtype)
    normaliser = (plan.batch, plan.heads, plan.maps, plan.length)
    spec = tiles.head_blocks(plan.value_size, size, rows)
    both = plan.maps == 2
    results = (
        output,
        output if both else None,
        result(query, normaliser, jnp.float32),
    )
    return pl.pallas_call(
        partial(_kernel, plan, visits, keys),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.batch, plan.heads, count, -(-plan.keys // (held * keys))),
            in_specs=[
                attention_plan.specs(plan, operands, rows, columns, (size, held * keys))
            ],
            out_specs=(
                spec,
                spec if both else None,
                attention_plan.by_row(plan.maps, size, rows),
            ),
            scratch_shapes=[
                pltpu.VMEM((plan.maps, size, width), jnp.float32)
                for width in (LANES, LANES, plan.value_size)
            ],
        ),
        compiler_params=tiles.compiler(3, 1),
        cost_estimate=attention_plan.cost(
            plan, operands, plan.maps, plan.maps, results
        ),
        interpret=plan.interpret,
        name="attention_forward",
    )(scalars, operands)


def _kernel(
    plan: AttentionPlan,
    visits: BlockVisits,
    keys: int,
    scalars,
    refs: AttentionOperands,
    output,
    second,
    normaliser,
    running_max,
    denominator,
    numerator,
) -> None:
    """Attend from a block of rows to one stretch of keys, those that are in VMEM.

    The denominator of a row is kept as 128 partial sums, which are added at the end.
    """
    example, block, stretch = (pl.program_id(i) for i in (0, 2, 3))
    size, held = refs.query.shape[0], refs.key.shape[0] // keys

    @pl.when(stretch == 0)
    def _():
        running_max[...] = jnp.full_like(running_max, EMPTY)
        denominator[...] = jnp.zeros_like(denominator)
        numerator[...] = jnp.zeros_like(numerator)

    def step(j, masked: bool) -> None:
        at = pl.ds((j - stretch * held) * keys, keys)
        key, value = refs.key[at, :], refs.value[at, :]
        if masked:
            intervals = exists = None
            if refs.rows is not None:
                intervals = [tiles.column(refs.rows[i : i + 1, :]) for i in range(3)]
            if refs.exists is not None:
                exists = refs.exists[:, at]
            value = attention_plan.within(value, j * keys, plan.keys)
            row = scalars[scalars.shape[0] - 1] + block * size
            place = row, j * keys, intervals, exists
            seen = attention_plan.visible(plan, 0, (size, keys), *place)
        for i in range(plan.maps):
            query = attention_plan.branch(refs.query[...], plan.head_size, i)
            own_key = attention_plan.branch(key, plan.head_size, i)
            scores = tiles.product(query, own_key, tiles.ACROSS)
            scores *= plan.scale * LOG2E
            if refs.factor is not None:
                scores *= tiles.column(refs.factor[...])
            if masked:
                scores = jnp.where(seen, scores, -jnp.inf)
            old = running_max[i]
            new = jnp.maximum(old, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp2(scores - jnp.tile(new, (1, keys // LANES)))
            pieces = [weights[:, x : x + LANES] for x in range(0, keys, LANES)]
            values = tiles.product(weights.astype(value.dtype), value, tiles.PLAIN)
            fade = jnp.exp2(old - new)
            running_max[i] = new
            denominator[i] = fade * denominator[i] + sum(pieces[1:], pieces[0])
            fade = jnp.tile(fade, (1, plan.value_size // LANES))
            numerator[i] = fade * numerator[i] + values

    bounds = visits.bounds(scalars, example, block)
    attention_plan.visit(bounds, stretch * held, (stretch + 1) * held, step)

    @pl.when(stretch == pl.num_programs(3) - 1)
    def _():
        results = []
        for i in range(plan.maps):
            total = denominator[i].sum(axis=-1, keepdims=True)
            empty = total == 0
            results.append(numerator[i] * (1 / jnp.where(empty, 1, total)))
            logarithm = jnp.where(empty, -EMPTY, running_max[i] + jnp.log2(total))
            tiles.write_row(normaliser, i, logarithm)
        if plan.maps == 2:
            second[...] = results[1].astype(second.dtype)
            results[0] -= tiles.column(refs.lam[...]) * results[1]
        output[...] = results[0].astype(output.dtype)
