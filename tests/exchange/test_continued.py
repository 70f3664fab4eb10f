"""Prompts in batches, and text that is decoded together with its prompt."""

import importlib

import jax
import numpy as np
import pytest
from hand_made import byte_fallback, hand_made

from symjax.data.tokens import ByteTokenizer
from symjax.exchange import continued as module
from symjax.exchange.continued import difference, ended, row_keys, texts
from symjax.models.generate import _read

KEY = jax.random.key(0)
BYTES = ByteTokenizer()


@pytest.mark.parametrize("decoder", ["strip", "metaspace"])
def test_a_continuation_keeps_the_space_before_its_first_word(decoder):
    tokens = byte_fallback(decoder)
    whole, count = (
        tokens.encode("the cat sat on the mat"),
        len(tokens.encode("the cat")),
    )
    prompt, more = whole[:count], whole[count:]
    assert tokens.decode(whole) == "the cat sat on the mat"
    assert ended(more, tokens, [], prompt) == " sat on the mat"
    assert ended(more, tokens, [" sat"], prompt) == ""
    assert ended(more, tokens, [" on"], prompt) == " sat"


def test_a_character_may_begin_in_the_prompt_and_end_in_the_continuation():
    ids = BYTES.encode("é你好😀.")
    for cut in range(1, len(ids)):
        text = difference(BYTES, ids[:cut], ids[cut:])
        shown = BYTES.decode(ids[:cut]).rstrip("\ufffd")
        assert shown + text == "é你好😀."


def test_a_character_that_is_cut_off_leaves_those_before_it():
    tokens = byte_fallback()
    prompt = tokens.encode("the cat")
    ids = tokens.encode("the cat你好😀")
    assert (
        tokens.decode(ids[:-1]).count("\ufffd") > 1
    )  # the decoder gives up on the whole text
    for cut, shown in (
        (0, "你好😀"),
        (1, "你好\ufffd"),
        (3, "你好\ufffd"),
        (5, "你\ufffd"),
    ):
        more = ids[len(prompt) : len(ids) - cut]
        assert ended(more, tokens, [], prompt) == shown


def test_bytes_that_are_no_character_do_not_take_the_prompt_with_them():
    tokens = byte_fallback()
    prompt, bad = tokens.encode("你"), tokens.encode("好")[-1:]
    for count in (1, 5):
        assert set(ended(np.repeat(bad, count), tokens, [], prompt)) == {"\ufffd"}


@pytest.fixture(scope="module")
def counting():
    """Return a byte model that writes "ab" after a space, and line feeds otherwise."""
    follows = {None: ord("\n"), ord(" "): ord("a"), ord("a"): ord("b")}
    return hand_made(BYTES, follows)


@pytest.fixture
def steps(monkeypatch):
    """Return how many tokens each loop had drawn at its end."""
    found, module = [], importlib.import_module("symjax.models.generate")
    run = module._write

    def watched(*arguments):
        state = run(*arguments)
        found.append(int(state.index))
        return state

    monkeypatch.setattr(module, "_write", watched)
    return found


def test_a_stop_string_ends_the_loop(counting, steps):
    assert counting.generate("hello", 1000, temperature=0, stop=["\n"]) == ""
    assert steps == []  # the first token came with the prompt
    assert counting.generate("hello ", 1000, temperature=0, stop=["\n"]) == "ab"
    assert steps == [2, 4]
    long = counting.generate("x", 1000, temperature=0, stop=["\n" * 40])
    assert long == "" and steps[2:] == [2, 4, 8, 16, 32, 48]


def test_the_loop_goes_on_until_the_last_row_has_its_stop(counting, steps):
    found = counting.generate(["x", " "], 1000, temperature=0, stop=["b", "\n"])
    assert found == ["", "a"] and steps == [2]
    found = counting.generate(["x", " "], 1000, temperature=0, stop=["b", 10])
    assert found == ["", "a"]


def test_many_prompts_are_continued_in_few_batches_and_in_their_order(monkeypatch):
    loaded = hand_made(BYTES)
    prompts = ["x" * (1 + 7 * i % 40) + chr(65 + i) for i in range(40)]
    alone = [loaded.generate(x, 9, temperature=0) for x in prompts]
    assert len(set(alone)) > 9
    monkeypatch.setattr(module, "BATCH", 8)
    before = _read._cache_size()
    assert loaded.generate(prompts, 9, temperature=0) == alone
    assert _read._cache_size() - before <= 4
    monkeypatch.setattr(module, "CACHE", 1)  # memory for one row
    assert loaded.generate(prompts[:3], 9, temperature=0) == alone[:3]


def test_draws_of_a_row_depend_on_its_key_alone():
    model = hand_made(BYTES).model
    prompts, keys = [BYTES.encode(x) for x in ("seven", "a", "of")], row_keys(KEY, 3)
    together = texts(model, BYTES, prompts, 12, keys)
    for i in (2, 0, 1):
        assert texts(model, BYTES, [prompts[i]], 12, keys[i : i + 1]) == [together[i]]


def test_each_prompt_uses_the_learned_positions_that_are_left_to_it():
    loaded = hand_made(BYTES, positions="learned", length=40)
    prompts = ["x" * 39, "x" * 30, "y" * 5, "z" * 30]
    found = loaded.generate(prompts, 20, temperature=0, ignore_end=True)
    for prompt, text in zip(prompts, found, strict=True):
        assert text == loaded.generate(prompt, 20, temperature=0, ignore_end=True)
    sure = hand_made(BYTES, {None: ord("x")}, positions="learned", length=40)
    found = sure.generate(prompts, 20, temperature=0)
    assert [len(text) for text in found] == [1, 10, 20, 10]
