"""Reading and packing texts in pieces gives the result of reading them whole."""

import io
from functools import partial

import numpy as np
import pytest

from symjax import config
from symjax.data import corpus, ngrams, subwords
from symjax.data.sources import texts
from symjax.data.store.writer import ArrayWriter

TEXT = "één 日本 😀 and\r\n\n some more words.\n" * 9


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "source.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.mark.parametrize("block", [1, 2, 3, 7, 10**6])
def test_characters_are_whole_however_a_file_is_read(file, monkeypatch, block):
    monkeypatch.setattr(texts, "BLOCK", block)
    pieces = list(texts.read_pieces(file, "data.path"))
    assert "".join(pieces) == TEXT
    assert max(map(len, pieces)) <= block


@pytest.mark.parametrize("block", [1, 2, 5, 10**6])
def test_a_byte_that_is_no_text_is_named_by_its_place(tmp_path, monkeypatch, block):
    monkeypatch.setattr(texts, "BLOCK", block)
    path = tmp_path / "broken"
    for content, place, byte in (
        (b"ab\xe6\x97cd", 2, "e6"),
        (b"abcd\xff", 4, "ff"),
        (b"abc\xe6\x97", 3, "e6"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"byte 0x{byte} at offset {place}"):
            list(texts.read_pieces(path, "data.path"))


@pytest.mark.parametrize("cut", [0, 1, 4, 6, 9])
def test_a_document_is_cut_between_two_characters(cut):
    pieces = ["ab", "", "cdef", "ghi"]
    halves = partial(texts.cut_in_two, lambda: iter([pieces]), cut)
    found = texts.Texts(halves, np.array([False, True]), 9)
    [train], [heldout] = map(list, (found.read("train"), found.read("heldout")))
    assert ("".join(train), "".join(heldout)) == ("abcdefghi"[:cut], "abcdefghi"[cut:])
    assert found.count("train") == found.count("heldout") == 1


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
@pytest.mark.parametrize("several", [False, True])
def test_packing_in_small_pieces_gives_the_same_files(
    tmp_path, file, monkeypatch, tokenizer, several
):
    for number in range(9 * several):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 9)
    path = tmp_path / "*.txt" if several else file
    more = {"vocabulary": 300} if tokenizer == "bpe" else {}
    options = config.Data("text", str(path), tokenizer=tokenizer, **more)
    whole = corpus.open_corpus(options, tmp_path / "whole")
    monkeypatch.setattr(texts, "BLOCK", 5)
    monkeypatch.setattr(subwords, "ENCODED_AT_ONCE", 4)
    parts = corpus.open_corpus(options, tmp_path / "parts")
    assert parts.fingerprint == whole.fingerprint
    if tokenizer == "bpe":  # words and their counts are the same, their order is not
        return
    assert parts.train.sha256 == whole.train.sha256
    assert parts.heldout.sha256 == whole.heldout.sha256


def test_an_array_written_in_parts_is_the_file_of_the_whole(tmp_path):
    whole = np.arange(1000, dtype=np.uint16)
    written = ArrayWriter(tmp_path / "a.npy", np.uint16)
    for part in np.split(whole, [0, 3, 700]):
        written.append(part)
    with pytest.raises(ValueError, match="has uint16, got int64"):
        written.append(np.arange(3))
    written.close()
    saved = io.BytesIO()
    np.save(saved, whole)
    assert (tmp_path / "a.npy").read_bytes() == saved.getvalue()


def test_tables_of_a_large_text_are_counted_on_a_sample_of_it(monkeypatch):
    text = np.random.default_rng(0).integers(0, 5, 4000)
    text = np.sort(text.reshape(-1, 4), axis=1).reshape(-1)
    whole = ngrams.cross_entropies(text, text, 5)
    monkeypatch.setattr(ngrams, "COUNTED_TARGETS", 1600)
    some = ngrams.cross_entropies(text, text, 5)
    for name, value in whole.items():
        assert some[name] == pytest.approx(value, abs=0.05) and some[name] != value
