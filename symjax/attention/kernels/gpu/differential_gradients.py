"""What a program of `hopper_backward` does: the gradients of a block of keys.

With the gradient dO of the output O₁ − λ O₂, Dᵢ = dO·Oᵢ and weights P₁ and P₂:

    dP = dO Vᵀ,  dS₁ = P₁ (dP − D₁),  dS₂ = −λ P₂ (dP − D₂)
    dQᵢ = dSᵢ Kᵢ,  dKᵢ = dSᵢᵀ Qᵢ,  dV = (P₁ − λ P₂)ᵀ dO

Five products of a map's size serve both maps where two passes would take seven: dP and
dV are common. A program has `BLOCK` keys of one value head: two warpgroups of `KEYS`,
and a third that loads. It goes over the queries that see them, `STEP` at a time, with
scores transposed. Gradients of keys and values stay in registers; those of queries, of
one map by each warpgroup, are added in global memory a step late, in float32, in the
order in which programs come there: two runs differ by rounding. D reads outputs as they
were rounded, as in FlashAttention-2: where values have a mean that dP − D takes away,
or maps are peaked, gradients of queries and keys lose digits (docs/performance.md).

What keeps it within its registers: weights in bfloat16 between products; waits for
barriers between products, which ptxas does not move them over; and the warpgroup asked
for anew each time, lest where all operands lie be kept in registers.

Gradients of differential attention on Hopper GPUs: one call of `gradients`.

Those of queries are added up in float32, in the order in which programs come there.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jaxtyping import Array, Float, Int

from symjax.attention.core.meshes import vary_alike
from symjax.attention.kernels.gpu.differential_forward import (
    EIGHT,
    IN_TWO,
    LOADERS,
    OPTIONS,
    TILES,
    WORKERS,
    in_rows,
    of_heads,
    part,
    place_in,
)
from symjax.attention.kernels.intervals import RowIntervals, blocks_of_keys
from symjax.attention.kernels.operands import even

KEYS = 64  # of a warpgroup
BLOCK = 2 * KEYS  # keys of a program
STEP = 64  # queries of a step
SLOTS = 2  # steps in shared memory at a time
SCORES = KEYS, STEP
# Rows of `numbers`; two for each map first.
NORMALISER, DELTA, LESS, LAST, FIRST = 0, 2, 4, 5, 6
BY_QUERY = gpu.Layout.WGMMA.reduce(0)


def _range(first: Any, lengths: tuple[int, int], causal: bool) -> tuple[Any, Any]:
    """The first step that sees keys from `first` on, and the first from which on all of
    a step see all of the block."""
    length, keys = lengths
    steps = pl.cdiv(length, STEP)
    clear = jnp.where(first + BLOCK <= keys, 0, steps)
    if not causal:
        return 0, clear
    first -= keys - length
    start = jnp.minimum(lax.div(jnp.maximum(first, 0), STEP), steps)
    whole = lax.div(jnp.maximum(first + BLOCK - 1, 0) + STEP - 1, STEP)
    return start, jnp.clip(jnp.maximum(clear, whole), start, steps)


def _product(left: Any, right: Any, then: Any) -> Any:
    """What `then` makes of a function that reads left @ right, which is under way."""

    def compute(found):
        gpu.wgmma(found, left, right)
        return then(partial(gpu.wgmma_accumulator_load, found))

    return pl.run_scoped(compute, gpu.ACC((left.shape[0], right.shape[1])))


class Arrays(NamedTuple):
    """In global memory: what a program reads, and the gradients."""

    query: Any
    key: Any
    value: Any
    numbers: Any
    change: Any
    limits: Any  # [B 4 blocks], as `blocks_of_keys` has them, or None
    of_query: Any  # sums in float32
    of_key: Any
    of_value: Any


class Scratch(NamedTuple):
    """Shared memory of a program, and its barriers."""

    keys: Any
    values: Any
    queries: Any
    changes: Any
    along: Any  # `numbers` of a step
    kept: Any  # scores, and in their place sums of gradients
    held: Any
    first: Any
    second: Any
    third: Any
    used: Any
    written: Any


class _Program:
    """A block of keys: what it reads and writes, and what each warpgroup does."""

    def __init__(
        self, *arrays: Any, lengths, sizes, shared, scale, causal, **scratch: Any
    ):
        self.arrays, self.memory = Arrays(*arrays), Scratch(**scratch)
        self.sizes, self.shared, self.scale = sizes, shared, scale
        places = (lax.axis_index(x) for x in ("batch", "head", "block"))
        self.example, self.head, block = places
        steps, self.at = pl.cdiv(lengths[0], STEP), block * BLOCK
        limits = self.arrays.limits
        self.hides = causal or lengths[1] % BLOCK or limits is not None
        if limits is None:
            self.start, self.clear = _range(self.at, lengths, causal)
        else:
            ends = (limits[self.example, i, block] for i in range(4))
            self.start, self.clear, self.until, steps = ends
        self.steps = steps - self.start
        self.every = shared * self.steps

    def place(self, number: Any) -> tuple[Any, Any]:
        """The head of the output and the step that come `number` after the first."""
        if self.shared == 1:
            return self.head, self.start + number
        step = lax.rem(number, self.steps)
        head = self.head * self.shared + lax.div(number, self.steps)
        return head, self.start + step

    def bring(self) -> None:
        """Keys and values, then queries and what comes with them, step by step."""
        query, key, value, numbers, change = self.arrays[:5]
        size, width = self.sizes
        to, example = self.memory, self.example
        gpu.set_max_registers(LOADERS, action="decrease")
        rows = pl.ds(self.at, BLOCK)
        for i in range(2):
            source = part(key, example, rows, 2 * self.head + i, size)
            gpu.copy_gmem_to_smem(source, to.keys.at[i], to.held)
        source = part(value, example, rows, self.head, width)
        gpu.copy_gmem_to_smem(source, to.values, to.held)

        @pl.loop(0, self.every + SLOTS)
        def _(number):
            slot = lax.rem(number, SLOTS)
            pl.when(number >= SLOTS)(lambda: gpu.barrier_wait(to.used.at[slot]))

            @pl.when(number < self.every)
            def _():
                head, step = self.place(number)
                rows = pl.ds(step * STEP, STEP)
                one, two = (
                    part(query, example, rows, 2 * head + i, size) for i in (0, 1)
                )
                row = part(change, example, rows, head, width)
                for source, held, barrier in (
                    (one, to.queries.at[slot, 0], to.first),
                    (numbers.at[example, head, :, rows], to.along.at[slot], to.first),
                    (two, to.queries.at[slot, 1], to.second),
                    (row, to.changes.at[slot], to.third),
                ):
                    gpu.copy_gmem_to_smem(source, held, barrier.at[slot])

    def compute(self) -> None:
        """Gradients of a warpgroup's keys and values."""
        memory, (tall, wide) = self.memory, (gpu.ACC((KEYS, x)) for x in self.sizes)
        gpu.set_max_registers(WORKERS, action="increase")
        gpu.barrier_wait(memory.held)
        gpu.barrier_arrive(memory.written)
        found = pl.run_scoped(self.accumulate, wide, tall, tall)
        mine = _mine()
        last = self.of_queries(self.every - 1, lambda found: found(wait_n=0))
        # As in a step: all threads have read the scores.
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(self.every > 0)(lambda: self.add_to_queries(self.every - 1, last))
        gpu.barrier_arrive(memory.written)
        gpu.barrier_wait(memory.written)  # nobody reads keys and values any more
        self.write(found, mine)

    def write(self, found: list, mine: Any) -> None:
        """To the gradients of values and of the keys of both maps."""
        (*_, of_key, of_value), (size, width) = self.arrays, self.sizes
        keys, values = self.memory[:2]
        values[mine] = found[0].astype(values.dtype)
        for i in range(2):
            keys[i, mine] = (found[1 + i] * self.scale).astype(values.dtype)
        gpu.commit_smem()
        rows = pl.ds(self.at + _warpgroup() * KEYS, KEYS)
        to = part(of_value, self.example, rows, self.head, width)
        gpu.copy_smem_to_gmem(values.at[mine], to)
        for i in range(2):
            to = part(of_key, self.example, rows, 2 * self.head + i, size)
            gpu.copy_smem_to_gmem(keys.at[i, mine], to)
        gpu.wait_smem_to_gmem(0)

    def accumulate(self, to_values: Any, *to_keys: Any) -> list:
        step = partial(self.step, to_values, to_keys)
        lax.fori_loop(0, self.every, step, self.first_scores(0))
        return [found[...] for found in (to_values, *to_keys)]

    def first_scores(self, number: Any) -> Array:
        """Of a step and the first map."""
        slot, memory = lax.rem(number, SLOTS), self.memory
        left = memory.keys.at[0, _mine()]
        pl.when(number < self.every)(lambda: gpu.barrier_wait(memory.first.at[slot]))
        right = memory.queries.at[slot, 0].T
        return _product(left, right, lambda found: found(wait_n=0))

    def step(self, to_values: Any, to_keys: tuple, number: Any, found: Array) -> Array:
        """found: scores of the first map. Returns those of the next step."""
        slot, memory, mine = lax.rem(number, SLOTS), self.memory, _mine()
        weigh = partial(self.weigh, number)
        differ = partial(self.differ, to_keys, number, mine)
        changes = memory.changes.at[slot]

        def with_scores(two):
            one = weigh(0, found)

            def with_queries(earlier):
                less = weigh(1, two(wait_n=1))
                gpu.barrier_wait(memory.third.at[slot])
                gpu.wgmma(to_values, one + less, changes)
                earlier = earlier(wait_n=1)
                # No copy is left to wait for, but the threads of the warpgroup: all
                # have read the scores whose place the sums take.
                gpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(number > 0)(lambda: self.add_to_queries(number - 1, earlier))

                def with_pairs(pairs):
                    pairs = pairs(wait_n=0)
                    differ(0, one, pairs)
                    gpu.wgmma_wait(1)
                    differ(1, less, pairs)

                _product(memory.values.at[mine], changes.T, with_pairs)

            self.of_queries(number - 1, with_queries)

        gpu.barrier_wait(memory.second.at[slot])
        _product(memory.keys.at[1, mine], memory.queries.at[slot, 1].T, with_scores)
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        gpu.commit_smem()
        gpu.barrier_arrive(memory.written)
        later = self.first_scores(number + 1)
        gpu.wgmma_wait(0)
        gpu.barrier_arrive(memory.used.at[slot])
        return later

    def row(self, number: Any, index: int) -> Array:
        """One of the `numbers` of a step's queries, for all keys."""
        found = self.memory.along.at[lax.rem(number, SLOTS), index]
        found = gpu.load(found, layout=BY_QUERY)  # pyright: ignore
        return lax.broadcast_in_dim(found, SCORES, [1])

    def weigh(self, number: Any, i: int, scores: Array) -> Array:
        """P of the first map, or −λ P of the second."""
        limits = self.arrays.limits

        def hide(scores):
            key = place_in(SCORES, 0) + self.at + _warpgroup() * KEYS
            key = key.astype(jnp.float32)
            seen = key <= self.row(number, LAST)
            if limits is not None:
                seen &= key >= self.row(number, FIRST)
            return jnp.where(seen, scores, -jnp.inf)

        if self.hides:
            step = self.place(number)[1]
            masked = step < self.clear
            if limits is not None:
                masked |= step >= self.until
            scores = lax.cond(masked, hide, lambda x: x, scores)
        base = self.scale * IN_TWO
        found = jnp.exp2(scores * base - self.row(number, NORMALISER + i))
        found = found * self.row(number, LESS) if i else found
        return lax.optimization_barrier(found.astype(self.memory.values.dtype))

    def differ(
        self, to_keys: tuple, number: Any, mine: Any, i: int, weights: Any, pairs: Any
    ) -> None:
        """dS of a map, from dP: to shared memory, and times queries to keys."""
        scores, _ = self.memory.kept
        found = weights * (pairs - self.row(number, DELTA + i)).astype(weights.dtype)
        found = lax.optimization_barrier(found)
        scores[lax.rem(number, 2), i, mine] = found
        gpu.wgmma(to_keys[i], found, self.memory.queries.at[lax.rem(number, SLOTS), i])

    def of_queries(self, number: Any, then: Any) -> Any:
        """`then` of the product dS K of a step and one of the maps."""
        gpu.barrier_wait(self.memory.written)
        scores, _ = self.memory.kept
        left = scores.at[lax.rem(number + 2, 2), _warpgroup()].T
        return _product(left, self.memory.keys.at[_warpgroup()], then)

    def add_to_queries(self, number: Any, found: Array) -> None:
        """What a step's queries have of these keys, by one of the maps."""
        (head, step), map_ = self.place(number), _warpgroup()
        _, sums = self.memory.kept
        to = sums.at[lax.rem(number, 2), map_]
        to[...] = found
        gpu.commit_smem()
        rows, total = pl.ds(step * STEP, STEP), self.arrays.of_query
        here = part(total, self.example, rows, 2 * head + map_, self.sizes[0])
        gpu.copy_smem_to_gmem(to, here, reduction_op="add")


