"""The delta rule as TPU kernels: one pass over chunks of 128 tokens, and one back.

Chunks, heads in tiles and states are those of `decay.py`, decays those of `fading.py`.
What the tokens of a chunk write, u of (I + A) u = β (v − k S), takes the inverse of a
unit-triangular matrix, whose blocks of 2, 4, … 128 rows come from two of half the size
as in `delta_rule.py`: each level is X − X A X, with of A only the pairs of the level.
Inverses and the states before chunks are saved for the backward pass.

Each of the products of an inverse waits for the one before. Those of two chunks, and of
packed heads, wait side by side: a chunk of a head of 64 then takes 1,796 bundles of v5e
instead of 4,035, one of 128 takes 2,804 instead of 4,556.
"""

from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.operands import in_parts
from symjax.attention.kernels.tpu import tiles
from symjax.attention.kernels.tpu.chunks import Plan
from symjax.attention.kernels.tpu.decays import (
    BLOCK,
    DIAGONAL,
    LEVELS,
    SINCE,
    UNTIL,
    Fading,
    fading_of,
    pairs_of,
)
from symjax.attention.kernels.tpu.gated import (
    Operands,
    levels_of,
    recurrent,
    scores_of,
    through_pairs,
)
from symjax.attention.kernels.tpu.lanes import in_lanes, of_heads, own
from symjax.attention.kernels.tpu.tiles import ACROSS, PLAIN, TURNED, column, product

TOGETHER = 2  # chunks of a turn forward; time is filled up to so many


