"""Tokens between documents, and which tokens of documents losses count."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tokenizers
from test_stream import SHARD, TEXTS, order_of, write_rows

from symjax import config
from symjax.data import corpus
from symjax.data.boundaries import boundaries
from symjax.data.examples import same_tokens, text_examples
from symjax.data.store import packer, stream
from symjax.data.store.cache import open_cached
from symjax.data.store.manifest import (
    MANIFEST,
    format_of,
    read_manifest,
    sealed,
    write_manifest,
)
from symjax.data.tokens import ByteTokenizer

LENGTH = 16
NEW = ("document_start", "shared", "judged")  # since format 2


@pytest.fixture
def options(tmp_path):
    for number in range(100):
        words = f"{number} " * (1 + 7 * number % 23)
        (tmp_path / f"{number:02}.txt").write_text(words)
    return config.Data("text", str(tmp_path / "*.txt"))


def older(options, folder):
    """Turn a corpus into one of format 1, with its manifest and n-gram lines."""
    manifest, _ = open_cached(options, corpus._pack, format=1)
    known = {name: x for name, x in manifest.items() if name not in NEW}
    del known["fingerprint"]["format"]
    known["ngrams"] = {"unigram": 3.0, "bigram": 2.0, "trigram": 1.0}
    write_manifest(folder, known)
    return known


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_an_older_corpus_keeps_its_meaning(options, tmp_path, tokenizer):
    """Also if it has to be packed again."""
    more = {"vocabulary": 300} if tokenizer == "bpe" else {}
    options = dataclasses.replace(options, tokenizer=tokenizer, **more)
    known = older(options, tmp_path / "data")
    for _ in range(2):
        opened = corpus.open_corpus(options, tmp_path / "data")
        assert opened.start is None and not opened.shared and opened.all_counted
        assert opened.references == known["ngrams"]
        counts = known["fingerprint"]["heldout"]
        assert opened.bytes_per_token == counts["bytes"] / counts["tokens"]
        examples = text_examples(opened)
        assert "document_start" not in examples.language
        text, ends = opened.train[:], opened.ends["train"][:]
        assert text[0] != text[ends[0] - 1]  # which is the separator
        (inputs, ids), targets = examples.read_training(np.arange(30), LENGTH, 1)
        separator = inputs == text[ends[0] - 1]
        np.testing.assert_array_equal(targets < 0, separator)
        np.testing.assert_array_equal(np.diff(ids, axis=1), separator[:, :-1])
        shutil.rmtree(opened.train.path.parent)
    new = corpus.open_corpus(options, tmp_path / "new")
    assert new.fingerprint["sha256"] != known["fingerprint"]["sha256"]
    assert not new.all_counted
    assert same_tokens(text_examples(new).language, examples.language)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_text_of_one_document_is_packed_as_before(options, tmp_path, tokenizer):
    more = {"vocabulary": 300} if tokenizer == "bpe" else {}
    path = str(tmp_path / "16.txt")
    options = dataclasses.replace(options, path=path, tokenizer=tokenizer, **more)
    known = older(options, tmp_path / "old")
    new = corpus.open_corpus(options, tmp_path / "new")
    assert new.fingerprint == {**known["fingerprint"], "format": 2}
    assert read_manifest(tmp_path / "new")["files"] == known["files"]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_every_part_of_a_mixture_begins_with_the_separator(tmp_path, tokenizer):
    entries, texts = [], {}
    for name in "abc":
        (tmp_path / name).mkdir()
        for number in range(9):
            text = f"{name}{number} " * 9
            (tmp_path / name / f"{number}.txt").write_text(text)
            texts[text.strip()] = name
        entries.append(f"{tmp_path / name}:1")
    more = {"vocabulary": 300} if tokenizer == "bpe" else {}
    options = config.Data("text", mixture=",".join(entries), tokenizer=tokenizer)
    opened = corpus.open_corpus(dataclasses.replace(options, **more), tmp_path / "data")
    for part, name in zip(opened.parts, "abc", strict=True):
        ids = opened.train[part.start : part.stop]
        assert ids[0] == opened.start
        places = np.split(ids[1:], np.flatnonzero(ids[1:] == opened.start))
        found = [opened.tokenizer.decode(x[x != opened.start]) for x in places]
        kinds = [texts[text.strip()] for text in found if text]
        assert kinds == [name] * len(kinds) and len(kinds) > 5
        end = opened.tokenizer.document_end
        assert (ids[-1] == end) == (end is not None)


def test_a_tokenizer_that_drops_the_separator_has_nothing_before_documents(tmp_path):
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, "[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text("two " + "one " * (number + 2))
    options = config.Data("text", str(folder), tokenizer=str(tmp_path))
    opened = corpus.open_corpus(options, tmp_path / "data")
    assert opened.start is None and opened.train[:][0] == 2
    (inputs, ids), targets = text_examples(opened).read_training(
        np.arange(30), LENGTH, 1
    )
    np.testing.assert_array_equal(np.diff(ids, axis=1), inputs[:, 1:] == 2)
    np.testing.assert_array_equal(targets[:, :-1] < 0, inputs[:, 1:] == 2)
    held = [x for x in range(len(opened.heldout)) if opened.heldout[:][x] == 2]
    counts = opened.fingerprint["heldout"]
    bytes_of_targets = counts["bytes"] - 3 * counts["documents"]
    assert len(held) == counts["documents"] > 1
    targets_there = counts["tokens"] - counts["documents"]
    assert opened.bytes_per_token == bytes_of_targets / targets_there


def test_a_stream_of_an_older_packer_goes_on_in_its_format(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "SHARD", SHARD)
    write_rows(tmp_path / "rows", TEXTS)
    options = config.Data(
        "hub",
        name=str(tmp_path / "rows"),
        streaming=True,
        tokens=9000,
        cache=str(tmp_path / "cache"),
    )
    whole = order_of(options, tmp_path / "whole" / "corpus")._replace(format=1)
    packer.pack(whole)
    wanted = {x.name: x.read_bytes() for x in whole.place.glob("*.npy")}
    order, advance = order_of(options)._replace(format=1), packer._Packer._advance

    def dies(self, writer):
        advance(self, writer)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packer._Packer, "_advance", dies)
        packer.pack(order)
    head = read_manifest(order.place, packer.HEAD)
    head = {
        name: x for name, x in head.items() if name not in NEW
    }  # as format 1 had it
    del head["fingerprint"]["format"]
    (order.place / packer.HEAD).write_text(sealed(head))
    write_manifest(tmp_path / "run", head)
    opened = corpus.open_corpus(options, tmp_path / "run")
    opened.stream.wait_for(10**9)
    found = {x.name: x.read_bytes() for x in order.place.glob("*.npy")}
    assert found == wanted and opened.start is None
    whole = json.loads((order.place / MANIFEST).read_text())
    assert format_of(whole["fingerprint"]) == 1
    opened.stream.close()
    shutil.rmtree(options.cache)
    orders = []
    monkeypatch.setattr(stream, "Stream", lambda order: orders.append(order) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        corpus.open_corpus(options, tmp_path / "run")
    assert orders[0].format == 1


@pytest.mark.always
@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_losses_bytes_and_lines_are_about_the_same_targets(tmp_path, documents):
    """Documents of 15 bytes and 18 bits: one letter of 16 bits, 14 letters of 2 bits.

    The letters of 2 bits are decided by their position alone.
    """
    draw, letters = np.random.default_rng(0), "ABCDEFGHIJKLMNOPQRSTUVWXYZ01"
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(2000):
        choices = draw.integers(2, size=14)
        rest = "".join(letters[2 * n + choice] for n, choice in enumerate(choices))
        text = "abcdefghijklmnop"[draw.integers(16)] + rest
        (folder / f"{number:04}.txt").write_text(text)
    options = config.Data("text", str(folder), documents=documents)
    opened = corpus.open_corpus(options, tmp_path / "data")
    assert opened.bytes_per_token == 1
    asked = sum(
        (rows(0, 4)[-1] > 0).sum()
        for rows in text_examples(opened).heldout_batches((4, LENGTH))
    )
    assert asked == len(opened.heldout) - 1  # and the lines are about all of them:
    for name in ("bigram", "trigram"):
        bits = opened.bits_per_byte(opened.references[name])
        assert bits == pytest.approx(18 / 16, abs=0.02)


def test_boundaries_of_a_byte_tokenizer():
    several = boundaries(ByteTokenizer(), several=True)
    assert several.start == 0 and several.shared and several.overlap == 0
    assert boundaries(ByteTokenizer(), several=False).start is None
    assert boundaries(ByteTokenizer(), several=True, format=1).first is None
