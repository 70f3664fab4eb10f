"""symjax.load: a model from its checkpoints alone."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hand_made import byte_fallback, hand_made, spaced
from runs import TEXT, call, train, write_text

import symjax
from symjax.checkpoints import record
from symjax.data import subwords
from symjax.data.tokens import ByteTokenizer
from symjax.evaluation.loading import load as load_run
from symjax.evaluation.measures.language import losses
from symjax.models import generate

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """Return a run of two checkpoints, with its data."""
    place = tmp_path_factory.mktemp("loaded")
    text = write_text(place)
    keys = {"steps": 4, "checkpoint__every": 2, "data__tokenizer": "char"}
    assert train(text, place / "run", **keys) == 0
    return place / "run"


@pytest.fixture(scope="module")
def bare(whole, tmp_path_factory):
    """Return a copy of only its checkpoints."""
    place = tmp_path_factory.mktemp("bare")
    shutil.copytree(whole / "checkpoints", place / "checkpoints")
    return place


def test_checkpoints_alone_give_model_tokenizer_and_configuration(whole, bare):
    found, run = symjax.load(str(bare)), load_run(whole)
    assert (found.step, found.config, found.labels) == (4, run.config, ())
    assert found.tokenizer == run.examples.tokenizer
    rows = np.arange(64).reshape(2, 32) % found.config.model.vocabulary
    np.testing.assert_array_equal(
        found.logits(rows), jax.jit(run.decoder())(jnp.asarray(rows))
    )
    np.testing.assert_array_equal(found.logits(rows[1:])[0], found.logits(rows[1]))
    np.testing.assert_array_equal(
        found.logits("7 sheep"), found.logits(found.encode("7 sheep"))
    )


def test_a_step_is_chosen(bare):
    assert symjax.load(bare, 2).step == 2
    with pytest.raises(ValueError, match="no checkpoint 3 in"):
        symjax.load(bare, 3)
    with pytest.raises(ValueError, match="no checkpoint in"):
        symjax.load(bare / "nothing")
    for step in (4.0, "4", True):
        with pytest.raises(ValueError, match=f"must be a whole number, got {step!r}"):
            symjax.load(bare, step)
    with pytest.raises(ValueError, match="step 2 and the best one: give one"):
        symjax.load(bare, 2, best=True)


def test_an_empty_path_is_not_the_folder_one_is_in(bare, monkeypatch):
    monkeypatch.chdir(bare)
    for call_it in (symjax.load, symjax.load_pretrained):
        with pytest.raises(ValueError, match="path is empty: name a file or a folder"):
            call_it("")


def test_the_mean_of_the_weights_is_used_and_exported(whole, tmp_path, capsys):
    text, run = write_text(tmp_path), tmp_path / "run"
    keys = {"steps": 2, "optimizer__ema": 0.25, "optimizer__warmup": 0}
    assert train(text, run, data__tokenizer="char", **keys) == 0
    mean, plain = symjax.load(run, ema=True), symjax.load(run)
    rows = np.arange(32)[None] % mean.config.model.vocabulary
    wanted = jax.jit(load_run(run, ema=True).decoder())(jnp.asarray(rows))
    np.testing.assert_array_equal(mean.logits(rows), wanted)
    assert np.abs(mean.logits(rows) - plain.logits(rows)).max() > 1e-4
    assert len(mean.generate("7 sheep", 5)) == 5
    with pytest.raises(ValueError, match="it was trained with optimizer.ema 0"):
        symjax.load(whole, ema=True)

    def judged(*flags):
        path = tmp_path / f"{len(flags)}.json"
        words = ["--workdir", str(run), "--tasks", "loss", "--json", str(path), *flags]
        assert call("eval", words) == 0
        return path

    results = {True: judged("--ema"), False: judged()}
    for loaded in (mean, plain):
        folder = tmp_path / f"exported-{loaded.ema}"
        symjax.save_pretrained(loaded, folder, results=results[loaded.ema])
        card = (folder / "README.md").read_text()
        assert "| held-out loss | " in card
        assert ("| moving average, optimizer.ema=0.25 |" in card) == loaded.ema
        found = symjax.load_pretrained(folder)
        assert found.ema == loaded.ema
        np.testing.assert_allclose(found.logits(rows), loaded.logits(rows), atol=1e-6)
        said = f"results are of ema {not loaded.ema}, the model is of ema {loaded.ema}"
        with pytest.raises(ValueError, match=said):
            symjax.save_pretrained(found, folder, results=results[not loaded.ema])
    given = judged("--text", str(text))
    symjax.save_pretrained(plain, tmp_path / "given", results=given)
    assert "| given text loss | " in (tmp_path / "given" / "README.md").read_text()
    keys |= {"seed": 1, "data__tokenizer": "char"}
    assert train(text, tmp_path / "other", **keys) == 0
    with pytest.raises(ValueError, match="the results are of weights [0-9a-f]{8}, the"):
        other = symjax.load(tmp_path / "other")
        symjax.save_pretrained(other, tmp_path / "none", results=results[False])
    assert not (tmp_path / "none").exists()


IDS = {
    "too large": ([9999, 1], r"in \[0, \d\d\), the model's vocabulary, got 1 to 9999"),
    "below 0": ([3, -1], r"must be in \[0, .*, got -1 to 3"),
    "beyond 32 bits": ([2**40, 1], "got 1 to 1099511627776"),
    "no numbers": (["a"], r"whole numbers \[T\].*, got <U1"),
    "fractions": ([0.5, 1.0], r"whole numbers \[T\].*, got float64 \(2,\)"),
    "one number": (3, r"whole numbers \[T\].*, got int64 \(\)"),
}


@pytest.mark.parametrize(("ids", "said"), IDS.values(), ids=IDS)
def test_ids_that_are_none_are_refused(bare, ids, said):
    found = symjax.load(bare)
    for call_it in (found.logits, found.losses, found.decode):
        with pytest.raises(ValueError, match=said):
            call_it(ids)


def test_nothing_has_no_logits(bare):
    found = symjax.load(bare)
    for nothing in ("", [], np.zeros((0, 3), int)):
        with pytest.raises(ValueError, match="logits need a token or more, got"):
            found.logits(nothing)
    with pytest.raises(
        ValueError, match=r"numbers \[T\] or \[B, T\], got int64 \(1, 2"
    ):
        found.logits(np.zeros((1, 2, 3), int))
    for call_it in (found.losses, found.decode):
        with pytest.raises(ValueError, match=r"numbers \[T\], got int64 \(1, 2\)"):
            call_it([[1, 2]])
    assert found.losses("").shape == (0,)


NUMBERS = {
    "count": (2.5, float("nan"), 0, -1, "3", None, 10**9),
    "top_k": (2.5, float("nan"), float("inf"), -1, "3"),
    "temperature": (float("nan"), float("inf"), -1, None, "hot", True),
    "top_p": (float("nan"), 0, 1.5, None, True),
    "seed": (2.5, -1, 2**32),
    "stop": ([2.5], [9999], [-1], [None], None, b"x"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_generate_are_checked(bare, name):
    found = symjax.load(bare)
    named = "a token to stop at" if name == "stop" else name
    for value in NUMBERS[name]:
        with pytest.raises(ValueError, match=f"{named} must be .*, got"):
            found.generate("7 sheep", **{"count": 3} | {name: value})


def test_prompts_are_texts(bare):
    found = symjax.load(bare)
    for nothing in ([], "", ["", ""]):
        with pytest.raises(ValueError, match="prompt is empty"):
            found.generate(nothing)
    for ids in ([1, 2], b"7 sheep", ["7", None], None):
        with pytest.raises(ValueError, match="a text is needed, got"):
            found.generate(ids)


def test_the_loss_of_the_heldout_text_is_that_of_the_evaluation(whole, bare):
    found, run = symjax.load(bare), load_run(whole)
    text = run.examples.tokenizer.decode(run.examples.text.heldout)
    wanted = losses(run)["heldout"]
    loss = found.loss(text)
    assert loss.nats_per_token == pytest.approx(wanted["loss"], abs=1e-6)
    assert loss.bits_per_byte == pytest.approx(wanted["bits_per_byte"], rel=1e-3)
    short = found.losses(text[:7])
    np.testing.assert_allclose(short, found.losses(text[:20])[:6], atol=1e-6)
    with pytest.raises(ValueError, match="needs 2 tokens or more, '7' has 1"):
        found.loss("7")


def test_prompts_of_different_lengths_are_continued_as_if_alone(bare):
    found = symjax.load(bare)
    prompts = ["7 sheep, 49 goats", "8", "600 sheep"]
    texts = found.generate(prompts, 12, temperature=0)
    assert texts == [found.generate(x, 12, temperature=0) for x in prompts]
    assert all(len(text) == 12 for text in texts)
    assert found.generate("7", 9, seed=1) == found.generate("7", 9, seed=1)
    assert found.generate("7", 9, seed=1) != found.generate("7", 9, seed=2)


def test_the_text_ends_before_what_stops_it(bare):
    found = symjax.load(bare)
    whole = found.generate("7 sheep", 40, temperature=0)
    word, letter = whole[3:6], whole[5]
    shown = {"temperature": 0, "count": 40}
    assert found.generate("7 sheep", stop=[word], **shown) == whole.split(word)[0]
    assert found.generate("7 sheep", stop=word, **shown) == whole.split(word)[0]
    with pytest.raises(ValueError, match="stop: every text holds the empty string"):
        found.generate("7 sheep", stop=["a", ""], **shown)
    token = found.encode(letter)[0]
    assert found.generate("7 sheep", stop=[token], **shown) == whole.split(letter)[0]


def test_a_continuation_keeps_to_learned_positions(bare, tmp_path):
    keys = {"model__positions": "learned", "steps": 1}
    assert train(write_text(tmp_path), tmp_path / "run", **keys) == 0
    found = symjax.load(tmp_path / "run")
    ids = jnp.asarray(found.encode("7 sheep"))[None]
    wanted = generate(found.model, ids, 25, jax.random.key(0), temperature=0)
    text = found.generate("7 sheep", temperature=0)
    assert text == found.decode(wanted[0])
    with pytest.raises(ValueError, match="of 40 tokens fills the model's 32 learned"):
        found.generate("x" * 40)
    with pytest.raises(ValueError, match="prompt is empty"):
        found.generate(["x", ""])
    with pytest.raises(ValueError, match="count must be a whole number from 1 to"):
        found.generate("x", None)


BYTES = ByteTokenizer()


@pytest.mark.parametrize("text", ["你好", "é!", "😀 ok", "日本語テキスト", "abcd"])
def test_bits_per_byte_are_of_the_bytes_of_the_text(text):
    loaded = hand_made(BYTES)
    bits = loaded.losses(text).astype(float).sum() / np.log(2)
    size = len(text.encode())
    wanted = pytest.approx(bits / (size - 1), rel=1e-6)
    assert loaded.loss(text).bits_per_byte == wanted
    begun = hand_made(BYTES, language={"document_start": 0})
    bits = begun.losses(text).astype(float).sum() / np.log(2)
    wanted = pytest.approx(bits / size, rel=1e-6)
    assert begun.loss(text).bits_per_byte == wanted


def test_a_space_that_the_tokenizer_adds_is_no_byte_of_the_text():
    loaded = hand_made(spaced())
    for text, first in (("the cat", 3), (" the cat", 4), ("你好", 0)):
        bits = loaded.losses(text).astype(float).sum() / np.log(2)
        wanted = pytest.approx(bits / (len(text.encode()) - first), rel=1e-6)
        assert loaded.loss(text).bits_per_byte == wanted


def test_a_text_is_scored_after_what_stands_before_a_document():
    follows = {0: ord("Q"), ord("Q"): ord("a"), ord("a"): 0}
    known = hand_made(BYTES, follows, {"document_start": 0})
    found = known.losses("Qab")
    assert found.shape == (3,) and found[:2].max() < 1e-6 < 20 < found[2]
    np.testing.assert_array_equal(known.losses(BYTES.encode("Qab")), found[1:])
    np.testing.assert_array_equal(known.losses(BYTES.encode("\0Qab")), found)
    assert known.loss("Q").nats_per_token < 1e-6
    with pytest.raises(ValueError, match="a loss needs 1 token or more, '' has 0"):
        known.loss("")
    assert known.generate("", 9, temperature=0) == "Qa"
    assert known.generate(["", "Q"], 9, temperature=0) == ["Qa", "a"]
    unknown = hand_made(BYTES, follows)
    np.testing.assert_array_equal(unknown.losses("Qab"), found[1:])
    with pytest.raises(ValueError, match="prompt is empty"):
        unknown.generate("", 9)


def test_prompts_begin_with_bos_where_all_documents_did():
    tokens = byte_fallback()
    bos, end = 1, tokens.document_end
    the, cat = tokens.encode("the cat").tolist()
    language = {"document_start": bos, "bos": True}
    loaded = hand_made(tokens, {None: end, bos: the, the: cat}, language)
    assert loaded.generate(["", "the"], 9, temperature=0) == [" the cat", " cat"]
    losses = loaded.losses("the cat")
    assert losses.shape == (2,) and losses.max() < 1e-6
    assert loaded.delimiters.prompt(tokens.encode("the")).tolist() == [bos, the]


def test_generation_stops_at_the_end_of_the_document():
    bpe = subwords.train_bpe(["the quick brown fox. " * 50], 280)
    quick, end = int(bpe.encode(" quick")[0]), bpe.document_end
    loaded = hand_made(bpe, {None: quick, quick: end, end: end})
    shown = {"count": 4, "temperature": 0}
    assert loaded.generate("the", **shown) == bpe.decode([quick])
    went_on = loaded.generate("the", ignore_end=True, **shown)
    assert went_on == bpe.decode([quick, end, end, end])
    assert hand_made(BYTES, {None: 0}).generate("x", **shown) == ""
    nul = hand_made(BYTES, {None: 0}).generate("x", ignore_end=True, **shown)
    assert nul == "\0" * 4


def test_a_model_without_text_says_so(tmp_path):
    keys = {"data__source": "copy", "data__items": 3, "steps": 1}
    words = [f"--config.{n.replace('__', '.')}={x}" for n, x in keys.items()]
    words += ["--config", "configs/copy.py:tiny", "--config.model.depth=1"]
    assert call("train", [*words, "--workdir", str(tmp_path / "run")]) == 0
    shutil.rmtree(tmp_path / "run" / "data")
    found = symjax.load(tmp_path / "run")
    assert found.tokenizer is None and found.logits(np.zeros(5, int)).shape[0] == 5
    with pytest.raises(ValueError, match="data.source=copy has no tokenizer"):
        found.generate("x")


def test_an_encoder_says_that_it_predicts_no_next_token(tmp_path):
    keys = {"model__kind": "encoder", "steps": 1, "model__attention__symmetric": "none"}
    assert train(write_text(tmp_path), tmp_path / "run", **keys) == 0
    shutil.rmtree(tmp_path / "run" / "data")
    found = symjax.load(tmp_path / "run")
    assert found.tokenizer.decode(found.encode(TEXT[:9])) == TEXT[:9]
    assert found.logits(TEXT[:9]).shape == (9, 257)
    for call_it in (found.generate, found.loss):
        with pytest.raises(ValueError, match="is an encoder: it predicts no next"):
            call_it(TEXT[:9])


def rewritten(place, change):
    """Return checkpoints with another meta, under a correct seal."""
    for path in place.glob("checkpoints/*/meta/metadata"):
        document = json.loads(path.read_text())
        change(document["meta"])
        del document["checksum"]
        document["checksum"] = record._seal(document)
        path.write_text(json.dumps(document))


def test_a_checkpoint_of_before_is_read_with_its_data(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    rewritten(tmp_path / "run", lambda meta: meta.pop("examples"))
    found = symjax.load(tmp_path / "run")
    assert found.tokenizer == load_run(whole).examples.tokenizer
    shutil.rmtree(tmp_path / "run" / "data")
    with pytest.raises(ValueError, match="does not say what its tokens are: .*data"):
        symjax.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocabulary", "x"), ("image", 3), ("language", {"kind": "x"}), ("labels", None)],
)
def test_descriptions_that_are_none_are_refused(bare, tmp_path, name, value):
    shutil.copytree(bare, tmp_path / "run")
    rewritten(tmp_path / "run", lambda meta: meta["examples"].update({name: value}))
    with pytest.raises(ValueError, match="checkpoint 4 of .* describes no examples"):
        symjax.load(tmp_path / "run")
