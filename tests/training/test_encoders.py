"""Runs that learn labels, images and masked tokens."""

import csv
import json

import datasets
import jax
import numpy as np
import pytest
from runs import ROOT, call, words

from symjax import config
from symjax.evaluation.loading import load
from symjax.evaluation.measures.language import losses
from symjax.evaluation.tasks import TASKS
from symjax.training.initial import weights_of
from symjax.training.sharding import make_mesh
from symjax.training.step import build_program

pytestmark = pytest.mark.usefixtures("cache")

SMALL = {
    "model__kind": "encoder",
    "model__positions": "learned",
    "model__heads": 2,
    "model__attention__symmetric": "none",
    "model__attention__differential": "none",
}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Return short texts of random letters, labelled by whether the first is early."""
    folder = tmp_path_factory.mktemp("reviews")
    random = np.random.default_rng(0)
    letters = random.integers(97, 123, (400, 30))
    texts = [bytes(x[: random.integers(3, 30)].tolist()).decode() for x in letters]
    labels = ["early" if text[0] < "n" else "late" for text in texts]
    table = datasets.Dataset.from_dict({"text": texts, "label": labels})
    table.to_parquet(folder / "train.parquet")
    return folder


def train(workdir, reviews, **changes):
    keys = {"data__source": "hub", "data__path": "", "data__name": reviews}
    keys |= {"data__label": "label", "model__classes": 2, **SMALL}
    return call("train", words("", workdir, **keys | changes))


@pytest.fixture(scope="module")
def run(reviews, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "run"
    rate = {"optimizer__learning_rate": 3e-3, "optimizer__decay_steps": 200}
    chosen = {"steps": 200, "batch_size": 32, "evaluate__batches": 9, **rate}
    assert train(workdir, reviews, **chosen) == 0
    return workdir


def test_a_run_learns_labels_and_reports_how_often_it_is_right(run, capsys):
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    [found] = [line for line in lines if "heldout/accuracy" in line]
    assert found["heldout/accuracy"] > 0.8 and found["heldout/loss"] < 0.5
    assert call("eval", ["--workdir", str(run), "--tasks", "loss,sample,rank"]) == 0
    said = capsys.readouterr().out
    assert f"held-out accuracy                {found['heldout/accuracy']:.4f}" in said
    assert "frequency table" in said and "bits per byte" not in said
    assert "sample: none, an encoder predicts no next token" in said
    assert "QKᵀ" in said


def test_the_accuracy_is_the_share_of_labels_with_the_highest_score(run):
    trained = load(run)
    [rows] = trained.examples.heldout_batches((96, 32), 1)
    inputs, targets, weights = rows(0, 96)
    scores = np.asarray(jax.jit(trained.model())(inputs), np.float64)
    right = (scores.argmax(axis=-1) == targets) * weights
    assert weights.sum() == 80
    found = losses(trained)["heldout"]["accuracy"]
    assert found == pytest.approx(right.sum() / 80)


def test_labels_can_be_learned_from_the_weights_of_a_masked_run(
    run, reviews, tmp_path, capsys
):
    """All weights are taken except the output layer, which scores other classes."""
    masked = {"data__label": "", "model__classes": 0, "steps": 1}
    assert train(tmp_path / "masked", reviews, **masked) == 0
    said = capsys.readouterr().err
    assert "nats/masked byte, accuracy 0." in said and "(unigram " in said
    assert "sample" not in said
    trained, before = load(run), load(tmp_path / "masked")
    target = trained.config.model
    weights = weights_of(tmp_path / "masked", target, trained.examples).params
    assert weights["head"]["kernel"].shape == (32, 2)
    for name in weights.keys() - {"head"}:
        jax.tree.map(np.testing.assert_array_equal, weights[name], before.params[name])


def test_hidden_tokens_are_judged_by_how_many_are_right(reviews, tmp_path, capsys):
    """Among the hidden tokens; printed, and written as JSON and CSV."""
    masked = {"data__label": "", "model__classes": 0, "steps": 40, "batch_size": 32}
    assert train(tmp_path / "run", reviews, **masked) == 0
    trained = load(tmp_path / "run")
    right = asked = 0
    model = jax.jit(trained.model())
    for rows in trained.examples.heldout_batches((32, 32)):
        inputs, targets, weights = rows(0, 32)
        hidden = (targets >= 0) & (inputs >= 0)
        np.testing.assert_array_equal(weights, hidden)
        right += ((np.asarray(model(inputs)).argmax(axis=-1) == targets) & hidden).sum()
        asked += hidden.sum()
    path, out = tmp_path / "found.json", tmp_path / "out"
    words = ["--tasks", "loss", "--json", str(path), "--out", str(out)]
    assert call("eval", ["--workdir", str(tmp_path / "run"), *words]) == 0
    assert f"held-out accuracy                {right / asked:.4f}" in (
        capsys.readouterr().out
    )
    found = json.loads(path.read_text())["heldout"]
    assert 0 < found["accuracy"] == pytest.approx(right / asked)
    names, row, *_ = csv.reader((out / "loss.csv").read_text().splitlines())
    values = dict(zip(names, row, strict=True))
    assert values == {
        "of": "held-out",
        **{name: str(found[name]) for name in ("loss", "perplexity", "accuracy")},
    }


def test_everything_is_asked_of_an_encoder(run, tmp_path, capsys):
    """All tasks but the slow `speed`: none fails, and each has a result."""
    names = [name for name in TASKS if name != "speed"]
    page = tmp_path / "page.html"
    words = ["--tasks", ",".join(names), "--prompt", "early", "--report", str(page)]
    assert call("eval", ["--workdir", str(run), *words]) == 0
    said = capsys.readouterr().out
    for name in names:
        if not TASKS[name].encoders:
            assert f"{name}: none, an encoder" in said
    assert "maps of 5 tokens, 'e a r l y':" in said
    assert "losses in nats/label" in said
    assert "windows are cut to their first n tokens" in said
    assert page.read_text().count("<img") >= 4


def test_what_does_not_fit_is_one_line(reviews, tmp_path, capsys):
    for changes, line in (
        ({"model__classes": 3}, "model.classes 3 must be the 2 of data: early, late"),
        ({"model__patch": 2}, "model.patch is 2, but the data are texts: leave it 0"),
        ({"model__kind": "decoder"}, "model.classes 2 has no meaning: model.kind is"),
        ({"model__attention__mechanism": "decay"}, "has no bidirectional form"),
    ):
        assert train(tmp_path / "run", reviews, **changes) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_digits_are_read_by_their_configuration(tmp_path, capsys):
    small = {"steps": 2, "model.width": 16, "model.depth": 1}
    small |= {"mesh.data": 2, "evaluate.batches": 1}
    given = [f"--config.{key}={value}" for key, value in small.items()]
    path = ["--config", f"{ROOT}/configs/digits.py", "--workdir", str(tmp_path / "run")]
    assert call("train", [*path, *given]) == 0
    said = capsys.readouterr().err
    assert "1,438 training images of 10 labels" in said and ", accuracy 0." in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_are_learned(seed, tmp_path):
    path = ["--config", f"{ROOT}/configs/digits.py", "--workdir", str(tmp_path / "run")]
    assert call("train", [*path, f"--config.seed={seed}", "--config.mesh.data=1"]) == 0
    found = losses(load(tmp_path / "run"))["heldout"]
    assert found["accuracy"] >= 0.97


IMAGES = config.Model(
    **{"kind": "encoder", "width": 16, "heads": 4, "depth": 1, "length": 4},
    **{"classes": 3, "patch": 2, "image": (4, 4, 1)},
)
TEXTS = config.Model(
    **{"kind": "encoder", "width": 16, "heads": 4, "depth": 1, "length": 8},
    **{"classes": 3, "vocabulary": 9},
)


def made(model):
    """Return eight rows as a function of (start, stop)."""
    random = np.random.default_rng(0)
    inputs = random.integers(-1, 9, (8, 8)).astype(np.int32)
    if model.patch:
        inputs = random.normal(size=(8, 4, 4, 1)).astype(np.float32)
    targets = random.integers(0, 3, (8, 1)).astype(np.int32)
    return lambda start, stop: (inputs[start:stop], targets[start:stop])


@pytest.mark.parametrize("model", [IMAGES, TEXTS], ids=["images", "texts"])
def test_images_and_labels_are_split_by_rows_and_tokens_also_within(model):
    mesh = config.Mesh(data=2, fsdp=2, sequence=2)
    options = config.Config(model=model, mesh=mesh, batch_size=8)
    program, rows = build_program(options, make_mesh(mesh)), made(model)
    placed = program.place((8, model.length), rows)
    for array, wanted in zip(placed, rows(0, 8), strict=True):
        np.testing.assert_array_equal(array, wanted)
    parts = [array.addressable_shards[0].data.shape for array in placed]
    assert parts == [(2, 4, 4, 1) if model.patch else (2, 4), (2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("model", [IMAGES, TEXTS], ids=["images", "texts"])
def test_a_mesh_and_micro_batches_change_no_loss(model):
    found = []
    for mesh, parts in (
        (config.Mesh(data=1), 1),
        (config.Mesh(data=2, tensor=2, sequence=2), 2),
    ):
        optimizer = config.Optimizer(accumulate=parts)
        options = config.Config(
            model=model, mesh=mesh, optimizer=optimizer, batch_size=8, steps=2
        )
        program = build_program(options, make_mesh(mesh))
        rows = program.place((8, model.length), made(model))
        with jax.set_mesh(program.mesh):
            state, constants = program.initial(0)
            state, _ = program.train(state, constants, *rows, jax.random.key(0))
            _, metrics = program.train(state, constants, *rows, jax.random.key(0))
        found.append([float(metrics["train/loss"]), float(metrics["gradient_norm"])])
    np.testing.assert_allclose(*found, rtol=2e-5)
