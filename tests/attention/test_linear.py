"""Linear attention with plain features, and the engine under it."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import close, inputs, run

from symjax.attention.linear import linear, linear_causal, linear_state, linear_step


def by_sign(x, module):
    """A user's own features; both signs occur, so denominators may vanish."""
    return module.concatenate([module.tanh(x), module.ones_like(x[..., :1]) * 4], -1)


DEFINITIONS = {
    "elu": lambda x, module: module.where(x > 0, x + 1, module.exp(x)),
    "relu": lambda x, module: module.maximum(x, 0),
    "relu2": lambda x, module: module.maximum(x, 0) ** 2,
    "function": by_sign,
}


def mechanism(name):
    define = DEFINITIONS[name]
    features = partial(by_sign, module=jnp) if name == "function" else name

    def products(query, key, module=np):
        pair = define(query, module), define(key, module)
        return oracles.feature_products(*pair, module)

    forms = (linear, linear_causal, linear_step, linear_state)
    return laws.Mechanism.of(forms, products, features=features)


def polynomial(name, weigh):
    """Features by name, weights by the polynomial of the score."""

    def products(query, key, module=np):
        key = module.repeat(key, query.shape[2] // key.shape[2], axis=2)
        scores = module.einsum("btnh,bsnh->bnts", query, key) * laws.H**-0.5
        return module.log(weigh(scores)), 1.0

    forms = (linear, linear_causal, linear_step, linear_state)
    return laws.Mechanism.of(forms, products, features=name)


POLYNOMIALS = {
    "squared": polynomial("squared", lambda s: s**2),
    "taylor": polynomial("taylor", lambda s: 1 + s + s**2 / 2),
}
ELU = mechanism("elu")


@laws.every_law
def test_elu_obeys(law):
    law(ELU)


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name != "elu"])
def test_other_features_equal_their_definition(name):
    laws.it_equals_its_definition(mechanism(name))


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials_of_scores_equal_their_definition(name):
    laws.it_equals_its_definition(POLYNOMIALS[name])


@pytest.mark.parametrize("name, size", [("squared", 1), ("taylor", 5)])
def test_weights_that_cancel_are_sums_of_pairs(name, size):
    """(q·k)² of 2080 features that change sign; one key is returned as it is."""
    rng = np.random.default_rng(0)
    sizes = (64, size), (64, size), (3, 1)
    wide = [rng.normal(size=(1, 4, 256, n)) * scale for n, scale in sizes]
    query, key, value = (x.astype(np.float32) for x in wide)
    form = partial(linear, features=name)
    close(form(query, key[:, :1], value[:, :1]), value[:, [0] * 4], 1e-6)
    state = linear_state(1, 256, 64, 3, features=name)
    wanted = run(form, query, key, value)[:, -1:]
    for t in range(4):
        now = (x[:, t : t + 1] for x in (query, key, value))
        output, state = linear_step(state, *now, features=name)
        if t == 0:
            close(output, value[:, :1], 1e-6)
    close(output, wanted, 2e-4)


def test_a_function_is_the_same_stepwise():
    laws.a_prefill_goes_on_in_chunks_and_steps(mechanism("function"))


def test_a_learned_function_takes_no_gradient_from_hidden_keys():
    """Not even from NaN: the function sees 0 there."""
    query, key, value = (jnp.asarray(x, jnp.float32) for x in inputs())
    mask = laws.hiding(laws.T)
    hidden = ~mask[:, 0, 0]
    bad = key.at[hidden].set(jnp.nan)

    def total(scale, key, form):
        options = {"features": lambda x: jnp.exp(scale * x)}
        return form(query, key, value, mask, **options).sum()

    for form in (linear, linear_causal):
        wanted = jax.grad(total)(0.7, key, form)
        assert np.isfinite(wanted) and wanted != 0
        np.testing.assert_array_equal(jax.grad(total)(0.7, bad, form), wanted)


def test_identity_takes_given_features(x64):
    query, key, value = inputs()
    given = linear_causal(np.exp(query), np.exp(key), value, features="identity")
    close(given, linear_causal(query, key, value, features=jnp.exp), 1e-12)


def test_unknown_features_list_the_known():
    with pytest.raises(
        ValueError, match="'gelu'.*elu, identity, relu, relu2, squared, taylor"
    ):
        linear(*inputs(), features="gelu")


@pytest.mark.parametrize("scale", [1e-4, 1e-9, 1e9])
def test_the_size_of_features_does_not_matter(scale):
    """relu² of 1e-9 is 1e-18, and its products 1e-36: no absolute ε may meet them."""
    query, key, value = (x.astype(np.float32) for x in inputs())
    query, key = np.abs(query), np.abs(key)
    form = partial(linear_causal, features="relu2", chunk_size=8)
    close(form(query * scale, key * scale, value), form(query, key, value), 1e-5)
    small = laws.gradient(form, query * scale, key * scale, value)
    for one, two in zip(small, laws.gradient(form, query, key, value), strict=True):
        ratio = np.abs(np.asarray(one, np.float64)).max() / np.abs(two).max()
        close(one / np.float32(ratio), two, 1e-4)


def test_features_that_cancel_give_zero_and_not_noise():
    """1 and −1 but for two units in the last place: no row can be told from that."""
    key = np.array([1, -1 - 2.0**-22], np.float32).reshape(1, 2, 1, 1)
    query, value = np.ones_like(key), np.ones((1, 2, 1, 2), np.float32)
    output = np.asarray(linear_causal(query, key, value, features="identity"))
    close(output[:, :1], value[:, :1], 1e-6)
    laws.same(output[:, 1], np.zeros((1, 1, 2)))


def test_elu_keeps_its_tail():
    """eˣ − 1 + 1 is 0 in float32 from x = −17 on; the weights here are 2:1."""
    key = np.array([-30, -30 - np.log(2)], np.float32).reshape(1, 2, 1, 1)
    value = np.array([3, 0], np.float32).reshape(1, 2, 1, 1)
    close(linear(key[:, :1], key, value), np.full((1, 1, 1, 1), 2.0), 1e-5)


def test_sums_do_not_saturate():
    """1 + 1 + … stops at 256 in bfloat16; the state counts on."""
    ones = jnp.ones((1, 600, 1, 1), jnp.bfloat16)
    options = dict(features="identity", return_state=True)
    _, state = linear_causal(ones, ones, ones, **options)
    assert state.total.item() == 600 and state.sums.item() == 600


def test_early_gradients_are_exact_when_late_keys_are_huge(x64):
    """A backward pass that subtracts prefixes loses 2e-3 here (float32)."""
    rng = np.random.default_rng(0)
    shapes = [(1, 512, 1, 8)] * 3
    query, key, value = (np.abs(rng.normal(size=shape)) for shape in shapes)
    key[:, 384:] *= 1e4
    form = partial(linear_causal, features="relu")
    wanted = laws.gradient(form, query, key, value)[0][:, :64]
    single = [x.astype(np.float32) for x in (query, key, value)]
    close(laws.gradient(form, *single)[0][:, :64], wanted, 1e-5)


def test_a_state_goes_through_jit_and_scan():
    query, key, value = (x.astype(np.float32) for x in inputs())
    state = linear_state(laws.B, laws.K, laws.H, laws.V)

    def body(state, now):
        output, state = linear_step(state, *(x[:, None] for x in now))
        return state, output[:, 0]

    times = [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (query, key, value)]
    _, outputs = jax.jit(lambda *x: jax.lax.scan(body, state, x))(*times)
    wanted = linear_causal(query, key, value)
    close(jnp.moveaxis(outputs, 0, 1), wanted, 2e-6)
