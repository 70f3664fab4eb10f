"""Rows of several sources are mixed by their shares."""

from collections import Counter

import numpy as np
import pytest

from symjax import config
from symjax.data import batches, corpus
from symjax.data.examples import text_examples
from symjax.data.sources import mixture
from symjax.data.sources.mixture import MixturePart

LENGTH = 7
TEXTS = {"a": "abcdefgh" * 400, "b": "01234567" * 90, "c": "ABCDEFGH" * 60}
WEIGHTS = {"a": 2, "b": 1, "c": 0.2}


@pytest.fixture
def options(tmp_path):
    entries = []
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text)
        entries.append(f"{tmp_path / name}.txt:{WEIGHTS[name]}")
    return config.Data(source="text", mixture=",".join(entries))


@pytest.mark.parametrize("shares", [[0.7, 0.3], [1 / 3] * 3, [0.9996, 0.0004], [1.0]])
def test_each_period_keeps_the_shares(shares):
    """Exact to a row; every source has a row, and visits its own rows in order."""
    rows = mixture.rows_in_period(shares)
    assert rows.sum() == mixture.PERIOD and rows.min() >= 1
    assert np.abs(rows - np.array(shares) * mixture.PERIOD).max() <= 1
    numbers = np.arange(2 * mixture.PERIOD)
    source, own = mixture.assign_rows(shares, numbers, 3)
    for index, count in enumerate(rows):
        for period in range(2):
            mine = own[(source == index) & (numbers // mixture.PERIOD == period)]
            wanted = period * count + np.arange(count)
            np.testing.assert_array_equal(np.sort(mine), wanted)
    again = mixture.assign_rows(shares, numbers[37:40], 3)
    np.testing.assert_array_equal(again, [source[37:40], own[37:40]])
    other, _ = mixture.assign_rows(shares, numbers, 4)
    assert len(shares) == 1 or (other != source).any()


def test_rows_are_of_one_source_and_as_many_as_its_share(options, tmp_path):
    found = corpus.open_corpus(options, tmp_path / "data")
    rows = text_examples(found)
    count = mixture.PERIOD
    inputs, targets = rows.read_training(np.arange(count), LENGTH, 0)
    kinds = Counter()
    for row in np.concatenate([inputs.tokens, targets[:, -1:]], axis=1):
        letters = set(bytes(row[row > 0].astype(np.uint8)).decode())
        [name] = (name for name, text in TEXTS.items() if letters <= set(text))
        kinds[name] += 1
    total = sum(WEIGHTS.values())
    for name, weight in WEIGHTS.items():
        assert abs(kinds[name] - count * weight / total) <= 1


def test_each_window_of_a_source_is_visited_as_often_and_no_row_crosses_sources():
    """A period has 250 rows of the second source: two epochs of its 125 windows."""
    tokens = np.arange(300 + 126 * LENGTH + 1)
    parts = MixturePart(0.75, 0, 300), MixturePart(0.25, 300, len(tokens))
    numbers = np.arange(mixture.PERIOD)
    inputs, targets = batches.training_windows(tokens, numbers, LENGTH, 5, parts=parts)
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1)
    second = (rows >= 300).all(axis=1)
    assert second.sum() == 250 and (rows[~second] < 300).all()
    windows = Counter((rows[second, 0] - 300) // LENGTH)
    assert windows == {window: 2 for window in range(125)}


def test_held_out_is_that_of_all_sources(options, tmp_path):
    found = corpus.open_corpus(options, tmp_path / "data")
    text = bytes(np.asarray(found.heldout[0 : len(found.heldout)], np.uint8)).decode()
    wanted = [text[len(text) * 9 // 10 :] for text in TEXTS.values()]
    assert text == "".join("\0" + x for x in wanted)
    described = found.fingerprint["mixture"]
    assert [x["share"] for x in described] == [x.share for x in found.parts]
    assert found.parts[-1].stop == len(found.train)


WRONG = {
    "x.txt": "is no SOURCE:WEIGHT",
    "x.txt:": "a weight is a number above 0, got ''",
    "x.txt:0,y.txt:1": "a weight is a number above 0, got '0'",
    "x.txt:inf,y.txt:1": "a weight is a number above 0, got 'inf'",
    "x.txt:1,x.txt:2": "'x.txt:2' is given twice",
    "x.txt:1,./x.txt:2": "'./x.txt:2' is given twice",
    ",".join(f"{x}.txt:1" for x in range(1001)): "1001 are too many for 1000 rows",
    "nowhere.txt:1": "data.path 'nowhere.txt' does not exist",
}


@pytest.mark.parametrize(("given", "words"), WRONG.items(), ids=lambda x: x[:20])
def test_a_mixture_that_is_none_is_refused(given, words, tmp_path):
    options = config.Data(source="text", mixture=given)
    with pytest.raises(ValueError, match=words):
        corpus.open_corpus(options, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_share_that_rows_cannot_keep_is_said():
    mixed = config.Data(source="text", mixture="a:9996,b:4")
    assert mixture.rounding_notes(mixed) == [
        "data.mixture: b is 1 of 1000 rows, for a share of 0.0004"
    ]
    assert not mixture.rounding_notes(config.Data(source="text", mixture="a:995,b:5"))
    assert not mixture.rounding_notes(config.Data(source="text", path="a"))


def test_other_keys_beside_it_are_refused(tmp_path):
    options = config.Data(source="text", mixture="x.txt:1", path="y.txt")
    with pytest.raises(ValueError, match="leave data.path 'y.txt' empty"):
        corpus.open_corpus(options, tmp_path / "data")
    with pytest.raises(ValueError, match="is read by data.source=text, hub only"):
        corpus.open_corpus(config.Data(mixture="x.txt:1"), tmp_path / "data")


def test_a_source_shorter_than_a_row_is_named(options, tmp_path):
    found = corpus.open_corpus(options, tmp_path / "data")
    with pytest.raises(ValueError, match=r"c\.txt has 433 tokens of training text"):
        found.check_length(500)
