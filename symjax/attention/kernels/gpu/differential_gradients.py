"""Backward pass of differential attention on Hopper GPUs.

With the gradient dO of the output O₁ − λ O₂, Dᵢ = dO·Oᵢ and weights P₁ and P₂:

    dP = dO Vᵀ,  dS₁ = P₁ (dP − D₁),  dS₂ = −λ P₂ (dP − D₂)
    dQᵢ = dSᵢ Kᵢ,  dKᵢ = dSᵢᵀ Qᵢ,  dV = (P₁ − λ P₂)ᵀ dO

dP and dV are common to both maps. Counted in products of vectors of 128 numbers, this
pass takes five for each pair of a query and a key: scores, dP, dV, dQ and dK. Two
passes, one for each map, would take seven.

`gradient_program.py` has the program of a block of keys.

The pass recomputes scores and weights from the normalisers that the forward pass
stored. D is computed from rounded outputs, as in FlashAttention-2. So the gradients of
queries and keys lose digits if the mean of the values is not 0, since it cancels in
dP − D, and if maps are peaked (docs/performance/gpu.md).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jaxtyping import Array, Float, Int

from symjax.attention.core.meshes import vary_alike
from symjax.attention.kernels.gpu.gradient_program import (
    BLOCK,
    SLOTS,
    STEP,
    run_program,
)
from symjax.attention.kernels.gpu.hopper import (
    EIGHT,
    IN_TWO,
    OPTIONS,
    TILES,
    join_heads,
    split_heads,
)
from symjax.attention.kernels.intervals import RowIntervals, blocks_of_keys
from symjax.attention.kernels.operands import round_up

WIDE_TILES = gpu.TilingTransform((8, 32)), gpu.SwizzleTransform(128)


def backward(
    interpret: Any,
    query: Float[Array, "B T 2N H"],
    key: Float[Array, "B S 2K H"],
    value: Float[Array, "B S K V"],
    lam: Float[Array, "B N T"],
    normaliser: Float[Array, "B 2N T"],
    deltas: Float[Array, "B 2N T"],
    output_gradient: Float[Array, "B T N V"],
    intervals: RowIntervals | None,
    *,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value.

    Args:
        deltas: D of each row and map, without −λ.
        output_gradient: dO.
        intervals: the keys that each row sees, in place of `causal`.
    """
    batch, length, maps, size = query.shape
    keys, heads, width = value.shape[1:]
    steps = pl.cdiv(length, STEP)
    ends = _key_ends(intervals, length, keys, causal)
    numbers = _query_numbers(lam, normaliser, deltas, ends, steps)
    limits = None
    if intervals is not None:
        limits = blocks_of_keys(intervals, keys, STEP, BLOCK)
        limits = jnp.broadcast_to(limits, (batch, *limits.shape[1:]))
    empty = jnp.zeros((batch, steps * STEP, maps * size), jnp.float32)
    total, dtype = jax.new_ref(empty), query.dtype
    program = partial(
        run_program,
        lengths=(length, keys),
        sizes=(size, width),
        group=maps // 2 // heads,
        scale=scale,
        causal=causal,
    )
    tiled = partial(gpu.SMEM, dtype=dtype, transforms=TILES)
    sums = gpu.SMEM((2, 2, STEP, size), jnp.float32, transforms=WIDE_TILES)
    rows = round_up(keys, EIGHT)
    gradients = gpu.kernel(
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
    )(
        *map(join_heads, (query, key, value)),
        numbers,
        join_heads(output_gradient),
        limits,
        total,
    )
    # References lose the mesh axes over which an array varies; `vary_alike` restores
    # them.
    key_gradient, value_gradient, total, _ = vary_alike(
        (*gradients, total[...], output_gradient)
    )
    query_gradient = (split_heads(total, length, maps) * scale).astype(dtype)
    key_gradient = split_heads(key_gradient, keys, 2 * heads)
    return query_gradient, key_gradient, split_heads(value_gradient, keys, heads)


def _query_numbers(
    lam: Array, normaliser: Array, deltas: Array, ends: Array, steps: int
) -> Float[Array, "B N numbers T"]:
    """Return the numbers of each query that a program needs, 0 beyond the last query.

    They are NORMALISER (in log₂), DELTA, LESS and LAST of `gradient_program`, and with
    intervals FIRST.
    """
    batch, heads, length = lam.shape
    maps = batch, heads, 2, length
    ends = jnp.broadcast_to(ends[:, None], (batch, heads, *ends.shape[1:]))
    each = (normaliser * IN_TWO).reshape(maps), deltas.reshape(maps), -lam[:, :, None]
    numbers = jnp.concatenate([*each, ends], axis=2, dtype=jnp.float32)
    return jnp.pad(numbers, ((0, 0),) * 3 + ((0, steps * STEP - length),))


def _key_ends(
    intervals: RowIntervals | None, length: int, keys: int, causal: bool
) -> Int[Array, "b ends T"]:
    """Return the last key that each query sees, and with intervals the first too."""
    if intervals is not None:
        last, first = intervals.rows[:, 1] - 1, intervals.rows[:, 0]
        return jnp.stack([last, first], axis=1)
    last = jnp.arange(length) + keys - length if causal else jnp.full(length, keys - 1)
    return last[None, None]
