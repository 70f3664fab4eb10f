"""Performer: exact arithmetic at any scale, strictly causal, an unbiased estimate."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import close, inputs, run, same

from symjax.attention.core.feature_maps import FeatureParameters
from symjax.attention.core.products import einsum
from symjax.attention.favor import Statistics, favor_statistics
from symjax.attention.performer import (
    performer,
    performer_causal,
    performer_state,
    performer_step,
)
from symjax.attention.random_features import RANDOM_FEATURES, orthogonal_projection
from symjax.attention.recurrent.linear_state import Arithmetic, query_state, update

FORMS = performer, performer_causal, performer_step, performer_state
ROWS = np.asarray(orthogonal_projection(jax.random.key(7), 11, laws.H))


def mechanism(features="positive", projection=ROWS, **options):
    """Return the mechanism; `options` (scale, statistics) apply to the definition
    too."""
    wide = np.asarray(projection, np.float64)
    options["features"] = features
    products = partial(oracles.performer_products, projection=wide, **options)

    def state(*sizes, scale=None, **options):
        return performer_state(*sizes, **options)

    return laws.Mechanism.of((*FORMS[:3], state), products, projection, **options)


POSITIVE = mechanism()
# Small angles keep denominators away from zero, and the definition exact.
TRIGONOMETRIC = mechanism("trigonometric", scale=0.1)


@laws.every_law
def test_positive_features_obey(law):
    law(POSITIVE)


@pytest.mark.parametrize(
    "law",
    [
        laws.it_equals_its_definition,
        laws.segments_do_not_see_each_other,
        laws.gradients_equal_those_of_the_definition,
        laws.a_prefill_goes_on_in_chunks_and_steps,
        laws.the_future_changes_nothing,
        laws.hidden_keys_change_nothing,
        laws.a_row_without_keys_is_zero,
    ],
)
def test_trigonometric_features_obey(law):
    law(TRIGONOMETRIC)


@pytest.mark.parametrize(
    "law",
    [laws.it_equals_its_definition, laws.a_prefill_goes_on_in_chunks_and_steps],
)
@pytest.mark.parametrize("features", ["hyperbolic", "favor#", "slay"])
def test_other_features_obey(features, law):
    statistics = {}
    if features == "favor#":
        sample = inputs(seed=3)[:2]
        with jax.enable_x64(True):
            found = favor_statistics(*sample, kind=features)
        statistics["statistics"] = Statistics(*map(np.asarray, found))
    law(mechanism(features, **statistics))


@pytest.mark.parametrize("features", ["favor++", "favor#", "relu"])
def test_features_without_options_equal_their_definition(features):
    """Without statistics they assume queries q and keys k of variance 1.

    Then q + k, times √scale, has the variance s = 2/√H in each direction. So the `a`
    with the least variance of the estimate is the same number in all directions.
    """
    statistics = None
    if features != "relu":
        s = 2 / laws.H**0.5
        a = (1 - 2 * s - np.sqrt((1 + 2 * s) ** 2 + 8 * s)) / 16
        statistics = np.full(laws.H, a), np.eye(laws.H) * (1 - 4 * a) ** 0.5
    arrays = inputs()
    products = mechanism(features, statistics=statistics).products
    bound = mechanism(features)._replace(products=products)
    single = [x.astype(np.float32) for x in arrays]
    close(run(bound.causal, *single), bound.oracle(*arrays, causal=True), 3e-6)


@pytest.mark.parametrize("features", sorted(RANDOM_FEATURES))
def test_rows_of_constant_norms_serve_all_features(features):
    rows = orthogonal_projection(jax.random.key(2), 12, laws.H, norms="constant")
    arrays = [x * 0.3 for x in inputs()]
    a = -0.1
    statistics = np.full(laws.H, a), np.eye(laws.H) * (1 - 4 * a) ** 0.5
    options = {"statistics": statistics} if "favor" in features else {}
    bound = mechanism(features, rows, **options)
    wanted = bound.oracle(*arrays)
    if "favor" in features:
        options["statistics"] = Statistics(*(x.astype(np.float32) for x in statistics))
    bound = mechanism(features, rows, **options)
    close(run(bound.whole, *[x.astype(np.float32) for x in arrays]), wanted, 3e-6)


WIDE_ROWS = np.asarray(orthogonal_projection(jax.random.key(1), 128, 64))
WIDE = mechanism(projection=WIDE_ROWS)
WIDE_CAUSAL = partial(WIDE.causal, chunk_size=64)
WAVES = mechanism("trigonometric", WIDE_ROWS)
WAVES_CAUSAL = partial(WAVES.causal, chunk_size=64)
WIDE_ORACLE = partial(WIDE.oracle, module=jnp, causal=True)


def scaled(scale, length=256, heads=1, seed=0):
    rng = np.random.default_rng(seed)
    sizes = (heads, scale), (heads, scale), (heads, 1)
    return tuple(rng.normal(size=(1, length, n, 64)) * size for n, size in sizes)


@pytest.mark.parametrize("scale", [0.5, 2, 8])
def test_float32_is_exact_at_any_scale(scale):
    """Implementations that add an ε to features fail at scale 2, where it dominates."""
    arrays = scaled(scale)
    single = [x.astype(np.float32) for x in arrays]
    error = run(WIDE_CAUSAL, *single) - WIDE.oracle(*arrays, causal=True)
    assert np.abs(error).max() < 1e-4
    assert np.abs(run(WIDE.whole, *single) - WIDE.oracle(*arrays)).max() < 1e-4


@pytest.mark.parametrize("scale", [1, 8])
def test_float32_gradients_are_exact_at_any_scale(scale):
    arrays = scaled(scale, length=128)
    single = [x.astype(np.float32) for x in arrays]
    with jax.enable_x64(True):
        wanted = laws.gradient(WIDE_ORACLE, *arrays)
    for part, exact in zip(laws.gradient(WIDE_CAUSAL, *single), wanted, strict=True):
        close(part, exact, 2e-5)


@pytest.mark.parametrize("scale", [0.5, 8])
def test_waves_are_as_exact_as_their_exponents(scale):
    """At scale 8 exponents of 300 are off by 1e-4, and terms cancel to a tenth."""
    arrays = scaled(scale)
    single = [x.astype(np.float32) for x in arrays]
    tolerance = 1e-6 if scale < 1 else 1e-3
    close(run(WAVES_CAUSAL, *single), WAVES.oracle(*arrays, causal=True), tolerance)
    close(run(WAVES.whole, *single), WAVES.oracle(*arrays), tolerance)


def surprise(arrays, position, factor=1.0):
    """Replace the key at a position by a key with a large weight for feature 0."""
    query, key, value = (x.astype(np.float32) for x in arrays)
    changed = key.copy()
    changed[:, position] = WIDE_ROWS[0] * 64**0.25 * factor
    return (query, key, value), (query, changed, value)


@pytest.mark.parametrize(
    "form, scale, factor",
    [(WIDE_CAUSAL, 0.5, 1), (WIDE_CAUSAL, 8, 1), (WAVES_CAUSAL, 8, 4)],
)
def test_a_key_that_dwarfs_the_past_leaves_it_alone(form, scale, factor):
    """In Google's code and performer-pytorch, outputs before the key move by 2.14.

    The largest output is 2.32.
    """
    one, two = surprise(scaled(scale), 100, factor)
    before, after = run(form, *one), run(form, *two)
    same(after[:, :64], before[:, :64])
    largest = np.abs(before).max()
    assert np.abs(after[:, 64:100] - before[:, 64:100]).max() < 2e-6 * largest
    assert np.abs(after[:, 100:] - before[:, 100:]).max() > 1e-3 * largest


def test_a_huge_key_leaves_earlier_steps_alone():
    one, two = surprise(scaled(4, length=12), 8, factor=50)
    state = WIDE.state(1, 1, 64, 64)
    before = laws.stepwise(WIDE, *one, state)[0]
    after = laws.stepwise(WIDE, *two, state)[0]
    same(after[:, :8], before[:, :8])


@pytest.mark.parametrize("chunk_size", [32, 12])
@pytest.mark.parametrize("features, size", [("positive", 1), ("trigonometric", 0.02)])
def test_the_rescue_of_lost_rows_is_exact(features, size, chunk_size, on_devices):
    """A late key raises the maximum by more than e⁹⁰, so earlier rows underflow.

    Trigonometric features rotate by small angles, so no denominator is near zero.
    """
    rows = np.eye(4, dtype=np.float32)[:2] * np.float32(size)
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 32, 2, 4)) for _ in range(3))
    key[0, :20, :, 2:] = 14 if features == "positive" else 0
    key[0, 20] = [1, 1, 0, 0] if features == "positive" else 14
    single = [x.astype(np.float32) for x in (query, key, value)]
    segments = np.repeat([[0] * 3 + [1] * 24 + [2] * 5], 2, axis=0)
    bound = mechanism(features, rows)
    options = dict(segment_ids=segments)
    form = partial(bound.causal, chunk_size=chunk_size, **options)
    oracle = partial(bound.oracle, module=jnp, causal=True, **options)
    wanted = bound.oracle(query, key, value, causal=True, **options)
    close(run(form, *single), wanted, 1e-5)
    with jax.enable_x64(True):
        exact = laws.gradient(oracle, query, key, value)
    for part, whole in zip(laws.gradient(form, *single), exact, strict=True):
        close(part, whole, 1e-5)


def test_lost_rows_of_one_example_leave_another_bitwise_alone():
    calm = [x.astype(np.float32) for x in scaled(0.5, length=64)]
    wild = [x.astype(np.float32) for x in scaled(8, length=64)]
    alone = run(WIDE_CAUSAL, *(np.concatenate([x, x]) for x in calm))
    beside = run(WIDE_CAUSAL, *map(np.concatenate, zip(calm, wild, strict=True)))
    same(alone[0], beside[0])


@pytest.mark.parametrize("scale", [1e-3, 1, 30])
def test_the_denominator_is_at_least_one(scale):
    arrays = [x.astype(np.float32) for x in scaled(scale, length=9)]
    state = WIDE.state(1, 1, 64, 64)
    random = FeatureParameters(jnp.asarray(WIDE_ROWS), jnp.asarray(0.125))
    maps, how = (
        RANDOM_FEATURES["positive"],
        Arithmetic(einsum, signed=False, nonnegative_count=0),
    )

    @jax.jit
    def bottom(state, query, key, value):
        state = update(how, state, maps.key(key, random), value)
        query = maps.query(query[:, :, None], random)
        return query_state(how, state, query).denominator, state

    for t in range(9):
        now = (x[:, t : t + 1].swapaxes(1, 2) for x in arrays)
        rows, state = bottom(state, *now)
        assert np.min(rows) >= 1 and np.min(state.total) >= 1


def test_one_key_is_returned_as_it_is():
    """Even if its feature underflows: nothing is added to the denominator."""
    query, key, value = (np.full((1, 1, 1, 64), x, np.float32) for x in (90, -90, 2))
    for form in (performer, performer_causal):
        close(form(query, key, value), value, 1e-5)  # 256 terms are summed


def relative_error(arrays, projection, **options):
    query, key, value = arrays
    scores = np.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    wanted = oracles.weighted_mean(scores, 1.0, value, np.array(True))
    output = performer(query, key, value, projection, **options)
    return np.linalg.norm(output - wanted) / np.linalg.norm(wanted)


def test_more_features_are_a_better_estimate():
    """Errors at H = 64 and scale 0.5 are about 0.54, 0.41 and 0.23."""
    arrays = scaled(0.5, length=128, heads=4)
    errors = [
        relative_error(arrays, orthogonal_projection(jax.random.key(0), count, 64))
        for count in (128, 1024)
    ]
    assert errors[0] < 0.65 and errors[1] < 0.3


def test_without_a_projection_it_is_always_the_same():
    arrays = inputs(dtype=np.float32)
    bound = laws.Mechanism.of(FORMS, None)
    state = performer_state(laws.B, laws.K, laws.H, laws.V)
    steps, _ = laws.stepwise(bound, *arrays, state)
    close(steps, run(bound.causal, *arrays), 2e-6)


def test_scale_multiplies_the_scores():
    query, key, value = inputs(dtype=np.float32)
    size = 2 * laws.H**0.5
    doubled = performer(query * 2**0.5, key * 2**0.5, value, ROWS, scale=1 / size)
    close(doubled, performer(query, key, value, ROWS, scale=2 / size), 1e-5)
    close(performer(query, key, value, scale=2 / size), performer(query, key, value), 0)
    for scale in (-1, np.float32(-1), jnp.float32(-1)):
        with pytest.raises(ValueError, match="scale.*-1"):
            performer(query, key, value, scale=scale)


@pytest.mark.parametrize("size", [1, 40])
def test_a_side_without_keys_has_no_say(size):
    """At size 40 scale · |k|²/2 is 2000; a shift of 0 for an empty side would
    underflow."""
    query, key, value = inputs(12)
    single = [x.astype(np.float32) for x in (query * size, key * size, value)]
    segments = np.arange(12) // np.array([[1], [3]])
    output = run(POSITIVE.whole, *single, segment_ids=segments)
    wanted = POSITIVE.oracle(query * size, key * size, value, segment_ids=segments)
    close(output, wanted, 1e-4)


def test_unknown_features_and_wrong_projections_are_named():
    arrays = inputs(dtype=np.float32)
    with pytest.raises(ValueError, match="'trig'.*favor.*positive, relu, slay, trig"):
        performer_causal(*arrays, features="trig")
    with pytest.raises(ValueError, match=r"\(2, 19, 6, 5\).*\(11, 4\)"):
        performer(*arrays, ROWS[:, :4])
    statistics = favor_statistics(*arrays[:2])
    with pytest.raises(ValueError, match="'relu' take no statistics.*favor#, favor"):
        performer(*arrays, features="relu", statistics=statistics)
    smaller = Statistics(statistics.a, statistics.b[:4])
    with pytest.raises(ValueError, match=r"\(5, 5\).*\(4, 5\)"):
        performer(*arrays, features="favor++", statistics=smaller)