def gradients(*arrays: Any, **options: Any) -> None:
    program = _Program(*arrays, **options)
    pl.when(_warpgroup() == 2)(program.bring)
    pl.when(_warpgroup() < 2)(program.compute)


def _warpgroup() -> Any:
    return lax.axis_index("warpgroup")


def _mine() -> Any:
    """This warpgroup's keys of the block."""
    return pl.ds(_warpgroup() * KEYS, KEYS)


WIDE_TILES = gpu.TilingTransform((8, 32)), gpu.SwizzleTransform(128)


def backward(
    interpret: Any,
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S 2K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B N T"],
    normaliser: Float[Array, "B 2N T"],
    deltas: Float[Array, "B 2N T"],
    change: Float[Array, "B T N V"],
    seen: RowIntervals | None,
    *,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value; deltas: D of each row and map."""
    batch, length, maps, size = query.shape
    keys, heads, width = value.shape[1:]
    steps = pl.cdiv(length, STEP)
    ends = _ends(seen, length, keys, causal)
    numbers = _numbers(lam, normaliser, deltas, ends, steps)
    limits = None
    if seen is not None:
        limits = blocks_of_keys(seen, keys, STEP, BLOCK)
        limits = jnp.broadcast_to(limits, (batch, *limits.shape[1:]))
    empty = jnp.zeros((batch, steps * STEP, maps * size), jnp.float32)
    total, dtype = jax.new_ref(empty), query.dtype
    program = partial(
        gradients,
        lengths=(length, keys),
        sizes=(size, width),
        shared=maps // 2 // heads,
        scale=scale,
        causal=causal,
    )
    tiled = partial(gpu.SMEM, dtype=dtype, transforms=TILES)
    sums = gpu.SMEM((2, 2, STEP, size), jnp.float32, transforms=WIDE_TILES)
    rows = even(keys, EIGHT)
    found = gpu.kernel(
        program,
        out_type=[
            jax.ShapeDtypeStruct((batch, rows, 2 * heads * size), dtype),
            jax.ShapeDtypeStruct((batch, rows, heads * width), dtype),
        ],
        scratch_types={
            "keys": tiled((2, BLOCK, size)),
            "values": tiled((BLOCK, width)),
            "queries": tiled((SLOTS, 2, STEP, size)),
            "changes": tiled((SLOTS, STEP, width)),
            "along": gpu.SMEM((SLOTS, numbers.shape[2], STEP), jnp.float32),
            "kept": gpu.RefUnion(tiled((2, 2, BLOCK, STEP)), sums),
            "held": gpu.Barrier(num_arrivals=3),
            "first": gpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            "second": gpu.Barrier(num_barriers=SLOTS),
            "third": gpu.Barrier(num_barriers=SLOTS),
            "used": gpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            "written": gpu.Barrier(num_arrivals=2),
        },
        grid=(batch, heads, pl.cdiv(keys, BLOCK)),
        grid_names=("batch", "head", "block"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=OPTIONS,
        interpret=interpret,
    )(*map(in_rows, (query, key, value)), numbers, in_rows(change), limits, total)
    # A reference has no type that differs over a mesh.
    of_key, of_value, total, _ = vary_alike((*found, total[...], change))
    of_query = (of_heads(total, length, maps) * scale).astype(dtype)
    return of_query, of_heads(of_key, keys, 2 * heads), of_heads(of_value, keys, heads)


def _numbers(
    lam: Array, normaliser: Array, deltas: Array, ends: Array, steps: int
) -> Float[Array, "B N numbers T"]:
    """What a step needs of each query: the normalisers of both maps in log₂, D of both,
    −λ, and the ends of what it sees; 0 beyond the last one."""
    batch, heads, length = lam.shape
    maps = batch, heads, 2, length
    ends = jnp.broadcast_to(ends[:, None], (batch, heads, *ends.shape[1:]))
    each = (normaliser * IN_TWO).reshape(maps), deltas.reshape(maps), -lam[:, :, None]
    numbers = jnp.concatenate([*each, ends], axis=2, dtype=jnp.float32)
    return jnp.pad(numbers, ((0, 0),) * 3 + ((0, steps * STEP - length),))


def _ends(
    seen: RowIntervals | None, length: int, keys: int, causal: bool
) -> Int[Array, "b ends T"]:
    """The last key that each query sees, and the first, where it is not 0 for all."""
    if seen is not None:
        return jnp.stack([seen.rows[:, 1] - 1, seen.rows[:, 0]], axis=1)
    last = jnp.arange(length) + keys - length if causal else jnp.full(length, keys - 1)
    return last[None, None]
