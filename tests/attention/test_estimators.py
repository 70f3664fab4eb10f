"""Random features as estimators: no bias, and variances within bounds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.favor import apply_statistics, favor_statistics
from symjax.attention.performer import performer
from symjax.attention.random_features import RANDOM_FEATURES, orthogonal_projection

ESTIMATORS = sorted(set(RANDOM_FEATURES) - {"relu", "slay"})


def projections(count, rows, size, **options):
    def draw(key):
        return orthogonal_projection(key, rows, size, **options)

    return jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), count))


# exp(q·k) alone: five pairs of normal vectors, standard deviation 0.5, and 4000
# projections of 16 rows.
DRAWS, ROWS, SIZE = 4000, 16, 8
PAIRS = np.random.default_rng(0).normal(size=(2, 5, SIZE)).astype(np.float32) * 0.5
EXACT = np.exp((PAIRS[0] * PAIRS[1]).sum(axis=-1) * SIZE**-0.5)


def statistics(features, sample):
    """Fit statistics to another sample; None for features without statistics."""
    if not features.startswith("favor"):
        return None
    return favor_statistics(*sample.reshape(2, -1, sample.shape[-1]), kind=features)


def estimate(features, rows):
    """Return φ(q)·φ(k) with all factors that attention may leave out."""
    query, key = PAIRS
    scale, sign, factor = SIZE**-0.5, -1, 1 / ROWS
    draw = FeatureParameters(rows, jnp.asarray(scale))
    if features == "hyperbolic":
        factor /= 2
    if features == "trigonometric":
        sign = 1
    sample = np.random.default_rng(1).normal(size=(2, 99, SIZE)).astype(np.float32)
    learned = statistics(features, sample * 0.5)
    if learned is not None:
        moved, offset = apply_statistics(rows, learned)
        draw = FeatureParameters(moved, draw.scale, offset)
        factor *= jnp.prod(1 - 4 * learned.a) ** 0.5
    maps = RANDOM_FEATURES[features]
    products = maps.query(query, draw).weights() * maps.key(key, draw).weights()
    left_out = jnp.exp(0.5 * sign * scale * (query * query).sum(axis=-1))
    return factor * left_out * products.sum(axis=-1)


@pytest.fixture(scope="module")
def estimates():
    """Return the estimates [DRAWS, pairs] of each estimator and kind of projection."""

    @jax.jit
    def every(rows):
        return {name: jax.vmap(partial(estimate, name))(rows) for name in ESTIMATORS}

    kinds = {
        "orthogonal": projections(DRAWS, ROWS, SIZE),
        "independent": jax.random.normal(jax.random.key(1), (DRAWS, ROWS, SIZE)),
        "constant": projections(DRAWS, ROWS, SIZE, norms="constant"),
    }
    return {
        kind: jax.tree.map(lambda x: np.asarray(x, np.float64), every(rows))
        for kind, rows in kinds.items()
    }


def bias(draws):
    """Return the bias of the mean in standard errors."""
    return np.abs(draws.mean(axis=0) - EXACT) * len(draws) ** 0.5 / draws.std(axis=0)


@pytest.mark.parametrize("kind", ["orthogonal", "independent"])
def test_estimates_are_unbiased(estimates, kind):
    for features, draws in estimates[kind].items():
        assert bias(draws).max() < 4, features
        assert (draws.std(axis=0) < EXACT).all(), features


def test_orthogonal_rows_have_less_variance(estimates):
    for features in ESTIMATORS:
        variances = (
            estimates[kind][features].var(axis=0)
            for kind in ("orthogonal", "independent")
        )
        orthogonal, independent = variances
        assert (orthogonal / independent).mean() < 0.9, features


def test_hyperbolic_and_favor_features_have_less_variance(estimates):
    """Hyperbolic features have the same rows, and twice as many features."""
    variance = {
        name: (draws.var(axis=0) / EXACT**2).mean()
        for name, draws in estimates["orthogonal"].items()
    }
    assert variance["hyperbolic"] < 0.5 * variance["positive"]
    assert variance["favor++"] < 0.7 * variance["positive"]
    assert variance["favor#"] < 0.7 * variance["positive"]


def test_constant_norms_have_a_bias(estimates):
    for features in ESTIMATORS:
        assert bias(estimates["constant"][features]).max() > 4, features


# Attention maps: mean square error × L², at 256 features for 16 dimensions.
MAPS, LENGTH, WIDTH = 12, 64, 16


def vectors(scale, seed=0):
    """Draw vectors; `scale` is one number, or one per dimension."""
    shape = (2, MAPS, LENGTH, WIDTH)
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def exact_maps(arrays):
    scores = np.einsum("dth,dsh->dts", *arrays.astype(np.float64)) * WIDTH**-0.5
    value = np.eye(LENGTH)[None, :, None].repeat(MAPS, axis=0)
    return oracles.weighted_mean(scores[:, None], 1.0, value, np.array(True))


@partial(jax.jit, static_argnames="features")
def performer_maps(arrays, rows, features, statistics):
    def one(query, key, rows):
        vectors = query[None, :, None], key[None, :, None]
        value = jnp.eye(LENGTH)[None, :, None]
        options = dict(features=features, statistics=statistics)
        return performer(*vectors, value, rows, **options)[0]

    return jax.vmap(one)(*arrays, rows)


def error(arrays, scale, features, norms="chi"):
    """Return the error with 256 features; pairs of features share a row."""
    count = 128 if features in ("hyperbolic", "trigonometric") else 256
    rows = projections(MAPS, count, WIDTH, norms=norms)
    learned = statistics(features, vectors(scale, seed=1))
    maps = np.asarray(performer_maps(arrays, rows, features, learned))
    squares = np.square(maps - exact_maps(arrays)).mean(axis=(1, 2, 3))
    return np.median(squares) * LENGTH**2  # one projection may be far worse than most


def test_the_error_of_attention_is_as_published():
    """Compare errors of maps, measured in these cases.

    Positive .018, hyperbolic .014, FAVOR++ .010, FAVOR# .012, trigonometric .0073.
    With constant norms positive has .0081 and hyperbolic .0039. A uniform map has .063.
    """
    arrays = vectors(0.5)
    errors = {features: error(arrays, 0.5, features) for features in ESTIMATORS}
    positive = errors["positive"]
    assert 0.014 < positive < 0.025
    assert errors["hyperbolic"] < positive
    assert errors["favor++"] < 0.8 * positive
    assert errors["favor#"] < 0.8 * positive
    assert errors["trigonometric"] < 0.6 * positive
    constant = error(arrays, 0.5, "positive", "constant")
    assert constant < 0.6 * positive
    assert error(arrays, 0.5, "hyperbolic", "constant") < 0.6 * constant


def test_waves_are_useless_for_entries_of_size_one():
    """An error of 770; positive features have 2.3, the mean of the values 1.5."""
    arrays = vectors(1.0)
    assert error(arrays, 1.0, "trigonometric") > 10 * error(arrays, 1.0, "positive")


def test_directions_of_different_size_are_what_favor_sharp_is_for():
    """Four dimensions of size 1.4, twelve of 0.21.

    FAVOR# has an error of .34, FAVOR++ .53, positive features .75.
    """
    scale = np.where(np.arange(WIDTH) < 4, 1.4, 0.21)
    arrays = vectors(scale)
    assert error(arrays, scale, "favor#") < 0.8 * error(arrays, scale, "favor++")


def test_statistics_are_those_of_least_variance(x64):
    """log E φ²(q)φ²(k) grows if `a` moves along any eigenvector of E zzᵀ."""
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 7, 5)) * 0.7 + 0.2
    a, b = (np.asarray(x) for x in favor_statistics(query, key, kind="favor#"))
    pairs = query.reshape(-1, 1, 5) + key.reshape(1, -1, 5)
    moments = np.einsum("qki,qkj->ij", pairs, pairs) / (21 * 21) * 5**-0.5
    rotation = b / np.sqrt(1 - 4 * a)[:, None]
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(5), atol=1e-12)
    turned = rotation @ moments @ rotation.T
    spectrum = np.diagonal(turned)
    np.testing.assert_allclose(turned, np.diag(spectrum), atol=1e-12)

    def log_square(a, s):
        power = 2 * (1 - 4 * a) / (1 - 8 * a) * s
        return np.log(1 - 4 * a) - 0.5 * np.log(1 - 8 * a) + power

    for move in (-1e-3, 1e-3):
        assert (log_square(a + move, spectrum) > log_square(a, spectrum)).all()
    even, scaled = favor_statistics(query, key)
    mean = np.full(5, np.trace(moments) / 5)
    for move in (-1e-3, 1e-3):
        assert (log_square(even + move, mean) > log_square(even, mean)).all()
    np.testing.assert_allclose(scaled, np.diag(np.sqrt(1 - 4 * even)), atol=1e-12)
    halved = favor_statistics(query, key, scale=0.5 * 5**-0.5)
    again = favor_statistics(query * 0.5**0.5, key * 0.5**0.5)
    np.testing.assert_allclose(halved.a, again.a, rtol=1e-12)


def test_wrong_samples_and_kinds_are_named():
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="'favor'.*favor#, favor"):
        favor_statistics(x, x, kind="favor")
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(3, 2\)"):
        favor_statistics(x, x[:, :2])
    with pytest.raises(ValueError, match=r"at least one .*\(0, 4\).*\(3, 4\)"):
        favor_statistics(x[:0], x, kind="favor#")
