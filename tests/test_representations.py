"""Notebooks show a value in a few lines, whatever arrays it holds."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.data import subwords
from symjax.data.tokens import ByteTokenizer, CharTokenizer
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Result, Table
from symjax.exchange.loaded import Loaded
from symjax.figures import Grid
from symjax.models.decoder import Decoder
from symjax.training.saved import Saved

MODEL = config.Model(
    vocabulary=256,
    width=16,
    depth=3,
    heads=2,
    length=12,
    pattern=("softmax", "linear"),
    attention=config.Attention(differential="v1"),
)
OPTIONS = config.Config(steps=7, model=MODEL)
ARRAYS = {"kernel": np.zeros((300, 3))}


@pytest.fixture(scope="module")
def model():
    return Decoder(MODEL, rngs=nnx.Rngs(0))


def test_a_loaded_model_shows_its_sizes_attention_tokens_and_step(model):
    labels = tuple(f"label {n}" for n in range(900))
    found = Loaded(model, ByteTokenizer(), OPTIONS, 4000, labels, ema=True)
    shown = repr(found)
    assert shown.count("\n") < 12 and max(map(len, shown.splitlines())) <= 88
    weights = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    wanted = f"{weights:,} parameters", "3 layers of width 16", "2 heads", "12 tokens"
    wanted += "softmax and linear, differential v1", "step       4000, the mean of"
    wanted += "900: 'label 0', 'label 1', 'label 2', 'label 3', …", "ByteTokenizer()"
    assert all(words in shown for words in wanted), shown
    assert "ema" not in repr(dataclasses.replace(found, ema=False))


def test_a_configuration_shows_what_differs_from_the_defaults_and_reads_back():
    shown = repr(OPTIONS)
    assert shown == (
        "Config(steps=7, model=Model(vocabulary=256, width=16, heads=2, length=12, "
        "pattern=('softmax', 'linear'), attention=Attention(differential='v1')))"
    )
    assert eval(shown, vars(config).copy()) == OPTIONS
    assert repr(config.Config()) == "Config()"


@pytest.mark.parametrize(
    "value",
    [
        Saved(3, OPTIONS, {}, (), ARRAYS, {}),
        LoadedRun(3, OPTIONS, None, None, ARRAYS, {}, "runs/gpt", {}),
        Result({"loss": {"x": [1.0] * 999}}, ["line"] * 99, (), ()),
        Result(
            {},
            [],
            (Table("many", ("a", "b"), [(1, 2)] * 999),),
            (Grid("map", "x", "y", ["0"], ["1"], np.zeros((99, 99)).tolist()),),
        ),
        Table("many", ("a", "b"), [(1, 2)] * 999),
        CharTokenizer("".join(map(chr, range(32, 9000)))),
        subwords.SubwordTokenizer("x" * 10**6, "<end>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_much_is_shown_in_one_line(value):
    assert len(repr(value)) < 100 and "\n" not in repr(value), repr(value)
