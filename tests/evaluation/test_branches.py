"""Gradients of the loss through the two branches of differential attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.evaluation.measures.branches import branch_gradients
from symjax.models.build import attentions
from symjax.models.decoder import Decoder
from symjax.models.encoder import Encoder
from symjax.training.loss import objective

DEPTH, TIME, WIDTH = 2, 11, 12


def model_of(kv_heads=3, **chosen) -> nnx.Module:
    attention = config.Attention(**chosen)
    sizes = {"width": WIDTH, "depth": DEPTH, "heads": 3, "length": 16}
    sizes["kv_heads"] = kv_heads
    options = config.Model(vocabulary=10, attention=attention, **sizes)
    model = Decoder(options, rngs=nnx.Rngs(1))
    for layer in attentions(model):  # λ differs from λ_init
        if hasattr(layer, "lambda_query_1"):
            layer.lambda_query_1[...] += 0.4
    return model


@pytest.fixture
def batch():
    tokens = np.random.default_rng(2).integers(0, 10, (2, TIME + 1))
    return jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])


def projected_gradients(model, batch, branches) -> list[jax.Array]:
    """Return the gradient of the loss by what each branch adds to a layer's input.

    Queries and keys of branch p are projected from x + e_p, and values from x. The
    gradients by e, at e = 0, have the shape [layers, branches, B, T, D].

    Args:
        branches: the number of e; query and key head i is projected from x + e_p with
            p = i mod branches.
    """
    graph, weights = nnx.split(model)
    inputs, targets = batch

    def loss(e):
        copy = nnx.merge(graph, weights)
        for layer, of_layer in zip(attentions(copy), e, strict=True):
            project = layer.project

            def projected(x, *args, project=project, e=of_layer, **options):
                *_, value = project(x, *args, **options)
                pairs = [project(x + shift, *args, **options)[:2] for shift in e]
                counts = [heads.shape[2] for heads in pairs[0]]
                query, key = (
                    jnp.stack([pairs[i % branches][k][:, :, i] for i in range(n)], 2)
                    for k, n in enumerate(counts)
                )
                return query, key, value

            layer.project = projected
        return objective(copy, copy.hidden(inputs), targets).minimised

    zeros = jnp.zeros((DEPTH, branches, *inputs.shape, WIDTH))
    return jax.jit(jax.grad(loss))(zeros)


def gradients_of(model, batch):
    return branch_gradients(*nnx.split(model), *batch)


@pytest.mark.parametrize("symmetric", ["none", "plain"])
def test_gradients_of_branches_are_those_by_their_queries_and_keys(batch, symmetric):
    model = model_of(differential="v1", symmetric=symmetric)
    wanted = projected_gradients(model, batch, 2)
    found = gradients_of(model, batch)
    assert list(found) == [0, 1]
    for layer, pair in found.items():
        for gradient, of_branch in zip(pair, wanted[layer], strict=True):
            scale = float(jnp.abs(of_branch).max())
            assert scale > 1e-5
            np.testing.assert_allclose(gradient, of_branch, atol=2e-5 * scale)


@pytest.mark.parametrize(
    "chosen",
    [
        {"differential": "v2", "kv_heads": 1},
        {"differential": "v1", "signals": 3},
        {"differential": "v1", "mechanism": "linear"},
    ],
    ids=lambda x: "-".join(map(str, x.values())),
)
def test_both_gradients_add_up_to_that_by_all_queries_and_keys(batch, chosen):
    model = model_of(**chosen)
    wanted = projected_gradients(model, batch, 1)
    for layer, (first, second) in gradients_of(model, batch).items():
        total = wanted[layer][0]
        scale = float(jnp.abs(total).max())
        np.testing.assert_allclose(first + second, total, atol=2e-5 * scale)
        assert jnp.abs(second).max() > 0.01 * scale


def test_both_gradients_of_a_classifier_add_up(batch):
    """The hidden state of a classifier is the mean over tokens [B 1 D]."""
    attention = config.Attention(differential="v1")
    sizes = {"width": WIDTH, "depth": DEPTH, "heads": 3, "length": TIME}
    options = config.Model(
        kind="encoder", vocabulary=10, classes=4, attention=attention, **sizes
    )
    model = Encoder(options, rngs=nnx.Rngs(1))
    batch = batch[0], jnp.array([[1], [3]])
    wanted = projected_gradients(model, batch, 2)
    for layer, pair in gradients_of(model, batch).items():
        for gradient, of_branch in zip(pair, wanted[layer], strict=True):
            scale = float(jnp.abs(of_branch).max())
            np.testing.assert_allclose(gradient, of_branch, atol=2e-5 * scale)
