"""Cosine attention: weights 1 + cos, normalised, in linear time."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from interpreted import antiparallel
from laws import close, inputs

from symjax.attention.cosine import cosine, cosine_causal, cosine_state, cosine_step


def products(query, key, module=np):
    features = [oracles.cosine_features(x, module) for x in (query, key)]
    return oracles.feature_products(*features, module)


MECHANISM = laws.Mechanism.of(
    (cosine, cosine_causal, cosine_step, cosine_state), products
)


FORMS = cosine, cosine_causal


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


@pytest.mark.parametrize("size", [1e-6, 1e-9, 1e-18])
def test_short_vectors_have_the_gradients_of_the_definition(size):
    """For vectors far shorter than 1e-6 directions are x / 1e-6 and weights are 1."""
    query, key, value = inputs(dtype=np.float32)
    short = query * np.float32(size), key * np.float32(size), value
    for form in FORMS:
        found = form(*short), *laws.gradient(form, *short)
        with jax.enable_x64(True):
            wide = [x.astype(np.float64) for x in short]
            oracle = partial(MECHANISM.oracle, module=jnp, causal=form is not cosine)
            wanted = oracle(*wide), *laws.gradient(oracle, *wide)
        for part, exact in zip(found, wanted, strict=True):
            close(part, exact, 5e-6)


def test_a_zero_vector_has_a_finite_gradient():
    query, key, value = (x.copy() for x in inputs(dtype=np.float32))
    query[0, 3], key[1, 4] = 0, 0
    for form in FORMS:
        gradients = laws.gradient(form, query, key, value)
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_keys_that_all_point_away_weigh_nothing():
    """1 + cos is 0 up to rounding: the row is zero, and not noise or NaN."""
    query = np.full((1, 40, 1, 4), 30, np.float32)
    value = np.ones((1, 40, 1, 2), np.float32)
    for form in FORMS:
        output = form(query, -query, value)
        laws.same(output, np.zeros_like(output))
        gradients = laws.gradient(form, query, -query, value)
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_a_lone_small_weight_still_counts():
    """A single visible key with 1 + cos = 1e-3 makes the whole output."""
    angle = np.pi - np.sqrt(2e-3)
    query = np.array([1.0, 0], np.float32).reshape(1, 1, 1, 2)
    key = np.array([np.cos(angle), np.sin(angle)], np.float32).reshape(1, 1, 1, 2)
    value = jnp.full((1, 1, 1, 3), 2.0)
    for form in FORMS:
        close(form(query, key, value), value, 1e-3)


# Sums of 66 terms that are at most a small factor above the sum.
NEAR_ZERO = (64 + 2) * np.finfo(np.float32).eps


@pytest.mark.parametrize("spread", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("length", [1, 6, 60])
def test_rows_that_are_nearly_antiparallel_to_their_keys(length, spread):
    """1 + cos is as small as 6e-7, where a float32 cosine has no correct digit."""
    arrays = antiparallel(length, spread)
    wide = [x.astype(np.float64) for x in arrays]
    for form in FORMS:
        wanted = MECHANISM.oracle(*wide, causal=form is not cosine)
        close(form(*arrays), wanted, NEAR_ZERO)


def test_a_nearly_antiparallel_key_in_the_state_is_its_value():
    query, key, value = antiparallel(3, 0.001)
    mask = np.array([True, False, False]).reshape(1, 1, 1, 3)
    output = cosine_causal(query, key, value, mask, chunk_size=1)
    close(output, value[:, [0] * 3], 1e-6)


@pytest.mark.parametrize("length", [6, 60])
def test_gradients_of_nearly_antiparallel_rows(length):
    arrays = antiparallel(length, 0.01, heads=6)
    for form, causal in ((cosine, False), (cosine_causal, True)):
        single = laws.gradient(form, *arrays)
        with jax.enable_x64(True):
            wide = [x.astype(np.float64) for x in arrays]
            oracle = partial(MECHANISM.oracle, module=jnp, causal=causal)
            wanted = laws.gradient(oracle, *wide)
        for part, exact in zip(single, wanted, strict=True):
            close(part, exact, 1e-4)
