"""The backward kernels: gradients of queries, keys, values and λ."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from symjax.attention.kernels.intervals import Seen, blocks_of_keys
from symjax.attention.kernels.plan import (
    ACROSS,
    LOG2E,
    PLAIN,
    TURNED,
    Operands,
    Plan,
    Visits,
    arranged,
    branch,
    by_heads,
    compiler,
    even,
    for_all_heads,
    head_rows,
    nearest,
    product,
    visible,
    visit,
    visit_edges,
    within,
)


def row_sums(
    plan: Plan,
    change: Float[Array, "B T N*V"],
    output: Float[Array, "B T N*V"],
    second: Float[Array, "B T N*V"] | None,
    lam: Float[Array, "B T N"] | None,
) -> Float[Array, "B N maps T"]:
    """Σ_s w dw of every row and map, w its weights and dw their gradients: the sums of
    change · output. Of the first map it is change · (output + λ second)."""
    size = even(plan.length, plan.sizes.rows)

    def rows(b, n, i):
        return b, n, i

    spec = by_heads(plan.heads, plan.value_size, size, rows)
    both = lam is not None
    return pl.pallas_call(
        partial(_row_sums, plan.maps),
        out_shape=jax.ShapeDtypeStruct(
            (plan.batch, plan.heads, plan.maps, plan.length), jnp.float32
        ),
        grid=(plan.batch, plan.heads, -(-plan.length // size)),
        in_specs=[
            spec,
            spec,
            spec if both else None,
            pl.BlockSpec((None, size, plan.heads), lambda b, n, i: (b, i, 0))
            if both
            else None,
        ],
        out_specs=head_rows(plan.maps, size, rows),
        compiler_params=compiler(3, 0),
        interpret=plan.interpret,
        name="attention_row_sums",
    )(change, output, second, lam)


def _row_sums(maps: int, change, output, second, lam, sums) -> None:
    def along(x):
        return (change[...].astype(jnp.float32) * x[...].astype(jnp.float32)).sum(
            axis=-1, keepdims=True
        )

    found = [along(output)]
    if maps == 2:
        found.append(along(second))
        lane = jax.lax.broadcasted_iota(jnp.int32, lam.shape, 1)
        own = jnp.where(lane == pl.program_id(1), lam[...], 0).sum(-1, keepdims=True)
        found[0] += own * found[1]
    for i, x in enumerate(found):
        sums[i : i + 1, :] = jnp.broadcast_to(x, (x.shape[0], 128)).T[:1]


def backward(
    plan: Plan,
    query: Float[Array, "B T _ H"],
    key: Float[Array, "B S _ H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B T N"] | None,
    factor: Float[Array, "b T"] | None,
    seen: Seen,
    change: Array,
    normaliser: Float[Array, "B N maps T"],
    sums: Float[Array, "B N maps T"],
    dtype,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, arranged; of keys and values in `dtype`."""
    size = even(plan.keys, plan.sizes.backward_keys)
    rows_size = even(plan.length, plan.sizes.backward_rows)
    count = -(-plan.length // rows_size)
    held = even(count, max(plan.sizes.resident_rows // rows_size, 1), 1)
    grid = (
        plan.batch,
        plan.kv_heads,
        -(-plan.keys // size),
        plan.groups,
        -(-count // held),
    )
    bounds = blocks_of_keys(seen, plan.keys, rows_size, size)
    visits = Visits(1, grid[2], bounds.shape[0] > 1)

    def rows(b, k, j, g, i, scalars):
        near = nearest(visits.union(scalars, b, j), i, held)
        return b, k * plan.groups + g, near

    def columns(b, k, j, g, i, scalars):
        return b, k, j

    def finished(b, k, j, g, i, scalars):  # nothing is written before the last keys
        last = jnp.where(j == grid[2] - 1, 1, 0)
        return b, k * plan.groups + g * last, i * last

    stretch = held * rows_size
    operands = Operands(
        arranged(query, plan.heads),
        arranged(key, plan.kv_heads),
        arranged(value, plan.kv_heads),
        None if lam is None else jnp.swapaxes(lam, 1, 2)[:, :, None],
        None if factor is None else factor[:, None],
        seen.rows if plan.by_row else None,
        None
        if seen.keys is None
        else jnp.swapaxes(seen.positions(size * grid[2]), 1, 2),
    )
    specs = Operands(
        by_heads(plan.heads, plan.query_width, stretch, rows),
        by_heads(plan.kv_heads, plan.key_width, size, columns),
        by_heads(plan.kv_heads, plan.value_size, size, columns),
        None if lam is None else head_rows(1, stretch, rows),
        for_all_heads(operands.factor, 2, stretch, rows),
        for_all_heads(operands.rows, 2, stretch, rows),
        for_all_heads(operands.positions, 1, size, columns),
    )
    f = jnp.float32
    return pl.pallas_call(
        partial(_kernel, plan, visits, rows_size),
        out_shape=tuple(
            jax.ShapeDtypeStruct(x.shape, t)
            for x, t in zip(operands[:3], (query.dtype, *dtype), strict=True)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                specs,
                by_heads(plan.heads, plan.value_size, stretch, rows),
                head_rows(plan.maps, stretch, rows),
                head_rows(plan.maps, stretch, rows),
            ],
            out_specs=(
                by_heads(plan.heads, plan.query_width, stretch, finished),
                specs.key,
                specs.value,
            ),
            scratch_shapes=[
                pltpu.VMEM((plan.groups, grid[4] * stretch, plan.query_width), f),
                pltpu.VMEM((size, plan.key_width), f),
                pltpu.VMEM((size, plan.value_size), f),
            ],
        ),
        compiler_params=compiler(2, 3),
        interpret=plan.interpret,
        name="attention_backward",
    )(visits.scalars(bounds, seen.first), operands, change, normaliser, sums)


def _kernel(
    plan: Plan,
    visits: Visits,
    size: int,
    scalars,
    given: Operands,
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
    """A block of keys against the resident rows of a head that may see them.

    Pairs are [keys rows], so that what belongs to a row lies along lanes and only the
    product for the queries needs a transpose.
    """
    example, block, group, stretch = (pl.program_id(i) for i in (0, 2, 3, 4))
    keys, held = given.key.shape[0], given.query.shape[0] // size
    low, high = stretch * held, (stretch + 1) * held
    resident = pl.ds(low * size, held * size)

    @pl.when((group == 0) & (stretch == 0))
    def _():
        key_sum[...] = jnp.zeros_like(key_sum)
        value_sum[...] = jnp.zeros_like(value_sum)

    @pl.when(block == 0)
    def _():
        shape = held * size, plan.query_width
        query_sum[group, resident, :] = jnp.zeros(shape, jnp.float32)

    def step(i, masked: bool) -> None:
        at = pl.ds((i - low) * size, size)
        key, value = given.key[...], given.value[...]
        query, grown = given.query[at, :], change[at, :]
        if masked:
            if plan.keys % keys:
                key, value = (within(x, block * keys, plan.keys) for x in (key, value))
            if plan.length % size:
                query, grown = (within(x, i * size, plan.length) for x in (query, grown))
            intervals = positions = None
            if given.rows is not None:
                intervals = [given.rows[x : x + 1, at] for x in range(3)]
            if given.positions is not None:
                positions = given.positions[...]
            row = visits.first(scalars) + i * size
            seen = visible(
                plan, (keys, size), 1, row, block * keys, intervals, positions
            )
            if plan.length % size:
                index = jax.lax.broadcasted_iota(jnp.int32, (keys, size), 1)
                seen &= index < plan.length - i * size

        def shown(x):
            return jnp.where(seen, x, 0) if masked else x

        weights_change, combined = product(value, grown, ACROSS), 0
        for p in range(plan.maps):
            own_query = branch(plan, query, p, plan.maps)
            own_key = branch(plan, key, p, plan.key_maps)
            scores = (plan.scale * LOG2E) * product(own_key, own_query, ACROSS)
            if given.factor is not None:
                scores *= given.factor[:, at]
            weights = jnp.exp2(scores - normaliser[p : p + 1, at])
            if p:
                weights *= -given.lam[:, at]
            combined += weights
            scores_change = weights * (weights_change - sums[p : p + 1, at])
            if given.factor is not None:
                scores_change *= given.factor[:, at]
            scores_change = shown(scores_change).astype(query.dtype)
            own = slice(p * plan.head_size, (p + 1) * plan.head_size)
            keyed = own if plan.key_maps == 2 else slice(0, plan.head_size)
            key_sum[:, keyed] += product(scores_change, own_query, PLAIN)
            query_sum[group, pl.ds(i * size, size), own] += product(
                scores_change, own_key, TURNED
            )
        value_sum[...] += product(shown(combined).astype(grown.dtype), grown, PLAIN)

    bounds = visits.union(scalars, example, block)
    visit_edges(bounds, low, high, partial(step, masked=True))
    visit(bounds, low, high, partial(step, masked=False))

    @pl.when(
        (group == pl.num_programs(3) - 1) & (stretch == pl.num_programs(4) - 1)
    )
    def _():
        key_out[...] = (key_sum[...] * plan.scale).astype(key_out.dtype)
        value_out[...] = value_sum[...].astype(value_out.dtype)

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        found = query_sum[group, resident, :] * plan.scale
        query_out[...] = found.astype(query_out.dtype)
