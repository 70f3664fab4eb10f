"""Accuracies of models whose answers are known."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from symjax import config
from symjax.evaluation import tasks
from symjax.evaluation.measures import answers
from symjax.evaluation.results import Options


def trained(options, length, model, positions="rope"):
    """Save a checkpoint of a model that is a function of tokens [B T] → logits."""
    chosen = config.Model(length=length, positions=positions)
    return SimpleNamespace(
        config=config.Config(data=options, model=chosen),
        decoder=lambda: model,
    )


def recalls(first):
    """Predict the token that followed the last equal token, from place `first` on."""

    def model(tokens):
        same = tokens[:, :, None] == tokens[:, None, :]
        place = jnp.arange(tokens.shape[1])
        seen = (
            same
            & (place[None, :] < place[:, None])[None]
            & (place >= first)[None, None]
        )
        last = jnp.where(seen, place[None, None], -1).max(axis=-1)
        said = jnp.take_along_axis(tokens, jnp.maximum(last + 1, 0), axis=1)
        return jnp.where(last[..., None] >= 0, jnp.eye(64)[said], jnp.eye(64)[63])

    return model


def test_a_model_that_recalls_has_all_pairs_and_one_that_forgets_fewer():
    options = config.Data(source="mqar", items=6, symbols=20)
    found = answers.mqar(trained(options, 32, recalls(0)), Options())
    assert [row["pairs"] for row in found.values["mqar"]] == [1, 2, 4, 6]
    assert all(row["accuracy"] == 1 for row in found.values["mqar"])
    assert found.values["mqar"][0]["chance"] == 0.05
    # the first two pairs are forgotten: a third of six
    found = answers.mqar(trained(options, 32, recalls(4)), Options())
    assert found.values["mqar"][0]["accuracy"] == 0
    assert found.values["mqar"][-1]["accuracy"] == pytest.approx(2 / 3)


def test_needles_are_found_from_where_a_model_can_see_them():
    """Needles lie at places 0 to 42 of 48; this model forgets the first 20 tokens."""
    options = config.Data(source="needle", items=2, symbols=9, asked=1)
    found = answers.needle(trained(options, 48, recalls(20)), Options()).values[
        "needle"
    ]
    assert found["lengths"] == [12, 24, 48, 96] and found["chance"] == 1 / 9
    column = np.array(found["grid"])[:, 2]
    assert column[0] == column[1] == 0 and (column[3:] == 1).all()
    assert (np.array(found["grid"])[-1][2:] == 1).all()
    whole = answers.needle(trained(options, 48, recalls(0)), Options())
    assert np.array(whole.values["needle"]["grid"]).min() == 1
    assert whole.values["needle"]["needles"] == {
        name: 1.0 for name in ("1, 1", "2, 2", "4, 2", "6, 2")
    }
    assert [len(f.rows) for f in whole.figures] == [5]


def test_learned_positions_are_not_asked_beyond_their_length():
    options = config.Data(source="needle", items=1, symbols=9, asked=1)
    at = trained(options, 48, recalls(0), positions="learned")
    assert answers.needle(at, Options()).values["needle"]["lengths"] == [12, 24, 48]


def test_copies_are_right_place_by_place():
    """The model copies correctly, except that it never predicts symbol 0."""
    options = config.Data(source="copy", items=5, symbols=4)

    def model(tokens):
        said = jnp.roll(tokens, 5, axis=1)
        return jnp.eye(5)[jnp.where(said == 0, 1, said)]

    rows = measured(options, 16, model)
    assert [row["place"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["accuracy"] == pytest.approx(0.75, abs=0.1)


def test_a_model_that_only_copies_has_the_middle_of_a_reversed_row():
    def model(tokens):
        return jnp.eye(51)[jnp.roll(tokens, 5, axis=1)]

    rows = measured(config.Data(source="reverse", items=5, symbols=50), 16, model)
    assert [row["accuracy"] > 0.1 for row in rows] == [False, False, True, False, False]
    rows = measured(config.Data(source="swap", items=5, symbols=50), 16, model)
    assert not any(row["accuracy"] > 0.1 for row in rows)


def measured(options, length, model):
    run = trained(options, length, model)
    return tasks.measure(options.source, run, Options()).values[options.source]


def test_majorities_are_judged_by_the_number_of_samples_and_their_order():
    """The model names the majority of the last 7 tokens."""

    def model(tokens):
        ones = jnp.pad(jnp.cumsum(2 * tokens - 1, axis=1), ((0, 0), (7, 0)))
        recent = ones[:, 7:] - ones[:, :-7]
        return jnp.eye(2)[(recent > 0).astype(int)]

    options = config.Data(source="sets", symbols=2)
    rows = {row["samples"]: row for row in measured(options, 32, model)}
    assert list(rows) == [3, 7, 15, 31, 32, 64, 128]
    for count in (3, 7):
        assert rows[count]["as drawn"] == rows[count]["in order"] == 1
    # In order the last tokens are ones if there are any, which is right half the time.
    assert rows[31]["in order"] == pytest.approx(0.5, abs=0.08)
    # The majority of 7 independent tokens is that of 15 with probability 0.751, and
    # that of 31 with 0.664.
    assert rows[15]["as drawn"] == pytest.approx(0.751, abs=0.06)
    assert rows[31]["as drawn"] == pytest.approx(0.664, abs=0.06)
    assert 0.5 < rows[128]["as drawn"] < 0.7
    assert all(row["chance"] == 0.5 for row in rows.values())


def test_lists_are_judged_by_their_depth():
    """The model only knows the answers of flat lists."""
    options = config.Data(source="listops")

    def model(tokens):
        opens = (tokens >= 10) & (tokens < 14)
        flat = opens.sum(axis=1) == 1
        digits = tokens < 10
        largest = jnp.where(digits, tokens, -1).max(axis=1)
        is_maximum = (tokens == 10).any(axis=1)
        said = jnp.where(flat & is_maximum, largest, 16)
        return jnp.broadcast_to(jnp.eye(17)[said][:, None], (*tokens.shape, 17))

    rows = answers.listops(trained(options, 24, model), Options()).values["listops"]
    assert [row["depth"] for row in rows] == [1, 2, 3, 4]
    assert 0.1 < rows[0]["accuracy"] < 0.5  # a quarter of the operators
    assert all(row["accuracy"] == 0 for row in rows[1:])


@pytest.mark.parametrize("name", ["mqar", "needle", "copy", "sort", "sets", "listops"])
def test_a_task_that_was_not_learned_is_said(name):
    other = "copy" if name != "copy" else "listops"
    model = trained(config.Data(source=other), 32, None)
    found = tasks.measure(name, model, Options())
    assert found.values == {name: None}
    assert found.text == [
        f"{name}: none, the model was not trained on data.source={name}"
    ]
