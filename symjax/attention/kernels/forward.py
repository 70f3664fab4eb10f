"""The forward kernel: one pass over the keys, for one map or two."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.kernels.intervals import Seen, blocks_of_rows
from symjax.attention.kernels.plan import (
    ACROSS,
    LANES,
    LOG2E,
    PLAIN,
    Operands,
    Plan,
    Visits,
    arranged,
    arranged_shape,
    branch,
    by_heads,
    compiler,
    even,
    for_all_heads,
    head_rows,
    nearest,
    product,
    repeat,
    visible,
    visit,
    visit_edges,
    within,
)

EMPTY = -1e30  # the running max of a row that has seen no key


def forward(
    plan: Plan,
    query: Float[Array, "B T _ H"],
    key: Float[Array, "B S _ H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B T N"] | None,
    factor: Float[Array, "b T"] | None,
    seen: Seen,
) -> tuple[Array, Array | None, Float[Array, "B N maps T"]]:
    """The output, that of the second map alone, and the normaliser of every row: the
    logarithm to base 2 of its sum of exp(score). The outputs are arranged."""
    size = even(plan.length, plan.sizes.rows)
    parts = 2 if 2 * size > plan.sizes.rows else 1
    keys = even(plan.keys, plan.sizes.keys)
    count = -(-plan.keys // keys)
    held = even(count, max(plan.sizes.resident_keys // keys, 1), 1)
    grid = plan.batch, plan.heads, -(-plan.length // size), -(-count // held)
    bounds = blocks_of_rows(seen, plan.keys, size // parts, grid[2] * parts, keys)
    visits = Visits(parts, grid[2] * parts, bounds.shape[0] > 1)

    def rows(b, n, i, j, scalars):
        return b, n, i

    def columns(b, n, i, j, scalars):
        return b, n // plan.groups, nearest(visits.union(scalars, b, i), j, held)

    def lam_block(b, n, i, j, scalars):
        return b, i, 0

    operands = Operands(
        arranged(query, plan.heads),
        arranged(key, plan.kv_heads),
        arranged(value, plan.kv_heads),
        lam,
        None if factor is None else factor[:, :, None],
        jnp.swapaxes(seen.rows, 1, 2) if plan.by_row else None,
        seen.positions(held * keys * grid[3]),
    )
    specs = Operands(
        by_heads(plan.heads, plan.query_width, size, rows),
        by_heads(plan.kv_heads, plan.key_width, held * keys, columns),
        by_heads(plan.kv_heads, plan.value_size, held * keys, columns),
        None if lam is None else pl.BlockSpec((None, size, plan.heads), lam_block),
        for_all_heads(operands.factor, 1, size, rows),
        for_all_heads(operands.rows, 1, size, rows),
        for_all_heads(operands.positions, 2, held * keys, columns),
    )
    output = jax.ShapeDtypeStruct(
        arranged_shape(plan, plan.heads, plan.value_size, plan.length), value.dtype
    )
    normaliser = (plan.batch, plan.heads, plan.maps, plan.length)
    output_spec = by_heads(plan.heads, plan.value_size, size, rows)
    both = lam is not None
    return pl.pallas_call(
        partial(_kernel, plan, visits, keys),
        out_shape=(
            output,
            output if both else None,
            jax.ShapeDtypeStruct(normaliser, jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[specs],
            out_specs=(
                output_spec,
                output_spec if both else None,
                head_rows(plan.maps, size, rows),
            ),
            scratch_shapes=[
                pltpu.VMEM((plan.maps, size, width), jnp.float32)
                for width in (LANES, LANES, plan.value_size)
            ],
        ),
        compiler_params=compiler(3, 1),
        interpret=plan.interpret,
        name="attention_forward",
    )(visits.scalars(bounds, seen.first), operands)


def _kernel(
    plan: Plan,
    visits: Visits,
    keys: int,
    scalars,
    given: Operands,
    output,
    second,
    normaliser,
    running_max,
    denominator,
    numerator,
) -> None:
    """A block of rows against a resident stretch of keys.

    The denominator is kept as 128 partial sums a row, which are added at the end.
    """
    example, head, block, stretch = (pl.program_id(i) for i in range(4))
    size, held = given.query.shape[0], given.key.shape[0] // keys
    part = size // visits.parts
    low, high = stretch * held, (stretch + 1) * held

    @pl.when(stretch == 0)
    def _():
        running_max[...] = jnp.full_like(running_max, EMPTY)
        denominator[...] = jnp.zeros_like(denominator)
        numerator[...] = jnp.zeros_like(numerator)

    def step(j, start: int, count: int, masked: bool) -> None:
        own, at = pl.ds(start, count), pl.ds((j - low) * keys, keys)
        query, key, value = given.query[own, :], given.key[at, :], given.value[at, :]
        if masked:
            if plan.keys % keys:
                value = within(value, j * keys, plan.keys)
            intervals = positions = None
            if given.rows is not None:
                intervals = [given.rows[own, i : i + 1] for i in range(3)]
            if given.positions is not None:
                positions = given.positions[:, at]
            row = visits.first(scalars) + block * size + start
            seen = visible(
                plan, (count, keys), 0, row, j * keys, intervals, positions
            )
        for i in range(plan.maps):
            scores = (plan.scale * LOG2E) * product(
                branch(plan, query, i, plan.maps),
                branch(plan, key, i, plan.key_maps),
                ACROSS,
            )
            if given.factor is not None:
                scores *= given.factor[own, :]
            if masked:
                scores = jnp.where(seen, scores, -jnp.inf)
            old = running_max[i, own, :]
            new = jnp.maximum(old, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp2(scores - repeat(new, keys))
            fade = jnp.exp2(old - new)
            pieces = [weights[:, x : x + LANES] for x in range(0, keys, LANES)]
            running_max[i, own, :] = new
            denominator[i, own, :] = fade * denominator[i, own, :] + sum(
                pieces[1:], pieces[0]
            )
            numerator[i, own, :] = repeat(fade, plan.value_size) * numerator[
                i, own, :
            ] + product(weights.astype(value.dtype), value, PLAIN)

    for i in range(visits.parts):
        bounds = visits.edges(scalars, example, block, i)
        edges = partial(step, start=i * part, count=part, masked=True)
        visit_edges(bounds, low, high, edges)
    whole = partial(step, start=0, count=size, masked=False)
    visit(visits.union(scalars, example, block), low, high, whole)

    @pl.when(stretch == pl.num_programs(3) - 1)
    def _():
        results = []
        for i in range(plan.maps):
            total = denominator[i].sum(axis=-1, keepdims=True)
            empty = total == 0
            results.append(numerator[i] * (1 / jnp.where(empty, 1, total)))
            logarithm = jnp.where(empty, -EMPTY, running_max[i] + jnp.log2(total))
            normaliser[i : i + 1, :] = logarithm.T[:1]
        if plan.maps == 2:
            second[...] = results[1].astype(second.dtype)
            lane = jax.lax.broadcasted_iota(jnp.int32, given.lam.shape, 1)
            lam = jnp.where(lane == head, given.lam[...], 0).sum(-1, keepdims=True)
            results[0] -= lam * results[1]
        output[...] = results[0].astype(output.dtype)
