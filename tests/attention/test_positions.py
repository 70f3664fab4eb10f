"""Rotary and sinusoidal positions, and linear biases."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import B, N, T, close, same

from symjax import attention

SIZE = 10
POSITIONS = np.stack([np.arange(T), np.arange(T) * 3 + 100])


def inputs(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, N, SIZE))


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_pairs_turn_as_complex_numbers(base, x64):
    x = inputs()
    wanted = oracles.rotate(x, POSITIONS, base)
    close(attention.rotate(x, POSITIONS, base), wanted, 1e-12)
    close(
        attention.rotate(x, POSITIONS[:1], base),
        oracles.rotate(x, POSITIONS[:1], base),
        1e-12,
    )


def test_a_product_depends_on_the_distance_alone(x64):
    query, key = inputs(0), inputs(1)

    def product(shift):
        turned = (attention.rotate(x, POSITIONS + shift) for x in (query, key))
        return np.einsum("btnh,bsnh->bnts", *turned)

    close(product(37), product(0), 1e-12)
    assert np.abs(product(0) - np.einsum("btnh,bsnh->bnts", query, key)).max() > 1


def test_lengths_are_kept_and_position_zero_changes_nothing(x64):
    x = inputs()
    turned = attention.rotate(x, POSITIONS)
    close((turned**2).sum(-1), (x**2).sum(-1), 1e-13)
    np.testing.assert_array_equal(turned[0, 0], x[0, 0])


def test_bfloat16_is_turned_in_float32():
    x = jnp.asarray(inputs(), jnp.bfloat16)
    turned = attention.rotate(x, POSITIONS + 5000)
    assert turned.dtype == jnp.bfloat16
    wanted = attention.rotate(x.astype(jnp.float32), POSITIONS + 5000)
    error = np.abs(np.asarray(turned, np.float32) - wanted)
    assert (error <= 2**-8 * np.abs(wanted) + 1e-6).all()


def test_both_conventions_turn_the_same_pairs(x64):
    """(2i, 2i + 1) and (i, i + H/2) differ only in the order of the features."""
    x = inputs()
    order = np.concatenate([np.arange(0, SIZE, 2), np.arange(1, SIZE, 2)])
    halves = attention.rotate(x[..., order], POSITIONS)
    interleaved = attention.rotate(x, POSITIONS, interleaved=True)
    close(interleaved[..., order], oracles.rotate(x[..., order], POSITIONS), 1e-12)
    same(interleaved[..., order], halves)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_share_turns_as_a_head_of_its_size_and_leaves_the_rest(interleaved):
    x = inputs().astype(np.float32)
    part = attention.rotate(x, POSITIONS, share=0.4, interleaved=interleaved)
    same(part[..., 4:], x[..., 4:])
    alone = attention.rotate(x[..., :4], POSITIONS, interleaved=interleaved)
    same(part[..., :4], alone)
    assert np.abs(part[:, 1:, :, :4] - x[:, 1:, :, :4]).max(axis=(0, 1, 2)).min() > 0.01


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_as_wide_as_the_lanes_turn_alike_where_there_is_no_tpu(interleaved):
    x = np.random.default_rng(4).normal(size=(1, T, 2, 128)).astype(np.float32)
    order = np.arange(128).reshape(2, -1).T.ravel() if interleaved else np.arange(128)
    wanted = oracles.rotate(x[..., np.argsort(order)], POSITIONS[:1])
    found = attention.rotate(x, POSITIONS[:1], interleaved=interleaved)
    close(found, wanted[..., order], 1e-5)


def test_odd_parts_of_a_head_are_refused():
    with pytest.raises(ValueError, match=r"even.*share 1.0 of \(2, 19, 6, 9\)"):
        attention.rotate(jnp.ones((B, T, N, 9)), POSITIONS)
    for share in (0.0, 0.3, 0.25, 1.2):
        with pytest.raises(ValueError, match=rf"even.*share {share} of .*, 10\)"):
            attention.rotate(jnp.ones((B, T, N, SIZE)), POSITIONS, share=share)


def test_sinusoids_alternate_between_sine_and_cosine(x64):
    waves = np.asarray(attention.sinusoidal(POSITIONS, 6, 500.0))
    assert waves.shape == (*POSITIONS.shape, 6)
    for i, angle in enumerate(500.0 ** (-2 * i / 6) * POSITIONS for i in range(3)):
        np.testing.assert_allclose(waves[..., 2 * i], np.sin(angle), atol=1e-12)
        np.testing.assert_allclose(waves[..., 2 * i + 1], np.cos(angle), atol=1e-12)
    with pytest.raises(ValueError, match="even.*7"):
        attention.sinusoidal(POSITIONS, 7)


def test_slopes_are_the_published_ones():
    """A geometric sequence for 8 heads; 12 heads add half of the slopes of 16."""
    eight = [2.0**-n for n in range(1, 9)]
    np.testing.assert_allclose(attention.alibi_slopes(8), eight, rtol=1e-6)
    twelve = [*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(attention.alibi_slopes(12), twelve, rtol=1e-6)
    np.testing.assert_allclose(attention.alibi_slopes(1), [2.0**-8], rtol=1e-6)
    with pytest.raises(ValueError, match="0"):
        attention.alibi_slopes(0)


def test_a_row_of_biases_is_enough_for_causal_attention(x64):
    """By the definition −m·(t − s), for softmax and sparsemax, with T ≠ S."""
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(B, 5, N, SIZE)), rng.normal(size=(B, T, N, SIZE))
    value, keys = rng.normal(size=(B, T, N, 7)), np.arange(T)
    slopes = attention.alibi_slopes(N)
    row = attention.alibi_bias(N, keys)
    whole = attention.alibi_bias(slopes, keys, keys[-5:])
    assert row.shape == (1, N, 1, T) and whole.shape == (1, N, 5, T)
    assert row.max() == 0 and not row[..., -1].any()
    for n, t, s in ((0, 0, 3), (5, 2, 18), (2, 4, 0)):
        assert whole[0, n, t, s] == -slopes[n] * abs(T - 5 + t - s)

    def outputs(bias):
        attends = attention.softmax, attention.sparsemax
        return [f(query, key, value, bias, is_causal=True) for f in attends]

    form = jax.jit(outputs)
    pairs = oracles.visible(B, N, 5, T, is_causal=True)
    wanted = oracles.softmax(query, key, value, pairs, bias=np.asarray(whole))
    for by_row, by_pair in zip(form(row), form(whole), strict=True):
        close(by_row, by_pair, 1e-13)
    close(form(row)[0], wanted, 1e-13)
    plain = attention.softmax(query, key, value, is_causal=True)
    assert np.abs(plain - wanted).max() > 0.1


def test_biases_need_plain_positions():
    with pytest.raises(ValueError, match=r"keys.*\(2, 19\)"):
        attention.alibi_bias(N, POSITIONS)
    with pytest.raises(ValueError, match=r"rows.*\(2, 19\)"):
        attention.alibi_bias(N, POSITIONS[0], POSITIONS)
    with pytest.raises(ValueError, match=r"slopes.*\(2, 2\)"):
        attention.alibi_bias(jnp.ones((2, 2)), POSITIONS[0])


def test_positions_that_are_not_those_of_the_tokens_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 4\) or \(1, 4\) .*got \(1, 3\)"):
        attention.rotate(jnp.ones((2, 4, 2, 4)), jnp.arange(3)[None])


def test_alibi_takes_any_integer_for_the_number_of_heads():
    keys = np.arange(5)
    wanted = attention.alibi_bias(8, keys)
    np.testing.assert_array_equal(attention.alibi_bias(np.int64(8), keys), wanted)
