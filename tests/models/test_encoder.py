"""The encoder: pads change nothing, images become patches, heads score classes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.models import Decoder, Encoder
from symjax.models.encoder import patchify

TEXT = config.Model(
    kind="encoder", vocabulary=20, width=16, depth=1, heads=2, length=24, classes=3
)
IMAGES = replace(TEXT, vocabulary=0, patch=2, image=(4, 6, 3), length=6)
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, -1, -1, -1]])


def encoder(options, seed=0):
    return Encoder(options, rngs=nnx.Rngs(seed))


def padded(length):
    return jnp.asarray(np.pad(TOKENS, ((0, 0), (0, length - 9)), constant_values=-1))


CHOICES = {
    "softmax": {"attention": config.Attention(length_base=5)},
    "performer": {"attention": config.Attention(mechanism="performer")},
    "matrix_function": {"attention": config.Attention(mechanism="matrix_function")},
    "gau": {"attention": config.Attention(mechanism="gau")},
    "flash": {"attention": config.Attention(mechanism="flash", chunk_size=4)},
    "masked": {"classes": 0, "positions": "sinusoidal"},
    "loop": {"scan_layers": True, "positions": "rope", "depth": 2},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_more_pads_change_no_score(choice):
    """Neither their number nor the embedding of the pad token matters."""
    model = encoder(replace(TEXT, **CHOICES[choice]))
    few, many = (jax.jit(model)(padded(n)) for n in (9, 24))
    if not model.classes:
        padding_mask = TOKENS >= 0
        few, many = few[padding_mask], many[:, :9][padding_mask]
    else:
        assert few.shape == (2, 1, 3)
    np.testing.assert_allclose(few, many, atol=2e-5)
    assert abs(few).max() > 1e-3


def test_not_even_what_is_no_number_reaches_a_score_from_a_pad():
    model = encoder(TEXT)
    before = jax.jit(model)(padded(12))
    model.embedding.embedding[...] = model.embedding.embedding[...].at[0].set(np.nan)
    model.positions[...] = model.positions[...].at[9:].set(np.nan)
    np.testing.assert_array_equal(jax.jit(model)(padded(12)), before)


def test_the_loop_is_the_unrolled_model():
    options = replace(TEXT, depth=2)
    models = encoder(options), encoder(replace(options, scan_layers=True))
    one, other = (jax.jit(model)(padded(9)) for model in models)
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_classes_are_scored_from_the_mean_over_the_text():
    """With one token the mean is that token; the masked-LM has the same trunk."""
    model = encoder(replace(TEXT, classes=20))
    other = encoder(replace(TEXT, classes=0))
    text = jnp.concatenate([padded(9), jnp.asarray([[7, *[-1] * 8]])])
    found, wanted = jax.jit(model)(text), jax.jit(other)(text)
    np.testing.assert_allclose(found[2, 0], wanted[2, 0], atol=1e-6)
    several = wanted[1, :6].mean(axis=0)  # the head is linear
    np.testing.assert_allclose(found[1, 0], several, atol=1e-5)


def test_patches_are_squares_row_by_row():
    images = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    found = np.asarray(patchify(jnp.asarray(images), 2))
    assert found.shape == (2, 6, 12)
    for y in range(2):
        for x in range(3):
            square = images[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
            np.testing.assert_array_equal(found[:, 3 * y + x], square.reshape(2, -1))


def test_images_are_scored_from_all_their_patches():
    model = jax.jit(encoder(IMAGES))
    images = jax.random.normal(jax.random.key(1), (2, 4, 6, 3))
    before = model(images)
    assert before.shape == (2, 1, 3)
    for y, x in ((0, 0), (3, 5)):
        assert abs(model(images.at[:, y, x].add(1.0)) - before).max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"length": 5}, "model.length 5 must be 6, the patches of 2 × 2 in an image"),
        ({"patch": 4}, "model.patch 4 does not divide images of 4 × 6 × 3"),
        ({"classes": 0}, "set model.classes"),
        ({"tie_embeddings": True}, "model.tie_embeddings needs logits of tokens"),
        ({"patch": 0}, r"model.image \(4, 6, 3\) has no meaning: model.patch is 0"),
        ({"kind": "decoder", "classes": 0}, "model.patch 2 has no meaning"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        encoder(replace(IMAGES, **changes))


def test_a_decoder_does_not_pass_for_an_encoder():
    with pytest.raises(ValueError, match="'encoder' needs an Encoder"):
        Decoder(TEXT, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="not decoder"):
        encoder(replace(TEXT, kind="decoder", classes=0))
