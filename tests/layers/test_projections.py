"""Shared projections, sizes of keys, gates and norms of heads against definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from projected import TIME, WIDTH, layer_of

from symjax import config
from symjax.layers import Attention


def rms(x, scale=None):
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normed if scale is None else normed * np.asarray(scale[...], np.float64)


def turned(x):
    """Rotate pairs (i, i + H/2) of [T N H] by their positions."""
    half = x.shape[-1] // 2
    angles = np.arange(TIME)[:, None] * 10000.0 ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def definition(layer, x, options):
    """Compute one example in float64; `options` are those of `layer_of`."""
    sizes = layer.mixer.sizes
    kind, symmetric = options.get("differential"), options.get("symmetric", "none")

    def dense(name, x):
        part = getattr(layer, name)
        kernel, bias = (np.asarray(w[...], "f8") for w in (part.kernel, part.bias))
        return x @ kernel + bias

    made = dense("query", x).reshape(TIME, sizes.queries, sizes.head_size)
    query = key = (
        rms(made, layer.query_norm.scale) if "query_key_norm" in options else made
    )
    if symmetric in ("none", "kv"):
        key = made = dense("key", x).reshape(TIME, sizes.keys, sizes.head_size)
        key = rms(key, layer.own_key_norm.scale) if "query_key_norm" in options else key
    if options.get("key_norm") == "unit":
        key = key / np.sqrt((key**2).sum(axis=-1, keepdims=True))
    value = made if symmetric in ("kv", "qkv") else dense("value", x)
    value = value.reshape(TIME, sizes.kv_heads, sizes.value_size)
    if options.get("positions") == "rope":
        query, key = turned(query), turned(key)
    maps = []
    for head in range(sizes.queries):
        branch = head % 2 if sizes.keys > sizes.kv_heads else 0
        group = head // (sizes.queries // sizes.kv_heads)
        own = key[:, group * (sizes.keys // sizes.kv_heads) + branch]
        scores = np.exp(query[:, head] @ own.T / np.sqrt(sizes.head_size))
        scores = np.tril(scores)
        maps.append(scores / scores.sum(axis=-1, keepdims=True))
    if kind == "v1":
        lam = float(layer.lam())
        maps = [one - lam * two for one, two in zip(maps[::2], maps[1::2], strict=True)]
    elif kind == "v2":
        logits = x @ np.asarray(layer.lambda_projection.kernel[...], "f8")
        lam = (1 / (1 + np.exp(-logits))).T[..., None]
        maps = [maps[2 * n] - lam[n] * maps[2 * n + 1] for n in range(sizes.heads)]
    repeats = sizes.heads // sizes.kv_heads
    mixed = [one @ value[:, head // repeats] for head, one in enumerate(maps)]
    mixed = np.stack(mixed, axis=1)
    if kind == "v1":
        initial = options.get("lambda_initial", 0.2)
        normed = rms(mixed, layer.head_norm.scale) if layer.has_head_norm else mixed
        mixed = normed * (1 - initial)
    mixed = mixed.reshape(TIME, -1)
    if (gate := options.get("output_gate")) is not None:
        logits = dense("output_gate", x)
        sigmoid = 1 / (1 + np.exp(-logits))
        mixed = mixed * (sigmoid if gate == "sigmoid" else logits * sigmoid)
    return dense("out", mixed)


CHOICES = [
    dict(symmetric="kv", heads=4, kv_heads=2, positions="rope", query_key_norm=True),
    dict(symmetric="kv", differential="v2"),
    dict(symmetric="qkv", differential="v1", positions="rope", key_norm="unit"),
    dict(symmetric="qkv", query_key_norm=True, output_gate="silu"),
    dict(key_size=6, differential="v1", positions="rope", output_gate="sigmoid"),
    dict(key_size=5, heads=4, kv_heads=2, differential="v2"),
    dict(differential="v1", head_norm=False, lambda_initial=0.5),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_layer_is_its_definition(choice):
    layer = layer_of(**choice)
    x = np.random.default_rng(3).normal(size=(2, TIME, WIDTH))
    wanted = [definition(layer, one, choice) for one in x]
    found = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("symmetric", "differential"),
    [("kv", "none"), ("kv", "v1"), ("kv", "v2"), ("qkv", "none"), ("qkv", "v1")],
)
def test_shared_values_halve_the_cache(symmetric, differential):
    def size(symmetric):
        layer = layer_of(symmetric=symmetric, differential=differential)
        cache = jax.eval_shape(lambda: layer.init_cache(2, 13))
        return sum(x.size for x in jax.tree.leaves(cache))

    assert size(symmetric) == size("none") / 2


def test_weights_that_are_shared_are_not_there():
    def count(**choice):
        weights = nnx.state(layer_of(**choice), nnx.Param)
        return sum(x.size for x in jax.tree.leaves(weights))

    projection = WIDTH * WIDTH + WIDTH
    assert count() - count(symmetric="kv") == projection
    assert count() - count(symmetric="qkv") == 2 * projection
    assert count() - count(key_size=5) == 2 * (WIDTH + 1) * 3 * (8 - 5)


def test_former_values_of_the_gate_mean_silu_and_none():
    for former, present in (
        (True, "silu"),
        (False, "none"),
        ("true", "silu"),
        ("False", "none"),
    ):
        assert config.Attention(output_gate=former).output_gate == present


def test_keys_may_begin_as_the_queries_do():
    def layer(**chosen):
        options = config.Model(
            width=WIDTH, heads=3, attention=config.Attention(**chosen)
        )
        return Attention(options, 0, rngs=nnx.Rngs(0))

    for chosen in ({}, {"symmetric": "kv", "differential": "v1"}):
        copied, drawn = layer(symmetric_initial=True, **chosen), layer(**chosen)
        query = copied.query.kernel[...]
        np.testing.assert_array_equal(copied.key.kernel[...], query)
        np.testing.assert_array_equal(drawn.query.kernel[...], query)
        assert abs(drawn.key.kernel[...] - query).max() > 0.1


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"symmetric": "qkv", "heads": 4, "kv_heads": 2}, "must equal model.heads 4"),
        ({"symmetric": "qkv", "differential": "v2"}, "gives two query heads one key"),
        ({"symmetric": "kv", "key_size": 5}, "model.attention.key_size 5 must be 0"),
        ({"symmetric": "kv", "key_norm": "unit"}, "symmetric is 'kv'"),
        (
            {"symmetric": "kv", "mechanism": "matrix_function", "kind": "encoder"},
            "symmetric 'kv' is about keys",
        ),
        (
            {"head_norm": False},
            "head_norm False needs differential 'v1' or a mechanism",
        ),
        ({"lambda_initial": 0.5}, "lambda_initial 0.5 needs differential 'v1'"),
        ({"lambda_initial": 1.0, "differential": "v1"}, "to below 1, got 1.0"),
        (
            {"lambda_initial": 0.5, "differential": "v1", "depth_offset": 1},
            "depth_offset 1 changes a λ_init by depth",
        ),
        (
            {"symmetric": "plain", "symmetric_initial": True},
            "a projection of their own, but model.attention.symmetric is 'plain'",
        ),
        (
            {"differential": "v2", "symmetric_initial": True},
            "as many key heads as query heads, got 3 and 6",
        ),
        ({"output_gate": "tanh"}, "output_gate 'tanh' is unknown: choose from"),
    ],
    ids=str,
)
def test_choices_that_exclude_each_other_are_named(choice, words):
    with pytest.raises(ValueError, match=words):
        layer_of(**choice)
