"""Harmful gradients change nothing except their count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from symjax.training.optimizer import ENOUGH, guarded

RATE = optax.linear_schedule(0.1, 0.0, 100)  # weights show the number of steps


def gradients(count, seed=0):
    draw = np.random.default_rng(seed).normal(size=(count, 3, 5)).astype("f4")
    return [{"kernel": g, "bias": g[0]} for g in draw]


def weights(transform, sequence):
    params = {"kernel": jnp.ones((3, 5)), "bias": jnp.zeros(5)}
    state = transform.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in sequence:
        params, state = step(params, state, gradient)
    return params, state


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e4], ids=str)
def test_a_harmful_step_is_as_if_it_had_not_been(bad):
    """Weights, moments and schedule are bitwise those of the other steps alone."""
    good = gradients(ENOUGH + 7)
    harmful = {"kernel": good[0]["kernel"].copy(), "bias": good[0]["bias"]}
    harmful["kernel"][1, 2] = bad
    mixed = list(good)
    for place in (ENOUGH + 6, ENOUGH + 3, ENOUGH + 2):
        mixed.insert(place, harmful)
    transform = guarded(optax.adamw(RATE), spike=10.0)
    wanted, clean = weights(transform, good)
    found, state = weights(transform, mixed)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    jax.tree.map(np.testing.assert_array_equal, state.inner, clean.inner)
    assert int(state.skipped) == 3 and int(state.taken) == len(good)


def test_without_a_limit_large_gradients_are_taken():
    large = [jax.tree.map(lambda x: 1e6 * x, g) for g in gradients(2)]
    sequence = [*gradients(ENOUGH + 1), *large]
    found, state = weights(guarded(optax.sgd(RATE), spike=0.0), sequence)
    wanted, _ = weights(optax.sgd(RATE), sequence)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert int(state.skipped) == 0


def test_the_first_steps_are_no_measure_of_what_is_usual():
    """A spike among the first steps is applied; the same spike later is not."""
    small, large = gradients(ENOUGH), jax.tree.map(lambda x: 50 * x, gradients(1)[0])
    transform = guarded(optax.sgd(RATE), spike=20.0)
    assert int(weights(transform, [*small[:-2], large])[1].skipped) == 0
    assert int(weights(transform, [*small, large])[1].skipped) == 1


def test_usual_is_the_mean_of_the_last_norms():
    transform = guarded(optax.sgd(0.0), spike=1.5)
    usual = gradients(1)[0]
    for factor, skipped in ((1.49, 0), (1.51, 1)):
        last = {name: factor * x for name, x in usual.items()}
        state = weights(transform, [usual] * (ENOUGH + 4) + [last])[1]
        assert int(state.skipped) == skipped
