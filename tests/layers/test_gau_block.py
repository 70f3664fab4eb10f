"""The gated block against its definition, in decoding, and on a mesh."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

from symjax import config
from symjax.layers import GatedBlock
from symjax.training.sharding import make_mesh

WIDTH, TIME, LENGTH, GROUP = 12, 19, 23, 8


def block(mechanism="gau", *, seed=0, **changes):
    """Return a block whose biases, scales and norms are not the initial ones."""
    known = config.Attention.__dataclass_fields__
    chosen = {name: changes.pop(name) for name in list(changes) if name in known}
    if mechanism == "flash":
        chosen.setdefault("chunk_size", GROUP)
    model = {"width": WIDTH, "length": LENGTH, "positions": "rope", **changes}
    model["attention"] = config.Attention(mechanism=mechanism, **chosen)
    options = config.Model(**model)
    made = GatedBlock(options, 0, rngs=nnx.Rngs(seed))
    graph, weights = nnx.split(made, nnx.Param)
    rng = np.random.default_rng(seed)
    weights = jax.tree.map(
        lambda x: x + rng.normal(size=x.shape, scale=0.3).astype(x.dtype), weights
    )
    return nnx.merge(graph, weights)


def inputs(batch=2, time=TIME):
    return np.random.default_rng(3).normal(size=(batch, time, WIDTH)).astype("f4")


@nnx.jit
def apply(made, x):
    return made(x)


@nnx.jit
def decode(made, x, state, position, padding_mask=None):
    return made.decode(x, state, position, padding_mask)


def definition(made, x: np.ndarray):
    """Compute x + W_o(u ⊙ A v) from the weights of a block, in float64."""

    def weight(part, name):
        return np.asarray(getattr(part, name)[...], np.float64)

    def dense(part, x):
        return x @ weight(part, "kernel") + weight(part, "bias")

    def silu(x):
        return x / (1 + np.exp(-x))

    def role(name):
        part = made.roles[name]
        used = z * weight(part, "scale") + weight(part, "bias")
        return oracles.rotate(used[:, :, None], np.arange(x.shape[1])[None])

    x = x.astype(np.float64)
    mean = x.mean(axis=-1, keepdims=True)
    y = (x - mean) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    y = y * weight(made.norm, "scale") + weight(made.norm, "bias")
    z, value = silu(dense(made.shared, y)), silu(dense(made.value, y))[:, :, None]
    query, key = role("query"), role("key")
    if made.mixer.mechanism == "gau":
        pairs = oracles.visible(len(x), 1, *[x.shape[1]] * 2, is_causal=True)
        mixed = oracles.squared_relu(query, key, value, pairs, divisor=LENGTH)
    else:
        arrays = query, key, role("linear_query"), role("linear_key"), value
        mixed = oracles.flash(*arrays, group_size=GROUP, causal=True)
    return x + dense(made.out, silu(dense(made.gate, y)) * mixed[:, :, 0])


@pytest.mark.parametrize("mechanism", ["gau", "flash"])
def test_a_block_equals_its_definition(mechanism):
    made, x = block(mechanism), inputs()
    wanted = definition(made, x)
    assert abs(wanted - x).max() > 1
    np.testing.assert_allclose(apply(made, x), wanted, 0, 1e-5 * abs(wanted).max())


@pytest.mark.parametrize("mechanism", ["gau", "flash"])
def test_pieces_of_different_lengths_and_steps_give_the_whole(mechanism):
    """The second piece has more places than the cache has room for, but not more
    tokens."""
    made, x = block(mechanism), inputs()
    wanted = definition(made, x)
    state, done = made.init_cache(2, TIME), np.zeros(2, int)
    for lengths, width in (((11, 4), 11), ((3, 7), 11), ((1, 0), 1), ((1, 1), 1)):
        piece = np.full((2, width, WIDTH), 50.0, np.float32)
        for b, n in enumerate(lengths):
            piece[b, :n] = x[b, done[b] : done[b] + n]
        padding_mask = np.arange(width)[None] < np.reshape(lengths, (2, 1))
        output, state = decode(made, piece, state, done, padding_mask)
        for b, n in enumerate(lengths):
            own = wanted[b, done[b] : done[b] + n]
            limit = 1e-5 * abs(wanted).max()
            np.testing.assert_allclose(output[b, :n], own, 0, limit)
        done += lengths
    output, _ = decode(
        made, np.stack([x[b, n : n + 1] for b, n in enumerate(done)]), state, done
    )
    own = np.stack([wanted[b, n : n + 1] for b, n in enumerate(done)])
    np.testing.assert_allclose(output, own, 0, 1e-5 * abs(wanted).max())


def test_the_state_of_flash_does_not_grow_with_the_context():
    for mechanism, grows in (("gau", True), ("flash", False)):
        made = block(mechanism)
        short, long = (
            sum(x.nbytes for x in jax.tree.leaves(made.init_cache(1, length)))
            for length in (10, 1000)
        )
        assert (long > short) == grows


@pytest.mark.parametrize("mechanism", ["gau", "flash"])
def test_a_mesh_changes_nothing(mechanism):
    made, x = block(mechanism), inputs(8)
    wanted = apply(made, x)
    mesh = make_mesh(config.Mesh(data=4, tensor=2))
    with jax.set_mesh(mesh):
        found = nnx.jit(lambda made, x: made(x))(made, x)
    np.testing.assert_allclose(found, wanted, 0, 2e-6 * abs(wanted).max())


def test_dropout_is_of_what_is_added():
    made, x = block(dropout=0.5), inputs()
    key = jax.random.key(0)
    dropped = np.asarray(nnx.jit(lambda made, x: made(x, dropout_key=key))(made, x)) - x
    added = np.asarray(apply(made, x) - x)
    kept = dropped != 0
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_allclose(dropped[kept], 2 * added[kept], 1e-3, 1e-4)


def test_sizes():
    """Half of the width and at most 128, or the given size."""
    for width, asked, wanted in ((12, 0, 6), (256, 0, 128), (512, 0, 128), (12, 4, 4)):
        make = partial(block, width=width, head_size=asked, positions="none")
        made = nnx.eval_shape(make)
        assert made.roles["query"].scale.shape == (wanted,)
        assert made.value.kernel.shape == (width, 2 * width)


def test_bfloat16_computes_close_to_float32():
    x, exact = inputs(), apply(block("flash"), inputs())
    rough = apply(block("flash", dtype="bfloat16"), jnp.asarray(x, jnp.bfloat16))
    assert rough.dtype == jnp.bfloat16
    error = np.asarray(rough, np.float32) - exact
    # 2⁻⁸ a rounding, some ten roundings deep
    assert np.sqrt(np.mean(error**2)) < 0.03 * np.std(exact)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"symmetric": "plain"}, "model.attention.symmetric 'plain': gau has no such"),
        ({"mechanism": "flash", "implementation": "whole"}, "flash has no such option"),
        ({"chunk_size": 8}, "model.attention.chunk_size 8: gau has no such option"),
        ({"feedforward": 40}, "model.feedforward 40: gau has no such option"),
        ({"kv_heads": 2}, "model.kv_heads 2: gau has no such option"),
        ({"positions": "alibi"}, "a gated block has one"),
        ({"head_size": 5}, "give an even model.head_size"),
    ],
    ids=str,
)
def test_what_a_block_does_not_know_is_refused_by_name(choice, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        block(**choice)
    if "positions" not in choice and "head_size" not in choice:
        mechanism = choice.get("mechanism", "gau")
        rest = {name: x for name, x in choice.items() if name != "mechanism"}
        other = "linear" if "chunk_size" in rest else "softmax"
        block(mechanism, pattern=(mechanism, other), **rest)


@pytest.mark.parametrize("mechanism", ["gau", "flash"])
@pytest.mark.parametrize(
    "choice",
    [
        {"differential": "v1"},
        {"differential": "v2"},
        {"differential": "v1", "signals": 3},
        {"symmetric": "kv"},
    ],
    ids=str,
)
def test_choices_for_heads_do_not_reach_a_gated_block_of_a_pattern(mechanism, choice):
    beside = block(mechanism, pattern=(mechanism, "softmax"), heads=3, **choice)
    alone = block(mechanism, heads=3)
    np.testing.assert_array_equal(apply(beside, inputs()), apply(alone, inputs()))
    state = beside.init_cache(2, LENGTH), alone.init_cache(2, LENGTH)
    jax.tree.map(np.testing.assert_array_equal, *state)
