"""Constants and functions for both kernels of differential attention on Hopper GPUs.

The kernels (forward and backward) are written in Pallas' Mosaic GPU, where code has to
handle barriers, registers and operations in flight. After a change look for spills and
for "wgmma serialized" in the notes of ptxas.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jaxtyping import Array, Float

EIGHT = 8  # rows of a tile in memory; `join_heads` pads time to a multiple of it
IN_TWO = math.log2(math.e)  # turns exponents of e into exponents of 2
TILES = gpu.TilingTransform((EIGHT, 64)), gpu.SwizzleTransform(128)
OPTIONS = gpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
LOADERS, WORKERS = 24, 240  # registers of a thread that loads, and that computes


def join_heads(x: Float[Array, "B T N H"]) -> Float[Array, "B T' N·H"]:
    """Make heads neighbours in one axis, and pad time to a multiple of `EIGHT`."""
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % EIGHT), (0, 0)))


def split_heads(
    x: Float[Array, "B T' N·H"], length: int, heads: int
) -> Float[Array, "B T N H"]:
    """Undo `join_heads`."""
    return x[:, :length].reshape(x.shape[0], length, heads, -1)


def head_rows(array: Any, batch: Any, rows: Any, head: Any, size: int) -> Any:
    """Return a reference to rows of one head of [B T N·H]."""
    return array.at[batch, rows, pl.ds(head * size, size)]


def index_along(shape: tuple[int, ...], axis: int) -> Array:
    """Return the index along an axis of each entry of a product."""
    return gpu.broadcasted_iota(jnp.int32, shape, axis, layout=gpu.Layout.WGMMA)
