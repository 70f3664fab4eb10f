"""Packed heads: several heads in one tile of 128 lanes.

A tile holds 128/H heads of size H, for instance two of 64. A product for one head sets
the other heads of its tile to 0 in one of the two factors. A NaN of these heads in the
other factor still reaches the result, because 0 · NaN is NaN.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.kernels.tpu.tiles import LANES


def heads_in_a_tile(heads: int, size: int, value_size: int) -> int:
    """Return the number of heads that share a tile of keys and of values, or 1."""
    packed = LANES // size
    fits = size == value_size and packed * size == LANES and heads % packed == 0
    return packed if fits else 1


def pack_heads(
    x: Float[Array, "B T K h"], heads: int, length: int, size: int
) -> Float[Array, "B length heads*size"]:
    """Repeat key heads for query heads, pad time and heads with 0, and join heads."""
    x = jnp.repeat(x, heads // x.shape[2], axis=2)
    missing = length - x.shape[1], size - x.shape[3]
    x = jnp.pad(x, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1])))
    return x.reshape(*x.shape[:2], -1)


def unpack_heads(x: Float[Array, "B length W"], heads: int, like: Array) -> Array:
    """Undo `pack_heads`: return [B T heads h] with the length and size of `like`."""
    x = x.reshape(*x.shape[:2], heads, -1)
    return x[:, : like.shape[1], :, : like.shape[3]]


def unpack_gradient(
    x: Float[Array, "B length W"], heads: int, like: Float[Array, "B T K h"]
) -> Float[Array, "B T K h"]:
    """Return the gradient of `like` from the gradient of `pack_heads`.

    The gradient of a key head is the sum over its query heads.
    """
    parts = unpack_heads(x, heads, like)
    parts = parts.reshape(*like.shape[:3], -1, like.shape[3])
    return parts.sum(axis=3).astype(like.dtype)


def is_own(shape: tuple[int, ...], size: int, head: int) -> Bool[Array, "..."]:
    """Return which lanes belong to a head."""
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (lane >= head * size) & (lane < (head + 1) * size)


def own(x: Float[Array, "c W"], size: int, head: int) -> Float[Array, "c W"]:
    """Return a tile with 0 for all heads but one."""
    return jnp.where(is_own(x.shape, size, head), x, 0) if x.shape[1] > size else x


def in_lanes(
    columns: Sequence[Float[Array, "c 1"]], shape: tuple[int, ...]
) -> Float[Array, "c W"]:
    """Return an array with the column of each head in the lanes of that head."""
    wide = jnp.broadcast_to(columns[0], shape)
    for head in range(1, len(columns)):
        mine = is_own(shape, shape[1] // len(columns), head)
        wide = jnp.where(mine, columns[head], wide)
    return wide


def of_heads(
    sizes: tuple[int, int], state: Float[Array, "P*V P*H"]
) -> Float[Array, "P*V P*H"]:
    """Return a state of packed heads, with 0 for values and keys of different heads.

    Args:
        sizes: V and H of one head.
    """
    if state.shape == sizes:
        return state
    value, key = (jax.lax.broadcasted_iota(jnp.int32, state.shape, x) for x in (0, 1))
    return jnp.where(value // sizes[0] == key // sizes[1], state, 0)
