"""TPU kernels of the delta rule, with or without decays.

Operands and states are those of `gated.py`. The tokens of a chunk write u, with
(I + A) u = β (v − k S). Here S is the state before the chunk, decayed to the token, and
A is β k kᵀ times decays, below its diagonal. The inverse X of I + A is computed for
blocks of 2, 4, … 128 rows, each from two blocks of half the size as in
`recurrent/triangular.py`. Each level is X − X A X, with only the pairs of the level in
A. The forward kernel saves inverses for the backward pass, besides the state before
each chunk.

The products that compute one inverse depend on each other. So the forward kernel
computes the inverses of two chunks, and of all heads of a tile, in parallel. A chunk of
a head of 64 then takes 1,796 instruction bundles of v5e instead of 4,035, and one of a
head of 128 takes 2,804 instead of 4,556.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.tpu.chunks import ChunkPlan
from symjax.attention.kernels.tpu.decays import (
    BLOCK,
    DIAGONAL,
    LEVELS,
    SINCE,
    UNTIL,
    Fading,
    fading_of,
    pairs_of,
    scores_of,
    through_pairs,
)
from symjax.attention.kernels.tpu.gated import GatedOperands, gated_kernels, levels_of
from symjax.attention.kernels.tpu.packed_heads import in_lanes, of_heads, own
from symjax.attention.kernels.tpu.tiles import (
    ACROSS,
    PLAIN,
    TURNED,
    column,
    mxu_passes,
    product,
    product_for,
    write_row,
)

TOGETHER = 2  # chunks per iteration of the delta rule's forward kernel


def _forward(
    plan: ChunkPlan,
    refs: GatedOperands,
    output: Any,
    before: Any,
    inverse: Any,
    state: Any,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    chunks = [refs.chunk(i) for i in range(TOGETHER)]
    fadings = [fading_of(plan, chunk) for chunk in chunks]
    pairs, matrices = [], []
    for chunk, fading in zip(chunks, fadings, strict=True):
        query, key = (x[...].astype(jnp.float32) for x in chunk[:2])
        pairs.append(_pairs(plan, chunk, fading, query, key))
        for i, of_key in enumerate(pairs[-1][1]):
            matrices.append(column(chunk.beta[i : i + 1, :]) * of_key)
    for i, x in enumerate(_inverses(refs, matrices)):
        inverse[divmod(i, plan.packed)] = x
    for i, chunk in enumerate(chunks):
        rows = output.at[pl.ds(i * BLOCK, BLOCK)]
        kept = before.at[i], inverse.at[i]
        _advance(plan, chunk, fadings[i], pairs[i], rows, *kept, state)


def _advance(
    plan: ChunkPlan,
    refs: GatedOperands,
    fading: Fading,
    pairs: list[list[Array]],
    output: Any,
    before: Any,
    inverse: Any,
    state: Any,
) -> None:
    before[...] = state[...].astype(before.dtype)
    query, key, value = (x[...].astype(jnp.float32) for x in refs[:3])
    dtype = refs.value.dtype
    reading = [(x * fading.since).astype(dtype) for x in (query, key)]
    rows, held = (product(x, before[...], ACROSS) for x in reading)
    change = _written(plan, refs, inverse, value - held)
    for i, of_query in enumerate(pairs[0]):
        mine = own(change, plan.value_size, i).astype(dtype)
        rows += product(of_query.astype(dtype), mine, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(change.astype(dtype), (key * fading.until).astype(dtype), TURNED)
    state[...] = state[...] * fading.through + of_heads(plan.sizes, new)


def _backward(
    plan: ChunkPlan,
    refs: GatedOperands,
    change: Any,
    before: Any,
    inverse: Any,
    *results: Any,
) -> None:
    """Write the gradients of a chunk.

    Args:
        results: the gradients of query, key, value, log-decays if there are any, β, and
            the state.
    """
    query_out, key_out, value_out, *decay_out, beta_out, state_change = results

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_change[...] = jnp.zeros_like(state_change)

    query, key, value, change = (
        x[...].astype(jnp.float32) for x in (*refs[:3], change)
    )
    dtype = refs.value.dtype
    fading = fading_of(plan, refs)
    since, until = fading.since, fading.until
    reading, joining = (query * since, key * since), key * until
    later = state_change[...].astype(dtype)
    wanted = value - product(reading[1].astype(dtype), before[...], ACROSS)
    written = _written(plan, refs, inverse, wanted)
    of_written = product(joining.astype(dtype), later, ACROSS)
    pairs = _pairs(plan, refs, fading, query, key)
    for i, (of_query, of_key) in enumerate(zip(*pairs, strict=True)):
        mine = own(change, plan.value_size, i).astype(dtype)
        of_written += product(of_query.astype(dtype), mine, TURNED)
        mine = own(written, plan.value_size, i).astype(dtype)
        wanted -= product(of_key.astype(dtype), mine, PLAIN)
    right = jnp.zeros_like(of_written)
    for i in range(plan.packed):
        mine = own(of_written, plan.value_size, i)
        right += _precise_product(refs, inverse[i], mine, TURNED)
    for i in range(plan.packed):
        of_beta = own(right * wanted, plan.value_size, i)
        write_row(beta_out, i, of_beta.sum(axis=1, keepdims=True))
    of_value = right * _by_head(plan, refs, right.shape)
    value_out[...] = of_value.astype(value_out.dtype)

    rows = [change.astype(dtype), (-of_value).astype(dtype)]  # of queries, and of keys
    u = written.astype(dtype)
    (query_change, of_reading), key_change, decay_change = through_pairs(
        plan, refs, fading, [query, key], key, rows, u, pairs
    )
    key_change += of_reading
    of_query, of_key = (product(x, before[...], PLAIN) for x in rows)
    of_joining = product(u, later, PLAIN)
    query_change += of_query * since
    key_change += of_key * since + of_joining * until
    query_out[...] = query_change.astype(query_out.dtype)
    key_out[...] = key_change.astype(key_out.dtype)
    for out in decay_out:
        of_since = of_query * reading[0] + of_key * reading[1]
        decay_change += fading.gradient_by_sums(SINCE, of_since)
        decay_change += fading.gradient_by_sums(UNTIL, of_joining * joining)
        of_state = state_change[...] * before[...].astype(jnp.float32) * fading.through
        of_state = of_state.sum(axis=0, keepdims=True)
        out[...] = decay_change + fading.gradient_by_state(of_state)
    both = zip(rows, reading, strict=True)
    here = [product(x, y.astype(dtype), TURNED) for x, y in both]
    state_change[...] = state_change[...] * fading.through + of_heads(
        plan.sizes, here[0] + here[1]
    )


def _pairs(
    plan: ChunkPlan, refs: GatedOperands, fading: Fading, query: Array, key: Array
) -> list[list[Float[Array, "c c"]]]:
    """Return the scores of each head times decays: q_t·k_s for s ≤ t, and k_t·k_s for
    s < t."""
    of_keys = scores_of(plan, refs, fading, key, key, with_own=False)
    return [scores_of(plan, refs, fading, query, key), of_keys]


def _precise_passes(operands: GatedOperands) -> int:
    return 3 if operands.value.dtype == jnp.bfloat16 else 6


def _precise_product(
    refs: GatedOperands, a: Array, b: Array, dimensions: tuple
) -> Array:
    """Return the product of float32 arrays, in parts if the operands are bfloat16."""
    return product_for(refs.value.dtype)(a, b, dimensions)


def _inverses(refs: GatedOperands, matrices: list[Array]) -> list[Float[Array, "c c"]]:
    """Return (I + A)⁻¹ for each matrix, whose part below the diagonal is A.

    A level of one inverse needs the level before. So each level is computed for all
    matrices before the next.
    """
    found = []
    for matrix in matrices:
        first = jnp.where(pairs_of(refs.levels, 0), -matrix, 0)
        found.append(jnp.where(pairs_of(refs.levels, DIAGONAL), 1.0, first))
    for level in range(1, LEVELS):
        keep = pairs_of(refs.levels, level)
        corners = [jnp.where(keep, x, 0) for x in matrices]
        right = [
            _precise_product(refs, x, y, PLAIN)
            for x, y in zip(corners, found, strict=True)
        ]
        found = [
            x - _precise_product(refs, x, y, PLAIN)
            for x, y in zip(found, right, strict=True)
        ]
    return found


def _written(
    plan: ChunkPlan, refs: GatedOperands, inverse: Any, wanted: Array
) -> Array:
    """Return u, which each token adds to the state at its key."""
    right = wanted * _by_head(plan, refs, wanted.shape)
    total = jnp.zeros_like(right)
    for i in range(plan.packed):
        mine = own(right, plan.value_size, i)
        total += _precise_product(refs, inverse[i], mine, PLAIN)
    return total


def _by_head(
    plan: ChunkPlan, refs: GatedOperands, shape: tuple
) -> Float[Array, "c P*V"]:
    """Return β of each token, in the lanes of its head."""
    betas = [column(refs.beta[i : i + 1, :]) for i in range(plan.packed)]
    return in_lanes(betas, shape)


def _kept(plan: ChunkPlan, operands: GatedOperands) -> list[tuple]:
    """Return shapes and dtypes of the residuals: the state before a chunk, inverses."""
    inverses = plan.packed, BLOCK, BLOCK
    return [(plan.widths, operands.value.dtype), (inverses, jnp.float32)]


def _products(plan: ChunkPlan, operands: GatedOperands) -> tuple[int, int]:
    levels, precise = levels_of(operands), _precise_passes(operands)
    each = mxu_passes(operands.value.dtype)
    forward = each * (plan.packed * (2 * levels + 2) + 3)
    backward = each * (plan.packed * (6 * levels + 9) + 7)
    inverse = precise * plan.packed * (2 * LEVELS - 1)
    return forward + inverse, backward + precise * plan.packed * 2


DELTA = gated_kernels("delta", _forward, _backward, _kept, _products, TOGETHER)
