"""Tokenizers are lossless, also after a round trip through JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from symjax.data import tokens

texts = st.text(st.characters(codec="utf-8"), max_size=50)


@given(texts)
def test_text_comes_back(text):
    for kind in ("byte", "char"):
        tokenizer = tokens.build(kind, [text, "ab"])
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert (ids < tokenizer.vocabulary).all()
        described = json.loads(json.dumps(tokenizer.describe()))
        assert tokens.from_description(described) == tokenizer


@given(texts)
def test_byte_ids_are_the_bytes(text):
    assert tokens.ByteTokenizer().encode(text).tobytes() == text.encode()


def test_the_alphabet_is_sorted_and_of_every_text():
    tokenizer = tokens.build("char", ["cab", "\U0001f600b\n"])
    assert tokenizer.describe() == {"kind": "char", "alphabet": "\nabc\U0001f600"}
    assert tokenizer.vocabulary == 5
    assert tokenizer.encode("ab\U0001f600").tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    "size, dtype", [(1, "uint8"), (256, "uint8"), (257, "uint16"), (70000, "uint32")]
)
def test_ids_take_the_smallest_type(size, dtype):
    alphabet = "".join(map(chr, range(0x10000, 0x10000 + size)))
    ids = tokens.CharTokenizer(alphabet).encode(alphabet)
    assert ids.dtype == dtype
    assert ids.tolist() == list(range(size))


def test_an_unknown_character_is_named():
    tokenizer = tokens.CharTokenizer("abc")
    with pytest.raises(ValueError, match=r"'€' \(U\+20AC\) at position 2 is not amo"):
        tokenizer.encode("ab€")
    with pytest.raises(ValueError, match=r"U\+DCFF"):
        tokenizer.encode("a\udcff")


def test_long_texts_are_encoded_in_pieces(monkeypatch):
    monkeypatch.setattr(tokens, "ENCODED_AT_ONCE", 4)
    tokenizer = tokens.CharTokenizer("abc")
    assert tokenizer.encode("abcabcabc").tolist() == [0, 1, 2] * 3
    with pytest.raises(ValueError, match="'d' .* at position 6 "):
        tokenizer.encode("abcabcd")


def test_undecoded_bytes_of_a_terminal_are_bytes():
    assert tokens.ByteTokenizer().encode("a\udcff").tolist() == [97, 255]
    with pytest.raises(ValueError, match="position 1 is half of a surrogate pair"):
        tokens.ByteTokenizer().encode("a\ud800")


def test_ids_that_are_no_text_are_replaced():
    assert (
        tokens.ByteTokenizer().decode([97, 0xC3, 98, 256, -1]) == "a\ufffdb\ufffd\ufffd"
    )
    assert tokens.CharTokenizer("ab").decode([0, 2, 1, -1]) == "a\ufffdb\ufffd"


def test_decoding_takes_any_array():
    assert tokens.ByteTokenizer().decode(np.array([[104, 105]], np.int32)) == "hi"
    assert tokens.CharTokenizer("hi").decode([]) == ""


def test_an_unknown_kind_is_refused():
    with pytest.raises(
        ValueError, match="'word' is unknown: choose from byte, char, bpe"
    ):
        tokens.build("word", [])
