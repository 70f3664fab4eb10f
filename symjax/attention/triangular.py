"""Unit lower triangular systems, by products of matrices."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.chunks import einsum


def solve_unit_lower(
    matrix: Float[Array, "*B T T"], right: Float[Array, "*B T V"]
) -> Float[Array, "*B T V"]:
    """X of (I + A) X = right, A what the matrix has below its diagonal.

    Inverses of diagonal blocks of 2, 4, 8 … rows, each from two of half the size:

        [[P, 0], [A₂₁, Q]]⁻¹ with P, Q inverted = [[P, 0], [−Q A₂₁ P, Q]]

    Time T³/3 + T² V multiply-adds, in log₂ T steps of all blocks at once.
    `jax.scipy.linalg.solve_triangular` takes T steps on a TPU; on a CPU its calls for
    several matrices can wait for each other for ever, since each holds a thread while
    it waits for others (jaxlib 0.10.2: eight solves in one program on two cores).
    """
    *lead, length, _ = matrix.shape
    size = 1 << (length - 1).bit_length()
    missing = [(0, size - length)] * 2
    below = jnp.pad(jnp.tril(matrix, -1), [(0, 0)] * len(lead) + missing)
    inverse = jnp.ones((*lead, size, 1, 1), matrix.dtype)
    half = 1
    while half < size:
        count = size // (2 * half)
        pairs = below.reshape(*lead, count, 2, half, count, 2, half)
        corners = jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2)
        corners = jnp.moveaxis(corners, -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corners = -einsum("...ij,...jk,...kl->...il", second, corners, first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([corners, second], axis=-1)
        inverse = jnp.concatenate([above, lower], axis=-2)
        half *= 2
    return einsum("...ts,...sv->...tv", inverse[..., 0, :length, :length], right)
