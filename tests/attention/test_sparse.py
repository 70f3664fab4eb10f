"""Sparsemax and entmax-1.5: thresholds, supports, ties, and derivatives along them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import K, N, S, T, close, same
from score_laws import DEFINITIONS, blocks, every_close, graded, single

from symjax import attention
from symjax.attention import sparse
from symjax.attention.scores.mechanism import row_map

WEIGHTS = {1: sparse.sparsemax_weights, 2: sparse.entmax15_weights}
each = pytest.mark.parametrize("power", WEIGHTS)


def bisected(power, scores):
    """Find the weights [z/power − τ]₊^power of a row by bisection of τ."""
    low, high = scores.max() / power - 1, scores.max() / power
    for _ in range(80):
        middle = (low + high) / 2
        total = (np.maximum(scores / power - middle, 0) ** power).sum()
        low, high = (middle, high) if total > 1 else (low, middle)
    return np.maximum(scores / power - low, 0) ** power


def rows_of_scores():
    """Return narrow and wide rows, ties, one dominant key, and a large offset."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(7, 31)) * np.array([0.01, 0.3, 1, 3, 30, 1, 1])[:, None]
    rows[4, :9] = 200
    rows[5, 3] += 40
    rows[6] += 1000
    return rows


@each
def test_weights_are_those_of_the_bisected_threshold(power, x64):
    rows = rows_of_scores()
    wanted = np.stack([bisected(power, row) for row in rows])
    form = jax.jit(lambda rows: WEIGHTS[power](rows, None))
    weights = np.asarray(form(rows))
    np.testing.assert_allclose(weights, wanted, atol=1e-12)
    close(weights.sum(-1), np.ones(7), 1e-14)
    same(weights == 0, wanted == 0)
    support = (weights > 0).sum(axis=-1)
    assert support[0] == 31 and support[5] == 1 and 1 < support[2] < 31
    same(weights[4, :9], np.full(9, weights[4, 0]))
    assert weights[4, 0] == pytest.approx(1 / 9, abs=1e-12)


@pytest.mark.parametrize("count", [64, 4096])
@each
def test_rows_of_any_length_keep_their_digits_in_float32(power, count):
    """Nearly even rows, one key far above the others, a ramp, steps of one half."""
    rng = np.random.default_rng(0)
    alone = -0.95 * power + 0.01 * rng.random(count)
    alone[3] = 0
    ramps = -np.arange(count) / 256, 2.0 ** -np.arange(count)
    rows = *(rng.normal(size=(3, count)) * [[0.001], [0.1], [1]]), alone, *ramps
    rows = np.stack(rows).astype(np.float32)
    wanted = np.stack([bisected(power, row.astype(np.float64)) for row in rows])
    weights = np.asarray(jax.jit(lambda rows: WEIGHTS[power](rows, None))(rows))
    assert (np.abs(weights - wanted).max(-1) < 1e-6 * wanted.max(-1)).all()


@each
def test_one_key_has_all_the_weight_and_no_gradient(power):
    visible = np.arange(5) == np.array([[2], [0], [4]])

    def loss(scores):
        weights = WEIGHTS[power](scores, visible)
        return (weights * jnp.arange(1.0, 6)[None]).sum(), weights

    scores = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32) * 50
    gradient, weights = jax.jit(jax.grad(loss, has_aux=True))(scores)
    same(weights, visible.astype(np.float32))
    same(gradient, np.zeros((3, 5)))
    single_score = WEIGHTS[power](jnp.full((2, 1), -1e30), None)
    same(single_score, np.ones((2, 1)))


@each
def test_an_infinitely_low_bias_hides_like_a_mask(power):
    """Also in rows whose keys are all hidden, and in gradients."""
    arrays = single(DEFINITIONS["sparsemax"].arrays())
    hidden = np.random.default_rng(0).random((1, 1, T, T)) < 0.4
    hidden[0, 0, 3] = True
    attend = (attention.sparsemax, attention.entmax15)[power - 1]

    def both(*arrays):
        by_bias = attend(*arrays, np.where(hidden, -np.inf, 0).astype(np.float32))
        return by_bias, attend(*arrays, mask=~hidden)

    def graded(*arrays):
        outputs, back = jax.vjp(both, *arrays)
        ones, zeros = jnp.ones_like(outputs[0]), jnp.zeros_like(outputs[0])
        return outputs, back((ones, zeros)), back((zeros, ones))

    (one, two), by_bias, by_mask = jax.jit(graded)(*arrays)
    same(one, two)
    assert not one[:, 3].any() and one[:, 4].any()
    for part, other in zip(by_bias, by_mask, strict=True):
        assert np.isfinite(part).all()
        close(part, other, 1e-6)


@each
def test_both_modes_of_differentiation_give_the_matrix_of_the_support(power, x64):
    """diag(g) − g gᵀ/Σg with g = weight^(2 − α), and second derivatives."""
    rows = rows_of_scores()[[1, 2, 5]]

    def weigh(row):
        return WEIGHTS[power](row[None], None)[0]

    def derivatives(rows):
        forward, reverse = jax.jacfwd(weigh), jax.jacrev(jax.checkpoint(weigh))
        along = jax.jvp(jax.vmap(reverse), (rows,), (rows[::-1],))[1]
        return jax.vmap(forward)(rows), jax.vmap(reverse)(rows), along

    forward, reverse, along = jax.jit(derivatives)(rows)

    def matrices(rows):
        weights = np.stack([bisected(power, row) for row in rows])
        slopes = (weights > 0) if power == 1 else np.sqrt(weights)
        outer = slopes[:, :, None] * slopes[:, None] / slopes.sum(-1)[:, None, None]
        return slopes[:, :, None] * np.eye(31) - outer

    close(forward, matrices(rows), 1e-10)
    close(reverse, matrices(rows), 1e-10)
    change = 1e-5 * rows[::-1]
    wanted = (matrices(rows + change) - matrices(rows - change)) / 2e-5
    np.testing.assert_allclose(along, wanted, atol=1e-7)


@each
def test_keys_outside_the_support_are_exactly_nothing(power):
    """Their weights are 0; changing them changes neither outputs nor gradients."""
    query, key, value = single(DEFINITIONS["sparsemax"].arrays(keys=S))
    query, weights = 3 * query, WEIGHTS[power]
    attend = (attention.sparsemax, attention.entmax15)[power - 1]
    visible = np.asarray(row_map(weights, query, key))
    assert 0.5 < (visible == 0).mean() < 1
    close(visible.sum(-1), np.ones(visible.shape[:3]), 1e-6)
    row = 5
    unused = (visible[:, :, row] == 0).reshape(2, K, N // K, S).all(axis=2)
    unused = unused.swapaxes(1, 2)[..., None]
    assert unused.any()

    def one_row(value):
        return attend(query[:, [row]], key, value).sum()

    form = jax.jit(jax.value_and_grad(one_row))
    with blocks(7):
        output, gradient = form(value)
        other, _ = form(np.where(unused, 1e6, value).astype(np.float32))
    assert output == other
    same(np.where(unused, gradient, 0), np.zeros_like(value))
    assert (np.where(unused, 1, gradient) != 0).all()


def test_examples_on_several_devices_are_as_on_one():
    """`shard_map` checks that loop carries vary over the devices."""
    arrays = single(DEFINITIONS["sparsemax"].arrays())
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.PartitionSpec("data")
    attend = partial(attention.entmax15, is_causal=True)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=spread, out_specs=spread)
    wanted = graded(attend, *arrays)
    output, gradients = graded(sharded, *arrays)
    every_close((output, *gradients), (wanted[0], *wanted[1]), 1e-6)
