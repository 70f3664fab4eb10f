"""Orders of examples: margins of models that only know the example at one place."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_answers import recalls, trained

from symjax import config
from symjax.data import generated
from symjax.evaluation import tasks
from symjax.evaluation.measures.order import ORDERS, order, orders, spread
from symjax.evaluation.results import Options

MQAR = config.Data(source="mqar", items=3, symbols=9)
NEEDLE = config.Data(source="needle", items=2, symbols=9, asked=1)


def knows_the_last(find):
    """Recall only the example whose place `find` returns."""

    def model(tokens):
        key, value = (
            jnp.take_along_axis(tokens, find(tokens)[:, None] + offset, axis=1)
            for offset in (0, 1)
        )
        return jnp.eye(64)[jnp.where(tokens == key, value, 63)]

    return model


def measured(options, model):
    return order(trained(options, 32, model), Options())


def test_a_model_that_knows_the_last_pair_has_one_answer_in_three_in_every_order():
    """All keys are asked: there is no margin, although every answer changes."""
    finding = measured(MQAR, knows_the_last(lambda x: jnp.full(len(x), 4)))
    found = finding.values["order"]
    assert (found["examples"], found["orders"]) == (3, 6)
    assert found["changed"] == 1 and found["by_place"] == [0, 0, 1]
    third = {"mean": 1 / 3, "least": 1 / 3, "greatest": 1 / 3, "margin": 0}
    assert found["prompt"] == pytest.approx(third)
    assert found["together"] == pytest.approx(third)
    assert finding.tables[0].rows[1][1:] == tuple(found["prompt"].values())


def test_a_model_that_knows_the_last_needle_has_the_largest_margin():
    """One of two needles is asked: the answer is right in one order only."""
    mark = 3 * NEEDLE.symbols

    def last(tokens):
        return jnp.where(tokens == mark, jnp.arange(tokens.shape[1]), 0).max(axis=1) + 1

    found = measured(NEEDLE, knows_the_last(last)).values["order"]
    assert found["orders"] == 2 and found["changed"] == 1
    assert found["by_place"] == [0, 1]
    assert found["prompt"] == {"mean": 0.5, "least": 0, "greatest": 1, "margin": 1}
    assert found["together"]["mean"] == 0.5
    sides = found["together"]["least"], found["together"]["greatest"]
    assert sum(sides) == pytest.approx(1)


@pytest.mark.parametrize("options", [MQAR, NEEDLE], ids=lambda x: x.source)
def test_a_model_that_recalls_has_no_margin(options):
    found = measured(options, recalls(0)).values["order"]
    assert found["changed"] == 0 and set(found["by_place"]) == {1.0}
    assert found["prompt"]["least"] == 1 and found["prompt"]["margin"] == 0


@pytest.mark.parametrize("options", [MQAR, NEEDLE], ids=lambda x: x.source)
def test_only_the_examples_change_their_places(options):
    rows = generated.rows(options, 32, seed=1, indices=np.arange(5), heldout=True)
    tokens, targets = rows
    new = np.arange(options.items)[::-1]
    changed = generated.reordered(options, tokens, new)
    for before, after, asked in zip(tokens, changed, targets, strict=True):
        places = generated.example_places(options, before[None])[0]
        np.testing.assert_array_equal(after[places], before[places[::-1]])
        rest = np.delete(np.arange(32), places)
        np.testing.assert_array_equal(after[rest], before[rest])
        values = {before[place[-2]]: before[place[-1]] for place in places}
        questions = np.flatnonzero(asked >= 0)
        assert [values[after[q]] for q in questions] == list(asked[questions])


def test_orders_differ_and_are_all_there_are_where_these_are_few():
    assert sorted(map(tuple, orders(2, 0))) == [(0, 1), (1, 0)]
    assert len(orders(3, 0)) == 6
    many = orders(8, 5)
    assert many.shape == (ORDERS, 8) and len(set(map(tuple, many))) == ORDERS
    np.testing.assert_array_equal(many[0], np.arange(8))
    assert (np.sort(many, axis=1) == np.arange(8)).all()


def test_the_margin_is_the_greatest_less_the_least():
    found = spread(np.array([[0.5, 1.0], [0.25, 1.0], [0.75, 0.25]]))
    np.testing.assert_allclose(
        found, [[0.5, 0.75], [0.25, 0.25], [0.75, 1], [0.5, 0.75]]
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (config.Data(source="copy"), "was not trained on data.source=mqar or needle"),
        (config.Data(source="mqar", items=1), "one example has one order"),
    ],
)
def test_what_has_no_order_is_said(options, said):
    found = tasks.measure("order", trained(options, 32, None), Options())
    assert found.values == {"order": None} and said in found.text[0]
