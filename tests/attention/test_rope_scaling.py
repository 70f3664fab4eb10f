"""Frequencies of RoPE for texts longer than those of training."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import B, N, T, close

from symjax import attention

SIZE, BASE = 24, 500.0
POSITIONS = np.stack([np.arange(T), np.arange(T) * 3 + 100])
KINDS = {
    "linear": ({"factor": 2.5}, {}),
    "yarn": ({"factor": 4.0, "original_length": 300}, {}),
    "yarn-ends": (
        {"factor": 3.0, "original_length": 90, "truncate": False},
        {"beta_fast": ("fast", 11.0), "beta_slow": ("slow", 1.5)},
    ),
    "llama3": ({"factor": 8.0, "original_length": 200}, {}),
    "llama3-ends": (
        {"factor": 32.0, "original_length": 150},
        {"low_frequency_factor": ("low", 0.7), "high_frequency_factor": ("high", 9.0)},
    ),
}


def both(name):
    """Return the options of the function, and those of its oracle."""
    kind, (options, renamed) = name.split("-")[0], KINDS[name]
    ours = options | {x: value for x, (_, value) in renamed.items()}
    return (kind, ours), (kind, options | dict(renamed.values()))


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_are_those_of_the_formulas(name):
    (kind, ours), (_, theirs) = both(name)
    found = attention.rope_frequencies(SIZE, BASE, kind, **ours)
    wanted = oracles.scaled_frequencies(kind, SIZE, BASE, **theirs)
    close(found, wanted, 1e-14)
    plain = attention.rope_frequencies(SIZE, BASE)
    close(plain, BASE ** (-np.arange(0, SIZE, 2) / SIZE), 1e-14)
    assert np.abs(np.log(found / plain)).max() > 0.9 * np.log(ours["factor"])
    if kind != "linear":
        assert found[0] == plain[0] and 0 < np.mean(found < plain) < 1


@pytest.mark.parametrize("length", [1, 40, 41, 100, 700])
def test_the_base_of_dynamic_grows_with_the_text(length, x64):
    options = {"factor": 3.0, "original_length": 40}
    found = attention.rope_frequencies(SIZE, BASE, "dynamic", length=length, **options)
    wanted = oracles.scaled_frequencies("dynamic", SIZE, BASE, length=length, **options)
    close(found, wanted, 1e-13)
    plain = attention.rope_frequencies(SIZE, BASE)
    assert (np.abs(found - plain).max() > 1e-4) == (length > 40)
    lengths = jnp.array([[length, 30], [90, length]])
    each = jax.jit(
        lambda x: attention.rope_frequencies(SIZE, BASE, "dynamic", length=x, **options)
    )(lengths)
    assert each.shape == (2, 2, SIZE // 2)
    close(each[0, 0], wanted, 1e-13)
    close(each[1, 1], wanted, 1e-13)
    close(each[0, 1], plain, 1e-13)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_pairs_turn_by_given_frequencies(interleaved, share, x64):
    """One for all tokens, or one per token; factor and share apply to rotated
    features."""
    size = SIZE * 2 if share == 0.5 else SIZE
    x = np.random.default_rng(0).normal(size=(B, T, N, size))
    draw = np.random.default_rng(1).uniform(0.1, 2, size=(B, T, SIZE // 2))
    factor = attention.rope_attention_factor(7.0)
    assert factor == pytest.approx(1 + 0.1 * np.log(7))
    for given in (draw, draw[:1, :1], draw[:, :1], draw[0, 0]):
        found = attention.rotate(
            x,
            POSITIONS,
            interleaved=interleaved,
            share=share,
            frequencies=given,
            attention_factor=factor,
        )
        half = SIZE // 2
        part = x[..., :SIZE]
        pairs = (
            part[..., ::2] + 1j * part[..., 1::2]
            if interleaved
            else part[..., :half] + 1j * part[..., half:]
        )
        angles = POSITIONS[..., None] * np.broadcast_to(given, (B, T, half))
        pairs = factor * pairs * np.exp(1j * angles)[:, :, None]
        order = np.stack if interleaved else np.concatenate
        wanted = order([pairs.real, pairs.imag], axis=-1).reshape(part.shape)
        close(found[..., :SIZE], wanted, 1e-12)
        np.testing.assert_array_equal(found[..., SIZE:], x[..., SIZE:])


@pytest.mark.parametrize(
    ("arguments", "options", "line"),
    [
        ((SIZE, BASE, "longrope"), {}, "kind 'longrope' is unknown: choose from none,"),
        ((SIZE, BASE, "linear"), {"factor": 0.5}, "factor must be at least 1, got 0.5"),
        ((SIZE, BASE, "yarn"), {"factor": 2.0}, "original_length must be at least 1"),
        ((2, BASE, "dynamic"), {"original_length": 9}, "needs at least 4 features"),
        ((SIZE, 1.0, "yarn"), {"original_length": 9}, "needs a base above 1, got 1.0"),
        (
            (SIZE, BASE, "llama3"),
            {"original_length": 9, "low_frequency_factor": 4.0},
            "low_frequency_factor must be above 0 and below high_frequency_factor 4.0",
        ),
        (
            (SIZE, BASE, "yarn"),
            {"original_length": 9, "beta_slow": 40.0},
            "beta_slow must be above 0 and below beta_fast 32.0, got 40.0",
        ),
    ],
)
def test_options_out_of_range_are_refused(arguments, options, line):
    with pytest.raises(ValueError, match=line):
        attention.rope_frequencies(*arguments, **options)


def test_frequencies_of_another_shape_are_refused():
    x = jnp.ones((B, T, N, SIZE))
    for shape in ((SIZE,), (B, T), (B, T, SIZE // 2 + 1), (B + 1, T, SIZE // 2)):
        with pytest.raises(ValueError, match=r"frequencies must be \(12,\) or"):
            attention.rotate(x, POSITIONS, frequencies=jnp.ones(shape))
    with pytest.raises(ValueError, match="attention_factor must be positive"):
        attention.rotate(x, POSITIONS, attention_factor=0.0)
