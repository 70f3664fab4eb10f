"""Plan of the TPU attention kernels: operands, their blocks, the order of blocks."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from symjax.attention.kernels.tpu.tiles import (
    LANES,
    MOST_RESIDENT,
    equal_block,
    estimate,
    head_blocks,
    mxu_passes,
)


class AttentionPlan(NamedTuple):
    """Static settings of a call: sizes, scale, window and limits of blocks."""

    batch: int
    kv_heads: int
    groups: int  # heads that share keys and values
    maps: int  # softmax maps per head: 2 with λ
    key_maps: int  # key heads per value head: 2 for differential V1
    length: int
    keys: int
    head_size: int
    value_size: int
    scale: float
    left: int | None  # keys before its own position that a row may see; None: all
    right: int | None
    pairs: int  # visible pairs of a row and a key in the window, approximately
    block: int  # rows and keys of a block, at most
    resident: int  # rows or keys in VMEM at once, at most
    gradients: int  # bytes of the queries' gradients in VMEM, at most
    interpret: Any

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    @property
    def query_width(self) -> int:
        return self.maps * self.head_size

    @property
    def key_width(self) -> int:
        return self.key_maps * self.head_size


class AttentionOperands(NamedTuple):
    """Arrays that both kernels read; in a kernel, the refs of their blocks.

    Heads are joined along lanes. b is 1 where all examples are alike.
    """

    query: Any  # [B T N·maps·H]
    key: Any  # [B S K·key_maps·H]
    value: Any  # [B S K·V]
    lam: Any  # [B N 1 T], or None
    factor: Any  # factor of each row's scores, [b 1 T], or None
    rows: Any  # as in `RowIntervals`, [b 3 T], or None
    exists: Any  # 0 for keys that the padding mask hides, else 1: [b 1 S], or None


class BlockVisits(NamedTuple):
    """Blocks that each block of rows (or of keys) visits, as scalars in SMEM."""

    count: int  # number of blocks of rows (or of keys)
    by_example: bool  # whether visits differ between examples

    @classmethod
    def of(cls, bounds: Int[Array, "b 4 count"], first: Array):
        """Return the visits and their scalars: bounds, and the position of row 0."""
        visits = cls(bounds.shape[2], bounds.shape[0] > 1)
        return visits, jnp.append(bounds.reshape(-1), first)

    def bounds(self, scalars, example, block) -> list:
        """Return the four block numbers of `intervals.blocks_of_rows`.

        They are the first visited block; the first that needs no mask, and the one
        after the last of these; the one after the last visited block.
        """
        start = example * self.by_example * 4 * self.count + block
        return [scalars[start + i * self.count] for i in range(4)]

    def nearest(self, scalars, example, block, index, group: int):
        """Return the `index` of a group of blocks, clipped to the visited groups."""
        first, _, _, last = self.bounds(scalars, example, block)
        return jnp.clip(index, first // group, jnp.maximum(last - 1, first) // group)


def held(plan: AttentionPlan, length: int, size: int, row: int) -> int:
    """Return how many blocks of `size` rows (or keys) are in VMEM at once.

    Args:
        length: number of rows.
        row: bytes of a row.
    """
    most = min(plan.resident, MOST_RESIDENT // row) // size
    return equal_block(-(-length // size), max(most, 1), 1)


def specs(
    plan: AttentionPlan,
    operands: AttentionOperands,
    rows: Callable,
    keys: Callable,
    sizes: tuple,
) -> AttentionOperands:
    """Return the `BlockSpec` of each operand.

    Args:
        rows, keys: indices of the grid → example, head and block of rows or keys.
        sizes: rows and keys of a block.
    """

    def shared(x, size: int, index: Callable) -> pl.BlockSpec | None:
        if x is None:
            return None

        def place(*at):
            example, _, block = index(*at)
            return example * (x.shape[0] > 1), 0, block

        return pl.BlockSpec((None, x.shape[1], size), place)

    return AttentionOperands(
        head_blocks(plan.query_width, sizes[0], rows),
        head_blocks(plan.key_width, sizes[1], keys),
        head_blocks(plan.value_size, sizes[1], keys),
        None if operands.lam is None else by_row(1, sizes[0], rows),
        shared(operands.factor, sizes[0], rows),
        shared(operands.rows, sizes[0], rows),
        shared(operands.exists, sizes[1], keys),
    )


def by_row(count: int, size: int, index: Callable) -> pl.BlockSpec:
    """Return the blocks of an array [B N count T]."""

    def place(*at):
        example, head, block = index(*at)
        return example, head, 0, block

    return pl.BlockSpec((None, None, count, size), place)


def cost(
    plan: AttentionPlan,
    operands: AttentionOperands,
    by_head: int,
    by_value: int,
    more: Any,
) -> pl.CostEstimate:
    """Return the cost that a kernel declares: FLOPs, exponentials and bytes.

    Each pair takes `by_head` products over the head size and `by_value` products over
    the value size. Sizes are rounded up to whole tiles, because half a tile keeps all
    of the MXU busy. Bytes are those of the operands and of `more`.
    """
    of_head, of_value = (
        count * mxu_passes(x.dtype) * -(-size // LANES) * LANES
        for count, x, size in (
            (by_head, operands.query, plan.head_size),
            (by_value, operands.value, plan.value_size),
        )
    )
    pairs = plan.batch * plan.heads * plan.pairs
    flops = 2 * pairs * (of_head + of_value)
    return estimate(flops, pairs * plan.maps, [operands, more])


def visit(bounds: list, low, high, step: Callable) -> None:
    """Call step(block, masked) for the visited blocks in [low, high).

    Blocks that need a mask come first.
    """
    first, start, stop, last = (jnp.clip(x, low, high) for x in bounds)
    before = start - first

    def edge(j, _):
        step(jnp.where(j < before, first + j, stop + j - before), True)

    jax.lax.fori_loop(0, before + last - stop, edge, None)
    jax.lax.fori_loop(start, stop, lambda j, _: step(j, False), None)


def visible(
    plan: AttentionPlan,
    axis: int,
    shape: tuple[int, int],
    row: Array,
    key: Array,
    intervals: list[Array] | None,
    exists: Int[Array, "_ _"] | None,
) -> Bool[Array, "_ _"]:
    """Return the visible pairs of a block. Rows run along `axis`.

    Args:
        row, key: positions of the first row and the first key.
        intervals: of each row, as in `RowIntervals`.
        exists: 0 for keys that the padding mask hides, else 1.
    """
    rows, keys = (
        jax.lax.broadcasted_iota(jnp.int32, shape, x) for x in (axis, 1 - axis)
    )
    tests = [keys < plan.keys - key]
    if intervals is not None:
        begin, end, own = intervals
        keys += key
        tests = [keys >= begin, keys < end, keys != own]
    else:
        if plan.left is not None:
            tests.append(keys - rows >= row - key - plan.left)
        if plan.right is not None:
            tests.append(keys - rows <= row - key + plan.right)
    if exists is not None:
        tests.append(jnp.broadcast_to(exists, shape) > 0)
    return reduce(jnp.logical_and, tests)


def branch(x: Array, size: int, i: int) -> Array:
    """Return the i-th branch of a head, or the head if it has one branch."""
    i = min(i, x.shape[1] // size - 1)
    return x[:, i * size : (i + 1) * size]


def within(x: Array, start: Array, length: int) -> Array:
    """Return the block x, which begins at `start`, with 0 beyond `length`."""
    if length % x.shape[0] == 0:
        return x
    index = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index < length, x, 0)
