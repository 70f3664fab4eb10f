"""Statistics of FAVOR++ and FAVOR# change only when they are fitted to inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.layers import Constant
from symjax.models import build, fit_statistics, transformer

TOKENS = jax.random.randint(jax.random.key(1), (2, 19), 0, 23)


def small(features="favor#", **changes):
    chosen = config.Attention(
        mechanism="performer", features=features, feature_count=16
    )
    sizes = {"vocabulary": 23, "width": 24, "heads": 3, "depth": 2, "length": 40}
    options = config.Model(attention=chosen, **{**sizes, **changes})
    return build(options, rngs=nnx.Rngs(0))


@nnx.jit
def scores(model, tokens):
    return model(tokens)


@pytest.mark.parametrize("choice", [{}, {"kind": "universal"}], ids=str)
def test_they_are_those_of_the_queries_and_keys_of_a_layer(choice):
    """In a universal model they are those of the first step."""
    model = small(**choice)
    first = scores(model, TOKENS)
    projection = model.blocks[0].attentions[0].projection[...]
    fit_statistics(model, TOKENS)
    block = model.blocks[0] if not choice else model.blocks[0].block
    x = transformer.look_up(model, TOKENS)
    x = transformer.with_positions(model, x, jnp.zeros(1, jnp.int32))
    if choice:
        x = x + model.blocks[0].step_embedding[0][None, None]
    layer = block.attention
    query, key, _ = layer.project(block.attention_norm(x), jnp.zeros((1, 1), int))
    query, key = (np.asarray(x, "f8").reshape(-1, x.shape[-1]) for x in (query, key))
    pairs = (query[:, None] + key[None]).reshape(-1, query.shape[-1])
    spectrum = np.linalg.eigvalsh(
        pairs.T @ pairs / len(pairs) * query.shape[-1] ** -0.5
    )
    root = np.sqrt((1 + 2 * spectrum) ** 2 + 8 * spectrum)
    wanted = (1 - 2 * spectrum - root) / 16
    np.testing.assert_allclose(layer.statistics_a[...], wanted, rtol=1e-4, atol=1e-6)
    assert isinstance(layer.statistics_a, Constant)
    np.testing.assert_array_equal(layer.projection[...], projection)
    assert abs(scores(model, TOKENS) - first).max() > 1e-4


def test_every_layer_of_a_pattern_that_has_them_is_fitted():
    model = small("favor++", pattern=("softmax", "performer"), depth=4)
    layers = [layer for block in model.blocks for layer in block.attentions]
    before = [np.asarray(layers[i].statistics_a[...]) for i in (1, 3)]
    fit_statistics(model, TOKENS)
    for i, unfitted in zip((1, 3), before, strict=True):
        assert abs(layers[i].statistics_a[...] - unfitted).max() > 1e-3


def test_pads_of_an_encoder_are_not_measured():
    lengths = np.array([[5], [19]])
    columns = np.arange(19)[None]
    padded = np.where(columns < lengths, TOKENS, -1)
    filled = np.take_along_axis(np.asarray(TOKENS), columns % lengths, axis=1)
    models = [small(kind="encoder") for _ in range(2)]
    for model, tokens in zip(models, (padded, filled), strict=True):
        fit_statistics(model, tokens)
    one, other = (nnx.to_pure_dict(nnx.state(x, Constant)) for x in models)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_model_without_them_is_refused():
    with pytest.raises(ValueError, match=r"no layer .* favor\+\+ or favor#"):
        fit_statistics(small("positive"), TOKENS)
