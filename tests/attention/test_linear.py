"""Linear attention with fixed features, and the engine of recurrences."""

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
    """Features of a user, with both signs, so that denominators may vanish."""
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
    """Features by name, with weights that are a polynomial of the score."""

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
    """(q·k)² of 2080 features with both signs; a single key returns its value."""
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


def many_heads(name, length, heads=1000, seed=1):
    """Draw entries of size 1 (squared) or 5 (taylor), head size 64, in float32."""
    rng = np.random.default_rng(seed)
    size = 5 if name == "taylor" else 1
    sizes = (64, size), (64, size), (3, 1)
    wide = [rng.normal(size=(1, length, heads, n)) * scale for n, scale in sizes]
    return [x.astype(np.float32) for x in wide]


# A mean over one key divides two sums of 64 products, which round by at most 2⁻²⁴ a
# term.
ONE_KEY = 2 * (64 + 2) * 2.0**-24


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_one_key_is_its_value_in_every_form(name):
    """Even with tiny weights: for some of 1,000 heads q·k is 1e-3 |q||k| / √H."""
    query, key, value = many_heads(name, 3)
    first = np.array([True, False, False]).reshape(1, 1, 1, 3)
    wanted = value[:, [0] * 3].astype(np.float64)
    limit = ONE_KEY * np.abs(wanted)
    options = dict(features=name)
    outputs = [
        linear(query, key[:, :1], value[:, :1], **options),
        linear(query, key, value, first, **options),
        linear(query, key, value, first, segment_ids=np.zeros((1, 3), int), **options),
    ]
    for chunk_size in (1, 2, 64):
        sizes = dict(chunk_size=chunk_size, **options)
        outputs.append(linear_causal(query, key, value, first, **sizes))
    for output in outputs:
        assert (np.abs(np.asarray(output) - wanted) <= limit).all()
    state = linear_state(1, 1000, 64, 3, **options)
    now = [x[:, :1] for x in (query, key, value)]
    output, state = linear_step(state, *now, **options)
    assert (np.abs(np.asarray(output) - wanted[:, :1]) <= limit[:, :1]).all()
    query, key, value = many_heads(
        name, 80, heads=50
    )  # by sums of features, not by pairs
    alone = (np.arange(80) == 7).reshape(1, 1, 1, 80)
    output = np.asarray(linear(query[:, :9], key, value, alone, **options))
    assert (np.abs(output - value[:, [7] * 9]) <= ONE_KEY * np.abs(value[:, [7]])).all()


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_steps_equal_the_definition_as_far_as_a_state_can_tell(name):
    """The state adds an error of at most ε|φ(q)|Σ|φ(k)|, as the docstring says."""
    query, key, value = many_heads(name, 6)
    scores = np.einsum("btnh,bsnh->bnts", *(x.astype(np.float64) for x in (query, key)))
    squares = [np.square(x, dtype=np.float64).sum(-1) for x in (query, key)]
    norms = np.einsum("btn,bsn->bnts", *squares)
    weights, sizes = scores**2, norms
    if name == "taylor":
        weights, sizes = ((1 + scores / 8) ** 2 + 1) / 2, (1 + norms**0.5 / 8) ** 2 / 2
    weights, past = np.tril(weights), np.tril(sizes, -1)
    own = 2 * np.sqrt(weights * sizes) * np.eye(6)  # of a pair, by the error of q·k
    total = weights.sum(-1)
    wanted = np.einsum("bnts,bsnv->btnv", weights / total[..., None], value)
    limit = np.finfo(np.float32).eps * ((past + own).sum(-1) / total + 3)
    limit = np.moveaxis(limit, 1, 2)[..., None] * np.abs(value).max()
    state, outputs = linear_state(1, 1000, 64, 3, features=name), []
    for t in range(6):
        now = (x[:, t : t + 1] for x in (query, key, value))
        output, state = linear_step(state, *now, features=name)
        outputs.append(np.asarray(output))
    steps = np.concatenate(outputs, axis=1)
    assert (np.abs(steps - wanted) <= limit).all()
    close(steps, run(linear_causal, query, key, value, features=name), 1e-4)


