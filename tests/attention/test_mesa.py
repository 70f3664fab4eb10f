"""The Mesa layer: equal to ridge regressions, in any chunks, over devices, stepwise."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from laws import CHUNK, B, H, K, N, T, V, close, hiding, inputs
from split_time import check_split_time

from symjax.attention.delta_rule import delta_causal
from symjax.attention.differential import differential
from symjax.attention.mesa_layer import MesaState, mesa_causal, mesa_state, mesa_step

RIDGE = np.random.default_rng(3).uniform(0.5, 2.0, (K, H))


class Regression(laws.Mechanism):
    """A mechanism whose oracle solves one ridge regression per token."""

    def oracle(self, query, key, value, *, causal=True, **options):
        return oracles.mesa(query, key, value, np.full(key.shape[2:], 0.8), **options)


CAUSAL = partial(mesa_causal, ridge=0.8, chunk_size=CHUNK)
MESA = Regression(CAUSAL, CAUSAL, partial(mesa_step, ridge=0.8), mesa_state, None)


@pytest.mark.parametrize("law", laws.CAUSAL_LAWS, ids=lambda law: law.__name__)
def test_the_mesa_layer_obeys(law):
    law(MESA)


def by_tokens(arrays, fit, root):
    """Return the output and the last W and P, one solve [H H] per token."""
    moments = jnp.linalg.inv(root @ jnp.swapaxes(root, -1, -2))

    def token(state, now):
        moments, sums = state
        query, key, value = now
        moments = moments + key[..., :, None] * key[..., None, :]
        sums = sums + key[..., None] * value[..., None, :]
        fit = jnp.repeat(jnp.linalg.solve(moments, sums), N // K, axis=1)
        return (moments, sums), jnp.einsum("bnh,bnhv->bnv", query, fit)

    moved = [jnp.moveaxis(x, 1, 0) for x in arrays]
    (moments, sums), outputs = jax.lax.scan(
        token, (moments, moments @ fit), tuple(moved)
    )
    inverse = jnp.linalg.inv(moments)
    return jnp.moveaxis(outputs, 0, 1), (inverse @ sums, inverse)


def fit_and_inverse(state):
    return state.fit, state.root @ jnp.swapaxes(state.root, -1, -2)


def by_chunks(arrays, *state):
    options = {"state": MesaState(*state), "return_state": True}
    output, end = mesa_causal(*arrays, **options)
    return output, fit_and_inverse(end)


def by_steps(arrays, *state):
    def token(state, now):
        output, state = mesa_step(state, *(x[:, None] for x in now))
        return state, output[:, 0]

    moved = [jnp.moveaxis(x, 1, 0) for x in arrays]
    state, outputs = jax.lax.scan(token, MesaState(*state), tuple(moved))
    return jnp.moveaxis(outputs, 0, 1), fit_and_inverse(state)


def graded(form, arrays, *state):
    """Return output, last state, and gradients of a weighted sum of both."""
    rng = np.random.default_rng(1)
    weigh = rng.normal(size=(B, arrays[0].shape[1], N, V))
    weigh_end = rng.normal(size=(B, K, H, V)), rng.normal(size=(B, K, H, H))

    def loss(arrays, *state):
        output, end = form(arrays, *state)
        ends = sum((x * y).sum() for x, y in zip(end, weigh_end, strict=True))
        return (output * weigh).sum() + ends, (output, end)

    found = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(arrays, *state)
    return jax.tree.map(np.asarray, found)


def test_2048_tokens_are_one_regression_each_in_float64(x64):
    """Chunks and steps: output, state and gradients, from a state that is not empty."""
    arrays, rng = inputs(2048), np.random.default_rng(4)
    state = rng.normal(size=(B, K, H, V)), rng.normal(size=(B, K, H, H)) / H**0.5
    wanted = graded(by_tokens, arrays, *state)
    for form in (by_chunks, by_steps):
        found = graded(form, arrays, *state)
        for one, two in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            close(one, two, 1e-9)


def test_the_loop_over_tokens_is_the_definition(x64):
    arrays = inputs()
    identity = np.broadcast_to(np.eye(H), (B, K, H, H))
    output, _ = by_tokens(arrays, np.zeros((B, K, H, V)), identity)
    close(output, oracles.mesa(*arrays, np.ones((K, H))), 1e-12)


@pytest.mark.parametrize("devices", [2, 5])
def test_time_split_over_devices_changes_nothing(devices):
    """Output and gradients, with hidden tokens and segments that cross devices."""
    length = 20
    arrays = [x.astype(np.float32) for x in inputs(length)]
    options = {
        "mask": hiding(length),
        "segment_ids": np.repeat([[0, 1, 1, 2], [3, 3, 3, 3]], 5, axis=1),
    }
    weigh = np.random.default_rng(1).normal(size=(B, length, N, V)).astype(np.float32)
    check_split_time(mesa_causal, arrays, weigh, devices, options)


@pytest.mark.parametrize("shape", [(), (K,), (K, H)])
def test_a_ridge_may_be_a_number_per_head_or_channel(shape):
    ridge = RIDGE[{0: (0, 0), 1: (slice(None), 0), 2: ()}[len(shape)]]
    wide = ridge.reshape((*shape, *[1] * (2 - len(shape))))
    wanted = oracles.mesa(*inputs(), np.broadcast_to(wide, (K, H)))
    single = [x.astype(np.float32) for x in inputs()]
    close(mesa_causal(*single, ridge=ridge), wanted, 3e-6)
    if not shape:
        close(mesa_causal(*single, ridge=float(ridge)), wanted, 3e-6)


def test_a_ridge_may_be_a_constant_of_a_compiled_function():
    arrays, ridge = [x.astype(np.float32) for x in inputs(3)], jnp.full(K, 0.7)
    found = jax.jit(lambda *arrays: mesa_causal(*arrays, ridge=ridge))(*arrays)
    close(found, mesa_causal(*arrays, ridge=0.7), 1e-6)


def test_a_small_ridge_recalls_every_value():
    """The regression through H independent keys has no error. The delta rule, which
    changes the state by one key at a time, has one."""
    query, key, value = (x[:, :H].astype(np.float32) for x in inputs())
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    query, ones = np.repeat(key, N // K, axis=2), np.ones((B, H, K), np.float32)
    wanted = np.repeat(value, N // K, axis=2)
    options = {"return_state": True}
    _, state = mesa_causal(query, key, value, ridge=1e-5, **options)
    fit = np.asarray(state.fit) * 1e5**0.5
    found = np.einsum("btkh,bkhv->btkv", key, fit)
    close(np.repeat(found, N // K, axis=2), wanted, 0.02)
    _, state = delta_causal(query, key, value, ones, **options)
    error = np.einsum("btkh,bkhv->btkv", key, state.sums) - value
    assert np.abs(error[:, 0]).max() > 0.5


@pytest.mark.parametrize(
    ("size", "chunks", "steps"), [(10, 1e-3, 5e-6), (100, 1e-2, 1e-5)]
)
def test_long_keys_keep_their_digits_in_float32(size, chunks, steps):
    """Lengths of keys of √5 × size, for a ridge of 1. Steps keep nearly all digits."""
    query, key, value = (x.astype(np.float32) for x in inputs(150))
    arrays = query, size * key, value
    wanted = oracles.mesa(*(x.astype(float) for x in arrays), np.ones((K, H)))
    close(mesa_causal(*arrays, chunk_size=CHUNK), wanted, chunks)
    found, _ = by_steps(arrays, *MESA.state(B, K, H, V))
    close(found, wanted, steps)


def test_differential_subtracts_two_regressions():
    query, key, value = inputs()
    key, value, lam = key[:, :, :2], value[:, :, :1], 0.4
    ridge = np.ones((1, H))
    one, two = (
        oracles.mesa(query[:, :, b::2], key[:, :, [b]], value, ridge) for b in (0, 1)
    )
    arrays = [x.astype(np.float32) for x in (query, key, value)]
    close(differential(*arrays, lam, attend=mesa_causal), one - lam * two, 5e-6)


def test_a_wrong_ridge_is_named():
    arrays = inputs(dtype=np.float32)
    for shape in ((N,), (H,), (B, T, K)):
        with pytest.raises(ValueError) as refusal:
            mesa_causal(*arrays, ridge=np.ones(shape, np.float32))
        assert str(shape) in str(refusal.value)
        assert str(arrays[1].shape) in str(refusal.value)
    with pytest.raises(ValueError, match="mesa_causal: ridge must be positive.* 0"):
        mesa_causal(*arrays, ridge=0.0)
    with pytest.raises(ValueError, match="mesa_causal: ridge must be positive"):
        mesa_causal(*arrays, ridge=np.float32(0))
    with pytest.raises(ValueError, match="need a MesaState.*got a MesaState"):
        mesa_causal(*arrays, state=mesa_state(B, K, H, V + 1))
