"""Dropout that draws 16 random bits per entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from symjax.layers.primitives import dropout

KEY = jax.random.key(7)
SHAPE = 24, 50, 33  # an odd number of features: the last random number is used by half


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_entries_are_dropped_at_the_rate_independently(rate):
    kept = np.asarray(dropout(jnp.ones(SHAPE), rate, KEY)) > 0
    sigma = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 4 * sigma / np.sqrt(kept.size)
    assert abs(kept.mean(axis=(0, 1)) - (1 - rate)).max() < 5 * sigma / np.sqrt(24 * 50)
    # Features that share a random number, and neighbours along each axis.
    centred = (kept - kept.mean()) / sigma
    for one, other in (
        (centred[..., :16], centred[..., 17:]),
        (centred[..., 1:], centred[..., :-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
    ):
        assert abs((one * other).mean()) < 4 / np.sqrt(one.size)


def test_what_is_kept_is_scaled_so_that_the_expected_output_is_the_input():
    x = jax.random.normal(jax.random.key(1), SHAPE)
    output, gradient = jax.value_and_grad(lambda x: dropout(x, 0.3, KEY).sum())(x)
    # 0.3 is rounded to 19,661 of 65,536; the scale is 1 / the rounded share.
    scale = np.float32(65536 / (65536 - 19661))
    kept = np.asarray(dropout(x, 0.3, KEY)) != 0
    np.testing.assert_array_equal(dropout(x, 0.3, KEY), np.where(kept, x * scale, 0))
    np.testing.assert_array_equal(gradient, np.where(kept, scale, 0))
    assert dropout(x.astype(jnp.bfloat16), 0.3, KEY).dtype == jnp.bfloat16


def test_no_key_and_rate_0_are_no_dropout():
    x = jax.random.normal(KEY, SHAPE)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, KEY) is x
    # A rate just below 1 keeps one of 65,536 entries, and no infinity.
    assert np.isfinite(dropout(x, 0.9999999, KEY)).all()


def test_a_mesh_drops_what_one_device_drops():
    x = jnp.ones((8, 6, 32))
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (jax.sharding.AxisType.Auto,) * 3)
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("a", "b", "c")))
    found = jax.jit(dropout, static_argnums=1)(placed, 0.4, KEY)
    np.testing.assert_array_equal(found, dropout(x, 0.4, KEY))
