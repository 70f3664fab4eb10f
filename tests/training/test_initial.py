"""init_from: a run that starts from another run's weights."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from runs import call, compile_cache, train, words, write_text

from symjax import config
from symjax.evaluation.loading import load
from symjax.exchange import Loaded, save_pretrained
from symjax.exchange import load as load_model
from symjax.models import build, fit_statistics
from symjax.models.huggingface.folders import read_folder
from symjax.training import initial


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return a finished run with symmetric keys and differential V1, and its text."""
    folder = tmp_path_factory.mktemp("initial")
    text = write_text(folder)
    with compile_cache(folder / "jax"):
        assert train(text, folder / "first") == 0
        yield folder, text


def test_a_run_starts_from_the_converted_weights_of_another(first, capfd):
    folder, text = first
    keys = {"model__attention__symmetric": "pairwise", "model__depth": 1}
    start = {"init_from": folder / "first", "optimizer__learning_rate": 0.0}
    assert train(text, folder / "second", **keys, **start) == 0
    assert f"weights of {folder / 'first'}" in capfd.readouterr().err
    one, two = load(folder / "first").params, load(folder / "second").params
    metric = two["blocks"][0]["attention"].pop("metric")
    np.testing.assert_array_equal(metric[0], np.eye(len(metric[0])))
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.slow
def test_fitted_statistics_of_random_features_stay_through_training(first):
    """Statistics of FAVOR# that were fitted offline are constants of the run."""
    folder, text = first
    names = {"mechanism": "performer", "features": "favor#"}
    loaded = load_model(folder / "first")
    chosen = dataclasses.replace(loaded.config.model.attention, **names)
    options = dataclasses.replace(loaded.config.model, attention=chosen)
    model = build(options, rngs=nnx.Rngs(0))
    fit_statistics(model, loaded.encode("def main(arguments):")[None])
    whole = dataclasses.replace(loaded.config, model=options)
    fitted = dataclasses.replace(loaded, model=model, config=whole)
    save_pretrained(fitted, folder / "fitted")
    keys = {f"model__attention__{name}": value for name, value in names.items()}
    start = {"init_from": folder / "fitted", "steps": 2}
    assert train(text, folder / "favor", **keys, **start) == 0
    layer = load(folder / "favor").constants["blocks"][0]["attention"]
    wanted = model.blocks[0].attention
    np.testing.assert_array_equal(layer["statistics_a"], wanted.statistics_a[...])
    np.testing.assert_array_equal(layer["statistics_b"], wanted.statistics_b[...])


def llama_keys(folder, **changes):
    """Return words for a model whose weights come from the folder."""
    model = read_folder(folder).options
    names = ("vocabulary", "width", "depth", "heads", "feedforward", "activation")
    names += ("norm", "positions", "rope_base", "bias", "tie_embeddings", "head_size")
    keys = {f"model__{name}": getattr(model, name) for name in names}
    return keys | {"init_from": folder, "model__length": 32, **changes}


def save_llama(folder, **changes):
    """Write a random Llama as transformers would, with a token for every byte."""
    chosen = {"positions": "rope", "rope_base": 500.0, "norm": "rmsnorm"}
    chosen |= {"activation": "swiglu", "feedforward": 40, "bias": False}
    sizes = {"vocabulary": 256, "width": 32, "depth": 1, "heads": 4, "kv_heads": 2}
    options = config.Model(length=64, **chosen, **sizes)
    model = build(options, rngs=nnx.Rngs(5))
    loaded = Loaded(model, None, config.Config(model=options))
    assert save_pretrained(loaded, folder, format="transformers") == "llama"
    (folder / "symjax.json").unlink()  # as another program writes it
    return model