def _forward(
    plan: Plan, given: Operands, output: Any, before: Any, inverse: Any, state: Any
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    chunks = [given.chunk(i) for i in range(TOGETHER)]
    fadings = [fading_of(plan, chunk) for chunk in chunks]
    pairs, matrices = [], []
    for chunk, fading in zip(chunks, fadings, strict=True):
        query, key = (x[...].astype(jnp.float32) for x in chunk[:2])
        pairs.append(_pairs(plan, chunk, fading, query, key))
        for i, of_key in enumerate(pairs[-1][1]):
            matrices.append(column(chunk.beta[i : i + 1, :]) * of_key)
    for i, x in enumerate(_inverses(given, matrices)):
        inverse[divmod(i, plan.packed)] = x
    for i, chunk in enumerate(chunks):
        rows = output.at[pl.ds(i * BLOCK, BLOCK)]
        kept = before.at[i], inverse.at[i]
        _advance(plan, chunk, fadings[i], pairs[i], rows, *kept, state)


def _advance(
    plan: Plan,
    given: Operands,
    fading: Fading,
    pairs: list[list[Array]],
    output: Any,
    before: Any,
    inverse: Any,
    state: Any,
) -> None:
    before[...] = state[...].astype(before.dtype)
    query, key, value = (x[...].astype(jnp.float32) for x in given[:3])
    dtype = given.value.dtype
    asking = [(x * fading.since).astype(dtype) for x in (query, key)]
    rows, held = (product(x, before[...], ACROSS) for x in asking)
    change = _change(plan, given, inverse, value - held)
    for i, of_query in enumerate(pairs[0]):
        mine = own(change, plan.value_size, i).astype(dtype)
        rows += product(of_query.astype(dtype), mine, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(change.astype(dtype), (key * fading.until).astype(dtype), TURNED)
    state[...] = state[...] * fading.through + of_heads(plan.sizes, new)


def _backward(
    plan: Plan, given: Operands, change: Any, before: Any, inverse: Any, *results: Any
) -> None:
    """The last of the results is the gradient of the state after the chunk, then of the
    one before."""
    query_out, key_out, value_out, *decay_out, beta_out, grown = results

    @pl.when(pl.program_id(2) == 0)
    def _():
        grown[...] = jnp.zeros_like(grown)

    query, key, value, change = (
        x[...].astype(jnp.float32) for x in (*given[:3], change)
    )
    dtype = given.value.dtype
    fading = fading_of(plan, given)
    since, until = fading.since, fading.until
    asking, joining = (query * since, key * since), key * until
    later = grown[...].astype(dtype)
    wanted = value - product(asking[1].astype(dtype), before[...], ACROSS)
    written = _change(plan, given, inverse, wanted)
    of_written = product(joining.astype(dtype), later, ACROSS)
    pairs = _pairs(plan, given, fading, query, key)
    for i, (of_query, of_key) in enumerate(zip(*pairs, strict=True)):
        mine = own(change, plan.value_size, i).astype(dtype)
        of_written += product(of_query.astype(dtype), mine, TURNED)
        mine = own(written, plan.value_size, i).astype(dtype)
        wanted -= product(of_key.astype(dtype), mine, PLAIN)
    right = jnp.zeros_like(of_written)
    for i in range(plan.packed):
        mine = own(of_written, plan.value_size, i)
        right += _closely(given, inverse[i], mine, TURNED)
    for i in range(plan.packed):
        of_beta = own(right * wanted, plan.value_size, i)
        tiles.write_row(beta_out, i, of_beta.sum(axis=1, keepdims=True))
    of_value = right * _by_head(plan, given, right.shape)
    value_out[...] = of_value.astype(value_out.dtype)

    rows = [change.astype(dtype), (-of_value).astype(dtype)]  # of queries, and of keys
    u = written.astype(dtype)
    (query_change, of_asking), key_change, decay_change = through_pairs(
        plan, given, fading, [query, key], key, rows, u, pairs
    )
    key_change += of_asking
    of_query, of_key = (product(x, before[...], PLAIN) for x in rows)
    of_joining = product(u, later, PLAIN)
    query_change += of_query * since
    key_change += of_key * since + of_joining * until
    query_out[...] = query_change.astype(query_out.dtype)
    key_out[...] = key_change.astype(key_out.dtype)
    for out in decay_out:
        of_since = of_query * asking[0] + of_key * asking[1]
        decay_change += fading.grown(SINCE, of_since)
        decay_change += fading.grown(UNTIL, of_joining * joining)
        of_state = grown[...] * before[...].astype(jnp.float32) * fading.through
        of_state = of_state.sum(axis=0, keepdims=True)
        out[...] = decay_change + fading.grown_by_state(of_state)
    both = zip(rows, asking, strict=True)
    here = [product(x, y.astype(dtype), TURNED) for x, y in both]
    grown[...] = grown[...] * fading.through + of_heads(plan.sizes, here[0] + here[1])


def _pairs(
    plan: Plan, given: Operands, fading: Fading, query: Array, key: Array
) -> list[list[Float[Array, "c c"]]]:
    """q_t·k_s with s ≤ t, and k_t·k_s with s < t, faded, both of each head."""
    of_keys = scores_of(plan, given, fading, key, key, with_own=False)
    return [scores_of(plan, given, fading, query, key), of_keys]


def _close_passes(operands: Operands) -> int:
    return 3 if operands.value.dtype == jnp.bfloat16 else 6


def _closely(given: Operands, a: Array, b: Array, dimensions: tuple) -> Array:
    """The product of float32 arrays, with 16 of their 24 bits where the operands of
    the kernel have 8: in three passes, not six."""
    if given.value.dtype != jnp.bfloat16:
        return product(a, b, dimensions)
    high, low = zip(*(in_parts(x, 2) for x in (a, b)), strict=True)
    pairs = (high[0], low[1]), (low[0], high[1]), (high[0], high[1])
    return reduce(jnp.add, [product(x, y, dimensions) for x, y in pairs])


def _inverses(given: Operands, matrices: list[Array]) -> list[Float[Array, "c c"]]:
    """(I + A)⁻¹, of A what each matrix has below its diagonal. A level of one waits for
    the one before, so those of all matrices are taken side by side."""
    found = []
    for matrix in matrices:
        first = jnp.where(pairs_of(given.levels, 0), -matrix, 0)
        found.append(jnp.where(pairs_of(given.levels, DIAGONAL), 1.0, first))
    for level in range(1, LEVELS):
        keep = pairs_of(given.levels, level)
        corners = [jnp.where(keep, x, 0) for x in matrices]
        right = [
            _closely(given, x, y, PLAIN) for x, y in zip(corners, found, strict=True)
        ]
        found = [
            x - _closely(given, x, y, PLAIN) for x, y in zip(found, right, strict=True)
        ]
    return found


def _change(plan: Plan, given: Operands, inverse: Any, wanted: Array) -> Array:
    """u: what each token adds to the state at its key."""
    right = wanted * _by_head(plan, given, wanted.shape)
    total = jnp.zeros_like(right)
    for i in range(plan.packed):
        mine = own(right, plan.value_size, i)
        total += _closely(given, inverse[i], mine, PLAIN)
    return total


def _by_head(plan: Plan, given: Operands, shape: tuple) -> Float[Array, "c P*V"]:
    """β of each token, in the lanes of its head."""
    betas = [column(given.beta[i : i + 1, :]) for i in range(plan.packed)]
    return in_lanes(betas, shape)


def _kept(plan: Plan, operands: Operands) -> list[tuple]:
    """The state before a chunk, and the inverses of its heads."""
    inverses = plan.packed, BLOCK, BLOCK
    return [(plan.widths, operands.value.dtype), (inverses, jnp.float32)]


def _products(plan: Plan, operands: Operands) -> tuple[int, int]:
    levels, close = levels_of(operands), _close_passes(operands)
    each = tiles.mxu_passes(operands.value.dtype)
    forward = each * (plan.packed * (2 * levels + 2) + 3)
    backward = each * (plan.packed * (6 * levels + 9) + 7)
    inverse = close * plan.packed * (2 * LEVELS - 1)
    return forward + inverse, backward + close * plan.packed * 2


DELTA = recurrent("delta", _forward, _backward, _kept, _products, TOGETHER)
