"""SLAY: quadrature of the spherical Yat kernel, and the features that estimate it."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import close, inputs, run

from symjax.attention import performer, performer_causal
from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.performer import performer_state, performer_step
from symjax.attention.random_features import RANDOM_FEATURES, orthogonal_projection
from symjax.attention.slay import EPSILON, NODES, laguerre_rule


def expected_kernel(cosine, size):
    """Return the kernel that the features estimate."""
    points, weights = laguerre_rule(NODES)
    terms = weights * np.exp(2 * points * cosine[..., None])
    return (1 + 2 * cosine**2) / (size * (size + 2)) * terms.sum(axis=-1)


@pytest.mark.parametrize("nodes, largest", [(1, 0.27), (2, 0.041), (4, 7e-4)])
def test_the_quadrature_has_the_stated_error(nodes, largest):
    """The error is below 5 (x/(2 − x))^2R, and largest at the ends of [−1, 1/2]."""
    cosine = np.linspace(-1, 0.9, 191)
    points, weights = laguerre_rule(nodes)
    sums = (weights * np.exp(2 * points * cosine[:, None])).sum(axis=-1)
    error = np.abs(sums * (2 + EPSILON - 2 * cosine) - 1)
    bound = 5 * np.abs(cosine / (2 - cosine)) ** (2 * nodes)
    assert np.all(error <= bound + 1e-6)
    within = error[cosine <= 0.5].max()
    assert largest / 1.1 < within < largest


def normal_rows(angles, radii):
    """Return a quadrature of the normal distribution in two dimensions."""
    squares, weights = np.polynomial.laguerre.laggauss(radii)  # of |w|²/2
    turns = 2 * np.pi * (np.arange(angles) + 0.3) / angles
    directions = np.stack([np.cos(turns), np.sin(turns)], axis=-1)
    rows = np.sqrt(2 * squares)[:, None, None] * directions
    return rows.reshape(-1, 2), np.repeat(weights, angles) / angles


def test_features_estimate_their_kernel_without_bias(x64):
    """The mean over two independent rows, by quadrature, for five angles."""
    rows, weights = normal_rows(96, 48)
    anchors, parts = normal_rows(8, 1)
    cosine = np.array([-1, -0.6, 0.0, 0.5, 0.95])
    query = 3 * np.array([0.6, 0.8])
    key = cosine[:, None] * query
    key = (key + np.sqrt(1 - cosine**2)[:, None] * 3 * np.array([-0.8, 0.6])) / 20

    def products(row, anchor):
        """Return φ_m(q) φ_m(k) of the node 0 and of the node 1."""
        pairs = []
        for node, two in enumerate(([row, anchor], [anchor, row])):
            random = FeatureParameters(jnp.stack(two), jnp.asarray(0.3))
            features = [
                RANDOM_FEATURES["slay"].key(x, random).weights()[..., node]
                for x in (jnp.asarray(query), jnp.asarray(key))
            ]
            pairs.append(features[0] * features[1])
        return sum(pairs)

    every = jax.vmap(jax.vmap(products, (None, 0)), (0, None))
    estimates = jax.jit(every)(jnp.asarray(rows), jnp.asarray(anchors))
    assert estimates.min() >= 0
    mean = np.einsum("wak,w,a->k", estimates, weights, parts)
    np.testing.assert_allclose(mean, expected_kernel(cosine, 2), 1e-9)


def mechanism():
    rows = np.asarray(orthogonal_projection(jax.random.key(7), 11, laws.H))
    products = partial(
        oracles.performer_products, projection=np.asarray(rows, float), features="slay"
    )
    forms = performer, performer_causal, performer_step, performer_state
    return laws.Mechanism.of(forms, products, rows, features="slay")


@pytest.mark.parametrize(
    "law",
    [
        laws.gradients_equal_those_of_the_definition,
        laws.segments_do_not_see_each_other,
        laws.hidden_keys_change_nothing,
        laws.the_future_changes_nothing,
    ],
)
def test_features_obey(law):
    law(mechanism())


def test_the_lengths_of_queries_and_keys_have_no_effect():
    query, key, value = inputs(dtype=np.float32)
    form = mechanism().causal
    longer = run(form, query * 1e9, key * 1e-9, value)
    close(longer, run(form, query, key, value), 1e-5)


def test_a_query_of_zero_has_a_row_of_zeros():
    query, key, value = inputs(dtype=np.float32)
    form = mechanism().whole
    output, back = jax.vjp(lambda query: form(query, key, value), query * 0)
    assert not output.any() and np.isfinite(back(output + 1)[0]).all()
