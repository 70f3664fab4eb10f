"""Layers of the delta rule against their definitions, token by token in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disturbed import HEADS, TIME, WIDTH, inputs, layer_of, weight
from flax import nnx

from symjax import config
from symjax.models.cost import attention_flops

TAPS = 4
SIZE = WIDTH // HEADS
PARTS = {"mechanism": "delta", "short_convolution": TAPS, "output_gate": True}
KINDS = [("none", "head"), ("mamba2", "head"), ("kda", "head"), ("kda", "channel")]
every_kind = pytest.mark.parametrize(("decay", "gates"), KINDS)


def dense(part, x):
    return x @ weight(part, "kernel") + (weight(part, "bias") if part.use_bias else 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def heads_of(layer, name, x):
    """Return the projection, convolved with zeros before the first token, and SiLU."""
    kernel, x = (
        weight(layer, f"{name}_convolution", "kernel"),
        dense(getattr(layer, name), x),
    )
    padded = np.concatenate([np.zeros((TAPS - 1, WIDTH)), x])
    mixed = sum(kernel[i] * padded[i : i + TIME] for i in range(TAPS))
    return silu(mixed).reshape(TIME, HEADS, SIZE)


def definition(layer, x):
    query, key, value = (heads_of(layer, n, x) for n in ("query", "key", "value"))
    query, key = (
        y / np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6) for y in (query, key)
    )
    eraser, beta = key, np.ones((TIME, HEADS))
    if layer.chosen.delta_gates == "channel":
        eraser = sigmoid(dense(layer.erase, x)).reshape(key.shape) * key
        value = sigmoid(dense(layer.write, x)).reshape(value.shape) * value
    else:
        beta = sigmoid(dense(layer.beta, x))
    log_decay = np.zeros((TIME, HEADS, 1))
    if layer.chosen.decay != "none":
        gate = layer.decay
        hidden = x if layer.chosen.decay == "mamba2" else dense(gate.down, x)
        step = np.log1p(np.exp(dense(gate.up, hidden) + weight(gate, "bias")))
        step = step.reshape(TIME, HEADS, -1)  # of every head, or of every channel
        log_decay = -np.exp(weight(gate, "rate"))[:, None] * step
    state = np.zeros((HEADS, SIZE, SIZE))
    mixed = np.zeros((TIME, HEADS, SIZE))
    for t in range(TIME):
        state = np.exp(log_decay[t])[..., None] * state
        held = np.einsum("nh,nhv->nv", eraser[t], state)
        change = beta[t][:, None] * (value[t] - held)
        state = state + key[t][..., None] * change[:, None]
        mixed[t] = np.einsum("nh,nhv->nv", query[t], state)
    root = np.sqrt((mixed**2).mean(axis=-1, keepdims=True) + 1e-5)
    normed = (mixed / root * weight(layer, "head_norm", "scale")).reshape(TIME, WIDTH)
    return dense(layer.out, normed * silu(dense(layer.output_gate, x)))


@every_kind
def test_a_layer_is_its_definition(decay, gates):
    layer, x = layer_of(decay, delta_gates=gates, **PARTS), inputs()
    wanted = [definition(layer, one.astype(np.float64)) for one in x]
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), wanted, atol=5e-5)


@every_kind
def test_decoding_is_the_whole_form(decay, gates):
    """A piece of five tokens, then one at a time, with the states of convolutions."""
    layer, x = layer_of(decay, delta_gates=gates, **PARTS), inputs()
    whole = nnx.jit(lambda m, x: m(x))(layer, x)
    decode = nnx.jit(lambda m, x, cache, read: m.decode(x, cache, read))
    cache, found = layer.init_cache(2, TIME), []
    for start, stop in ((0, 5), *((t, t + 1) for t in range(5, TIME))):
        piece, cache = decode(layer, x[:, start:stop], cache, jnp.full(2, start))
        found.append(piece)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=5e-6)


def test_gates_per_channel_have_a_weight_per_channel_of_keys_and_of_values():
    shared = {"key_size": 2 * SIZE, **PARTS}
    counts = [
        sum(x.size for x in jax.tree.leaves(nnx.state(layer, nnx.Param)))
        for layer in (
            layer_of("kda", delta_gates=x, **shared) for x in ("head", "channel")
        )
    ]
    erase, write = WIDTH * HEADS * 2 * SIZE, WIDTH * HEADS * SIZE
    assert counts[1] - counts[0] == erase + write - WIDTH * HEADS


def test_the_key_asks_as_one_more_query_does():
    """At the same state and chunk size, a layer costs twice as much as one with
    decay."""
    costs = [
        attention_flops(
            config.Model(
                width=WIDTH, heads=HEADS, attention=config.Attention(mechanism=name)
            ),
            0,
        )
        for name in ("delta", "decay")
    ]
    assert costs[0] == 2 * costs[1]
