"""Differential attention on Hopper GPUs, forward: two maps of softmax over one value.

A program has `TILE` rows of one head: two warpgroups hold `ROWS` of them, of both maps
each, and a third one brings keys and values, a ring of blocks ahead. In a warpgroup the
softmax of one map runs while tensor cores add the values that the other one has
weighed. Blocks come last first: where rows see all keys before them, only the first
blocks have keys to hide, and which they are is known when the kernel is compiled.

Arrays are [B T N·H] in memory, as projections leave them. Both kernels for Hopper are
written in Pallas' Mosaic GPU: barriers, registers and what is under way are ours.
Whoever changes them should look for spills and for "wgmma serialized" in ptxas' notes.
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
from symjax.attention.kernels.intervals import RowIntervals, blocks_of_rows
from symjax.attention.kernels.operands import even

ROWS = 64  # of a warpgroup: those of a product of tensor cores
TILE = 2 * ROWS
BLOCK = 64  # keys at once
SLOTS = 4  # blocks of the ring, a power of two
SHARED = 2**24  # bytes of keys and values which running programs share in the L2 cache
EIGHT = 8  # rows of a tile of memory, which lengths must be whole multiples of
UNSEEN = -(2.0**100)  # score of a key that a row may not see: its scaling is exact
IN_TWO = math.log2(math.e)  # to exponents of 2
BY_ROW = gpu.Layout.WGMMA.reduce(1)
TILES = gpu.TilingTransform((EIGHT, 64)), gpu.SwizzleTransform(128)
OPTIONS = gpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
LOADERS, WORKERS = 24, 240  # registers of a thread


def forward(
    interpret: Any,
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S 2K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B N T"],
    seen: RowIntervals | None,
    *,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """The output and that of the second map alone, [B T N V]; normalisers of both maps,
    log Σ exp(score), [B 2N T]."""
    program = _Program(query, key, value, scale, causal, seen is not None)
    batch, heads, length = lam.shape
    padded = program.tiles * TILE

    def filled_up(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, padded - length)))

    limits = None
    if seen is not None:
        blocks = blocks_of_rows(seen, program.keys, TILE, BLOCK)
        rows = filled_up(seen.rows[:, :2])
        limits = Limits(
            *(jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (rows, blocks))
        )
    arrays = *map(in_rows, (query, key, value)), filled_up(lam), limits
    shape = batch, even(length, EIGHT), heads * program.width
    output = jax.ShapeDtypeStruct(shape, value.dtype)
    normaliser = jax.ShapeDtypeStruct((batch, 2 * heads, padded), jnp.float32)
    found = gpu.kernel(
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
    *outputs, normaliser, _ = vary_alike((*found, query))
    output, second = (of_heads(x, length, heads) for x in outputs)
    return output, second, normaliser[:, :, :length]


class Limits(NamedTuple):
    """Where what rows see is an interval of keys, of each row and of each tile."""

    rows: Any  # [B 2 T]: the first key, and the one after the last
    blocks: Any  # [B 4 tiles], as `blocks_of_rows` has them

    def of(self, example: Any) -> "Limits":
        return Limits(*(x.at[example] for x in self))


def in_rows(x: Float[Array, "B T N H"]) -> Float[Array, "B T' N·H"]:
    """With heads side by side, and zeros at the end for whole tiles."""
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % EIGHT), (0, 0)))


def of_heads(
    x: Float[Array, "B T' N·H"], length: int, heads: int
) -> Float[Array, "B T N H"]:
    return x[:, :length].reshape(x.shape[0], length, heads, -1)


def part(array: Any, batch: Any, rows: Any, head: Any, size: int) -> Any:
    """A head's rows of [B T N·H]."""
    return array.at[batch, rows, pl.ds(head * size, size)]


def slot_of(step: Any) -> Any:
    return step & (SLOTS - 1)


class Visits(NamedTuple):
    """Blocks that a tile goes through, from the one before `end` down."""

    end: Any
    opened: Any  # how many come before those that all rows see whole, 1 at least
    clear: Any  # how many before those that some row does not see whole
    count: Any  # how many in all


