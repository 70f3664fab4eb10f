"""Losses in parts of the tokens are those of all logits at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config, models
from symjax.training import loss, sharding
from symjax.training.loss import token_losses

SHAPE, VOCABULARY = (4, 12), 31
MODEL = config.Model(vocabulary=VOCABULARY, width=16, depth=1, heads=2, length=12)


def example(model=MODEL):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(*SHAPE, model.width)), jnp.float32)
    targets = jnp.asarray(rng.integers(-1, VOCABULARY, SHAPE))
    assert (targets < 0).any()
    return models.Decoder(model, rngs=nnx.Rngs(0)), hidden, targets


def gradients(model, hidden, targets):
    """The losses, and the gradients of a sum of them by weights and hidden states."""
    graph, weights = nnx.split(model)
    factor = jnp.cos(jnp.arange(targets.size)).reshape(targets.shape)

    def total(weights, hidden):
        found = token_losses(nnx.merge(graph, weights), hidden, targets)
        return (factor * (found.loss + 0.1 * found.normaliser)).sum(), found

    (_, found), gradient = jax.jit(
        jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    )(weights, hidden)
    return found, gradient


@pytest.mark.parametrize("tied", (False, True), ids=("head", "tied"))
@pytest.mark.parametrize("largest", (1, 200, 744))  # single tokens, thirds, halves
def test_parts_have_the_losses_and_gradients_of_the_whole(monkeypatch, tied, largest):
    given = example(dataclasses.replace(MODEL, tie_embeddings=tied))
    wanted = gradients(*given)
    monkeypatch.setattr(loss, "LARGEST", largest)
    found = gradients(*given)
    assert (wanted[0].right == found[0].right).all()
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_they_are_those_of_the_definition():
    model, hidden, targets = example()
    found = token_losses(model, hidden, targets)
    weights = {
        x: np.asarray(y[...], np.float64)
        for x, y in vars(model.head).items()
        if x in ("kernel", "bias") and y is not None
    }
    logits = np.asarray(hidden, np.float64) @ weights["kernel"] + weights.get("bias", 0)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    normaliser = np.log(powers.sum(-1)) + logits.max(-1)
    asked = np.asarray(targets) >= 0
    own = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.loss, (normaliser - own) * asked, atol=2e-6)
    np.testing.assert_allclose(found.normaliser, normaliser**2 * asked, rtol=2e-6)
    assert (found.right == ((logits.argmax(-1) == targets) & asked)).all()


@pytest.mark.parametrize(
    "axes",
    ({"data": 2, "fsdp": 2}, {"fsdp": 2, "sequence": 2}, {"tensor": 2, "data": 2}),
    ids=str,
)
def test_parts_on_a_mesh_are_those_of_one_device(monkeypatch, axes):
    given = example()
    wanted = gradients(*given)
    monkeypatch.setattr(loss, "LARGEST", 100)
    mesh = sharding.make_mesh(config.Mesh(**{"data": 1} | axes), jax.devices()[:4])
    with jax.set_mesh(mesh):
        found = gradients(*given)
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_no_array_holds_the_logits_of_all_tokens(monkeypatch):
    """Forward and backward: the compiled program takes less memory than one."""
    vocabulary, tokens = 4096, (2, 64)
    model = models.Decoder(
        dataclasses.replace(MODEL, vocabulary=vocabulary), rngs=nnx.Rngs(0)
    )
    hidden = jnp.ones((*tokens, MODEL.width))
    targets = jnp.zeros(tokens, jnp.int32)
    size = 4 * vocabulary * targets.size
    graph, weights = nnx.split(model)

    def working() -> int:
        def total(weights, hidden):
            found = token_losses(nnx.merge(graph, weights), hidden, targets)
            return found.loss.sum()

        program = jax.jit(jax.grad(total, argnums=(0, 1))).lower(weights, hidden)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert working() > size
    monkeypatch.setattr(loss, "LARGEST", vocabulary * 8)
    assert working() < size / 2
