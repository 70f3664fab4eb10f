"""Keys that are made from queries: symmetry, rank and size."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import B, H, N, T, V, close

from symjax import attention
from symjax.attention.scores.mechanism import row_map


def scores(query, key):
    """Return the scores of the engine before they become weights."""
    return row_map(lambda scores, visible: scores, query, key)


def queries(size=6):
    return np.random.default_rng(0).normal(size=(B, T, N, size))


def test_scores_are_symmetric_and_of_the_rank_of_a_head(x64):
    query = queries()
    plain = np.asarray(scores(query, attention.symmetric_key(query)))
    close(plain, plain.swapaxes(-1, -2), 1e-14)
    turned = attention.rotate(query, jnp.arange(T)[None])
    rotary = np.asarray(scores(turned, turned))
    close(rotary, rotary.swapaxes(-1, -2), 1e-14)
    assert np.abs(rotary - plain).max() > 1
    for product in (plain, rotary):
        assert (np.linalg.matrix_rank(product, tol=1e-9) == 6).all()
        assert (np.linalg.matrix_rank(np.exp(product), tol=1e-9) > 6).all()


def test_a_metric_gives_q_U_q_and_need_not_be_symmetric(x64):
    query = queries(H)
    metric = np.random.default_rng(1).normal(size=(N, H, H))
    product = np.asarray(scores(query, attention.symmetric_key(query, metric)))
    wanted = np.einsum("btnh,nhg,bsng->bnts", query, metric, query) / np.sqrt(H)
    close(product, wanted, 1e-13)
    assert np.abs(product - product.swapaxes(-1, -2)).max() > 1


def test_normalised_keys_have_length_one_or_the_root_of_the_size(x64):
    query = queries(H)
    unit = attention.symmetric_key(query, normalise="unit")
    close((unit**2).sum(-1), np.ones((B, T, N)), 1e-13)
    rms = attention.symmetric_key(query, normalise="rms")
    close((rms**2).mean(-1), np.ones((B, T, N)), 1e-4)
    close(rms / np.sqrt(H), unit, 1e-4)


@pytest.mark.parametrize("normalise", ["unit", "rms"])
def test_a_zero_query_has_a_zero_key_and_a_finite_gradient(normalise):
    def loss(query):
        return attention.symmetric_key(query, normalise=normalise).sum()

    zeros = jnp.zeros((B, T, N, H))
    assert not attention.symmetric_key(zeros, normalise=normalise).any()
    assert jnp.isfinite(jax.grad(loss)(zeros)).all()


def test_plain_keys_are_the_queries_and_any_mechanism_may_attend():
    query = queries(H).astype(np.float32)
    value = np.random.default_rng(2).normal(size=(B, T, N, V)).astype(np.float32)
    assert attention.symmetric_key(query) is query
    output = attention.symmetric(
        query, value, attend=attention.cosine_causal, chunk_size=8
    )
    close(output, attention.cosine_causal(query, query, value), 1e-5)


def test_a_differential_head_may_have_symmetric_branches(x64):
    """Each branch has its own keys: plain, pairwise, self-masked, normalised."""
    rng = np.random.default_rng(3)
    query, metric = rng.normal(size=(B, T, 2 * N, H)), rng.normal(size=(2 * N, H, H))
    value, lam = rng.normal(size=(B, T, N, V)), rng.normal(size=N)
    cases = [
        ({}, {"is_causal": True}),
        ({"metric": metric}, {"is_causal": True}),
        ({"metric": metric}, {"mask_self": True}),
        ({"normalise": "unit"}, {"mask_self": True, "is_causal": True}),
        ({"normalise": "rms"}, {"mask_self": True, "is_causal": True}),
    ]

    def outputs(query, value):
        keys = [attention.symmetric_key(query, **made) for made, _ in cases]
        return [
            attention.differential(query, key, value, lam, **options)
            for key, (_, options) in zip(keys, cases, strict=True)
        ]

    results = jax.jit(outputs)(query, value)
    for output, (made, options) in zip(results, cases, strict=True):
        key = oracles.symmetric_key(query, **made)
        pairs = oracles.visible(B, N, T, T, **options)
        close(output, oracles.differential(query, key, value, lam, pairs), 1e-13)


def test_wrong_shapes_and_names_are_named():
    query, value = np.ones((B, T, N, H)), np.ones((B, T, 2, V))
    with pytest.raises(ValueError) as refusal:
        attention.symmetric(query, value)
    assert str(query.shape) in str(refusal.value)
    assert str(value.shape) in str(refusal.value)
    with pytest.raises(ValueError) as refusal:
        attention.symmetric_key(query, np.ones((N, H, V)))
    assert str(query.shape) in str(refusal.value)
    assert str((N, H, V)) in str(refusal.value)
    with pytest.raises(ValueError, match="'length'.*unit, rms"):
        attention.symmetric_key(query, normalise="length")
    for query in (np.ones(H), np.ones((T, H)), np.ones((B, T, N, H), int)):
        with pytest.raises(ValueError, match="symmetric_key: query must be"):
            attention.symmetric_key(query, np.ones((N, H, H)))
    with pytest.raises(ValueError, match=r"got \(19, 5\), \(2, 19, 2, 7\)"):
        attention.symmetric(np.ones((T, H)), value)
