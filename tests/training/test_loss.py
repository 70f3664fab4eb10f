"""Losses in parts of the tokens, with gradients, equal those of all logits at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config, models
from symjax.training import loss, sharding
from symjax.training.loss import objective, token_losses

SHAPE, VOCABULARY = (4, 12), 31
MODEL = config.Model(vocabulary=VOCABULARY, width=16, depth=1, heads=2, length=12)


def example(model=MODEL):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(*SHAPE, model.width)), jnp.float32)
    targets = jnp.asarray(rng.integers(-1, VOCABULARY, SHAPE))
    assert (targets < 0).any()
    return models.Decoder(model, rngs=nnx.Rngs(0)), hidden, targets


def gradients(model, hidden, targets, z_loss=0.1):
    """Return losses, their means, and gradients of the means by weights and hidden
    states."""
    graph, weights = nnx.split(model)

    def total(weights, hidden):
        model = nnx.merge(graph, weights)
        found = objective(model, hidden, targets, z_loss)
        return 3 * found.minimised, (found, token_losses(model, hidden, targets))

    (_, found), gradient = jax.jit(
        jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    )(weights, hidden)
    return *found, gradient


@pytest.mark.parametrize("tied", (False, True), ids=("head", "tied"))
@pytest.mark.parametrize("largest", (1, 200, 744))  # single tokens, thirds, halves
def test_parts_have_the_losses_and_gradients_of_the_whole(monkeypatch, tied, largest):
    given = example(dataclasses.replace(MODEL, tie_embeddings=tied))
    wanted = gradients(*given)
    monkeypatch.setattr(loss, "MOST_LOGITS", largest)
    found = gradients(*given)
    assert (wanted[1].right == found[1].right).all()
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def definition(model, hidden, targets):
    """Return logits in float64, their log Σ exp, and which tokens have a target."""
    weights = {
        x: np.asarray(y[...], np.float64)
        for x, y in vars(model.head).items()
        if x in ("kernel", "bias") and y is not None
    }
    logits = np.asarray(hidden, np.float64) @ weights["kernel"] + weights.get("bias", 0)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    normaliser = np.log(powers.sum(-1)) + logits.max(-1)
    return logits, normaliser, np.asarray(targets) >= 0, weights["kernel"]


def test_they_are_those_of_the_definition():
    model, hidden, targets = example()
    found = token_losses(model, hidden, targets)
    logits, normaliser, asked, _ = definition(model, hidden, targets)
    own = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.loss, (normaliser - own) * asked, atol=2e-6)
    np.testing.assert_allclose(found.normaliser, normaliser * asked, rtol=2e-6)
    assert (found.right == ((logits.argmax(-1) == targets) & asked)).all()


@pytest.mark.parametrize("largest", (100, 2**26), ids=("parts", "whole"))
def test_means_have_the_gradient_of_the_definition(monkeypatch, largest):
    """∂/∂hidden of Σ (loss + z · normaliser²) / count, written out."""
    monkeypatch.setattr(loss, "MOST_LOGITS", largest)
    model, hidden, targets = example()
    z = 0.1
    means, _, (_, found) = gradients(model, hidden, targets, z)
    logits, normaliser, asked, kernel = definition(model, hidden, targets)
    n = normaliser[..., None]
    slope = np.exp(logits - n) * (1 + 2 * z * n) - np.eye(VOCABULARY)[targets]
    wanted = 3 * (slope * asked[..., None] / asked.sum()) @ kernel.T
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    own = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    each = normaliser - own
    np.testing.assert_allclose(means.loss, each[asked].mean(), rtol=1e-6)
    each += z * normaliser**2
    np.testing.assert_allclose(means.minimised, each[asked].mean(), rtol=1e-6)


@pytest.mark.parametrize("largest", (100, 2**26), ids=("parts", "whole"))
@pytest.mark.parametrize("middle", (1000, 50, -80, -1000))
def test_losses_of_large_logits_keep_their_digits(monkeypatch, largest, middle):
    """Losses and gradients.

    Logits are exact, and some tokens are certain: exp overflows or underflows for all
    tokens of a part, or for some.
    """
    monkeypatch.setattr(loss, "MOST_LOGITS", largest)
    model, hidden, targets = example()
    kernel, bias = model.head.kernel, model.head.bias
    kernel[...] = jnp.round(100 * kernel[...]) / 8
    bias[...] = jnp.full_like(bias[...], middle)
    hidden = jnp.round(hidden) * jnp.array([0, 1, 1, 4])[:, None, None]
    z = 0.1
    means, _, (_, found) = gradients(model, hidden, targets, z)
    logits, normaliser, asked, kernel = definition(model, hidden, targets)
    own = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(means.loss, (normaliser - own)[asked].mean(), rtol=1e-6)
    n = normaliser[..., None]
    slope = np.exp(logits - n) * (1 + 2 * z * n) - np.eye(VOCABULARY)[targets]
    wanted = 3 * (slope * asked[..., None] / asked.sum()) @ kernel.T
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


def test_parts_in_a_program_with_float64(monkeypatch, x64):
    """The model computes in float32 there, too."""
    given = example()
    wanted = gradients(*given)
    monkeypatch.setattr(loss, "MOST_LOGITS", 100)
    found = gradients(*given)
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_weights_are_rounded_once_for_all_parts(monkeypatch):
    monkeypatch.setattr(loss, "MOST_LOGITS", 100)
    model, hidden, targets = example(dataclasses.replace(MODEL, dtype="bfloat16"))
    graph, weights = nnx.split(model)

    def minimised(weights):
        hidden_states = hidden.astype(jnp.bfloat16)
        return objective(nnx.merge(graph, weights), hidden_states, targets).minimised

    program = jax.make_jaxpr(jax.grad(minimised))(weights)
    (parts,) = (x for x in program.eqns if x.primitive.name == "scan")
    given = (x.aval for x in parts.invars)
    found = {x.dtype.name for x in given if x.shape == model.head.kernel.shape}
    assert found == {"bfloat16", "float32"}  # the weights, and their gradient


def test_without_targets_there_is_no_loss_and_no_gradient(monkeypatch):
    monkeypatch.setattr(loss, "MOST_LOGITS", 100)
    model, hidden, targets = example()
    means, _, found = gradients(model, 100 * hidden, jnp.full_like(targets, -1))
    assert means == (0, 0)
    assert not any(x.any() for x in jax.tree.leaves(found))


@pytest.mark.parametrize(
    "axes",
    ({"data": 2, "fsdp": 2}, {"fsdp": 2, "sequence": 2}, {"tensor": 2, "data": 2}),
    ids=str,
)
def test_parts_on_a_mesh_are_those_of_one_device(monkeypatch, axes):
    given = example()
    wanted = gradients(*given)
    monkeypatch.setattr(loss, "MOST_LOGITS", 100)
    mesh = sharding.make_mesh(config.Mesh(**{"data": 1} | axes), jax.devices()[:4])
    with jax.set_mesh(mesh):
        found = gradients(*given)
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_no_array_holds_the_logits_of_all_tokens(monkeypatch):
    """Forward and backward, the compiled program takes less memory than that array."""
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
            return objective(nnx.merge(graph, weights), hidden, targets).minimised

        program = jax.jit(jax.grad(total, argnums=(0, 1))).lower(weights, hidden)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert working() > size
    monkeypatch.setattr(loss, "MOST_LOGITS", vocabulary * 8)
    assert working() < size / 2
