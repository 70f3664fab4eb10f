"""Gradients of differential attention on Hopper GPUs: one call of `gradients`.

Those of queries are added up in float32, in the order in which programs come there.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jaxtyping import Array, Float, Int

from symjax.attention.kernels.hopper_forward import (
    EIGHT,
    IN_TWO,
    OPTIONS,
    TILES,
    in_rows,
    of_heads,
)
from symjax.attention.kernels.hopper_gradients import BLOCK, SLOTS, STEP, gradients
from symjax.attention.kernels.intervals import Seen, blocks_of_keys
from symjax.attention.kernels.lanes import even
from symjax.attention.meshes import vary_alike

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
    seen: Seen | None,
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
    seen: Seen | None, length: int, keys: int, causal: bool
) -> Int[Array, "b ends T"]:
    """The last key that each query sees, and the first, where it is not 0 for all."""
    if seen is not None:
        return jnp.stack([seen.rows[:, 1] - 1, seen.rows[:, 0]], axis=1)
    last = jnp.arange(length) + keys - length if causal else jnp.full(length, keys - 1)
    return last[None, None]
