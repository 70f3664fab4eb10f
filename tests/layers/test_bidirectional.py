"""Layers of encoders: every token sees all tokens, and no pads."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import attention, config
from symjax.layers import Attention, Block, GatedBlock

WIDTH, HEADS, TIME, BATCH = 24, 3, 11, 2
PADDING_MASK = np.arange(TIME)[None] < np.array([[7], [11]])
MECHANISMS = [
    name for name, mechanism in attention.MECHANISMS.items() if mechanism.bidirectional
]
ENCODER = config.Model(kind="encoder", width=WIDTH, heads=HEADS, classes=2)


def options(**chosen):
    return replace(ENCODER, attention=config.Attention(**chosen))


def inputs(key=1):
    return jax.random.normal(jax.random.key(key), (BATCH, TIME, WIDTH))


def split(layer, name, x, heads):
    return getattr(layer, name)(x).reshape(BATCH, TIME, heads, -1)


@pytest.mark.parametrize("mechanism", ["softmax", "performer", "matrix_function"])
def test_a_layer_is_the_pure_function_between_its_projections(mechanism):
    layer = Attention(options(mechanism=mechanism), 0, rngs=nnx.Rngs(0))
    x, mask = inputs(), jnp.asarray(PADDING_MASK)[:, None, None]
    query, value = (split(layer, name, x, HEADS) for name in ("query", "value"))
    if mechanism == "matrix_function":
        assert not hasattr(layer, "key")
        mixed = attention.matrix_function(query, value, "exp", mask)
    else:
        key = split(layer, "key", x, HEADS)
        more = {"projection": layer.projection[...]} if mechanism == "performer" else {}
        function = getattr(attention, mechanism)
        mixed = function(query, key, value, mask=mask, **more)
    wanted = layer.out(mixed.reshape(BATCH, TIME, -1))
    np.testing.assert_allclose(layer(x, jnp.asarray(PADDING_MASK)), wanted, atol=2e-6)


def test_the_matrix_function_and_its_scale_are_chosen_by_name():
    """Compared with the function of the whole matrix in float64."""
    chosen = options(
        mechanism="matrix_function", function="resolvent", function_scale=3.0
    )
    layer = Attention(chosen, 0, rngs=nnx.Rngs(0))
    x = inputs()
    query, value = (
        np.asarray(split(layer, name, x, HEADS), np.float64)
        for name in ("query", "value")
    )
    matrix = np.einsum("btnh,bsnh->bnts", query, query) * 3 / (TIME * 8**0.5)
    inverse = np.linalg.inv(np.eye(TIME) + matrix)
    mixed = np.einsum("bnts,bsnv->btnv", inverse, value)
    wanted = layer.out(jnp.asarray(mixed, jnp.float32).reshape(BATCH, TIME, -1))
    np.testing.assert_allclose(layer(x), wanted, atol=5e-6)


@pytest.mark.parametrize("mechanism", ["linear", "matrix_function"])
def test_differential_maps_are_subtracted_both_ways(mechanism):
    chosen = options(mechanism=mechanism, symmetric="plain", differential="v1")
    layer = Attention(chosen, 0, rngs=nnx.Rngs(0))
    x, mask = inputs(), jnp.asarray(PADDING_MASK)[:, None, None]
    query = split(layer, "query", x, 2 * HEADS)
    value = split(layer, "value", x, HEADS)

    def branch(number):
        part = query[:, :, number::2]
        if mechanism == "matrix_function":
            return attention.matrix_function(part, value, "exp", mask)
        return getattr(attention, mechanism)(part, part, value, mask=mask)

    mixed = branch(0) - layer.lam() * branch(1)
    mixed = layer.head_norm(mixed) * (1 - layer.lambda_initial)
    wanted = layer.out(mixed.reshape(BATCH, TIME, -1))
    np.testing.assert_allclose(layer(x, jnp.asarray(PADDING_MASK)), wanted, atol=2e-5)


def test_alibi_counts_distance_on_both_sides():
    layer = Attention(replace(ENCODER, positions="alibi"), 0, rngs=nnx.Rngs(0))
    x = inputs()
    query, key, value = (split(layer, n, x, HEADS) for n in ("query", "key", "value"))
    slopes = np.asarray(attention.alibi_slopes(HEADS))
    distance = np.abs(np.arange(TIME)[:, None] - np.arange(TIME)[None])
    bias = jnp.asarray(-slopes[None, :, None, None] * distance[None, None], jnp.float32)
    mixed = attention.softmax(query, key, value, bias)
    wanted = layer.out(mixed.reshape(BATCH, TIME, -1))
    np.testing.assert_allclose(layer(x), wanted, atol=2e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_block_sees_what_is_present_on_both_sides_and_no_pad(mechanism):
    """Pads of any content change nothing; tokens reach tokens on both sides."""
    kind = GatedBlock if attention.MECHANISMS[mechanism].gated else Block
    more = {"chunk_size": 4} if mechanism == "flash" else {}
    block = kind(options(mechanism=mechanism, **more), 0, rngs=nnx.Rngs(0))
    x, padding_mask = inputs(), jnp.asarray(PADDING_MASK)
    run = jax.jit(lambda x: block(x, padding_mask))
    before = run(x)
    pads = run(jnp.where(padding_mask[..., None], x, 50 * inputs(2)))
    np.testing.assert_array_equal(pads[PADDING_MASK], before[PADDING_MASK])
    last = run(x.at[:, 6].set(inputs(3)[:, 6]))
    assert (abs(last - before)[:, :6].max(axis=(1, 2)) > 1e-5).all()
    early = run(x.at[:, 0].set(inputs(3)[:, 0]))
    assert (abs(early - before)[:, 1:7].max(axis=(1, 2)) > 1e-5).all()


def test_flash_and_gau_are_their_pure_functions():
    x, mask = inputs(), jnp.asarray(PADDING_MASK)[:, None, None]
    for mechanism, more in (("gau", {}), ("flash", {"chunk_size": 4})):
        chosen = options(mechanism=mechanism, **more)
        block = GatedBlock(chosen, 0, rngs=nnx.Rngs(0))
        y = block.norm(x)
        z = jax.nn.silu(block.shared(y))
        roles = {name: make(z)[:, :, None] for name, make in block.roles.items()}
        value = jax.nn.silu(block.value(y))[:, :, None]
        if mechanism == "gau":  # it divides by the number of tokens
            mixed = attention.gau(**roles, value=value, mask=mask, divisor="count")
        else:
            mixed = attention.flash(**roles, value=value, mask=mask, group_size=4)
        wanted = x + block.out(jax.nn.silu(block.gate(y)) * mixed[:, :, 0])
        found = block(x, jnp.asarray(PADDING_MASK))
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize(
    ("chosen", "changes", "words"),
    [
        ({"mechanism": "decay"}, {}, "'decay' has no bidirectional form"),
        ({"mechanism": "mesa"}, {}, "'mesa' has no bidirectional form"),
        (
            {"mechanism": "matrix_function", "symmetric": "pairwise"},
            {},
            "symmetric 'pairwise' is about keys: matrix_function has none",
        ),
        (
            {"mechanism": "matrix_function", "differential": "v2"},
            {},
            "differential 'v2' is about keys",
        ),
        ({"mechanism": "matrix_function"}, {"kv_heads": 1}, "model.kv_heads 1 is"),
        ({"function": "expm1"}, {}, "function 'expm1': softmax has no such option"),
        (
            {"implementation": "ring"},
            {},
            "'ring' needs a causal model, but model.kind is 'encoder'",
        ),
        ({"function_scale": 2.0}, {}, "function_scale 2.0: softmax has no such"),
        (
            {"mechanism": "linear", "chunk_size": 32},
            {},
            "chunk_size 32: linear has no such option",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(chosen, changes, words):
    with pytest.raises(ValueError, match=words):
        Attention(replace(options(**chosen), **changes), 0, rngs=nnx.Rngs(0))
