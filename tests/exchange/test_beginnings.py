"""Folders of weights say how texts begin, and callers can override it."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, processors

import symjax
from symjax import config
from symjax.data import subwords
from symjax.data.tokens import ByteTokenizer
from symjax.exchange import Loaded
from symjax.models import build
from symjax.models.generate import generate

END = subwords.END


def model_of(tokenizer, step, **language):
    options = config.Model(
        vocabulary=tokenizer.vocabulary,
        width=16,
        heads=2,
        depth=1,
        length=16,
        positions="rope",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
    )
    described = {**tokenizer.describe(), **language}
    model = build(options, rngs=nnx.Rngs(0))
    return Loaded(
        model, tokenizer, config.Config(model=options), step, language=described
    )


@pytest.fixture
def tokenizer(tmp_path):
    """Write a tokenizer whose post-processor puts a token before every text."""
    made = Tokenizer.from_str(subwords.train_bpe(["a sheep met a fox"], 260).definition)
    made.add_special_tokens(["<s>"])
    token = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", token)]
    )
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    return subwords.from_file(tmp_path)


def test_a_folder_of_a_run_begins_texts_as_training_did(tokenizer, tmp_path):
    begin = tokenizer.document_begin
    symjax.save_pretrained(model_of(tokenizer, 7, document_start=begin), tmp_path)
    found = symjax.load_pretrained(tmp_path)
    assert found.tokenizer == tokenizer and found.language["bos"] == "<s>"
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["bos_token_id"] == begin and settings["eos_token_id"] == 0
    without = symjax.load_pretrained(tmp_path, bos=False)
    assert without.tokenizer.bos == "" and "bos" not in without.language
    assert without.language["document_start"] == begin  # the model has learned it
    assert symjax.load_pretrained(tmp_path, bos=True).language == found.language


def test_a_folder_of_a_run_without_the_token_adds_none(tokenizer, tmp_path):
    plain = subwords.SubwordTokenizer(tokenizer.definition, END)
    symjax.save_pretrained(model_of(plain, 7, document_start=0), tmp_path)
    exported = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert exported.encode("a fox").ids == plain.encode("a fox").tolist()
    found = symjax.load_pretrained(tmp_path)
    assert found.tokenizer == plain and found.language["document_start"] == 0
    asked = symjax.load_pretrained(tmp_path, bos=True)
    assert asked.tokenizer.bos == "<s>"
    assert asked.language["document_start"] == tokenizer.document_begin


def test_a_folder_of_transformers_begins_texts_as_its_tokenizer_says(
    tokenizer, tmp_path
):
    symjax.save_pretrained(model_of(tokenizer, 0), tmp_path)
    (tmp_path / "symjax.json").unlink()
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "split_special_tokens" not in about  # as it was read
    begin = tokenizer.document_begin
    for bos in (None, True, False):
        found = symjax.load_pretrained(tmp_path, bos=bos)
        assert found.tokenizer.bos == ("" if bos is False else "<s>")
        assert found.language["document_start"] == begin
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.post_processor = processors.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    assert symjax.load_pretrained(tmp_path).tokenizer.bos == ""
    assert symjax.load_pretrained(tmp_path, bos=True).tokenizer.bos == "<s>"
    (tmp_path / "tokenizer_config.json").unlink()
    found = symjax.load_pretrained(tmp_path)  # texts follow the end of other texts
    assert found.language["document_start"] == found.tokenizer.document_end == 0
    with pytest.raises(ValueError, match="does not say which token begins a text"):
        symjax.load_pretrained(tmp_path, bos=True)


def test_bytes_begin_with_no_token(tmp_path):
    symjax.save_pretrained(model_of(ByteTokenizer(), 7), tmp_path)
    assert symjax.load_pretrained(tmp_path, bos=False).tokenizer == ByteTokenizer()
    with pytest.raises(
        ValueError, match="bos=True needs a tokenizer.json, .* has none"
    ):
        symjax.load_pretrained(tmp_path, bos=True)


def test_texts_and_prompts_begin_with_the_token_wherever_they_are_read(tokenizer):
    begin, text = tokenizer.document_begin, "a fox"
    model = model_of(tokenizer, 7, document_start=begin)
    ids = np.array([begin, *tokenizer.encode(text)])
    np.testing.assert_array_equal(model.logits(text), model.logits(ids))
    np.testing.assert_array_equal(model.losses(text), model.losses(ids))
    chosen = {"temperature": 0.0, "ignore_end": True}
    more = generate(model.model, ids[None], 4, jax.random.key(0), temperature=0.0)
    whole = tokenizer.decode([*tokenizer.encode(text), *np.asarray(more[0])])
    assert text + model.generate(text, 4, **chosen) == whole
    plain = subwords.SubwordTokenizer(tokenizer.definition, END)
    other = model_of(plain, 7, document_start=0)
    np.testing.assert_array_equal(other.logits(text), other.logits(ids[1:]))


def test_the_harness_has_the_tokens_of_training(tokenizer):
    pytest.importorskip("lm_eval")
    from symjax.evaluation.harness_model import HarnessModel

    begin, ids = tokenizer.document_begin, tokenizer.encode("a fox").tolist()
    asked = HarnessModel(model_of(tokenizer, 7, document_start=begin))
    assert asked.tok_encode("a fox") == [begin, *ids]
    plain = subwords.SubwordTokenizer(tokenizer.definition, END)
    asked = HarnessModel(model_of(plain, 7, document_start=0))
    assert asked.tok_encode("a fox") == ids
