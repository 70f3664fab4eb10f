"""symjax.load: a model used from its checkpoints alone."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TEXT, call, train, write_text

import symjax
from symjax.evaluation.language import losses
from symjax.evaluation.loading import load as load_run
from symjax.models import generate
from symjax.training import record

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A run of two checkpoints, with its data."""
    place = tmp_path_factory.mktemp("loaded")
    text = write_text(place)
    keys = {"steps": 4, "checkpoint__every": 2, "data__tokenizer": "char"}
    assert train(text, place / "run", **keys) == 0
    return place / "run"


@pytest.fixture(scope="module")
def bare(whole, tmp_path_factory):
    """Its checkpoints, copied without anything else."""
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
    np.testing.assert_array_equal(found.logits(rows)[1], found.logits(rows[1]))
    np.testing.assert_array_equal(
        found.logits("7 sheep"), found.logits(found.encode("7 sheep"))
    )


def test_a_step_is_chosen(bare):
    assert symjax.load(bare, 2).step == 2
    with pytest.raises(ValueError, match="no checkpoint 3 in"):
        symjax.load(bare, 3)
    with pytest.raises(ValueError, match="no checkpoint in"):
        symjax.load(bare / "nothing")


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
    """Checkpoints whose meta says something else, with a seal that is right."""
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
