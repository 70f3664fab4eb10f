"""Runs that learn generated tasks."""

import math

import numpy as np
import pytest
from runs import call, words

from symjax import config
from symjax.data.examples import open_examples
from symjax.evaluation.loading import load
from symjax.evaluation.measures.language import losses

pytestmark = pytest.mark.usefixtures("cache")

SHAPE = (4, 24)
COPY = config.Data(source="copy", items=5, symbols=6)


def train(workdir, **changes):
    keys = {"data__source": "copy", "data__path": "", "data__items": 5}
    keys |= {"data__symbols": 6, "model__length": 24, "model__positions": "learned"}
    return call("train", words("", workdir, **keys | changes))


def test_a_run_learns_its_task_and_is_judged_by_answers(tmp_path, capsys):
    """Six symbols: guessing costs ln 6. A resumed run equals the undisturbed one."""
    rate = {"optimizer__learning_rate": 3e-3, "optimizer__decay_steps": 300}
    assert train(tmp_path / "one", steps=300, batch_size=32, **rate) == 0
    said = capsys.readouterr().err
    assert "any number of copy rows" in said and "sample" not in said
    assert (
        f"(chance {math.log(6):.2f} nats/answer)" in said
        and " nats/answer, accuracy " in said
    )
    found = losses(load(tmp_path / "one"), 4)
    assert found["heldout"]["loss"] < 0.8 * math.log(6)
    assert "bits_per_byte" not in found["heldout"]
    assert call("eval", ["--workdir", str(tmp_path / "one"), "--batches", "2"]) == 0
    said = capsys.readouterr().out
    assert "sample: none" in said and "chance" in said and "accuracy" in said
    chosen = ["--workdir", str(tmp_path / "one"), "--tasks", "position"]
    assert call("eval", chosen) == 0
    assert "by place in a window of 24, in nats/answer" in capsys.readouterr().out


def test_only_what_is_asked_counts(tmp_path):
    """The loss of an untrained model over the answers alone, in float64."""
    assert train(tmp_path / "run", steps=1, optimizer__learning_rate=0.0) == 0
    trained = load(tmp_path / "run")
    examples = trained.examples
    assert examples.unit == "answer" and examples.text is None
    [rows] = examples.heldout_batches((8, 24), 1)
    inputs, targets, weights = rows(0, 8)
    np.testing.assert_array_equal(weights, targets >= 0)
    scores = np.asarray(trained.model()(inputs), np.float64)
    logs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(logs, np.maximum(targets, 0)[..., None], -1)[..., 0]
    wanted = -(picked * weights).sum() / weights.sum()
    found = losses(trained, 1)["heldout"]
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)
    right = (scores.argmax(axis=-1) == targets) * weights
    assert found["accuracy"] == pytest.approx(right.sum() / weights.sum())


def test_processes_get_their_own_rows(tmp_path):
    examples = open_examples(config.Config(data=COPY), tmp_path)
    for rows in (
        examples.batch_reader(SHAPE, seed=1, step=7),
        *examples.heldout_batches(SHAPE, 2),
    ):
        whole = rows(0, 4)
        for one, two, both in zip(rows(0, 1), rows(1, 4), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate([one, two]), both)


def test_another_task_in_the_workdir_is_refused(tmp_path, capsys):
    assert train(tmp_path / "run", steps=1) == 0
    capsys.readouterr()
    assert train(tmp_path / "run", steps=1, data__items=6) == 2
    assert "data.items: 5 → 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"data__items": 13},
            "data.items 13 needs rows of 26 tokens, model.length is 24",
        ),
        ({"data__path": "a.txt"}, "data.path 'a.txt' is read by data.source=text only"),
        ({"data__asked": 3}, "data.asked 3 is read by data.source=needle only"),
        (
            {"data__tokenizer": "char"},
            "data.source=stdlib, text, hub, packages only",
        ),
    ],
)
def test_what_a_task_cannot_be_is_one_line(changes, line, tmp_path, capsys):
    assert train(tmp_path / "run", **changes) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
