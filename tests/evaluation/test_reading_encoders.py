"""Tasks read encoders: every token sees all tokens, and no pads."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.data.generated import NOTHING
from symjax.evaluation import tasks
from symjax.evaluation.measures import approximation, attended, lengths, reading, speed
from symjax.evaluation.measures.reading import read
from symjax.evaluation.measures.windows import Window
from symjax.evaluation.results import Options
from symjax.layers.sharded import Operand
from symjax.models import Encoder

LENGTH = 16
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
TIME = len(TOKENS)
PADDED = np.concatenate([TOKENS, np.full(LENGTH - TIME, NOTHING)])
CASES = {
    "softmax": ({"scan_layers": True}, {"length_base": 64, "mask_self": True}),
    "v1": (
        {"positions": "alibi"},
        {"mechanism": "sparsemax", "differential": "v1", "symmetric": "plain"},
    ),
    "v2": ({"kv_heads": 2}, {"mechanism": "linear", "differential": "v2"}),
    "gated": ({"pattern": ("gau", "flash")}, {"chunk_size": 4}),
    "function": ({}, {"mechanism": "matrix_function", "function": "exp"}),
}


def encoder(name="softmax", **changes):
    model, attention = CASES[name]
    options = {"kind": "encoder", "vocabulary": 10, "width": 16, "depth": 2}
    options |= {"heads": 4, "length": LENGTH, "classes": 3, "positions": "rope"} | model
    options["attention"] = config.Attention(**attention)
    made = config.Model(**options | changes)
    return made, Encoder(made, rngs=nnx.Rngs(0))


def uniform_encoder(**changes):
    """Return an encoder without queries: all visible keys have the same weight."""
    plain = {"scan_layers": False, "attention": config.Attention()}
    model = config.Model(
        **{
            **{"kind": "encoder", "vocabulary": 10, "width": 16, "depth": 2},
            **{"heads": 2, "length": LENGTH, "classes": 3, **plain, **changes},
        }
    )
    made = Encoder(model, rngs=nnx.Rngs(0))
    for block in made.blocks:
        block.attention.query.kernel[...] *= 0
        block.attention.query.bias[...] *= 0
    return model, made


def run_of(model, made, *rows):
    """Return a run with these held-out inputs and targets."""

    def heldout_batches(shape, count=None):
        for inputs, targets in rows[:count]:
            weights = (targets >= 0).astype(np.float32)
            batch = inputs[None], targets[None], weights[None]
            yield lambda start, stop, batch=batch: batch

    return SimpleNamespace(
        examples=SimpleNamespace(
            heldout_batches=heldout_batches,
            unit="label",
            tokenizer=None,
            separate=False,
            fixed_length=model.patch > 0,
        ),
        config=config.Config(model=model, batch_size=1),
        ema=True,  # no metrics.jsonl is read
        model=lambda: made,
    )


def measure(run, name):
    return tasks.measure(name, run, Options())


LABEL = np.array([1])


@pytest.fixture(scope="module")
def even():
    """Return uniform attention over rows of 11 and of 16 tokens."""
    full = np.arange(LENGTH) % 10
    return run_of(*uniform_encoder(), (PADDED, LABEL), (full, LABEL))


@pytest.mark.parametrize("name", CASES)
def test_pads_carry_no_mass_and_change_nothing_that_is_read(name):
    _, model = encoder(name)
    padded, alone = read(model, PADDED), read(model, TOKENS)
    graph, weights = nnx.split(model)
    whole = reading._read_layers(graph, weights, jnp.asarray(PADDED)[None])
    for one, other, raw in zip(padded, alone, whole, strict=True):
        assert not np.asarray(raw.branches)[..., :TIME, TIME:].any()
        for field, x, y in zip(one._fields, one, other, strict=True):
            assert (x is None) == (y is None), field
            if x is not None:
                near = 1e-6 if field == "products" else 1e-7  # products reach 8
                np.testing.assert_allclose(x, y, near, 2e-6, err_msg=field)


def test_maps_times_values_are_what_a_layer_puts_out_beside_pads():
    for name in CASES:
        _, model = encoder(name)
        block = model.blocks[0]
        layer = getattr(block, "attention", block)
        norm = getattr(block, "attention_norm", None) or block.norm

        @jax.jit
        def run(tokens, model=model, layer=layer, norm=norm):
            x, padding_mask = model._embed(tokens[None])
            operands = layer.operands(norm(x), jnp.arange(LENGTH)[None])
            operands["mask"] = Operand(padding_mask[:, None, None], "B")
            return layer.mixer(operands)[0]

        found = read(model, PADDED)[0]
        wanted = run(PADDED)[:TIME]
        np.testing.assert_allclose(
            np.einsum("nts,nsv->tnv", found.map, found.value), wanted, atol=3e-6
        )
        assert np.triu(found.map, 1).any(), "nothing after a token is seen"


def test_softmax_of_the_scores_is_the_map_and_n_are_the_keys_that_exist():
    """20 tokens in 24 places, each sees 19 others; log-n scaling counts at least 16."""
    _, model = encoder("softmax", length=24)
    tokens = np.where(np.arange(24) < 20, np.arange(24) % 10, NOTHING)
    for layer in read(model, tokens):
        others = ~np.eye(20, dtype=bool)
        products = np.einsum("npth,npsh->npts", layer.query, layer.key) * 4**-0.5
        scaled = products * np.log(19) / np.log(64)
        np.testing.assert_allclose(layer.scores, scaled * others, atol=2e-6)
        powers = np.where(others, np.exp(layer.scores.astype(np.float64)), 0)
        powers /= powers.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(layer.branches, powers, atol=2e-6)


def test_the_map_of_a_matrix_function_is_that_function_of_its_queries():
    """e^A with A = QQᵀ/(n √H) in float64, where n is the number of tokens."""
    _, model = encoder("function")
    for layer in read(model, PADDED):
        query = layer.query[:, 0].astype(np.float64)
        matrix = query @ np.swapaxes(query, -1, -2) / (TIME * 4**0.5)
        values, vectors = np.linalg.eigh(matrix)
        wanted = vectors * np.exp(values)[:, None] @ np.swapaxes(vectors, -1, -2)
        np.testing.assert_allclose(layer.map, wanted, atol=1e-5)


def test_entropy_of_uniform_attention_is_ln_n_of_the_keys_that_exist(even):
    finding = measure(even, "entropy")
    for row in finding.values["entropy"]:
        assert list(row["entropy"]) == ["1", "2", "4", "8", "16"]
        for n, found in row["entropy"].items():
            assert found == pytest.approx(np.log(int(n)), abs=1e-6)
        assert row["slope"] is None, "one size from 16 on has no slope"
    short = run_of(*uniform_encoder(depth=1), (PADDED, LABEL))
    (row,) = measure(short, "entropy").values["entropy"]
    assert row["entropy"]["11"] == pytest.approx(np.log(11), abs=1e-6)


def test_uniform_attention_by_hand(even, monkeypatch):
    """Means over all 27 rows of a window of 11 tokens and one of 16."""
    monkeypatch.setattr(approximation, "FEATURES", (16,))
    monkeypatch.setattr(approximation, "KINDS", ("positive",))
    for row in measure(even, "self_share").values["self_share"]:
        assert row["mean"] == pytest.approx(2 / 27)
        assert row["mean"] == pytest.approx(row["uniform"])
    for row in measure(even, "dilution").values["dilution"]:
        near = row["within"]
        assert near["1"] == pytest.approx(2 / 27)
        # 3 on either side, minus 3 + 2 + 1 beyond each end
        counts = [(7 * n - 12) / n for n in (11, 16)]
        assert near["4"] == pytest.approx(sum(counts) / 27)
        assert near["16"] == near["64"] == pytest.approx(1)
    ranks = measure(even, "rank")
    assert "11 to 16 tokens" in ranks.text[0]
    for row in ranks.values["rank"]:
        wanted = {"A": 1, "QKᵀ": 0}[row["matrix"]]
        assert row["effective"] == pytest.approx(wanted, abs=1e-4)
    for row in measure(even, "gradients").values["gradients"]:
        assert row["largest"] == pytest.approx(1 / 11 * (1 - 1 / 11))
    for row in measure(even, "outliers").values["outliers"]["logit"]:
        assert row["top_1"] == row["median"] == 0
    found = measure(even, "approximation").values["approximation"]
    assert found["uniform"] == pytest.approx([0, 0], abs=1e-6)


def test_every_key_has_a_weight_in_uniform_sparsemax():
    chosen = config.Attention(mechanism="sparsemax")
    model, made = uniform_encoder(depth=1, attention=chosen)
    finding = measure(run_of(model, made, (PADDED, LABEL)), "support")
    (row,) = finding.values["support"]
    assert (row["keys"], row["share"]) == (11, 1)
    (row,) = finding.values["sparsity"]
    assert (row["map"], row["top_16"]) == ("A", pytest.approx(1))
    assert row["top_4"] == pytest.approx(4 / 11)
    assert row["hoyer"] == pytest.approx(0, abs=1e-6)
    (x, y) = finding.figures[0].series["layer 0"]
    assert x == y == [1, 2, 4, 8, 11]


def test_a_mean_over_rows_counts_the_rows_of_windows_of_any_length():
    chosen = config.Attention(mechanism="sparsemax")
    model, made = uniform_encoder(depth=1, attention=chosen)
    full = np.arange(LENGTH) % 10
    rows = (PADDED, LABEL), (full, LABEL)
    (row,) = measure(run_of(model, made, *rows), "support").values["support"]
    assert row["keys"] == pytest.approx((11 * 11 + 16 * 16) / 27)
    model, made = uniform_encoder(classes=0, depth=1)
    shown = np.array([0, 1, 9, 0, 1] + [2] * 11)
    one = np.where(np.arange(LENGTH) == 2, 0, NOTHING)  # 2 of 16 keys hold an a
    five = np.where(np.arange(LENGTH) > 10, 2, NOTHING)  # each: 10 others of 16 keys
    rows = (shown, one), (shown, five)
    (row,) = measure(run_of(model, made, *rows), "noise").values["noise"]
    assert row["answer"] == row["uniform"] == pytest.approx((2 + 5 * 10) / 6 / 16)


def test_hidden_tokens_have_their_answers_elsewhere_by_hand():
    """In a b ? a b, token 2 is a hidden a, found at 0 and 3; the last b shows
    itself."""
    tokens, mask = np.array([0, 1, 9, 0, 1]), np.ones((5, 5), bool)
    targets = np.array([-1, -1, 0, -1, 1])
    answer = attended.answer_pairs(Window(tokens, targets, mask))
    np.testing.assert_array_equal(np.argwhere(answer), [[2, 0], [2, 3], [4, 1]])
    near = attended.context_pairs(answer, mask, size=4)
    wanted = [[2, 1], [2, 2], [4, 3], [4, 4]]
    found = [pair for pair in np.argwhere(near).tolist() if pair[0] in (2, 4)]
    assert found == wanted
    model, made = uniform_encoder(classes=0, depth=1)
    tokens = np.concatenate([tokens, np.full(LENGTH - 5, NOTHING)])
    targets = np.concatenate([targets, np.full(LENGTH - 5, NOTHING)])
    (row,) = measure(run_of(model, made, (tokens, targets)), "noise").values["noise"]
    assert row["answer"] == row["uniform"] == pytest.approx((2 + 1) / 2 / 5)
    assert row["context"] == pytest.approx((3 + 4) / 2 / 5)
    assert row["elsewhere"] == pytest.approx(0, abs=1e-6)


def test_patches_see_all_patches_and_are_named_by_row_and_column():
    image = {"patch": 2, "image": (4, 8, 1), "length": 8, "vocabulary": 0}
    model, made = uniform_encoder(**image)
    pixels = np.random.default_rng(0).random((4, 8, 1)).astype(np.float32)
    run = run_of(model, made, (pixels, LABEL))
    figures = measure(run, "maps").figures
    assert [figure.name for figure in figures] == ["map_0", "map_1"]
    for figure in figures:
        labels = [f"{row},{column}" for row in (0, 1) for column in range(4)]
        assert figure.rows == figure.columns == labels
        np.testing.assert_allclose(figure.values, 1 / 8, rtol=1e-6)
    entropy = measure(run, "entropy")
    assert not entropy.figures, "one point makes no curve"
    for row in entropy.values["entropy"]:
        assert row["entropy"] == {"8": pytest.approx(np.log(8), abs=1e-6)}
    for name in ("dilution", "noise", "position", "length"):
        assert measure(run, name).text[0].startswith(f"{name}: none, ")


def test_tasks_of_the_next_token_say_that_there_is_none(even):
    for name in ("mqar", "needle", "copy", "sets", "listops", "order", "sample"):
        text = measure(even, name).text
        assert text == [f"{name}: none, an encoder predicts no next token"]


def test_lambdas_of_tokens_are_means_over_those_that_exist():
    chosen = config.Attention(differential="v2")
    model, made = encoder(attention=chosen, scan_layers=False)
    finding = measure(run_of(model, made, (PADDED, LABEL)), "lambda")
    for row, layer in zip(finding.values["lambda"], read(made, TOKENS), strict=True):
        assert row["lambda"] == pytest.approx(layer.lam.mean(), abs=1e-6)


@pytest.mark.parametrize("classes", [0, 3])
def test_a_label_has_one_place_and_a_hidden_token_its_own(classes):
    model, made = encoder(classes=classes)
    targets = np.where(np.arange(LENGTH) == 2, 7, NOTHING) if not classes else LABEL
    run = run_of(model, made, (PADDED, targets))
    found = lengths.by_position(run, made, LENGTH, 1)
    scores = np.asarray(jax.jit(made)(PADDED[None]), np.float64)[0]
    place, target = (0, 1) if classes else (2, 7)
    wanted = np.log(np.exp(scores[place]).sum()) - scores[place, target]
    loss, accuracy = found.mean()
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert accuracy == (scores[place].argmax() == target)
    assert found.weight.shape == ((1,) if classes else (LENGTH,))
    assert found.weight.sum() == 1


def test_an_encoder_reads_and_learns_at_any_length_and_is_not_decoded(monkeypatch):
    image = {"patch": 2, "image": (4, 8, 1), "length": 8, "vocabulary": 0}
    model, _ = encoder("v2", **image, positions="learned")
    larger = speed.with_length(model, 32)
    assert larger.image == (2, 64, 1) and larger.length == 32
    job = speed.prefill(config.Config(model=larger), 32)
    assert job.tokens == 32 and job.run().shape == (1, 1, 3)
    works = []
    monkeypatch.setattr(speed, "time_in_turns", lambda *jobs: np.ones((2, 1)))
    for name in ("prefill", "training", "decoding"):

        def work(options, length, name=name):
            return works.append(name) or job

        work.__name__ = name
        monkeypatch.setattr(speed, name, work)
    rows = speed.compare_with_softmax(config.Config(model=model), 32)
    assert [row[0] for row in rows] == ["prefill", "training"] == works[::2]


@pytest.mark.slow
@pytest.mark.parametrize("patch", [0, 2])
def test_speeds_of_encoders_are_measured(patch, monkeypatch):
    monkeypatch.setattr(speed, "LENGTHS", (32,))
    monkeypatch.setattr(speed, "ROUNDS", 2)
    image = {"patch": 2, "image": (4, 8, 1), "length": 8, "vocabulary": 0}
    model, _ = encoder("function", **image if patch else {})
    run = SimpleNamespace(config=config.Config(model=model))
    finding = speed.speed(run, Options())
    assert [row[:2] for row in finding.tables[0].rows] == [
        ("prefill", 32),
        ("training", 32),
    ]
    assert any("decoding: none" in line for line in finding.text)
