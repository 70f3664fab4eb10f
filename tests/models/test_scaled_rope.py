"""model.rope_scaling: every way through a model rotates by the same angles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config, validation
from symjax.layers.segments import document_lengths, segments_of
from symjax.models import build, generate
from symjax.training.sharding import make_mesh

SCALINGS = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0, "original_length": 8},
    "yarn": {"factor": 4.0, "original_length": 60},
    "llama3": {"factor": 8.0, "original_length": 40, "low_frequency_factor": 0.5},
}
STATIC = [kind for kind in SCALINGS if kind != "dynamic"]
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 24))
ATTENTION = {
    "linear": {"mechanism": "linear"},
    "dynamic": {"symmetric": "plain"},
    "yarn": {"symmetric": "plain", "differential": "v1"},
    "llama3": {"mechanism": "gau"},
}


def small(kind="none", attention=None, rope=None, reads="decoder", **more):
    """Return a model with small weights, of one or two blocks."""
    tree = {"kind": reads, "vocabulary": 11, "width": 32, "heads": 2, "depth": 1}
    tree |= {"length": 24, "positions": "rope", "rope_base": 100.0}
    tree |= {"attention": attention or {}}
    scaling = rope or {"kind": kind, **SCALINGS.get(kind, {})}
    tree |= {"rope_scaling": scaling, **more}
    options = validation.from_dict({"model": tree}).model
    return build(options, rngs=nnx.Rngs(3))


@nnx.jit
def run(model, tokens, ids=None):
    return model(tokens) if ids is None else model(tokens, segment_ids=ids)


@nnx.jit
def read(model, tokens, cache, lengths=None):
    return model.decode(tokens, cache, lengths)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", STATIC)
def test_decoding_gives_what_the_whole_row_gives(kind):
    """In pieces of several tokens and of one."""
    model = small(kind, ATTENTION[kind])
    wanted, outputs = run(model, TOKENS), []
    cache = model.init_cache(2, 24)
    for part in np.split(TOKENS, [9, 10], axis=1):
        found, cache = read(model, part, cache)
        outputs.append(found)
    close(np.concatenate(outputs, axis=1), wanted)
    plain = small(attention=ATTENTION[kind])
    nnx.update(plain, nnx.state(model))
    assert np.abs(run(plain, TOKENS) - wanted).max() > 1e-3


def test_dynamic_is_plain_up_to_its_original_length_and_decodes_so():
    model = small("dynamic")
    plain = small()
    nnx.update(plain, nnx.state(model))
    short, cache = TOKENS[:, :8], model.init_cache(2, 24)
    wanted = run(plain, short)
    close(run(model, short), wanted)
    close(read(model, short, cache)[0], wanted)
    assert np.abs(run(model, TOKENS)[:, :8] - wanted).max() > 1e-3


def test_a_token_read_from_a_cache_is_turned_by_the_length_when_it_was_read():
    """Cached keys keep the angles they were given, as in transformers."""
    model = small("dynamic")
    layer, count = model.blocks[0].attention, 12
    x = jax.random.normal(jax.random.key(1), (1, count, 32))
    cache, keys = layer.init_cache(1, count), []
    for place in range(count):
        _, cache = layer.decode(x[:, place : place + 1], cache, jnp.array([place]))
        lengths = jnp.full((1, 1), place + 1)
        _, key, _ = layer.project(
            x[:, place : place + 1], jnp.full((1, 1), place), lengths=lengths
        )
        keys.append(key)
    close(cache.key, np.concatenate(keys, axis=1))


@pytest.mark.parametrize("symmetric", ["kv", "qkv"])
def test_keys_made_from_cached_values_are_turned_by_the_length_of_each_step(symmetric):
    """So a step of a layer is the last row of the text so far."""
    layer = small("dynamic", {"symmetric": symmetric}).blocks[0].attention
    count = 10
    x = jax.random.normal(jax.random.key(1), (1, count, 32))
    cache = layer.init_cache(1, count)
    for place in range(count):
        now = x[:, place : place + 1]
        found, cache = layer.decode(now, cache, jnp.array([place]))
    close(found, layer(x)[:, -1:])


@pytest.mark.parametrize("kind", SCALINGS)
def test_documents_of_a_row_are_turned_as_if_alone(kind):
    lengths = 13, 2, 9  # of dynamic: longer and shorter than its original length
    model = small(kind, ATTENTION[kind], depth=2)
    if kind == "llama3":  # gau divides by model.length
        model = small(kind, depth=2)
    ids = np.repeat(np.arange(3), lengths)[None].repeat(2, axis=0)
    parts = np.split(TOKENS, np.cumsum(lengths)[:-1], axis=1)
    wanted = np.concatenate([run(model, part) for part in parts], axis=1)
    close(run(model, TOKENS, jnp.asarray(ids)), wanted)


def test_every_token_knows_how_long_its_document_is():
    ids = jnp.array([[3, 3, 3, 1, 1, 3, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]])
    wanted = [[3, 3, 3, 2, 2, 1, 2, 2], [8] * 8]
    np.testing.assert_array_equal(document_lengths(segments_of(ids)), wanted)


@pytest.mark.parametrize("attention", [{}, {"mechanism": "gau"}], ids=str)
def test_pads_of_an_encoder_change_no_angle(attention):
    model = small("dynamic", attention, reads="encoder")
    pads = np.full((2, 30), -1)
    pads[0, :24], pads[1, :11] = TOKENS[0], TOKENS[1, :11]
    found = run(model, pads)
    close(found[:1, :24], run(model, TOKENS[:1]))
    close(found[1:, :11], run(model, TOKENS[1:, :11]))


def test_prompts_of_several_lengths_are_turned_as_if_alone():
    model = small("dynamic")
    lengths, count, key = (12, 3), 8, jax.random.key(0)
    rows = [TOKENS[0, :12], TOKENS[1, :3]]
    filled = jnp.stack([jnp.pad(row, (12 - row.size, 0)) for row in rows])
    found = generate(
        model, filled, count, key, lengths=jnp.array(lengths), temperature=0.0
    )
    for row, tokens in zip(rows, found, strict=True):
        alone = generate(model, jnp.asarray(row)[None], count, key, temperature=0.0)
        np.testing.assert_array_equal(tokens, alone[0])


@pytest.mark.parametrize("implementation", ["auto", "ring"])
@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_rows_split_over_devices_are_turned_as_whole_ones(kind, implementation):
    model = small(kind, {"implementation": implementation})
    wanted = run(small(kind), TOKENS)
    with jax.set_mesh(make_mesh(config.Mesh(data=1, sequence=4))):
        close(run(model, TOKENS), wanted)


def test_blocks_as_one_loop_give_the_same():
    model = small("yarn", {"differential": "v1"}, depth=2)
    scanned = small("yarn", {"differential": "v1"}, depth=2, scan_layers=True)
    close(run(scanned, TOKENS), run(model, TOKENS))


def test_a_scaled_part_of_the_features_turns_as_a_head_of_its_size(x64):
    """rope_share and interleaved pairs scale with the number of rotated features."""
    model = small("yarn", rope_share=0.5, positions="rope_interleaved")
    turn = model.blocks[0].attention.rotate
    x = jax.random.normal(jax.random.key(2), (1, 24, 2, 16))
    found = turn(x, jnp.arange(24)[None])
    half = small("yarn", positions="rope_interleaved", head_size=8)
    wanted = half.blocks[0].attention.rotate(x[..., :8], jnp.arange(24)[None])
    np.testing.assert_array_equal(found[..., :8], wanted)
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])


@pytest.mark.parametrize(
    ("scaling", "line"),
    [
        ({"kind": "yarn"}, "kind 'yarn' needs model.rope_scaling.original_length"),
        ({"factor": 2.0}, "rope_scaling.factor 2.0 has no meaning: .*kind is 'none'"),
        ({"kind": "linear", "original_length": 9}, "original_length 9 has no meaning"),
        (
            {"kind": "llama3", "original_length": 9, "beta_fast": 3.0},
            "beta_fast 3.0 has no meaning: model.rope_scaling.kind is 'llama3'",
        ),
        ({"kind": "ntk"}, "rope_scaling.kind 'ntk' is unknown: choose from none, lin"),
        ({"kind": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        (
            {"kind": "llama3", "original_length": 9, "high_frequency_factor": 0.5},
            "model.rope_scaling: .* below high_frequency_factor 0.5, got 1.0",
        ),
    ],
)
def test_scalings_without_a_meaning_are_refused_in_one_line(scaling, line):
    with pytest.raises(ValueError, match=line) as error:
        small(rope=scaling)
    assert "\n" not in str(error.value)


def test_scaling_is_of_rotary_positions():
    line = "model.rope_scaling.kind 'linear' has no meaning: model.positions is 'alibi'"
    with pytest.raises(ValueError, match=re.escape(line)):
        small("linear", positions="alibi", rope_base=10000.0)


def test_older_configurations_have_no_scaling():
    model = validation.from_dict({"model": {"positions": "rope"}}).model
    assert (
        model.rope_scaling == config.RopeScaling() and model.rope_scaling.kind == "none"
    )
