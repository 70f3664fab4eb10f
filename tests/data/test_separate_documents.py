"""Documents of a packed text stay apart, if they are to."""

import dataclasses

import numpy as np
import pytest

from symjax import config
from symjax.data.corpus import open_corpus
from symjax.data.documents import Separate, separated
from symjax.data.examples import open_examples, text_examples

LENGTH = 16


@pytest.fixture
def options(tmp_path):
    for number in range(40):
        words = f"{number} " * (1 + 7 * number % 23)
        (tmp_path / f"{number:02}.txt").write_text(words)
    return config.Data("text", str(tmp_path / "*.txt"))


def model(**more):
    return config.Config(model=config.Model(length=LENGTH, **more))


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_every_token_but_the_first_of_a_document_is_a_target_once(
    options, tmp_path, tokenizer
):
    more = {"vocabulary": 300} if tokenizer == "bpe" else {}
    options = dataclasses.replace(options, tokenizer=tokenizer, **more)
    corpus = open_corpus(options, tmp_path / "data")
    ends = corpus.ends["heldout"][:]
    counts = corpus.fingerprint["heldout"]
    assert len(ends) == counts["documents"] and ends[-1] == counts["tokens"]
    texts = np.split(corpus.heldout[:], ends[:-1])
    asked, seen = [], 0
    examples = text_examples(corpus)
    for rows in examples.heldout_batches((3, LENGTH)):
        inputs, targets, weights = rows(0, 3)
        assert isinstance(inputs, Separate)
        kept = weights > 0
        assert (targets[kept] >= 0).all()
        asked += targets[kept].tolist()
        seen += kept.sum()
    assert asked == [token for text in texts for token in text[1:].tolist()]
    assert seen == counts["tokens"] - counts["documents"]


def test_ids_are_those_of_the_documents(options, tmp_path):
    corpus = open_corpus(options, tmp_path / "data")
    of_token = np.repeat(
        np.arange(len(corpus.ends["train"])),
        np.diff(corpus.ends["train"][:], prepend=0),
    )
    text = corpus.train[:]
    rows = text_examples(corpus).train(np.arange(50), LENGTH, 3)
    places = {text[i : i + LENGTH].tobytes(): i for i in range(len(text) - LENGTH)}
    for tokens, ids, targets in zip(*rows[0], rows[1], strict=True):
        start = places[tokens.astype(text.dtype).tobytes()]
        own = of_token[start : start + LENGTH + 1]
        if list(places.values()).count(start) == 1:
            np.testing.assert_array_equal(ids, (own - own[0])[:-1])
            np.testing.assert_array_equal(targets < 0, own[1:] != own[:-1])


def test_a_row_may_begin_and_end_anywhere():
    ends = np.array([3, 4, 9])
    tokens = np.arange(9)
    for start in range(5):
        inputs, targets = tokens[start : start + 4], tokens[start + 1 : start + 5]
        found, asked = separated(
            np.array([start]), inputs[None], targets[None].copy(), ends
        )
        numbers = np.searchsorted(ends, inputs, side="right")
        np.testing.assert_array_equal(found.segment_ids[0], numbers - numbers[0])
        np.testing.assert_array_equal(asked[0] < 0, np.isin(targets, ends))


@pytest.mark.parametrize("documents", ["auto", "joined", "separate"])
def test_one_file_is_joined_unless_it_is_asked_for(tmp_path, documents):
    path = tmp_path / "one.txt"
    path.write_text("one document\n" * 50)
    options = config.Data("text", str(path), documents=documents)
    corpus = open_corpus(options, tmp_path / "data")
    assert bool(corpus.ends) == (documents == "separate")
    joined = text_examples(dataclasses.replace(corpus, ends={}))
    inputs, targets = text_examples(corpus).train(np.arange(3), LENGTH, 0)
    wanted = joined.train(np.arange(3), LENGTH, 0)
    if documents == "separate":
        assert not inputs.segment_ids.any()
        inputs = inputs.tokens
    np.testing.assert_array_equal(inputs, wanted[0])
    np.testing.assert_array_equal(targets, wanted[1])


def test_joined_documents_have_the_tokens_of_separate_ones(options, tmp_path):
    apart = open_corpus(options, tmp_path / "a")
    options = dataclasses.replace(options, documents="joined")
    joined = open_corpus(options, tmp_path / "b")
    assert not joined.ends and apart.ends
    np.testing.assert_array_equal(apart.train[:], joined.train[:])
    assert apart.references == joined.references


def test_an_encoder_reads_documents_joined(options, tmp_path):
    whole = dataclasses.replace(model(kind="encoder"), data=options)
    assert not open_examples(whole, tmp_path / "data").separate
    options = dataclasses.replace(options, documents="separate")
    with pytest.raises(ValueError, match="data.documents 'separate' is for decoders"):
        open_examples(dataclasses.replace(whole, data=options), tmp_path / "other")


def test_where_documents_do_not_exist_the_key_is_refused(tmp_path):
    options = config.Data("mqar", documents="joined")
    with pytest.raises(
        ValueError, match="data.documents 'joined' is read by data.sour"
    ):
        open_examples(dataclasses.replace(model(), data=options), tmp_path)
