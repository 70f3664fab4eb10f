"""A loop over stacked blocks computes the same function as a list of blocks."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.layers.block import POLICIES
from symjax.models import Decoder
from symjax.models.scanned import run_scanned, set_values, values_by_depth

MODEL = config.Model(vocabulary=23, width=16, heads=2, depth=2, length=24, dropout=0.1)
TOKENS = jax.random.randint(jax.random.key(1), (2, 19), 0, 23)
CHOICES = [
    {
        "pattern": ("performer", "softmax"),
        "depth": 4,
        "differential": "v1",
        "feature_count": 8,
    },
    {"mechanism": "decay", "decay": "lightning", "depth": 3, "positions": "rope"},
]
CHOICES += [
    pytest.param(choice, marks=pytest.mark.slow)
    for choice in (
        {"differential": "v2", "tie_embeddings": True},
        {"differential": "v1", "symmetric": "pairwise", "query_key_norm": True},
        {"mechanism": "decay", "decay": "transnormer", "output_gate": True},
        {"mechanism": "decay", "decay": "gated", "differential": "v1"},
        {"mechanism": "linear", "features": "t2r", "feature_count": 8},
        {"pattern": ("flash", "gau"), "depth": 4, "chunk_size": 4},
    )
]


def options(choice: dict, **changes) -> config.Model:
    known = config.Attention.__dataclass_fields__
    chosen = {name: value for name, value in choice.items() if name in known}
    others = {name: value for name, value in choice.items() if name not in known}
    return replace(MODEL, attention=config.Attention(**chosen), **{**others, **changes})


def compiled(model: config.Model):
    """Return loss and gradients with dropout as a function of weights, and the
    weights."""
    graph, weights, rest = nnx.split(Decoder(model, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(weights):
        scores = nnx.merge(graph, weights, rest)(TOKENS, dropout_key=jax.random.key(5))
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - scores[..., 0])

    return jax.jit(jax.value_and_grad(loss)).lower(weights).compile(), weights


def slopes(model: config.Model):
    """Return the loss, and its gradient by weight."""
    function, weights = compiled(model)
    value, gradient = function(weights)
    return float(value), nnx.to_pure_dict(gradient)


def assert_close(left, right, share=1e-6):
    """Compare arrays up to a share of the largest value in each."""

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=share * max(1, abs(b).max()))

    jax.tree.map(close, left, right)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_loop_has_the_loss_and_the_gradients_of_the_list(choice):
    value, gradient = slopes(options(choice))
    looped, other = slopes(options(choice, scan_layers=True))
    assert looped == pytest.approx(value, abs=1e-6)
    assert_close(other, gradient)


def test_what_is_computed_again_changes_no_gradient_and_saves_memory():
    found, memory = {}, {}
    for remat in ("none", *POLICIES):
        function, weights = compiled(options({}, scan_layers=True, remat=remat))
        found[remat] = function(weights)
        plan = function.memory_analysis()
        assert plan is not None
        memory[remat] = plan.temp_size_in_bytes
    for remat in POLICIES:
        assert abs(found[remat][0] - found["none"][0]) < 1e-6
        assert_close(found[remat][1], found["none"][1])
    names = "full", "feedforward", "dots", "none"
    sizes = [memory[name] for name in names]
    assert sizes == sorted(set(sizes))


def test_blocks_of_two_kinds_are_not_run_as_one():
    model = Decoder(options({"pattern": ("softmax", "cosine")}), rngs=nnx.Rngs(0))
    model.period = 1
    with pytest.raises(ValueError, match="block 1 differs from block 0"):
        run_scanned(model, jnp.zeros((1, 3, 16)), [None, None])


def test_numbers_of_the_depth_are_the_layer_s_own():
    model = Decoder(options({"differential": "v1"}), rngs=nnx.Rngs(0))
    first, second = (values_by_depth(block) for block in model.blocks)
    path = "attention/lambda_initial"
    assert first[path] != second[path]
    set_values(model.blocks[1], first)
    assert values_by_depth(model.blocks[1])[path] == first[path]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"pattern": ("softmax", "cosine"), "depth": 3}, "no multiple of its 2"),
        ({"kind": "universal"}, "model.kind is 'universal'"),
    ],
)
def test_what_a_loop_cannot_run_is_refused_by_name(choice, words):
    with pytest.raises(ValueError, match=f"model.scan_layers.*{re.escape(words)}"):
        Decoder(options(choice, scan_layers=True), rngs=nnx.Rngs(0))


def test_a_second_call_outside_jit_compiles_nothing(compilations):
    model = Decoder(replace(MODEL, scan_layers=True), rngs=nnx.Rngs(0))
    model(TOKENS)
    compilations.clear()
    model(TOKENS)
    assert not compilations
    model(TOKENS[:, :-1])
    assert compilations
