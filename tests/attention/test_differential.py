"""λ, and differential attention over mechanisms that have a state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import CHUNK, B, H, K, N, T, V, close
from score_laws import DIFFERENTIAL, LAMBDA, jitted, single

from symjax import attention

CAUSAL = {
    "cosine": (attention.cosine_causal, attention.cosine_step),
    "linear": (attention.linear_causal, attention.linear_step),
    "performer": (attention.performer_causal, attention.performer_step),
}


def test_lambda_initial_counts_layers_from_zero():
    values = [attention.lambda_initial(depth) for depth in (0, 1, 2)]
    np.testing.assert_allclose(values, [0.2, 0.3555, 0.4707], atol=5e-5)
    assert attention.lambda_initial(0) == pytest.approx(0.2, abs=1e-15)
    assert attention.lambda_initial(100) == pytest.approx(0.8)


def test_lambda_is_a_difference_of_exponentials_and_may_be_negative(x64):
    one, two, three, four = np.random.default_rng(0).normal(size=(4, H))
    wanted = np.exp(sum(one * two)) - np.exp(sum(three * four)) + 0.2
    lam = attention.differential_lambda(one, two, three, four, 0.2)
    np.testing.assert_allclose(lam, wanted, rtol=1e-14)
    assert attention.differential_lambda(0 * one, two, one, one, 0.2) < -0.5
    half = jnp.asarray(one, jnp.bfloat16)
    assert attention.differential_lambda(half, half, half, half, 0.2).dtype == "float32"


def test_lambda_is_a_number_an_array_or_one_a_head():
    query, key, value, _ = single(DIFFERENTIAL.arrays())
    by_head = attention.differential(query, key, value, np.full(N, 0.3, np.float32))
    for lam in (0.3, jnp.float32(0.3)):
        close(attention.differential(query, key, value, lam), by_head, 1e-6)


@pytest.mark.parametrize("causal, step", CAUSAL.values(), ids=CAUSAL)
def test_any_mechanism_runs_for_both_branches(causal, step, x64):
    """As two calls whose outputs are subtracted, and token by token with states."""
    query, key, value, lam = DIFFERENTIAL.arrays()
    attend = partial(causal, chunk_size=CHUNK, return_state=True)
    form = jitted(attention.differential, attend=attend)
    output, last = form(query, key, value, lam)
    one = causal(query[:, :, 0::2], key[:, :, 0::2], value)
    two = causal(query[:, :, 1::2], key[:, :, 1::2], value)
    close(output, one - lam[None, None, :, None] * two, 1e-11)
    past = [x[:, :-1] for x in (query, key, value)]
    _, state = jitted(attention.differential, attend=attend)(*past, lam)
    now = [x[:, -1:] for x in (query, key, value)]
    stepped, state = attention.differential(*now, lam, attend=partial(step, state))
    close(stepped, output[:, -1:], 1e-11)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
        close(a, b, 1e-11)


WRONG = {
    "odd_query_heads": ((B, T, 5, H), (B, T, 2 * K, H), (B, T, K, V), (), None),
    "single_keys": ((B, T, 2 * N, H), (B, T, K, H), (B, T, K, V), (), None),
    "groups": ((B, T, 8, H), (B, T, 2 * K, H), (B, T, K, V), (), None),
    "lambda": ((B, T, 2 * N, H), (B, T, 2 * K, H), (B, T, K, V), (K,), None),
    "sub_head_mask": (
        (B, T, 2 * N, H),
        (B, T, 2 * K, H),
        (B, T, K, V),
        (),
        (1, 2 * N, T, T),
    ),
}
NAMED = {
    "odd_query_heads": [0, 1, 2],
    "single_keys": [0, 1, 2],
    "groups": [0, 2],
    "lambda": [3],
    "sub_head_mask": [0, 4],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_named(name):
    shapes = WRONG[name]
    arrays = [np.ones(shape, np.float32) for shape in shapes[:4]]
    mask = None if shapes[4] is None else np.ones(shapes[4], bool)
    with pytest.raises(ValueError) as refusal:
        attention.differential(*arrays, mask=mask)
    for which in NAMED[name]:
        assert str(shapes[which]) in str(refusal.value)


def test_lambda_of_each_head_belongs_to_its_head():
    """A head with λ = 0 is its first branch alone; the others are not."""
    query, key, value, lam = single(DIFFERENTIAL.arrays())
    output = attention.differential(query, key, value, lam)
    first = attention.softmax(query[:, :, 0::2], key[:, :, 0::2], value)
    apart = np.abs(output - first).max(axis=(0, 1, 3)) > 1e-5
    np.testing.assert_array_equal(apart, LAMBDA != 0)
