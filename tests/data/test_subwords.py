"""Subword tokenizers: exact text, no special tokens from text, ends of documents."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from symjax import config
from symjax.data import corpus, subwords, tokens
from symjax.data.subwords import END

TEXT = "The quick brown fox's tail, naïve  and\n\n\tlazy: 日本 😀 12345.\r\n"


@pytest.fixture(scope="module")
def bpe():
    return tokens.build("bpe", [TEXT * 20, "another text\n" * 9], vocabulary=400)


def written(folder, **changes):
    """Write a tokenizer.json of whole words with some keys changed."""
    words = ["[UNK]", "the", "fox", "</s>"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>", "<stop>"])
    made.enable_truncation(3)
    made.enable_padding(length=3)
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(made.to_str()) | changes))
    return path


def test_text_comes_back_exactly(bpe):
    ids = bpe.encode(TEXT)
    assert bpe.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode()) / 2 and ids.dtype == np.uint16
    assert bpe.decode(bpe.encode("\0 never seen: ß")) == "\0 never seen: ß"
    assert bpe.encode("").shape == (0,)
    assert 257 < bpe.vocabulary <= 400


def test_the_same_text_gives_the_same_tokens_and_json_keeps_them(bpe):
    again = tokens.build("bpe", [TEXT * 20, "another text\n" * 9], vocabulary=400)
    assert again == bpe
    described = json.loads(json.dumps(bpe.describe()))
    assert tokens.from_description(described) == bpe


def test_text_that_spells_a_special_token_is_text(bpe):
    spelled = f"before{END}after"
    ids = bpe.encode(spelled)
    assert bpe.document_end not in ids and bpe.decode(ids) == spelled
    assert bpe.decode([bpe.document_end]) == END


def test_ids_outside_the_vocabulary_are_replaced(bpe):
    a, b = bpe.encode("a")[0], bpe.encode("b")[0]
    assert bpe.decode([a, 999, b, -1]) == "a\ufffdb\ufffd"
    with pytest.raises(ValueError, match="position 1 is half of a surrogate pair"):
        bpe.encode("a\ud800")


def test_long_texts_are_cut_where_no_token_is(bpe, monkeypatch):
    whole = bpe.encode(TEXT * 5)
    for size in (1, 7, 30):
        monkeypatch.setattr(subwords, "ENCODED_AT_ONCE", size)
        assert len(list(bpe.pieces([TEXT * 5]))) > 3
        np.testing.assert_array_equal(bpe.encode(TEXT * 5), whole)


def test_a_vocabulary_is_learned_from_the_beginning_of_a_large_text(monkeypatch):
    monkeypatch.setattr(subwords, "LEARNED_FROM", 1)
    one = tokens.build("bpe", ["abab " * 9, "xyxy " * 9], vocabulary=300)
    assert one == tokens.build("bpe", ["abab " * 9], vocabulary=300)


def test_pieces_that_are_learned_from_change_no_vocabulary(bpe, monkeypatch):
    for size in (1, 7, 30):
        monkeypatch.setattr(subwords, "ENCODED_AT_ONCE", size)
        again = tokens.build("bpe", [TEXT * 20, "another text\n" * 9], vocabulary=400)
        assert again == bpe


MEMORY = """
from symjax.data.tokens import build

def peak():  # megabytes, of this process
    lines = dict(x.split(":", 1) for x in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) / 1e3

import tokenizers
before, text = peak(), ("x" * 999 + " ") * 1000
made = build("bpe", (text for _ in range(40)), vocabulary=300)
learned, words = peak(), "some words of a text " * 50_000
for piece in made.pieces([words]):
    made.encode_all([piece])
print(learned - before, peak() - learned)
"""


@pytest.mark.always  # in pieces of 1 MB learning takes 140 MB, and encoding 300
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_long_text_is_learned_and_encoded_in_little_memory():
    words = [sys.executable, "-c", MEMORY]
    where = Path(__file__).resolve().parents[2]
    said = subprocess.run(words, capture_output=True, text=True, check=True, cwd=where)
    learned, encoded = map(float, said.stdout.split())
    assert learned < 80 and encoded < 80


def test_a_file_is_used_without_its_truncation_and_padding(tmp_path):
    path = written(tmp_path / "words")
    for given in (path, path.parent):
        found = tokens.build(str(given), [])
        assert found.vocabulary == 5 and found.end == "</s>"
        assert found.encode("the fox the fox the").tolist() == [1, 2, 1, 2, 1]
        assert found.encode("fox").tolist() == [2]


@pytest.mark.parametrize("stated", ["<stop>", {"content": "<stop>"}])
def test_the_end_of_documents_may_be_stated_beside_the_file(tmp_path, stated):
    path = written(tmp_path)
    beside = tmp_path / "tokenizer_config.json"
    beside.write_text(json.dumps({"eos_token": stated}))
    assert tokens.build(str(path), []).document_end == 4
    beside.write_text(json.dumps({"eos_token": "unknown"}))
    assert tokens.build(str(path), []).end == "</s>"


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="is unknown: choose from byte, char, bpe, or"):
        tokens.build(str(path), [])
    path.write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json' is no tokenizer.json of"):
        tokens.build(str(path), [])
    with pytest.raises(ValueError, match="cannot be read"):
        (tmp_path / "empty").mkdir()
        tokens.build(str(tmp_path / "empty"), [])


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        tokens.build("bpe", ["a"])


def test_the_token_that_ends_documents_stands_before_the_first_one_too(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"document {number} {END}\n")
    options = config.Data(
        "text", str(tmp_path / "*.txt"), tokenizer="bpe", vocabulary=300
    )
    opened = corpus.open_corpus(options, tmp_path / "data")
    end = opened.tokenizer.document_end
    for split in ("train", "heldout"):
        ids = getattr(opened, split)[:]
        counts = opened.fingerprint[split]
        assert (ids == end).sum() == counts["documents"] + 1
        assert ids[0] == ids[-1] == end
        text = opened.tokenizer.decode(ids[ids != end])
        assert counts["bytes"] == len(text.encode())
    assert opened.bytes_per_token == counts["bytes"] / (counts["tokens"] - 1)
    again = corpus.open_corpus(options, tmp_path / "data")
    assert again.tokenizer == opened.tokenizer


def test_a_vocabulary_that_nothing_reads_is_refused(tmp_path):
    with pytest.raises(ValueError, match="data.vocabulary 300 is learned by data.tok"):
        corpus.open_corpus(config.Data(vocabulary=300), tmp_path)
