"""Numbers of a checkpoint against computations that share none of their code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TEXT, compile_cache, train, write_text

from symjax import attention
from symjax.evaluation.loading import load
from symjax.evaluation.measures import language
from symjax.evaluation.measures.weights import lambda_table
from symjax.evaluation.results import Options

KEYS = {
    "data__tokenizer": "char",
    "model__depth": 2,
    "model__dropout": 0.3,
    "steps": 30,
    "evaluate__batches": 1000,
    "log__every": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "jax"):
        place = tmp_path_factory.mktemp("language")
        text = write_text(place)
        # Two bytes a character: a token is not a byte here.
        text.write_text(TEXT.replace("e", "é"), encoding="utf-8")
        assert train(text, place / "run", **KEYS) == 0
        yield place / "run"


@pytest.fixture(scope="module")
def trained(folder):
    return load(folder)


def test_a_complete_run_has_a_picture_of_its_loss(folder):
    assert (folder / "metrics.png").read_bytes().startswith(b"\x89PNG")


def mean_loss(model, tokens, starts, length):
    """Return nats per token in float64, computed window by window."""
    model, losses = jax.jit(model), []
    for start in starts:
        window = np.asarray(tokens[start : start + length + 1], np.int32)
        scores = np.asarray(model(jnp.asarray(window[None, :-1])), np.float64)[0]
        norm = np.log(np.exp(scores).sum(axis=-1))
        losses.extend(norm - scores[np.arange(len(scores)), window[1:]])
    return np.mean(losses)


def test_the_heldout_loss_is_the_mean_over_every_heldout_token(trained, folder):
    tokens = trained.examples.text.heldout
    starts = range(0, len(tokens) - 1, 32)
    assert (len(tokens) - 1) % (8 * 32), "the last batch should not be full"
    expected = mean_loss(trained.model(), tokens, starts, 32)
    found = language.losses(trained)["heldout"]
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(expected), rel=1e-4)
    targets = tokens[1:]
    text = trained.examples.tokenizer.decode(targets)
    bytes_a_token = len(text.encode()) / len(targets)
    assert bytes_a_token > 1.01
    bits = expected / np.log(2) / bytes_a_token
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    logged = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    assert f'"heldout/loss": {found["loss"]:.5f}'[:-1] in logged


def test_fewer_batches_are_the_first_ones(trained):
    expected = mean_loss(
        trained.model(), trained.examples.text.heldout, range(0, 256, 32), 32
    )
    found = language.losses(trained, 1)["heldout"]
    assert found["batches"] == 1
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_training_text_is_read_with_and_without_dropout(trained):
    found = language.losses(trained, 3)["train"]
    assert found["loss"] > found["loss_eval_mode"] + 0.01
    assert found["loss_eval_mode"] < 2.0


def test_the_lambda_table_is_what_the_layers_use(trained):
    model = trained.model()
    table = lambda_table(model)
    assert [row["layer"] for row in table] == [0, 1]
    for row, block in zip(table, model.blocks, strict=True):
        layer = block.attention
        vectors = (
            layer.lambda_query_1,
            layer.lambda_key_1,
            layer.lambda_query_2,
            layer.lambda_key_2,
        )
        used = attention.differential_lambda(
            *(vector[...] for vector in vectors), layer.lambda_initial
        )
        assert row["lambda"] == pytest.approx(float(used), abs=1e-6)
        initial = 0.8 - 0.6 * np.exp(-0.3 * row["layer"])
        assert row["lambda_initial"] == pytest.approx(initial, abs=1e-9)
        parts = row["lambda_1"] - row["lambda_2"] + row["lambda_initial"]
        assert row["lambda"] == pytest.approx(parts)
        assert abs(row["lambda_1"] - row["lambda_2"]) > 1e-5, "nothing was learned"


def test_greedy_sampling_equals_reading_the_whole_text_again(trained):
    options = Options(prompt="12 shéép", tokens=20, temperature=0.0)
    prompt, text = language.continuation(trained, trained.examples.text, options)
    ids = [int(i) for i in trained.examples.tokenizer.encode(prompt)]
    assert prompt == "12 shéép"
    model = jax.jit(lambda tokens: trained.model()(tokens))
    padded = np.zeros((1, 32), np.int32)
    for _ in range(20):
        padded[0, : len(ids)] = ids
        ids.append(int(np.argmax(model(jnp.asarray(padded))[0, len(ids) - 1])))
    assert text == trained.examples.tokenizer.decode(ids[-20:])


def test_a_sample_depends_on_its_seed_only(trained):
    one, two = (Options(tokens=20, temperature=1.0, seed=seed) for seed in (1, 2))
    first = language.continuation(trained, trained.examples.text, one)
    assert first == language.continuation(trained, trained.examples.text, one)
    assert first != language.continuation(trained, trained.examples.text, two)
    assert len(first[1]) == 20
