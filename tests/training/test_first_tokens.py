"""Runs on separate documents learn the first token of a document.

They keep the delimiters that they were trained with.
"""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
from runs import call, compile_cache, train

import symjax
from symjax.data.tokens import ByteTokenizer
from symjax.evaluation.loading import load
from symjax.training import preflight
from symjax.training.saved import language_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run on 400 documents that begin with Q."""
    folder, draw = tmp_path_factory.mktemp("separate"), np.random.default_rng(0)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(400):
        letters = draw.choice(list("abcdefghij"), draw.integers(8, 21))
        (texts / f"{number}.txt").write_text("Q" + "".join(letters))
    changes = {
        "optimizer__learning_rate": 0.01,
        "model__attention__differential": "none",
        "model__attention__symmetric": "none",
        "steps": 100,
        "batch_size": 8,
    }
    with compile_cache(folder / "jax"):
        assert train(texts, folder / "run", **changes) == 0
        yield folder / "run"


def test_the_first_token_of_a_document_is_learned(trained):
    model = symjax.load(trained)
    start = model.language["document_start"]
    assert start == 0
    [nats] = model.losses(np.array([start, ord("Q")]))
    assert nats < 0.1
    [other] = model.losses(np.array([start, ord("a")]))
    assert other > 3


def test_a_text_by_hand_is_scored_after_the_separator(trained, tmp_path):
    text, found = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("Qabcabcabc")
    words = ["--tasks", "loss", "--text", str(text), "--json", str(found)]
    assert call("eval", ["--workdir", str(trained), *words]) == 0
    loss = json.loads(found.read_text())["heldout"]["loss"]
    ids = np.frombuffer(b"\0Qabcabcabc", np.uint8)
    wanted = symjax.load(trained).losses(ids).mean()
    assert loss == pytest.approx(wanted, rel=1e-5)
    bits = json.loads(found.read_text())["heldout"]["bits_per_byte"]
    assert bits == pytest.approx(wanted / np.log(2), rel=1e-5)


def test_an_export_keeps_what_stands_before_documents(trained, tmp_path):
    symjax.save_pretrained(symjax.load(trained), tmp_path)
    assert symjax.load_pretrained(tmp_path).language["document_start"] == 0


def test_samples_begin_after_the_separator(trained, capsys):
    words = ["--tasks", "sample", "--tokens", "4"]
    assert call("eval", ["--workdir", str(trained), *words]) == 0
    assert "prompt 'Q" in capsys.readouterr().out


def test_an_older_run_names_its_separator_where_documents_were_joined(trained):
    run = load(trained)
    data = {"train": {"documents": 9}, "heldout": {"documents": 1}}
    language = ByteTokenizer().describe()

    def meta(**options):
        config = {"data": options}
        return {"config": config, "data": data, "examples": {"language": language}}

    assert run.examples.language == {**language, "document_start": 0}
    assert language_of(meta()) == run.examples.language
    assert language_of(meta(documents="joined")) == run.examples.language
    for documents in ("separate", "auto"):
        assert language_of(meta(documents=documents)) == language
    data["train"]["documents"] = 1
    assert language_of(meta()) == language


def test_weights_of_an_older_run_are_a_beginning(trained, tmp_path):
    """The meaning of their tokens is the same."""
    model = symjax.load(trained)
    older = dataclasses.replace(model, language=ByteTokenizer().describe())
    symjax.save_pretrained(older, tmp_path / "older")
    texts = trained.parent / "texts"
    changes = {
        "model__attention__differential": "none",
        "model__attention__symmetric": "none",
        "init_from": tmp_path / "older",
        "steps": 1,
    }
    assert train(texts, tmp_path / "run", **changes) == 0


def test_an_older_run_goes_on_without_its_folder_of_data(tmp_path, monkeypatch, capsys):
    """Its text is packed again in its old format."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"{number} sheep met a fox. " * 9)
    changes = {"data__cache": tmp_path / "cache", "evaluate__sample": False}
    opened = preflight.open_examples
    with monkeypatch.context() as patch:
        older = functools.partial(opened, format=1)
        patch.setattr(
            preflight, "open_examples", lambda *x, format, **y: older(*x, **y)
        )
        assert train(texts, tmp_path / "run", steps=2, **changes) == 0
    language = symjax.load(tmp_path / "run").language
    assert "document_start" not in language
    shutil.rmtree(tmp_path / "run" / "data")
    shutil.rmtree(tmp_path / "cache")
    assert train(texts, tmp_path / "run", steps=4, **changes) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert symjax.load(tmp_path / "run").language == language
