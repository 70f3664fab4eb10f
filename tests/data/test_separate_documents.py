"""Documents of a packed text are separate if the configuration says so."""

import dataclasses

import numpy as np
import pytest

from symjax import config
from symjax.data.corpus import open_corpus
from symjax.data.documents import SegmentedTokens, with_segment_ids
from symjax.data.examples import open_examples, text_examples, tokenizer_of
from symjax.data.sources import local_files

LENGTH = 16


@pytest.fixture
def options(tmp_path):
    for number in range(100):
        words = f"{number} " * (1 + 7 * number % 23)
        (tmp_path / f"{number:02}.txt").write_text(words)
    return config.Data("text", str(tmp_path / "*.txt"))


def model(**more):
    return config.Config(model=config.Model(length=LENGTH, **more))


def tokens_of(options, tmp_path, tokenizer):
    more = {"vocabulary": 300} if tokenizer == "bpe" else {}
    options = dataclasses.replace(options, tokenizer=tokenizer, **more)
    return open_corpus(options, tmp_path / "data")


def documents_in(options, split, corpus):
    """Return the tokens of each document of a split, without delimiters."""
    texts = ["".join(x) for x in local_files.text_files(options.path).read(split)]
    return [corpus.tokenizer.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_every_token_of_a_document_is_a_target_once_and_sees_its_own_document(
    options, tmp_path, tokenizer
):
    corpus = tokens_of(options, tmp_path, tokenizer)
    texts = documents_in(options, "heldout", corpus)
    counts, start = corpus.fingerprint["heldout"], corpus.start
    assert len(texts) == counts["documents"] > 3
    wanted = [x for text in texts for x in (*text, start)]
    if corpus.tokenizer.document_end is None:  # the last one has no end
        wanted.pop()
    asked, seen = [], []
    for rows in text_examples(corpus).heldout_batches((3, LENGTH)):
        inputs, targets, weights = rows(0, 3)
        assert isinstance(inputs, SegmentedTokens) and (targets >= 0).all()
        for tokens, ids, own, kept in zip(*inputs, targets, weights > 0, strict=True):
            asked += own[kept].tolist()
            for place in np.flatnonzero(kept):
                context = tokens[: place + 1][ids[: place + 1] == ids[place]]
                seen.append(context.tolist())
    assert asked == wanted
    assert len(asked) == counts["tokens"] - 1
    before = [[start, *text[:n]] for text in texts for n in range(len(text) + 1)]
    for context, whole in zip(seen, before, strict=False):
        assert whole[len(whole) - len(context) :] == context
        assert len(context) == len(whole) or len(context) <= LENGTH
    assert sum(len(x) == len(y) for x, y in zip(seen, before, strict=False)) > 30


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_an_input_is_of_the_document_of_its_target(options, tmp_path, tokenizer):
    """In rows of training, which begin anywhere in a document."""
    corpus = tokens_of(options, tmp_path, tokenizer)
    (inputs, ids), targets = text_examples(corpus).read_training(
        np.arange(50), LENGTH, 3
    )
    assert (targets >= 0).all()
    np.testing.assert_array_equal(targets[:, :-1], inputs[:, 1:])
    # No text here has the separator: it alone begins another document.
    changes = np.diff(ids, axis=1)
    np.testing.assert_array_equal(changes, inputs[:, 1:] == corpus.start)
    assert not ids[:, 0].any() and changes.any()


def test_the_language_says_what_stands_before_a_document(options, tmp_path):
    for tokenizer, wanted in (("byte", 0), ("bpe", None)):
        more = {"vocabulary": 300} if tokenizer == "bpe" else {}
        for documents in ("separate", "joined"):
            changes = {"tokenizer": tokenizer, "documents": documents, **more}
            changed = dataclasses.replace(options, **changes)
            folder = tmp_path / f"{tokenizer}-{documents}"
            found = text_examples(open_corpus(changed, folder))
            end = found.text.tokenizer.document_end if wanted is None else wanted
            assert found.language["document_start"] == end == found.text.train[:1][0]
            assert found.text.heldout[:1][0] == end
            assert tokenizer_of(found.language) == found.tokenizer
    one = dataclasses.replace(options, path=str(tmp_path / "11.txt"))
    found = text_examples(open_corpus(one, tmp_path / "one"))
    assert "document_start" not in found.language


@pytest.mark.parametrize("shared", [False, True])
def test_a_row_may_begin_and_end_anywhere(shared):
    ends = np.array([3, 4, 9])
    tokens = np.arange(9)
    for start in range(5):
        inputs, targets = tokens[start : start + 4], tokens[start + 1 : start + 5]
        found, asked = with_segment_ids(
            np.array([start]), inputs[None], targets[None].copy(), ends, shared=shared
        )
        own = targets if shared else inputs
        numbers = np.searchsorted(ends, own, side="right")
        np.testing.assert_array_equal(found.segment_ids[0], numbers - numbers[0])
        left_out = np.isin(targets, ends) & (not shared)
        np.testing.assert_array_equal(asked[0] < 0, left_out)


@pytest.mark.parametrize("documents", ["auto", "joined", "separate"])
def test_one_file_is_joined_unless_it_is_asked_for(tmp_path, documents):
    path = tmp_path / "one.txt"
    path.write_text("one document\n" * 50)
    options = config.Data("text", str(path), documents=documents)
    corpus = open_corpus(options, tmp_path / "data")
    assert bool(corpus.ends) == (documents == "separate")
    joined = text_examples(dataclasses.replace(corpus, ends={}))
    inputs, targets = text_examples(corpus).read_training(np.arange(3), LENGTH, 0)
    wanted = joined.read_training(np.arange(3), LENGTH, 0)
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
    assert apart.bytes_per_token == joined.bytes_per_token


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
