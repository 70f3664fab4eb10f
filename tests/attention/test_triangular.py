"""Unit lower triangular systems against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax.attention.delta_rule import solve_unit_lower


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