def test_keys_that_a_state_cannot_tell_from_orthogonal_give_their_mean():
    """(q·k)² is 0 twice: the result is the mean of values weighted by |k|², 2 and 8."""
    query = np.array([1, -1], np.float32).reshape(1, 1, 1, 2).repeat(3, axis=1)
    key = np.array([[1, 1], [2, 2], [5, 3]], np.float32).reshape(1, 3, 1, 2)
    value = np.array([5, 10, 77], np.float32).reshape(1, 3, 1, 1)
    mask = np.array([True, True, False]).reshape(1, 1, 1, 3)
    form = partial(linear_causal, features="squared", chunk_size=2)
    close(form(query, key, value, mask)[:, 2:], np.full((1, 1, 1, 1), 9.0), 1e-6)
    gradients = laws.gradient(form, query, key, value, mask)
    assert all(np.isfinite(part).all() for part in gradients)


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_gradients_of_polynomials_equal_those_of_the_definition(name):
    laws.gradients_equal_those_of_the_definition(POLYNOMIALS[name])


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_gradients_of_one_key_are_those_of_its_value(name):
    """Chunks of one token: rows after the first read the key from the state."""
    query, key, value = many_heads(name, 2)
    mask = np.array([True, False]).reshape(1, 1, 1, 2)
    form = partial(linear_causal, features=name, chunk_size=1)
    gradients = laws.gradient(form, query, key, value, mask)
    assert all(np.isfinite(part).all() for part in gradients)
    weigh = np.random.default_rng(1).normal(size=value.shape)
    scores = np.einsum("bnh,bnh->bn", query[:, 1], key[:, 0])
    usual = np.abs(scores) > 0.1 * np.abs(scores).max()
    error = np.abs(gradients[2][:, 0] - weigh.sum(axis=1))
    assert error[usual].max() < 1e-4


def test_a_function_is_the_same_stepwise():
    laws.a_prefill_goes_on_in_chunks_and_steps(mechanism("function"))


def test_a_learned_function_takes_no_gradient_from_hidden_keys():
    """Not even from NaN, because the function gets 0 for hidden keys."""
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
    """relu² of 1e-9 is 1e-18 and products are 1e-36: an absolute ε would show."""
    query, key, value = (x.astype(np.float32) for x in inputs())
    query, key = np.abs(query), np.abs(key)
    form = partial(linear_causal, features="relu2", chunk_size=8)
    close(form(query * scale, key * scale, value), form(query, key, value), 1e-5)
    small = laws.gradient(form, query * scale, key * scale, value)
    for one, two in zip(small, laws.gradient(form, query, key, value), strict=True):
        ratio = np.abs(np.asarray(one, np.float64)).max() / np.abs(two).max()
        close(one / np.float32(ratio), two, 1e-4)


@pytest.mark.parametrize("features", ["relu2", "squared"])
@pytest.mark.parametrize("scale", [1e-17, 1e15])
def test_squares_hold_in_the_range_that_is_documented(features, scale):
    query, key, value = (x.astype(np.float32) for x in inputs())
    query, key = np.abs(query), np.abs(key)
    found = linear_causal(query * scale, key * scale, value, features=features)
    close(found, linear_causal(query, key, value, features=features), 1e-4)


def test_features_that_cancel_give_zero_and_not_noise():
    """1 and −1 up to two units in the last place: the row cannot be told from 0."""
    key = np.array([1, -1 - 2.0**-22], np.float32).reshape(1, 2, 1, 1)
    query, value = np.ones_like(key), np.ones((1, 2, 1, 2), np.float32)
    output = np.asarray(linear_causal(query, key, value, features="identity"))
    close(output[:, :1], value[:, :1], 1e-6)
    laws.same(output[:, 1], np.zeros((1, 1, 2)))


def test_elu_keeps_its_tail():
    """In float32 eˣ − 1 + 1 is 0 below x = −17; the weights here are 2:1."""
    key = np.array([-30, -30 - np.log(2)], np.float32).reshape(1, 2, 1, 1)
    value = np.array([3, 0], np.float32).reshape(1, 2, 1, 1)
    close(linear(key[:, :1], key, value), np.full((1, 1, 1, 1), 2.0), 1e-5)


def test_sums_do_not_saturate():
    """In bfloat16 1 + 1 + … stops at 256; the state continues."""
    ones = jnp.ones((1, 600, 1, 1), jnp.bfloat16)
    options = dict(features="identity", return_state=True)
    _, state = linear_causal(ones, ones, ones, **options)
    assert state.total.item() == 600 and state.sums.item() == 600


def test_early_gradients_are_exact_when_late_keys_are_huge(x64):
    """A backward pass that subtracts prefix sums would be off by 2e-3 in float32."""
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
