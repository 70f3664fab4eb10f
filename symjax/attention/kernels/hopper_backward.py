"""Gradients of differential attention on Hopper GPUs, by blocks of keys.

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
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jaxtyping import Array, Float

from symjax.attention.kernels.hopper_forward import (
    EIGHT,
    LOADERS,
    OPTIONS,
    TILES,
    WORKERS,
    in_rows,
    of_heads,
    part,
    up,
)
from symjax.attention.meshes import vary_alike

KEYS = 64  # of a warpgroup
BLOCK = 2 * KEYS  # keys of a program
STEP = 64  # queries of a step
SLOTS = 2  # steps in shared memory at a time
SCORES = KEYS, STEP
NORMALISER, DELTA, LESS, LAST = 0, 2, 4, 5  # rows of `numbers`; two for each map first
NUMBERS = 6
WIDE_TILES = gpu.TilingTransform((8, 32)), gpu.SwizzleTransform(128)
BY_QUERY = gpu.Layout.WGMMA.reduce(0)
IN_TWO = math.log2(math.e)


def backward(
    interpret: Any,
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S 2K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B N T"],
    normaliser: Float[Array, "B 2N T"],
    deltas: Float[Array, "B 2N T"],
    change: Float[Array, "B T N V"],
    *,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value; deltas: D of each row and map."""
    batch, length, maps, size = query.shape
    keys, heads, width = value.shape[1:]
    steps = pl.cdiv(length, STEP)
    numbers = _numbers(lam, normaliser, deltas, steps, keys, causal)
    empty = jnp.zeros((batch, steps * STEP, maps * size), jnp.float32)
    total, dtype = jax.new_ref(empty), query.dtype
    program = partial(
        _gradients,
        lengths=(length, keys),
        sizes=(size, width),
        shared=maps // 2 // heads,
        scale=scale,
        causal=causal,
    )
    tiled = partial(gpu.SMEM, dtype=dtype, transforms=TILES)
    sums = gpu.SMEM((2, 2, STEP, size), jnp.float32, transforms=WIDE_TILES)
    rows = up(keys, EIGHT)
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
            "along": gpu.SMEM((SLOTS, NUMBERS, STEP), jnp.float32),
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
    )(*map(in_rows, (query, key, value)), numbers, in_rows(change), total)
    # A reference has no type that differs over a mesh.
    of_key, of_value, total, _ = vary_alike((*found, total[...], change))
    of_query = (of_heads(total, length, maps) * scale).astype(dtype)
    return of_query, of_heads(of_key, keys, 2 * heads), of_heads(of_value, keys, heads)


def _numbers(
    lam: Array, normaliser: Array, deltas: Array, steps: int, keys: int, causal: bool
) -> Float[Array, "B N NUMBERS T"]:
    """What a step needs of each query: the normalisers of both maps in log₂, D of both,
    −λ, and the last key that it sees; 0 beyond the end."""
    batch, heads, length = lam.shape
    maps = batch, heads, 2, length
    last = jnp.arange(length) + keys - length if causal else jnp.full(length, keys - 1)
    last = jnp.broadcast_to(last, (batch, heads, 1, length))
    each = (normaliser * IN_TWO).reshape(maps), deltas.reshape(maps), -lam[:, :, None]
    numbers = jnp.concatenate([*each, last], axis=2, dtype=jnp.float32)
    return jnp.pad(numbers, ((0, 0),) * 3 + ((0, steps * STEP - length),))


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