class _Program:
    """What all programs of a call have in common, and what one of them does."""

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
        # Blocks with keys to hide.
        self.masked = TILE // BLOCK if causal else int(self.keys % BLOCK > 0)
        self.tiles = pl.cdiv(self.length, TILE)
        self.beside = self._heads_beside()

    def _heads_beside(self) -> int:
        """Heads whose programs run side by side: what they read stays in the cache."""
        each = self.keys * (2 * self.size + self.width) * 2
        most = max(1, SHARED // each) * (self.heads // self.values)
        every = self.batch * self.heads
        return max(n for n in range(1, min(every, most) + 1) if every % n == 0)

    def scratch(self, dtype: Any) -> list:
        def space(*shape):
            return gpu.SMEM(shape, dtype, transforms=TILES)

        return [
            space(2, 2, ROWS, self.size),
            space(SLOTS, 2, BLOCK, self.size),
            space(SLOTS, BLOCK, self.width),
            space(2, ROWS, self.width),
            gpu.Barrier(num_arrivals=2, num_barriers=2),
            gpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            gpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
            gpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        ]

    def place(self) -> tuple[Any, Any, Any]:
        """Example, head and tile of this program: of a few heads the longest first."""
        number, each = lax.axis_index("program"), self.tiles * self.beside
        rest = lax.rem(number, each)
        head = lax.div(number, each) * self.beside + lax.rem(rest, self.beside)
        tile = lax.div(rest, self.beside)
        tile = self.tiles - 1 - tile if self.causal else tile
        return lax.div(head, self.heads), lax.rem(head, self.heads), tile

    def visits(self, tile: Any, limits: Limits | None) -> Visits:
        if limits is not None:
            first, start, stop, end = (limits.blocks[i, tile] for i in range(4))
            opened = jnp.maximum(end - stop, 1)
            return Visits(end, opened, jnp.maximum(end - start, opened), end - first)
        if self.causal:
            end = lax.div((tile + 1) * TILE + self.offset + BLOCK - 1, BLOCK)
        else:
            # As if it depended on the tile: for a loop of constant length ptxas finds
            # too few registers.
            end = jnp.maximum(pl.cdiv(self.keys, BLOCK), tile - 2**24)
        return Visits(end, max(1, self.masked), end, end)

    def run(self, query, key, value, lam, limits, output, second, normaliser, *scratch):
        warpgroup = lax.axis_index("warpgroup")
        batch, head, tile = self.place()
        limits = limits and limits.of(batch)
        queries, keys, values, rows, asked, *barriers = scratch
        ring = keys, values, *barriers

        @pl.when(warpgroup == 2)
        def _():
            gpu.set_max_registers(LOADERS, action="decrease")
            to = queries, asked
            place = batch, head, tile
            self.bring((query, key, value), to, ring, place, limits)

        @pl.when(warpgroup < 2)
        def _():
            gpu.set_max_registers(WORKERS, action="increase")
            first = tile * TILE + warpgroup * ROWS
            gpu.barrier_wait(asked.at[warpgroup])
            own, held = pl.ds(first, ROWS), queries.at[warpgroup]
            outputs = []
            attended = self.attend(first, tile, limits, held, ring)
            for branch, found in enumerate(attended):
                total, highest, count = found
                at = batch, 2 * head + branch, own
                normaliser[at] = highest * math.log(2.0) + jnp.log(count)
                outputs.append(total * along(1.0 / count, total))
            one, two = outputs
            less = by_row(lam.at[batch, head, own])
            for found, to in ((one - two * along(less, two), output), (two, second)):
                gpu.wait_smem_to_gmem(0, wait_read_only=True)
                rows[warpgroup] = found.astype(rows.dtype)
                gpu.commit_smem()
                at = part(to, batch, own, head, self.width)
                gpu.copy_smem_to_gmem(rows.at[warpgroup], at)
            gpu.wait_smem_to_gmem(0)

    def bring(self, arrays, to, ring, place, limits):
        """Queries of both warpgroups, then blocks into the ring, the last one first."""
        query, key, value = arrays
        queries, asked = to
        keys, values, has_keys, has_values, free = ring
        batch, head, tile = place
        of = lax.div(head, self.heads // self.values)
        for warpgroup in range(2):
            rows = pl.ds(tile * TILE + warpgroup * ROWS, ROWS)
            for branch in range(2):
                source = part(query, batch, rows, 2 * head + branch, self.size)
                held = queries.at[warpgroup, branch]
                gpu.copy_gmem_to_smem(source, held, asked.at[warpgroup])
        end, _, _, count = self.visits(tile, limits)

        @pl.loop(0, count + 1 + SLOTS)
        def _(step):
            slot, block = slot_of(step), jnp.clip(end - 1 - step, 0, end - 1)
            rows = pl.ds(block * BLOCK, BLOCK)

            @pl.when(step >= SLOTS)
            def _():
                gpu.barrier_wait(free.at[slot])

            @pl.when(step <= count)  # the last keys are for a barrier only
            def _():
                for branch in range(2):
                    source = part(key, batch, rows, 2 * of + branch, self.size)
                    held = keys.at[slot, branch]
                    gpu.copy_gmem_to_smem(source, held, has_keys.at[slot])

            @pl.when(step < count)
            def _():
                source = part(value, batch, rows, of, self.width)
                gpu.copy_gmem_to_smem(source, values.at[slot], has_values.at[slot])

    def attend(
        self, first: Any, tile: Any, limits: Limits | None, queries: Any, ring: tuple
    ) -> tuple:
        """Of both maps: weighed values [ROWS V], and of each row the highest score and
        the sum of weights."""
        keys, values, has_keys, has_values, free = ring
        wide = gpu.ACC((ROWS, self.width), jnp.float32)
        tall = gpu.ACC((ROWS, BLOCK), jnp.float32)
        end, opened, clear, count = self.visits(tile, limits)
        hide = partial(self.hide, first, limits)

        def beside(slot, branch, held, seen, then, *product):
            """Softmax of a block's scores, beside the other map's product with values.

            The barrier `then`, awaited last, keeps ptxas from moving the softmax past
            the end of the product.
            """

            def body(scores, *sums):
                asked = keys.at[slot, branch].transpose((1, 0))
                if sums:
                    total, weights, at = product
                    sums[0][...] = total
                gpu.wgmma(scores, queries.at[branch], asked)
                if sums:
                    gpu.wgmma(sums[0], weights.astype(values.dtype), values.at[at])
                found = seen(gpu.wgmma_accumulator_load(scores, wait_n=len(sums)))
                done = lax.optimization_barrier(self.softmax(found, held))
                gpu.barrier_wait(then)
                return *done, *(gpu.wgmma_accumulator_load(x, wait_n=0) for x in sums)

            return pl.run_scoped(body, tall, *([wide] if product else []))

        def visit(step, state, opening=False, masked=False):
            """One block; what the second map weighs is added in the next one."""
            one, two, weights = state
            slot, before = slot_of(step), slot_of(step - 1)
            seen = partial(hide, end - 1 - step) if masked else lambda scores: scores
            product = () if opening else (two[0], weights, before)
            then = has_values.at[slot]
            weights, one, *total = beside(slot, 0, one, seen, then, *product)
            if not opening:
                two = *total, *two[1:]
                gpu.barrier_arrive(free.at[before])
            product = one[0], weights, slot
            then = has_keys.at[slot_of(step + 1)]
            weights, two, total = beside(slot, 1, two, seen, then, *product)
            return (total, *one[1:]), two, weights

        def last(total, weights):
            def body(sums):
                sums[...] = total
                slot = slot_of(count - 1)
                gpu.wgmma(sums, weights.astype(values.dtype), values.at[slot])
                return sums[...]

            return pl.run_scoped(body, wide)

        empty = filled(0.0, ROWS, self.width), filled(-jnp.inf, ROWS), filled(0.0, ROWS)
        gpu.barrier_wait(has_keys.at[0])
        state = empty, empty, None
        masked = partial(visit, masked=True)
        hides = self.masked > 0 or self.limited
        state = visit(0, state, opening=True, masked=hides)
        state = lax.fori_loop(1, opened, masked, state)
        state = lax.fori_loop(opened, clear, visit, state)
        if self.limited:
            state = lax.fori_loop(clear, count, masked, state)
        one, two, weights = state
        two = last(two[0], weights), *two[1:]
        for step in (count - 1, count):
            gpu.barrier_arrive(free.at[slot_of(step)])
        return one, two

    def softmax(self, scores: Array, held: tuple) -> tuple:
        """Weights of a block's scores, and what is held, beside a new highest score."""
        total, highest, count = held
        new = jnp.maximum(highest, scores.max(axis=1) * self.base)
        weights = jnp.exp2(scores * self.base - along(new, scores))
        shrink = jnp.exp2(highest - new)
        count = count * shrink + weights.sum(axis=1)
        return weights, (total * along(shrink, total), new, count)

    def hide(
        self, first: Any, limits: Limits | None, block: Any, scores: Array
    ) -> Array:
        """UNSEEN where a row may not look. A row may see nothing of the first blocks:
        the first score that it does see shrinks what they have added to nothing."""
        key = place_in(scores.shape, 1) + block * BLOCK
        if limits is not None:
            rows = pl.ds(first, ROWS)
            begin, end = (along(by_row(limits.rows.at[i, rows]), key) for i in (0, 1))
            return jnp.where((begin <= key) & (key < end), scores, UNSEEN)
        if self.causal:
            row = place_in(scores.shape, 0) + (first + self.offset)
            return jnp.where(key <= row, scores, UNSEEN)
        return jnp.where(key < self.keys, scores, UNSEEN)


def by_row(numbers: Any) -> Array:
    """Of a warpgroup's rows, from global memory."""
    return gpu.load(numbers, layout=BY_ROW, optimized=False)  # pyright: ignore


def filled(number: float, *shape: int) -> Array:
    layout = gpu.Layout.WGMMA if shape[1:] else BY_ROW
    return gpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)


def place_in(shape: tuple[int, ...], axis: int) -> Array:
    """Where along the axis each number of a product is."""
    return gpu.broadcasted_iota(jnp.int32, shape, axis, layout=gpu.Layout.WGMMA)


def along(column: Array, array: Array) -> Array:
    """A number of each row, repeated along the row."""
    return lax.broadcast_in_dim(column, array.shape, (0,))
