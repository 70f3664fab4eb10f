"""The large presets of configs/: their numbers of parameters, and shared properties."""

import dataclasses

import jax
import pytest
from flax import nnx
from runs import ROOT

from symjax import validation
from symjax.models import build
from symjax.programs.configuration_file import load_config

NAMES = "gpt sym diff diff_sym diff_v2 performer retnet gla delta"
# Number of parameters, and its largest relative deviation. `:1b` has 1.15 to 1.33e9,
# because its layers were chosen before its vocabulary of 50,304.
SIZES = {"125m": (125e6, 0.08), "350m": (350e6, 0.12), "1b": (1e9, 1 / 3)}
SIZES["7b"] = (7e9, 0.1)


def parameters(model) -> int:
    """Return the number of parameters, from models of one and of two blocks."""
    one, two = (count(dataclasses.replace(model, depth=n)) for n in (1, 2))
    return one + (model.depth - 1) * (two - one)


def count(model) -> int:
    built = nnx.eval_shape(lambda: build(model, rngs=nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(built, nnx.Param)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES.split())
def test_a_preset_has_the_parameters_of_its_name(name, size):
    tree = load_config(ROOT / "configs" / f"{name}.py", size).to_dict()
    options = validation.from_dict(tree)
    named, share = SIZES[size]
    assert abs(parameters(options.model) / named - 1) < share
    model = options.model
    for features in (model.vocabulary, model.width, model.feedforward):
        assert features % 128 == 0
    tokens = options.steps * options.batch_size * model.length
    assert 15 < tokens / parameters(model) < 80
