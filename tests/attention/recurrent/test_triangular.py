"""Unit lower triangular systems and factors against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax.attention.recurrent.triangular import (
    root_of_inverse,
    solve_unit_lower,
    unit_factor,
)


def example(length, seed=0):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(2, 3, length, length))
    return matrix / length**0.5, rng.normal(size=(2, 3, length, 5))


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
def test_it_solves_with_what_is_below_the_diagonal(length):
    matrix, right = example(length)
    wanted = np.linalg.solve(np.tril(matrix, -1) + np.eye(length), right)
    with jax.enable_x64(True):
        found = solve_unit_lower(jnp.asarray(matrix), jnp.asarray(right))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_the_solve():
    matrix, right = example(6)

    def by_inverse(matrix, right):
        whole = jnp.tril(matrix, -1) + jnp.eye(6)[None, None]
        return (jnp.linalg.inv(whole) @ right * jnp.cos(right)).sum()

    def by_blocks(matrix, right):
        return (solve_unit_lower(matrix, right) * jnp.cos(right)).sum()

    with jax.enable_x64(True):
        wanted = jax.grad(by_inverse, argnums=(0, 1))(matrix, right)
        found = jax.grad(by_blocks, argnums=(0, 1))(matrix, right)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11)


def test_a_chunk_of_equal_keys_at_full_strength_keeps_its_digits():
    """Equal keys reflect: each change is twice what the previous one left."""
    length = 64
    matrix = np.full((length, length), 2.0, np.float32)
    right = np.random.default_rng(0).normal(size=(length, 4)).astype(np.float32)
    wanted = np.linalg.solve(np.tril(matrix.astype(float), -1) + np.eye(length), right)
    found = solve_unit_lower(jnp.asarray(matrix), jnp.asarray(right))
    np.testing.assert_allclose(found, wanted, atol=64 * 2**-23 * np.abs(wanted).max())


@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_a_factor_makes_a_positive_matrix_diagonal(length):
    matrix, _ = example(length)
    matrix = matrix @ np.swapaxes(matrix, -1, -2) + np.eye(length)
    with jax.enable_x64(True):
        sizes, inverse = map(np.asarray, unit_factor(jnp.asarray(matrix)))
        root = np.asarray(root_of_inverse(jnp.asarray(matrix)))
    diagonal = inverse @ matrix @ np.swapaxes(inverse, -1, -2)
    wanted = sizes[..., None] * np.eye(length)
    np.testing.assert_allclose(diagonal, wanted, atol=1e-12)
    same = np.triu(inverse), np.broadcast_to(np.eye(length), matrix.shape)
    np.testing.assert_array_equal(*same)
    found = root @ np.swapaxes(root, -1, -2)
    np.testing.assert_allclose(found, np.linalg.inv(matrix), atol=1e-12)


def test_derivatives_of_a_factor_are_those_of_the_cholesky_factor():
    """The first, and the derivative of the first along a direction."""
    matrix, _ = example(6)
    matrix = matrix @ np.swapaxes(matrix, -1, -2) + np.eye(6)
    weigh = np.random.default_rng(1).normal(size=(2, *matrix.shape))

    def loss(factor):
        def total(matrix):
            sizes, inverse = factor(matrix)
            diagonal = (jnp.sin(sizes) * weigh[0, ..., 0]).sum()
            return diagonal + (jnp.sin(inverse) * weigh[1]).sum()

        return total

    def by_cholesky(matrix):
        root = jnp.linalg.cholesky(matrix)
        diagonal = jnp.diagonal(root, axis1=-2, axis2=-1)
        return diagonal**2, jnp.linalg.inv(root / diagonal[..., None, :])

    with jax.enable_x64(True):
        for order in (1, 2):
            slopes = []
            for factor in (unit_factor, by_cholesky):
                slope = jax.grad(loss(factor))
                if order == 2:
                    first = slope
                    slope = jax.grad(lambda x, first=first: (first(x) * weigh[0]).sum())
                found = np.asarray(jax.jit(slope)(matrix))
                slopes.append(found + np.swapaxes(found, -1, -2))
            np.testing.assert_allclose(*slopes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 3])
def test_a_matrix_that_is_not_positive_has_no_factor(length):
    sizes, _ = unit_factor(-jnp.eye(length))
    assert np.isnan(sizes).all()
