"""Cosine attention: 1 + cos over its sum, in linear time."""

import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import close, inputs

from symjax.attention.cosine import cosine, cosine_causal, cosine_state, cosine_step


def products(query, key, module=np):
    features = [oracles.cosine_features(x, module) for x in (query, key)]
    return oracles.feature_products(*features, module)


MECHANISM = laws.Mechanism.of(
    (cosine, cosine_causal, cosine_step, cosine_state), products
)


@laws.every_law
def test_it_obeys(law):
    law(MECHANISM)


def test_is_causal_is_the_causal_form():
    arrays = inputs(dtype=np.float32)
    laws.same(cosine(*arrays, is_causal=True), cosine_causal(*arrays))


def test_weights_are_one_plus_cosine(x64):
    query, key, value = inputs(heads=3)
    units = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    cosines = np.einsum("btkh,bskh->bkts", *units)
    weights = (1 + cosines) / (1 + cosines).sum(axis=-1, keepdims=True)
    wanted = np.einsum("bkts,bskv->btkv", weights, value)
    close(cosine(query, key, value), wanted, 1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1e15])
def test_lengths_of_queries_and_keys_do_not_matter(x64, scale):
    query, key, value = inputs()
    wanted = cosine_causal(query * 1e3, key * 1e3, value)
    close(cosine_causal(query * 1e3 * scale, key * 1e3 * scale, value), wanted, 1e-5)


def test_a_zero_vector_has_a_finite_gradient():
    query, key, value = (x.copy() for x in inputs(dtype=np.float32))
    query[0, 3], key[1, 4] = 0, 0
    for form in (cosine, cosine_causal):
        gradients = laws.gradient(form, query, key, value)
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_keys_that_all_point_away_weigh_nothing():
    """1 + cos is 0 up to rounding: the row is zero, neither noise nor NaN."""
    query = np.full((1, 40, 1, 4), 30, np.float32)
    value = np.ones((1, 40, 1, 2), np.float32)
    for form in (cosine, cosine_causal):
        output = form(query, -query, value)
        laws.same(output, np.zeros_like(output))
        gradients = laws.gradient(form, query, -query, value)
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_a_lone_small_weight_still_counts():
    """One key at 1 + cos = 1e-3 is the whole of its row."""
    angle = np.pi - np.sqrt(2e-3)
    query = np.array([1.0, 0], np.float32).reshape(1, 1, 1, 2)
    key = np.array([np.cos(angle), np.sin(angle)], np.float32).reshape(1, 1, 1, 2)
    value = jnp.full((1, 1, 1, 3), 2.0)
    for form in (cosine, cosine_causal):
        close(form(query, key, value), value, 1e-3)
