"""Rotation of pairs of features by given angles, in XLA or by a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.kernels.dispatch import run_heads


def rotated(
    shape: tuple[int, int],
    x: Float[Array, "B T N H"],
    cos: Float[Array, "#B T 1 H/2"],
    sin: Float[Array, "#B T 1 H/2"],
) -> Float[Array, "B T N H"]:
    """Return x cos ∓ partner sin, where the partner is the other feature of a pair.

    XLA's form does not concatenate two halves: on an H200 a concatenation took four
    times as long as reading and writing the array.

    Args:
        shape: (2, −1) or (−1, 2): reshapes the features so that the axis of length 2
            has the two features of a pair.
    """
    axis = shape.index(2) - 2

    def for_pairs(first: Array, second: Array) -> Float[Array, "#B T H"]:
        stacked = jnp.stack([first, second], axis=axis)
        return stacked.reshape(*first.shape[:2], x.shape[-1])

    def turn(x: Array, same: Array, other: Array) -> Float[Array, "B T N H"]:
        wide = x.astype(same.dtype)
        partners = _partners(shape, wide)
        return (wide * same[:, :, None] + partners * other[:, :, None]).astype(x.dtype)

    distance = 1 if axis == -1 else x.shape[-1] // 2
    return run_heads(
        "turn", distance, turn, x, for_pairs(cos, cos), for_pairs(-sin, sin)
    )


def _partners(
    shape: tuple[int, int], x: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    """Return the other feature of the pair of each feature."""
    pairs = x.reshape(*x.shape[:-1], *shape)
    return jnp.flip(pairs, axis=shape.index(2) - 2).reshape(x.shape)
