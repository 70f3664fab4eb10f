"""Attention transfer: the first steps of a run that converts softmax attention."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from runs import compile_cache, train, write_text

from symjax import config
from symjax.evaluation.loading import load
from symjax.evaluation.measures.reading import read
from symjax.models import convert
from symjax.models.build import merged
from symjax.training.transfer import teacher_of

SOFTMAX = {
    "model__attention__symmetric": "none",
    "model__attention__differential": "none",
}
LINEAR = SOFTMAX | {
    "model__attention__mechanism": "linear",
    "model__attention__features": "hedgehog",
    "evaluate__sample": "false",
    "log__every": 1,
    "checkpoint__every": 8,
    "checkpoint__keep": 9,
    "optimizer__decay_steps": 9,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a softmax run and its text."""
    folder = tmp_path_factory.mktemp("transfer")
    text = write_text(folder)
    with compile_cache(folder / "jax"):
        keys = SOFTMAX | {"steps": 40, "optimizer__learning_rate": 1e-2}
        assert train(text, folder / "softmax", **keys) == 0
        yield folder, text


def transfer(match, **changes):
    keys = {"transfer__match": match, "transfer__steps": 16}
    keys["transfer__learning_rate"] = 3e-2
    return LINEAR | keys | changes


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def params_of(workdir, step):
    return load(workdir, step).params


def without_maps(params):
    for block in params["blocks"].values():
        del block["attention"]["query_map"], block["attention"]["key_map"]
    return params


def test_the_error_falls_and_shared_weights_stay_until_all_train(source, capsys):
    """Outputs are matched on four devices, in two micro-batches."""
    folder, text = source
    keys = transfer("outputs", init_from=folder / "softmax", steps=18)
    keys |= {"mesh__data": 2, "mesh__tensor": 2, "optimizer__accumulate": 2}
    keys["optimizer__ema"] = 0.9
    assert train(text, folder / "outputs", **keys) == 0
    said = capsys.readouterr().err
    assert f"steps 1 to 16 are attention transfer: only weights that {folder}" in said
    assert "step 16: attention transfer of outputs ends with an error of" in said
    found = rows(folder / "outputs")
    errors = [row["transfer/error"] for row in found if "transfer/error" in row]
    assert len(errors) == 16 and 0 < errors[-1] < 0.9 * errors[0]
    losses = [row["step"] for row in found if "train/loss" in row]
    assert losses == [17, 18]
    before, at_end = load(folder / "softmax").params, params_of(folder / "outputs", 16)
    middle, last = (load(folder / "outputs", x, ema=True).params for x in (8, 16))
    jax.tree.map(np.testing.assert_array_equal, last, at_end)
    jax.tree.map(np.testing.assert_array_equal, without_maps(middle), before)
    identity = at_end["blocks"][0]["attention"]["query_map"]["weight"]
    assert not np.array_equal(identity[0], np.eye(len(identity[0])))
    jax.tree.map(np.testing.assert_array_equal, without_maps(at_end), before)
    after = params_of(folder / "outputs", 18)
    assert not np.array_equal(
        after["embedding"]["embedding"], before["embedding"]["embedding"]
    )


def maps_error(softmax, linear, tokens):
    """Return Σ a ln(a / b) by definition, the mean over rows of maps, in float64."""
    found = []
    for row in tokens:
        a, b = (np.float64(read(model, row)[0].map) for model in (softmax, linear))
        found.append(
            (a * np.log(np.where(a > 0, a, 1) / np.where(a > 0, b, 1))).sum(-1)
        )
    return np.mean(found)


def test_a_resumed_transfer_is_the_undisturbed_one_without_its_source(source):
    folder, text = source
    softmax, hidden = folder / "softmax", folder / "hidden"
    keys = transfer("maps", init_from=softmax, steps=18)
    assert train(text, folder / "whole", **keys) == 0
    shutil.copytree(folder / "whole", folder / "resumed")
    for step in (16, 18):  # as if the run had stopped after step 8
        shutil.rmtree(folder / "resumed" / "checkpoints" / str(step))
    softmax.rename(hidden)
    softmax.mkdir()
    try:
        assert train(text, folder / "resumed", **keys) == 0
    finally:
        softmax.rmdir()
        hidden.rename(softmax)
    one, two = (params_of(folder / name, 18) for name in ("whole", "resumed"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    found = [row.get("transfer/error") for row in rows(folder / "resumed")]
    errors = [x for x in found if x is not None]
    assert len(errors) == 16 and 0 < errors[-1] < 0.75 * errors[0]
    run, target = load(softmax), load(folder / "whole").config.model
    params = convert(run.params, run.config.model, target)
    tokens = run.examples.batch_reader((8, 32), seed=0, step=0)(0, 8)[0]
    wanted = maps_error(run.model(), merged(target, params, {}), tokens)
    assert errors[0] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transfer__steps": 0}, "with transfer.steps 0: give both or neither"),
        ({"steps": 16}, "transfer.steps 16 must be below steps 16"),
        ({"init_from": ""}, "transfer.match 'maps' needs init_from"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(source, capsys, changes, said):
    folder, text = source
    keys = transfer("maps", init_from=folder / "softmax", steps=18) | changes
    for run in ((folder / "refused",), (None, "--dry_run")):
        assert train(text, *run, **keys) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (folder / "refused").exists()


MODEL = config.Model(vocabulary=11, width=16, heads=2, depth=1, length=8)


@pytest.mark.parametrize(
    ("source", "target", "match", "said"),
    [
        (
            {"mechanism": "linear"},
            {"mechanism": "decay"},
            "outputs",
            "needs softmax in init_from, which has linear",
        ),
        (
            {},
            {"mechanism": "linear", "features": "hedgehog", "symmetric": "plain"},
            "maps",
            "needs one model.attention.symmetric: 'none' in init_from, 'plain' here",
        ),
        ({}, {"mechanism": "linear"}, "maps", "'maps' has nothing to train: linear"),
        ({}, {"mechanism": "decay"}, "maps", "which decay does not promise"),
        (
            {"differential": "v1"},
            {"mechanism": "linear", "differential": "v1"},
            "maps",
            "model.attention.differential is 'v1': use outputs",
        ),
        (
            {"forget": "fox"},
            {"mechanism": "linear", "features": "hedgehog"},
            "maps",
            "no place for blocks/0/attention/forget/up/bias of init_from",
        ),
    ],
)
def test_sources_that_cannot_be_matched_are_refused(source, target, match, said):
    first, second = (
        dataclasses.replace(MODEL, attention=config.Attention(**chosen))
        for chosen in (source, target)
    )
    with pytest.raises(ValueError, match=said):
        teacher_of(first, second, match)
