"""Rotary positions."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import B, N, T, close

from symjax import attention

SIZE = 10
POSITIONS = np.stack([np.arange(T), np.arange(T) * 3 + 100])


def inputs(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, N, SIZE))


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_pairs_turn_as_complex_numbers(base, x64):
    x = inputs()
    wanted = oracles.rotate(x, POSITIONS, base)
    close(attention.rotate(x, POSITIONS, base), wanted, 1e-12)
    close(
        attention.rotate(x, POSITIONS[:1], base),
        oracles.rotate(x, POSITIONS[:1], base),
        1e-12,
    )


def test_a_product_depends_on_the_distance_alone(x64):
    query, key = inputs(0), inputs(1)

    def product(shift):
        turned = (attention.rotate(x, POSITIONS + shift) for x in (query, key))
        return np.einsum("btnh,bsnh->bnts", *turned)

    close(product(37), product(0), 1e-12)
    assert np.abs(product(0) - np.einsum("btnh,bsnh->bnts", query, key)).max() > 1


def test_lengths_are_kept_and_position_zero_changes_nothing(x64):
    x = inputs()
    turned = attention.rotate(x, POSITIONS)
    close((turned**2).sum(-1), (x**2).sum(-1), 1e-13)
    np.testing.assert_array_equal(turned[0, 0], x[0, 0])


def test_bfloat16_is_turned_in_float32():
    x = jnp.asarray(inputs(), jnp.bfloat16)
    turned = attention.rotate(x, POSITIONS + 5000)
    assert turned.dtype == jnp.bfloat16
    wanted = attention.rotate(x.astype(jnp.float32), POSITIONS + 5000)
    error = np.abs(np.asarray(turned, np.float32) - wanted)
    assert (error <= 2**-8 * np.abs(wanted) + 1e-6).all()


def test_an_odd_head_size_is_refused():
    with pytest.raises(ValueError, match=r"even.*\(2, 19, 6, 9\)"):
        attention.rotate(jnp.ones((B, T, N, 9)), POSITIONS)
