"""Random projections and feature maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax.attention.core.feature_maps import feature_map
from symjax.attention.features import PLAIN, UNIT, hedgehog, t2r
from symjax.attention.random_features import (
    RANDOM_FEATURES,
    default_projection,
    orthogonal_projection,
)


@pytest.mark.parametrize(("features", "norms"), [(3, "chi"), (21, "constant")])
def test_rows_are_orthogonal_inside_a_block(features, norms):
    rows = orthogonal_projection(jax.random.key(0), features, 8, norms=norms)
    assert rows.shape == (features, 8)
    for start in range(0, features, 8):
        block = rows[start : start + 8]
        products = np.array(block @ block.T)
        np.fill_diagonal(products, 0)
        np.testing.assert_allclose(products, 0, atol=1e-5)
    if norms == "constant":
        lengths = jnp.linalg.norm(rows, axis=-1)
        np.testing.assert_allclose(lengths, 8**0.5, rtol=1e-6)


def test_lengths_are_those_of_normal_vectors():
    rows = orthogonal_projection(jax.random.key(0), 4096, 8)
    squares = jnp.sum(rows**2, axis=-1)
    assert abs(squares.mean() - 8) < 0.25  # χ²(8): mean 8, variance 16
    assert abs(squares.var() - 16) < 2.5


@pytest.fixture(scope="module")
def many_draws():
    keys = jax.random.split(jax.random.key(1), 4000)
    return jax.jit(jax.vmap(lambda key: orthogonal_projection(key, 8, 8)))(keys)


def test_rows_are_uniform(many_draws):
    """Without the signs of R the mean of W[i, i] is between −0.29 and 0.23."""
    diagonal = jnp.diagonal(many_draws.mean(axis=0))
    assert jnp.abs(diagonal).max() < 0.06  # four standard errors of 1/√4000


@pytest.mark.parametrize("sign", [1, -1])
def test_the_estimate_is_unbiased(many_draws, sign):
    """E φ(q)·φ(k) / exp(q·k) for q = k; without the signs of R it is 0.73 and 1.25."""
    x = jnp.full(8, sign * 0.7 * 8**-0.5)
    estimate = jnp.exp(2 * (many_draws @ x) - 0.49).mean() / jnp.exp(0.49)
    assert abs(estimate - 1) < 0.06  # four standard errors


def test_the_same_key_gives_the_same_rows_in_float64():
    single = orthogonal_projection(jax.random.key(3), 7, 4)
    with jax.enable_x64(True):
        double = orthogonal_projection(jax.random.key(3), 7, 4)
    assert double.dtype == jnp.float32
    np.testing.assert_array_equal(single, double)


def test_the_default_projection_never_changes():
    rows = default_projection(16)
    default_projection.cache_clear()
    with jax.enable_x64(True):
        inside = jax.jit(lambda: jnp.asarray(default_projection(16)))()
    assert rows.shape == (256, 16)
    np.testing.assert_array_equal(rows, inside)


def test_unknown_norms_and_bad_sizes_raise():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="'unit'.*chi, constant"):
        orthogonal_projection(key, 4, 4, norms="unit")
    with pytest.raises(ValueError, match="0 and 4"):
        orthogonal_projection(key, 0, 4)


def test_tables_list_what_they_know():
    with pytest.raises(ValueError, match="who: .*'cos'.*hyperbolic, positive, relu"):
        feature_map("who", RANDOM_FEATURES, "cos")
    assert list(PLAIN) == sorted(PLAIN) and list(RANDOM_FEATURES) == sorted(
        RANDOM_FEATURES
    )


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_squares_take_every_pair_once(size, x64):
    query, key = np.random.default_rng(0).normal(size=(2, 3, size))
    score = (query * key).sum(axis=-1)
    count = size * (size + 1) // 2
    wanted = {
        "squared": score**2,
        "taylor": 1 + score / size**0.5 + score**2 / size / 2,
    }
    for name, features in (("squared", count), ("taylor", 1 + size + count)):
        pair = [PLAIN[name].key(x, None).weights() for x in (query, key)]
        assert pair[0].shape == (3, features)
        np.testing.assert_allclose((pair[0] * pair[1]).sum(-1), wanted[name], 1e-12)


def test_features_around_the_keys_have_the_products_of_the_others(x64):
    query, key = np.random.default_rng(0).normal(size=(2, 1, 2, 9, 5))
    plain = [UNIT.key(x, None).weights() for x in (query, key)]
    centred = UNIT.centred(UNIT.query(query[:, :, None], None), UNIT.key(key, None))
    products = np.einsum("bktm,bksm->bkts", *plain)
    near = np.einsum("bkgtm,bksm->bkts", *(x.weights() for x in centred))
    np.testing.assert_allclose(near, products, 1e-12)
    np.testing.assert_array_equal(centred[1].weights()[..., 0], 1)


def test_learned_features_equal_their_definition():
    """softmax over [x W, −x W], and relu(x W + b), for each head."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(4, 5, 7))
    bias = rng.normal(size=(4, 7))
    arrays = [y.astype(np.float32) for y in (x, weight, bias)]
    waves, ramps = hedgehog(*arrays[:2]), t2r(*arrays)
    for n in range(4):
        projected = x[:, :, n] @ weight[n]
        powers = np.exp(np.concatenate([projected, -projected], axis=-1))
        wanted = powers / powers.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(waves[:, :, n], wanted, rtol=1e-5)
        wanted = np.maximum(projected + bias[n], 0)
        np.testing.assert_allclose(ramps[:, :, n], wanted, atol=1e-5)
    half = [y.astype(jnp.bfloat16) for y in arrays]
    assert hedgehog(*half[:2]).dtype == t2r(*half).dtype == jnp.float32
    with pytest.raises(ValueError, match=r"hedgehog.*\(4, 3, 7\).*\(2, 3, 4, 5\)"):
        hedgehog(arrays[0], np.zeros((4, 3, 7)))
    with pytest.raises(ValueError, match=r"t2r.*\(4, 5, 7\).*\(7,\)"):
        t2r(*arrays[:2], np.zeros(7))


def test_the_gradient_of_elu_plus_one_is_one_at_zero():
    gradient = jax.grad(lambda x: PLAIN["elu"].key(x, None).amplitude)
    assert [float(gradient(x)) for x in (-0.0, 0.0, 2.0)] == [1.0, 1.0, 1.0]
    assert float(gradient(-1.0)) == pytest.approx(np.exp(-1), rel=1e-6)
