"""TPU kernels of recurrences whose state decays: linear attention and the delta rule.

Each has a forward and a backward kernel, which pass over chunks of 128 tokens. The
state of a head stays in VMEM, values × channels of keys. So the channels that decay are
along lanes. The state before each chunk is saved for the backward pass, in the dtype of
the products. `decays.py` computes the decays of pairs and states. Heads are in tiles
(`packed_heads.py`); the states of packed heads are one block-diagonal matrix.

The tokens of a chunk of the delta rule write u, with (I + A) u = β (v − k S). The
inverse X of this unit-triangular matrix is computed for blocks of 2, 4, … 128 rows,
each from two blocks of half the size as in `recurrent/triangular.py`. Each level is
X − X A X, with only the pairs of the level in A. Inverses are saved for the backward
pass.

The compiler hardly reorders products. So independent products are written next to each
other, all levels of one product before the next, which keeps the matrix unit busy:

- With a decay per channel a chunk of a head of 128 takes 1,549 bundles of v5e forward
  instead of 2,393, and 2,999 backward instead of 4,557.
- The products of an inverse depend on each other. With two chunks, and all packed
  heads, in parallel a chunk of a head of 64 takes 1,796 bundles instead of 4,035, and
  one of 128 takes 2,804 instead of 4,556.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from symjax.attention.kernels.operands import in_parts
from symjax.attention.kernels.tpu.chunks import ChunkPlan, Chunks, Kernels
from symjax.attention.kernels.tpu.decays import (
    BLOCK,
    DIAGONAL,
    LEVELS,
    SINCE,
    UNTIL,
    Fading,
    exponents,
    fading_of,
    pairs_of,
    scores_of,
    through_pairs,
)
from symjax.attention.kernels.tpu.packed_heads import in_lanes, of_heads, own
from symjax.attention.kernels.tpu.tiles import (
    ACROSS,
    PLAIN,
    TURNED,
    column,
    mxu_passes,
    product,
    write_row,
)

TOGETHER = 2  # chunks per iteration of the delta rule's forward kernel


class GatedOperands(NamedTuple):
    """Inputs of both kernels, or their blocks. Heads are joined along lanes."""

    query: Any  # [B T N·H]
    key: Any  # [B T K·H], K = N / plan.sharing
    value: Any  # [B T K·V]
    by_channel: Any  # bfloat16 parts of log-decays: [parts B T K·H], or None
    by_head: Any  # log-decays [B N/P P T], or None
    sums: Any  # as `decays.constants` returns them
    levels: Any  # as `decays.constants` returns them
    beta: Any = None  # of the delta rule, [B N/P P T]

    def chunk(self, i: int):
        """Return one chunk of blocks that hold several."""
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


def _decay_forward(
    plan: ChunkPlan, given: GatedOperands, output, before, state
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    before[...] = state[...].astype(before.dtype)
    query, key, value = (x[...] for x in given[:3])
    dtype, wide = value.dtype, jnp.float32
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    heads, fading = range(plan.packed), fading_of(plan, given)
    scores = scores_of(plan, given, fading, wide_query, wide_key)
    rows = product((wide_query * fading.since).astype(dtype), before[...], ACROSS)
    for i in heads:
        own_value = own(value, plan.value_size, i)
        rows += product(scores[i].astype(dtype), own_value, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(value, (wide_key * fading.until).astype(dtype), TURNED)
    state[...] = state[...] * fading.through + of_heads(plan.sizes, new)


def _decay_backward(
    plan: ChunkPlan,
    given: GatedOperands,
    change,
    before,
    query_out,
    key_out,
    value_out,
    decay_out,
    state_change,
) -> None:
    """Write the gradients of a chunk.

    Args:
        state_change: the gradient of the state, which goes from that after the chunk
            to that before it.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_change[...] = jnp.zeros_like(state_change)

    query, key, value, change = (x[...] for x in (*given[:3], change))
    dtype, wide = value.dtype, jnp.float32
    change = change.astype(dtype)
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    fading = fading_of(plan, given)
    scores = scores_of(plan, given, fading, wide_query, wide_key)
    (query_change,), key_change, decay_change = through_pairs(
        plan, given, fading, [wide_query], wide_key, [change], value, [scores]
    )
    reading, joining = wide_query * fading.since, wide_key * fading.until
    later = state_change[...].astype(dtype)
    of_query = product(change, before[...], PLAIN)
    of_key = product(value, later, PLAIN)
    query_change += of_query * fading.since
    key_change += of_key * fading.until
    query_out[...] = query_change.astype(query_out.dtype)
    key_out[...] = key_change.astype(key_out.dtype)
    decay_change += fading.gradient_by_sums(SINCE, of_query * reading)
    decay_change += fading.gradient_by_sums(UNTIL, of_key * joining)
    of_state = state_change[...] * before[...].astype(wide) * fading.through
    of_state = of_state.sum(axis=0, keepdims=True)
    decay_out[...] = decay_change + fading.gradient_by_state(of_state)
    value_change = product(joining.astype(dtype), later, ACROSS)
    for i, x in enumerate(scores):
        own_change = own(change, plan.value_size, i)
        value_change += product(x.astype(dtype), own_change, TURNED)
    value_out[...] = value_change.astype(value_out.dtype)
    here = product(change, reading.astype(dtype), TURNED)
    state_change[...] = state_change[...] * fading.through + of_heads(plan.sizes, here)