def _gradients(
    query, key, value, numbers, change, total, of_key, of_value,
    *, keys, values, queries, changes, along, kept,
    held, first, second, third, used, written,
    lengths, sizes, shared, scale, causal,
):  # fmt: skip
    example, head, block = (lax.axis_index(x) for x in ("batch", "head", "block"))
    warpgroup = partial(lax.axis_index, "warpgroup")
    (scores, sums), (size, width), dtype = kept, sizes, values.dtype
    steps, at = pl.cdiv(lengths[0], STEP), block * BLOCK
    start, clear = _range(at, lengths, causal)
    every = shared * (steps - start)

    def place(number):
        """The head of the output and the step that come `number` after the first."""
        if shared == 1:
            return head, start + number
        step = lax.rem(number, steps - start)
        return head * shared + lax.div(number, steps - start), start + step

    @pl.when(warpgroup() == 2)
    def _():
        gpu.set_max_registers(LOADERS, action="decrease")
        rows = pl.ds(at, BLOCK)
        for i in range(2):
            source = part(key, example, rows, 2 * head + i, size)
            gpu.copy_gmem_to_smem(source, keys.at[i], held)
        gpu.copy_gmem_to_smem(part(value, example, rows, head, width), values, held)

        @pl.loop(0, every + SLOTS)
        def _(number):
            slot = lax.rem(number, SLOTS)
            pl.when(number >= SLOTS)(lambda: gpu.barrier_wait(used.at[slot]))

            @pl.when(number < every)
            def _():
                own, step = place(number)
                rows = pl.ds(step * STEP, STEP)
                one, two = (
                    part(query, example, rows, 2 * own + i, size) for i in (0, 1)
                )
                row = part(change, example, rows, own, width)
                for source, to, barrier in (
                    (one, queries.at[slot, 0], first),
                    (numbers.at[example, own, :, rows], along.at[slot], first),
                    (two, queries.at[slot, 1], second),
                    (row, changes.at[slot], third),
                ):
                    gpu.copy_gmem_to_smem(source, to, barrier.at[slot])

    def add_to_queries(number, found):
        """What a step's queries have of these keys, by one of the maps."""
        (own, step), map_ = place(number), warpgroup()
        to = sums.at[lax.rem(number, 2), map_]
        to[...] = found
        gpu.commit_smem()
        rows = pl.ds(step * STEP, STEP)
        here = part(total, example, rows, 2 * own + map_, size)
        gpu.copy_smem_to_gmem(to, here, reduction_op="add")

    def of_queries(number, then):
        gpu.barrier_wait(written)
        left = scores.at[lax.rem(number + 2, 2), warpgroup()].T
        return _product(left, keys.at[warpgroup()], then)

    def of_step(to_values, to_keys, number, found):
        """found: scores of the first map. Returns those of the next step."""
        slot, now = lax.rem(number, SLOTS), lax.rem(number, 2)
        mine = pl.ds(warpgroup() * KEYS, KEYS)

        def row(index):
            found = gpu.load(along.at[slot, index], layout=BY_QUERY)  # pyright: ignore
            return lax.broadcast_in_dim(found, SCORES, [1])

        def hide(found):
            layout = gpu.Layout.WGMMA
            place = gpu.broadcasted_iota(jnp.int32, SCORES, 0, layout=layout)
            place = (place + at + warpgroup() * KEYS).astype(jnp.float32)
            return jnp.where(place <= row(LAST), found, -jnp.inf)

        def weigh(i, found):
            if causal or lengths[1] % BLOCK:
                found = lax.cond(place(number)[1] < clear, hide, lambda x: x, found)
            found = jnp.exp2(found * (scale * IN_TWO) - row(NORMALISER + i))
            found = (found * row(LESS) if i else found).astype(dtype)
            return lax.optimization_barrier(found)

        def differ(i, weights, pairs):
            found = weights * (pairs - row(DELTA + i)).astype(dtype)
            scores[now, i, mine] = found = lax.optimization_barrier(found)
            gpu.wgmma(to_keys[i], found, queries.at[slot, i])

        def with_scores(two):
            one = weigh(0, found)

            def with_queries(earlier):
                less = weigh(1, two(wait_n=1))
                gpu.barrier_wait(third.at[slot])
                gpu.wgmma(to_values, one + less, changes.at[slot])
                earlier = earlier(wait_n=1)
                # No copy is left to wait for, but the threads of the warpgroup: all
                # have read the scores whose place the sums take.
                gpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(number > 0)(lambda: add_to_queries(number - 1, earlier))

                def with_pairs(pairs):
                    pairs = pairs(wait_n=0)
                    differ(0, one, pairs)
                    gpu.wgmma_wait(1)
                    differ(1, less, pairs)

                _product(values.at[mine], changes.at[slot].T, with_pairs)

            of_queries(number - 1, with_queries)

        gpu.barrier_wait(second.at[slot])
        _product(keys.at[1, mine], queries.at[slot, 1].T, with_scores)
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        gpu.commit_smem()
        gpu.barrier_arrive(written)
        later = first_scores(number + 1)
        gpu.wgmma_wait(0)
        gpu.barrier_arrive(used.at[slot])
        return later

    def first_scores(number):
        slot = lax.rem(number, SLOTS)
        left = keys.at[0, pl.ds(warpgroup() * KEYS, KEYS)]
        pl.when(number < every)(lambda: gpu.barrier_wait(first.at[slot]))
        return _product(left, queries.at[slot, 0].T, lambda found: found(wait_n=0))

    def accumulate(to_values, *to_keys):
        step = partial(of_step, to_values, to_keys)
        lax.fori_loop(0, every, step, first_scores(0))
        return [found[...] for found in (to_values, *to_keys)]

    @pl.when(warpgroup() < 2)
    def _():
        gpu.set_max_registers(WORKERS, action="increase")
        gpu.barrier_wait(held)
        gpu.barrier_arrive(written)
        tall, wide = (gpu.ACC((KEYS, x)) for x in sizes)
        found = pl.run_scoped(accumulate, wide, tall, tall)
        mine = pl.ds(warpgroup() * KEYS, KEYS)
        last = of_queries(every - 1, lambda found: found(wait_n=0))
        # As above: all threads have read the scores.
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(every > 0)(lambda: add_to_queries(every - 1, last))
        gpu.barrier_arrive(written)
        gpu.barrier_wait(written)  # nobody reads keys and values any more
        values[mine] = found[0].astype(dtype)
        for i in range(2):
            keys[i, mine] = (found[1 + i] * scale).astype(dtype)
        gpu.commit_smem()
        rows = pl.ds(at + warpgroup() * KEYS, KEYS)
        to = part(of_value, example, rows, head, width)
        gpu.copy_smem_to_gmem(values.at[mine], to)
        for i in range(2):
            to = part(of_key, example, rows, 2 * head + i, size)
            gpu.copy_smem_to_gmem(keys.at[i, mine], to)
        gpu.wait_smem_to_gmem(0)
