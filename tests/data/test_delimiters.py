"""Tokens before and after documents, for every kind of tokenizer."""

import dataclasses

import numpy as np
import pytest
from hand_made import byte_fallback, spaced

from symjax.data import subwords
from symjax.data.boundaries import boundaries
from symjax.data.delimiters import delimiters
from symjax.data.tokens import ByteTokenizer, CharTokenizer

BPE = subwords.train_bpe(["the quick brown fox. " * 50], 280)


def test_a_document_ends_with_the_token_for_it_or_with_a_nul_if_there_is_one():
    assert delimiters(BPE, {}).end == BPE.document_end
    assert delimiters(ByteTokenizer(), {}).end == 0
    assert delimiters(CharTokenizer("\0ab"), {}).end == 0
    assert delimiters(CharTokenizer("ab"), {}).end is None


def test_a_document_ends_with_the_token_that_begins_the_next_one_if_no_other_ends_it():
    tokenizer = dataclasses.replace(BPE, end="", bos="q")
    marks = boundaries(tokenizer, several=True)
    language = {**tokenizer.describe(), "document_start": marks.start}
    known = delimiters(tokenizer, language)
    assert known.end == known.start == marks.between == tokenizer.document_begin


def test_what_stands_before_a_document_is_what_the_run_says():
    for tokenizer in (BPE, ByteTokenizer(), CharTokenizer("ab")):
        assert delimiters(tokenizer, {}).start is None
        found = delimiters(tokenizer, {"document_start": 1})
        assert found.start == 1 and not found.every
    assert delimiters(BPE, {"document_start": 1, "bos": True}).every
    assert not delimiters(BPE, {"bos": True}).every


def test_prompts_begin_as_the_documents_of_training_did():
    ids = np.array([5, 6], np.uint8)
    known = delimiters(ByteTokenizer(), {"document_start": 0})
    assert known.prompt(ids).tolist() == [5, 6]
    assert known.prompt(ids[:0]).tolist() == [0]
    assert known.with_start(ids).tolist() == [0, 5, 6]
    bos = delimiters(byte_fallback(), {"document_start": 258, "bos": True})
    assert bos.prompt(ids).tolist() == [258, 5, 6]
    nothing = delimiters(ByteTokenizer(), {})
    assert nothing.with_start(ids).tolist() == [5, 6]
    assert nothing.prompt(ids[:0]).tolist() == []


META = byte_fallback("metaspace")
FIRST = {
    "a byte": (ByteTokenizer(), "a", 1),
    "a byte of a character": (ByteTokenizer(), "你好", 1),
    "a character": (CharTokenizer("你好"), "你好", 3),
    "a word": (BPE, "the quick", 3),
    "a byte of a character in byte-level BPE": (BPE, "你好", 1),
    "an added space": (byte_fallback(), "你好", 0),
    "a word after an added space": (byte_fallback(), "the cat", 3),
    "a word and an added space": (spaced(), "the cat", 3),
    "a word and a space of the text": (spaced(), " the cat", 4),
    "a space of the text that a decoder drops": (META, " the cat", 4),
    "an added space that a decoder drops": (META, "the cat", 3),
    "a space of the text before a step that strips": (byte_fallback(), " the cat", 4),
    "a space of the text before another space": (byte_fallback(), "  the", 1),
    "an added space in byte-level BPE": (spaced(), "你好", 0),
}


@pytest.mark.parametrize(("tokenizer", "text", "size"), FIRST.values(), ids=FIRST)
def test_the_first_token_of_a_text_stands_for_some_of_its_bytes(tokenizer, text, size):
    first = int(tokenizer.encode(text)[0])
    assert tokenizer.size_of(first, text) == size
    if not text.startswith(" "):  # so are most texts, if only the token is known
        assert tokenizer.size_of(first) == size