def _delta_forward(
    plan: ChunkPlan,
    given: GatedOperands,
    output: Any,
    before: Any,
    inverse: Any,
    state: Any,
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
    plan: ChunkPlan,
    given: GatedOperands,
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
    reading = [(x * fading.since).astype(dtype) for x in (query, key)]
    rows, held = (product(x, before[...], ACROSS) for x in reading)
    change = _written(plan, given, inverse, value - held)
    for i, of_query in enumerate(pairs[0]):
        mine = own(change, plan.value_size, i).astype(dtype)
        rows += product(of_query.astype(dtype), mine, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(change.astype(dtype), (key * fading.until).astype(dtype), TURNED)
    state[...] = state[...] * fading.through + of_heads(plan.sizes, new)


def _delta_backward(
    plan: ChunkPlan,
    given: GatedOperands,
    change: Any,
    before: Any,
    inverse: Any,
    *results: Any,
) -> None:
    """Write the gradients of a chunk, as `_decay_backward` does.

    Args:
        results: the gradients of query, key, value, log-decays if there are any, β, and
            the state.
    """
    query_out, key_out, value_out, *decay_out, beta_out, state_change = results

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_change[...] = jnp.zeros_like(state_change)

    query, key, value, change = (
        x[...].astype(jnp.float32) for x in (*given[:3], change)
    )
    dtype = given.value.dtype
    fading = fading_of(plan, given)
    since, until = fading.since, fading.until
    reading, joining = (query * since, key * since), key * until
    later = state_change[...].astype(dtype)
    wanted = value - product(reading[1].astype(dtype), before[...], ACROSS)
    written = _written(plan, given, inverse, wanted)
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
        right += _precise_product(given, inverse[i], mine, TURNED)
    for i in range(plan.packed):
        of_beta = own(right * wanted, plan.value_size, i)
        write_row(beta_out, i, of_beta.sum(axis=1, keepdims=True))
    of_value = right * _by_head(plan, given, right.shape)
    value_out[...] = of_value.astype(value_out.dtype)

    rows = [change.astype(dtype), (-of_value).astype(dtype)]  # of queries, and of keys
    u = written.astype(dtype)
    (query_change, of_reading), key_change, decay_change = through_pairs(
        plan, given, fading, [query, key], key, rows, u, pairs
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
    plan: ChunkPlan, given: GatedOperands, fading: Fading, query: Array, key: Array
) -> list[list[Float[Array, "c c"]]]:
    """Return the scores of each head times decays: q_t·k_s for s ≤ t, and k_t·k_s for
    s < t."""
    of_keys = scores_of(plan, given, fading, key, key, with_own=False)
    return [scores_of(plan, given, fading, query, key), of_keys]


def _precise_passes(operands: GatedOperands) -> int:
    return 3 if operands.value.dtype == jnp.bfloat16 else 6


def _precise_product(
    given: GatedOperands, a: Array, b: Array, dimensions: tuple
) -> Array:
    """Return the product of float32 arrays.

    If the operands of the kernel are bfloat16, it keeps 16 of the 24 bits of a factor,
    in three MXU passes instead of six.
    """
    if given.value.dtype != jnp.bfloat16:
        return product(a, b, dimensions)
    high, low = zip(*(in_parts(x, 2) for x in (a, b)), strict=True)
    pairs = (high[0], low[1]), (low[0], high[1]), (high[0], high[1])
    return reduce(jnp.add, [product(x, y, dimensions) for x, y in pairs])


def _inverses(given: GatedOperands, matrices: list[Array]) -> list[Float[Array, "c c"]]:
    """Return (I + A)⁻¹ for each matrix, whose part below the diagonal is A.

    A level of one inverse needs the level before. So each level is computed for all
    matrices before the next.
    """
    found = []
    for matrix in matrices:
        first = jnp.where(pairs_of(given.levels, 0), -matrix, 0)
        found.append(jnp.where(pairs_of(given.levels, DIAGONAL), 1.0, first))
    for level in range(1, LEVELS):
        keep = pairs_of(given.levels, level)
        corners = [jnp.where(keep, x, 0) for x in matrices]
        right = [
            _precise_product(given, x, y, PLAIN)
            for x, y in zip(corners, found, strict=True)
        ]
        found = [
            x - _precise_product(given, x, y, PLAIN)
            for x, y in zip(found, right, strict=True)
        ]
    return found


def _written(
    plan: ChunkPlan, given: GatedOperands, inverse: Any, wanted: Array
) -> Array:
    """Return u, which each token adds to the state at its key."""
    right = wanted * _by_head(plan, given, wanted.shape)
    total = jnp.zeros_like(right)
    for i in range(plan.packed):
        mine = own(right, plan.value_size, i)
        total += _precise_product(given, inverse[i], mine, PLAIN)
    return total


def _by_head(
    plan: ChunkPlan, given: GatedOperands, shape: tuple
) -> Float[Array, "c P*V"]:
    """Return β of each token, in the lanes of its head."""
    betas = [column(given.beta[i : i + 1, :]) for i in range(plan.packed)]
    return in_lanes(betas, shape)


def _delta_kept(plan: ChunkPlan, operands: GatedOperands) -> list[tuple]:
    """Return shapes and dtypes of the residuals: the state before a chunk, inverses."""
    inverses = plan.packed, BLOCK, BLOCK
    return [(plan.widths, operands.value.dtype), (inverses, jnp.float32)]


def _delta_products(plan: ChunkPlan, operands: GatedOperands) -> tuple[int, int]:
    levels, precise = _levels_of(operands), _precise_passes(operands)
    each = mxu_passes(operands.value.dtype)
    forward = each * (plan.packed * (2 * levels + 2) + 3)
    backward = each * (plan.packed * (6 * levels + 9) + 7)
    inverse = precise * plan.packed * (2 * LEVELS - 1)
    return forward + inverse, backward + precise * plan.packed * 2


def _levels_of(operands: GatedOperands) -> int:
    """Return the number of levels of pairs of different tokens."""
    return 1 if operands.by_channel is None else LEVELS


def _gated_kernels(
    name: str, forward: Any, backward: Any, kept: Any, products: Any, together: int = 1
) -> Kernels:
    """Return the kernels of a recurrence.

    Args:
        products: counts the MXU passes of a chunk, forward and backward. A pass is a
            product of the rows of a chunk with a tile of 128 columns.
    """

    def cost(plan: ChunkPlan, operands: GatedOperands) -> list[tuple[int, int]]:
        tokens = math.prod(plan.grid) * plan.block
        counts = zip(products(plan, operands), exponents(plan, operands), strict=True)
        return [
            (2 * tokens * (x + sums) * BLOCK * plan.widths[1], tokens * exponentials)
            for x, (sums, exponentials) in counts
        ]

    def states(plan: ChunkPlan, operands: GatedOperands) -> list[list]:
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


def _specs(plan: ChunkPlan, operands: GatedOperands, chunks: Chunks) -> GatedOperands:
    values, keys = plan.widths
    by_channel = None
    if operands.by_channel is not None:
        shape = operands.by_channel.shape[0], None, plan.block, keys
        by_channel = pl.BlockSpec(
            shape, lambda b, n, i: (0, b, chunks.turn(i), chunks.key_head(n))
        )
    return GatedOperands(
        chunks.by_query(keys),
        chunks.by_key(keys),
        chunks.by_key(values),
        by_channel,
        chunks.of_tiles(operands.by_head),
        chunks.whole(operands.sums),
        chunks.whole(operands.levels),
        chunks.of_tiles(operands.beta),
    )


def _more(operands: GatedOperands, specs: GatedOperands) -> list[tuple]:
    """Return arrays with the shapes of the gradients of log-decays and β, and blocks.

    The gradients of decays per channel are those of each query head.
    """
    found = []
    if operands.by_channel is not None:
        found.append((operands.query, specs.query))
    of_heads = (operands.by_head, specs.by_head), (operands.beta, specs.beta)
    return found + [(x, spec) for x, spec in of_heads if x is not None]


def _decay_kept(plan: ChunkPlan, operands: GatedOperands) -> list[tuple]:
    """Return the shape and dtype of the residual: the state before a chunk."""
    return [(plan.widths, operands.value.dtype)]


def _decay_products(plan: ChunkPlan, operands: GatedOperands) -> tuple[int, int]:
    levels, each = _levels_of(operands), mxu_passes(operands.value.dtype)
    forward, backward = levels + 2, 3 * levels + 6
    return each * (plan.packed * forward + 2), each * (plan.packed * backward + 4)


DECAY = _gated_kernels(
    "decay", _decay_forward, _decay_backward, _decay_kept, _decay_products
)
DELTA = _gated_kernels(
    "delta", _delta_forward, _delta_backward, _delta_kept, _delta_products, TOGETHER
)
