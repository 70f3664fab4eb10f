"""λ, and differential attention over mechanisms with a state."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import CHUNK, B, H, K, N, S, T, V, close, hiding, same
from score_laws import (
    DEFINITIONS,
    DIFFERENTIAL,
    LAMBDA,
    every_close,
    every_option,
    grading,
    jitted,
    single,
)

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


PROJECTION = np.random.default_rng(7).normal(size=(9, H))


def _scored(definition):
    def single_map(query, key, value, mask):
        shape = B, query.shape[2], query.shape[1], key.shape[1]
        return definition(query, key, value, np.broadcast_to(mask, shape))

    return single_map


def _products(products):
    def single_map(query, key, value, mask):
        return oracles.weighted_mean(*products(query, key), value, mask)

    return single_map


def _features(define):
    return _products(lambda *pair: oracles.feature_products(*map(define, pair)))


# A mechanism, and the definition of one map: (query, key, value, mask).
ANY = {
    "softmax": (attention.softmax, _scored(oracles.softmax)),
    "sparsemax": (attention.sparsemax, _scored(oracles.sparsemax)),
    "cosine": (attention.cosine, _features(oracles.cosine_features)),
    "linear": (
        attention.linear,
        _features(lambda x: np.where(x > 0, x + 1, np.exp(x))),
    ),
    "performer": (
        partial(attention.performer, projection=PROJECTION),
        _products(partial(oracles.performer_products, projection=PROJECTION)),
    ),
}


@pytest.mark.parametrize("attend, single_map", ANY.values(), ids=ANY)
def test_any_attention_is_the_difference_of_its_two_maps(attend, single_map, x64):
    """V1 and V2, with grouped heads, hidden keys, and more keys than queries."""
    *first, lam = DIFFERENTIAL.arrays(keys=S)
    *second, by_token = DEFINITIONS["differential_v2"].arrays(keys=S, seed=1)
    mask = hiding(S)

    def both(first, second):
        options = {"attend": attend, "mask": mask}
        return (
            attention.differential(*first, lam, **options),
            attention.differential_v2(*second, by_token, **options),
        )

    one, two = jax.jit(both)(first, second)
    query, key, value = first
    maps = [single_map(query[:, :, b::2], key[:, :, b::2], value, mask) for b in (0, 1)]
    close(one, maps[0] - lam[None, None, :, None] * maps[1], 1e-12)
    outputs = single_map(*second, mask)
    close(two, outputs[:, :, 0::2] - by_token[..., None] * outputs[:, :, 1::2], 1e-12)


def test_options_bound_to_a_mechanism_are_kept():
    """In one pass over both maps, too; a mask per head applies to both branches."""
    query, key, value, lam = single(DIFFERENTIAL.arrays())
    mask = np.random.default_rng(2).random((B, N, T, T)) < 0.7
    options = {"scale": 0.2, "mask": mask, "is_causal": True}
    bound = partial(attention.softmax, **options)

    def outputs(*arrays):
        return (
            attention.differential(*arrays, **options),
            attention.differential(*arrays, attend=bound),
            attention.differential(*arrays, attend=bound, scale=0.9),
            attention.differential(*arrays, **options | {"scale": 0.9}),
        )

    free, kept, called, wanted = jax.jit(outputs)(query, key, value, lam)
    same(kept, free)
    same(called, wanted)
    assert np.abs(called - kept).max() > 0.1


def test_the_second_version_runs_over_outputs_with_states_and_gradients(x64):
    """Over a mechanism that returns (output, state), and over one without row
    weights."""
    arrays = DEFINITIONS["differential_v2"].arrays()
    attend = partial(attention.linear_causal, chunk_size=CHUNK, return_state=True)
    output, last = jitted(attention.differential_v2, attend=attend)(*arrays)
    query, key, value, lam = arrays
    both, wanted = attention.linear_causal(query, key, value, return_state=True)
    both = np.asarray(both)
    close(output, both[:, :, 0::2] - lam[..., None] * both[:, :, 1::2], 1e-12)
    close(last.sums, wanted.sums, 1e-12)

    def unknown(*arrays, **options):
        return attention.softmax(*arrays, **options)

    options = every_option()
    outputs = grading(attention.differential_v2, 4, attend=unknown, **options)(*arrays)
    fused = grading(attention.differential_v2, 4, **options)(*arrays)
    close(outputs[0], fused[0], 1e-13)
    every_close(outputs[1], fused[1], 1e-12)


@pytest.mark.parametrize("causal, step", CAUSAL.values(), ids=CAUSAL)
def test_any_mechanism_runs_for_both_branches(causal, step, x64):
    """Two calls with subtracted outputs, and token by token with states."""
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


PAIRS = {  # shapes of query, key, value, λ, mask; which ones the message names
    "odd": ((B, T, 5, H), (B, T, 1, H), (B, T, 1, V), (B, T, 2), None, (0, 1)),
    "split_pair": ((B, T, 6, H), (B, T, 2, H), (B, T, 2, V), (B, T, 3), None, (0, 1)),
    "branches": ((B, T, 12, H), (B, T, 6, H), (B, T, 3, V), (B, T, 6), None, (1, 2)),
    "lambda": ((B, T, 12, H), (B, T, 3, H), (B, T, 3, V), (6,), None, (0, 3)),
    "mask": ((B, T, 12, H), (B, T, 3, H), (B, T, 3, V), (B, T, 6), (1, 12, T, T), (4,)),
}


@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_wrong_shapes_of_the_second_version_are_named(case):
    *shapes, mask, named = case
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    with pytest.raises(ValueError) as refusal:
        mask = None if mask is None else np.ones(mask, bool)
        attention.differential_v2(*arrays, mask=mask)
    for which in named:
        assert str(case[which]) in str(refusal.value)


@pytest.mark.parametrize("name, shape", [("mask", (1, 2 * N, T, T)), ("alibi", (K,))])
def test_an_option_of_each_head_has_as_many_heads_as_the_output(name, shape):
    """With a mechanism without row weights, too, which runs for both branches."""

    def unknown(*arrays, **options):
        return attention.softmax(*arrays, **options)

    arrays, option = single(DIFFERENTIAL.arrays()), np.ones(shape, bool)
    with pytest.raises(ValueError, match=rf"{name} must have one head or {N}, as many"):
        attention.differential(*arrays, attend=unknown, **{name: option})


def test_lambda_of_each_head_belongs_to_its_head():
    """A head with λ = 0 is its first branch alone; other heads are not."""
    query, key, value, lam = single(DIFFERENTIAL.arrays())
    output = attention.differential(query, key, value, lam)
    first = attention.softmax(query[:, :, 0::2], key[:, :, 0::2], value)
    apart = np.abs(output - first).max(axis=(0, 1, 3)) > 1e-5
    np.testing.assert_array_equal(apart, LAMBDA != 0)


# Shapes of query, key and value. 12 heads in groups of 3 have 4 noise heads.
GROUPS = {
    "no_group": ((B, T, 15, H), (B, T, 8, H), (B, T, 4, V)),
    "noise_keys": ((B, T, 16, H), (B, T, 7, H), (B, T, 4, V)),
    "split_values": ((B, T, 16, H), (B, T, 6, H), (B, T, 3, V)),
    "values": ((B, T, 16, H), (B, T, 12, H), (B, T, 8, V)),
}


@pytest.mark.parametrize("shapes", GROUPS.values(), ids=GROUPS)
def test_heads_that_are_no_groups_are_refused(shapes):
    query, key, value = (np.ones(shape, np.float32) for shape in shapes)
    named = ".*".join(map(re.escape, map(str, shapes)))
    with pytest.raises(ValueError, match=f"differential: .*{named}"):
        attention.differential(query, key, value, 0.5, signals=3)
    with pytest.raises(ValueError, match=f"softmax: .*{named}"):
        lam = np.full((1, 1, 1), 0.5, np.float32)
        attention.softmax(query, key, value, lam=lam, signals=3)


def test_a_group_has_one_mask_and_a_whole_number_of_signals():
    query, key, value = single(DEFINITIONS["grouped"].arrays())[:3]
    by_head = np.ones((1, 2 * N, T, T), bool)
    with pytest.raises(ValueError, match=rf"mask must broadcast to \({B}, {N}, "):
        attention.differential(query, key, value, 0.5, signals=2, mask=by_head)
    with pytest.raises(ValueError, match="signals 2 needs lam, got None"):
        attention.softmax(query, key, value, signals=2)
    with pytest.raises(ValueError, match="signals must be an int, got 2.0"):
        attention.differential(query, key, value, 0.5, signals=2.0)


def test_grouped_linear_attention_has_a_state_for_each_signal_head(x64):
    """It is what V1 is with the noise repeated, whole and token by token."""
    query, key, value, lam = DEFINITIONS["grouped_keys"].arrays()
    signal = [x.reshape(B, T, N, 3, H)[:, :, :, :2] for x in (query, key)]
    noise = [x.reshape(B, T, N, 3, H)[:, :, :, 2:].repeat(2, 3) for x in (query, key)]
    one, two = (
        attention.linear_causal(*(x.reshape(B, T, 2 * N, H) for x in pair), value)
        for pair in (signal, noise)
    )
    attend = partial(attention.linear_causal, chunk_size=CHUNK, return_state=True)
    form = jitted(attention.differential, attend=attend, signals=2)
    output, last = form(query, key, value, lam)
    close(output, one - lam[None, None, :, None] * two, 1e-11)
    _, state = form(*(x[:, :-1] for x in (query, key, value)), lam)
    attend, now = partial(attention.linear_step, state), (query, key, value)
    stepped, state = attention.differential(
        *(x[:, -1:] for x in now), lam, attend=attend, signals=2
    )
    close(stepped, output[:, -1:], 1e-11)
    close(state.sums, last.sums, 1e-11)


def test_gates_and_sinks_are_those_of_repeated_noise_heads(x64):
    """The gates of signal and noise keys, and a sink for each noise head."""
    query, key, value, lam = DEFINITIONS["grouped_keys"].arrays()
    rng = np.random.default_rng(3)
    log_decay, sink = -np.exp(rng.normal(size=(B, T, 3 * N))), rng.normal(size=N)

    def pairs(x):
        groups = x.reshape(B, T, N, 3, *x.shape[3:])
        noise = np.broadcast_to(groups[:, :, :, 2:], groups[:, :, :, :2].shape)
        return np.stack([groups[:, :, :, :2], noise], 4).reshape(
            B, T, 4 * N, *x.shape[3:]
        )

    shared = {"log_decay": log_decay, "sink": sink, "is_causal": True}
    found = jitted(attention.differential, signals=2, **shared)(query, key, value, lam)
    alone = {"log_decay": pairs(log_decay), "sink": sink.repeat(2), "is_causal": True}
    wanted = jitted(attention.differential, **alone)(
        pairs(query), pairs(key), value, lam
    )
    close(found, wanted, 1e-12)


def test_vectors_of_lambda_of_different_lengths_are_refused():
    one, other = np.ones(3), np.ones(4)
    with pytest.raises(ValueError, match=r"one length.*\(3,\), \(4,\)"):
        attention.differential_lambda(one, other, one, one, 0.2)


def test_layers_count_from_zero():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        attention.lambda_initial(-1)


def test_a_query_without_heads_is_refused():
    arrays = np.ones((2, 4)), np.ones((2, 5, 2, 4)), np.ones((2, 5, 1, 4))
    with pytest.raises(ValueError, match=r"got \(2, 4\), \(2, 5, 2, 4\)"):
        attention.differential(*arrays, 0.5)
    with pytest.raises(ValueError, match=r"got \(2, 4\), \(2, 5, 2, 4\)"):
        attention.differential_v2(*arrays, 0.5)
