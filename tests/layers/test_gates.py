"""Learned decays against definitions, token by token in float64."""

import numpy as np
import pytest
from disturbed import HEADS, TIME, WIDTH, inputs, layer_of, weight
from flax import nnx

from symjax import config
from symjax.layers import Attention

SIZE = WIDTH // HEADS


def dense(part, x):
    return x @ weight(part, "kernel") + (weight(part, "bias") if part.use_bias else 0)


def definition(layer, x):
    """Compute decay "mamba2" or "kda" for one example."""
    query, key, value = (
        dense(getattr(layer, name), x).reshape(TIME, HEADS, SIZE)
        for name in ("query", "key", "value")
    )
    gate, kind = layer.decay, layer.chosen.decay
    hidden = x if kind == "mamba2" else dense(gate.down, x)
    step = np.log1p(np.exp(dense(gate.up, hidden) + weight(gate, "bias")))
    step = step.reshape(TIME, HEADS, -1)  # of every head, or of every channel
    log_decay = -np.exp(weight(gate, "rate"))[:, None] * step
    state = np.zeros((HEADS, SIZE, SIZE))
    mixed = np.zeros((TIME, HEADS, SIZE))
    for t in range(TIME):
        wrote = value[t] * step[t] if kind == "mamba2" else value[t]
        state = np.exp(log_decay[t])[..., None] * state
        state = state + key[t][..., None] * wrote[:, None]
        mixed[t] = np.einsum("nh,nhv->nv", query[t], state)
        if kind == "mamba2":
            mixed[t] += weight(layer, "skip")[:, None] * value[t]
    root = np.sqrt((mixed**2).mean(axis=-1, keepdims=True) + 1e-5)
    normed = mixed / root * weight(layer, "head_norm", "scale")
    return dense(layer.out, normed.reshape(TIME, WIDTH))


@pytest.mark.parametrize("decay", ["mamba2", "kda"])
def test_a_layer_is_its_definition(decay):
    layer, x = layer_of(decay), inputs()
    wanted = [definition(layer, one.astype(np.float64)) for one in x]
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), wanted, atol=2e-5)


@pytest.mark.parametrize("decay", ["mamba2", "kda"])
def test_decays_begin_between_those_of_the_papers(decay):
    """Initially exp(rate) is in [1, 16] and softplus(bias) in [0.001, 0.1]."""
    chosen = config.Attention(mechanism="decay", decay=decay)
    options = config.Model(width=256, heads=64, attention=chosen)
    gate = Attention(options, 0, rngs=nnx.Rngs(0)).decay
    for found, least, most in (
        (np.exp(gate.rate[...]), 1, 16),
        (np.log1p(np.exp(gate.bias[...])), 0.001, 0.1),
    ):
        assert least * 0.999 <= found.min() < 2 * least
        assert most / 2 < found.max() <= most * 1.001


def test_a_layer_with_forget_gates_and_a_sink_is_its_definition():
    layer = layer_of("retention", "softmax", forget="fox", sink=True)
    x = inputs()
    wanted = []
    for one in x.astype(np.float64):
        query, key, value = (
            dense(getattr(layer, name), one).reshape(TIME, HEADS, SIZE)
            for name in ("query", "key", "value")
        )
        gates = 1 / (1 + np.exp(-dense(layer.forget.up, one)))
        weights = np.einsum("tnh,snh->nts", query, key) / np.sqrt(SIZE)
        weights = np.exp(weights)
        for t, s in np.ndindex(TIME, TIME):
            weights[:, t, s] *= gates[s + 1 : t + 1].prod(axis=0) if s <= t else 0
        total = weights.sum(axis=-1) + np.exp(weight(layer, "sink"))[:, None]
        mixed = np.einsum("nts,snh->tnh", weights / total[..., None], value)
        wanted.append(dense(layer.out, mixed.reshape(TIME, WIDTH)))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), wanted, atol=2e-5)


def test_learned_laws_of_length_are_computed_from_the_token_or_per_head():
    x = inputs()
    layer = layer_of("retention", "entmax15", length_scale="adaptive")
    slope, power = layer.operands(x, np.arange(TIME)[None])["length_scale"].array
    wanted = np.log1p(np.exp(dense(layer.length_slope, x)))
    np.testing.assert_allclose(slope, wanted, atol=1e-5)
    wanted = 2 * np.tanh(dense(layer.length_power, x))
    np.testing.assert_allclose(power, wanted, atol=1e-5)

    layer = layer_of("retention", "softmax", length_scale="learned", length_base=5)
    factor = weight(layer, "length_factor")[:, None]
    query = layer.operands(x, np.arange(TIME)[None])["query"].array
    wanted = dense(layer.query, x).reshape(*query.shape) * factor
    np.testing.assert_allclose(query, wanted, atol=1e-5)
    assert dict(layer.mixer.options) == {"length_base": 5}


def test_without_decay_a_state_is_a_sum():
    layer, x = layer_of("none"), inputs()
    operands = layer.operands(x, np.arange(TIME)[None])
    query, key, value = (
        np.asarray(operands[name].array, np.float64)
        for name in ("query", "key", "value")
    )
    pairs = np.tril(np.einsum("btnh,bsnh->bnts", query, key))
    wanted = np.einsum("bnts,bsnv->btnv", pairs, value)
    np.testing.assert_allclose(layer.mixer(operands), wanted, atol=2e-5)


def test_forget_gates_do_not_need_the_constants_of_decay_heads():
    """In a model with both, decay_heads is about model.attention.decay."""
    chosen = config.Attention(decay="retention", decay_heads=1, forget="fox")
    sizes = {"width": WIDTH, "heads": HEADS, "depth": 2}
    options = config.Model(**sizes, pattern=("decay", "softmax"), attention=chosen)
    first, second = (Attention(options, depth, rngs=nnx.Rngs(0)) for depth in (0, 1))
    assert first.decay(inputs()).shape == (1, 1, HEADS)
    assert second.forget(inputs()).shape == (*inputs().shape[:2], HEADS)


def test_no_decay_is_none_of_any_key_head():
    """Four heads in two groups have four signal keys and two noise keys."""
    chosen = config.Attention(
        mechanism="decay", decay="none", differential="v1", signals=2
    )
    options = config.Model(width=WIDTH, heads=4, head_size=3, attention=chosen)
    layer = Attention(options, 0, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.decay(inputs()), np.zeros((1, 1, 6)))
    assert np.isfinite(layer(inputs())).all()
