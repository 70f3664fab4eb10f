"""The attention layer against its definition, in NumPy and float64."""

import jax
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.layers import Attention

WIDTH, HEADS, TIME = 24, 3, 13


def definition(layer: Attention, x: np.ndarray, initial: float) -> np.ndarray:
    """Compute one example of differential V1 with symmetric keys by loops."""

    def dense(name, inputs):
        part = getattr(layer, name)
        kernel, bias = (
            np.asarray(w[...], np.float64) for w in (part.kernel, part.bias)
        )
        return inputs @ kernel + bias

    vectors = [
        np.asarray(getattr(layer, f"lambda_{name}")[...], np.float64)
        for name in ("query_1", "key_1", "query_2", "key_2")
    ]
    lam = np.exp(vectors[0] @ vectors[1]) - np.exp(vectors[2] @ vectors[3]) + initial
    size = WIDTH // (2 * HEADS)
    query = dense("query", x).reshape(TIME, HEADS, 2, size)
    value = dense("value", x).reshape(TIME, HEADS, 2 * size)
    output = np.zeros((TIME, HEADS, 2 * size))
    for head in range(HEADS):
        for t in range(TIME):
            maps = []
            for branch in range(2):
                seen = query[: t + 1, head, branch]
                scores = np.exp(seen @ query[t, head, branch] / np.sqrt(size))
                maps.append(scores / scores.sum())
            mixed = (maps[0] - lam * maps[1]) @ value[: t + 1, head]
            root = np.sqrt(np.mean(mixed**2) + 1e-5)
            scale = np.asarray(layer.head_norm.scale[...], np.float64)
            output[t, head] = mixed / root * scale * (1 - initial)
    return dense("out", output.reshape(TIME, WIDTH))


@pytest.mark.parametrize(("depth", "offset", "initial"), [(0, 0, 0.2), (2, 1, 0.55605)])
def test_differential_symmetric_layer_equals_its_definition(depth, offset, initial):
    chosen = config.Attention(symmetric="plain", differential="v1", depth_offset=offset)
    options = config.Model(width=WIDTH, heads=HEADS, attention=chosen)
    layer = Attention(options, depth, rngs=nnx.Rngs(0))
    layer.head_norm.scale[...] = jax.random.normal(jax.random.key(2), (8,))
    assert abs(layer.lambda_initial - initial) < 1e-5
    x = jax.random.normal(jax.random.key(1), (2, TIME, WIDTH))
    expected = [definition(layer, np.float64(one), layer.lambda_initial) for one in x]
    np.testing.assert_allclose(layer(x), expected, atol=5e-6)


def test_a_symmetric_layer_has_no_key_projection():
    options = config.Model(
        width=WIDTH, heads=HEADS, attention=config.Attention(symmetric="pairwise")
    )
    layer = Attention(options, 0, rngs=nnx.Rngs(0))
    assert not hasattr(layer, "key")
    assert layer.metric.shape == (HEADS, 8, 8)


@pytest.mark.parametrize("name", ["mechanism", "features", "decay", "symmetric"])
def test_an_unknown_choice_names_the_known_ones(name):
    mechanism = {"features": "linear", "decay": "decay"}.get(name, "softmax")
    chosen = config.Attention(**({"mechanism": mechanism} | {name: "nope"}))
    options = config.Model(width=WIDTH, heads=HEADS, attention=chosen)
    with pytest.raises(ValueError, match=f"{name} 'nope' is unknown: choose from "):
        Attention(options, 0, rngs=nnx.Rngs(0))
