"""Sampling: tokens that may be drawn, the end of the loop, and compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.models import Decoder, generate
from symjax.models.generate import _draw, _likely, _read, _write

OPTIONS = config.Model(
    vocabulary=23, width=16, heads=2, depth=1, length=48, positions="rope"
)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model():
    return Decoder(OPTIONS, rngs=nnx.Rngs(0))


def prompts(rows, length, seed=0):
    return np.random.default_rng(seed).integers(0, 23, (rows, length), np.int32)


def compiled():
    return _read._cache_size() + _write._cache_size()


def kept(logits, top_k=0, top_p=1.0):
    """Return the tokens of each row that may be drawn."""
    found = np.asarray(_likely(jnp.asarray(logits), top_k, jnp.float32(top_p)))
    assert not np.isnan(found).any()
    return [set(np.flatnonzero(row > -np.inf)) for row in found]


def test_one_compilation_serves_a_range_of_lengths_counts_stops_and_batches(model):
    draws = {"temperature": 0.0}
    generate(model, prompts(2, 3), 5, KEY, **draws)
    before = compiled()
    for length, count in ((1, 4), (5, 7), (16, 48), (9, 55), (13, 2)):
        stop, rows = list(range(count % 3)), prompts(2, length)
        found = generate(model, rows, count, KEY, stop=stop, top_p=0.9)
        assert found.shape == (2, count)
        lengths = np.array([1, length])
        generate(model, rows, count, KEY, lengths=lengths, until=lambda _: False)
    assert compiled() == before
    generate(model, prompts(3, 3), 5, KEY)
    before = compiled()
    generate(model, prompts(4, 7), 5, KEY)
    assert compiled() == before


def test_learned_positions_end_between_two_powers_of_two():
    model = Decoder(
        config.Model(vocabulary=23, width=16, heads=2, depth=1, length=41),
        rngs=nnx.Rngs(0),
    )
    whole = generate(model, prompts(1, 33), 8, KEY, temperature=0)
    for count in (1, 7):
        part = generate(model, prompts(1, 33), count, KEY, temperature=0)
        np.testing.assert_array_equal(part, whole[:, :count])
    with pytest.raises(ValueError, match="prompt of 33 and 9 new tokens do not fit"):
        generate(model, prompts(1, 33), 9, KEY)


def test_a_row_with_its_own_key_is_the_same_in_any_batch(model):
    keys, rows = jax.random.split(KEY, 5), prompts(5, 11)
    lengths = np.array([11, 2, 7, 1, 5])
    together = generate(model, rows, 9, keys, lengths=lengths)
    for i in range(5):
        alone = generate(model, rows[i, -lengths[i] :][None], 9, keys[i])
        np.testing.assert_array_equal(together[i], alone[0])
    assert len({tuple(row) for row in np.asarray(together).tolist()}) == 5


def test_a_count_changes_no_draw(model):
    whole = generate(model, prompts(2, 5), 90, KEY)
    np.testing.assert_array_equal(generate(model, prompts(2, 5), 7, KEY), whole[:, :7])


def test_keys_that_fit_no_row_are_refused(model):
    with pytest.raises(ValueError, match=r"one for each of 3 rows, got \(2,\)"):
        generate(model, prompts(3, 5), 2, jax.random.split(KEY))


def test_keys_of_the_old_type_give_the_same_draws(model):
    old = generate(model, prompts(2, 5), 6, jax.random.PRNGKey(0))
    np.testing.assert_array_equal(old, generate(model, prompts(2, 5), 6, KEY))


def test_the_loop_ends_when_the_caller_has_seen_enough(model):
    seen, rows = [], prompts(3, 5)
    whole = np.asarray(generate(model, rows, 60, KEY))

    def enough(tokens):
        seen.append(tokens.shape)
        np.testing.assert_array_equal(tokens, whole[:, : tokens.shape[1]])
        return tokens.shape[1] >= 8

    found = np.asarray(generate(model, rows, 60, KEY, until=enough))
    assert seen == [(3, 1), (3, 2), (3, 4), (3, 8)]
    np.testing.assert_array_equal(found[:, :8], whole[:, :8])
    assert (found[:, 8:] == found[:, 7:8]).all()


def test_stop_tokens_end_the_loop_that_a_caller_watches(model):
    first = np.asarray(generate(model, prompts(1, 5), 1, KEY))[0, 0]
    seen = []
    stop = {"stop": [int(first)], "until": lambda tokens: seen.append(tokens.shape)}
    found = generate(model, prompts(1, 5), 60, KEY, **stop)
    assert len(seen) == 1 and set(np.asarray(found)[0]) == {first}


def test_generation_runs_inside_a_compiled_function(model):
    wanted = generate(model, prompts(2, 5), 6, KEY, temperature=0.7)

    @nnx.jit
    def inside(model, rows, temperature):
        return generate(model, rows, 6, KEY, temperature=temperature)

    found = inside(model, jnp.asarray(prompts(2, 5)), 0.7)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_top_k_keeps_exactly_k_and_of_equal_logits_the_first(dtype):
    rows = np.random.default_rng(0).standard_normal((4, 5000))
    logits = jnp.asarray(rows, dtype)
    for count in (1, 40, 4999):
        order = np.argsort(-np.asarray(logits, np.float64), axis=1, kind="stable")
        wanted = [set(row[:count]) for row in order]
        assert kept(logits, top_k=count) == wanted
    assert kept(np.zeros((1, 100)), top_k=1) == [{0}]
    assert kept(np.zeros((1, 9)), top_k=9) == kept(np.zeros((1, 9)), top_k=99)
    assert len(kept(np.zeros((1, 9)), top_k=99)[0]) == 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(dtype):
    rows = 3 * np.random.default_rng(1).standard_normal((4, 2000))
    logits = jnp.asarray(rows, dtype)
    exact = np.asarray(logits, np.float64)
    order = np.argsort(-exact, axis=1, kind="stable")
    chances = np.exp(exact) / np.exp(exact).sum(axis=1, keepdims=True)
    for share in (1e-30, 0.1, 0.5, 0.95):
        reached = np.cumsum(np.take_along_axis(chances, order, axis=1), axis=1)
        counts = 1 + (reached < share).sum(axis=1)
        wanted = [set(row[:n]) for row, n in zip(order, counts, strict=True)]
        assert kept(logits, top_p=share) == wanted


def test_top_p_of_equal_logits_takes_the_first():
    assert kept(np.zeros((1, 4)), top_p=0.5) == [{0, 1}]
    assert kept(np.zeros((1, 100)), top_p=0.3) == [set(range(30))]
    assert kept([[2.0, 3, 2, 3, 2]], top_p=0.7) == [{0, 1, 3}]


def test_top_p_is_of_the_tokens_that_top_k_keeps():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    assert kept(logits, top_p=0.5) == [{0, 1}]
    assert kept(logits, top_k=2, top_p=0.5) == [{0}]  # 0.4 of 0.7
    assert kept(logits, top_k=99, top_p=0.95) == [{0, 1, 2, 3}]


def test_tokens_of_probability_zero_are_never_kept():
    logits = [[-np.inf, 1, -np.inf, 0]]
    for sampling in ({"top_k": 3}, {"top_p": 0.9999}, {"top_k": 1}, {}):
        assert kept(logits, **sampling)[0] <= {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-30, 1e-40, 1e-46])
def test_a_temperature_near_0_takes_the_likeliest_token(temperature):
    logits = np.random.default_rng(2).standard_normal((50, 400))
    logits[:, :3] = [-np.inf, 7, 7]
    cold = jnp.float32(temperature), jnp.float32(1)
    for rows in (logits, 1e4 * logits, logits.astype(jnp.bfloat16)):
        drawn = _draw(jnp.asarray(rows, jnp.float32), KEY, 0, *cold)
        np.testing.assert_array_equal(drawn, np.ones(50))


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 3e38, np.inf])
def test_impossible_tokens_are_drawn_at_no_temperature(temperature):
    logits = np.full((400, 4), -np.inf)
    logits[:, 1:3] = [5e3, 4e3]
    drawn = _draw(jnp.asarray(logits), KEY, 0, jnp.float32(temperature), jnp.float32(1))
    assert set(np.asarray(drawn)) == ({1} if temperature <= 1 else {1, 2})
