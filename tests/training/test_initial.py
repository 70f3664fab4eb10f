"""init_from: a run that starts from another run's weights."""

import jax
import numpy as np
import pytest
from runs import call, compile_cache, train, words, write_text

from symjax.attention.projections import unit_statistics
from symjax.evaluation.loading import load


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A finished run with symmetric keys and differential V1, and its text."""
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
def test_random_features_are_fitted_to_the_weights_they_start_from(first):
    """FAVOR# from other weights has statistics of its own, which are stored."""
    folder, text = first
    names = {"mechanism": "performer", "features": "favor#"}
    keys = {f"model__attention__{name}": value for name, value in names.items()}
    start = {"init_from": folder / "first", "optimizer__learning_rate": 0.0}
    assert train(text, folder / "fitted", **keys, **start) == 0
    found = load(folder / "fitted").constants["blocks"][0]["attention"]
    size = len(found["statistics_a"])
    unit = unit_statistics(size, size**-0.5)
    assert abs(found["statistics_a"] - unit.a).max() > 1e-3
    # √(1 − 4a) times a rotation
    scales = np.sqrt(1 - 4 * np.asarray(found["statistics_a"]))[:, None]
    rotation = np.asarray(found["statistics_b"]) / scales
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(size), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"init_from": "nowhere"}, "init_from: nowhere is no workdir"),
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
    error = capfd.readouterr().err
    assert line in error and error.count("\n") == 1
    assert not (folder / "third").exists()
