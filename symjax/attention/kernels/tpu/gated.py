"""TPU kernels of linear attention with decays; operands of all kernels with decays.

The kernels of the delta rule are in `delta.py`. Each recurrence has a forward and a
backward kernel, which pass over chunks of 128 tokens. The state of a head stays in
VMEM as a matrix, values × channels of keys. So the channels that decay are along lanes.
The state before each chunk is saved for the backward pass, in the dtype of the
products. `decays.py` computes the decays of pairs and states. Heads are in tiles; the
states of the heads of a tile (`packed_heads.py`) are one block-diagonal matrix.

The compiler hardly reorders products. So independent products are written next to each
other, all levels of one product before the next, which keeps the matrix unit busy. With
a decay per channel a chunk of a head of 128 then takes 1,549 instruction bundles of v5e
forward instead of 2,393, and 2,999 backward instead of 4,557.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from symjax.attention.kernels.tpu.chunks import ChunkPlan, Chunks, Kernels
from symjax.attention.kernels.tpu.decays import (
    BLOCK,
    LEVELS,
    SINCE,
    UNTIL,
    decay_costs,
    fading_of,
    scores_of,
    through_pairs,
)
from symjax.attention.kernels.tpu.packed_heads import of_heads, own
from symjax.attention.kernels.tpu.tiles import (
    ACROSS,
    PLAIN,
    TURNED,
    mxu_passes,
    product,
)


class GatedOperands(NamedTuple):
    """Arrays that both kernels read; in a kernel, the refs of their blocks.

    Heads are joined along lanes.
    """

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


def gated_kernels(
    name: str, forward: Any, backward: Any, kept: Any, products: Any, together: int = 1
) -> Kernels:
    """Return the kernels of a recurrence.

    Args:
        products: counts the MXU passes of a chunk, forward and backward. A pass is a
            product of the rows of a chunk with a tile of 128 columns.
    """

    def cost(plan: ChunkPlan, operands: GatedOperands) -> list[tuple[int, int]]:
        tokens = math.prod(plan.grid) * plan.block
        counts = zip(products(plan, operands), decay_costs(plan, operands), strict=True)
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
            shape, lambda b, n, i: (0, b, chunks.chunk_at(i), chunks.key_head(n))
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


def levels_of(operands: GatedOperands) -> int:
    """Return the number of levels of pairs of different tokens."""
    return 1 if operands.by_channel is None else LEVELS


def _decay_forward(plan: ChunkPlan, refs: GatedOperands, output, before, state) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    before[...] = state[...].astype(before.dtype)
    query, key, value = (x[...] for x in refs[:3])
    dtype, wide = value.dtype, jnp.float32
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    heads, fading = range(plan.packed), fading_of(plan, refs)
    scores = scores_of(plan, refs, fading, wide_query, wide_key)
    rows = product((wide_query * fading.since).astype(dtype), before[...], ACROSS)
    for i in heads:
        own_value = own(value, plan.value_size, i)
        rows += product(scores[i].astype(dtype), own_value, PLAIN)
    output[...] = rows.astype(output.dtype)
    new = product(value, (wide_key * fading.until).astype(dtype), TURNED)
    state[...] = state[...] * fading.through + of_heads(plan.sizes, new)


def _decay_backward(
    plan: ChunkPlan,
    refs: GatedOperands,
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
        state_change: first the gradient of the state after the chunk, at the end that
            of the state before it.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_change[...] = jnp.zeros_like(state_change)

    query, key, value, change = (x[...] for x in (*refs[:3], change))
    dtype, wide = value.dtype, jnp.float32
    change = change.astype(dtype)
    wide_query, wide_key = query.astype(wide), key.astype(wide)
    fading = fading_of(plan, refs)
    scores = scores_of(plan, refs, fading, wide_query, wide_key)
    (query_change,), key_change, decay_change = through_pairs(
        plan, refs, fading, [wide_query], wide_key, [change], value, [scores]
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


def _decay_kept(plan: ChunkPlan, operands: GatedOperands) -> list[tuple]:
    """Return the shape and dtype of the residual: the state before a chunk."""
    return [(plan.widths, operands.value.dtype)]


def _decay_products(plan: ChunkPlan, operands: GatedOperands) -> tuple[int, int]:
    levels, each = levels_of(operands), mxu_passes(operands.value.dtype)
    forward, backward = levels + 2, 3 * levels + 6
    return each * (plan.packed * forward + 2), each * (plan.packed * backward + 4)


DECAY = gated_kernels(
    "decay", _decay_forward, _decay_backward, _decay_kept, _decay_products
)
