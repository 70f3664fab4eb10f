"""Tokens that begin texts, as the tokenizer or the user says, and their export."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from symjax import config
from symjax.data import corpus, subwords, tokens
from symjax.data.examples import text_examples
from symjax.data.subwords import from_file

TEXT = (
    "The quick brown fox's tail; naïve {foxes}:\n\n\tjump over\n lazy dog. 日本 12345\n"
)
BEGIN, END = "<s>", "</s>"


def template(*, end=False):
    return {
        "single": f"{BEGIN} $A {END}" if end else f"{BEGIN} $A",
        "special_tokens": [(BEGIN, 0), (END, 1)],
    }


def byte_level(prefix=False):
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    return made, sorted(pre_tokenizers.ByteLevel.alphabet())


def llama_3():
    """Return a tokenizer whose signs take the line feeds after them."""
    made, alphabet = byte_level()
    words = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    post = [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(**template()),
    ]
    return made, alphabet, processors.Sequence(post)


def llama_2():
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # to be trained
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made, [], processors.TemplateProcessing(**template())


def metaspace():
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    return made, [], processors.TemplateProcessing(**template(end=True))


def roberta():
    made, alphabet = byte_level(prefix=True)
    return made, alphabet, processors.RobertaProcessing((END, 1), (BEGIN, 0))


def plain():
    made, alphabet = byte_level()
    return made, alphabet, processors.ByteLevel(trim_offsets=False)


KINDS = {x.__name__: x for x in (llama_3, llama_2, metaspace, roberta, plain)}


@pytest.fixture(params=KINDS)
def path(request, tmp_path):
    made, alphabet, post = KINDS[request.param]()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BEGIN, END, "<unk>", "<extra>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 9, trainer)
    made.add_tokens([AddedToken("foxes", special=False, single_word=True)])
    if request.param == "llama_2":
        made.pre_tokenizer = None
    made.post_processor = post
    made.enable_truncation(5)
    made.enable_padding(length=5)
    file = tmp_path / request.param / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(made.to_str())
    about = {"eos_token": END, "bos_token": BEGIN}
    file.with_name("tokenizer_config.json").write_text(json.dumps(about))
    return file


def ids_of(tokenizer, text):
    """Return token ids in training, in scores and in prompts."""
    begin = [] if tokenizer.document_begin is None else [tokenizer.document_begin]
    return [*begin, *tokenizer.encode(text).tolist()]


def test_a_text_begins_as_the_tokenizer_says(path):
    found = from_file(path)
    assert found.bos == ("" if path.parent.name == "plain" else BEGIN)
    assert from_file(path, "false").bos == "" and from_file(path, "true").bos == BEGIN
    assert found.document_begin == (0 if found.bos else None)
    assert tokens.from_description(found.describe()) == found
    assert not (found.encode(TEXT) == 0).any()


@pytest.mark.parametrize("bos", ["auto", "true", "false"])
@pytest.mark.parametrize("cut", [subwords.ENCODED_AT_ONCE, 20, 30])
def test_an_exported_tokenizer_gives_the_ids_of_training(path, bos, cut, monkeypatch):
    """The ids of the whole text, although training reads it in pieces."""
    monkeypatch.setattr(subwords, "ENCODED_AT_ONCE", cut)
    used = from_file(path, bos)
    files = used.files(99)
    exported = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in (TEXT * 3, "the fox", " the fox", "a\nfoxes", "", "日本"):
        assert exported.encode(text).ids == ids_of(used, text)
    folder = path.parent / "again"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    again = from_file(folder)
    assert (again.bos, again.end) == (used.bos, used.end)
    assert ids_of(again, TEXT) == ids_of(used, TEXT)
    about = json.loads(files["tokenizer_config.json"])
    assert about.get("bos_token", "") == used.bos and about["split_special_tokens"]
    assert "split_special_tokens" not in used.files(99, trained=False)


def test_all_else_of_a_definition_is_kept(path):
    known = json.loads(path.read_text())
    for bos in ("auto", "true", "false"):
        used = from_file(path, bos)
        found = json.loads(used.files(99)["tokenizer.json"])
        changed = {name for name in known if known[name] != found[name]}
        assert changed <= {"post_processor", "truncation", "padding"}
        pair = tokenizers.Tokenizer.from_str(json.dumps(found)).encode("fox", "dog")
        if bos == "false":
            assert pair.special_tokens_mask.count(1) == 0
    assert found["truncation"] is None and found["padding"] is None


@pytest.mark.parametrize("documents", ["separate", "joined"])
@pytest.mark.parametrize("bos", ["auto", "false"])
def test_documents_begin_with_the_token(path, tmp_path, bos, documents):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number}.txt").write_text(f"{number} foxes " * (1 + number % 5))
    options = config.Data(
        "text", str(texts), tokenizer=str(path), bos=bos, documents=documents
    )
    opened = corpus.open_corpus(options, tmp_path / "data")
    begins, text = bool(opened.tokenizer.bos), opened.heldout[:]
    assert begins == (bos == "auto" and path.parent.name != "plain")
    assert opened.start == (0 if begins else 1) == text[0] and text[-1] == 1
    counts = opened.fingerprint["heldout"]
    assert counts["documents"] > 1
    assert (text == 0).sum() == (counts["documents"] if begins else 0)
    assert (text == 1).sum() == counts["documents"] + (not begins)
    language = text_examples(opened).language
    assert language["document_start"] == opened.start
    assert language.get("bos", "") == opened.tokenizer.bos
    rows = [x(0, 2) for x in text_examples(opened).heldout_batches((2, 9))]
    asked = np.concatenate([targets[weights > 0] for _, targets, weights in rows])
    wanted = text[1:] if documents == "joined" or not begins else text[text != 0]
    np.testing.assert_array_equal(asked, wanted)
    if documents == "separate":
        for (inputs, ids), targets, weights in rows:
            edges = (inputs == opened.start)[:, 1:] & (weights[:, 1:] > 0)
            np.testing.assert_array_equal((np.diff(ids, axis=1) > 0)[edges], True)
            first = (inputs == opened.start) & (weights > 0)
            assert (targets[first] > 1).all()
    assert opened.bytes_per_token == counts["bytes"] / len(asked)


def test_a_token_that_begins_and_ends_documents_stands_once_between_them(tmp_path):
    made = subwords.train_bpe([TEXT], 300)
    (tmp_path / "tokenizer.json").write_text(made.definition)
    about = json.dumps({"bos_token": made.end, "eos_token": made.end})
    (tmp_path / "tokenizer_config.json").write_text(about)
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    path = str(tmp_path / "*.txt")
    options = config.Data("text", path, tokenizer=str(tmp_path), bos="true")
    opened = corpus.open_corpus(options, tmp_path / "data")
    text, end = opened.train[:], made.document_end
    assert opened.start == end and opened.shared and opened.tokenizer.bos == made.end
    assert (text == end).sum() == opened.fingerprint["train"]["documents"] + 1
    other = dataclasses.replace(options, bos="auto")
    assert not corpus.open_corpus(other, tmp_path / "other").tokenizer.bos


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "data.bos true is for texts and a tokenizer.json, not for .*=byte"),
        ({"tokenizer": "bpe"}, "not for data.tokenizer=bpe: leave data.bos auto"),
        ({"source": "digits"}, "data.bos 'true' is read by data.source="),
        ({"source": "hub", "label": "x", "tokenizer": "t"}, "not for data.label"),
    ],
)
def test_where_nothing_begins_a_text_the_key_is_refused(tmp_path, changes, said):
    options = config.Data(**{"bos": "true", "source": "text", **changes})
    with pytest.raises(ValueError, match=said):
        corpus.open_corpus(options, tmp_path)


def test_a_tokenizer_that_does_not_say_how_texts_begin_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text(subwords.train_bpe([TEXT], 300).definition)
    with pytest.raises(ValueError, match="data.bos true: .* does not say which token"):
        from_file(tmp_path, "true")
