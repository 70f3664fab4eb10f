"""Layers of causal functions of QQᵀ and of ridge regression: their definitions."""

import math

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from disturbed import HEADS, TIME, WIDTH, inputs, layer_of, weight
from flax import nnx

SIZE = WIDTH // HEADS
KINDS = {
    "exp": {"mechanism": "matrix_function", "function": "exp"},
    "resolvent": {
        "mechanism": "matrix_function",
        "function": "resolvent",
        "function_scale": 90.0,
    },
    "mesa": {"mechanism": "mesa"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def heads_of(layer, name, x):
    part = getattr(layer, name)
    found = x @ weight(part, "kernel") + weight(part, "bias")
    return found.reshape(*x.shape[:2], HEADS, SIZE)


def definition(kind, layer, x):
    """Compute the layer in float64. QQᵀ is divided by model.length √H."""
    query, value = (heads_of(layer, name, x) for name in ("query", "value"))
    if kind == "mesa":
        key = heads_of(layer, "key", x)
        query, key = (
            y / np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6) for y in (query, key)
        )
        ridge = 0.25 + np.log1p(np.exp(weight(layer, "ridge").reshape(HEADS, SIZE)))
        mixed = oracles.mesa(query, key, value, ridge)
        root = np.sqrt((mixed**2).mean(axis=-1, keepdims=True) + 1e-5)
        mixed = mixed / root * weight(layer, "head_norm", "scale")
    else:
        function = np.exp if kind == "exp" else lambda x: 1 / (1 + x)
        scale = KINDS[kind].get("function_scale", 1) / (300 * math.sqrt(SIZE))
        mixed = oracles.causal_matrix_function(query, value, function, scale)
    mixed = mixed.reshape(*x.shape[:2], WIDTH)
    return mixed @ weight(layer.out, "kernel") + weight(layer.out, "bias")


@every_kind
def test_a_layer_is_its_definition(kind):
    layer, x = layer_of("retention", **KINDS[kind]), inputs()
    wanted = definition(kind, layer, x.astype(np.float64))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), wanted, atol=5e-5)


@every_kind
def test_decoding_is_the_whole_form(kind):
    """A piece of five tokens, of which one example has three, then single tokens."""
    layer, x = layer_of("retention", **KINDS[kind]), inputs()
    whole = nnx.jit(lambda m, x: m(x))(layer, x)
    cache, read = layer.init_cache(2, TIME), np.array([3, 5])
    padding_mask = jnp.asarray(np.arange(5)[None] < read[:, None])
    _, cache = layer.decode(x[:, :5], cache, jnp.zeros(2, int), padding_mask)
    step = nnx.jit(lambda m, x, cache, read: m.decode(x, cache, read))
    for _ in range(3):
        now = np.take_along_axis(x, read[:, None, None], axis=1)
        found, cache = step(layer, now, cache, jnp.asarray(read))
        wanted = np.take_along_axis(np.asarray(whole), read[:, None, None], axis=1)
        np.testing.assert_allclose(found, wanted, atol=5e-6)
        read += 1
