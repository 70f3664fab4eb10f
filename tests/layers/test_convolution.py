"""Short convolutions of queries, keys and values, over whole rows and in decoding."""

import jax
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.layers import Attention, GatedBlock
from symjax.layers.convolution import ShortConvolution
from symjax.layers.mixer import KeyValues
from symjax.training.sharding import make_mesh

WIDTH, HEADS, TIME, SIZE = 24, 3, 13, 4
CHOICES = [
    {"mechanism": "softmax"},
    {"mechanism": "linear", "symmetric": "plain", "differential": "v1"},
    {"mechanism": "decay", "decay": "gated", "query_key_norm": True},
]


def options(kind="decoder", heads=HEADS, **chosen):
    chosen = {"short_convolution": SIZE, **chosen}
    attention = config.Attention(**chosen)
    return config.Model(kind=kind, width=WIDTH, heads=heads, attention=attention)


def layer_of(**chosen):
    return Attention(options(**chosen), 0, rngs=nnx.Rngs(0))


def inputs(batch=2):
    return np.random.default_rng(0).normal(size=(batch, TIME, WIDTH)).astype("f4")


@nnx.jit
def apply(layer, x):
    return layer(x)


@nnx.jit
def decode(layer, x, cache, position, padding_mask):
    return layer.decode(x, cache, position, padding_mask)


@pytest.mark.parametrize("size", [1, 2, 4, 20])
def test_a_convolution_is_its_definition(size):
    made = ShortConvolution(size, WIDTH, dtype=np.float32, rngs=nnx.Rngs(0))
    x, kernel = inputs().astype("f8"), np.asarray(made.kernel[...], "f8")
    wanted = np.zeros_like(x)
    for t in range(TIME):
        for i in range(size):
            if (s := t - size + 1 + i) >= 0:
                wanted[:, t] += kernel[i] * x[:, s]
    wanted /= 1 + np.exp(-wanted)
    x = inputs()
    found, last = made(x)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert last.shape == (2, size - 1, WIDTH)
    kept = min(size - 1, TIME)
    np.testing.assert_array_equal(last[:, size - 1 - kept :], x[:, TIME - kept :])
    assert not last[:, : size - 1 - kept].any()


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_pieces_of_different_lengths_and_steps_give_the_whole(chosen):
    layer, x = layer_of(**chosen), inputs()
    wanted = np.asarray(apply(layer, x))
    cache, done = layer.init_cache(2, TIME), np.zeros(2, int)
    for lengths in ((6, 2), (1, 5), (3, 0), (1, 1)):
        piece = np.full((2, max(lengths), WIDTH), 50.0, np.float32)
        for b, n in enumerate(lengths):
            piece[b, :n] = x[b, done[b] : done[b] + n]
        mask = np.arange(max(lengths))[None] < np.reshape(lengths, (2, 1))
        if mask.all():
            mask = None
        output, cache = decode(layer, piece, cache, done, mask)
        for b, n in enumerate(lengths):
            own = wanted[b, done[b] : done[b] + n]
            np.testing.assert_allclose(output[b, :n], own, atol=2e-5)
        done += lengths


def test_it_changes_what_a_layer_computes_and_no_earlier_token():
    layer, x = layer_of(), inputs()
    plain = Attention(options(short_convolution=0), 0, rngs=nnx.Rngs(0))
    assert not [name for name in vars(plain) if "convolution" in name]
    assert isinstance(plain.init_cache(1, 4), KeyValues)
    whole = apply(layer, x)
    assert abs(whole - apply(plain, x)).max() > 0.01
    later = apply(layer, np.concatenate([x[:, :7], -x[:, 7:]], axis=1))
    np.testing.assert_allclose(later[:, :7], whole[:, :7], atol=1e-6)
    assert (abs(later - whole)[:, 7:].max(axis=(0, 2)) > 1e-3).all()


def test_a_mesh_changes_nothing():
    layer = layer_of(mechanism="linear", heads=4)
    x = np.concatenate([inputs(4), inputs(4)[:, :3]], axis=1)
    wanted = apply(layer, x)
    with jax.set_mesh(make_mesh(config.Mesh(data=2, tensor=2, sequence=2))):
        found = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(found, wanted, 0, 2e-6 * abs(wanted).max())


def test_where_it_has_no_meaning_it_is_refused():
    with pytest.raises(
        ValueError, match="short_convolution 4 needs a causal model, but model.kind"
    ):
        layer_of(kind="encoder")
    with pytest.raises(ValueError, match="short_convolution 4: gau has no such option"):
        GatedBlock(options(mechanism="gau"), 0, rngs=nnx.Rngs(0))
