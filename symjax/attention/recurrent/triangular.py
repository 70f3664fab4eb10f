"""Triangular matrices of the tokens of a chunk: systems, inverses and factors.

Systems are solved by products of matrices, since triangular solves of `jax.scipy` take
one step per row on a TPU, and can deadlock on a CPU (`solve_unit_lower`).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symjax.attention.core.products import einsum


def solve_unit_lower(
    matrix: Float[Array, "*B T T"],
    right: Float[Array, "*B T V"],
    product: Callable[..., Array] = einsum,
) -> Float[Array, "*B T V"]:
    """Return X with (I + A) X = right, where A is the matrix below its diagonal.

    X is computed from the inverse of I + A. Derivatives use the same inverse; the steps
    that compute it are not differentiated.

    Time T³/3 + T² V multiply-adds, in log₂ T steps.
    `jax.scipy.linalg.solve_triangular` takes T steps on a TPU. On a CPU several of its
    calls can deadlock, since each holds a thread while it waits for others (jaxlib
    0.10.2: eight solves in one program on two cores).

    Args:
        product: the einsum that multiplies matrices.
    """
    below = jnp.tril(matrix, -1)
    inverse = _inverse_unit_lower(jax.lax.stop_gradient(below), product)
    times = partial(product, "...ts,...sv->...tv")
    return jax.lax.custom_linear_solve(
        lambda x: x + times(below, x),
        right,
        lambda _, x: times(inverse, x),
        lambda _, x: times(jnp.swapaxes(inverse, -1, -2), x),
    )


def _inverse_unit_lower(
    below: Float[Array, "*B T T"], product: Callable[..., Array]
) -> Float[Array, "*B T T"]:
    """Return (I + A)⁻¹, from the inverses of its diagonal blocks of 2, 4, 8 … rows.

    With P and Q the inverses of two neighbouring blocks of n rows, the inverse of the
    block of 2n rows is [[P, 0], [−Q A₂₁ P, Q]]. That of 2 rows is I − A.

    First the matrix is cut in halves, then its diagonal blocks, and so on, so that
    slices give each A₂₁. A gather of the diagonal blocks would be slower and make a
    longer program.
    """
    *lead, length, _ = below.shape
    size = max(2, 1 << (length - 1).bit_length())
    if size > length:
        missing = [(0, size - length)] * 2
        below = jnp.pad(below, [(0, 0)] * len(lead) + missing)
    blocks, corners = below[..., None, :, :], []
    while (half := blocks.shape[-1] // 2) > 1:
        corners.append(blocks[..., half:, :half])
        first, second = blocks[..., :half, :half], blocks[..., half:, half:]
        halves = jnp.concatenate([first[..., None, :, :], second[..., None, :, :]], -3)
        blocks = jax.lax.collapse(halves, halves.ndim - 4, halves.ndim - 2)
    ones = jnp.eye(2, dtype=below.dtype)
    inverse = jax.lax.expand_dims(ones, range(blocks.ndim - 2)) - blocks
    for corner in reversed(corners):
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -product("...ij,...jk,...kl->...il", second, corner, first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([corner, second], axis=-1)
        inverse = jnp.concatenate([above, lower], axis=-2)
    return inverse[..., 0, :length, :length]


@jax.custom_jvp
def unit_factor(
    matrix: Float[Array, "*B T T"],
) -> tuple[Float[Array, "*B T"], Float[Array, "*B T T"]]:
    """Return D and N with N A Nᵀ = diag(D), where N is unit lower triangular.

    So A = L diag(D) Lᵀ with L = N⁻¹, and A⁻¹ = Nᵀ diag(1/D) N. The derivative is: with
    X = N dA Nᵀ, dD is the diagonal of X, and dN is −(X below its diagonal) diag(1/D) N.

    Time O(T³). D is NaN unless A is positive definite.

    Args:
        matrix: A, symmetric.
    """
    if matrix.shape[-1] == 1:
        positive = matrix[..., 0] > 0
        return jnp.where(positive, matrix[..., 0], jnp.nan), jnp.ones_like(matrix)
    root = jnp.linalg.cholesky(matrix)
    diagonal = jnp.diagonal(root, axis1=-2, axis2=-1)
    lower = jnp.tril(root / diagonal[..., None, :], -1)
    return diagonal**2, _inverse_unit_lower(lower, einsum)


@unit_factor.defjvp
def _unit_factor_derivative(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    pivots, inverse = unit_factor(*primals)
    (change,) = tangents
    change = (change + jnp.swapaxes(change, -1, -2)) / 2
    change = einsum("...ij,...jk,...lk->...il", inverse, change, inverse)
    below = jnp.tril(change, -1) / pivots[..., None, :]
    tangent = (
        jnp.diagonal(change, axis1=-2, axis2=-1),
        -einsum("...ij,...jk->...ik", below, inverse),
    )
    return (pivots, inverse), tangent


def root_of_inverse(matrix: Float[Array, "*B T T"]) -> Float[Array, "*B T T"]:
    """Return F with F Fᵀ = A⁻¹ of a symmetric positive definite matrix, else NaN."""
    pivots, inverse = unit_factor(matrix)
    return jnp.swapaxes(inverse / jnp.sqrt(pivots)[..., None], -1, -2)
