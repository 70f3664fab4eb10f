"""Forward pass of differential attention on Hopper GPUs: two maps, the same values.

A program computes `TILE` rows of one head. It has three warpgroups:

- two compute `ROWS` rows each, of both maps (`ForwardProgram.attend`). In registers a
  warpgroup holds, for each map, the weighted sum of values [ROWS V] in float32, and of
  each row the highest score and the sum of weights, as in online softmax;
- one loads (`ForwardProgram.load`): the queries of the tile, then blocks of `BLOCK`
  keys and values into a ring of `SLOTS` slots, ahead of the computation.

Shared memory holds the queries of the tile, the ring, the rows of the output before
they are copied, and four kinds of barriers: queries have arrived, keys of a slot have
arrived, values of a slot have arrived, and a slot is free.

The softmax of one map runs while tensor cores multiply the weights of the other map by
the values. Blocks are visited from the last to the first. So if attention is causal,
without `Limits`, only the first few visits have keys to hide. The number of these
visits is known at compile time.

Arrays are [B T N·H] in memory, as projections leave them. `hopper.py` has what both
kernels share.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jaxtyping import Array, Float

from symjax.attention.core.meshes import vary_alike
from symjax.attention.kernels.gpu.hopper import (
    EIGHT,
    IN_TWO,
    LOADERS,
    OPTIONS,
    TILES,
    WORKERS,
    head_rows,
    index_along,
    join_heads,
    split_heads,
)
from symjax.attention.kernels.intervals import RowIntervals, blocks_of_rows
from symjax.attention.kernels.operands import round_up

ROWS = 64  # rows of a warpgroup, and of one product of tensor cores
TILE = 2 * ROWS
BLOCK = 64  # keys of a visit
SLOTS = 4  # slots of the ring; a power of two
SHARED = 2**24  # bytes of keys and values that concurrent programs keep in the L2 cache
UNSEEN = -(2.0**100)  # score of a hidden key; scaling it is exact
BY_ROW = gpu.Layout.WGMMA.reduce(1)


def forward(
    interpret: Any,
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S 2K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B N T"],
    intervals: RowIntervals | None,
    *,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """Return the output, and what the backward pass needs.

    Args:
        intervals: the keys that each row sees, in place of `causal`.

    Returns:
        output: [B T N V].
        second: [B T N V], the output of the second map alone.
        normaliser: [B 2N T], log Σ exp(score) of both maps.
    """
    program = ForwardProgram(query, key, value, scale, causal, intervals is not None)
    batch, heads, length = lam.shape
    padded = program.tiles * TILE

    def pad_to_tiles(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, padded - length)))

    limits = None
    if intervals is not None:
        blocks = blocks_of_rows(intervals, program.keys, TILE, BLOCK)
        rows = pad_to_tiles(intervals.rows[:, :2])
        limits = Limits(
            *(jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (rows, blocks))
        )
    arrays = *map(join_heads, (query, key, value)), pad_to_tiles(lam), limits
    shape = batch, round_up(length, EIGHT), heads * program.width
    output = jax.ShapeDtypeStruct(shape, value.dtype)
    normaliser = jax.ShapeDtypeStruct((batch, 2 * heads, padded), jnp.float32)
    results = gpu.kernel(
        program.run,
        out_type=[output, output, normaliser],
        scratch_types=program.scratch(value.dtype),
        grid=(batch * heads * program.tiles,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=OPTIONS,
        interpret=interpret,
    )(*arrays)
    *outputs, normaliser, _ = vary_alike((*results, query))
    output, second = (split_heads(x, length, heads) for x in outputs)
    return output, second, normaliser[:, :, :length]


class Limits(NamedTuple):
    """Intervals of keys that rows see, and the blocks of keys that tiles visit."""

    rows: Any  # [B 2 T]: the first key of each row, and the one after its last key
    blocks: Any  # [B 4 tiles]: as `blocks_of_rows` returns them

    def of(self, example: Any) -> "Limits":
        return Limits(*(x.at[example] for x in self))


def slot_of(visit: Any) -> Any:
    return visit & (SLOTS - 1)


class KeyBlocks(NamedTuple):
    """The blocks of keys that a tile of rows visits, from the last one to the first.

    Blocks that all rows see whole need no mask. They are in the middle: the first
    visits have a mask because of the diagonal, the last ones because of the window.
    """

    end: Any  # number of the first block that is visited, plus 1
    opened: Any  # number of visits before the first without a mask, 1 at least
    clear: Any  # number of visits before the last ones, which have a mask
    count: Any  # visits in all


class ForwardProgram:
    """One program: its place in the grid, its memory, and what its warpgroups do."""

    def __init__(
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: float,
        causal: bool,
        limited: bool,
    ):
        self.batch, self.length, maps, self.size = query.shape
        self.keys, self.values, self.width = value.shape[1:]
        self.heads = maps // 2
        self.offset = self.keys - self.length
        self.base, self.causal, self.limited = scale * IN_TWO, causal, limited
        # Visits at the start whose blocks have keys to hide.
        self.masked = TILE // BLOCK if causal else int(self.keys % BLOCK > 0)
        self.tiles = pl.cdiv(self.length, TILE)
        self.concurrent = self._concurrent_heads()

    def _concurrent_heads(self) -> int:
        """Return the number of heads whose keys and values fit the cache together.

        The number divides the number of heads of all examples.
        """
        each = self.keys * (2 * self.size + self.width) * 2
        most = max(1, SHARED // each) * (self.heads // self.values)
        every = self.batch * self.heads
        return max(n for n in range(1, min(every, most) + 1) if every % n == 0)

    def scratch(self, dtype: Any) -> list:
        def space(*shape):
            return gpu.SMEM(shape, dtype, transforms=TILES)

        return [
            space(2, 2, ROWS, self.size),  # queries, by warpgroup and map
            space(SLOTS, 2, BLOCK, self.size),  # ring of keys, by slot and map
            space(SLOTS, BLOCK, self.width),  # ring of values
            space(2, ROWS, self.width),  # rows of the output, by warpgroup
            gpu.Barrier(num_arrivals=2, num_barriers=2),  # queries have arrived
            gpu.Barrier(num_arrivals=2, num_barriers=SLOTS),  # keys have arrived
            gpu.Barrier(num_arrivals=1, num_barriers=SLOTS),  # values have arrived
            gpu.Barrier(num_arrivals=2, num_barriers=SLOTS),  # the slot is free
        ]

    def place(self) -> tuple[Any, Any, Any]:
        """Return the example, head and tile of this program.

        The grid has groups of `concurrent` heads. In a group the tiles that see most
        keys come first.
        """
        number, each = lax.axis_index("program"), self.tiles * self.concurrent
        rest = lax.rem(number, each)
        head = lax.div(number, each) * self.concurrent + lax.rem(rest, self.concurrent)
        tile = lax.div(rest, self.concurrent)
        tile = self.tiles - 1 - tile if self.causal else tile
        return lax.div(head, self.heads), lax.rem(head, self.heads), tile

    def key_blocks(self, tile: Any, limits: Limits | None) -> KeyBlocks:
        """Return the blocks of keys that the tile visits."""
        if limits is not None:
            first, start, stop, end = (limits.blocks[i, tile] for i in range(4))
            opened = jnp.maximum(end - stop, 1)
            return KeyBlocks(end, opened, jnp.maximum(end - start, opened), end - first)
        if self.causal:
            end = lax.div((tile + 1) * TILE + self.offset + BLOCK - 1, BLOCK)
        else:
            # `end` is made to depend on the tile: for a loop of constant length ptxas
            # runs out of registers.
            end = jnp.maximum(pl.cdiv(self.keys, BLOCK), tile - 2**24)
        return KeyBlocks(end, max(1, self.masked), end, end)

    def run(self, query, key, value, lam, limits, output, second, normaliser, *scratch):
        """Run one program: warpgroup 2 loads, the others compute rows and copy them."""
        warpgroup = lax.axis_index("warpgroup")
        batch, head, tile = self.place()
        limits = limits and limits.of(batch)
        queries, keys, values, rows, has_queries, *barriers = scratch
        ring = keys, values, *barriers

        @pl.when(warpgroup == 2)
        def _():
            gpu.set_max_registers(LOADERS, action="decrease")
            to = queries, has_queries
            place = batch, head, tile
            self.load((query, key, value), to, ring, place, limits)

        @pl.when(warpgroup < 2)
        def _():
            gpu.set_max_registers(WORKERS, action="increase")
            first = tile * TILE + warpgroup * ROWS
            gpu.barrier_wait(has_queries.at[warpgroup])
            own, held = pl.ds(first, ROWS), queries.at[warpgroup]
            outputs = []
            attended = self.attend(first, tile, limits, held, ring)
            for branch, sums in enumerate(attended):
                total, highest, weight_sum = sums
                at = batch, 2 * head + branch, own
                normaliser[at] = highest * math.log(2.0) + jnp.log(weight_sum)
                outputs.append(total * along(1.0 / weight_sum, total))
            one, two = outputs
            factor = load_by_row(lam.at[batch, head, own])
            difference = one - two * along(factor, two)
            for x, to in ((difference, output), (two, second)):
                gpu.wait_smem_to_gmem(0, wait_read_only=True)
                rows[warpgroup] = x.astype(rows.dtype)
                gpu.commit_smem()
                at = head_rows(to, batch, own, head, self.width)
                gpu.copy_smem_to_gmem(rows.at[warpgroup], at)
            gpu.wait_smem_to_gmem(0)

    def load(self, arrays, to, ring, place, limits):
        """Copy the queries of both warpgroups, then blocks of keys and values into the
        ring, the last block first."""
        query, key, value = arrays
        queries, has_queries = to
        keys, values, has_keys, has_values, free = ring
        batch, head, tile = place
        key_head = lax.div(head, self.heads // self.values)
        for warpgroup in range(2):
            rows = pl.ds(tile * TILE + warpgroup * ROWS, ROWS)
            for branch in range(2):
                source = head_rows(query, batch, rows, 2 * head + branch, self.size)
                held = queries.at[warpgroup, branch]
                gpu.copy_gmem_to_smem(source, held, has_queries.at[warpgroup])
        end, _, _, count = self.key_blocks(tile, limits)

        @pl.loop(0, count + 1 + SLOTS)
        def _(step):
            slot, block = slot_of(step), jnp.clip(end - 1 - step, 0, end - 1)
            rows = pl.ds(block * BLOCK, BLOCK)

            @pl.when(step >= SLOTS)
            def _():
                gpu.barrier_wait(free.at[slot])

            # One block of keys more than needed: `attend_block` waits for its barrier.
            @pl.when(step <= count)
            def _():
                for branch in range(2):
                    source = head_rows(
                        key, batch, rows, 2 * key_head + branch, self.size
                    )
                    held = keys.at[slot, branch]
                    gpu.copy_gmem_to_smem(source, held, has_keys.at[slot])

            @pl.when(step < count)
            def _():
                source = head_rows(value, batch, rows, key_head, self.width)
                gpu.copy_gmem_to_smem(source, values.at[slot], has_values.at[slot])

    def attend(
        self, first: Any, tile: Any, limits: Limits | None, queries: Any, ring: tuple
    ) -> tuple:
        """Attend with the rows of a warpgroup.

        Returns:
            For each map the weighted sum of values [ROWS V], and of each row the
            highest score and the sum of weights.
        """
        keys, values, has_keys, has_values, free = ring
        wide = gpu.ACC((ROWS, self.width), jnp.float32)
        tall = gpu.ACC((ROWS, BLOCK), jnp.float32)
        end, opened, clear, count = self.key_blocks(tile, limits)
        hide = partial(self.hide, first, limits)

        def overlap(slot, branch, held, mask, barrier, *product):
            """Compute the softmax of a block's scores while the other map's weights are
            multiplied by values.

            The wait for the barrier comes last. It keeps ptxas from moving the softmax
            past the end of the product.

            Args:
                held: this map's weighted sum of values, highest score and sum of
                    weights so far.
                mask: scores → scores, which hides keys.
                product: the other map's weighted sum of values, the weights to add, and
                    the slot of their values.
            """

            def body(scores, *sums):
                block_keys = keys.at[slot, branch].transpose((1, 0))
                if sums:
                    total, weights, at = product
                    sums[0][...] = total
                gpu.wgmma(scores, queries.at[branch], block_keys)
                if sums:
                    gpu.wgmma(sums[0], weights.astype(values.dtype), values.at[at])
                masked = mask(gpu.wgmma_accumulator_load(scores, wait_n=len(sums)))
                done = lax.optimization_barrier(self.softmax(masked, held))
                gpu.barrier_wait(barrier)
                return *done, *(gpu.wgmma_accumulator_load(x, wait_n=0) for x in sums)

            return pl.run_scoped(body, tall, *([wide] if product else []))

        def attend_block(step, state, opening=False, masked=False):
            """Visit one block. The weights of the second map are multiplied by values
            in the next visit.

            Args:
                state: `held` of both maps, and the weights of the second map.
            """
            one, two, weights = state
            slot, before = slot_of(step), slot_of(step - 1)
            mask = partial(hide, end - 1 - step) if masked else lambda scores: scores
            product = () if opening else (two[0], weights, before)
            barrier = has_values.at[slot]
            weights, one, *total = overlap(slot, 0, one, mask, barrier, *product)
            if not opening:
                two = *total, *two[1:]
                gpu.barrier_arrive(free.at[before])
            product = one[0], weights, slot
            barrier = has_keys.at[slot_of(step + 1)]
            weights, two, total = overlap(slot, 1, two, mask, barrier, *product)
            return (total, *one[1:]), two, weights

        def add_last(total, weights):
            def body(sums):
                sums[...] = total
                slot = slot_of(count - 1)
                gpu.wgmma(sums, weights.astype(values.dtype), values.at[slot])
                return sums[...]

            return pl.run_scoped(body, wide)

        empty = (
            constant(0.0, ROWS, self.width),
            constant(-jnp.inf, ROWS),
            constant(0.0, ROWS),
        )
        gpu.barrier_wait(has_keys.at[0])
        state = empty, empty, None
        masked = partial(attend_block, masked=True)
        hides = self.masked > 0 or self.limited
        state = attend_block(0, state, opening=True, masked=hides)
        state = lax.fori_loop(1, opened, masked, state)
        state = lax.fori_loop(opened, clear, attend_block, state)
        if self.limited:
            state = lax.fori_loop(clear, count, masked, state)
        one, two, weights = state
        two = add_last(two[0], weights), *two[1:]
        for step in (count - 1, count):
            gpu.barrier_arrive(free.at[slot_of(step)])
        return one, two

    def softmax(self, scores: Array, held: tuple) -> tuple:
        """Return the weights of a block's scores, and `held` rescaled.

        Both are relative to the new highest score. The caller adds the values.
        """
        total, highest, weight_sum = held
        new = jnp.maximum(highest, scores.max(axis=1) * self.base)
        weights = jnp.exp2(scores * self.base - along(new, scores))
        shrink = jnp.exp2(highest - new)
        weight_sum = weight_sum * shrink + weights.sum(axis=1)
        return weights, (total * along(shrink, total), new, weight_sum)

    def hide(
        self, first: Any, limits: Limits | None, block: Any, scores: Array
    ) -> Array:
        """Set the scores of hidden keys to `UNSEEN`.

        A row may see no key of the first blocks that it visits. Their keys then get
        weights of 1. The first visible score is so much higher that it rescales these
        weights to 0.
        """
        key = index_along(scores.shape, 1) + block * BLOCK
        if limits is not None:
            rows = pl.ds(first, ROWS)
            begin, end = (
                along(load_by_row(limits.rows.at[i, rows]), key) for i in (0, 1)
            )
            return jnp.where((begin <= key) & (key < end), scores, UNSEEN)
        if self.causal:
            row = index_along(scores.shape, 0) + (first + self.offset)
            return jnp.where(key <= row, scores, UNSEEN)
        return jnp.where(key < self.keys, scores, UNSEEN)


def load_by_row(numbers: Any) -> Array:
    """Load from global memory one number for each row of a warpgroup."""
    return gpu.load(numbers, layout=BY_ROW, optimized=False)  # pyright: ignore


def constant(number: float, *shape: int) -> Array:
    """Return registers of a warpgroup filled with a number, [ROWS] or [ROWS V]."""
    layout = gpu.Layout.WGMMA if shape[1:] else BY_ROW
    return gpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)


def along(column: Array, array: Array) -> Array:
    """Repeat one number for each row along the row, in the shape of the array."""
    return lax.broadcast_in_dim(column, array.shape, (0,))
