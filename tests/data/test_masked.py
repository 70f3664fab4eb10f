"""Masked text has the shares of the definition, and nothing else is changed."""

import dataclasses

import numpy as np
import pytest
from hand_made import byte_fallback
from runs import write_text

from symjax import config
from symjax.data.corpus import open_corpus
from symjax.data.examples import masked_examples, open_examples, text_examples

SHAPE = (16, 100)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    data = config.Data(source="text", path=str(write_text(folder)))
    options = config.Config(data=data, model=config.Model(kind="encoder"))
    assert open_examples(options, folder / "data").unit == "masked byte"
    assert open_examples(options, folder / "data").unit == "masked byte"
    return text_examples(open_corpus(data, folder / "data"))


@pytest.fixture(scope="module")
def masked(text):
    return masked_examples(text)


def test_fifteen_in_a_hundred_are_asked_and_the_rest_is_untouched(masked, text):
    shown = kept = other = 0
    for step in range(20):
        inputs, targets = masked.batch_reader(SHAPE, seed=0, step=step)(0, 16)
        tokens, _ = text.batch_reader(SHAPE, seed=0, step=step)(0, 16)
        asked = targets >= 0
        assert (asked.sum(axis=1) == 15).all()
        np.testing.assert_array_equal(targets[asked], tokens[asked])
        np.testing.assert_array_equal(inputs[~asked], tokens[~asked])
        assert inputs.max() <= 256 and (tokens < 256).all()
        shown += (inputs[asked] == 256).sum()
        kept += (inputs[asked] == tokens[asked]).sum()
        other += (inputs[asked] != tokens[asked]).sum()
    total = 20 * 16 * 15  # standard deviations of the shares are below 0.006
    assert shown / total == pytest.approx(0.8, abs=0.025)
    assert kept / total == pytest.approx(0.1, abs=0.02)
    assert (other - shown) / total == pytest.approx(0.1, abs=0.02)


def test_steps_and_seeds_hide_other_places_and_processes_get_their_own(masked):
    rows = masked.batch_reader(SHAPE, seed=0, step=5)
    for one, two, both in zip(rows(0, 3), rows(3, 16), rows(0, 16), strict=True):
        np.testing.assert_array_equal(np.concatenate([one, two]), both)
    hidden = rows(0, 16)[1] >= 0
    for seed, step in ((0, 6), (1, 5)):
        other = masked.batch_reader(SHAPE, seed=seed, step=step)(0, 16)[1] >= 0
        assert (hidden != other).any(axis=1).all()
    assert (hidden[0] != hidden[1]).any()


def test_the_same_places_are_judged_each_time_and_none_beyond_the_text(masked, text):
    for one, other in zip(
        masked.heldout_batches(SHAPE), masked.heldout_batches(SHAPE), strict=True
    ):
        for a, b in zip(one(0, 16), other(0, 16), strict=True):
            np.testing.assert_array_equal(a, b)
    *_, last = masked.heldout_batches(SHAPE)
    inputs, targets, weights = last(0, 16)
    *_, rows = text.heldout_batches(SHAPE)
    there = rows(0, 16)[2]
    assert there.min() == 0  # the text ends in this batch
    np.testing.assert_array_equal(weights, there * (targets >= 0))
    np.testing.assert_array_equal(inputs < 0, there == 0)  # pads, which none sees


def test_a_few_batches_hide_what_all_of_them_hide(masked):
    shape = (4, 50)
    every = [rows(0, 4)[0] for rows in masked.heldout_batches(shape)]
    assert len(every) > 6
    for index, rows in enumerate(masked.heldout_batches(shape, 3)):
        same = every[index * len(every) // 3]
        np.testing.assert_array_equal(rows(0, 4)[0], same)


def test_the_mask_is_a_token_of_its_own(masked):
    assert masked.vocabulary == 257 and masked.language["mask"] == 256
    assert masked.unit == "masked byte" and set(masked.references) == {"unigram"}


def test_the_unigram_table_of_an_encoder_is_about_all_tokens(tmp_path):
    """Also BOS, which a decoder does not predict if another token ends texts."""
    tokenizer = dataclasses.replace(byte_fallback(), bos="<s>")
    (tmp_path / "texts").mkdir()
    for number in range(12):
        written = f"the cat sat on mat {number}. " * (5 + number)
        (tmp_path / "texts" / f"{number}.txt").write_text(written)
    for name, content in tokenizer.files(64).items():
        (tmp_path / name).write_text(content)
    path, kind = str(tmp_path / "texts"), str(tmp_path)
    data = config.Data(source="text", path=path, tokenizer=kind, bos="true")
    options = config.Config(data=data, model=config.Model(kind="encoder"))
    found = open_examples(options, tmp_path / "data")
    corpus = open_corpus(data, tmp_path / "data")
    assert corpus.ends and not corpus.shared
    counts = np.bincount(corpus.train[1:], minlength=tokenizer.vocabulary) + 0.01
    nats = -np.log(counts / counts.sum())[corpus.heldout[1:]].mean()
    assert found.references["unigram"] == pytest.approx(nats, rel=1e-9)
    assert corpus.references["unigram"] != pytest.approx(nats, rel=1e-3)