@pytest.mark.parametrize(
    "attention",
    [
        {"symmetric": "none", "differential": "none"},
        {"symmetric": "plain", "differential": "v1"},
        {"symmetric": "none", "differential": "none", "mechanism": "performer"},
    ],
    ids=["gpt", "diff_sym", "performer"],
)
def test_a_run_starts_from_a_llama(first, tmp_path, capfd, attention):
    _, text = first
    theirs = save_llama(tmp_path)
    keys = llama_keys(tmp_path, optimizer__learning_rate=0.0, steps=1)
    keys |= {f"model__attention__{name}": value for name, value in attention.items()}
    if attention["differential"] == "v1":
        keys["model__head_size"] = 4
    assert train(text, tmp_path / "run", **keys) == 0
    said = capfd.readouterr().err
    assert f"weights of {tmp_path}" in said
    assert "does not say what its 256 tokens are: the 256 of data.tokenizer" in said
    other = "since keys differ: model.attention.mechanism 'softmax' → 'performer'"
    assert (other in said) == ("mechanism" in attention)
    params = load(tmp_path / "run").params
    np.testing.assert_array_equal(
        params["blocks"][0]["feedforward"]["gate"]["kernel"],
        theirs.blocks[0].feedforward.gate.kernel[...],
    )


def test_a_llama_of_another_shape_names_every_key_at_once(first, tmp_path, capfd):
    _, text = first
    save_llama(tmp_path)
    keys = llama_keys(tmp_path, model__width=64, model__feedforward=0)
    del keys["model__rope_base"]
    assert call("train", words(text, tmp_path / "run", **keys)) == 2
    *progress, error = capfd.readouterr().err.splitlines()
    assert not any(x.startswith("error") for x in progress)
    assert not (tmp_path / "run").exists()
    wanted = "--config.model.width=32 --config.model.rope_base=500.0 "
    wanted += "--config.model.head_size=4 --config.model.feedforward=40"
    assert f"init_from: {tmp_path} needs {wanted}" in error


def test_the_keys_of_scaled_rope_and_of_norms_are_named():
    shape = config.Model(positions="rope", norm_eps=1e-6)
    scaled = config.RopeScaling(kind="yarn", factor=4.0, original_length=16)
    theirs = dataclasses.replace(shape, rope_scaling=scaled, length=64)
    assert initial._needed_keys(theirs, dataclasses.replace(shape, norm_eps=1e-5)) == [
        "--config.model.norm_eps=1e-06",
        "--config.model.rope_scaling.kind=yarn",
        "--config.model.rope_scaling.factor=4.0",
        "--config.model.rope_scaling.original_length=16",
    ]


def test_the_tokens_of_a_folder_of_symjax_are_compared(first, tmp_path, capfd):
    folder, text = first
    save_pretrained(load_model(folder / "first"), tmp_path / "folder")
    start = {"init_from": tmp_path / "folder", "steps": 1}
    assert train(text, tmp_path / "run", **start) == 0
    assert "does not say" not in capfd.readouterr().err
    keys = {"data__tokenizer": "char", **start}
    assert call("train", words(text, tmp_path / "other", **keys)) == 2
    assert "folder was trained on other tokens" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model__width": 64}, "init_from: weights of a model with width 32"),
        (
            {"data__tokenizer": "char"},
            "other tokens: data.source 'text', data.tokenizer 'byte', model.kind 'dec",
        ),
        ({"model__attention__differential": "none"}, "'v1' does not turn into 'none'"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(first, capfd, changes, line):
    folder, text = first
    changes = {"init_from": folder / "first", **changes}
    assert call("train", words(text, folder / "third", **changes)) == 2
    *progress, message = capfd.readouterr().err.splitlines()
    assert line in message and progress == ["compiling the training step"]
    assert not (folder / "third").exists()


def test_a_misspelt_init_from_is_refused_before_data_are_read(tmp_path, capfd):
    workdir, changes = tmp_path / "run", {"init_from": "nowhere"}
    assert call("train", words(tmp_path / "no-text", workdir, **changes)) == 2
    (message,) = capfd.readouterr().err.splitlines()
    assert "init_from: nowhere is no workdir" in message
    assert not workdir.exists()
